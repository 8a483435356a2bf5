"""Transformations inside one another, and under JAX's modes: each alone may be right, and not together."""

import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import arrays, call, jit, options
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_kda
from jax_kda import primitive

AXES = {name: P("x", None, "y") for name in ("q", "k", "v", "g", "beta")} | {
    "A_log": P("y"),
    "dt_bias": P("y"),
    "initial_state": P("x", "y"),
}
RESULTS = (P("x", None, "y"), P("x", "y"))
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")


def close(got, wanted, rtol=2e-4, atol=2e-5):
    def compare(x, y):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x, "f4"), np.asarray(y, "f4"), rtol=rtol, atol=atol)

    jax.tree.map(compare, got, wanted)


def kda(rest):
    return lambda x: jax_kda.kda_prefill(**x, **rest)


def loss(rest):
    def function(x):
        o, state = jax_kda.kda_prefill(**x, **rest)
        return jnp.sum(jnp.sin(o.astype("f4"))) + jnp.sum(jnp.cos(state.astype("f4")))

    return function


def split(**arguments):
    arguments = call(**arguments)
    return arrays(arguments), options(arguments)


def stacked(x):
    """Two different calls, one array for both."""
    return jax.tree.map(lambda y: np.stack([y, (y * 0.5).astype(y.dtype)]), x)


def both(rest, x):
    """What they give one at a time."""
    one = jit(kda(rest))
    return jax.tree.map(lambda *y: jnp.stack(y), *(one(element(x, n)) for n in (0, 1)))


def element(x, n):
    return jax.tree.map(lambda y: y[n], x)


def mesh(kind=AxisType.Auto):
    return Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("x", "y"), axis_types=(kind,) * 2)


def place(x, over, *lead):
    return {
        name: jax.device_put(value, NamedSharding(over, P(*lead, *AXES[name]))) for name, value in x.items()
    }


def collectives(compiled):
    return [name for name in COLLECTIVES if name in compiled.as_text()]


# ---- states of both dtypes through everything


def under_shard_map(function, x):
    specs = {name: AXES[name] for name in x}
    return jit(jax.shard_map(function, mesh=mesh(), in_specs=(specs,), out_specs=RESULTS))(x)


def over_an_explicit_mesh(function, x):
    over = mesh(AxisType.Explicit)
    with jax.set_mesh(over):
        return jit(function)(place(x, over))


def under_scan(function, x):
    def step(state, _):
        o, state = function(x | {"initial_state": state})
        return state, o

    state, outputs = jit(lambda s: jax.lax.scan(step, s, None, length=1))(x["initial_state"])
    return outputs[0], state


def under_vmap(function, x):
    return jax.tree.map(lambda y: y[0], jit(jax.vmap(function))(stacked(x)))


def in_64_bit_mode(function, x):
    with jax.enable_x64(True):
        return jit(function)(x)


def under_debug_nans(function, x):
    with jax.debug_nans(True):
        return jit(function)(x)


WAYS = {
    "scan": under_scan,
    "vmap": under_vmap,
    "remat": lambda f, x: jit(jax.checkpoint(f))(x),
    "sharded": lambda f, x: jit(f)(place(x, mesh())),
    "shard_map": under_shard_map,
    "explicit mesh": over_an_explicit_mesh,
    "x64": in_64_bit_mode,
    "debug_nans": under_debug_nans,
}


