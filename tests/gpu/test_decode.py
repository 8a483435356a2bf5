"""kda_decode on the device: against the float64 recurrence, in place, and over thousands of steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fault_cases import bits
from harness import (
    BAR,
    BAR_COLLINEAR,
    BAR_DOUBLED,
    DRY,
    TOKENS,
    Findings,
    Inputs,
    changed,
    on_device,
    same_bits,
    sequence,
    split,
)
from oracle import numpy_recurrence, relative_error

from jax_kda import kda_decode
from jax_kda.regimes import REGIMES, make_inputs

TARGET = "custom_call @jax_kda.decode.v1"


def inputs_of(regime: str, B: int, T: int, H: int, HV: int | None = None, **keywords: Any) -> Inputs:
    inputs = make_inputs(regime, B, T, H, HV, **keywords)
    del inputs["output_final_state"]  # decode always returns the state
    return inputs


VARIANTS: dict[str, Inputs] = {
    "dense": {"B": 3, "H": 2},
    "grouped": {"B": 2, "H": 2, "HV": 6, "state_v_first": True},
    "narrow": {"B": 3, "H": 1, "HV": 2, "state_dtype": "bfloat16", "g_dtype": "float32"},
    "narrow, transposed": {"B": 2, "H": 1, "state_dtype": "bfloat16", "state_v_first": True},
    "doubled": {"B": 2, "H": 1, "HV": 3, "beta_dtype": "float32", "allow_neg_eigval": True},
    "many": {"B": 3 if DRY else 40, "H": 1, "HV": 4},
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_regime(regime, variant, record_property):
    bar = BAR_COLLINEAR if regime == "collinear" else BAR_DOUBLED if variant == "doubled" else BAR
    with Findings(record_property) as found:
        for T in (1, 2, 3, 8):
            found.compare(kda_decode, inputs_of(regime, T=T, **VARIANTS[variant]), f"T={T}", bar)


def test_bare_options(record_property):
    """Nothing done to q, k and beta, a scale of its own."""
    inputs = inputs_of("long", 2, 4, 1, 2, beta_dtype="float32")
    inputs["k"] = (inputs["k"] / inputs["k"].dtype.type(12)).astype(inputs["k"].dtype)
    inputs["beta"] = 1 / (1 + np.exp(-inputs["beta"]))
    inputs |= {"use_qk_l2norm_in_kernel": False, "use_beta_sigmoid_in_kernel": False, "scale": 0.3}
    with Findings(record_property) as found:
        found.compare(kda_decode, inputs)


def test_the_kernel_is_what_runs():
    arrays, rest = split(inputs_of("slow", 2, 1, 1))
    text = jax.jit(lambda x: kda_decode(**x, **rest)).lower(arrays).as_text()
    assert (TARGET in text) == (not DRY)


def test_same_call_same_bits():
    pair = [on_device(inputs_of("slow", 4, 8, 2, 4, seed=seed)) for seed in (1, 2)]
    first = [kda_decode(**inputs) for inputs in pair]
    assert not same_bits(*first)
    for _ in range(2 if DRY else 20):
        for inputs, want in zip(pair, first, strict=True):
            assert same_bits(kda_decode(**inputs), want)


@pytest.mark.parametrize("regime", ["production", "long", "unbounded"])
def test_no_bit_depends_on_later_tokens(regime, record_property):
    inputs, other = inputs_of(regime, 2, 8, 1, 2), inputs_of(regime, 2, 8, 1, 2, seed=9)
    o = np.asarray(kda_decode(**inputs)[0])
    with Findings(record_property) as found:
        for t in (1, 4, 7):
            late = {name: other[name][:, t:] for name in TOKENS}
            got = np.asarray(kda_decode(**changed(inputs, np.s_[:, t:], late))[0])
            found.expect(bits(got[:, :t]) == bits(o[:, :t]), f"tokens before {t} changed")
            found.expect(bits(got[:, t:]) != bits(o[:, t:]), f"tokens after {t} did not change")


@pytest.mark.parametrize("state_v_first", [False, True])
def test_one_call_of_eight_is_eight_calls_of_one(state_v_first):
    """Bit for bit with a float32 state, as it is what the kernel keeps between tokens."""
    inputs = inputs_of("mixed", 3, 8, 1, 2, state_v_first=state_v_first)
    whole = kda_decode(**inputs)
    state, outputs = inputs["initial_state"], []
    for t in range(8):
        o, state = kda_decode(**sequence(inputs, t, t + 1, state))
        outputs.append(o)
    parts = jnp.concatenate(outputs, axis=1), state
    if DRY:
        for x, y in zip(parts, whole, strict=True):
            np.testing.assert_allclose(x.astype("f4"), y.astype("f4"), rtol=1e-2, atol=1e-5)
    else:
        assert same_bits(parts, whole)


@pytest.mark.parametrize("regime", ["long", "none"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_4096_steps(regime, tokens, record_property):
    """In one jitted loop, from a donated pool."""
    steps = (64 if DRY else 4096) // (1 if DRY else tokens)
    inputs = inputs_of(regime, 2, steps * tokens, 1, 2)
    want_o, want_state = numpy_recurrence(**inputs)
    stacked = {name: np.stack(np.split(inputs[name], steps, axis=1)) for name in TOKENS}
    rest = {name: x for name, x in inputs.items() if name not in (*TOKENS, "initial_state")}
    pool = np.full((5, *inputs["initial_state"].shape[1:]), np.nan, np.float32)
    places = np.array([3, 1], np.int32)
    pool[places] = inputs["initial_state"]

    def run(pool: Any, tokens: Any) -> Any:
        def step(pool: Any, token: Any) -> Any:
            o, pool = kda_decode(**token, **rest, initial_state=pool, state_indices=places)
            return pool, o

        return jax.lax.scan(step, pool, tokens)

    new_pool, o = jax.jit(run, donate_argnums=0)(jnp.asarray(pool), stacked)
    o = np.moveaxis(np.asarray(o).astype(np.float64), 0, 1).reshape(want_o.shape)
    new_pool = np.asarray(new_pool)
    with Findings(record_property) as found:
        found.figure("o", relative_error(o, want_o), BAR)
        found.figure("state", relative_error(new_pool[places], want_state), BAR)
        last = max(1, o.shape[1] // 16)
        found.figure("o, the last tokens", relative_error(o[:, -last:], want_o[:, -last:]), BAR)
        for row in (0, 2, 4):
            found.expect(bits(new_pool[row]) == bits(pool[row]), f"row {row} of the pool changed")


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_pools(state_dtype, state_v_first, record_property):
    """Padding slots full of NaN, rows that nobody names full of NaN, indices of every wrong kind."""
    places = np.array([5, -1, 0, 7, 2**31 - 1, 3, -(2**31)], np.int32)
    kind = {"state_dtype": state_dtype, "state_v_first": state_v_first}
    inputs = inputs_of("slow", len(places), 3, 1, 2, **kind)
    used = np.flatnonzero((places >= 0) & (places < 7))
    padding = np.setdiff1d(np.arange(len(places)), used)
    wanted = kda_decode(**inputs)
    pool = np.full((7, *inputs["initial_state"].shape[1:]), np.nan).astype(inputs["initial_state"].dtype)
    pool[places[used]] = inputs["initial_state"][used]
    inputs = changed(inputs, padding, np.nan)
    o, new_pool = kda_decode(**inputs | {"initial_state": pool, "state_indices": places})
    o, new_pool = np.asarray(o), np.asarray(new_pool)
    with Findings(record_property) as found:
        found.expect(bits(o[used]) == bits(np.asarray(wanted[0])[used]), "o is not that of separate states")
        got = new_pool[places[used]]
        found.expect(bits(got) == bits(np.asarray(wanted[1])[used]), "the states are not the separate ones")
        found.expect(not o[padding].any(), "a padding slot's o is not zero")
        for row in np.setdiff1d(np.arange(7), places[used]):
            found.expect(bits(new_pool[row]) == bits(pool[row]), f"row {row}, which nobody names, changed")


@pytest.mark.parametrize("has_pool", [False, True])
def test_a_donated_state_is_updated_where_it_lies(has_pool):
    inputs = on_device(inputs_of("slow", 2, 1, 1, 2))
    wanted = kda_decode(**inputs)
    state, before = inputs.pop("initial_state"), np.asarray(inputs["v"])
    arrays, rest = split(inputs)
    if has_pool:
        rest["state_indices"] = np.array([1, 0], np.int32)
        state = state[::-1]
    kept = jnp.array(state)
    step = jax.jit(lambda state, x: kda_decode(**x, **rest, initial_state=state), donate_argnums=0)
    address = state.unsafe_buffer_pointer()
    o, new_state = step(state, arrays)
    assert state.is_deleted()
    assert DRY or new_state.unsafe_buffer_pointer() == address
    assert bits(o) == bits(wanted[0])
    assert bits(new_state[::-1] if has_pool else new_state) == bits(wanted[1])
    assert bits(inputs["v"]) == bits(before)
    # Without donation the caller's array stays as it was.
    again = jax.jit(lambda state, x: kda_decode(**x, **rest, initial_state=state))(kept, arrays)
    assert same_bits(again, (o, new_state))
    assert not same_bits(kept, new_state)


def test_nan_stays_in_its_head(record_property):
    inputs = inputs_of("production", 2, 2, 2, 4)
    o, state = map(np.asarray, kda_decode(**inputs))
    got_o, got_state = map(np.asarray, kda_decode(**changed(inputs, np.s_[1, 0, 2], np.nan, ("g",))))
    with Findings(record_property) as found:
        for n in range(2):
            for head in range(4):
                hit = (n, head) == (1, 2)
                same = bits(got_o[n, :, head]) == bits(o[n, :, head])
                found.expect(same != hit, f"o of sequence {n}, head {head}")
                found.expect((bits(got_state[n, head]) == bits(state[n, head])) != hit, f"state {n}, {head}")
        found.expect(bool(np.isnan(got_o[1, :, 2]).all()), "the NaN is lost")


def test_huge_keys_are_normalised():
    """|q| and |k| whose squares leave float32."""
    inputs = inputs_of("slow", 1, 2, 1)
    scaled = {name: (inputs[name].astype(np.float32) * 2.0**100).astype(inputs[name].dtype) for name in "qk"}
    o, state = kda_decode(**inputs | scaled)
    want_o, want_state = numpy_recurrence(**inputs)
    assert relative_error(o, want_o) < BAR
    assert relative_error(state, want_state) < BAR


@pytest.mark.big
def test_a_pool_beyond_32_bit_offsets(record_property):
    """The last state of a pool of more than 2^32 elements."""
    heads = 2 if DRY else 64
    size = 5 if DRY else 2**32 // (heads * 128 * 128) + 2
    inputs = inputs_of("slow", 2, 1, heads, state_dtype="bfloat16")
    wanted = kda_decode(**inputs)
    places = np.array([size - 1, 1], np.int32)
    arrays, rest = split(inputs)
    states = arrays.pop("initial_state")
    pool = jnp.zeros((size, *states.shape[1:]), states.dtype).at[places].set(states)
    step = jax.jit(
        lambda pool, x: kda_decode(**x, **rest, initial_state=pool, state_indices=places), donate_argnums=0
    )
    o, pool = step(pool, arrays)
    assert same_bits((o, pool[places]), wanted)
    assert not bool(jnp.any(pool[2 : size - 1]))
