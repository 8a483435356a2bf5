"""`python -m bench.kernels`: the GPU time of each kernel of one call, for the roofline.

The native driver times the kernels one by one, L2 flushed, median of 20. The shapes are those where the
segmented route is two kernels, each on all SMs: K1 alone, then K2 alone. Results:
bench/results/h200-kernels.json, a row a kernel, its name in `route` behind that of the route.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from . import native, prefill, progress, records, rows
from .digest import ROOT
from .shapes import Case, Shape

__all__ = ["CASES", "main", "parse"]

RESULT = ROOT / "bench" / "results" / records.KERNELS
# As many CTAs as SMs: 64 heads of two halves of the state, 132 of the whole.
CASES = tuple(Case(Shape(1, 8192, heads, heads), "slow", "segmented") for heads in (64, 132))
_KERNEL = re.compile(r"^ +([\d.]+) us  (\S.*)$", re.MULTILINE)
_ERRORS = re.compile(r"err (\S+) (\S+):")


def parse(said: str) -> tuple[list[tuple[str, float]], tuple[float, float]]:
    """From what the driver prints: name and microseconds of each kernel; errors of o and of the state."""
    errors = _ERRORS.search(said)
    kernels = [(name, float(us)) for us, name in _KERNEL.findall(said)]
    if not kernels or not errors:
        raise native.DriverError(f"the driver names no kernels: {said.strip()!r}")
    return kernels, (float(errors[1]), float(errors[2]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 for a wrong figure, 2 for what cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=RESULT, help="the result file (default: bench/results/h200-kernels.json)")
    add("--driver", type=Path, help="a driver that is built already (default: build it)")
    add("--commit", help="for the rows (default: what git says)")
    options = parser.parse_args(arguments)
    found = []
    try:
        driver = options.driver or native.build()
        common = prefill.provenance(native.device(driver), options.commit)
        for line in native.run(driver, CASES[:1], 1, 1):  # its first line has the rate
            if "copy_rate" in line:
                common["copy_rate"] = line["copy_rate"]
        for case in tqdm(CASES, unit="case", leave=False, disable=progress.disabled()):
            kernels, errors = parse(native.output(driver, "kernels", *case.line().split()))
            found += [_row(case, name, us, errors, common) for name, us in kernels]
    except (native.DriverError, OSError) as error:
        print(f"bench.kernels: {error}", file=sys.stderr)
        return 2
    rows.write(options.out, found)
    print(rows.table(found))
    print(f"{len(found)} rows in {options.out}")
    return 0 if all(map(rows.is_right, found)) else 1


def _row(case: Case, kernel: str, us: float, errors: tuple[float, float], common: rows.Row) -> rows.Row:
    said = {
        "kernels": [kernel],
        "median_us": us,
        "min_us": us,  # the driver gives the median alone
        "round_us": [us],
        "calls": 20,
        "err_o": errors[0],
        "err_state": errors[1],
    }
    return prefill.row("kernels", case, said, None, common) | {"route": f"{case.route}: {kernel}"}


if __name__ == "__main__":
    sys.exit(main())
