"""kda_decode as a JAX primitive: a few tokens a sequence, the state (or the pool of states) updated in place.

The operands are those of primitive.py, unpacked and always with a state; instead of `initial_state
[B, 1, HV, K, V]` there may be `pool [P, HV, K, V]` with `state_indices [B]` at the end. The results are o and
the new state or pool.

On CUDA it is the kernel of csrc/decode.cu where that serves, with the state's operand and result in one
buffer: XLA copies the operand first unless its last use is this one, as it is when the caller donates it.
Everywhere else it is the token recurrence.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from . import activations, ffi, pools, routing
from .contract import GateMode, Options, Problem
from .primitive import Arrays, Operation, apply, lower_call, lowering_device
from .reference import recurrence

__all__ = ["decode", "kda_decode_p", "recurrent_decode"]


def decode(options: Options, operands: Sequence[jax.Array]) -> Arrays:
    """`(o, new state or pool)` of the canonical operands, with every transformation in place."""
    return apply(DECODE, options, operands)


def recurrent_decode(options: Options, *operands: jax.Array) -> Arrays:
    """The same in plain JAX, token by token in float32."""
    # Shapes and dtypes are combined in NumPy's way here, however strict the caller is with his own.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return _recur(options, dict(zip(options.operand_names, operands, strict=True)))


def _recur(options: Options, named: dict[str, jax.Array]) -> Arrays:
    v = named["v"]
    A_log = named["A_log"] if options.gate != GateMode.LOG else None
    decays = activations.log_decay(options, named["g"], A_log, named.get("dt_bias"), jnp.float32)
    strengths = activations.write_strength(options, named["beta"], jnp.float32)
    q, k = (named[name].astype(jnp.float32) for name in ("q", "k"))
    if options.l2norm:
        q, k = activations.l2_normalise(q), activations.l2_normalise(k)

    def run(states: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = states.astype(jnp.float32)
        start = start.swapaxes(-1, -2) if options.state_v_first else start
        o, end = recurrence(q, k, v.astype(jnp.float32), decays, strengths, start, scale=options.scale)
        end = end.swapaxes(-1, -2) if options.state_v_first else end
        return o.astype(v.dtype), end.astype(states.dtype)

    if options.pooled:
        return pools.through_pool(run, named["pool"], named["state_indices"])
    o, state = run(named["initial_state"][:, 0])
    return o, state[:, None]


kda_decode_p = Primitive("kda_decode")
kda_decode_p.multiple_results = True
DECODE = Operation(kda_decode_p, recurrent_decode)


@kda_decode_p.def_impl
def _evaluate(*operands: jax.Array, options: Options) -> Any:
    with jax.disable_jit(False):  # as in primitive.py
        return _compiled(*operands, options=options)


@functools.partial(jax.jit, static_argnames=("options",))
def _compiled(*operands: jax.Array, options: Options) -> Any:
    return kda_decode_p.bind(*operands, options=options)


@kda_decode_p.def_abstract_eval
def _abstract(*operands: Any, options: Options, shard: bool = False) -> tuple[Any, ...]:
    named = dict(zip(options.operand_names, operands, strict=True))
    return named["v"].update(weak_type=False), named[options.state_operand].update(weak_type=False)


def _lower(ctx: Any, *operands: Any, options: Options, shard: bool = False) -> Any:
    device = lowering_device(ctx)

    def call(*operands: jax.Array) -> Arrays:
        problem = Problem.from_operands(options, operands)
        if isinstance(problem.B, int) and problem.B == 0:  # nothing to compute, nor to launch
            return jnp.zeros(problem.output_shape, operands[2].dtype), operands[
                options.operand_names.index(options.state_operand)
            ]
        uses_kernel = options.route == "auto" and not routing.decode_refuses(problem, device, ffi.build())
        with jax.named_scope(f"kda_decode.{'kernel' if uses_kernel else 'xla'}"):
            if uses_kernel:
                return ffi.call_decode(options, operands)
            return recurrent_decode(options, *operands)

    return lower_call(ctx, call, operands, shard)


mlir.register_lowering(kda_decode_p, _lower)
mlir.register_lowering(kda_decode_p, _lower, platform="cuda")
