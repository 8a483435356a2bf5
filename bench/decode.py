"""`python -m bench.decode`: GPU times of kda_decode, a step of T new tokens for N sequences.

The native tool (tests/native/decode_driver.cu) checks each case against the f64 recurrence, flushes L2 before
every call, and measures the copy rate in the same run. Results: bench/results/h200-decode.json; the floor of
a row is all bytes of the step, states read and written once, at the copy rate.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import native, prefill, rows
from .digest import ROOT
from .shapes import Case, Shape

__all__ = ["main"]

RESULT = ROOT / "bench" / "results" / "h200-decode.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 for a wrong figure, 2 for what cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", default="1,4", help="new tokens a sequence (default: %(default)s)")
    add("--calls", type=int, default=100, help="timed calls (default: %(default)s)")
    add("--out", type=Path, default=RESULT, help="the result file (default: bench/results/h200-decode.json)")
    add("--driver", type=Path, help="a decode_driver that is built already (default: build it)")
    add("--facts", type=Path, help="a driver that says what the device is (default: build it)")
    add("--commit", help="for the rows (default: what git says)")
    options = parser.parse_args(arguments)
    try:
        driver = options.driver or native.build("decode_driver")
        common = prefill.provenance(native.device(options.facts or native.build()), options.commit)
        found = [
            row
            for tokens in map(int, options.tokens.split(","))
            for row in _measure(driver, tokens, options.calls, common)
        ]
    except (native.DriverError, OSError) as error:
        print(f"bench.decode: {error}", file=sys.stderr)
        return 2
    rows.write(options.out, found)
    print(rows.table(found))
    print(f"{len(found)} rows in {options.out}")
    return 0 if all(map(rows.is_right, found)) else 1


def _measure(driver: Path, tokens: int, calls: int, common: rows.Row) -> list[rows.Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "decode.json"
        native.output(driver, "bench", f"T={tokens}", f"calls={calls}", f"json={out}")
        said: dict[str, Any] = json.loads(out.read_text())
    return [_row(case, said["copy_rate"], common) for case in said["rows"]]


def _row(said: dict[str, Any], copy_rate: float, common: rows.Row) -> rows.Row:
    case = Case(Shape(said["N"], said["T"], said["HV"], said["HV"]), said["gates"], "decode")
    said = said | {"kernels": ["decode_kernel"], "round_us": [said["median_us"]]}
    made = prefill.row("decode", case, said, None, common | {"copy_rate": copy_rate})
    return made | {"floor_us": said["bytes"] / copy_rate * 1e6}


if __name__ == "__main__":
    sys.exit(main())
