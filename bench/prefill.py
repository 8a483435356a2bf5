"""`python -m bench.prefill`: times prefill at the shapes of bench/shapes.py, and writes a result file.

The figure is GPU time of one call, by the native driver (tests/native/driver.cu): inputs on the device, 256
MB written before each call so that none of it is in the L2 cache, calls queued behind a spinning kernel, 5
warm-ups, 20 timed calls, two rounds in shuffled order; everything that the call launches counts. Before it is
timed, a call's results are compared with the token recurrence in f64, on the device. `wall` is the time per
call of jitted calls in a loop. The floor is the time that the device's own copy rate, measured in the same
run, allows for the bytes of the token arrays and of checkpoints (other states are not in it).
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jax_kda import contract, routing

from . import native, progress, rows
from .digest import ROOT, digest
from .shapes import FOLDED_GATES, GATES, HEAD_SIZE, SETS, Case, Shape, cases, floor_us, parse_names

__all__ = ["device", "main", "measure", "provenance", "resolve", "row"]

RESULT = ROOT / "bench" / "results" / "h200-prefill.json"
DRY_COPY_RATE = 4.3e12  # of an H200, where none is there to be measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 for a wrong or missing figure, 2 for what cannot run."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        sets = parse_names("--set", options.set, SETS)
        gates = parse_names("--gates", options.gates, FOLDED_GATES)
    except ValueError as error:
        parser.error(str(error))
    asked = cases(sets, gates, options.routes.split(","))
    if options.dry:
        wanted = resolve(asked, routing.H200)
        for case in wanted:
            print(f"{case.line()}  # floor {floor_us(case.shape, DRY_COPY_RATE):.1f} us")
        print(f"# {len(wanted)} cases; floors at {DRY_COPY_RATE:.1e} bytes a second")
        return 0

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the driver needs memory as well
    try:
        driver = options.driver or native.build()
        facts = native.device(driver)
    except (native.DriverError, OSError) as error:
        print(f"bench.prefill: {error}", file=sys.stderr)
        return 2
    wanted = resolve(asked, device(facts))
    measured, copy_rate, complete = measure(driver, wanted, 1 if options.quick else 2, options.calls)
    timed = [case for case in wanted if case in measured]
    walls = {} if options.quick or options.no_walls else _walls(timed)
    common = provenance(facts, options.commit) | {"copy_rate": copy_rate}
    found = [
        row(name, case, measured[case], walls.get(case), common)
        for name in sets
        for case in timed
        if case.shape in SETS[name]
    ]
    if not found:
        print("bench.prefill: no figure", file=sys.stderr)
        return 1
    print(rows.table(found))
    print(f"\n{facts['gpu']}, copies at {copy_rate / 1e12:.2f} TB/s, digest {common['digest']}")
    for line in rows.spreads(found):
        print(f"gates matter: {line}")
    out = options.out or (None if options.quick else RESULT)
    if out:
        rows.write(out, found)
        print(f"{len(found)} rows in {out}")
    return 0 if complete and all(map(rows.is_right, found)) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.prefill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    usual = ",".join(name for name in SETS if name != "regions")
    add("--set", default=usual, help="sets of shapes, regions among them (default: %(default)s)")
    add("--gates", default=",".join(GATES), help="gate regimes (default: %(default)s)")
    add("--routes", default="auto", help="auto, or routes of the driver to force (default: %(default)s)")
    add(
        "--out",
        type=Path,
        help="the result file (default: bench/results/h200-prefill.json; none with --quick)",
    )
    add(
        "--quick", action="store_true", help="one round, no wall times, no result file unless --out names one"
    )
    add("--no-walls", action="store_true", help="no wall times")
    add("--calls", type=int, default=20, help="timed calls a round (default: %(default)s)")
    add("--driver", type=Path, help="a driver that is built already (default: build it)")
    add("--commit", help="for the rows (default: what git says)")
    add("--dry", action="store_true", help="only print the cases, as the driver reads them; needs no GPU")
    return parser


def resolve(asked: Iterable[Case], device: routing.Device) -> list[Case]:
    """The cases with the route that `auto` takes on this device in its place, each once.

    Without those that their route refuses: the driver would time what runs in its place, under its name.
    """
    major, minor = device.compute_capability or (0, 0)
    build = routing.Build(cuda=True, architectures=(f"{major}{minor}a",))
    found = {}
    for case in asked:
        decision = routing.choose(_problem(case.shape), device, build)
        if case.route == "auto":
            found[replace(case, route=decision.route.value)] = None
        elif case.route not in {route.value for route, _ in decision.refused}:
            found[case] = None
    return list(found)


def _problem(s: Shape) -> contract.Problem:
    def array(dtype: str, *size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, jnp.dtype(dtype))

    options: dict[str, Any] = {}
    if s.gate != "log":
        options = {
            "use_gate_in_kernel": True,
            "A_log": array("float32", s.HV),
            "dt_bias": array("float32", s.HV, HEAD_SIZE),
            "safe_gate": s.gate == "safe",
        }
    if s.lengths:
        options["cu_seqlens"] = array("int32", len(s.lengths) + 1)
    return contract.check(
        array("bfloat16", s.B, s.T, s.H, HEAD_SIZE),
        array("bfloat16", s.B, s.T, s.H, HEAD_SIZE),
        array("bfloat16", s.B, s.T, s.HV, HEAD_SIZE),
        array(s.g_dtype, s.B, s.T, s.HV, HEAD_SIZE),
        array("bfloat16", s.B, s.T, s.HV),
        initial_state=array("float32", s.sequences, s.HV, HEAD_SIZE, HEAD_SIZE),
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        checkpoint_every=s.checkpoint_every or None,
        **options,
    )


def measure(
    driver: Path, wanted: Sequence[Case], rounds: int, calls: int
) -> tuple[dict[Case, dict[str, Any]], float, bool]:
    """The driver's result of each case, the copy rate, and whether nothing is missing."""
    measured: dict[Case, dict[str, Any]] = {}
    copy_rate, complete = math.nan, True
    with tqdm(total=rounds * len(wanted), unit="case", leave=False, disable=progress.disabled()) as bar:
        try:
            for said in native.run(driver, wanted, rounds, calls):
                if "case" not in said:
                    copy_rate = said["copy_rate"]
                    continue
                case = wanted[said["case"]]
                bar.update()
                bar.set_description(str(case))
                if "error" in said:
                    complete = False
                    tqdm.write(f"{case}: {said['error']}", file=sys.stderr)
                else:
                    measured[case] = said
        except native.DriverError as error:
            complete = False
            tqdm.write(f"bench.prefill: {error}", file=sys.stderr)
    return measured, copy_rate, complete


