"""`python -m bench.figures`: the README's figure, drawn from the rows in bench/results.

The notebook's figures are drawn here too. Every function takes rows and returns a figure, or None where there
are no rows for it. A figure of the README carries a digest of what it shows and of this file, so that a test
can tell, without drawing, whether it is in step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from jax_kda import regimes

from . import records, rows
from .digest import ROOT
from .rows import Row
from .shapes import Shape

__all__ = [
    "accuracy",
    "check",
    "decode",
    "errors",
    "main",
    "scaling",
    "shares",
    "speedup",
    "times",
    "winners",
]

README_FIGURE = ROOT / "docs" / "figures" / "h200-prefill.svg"
README_SETS = ("seed", "small", "serving", "packed")

# Okabe and Ito's palette: told apart by colour-blind eyes; the markers tell a route apart without any colour.
_STYLES = {
    "xla": ("#7f7f7f", "X", "xla"),
    "baseline_m128": ("#0072B2", "o", "baseline_m128"),
    "c4_m128_d15": ("#D55E00", "^", "c4_m128_d15"),
    "c4_m64_d10": ("#E69F00", "v", "c4_m64_d10"),
    "pool_m128": ("#8C564B", "p", "pool_m128"),
    "pool_m64": ("#4B0082", "h", "pool_m64"),
    "segmented": ("#009E73", "s", "segmented"),
    "decode": ("#56B4E9", "D", "decode"),
    "fla": ("#CC79A7", "P", "flash-linear-attention"),
    "cudnn_fused": ("#000000", "<", "cuDNN fused"),
    "cudnn_exact": ("#8C6D00", ">", "cuDNN exact (prepared inputs)"),
}
_OTHERS = [("#56B4E9", "d"), ("#2F4F4F", "*")]
_GATES = dict(zip(regimes.REGIMES, "o^vsDPX*", strict=True))
_FLOOR = {"color": "0.45", "marker": "|", "markersize": 9, "markeredgewidth": 1.6, "linestyle": "none"}

mpl.rcParams.update(
    {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "0.9",
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "svg.hashsalt": "jax_kda",
    }
)


def _style(route: str, among: Sequence[str]) -> tuple[str, str, str]:
    """Colour, marker and label; a route that this file does not know takes the next free ones."""
    if route in _STYLES:
        return _STYLES[route]
    unknown = [name for name in among if name not in _STYLES]
    color, marker = _OTHERS[unknown.index(route) % len(_OTHERS)]
    return color, marker, route


def _plain(axis: Any) -> None:
    """Numbers of a logarithmic axis as people write them."""

    def text(x: float, _: Any) -> str:
        return f"{x:,.0f}" if x >= 1 else f"{x:g}"

    axis.set_major_formatter(FuncFormatter(text))
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, handles: Sequence[Any], columns: int = 4) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)))


def _marker(route: str, among: Sequence[str], **other: Any) -> Line2D:
    color, marker, label = _style(route, among)
    return Line2D([], [], **{"color": color, "marker": marker, "linestyle": "none", "label": label} | other)


def times(
    found: Sequence[Row], gates: Sequence[str] = ("production", "slow"), sets: Sequence[str] = README_SETS
) -> Figure | None:
    """GPU time of every route at every shape, one panel a regime, the memory's floor beside them."""
    panels = {name: table for name in gates if (table := records.group(found, name, sets))}
    if not panels:
        return None
    shapes = list(dict.fromkeys(shape for table in panels.values() for shape in table))
    shown = records.routes(row for table in panels.values() for of in table.values() for row in of.values())
    figure = Figure(
        figsize=(3.2 + 3.3 * len(panels), 1.7 + (0.2 + 0.06 * len(shown)) * len(shapes)), layout="constrained"
    )
    axes = figure.subplots(1, len(panels), sharey=True, sharex=True, squeeze=False)[0]
    for axis, (name, table) in zip(axes, panels.items(), strict=True):
        for y, shape in enumerate(shapes):
            of_shape = table.get(shape, {})
            if not of_shape:
                continue
            floor = next(iter(of_shape.values()))["floor_us"]
            axis.plot([floor, max(row["median_us"] for row in of_shape.values())], [y, y], color="0.8", lw=1)
            axis.plot(floor, y, **_FLOOR)
            for route, row in of_shape.items():
                color, marker, _ = _style(route, shown)
                beside = y + 0.7 * ((shown.index(route) + 0.5) / len(shown) - 0.5)
                axis.plot(row["median_us"], beside, color=color, marker=marker, markersize=5)
        axis.set_xscale("log")
        _plain(axis.xaxis)
        axis.set_title(f"{name} gates")
        axis.set_xlabel("GPU time of one call, µs")
    axes[0].set_yticks(range(len(shapes)), [_shape_label(shape) for shape in shapes])
    axes[0].set_ylabel("B x T x heads")
    axes[0].set_ylim(len(shapes) - 0.4, -0.6)
    floor_handle = Line2D([], [], **_FLOOR, label="memory's floor")
    _legend(figure, [*(_marker(route, shown) for route in shown), floor_handle])
    return figure


