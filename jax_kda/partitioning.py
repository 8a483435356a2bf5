"""How the operation splits over devices: by batch rows and by heads, never by tokens or channels.

Left alone, XLA's partitioner gathers every operand of a custom call that it does not know onto every device.
So under automatic sharding the primitive is wrapped in `custom_partitioning`, which tells it. Where more than
one device takes part that wrapper has a price (no persistent compilation cache, no `jax.export`); it is left
out where no partitioner runs, inside a `shard_map` that is manual over its whole mesh. Serving code should
use that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .contract import Options, Problem

__all__ = ["bind", "local_problem", "split_explicitly"]

# The dimensions of operands and results. Batch ("b") and heads ("h" of q and k, "w" of the rest) may be
# split; tokens, channels, the list of sequences and pools stay whole, and so does the batch of a call with a
# pool: any row may name any state of it.
_DIMENSIONS = {
    "q": "bthk",
    "k": "bthk",
    "v": "btwv",
    "g": "btwk",
    "beta": "btw",
    "A_log": "rw",
    "dt_bias": "rwk",
    "initial_state": "bnwkv",
    "offsets": "bm",
    "pool": "pwkv",
    "state_indices": "b",
    "o": "btwv",
    "final_state": "bnwkv",
    "new_pool": "pwkv",
    "checkpoints": "bcwkv",
}

# A mesh axis, several, or none: one entry of a PartitionSpec.
Axes = Any


def bind(primitive: Primitive, options: Options, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Binds the primitive, with the partitioning rule around it where a partitioner may run."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.are_all_axes_manual:
        return tuple(primitive.bind(*operands, options=options))
    devices = math.prod(mesh.shape[name] for name in mesh.auto_axes) if mesh.manual_axes else None
    problem = Problem.from_operands(options, operands)
    gate_rows = (
        operands[options.operand_names.index("A_log")].shape[0] if "A_log" in options.operand_names else 1
    )
    per_row_gate = isinstance(gate_rows, int) and gate_rows > 1
    return tuple(_partitioned(primitive, options, problem.H, problem.HV, per_row_gate, devices)(*operands))


def split_explicitly(
    options: Options, operands: Sequence[jax.Array], call: Callable[..., tuple[jax.Array, ...]]
) -> tuple[jax.Array, ...]:
    """`call(*operands)`; over a mesh with explicit axes, a `shard_map` of it along their shardings.

    There the types say how everything is split: no partitioner is asked. What cannot be had is a vmap whose
    mapped axis is itself split over an explicit mesh axis, as JAX refuses to map the `shard_map` then. Fold
    that axis into B first.
    """
    types = [jax.typeof(x) for x in operands]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:  # outside jax.set_mesh
        mesh = next((t.sharding.mesh for t in types if not t.sharding.mesh.empty), mesh)
    if not mesh.explicit_axes:
        return call(*operands)
    names = options.operand_names
    specs = {name: _entries(t) for name, t in zip(names, types, strict=True)}
    split = _split(Problem.from_operands(options, operands), specs, dict(mesh.shape))
    spec = _spec_of(options, operands, *split)
    arguments = tuple(spec(name) for name in names)
    placed = (
        jax.sharding.reshard(x, NamedSharding(mesh, wanted))
        for x, wanted in zip(operands, arguments, strict=True)
    )
    results = tuple(spec(name) for name in options.result_names)
    axes = set(mesh.axis_names) - set(mesh.manual_axes)
    return jax.shard_map(call, mesh=mesh, in_specs=arguments, out_specs=results, axis_names=axes)(*placed)


def local_problem(problem: Problem, operands: dict[str, Any]) -> Problem:
    """The problem that one device sees: `operands` are q, k, v, g by name, with shardings."""
    named = [x.sharding for x in operands.values() if isinstance(x.sharding, NamedSharding)]
    if not named or named[0].mesh.empty:
        return problem
    sizes = dict(named[0].mesh.shape)
    batch, heads = _split(problem, {name: _entries(x) for name, x in operands.items()}, sizes)
    rows, shards = _count(batch, sizes), _count(heads, sizes)
    H = problem.H if problem.H == 1 else problem.H // shards
    return replace(problem, B=problem.B if rows == 1 else problem.B // rows, H=H, HV=problem.HV // shards)


def _split(problem: Problem, specs: dict[str, Sequence[Axes]], sizes: dict[Any, int]) -> tuple[Axes, Axes]:
    """The mesh axes that split the batch and the value heads, by the specs of q, k, v, g.

    The first of q, k, v, g that is split decides: slicing a whole operand is free, gathering a split one is
    not. Where a size does not divide, that dimension stays whole.
    """

    def divides(axes: Axes, *lengths: Any) -> bool:
        return all(isinstance(n, int) and n % _count(axes, sizes) == 0 for n in lengths)

    # A single query/key head serves every value head, so it stays whole while they are split.
    heads_of = ("v", "g") if problem.H == 1 else ("q", "k", "v", "g")
    lengths = (problem.HV,) if problem.H == 1 else (problem.H, problem.HV)
    batch = _first(specs[name][0] for name in ("q", "k", "v", "g") if divides(specs[name][0], problem.B))
    heads = _first(specs[name][2] for name in heads_of if divides(specs[name][2], *lengths))
    if problem.options.pooled:
        batch = None
    if set(_names(batch)) & set(_names(heads)):
        heads = None
    return batch, heads


def _spec_of(
    options: Options, operands: Sequence[Any], batch: Axes, heads: Axes
) -> Callable[[str], PartitionSpec]:
    """The spec of each operand and result, by name."""
    named = dict(zip(options.operand_names, operands, strict=True))
    one_head, gate_rows = named["q"].shape[2] == 1, named["A_log"].shape[0] if "A_log" in named else 1
    axes = {
        "b": batch,
        "r": batch if isinstance(gate_rows, int) and gate_rows > 1 else None,
        "h": None if one_head else heads,
        "w": heads,
    }
    return lambda name: PartitionSpec(*(axes.get(letter) for letter in _DIMENSIONS[name]))


@functools.cache
def _partitioned(
    primitive: Primitive, options: Options, H: int, HV: int, per_row_gate: bool, devices: int | None
) -> Callable[..., tuple[jax.Array, ...]]:
    names = options.operand_names

    def shardings(mesh: Mesh, operands: Sequence[Any]) -> tuple[Mesh, tuple[NamedSharding, ...], Any]:
        mesh, specs = _specs(mesh, dict(zip(names, operands, strict=True)), devices)
        split = _split(Problem.from_operands(options, operands), specs, dict(mesh.shape))
        spec = _spec_of(options, operands, *split)
        arguments = tuple(NamedSharding(mesh, spec(name)) for name in names)
        return mesh, arguments, tuple(NamedSharding(mesh, spec(name)) for name in options.result_names)

    def partition(mesh: Mesh, operands: Sequence[Any], _: Any) -> Any:
        mesh, arguments, results = shardings(mesh, operands)
        return mesh, shard, results, arguments

    def infer_sharding_from_operands(mesh: Mesh, operands: Sequence[Any], _: Any) -> Any:
        return shardings(mesh, operands)[2]

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(primitive.bind(*operands, options=options))

    def shard(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(primitive.bind(*operands, options=options, shard=True))

    wrapped = custom_partitioning(call)
    rule, factors = _shardy_rule(options, H, HV, per_row_gate)
    wrapped.def_partition(
        partition, infer_sharding_from_operands=infer_sharding_from_operands, sharding_rule=rule, **factors
    )
    return wrapped


def _shardy_rule(options: Options, H: int, HV: int, per_row_gate: bool) -> tuple[str, dict[str, Any]]:
    """The same in Shardy's notation. Value heads are the query/key heads times the group that each serves."""
    group = HV // H
    factors: dict[str, Any] = {"need_replication_factors": tuple("btkvp" if options.pooled else "tkvnmc")}

    def term(name: str) -> str:
        letters = _DIMENSIONS[name]
        if options.state_v_first and name.endswith(("state", "pool", "checkpoints")):
            letters = letters.replace("kv", "vk")
        if per_row_gate:
            letters = letters.replace("r", "b")
        if H == 1:
            return " ".join(letters)
        return " ".join(letters.replace("w", "h")) if group == 1 else " ".join(letters).replace("w", "(h u)")

    if H > 1 and group > 1:
        factors["u"] = group
    text = f"{', '.join(map(term, options.operand_names))} -> {', '.join(map(term, options.result_names))}"
    used = tuple(f for f in factors["need_replication_factors"] if f in text)
    return text, factors | {"need_replication_factors": used}


