"""Decode and state pools: against the token recurrence, under JAX's transformations, and what a CUDA lowering
emits for them.
"""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from calls import arrays, call, jit, options
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import numpy_recurrence, relative_error
from test_lowering import lower, mesh

import jax_kda
from jax_kda import ffi
from jax_kda.regimes import REGIMES, make_inputs
from jax_kda.routing import Route

TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
TOKENS = ("q", "k", "v", "g", "beta")


def close(got, wanted, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **TOLERANCE | tolerance), got, wanted)


def decode(arguments, **more):
    """`kda_decode` of a call's arguments under jit."""
    rest = options(arguments) | more
    return jit(lambda x: jax_kda.kda_decode(**x, **rest))(arrays(arguments))


def pooled(places, size=5, seed=0, **arguments):
    """A call whose B = len(places) sequences name their states in a pool of this size."""
    keywords = call(B=len(places), T=3, seed=seed, **arguments)
    pool = call(B=size, T=1, seed=seed + 7, **arguments)["initial_state"]
    return keywords | {"initial_state": pool, "state_indices": np.array(places, np.int32)}


def by_hand(arguments, operation):
    """What a pooled call must give: each sequence alone, from its state, put back in its place."""
    pool, places = arguments["initial_state"], arguments["state_indices"]
    rest = {name: x for name, x in arguments.items() if name not in ("state_indices", *TOKENS)}
    new_pool, outputs = np.array(pool), []
    for n, place in enumerate(places):
        tokens = {name: arguments[name][n : n + 1] for name in TOKENS}
        if 0 <= place < len(pool):
            o, state = operation(**tokens, **rest | {"initial_state": pool[place][None]})
            new_pool[place] = state[0]
        else:
            o = np.zeros_like(tokens["v"])
        outputs.append(o)
    return np.concatenate(outputs), new_pool


# ---- the numbers


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime(regime, tokens):
    inputs = make_inputs(regime, 2, tokens, 1, 2, K=16, V=8, dtype="float32")
    del inputs["output_final_state"]
    got, wanted = jax_kda.kda_decode(**inputs), numpy_recurrence(**inputs)
    bar = 2e-4 if regime in ("collinear", "unbounded") else 1e-5
    assert relative_error(got[0], wanted[0]) < bar
    assert relative_error(got[1], wanted[1]) < bar
    close(got, jax_kda.kda_reference(**inputs))


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "bfloat16", "g_dtype": "bfloat16", "gate": "softplus", "bias": False, "state": "bfloat16"},
        {"gate": "safe", "state_v_first": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
        {"dtype": "float16", "use_qk_l2norm_in_kernel": True, "scale": 0.3, "H": 1},
    ],
    ids=["narrow", "transposed", "scaled"],
)
def test_every_option(arguments):
    arguments = call(T=5, **arguments)
    o, state = decode(arguments)
    wanted_o, wanted_state = numpy_recurrence(**arguments)
    assert o.dtype == arguments["v"].dtype
    assert state.dtype == arguments["initial_state"].dtype
    assert relative_error(o, wanted_o) < (1e-5 if o.dtype == np.float32 else 4e-3)
    assert relative_error(state, wanted_state) < (1e-5 if state.dtype == np.float32 else 4e-3)


def test_the_next_step_goes_on():
    arguments = call(T=4, gate="safe")
    state, outputs = arguments["initial_state"], []
    for t in range(4):
        step = {name: arguments[name][:, t : t + 1] for name in TOKENS}
        o, state = decode(arguments | step | {"initial_state": state})
        outputs.append(o)
    close((jnp.concatenate(outputs, axis=1), state), jax_kda.kda_prefill(**arguments))


def test_named_routes():
    """route="xla" is decode's plain form; the routes of prefill say what they lack."""
    arguments = call(T=2)
    close(decode(arguments, route="xla"), decode(arguments))
    with pytest.raises(ValueError, match="'baseline_m128', but it needs a CUDA device"):
        decode(arguments, route=Route.BASELINE_M128)


def test_an_empty_batch():
    o, state = decode(call(B=0, T=2))
    assert (o.shape, state.shape) == ((0, 2, 4, 4), (0, 4, 8, 4))


# ---- pools