def _shape_label(shape: Shape) -> str:
    if not shape.lengths:
        return str(shape)
    if len(set(shape.lengths)) == 1:
        return f"{len(shape.lengths)} packed, {shape.lengths[0]} each, x{shape.HV}"
    return f"{len(shape.lengths)} packed, {min(shape.lengths)} to {max(shape.lengths)}, x{shape.HV}"


def speedup(found: Sequence[Row], published: dict[str, Any], gates: str = "production") -> Figure | None:
    """Other routes of ours over the baseline at the seed's shapes, with the seed's own ratios beside them."""
    table = records.group((row for row in found if row["package"] is None), gates, ["seed"])
    table = {shape: of for shape, of in table.items() if "baseline_m128" in of and len(of) > 1}
    if not table:
        return None
    shown = records.routes(row for of in table.values() for row in of.values())
    shown.remove("baseline_m128")
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axis = figure.subplots()
    theirs = {(r["B"], r["T"], r["H"]): r["baseline_us"] / r["owner_helper_us"] for r in published["rows"]}
    for x, (shape, of_shape) in enumerate(table.items()):
        for route, row in of_shape.items():
            if route in shown:
                color, marker, _ = _style(route, shown)
                offset = 0.12 * (shown.index(route) - (len(shown) - 1) / 2)
                ratio = of_shape["baseline_m128"]["median_us"] / row["median_us"]
                axis.plot(x + offset, ratio, color=color, marker=marker, markersize=7)
        if (ratio := theirs.get((shape.B, shape.T, shape.H))) is not None:
            axis.plot(x + 0.3, ratio, color="0.35", marker="D", markerfacecolor="none", markersize=6)
    axis.axhline(1, color="0.4", linewidth=1)
    axis.set_xticks(range(len(table)), [str(shape) for shape in table])
    axis.set_xlabel("B x T x heads")
    axis.set_ylabel("times as fast as baseline_m128")
    axis.set_ylim(bottom=0)
    hollow = {"markerfacecolor": "none", "linestyle": "none"}
    theirs_handle = Line2D([], [], color="0.35", marker="D", label=f"the seed, {published['gpu']}", **hollow)
    _legend(figure, [*(_marker(route, shown) for route in shown), theirs_handle])
    return figure