def _walls(timed: Sequence[Case]) -> dict[Case, float]:
    """Wall times of the cases whose route JAX can be told to take."""
    from . import wall  # imported late: only here a device of JAX's is touched

    if why := wall.unavailable():
        print(f"no wall times: {why}", file=sys.stderr)
        return {}
    names = [route.value for route in routing.Route]
    possible = [case for case in timed if case.route in names]
    return {
        case: wall.wall_us(case)
        for case in tqdm(possible, desc="wall times", unit="case", leave=False, disable=progress.disabled())
    }


def row(name: str, case: Case, said: dict[str, Any], wall_us: float | None, common: rows.Row) -> rows.Row:
    """The row of a case: what the driver said of it, and what all rows of the run have in common."""

    def finite(x: float) -> float | None:
        return x if math.isfinite(x) else None

    made = {
        **common,
        "set": name,
        **rows.shape_fields(case.shape),
        "gates": case.gates,
        "route": case.route,
        "package": None,
        **{key: said[key] for key in ("kernels", "median_us", "min_us", "round_us", "calls")},
        "wall_us": wall_us,
        "floor_us": floor_us(case.shape, common["copy_rate"]),
        "err_o": finite(said["err_o"]),
        "err_state": finite(said["err_state"]),
    }
    return rows.ordered(made)


def device(facts: dict[str, Any]) -> routing.Device:
    """For routing. `facts`: what the driver says of the device."""
    major, minor = facts["compute_capability"]
    return routing.Device("cuda", facts["gpu"], (major, minor), facts["sm_count"])


def provenance(facts: dict[str, Any], commit: str | None = None) -> rows.Row:
    """What every row of a run has in common. `facts`: what the driver says of the device."""
    return {
        "digest": digest(),
        "commit": commit or _commit(),
        "gpu": facts["gpu"],
        "driver": _driver_version(),
        "jax": jax.__version__,
        "cuda": facts["cuda"],
    }


def _commit() -> str:
    """The commit, with a "+" where the product has changes on top of it; "unknown" outside a checkout."""
    head = _says(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"])
    if not head:
        return "unknown"
    status = ["git", "-C", str(ROOT), "status", "--porcelain", "--", "csrc", "jax_kda", "CMakeLists.txt"]
    return head + ("+" if _says(status) else "")


def _driver_version() -> str:
    """Of NVIDIA's driver; "unknown" where there is none."""
    found = _says(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if not found:
        try:
            text = Path("/proc/driver/nvidia/version").read_text()
        except OSError:
            text = ""
        found = match[1] if (match := re.search(r"\s(\d+\.\d+(\.\d+)?)\s", text)) else ""
    return found.splitlines()[0] if found else "unknown"


def _says(command: Sequence[str]) -> str:
    """What a command prints; "" where it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
