"""Small calls of kda_prefill for tests of plumbing: every option can be had, no regime is meant."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np

ARRAYS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")


def call(
    B: int = 2,
    T: int = 7,
    H: int = 2,
    HV: int = 4,
    K: int = 8,
    V: int = 4,
    *,
    dtype: str = "float32",
    g_dtype: str = "float32",
    gate: str = "log",
    bias: bool = True,
    state: str | None = "float32",
    lengths: tuple[int, ...] | None = None,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """kda_prefill's keyword arguments. `gate` is "log", "softplus" or "safe"; `lengths` packs the one row."""
    random = np.random.default_rng(seed)

    def normal(*shape: int, dtype: str = dtype, scale: float = 1.0) -> np.ndarray:
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        return (scale * random.standard_normal(shape)).astype(kind)

    arguments: dict[str, Any] = {
        "q": normal(B, T, H, K, scale=0.5),
        "k": normal(B, T, H, K, scale=0.5),
        "v": normal(B, T, HV, V),
        "g": normal(B, T, HV, K, dtype=g_dtype),
        "beta": 1 / (1 + np.exp(-normal(B, T, HV, dtype="float32"))),
    }
    if gate == "log":
        arguments["g"] = -abs(arguments["g"])
    else:
        arguments |= {"use_gate_in_kernel": True, "A_log": normal(HV, dtype="float32", scale=0.5)}
        if bias:
            arguments["dt_bias"] = normal(HV, K, dtype="float32")
    if gate == "safe":
        arguments["safe_gate"] = True
    sequences = B if lengths is None else len(lengths)
    if lengths is not None:
        arguments["cu_seqlens"] = np.cumsum([0, *lengths]).astype(np.int32)
    if state is not None:
        inner = (V, K) if options.get("state_v_first") else (K, V)
        arguments["initial_state"] = normal(sequences, HV, *inner, dtype=state)
    return arguments | options


def arrays(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arrays among the arguments."""
    return {name: x for name, x in arguments.items() if name in ARRAYS}


def options(arguments: dict[str, Any]) -> dict[str, Any]:
    """The rest of them."""
    return {name: x for name, x in arguments.items() if name not in ARRAYS}


def jit(function: Any) -> Any:
    """`jax.jit` that compiles in half the time: these tests run each executable once."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})
