"""`python -m bench.compare OLD NEW`: two result files side by side, and what became slower or less exact.

A case is slower or faster where its median moved by more than the threshold and by more than the timer can
tell apart; it is worse where an error passed its bar or doubled. The exit code is 1 where anything is slower,
worse or missing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from . import rows

__all__ = ["compare", "main"]

RESOLUTION_US = 0.3  # a smaller change of a median is no change
WORSE = 2.0  # times the old error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--threshold", type=float, default=0.03, help="relative change of a median (default: %(default)s)"
    )
    parser.add_argument("--all", action="store_true", help="also show the cases that did not change")
    options = parser.parse_args(arguments)
    try:
        old, new = rows.read(options.old), rows.read(options.new)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    text, regressions = compare(old, new, options.threshold, options.all)
    print(text)
    return 1 if regressions else 0


def compare(
    old: Sequence[rows.Row], new: Sequence[rows.Row], threshold: float = 0.03, show_all: bool = False
) -> tuple[str, int]:
    """The comparison as text, and how many regressions are in it."""
    before, after = ({rows.identity(row): row for row in part} for part in (old, new))
    lines: list[tuple[str, ...]] = [
        ("set", "shape", "gates", "route", "old us", "new us", "new/old", "err o", "err state", "")
    ]
    ratios, regressions, faster = [], 0, 0
    for key, b in after.items():
        a = before.get(key)
        verdict = _verdict(a, b, threshold)
        regressions += "SLOWER" in verdict or "WORSE" in verdict
        faster += "faster" in verdict
        if a is not None:
            ratios.append(b["median_us"] / a["median_us"])
        if verdict or show_all:
            lines.append(_line(a, b, verdict))
    for key, a in before.items():
        if key not in after:
            regressions += 1
            lines.append(_line(a, None, "MISSING"))
    told = []
    for name in ("gpu", "driver", "cuda", "jax"):
        values = [sorted({row[name] for row in part}) for part in (old, new)]
        if values[0] != values[1]:
            told.append(f"another {name}: {', '.join(values[0])} -> {', '.join(values[1])}")
    digests = [", ".join(sorted({row["digest"] for row in part})) for part in (old, new)]
    told.append(f"digest {digests[0]} -> {digests[1]}")
    if len(lines) > 1:
        told.append(rows.columns(lines, left=4))
    mean = f", geometric mean of new/old {statistics.geometric_mean(ratios):.3f}" if ratios else ""
    told.append(f"{len(ratios)} cases in both{mean}; {faster} faster, {regressions} regressions")
    return "\n".join(told), regressions


def _verdict(a: rows.Row | None, b: rows.Row, threshold: float) -> str:
    words = []
    if a is None:
        words.append("new")
    elif abs(b["median_us"] - a["median_us"]) > RESOLUTION_US:
        ratio = b["median_us"] / a["median_us"]
        if ratio > 1 + threshold:
            words.append("SLOWER")
        elif ratio < 1 / (1 + threshold):
            words.append("faster")
    bar = rows.error_bar(b)
    for name in ("err_o", "err_state"):
        error = math.inf if b[name] is None else b[name]
        was = None if a is None else math.inf if a[name] is None else a[name]
        if error > bar or (was is not None and error > WORSE * was):
            words.append("WORSE " + name)
    return ", ".join(words)


def _line(a: rows.Row | None, b: rows.Row | None, verdict: str) -> tuple[str, ...]:
    row = a if b is None else b
    assert row is not None

    def cell(part: rows.Row | None, name: str, form: str) -> str:
        return "-" if part is None else "nan" if part[name] is None else format(part[name], form)

    ratio = f"{b['median_us'] / a['median_us']:.3f}" if a is not None and b is not None else "-"
    return (
        row["set"],
        str(rows.shape(row)),
        row["gates"],
        row["route"],
        cell(a, "median_us", ".1f"),
        cell(b, "median_us", ".1f"),
        ratio,
        cell(b, "err_o", ".1e"),
        cell(b, "err_state", ".1e"),
        verdict,
    )


if __name__ == "__main__":
    sys.exit(main())
