"""BR-14, and what splits over several devices. Those tests need two GPUs."""

from __future__ import annotations

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recipes
from fault_cases import bits
from harness import DRY, PLATFORM, on_device, same_bits, split
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_kda
from jax_kda.regimes import make_inputs

COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")
BY_HEADS = {name: P(None, None, "x") for name in ("q", "k", "v", "g", "beta")} | {
    "A_log": P("x"),
    "dt_bias": P("x"),
    "initial_state": P(None, "x"),
    "cu_seqlens": P(),
}
BY_BATCH = {name: P("x") for name in BY_HEADS} | {"A_log": P(), "dt_bias": P()}


def devices(count):
    try:
        found = jax.devices(PLATFORM)
    except RuntimeError:
        found = []
    if len(found) < count:
        pytest.skip(f"needs {count} devices, and there are {len(found)}")
    return found[:count]


def mesh(count):
    return Mesh(np.array(devices(count)), ("x",))


def place(arrays, over, specs):
    return {name: jax.device_put(x, NamedSharding(over, specs[name])) for name, x in arrays.items()}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("specs", "lengths"), [(BY_BATCH, None), (BY_HEADS, (30, 0, 20))], ids=["batch", "heads, packed"]
)
def test_split_arguments_under_jit(run, count, specs, lengths):
    """The same bits, where they were, and nothing gathered."""
    over = mesh(count)
    arrays, rest = split(make_inputs("slow", 1 if lengths else 2, 50, 2, 4, lengths=lengths))
    want = run(**arrays, **rest)
    placed = place(arrays, over, specs)
    compiled = jax.jit(lambda x: run(**x, **rest)).lower(placed).compile()
    assert not [name for name in COLLECTIVES if name in compiled.as_text()]
    got = compiled(placed)
    assert got[0].sharding.is_equivalent_to(NamedSharding(over, specs["v"]), 4)
    assert got[1].sharding.is_equivalent_to(NamedSharding(over, specs["initial_state"]), 4)
    assert [bits(x) for x in got] == [bits(x) for x in want]


@pytest.mark.parametrize("count", [1, 2])
def test_shard_map(run, count):
    over = mesh(count)
    arrays, rest = split(make_inputs("slow", 2, 50, 2, 4))
    specs = {name: BY_BATCH[name] for name in arrays}
    mapped = jax.jit(
        jax.shard_map(lambda x: run(**x, **rest), mesh=over, in_specs=(specs,), out_specs=P("x"))
    )
    placed = place(arrays, over, specs)
    assert not [name for name in COLLECTIVES if name in mapped.lower(placed).compile().as_text()]
    assert [bits(x) for x in mapped(placed)] == [bits(x) for x in run(**arrays, **rest)]


@pytest.mark.parametrize("count", [1, 2])
def test_shard_map_unchecked_and_partly_manual(run, count):
    """check_vma off; and manual over the batch alone, the heads being split by the partitioner."""
    arrays, rest = split(make_inputs("slow", 2, 50, 2, 4))
    want = [bits(x) for x in run(**arrays, **rest)]
    specs = {name: BY_BATCH[name] for name in arrays}

    def function(x):
        return run(**x, **rest)

    unchecked = jax.shard_map(
        function, mesh=mesh(count), in_specs=(specs,), out_specs=P("x"), check_vma=False
    )
    assert [bits(x) for x in jax.jit(unchecked)(arrays)] == want
    both = Mesh(np.array(devices(count)).reshape(1, count), ("x", "y"))
    partly = jax.jit(
        jax.shard_map(function, mesh=both, in_specs=(specs,), out_specs=P("x"), axis_names={"x"})
    )
    by_heads = {name: P(*("y" if axis else None for axis in spec)) for name, spec in BY_HEADS.items()}
    placed = place(arrays, both, by_heads)
    assert not [name for name in COLLECTIVES if name in partly.lower(placed).compile().as_text()]
    assert [bits(x) for x in partly(placed)] == want


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("specs", [BY_BATCH, BY_HEADS], ids=["batch", "heads"])
def test_explicit_meshes(run, count, specs):
    over = Mesh(np.array(devices(count)), ("x",), axis_types=(AxisType.Explicit,))
    arrays, rest = split(make_inputs("slow", 2, 50, 2, 4))
    want = [bits(x) for x in run(**arrays, **rest)]
    with jax.set_mesh(over):
        placed = place(arrays, over, specs)
        compiled = jax.jit(lambda x: run(**x, **rest)).lower(placed).compile()
        assert not [name for name in COLLECTIVES if name in compiled.as_text()]
        got = compiled(placed)
    assert [bits(x) for x in got] == want


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pmap(run, count):
    """Different data on each device."""
    several = [split(make_inputs("slow", 1, 50, 2, 4, seed=seed)) for seed in range(count)]
    rest = several[0][1]
    stacked = {name: np.stack([x[name] for x, _ in several]) for name in several[0][0]}
    got = jax.pmap(lambda x: run(**x, **rest), devices=devices(count))(stacked)
    for n, (x, _) in enumerate(several):
        # Indexed on the host: on the devices that is a program with collectives of its own.
        assert [bits(np.asarray(y)[n]) for y in got] == [bits(y) for y in run(**x, **rest)]


