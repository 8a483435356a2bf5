"""State checkpoints: which rows of `kda_prefill(..., checkpoint_every=n)`'s third result belong to what.

A sequence has a checkpoint behind every n-th of its tokens, `length // n` in all. Those of packed sequences
lie one sequence after the other in `T // n` rows, which are enough for any offsets; rows left over are zeros.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kda import contract

__all__ = ["checkpoint_offsets", "of_used_sequences", "token_rows"]


def checkpoint_offsets(cu_seqlens: Any, checkpoint_every: int) -> Any:
    """Where the checkpoints of packed sequences begin: those of sequence n are rows `offsets[n]` to
    `offsets[n + 1]`.

    Args:
        cu_seqlens: `[N + 1]` int32 or int64, NumPy (or a list) or JAX, as `kda_prefill` takes them.
        checkpoint_every: as `kda_prefill` takes it.

    Returns:
        `[N + 1]` int32: NumPy for what NumPy holds, else a JAX array, made without reading the device.

    Raises:
        ValueError, TypeError: for a wrong `checkpoint_every`.

    Examples:
        >>> import jax_kda
        >>> jax_kda.checkpoint_offsets([0, 200, 263, 400], 64).tolist()  # 3, 0 and 2 of them
        [0, 3, 3, 5]
    """
    every = contract.check_checkpoint_every(checkpoint_every)
    xnp: Any = jnp if isinstance(cu_seqlens, jax.Array) else np
    bounds = xnp.asarray(cu_seqlens)
    counts = (bounds[1:] - bounds[:-1]) // every
    return xnp.concatenate([xnp.zeros(1, xnp.int32), xnp.cumsum(counts).astype(xnp.int32)])


def token_rows(T: int, every: int, offsets: jax.Array | None) -> jax.Array:
    """`[T]` int32: the row that the state behind each token is a checkpoint for, `T // every` where it is
    none. `offsets [N + 1]` are those of one packed row.
    """
    position = jnp.arange(T, dtype=jnp.int32)
    if offsets is None:
        number = position + 1
        row = number // every - 1
        return jnp.where(number % every == 0, row, T // every)
    sequence = jnp.searchsorted(offsets, position, side="right") - 1
    inside = (sequence >= 0) & (sequence < offsets.shape[0] - 1)
    of = jnp.where(inside, sequence, 0)
    number = position - offsets[of] + 1
    row = checkpoint_offsets(offsets, every)[of] + number // every - 1
    return jnp.where(inside & (number % every == 0), row, T // every).astype(jnp.int32)


def of_used_sequences(
    checkpoints: jax.Array, is_used: jax.Array, every: int, cu_seqlens: jax.Array | None
) -> jax.Array:
    """The checkpoints, zeros where `is_used [N]` says that their sequence is a padding slot."""
    if cu_seqlens is None:
        keeps = jnp.repeat(is_used, checkpoints.shape[0] // max(is_used.shape[0], 1))
    else:
        row = jnp.arange(checkpoints.shape[0], dtype=jnp.int32)
        sequence = jnp.searchsorted(checkpoint_offsets(cu_seqlens, every), row, side="right") - 1
        keeps = is_used.at[sequence].get(mode="clip")
    return jnp.where(keeps[:, None, None, None], checkpoints, jnp.zeros((), checkpoints.dtype))
