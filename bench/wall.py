"""Wall time per call through JAX: jitted calls in a loop that waits for the last one only."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_kda
from jax_kda import regimes

from .shapes import HEAD_SIZE, Case, Shape

__all__ = ["best", "inputs", "split", "unavailable", "wall_us"]

BLOCK = 64  # tokens that are made on the host, and repeat
SECONDS = 0.05  # of one timed loop
ROUNDS = 3


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


def split(case: Case) -> tuple[dict[str, jax.Array], tuple[tuple[str, Any], ...]]:
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


def best(functions: Sequence[Any], arrays: dict[str, jax.Array], rounds: int) -> list[float]:
    """Microseconds a call of each, the best of so many loops; they take turns."""
    for function in functions:
        jax.block_until_ready(function(**arrays))
    # The first loop says how many calls the others have.
    calls = [min(max(int(SECONDS / _seconds(f, arrays, 4)), 10), 400) for f in functions]
    loops = [[_seconds(f, arrays, n) for f, n in zip(functions, calls, strict=True)] for _ in range(rounds)]
    return [min(seconds) * 1e6 for seconds in zip(*loops, strict=True)]


def wall_us(case: Case) -> float:
    """Microseconds a call, the best of a few loops. One compilation serves all gate regimes of a shape."""
    arrays, static = split(case)
    return best([_compiled(case.shape, case.route, static)], arrays, ROUNDS)[0]