def _specs(
    mesh: Mesh, operands: dict[str, Any], devices: int | None
) -> tuple[Mesh, dict[str, Sequence[Axes]]]:
    """The mesh and the operands' specs.

    Where the partitioner's shardings name no mesh axes (in a `shard_map` over some axes of the mesh only, for
    one), a mesh is made up here from how often each operand's batch and heads are split; `devices` are then
    partitioned over.
    """
    if not mesh.empty:
        return mesh, {name: _entries(x) for name, x in operands.items()}
    everyone = sorted(
        next(x.sharding.device_set for x in operands.values() if x.sharding is not None), key=lambda d: d.id
    )
    everyone = everyone[:devices]

    def shards(dimension: int, most: int) -> int:
        counts = (_shards(operands[name], dimension) for name in ("q", "k", "v", "g"))
        return next((count for count in counts if count > 1 and most % count == 0), 1)

    rows = shards(0, len(everyone))
    heads = shards(2, len(everyone) // rows)
    mesh = Mesh(np.array(everyone).reshape(rows, heads, -1), ("batch", "heads", "rest"))
    entries = ("batch" if rows > 1 else None, None, "heads" if heads > 1 else None)
    return mesh, dict.fromkeys(operands, entries)


def _shards(x: Any, dimension: int) -> int:
    """In how many equal parts this dimension is split; 1 if they are not equal."""
    try:
        part = x.sharding.shard_shape(tuple(x.shape))[dimension]
    except (AttributeError, ValueError):
        return 1
    return x.shape[dimension] // part if part else 1


def _entries(x: Any) -> Sequence[Axes]:
    spec = tuple(x.sharding.spec) if isinstance(x.sharding, NamedSharding) else ()
    return spec + (None,) * (len(x.shape) - len(spec))


def _count(axes: Axes, sizes: dict[Any, int]) -> int:
    return math.prod(sizes[name] for name in _names(axes))


def _names(axes: Axes) -> tuple[Any, ...]:
    if axes is None or axes is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(axes) if isinstance(axes, tuple) else (axes,)


def _first(candidates: Iterable[Axes]) -> Axes:
    return next((axes for axes in candidates if _names(axes)), None)