def shares(found: Sequence[Row], gates: str = "production") -> Figure | None:
    """The share of the memory's floor that each call reaches, over the bytes that it cannot avoid."""
    shown_rows = [row for row in records.unique(found) if row["gates"] == gates]
    if not shown_rows:
        return None
    shown = records.routes(shown_rows)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.subplots()
    for row in shown_rows:
        color, marker, _ = _style(row["route"], shown)
        megabytes = row["floor_us"] * row["copy_rate"] / 1e12
        share = 100 * row["floor_us"] / row["median_us"]
        axis.plot(megabytes, share, color=color, marker=marker, markersize=6, alpha=0.8)
    axis.axhline(100, color="0.4", linewidth=1)
    rates = [row["copy_rate"] / 1e12 for row in shown_rows]
    axis.annotate(
        f"as fast as a copy, {min(rates):.2f} TB/s" + ("" if len(set(rates)) == 1 else " and more"),
        (0.01, 100),
        xycoords=("axes fraction", "data"),
        xytext=(0, -4),
        textcoords="offset points",
        va="top",
        color="0.3",
    )
    axis.set(xscale="log", yscale="log", ylim=(None, 140))
    _plain(axis.xaxis)
    _plain(axis.yaxis)
    axis.set_xlabel("bytes of the token arrays, MB")
    axis.set_ylabel("share of the memory's speed, %")
    axis.set_title(f"{gates} gates")
    _legend(figure, [_marker(route, shown) for route in shown])
    return figure


def winners(found: Sequence[Row], gates: str = "production") -> Figure | None:
    """Which of our routes was the fastest where; the ground is coloured by what `auto` takes."""
    table = {shape: of for shape, of in records.group(found, gates).items() if shape.gate == "safe"}
    measured = [(shape, of, best) for shape, of in table.items() if (best := records.best(of))]
    if not measured:
        return None
    ours = records.routes(row for _, of, _ in measured for row in of.values() if row["package"] is None)
    task_grid, token_grid = [2**n for n in range(11)], [2**n for n in range(8, 17)]
    routed = [[records.auto_route(Shape(1, T, n, n)) for n in task_grid] for T in token_grid]
    grounds = list(dict.fromkeys(route for line in routed for route in line))
    shown = [*ours, *(route for route in grounds if route not in ours)]

    figure = Figure(figsize=(7, 4.8), layout="constrained")
    axis = figure.subplots()
    axis.grid(False)
    axis.pcolormesh(
        [x * 2**0.5 for x in (0.5, *task_grid)],
        [y * 2**0.5 for y in (128, *token_grid)],
        [[grounds.index(route) for route in line] for line in routed],
        cmap=ListedColormap([_style(route, shown)[0] for route in grounds]),
        vmin=-0.5,
        vmax=len(grounds) - 0.5,
        alpha=0.18,
        edgecolors="white",
        linewidth=0.5,
    )
    for shape, of_shape, best in measured:
        color, marker, _ = _style(best["route"], shown)
        alone = sum(row["package"] is None for row in of_shape.values()) == 1
        face = {"markerfacecolor": "none"} if alone else {}
        axis.plot(shape.sequences * shape.HV, shape.T, color=color, marker=marker, markersize=8, **face)
    axis.set(xscale="log", yscale="log")
    axis.set_xticks(task_grid)
    axis.set_yticks(token_grid)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_locator(NullLocator())
    _plain(axis.xaxis)
    _plain(axis.yaxis)
    axis.set_xlabel("tasks: sequences x value heads")
    axis.set_ylabel("T, tokens in a row of the batch")
    axis.set_title(f"{gates} gates: the fastest route measured, over the route that auto takes")
    won = {best["route"] for _, _, best in measured}
    handles: list[Any] = [
        _marker(route, shown, label=f"fastest: {_style(route, shown)[2]}") for route in ours if route in won
    ]
    if any(sum(row["package"] is None for row in of.values()) == 1 for _, of, _ in measured):
        handles.append(
            Line2D(
                [], [], color="0.3", marker="o", markerfacecolor="none", ls="none", label="the only one timed"
            )
        )
    for route in grounds:
        color, _, label = _style(route, shown)
        handles.append(Patch(facecolor=color, alpha=0.18, label=f"auto takes {label}"))
    _legend(figure, handles, columns=3)
    return figure


