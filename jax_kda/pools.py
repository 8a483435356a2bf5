"""State pools: the states of many sequences in one array, and calls that name theirs by index.

A pool is `[P, HV, K, V]` (V, K with `state_v_first`), the places `state_indices [N]`: sequence n starts from
`pool[state_indices[n]]` and leaves its final state there. An index outside `[0, P)` (-1, say) is a padding
slot: nothing of it is read or written, and its outputs are zeros. Two sequences with one index are the
caller's mistake: what becomes of that state is unspecified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_kda import checkpoints

__all__ = ["in_folded_pool", "through_pool"]


def through_pool(
    call: Callable[[jax.Array], tuple[Any, ...]],
    pool: jax.Array,
    state_indices: jax.Array,
    cu_seqlens: jax.Array | None = None,
    checkpoint_every: int = 0,
) -> tuple[Any, ...]:
    """`(o, new pool)` of a call that takes the states `[N, ...]` of its sequences to `(o, final states)`, and
    with `checkpoint_every` to their checkpoints too, which are then the third result.

    o is `[N, T, HV, V]`, or `[1, T, HV, V]` with `cu_seqlens [N + 1]`. The new pool has the dtype of the
    final states.
    """
    size = pool.shape[0]
    is_used = (state_indices >= 0) & (state_indices < size)
    places = jnp.where(
        is_used, state_indices, size
    )  # out of range: JAX would count a negative one from the end
    o, states, *more = call(pool.at[places].get(mode="fill", fill_value=0))
    if cu_seqlens is None:
        keeps = is_used[:, None]
    else:
        # Rows of no sequence are zeros already, so any sequence will do for them.
        position = jnp.arange(o.shape[1], dtype=cu_seqlens.dtype)
        sequence = jnp.searchsorted(cu_seqlens, position, side="right") - 1
        keeps = is_used.at[sequence].get(mode="clip")[None]
    o = jnp.where(keeps[..., None, None], o, jnp.zeros((), o.dtype))
    more = [checkpoints.of_used_sequences(x, is_used, checkpoint_every, cu_seqlens) for x in more]
    return o, pool.astype(states.dtype).at[places].set(states, mode="drop"), *more


def in_folded_pool(state_indices: jax.Array, size: int) -> jax.Array:
    """Indices `[M, N]` into M pools of `size` states each, as indices into all of them laid end to end."""
    is_used = (state_indices >= 0) & (state_indices < size)
    first = jnp.arange(state_indices.shape[0], dtype=state_indices.dtype)[:, None] * size
    return jnp.where(is_used, state_indices + first, -1)
