"""Every regime, length and option against the float64 recurrence."""

from __future__ import annotations

import numpy as np
import pytest
from harness import BAR, BAR_COLLINEAR, BAR_DOUBLED, DRY, LENGTHS, Findings, Inputs, forced
from oracle import numpy_recurrence, relative_error

from jax_kda.regimes import REGIMES, bench_inputs, make_inputs

BENCHMARKED = ("production", "slow", "long", "mixed", "none")


def few(T: int, count: int) -> int:
    """Fewer rows or heads where there are many tokens: the judge goes token by token."""
    return 1 if T > 1000 else count


def dense(regime: str, T: int) -> Inputs:
    return make_inputs(regime, few(T, 2), T, few(T, 2))


def grouped(regime: str, T: int) -> Inputs:
    return make_inputs(regime, 1, T, few(T, 2), 2 * few(T, 3), state_v_first=True)


def packed(regime: str, T: int) -> Inputs:
    """A sequence of T tokens, an empty one, one of a single token, another; then rows of none."""
    lengths = (T, 0, 1, T // 2 + 1)
    return make_inputs(regime, 1, sum(lengths) + 3, 1, 2, lengths=lengths)


def narrow(regime: str, T: int) -> Inputs:
    """bfloat16 states; gates in the dtype that the regime does not have by itself."""
    own = make_inputs(regime, 1, 1, 1)["g"].dtype
    g_dtype = "bfloat16" if own == np.float32 else "float32"
    return make_inputs(regime, few(T, 2), T, 1, 2, g_dtype=g_dtype, state_dtype="bfloat16")


def doubled(regime: str, T: int) -> Inputs:
    lengths = (T // 2, T - T // 2)
    return make_inputs(
        regime, 1, T, 1, 2, beta_dtype="float32", state_dtype="bfloat16", state_v_first=True,
        lengths=lengths, allow_neg_eigval=True,
    )  # fmt: skip


def bare(regime: str, T: int) -> Inputs:
    """No state to begin with, nothing done to q, k and beta: beta |k|^2 stays below 2."""
    inputs = make_inputs(regime, few(T, 2), T, few(T, 2), beta_dtype="float32", initial_state=False)
    k = inputs["k"].astype(np.float64)
    size = np.random.default_rng(T).uniform(0.5, 1.95, k.shape[:-1])[..., None]
    inputs["k"] = (k * np.sqrt(size / np.sum(k * k, axis=-1, keepdims=True))).astype(inputs["k"].dtype)
    inputs["beta"] = 1 / (1 + np.exp(-inputs["beta"]))
    return inputs | {
        "use_qk_l2norm_in_kernel": False,
        "use_beta_sigmoid_in_kernel": False,
        "scale": 0.3,
    }


VARIANTS = {f.__name__: f for f in (dense, grouped, packed, narrow, doubled, bare)}


def bar_of(regime: str, variant: str = "") -> float:
    return BAR_COLLINEAR if regime == "collinear" else BAR_DOUBLED if variant == "doubled" else BAR


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_length(run, regime, variant, record_property):
    with Findings(record_property) as found:
        for T in LENGTHS:
            found.compare(run, VARIANTS[variant](regime, T), f"T={T}", bar_of(regime, variant))


@pytest.mark.parametrize("regime", BENCHMARKED)
def test_the_inputs_of_the_benchmarks(run, regime, record_property):
    """All regimes through one safe gate: the kernel that is timed is the one that is right."""
    with Findings(record_property) as found:
        found.compare(run, bench_inputs(regime, 1, 100 if DRY else 513, 2), regime, bar_of(regime))


@pytest.mark.parametrize("regime", ["production", "long"])
def test_more_heads_than_multiprocessors(run, regime, record_property):
    with Findings(record_property) as found:
        found.compare(run, make_inputs(regime, 2 if DRY else 4, 70, 1 if DRY else 64), regime)


@pytest.mark.parametrize("regime", ["long", "none"])
def test_65536_tokens(run, regime, record_property):
    with Findings(record_property) as found:
        found.compare(run, make_inputs(regime, 1, 4096 if DRY else 65536, 1), regime)


@pytest.mark.parametrize("regime", REGIMES)
def test_float32_on_the_xla_route(regime, record_property):
    inputs = make_inputs(regime, 1, 70, 1, 2, dtype="float32")
    bar = 2e-4 if regime in ("collinear", "unbounded") else 1e-5
    with Findings(record_property) as found:
        o, state = forced("xla")(**inputs)
        want_o, want_state = numpy_recurrence(**inputs)
        found.figure("o", relative_error(o, want_o), bar)
        found.figure("state", relative_error(state, want_state), bar)
