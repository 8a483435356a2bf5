"""The inputs are what regimes.py says they are, and the public call takes them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jax_kda import contract
from jax_kda.regimes import BOUND, LARGEST_DECAY, REGIMES, bench_inputs, make_inputs


def log_decays(inputs: dict[str, Any]) -> np.ndarray:
    g = inputs["g"].astype(np.float64)
    if not inputs.get("use_gate_in_kernel"):
        return g
    rate = np.exp(inputs["A_log"].astype(np.float64))[:, None]
    g = g + inputs.get("dt_bias", 0.0)
    if inputs.get("safe_gate"):
        return inputs["lower_bound"] / (1 + np.exp(-np.clip(rate * g, -700, 700)))
    return -rate * np.logaddexp(g, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_decays_are_the_regime_s(dtype: str) -> None:
    decays = {name: log_decays(make_inputs(name, 1, 200, 8, dtype=dtype)) for name in REGIMES}
    assert all((x <= 0).all() and x.shape == (1, 200, 8, 128) for x in decays.values())

    assert decays["production"].mean() == pytest.approx(-3.1, abs=0.25)
    assert decays["production"].min() >= BOUND
    slow_channels = decays["slow"].mean(axis=(0, 1))
    assert decays["slow"].mean() == pytest.approx(-0.15, abs=0.03)
    assert slow_channels.max() == pytest.approx(-0.008, abs=0.002)
    assert (decays["long"] == decays["long"][:, :1]).all()
    assert -0.1 <= decays["long"].min() < -0.08
    assert -2e-5 < decays["long"].max() <= -1e-5
    is_long = (decays["mixed"] == decays["mixed"][:, :1]).all(axis=1)
    assert (is_long.sum(axis=-1) == 64).all()
    assert decays["mixed"][:, :, ~is_long[0]].mean() == pytest.approx(-3.1, abs=0.3)
    assert (decays["bound"] == BOUND).all()
    assert -1.02 * LARGEST_DECAY <= decays["unbounded"].min() < -0.9 * LARGEST_DECAY
    assert np.mean(decays["unbounded"] == 0) == pytest.approx(0.25, abs=0.01)
    assert not decays["none"].any()
    assert decays["collinear"].mean() == pytest.approx(-0.15, abs=0.03)


def test_collinear_keys_and_strong_writes() -> None:
    inputs = make_inputs("collinear", 2, 50, 3, dtype="float32")
    k = inputs["k"] / np.linalg.norm(inputs["k"], axis=-1, keepdims=True)
    assert np.einsum("bihd,bjhd->bhij", k, k).min() > 0.98
    assert inputs["beta"].min() >= 3
    assert inputs["beta"].max() <= 8


@pytest.mark.parametrize("regime", REGIMES)
def test_the_contract_accepts_them(regime: str) -> None:
    problem = contract.check(**make_inputs(regime, 2, 10, 2, 4, K=64, V=32, state_v_first=True))
    assert (problem.B, problem.T, problem.H, problem.HV, problem.K, problem.V) == (2, 10, 2, 4, 64, 32)
    assert problem.dtype == problem.beta_dtype == "bfloat16"
    assert problem.g_dtype == ("float32" if regime in ("long", "mixed", "none") else "bfloat16")
    packed = make_inputs(regime, 1, 12, 2, dtype="float16", lengths=(3, 0, 7), state_dtype="bfloat16")
    assert contract.check(**packed).options.state_dtype == "bfloat16"
    assert packed["cu_seqlens"].tolist() == [0, 3, 3, 10]
    assert packed["initial_state"].shape == (3, 2, 128, 128)


def test_same_seed_same_arrays() -> None:
    one, two, other = (make_inputs("slow", 1, 8, 1, seed=seed) for seed in (1, 1, 2))
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        assert one[name].tobytes() == two[name].tobytes()
        assert one[name].tobytes() != other[name].tobytes()


@pytest.mark.parametrize("regime", [name for name in REGIMES if name != "unbounded"])
def test_bench_inputs_are_the_same_decays_through_one_gate(regime: str) -> None:
    wanted = log_decays(make_inputs(regime, 1, 30, 2))
    exact, rounded = bench_inputs(regime, 1, 30, 2, g_dtype="float32"), bench_inputs(regime, 1, 30, 2)
    assert exact["safe_gate"]
    assert rounded["g"].dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(log_decays(exact), wanted, rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(log_decays(rounded), wanted, rtol=0.05, atol=1e-30)


def test_errors_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"regime: got 'fast'; allowed: production, slow"):
        make_inputs("fast", 1, 1, 1)
    with pytest.raises(ValueError, match="regime: got 'unbounded'"):
        bench_inputs("unbounded", 1, 1, 1)
    with pytest.raises(ValueError, match="lengths: got 9 tokens"):
        make_inputs("none", 1, 8, 1, lengths=(4, 5))
