"""The compiled extension: loaded if it can be, registered with XLA, and never in the way if not.

A handler compiled against newer XLA FFI headers than the installed jaxlib is refused by XLA, and once such a
handler is registered every JAX call of the process fails. So the version the extension was compiled against
is compared with the installed one *before* anything is registered, and a newer extension is left alone.
"""

from __future__ import annotations

import functools
import importlib
import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .contract import Options, Problem
from .routing import Build, Decision, Device

__all__ = [
    "DECODE_TARGET",
    "PREFILL_TARGET",
    "Status",
    "build",
    "call_decode",
    "call_prefill",
    "device_facts",
    "status",
]

# Versioned: exported and cached executables find the handler by this name.
PREFILL_TARGET = "jax_kda.prefill.v1"
DECODE_TARGET = "jax_kda.decode.v1"

_FFI_OPERANDS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "offsets")


@dataclass(frozen=True)
class Status:
    """What was loaded, what not, and why."""

    cuda: bool
    summary: str
    architectures: tuple[str, ...] = ()
    cuda_version: str = ""
    targets: tuple[str, ...] = ()
    compiled_ffi: tuple[int, int] | None = None
    installed_ffi: tuple[int, int] | None = None

    def __str__(self) -> str:
        def version(v: tuple[int, int] | None) -> str:
            return "unknown" if v is None else f"{v[0]}.{v[1]}"

        rows = [
            ("CUDA kernels", "loaded" if self.cuda else "not loaded"),
            ("because", self.summary),
            ("architectures", ", ".join(f"sm_{a}" for a in self.architectures) or "none"),
            ("CUDA toolkit", self.cuda_version or "none"),
            ("XLA targets", ", ".join(self.targets) or "none"),
            (
                "XLA FFI API",
                f"built for {version(self.compiled_ffi)}, jaxlib has {version(self.installed_ffi)}",
            ),
        ]
        return "\n".join(f"{name:<13}  {text}" for name, text in rows)


@functools.cache
def status() -> Status:
    """What the extension brought, or why it was left alone. Loads and registers it on the first call.

    Returns:
        A `Status`, which prints as a table.

    Examples:
        >>> import jax_kda
        >>> status = jax_kda.status()
        >>> status.cuda == bool(status.targets)
        True
    """
    installed = installed_ffi_version()
    try:
        native = importlib.import_module("jax_kda._native")
        info = native.build_info()
    except Exception as error:  # whatever is wrong with the extension, `import jax_kda` goes on without it
        missing = isinstance(error, ModuleNotFoundError) and error.name == "jax_kda._native"
        why = (
            "the package was installed without its extension" if missing else f"it cannot be loaded: {error}"
        )
        return Status(False, why, installed_ffi=installed)

    compiled = tuple(info["ffi_api_version"])
    facts: dict[str, Any] = {
        "architectures": tuple(info["architectures"]),
        "cuda_version": info["cuda_version"],
        "compiled_ffi": compiled,
        "installed_ffi": installed,
    }
    if not info["cuda"]:
        return Status(False, info["reason"] or "it was built without CUDA", **facts)
    if installed is None or compiled[0] != installed[0] or compiled[1] > installed[1]:
        have = "of unknown version" if installed is None else f"{installed[0]}.{installed[1]}"
        why = (
            f"it was built for XLA FFI API {compiled[0]}.{compiled[1]} and the installed jaxlib's is {have}: "
            "rebuild jax_kda with this jaxlib, or install a newer one"
        )
        return Status(False, why, **facts)
    try:
        handlers = native.handlers()
        for name, capsule in handlers.items():
            jax.ffi.register_ffi_target(name, capsule, platform="CUDA")
    except Exception as error:  # the same: a refusal by jaxlib leaves the XLA path
        return Status(False, f"jaxlib refused its handlers: {error}", **facts)
    return Status(True, info["reason"] or "the extension is registered", targets=tuple(handlers), **facts)


def build() -> Build:
    """The same, as routing reads it."""
    found = status()
    return Build(cuda=found.cuda, architectures=found.architectures, reason=found.summary)


def installed_ffi_version() -> tuple[int, int] | None:
    """The (major, minor) of the XLA FFI API in the installed jaxlib, read from the headers it ships."""
    try:
        header = (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    except OSError:
        return None
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR")]
    if found[0] is None or found[1] is None:
        return None
    return int(found[0][1]), int(found[1][1])


def device_facts(device: Any) -> Device:
    """A jax.Device as routing reads it."""
    if device.platform not in ("gpu", "cuda"):
        return Device(device.platform, device.platform.upper())
    capability = getattr(device, "compute_capability", None)
    if not capability or "." not in str(capability):  # ROCm devices say "gfx..." here
        return Device(device.platform, device.device_kind)
    major, minor = str(capability).split(".")
    return Device("cuda", device.device_kind, (int(major), int(minor)), getattr(device, "core_count", None))


def call_prefill(
    options: Options, operands: Sequence[jax.Array], decision: Decision
) -> tuple[jax.Array, ...]:
    """The custom call of a CUDA route: nine operands, four results; what is absent has no elements."""
    problem = Problem.from_operands(options, operands)
    named = dict(zip(options.operand_names, operands, strict=True))
    absent = {
        name: jnp.zeros((0,), jnp.int32 if name == "offsets" else jnp.float32) for name in _FFI_OPERANDS
    }
    states = dict.fromkeys(("final_state", "checkpoints"), jax.ShapeDtypeStruct((0,), jnp.float32))
    if options.output_final_state:
        states["final_state"] = jax.ShapeDtypeStruct(problem.state_shape, jnp.dtype(options.state_dtype))
    if options.checkpoint_every:
        shape, dtype = problem.checkpoints_shape, jnp.dtype(options.state_dtype)
        states["checkpoints"] = jax.ShapeDtypeStruct(shape, dtype)
    results = {
        "o": jax.ShapeDtypeStruct(problem.output_shape, named["v"].dtype),
        "final_state": states["final_state"],
        "workspace": jax.ShapeDtypeStruct((decision.workspace_bytes,), jnp.uint8),
        "checkpoints": states["checkpoints"],
    }
    outputs = jax.ffi.ffi_call(PREFILL_TARGET, tuple(results.values()))(
        *(named.get(name, absent[name]) for name in _FFI_OPERANDS),
        **_attributes(options),
        route=decision.route.value,
        segment_chunks=np.int32(decision.segment_chunks),
        checkpoint_every=np.int32(options.checkpoint_every),
    )
    made = dict(zip(results, outputs, strict=True))
    return tuple(made[name] for name in options.result_names)


def call_decode(options: Options, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The custom call of decode: nine operands, two results, the state's operand and result in one buffer."""
    named = dict(zip(options.operand_names, operands, strict=True))
    absent = jnp.zeros((0,), jnp.float32)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", options.state_operand)
    state = named[options.state_operand]
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (named["v"], state))
    call = jax.ffi.ffi_call(
        DECODE_TARGET, results, input_output_aliases={names.index(options.state_operand): 1}
    )
    o, new_state = call(
        *(named.get(name, absent) for name in names),
        named.get("state_indices", jnp.zeros((0,), jnp.int32)),
        **_attributes(options),
    )
    return o, new_state


def _attributes(options: Options) -> dict[str, Any]:
    # NumPy scalars fix the attribute types: a Python float would arrive as f64.
    return {
        "scale": np.float32(options.scale),
        "lower_bound": np.float32(options.lower_bound),
        "gate": np.int32(options.gate),
        "beta": np.int32(options.beta),
        "l2norm": np.bool_(options.l2norm),
        "state_v_first": np.bool_(options.state_v_first),
    }
