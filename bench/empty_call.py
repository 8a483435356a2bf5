"""`python -m bench.empty_call`: the wall time of a call that neither an empty one nor the GPU accounts for.

A jitted call takes turns with the same program that has an empty custom call in the place of ours
(tests/native/empty_call.cc): same arguments, results, attributes and workspace. What is left of our wall time
without the empty call's and our GPU time is to be 5 us at most. Writes bench/results/h200-wall.json: rows as
bench.prefill's, with `empty_us` beside `wall_us`.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from tqdm import tqdm

import jax_kda

from . import native, prefill, progress, rows, wall
from .digest import ROOT
from .shapes import FOLDED_GATES, Case, Shape, parse_names

__all__ = ["EmptyCall", "main", "walls_against"]

RESULT = ROOT / "bench" / "results" / "h200-wall.json"
MOST_US = 5.0  # of a call's wall time that neither the empty call nor the GPU accounts for


class EmptyCall:
    """The custom call of tests/native/empty_call.cc, registered with JAX."""

    TARGET = "jax_kda_bench.empty.v1"

    def __init__(self, library: Path, platform: str = "CUDA") -> None:
        loaded = ctypes.CDLL(str(library))
        loaded.kda_bench_empty_calls.restype = ctypes.c_longlong
        self.calls: Callable[[], int] = loaded.kda_bench_empty_calls
        jax.ffi.register_ffi_target(self.TARGET, jax.ffi.pycapsule(loaded.kda_bench_empty_call), platform)

    def in_place_of_ours(self) -> Any:
        """A context in which what is compiled has this call where it would have ours."""
        return mock.patch.object(jax_kda.ffi, "PREFILL_TARGET", self.TARGET)


def walls_against(empty: EmptyCall, case: Case, rounds: int = 10) -> tuple[float, float]:
    """Microseconds a call, of ours and of the empty one in its place."""
    arrays, static = wall.split(case)
    # Two functions: one would be compiled once.
    ours, nothing = (
        jax.jit(functools.partial(jax_kda.kda_prefill, **dict(static), route=case.route)) for _ in range(2)
    )
    before = empty.calls()
    jax.block_until_ready(ours(**arrays))
    between = empty.calls()
    with empty.in_place_of_ours():
        jax.block_until_ready(nothing(**arrays))
    if between != before or empty.calls() != between + 1:
        raise RuntimeError(f"{case}: the empty call is not where it should be")
    wall_us, empty_us = wall.best([ours, nothing], arrays, rounds)
    return wall_us, empty_us


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 for a figure past the bar, 2 for what cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.empty_call",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--gates", default="production,slow", help="gate regimes (default: %(default)s)")
    add("--routes", default="auto", help="auto, or routes to force (default: %(default)s)")
    add("--rounds", type=int, default=10, help="loops of each, in turns (default: %(default)s)")
    add("--driver", type=Path, help="a driver that is built already (default: build it)")
    add("--commit", help="for the rows (default: what git says)")
    add("--out", type=Path, default=RESULT, help="the result file (default: bench/results/h200-wall.json)")
    options = parser.parse_args(arguments)
    try:
        gates = parse_names("--gates", options.gates, FOLDED_GATES)
    except ValueError as error:
        parser.error(str(error))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the driver needs memory as well
    if why := wall.unavailable():
        print(f"bench.empty_call: {why}", file=sys.stderr)
        return 2
    try:
        driver = options.driver or native.build()
        facts = native.device(driver)
        empty = EmptyCall(native.build("empty_call.so"))
    except (native.DriverError, OSError) as error:
        print(f"bench.empty_call: {error}", file=sys.stderr)
        return 2
    shape = Shape(1, 512, 8, 8)
    cases = [Case(shape, name, route) for name in gates for route in options.routes.split(",")]
    wanted = prefill.resolve(cases, prefill.device(facts))
    measured, copy_rate, complete = prefill.measure(driver, wanted, 2, 20)
    common = prefill.provenance(facts, options.commit) | {"copy_rate": copy_rate}
    found, over = [], False
    for case in tqdm(measured, desc="wall times", unit="case", leave=False, disable=progress.disabled()):
        wall_us, empty_us = walls_against(empty, case, options.rounds)
        gpu = measured[case]["median_us"]
        left = wall_us - empty_us - gpu
        over |= left > MOST_US
        found.append(prefill.row("wall", case, measured[case], wall_us, common) | {"empty_us": empty_us})
        tqdm.write(
            f"{case}: wall {wall_us:.1f} us, the empty call {empty_us:.1f} us, GPU {gpu:.1f} us; "
            f"left {left:.1f} us, at most {MOST_US:.0f} allowed{' TOO MUCH' if left > MOST_US else ''}"
        )
    if not found:
        return 2
    rows.write(options.out, found)
    print(f"{len(found)} rows in {options.out}")
    return 1 if over or not complete or not all(map(rows.is_right, found)) else 0


if __name__ == "__main__":
    sys.exit(main())