@functools.cache
def wanted(state):
    x, rest = split(dtype="bfloat16", gate="safe", state=state)
    return jit(kda(rest))(x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_states_of_both_dtypes(way, state):
    x, rest = split(dtype="bfloat16", gate="safe", state=state)
    o, final = WAYS[way](kda(rest), x)
    assert (o.dtype, final.dtype) == (jnp.bfloat16, state)
    close((o, final), wanted(state), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_gradients_come_in_the_dtypes_of_the_arguments(state):
    x, rest = split(dtype="bfloat16", gate="safe", state=state)
    gradient = jit(jax.vmap(jax.grad(loss(rest))))(stacked(x))
    assert {name: g.dtype for name, g in gradient.items()} == {name: y.dtype for name, y in x.items()}


# ---- vmap with the rest


def test_only_the_offsets_are_mapped():
    x, rest = split(B=1, lengths=(3, 4))
    offsets = np.array([[0, 3, 7], [1, 1, 6]], np.int32)
    one = jit(kda(rest))
    o, state = jit(jax.vmap(lambda offsets: kda(rest)(x | {"cu_seqlens": offsets})))(offsets)
    for n in (0, 1):
        close((o[n], state[n]), one(x | {"cu_seqlens": offsets[n]}))


def test_nested_vmap_of_packed_calls():
    """States over one axis, offsets over the other."""
    x, rest = split(B=1, lengths=(3, 4), gate="safe")
    offsets = np.array([[0, 3, 7], [1, 1, 6]], np.int32)
    states = np.stack([x["initial_state"] * factor for factor in (1, 2, 3)]).astype("f4")

    def function(state, offsets):
        return kda(rest)(x | {"initial_state": state, "cu_seqlens": offsets})

    o, final = jit(jax.vmap(jax.vmap(function, (0, None)), (None, 0)))(states, offsets)
    one = jit(function)
    for i in range(2):
        for j in range(3):
            close((o[i, j], final[i, j]), one(states[j], offsets[i]))


def test_vmap_over_an_axis_of_no_elements():
    x, rest = split(gate="safe")
    o, state = jit(jax.vmap(kda(rest)))({name: y[None][:0] for name, y in x.items()})
    assert (o.shape, state.shape) == ((0, 2, 7, 4, 4), (0, 2, 4, 8, 4))


@pytest.mark.parametrize("keywords", [{}, {"spmd_axis_name": "x"}], ids=["", "spmd_axis_name"])
def test_vmap_over_a_split_axis(keywords):
    """The mapped axis itself lies on several devices; folded into B it stays there."""
    x, rest = split(gate="safe")
    x = stacked(x)
    over = mesh()
    placed = {name: jax.device_put(y, NamedSharding(over, P("x"))) for name, y in x.items()}
    compiled = jit(jax.vmap(kda(rest), **keywords)).lower(placed).compile()
    assert collectives(compiled) == []
    close(compiled(placed), both(rest, x))


def test_vmap_of_shard_map_and_the_reverse():
    x, rest = split(gate="safe")
    x = stacked(x)
    over, specs = mesh(), {name: AXES[name] for name in x}
    outside = jax.vmap(jax.shard_map(kda(rest), mesh=over, in_specs=(specs,), out_specs=RESULTS))
    mapped = {name: P(None, *spec) for name, spec in specs.items()}
    inside = jax.shard_map(
        jax.vmap(kda(rest)), mesh=over, in_specs=(mapped,), out_specs=tuple(P(None, *r) for r in RESULTS)
    )
    for function in (outside, inside):
        close(jit(function)(x), both(rest, x))


def test_vmap_of_a_branch():
    """A mapped choice becomes a select of both branches."""
    x, rest = split(gate="safe")
    x = stacked(x)
    branches = [kda(rest), lambda x: jax.tree.map(jnp.zeros_like, kda(rest)(x))]
    o, state = jit(jax.vmap(lambda n, x: jax.lax.switch(n, branches, x)))(np.array([0, 1]), x)
    close((o[0], state[0]), element(both(rest, x), 0))
    assert not o[1].any()
    assert not state[1].any()


# ---- derivatives with the rest


def test_gradient_of_a_rematerialised_scan():
    x, rest = split(gate="safe")
    first = x.pop("initial_state")
    x = stacked(x)

    def total(wrap):
        def step(state, tokens):
            o, state = jax_kda.kda_prefill(**tokens, **rest, initial_state=state)
            return state, o

        def function(x, state):
            state, o = jax.lax.scan(wrap(step), state, x)
            return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state))

        return jit(jax.grad(function, (0, 1)))(x, first)

    close(total(jax.checkpoint), total(lambda step: step))


