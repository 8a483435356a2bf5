"""State checkpoints (`checkpoint_every`): against the judge, under transformations, and resumed from."""

import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from calls import arrays, call, jit, options
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import numpy_recurrence, relative_error

import jax_kda
from jax_kda import contract, partitioning
from jax_kda.regimes import make_inputs

AXES = dict.fromkeys(("q", "k", "v", "g", "beta"), P("x", None, "y")) | {
    "A_log": P("y"),
    "dt_bias": P("y"),
    "initial_state": P("x", "y"),
    "cu_seqlens": P(),
}
RESULTS = (P("x", None, "y"), P("x", "y"), P("x", "y"))
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")
PACKED = (70, 0, 64, 3, 130, 63, 128)  # checkpoints every 64: 1, 0, 1, 0, 2, 0, 2

CALLS = {
    "dense": {"B": 2, "T": 200},
    "one chunk": {"B": 2, "T": 64},
    "no checkpoint": {"B": 2, "T": 63},
    "no token": {"B": 2, "T": 0},
    "no state": {"B": 1, "T": 130, "state": None, "output_final_state": False},
    "state_v_first": {"B": 2, "T": 200, "gate": "safe", "state_v_first": True},
    "bfloat16 state": {"B": 2, "T": 200, "gate": "softplus", "state": "bfloat16"},
    "packed": {"B": 1, "T": 480, "lengths": PACKED, "gate": "safe"},
    "packed, no state": {"B": 1, "T": 480, "lengths": PACKED, "output_final_state": False},
    "packed, v first": {"B": 1, "T": 480, "lengths": PACKED, "state_v_first": True, "state": "bfloat16"},
    "packed, short": {"B": 1, "T": 300, "lengths": (63, 1, 63, 0, 63), "state": None},
}


