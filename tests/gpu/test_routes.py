"""`explain_route` against what was emitted and what ran, and the calls that no kernel serves."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    BAR,
    DRY,
    PLATFORM,
    Findings,
    emitted_routes,
    expected_calls,
    on_device,
    same_bits,
    split,
)
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from oracle import numpy_recurrence, relative_error

import jax_kda
from jax_kda.regimes import make_inputs
from jax_kda.routing import Route

# In the name of the kernel that a route launches (no other route's has it).
KERNELS = {
    Route.BASELINE_M128: r"baseline_kernel<.*Engine, (\(int\))?1,|baseline_kernel.*EngineELi1E",
    Route.BASELINE_M64: r"baseline_kernel<.*Engine, (\(int\))?2,|baseline_kernel.*EngineELi2E",
    Route.C4_M128_D15: r"Roles<(\(int\))?1, (\(int\))?3>|RolesILi1ELi3E",
    Route.C4_M64_D10: r"Roles<(\(int\))?2, (\(int\))?2>|RolesILi2ELi2E",
    Route.C8_M128_D35: r"Roles<(\(int\))?1, (\(int\))?7>|RolesILi1ELi7E",
    Route.POOL_M128: r"pool_kernel<.*Engine, (\(int\))?1,|pool_kernel.*EngineELi1E",
    Route.POOL_M64: r"pool_kernel<.*Engine, (\(int\))?2,|pool_kernel.*EngineELi2E",
    Route.SEGMENTED: r"outputs_kernel",
}


def test_the_installed_package_is_this_tree():
    """The record's digest is the tree's; what ran must be the same."""
    installed = Path(jax_kda.__file__).parent
    tree = Path(__file__).resolve().parents[2] / "jax_kda"
    for path in tree.glob("*.py"):
        assert (installed / path.name).read_bytes() == path.read_bytes(), path.name


def test_auto_takes_the_kernels(record_property):
    """Whatever is bfloat16 with heads of 128 channels."""
    for regime, options in (
        ("production", {}),
        ("long", {"state_dtype": "bfloat16", "state_v_first": True}),
        ("unbounded", {"initial_state": False}),
        ("slow", {"lengths": (20, 0, 13)}),
    ):
        inputs = make_inputs(regime, 1, 40, 1, 2, **options)
        decision = jax_kda.explain_route(**inputs)
        assert decision.device.platform == PLATFORM
        assert (decision.route is Route.XLA) == DRY, str(decision)
    record_property("device", str(decision.device))


@pytest.mark.parametrize("transformed", ["jit", "vmap", "shard_map"])
@pytest.mark.parametrize("route", ["auto", *(route.value for route in Route)])
def test_explained_emitted_ran(route, transformed, tmp_path, record_property):
    if DRY and route not in ("auto", "xla"):
        pytest.skip("the CUDA routes have no dry run")
    if route == "xla" and transformed != "jit" and not DRY:
        pytest.skip("slow to compile on a GPU, and the dry run has it")
    arrays, rest = split(on_device(make_inputs("slow", 2, 40, 1, 2)))
    explained = []

    def call(x):
        try:
            explained.append(jax_kda.explain_route(**x, **rest, route=route))
        except ValueError as refusal:
            pytest.skip(str(refusal))
        return jax_kda.kda_prefill(**x, **rest, route=route)

    function, folded = call, 2
    if transformed == "vmap":
        arrays = jax.tree.map(lambda x: jnp.stack([x] * 3), arrays)
        function, folded = jax.vmap(call), 6
    elif transformed == "shard_map":
        mesh = Mesh(np.array(jax.devices(PLATFORM)[:1]), ("x",))
        specs = {name: P() if name in ("A_log", "dt_bias") else P("x") for name in arrays}
        function = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=P("x"))
    function = jax.jit(function)
    lowered = function.lower(arrays)
    decision = explained[0]
    if transformed == "vmap":  # the shapes of one element do not tell: those of the folded batch do
        shapes = {
            name: x[0] if name in ("A_log", "dt_bias") else x.reshape(folded, *x.shape[2:])
            for name, x in arrays.items()
        }
        decision = jax_kda.explain_route(**shapes, **rest, route=route)
    assert folded == decision.problem.B
    if route != "auto":
        assert decision.route == route
    assert emitted_routes(lowered) == expected_calls(decision)
    compiled = lowered.compile()
    targets = compiled.as_text().count('custom_call_target="jax_kda.prefill.v1"')
    assert targets == len(expected_calls(decision))

    jax.block_until_ready(compiled(arrays))
    if decision.route not in (Route.XLA, *KERNELS):
        return
    names = kernels_of(lambda: jax.block_until_ready(compiled(arrays)), tmp_path)
    if not names:
        pytest.skip("emitted as explained; what ran is not known: the profiler saw nothing on the device")
    record_property("kernels", ", ".join(f"{n} {name[:80]}" for name, n in names.items()))
    ran = {route for route, part in KERNELS.items() if any(re.search(part, name) for name in names)}
    assert ran == {decision.route} - {Route.XLA}, names


def kernels_of(run, directory):
    """Names of the kernels that this runs on the GPU, counted, by the profiler's word."""
    with jax.profiler.trace(str(directory)):
        run()
    names = Counter()
    for path in Path(directory).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    names.update(event.name for event in line.events)
    return names


@pytest.mark.parametrize("change", ["float16", "float32", "K = 64"])
def test_what_no_kernel_serves_takes_the_xla_route(change, record_property):
    dtype = "bfloat16" if change == "K = 64" else change
    inputs = make_inputs("slow", 1, 40, 1, 2, K=64 if change == "K = 64" else 128, dtype=dtype)
    decision = jax_kda.explain_route(**inputs)
    assert decision.route is Route.XLA
    arrays, rest = split(inputs)
    function = jax.jit(lambda x: jax_kda.kda_prefill(**x, **rest))
    assert emitted_routes(function.lower(arrays)) == []
    o, state = function(arrays)
    assert o.dtype == dtype
    want_o, want_state = numpy_recurrence(**inputs)
    with Findings(record_property) as found:
        found.figure("o", relative_error(o, want_o), {"float32": 1e-5, "float16": 1e-3}.get(dtype, BAR))
        found.figure("state", relative_error(state, want_state), 1e-5)


def test_ways_to_call_give_the_same_bits(route):
    """Eager, under jit, compiled ahead of time, under remat and inside cond."""
    arrays, rest = split(on_device(make_inputs("slow", 1, 40, 1, 2)))

    def call(x):
        return jax_kda.kda_prefill(**x, **rest, route=route)

    want = call(arrays)
    for way in (
        jax.jit(call),
        jax.jit(call).lower(arrays).compile(),
        jax.jit(jax.checkpoint(call)),
        jax.jit(lambda x: jax.lax.cond(x["beta"].sum() < np.inf, call, lambda x: want, x)),
    ):
        assert same_bits(way(arrays), want)
