"""What happens to the gate, to beta and to q, k before the recurrence sees them.

The operands are those of the primitive: g [B, T, HV, K], beta [B, T, HV], A_log [R, HV], dt_bias [R, HV, K]
with R in {1, B}; leading axes in front of B are allowed. Everything is computed in the dtype asked for,
float32 or float64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_kda.contract import BetaMode, GateMode, Options

__all__ = ["L2_EPSILON", "l2_normalise", "log_decay", "write_strength"]

L2_EPSILON = 1e-6  # on the sum of squares, inside the root


def log_decay(
    options: Options, g: jax.Array, A_log: jax.Array | None, dt_bias: jax.Array | None, dtype: DTypeLike
) -> jax.Array:
    """The natural log of each channel's decay, [B, T, HV, K] and <= 0, by the gate mode of `options`."""
    g = g.astype(dtype)
    if options.gate == GateMode.LOG:
        return g
    assert A_log is not None  # the contract: every gate but LOG has one
    rate = jnp.exp(A_log.astype(dtype))[:, None, :, None]
    if dt_bias is not None:
        g = g + dt_bias.astype(dtype)[:, None]
    if options.gate == GateMode.SOFTPLUS:
        # logaddexp neither overflows nor blends branches, so -100 and 120 are both exact and differentiable.
        return -rate * jnp.logaddexp(g, jnp.zeros((), dtype))
    return jnp.asarray(options.lower_bound, dtype) * jax.nn.sigmoid(rate * g)


def write_strength(options: Options, beta: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Beta as the delta rule uses it, [B, T, HV]: never rounded below `dtype`."""
    beta = beta.astype(dtype)
    if options.beta == BetaMode.PLAIN:
        return beta
    beta = jax.nn.sigmoid(beta)
    return 2 * beta if options.beta == BetaMode.SIGMOID_DOUBLED else beta


def l2_normalise(x: jax.Array) -> jax.Array:
    """`x * rsqrt(sum x^2 + 1e-6)` over the last axis, for every finite bfloat16 or float32 x.

    A plain float32 sum of squares overflows from |x| = 2**64 on; such rows are scaled by a power of two
    first, which is exact, so that no other row changes in any bit.
    """
    small = x * jnp.asarray(2.0**-100, x.dtype)
    squares, small_squares = (jnp.sum(y * y, axis=-1, keepdims=True) for y in (x, small))
    is_large = squares > 2.0**80
    # The unused branch must be harmless too, or the gradient of the zero row is NaN.
    small_squares = jnp.where(is_large, small_squares, 1.0)
    return jnp.where(is_large, small * jax.lax.rsqrt(small_squares), x * jax.lax.rsqrt(squares + L2_EPSILON))
