"""Runs in a process of its own: `fresh_process.py TASK ROUTE [FILE]`, a task being a function below. Started
by harness.run_apart.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_kda
from jax_kda.regimes import make_inputs

DRY = jax.default_backend() == "cpu"
TOKENS = ("q", "k", "v", "g", "beta")
INPUTS = (*TOKENS, "initial_state")


def capture(route: str) -> None:
    """The first use of the library, inside a scan under jit; then the same in a loop of plain calls.

    Two kernels take turns, one of them on packed sequences too, and rounds of new tokens, states and offsets
    bring new addresses. Prints digests of all results: the caller compares them between processes.
    """
    steps = 4
    packed = {"lengths": (1, 0, 0)}
    kinds: dict[str, dict[str, Any]] = {"production": {}, "long": {}, "slow": packed}

    def tokens_and_state(seed: int) -> dict[str, tuple[Any, Any]]:
        calls = {}
        for kind, options in kinds.items():
            x = make_inputs(kind, 1, steps * 48, 2, seed=seed, **options)
            tokens = {name: np.stack(np.split(x[name], steps, axis=1)) for name in TOKENS}
            if options:
                cuts = np.random.default_rng(seed).integers(0, 49, (steps, 4))
                tokens["cu_seqlens"] = np.sort(cuts, axis=1).astype(np.int32)
            calls[kind] = tokens, x["initial_state"]
        return calls

    rest = {
        kind: {name: x for name, x in make_inputs(kind, 1, 1, 2).items() if name not in INPUTS}
        for kind in kinds
    }

    def step(states: Any, tokens: Any) -> tuple[Any, Any]:
        results = {
            kind: jax_kda.kda_prefill(**tokens[kind], **rest[kind], initial_state=states[kind], route=route)
            for kind in rest
        }
        return {kind: x[1] for kind, x in results.items()}, {kind: x[0] for kind, x in results.items()}

    @jax.jit
    def captured(calls: Any) -> Any:
        states = {kind: state for kind, (_, state) in calls.items()}
        return jax.lax.scan(step, states, {kind: tokens for kind, (tokens, _) in calls.items()})

    rounds = [tokens_and_state(seed) for seed in range(2 if DRY else 4)]
    scanned = [captured(calls) for calls in rounds]
    looped = []
    for calls in rounds:
        states, outputs = {kind: state for kind, (_, state) in calls.items()}, []
        for n in range(steps):
            tokens = {kind: {name: x[n] for name, x in calls[kind][0].items()} for kind in calls}
            states, o = step(states, tokens)
            outputs.append(o)
        looped.append((states, jax.tree.map(lambda *x: np.stack(x), *outputs)))
    digests = {"scan": list(map(_digest, scanned)), "loop": list(map(_digest, looped))}
    print("digests:", json.dumps(digests))


def offsets(route: str) -> None:
    """Wrong cu_seqlens, as device arrays. Nothing may hang or fail, nothing else in memory may change."""
    T, N, most = 257, 4, 2**31 - 1
    inputs = make_inputs("slow", 1, T, 2, lengths=(65, 0, 130, 62))
    names = [name for name, x in inputs.items() if isinstance(x, np.ndarray)]
    inputs |= {name: jnp.asarray(inputs[name]) for name in names}
    right = [np.asarray(x) for x in jax_kda.kda_prefill(**inputs, route=route)]

    rng = np.random.default_rng(0)
    wrong = [
        [50, 40, 30, 20, 10],
        [0, most, 5, -7, 100],
        [-(2**31), -5, 0, most, most],
        [T + 1, 2 * T, 3 * T, 4 * T, 5 * T],
        [-40, -30, -20, -10, -1],
        [0, 200, 100, 300, T],
        [0, 0, 0, 0, most],
        [-(2**31), most, -(2**31), most, -(2**31)],
        [most - 3, most - 2, most - 1, most, most],
        [0, T + 64, T, T, T],
    ]
    wrong += [list(rng.integers(-(2**31), most, N + 1)) for _ in range(2 if DRY else 30)]
    wrong += [list(rng.integers(-T, 2 * T, N + 1)) for _ in range(2 if DRY else 60)]
    guards = [jnp.full((2**16,), 7, jnp.uint8) for _ in range(4 if DRY else 200)]
    for values in wrong:
        bad = jnp.asarray(np.array(values, np.int32))
        jax.block_until_ready(jax_kda.kda_prefill(**inputs | {"cu_seqlens": bad}, route=route))
    assert all(bool((guard == 7).all()) for guard in guards), "other arrays changed"
    again = [np.asarray(x) for x in jax_kda.kda_prefill(**inputs, route=route)]
    assert all(x.tobytes() == y.tobytes() for x, y in zip(right, again, strict=True)), "a right call changed"
    print("offsets: all safe")


def cache(route: str) -> None:
    """One call through the persistent compilation cache. Prints whether it was found there, and a digest."""
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    arrays, rest = _call()
    function = jax.jit(lambda x: jax_kda.kda_prefill(**x, **rest, route=route))
    results = jax.block_until_ready(function(arrays))
    print("hits:", sum("cache_hits" in event for event in events), "digest:", _digest(results))


def export(route: str, file: str) -> None:
    """Writes one artifact for both platforms. Prints the digest of the call itself."""
    arrays, rest = _call()
    function = jax.jit(lambda x: jax_kda.kda_prefill(**x, **rest, route=route))
    exported = jax.export.export(
        # A forced kernel cannot be lowered for the CPU: there the artifact takes what auto takes.
        function if route == "xla" else jax.jit(lambda x: jax_kda.kda_prefill(**x, **rest)),
        platforms=["cpu", "cuda"],
        disabled_checks=jax_kda.export_checks(),
    )(arrays)
    Path(file).write_bytes(exported.serialize())
    print("digest:", _digest(function(arrays)))


def load(route: str, file: str) -> None:
    """Runs the artifact that `export` wrote. Prints the digest of its results."""
    exported = jax.export.deserialize(bytearray(Path(file).read_bytes()))
    print("digest:", _digest(jax.jit(exported.call)(_call()[0])))


def _call() -> tuple[dict[str, Any], dict[str, Any]]:
    inputs = make_inputs("slow", 1, 60, 2, 4, lengths=(20, 0, 33))
    arrays = {name: x for name, x in inputs.items() if isinstance(x, np.ndarray)}
    return arrays, {name: x for name, x in inputs.items() if name not in arrays}


def _digest(results: Any) -> str:
    sha = hashlib.sha256()
    for x in jax.tree.leaves(results):
        sha.update(np.ascontiguousarray(x).tobytes())
    return sha.hexdigest()[:16]


if __name__ == "__main__":
    {f.__name__: f for f in (capture, offsets, cache, export, load)}[sys.argv[1]](*sys.argv[2:])