def scaling(
    found: Sequence[Row], gates: str = "production", heads: Sequence[int] = (1, 4, 8)
) -> Figure | None:
    """GPU time over T, one sequence, a panel for each number of heads."""
    dense = [
        (shape, of)
        for shape, of in records.group(found, gates).items()
        if shape.B == 1 and not shape.lengths and shape.gate == "safe" and shape.H == shape.HV
    ]
    by_heads = {n: [(s.T, of) for s, of in dense if n == s.HV] for n in heads}
    panels = {n: sorted(points, key=lambda p: p[0]) for n, points in by_heads.items() if len(points) > 1}
    if not panels:
        return None
    shown = records.routes(row for points in panels.values() for _, of in points for row in of.values())
    figure = Figure(figsize=(2.3 + 2.4 * len(panels), 3.8), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (n, points) in zip(axes, panels.items(), strict=True):
        for route in shown:
            color, marker, _ = _style(route, shown)
            line = [(T, of[route]["median_us"]) for T, of in points if route in of]
            if line:
                axis.plot(*zip(*line, strict=True), color=color, marker=marker, markersize=5, linewidth=1.3)
        floors = [(T, next(iter(of.values()))["floor_us"]) for T, of in points]
        axis.plot(*zip(*floors, strict=True), color="0.45", linestyle="--", linewidth=1.2)
        axis.set(xscale="log", yscale="log")
        axis.set_xticks([T for T, _ in points])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.tick_params(axis="x", labelrotation=45)
        _plain(axis.xaxis)
        _plain(axis.yaxis)
        axis.set_title(f"{n} head{'s' if n > 1 else ''}")
        axis.set_xlabel("T, tokens")
    axes[0].set_ylabel("GPU time of one call, µs")
    figure.suptitle(f"{gates} gates", fontsize=10)
    floor_handle = Line2D([], [], color="0.45", linestyle="--", label="memory's floor")
    _legend(figure, [*(_marker(route, shown, linestyle="-") for route in shown), floor_handle])
    return figure


def decode(found: Sequence[Row], gates: str = "production") -> Figure | None:
    """GPU time of one decoding step over the states that it must read and write."""
    shown_rows = [row for row in records.unique(found) if row["gates"] == gates]
    if not shown_rows:
        return None
    shown = records.routes(shown_rows)
    lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
    floors: dict[int, dict[int, float]] = {}
    for row in shown_rows:
        lines.setdefault((row["route"], row["T"]), []).append((records.tasks(row), row["median_us"]))
        floors.setdefault(row["T"], {})[records.tasks(row)] = row["floor_us"]
    figure = Figure(figsize=(2.6 + 3 * len(floors), 3.8), layout="constrained")
    axes = figure.subplots(1, len(floors), sharey=True, squeeze=False)[0]
    for axis, T in zip(axes, sorted(floors), strict=True):
        for route in shown:
            if points := sorted(lines.get((route, T), [])):
                color, marker, _ = _style(route, shown)
                axis.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=6, linewidth=1.3)
        axis.plot(*zip(*sorted(floors[T].items()), strict=True), color="0.45", linestyle="--", linewidth=1.2)
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(sorted(floors[T]))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.tick_params(axis="x", labelrotation=45)
        _plain(axis.xaxis)
        _plain(axis.yaxis)
        axis.set_title(f"{T} token{'s' if T > 1 else ''} a step")
        axis.set_xlabel("states: sequences x value heads")
    axes[0].set_ylabel("GPU time of one step, µs")
    floor_handle = Line2D([], [], color="0.45", linestyle="--", label="memory's floor")
    _legend(figure, [*(_marker(route, shown, linestyle="-") for route in shown), floor_handle])
    return figure


def accuracy(tests: dict[str, Any]) -> Figure | None:
    """The worst errors that the tests on a GPU found, by regime and route."""
    found = worst_errors(tests)
    return (
        errors(found, "the worst of all lengths: dense, grouped, packed, narrow, without norm")
        if found
        else None
    )


