"""What is recorded under bench/results: read for the tables, the figures and the notebook.

A file of rows is one run in one process on one machine, so a ratio is only ever made of two rows of one file.
A file that is not there is an empty list: whoever shows it says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jax_kda import routing

from . import prefill, rows
from .digest import ROOT, digest
from .rows import Row
from .shapes import SETS, Case, Shape

__all__ = [
    "DECODE",
    "DECODE_PEERS",
    "FOLDER",
    "PEERS",
    "PREFILL",
    "auto_route",
    "best",
    "date",
    "failed",
    "gpu_tests",
    "group",
    "is_stale",
    "load",
    "missing",
    "number_formats",
    "prototypes",
    "provenance",
    "published",
    "routes",
    "tasks",
    "unique",
]

FOLDER = ROOT / "bench" / "results"
PREFILL, PEERS, DECODE = "h200-prefill.json", "h200-peers.json", "h200-decode.json"
DECODE_PEERS = "h200-decode-peers.json"
REGIONS, RANDOM, KERNELS = "h200-regions.json", "h200-random.json", "h200-kernels.json"
GPU_TESTS, PUBLISHED, FORMATS = "gpu-tests.json", "published.json", "number-formats.json"
PROTOTYPES = "prototypes.json"

_MADE_BY = {
    PREFILL: "python -m bench.prefill",
    PEERS: "python -m bench.peers",
    DECODE_PEERS: "python -m bench.peers",
    KERNELS: "python -m bench.kernels",
}


def load(name: str, folder: Path = FOLDER) -> list[Row]:
    """The right rows of a result file; none where there is no such file. A wrong result is no figure."""
    path = folder / name
    return [row for row in rows.read(path) if rows.is_right(row)] if path.is_file() else []


def failed(name: str, folder: Path = FOLDER) -> dict[str, list[str]]:
    """By route, why rows of a result file have no figures, each reason once."""
    path = folder / name
    why: dict[str, list[str]] = {}
    for row in rows.failures(path) if path.is_file() else []:
        reasons = why.setdefault(row["route"], [])
        if row["failed"] not in reasons:
            reasons.append(row["failed"])
    return why


def missing(name: str) -> str:
    """The line for a file without the rows that were looked for."""
    made_by = f"; `{_MADE_BY[name]}` writes it on a GPU" if name in _MADE_BY else ""
    return f"No rows yet in bench/results/{name}{made_by}."


def gpu_tests(folder: Path = FOLDER) -> dict[str, Any]:
    """The record of the tests that ran on a GPU; empty where there is none."""
    return _read(folder / GPU_TESTS)


def number_formats(folder: Path = FOLDER) -> dict[str, Any]:
    """What bench.number_formats found; empty where it has not run."""
    return _read(folder / FORMATS)


def published(folder: Path = FOLDER) -> dict[str, Any]:
    """Figures that others published, with where they stand."""
    return _read(folder / PUBLISHED)


def prototypes(folder: Path = FOLDER) -> dict[str, Any]:
    """What the kernels' prototypes took, and the clock that figures in cycles are for."""
    return _read(folder / PROTOTYPES)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def unique(found: Iterable[Row]) -> list[Row]:
    """One row for each shape, regime and route: a shape that is in two sets was timed once."""
    return list({(rows.shape(row), row["gates"], row["route"]): row for row in found}.values())


def group(found: Iterable[Row], gates: str, sets: Sequence[str] = ()) -> dict[Shape, dict[str, Row]]:
    """The rows of one regime by shape and route, in the order of the sets; of these sets alone, if any."""
    table: dict[Shape, dict[str, Row]] = {}
    for row in unique(row for row in found if row["gates"] == gates):
        table.setdefault(rows.shape(row), {})[row["route"]] = row
    wanted = [shape for name in sets or SETS for shape in SETS[name]]
    order = list(dict.fromkeys(wanted if sets else [*wanted, *table]))
    return {shape: table[shape] for shape in order if shape in table}


def routes(found: Iterable[Row]) -> list[str]:
    """Every route once: ours in the order of jax_kda.Route, others of ours, then the peers."""
    names = {row["route"]: row["package"] is not None for row in found}
    ours = [name for name, peer in names.items() if not peer]
    order = [route.value for route in routing.Route]
    known = [name for name in order if name in ours]
    return [*known, *(n for n in ours if n not in known), *(n for n, peer in names.items() if peer)]


def tasks(row: Row) -> int:
    """Sequences times value heads: what a kernel with one CTA a task has of them."""
    return rows.shape(row).sequences * row["HV"]


def auto_route(shape: Shape, device: routing.Device = routing.H200) -> str:
    """The route that `auto` takes, with this tree's regions."""
    (case,) = prefill.resolve([Case(shape, "production", "auto")], device)
    return case.route


def best(of_shape: dict[str, Row]) -> Row | None:
    """Our fastest row of one shape; None where all are peers'."""
    ours = [row for row in of_shape.values() if row["package"] is None]
    return min(ours, key=lambda row: row["median_us"]) if ours else None


OLDER = ". Older than the code beside it, which has changed since"


def is_stale(found: Iterable[dict[str, Any]]) -> bool:
    """Whether any of these rows or records was measured on other code than this tree's."""
    return {row["digest"] for row in found} != {digest()}


def date(found: Sequence[Row], folder: Path = FOLDER) -> str:
    """The day of the GPU tests of the same product, as the rows have none; "" where those are of another."""
    tests = gpu_tests(folder)
    same = tests and {row["digest"] for row in found} == {tests["digest"]}
    return str(tests["date"]) if same else ""


def provenance(found: Sequence[Row], folder: Path = FOLDER) -> str:
    """Where the rows come from, and whether the code has changed since: for the line under a table."""
    parts = []
    for name, words in (
        ("gpu", "{}"),
        ("driver", "driver {}"),
        ("cuda", "CUDA {}"),
        ("jax", "jax {}"),
        ("commit", "commit {}"),
        ("digest", "product digest {}"),
    ):
        parts.append(words.format(" and ".join(sorted({row[name] for row in found}))))
    if day := date(found, folder):
        parts.insert(1, day)
    text = ", ".join(parts)
    return text + (OLDER if is_stale(found) else "")
