"""`python -m bench.peers`: other implementations beside ours, all in one process on one GPU.

Prefill at the shapes of `--set`, and decode at every (N, HV) of {1, 8, 64, 256} x {8, 32, 64}; who the peers
are is in bench/peer_calls.py. They come with PyTorch; one that is not there is left out, and a line says so.
Every implementation gets the same arrays, made by the native library (tests/native/library.cu), and is judged
by the same f64 recurrence before it is timed. Times are GPU times, measured as `bench.prefill` measures: L2
flushed, calls queued behind a spinning kernel, 5 warm-ups, median of 20 timed calls. What cannot be timed, or
is wrong, is a row with the reason. Results: bench/results/h200-peers.json and h200-decode-peers.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from jax_kda import routing

from . import native, peers_warm, prefill, progress, rows
from .digest import ROOT
from .library import Figures, Library, Open
from .peer_calls import DECODE_PEERS, PEERS, Call, importable
from .shapes import FOLDED_GATES, SETS, Case, Shape, floor_us, parse_names, state_bytes, token_bytes

__all__ = ["main"]

RESULT = ROOT / "bench" / "results" / "h200-peers.json"
DECODE_RESULT = RESULT.with_name("h200-decode-peers.json")
WARM_UPS = 5

# Few shapes, and few numbers of heads: flash-linear-attention compiles its kernels for each of these.
BRIEF = tuple(
    Shape(1, T, H, H) for T, H in ((512, 8), (2048, 1), (4096, 1), (8192, 8), (8192, 64), (8192, 96))
)
PEER_SETS = {"brief": BRIEF, **SETS}
STEPS = tuple(Shape(N, 1, HV, HV) for HV in (8, 32, 64) for N in (1, 8, 64, 256))


class _Timer:
    """Times calls that PyTorch launches, as tests/native/timing.cuh times ours."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def time(self, call: Call, calls: int) -> list[float]:
        torch = self._torch
        for _ in range(WARM_UPS):  # they compile and choose
            call()
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        host = time.perf_counter() - started  # that the queue takes to fill; the device must not run out
        torch.cuda.synchronize()
        spin = int(2e9 * min(max(3 * host, 5e-4), 0.2))  # cycles, at no more than 2 GHz
        us = []
        for n in range(calls):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(spin)
            self._flush.fill_(n % 256)
            before.record()
            call()
            after.record()
            torch.cuda.synchronize()
            us.append(1e3 * before.elapsed_time(after))
        return us


class _Run:
    """One run: what it has found, and until when it may go on."""

    def __init__(
        self, library: Library, calls: int, budget: float, common: rows.Row, packages: dict[str, str]
    ):
        self.library, self.calls, self.budget = library, calls, budget
        self.common, self.packages = common, packages
        self.end = time.monotonic() + budget
        self.timer = _Timer()
        self.bar = tqdm(unit="case", leave=False, disable=progress.disabled())
        self.found: list[rows.Row] = []
        self.out: Path | None = None  # written anew after every shape: a peer may take the process along

    def left(self) -> float:
        return self.end - time.monotonic()

    def prefill(self, groups: dict[tuple[Shape, str], list[str]], sets: Sequence[str]) -> None:
        """Times everyone named at every shape and regime; one opening of a case's arrays serves them all."""
        for (shape, gates), names in groups.items():
            in_sets = [name for name in sets if shape in PEER_SETS[name]]
            floor = floor_us(shape, self.common["copy_rate"])
            self._group(Case(shape, gates, ""), names, in_sets, floor, lambda n, o: o.time(n, self.calls))

    def decode(self, names: Sequence[str]) -> None:
        """Times a step of one token: ours and every peer named."""
        for shape in STEPS:
            floor = 1e6 * (token_bytes(shape) + state_bytes(shape)) / self.common["copy_rate"]
            self._group(
                Case(shape, "production", ""),
                ["decode", *names],
                ["decode"],
                floor,
                lambda _, o: o.time_decode(self.calls),
            )

    def _group(
        self,
        case: Case,
        names: Sequence[str],
        sets: Sequence[str],
        floor: float,
        ours: Callable[[str, Open], Figures],
    ) -> None:
        import torch

        try:
            with self.library.case(case) as opened:
                for name in names:
                    self.bar.set_description(f"{case.shape} {case.gates} {name}")
                    figures, why = self._one(name, opened, case.shape, ours)
                    self._add(Case(case.shape, case.gates, name), sets, floor, figures, why)
        except native.DriverError as error:
            for name in names:
                self._add(Case(case.shape, case.gates, name), sets, floor, None, str(error))
        if self.out:
            rows.write(self.out, self.found)
        torch.cuda.empty_cache()

    def _one(
        self, name: str, opened: Open, shape: Shape, ours: Callable[[str, Open], Figures]
    ) -> tuple[Figures | None, str]:
        """A time and its errors, or the reason that there is none."""
        if self.left() <= 0:
            return None, f"the {self.budget:.0f} s given to the run were over"
        try:
            peer = (PEERS | DECODE_PEERS).get(name)
            if peer is None:
                return ours(name, opened), ""
            call = peer.make(shape, opened.arrays())
            o, state = call()
            errors = opened.judge(o, state.transpose(-1, -2) if peer.v_first else state)
            del o, state
            return (self.timer.time(call, self.calls), errors), ""
        except Exception as error:  # one that cannot serve a shape leaves the others
            lines = str(error).strip().splitlines()
            return None, f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]

    def _add(self, case: Case, sets: Sequence[str], floor: float, figures: Figures | None, why: str) -> None:
        for name in sets:
            row = _row(name, case, floor, self.packages.get(case.route), self.common)
            if figures is not None:
                _put(row, *figures)
            else:
                row["failed"] = why
            self.found.append(row)
        if why or "failed" in row:
            tqdm.write(f"skipped {case}: {row['failed']}", file=sys.stderr)
        self.bar.update()