@pytest.mark.parametrize("operation", [jax_kda.kda_decode, jax_kda.kda_prefill, jax_kda.kda_reference])
@pytest.mark.parametrize("arguments", [{"gate": "safe"}, {"state": "bfloat16", "state_v_first": True}])
def test_pools(operation, arguments):
    arguments = pooled((3, -1, 0, 5, 2**31 - 1), **arguments)
    for n in (1, 3, 4):  # of padding slots nothing may count
        for name in TOKENS:
            arguments[name][n] = np.nan
    o, pool = operation(**arguments)
    wanted_o, wanted_pool = by_hand(arguments, operation)
    close((o, pool.astype("f4")), (wanted_o, wanted_pool.astype("f4")))
    assert pool.dtype == arguments["initial_state"].dtype
    assert not np.asarray(o)[[1, 3, 4]].any()
    for place in (1, 2, 4):
        np.testing.assert_array_equal(pool[place], arguments["initial_state"][place])
    assert (np.asarray(pool) != arguments["initial_state"])[[0, 3]].any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("operation", [jax_kda.kda_prefill, jax_kda.kda_reference])
def test_packed_prefill_into_a_pool(operation):
    lengths = (4, 0, 5, 3)
    arguments = call(B=1, T=14, gate="safe", lengths=lengths)
    pool = call(B=6, seed=3)["initial_state"]
    arguments["cu_seqlens"] += 1  # rows of no sequence before and after
    for name in TOKENS:
        arguments[name][:, 5:10] = np.nan  # of the third sequence, which is padding
    o, new_pool = operation(
        **arguments | {"initial_state": pool, "state_indices": np.array([5, 2, -1, 0], np.int64)}
    )
    wanted_o, states = jax_kda.kda_reference(**arguments | {"initial_state": pool[[5, 2, 1, 0]]})
    wanted_o = np.array(wanted_o)
    wanted_o[:, 5:10] = 0
    wanted_pool = pool.copy()
    wanted_pool[[5, 2, 0]] = states[np.array([0, 1, 3])]
    close((o, new_pool), (wanted_o, wanted_pool))
    np.testing.assert_array_equal(new_pool[np.array([1, 2, 3, 4])], pool[[1, 2, 3, 4]])


def test_the_reference_of_a_pool_in_float64():
    arguments = pooled((2, -1))
    with jax.enable_x64(True):
        o, pool = jax_kda.kda_reference(**arguments, dtype=jnp.float64)
    assert (o.dtype, pool.dtype) == (np.float64, np.float64)
    close((o, pool), by_hand(arguments, lambda **x: numpy_recurrence(**x)))


def test_a_donated_pool_is_used_up():
    arguments = pooled((1, 3))
    wanted = jax_kda.kda_decode(**arguments)
    pool = jnp.array(arguments.pop("initial_state"))

    def steps(pool, x):
        return jax.lax.fori_loop(0, 3, lambda _, p: jax_kda.kda_decode(**x, initial_state=p)[1], pool)

    step = jax.jit(lambda pool, x: jax_kda.kda_decode(**x, initial_state=pool), donate_argnums=0)
    got = step(pool, arguments)
    assert pool.is_deleted()
    close(got, wanted)
    looped = jax.jit(steps, donate_argnums=0)(got[1], arguments)
    assert got[1].is_deleted()
    one = wanted[1]
    for _ in range(3):
        one = jax_kda.kda_decode(**arguments, initial_state=one)[1]
    close(looped, one)


# ---- transformations


@pytest.mark.parametrize("shared", [(), ("initial_state", "A_log"), ("state_indices",)])
def test_vmap_of_pools(shared):
    """An index that is out of range in its own pool must not reach the next one."""
    calls = [pooled((2, 5, -1), gate="safe", seed=seed) for seed in range(2)]
    calls[1]["state_indices"] = np.array([-2, 0, 4], np.int32)
    names = (*arrays(calls[0]), "state_indices")
    rest = {name: x for name, x in calls[0].items() if name not in names}
    axes = {name: None if name in shared else 0 for name in names}
    together = {
        name: calls[0][name] if name in shared else np.stack([c[name] for c in calls]) for name in names
    }
    calls = [c | {name: calls[0][name] for name in shared} for c in calls]
    got = jit(jax.vmap(lambda x: jax_kda.kda_decode(**x, **rest), in_axes=(axes,)))(together)
    close(got, jax.tree.map(lambda *x: np.stack(x), *(by_hand(c, jax_kda.kda_decode) for c in calls)))


def test_vmap_of_pools_over_an_axis_of_no_elements():
    arguments = pooled((2, -1), gate="safe")
    names = (*arrays(arguments), "state_indices")
    rest = {name: x for name, x in arguments.items() if name not in names}
    none = {name: arguments[name][None][:0] for name in names}
    o, pools = jit(jax.vmap(lambda x: jax_kda.kda_decode(**x, **rest)))(none)
    assert (o.shape, pools.shape) == ((0, 2, 3, 4, 4), (0, 5, 4, 8, 4))