def mesh(kind=AxisType.Auto, shape=(2, 2)):
    devices = np.array(jax.devices("cpu")[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, ("x", "y"), axis_types=(kind,) * 2)


def place(x, over):
    return {name: jax.device_put(value, NamedSharding(over, AXES[name])) for name, value in x.items()}


def collectives(function, x):
    text = function.lower(x).compile().as_text()
    return [name for name in COLLECTIVES if name in text]


def kda(every, rest):
    return lambda x: jax_kda.kda_prefill(**x, **rest, checkpoint_every=every)


def close(got, wanted, **tolerance):
    def compare(x, y):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_allclose(
            np.asarray(x, "f4"), np.asarray(y, "f4"), **{"rtol": 2e-4, "atol": 2e-5} | tolerance
        )

    jax.tree.map(compare, got, wanted)


@pytest.mark.parametrize(
    ("name", "every"), [*((name, 64) for name in CALLS), ("dense", 192), ("packed", 128), ("packed", 640)]
)
def test_against_the_judge(name, every):
    arguments = call(**CALLS[name])
    bar = 4e-3 if CALLS[name].get("state") == "bfloat16" else 1e-5
    wanted = numpy_recurrence(**arguments, checkpoint_every=every)
    x, rest = arrays(arguments), options(arguments)
    for operation in (jax_kda.kda_prefill, jax_kda.kda_reference):
        o, state, checkpoints = jit(lambda x, run=operation: run(**x, **rest, checkpoint_every=every))(x)
        assert relative_error(o, wanted[0]) <= 1e-5
        assert (state is None) == (wanted[1] is None)
        if state is not None:
            assert checkpoints.dtype == state.dtype
            assert relative_error(state, wanted[1]) <= bar
        assert checkpoints.shape == wanted[2].shape
        assert relative_error(checkpoints, wanted[2]) <= bar


@pytest.mark.parametrize("name", ["dense", "packed", "packed, v first"])
def test_nothing_else_changes(name):
    arguments = call(**CALLS[name])
    for x, y in zip(
        jax_kda.kda_prefill(**arguments),
        jax_kda.kda_prefill(**arguments, checkpoint_every=64)[:2],
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(x, "f4"), np.asarray(y, "f4"))


@pytest.mark.parametrize("regime", ["production", "long", "unbounded"])
def test_a_call_goes_on_from_a_checkpoint(regime):
    inputs = make_inputs(regime, B=1, T=330, H=1, HV=2, K=16, V=8, dtype="float32")
    o, state, checkpoints = jax_kda.kda_prefill(**inputs, checkpoint_every=128)
    tail = {name: inputs[name][:, 256:] for name in ("q", "k", "v", "g", "beta")}
    resumed = jax_kda.kda_prefill(**inputs | tail | {"initial_state": checkpoints[1:2]})
    assert relative_error(resumed[0], o[:, 256:]) <= 1e-5
    assert relative_error(resumed[1], state) <= 1e-5


def test_where_a_sequences_checkpoints_lie():
    bounds = np.cumsum([0, *PACKED])
    for cu_seqlens in (bounds, bounds.astype(np.int32), jnp.asarray(bounds)):
        offsets = jax_kda.checkpoint_offsets(cu_seqlens, 64)
        assert isinstance(offsets, jax.Array if isinstance(cu_seqlens, jax.Array) else np.ndarray)
        assert offsets.dtype == np.int32
        assert offsets.tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    traced = jit(lambda x: jax_kda.checkpoint_offsets(x, 64))(bounds)
    np.testing.assert_array_equal(traced, offsets)
    arguments = call(**CALLS["packed"])
    _, _, packed = jax_kda.kda_prefill(**arguments, checkpoint_every=64)
    for n, (begin, end) in enumerate(itertools.pairwise(bounds)):
        part = {name: arguments[name][:, begin:end] for name in ("q", "k", "v", "g", "beta")}
        part["initial_state"] = arguments["initial_state"][n : n + 1]
        alone = {name: x for name, x in arguments.items() if name != "cu_seqlens"} | part
        _, _, wanted = jax_kda.kda_prefill(**alone, checkpoint_every=64)
        assert relative_error(packed[offsets[n] : offsets[n + 1]], wanted) <= 1e-6
    assert not np.asarray(packed)[offsets[-1] :].any()


@pytest.mark.parametrize("offsets", [[40, 10, 300, 20], [-5, 2**31 - 1, -(2**31), 400], [300, 300, 300, 299]])
def test_wrong_offsets_are_safe(offsets):
    arguments = call(**CALLS["packed, short"]) | {"cu_seqlens": jnp.asarray(offsets, jnp.int32)}
    _, _, checkpoints = jax_kda.kda_prefill(**arguments, checkpoint_every=64)
    assert checkpoints.shape[0] == 4


# ---- pools


@pytest.mark.parametrize("lengths", [None, (70, 0, 130)])
@pytest.mark.parametrize("operation", [jax_kda.kda_prefill, jax_kda.kda_reference])
def test_checkpoints_with_a_pool(lengths, operation):
    arguments = call(B=3 if lengths is None else 1, T=200, lengths=lengths)
    states = arguments.pop("initial_state")
    pool = np.concatenate([states[2:], np.full_like(states, np.nan), states[:1]])
    places = np.array([4, 17, 0], np.int32)  # the second is a padding slot
    o, new_pool, checkpoints = operation(
        **arguments, initial_state=pool, state_indices=places, checkpoint_every=64
    )
    start = np.stack([states[0], np.zeros_like(states[1]), states[2]])
    _, final, wanted = numpy_recurrence(**arguments, initial_state=start, checkpoint_every=64)
    if lengths is None:
        wanted[3:6] = 0
    assert relative_error(checkpoints, wanted) <= 1e-5
    assert relative_error(np.asarray(new_pool)[[4, 0]], final[[0, 2]]) <= 1e-5
    assert np.isfinite(np.asarray(o)).all()


# ---- transformations


@pytest.mark.parametrize("name", ["dense", "packed", "packed, v first"])
def test_vmap(name):
    arguments = call(**CALLS[name])
    x, rest = arrays(arguments), options(arguments)
    other = {name: x if name == "cu_seqlens" else (x * 0.5).astype(x.dtype) for name, x in x.items()}
    if "cu_seqlens" in other:
        other["cu_seqlens"] = np.array([0, 0, 200, 264, 264, 300, 300, 480], np.int32)
    one = jit(kda(64, rest))
    wanted = jax.tree.map(lambda *y: jnp.stack(y), one(x), one(other))
    got = jit(jax.vmap(kda(64, rest)))({name: np.stack([x[name], other[name]]) for name in x})
    close(got, wanted, atol=2e-2 if rest.get("state_v_first") else 2e-5)


def loss(results):
    return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in results if y is not None)


