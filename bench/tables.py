"""The rows in bench/results as Markdown: for the README and the notebook."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_kda import regimes, regions

from . import figures, records, rows
from .rows import Row
from .shapes import Shape

__all__ = ["accuracy", "markdown", "peers", "regimes_spread", "routed", "speedup", "times", "us", "walls"]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table; the first `left` columns are text, the others numbers."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(
        "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|" for cells in (head, rule, *lines)
    )


def us(x: float) -> str:
    """Microseconds as the tables have them."""
    return f"{x:.1f}"


def floor(x: float) -> str:
    """A floor as the tables have it: three digits are more than it deserves."""
    return f"{x:.1f}" if x < 100 else f"{x:.0f}"


def shape_name(shape: Shape) -> str:
    """The first cell of a line; one name for one shape of the sets."""
    if shape.lengths and len(set(shape.lengths)) == 1:
        return f"{len(shape.lengths)} x {shape.lengths[0]} packed, H = {shape.HV}"
    if shape.lengths:
        return f"{', '.join(map(str, shape.lengths))} packed, H = {shape.HV}"
    heads = str(shape.H) if shape.H == shape.HV else f"{shape.H}, {shape.HV} value heads"
    gate = {"safe": "", "softplus": ", softplus gate", "log": ", log gates"}[shape.gate]
    return f"{shape.B}x{shape.T}x{heads}{gate}{' in f32' if shape.g_dtype == 'float32' else ''}"


def times(found: Sequence[Row], gates: str, sets: Sequence[str]) -> str:
    """Microseconds of every route of ours, the memory's floor, and the share of it that the best reaches."""
    ours = [row for row in found if row["package"] is None]
    table = records.group(ours, gates, sets)
    shown = records.routes(row for of in table.values() for row in of.values())
    lines = []
    for shape, of_shape in table.items():
        best = records.best(of_shape)
        assert best is not None
        lines.append(
            [
                shape_name(shape),
                *(us(of_shape[route]["median_us"]) if route in of_shape else "" for route in shown),
                floor(best["floor_us"]),
                f"{100 * best['floor_us'] / best['median_us']:.1f} %",
            ]
        )
    return markdown(["B x T x H", *(f"`{route}`" for route in shown), "floor", "share of it"], lines)


def peers(found: Sequence[Row], sets: Sequence[str], gates: Sequence[str] = ("production", "slow")) -> str:
    """Microseconds of ours and of the peers in one run, and the best peer over the best of ours."""
    shown = records.routes(found)
    lines = []
    for name in gates:
        for shape, of_shape in records.group(found, name, sets).items():
            best = records.best(of_shape)
            theirs = [row["median_us"] for row in of_shape.values() if row["package"] is not None]
            ratio = f"{min(theirs) / best['median_us']:.2f}" if best and theirs else ""
            times_of = (us(of_shape[route]["median_us"]) if route in of_shape else "" for route in shown)
            lines.append([shape_name(shape), name, *times_of, ratio])
    head = ["B x T x H", "gates", *(f"`{route}`" for route in shown), "best peer / ours"]
    return markdown(head, lines, left=2)


def speedup(found: Sequence[Row], published: dict[str, Any], gates: str = "production") -> str:
    """The seed's table, measured here: the baseline, the fastest other route of ours, the speedup.

    Beside it the seed's speedup on its own GPU. "" where no other route was timed.
    """
    table = records.group((row for row in found if row["package"] is None), gates, ["seed"])
    theirs = {(r["B"], r["T"], r["H"]): r["baseline_us"] / r["owner_helper_us"] for r in published["rows"]}
    lines = []
    for shape, of_shape in table.items():
        others = {route: row for route, row in of_shape.items() if route != "baseline_m128"}
        best, baseline = records.best(others), of_shape.get("baseline_m128")
        if best is None or baseline is None:
            continue
        seed = theirs.get((shape.B, shape.T, shape.H))
        lines.append(
            [
                shape_name(shape),
                f"`{best['route']}`",
                us(baseline["median_us"]),
                us(best["median_us"]),
                f"{baseline['median_us'] / best['median_us']:.2f}",
                f"{seed:.2f}" if seed else "",
            ]
        )
    head = [
        "B x T x H",
        "fastest",
        "`baseline_m128`",
        "fastest",
        "speedup",
        f"the seed's, {published['gpu']}",
    ]
    return markdown(head, lines, left=2) if lines else ""


def regimes_spread(found: Sequence[Row]) -> float:
    """How much longer, at most, one shape and route takes in one gate regime than in another: 0.01 is 1 %."""
    groups: dict[Any, list[float]] = {}
    for row in found:
        if row["package"] is None:
            groups.setdefault((rows.shape(row), row["route"]), []).append(row["median_us"])
    return max((max(x) / min(x) - 1 for x in groups.values()), default=0.0)


def walls(found: Sequence[Row]) -> tuple[float, float] | None:
    """Least and most that a jitted call in a loop takes, over its GPU time; None where not measured."""
    ratios = [row["wall_us"] / row["median_us"] for row in found if row["wall_us"] is not None]
    return (min(ratios), max(ratios)) if ratios else None


def accuracy(tests: dict[str, Any]) -> str:
    """Worst errors of the GPU tests by regime and route, and those at 65,536 tokens. "" where none."""
    worst, far = figures.worst_errors(tests, ["dense"]), long_errors(tests)
    if not worst:
        return ""
    lines = [[name, *(_errors(worst[route].get(name)) for route in worst)] for name in regimes.REGIMES]
    for name in regimes.REGIMES:
        cells = [_errors(far.get(route, {}).get(name)) for route in worst]
        if any(cells):
            lines.append([f"{name}, 65,536 tokens", *cells])
    return markdown(["gates", *(f"`{route}`: o / state" for route in worst)], lines)


def _errors(pair: tuple[float, float] | None) -> str:
    return " / ".join(f"{x:.1e}".replace("e-0", "e-") for x in pair) if pair else ""


def long_errors(tests: dict[str, Any]) -> dict[str, dict[str, tuple[float, float]]]:
    """By route and regime, errors of o and the state at 65,536 tokens."""
    prefix = "test_accuracy.py::test_65536_tokens["
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for test in tests.get("tests", ()):
        if test["name"].startswith(prefix) and "figures" in test:
            route, regime = test["name"][len(prefix) : -1].rsplit("-", 1)
            found.setdefault(route, {})[regime] = (test["figures"]["o"], test["figures"]["state"])
    return found


def routed(table: Sequence[regions.Region] = regions.REGIONS) -> str:
    """The measured regions that `auto` reads, with the provenance of each; "" where there is none."""
    if not table:
        return ""
    names = [
        field.name
        for field in dataclasses.fields(table[0])
        if field.name not in ("route", "provenance", "measured")
    ]
    lines = [
        [f"auto: `{r.route}`", *(_range(name, getattr(r, name)) for name in names), r.provenance]
        for r in table
    ]
    head = [
        "first that holds",
        *(_REGION_NAMES.get(name, name.replace("_", " ")) for name in names),
        "on the word of",
    ]
    return markdown(head, lines, left=len(head))


_REGION_NAMES = {"tasks": "sequences x value heads", "tokens": "tokens of a sequence"}


def _range(name: str, value: Any) -> str:
    if not (isinstance(value, tuple) and len(value) == 2):
        return str(value)
    if name == "compute_capability":
        return f"{value[0]}.{value[1]}"
    low, high = value
    return f"{low:,}" if low == high else f"{low:,} to {high:,}" if high < 2**31 else f"from {low:,}"