def _row(name: str, case: Case, floor: float, package: str | None, common: rows.Row) -> rows.Row:
    row = {
        **common,
        "set": name,
        **rows.shape_fields(case.shape),
        "gates": case.gates,
        "route": case.route,
        "package": package,
        "kernels": [],  # the engine is pinned by name; PyTorch gives no list without a profiler
        "floor_us": floor,
    }
    return {key: row[key] for key in rows.KEYS if key in row}


def _put(row: rows.Row, us: Sequence[float], errors: tuple[float, float]) -> None:
    """Puts the figures into a row; or that they are wrong, which is no figure."""
    median = statistics.median(us)
    row |= {
        "median_us": median,
        "min_us": min(us),
        "round_us": [median],
        "calls": len(us),
        "wall_us": None,
        "err_o": errors[0],
        "err_state": errors[1],
    }
    if not all(map(math.isfinite, errors)) or not rows.is_right(row):
        for key in rows.FIGURES:
            del row[key]
        row["failed"] = f"wrong: errors of o and of the state are {errors[0]:.1e} and {errors[1]:.1e}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 for a missing figure of ours, 2 for what cannot run."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        sets = () if options.set == "none" else parse_names("--set", options.set, PEER_SETS)
        gates = parse_names("--gates", options.gates, FOLDED_GATES)
        wanted = parse_names("--peers", options.peers, PEERS | DECODE_PEERS)
    except ValueError as error:
        parser.error(str(error))
    there, missing = importable({name: (PEERS | DECODE_PEERS)[name] for name in wanted})
    for name, why in missing.items():
        print(f"skipped {name}: {why}", file=sys.stderr)
    if not there:
        print("bench.peers: no peer is installed; pip install 'jax_kda[bench]' brings them", file=sys.stderr)
        return 2

    import torch

    if not torch.cuda.is_available():
        print("bench.peers: PyTorch sees no GPU", file=sys.stderr)
        return 2
    try:
        library = Library(options.library or native.build("library.so"))
    except (native.DriverError, OSError) as error:
        print(f"bench.peers: {error}", file=sys.stderr)
        return 2
    properties = torch.cuda.get_device_properties(0)
    gpu = routing.Device(
        "cuda", properties.name, (properties.major, properties.minor), properties.multi_processor_count
    )
    common = prefill.provenance({"gpu": gpu.name, "cuda": torch.version.cuda}, options.commit)
    common["copy_rate"] = library.copy_rate()
    run = _Run(library, options.calls, options.budget, common, there)

    # Every shape once, and first what does not tune: a run that ends early has most of the table.
    shapes = [*{shape: None for name in sets for shape in PEER_SETS[name]}]
    asked = [Case(s, g, r) for s in shapes for r in options.routes.split(",") for g in gates]
    quick: dict[tuple[Shape, str], list[str]] = {}
    for case in prefill.resolve(asked, gpu):
        quick.setdefault((case.shape, case.gates), []).append(case.route)
    slow = {key: [n for n in PEERS if n in there and PEERS[n].tunes] for key in quick}
    for names in quick.values():
        names += [n for n in PEERS if n in there and not PEERS[n].tunes]
    steps = [] if options.no_decode else [n for n in DECODE_PEERS if n in there]
    run.bar.total = sum(map(len, (*quick.values(), *slow.values()))) + (
        len(STEPS) * (1 + len(steps)) if steps else 0
    )
    compiled = {n: shapes if n in PEERS else STEPS for n in there if n not in DECODE_PEERS or n in steps}
    with run.bar, torch.inference_mode():
        said = ""
        for said in peers_warm.ahead(compiled, options.budget / 2):
            run.bar.set_description(said)
        if "stopped" in said:
            tqdm.write(said, file=sys.stderr)
        run.out = options.out
        run.prefill(quick, sets)
        prefilled, run.found = run.found, []
        if steps:
            run.out = options.decode_out
            run.decode(steps)
        decoded, run.found, run.out = run.found, prefilled, options.out
        if any(slow.values()):
            peers_warm.brief()
        run.prefill(slow, sets)
    found = sorted(run.found, key=lambda row: sets.index(row["set"]))
    for out, part in ((options.out, found), (options.decode_out, decoded)):
        if part:
            rows.write(out, part)
            print(rows.table([row for row in part if "failed" not in row]))
            print(
                f"{len(part)} rows in {out}, {sum('failed' in row for row in part)} of them without a time\n"
            )
    print(", ".join(dict.fromkeys(there.values())))
    return int(any("failed" in row and row["package"] is None for row in (*found, *decoded)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    everyone = ",".join(PEERS | DECODE_PEERS)
    add("--set", default="brief", help="sets of shapes, or none (default: %(default)s: six shapes)")
    add("--gates", default="production,slow", help="gate regimes (default: %(default)s)")
    add("--peers", default=everyone, help="which (default: %(default)s)")
    add("--routes", default="auto", help="ours, beside them (default: %(default)s)")
    add("--calls", type=int, default=20, help="timed calls (default: %(default)s)")
    add(
        "--budget",
        type=float,
        default=90,
        help="seconds; what is left then is not timed (default: %(default)s)",
    )
    add("--no-decode", action="store_true", help="prefill alone")
    add("--out", type=Path, default=RESULT, help="the result file (default: bench/results/h200-peers.json)")
    add(
        "--decode-out",
        type=Path,
        default=DECODE_RESULT,
        help="that of decode (default: h200-decode-peers.json)",
    )
    add("--library", type=Path, help="the native library, if it is built already (default: build it)")
    add("--commit", help="for the rows (default: what git says)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