@pytest.mark.parametrize("name", ["dense", "no state", "state_v_first", "packed", "packed, no state"])
def test_gradients(name):
    """Of everything, and of the checkpoints alone, against those of the token recurrence."""
    arguments = call(**CALLS[name])
    x, rest = arrays(arguments), options(arguments)
    offsets = {"cu_seqlens": x.pop("cu_seqlens")} if "cu_seqlens" in x else {}
    for which in (slice(None), slice(2, 3)):

        def function(operation, x, which=which):
            return loss(operation(**x, **offsets, **rest, checkpoint_every=64)[which])

        got, wanted = (
            jit(jax.grad(lambda x, run=run: function(run, x)))(x)
            for run in (jax_kda.kda_prefill, jax_kda.kda_reference)
        )
        close(got, wanted, rtol=2e-3, atol=2e-4)


def test_shardings():
    for name, shape in (("dense", (2, 2)), ("packed", (1, 2))):
        arguments = call(**CALLS[name])
        x, rest = arrays(arguments), options(arguments)
        wanted = jax_kda.kda_prefill(**arguments, checkpoint_every=64)
        function = jit(kda(64, rest))
        over = mesh(shape=shape)
        assert collectives(function, place(x, over)) == []
        got = function(place(x, over))
        close(got, wanted)
        spec = RESULTS[2] if name == "dense" else P(None, "y")
        assert got[2].sharding.is_equivalent_to(NamedSharding(over, spec), 4)
        with jax.set_mesh(mesh(AxisType.Explicit, shape)) as _:
            explicit = mesh(AxisType.Explicit, shape)
            close(jit(kda(64, rest))(place(x, explicit)), wanted)


def test_a_query_head_for_several_value_heads_and_rows_with_a_gate_each():
    for H, per_row_gate in ((1, False), (2, True)):
        problem = contract.check(**call(B=4, T=64, H=H, gate="safe"), checkpoint_every=64)
        rule, factors = partitioning._shardy_rule(problem.options, H, 4, per_row_gate)
        result = rule.split("->")[1].split(",")[2].strip()
        assert result == ("b c w k v" if H == 1 else "b c (h u) k v")
        assert "c" in factors["need_replication_factors"]


def test_shard_map():
    arguments = call(**CALLS["dense"])
    x, rest = arrays(arguments), options(arguments)
    specs = {name: AXES[name] for name in x}
    mapped = jit(jax.shard_map(kda(64, rest), mesh=mesh(), in_specs=(specs,), out_specs=RESULTS))
    assert collectives(mapped, place(x, mesh())) == []
    close(mapped(x), jax_kda.kda_prefill(**arguments, checkpoint_every=64))


