"""The reference against closed forms, and against the NumPy recurrence, which shares no code with it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import numpy_recurrence, relative_error

from jax_kda import kda_reference
from jax_kda.regimes import REGIMES, make_inputs


def small(regime: str, T: int = 20, **keywords: Any) -> dict[str, Any]:
    return make_inputs(regime, keywords.pop("B", 2), T, 2, 4, K=12, V=8, **{"dtype": "float32"} | keywords)


def plain(T: int, K: int = 8, V: int = 6, seed: int = 0) -> dict[str, Any]:
    """Inputs of the bare delta rule: no gate, no norm, beta as it is."""
    rng = np.random.default_rng(seed)
    return {
        "q": rng.standard_normal((1, T, 1, K)).astype(np.float32),
        "k": rng.standard_normal((1, T, 1, K)).astype(np.float32),
        "v": rng.standard_normal((1, T, 1, V)).astype(np.float32),
        "g": np.zeros((1, T, 1, K), np.float32),
        "beta": np.ones((1, T, 1), np.float32),
        "initial_state": rng.standard_normal((1, 1, K, V)).astype(np.float32),
    }


def test_one_token() -> None:
    x = plain(1) | {"beta": np.full((1, 1, 1), 0.7, np.float32), "g": np.full((1, 1, 1, 8), -0.3, np.float32)}
    q, k, v, S = x["q"][0, 0, 0], x["k"][0, 0, 0], x["v"][0, 0, 0], np.exp(-0.3) * x["initial_state"][0, 0]
    S = S + 0.7 * np.outer(k, v - S.T @ k)
    o, state = kda_reference(**x, scale=0.5)
    np.testing.assert_allclose(o[0, 0, 0], 0.5 * S.T @ q, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state[0, 0], S, rtol=1e-5, atol=1e-6)


def test_orthonormal_keys_are_linear_attention() -> None:
    x = plain(8)
    basis = np.linalg.qr(np.random.default_rng(1).standard_normal((8, 8)))[0].astype(np.float32)
    x |= {"k": basis[None, :, None], "initial_state": None}
    o, state = kda_reference(**x, scale=1.0)
    weights = np.tril(x["q"][0, :, 0] @ basis.T)
    np.testing.assert_allclose(o[0, :, 0], weights @ x["v"][0, :, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state[0, 0], basis.T @ x["v"][0, :, 0], rtol=1e-4, atol=1e-5)


def test_without_writes_the_state_only_decays() -> None:
    x = plain(5)
    g = -np.random.default_rng(2).uniform(0, 2, x["g"].shape).astype(np.float32)
    _, state = kda_reference(**x | {"g": g, "beta": np.zeros_like(x["beta"])})
    want = np.exp(g.sum(axis=1))[0, 0, :, None] * x["initial_state"][0, 0]
    np.testing.assert_allclose(state[0, 0], want, rtol=1e-5)


def test_a_key_written_fully_is_read_back() -> None:
    x = plain(3)
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    x["q"] = x["k"]
    o, _ = kda_reference(**x, scale=1.0)
    np.testing.assert_allclose(o, x["v"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("regime", REGIMES)
def test_float32_in_every_regime(regime: str) -> None:
    inputs = small(regime)
    want_o, want_state = numpy_recurrence(**inputs)
    o, state = kda_reference(**inputs)
    assert relative_error(o, want_o) < 2e-6
    assert relative_error(state, want_state) < 2e-6


@pytest.mark.parametrize("regime", ["production", "slow", "unbounded", "mixed"])
def test_float64_agrees_to_the_last_digits(regime: str) -> None:
    inputs = small(regime, B=1, lengths=(4, 0, 15), dtype="bfloat16", state_v_first=True)
    want_o, want_state = numpy_recurrence(**inputs)
    with jax.enable_x64(True):
        o, state = kda_reference(**inputs, dtype=jnp.float64)
        assert (o.dtype, state.dtype) == (jnp.float64, jnp.float64)
        assert relative_error(o, want_o) < 1e-13
        assert relative_error(state, want_state) < 1e-13


@pytest.mark.parametrize(
    "options",
    [
        {"allow_neg_eigval": True},
        {"initial_state": False},
        {"state_v_first": True, "state_dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "g_dtype": "float32", "beta_dtype": "float32"},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    inputs = small("production", **options)
    want_o, want_state = numpy_recurrence(**inputs)
    o, state = kda_reference(**inputs)
    assert o.dtype == inputs["v"].dtype
    assert state.dtype == ("bfloat16" if "state_dtype" in options else "float32")
    assert relative_error(o, want_o) < (2e-6 if o.dtype == "float32" else 4e-3)
    assert relative_error(state, want_state) < (2e-6 if state.dtype == "float32" else 4e-3)


def test_no_final_state() -> None:
    assert kda_reference(**small("none", output_final_state=False))[1] is None


def test_safe_gate_without_a_rate() -> None:
    inputs = small("slow", B=1)
    assert not inputs["A_log"].any()
    bare = {name: x for name, x in inputs.items() if name not in ("A_log", "dt_bias")}
    assert relative_error(kda_reference(**bare)[0], numpy_recurrence(**bare)[0]) < 2e-6


def test_packed_ignores_what_belongs_to_no_sequence() -> None:
    inputs = small("production", B=1, lengths=(3, 0, 6, 0))
    inputs["cu_seqlens"] = inputs["cu_seqlens"] + 5
    want_o, want_state = numpy_recurrence(**inputs)
    outside = np.r_[0:5, 14:20]
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, outside] = np.nan
    o, state = kda_reference(**inputs)
    assert relative_error(o, want_o) < 2e-6
    assert not np.asarray(o)[:, outside].any()
    assert relative_error(state, want_state) < 2e-6
    for n in (1, 3):
        assert np.asarray(state[n]).tobytes() == inputs["initial_state"][n].tobytes()


def test_no_tokens() -> None:
    inputs = small("slow", T=0)
    o, state = kda_reference(**inputs)
    assert o.shape == (2, 0, 4, 8)
    assert np.asarray(state).tobytes() == inputs["initial_state"].tobytes()


def test_huge_queries_and_keys_are_normalised() -> None:
    inputs = small("slow", dtype="bfloat16")
    inputs["q"][:, 3] *= np.float32(2**100)
    inputs["k"][:, 4] *= np.float32(2**70)
    inputs["k"][:, 5] = 0
    want_o, want_state = numpy_recurrence(**inputs)
    o, state = kda_reference(**inputs)
    assert relative_error(o, want_o) < 4e-3
    assert relative_error(state, want_state) < 2e-6


def test_dtype_is_checked() -> None:
    inputs = small("none")
    with pytest.raises(TypeError, match="dtype: got bfloat16; allowed: float32 or float64"):
        kda_reference(**inputs, dtype=jnp.bfloat16)
    with (
        jax.enable_x64(False),
        pytest.raises(ValueError, match="dtype: got float64 with 64-bit types switched off"),
    ):
        kda_reference(**inputs, dtype=jnp.float64)
    with pytest.raises(ValueError, match="beta"):
        kda_reference(**inputs | {"beta": inputs["beta"][:, 1:]})