def worst_errors(
    tests: dict[str, Any], variants: Sequence[str] = ("dense", "grouped", "packed", "narrow", "bare")
) -> dict[str, dict[str, tuple[float, float]]]:
    """By route and regime the worst errors of o and the state in the record of the GPU tests.

    Left out of the variants is "doubled": beta doubled has a bar of its own.
    """
    pattern = re.compile(r"::test_every_length\[(\w+)-(\w+)-(\w+)\]$")
    worst: dict[str, dict[str, tuple[float, float]]] = {}
    for test in tests.get("tests", ()):
        if (match := pattern.search(test["name"])) and match[2] in variants and "figures" in test:
            now = (float(test["figures"]["o"]), float(test["figures"]["state"]))
            of_route = worst.setdefault(match[1], {})
            before = of_route.get(match[3], (0.0, 0.0))
            of_route[match[3]] = (max(before[0], now[0]), max(before[1], now[1]))
    return worst


def errors(found: dict[str, dict[str, tuple[float, float]]], title: str) -> Figure:
    """Errors of o and the state by route and regime, with the bar that they must stay under."""
    shown = list(found)
    names = [name for name in regimes.REGIMES if any(name in of for of in found.values())]
    figure = Figure(figsize=(7.5, 1.5 + 0.32 * len(names)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True, sharex=True)
    for n, (axis, what) in enumerate(zip(axes, ("o", "final state"), strict=True)):
        for y, name in enumerate(names):
            bar = rows.ERROR_BARS.get(name, rows.ERROR_BAR)
            axis.plot([bar] * 2, [y - 0.4, y + 0.4], color="0.3", linewidth=2)
            for i, route in enumerate(shown):
                if name in found[route]:
                    color, marker, _ = _style(route, shown)
                    offset = 0.22 * (i - (len(shown) - 1) / 2)
                    axis.plot(found[route][name][n], y + offset, color=color, marker=marker, markersize=6)
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 40 * low else (1,)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0e}".replace("e-0", "e-")))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_title(what)
        axis.set_xlabel("relative Frobenius error")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    figure.suptitle(title, fontsize=10)
    bar_handle = Line2D(
        [], [], color="0.3", marker="|", ls="none", markersize=10, mew=2, label="allowed at most"
    )
    _legend(figure, [*(_marker(route, shown) for route in shown), bar_handle])
    return figure


# ------------------------------------------------------------------------------------------ the README's


def readme_rows(folder: Path = records.FOLDER) -> list[Row]:
    """What the README's figure shows: ours beside the peers if they were timed, else ours alone."""
    found = records.load(records.PEERS, folder) or records.load(records.PREFILL, folder)
    return [
        row
        for name in ("production", "slow")
        for of in records.group(found, name, README_SETS).values()
        for row in of.values()
    ]


def stamp(found: Iterable[Row]) -> str:
    """The digest of what the figure shows and of how it is drawn."""
    shown = [[*map(str, rows.identity(row)), row["median_us"], row["floor_us"]] for row in found]
    text = json.dumps(shown) + Path(__file__).read_text()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check() -> str:
    """Why the README's figure is not in step with the rows; "" where it is."""
    text = README_FIGURE.read_text() if README_FIGURE.is_file() else ""
    if f"rows and drawing {stamp(readme_rows())}" in text:
        return ""
    return f"{README_FIGURE.relative_to(ROOT)} is not in step with bench/results: run python -m bench.figures"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--check", action="store_true", help="draw nothing; exit code 1 where it is not in step"
    )
    if parser.parse_args(arguments).check:
        if why := check():
            print(why, file=sys.stderr)
        return 1 if why else 0
    found = readme_rows()
    figure = times(found)
    if figure is None:
        print(f"bench.figures: {records.missing(records.PREFILL)}", file=sys.stderr)
        return 1
    README_FIGURE.parent.mkdir(parents=True, exist_ok=True)
    description = f"{records.provenance(found)}; rows and drawing {stamp(found)}"
    figure.savefig(README_FIGURE, metadata={"Date": None, "Description": description})
    print(README_FIGURE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
