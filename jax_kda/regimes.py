"""Inputs in the gate regimes that every correctness test and every benchmark names.

A kernel that is right for strong decays can be wrong for weak ones, and the other way round; a benchmark on
one regime says little about another. So inputs come from here, by name:

| regime       | log decays                                    | where it comes from                         |
|--------------|-----------------------------------------------|---------------------------------------------|
| `production` | safe gate, bound -5, raw N(0, 1), A_log and   | what Kimi-style serving sees: mean about    |
|              | dt_bias U(0, 1)                               | -3.1 a token                                |
| `slow`       | safe gate, bound -5, raw N(0, 1), A_log = 0,  | flash-linear-attention's initialisation of  |
|              | dt_bias = softplus^-1(dt), dt log-uniform in  | a KDA layer (fla/layers/kda.py; Mamba2's    |
|              | [1e-3, 1e-1] per channel                      | before): mean about -0.15, slowest channel  |
|              |                                               | about -0.008                                |
| `long`       | constant per channel, magnitude log-uniform   | memory over the whole sequence: any trick   |
|              | in [1e-5, 1e-1]                               | that drops far history is wrong here        |
| `mixed`      | half the channels `production`, half `long`   | a few slow channels must not make a head    |
|              |                                               | slow or wrong                               |
| `bound`      | safe gate, every gate at its bound -5         | exponent range: 16 tokens span exp(80)      |
| `unbounded`  | softplus gate, magnitudes log-uniform up to   | a released Kimi-Linear checkpoint:          |
|              | 2661 a token, mixed with zeros                | exp(A_log) has mean 8.3 and maximum 201     |
| `none`       | none at all                                   | the plain delta rule: drift, and far        |
|              |                                               | history                                     |
| `collinear`  | those of `slow`; k = k0 + 0.05 noise, beta    | L is large: low-precision Neumann inverses  |
|              | logits U(3, 8)                                | of I + L return NaN or nonsense             |

Everything else is the same throughout: q, k, v, beta logits ~ N(0, 1), q and k normalised and beta's sigmoid
taken in the kernel, initial_state ~ N(0, 1) / 2. All arrays are NumPy's, so that no device is touched before
the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["REGIMES", "bench_inputs", "make_inputs"]

REGIMES = ("production", "slow", "long", "mixed", "bound", "unbounded", "none", "collinear")

BOUND = -5.0
LARGEST_DECAY = 2661.0  # of the checkpoint: 201 * softplus of its largest raw gate
LARGEST_RATE = 201.0  # of the checkpoint: its largest exp(A_log)
OFF = -1e4  # a raw gate that sigmoid and softplus both turn into exactly 0 in float32


def make_inputs(
    regime: str,
    B: int,
    T: int,
    H: int,
    HV: int | None = None,
    K: int = 128,
    V: int = 128,
    *,
    dtype: Any = "bfloat16",
    g_dtype: Any = None,
    beta_dtype: Any = None,
    state_dtype: Any = "float32",
    seed: int = 0,
    lengths: Sequence[int] | None = None,
    initial_state: bool = True,
    output_final_state: bool = True,
    state_v_first: bool = False,
    allow_neg_eigval: bool = False,
) -> dict[str, Any]:
    """Keyword arguments for `kda_prefill` in this regime.

    Args:
      regime: one of REGIMES. B, T, H, HV, K, V: sizes, see `jax_kda.contract`; HV is H unless given. dtype:
      of q, k and v. g_dtype: default float32 where g is the log decay itself (`long`, `mixed`, `none`), else
      `dtype` (float32 for
        float16, which the contract does not allow for g).
      beta_dtype: default `dtype` (float32 for float16).
      lengths: of packed sequences, which must fit in T; adds `cu_seqlens`, int32. B must be 1.
      initial_state: whether to make one.
    """
    rng = np.random.default_rng([seed, REGIMES.index(_known(regime))])
    HV = H if HV is None else HV
    inputs = _common(
        rng, B, T, H, HV, K, V, dtype, beta_dtype, state_dtype, lengths, initial_state, output_final_state,
        state_v_first, allow_neg_eigval,
    )  # fmt: skip
    gate_dtype = _gate_dtype(dtype) if g_dtype is None else _numpy_dtype(g_dtype)
    log_dtype = np.dtype(np.float32) if g_dtype is None else gate_dtype
    shape = (B, T, HV, K)

    if regime in ("long", "mixed", "none"):
        inputs["g"] = _log_decays(rng, regime, shape).astype(log_dtype)
        return inputs

    inputs["use_gate_in_kernel"] = True
    if regime == "unbounded":
        raw, inputs["A_log"] = _unbounded(rng, shape)
        inputs["g"] = raw.astype(gate_dtype)
        return inputs

    inputs |= {"safe_gate": True, "lower_bound": BOUND}
    if regime == "bound":
        raw, A_log, dt_bias = np.full(shape, -OFF), np.zeros(HV), np.zeros((HV, K))
    elif regime == "production":
        raw, A_log, dt_bias = _production(rng, shape)
    else:
        raw, A_log, dt_bias = _slow(rng, shape)
    inputs |= {
        "g": raw.astype(gate_dtype),
        "A_log": A_log.astype(np.float32),
        "dt_bias": dt_bias.astype(np.float32),
    }
    if regime == "collinear":
        k0 = rng.standard_normal((B, 1, H, K))
        inputs["k"] = (k0 + 0.05 * rng.standard_normal((B, T, H, K))).astype(inputs["k"].dtype)
        inputs["beta"] = rng.uniform(3, 8, (B, T, HV)).astype(inputs["beta"].dtype)
    return inputs


def bench_inputs(
    regime: str,
    B: int,
    T: int,
    H: int,
    HV: int | None = None,
    K: int = 128,
    V: int = 128,
    *,
    g_dtype: Any = None,
    seed: int = 0,
    **keywords: Any,
) -> dict[str, Any]:
    """As `make_inputs`, with every regime's decays fed through one and the same safe gate.

    A wanted log decay is the raw value logit(decay / bound), with A_log = 0 and dt_bias = 0, so that a
    difference in time between two regimes is the algorithm's and not the input's. `unbounded` has no such
    form.
    """
    if _known(regime) == "unbounded":
        raise ValueError(
            "regime: got 'unbounded'; allowed: any other of REGIMES. "
            "Note: its decays pass the safe gate's bound."
        )
    inputs = make_inputs(regime, B, T, H, HV, K, V, seed=seed, **keywords)
    decays = _ready_log_decays(inputs)
    with np.errstate(divide="ignore"):
        fraction = decays / BOUND
        raw = np.clip(np.log(fraction) - np.log1p(-fraction), OFF, -OFF)
    gate_dtype = _gate_dtype(inputs["q"].dtype) if g_dtype is None else _numpy_dtype(g_dtype)
    heads, channels = raw.shape[2:]
    return inputs | {
        "g": raw.astype(gate_dtype),
        "use_gate_in_kernel": True,
        "safe_gate": True,
        "lower_bound": BOUND,
        "A_log": np.zeros(heads, np.float32),
        "dt_bias": np.zeros((heads, channels), np.float32),
    }


def _common(
    rng: np.random.Generator,
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: Any,
    beta_dtype: Any,
    state_dtype: Any,
    lengths: Sequence[int] | None,
    initial_state: bool,
    output_final_state: bool,
    state_v_first: bool,
    allow_neg_eigval: bool,
) -> dict[str, Any]:
    narrow = _numpy_dtype(dtype)
    inputs: dict[str, Any] = {
        "q": rng.standard_normal((B, T, H, K)).astype(narrow),
        "k": rng.standard_normal((B, T, H, K)).astype(narrow),
        "v": rng.standard_normal((B, T, HV, V)).astype(narrow),
        "beta": rng.standard_normal((B, T, HV)).astype(
            _gate_dtype(dtype) if beta_dtype is None else _numpy_dtype(beta_dtype)
        ),
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": allow_neg_eigval,
        "output_final_state": output_final_state,
        "state_v_first": state_v_first,
    }
    sequences = B
    if lengths is not None:
        if B != 1 or sum(lengths) > T:
            raise ValueError(
                f"lengths: got {sum(lengths)} tokens for B = {B}, T = {T}; "
                "allowed: B = 1 and at most T tokens. "
                "Note: T may be larger, its last tokens then belong to no sequence."
            )
        inputs["cu_seqlens"] = np.cumsum([0, *lengths]).astype(np.int32)
        sequences = len(lengths)
    if initial_state:
        inner = (V, K) if state_v_first else (K, V)
        inputs["initial_state"] = (0.5 * rng.standard_normal((sequences, HV, *inner))).astype(
            _numpy_dtype(state_dtype)
        )
    return inputs


def _production(
    rng: np.random.Generator, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    HV, K = shape[2:]
    return rng.standard_normal(shape), rng.uniform(0, 1, HV), rng.uniform(0, 1, (HV, K))


def _slow(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    HV, K = shape[2:]
    dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), (HV, K)))
    return rng.standard_normal(shape), np.zeros(HV), _inverse_softplus(dt)


def _log_decays(rng: np.random.Generator, regime: str, shape: tuple[int, ...]) -> np.ndarray:
    if regime == "none":
        return np.zeros(shape)
    long = np.broadcast_to(-np.exp(rng.uniform(np.log(1e-5), np.log(1e-1), shape[2:])), shape)
    if regime == "long":
        return long
    fast = _safe_gate(*_production(rng, shape))
    is_fast = rng.permuted(np.broadcast_to(np.arange(shape[3]) % 2 == 0, shape[2:]), axis=-1)
    return np.where(is_fast, fast, long)


def _unbounded(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Raw gates and A_log [HV]. A quarter of the magnitudes is 0; the others start at 1e-3."""
    rate = np.exp(rng.uniform(0, np.log(LARGEST_RATE), shape[2]))
    rate[-1] = LARGEST_RATE
    magnitude = np.exp(rng.uniform(np.log(1e-3), np.log(LARGEST_DECAY), shape))
    raw = _inverse_softplus(magnitude / rate[:, None])
    return np.where(rng.uniform(size=shape) < 0.25, OFF, raw), np.log(rate).astype(np.float32)


def _ready_log_decays(inputs: dict[str, Any]) -> np.ndarray:
    g = inputs["g"].astype(np.float64)
    return _safe_gate(g, inputs["A_log"], inputs["dt_bias"]) if "A_log" in inputs else g


def _safe_gate(raw: np.ndarray, A_log: np.ndarray, dt_bias: np.ndarray) -> np.ndarray:
    return BOUND / (1 + np.exp(-np.clip(np.exp(A_log)[:, None] * (raw + dt_bias), -700, 700)))


def _inverse_softplus(x: np.ndarray) -> np.ndarray:
    return x + np.log(-np.expm1(-x))


def _known(regime: str) -> str:
    if regime not in REGIMES:
        raise ValueError(f"regime: got {regime!r}; allowed: {', '.join(REGIMES)}.")
    return regime


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def _gate_dtype(dtype: Any) -> np.dtype[Any]:
    narrow = _numpy_dtype(dtype)
    return np.dtype(np.float32) if narrow == np.float16 else narrow