def test_offsets_have_no_gradient():
    x, rest = split(B=1, lengths=(3, 4))
    assert jit(jax.grad(loss(rest), allow_int=True))(x)["cu_seqlens"].dtype == jax.dtypes.float0


def test_gradients_under_a_partly_manual_shard_map():
    x, rest = split(gate="safe")
    specs = {name: P(*(axis if axis == "x" else None for axis in AXES[name])) for name in x}
    mapped = jax.shard_map(kda(rest), mesh=mesh(), in_specs=(specs,), out_specs=P("x"), axis_names={"x"})

    def function(x):
        o, state = mapped(x)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state))

    close(jit(jax.grad(function))(place(x, mesh())), jit(jax.grad(loss(rest)))(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gradients_under_pmap():
    x, rest = split(gate="safe")
    x = stacked(x)
    got = jax.pmap(jax.grad(loss(rest)), devices=jax.devices("cpu")[:2])(x)
    one = jit(jax.grad(loss(rest)))
    for n in (0, 1):
        close(element(got, n), one(element(x, n)))


# ---- sharding with the rest


@pytest.mark.parametrize("given", ["initial_state", "v"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_donation_where_output_and_state_have_equal_sizes(kind, given):
    """JAX pairs a donated array with a result of its size: both results are candidates here."""
    x, rest = split(B=2, T=8, H=4, HV=4, K=8, V=8, gate="safe")
    want = jit(kda(rest))(x)
    over = mesh(kind)
    with jax.set_mesh(over):
        x = place(x, over)
        donor = x.pop(given)
        step = jax.jit(
            lambda donor, x: kda(rest)(x | {given: donor}),
            donate_argnums=0,
            compiler_options={"xla_backend_optimization_level": 0},
        )
        got = step(donor, x)
    assert donor.is_deleted()
    close(got, want)


def test_a_mesh_of_explicit_and_automatic_axes():
    x, rest = split(gate="safe")
    square, kinds = np.array(jax.devices("cpu")[:4]).reshape(2, 2), (AxisType.Explicit, AxisType.Auto)
    over = Mesh(square, ("x", "y"), axis_types=kinds)
    with jax.set_mesh(over):
        placed = {
            name: jax.device_put(
                y, NamedSharding(over, P(*(axis if axis == "x" else None for axis in AXES[name])))
            )
            for name, y in x.items()
        }
        got = jit(kda(rest))(placed)
    close(got, jit(kda(rest))(x))


def test_the_state_stays_split_in_a_scan():
    x, rest = split(gate="safe")
    gate = {name: x.pop(name) for name in ("A_log", "dt_bias")}
    first = x.pop("initial_state")
    x, over = stacked(x), mesh()

    def function(state, x, gate):
        def step(state, tokens):
            o, state = jax_kda.kda_prefill(**tokens, **gate, **rest, initial_state=state)
            return state, o

        return jax.lax.scan(step, state, x)

    placed = place({"initial_state": first}, over)["initial_state"], place(x, over, None), place(gate, over)
    compiled = jit(function).lower(*placed).compile()
    assert collectives(compiled) == []
    state, outputs = compiled(*placed)
    wanted_state, wanted_outputs = jit(function)(first, x, gate)
    close((state, outputs), (wanted_state, wanted_outputs))


@pytest.mark.parametrize("operation", [jax_kda.kda_prefill, jax_kda.kda_decode])
def test_one_devices_share_carries_no_python_frames(operation, monkeypatch):
    """XLA takes the share's frame numbers for its caller's, and was seen to follow them for ever."""
    forget, texts = primitive._forget_frames, []

    def seen(module):
        before = module.operation.get_asm(enable_debug_info=True)
        forget(module)
        texts.append((before, module.operation.get_asm(enable_debug_info=True)))

    monkeypatch.setattr(primitive, "_forget_frames", seen)
    x, rest = split(B=2, T=6, gate="safe")  # shapes of no other test
    compiled = jit(lambda x: operation(**x, **rest)).lower(place(x, mesh())).compile()
    ((before, after),) = texts
    assert ".py" in before
    assert ".py" not in after
    assert f"{operation.__name__}.xla/" in compiled.as_text()  # the names are still there


# ---- JAX's modes


def test_strict_promotion():
    x, rest = split(
        B=1, T=9, lengths=(3, 4), gate="safe", dtype="bfloat16", use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
    )  # fmt: skip
    want = jit(kda(rest))(x)
    offsets = x.pop("cu_seqlens")
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        close(jit(kda(rest))(x | {"cu_seqlens": offsets}), want)
        jit(jax.grad(lambda x: loss(rest)(x | {"cu_seqlens": offsets})))(x)


@pytest.mark.parametrize("operation", [jax_kda.kda_prefill, jax_kda.kda_decode])
def test_strict_promotion_with_a_pool(operation):
    x, rest = split(B=2, T=3, gate="softplus", dtype="bfloat16", use_qk_l2norm_in_kernel=True)
    places = np.array([1, -1], np.int32)

    def function(x):
        return operation(**x, **rest, state_indices=places)

    want = jit(function)(x)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        close(jit(function)(x), want)
        jit(jax.vmap(function))(stacked(x))
        jit(jax.grad(lambda x: jnp.sum(function(x)[1])))(x)


def test_no_offset_is_read_on_the_host():
    x, rest = split(B=1, lengths=(3, 4), gate="safe")
    x = jax.tree.map(jnp.asarray, x)
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(jax_kda.kda_prefill(**x, **rest))


def test_no_tracer_leaks():
    x, rest = split(B=3, gate="safe")
    with jax.checking_leaks():
        jax.make_jaxpr(jax.vmap(jax.grad(loss(rest))))(stacked(x))


def test_jaxs_own_checks():
    x, rest = split(B=2, gate="safe")
    jax.config.update("jax_enable_checks", True)
    try:
        jit(jax.grad(loss(rest)))(place(x, mesh()))
    finally:
        jax.config.update("jax_enable_checks", False)


def test_the_default_precision_does_not_reach_the_chunk_form():
    x, rest = split()
    with jax.default_matmul_precision("bfloat16"):
        lowered = jax.jit(kda(rest)).lower(x).as_text()
    products = [line for line in lowered.splitlines() if "stablehlo.dot_general" in line]
    assert products
    assert all("HIGHEST" in line for line in products)


def test_64_bit_mode_with_the_rest():
    x, rest = split(gate="safe")
    want, gradient = both(rest, stacked(x)), jit(jax.grad(loss(rest)))(x)
    with jax.enable_x64(True):
        close(jit(jax.vmap(kda(rest)))(stacked(x)), want)
        close(jit(jax.grad(loss(rest)))(x), gradient)


def test_debug_nans_in_the_backward_pass():
    """Masked exponents and zero rows must not make a NaN on the way, even one that is selected away."""
    x, rest = split(B=1, T=9, lengths=(3, 0, 4), gate="softplus", use_qk_l2norm_in_kernel=True)
    for name in ("q", "k"):
        x[name][:, 2] = 0
    offsets = x.pop("cu_seqlens")
    with jax.debug_nans(True):
        jax.grad(lambda x: loss(rest)(x | {"cu_seqlens": offsets}))(x)


# ---- jax.export with the rest


def test_a_gradient_is_exported_with_a_symbolic_batch():
    pytest.importorskip("flatbuffers")
    x, rest = split(gate="safe")
    (B,) = jax.export.symbolic_shape("b")

    def symbolic(name, y):
        return jax.ShapeDtypeStruct(y.shape if name in ("A_log", "dt_bias") else (B, *y.shape[1:]), y.dtype)

    function = jax.jit(jax.grad(loss(rest)))
    exported = jax.export.export(
        function, platforms=["cpu", "cuda"], disabled_checks=jax_kda.export_checks()
    )({name: symbolic(name, y) for name, y in x.items()})
    got = jit(jax.export.deserialize(exported.serialize()).call)(x)
    close(got, jit(jax.grad(loss(rest)))(x))


def test_packed_calls_are_exported_with_symbolic_sizes():
    pytest.importorskip("flatbuffers")
    x, rest = split(B=1, lengths=(3, 4))
    N, T = jax.export.symbolic_shape("n, t")
    shapes = {name: jax.ShapeDtypeStruct((1, T, *x[name].shape[2:]), x[name].dtype) for name in "qkvg"}
    shapes |= {
        "beta": jax.ShapeDtypeStruct((1, T, 4), x["beta"].dtype),
        "initial_state": jax.ShapeDtypeStruct((N, *x["initial_state"].shape[1:]), np.float32),
        "cu_seqlens": jax.ShapeDtypeStruct((N + 1,), np.int32),
    }
    exported = jax.export.export(
        jax.jit(kda(rest)), platforms=["cpu", "cuda"], disabled_checks=jax_kda.export_checks()
    )(shapes)
    close(jit(jax.export.deserialize(exported.serialize()).call)(x), jit(kda(rest))(x))


# ---- processes and threads


def run_script(script, **environment):
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


FIRST_USE = """
import jax, numpy as np, jax_kda
from calls import arrays, call, jit, options
calls = [call(seed=seed, gate="safe") for seed in range(3)]
rest, first = options(calls[0]), calls[0]["initial_state"]
tokens = [{n: x for n, x in arrays(c).items() if n != "initial_state"} for c in calls]

def step(state, x):
    o, state = jax_kda.kda_prefill(**x, **rest, initial_state=state)
    return state, o

scan = jit(lambda s, x: jax.lax.scan(step, s, x))
state, outputs = scan(first, jax.tree.map(lambda *x: np.stack(x), *tokens))
running = first
for n, x in enumerate(tokens):
    running, o = jit(step)(running, x)
    np.testing.assert_allclose(outputs[n], o, rtol=1e-5, atol=1e-6)
np.testing.assert_allclose(state, running, rtol=1e-5, atol=1e-6)
print("same")
"""


def test_first_use_inside_a_scanned_loop():
    """In a fresh process: nothing of ours has run before."""
    assert "same" in run_script(FIRST_USE)


CACHED = """
import jax, numpy as np, jax_kda
from calls import arrays, call, jit
from jax.sharding import Mesh, PartitionSpec as P
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
x = arrays(call(T=2, state=None))
mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
step = jax.shard_map(
    lambda x: jax_kda.kda_prefill(**x), mesh=mesh, in_specs=({n: P("x") for n in x},), out_specs=P("x")
)
compiled = jit(step).lower(x).compile()
print(sum("cache_hits" in event for event in events))
"""


def test_the_persistent_cache_serves_the_next_process_under_shard_map(tmp_path):
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    first, second = (run_script(CACHED, **environment) for _ in range(2))
    assert (int(first), int(second)) == (0, 1)


def test_threads_with_jitted_calls():
    """200 rounds in each of four threads, the first call of each function among them."""
    calls = [split(B=1, T=5, seed=seed, gate="safe") for seed in range(4)]
    functions = [jit(kda(rest)) for _, rest in calls]
    alone = [jit(kda(rest))(x) for x, rest in calls]

    def rounds(n):
        with jax.default_device(jax.devices("cpu")[0]):
            return [functions[n](calls[n][0]) for _ in range(200)]

    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(rounds, range(4)), alone, strict=True):
            for again in got:
                jax.tree.map(np.testing.assert_array_equal, again, want)
