"""kda_prefill as one JAX primitive, and the layers that teach it (and decode.py's) JAX's transformations.

    prefill(options, operands) = apply(PREFILL, options, operands)
      -> custom_vjp           reverse mode: backward, the form in plain JAX is differentiated
      -> custom_vmap          a mapped axis is folded into B, so that vmap meets the same kernels
      -> custom_partitioning  batch and heads split over devices; absent where no partitioner runs
      -> kda_prefill_p        abstract evaluation, and the lowering of each platform

The operands are flat and canonical (`Options.operand_names`; optional ones only where the options say so):

    q, k           [B, T, H, K]
    v              [B, T, HV, V]
    g              [B, T, HV, K]
    beta           [B, T, HV]
    A_log          [R, HV]           with R = 1 (all rows share the gate) or B; both absent for log decays
    dt_bias        [R, HV, K]
    initial_state  [B, N, HV, K, V]  (V, K with state_v_first)
    offsets        [B, N + 1]        where rows are packed

The results are o [B, T, HV, V] and, if wanted, final_state [B, N, HV, K, V] (V, K with state_v_first) and
checkpoints [B, T // n, HV, K, V], of a row's sequences one after the other.

The route is chosen in the lowering, from the shapes found there: by then vmap has folded and shardings have
split.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from . import ffi, partitioning, pools, routing
from .chunked import chunked_prefill
from .contract import Options, Problem

__all__ = ["Operation", "apply", "kda_prefill_p", "lower_call", "lowering_device", "prefill"]

Arrays = tuple[jax.Array, ...]


class Operation(NamedTuple):
    """What the layers need to know of an operation on canonical operands."""

    primitive: Primitive
    plain: Callable[
        ..., Arrays
    ]  # (options, *operands): the same in plain JAX, which derivatives are taken of


def prefill(options: Options, operands: Sequence[jax.Array]) -> Arrays:
    """The results named by `options.result_names`, with every transformation in place."""
    return apply(PREFILL, options, operands)


def apply(operation: Operation, options: Options, operands: Sequence[jax.Array]) -> Arrays:
    """The operation's results, with every transformation in place."""
    call = functools.partial(_differentiable, operation, options)
    return partitioning.split_explicitly(options, _vary_together(operands), call)


# ---- the primitive

kda_prefill_p = Primitive("kda_prefill")
kda_prefill_p.multiple_results = True
PREFILL = Operation(kda_prefill_p, chunked_prefill)


@kda_prefill_p.def_impl
def _evaluate(*operands: jax.Array, options: Options) -> Any:
    # Under jit, so that an eager call finds its executable again instead of lowering anew; even where jit is
    # disabled, as there is nothing below the primitive to step through.
    with jax.disable_jit(False):
        return _compiled(*operands, options=options)


@functools.partial(jax.jit, static_argnames=("options",))
def _compiled(*operands: jax.Array, options: Options) -> Any:
    return kda_prefill_p.bind(*operands, options=options)


@kda_prefill_p.def_abstract_eval
def _abstract(*operands: Any, options: Options, shard: bool = False) -> tuple[Any, ...]:
    problem = Problem.from_operands(options, operands)
    v = operands[2]
    # Made from v's type, results vary over the mesh axes that v varies over: those of all operands, see
    # prefill.
    output = v.update(shape=problem.output_shape, weak_type=False)
    batch, _, heads, _ = v.sharding.spec if len(v.sharding.spec) == 4 else (None,) * 4
    sharding = NamedSharding(v.sharding.mesh, PartitionSpec(batch, None, heads, None, None))
    dtype = jnp.dtype(options.state_dtype)
    shapes = {"final_state": problem.state_shape}
    if options.checkpoint_every:
        shapes["checkpoints"] = problem.checkpoints_shape
    return output, *(
        v.update(shape=shapes[name], dtype=dtype, weak_type=False, sharding=sharding)
        for name in options.result_names[1:]
    )


def _lower(ctx: Any, *operands: Any, options: Options, shard: bool = False) -> Any:
    device = lowering_device(ctx)

    def call(*operands: jax.Array) -> Arrays:
        problem = Problem.from_operands(options, operands)
        decision = routing.choose(problem, device, ffi.build())
        if isinstance(problem.B, int) and problem.B == 0:  # nothing to compute, nor to launch
            return tuple(jnp.zeros(aval.shape, aval.dtype) for aval in ctx.avals_out)
        with jax.named_scope(f"kda_prefill.{decision.route.value}"):
            if decision.route is routing.Route.XLA:
                return chunked_prefill(options, *operands)
            return ffi.call_prefill(options, operands, decision)

    return lower_call(ctx, call, operands, shard)


mlir.register_lowering(kda_prefill_p, _lower)
mlir.register_lowering(kda_prefill_p, _lower, platform="cuda")


def lower_call(ctx: Any, call: Callable[..., Arrays], operands: Sequence[Any], shard: bool) -> Any:
    """Lowers `call(*operands)`; with `shard`, as one device's share, for the partitioner."""
    results = mlir.lower_fun(call, multiple_results=True)(ctx, *operands)
    if shard:
        _forget_frames(ctx.module_context.module)
    return results


