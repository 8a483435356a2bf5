"""JAX's transformations of the operation, on one device: each against plain calls of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import arrays, call, jit, options
from jax.test_util import check_grads

import jax_kda
from jax_kda import primitive, routing
from jax_kda.contract import Options

TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def close(got, wanted, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **TOLERANCE | tolerance), got, wanted)


def stacked(count, **arguments):
    """`count` different calls: their arrays stacked, the other options, and the calls themselves."""
    calls = [call(seed=seed, **arguments) for seed in range(count)]
    together = {name: np.stack([each[name] for each in calls]) for name in arrays(calls[0])}
    return together, options(calls[0]), calls


def each(calls):
    return jax.tree.map(lambda *x: jnp.stack(x), *(jax_kda.kda_prefill(**arguments) for arguments in calls))


def kda(rest):
    return lambda x: jax_kda.kda_prefill(**x, **rest)


# ---- vmap


@pytest.mark.parametrize(
    "arguments",
    [
        {"gate": "safe"},
        {"B": 1, "gate": "safe", "state_v_first": True, "lengths": (3, 4)},
    ],
    ids=["dense", "packed"],
)
def test_vmap_of_everything(arguments):
    together, rest, calls = stacked(3, **arguments)
    if "lengths" in arguments:
        together["cu_seqlens"] = np.array([[0, 3, 7], [2, 2, 6], [1, 6, 7]], np.int32)
        calls = [c | {"cu_seqlens": o} for c, o in zip(calls, together["cu_seqlens"], strict=True)]
    close(jit(jax.vmap(kda(rest)))(together), each(calls))


@pytest.mark.parametrize(
    "shared", [("q",), ("q", "k", "v", "g", "beta"), ("A_log",), ("dt_bias", "initial_state")]
)
def test_vmap_with_arguments_left_whole(shared):
    together, rest, calls = stacked(2, gate="softplus")
    axes = {name: None if name in shared else 0 for name in together}
    together |= {name: calls[0][name] for name in shared}
    calls = [c | {name: calls[0][name] for name in shared} for c in calls]
    close(jit(jax.vmap(kda(rest), in_axes=(axes,)))(together), each(calls))


def test_vmap_over_any_axis_and_back():
    together, rest, calls = stacked(2)
    moved = {name: np.moveaxis(x, 0, 2) for name, x in together.items()}
    o, state = jit(jax.vmap(kda(rest), in_axes=2, out_axes=(1, -1)))(moved)
    close((jnp.moveaxis(o, 1, 0), jnp.moveaxis(state, -1, 0)), each(calls))


def test_nested_vmap():
    """Twice over the gates, once of them with gates of its own, as in a sweep."""
    together, rest, calls = stacked(2, gate="safe")
    gate = {name: together.pop(name) for name in ("A_log", "dt_bias")}

    def inner(x, gate):
        return jax.vmap(lambda x: jax_kda.kda_prefill(**x, **gate, **rest))(x)

    o, _ = jit(jax.vmap(inner, in_axes=(None, 0)))(together, gate)
    for i in range(2):
        for j in range(2):
            mixed = calls[j] | {name: calls[i][name] for name in ("A_log", "dt_bias")}
            close(o[i, j], jax_kda.kda_prefill(**mixed)[0])


def test_vmap_without_final_state():
    together, rest, calls = stacked(2, state=None, output_final_state=False)
    o, none = jax.vmap(kda(rest))(together)
    assert none is None
    close(o[1], jax_kda.kda_prefill(**calls[1])[0])


# ---- derivatives


def loss(rest, of=jax_kda.kda_prefill):
    """A scalar that depends on every output, unevenly."""

    def function(x):
        o, state = of(**x, **rest)
        return sum(
            jnp.vdot(y, jnp.cos(jnp.arange(y.size, dtype=y.dtype))) for y in (o.ravel(), state.ravel())
        )

    return function


DIFFERENTIATED = {
    "log": {},
    "softplus": {"gate": "softplus", "use_qk_l2norm_in_kernel": True},
    "safe": {"gate": "safe", "use_beta_sigmoid_in_kernel": True, "state_v_first": True},
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_are_those_of_the_reference(name):
    arguments = call(**DIFFERENTIATED[name])
    x, rest = arrays(arguments), options(arguments)
    got = jit(jax.grad(loss(rest)))(x)
    wanted = jit(jax.grad(loss(rest, jax_kda.kda_reference)))(x)
    close(got, wanted, rtol=1e-3, atol=1e-5)


def test_gradients_of_a_packed_call():
    """The offsets are traced, as in a training step."""
    arguments = call(B=1, gate="softplus", lengths=(2, 0, 4))
    x, rest = arrays(arguments), options(arguments)
    offsets = x.pop("cu_seqlens")

    def gradient(of):
        return jit(jax.grad(lambda x, offsets: loss(rest, of)(x | {"cu_seqlens": offsets})))(x, offsets)

    got = gradient(jax_kda.kda_prefill)
    close(got, gradient(jax_kda.kda_reference), rtol=1e-3, atol=1e-5)
    assert not np.any(got["v"][:, 6:])  # a row of no sequence


def test_finite_differences():
    arguments = call(B=1, T=3, H=1, HV=1, K=2, V=2, gate="safe", bias=True)
    x, rest = arrays(arguments), options(arguments)
    check_grads(jax.jit(loss(rest)), (x,), order=1, modes=["rev"], rtol=2e-2, atol=2e-2, eps=1e-2)


def test_vmap_of_grad_and_grad_of_vmap():
    together, rest, calls = stacked(2, gate="softplus")
    gate = {name: calls[0][name] for name in ("A_log", "dt_bias")}  # shared: its gradient is summed
    for name in gate:
        together.pop(name)

    def function(x, gate):
        return loss(rest)(x | gate)

    plain = jit(jax.grad(function, (0, 1)))
    wanted = [plain({n: c[n] for n in together}, gate) for c in calls]
    wanted = jax.tree.map(lambda *g: jnp.stack(g), *wanted)
    close(jit(jax.vmap(jax.grad(function, (0, 1)), (0, None)))(together, gate), wanted, rtol=1e-4, atol=1e-5)

    summed = jax.grad(lambda x, gate: jax.vmap(function, (0, None))(x, gate).sum(), (0, 1))
    of_x, of_gate = jit(summed)(together, gate)
    close(of_x, wanted[0], rtol=1e-4, atol=1e-5)
    close(of_gate, jax.tree.map(lambda g: g.sum(0), wanted[1]), rtol=1e-4, atol=1e-5)


def test_the_gradient_of_an_empty_batch():
    arguments = call(B=0, gate="safe")
    x, rest = arrays(arguments), options(arguments)
    gradient = jax.grad(loss(rest))(x)
    assert {name: g.shape for name, g in gradient.items()} == {name: value.shape for name, value in x.items()}
    assert not np.any(gradient["A_log"])


def test_reverse_over_reverse():
    arguments = call(B=1, T=3, H=1, HV=1, K=2, V=2, state=None)
    x = arrays(arguments)

    def twice(of):
        first = jax.grad(lambda v: jnp.sum(of(**x | {"v": v})[0] ** 2))
        return jit(jax.grad(lambda v: jnp.sum(jnp.sin(first(v)))))(x["v"])

    close(twice(jax_kda.kda_prefill), twice(jax_kda.kda_reference), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "forward",
    [lambda f, x: jax.jvp(f, (x,), (x,)), lambda f, x: jax.jacfwd(f)(x), lambda f, x: jax.hessian(f)(x)],
)
def test_forward_mode_says_that_it_is_not_there(forward):
    arguments = call(B=1, T=2, H=1, HV=1)
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
        forward(lambda v: jax_kda.kda_prefill(**arguments | {"v": v})[0], arguments["v"])


def test_remat_gives_the_same_gradient():
    arguments = call(gate="safe")
    x, rest = arrays(arguments), options(arguments)
    close(jit(jax.grad(jax.checkpoint(loss(rest))))(x), jit(jax.grad(loss(rest)))(x), rtol=1e-5)


def test_only_the_operands_are_saved_for_the_backward_pass():
    arguments = call(gate="safe")
    x, rest = arrays(arguments), options(arguments)
    _, transpose = jax.vjp(kda(rest), x)
    saved = sum(leaf.size for leaf in jax.tree.leaves(transpose) if hasattr(leaf, "size"))
    assert saved <= sum(operand.size for operand in x.values()) + 16


# ---- control flow and dtypes


def test_scan_carries_the_state():
    together, rest, calls = stacked(3, gate="safe")
    gate = {name: calls[0][name] for name in ("A_log", "dt_bias")}
    for name in (*gate, "initial_state"):
        together.pop(name)

    def step(state, x):
        o, state = jax_kda.kda_prefill(**x, **gate, **rest, initial_state=state)
        return state, o

    state, outputs = jit(lambda s, x: jax.lax.scan(step, s, x))(calls[0]["initial_state"], together)
    running = calls[0]["initial_state"]
    for i in range(3):
        running, o = step(running, {name: x[i] for name, x in together.items()})
        close(outputs[i], o)
    close(state, running)


def test_while_and_cond():
    arguments = call()
    first = arguments.pop("initial_state")

    def body(carry):
        i, state = carry
        return i + 1, jax_kda.kda_prefill(**arguments, initial_state=state)[1]

    _, state = jit(lambda s: jax.lax.while_loop(lambda c: c[0] < 2, body, (0, s)))(first)
    close(state, body(body((0, first)))[1])
    chosen = jit(lambda c, s: jax.lax.cond(c, lambda s: body((0, s))[1], lambda s: s, s))
    close(chosen(True, first), body((0, first))[1])
    close(chosen(False, first), first)


def test_ahead_of_time_compilation():
    arguments = call()
    compiled = jit(kda({})).lower(arguments).compile()
    close(compiled(arguments), jax_kda.kda_prefill(**arguments))


def test_jit_lowers_once_for_equal_options(monkeypatch):
    chosen = []
    choose = routing.choose
    monkeypatch.setattr(routing, "choose", lambda *args: chosen.append(args) or choose(*args))
    function = jit(lambda x: jax_kda.kda_prefill(**x, scale=0.123))
    for seed in range(3):
        function(call(B=3, seed=seed))
    assert len(chosen) == 1


def test_x64_mode():
    arguments = call(B=1, lengths=(3, 4), state="bfloat16")
    wanted = jax_kda.kda_prefill(**arguments)
    with jax.enable_x64(True):
        offsets = jnp.asarray(arguments["cu_seqlens"], jnp.int64)
        got = jax_kda.kda_prefill(**arguments | {"cu_seqlens": offsets})
        assert offsets.dtype == jnp.int64
    assert [x.dtype for x in got] == [x.dtype for x in wanted]
    close(jax.tree.map(lambda x: x.astype("f4"), got), jax.tree.map(lambda x: x.astype("f4"), wanted))


def test_debug_nans():
    arguments = call(B=1, lengths=(3, 3))
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name][:, 6] = np.nan  # in no sequence: must not show
    with jax.debug_nans(True):
        o, _ = jax_kda.kda_prefill(**arguments)
        assert not np.any(o[:, 6])
        arguments["v"][0, 1, 0, 0] = np.nan
        with pytest.raises(FloatingPointError):
            jax_kda.kda_prefill(**arguments)


def test_disable_jit():
    arguments = call(B=1, T=2, H=1, HV=1, K=2, V=2)
    with jax.disable_jit():
        got = jax_kda.kda_prefill(**arguments)
    close(got, jax_kda.kda_prefill(**arguments))


def test_the_primitive_alone():
    """What the layers bind, for whoever reads a jaxpr."""
    arguments = call(state=None)
    jaxpr = str(jax.make_jaxpr(kda({}))(arguments))
    assert "kda_prefill" in jaxpr
    operands = [arguments[name] for name in ("q", "k", "v", "g", "beta")]
    o, state = primitive.kda_prefill_p.bind(*operands, options=Options(scale=8**-0.5))
    wanted = jax_kda.kda_prefill(**arguments)
    close((o, state[:, 0]), wanted)
