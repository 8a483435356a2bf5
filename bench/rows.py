"""Result files: their rows, how they are written, read and shown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .shapes import Shape

__all__ = [
    "ERROR_BARS",
    "KEYS",
    "Row",
    "check",
    "columns",
    "error_bar",
    "failures",
    "identity",
    "ordered",
    "read",
    "shape_fields",
    "spreads",
    "table",
    "write",
]

Row = dict[str, Any]

# Every row of a result file has these. What may be null says so.
KEYS: dict[str, tuple[type, ...]] = {
    "digest": (str,),  # of the product, bench/digest.py
    "commit": (str,),  # "+" at its end: the product had changes on top of it
    "gpu": (str,),
    "driver": (str,),
    "jax": (str,),
    "cuda": (str,),
    "set": (str,),
    "B": (int,),
    "T": (int,),
    "H": (int,),
    "HV": (int,),
    "lengths": (list, type(None)),  # of packed sequences; null: a row is one sequence
    "gates": (str,),  # the regime
    "gate": (str,),  # the input that it goes through: "safe", "softplus", "log"
    "dtype": (str,),  # of q, k, v, beta and o
    "g_dtype": (str,),
    "route": (str,),
    "package": (str, type(None)),  # that a peer comes with, and its version; null: ours
    "kernels": (list,),  # what one call put on the stream, in order; empty: not read
    "median_us": (int, float),  # GPU time of one call, L2 flushed before it
    "min_us": (int, float),
    "round_us": (list,),  # the median of each round
    "calls": (int,),
    "wall_us": (int, float, type(None)),  # a call in a queued loop of jitted ones; null: not measured
    "floor_us": (int, float),  # bytes of the token arrays over copy_rate
    "copy_rate": (int, float),  # bytes a second, read and written ones counted, in the same run
    "err_o": (int, float, type(None)),  # relative, Frobenius, against the f64 recurrence; null: not finite
    "err_state": (int, float, type(None)),
}

# A row of what could not be timed has "failed", the reason, and no figures.
FIGURES = ("median_us", "min_us", "round_us", "calls", "wall_us", "err_o", "err_state")

# Only in rows of calls that return state checkpoints: tokens from one to the next.
OPTIONAL: dict[str, tuple[type, ...]] = {"checkpoint_every": (int,)}

# What makes two rows figures of the same thing.
_IDENTITY = ("set", "B", "T", "H", "HV", "lengths", "gates", "gate", "dtype", "g_dtype", "route")

ERROR_BARS = {"collinear": 3e-2}
ERROR_BAR = 6e-3
PEER_ERROR_BAR = 2e-2  # what shows that another implementation computes the same thing, and no more


def error_bar(row: Row) -> float:
    """The largest relative error that this row may have."""
    ours = ERROR_BARS.get(row["gates"], ERROR_BAR)
    return ours if row["package"] is None else max(ours, PEER_ERROR_BAR)


def identity(row: Row) -> tuple[Any, ...]:
    own = tuple(tuple(x) if isinstance(x := row[key], list) else x for key in _IDENTITY)
    return (*own, row.get("checkpoint_every", 0))


def shape(row: Row) -> Shape:
    sizes = (row["B"], row["T"], row["H"], row["HV"], tuple(row["lengths"] or ()))
    return Shape(*sizes, row["gate"], row["g_dtype"], row.get("checkpoint_every", 0))


def shape_fields(s: Shape) -> Row:
    return {
        "B": s.B,
        "T": s.T,
        "H": s.H,
        "HV": s.HV,
        "lengths": list(s.lengths) or None,
        "gate": s.gate,
        "dtype": "bfloat16",
        "g_dtype": s.g_dtype,
        **({"checkpoint_every": s.checkpoint_every} if s.checkpoint_every else {}),
    }


def ordered(row: Row) -> Row:
    """The row with its keys in order, and no others."""
    return {key: row[key] for key in (*KEYS, *OPTIONAL) if key in KEYS or key in row}


def is_right(row: Row) -> bool:
    """Whether both errors are finite and within the bar."""
    return all(x is not None and x <= error_bar(row) for x in (row["err_o"], row["err_state"]))


def check(row: Row) -> None:
    """ValueError where a row lacks a key, has one of another type, or a number that JSON has not."""
    for key, types in (KEYS | {key: OPTIONAL[key] for key in OPTIONAL if key in row}).items():
        if "failed" in row and key in FIGURES:
            if key in row or not row["failed"]:
                raise ValueError(f"a figure, or no reason, where nothing was timed: {row}")
            continue
        if key not in row:
            raise ValueError(f"a row lacks {key!r}: {row}")
        if not isinstance(row[key], types) or isinstance(row[key], bool):
            raise ValueError(f"{key!r} is {row[key]!r} in {row}")
        if isinstance(row[key], float) and not math.isfinite(row[key]):
            raise ValueError(f"{key!r} is not finite in {row}")
    if not row["gates"]:
        raise ValueError(f"a figure without its gate regime: {row}")


def write(path: Path, rows: Iterable[Row]) -> None:
    """One row a line: a changed figure is a changed line."""
    lines = []
    for row in rows:
        check(row)
        lines.append(json.dumps(row, allow_nan=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def read(path: Path) -> list[Row]:
    """The rows with figures."""
    return [row for row in _read(path) if "failed" not in row]


def failures(path: Path) -> list[Row]:
    """The rows of what could not be timed."""
    return [row for row in _read(path) if "failed" in row]


def _read(path: Path) -> list[Row]:
    rows: list[Row] = json.loads(path.read_text())
    for row in rows:
        check(row)
    return rows


_COLUMNS = (
    "set",
    "shape",
    "gates",
    "route",
    "median",
    "min",
    "wall",
    "floor",
    "share",
    "err o",
    "err state",
    "",
)


def table(rows: Sequence[Row]) -> str:
    """The rows as text, microseconds; the share is how much of the memory's speed a call reached."""
    lines = [_COLUMNS]
    for row in rows:
        lines.append(
            (
                row["set"],
                str(shape(row)),
                row["gates"],
                row["route"],
                f"{row['median_us']:.1f}",
                f"{row['min_us']:.1f}",
                "-" if row["wall_us"] is None else f"{row['wall_us']:.1f}",
                f"{row['floor_us']:.1f}",
                f"{row['floor_us'] / row['median_us']:.0%}",
                _error(row["err_o"]),
                _error(row["err_state"]),
                "" if is_right(row) else "WRONG",
            )
        )
    return columns(lines, left=4)


def _error(x: float | None) -> str:
    return "nan" if x is None else f"{x:.1e}"


def columns(lines: Sequence[Sequence[str]], left: int) -> str:
    """Lines of cells as text: the first `left` columns start at the left, the others end at the right."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if i < left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def spreads(rows: Sequence[Row], above: float = 1.05) -> list[str]:
    """A line for each shape and route whose gate regimes differ by more than this factor."""
    groups: dict[tuple[Any, ...], dict[str, float]] = {}
    names = {}
    for row in rows:
        key = (shape(row), row["route"])
        groups.setdefault(key, {})[row["gates"]] = row["median_us"]
        names[key] = f"{shape(row)} {row['route']}"
    lines = []
    for key, times in groups.items():
        fast, slow = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
        if times[slow] > above * times[fast]:
            lines.append(
                f"{names[key]}: {slow} gates {times[slow]:.1f} us, {fast} gates {times[fast]:.1f} us, "
                f"{times[slow] / times[fast]:.2f} times"
            )
    return lines