def _forget_frames(module: Any) -> None:
    """Takes the Python frames out of a program's locations, and leaves the names.

    For the program that the partitioner asks for, one device's share: XLA inlines it into the caller's, but
    not the table that its frames are numbered by. The numbers then point into the caller's table or past its
    end, and passes that follow them may never return (seen with jaxlib 0.10.2 and 0.11.2).
    """

    def forget(operation: Any) -> Any:
        # loc("add:"("path/add"(frames))) or loc("name"(frames))
        name = re.match(r'loc\((?:"[^"]*:"\()?"([^"]*)"[()]', str(operation.location))
        operation.location = ir.Location.name(name[1]) if name else ir.Location.unknown()
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(forget)


def lowering_device(ctx: Any) -> routing.Device:
    """What this lowering is for. On CUDA: its devices if it knows them, else this process's GPU, else an
    H200.
    """
    platform = (ctx.platforms or ctx.module_context.platforms)[0]
    if platform != "cuda":
        return routing.Device(platform, platform.upper())
    axes = ctx.module_context.axis_context
    candidates = list(getattr(axes, "device_assignment", None) or ())
    with contextlib.suppress(RuntimeError):  # no GPU in this process: it lowers for another machine
        candidates += jax.local_devices(backend="cuda")
    facts = (ffi.device_facts(device) for device in candidates)
    return next((device for device in facts if device.platform == "cuda"), routing.H200)


# ---- derivatives


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(operation: Operation, options: Options, *operands: jax.Array) -> Arrays:
    return _batchable(operation.primitive, options)(*operands)


def _forward(operation: Operation, options: Options, *operands: jax.Array) -> tuple[Arrays, Arrays]:
    # Through _differentiable itself, so that a derivative of the derivative finds a rule here too.
    return _differentiable(operation, options, *operands), operands


def _backward(
    operation: Operation, options: Options, operands: Arrays, cotangents: Arrays
) -> tuple[jax.Array | None, ...]:
    count = len(operands) - len(options.integer_operands)  # the integers come last
    floats, integers = operands[:count], operands[count:]
    if isinstance(floats[0].shape[0], int) and floats[0].shape[0] == 0:
        return (*map(jnp.zeros_like, floats), *(None for _ in integers))
    _, transpose = jax.vjp(lambda *floats: operation.plain(options, *floats, *integers), *floats)
    return (*transpose(tuple(cotangents)), *(None for _ in integers))


_differentiable.defvjp(_forward, _backward)


# ---- vmap


@functools.cache
def _batchable(primitive: Primitive, options: Options) -> Callable[..., Arrays]:
    @custom_vmap
    def bind(*operands: jax.Array) -> Arrays:
        return partitioning.bind(primitive, options, operands)

    @bind.def_vmap
    def fold(size: int, mapped: Sequence[bool], *operands: jax.Array) -> tuple[Arrays, tuple[bool, ...]]:
        names = options.operand_names
        rows = {name: x.shape[1 if m else 0] for name, x, m in zip(names, operands, mapped, strict=True)}
        batch = rows["q"]
        gate = [i for i, name in enumerate(names) if name in ("A_log", "dt_bias")]
        # One gate for all rows stays one gate; otherwise every row gets its own, as the kernels count rows
        # once.
        shared = all(not mapped[i] and operands[i].shape[0] == 1 for i in gate)

        def into_batch(i: int) -> jax.Array:
            x = operands[i]
            if i in gate and shared:
                return x
            if not mapped[i]:
                x = jnp.broadcast_to(x, (size, *x.shape))
            if i in gate:
                x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
            if names[i] == "state_indices":
                x = pools.in_folded_pool(x, rows["pool"])
            return x.reshape(size * x.shape[1], *x.shape[2:])

        results = bind(*(into_batch(i) for i in range(len(names))))
        counts = (rows["pool"] if name == "new_pool" else batch for name in options.result_names)
        results = tuple(r.reshape(size, n, *r.shape[1:]) for n, r in zip(counts, results, strict=True))
        return results, (True,) * len(results)

    return bind


# ---- shard_map


def _vary_together(operands: Sequence[jax.Array]) -> Arrays:
    """Inside shard_map: every operand made to vary over all the mesh axes that any of them varies over.

    A replicated q with a sharded v has a result that differs per device; the type must say so, and the
    transpose of this cast is the sum over devices that the gradient of q then needs.
    """
    axes = [_varying_axes(x) for x in operands]
    union = frozenset[Any]().union(*axes)
    return tuple(_vary(x, tuple(sorted(union - own))) for x, own in zip(operands, axes, strict=True))


def _varying_axes(x: jax.Array) -> frozenset[Any]:
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)  # jax >= 0.11
    return frozenset(kind.varying if kind is not None else getattr(aval, "vma", ()))


def _vary(x: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    if not axes:
        return x
    pcast: Any = getattr(jax.lax, "pcast", None)
    if pcast is None:  # jax < 0.8.2
        pvary: Any = getattr(jax.lax, "pvary", None)
        return pvary(x, axes)
    return pcast(x, axes, to="varying")
