"""Derives jax_kda/regions.py from measured rows: which route is the fastest where.

    python -m bench.prefill --set regions --gates slow --no-walls --out bench/results/h200-regions.json \\
        --routes baseline_m128,baseline_m64,c4_m128_d15,c4_m64_d10,pool_m128,pool_m64,segmented
    python -m bench.regions            # writes the table
    python -m bench.regions --check    # exit status 1 where it is not the one that the rows give

Between two points of the grid the route is taken whose worst ratio to the best, over the corners of the cell,
is the smallest; a route other than the baseline only where it is at no corner slower than the baseline in any
round, and at one corner at least 5 % faster in every round. Beyond the grid's tasks the baseline stays;
longer sequences are as the longest measured. The predicted times (jax_kda/costs.py), which decide packed
calls, are fitted to the same rows, relative errors weighted towards the largest.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from jax_kda import costs

from . import rows
from .digest import ROOT
from .shapes import REGION_HEADS, REGION_TOKENS

__all__ = ["fit", "main", "rewritten", "table"]

RESULT = ROOT / "bench" / "results" / "h200-regions.json"
PAGE = ROOT / "jax_kda" / "regions.py"
BASELINE = "baseline_m128"
MARGIN = 0.95
Times = dict[tuple[int, int], dict[str, list[float]]]  # [heads, tokens][route]: a median a round


def _times(found: Sequence[rows.Row]) -> Times:
    times: Times = {}
    for row in found:
        times.setdefault((row["HV"], row["T"]), {})[row["route"]] = row["round_us"]
    return times


def _best(corners: list[dict[str, list[float]]]) -> str:
    """The route for a cell, from what was measured at its corners."""
    corners = [c for c in corners if c]
    if not corners:
        return BASELINE
    routes = set.intersection(*(set(c) for c in corners))

    def wins(route: str) -> bool:
        ratios = [[x / y for x, y in zip(c[route], c[BASELINE], strict=True)] for c in corners]
        return all(x <= 1 for c in ratios for x in c) and any(all(x <= MARGIN for x in c) for c in ratios)

    def worst(route: str) -> float:
        return max(min(c[route]) / min(min(x) for x in c.values()) for c in corners)

    return min((r for r in routes if r == BASELINE or wins(r)), key=worst, default=BASELINE)


def boxes(times: Times) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    """(route, heads, tokens) of every box that is not the baseline's; ranges inclusive."""
    strips: list[tuple[int, int, list[tuple[str, int, int]]]] = []
    for i, heads in enumerate(REGION_HEADS):
        following = REGION_HEADS[i + 1] if i + 1 < len(REGION_HEADS) else heads + 1
        others = [heads] if following == heads + 1 else [heads, following]
        strip: list[tuple[str, int, int]] = []
        for j, tokens in enumerate(REGION_TOKENS):
            last = j + 1 == len(REGION_TOKENS)
            upper = REGION_TOKENS[j + 1] - 1 if not last else 16 * tokens
            columns = [tokens] if last else [tokens, REGION_TOKENS[j + 1]]
            if (heads, tokens) not in times:
                continue
            if (
                last or (heads, columns[1]) not in times
            ):  # the end of the grid: longer ones are as the longest
                columns, upper = [tokens], 16 * tokens
            route = _best([times.get((h, t), {}) for h in others for t in columns])
            lower = 1 if j == 0 else tokens
            if strip and strip[-1][0] == route and strip[-1][2] == lower - 1:
                strip[-1] = (route, strip[-1][1], upper)
            else:
                strip.append((route, lower, upper))
        strip = [box for box in strip if box[0] != BASELINE]
        if strips and strips[-1][2] == strip and strips[-1][1] == heads - 1:
            strips[-1] = (strips[-1][0], following - 1, strip)
        else:
            strips.append((heads, following - 1, strip))
    return [(route, (a, b), (low, high)) for a, b, strip in strips for route, low, high in strip]


def table(found: Sequence[rows.Row]) -> str:
    """The measured part of jax_kda/regions.py."""
    first = found[0]
    source = f"h200-regions.json, {first['gpu']}, commit {first['commit']}"
    lines = [f'_MEASURED = "{source}"', "MEASURED: tuple[Region, ...] = ("]
    lines += [
        f'    Region("{route}", (9, 0), {heads}, {tokens}, _MEASURED),'
        for route, heads, tokens in boxes(_times(found))
    ]
    return "\n".join([*lines, ")"])


# How many sequences x value heads a GPU of 132 SMs holds at once; `segmented` spreads over all SMs.
RESIDENT = {"baseline_m128": 132, "baseline_m64": 66, "c4_m128_d15": 30, "c4_m64_d10": 30, "segmented": 132}


def fit(found: Sequence[rows.Row], resident: int) -> tuple[float, ...]:
    """The coefficients of costs.terms, none negative, that predict these rows of one route best."""
    terms = np.array([costs.terms((row["T"],), row["HV"], resident) for row in found])
    relative = terms / np.array([row["median_us"] for row in found])[:, None]
    weights, best, least = np.ones(len(found)), np.zeros(terms.shape[1]), np.inf
    for _ in range(200):
        coefficients, _ = nnls(relative * weights[:, None], weights)
        errors = np.abs(relative @ coefficients - 1)
        if errors.max() < least:
            best, least = coefficients, errors.max()
        weights *= 1 + 2 * errors
        weights /= weights.mean()
    return tuple(float(f"{x:.3g}") for x in best)


def fits(found: Sequence[rows.Row]) -> str:
    """The predicted times' part of jax_kda/regions.py."""
    lines = ["COSTS: tuple[Cost, ...] = ("]
    for route, resident in RESIDENT.items():
        if of_route := [row for row in found if row["route"] == route]:
            lines.append(f'    Cost("{route}", {resident}, {fit(of_route, resident)}),')
    return "\n".join([*lines, ")"])


def rewritten(text: str, found: Sequence[rows.Row]) -> str:
    """The text of jax_kda/regions.py with its measured parts made anew."""
    for start, made in ((r"_MEASURED = ", table(found)), (r"COSTS: ", fits(found))):
        text, count = re.subn(
            rf"^{start}.*?^\)", lambda _, made=made: made, text, count=1, flags=re.DOTALL | re.M
        )
        if count != 1:
            raise ValueError(f"{PAGE.name} has no part that starts with {start!r}")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.regions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--rows", type=Path, default=RESULT, help="the measured rows (default: %(default)s)")
    options: Any = parser.parse_args(arguments)
    text = PAGE.read_text()
    made = rewritten(text, rows.read(options.rows))
    if options.check:
        return int(made != text)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
