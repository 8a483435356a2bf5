"""JAX's transformations, modes and processes around the kernels, on one GPU."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recipes
from harness import (
    BAR,
    BAR_DOUBLED,
    DRY,
    PLATFORM,
    Findings,
    Inputs,
    on_device,
    output_of,
    run_apart,
    same_bits,
    split,
)
from jax.sharding import Mesh
from oracle import relative_error

import jax_kda
from jax_kda.regimes import make_inputs


def small(**keywords: Any) -> tuple[Inputs, Inputs]:
    return split(on_device(make_inputs("slow", 1, 40, 1, 2, **keywords)))


def agree(got: Any, want: Any) -> bool:
    """The same bits. XLA compiles its own route anew for every surrounding: there, the same numbers."""
    if not DRY:
        return same_bits(got, want)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(x.dtype == y.dtype and relative_error(x, y) <= BAR for x, y in pairs)


# ---- control flow, and states of both dtypes


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_loops_give_the_bits_of_plain_calls(run, state):
    """scan, while and fori, each carrying the state through three calls."""
    x, rest = small(state_dtype=state)
    first = x.pop("initial_state")

    def step(state: Any, _: Any = None) -> Any:
        o, state = run(**x, **rest, initial_state=state)
        return state, o

    want, outputs = first, []
    for _ in range(3):
        want, o = step(want)
        outputs.append(o)
    assert want.dtype == state
    scanned, o = jax.jit(lambda s: jax.lax.scan(step, s, None, length=3))(first)
    assert agree(scanned, want)
    assert agree(o, jnp.stack(outputs))
    counted = jax.jit(lambda s: jax.lax.fori_loop(0, 3, lambda _, s: step(s)[0], s))(first)
    assert agree(counted, want)

    def until(carry: Any) -> Any:
        return carry[0] + 1, step(carry[1])[0]

    _, looped = jax.jit(lambda s: jax.lax.while_loop(lambda c: c[0] < 3, until, (0, s)))(first)
    assert agree(looped, want)


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["vmap", "remat", "x64", "debug_nans", "shard_map", "pmap"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_states_of_both_dtypes(run, way, state):
    x, rest = small(state_dtype=state)
    want = run(**x, **rest)
    assert want[1].dtype == state

    def function(x: Inputs) -> Any:
        return run(**x, **rest)

    if way == "vmap":
        mapped = jax.jit(jax.vmap(function))(jax.tree.map(lambda y: jnp.stack([y * 0, y]), x))
        got = jax.tree.map(lambda y: y[1], mapped)
    elif way == "remat":
        got = jax.jit(jax.checkpoint(function))(x)
    elif way == "x64":
        with jax.enable_x64(True):
            got = jax.jit(function)(x)
    elif way == "debug_nans":
        with jax.debug_nans(True):
            got = jax.jit(function)(x)
    elif way == "shard_map":
        over = Mesh(np.array(jax.devices(PLATFORM)[:1]), ("x",))
        spec = jax.sharding.PartitionSpec()
        got = jax.jit(jax.shard_map(function, mesh=over, in_specs=(spec,), out_specs=spec))(x)
    else:
        device = jax.devices(PLATFORM)[:1]
        got = jax.pmap(function, devices=device)(jax.tree.map(lambda y: y[None], x))
        got = jax.tree.map(lambda y: y[0], got)
    if way == "vmap":  # of another batch: a route may cut the tokens differently then
        assert all(relative_error(x, y) <= BAR for x, y in zip(got, want, strict=True))
        assert [x.dtype for x in got] == [x.dtype for x in want]
    else:
        assert agree(tuple(map(jnp.asarray, got)), want)


def test_debug_nans_raises_where_there_is_one(run):
    x, rest = small()
    with jax.debug_nans(True):
        jax.block_until_ready(run(**x, **rest))
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(run(**x | {"v": x["v"].at[0, 3].set(jnp.nan)}, **rest))


def test_nested_vmap_of_packed_calls(run, record_property):
    """States over one axis, offsets over the other."""
    x, rest = small(lengths=(10, 30))
    offsets = jnp.array([[0, 10, 40], [3, 3, 33]], jnp.int32)
    states = jnp.stack([x["initial_state"] * factor for factor in (1, 2, 3)])

    def function(state: Any, offsets: Any) -> Any:
        return run(**x | {"initial_state": state, "cu_seqlens": offsets}, **rest)

    o, final = jax.jit(jax.vmap(jax.vmap(function, (0, None)), (None, 0)))(states, offsets)
    with Findings(record_property) as found:
        for i, j in np.ndindex(2, 3):
            want_o, want_state = function(states[j], offsets[i])
            found.figure("o", relative_error(o[i, j], want_o), BAR, f"element {i}, {j}")
            found.figure("state", relative_error(final[i, j], want_state), BAR, f"element {i}, {j}")


# ---- names


def test_the_routes_name_is_in_the_compiled_program(run, route):
    """It is what profilers show."""
    x, rest = small()
    text = jax.jit(lambda x: run(**x, **rest)).lower(x).compile().as_text()
    names = re.findall(r'op_name="([^"]*)"', text)
    assert any(f"kda_prefill.{route}" in name for name in names), names[:20]


# ---- processes and threads


def test_the_persistent_cache_serves_the_next_process(route, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    first, second = (
        re.search(r"hits: (\d+) digest: (\w+)", output_of(run_apart("cache", route), 120)) for _ in range(2)
    )
    assert first is not None
    assert second is not None
    assert int(first[1]) == 0
    assert int(second[1]) >= 1
    assert first[2] == second[2]


def test_an_artifact_runs_in_another_process(route, tmp_path):
    """Exported for the CPU and CUDA at once. It takes the route that auto takes."""
    pytest.importorskip("flatbuffers")
    inputs = make_inputs("slow", 1, 60, 2, 4, lengths=(20, 0, 33))
    auto = jax_kda.explain_route(**inputs).route.value
    if route != auto:
        pytest.skip(f"auto takes {auto} here, and one artifact for both platforms can force no kernel")
    file = str(tmp_path / "artifact")
    written = output_of(run_apart("export", route, file), 120)
    assert output_of(run_apart("load", route, file), 120) == written


def test_threads_with_calls_of_their_own(run):
    """200 rounds each of four jitted calls on one device, from four threads: the bits of one at a time."""
    calls = [split(on_device(make_inputs("slow", 1, 70 + n, 2, seed=n))) for n in range(4)]
    functions = [jax.jit(lambda x, rest=rest: run(**x, **rest)) for _, rest in calls]
    want = [run(**x, **rest) for x, rest in calls]

    def rounds(n: int) -> int:
        return sum(not same_bits(functions[n](calls[n][0]), want[n]) for _ in range(5 if DRY else 200))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rounds, range(4))) == [0] * 4


# ---- docs/recipes.md, with the route that auto takes


def test_recipe_flax_nnx_layer():
    recipes.flax_layer("bfloat16", 2e-2)


def test_recipe_maxtext_style_code():
    recipes.maxtext("bfloat16", 2 * BAR)


def test_recipe_heads_first():
    recipes.heads_first("bfloat16", BAR_DOUBLED)


def test_recipe_a_cache_of_prefixes():
    recipes.prefix_cache("bfloat16", BAR_DOUBLED)


def test_recipe_exporting():
    pytest.importorskip("flatbuffers")
    recipes.exporting("bfloat16", BAR_DOUBLED)