def test_vmap_without_pools():
    calls = [call(T=2, gate="softplus", seed=seed) for seed in range(2)]
    together = {name: np.stack([c[name] for c in calls]) for name in arrays(calls[0])}
    got = jit(jax.vmap(lambda x: jax_kda.kda_decode(**x, **options(calls[0]))))(together)
    close(got, jax.tree.map(lambda *x: np.stack(x), *(jax_kda.kda_decode(**c) for c in calls)))


@pytest.mark.parametrize("has_pool", [False, True])
def test_gradients(has_pool):
    arguments = pooled((3, -1), gate="safe") if has_pool else call(T=3, gate="safe")
    places = {"state_indices": arguments.pop("state_indices")} if has_pool else {}
    rest = options(arguments) | places

    def loss(of):
        def function(x):
            o, state = of(**x, **rest)
            return jnp.vdot(o, jnp.cos(jnp.arange(o.size).reshape(o.shape))) + jnp.sum(jnp.sin(state))

        return jit(jax.grad(function))(arrays(arguments))

    close(loss(jax_kda.kda_decode), loss(jax_kda.kda_reference), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_pool", [False, True])
@pytest.mark.parametrize("mapped", [False, True], ids=["automatic", "shard_map"])
def test_sharding(has_pool, mapped):
    """Heads split, and the batch too where there is no pool."""
    arguments = pooled((3, -1), gate="safe") if has_pool else call(T=3, gate="safe")
    over, rows = mesh(x=2, y=2), None if has_pool else "x"
    states = P(rows, "y")
    specs = dict.fromkeys(TOKENS, P(rows, None, "y")) | {"initial_state": states, "state_indices": P()}
    specs |= {"A_log": P("y"), "dt_bias": P("y")}
    names = (*arrays(arguments), *(("state_indices",) if has_pool else ()))
    rest = {name: x for name, x in arguments.items() if name not in names}
    specs = {name: specs[name] for name in names}
    placed = {name: jax.device_put(arguments[name], NamedSharding(over, specs[name])) for name in names}

    def function(x):
        return jax_kda.kda_decode(**x, **rest)

    if mapped:
        function = jax.shard_map(
            function, mesh=over, in_specs=(specs,), out_specs=(P(rows, None, "y"), states)
        )
    compiled = jax.jit(function).lower(placed).compile()
    assert "all-gather" not in compiled.as_text()
    got = compiled(placed)
    close(got, jax_kda.kda_decode(**arguments))
    assert got[1].sharding.is_equivalent_to(NamedSharding(over, states), 4)


# ---- errors


@pytest.mark.parametrize("operation", [jax_kda.kda_decode, jax_kda.kda_prefill])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"initial_state": None}, ValueError, "initial_state: got None"),
        (
            {"state_indices": np.zeros(3, np.int32)},
            ValueError,
            "state_indices: got shape (3,); allowed: [N] = [2]",
        ),
        (
            {"state_indices": np.zeros(2, np.float32)},
            TypeError,
            "state_indices: got float32; allowed: int32 or",
        ),
        ({"state_indices": [0, 1]}, TypeError, "state_indices: got list; allowed: an array"),
        (
            {"initial_state": np.zeros((5, 4, 8, 3), np.float32)},
            ValueError,
            "initial_state: got shape (5, 4, 8, 3); allowed: [P, HV, K, V] = [5, 4, 8, 4]. Note: a pool",
        ),
        (
            {"initial_state": np.zeros((0, 4, 8, 4), np.float32)},
            ValueError,
            "got a pool of 0 states; allowed: 1 to",
        ),
    ],
)
def test_pools_refuse(operation, change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        operation(**pooled((1, 2)) | change)


def test_a_pool_is_always_returned():
    with pytest.raises(ValueError, match="output_final_state: got False with state_indices"):
        jax_kda.kda_prefill(**pooled((1, 2)), output_final_state=False)


# ---- what CUDA gets


def kda(**arguments):
    return call(**{"K": 128, "V": 128, "dtype": "bfloat16", "T": 1} | arguments)


def aliases(emitted):
    """(result, operand) of each pair that shares a buffer."""
    return re.findall(r"output_tuple_indices = \[(\d*)\],\s*operand_index = (\d+)", emitted["line"])


def test_a_plain_call(cuda_build):
    arguments = kda(gate="safe", state="bfloat16", state_v_first=True)
    rest = options(arguments)
    (emitted,) = lower(lambda x: jax_kda.kda_decode(**x, **rest), arrays(arguments))
    assert emitted["target"] == ffi.DECODE_TARGET == "jax_kda.decode.v1"
    assert emitted["operands"] == [
        "2x1x2x128xbf16",
        "2x1x2x128xbf16",
        "2x1x4x128xbf16",
        "2x1x4x128xf32",
        "2x1x4xf32",
        "1x4xf32",
        "1x4x128xf32",
        "2x1x4x128x128xbf16",
        "0xi32",
    ]
    assert emitted["results"] == ["2x1x4x128xbf16", "2x1x4x128x128xbf16"]
    assert emitted["attributes"] == {
        "scale": "0.0883883461 : f32",
        "lower_bound": "-5.000000e+00 : f32",
        "gate": "2 : i32",
        "beta": "0 : i32",
        "l2norm": "false",
        "state_v_first": "true",
    }
    assert aliases(emitted) == [("1", "7")]


def test_a_pooled_call(cuda_build):
    arguments = kda(B=3) | {"initial_state": np.zeros((9, 4, 128, 128), "f4")}
    (emitted,) = lower(
        lambda x, i: jax_kda.kda_decode(**x, state_indices=i), arrays(arguments), np.zeros(3, "i4")
    )
    assert emitted["operands"][5:] == ["0xf32", "0xf32", "9x4x128x128xf32", "3xi32"]
    assert emitted["results"] == ["3x1x4x128xbf16", "9x4x128x128xf32"]
    assert aliases(emitted) == [("1", "7")]


def test_under_vmap_the_axis_is_folded(cuda_build):
    arguments = {name: np.stack([x] * 2) for name, x in arrays(kda(B=3)).items()}
    arguments["initial_state"] = np.zeros((2, 9, 4, 128, 128), "f4")
    call_one = jax.vmap(lambda x, i: jax_kda.kda_decode(**x, state_indices=i))
    (emitted,) = lower(call_one, arguments, np.zeros((2, 3), "i4"))
    assert emitted["operands"][0] == "6x1x2x128xbf16"
    assert emitted["operands"][7:] == ["18x4x128x128xf32", "6xi32"]


@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"K": 64}, {"V": 64}])
def test_what_the_kernel_does_not_serve(cuda_build, change):
    assert lower(lambda x: jax_kda.kda_decode(**x), arrays(kda(**change))) == []


