"""The token recurrence in plain JAX: slow, short, and what everything else is judged by.

S <- exp(g_t)[:, None] * S;  u = beta_t (v_t - S^T k_t);  S <- S + k_t u^T;  o_t = scale S^T q_t
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_kda import activations, checkpoints, contract, pools

__all__ = ["kda_reference", "recurrence"]


def kda_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    state_indices: jax.Array | None = None,
    checkpoint_every: int | None = None,
    dtype: DTypeLike = jnp.float32,
    **options: Any,
) -> tuple[Any, ...]:
    """`kda_prefill`, one token after the other, in `dtype` (float32 or float64) from the first operation to
    the last.

    Takes `kda_prefill`'s arguments except `route`, with the same shapes, dtypes and checks, and returns the
    same `(o, final_state)`, or `(o, final_state, checkpoints)`. With `dtype=float64` all come back in
    float64, so that nothing is rounded away before a comparison; else o has v's dtype and the state is
    float32, or bfloat16 where `initial_state` was.

    Args:
        q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, state_indices, checkpoint_every: as
            `kda_prefill` takes them.
        dtype: of every operation, float32 or float64.
        options: the other keyword arguments of `kda_prefill`.

    Raises:
        ValueError, TypeError: as `kda_prefill`; and ValueError for float64 where JAX has it switched off.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_kda
        >>> x, beta = jnp.ones((1, 9, 1, 16)), jnp.full((1, 9, 1), 0.5)
        >>> with jax.enable_x64(True):
        ...     o, state = jax_kda.kda_reference(x / 4, x / 4, x, -x, beta, dtype=jnp.float64)
        >>> o.dtype.name, state.shape
        ('float64', (1, 1, 16, 16))
    """
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.float64):
        raise TypeError(
            f"dtype: got {dtype}; allowed: float32 or float64. Note: it is the precision of the sums."
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            "dtype: got float64 with 64-bit types switched off; allowed: float32 or float64. "
            "Note: call this under `with jax.enable_x64(True):`, or set the option jax_enable_x64."
        )
    problem = contract.check(
        q, k, v, g, beta,
        initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
        state_indices=state_indices, checkpoint_every=checkpoint_every, **options,
    )  # fmt: skip
    if state_indices is not None:
        alone = functools.partial(
            kda_reference, q, k, v, g, beta,
            cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias, checkpoint_every=checkpoint_every,
            dtype=dtype, **options,
        )  # fmt: skip
        offsets = None if cu_seqlens is None else jnp.asarray(cu_seqlens)
        pool, indices = jnp.asarray(initial_state), jnp.asarray(state_indices)
        every = problem.options.checkpoint_every
        return pools.through_pool(lambda states: alone(initial_state=states), pool, indices, offsets, every)
    static = problem.options
    q, k, v, g, beta = (jnp.asarray(x) for x in (q, k, v, g, beta))

    if static.gate != contract.GateMode.LOG:
        A_log = jnp.zeros((1, problem.HV), jnp.float32) if A_log is None else jnp.asarray(A_log)[None]
        dt_bias = None if dt_bias is None else jnp.asarray(dt_bias).reshape(1, problem.HV, problem.K)
    log_decays = activations.log_decay(static, g, A_log, dt_bias, dtype)
    strengths = activations.write_strength(static, beta, dtype)
    queries, keys = q.astype(dtype), k.astype(dtype)
    if static.l2norm:
        queries, keys = activations.l2_normalise(queries), activations.l2_normalise(keys)

    rows = problem.N if static.packed else problem.B
    if initial_state is None:
        state = jnp.zeros((rows, problem.HV, problem.K, problem.V), dtype)
    else:
        state = jnp.asarray(initial_state).astype(dtype)
        state = state.swapaxes(-1, -2) if static.state_v_first else state

    offsets = jnp.asarray(cu_seqlens) if static.packed else None
    every = static.checkpoint_every
    count = problem.T // every if every else 0
    o, *states = recurrence(
        queries, keys, v.astype(dtype), log_decays, strengths, state,
        scale=static.scale,
        offsets=offsets,
        rows=checkpoints.token_rows(problem.T, every, offsets) if count else None,
        count=count,
    )  # fmt: skip
    if every and not count:
        states.append(states[0][:0])
    states = [x.swapaxes(-1, -2) if static.state_v_first else x for x in states]
    if dtype != jnp.float64:
        o, states = o.astype(v.dtype), [x.astype(static.state_dtype) for x in states]
    final_state, *more = states
    return o, final_state if static.output_final_state else None, *more


def recurrence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float,
    offsets: jax.Array | None = None,
    rows: jax.Array | None = None,
    count: int = 0,
) -> tuple[jax.Array, ...]:
    """The recurrence alone: log decays g [B, T, HV, K], write strengths beta [B, T, HV], one floating dtype
    throughout.

    `state` is [B, HV, K, V], or [N, HV, K, V] with `offsets` [N + 1] (B is 1 then). Returns o [B, T, HV, V]
    and the state after each row or sequence. Tokens of no packed sequence give zeros and are otherwise
    ignored. With `rows` [T] the third result are `count` checkpoints of each batch row: the state after token
    t is that row's number `rows[t]`, where it is below `count`.
    """
    group = v.shape[2] // q.shape[2]
    q, k = (jnp.repeat(x, group, axis=2) for x in (q, k))
    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q * scale, k, v, jnp.exp(g), beta))

    def run(step: Any, state: jax.Array, xs: Any, own: Any) -> tuple[jax.Array, ...]:
        """The scan; with `rows` the state that a token leaves, own(state, x), goes to its place too."""
        if rows is None:
            state, o = lax.scan(step, state, xs)
            return jnp.moveaxis(o, 0, 1), state

        def keep(carry: Any, row_and_x: Any) -> Any:
            (state, kept), (row, x) = carry, row_and_x
            state, o = step(state, x)
            return (state, kept.at[:, row].set(own(state, x), mode="drop")), o

        kept = jnp.zeros((v.shape[0], count, *state.shape[1:]), state.dtype)
        (state, kept), o = lax.scan(keep, (state, kept), (rows, xs))
        return jnp.moveaxis(o, 0, 1), state, kept.reshape(-1, *state.shape[1:])

    if offsets is None:
        return run(lambda state, token: _token(state, *token), state, tokens, lambda state, _: state)

    position = jnp.arange(v.shape[1], dtype=offsets.dtype)
    sequence = jnp.searchsorted(offsets, position, side="right") - 1
    sequence = jnp.where((sequence >= 0) & (sequence < state.shape[0]), sequence, state.shape[0])

    def token_of(states: jax.Array, operands: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """Each token reads and writes the state of its own sequence; a token of none reads zeros and writes
        nothing.
        """
        n, *token = operands
        own = states.at[n[None]].get(mode="fill", fill_value=0)
        own, o = _token(own, *token)
        return states.at[n[None]].set(own, mode="drop"), jnp.where(n < states.shape[0], o, 0)

    def own_of(states: jax.Array, operands: tuple[jax.Array, ...]) -> jax.Array:
        return states.at[operands[0][None]].get(mode="fill", fill_value=0)

    return run(token_of, state, (sequence, *tokens), own_of)


def _token(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """state [B, HV, K, V]; q (scaled), k, decay [B, HV, K]; v [B, HV, V]; beta [B, HV]."""
    state = decay[..., None] * state
    u = beta[..., None] * (v - _read(state, k))
    state = state + k[..., None] * u[..., None, :]
    return state, _read(state, q)


def _read(state: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.einsum("bhkv,bhk->bhv", state, x, precision=lax.Precision.HIGHEST)