def test_export_with_symbolic_sizes():
    arguments = call(**CALLS["packed"])
    x, rest = arrays(arguments), options(arguments)
    T, N = jax.export.symbolic_shape("T, N")

    def symbolic(name):
        first = {"cu_seqlens": (N + 1,), "initial_state": (N,)}.get(name, x[name].shape[:1])
        if name in ("q", "k", "v", "g", "beta"):
            first = (1, T)
        return jax.ShapeDtypeStruct((*first, *x[name].shape[len(first) :]), x[name].dtype)

    exported = jax.export.export(
        jax.jit(kda(64, rest)), platforms=["cpu", "cuda"], disabled_checks=jax_kda.export_checks()
    )({name: symbolic(name) for name in x})
    close(jax.export.deserialize(exported.serialize()).call(x), kda(64, rest)(x))

    arguments = call(**CALLS["dense"])
    x = arrays(arguments)
    B, T = jax.export.symbolic_shape("B, T")
    sizes = {name: (B,) if name == "initial_state" else (B, T) for name in x}
    exported = jax.export.export(jax.jit(kda(64, {})))(
        {
            name: jax.ShapeDtypeStruct((*sizes[name], *y.shape[len(sizes[name]) :]), y.dtype)
            for name, y in x.items()
        }
    )
    close(exported.call(x), kda(64, {})(x))


# ---- what is emitted, and what refused


def test_the_custom_call(cuda_build):
    def lines(every, **arguments):
        arguments = call(B=2, T=200, K=128, V=128, dtype="bfloat16", **arguments)
        x, rest = arrays(arguments), options(arguments)
        traced = jax.jit(lambda x: jax_kda.kda_prefill(**x, **rest, checkpoint_every=every)).trace(x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return [line for line in text.splitlines() if "custom_call @jax_kda" in line]

    (line,) = lines(64)
    assert "checkpoint_every = 64 : i32" in line
    assert "tensor<2x3x4x128x128xf32>)" in line
    (line,) = lines(128, state="bfloat16", output_final_state=False)
    assert "checkpoint_every = 128 : i32" in line
    assert "tensor<2x1x4x128x128xbf16>)" in line
    (line,) = lines(None)
    assert "checkpoint_every = 0 : i32" in line
    assert "tensor<0xf32>)" in line


@pytest.mark.parametrize("route", [r.value for r in jax_kda.Route if r is not jax_kda.Route.XLA])
def test_every_route_may_have_them(cuda_build, route):
    arguments = call(B=2, T=200, K=128, V=128, dtype="bfloat16")
    decision = jax_kda.explain_route(**arguments, checkpoint_every=64, route=route, device="cuda")
    assert decision.route.value == route
    auto = jax_kda.explain_route(**arguments, device="cuda")
    assert jax_kda.explain_route(**arguments, checkpoint_every=64, device="cuda").route is auto.route


@pytest.mark.parametrize(
    ("every", "error", "message"),
    [
        (
            0,
            ValueError,
            r"checkpoint_every: got 0; allowed: a positive multiple of 64 below 2\*\*31\. Note: ",
        ),
        (-64, ValueError, "checkpoint_every: got -64; allowed"),
        (32, ValueError, "checkpoint_every: got 32; allowed"),
        (100, ValueError, "checkpoint_every: got 100; allowed"),
        (2**31, ValueError, "checkpoint_every: got 2147483648; allowed"),
        (64.0, TypeError, "checkpoint_every: got float; allowed: None or a Python integer"),
        (True, TypeError, "checkpoint_every: got bool; allowed"),
        (np.zeros(1, np.int32), TypeError, "checkpoint_every: got ndarray; allowed"),
    ],
)
def test_what_is_refused(every, error, message):
    arguments = call(T=64)
    for operation in (jax_kda.kda_prefill, jax_kda.kda_reference, jax_kda.explain_route):
        with pytest.raises(error, match=message):
            operation(**arguments, checkpoint_every=every)
    with pytest.raises(error, match=message):
        jax_kda.checkpoint_offsets([0, 64], every)


def test_numpy_integers_are_integers():
    assert jax_kda.kda_prefill(**call(T=64), checkpoint_every=np.int64(64))[2].shape[0] == 2