def test_routes_on_cuda(cuda_build):
    """The plain form where it is asked for; a route of prefill's kernels, with pools as well."""
    arguments = arrays(kda())
    assert lower(lambda x: jax_kda.kda_decode(**x, route="xla"), arguments) == []
    places = np.zeros(2, "i4")
    for more in ({}, {"state_indices": places}):
        (emitted,) = lower(
            lambda x, more=more: jax_kda.kda_decode(**x, **more, route="baseline_m128"), arguments
        )
        assert emitted["target"] == ffi.PREFILL_TARGET
    (emitted,) = lower(lambda x: jax_kda.kda_prefill(**x, state_indices=places), arguments)
    assert emitted["operands"][7] == "2x1x4x128x128xf32"


def test_no_kernel_without_an_extension(no_cuda_build):
    assert lower(lambda x: jax_kda.kda_decode(**x), arrays(kda())) == []


def test_the_name_reaches_the_profiler(cuda_build):
    text = jax.jit(lambda x: jax_kda.kda_decode(**x)).trace(arrays(kda())).lower(lowering_platforms=("cuda",))
    assert "kda_decode.kernel" in text.as_text(debug_info=True)


def test_exporting(cuda_build):
    pytest.importorskip("flatbuffers")
    (B,) = jax.export.symbolic_shape("b")
    arguments = kda(gate="safe")
    rest = options(arguments)

    def symbolic(name, x):
        return jax.ShapeDtypeStruct(x.shape if name in ("A_log", "dt_bias") else (B, *x.shape[1:]), x.dtype)

    shapes = {name: symbolic(name, x) for name, x in arrays(arguments).items()}
    function = jax.jit(lambda x: jax_kda.kda_decode(**x, **rest))
    checks = jax_kda.export_checks()
    artifact = jax.export.export(function, platforms=["cpu", "cuda"], disabled_checks=checks)(shapes)
    assert "@jax_kda.decode.v1" in artifact.mlir_module()
    real = kda(B=3, gate="safe")
    got = jax.export.deserialize(artifact.serialize()).call(arrays(real))
    wanted = jax_kda.kda_decode(**real)
    close(got[1], wanted[1], rtol=1e-4, atol=1e-5)
    assert got[0].dtype == ml_dtypes.bfloat16