@pytest.mark.parametrize("count", [1, 2])
def test_split_tokens_are_still_right(run, count):
    """They are gathered, as they must be."""
    over = mesh(count)
    arrays, rest = split(make_inputs("slow", 2, 50, 2, 4))
    tokens = dict.fromkeys(("q", "k", "v", "g", "beta"), P(None, "x"))
    placed = place(arrays, over, dict.fromkeys(BY_HEADS, P()) | tokens)
    got = jax.jit(lambda x: run(**x, **rest))(placed)
    assert [bits(x) for x in got] == [bits(x) for x in run(**arrays, **rest)]


@pytest.mark.parametrize("count", [1, 2])
def test_vmap_over_a_split_axis(run, count):
    over = mesh(count)
    arrays, rest = split(make_inputs("slow", 1, 50, 2, 4))
    stacked = {name: np.stack([x, (x * 0.5).astype(x.dtype)]) for name, x in arrays.items()}
    function = jax.jit(jax.vmap(lambda x: run(**x, **rest)))
    placed = place(stacked, over, dict.fromkeys(stacked, P("x")))
    compiled = function.lower(placed).compile()
    assert not [name for name in COLLECTIVES if name in compiled.as_text()]
    assert [bits(x) for x in compiled(placed)] == [bits(x) for x in function(stacked)]


@pytest.mark.parametrize("count", [1, 2])
def test_a_donated_state_that_is_split(run, count):
    over = mesh(count)
    arrays, rest = split(make_inputs("slow", 1, 128, 2, 4))  # T = K: o has as many elements as the state
    want = [bits(x) for x in run(**arrays, **rest)]
    placed = place(arrays, over, BY_HEADS)
    state = placed.pop("initial_state")
    step = jax.jit(lambda state, x: run(**x, **rest, initial_state=state), donate_argnums=0)
    got = step(state, placed)
    assert state.is_deleted()
    assert [bits(x) for x in got] == want


@pytest.mark.parametrize("count", [1, 2])
def test_recipe_serving_under_shard_map(count):
    over = Mesh(np.array(devices(count)).reshape(1, count), ("data", "model"))
    text = recipes.serving("bfloat16", 8e-3, over)
    assert not [name for name in COLLECTIVES if name in text]


def test_no_kernel_on_the_idle_device(run, tmp_path):
    """By the profiler's word: all that runs, runs on the second device."""
    _, second = devices(2)
    arrays, rest = split(make_inputs("slow", 1, 50, 1, 2))
    there = jax.device_put(arrays, second)
    function = jax.jit(lambda x: run(**x, **rest))
    jax.block_until_ready(function(there))
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(function(there))
    busy = {
        plane.name
        for path in tmp_path.rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream") and any(True for _ in line.events)
    }
    if not busy:
        pytest.skip("the profiler saw nothing on any device")
    assert len(busy) == 1, busy
    assert busy == {f"/device:GPU:{second.local_hardware_id}"}


def test_data_on_the_second_device_alone(run):
    first, second = devices(2)
    arrays, rest = split(make_inputs("slow", 1, 50, 1, 2))
    want = [bits(x) for x in run(**jax.device_put(arrays, first), **rest)]
    gc.collect()  # what earlier tests left in cycles must not be freed below
    before = first.memory_stats()
    there = jax.device_put(arrays, second)
    for _ in range(3):
        got = run(**there, **rest)
        assert all(x.devices() == {second} for x in got)
        assert [bits(x) for x in got] == want
    assert jax_kda.explain_route(**there, **rest).device.platform == PLATFORM
    if before is not None:  # on a GPU: the idle one's allocator saw nothing
        after = first.memory_stats()
        assert (after["num_allocs"], after["bytes_in_use"]) == (before["num_allocs"], before["bytes_in_use"])


def test_two_threads_one_device_each(run):
    """XLA runs handlers for several devices from several threads."""
    pair = devices(2)
    inputs = [make_inputs("slow", 1, 300, 1 if DRY else 16, seed=seed) for seed in (1, 2)]
    placed = [jax.device_put(split(x)[0], device) for x, device in zip(inputs, pair, strict=True)]
    rest = split(inputs[0])[1]
    want = [run(**jax.device_put(x, pair[0]), **rest) for x in placed]
    want = [[bits(x) for x in results] for results in want]
    wrong = []

    def work(n):
        for _ in range(5 if DRY else 200):
            if [bits(x) for x in run(**placed[n], **rest)] != want[n]:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_one_call_after_another_needs_no_wait(run):
    """Calls queue on the device in order, each on the state of the one before."""
    arrays, rest = split(on_device(make_inputs("slow", 1, 64, 1, 2)))
    state = arrays.pop("initial_state")
    queued, waited = state, state
    for _ in range(5):
        _, queued = run(**arrays, **rest, initial_state=queued)
    for _ in range(5):
        _, waited = jax.block_until_ready(run(**arrays, **rest, initial_state=waited))
    assert same_bits(queued, waited)
    assert bool(jnp.isfinite(queued).all())
