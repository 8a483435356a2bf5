"""The judge: the token recurrence in NumPy float64, written from the definition and sharing no code with the
library.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np


def numpy_recurrence(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = True,
    cu_seqlens: Any = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Any = None,
    dt_bias: Any = None,
    safe_gate: bool = False,
    lower_bound: float = -5.0,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    checkpoint_every: int | None = None,
) -> tuple[Any, ...]:
    """`kda_prefill`'s keyword arguments to its (o, final_state) or (o, final_state, checkpoints), in float64;
    every operand may be of any dtype.
    """
    q, k, v, g, beta = (np.asarray(x).astype(np.float64) for x in (q, k, v, g, beta))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    if use_gate_in_kernel:
        rate = np.exp(np.zeros(HV) if A_log is None else np.asarray(A_log, np.float64))[:, None]
        bias = np.zeros((HV, K)) if dt_bias is None else np.asarray(dt_bias, np.float64).reshape(HV, K)
        g = lower_bound * _sigmoid(rate * (g + bias)) if safe_gate else -rate * np.logaddexp(g + bias, 0)
    if use_beta_sigmoid_in_kernel:
        beta = _sigmoid(beta) * (2 if allow_neg_eigval else 1)
    if use_qk_l2norm_in_kernel:
        q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, HV // H, axis=2) for x in (q, k))

    sequences = B if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is None:
        state = np.zeros((sequences, HV, K, V))
    else:
        state = np.asarray(initial_state).astype(np.float64)
        state = np.swapaxes(state, -1, -2) if state_v_first else state
    kept = []  # of each sequence [length // checkpoint_every, HV, K, V]
    if cu_seqlens is None:
        o, state, after = _run(q * scale, k, v, g, beta, state, checkpoint_every)
        kept = list(after.swapaxes(0, 1))
    else:
        o = np.zeros((B, T, HV, V))
        state = state.copy()
        bounds = [int(x) for x in np.asarray(cu_seqlens)]
        for n, (begin, end) in enumerate(itertools.pairwise(bounds)):
            part = [x[:, begin:end] for x in (q * scale, k, v, g, beta)]
            o[:, begin:end], state[n : n + 1], after = _run(*part, state[n : n + 1], checkpoint_every)
            kept.append(after[:, 0])
    state = np.swapaxes(state, -1, -2) if state_v_first else state
    final_state = state if output_final_state else None
    if checkpoint_every is None:
        return o, final_state
    checkpoints = np.zeros((B * (T // checkpoint_every), HV, K, V))
    used = np.concatenate(kept)
    checkpoints[: len(used)] = used
    return o, final_state, np.swapaxes(checkpoints, -1, -2) if state_v_first else checkpoints


def relative_error(got: Any, want: Any) -> float:
    """Relative Frobenius error; infinite if anything is not finite."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    assert got.shape == want.shape, f"{got.shape} against {want.shape}"
    if not np.isfinite(got).all():
        return float("inf")
    norm = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / (norm if norm else 1.0))


def _run(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    checkpoint_every: int | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q (scaled), k, g [B, T, HV, K], v [B, T, HV, V], beta [B, T, HV], state [B, HV, K, V]. The last result
    is the states after every `checkpoint_every`-th token, [number, B, HV, K, V]."""
    state = state.copy()
    kept = []
    o = np.empty(v.shape)
    decay = np.exp(g)
    for t in range(v.shape[1]):
        state *= decay[:, t, :, :, None]
        predicted = np.matmul(k[:, t, :, None, :], state)
        state += k[:, t, :, :, None] * (beta[:, t, :, None, None] * (v[:, t, :, None, :] - predicted))
        o[:, t] = np.matmul(q[:, t, :, None, :], state)[:, :, 0]
        if checkpoint_every and (t + 1) % checkpoint_every == 0:
            kept.append(state.copy())
    return o, state, np.array(kept).reshape(-1, *state.shape)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))
