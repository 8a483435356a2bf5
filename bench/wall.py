"""Wall time per call through JAX: jitted calls in a loop that waits for the last one only.

`python -m bench.wall --against-empty` puts it beside the same program with an empty custom call in the place
of ours (tests/native/empty_call.cc): same arguments, results, attributes and workspace. The two take turns.
What is left of our wall time without the empty call's and our GPU time is to be 5 us at most. Writes
bench/results/h200-wall.json: rows as bench.prefill's, with `empty_us` beside `wall_us`.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_kda
from jax_kda import regimes, routing

from . import native, prefill, progress, rows
from .digest import ROOT
from .shapes import FOLDED_GATES, HEAD_SIZE, Case, Shape, parse_names

__all__ = ["EmptyCall", "inputs", "main", "unavailable", "wall_us", "walls_against"]

BLOCK = 64  # tokens that are made on the host, and repeat
SECONDS = 0.05  # of one timed loop
ROUNDS = 3
RESULT = ROOT / "bench" / "results" / "h200-wall.json"
MOST_US = 5.0  # of a call's wall time that neither the empty call nor the GPU accounts for


def unavailable() -> str:
    """Why this process cannot time through JAX; "" where it can."""
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return f"JAX has no GPU here, its first device is {device}"
    status = jax_kda.status()
    return "" if status.cuda else f"jax_kda has no CUDA kernels here: {status.summary}"


def inputs(shape: Shape, gates: str, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of `kda_prefill`, its arrays on JAX's default device."""
    block = regimes.bench_inputs(gates, 1, BLOCK, shape.H, shape.HV, seed=seed, initial_state=False)
    raw = block["g"].astype(np.float32)
    if shape.gate != "safe":
        for name in ("safe_gate", "lower_bound"):
            del block[name]
        decay = -regimes.BOUND / (1 + np.exp(-np.clip(raw, -80, 80)))
        decay[raw <= regimes.OFF / 2] = 0
        if shape.gate == "log":
            for name in ("use_gate_in_kernel", "A_log", "dt_bias"):
                del block[name]
            raw = -decay
        else:
            with np.errstate(divide="ignore"):
                raw = np.maximum(np.log(np.expm1(decay)), regimes.OFF)
    block["g"] = raw

    def tiled(x: np.ndarray, dtype: Any) -> jax.Array:
        repeats = -(-shape.T // BLOCK)
        small = jnp.asarray(x).astype(dtype)
        return jnp.tile(small, (shape.B, repeats, *(1,) * (x.ndim - 2)))[:, : shape.T]

    block |= {name: tiled(block[name], jnp.bfloat16) for name in ("q", "k", "v", "beta")}
    block["g"] = tiled(raw, shape.g_dtype)
    for name in ("A_log", "dt_bias"):
        if name in block:
            block[name] = jnp.asarray(block[name])
    block["initial_state"] = 0.5 * jax.random.normal(
        jax.random.key(seed), (shape.sequences, shape.HV, HEAD_SIZE, HEAD_SIZE)
    )
    if shape.lengths:
        block["cu_seqlens"] = jnp.asarray(np.cumsum([0, *shape.lengths]), jnp.int32)
    if shape.checkpoint_every:
        block["checkpoint_every"] = shape.checkpoint_every
    return block


@functools.lru_cache(maxsize=4)
def _compiled(shape: Shape, route: str, static: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(jax_kda.kda_prefill, **dict(static), route=route))


def _split(case: Case) -> tuple[dict[str, jax.Array], tuple[tuple[str, Any], ...]]:
    """The arrays of a call, and its other arguments."""
    call = inputs(case.shape, case.gates)
    arrays = {name: x for name, x in call.items() if isinstance(x, jax.Array)}
    return arrays, tuple(sorted((name, x) for name, x in call.items() if name not in arrays))


def _seconds(function: Any, arrays: dict[str, jax.Array], calls: int) -> float:
    """Of one call in a loop."""
    started = time.perf_counter()
    for _ in range(calls):
        result = function(**arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / calls


def _best(functions: Sequence[Any], arrays: dict[str, jax.Array], rounds: int) -> list[float]:
    """Microseconds a call of each, the best of so many loops; they take turns."""
    for function in functions:
        jax.block_until_ready(function(**arrays))
    # The first loop says how many calls the others have.
    calls = [min(max(int(SECONDS / _seconds(f, arrays, 4)), 10), 400) for f in functions]
    loops = [[_seconds(f, arrays, n) for f, n in zip(functions, calls, strict=True)] for _ in range(rounds)]
    return [min(seconds) * 1e6 for seconds in zip(*loops, strict=True)]


def wall_us(case: Case) -> float:
    """Microseconds a call, the best of a few loops. One compilation serves all gate regimes of a shape."""
    arrays, static = _split(case)
    return _best([_compiled(case.shape, case.route, static)], arrays, ROUNDS)[0]


class EmptyCall:
    """The custom call of tests/native/empty_call.cc, registered with JAX."""

    TARGET = "jax_kda_bench.empty.v1"

    def __init__(self, library: Path, platform: str = "CUDA") -> None:
        loaded = ctypes.CDLL(str(library))
        loaded.kda_bench_empty_calls.restype = ctypes.c_longlong
        self.calls: Callable[[], int] = loaded.kda_bench_empty_calls
        jax.ffi.register_ffi_target(self.TARGET, jax.ffi.pycapsule(loaded.kda_bench_empty_call), platform)

    def in_place_of_ours(self) -> Any:
        """A context in which what is compiled has this call where it would have ours."""
        return mock.patch.object(jax_kda.ffi, "PREFILL_TARGET", self.TARGET)


def walls_against(empty: EmptyCall, case: Case, rounds: int = 10) -> tuple[float, float]:
    """Microseconds a call, of ours and of the empty one in its place."""
    arrays, static = _split(case)
    # Two functions: one would be compiled once.
    ours, nothing = (
        jax.jit(functools.partial(jax_kda.kda_prefill, **dict(static), route=case.route)) for _ in range(2)
    )
    before = empty.calls()
    jax.block_until_ready(ours(**arrays))
    between = empty.calls()
    with empty.in_place_of_ours():
        jax.block_until_ready(nothing(**arrays))
    if between != before or empty.calls() != between + 1:
        raise RuntimeError(f"{case}: the empty call is not where it should be")
    wall, empty_us = _best([ours, nothing], arrays, rounds)
    return wall, empty_us


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 for a figure past the bar, 2 for what cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.wall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--against-empty", action="store_true", required=True, help="measure, as described above")
    add("--gates", default="production,slow", help="gate regimes (default: %(default)s)")
    add("--routes", default="auto", help="auto, or routes to force (default: %(default)s)")
    add("--rounds", type=int, default=10, help="loops of each, in turns (default: %(default)s)")
    add("--driver", type=Path, help="a driver that is built already (default: build it)")
    add("--commit", help="for the rows (default: what git says)")
    add("--out", type=Path, default=RESULT, help="the result file (default: bench/results/h200-wall.json)")
    options = parser.parse_args(arguments)
    try:
        gates = parse_names("--gates", options.gates, FOLDED_GATES)
    except ValueError as error:
        parser.error(str(error))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the driver needs memory as well
    if why := unavailable():
        print(f"bench.wall: {why}", file=sys.stderr)
        return 2
    try:
        driver = options.driver or native.build()
        facts = native.device(driver)
        empty = EmptyCall(native.build("empty_call.so"))
    except (native.DriverError, OSError) as error:
        print(f"bench.wall: {error}", file=sys.stderr)
        return 2
    major, minor = facts["compute_capability"]
    device = routing.Device("cuda", facts["gpu"], (major, minor), facts["sm_count"])
    shape = Shape(1, 512, 8, 8)
    cases = [Case(shape, name, route) for name in gates for route in options.routes.split(",")]
    wanted = prefill.resolve(cases, device)
    measured, copy_rate, complete = prefill.measure(driver, wanted, 2, 20)
    common = prefill.provenance(facts, options.commit) | {"copy_rate": copy_rate}
    found, over = [], False
    for case in tqdm(measured, desc="wall times", unit="case", leave=False, disable=progress.disabled()):
        wall, empty_us = walls_against(empty, case, options.rounds)
        gpu = measured[case]["median_us"]
        left = wall - empty_us - gpu
        over |= left > MOST_US
        found.append(prefill.row("wall", case, measured[case], wall, common) | {"empty_us": empty_us})
        tqdm.write(
            f"{case}: wall {wall:.1f} us, the empty call {empty_us:.1f} us, GPU {gpu:.1f} us; "
            f"left {left:.1f} us, at most {MOST_US:.0f} allowed{' TOO MUCH' if left > MOST_US else ''}"
        )
    if not found:
        return 2
    rows.write(options.out, found)
    print(f"{len(found)} rows in {options.out}")
    return 1 if over or not complete or not all(map(rows.is_right, found)) else 0


if __name__ == "__main__":
    sys.exit(main())
