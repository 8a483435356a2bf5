"""Several devices: the same numbers, split over batch and heads, and nothing gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import arrays, call, jit, options
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_kda
from jax_kda.routing import Route

COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
BY_BATCH_AND_HEADS = {
    "q": P("x", None, "y"),
    "k": P("x", None, "y"),
    "v": P("x", None, "y"),
    "g": P("x", None, "y"),
    "beta": P("x", None, "y"),
    "A_log": P("y"),
    "dt_bias": P("y"),
    "initial_state": P("x", "y"),
    "cu_seqlens": P(),
}
RESULTS = (P("x", None, "y"), P("x", "y"))


def make_mesh(kind=AxisType.Auto, shape=(2, 2)):
    return Mesh(
        np.array(jax.devices("cpu")[: np.prod(shape)]).reshape(shape), ("x", "y"), axis_types=(kind,) * 2
    )


def place(x, mesh, specs=None):
    specs = specs or BY_BATCH_AND_HEADS
    return {name: jax.device_put(value, NamedSharding(mesh, specs[name])) for name, value in x.items()}


def kda(rest):
    return lambda x: jax_kda.kda_prefill(**x, **rest)


def loss(rest):
    def function(x):
        o, state = jax_kda.kda_prefill(**x, **rest)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state))

    return function


def close(got, wanted, **tolerance):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), **TOLERANCE | tolerance),
        got,
        wanted,
    )


def collectives(function, *args):
    text = function.lower(*args).compile().as_text()
    return {name for name in COLLECTIVES if name in text}


VARIANTS = {
    "dense": call(B=2, H=2, HV=4, gate="safe"),
    "equal heads": call(B=2, H=4, HV=4, gate="softplus", bias=False, state_v_first=True),
    "no state": call(B=4, H=2, HV=2, state=None, output_final_state=False),
    "packed": call(B=1, H=2, HV=4, gate="safe", lengths=(3, 4)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_sharded_arguments_under_jit(variant):
    arguments = VARIANTS[variant]
    x, rest = arrays(arguments), options(arguments)
    mesh = make_mesh(shape=(1, 2) if variant == "packed" else (2, 2))
    placed = place(x, mesh)
    function = jit(kda(rest))
    assert collectives(function, placed) == set()
    o, state = function(placed)
    close((o, state), jax_kda.kda_prefill(**arguments))
    assert o.sharding.is_equivalent_to(NamedSharding(mesh, RESULTS[0]), 4)
    if state is not None:
        assert state.sharding.is_equivalent_to(NamedSharding(mesh, RESULTS[1]), 4)


def test_an_eager_call_on_sharded_arguments():
    arguments = VARIANTS["dense"]
    mesh = make_mesh()
    o, state = jax_kda.kda_prefill(**place(arrays(arguments), mesh), **options(arguments))
    assert o.sharding.is_equivalent_to(NamedSharding(mesh, RESULTS[0]), 4)
    close((o, state), jax_kda.kda_prefill(**arguments))


def test_one_sharded_argument_is_enough():
    """Whole operands are sliced, which is free; the split one is not gathered."""
    arguments = VARIANTS["dense"]
    x, rest = arrays(arguments), options(arguments)
    placed = place(x, make_mesh(), BY_BATCH_AND_HEADS | {"q": P(), "k": P(), "g": P(), "initial_state": P()})
    function = jit(kda(rest))
    assert collectives(function, placed) == set()
    close(function(placed), jax_kda.kda_prefill(**arguments))


def test_a_single_query_head_serves_split_value_heads():
    arguments = call(B=1, H=1, HV=4)
    specs = BY_BATCH_AND_HEADS | {"q": P(), "k": P()}
    placed = place(arrays(arguments), make_mesh(shape=(1, 2)), specs)
    function = jit(kda({}))
    assert collectives(function, placed) == set()
    close(function(placed), jax_kda.kda_prefill(**arguments))


@pytest.mark.parametrize("spec", [P("x", "y"), P(None, None, None, "y"), P(None, "x", "y"), P(("x", "y"))])
def test_any_other_sharding_is_still_right(spec):
    """Tokens or channels split: gathered, as they must be. Sizes that do not divide: whole."""
    arguments = call(B=2 if len(spec) > 1 else 4, T=8, H=2, HV=4)
    x = arrays(arguments)
    mesh = make_mesh()
    placed = {
        name: jax.device_put(value, NamedSharding(mesh, spec if name in ("q", "k", "v", "g") else P()))
        for name, value in x.items()
    }
    close(jit(kda({}))(placed), jax_kda.kda_prefill(**arguments))


def test_gradients_of_sharded_arguments():
    arguments = VARIANTS["dense"]
    x, rest = arrays(arguments), options(arguments)
    function = jit(jax.grad(loss(rest)))
    placed = place(x, make_mesh())
    assert "all-gather" not in collectives(function, placed)
    close(function(placed), function(x), rtol=1e-4, atol=1e-5)


def test_vmap_of_sharded_arguments():
    arguments = VARIANTS["dense"]
    x, rest = arrays(arguments), options(arguments)
    both = {name: np.stack([value, 0.5 * value]) for name, value in x.items()}
    mesh = make_mesh()
    placed = {
        name: jax.device_put(value, NamedSharding(mesh, P(None, *BY_BATCH_AND_HEADS[name])))
        for name, value in both.items()
    }
    function = jit(jax.vmap(kda(rest)))
    close(function(placed), function(both))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("variant", ["dense", "packed"])
def test_shard_map(check_vma, variant):
    arguments = VARIANTS[variant]
    x, rest = arrays(arguments), options(arguments)
    specs = {name: BY_BATCH_AND_HEADS[name] for name in x}
    mesh = make_mesh(shape=(1, 2) if variant == "packed" else (2, 2))
    mapped = jit(
        jax.shard_map(kda(rest), mesh=mesh, in_specs=(specs,), out_specs=RESULTS, check_vma=check_vma)
    )
    assert collectives(mapped, place(x, mesh)) == set()
    close(mapped(x), jax_kda.kda_prefill(**arguments))


def test_shard_map_over_some_axes_only():
    arguments = VARIANTS["dense"]
    x, rest = arrays(arguments), options(arguments)
    mesh = make_mesh()
    specs = {name: P(*(axis if axis == "x" else None for axis in BY_BATCH_AND_HEADS[name])) for name in x}
    mapped = jit(jax.shard_map(kda(rest), mesh=mesh, in_specs=(specs,), out_specs=P("x"), axis_names={"x"}))
    placed = place(x, mesh)
    assert collectives(mapped, placed) == set()
    close(mapped(placed), jax_kda.kda_prefill(**arguments))


def test_results_vary_over_every_axis_that_an_operand_varies_over():
    """Only v is split: without the union of the axes, the carry of the scan would not type-check."""
    arguments = call(B=1, H=1, HV=4, state=None)
    x = arrays(arguments)
    specs = {name: P(None, None, "x") if name in ("v", "g", "beta") else P() for name in x}
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("x",))

    def local(x):
        def step(state, _):
            o, state = jax_kda.kda_prefill(**x, initial_state=state)
            return state, o

        _, first = jax_kda.kda_prefill(**x)
        return jax.lax.scan(step, first, None, length=2)

    def whole(x):
        _, state = jax_kda.kda_prefill(**x)
        outputs = []
        for _ in range(2):
            o, state = jax_kda.kda_prefill(**x, initial_state=state)
            outputs.append(o)
        return state, jnp.stack(outputs)

    out = (P(None, "x"), P(None, None, None, "x"))
    close(jit(jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=out))(x), whole(x))


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_under_shard_map(check_vma):
    """A_log is shared by the batch shards: its gradient is the sum over them."""
    arguments = VARIANTS["dense"]
    x, rest = arrays(arguments), options(arguments)
    specs = {name: BY_BATCH_AND_HEADS[name] for name in x}
    mapped = jax.shard_map(
        kda(rest), mesh=make_mesh(), in_specs=(specs,), out_specs=RESULTS, check_vma=check_vma
    )

    def function(x):
        o, state = mapped(x)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state))

    close(jit(jax.grad(function))(x), jit(jax.grad(loss(rest)))(x), rtol=1e-4, atol=1e-5)


def explicit_call(variant, specs):
    arguments = VARIANTS[variant]
    x, rest = arrays(arguments), options(arguments)
    mesh = make_mesh(AxisType.Explicit, (1, 2) if variant == "packed" else (2, 2))
    return arguments, place(x, mesh, specs), rest, mesh


@pytest.mark.parametrize("variant", ["dense", "packed"])
def test_explicit_meshes(variant):
    arguments, placed, rest, mesh = explicit_call(variant, BY_BATCH_AND_HEADS)
    with jax.set_mesh(mesh):
        function = jit(kda(rest))
        assert collectives(function, placed) == set()
        o, state = function(placed)
    assert jax.typeof(o).sharding.spec == P("x", None, "y", None)
    assert jax.typeof(state).sharding.spec == P(None if variant == "packed" else "x", "y", None, None)
    close((o, state), jax_kda.kda_prefill(**arguments))


def test_gradients_over_explicit_meshes():
    arguments, placed, rest, mesh = explicit_call("dense", BY_BATCH_AND_HEADS)
    with jax.set_mesh(mesh):
        gradient = jit(jax.grad(loss(rest)))(placed)
    assert jax.typeof(gradient["q"]).sharding.spec == P("x", None, "y", None)
    close(gradient, jit(jax.grad(loss(rest)))(arrays(arguments)), rtol=1e-4, atol=1e-5)


def test_explicit_meshes_with_split_tokens():
    tokens = dict.fromkeys(("q", "k", "v", "g", "beta"), P("x", None))
    specs = BY_BATCH_AND_HEADS | tokens | {"initial_state": P(), "A_log": P(), "dt_bias": P()}
    arguments, placed, rest, mesh = explicit_call("dense", specs)
    with jax.set_mesh(mesh):
        o, _ = jit(kda(rest))(placed)
    assert jax.typeof(o).sharding.spec == P("x", None, None, None)
    close(o, jax_kda.kda_prefill(**arguments)[0])


def test_explicit_meshes_under_vmap():
    arguments = VARIANTS["dense"]
    x, rest = arrays(arguments), options(arguments)
    mesh = make_mesh(AxisType.Explicit)
    both = {
        name: jax.device_put(
            np.stack([value, 0.5 * value]), NamedSharding(mesh, P(None, *BY_BATCH_AND_HEADS[name]))
        )
        for name, value in x.items()
    }
    with jax.set_mesh(mesh):
        o, _ = jit(jax.vmap(kda(rest)))(both)
    close(np.asarray(o)[0], jax_kda.kda_prefill(**arguments)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pmap():
    arguments = VARIANTS["dense"]
    x, rest = arrays(arguments), options(arguments)
    both = {name: np.stack([value, 0.5 * value]) for name, value in x.items()}
    o, _ = jax.pmap(kda(rest), devices=jax.devices("cpu")[:2])(both)
    close(o[0], jax_kda.kda_prefill(**arguments)[0])


@pytest.mark.parametrize(
    ("specs", "local"),
    [
        (BY_BATCH_AND_HEADS, (1, 1, 2)),
        (dict.fromkeys(BY_BATCH_AND_HEADS, P()), (2, 2, 4)),
        (BY_BATCH_AND_HEADS | {"q": P(None, None, None, "y")}, (1, 1, 2)),
        (dict.fromkeys(BY_BATCH_AND_HEADS, P(("x",))), (1, 2, 4)),
    ],
)
def test_explain_route_counts_what_one_device_sees(cuda_build, specs, local):
    arguments = call(B=2, H=2, HV=4, K=128, V=128, dtype="bfloat16")
    placed = place(arrays(arguments), make_mesh(), specs)
    decision = jax_kda.explain_route(**placed, device="cuda")
    assert decision.route is not Route.XLA
    assert local == (decision.problem.B, decision.problem.H, decision.problem.HV)
