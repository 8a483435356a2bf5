"""The chunk form, through the public call on the XLA route, against the NumPy recurrence."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import numpy_recurrence, relative_error

import jax_kda
from jax_kda import chunked
from jax_kda.regimes import REGIMES, make_inputs

run = functools.partial(jax_kda.kda_prefill, route="xla")

BARS = {"collinear": 2e-4, "unbounded": 2e-4}  # float32, relative; the others 1e-5
ARRAYS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
TOKEN_ARRAYS = ("q", "k", "v", "g", "beta")


def expect_oracle(inputs: dict[str, Any], bar: float, state_bar: float | None = None) -> tuple[Any, Any]:
    want_o, want_state = numpy_recurrence(**inputs)
    o, state = run(**inputs)
    assert o.dtype == inputs["v"].dtype
    assert relative_error(o, want_o) <= bar
    if want_state is not None:
        assert relative_error(state, want_state) <= (bar if state_bar is None else state_bar)
    return o, state


def bits(x: Any) -> bytes:
    return np.asarray(x).tobytes()


def small(regime: str = "slow", B: int = 1, T: int = 100, **keywords: Any) -> dict[str, Any]:
    """Two value heads on one query/key head, small enough to compile and judge in a moment."""
    return make_inputs(regime, B, T, 1, 2, K=16, V=12, **{"dtype": "float32"} | keywords)


def changed(inputs: dict[str, Any], tokens: Any, value: Any = None, seed: int = 9) -> dict[str, Any]:
    """These inputs with other tokens in some places: `value`, or those of another seed."""
    other = make_inputs("slow", 1, inputs["q"].shape[1], 1, 2, K=16, V=12, dtype="float32", seed=seed)
    result = dict(inputs)
    for name in TOKEN_ARRAYS:
        result[name] = inputs[name].copy()
        result[name][:, tokens] = other[name][:, tokens] if value is None else value
    return result


# ---- accuracy


@pytest.mark.parametrize("regime", REGIMES)
def test_float32(regime: str) -> None:
    expect_oracle(make_inputs(regime, 2, 150, 1, 2, dtype="float32"), BARS.get(regime, 1e-5))


@pytest.mark.parametrize("regime", REGIMES)
def test_bfloat16(regime: str) -> None:
    # The arithmetic is float32 here too: what is left is the rounding of o itself.
    expect_oracle(make_inputs(regime, 2, 150, 1, 2), 3e-3, BARS.get(regime, 1e-5))


@pytest.mark.parametrize("regime", ["long", "none"])
def test_float32_over_thousands_of_tokens(regime: str) -> None:
    expect_oracle(make_inputs(regime, 1, 4096, 1, dtype="float32"), 1e-5)


def test_one_key_throughout() -> None:
    inputs = make_inputs("none", 1, 150, 1, 2, dtype="float32", allow_neg_eigval=True)
    inputs["k"] = np.broadcast_to(inputs["k"][:, :1], inputs["k"].shape).copy()
    inputs["beta"] = np.full_like(inputs["beta"], 8.0)  # doubled: every write overshoots to the other side
    expect_oracle(inputs, 2e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"g_dtype": "bfloat16", "beta_dtype": "bfloat16"},
        {"allow_neg_eigval": True, "state_v_first": True},
        {"initial_state": False},
        {"state_dtype": "bfloat16"},
        {"output_final_state": False},
        {"lengths": (3, 40, 0, 57), "state_v_first": True, "state_dtype": "bfloat16"},
        {"lengths": (3, 40, 0, 57), "initial_state": False},
        {"lengths": (3, 40, 0, 57), "output_final_state": False},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    narrow = options.get("dtype") == "float16"
    rounded_state = options.get("state_dtype") == "bfloat16"
    _, state = expect_oracle(small(**options), 1e-3 if narrow else 1e-5, 3e-3 if rounded_state else 1e-5)
    if state is not None:
        assert state.dtype == ("bfloat16" if rounded_state else "float32")


@pytest.mark.parametrize("T", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_lengths(T: int) -> None:
    expect_oracle(small("production", T=T), 1e-5)


@pytest.mark.parametrize("lengths", [None, (0, 0)])
def test_no_tokens(lengths: tuple[int, ...] | None) -> None:
    inputs = small(T=0, lengths=lengths)
    o, state = run(**inputs)
    assert o.shape == (1, 0, 2, 12)
    assert bits(state) == bits(inputs["initial_state"])


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 80),
    H=st.integers(1, 3),
    group=st.integers(1, 3),
    K=st.integers(1, 40),
    V=st.integers(1, 40),
    regime=st.sampled_from(REGIMES),
    seed=st.integers(0, 99),
)
def test_any_shape(B: int, T: int, H: int, group: int, K: int, V: int, regime: str, seed: int) -> None:
    inputs = make_inputs(regime, B, T, H, H * group, K, V, dtype="float32", seed=seed)
    expect_oracle(inputs, BARS.get(regime, 1e-5))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    cuts=st.lists(st.integers(0, 97), min_size=6, max_size=6).map(sorted),
    regime=st.sampled_from(("production", "slow")),
)
def test_any_offsets(cuts: list[int], regime: str) -> None:
    inputs = small(regime, T=97, lengths=(0,) * 5) | {"cu_seqlens": np.array(cuts, np.int32)}
    want_o, want_state = numpy_recurrence(**inputs)
    outside = np.r_[0 : cuts[0], cuts[-1] : 97]
    o, state = run(**changed(inputs, outside, np.nan))
    assert relative_error(o, want_o) <= 1e-5
    assert not np.asarray(o)[:, outside].any()
    assert relative_error(state, want_state) <= 1e-5
    for n in np.flatnonzero(np.diff(cuts) == 0):
        assert bits(state[n]) == bits(inputs["initial_state"][n])


def test_packed_equals_separate() -> None:
    inputs = small("slow", T=97, lengths=(40, 0, 57))
    o, state = run(**inputs)
    for n, (begin, end) in enumerate([(0, 40), (40, 40), (40, 97)]):
        alone = {name: x for name, x in inputs.items() if name != "cu_seqlens"}
        alone |= {name: inputs[name][:, begin:end] for name in TOKEN_ARRAYS}
        alone_o, alone_state = run(**alone | {"initial_state": inputs["initial_state"][n : n + 1]})
        assert relative_error(o[:, begin:end], alone_o) <= 1e-6
        assert relative_error(state[n : n + 1], alone_state) <= 1e-6


def test_an_empty_sequence_passes_any_bits_through() -> None:
    inputs = small(T=100, lengths=(0, 99, 0))
    state = inputs["initial_state"]
    state[0, 0, 0, :4] = np.nan, np.inf, -0.0, 1e-42
    state[2] = np.frombuffer(np.random.default_rng(0).bytes(state[2].nbytes), np.float32).reshape(
        state[2].shape
    )
    o, final = run(**inputs)
    assert bits(final[0]) == bits(state[0])
    assert bits(final[2]) == bits(state[2])
    assert np.isfinite(o).all()


# ---- what a token may see


def test_no_bit_depends_on_later_tokens() -> None:
    inputs = small("slow")
    o = np.asarray(run(**inputs)[0])
    for t in (1, 31, 32, 33, 50, 99):
        for value in (None, 1e18, np.nan):
            other = np.asarray(run(**changed(inputs, np.s_[t:], value))[0])
            assert bits(other[:, :t]) == bits(o[:, :t]), (t, value)
            assert bits(other[:, t:]) != bits(o[:, t:])


def test_no_bit_depends_on_later_chunks_prepared_together() -> None:
    T = chunked.CHUNK * (chunked.SPAN + 2)  # two spans of more than one group each
    inputs = small("slow", T=T)
    o = np.asarray(run(**inputs)[0])
    for t in (chunked.CHUNK + 3, T // 2 - 1, T - chunked.CHUNK - 1):
        for value in (None, np.nan):
            other = np.asarray(run(**changed(inputs, np.s_[t:], value))[0])
            assert bits(other[:, :t]) == bits(o[:, :t]), (t, value)
            assert value is None or np.isnan(other[:, t:]).all()


def test_an_overflow_does_not_reach_back() -> None:
    # Without a norm a later key can be large enough for its own products to leave float32.
    inputs = small("none") | {"use_qk_l2norm_in_kernel": False}
    inputs["k"] = inputs["k"] / 8
    o = np.asarray(run(**inputs)[0])
    wild = inputs | {"k": inputs["k"].copy()}
    wild["k"][:, 20] = 1e30
    other = np.asarray(run(**wild)[0])
    assert bits(other[:, :20]) == bits(o[:, :20])
    assert not np.isfinite(other[:, 21:]).any()


def test_two_halves_equal_the_whole() -> None:
    inputs = small("slow")
    o, state = run(**inputs)
    first, second = (
        {name: inputs[name][:, part] for name in TOKEN_ARRAYS} for part in (np.s_[:37], np.s_[37:])
    )
    o1, middle = run(**inputs | first)
    o2, end = run(**inputs | second | {"initial_state": middle})
    assert relative_error(jnp.concatenate([o1, o2], axis=1), o) <= 1e-6
    assert relative_error(end, state) <= 1e-6


def test_same_call_same_bits() -> None:
    inputs = make_inputs("slow", 2, 150, 1, 2, dtype="float32")
    first = run(**inputs)
    for _ in range(5):
        again = run(**inputs)
        assert [bits(x) for x in again] == [bits(x) for x in first]


def test_nan_stays_in_its_head() -> None:
    inputs = small()
    o, state = run(**inputs)
    for name in ("v", "g", "beta", "initial_state"):
        broken = inputs | {name: inputs[name].copy()}
        if name == "initial_state":
            broken[name][0, 1, 3, 3] = np.nan
        else:
            broken[name][0, 10, 1] = np.nan
        broken_o, broken_state = run(**broken)
        assert bits(broken_o[:, :, 0]) == bits(o[:, :, 0])
        assert bits(broken_state[:, 0]) == bits(state[:, 0])
        assert np.isnan(broken_o[:, 40:, 1]).any()
        assert np.isnan(broken_state[:, 1]).any()


def test_nan_stays_in_its_sequence() -> None:
    inputs = small(T=100, lengths=(20, 30, 0, 45))
    o, state = run(**inputs)
    broken_o, broken_state = run(**changed(inputs, np.s_[20:50], np.nan))
    others = np.r_[0:20, 50:100]
    assert bits(np.asarray(broken_o)[:, others]) == bits(np.asarray(o)[:, others])
    assert np.isnan(broken_o[:, 20:50]).all()
    assert bits(np.asarray(broken_state)[[0, 2, 3]]) == bits(np.asarray(state)[[0, 2, 3]])


@pytest.mark.parametrize(
    "offsets",
    [
        [50, 40, 30, 20, 10],
        [0, 2**31 - 1, 5, -7, 100],
        [-(2**31), -5, 0, 2**31 - 1, 2**31 - 1],
        [101, 200, 300, 400, 500],
        [-40, -30, -20, -10, -1],
    ],
    ids=str,
)
def test_any_offsets_are_safe(offsets: list[int]) -> None:
    o, state = run(**small(lengths=(0,) * 4) | {"cu_seqlens": jnp.array(offsets, jnp.int32)})
    assert np.isfinite(o).all()
    assert np.isfinite(state).all()


def test_huge_queries_and_keys_are_normalised() -> None:
    inputs = small(dtype="bfloat16")
    inputs["q"][:, 3] *= np.float32(2**100)
    inputs["k"][:, 40] *= np.float32(2**100)
    inputs["k"][:, 41] = 0
    expect_oracle(inputs, 3e-3, 1e-5)


# ---- transformations


def test_vmap_equals_a_loop() -> None:
    calls = [small(seed=seed, lengths=lengths) for seed, lengths in ((0, (30, 0, 60)), (1, (0, 1, 99)))]
    names = (*ARRAYS, "cu_seqlens")
    options = {name: x for name, x in calls[0].items() if name not in names}
    stacked = {name: np.stack([call[name] for call in calls]) for name in names}
    o, state = jax.vmap(lambda arrays: run(**arrays, **options))(stacked)
    for n, call in enumerate(calls):
        want_o, want_state = run(**call)
        assert relative_error(o[n], want_o) <= 1e-6
        assert relative_error(state[n], want_state) <= 1e-6


def test_exported_with_symbolic_sizes() -> None:
    inputs = small(lengths=(30, 0, 60))
    names = (*ARRAYS, "cu_seqlens")
    options = {name: x for name, x in inputs.items() if name not in names}
    T, N = jax.export.symbolic_shape("T, N")

    def symbolic(name: str) -> jax.ShapeDtypeStruct:
        x = inputs[name]
        if name in TOKEN_ARRAYS:
            return jax.ShapeDtypeStruct((1, T, *x.shape[2:]), x.dtype)
        first = {"cu_seqlens": N + 1, "initial_state": N}.get(name, x.shape[0])
        return jax.ShapeDtypeStruct((first, *x.shape[1:]), x.dtype)

    call = jax.jit(lambda arrays: run(**arrays, **options))
    exported = jax.export.export(call)({name: symbolic(name) for name in inputs if name in names})
    o, state = exported.call({name: inputs[name] for name in names})
    want_o, want_state = numpy_recurrence(**inputs)
    assert relative_error(o, want_o) <= 1e-5
    assert relative_error(state, want_state) <= 1e-5


def test_64_bit_mode_changes_nothing() -> None:
    inputs = small(lengths=(30, 0, 69))
    o, state = run(**inputs)
    with jax.enable_x64(True):
        wide_o, wide_state = run(**inputs)
        assert (wide_o.dtype, wide_state.dtype) == (jnp.float32, jnp.float32)
        assert bits(wide_o) == bits(o)
        assert bits(wide_state) == bits(state)


# ---- gradients


def gradient_inputs(regime: str, l2norm: bool, **keywords: Any) -> dict[str, Any]:
    inputs = make_inputs(regime, 1, 70, 1, 2, K=8, V=6, **{"dtype": "float32"} | keywords)
    inputs["use_qk_l2norm_in_kernel"] = l2norm
    if not l2norm:  # |k| near 1, as the promise without a norm has it
        inputs |= {name: inputs[name] / np.float32(8**0.5) for name in ("q", "k")}
    inputs["k"][:, [7, 40]] = 0
    inputs["q"][:, [7, 41]] = 0
    return inputs


def loss_weights(inputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.standard_normal(inputs["v"].shape), rng.standard_normal(inputs["initial_state"].shape)


def gradients(inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    arrays = {name: jnp.asarray(inputs[name]) for name in ARRAYS if name in inputs}
    offsets = inputs.get("cu_seqlens")
    options = {name: x for name, x in inputs.items() if name not in (*arrays, "cu_seqlens")}
    weights = [w.astype(np.float32) for w in loss_weights(inputs)]
    gradient = compiled_gradient(tuple(options.items()))
    return {name: np.asarray(x) for name, x in gradient(arrays, offsets, weights).items()}


@functools.cache
def compiled_gradient(options: tuple[tuple[str, Any], ...]) -> Any:
    """One function for all regimes with the same options, not optimised: compiling is what takes the time
    here.
    """

    def loss(arrays: dict[str, jax.Array], offsets: Any, weights: list[jax.Array]) -> jax.Array:
        results = run(**arrays, cu_seqlens=offsets, **dict(options))
        return sum(jnp.vdot(x, w) for x, w in zip(results, weights, strict=True))

    return jax.jit(jax.grad(loss), compiler_options={"xla_backend_optimization_level": 0})


def expect_finite_differences(inputs: dict[str, Any], directions: int = 6) -> dict[str, np.ndarray]:
    """Directional derivatives of the float64 recurrence, central differences, against the chunk form's
    gradients.

    Half the directions leave out the zero keys and queries: their normalisation has a slope of 1000, and next
    to it nothing else would be seen.
    """
    got = gradients(inputs)
    weights = loss_weights(inputs)

    def loss(name: str, x: np.ndarray) -> float:
        return sum(
            np.vdot(y, w) for y, w in zip(numpy_recurrence(**inputs | {name: x}), weights, strict=True)
        )

    for name, gradient in got.items():
        assert np.isfinite(gradient).all(), f"{name}: the gradient is not finite"
        rng = np.random.default_rng(len(name))
        x = inputs[name].astype(np.float64)
        pairs: list[list[tuple[float, float]]] = [[], []]
        for n in range(directions):
            d = rng.standard_normal(x.shape)
            if n % 2 and name in ("q", "k"):
                d[:, [7, 40, 41]] = 0
            h = 1e-6
            pairs[n % 2].append(
                ((loss(name, x + h * d) - loss(name, x - h * d)) / (2 * h), np.vdot(gradient, d))
            )
        for group in pairs:
            want, found = np.array(group).T
            error = np.linalg.norm(found - want) / max(np.linalg.norm(want), 1e-6)
            assert error <= 1e-3, f"{name}: off by {error:.1e}"
    return got


@pytest.mark.parametrize("l2norm", [True, False], ids=["l2norm", "no norm"])
@pytest.mark.parametrize("regime", REGIMES)
def test_gradients(regime: str, l2norm: bool) -> None:
    expect_finite_differences(gradient_inputs(regime, l2norm))


def test_gradients_packed() -> None:
    inputs = gradient_inputs("slow", True, lengths=(33, 0, 30))
    for name in TOKEN_ARRAYS:
        inputs[name] = np.roll(inputs[name], 3, axis=1)
    inputs["cu_seqlens"] = inputs["cu_seqlens"] + 3
    got = expect_finite_differences(inputs)
    outside = np.r_[0:3, 66:70]
    _, state_weights = loss_weights(inputs)
    np.testing.assert_array_equal(got["initial_state"][1], state_weights[1].astype(np.float32))
    # Whatever stands outside the sequences has no gradient, and no part in any other.
    broken = dict(inputs)
    for name in TOKEN_ARRAYS:
        assert not got[name][:, outside].any()
        broken[name] = inputs[name].copy()
        broken[name][:, outside] = np.nan
    for name, gradient in gradients(broken).items():
        kept = gradient[:, 3:66] if name in TOKEN_ARRAYS else gradient
        want = got[name][:, 3:66] if name in TOKEN_ARRAYS else got[name]
        assert bits(kept) == bits(want)


def test_gradient_memory_is_linear_in_T() -> None:
    inputs = small(T=16 * chunked.CHUNK * chunked.SPAN)
    shapes = {name: jax.ShapeDtypeStruct(inputs[name].shape, inputs[name].dtype) for name in ARRAYS}
    options = {name: x for name, x in inputs.items() if name not in ARRAYS}
    gradient = jax.jit(jax.grad(lambda arrays: run(**arrays, **options)[0].sum()))
    analysis = gradient.lower(shapes).compile().memory_analysis()
    assert analysis is not None
    # A few copies of the operands, and one state a span.
    assert analysis.temp_size_in_bytes < 3 * sum(inputs[name].nbytes for name in TOKEN_ARRAYS)
