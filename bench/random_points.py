"""`python -m bench.random_points`: is `auto` near the best forced route at shapes that nobody chose?

Draws shapes off the grid that routing was measured on: sequences times heads log-uniform in 1..512, tokens of
a sequence in 64..1M, a third of them packed with uneven lengths. Times every route at each through the native
driver, as bench.prefill does, and prints how much slower than the best the one that `auto` takes is. Results:
bench/results/h200-random.json, the set's name with the seed in it.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from jax_kda import routing

from . import native, prefill, records, rows
from .digest import ROOT
from .shapes import GATES, REGION_HEADS, REGION_TOKENS, Case, Shape, parse_names

__all__ = ["draw", "main", "ratios"]

# All that `auto` can take.
ROUTES = tuple(r.value for r in routing.Route if r not in (routing.Route.XLA, routing.Route.C8_M128_D35))
RESULT = ROOT / "bench" / "results" / records.RANDOM
MOST_TASKS, TOKENS, LIMIT = 512, (64, 1 << 20), 1 << 21


def draw(seed: int, points: int) -> list[Shape]:
    """The shapes of a seed, each once."""
    r = random.Random(seed)

    def log_uniform(low: int, high: int) -> int:
        return round(math.exp(r.uniform(math.log(low), math.log(high))))

    found: dict[Shape, None] = {}
    while len(found) < points:
        tasks, tokens = log_uniform(1, MOST_TASKS), log_uniform(*TOKENS)
        if tasks * tokens > LIMIT or (tasks in REGION_HEADS and tokens in REGION_TOKENS):
            continue
        sequences = log_uniform(1, min(tasks, 16))
        heads = max(1, tasks // sequences)
        if len(found) % 3 == 2 and sequences > 1:
            total = sequences * tokens
            cuts = sorted(r.sample(range(1, total), sequences - 1))
            lengths = tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
            found[Shape(1, total, heads, heads, lengths)] = None
        elif len(found) % 3 < 2:
            found[Shape(sequences, tokens, heads, heads)] = None
    return [*found]


def ratios(found: Sequence[rows.Row]) -> dict[Shape, tuple[float, str, str]]:
    """Of each shape: auto's time over the best's, auto's route, the best."""
    times: dict[Shape, dict[str, float]] = {}
    for row in found:
        times.setdefault(rows.shape(row), {})[row["route"]] = row["median_us"]
    made = {}
    for shape, of in times.items():
        auto, best = records.auto_route(shape), min(of, key=of.__getitem__)
        if auto in of:
            made[shape] = (of[auto] / of[best], auto, best)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 for a wrong or missing figure, 2 for what cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.random_points",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seed", type=int, default=1, help="of the shapes (default: %(default)s)")
    add("--points", type=int, default=60, help="shapes (default: %(default)s)")
    add("--gates", default="slow", help="one gate regime (default: %(default)s)")
    add("--routes", default=",".join(ROUTES), help="forced (default: %(default)s)")
    add("--calls", type=int, default=20, help="timed calls a round, of two (default: %(default)s)")
    add("--out", type=Path, default=RESULT, help="the result file (default: bench/results/h200-random.json)")
    add("--driver", type=Path, help="a driver that is built already (default: build it)")
    add("--commit", help="for the rows (default: what git says)")
    add("--dry", action="store_true", help="only print the cases, as the driver reads them; needs no GPU")
    options = parser.parse_args(arguments)
    try:
        (gates,) = parse_names("--gates", options.gates, GATES)
        routes = parse_names("--routes", options.routes, (r.value for r in routing.Route if r != "xla"))
    except ValueError as error:
        parser.error(str(error))
    shapes = draw(options.seed, options.points)
    asked = [Case(shape, gates, route) for shape in shapes for route in routes]
    if options.dry:
        print("\n".join(case.line() for case in prefill.resolve(asked, routing.H200)))
        return 0
    try:
        driver = options.driver or native.build()
        facts = native.device(driver)
    except (native.DriverError, OSError) as error:
        print(f"bench.random_points: {error}", file=sys.stderr)
        return 2
    wanted = prefill.resolve(asked, prefill.device(facts))
    measured, copy_rate, complete = prefill.measure(driver, wanted, 2, options.calls)
    common = prefill.provenance(facts, options.commit) | {"copy_rate": copy_rate}
    name = f"random, seed {options.seed}"
    found = [prefill.row(name, case, measured[case], None, common) for case in wanted if case in measured]
    if not found:
        print("bench.random_points: no figure", file=sys.stderr)
        return 1
    rows.write(options.out, found)
    slowest = sorted(ratios(found).items(), key=lambda item: -item[1][0])
    lines = [("shape", "auto takes", "best", "auto / best")]
    lines += [(str(shape), auto, best, f"{ratio:.3f}") for shape, (ratio, auto, best) in slowest]
    print(rows.columns(lines, left=3))
    print(
        f"{len(slowest)} shapes, the worst ratio {slowest[0][1][0]:.3f}; {len(found)} rows in {options.out}"
    )
    return 0 if complete and all(map(rows.is_right, found)) else 1


if __name__ == "__main__":
    sys.exit(main())
