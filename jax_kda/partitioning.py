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

__all__ = ["bind", "local_problem"]

# The dimensions of operands and results. Batch ("b") and heads ("h" of q and k, "w" of the rest) may be
# split; tokens, channels and the list of sequences stay whole.
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
    "o": "btwv",
    "final_state": "bnwkv",
}

# A mesh axis, several, or none: one entry of a PartitionSpec.
Axes = Any


def bind(primitive: Primitive, options: Options, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Binds the primitive, with the partitioning rule around it where a partitioner may run."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.are_all_axes_manual:
        return tuple(primitive.bind(*operands, options=options))
    problem = Problem.from_operands(options, operands)
    gate_rows = (
        operands[options.operand_names.index("A_log")].shape[0] if "A_log" in options.operand_names else 1
    )
    per_row_gate = isinstance(gate_rows, int) and gate_rows > 1
    return tuple(_partitioned(primitive, options, problem.H, problem.HV, per_row_gate)(*operands))


def local_problem(problem: Problem, operands: dict[str, Any]) -> Problem:
    """The problem that one device sees: `operands` are q, k, v, g by name, with their shardings."""
    named = [x.sharding for x in operands.values() if isinstance(x.sharding, NamedSharding)]
    if not named or named[0].mesh.empty:
        return problem
    sizes = dict(named[0].mesh.shape)
    batch, heads = _split(problem, {name: _entries(x) for name, x in operands.items()}, sizes)
    rows, shards = _count(batch, sizes), _count(heads, sizes)
    H = problem.H if problem.H == 1 else problem.H // shards
    return replace(problem, B=problem.B if rows == 1 else problem.B // rows, H=H, HV=problem.HV // shards)


def _split(problem: Problem, specs: dict[str, Sequence[Axes]], sizes: dict[Any, int]) -> tuple[Axes, Axes]:
    """The mesh axes that split the batch and the value heads, given the specs of q, k, v, g and the mesh's
    sizes.

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
    if set(_names(batch)) & set(_names(heads)):
        heads = None
    return batch, heads


@functools.cache
def _partitioned(
    primitive: Primitive, options: Options, H: int, HV: int, per_row_gate: bool
) -> Callable[..., tuple[jax.Array, ...]]:
    names = options.operand_names
    results = ("o", "final_state") if options.output_final_state else ("o",)

    def spec(name: str, batch: Axes, heads: Axes) -> PartitionSpec:
        letters = _DIMENSIONS[name]
        if per_row_gate:
            letters = letters.replace("r", "b")
        axes = {"b": batch, "h": None if H == 1 else heads, "w": heads}
        return PartitionSpec(*(axes.get(letter) for letter in letters))

    def shardings(mesh: Mesh, operands: Sequence[Any]) -> tuple[Mesh, tuple[NamedSharding, ...], Any]:
        mesh, specs = _specs(mesh, dict(zip(names, operands, strict=True)))
        batch, heads = _split(Problem.from_operands(options, operands), specs, dict(mesh.shape))
        arguments = tuple(NamedSharding(mesh, spec(name, batch, heads)) for name in names)
        return mesh, arguments, tuple(NamedSharding(mesh, spec(name, batch, heads)) for name in results)

    def partition(mesh: Mesh, operands: Sequence[Any], _: Any) -> Any:
        mesh, arguments, outputs = shardings(mesh, operands)
        return mesh, call, outputs, arguments

    def infer_sharding_from_operands(mesh: Mesh, operands: Sequence[Any], _: Any) -> Any:
        return shardings(mesh, operands)[2]

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(primitive.bind(*operands, options=options))

    wrapped = custom_partitioning(call)
    rule, factors = _shardy_rule(options, results, H, HV, per_row_gate)
    wrapped.def_partition(
        partition, infer_sharding_from_operands=infer_sharding_from_operands, sharding_rule=rule, **factors
    )
    return wrapped


def _shardy_rule(
    options: Options, results: Sequence[str], H: int, HV: int, per_row_gate: bool
) -> tuple[str, dict[str, Any]]:
    """The same in Shardy's notation. Value heads are the query/key heads times the group that each serves."""
    group = HV // H
    factors: dict[str, Any] = {"need_replication_factors": tuple("tkvnm")}

    def term(name: str) -> str:
        letters = _DIMENSIONS[name]
        if options.state_v_first and name.endswith("state"):
            letters = letters.replace("kv", "vk")
        if per_row_gate:
            letters = letters.replace("r", "b")
        if H == 1:
            return " ".join(letters)
        return " ".join(letters.replace("w", "h")) if group == 1 else " ".join(letters).replace("w", "(h u)")

    if H > 1 and group > 1:
        factors["u"] = group
    text = f"{', '.join(map(term, options.operand_names))} -> {', '.join(map(term, results))}"
    used = tuple(f for f in factors["need_replication_factors"] if f in text)
    return text, factors | {"need_replication_factors": used}


def _specs(mesh: Mesh, operands: dict[str, Any]) -> tuple[Mesh, dict[str, Sequence[Axes]]]:
    """The mesh and the operands' specs. A sharding that names no mesh axes counts as whole."""
    if mesh.empty:
        everyone = next(x.sharding.device_set for x in operands.values() if x.sharding is not None)
        mesh = Mesh(np.array(sorted(everyone, key=lambda device: device.id)), ("devices",))
    return mesh, {name: _entries(x) for name, x in operands.items()}


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
