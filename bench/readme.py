"""`python -m bench.readme`: writes the README's measured tables anew, from bench/results.

Whatever stands between `<!-- measured: NAME -->` and `<!-- end -->` is made here. With `--check` nothing is
written, and the exit code says whether the README is in step.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from . import figures, records, roofline, rows, shapes, tables
from .digest import ROOT

__all__ = ["BLOCKS", "main", "rewritten"]

README = ROOT / "README.md"
SETS = ("seed", "small", "serving", "packed", "modes")
_MARKED = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _wrap(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _figure(folder: Path) -> str:
    found = figures.readme_rows(folder)
    if not found:
        return records.missing(records.PREFILL)
    what = "this package's routes and its peers" if any(row["package"] for row in found) else "this package"
    gpus = " and ".join(sorted({row["gpu"] for row in found}))
    caption = f"GPU time of one call of {what} on one {gpus}, in two gate regimes"
    image = figures.README_FIGURE.relative_to(ROOT).as_posix()
    older = records.OLDER if records.is_stale(found) else ""
    return f"![{caption}]({image})\n\n{_wrap(f'{caption}; the figures are under Measured{older}.')}"


def _prefill(folder: Path) -> str:
    found = records.load(records.PREFILL, folder)
    if not found:
        return records.missing(records.PREFILL)
    rates = " and ".join(sorted({f"{row['copy_rate'] / 1e12:.2f}" for row in found}))
    calls = " or ".join(str(n) for n in sorted({row["calls"] for row in found}))
    gates = list(dict.fromkeys(row["gates"] for row in found))
    text = (
        f"GPU time of one call in microseconds, median of {calls} with the L2 cache flushed before each: "
        "bfloat16, 128 channels, safe gate unless named, norm and sigmoid inside the op, f32 states in and "
        f"out. The figures are those of `production` gates; over {_listed(gates)} the time of a shape and "
        f"route changes by at most {100 * tables.regimes_spread(found):.1f} %. Floor: the bytes of the token "
        f"arrays at the copy rate of the same run, {rates} TB/s; its share is that of the fastest route."
    )
    if ratios := tables.walls(found):
        low, high = (f"{100 * abs(r - 1):.1f} % {'more' if r > 1 else 'less'}" for r in ratios)
        text += f" Jitted calls in a queued loop, the rows' `wall_us`, take from {low} to {high}."
    source = f"Rows: `bench/results/{records.PREFILL}`; {records.provenance(found, folder)}."
    return "\n\n".join([_wrap(text), tables.times(found, "production", SETS), _wrap(source)])


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _peers(folder: Path) -> str:
    found = records.load(records.PEERS, folder)
    if not found:
        return _wrap(f"{records.missing(records.PEERS)} So nothing is compared here.")
    text = (
        f"Microseconds, all in one process ({_packages(found)}). `cudnn_exact` gets prepared inputs: the "
        "passes that make them are not in its figure."
    )
    return _compared(records.PEERS, folder, text, tables.peers(found, figures.README_SETS))


def _packages(found: Sequence[rows.Row]) -> str:
    return ", ".join(sorted({row["package"] for row in found if row["package"]}))


def _compared(file: str, folder: Path, text: str, table: str) -> str:
    source = f"Rows: `bench/results/{file}`; {records.provenance(records.load(file, folder), folder)}."
    return "\n\n".join([_wrap(text + _untimed(file, folder)), table, _wrap(source)])


def _untimed(file: str, folder: Path) -> str:
    """A sentence for each route that has a row without a figure."""
    return "".join(
        f" Without a time, `{route}`: {'; '.join(why)}."
        for route, why in records.failed(file, folder).items()
    )


def _decode_peers(folder: Path) -> str:
    found = records.load(records.DECODE_PEERS, folder)
    if not found:
        return records.missing(records.DECODE_PEERS)
    text = (
        f"A step of one token in microseconds beside {_packages(found)}, in one process: its fused "
        "recurrent call, and its kernel with the state updated in place."
    )
    return _compared(records.DECODE_PEERS, folder, text, tables.peers(found, (), ("production",)))


def _speedup(folder: Path) -> str:
    table = tables.speedup(records.load(records.PREFILL, folder), records.published())
    if table:
        return table
    grid = [
        row | {"set": "seed"}
        for row in records.load(records.REGIONS, folder)
        if rows.shape(row) in shapes.SETS["seed"]
    ]
    parts = []
    for title, kept in (
        ("The owner/helper routes, gates `slow`:", ("baseline_m128", "c4_m128_d15", "c4_m64_d10")),
        ("All routes:", records.routes(grid)),
    ):
        table = tables.speedup([r for r in grid if r["route"] in kept], records.published(), "slow")
        if table:
            parts.append(f"{title}\n\n{table}")
    if not parts:
        return "No rows yet of another route than the baseline at these shapes."
    source = f"Rows: `bench/results/{records.REGIONS}`; {records.provenance(grid, folder)}."
    return "\n\n".join([*parts, _wrap(source)])


def _roofline(folder: Path) -> str:
    prototypes = records.prototypes(folder)
    grid, kernels = records.load(records.REGIONS, folder), records.load(records.KERNELS, folder)
    if not prototypes or not (table := roofline.table(grid, kernels, prototypes)):
        return records.missing(records.REGIONS)
    text = (
        f"Cycles that pass for 16 tokens of a head, at {prototypes['clock_mhz'] / 1e3:.2f} GHz: measured "
        "times through that clock, a route's from the slope between two lengths. One task: one sequence and "
        "head. GPU full: as many as it holds at once, for which the floor is the time that the memory needs. "
        f"Prototypes: {prototypes['source']}; beside a route stands what they promised for it."
    )
    sources = [f"`bench/results/{records.PROTOTYPES}`"]
    for file, found in ((records.REGIONS, grid), (records.KERNELS, kernels)):
        if found:
            sources.append(f"`bench/results/{file}`; {records.provenance(found, folder)}")
    source = f"Rows: {'; '.join(sources)}."
    if not kernels:
        source += f" {records.missing(records.KERNELS)}"
    return "\n\n".join([_wrap(text), table, _wrap(source)])


def _decode(folder: Path) -> str:
    found = [row for row in records.load(records.DECODE, folder) if row["gates"] == "production"]
    if not found:
        return records.missing(records.DECODE)
    shown = records.routes(found)
    by_shape: dict[shapes.Shape, dict[str, float]] = {}
    for row in records.unique(found):
        shape = shapes.Shape(row["B"], row["T"], row["H"], row["HV"])
        by_shape.setdefault(shape, {})[row["route"]] = row["median_us"]
    lines = [
        [tables.shape_name(shape), *(tables.us(of[route]) if route in of else "" for route in shown)]
        for shape, of in by_shape.items()
    ]
    source = f"Rows: `bench/results/{records.DECODE}`; {records.provenance(found, folder)}."
    table = tables.markdown(["B x T x H", *(f"`{route}`" for route in shown)], lines)
    return f"{table}\n\n{_wrap(source)}"


def _routes(folder: Path) -> str:
    if not (table := tables.routed()):
        return "Nowhere yet: no region has been measured in which another one wins."
    return (
        f"{table}\n\nOutside these, `auto` takes the baseline wherever it serves the call. Packed calls of "
        "several sequences get, on the\nGPU that was measured, the route that a model of the measured times "
        "says loses the least to the best one, whether the\nlengths are even or as uneven as random cuts "
        "make them."
    )


def _accuracy(folder: Path) -> str:
    tests = records.gpu_tests(folder)
    if not (table := tables.accuracy(tests)):
        return f"No rows yet in bench/results/{records.GPU_TESTS}; the tests write it on a GPU."
    source = (
        f"Rows: `bench/results/{records.GPU_TESTS}`, {tests['gpu']}, {tests['date']}, product digest "
        f"{tests['digest']}{records.OLDER if records.is_stale([tests]) else ''}."
    )
    return f"{table}\n\n{_wrap(source)}"


def _formats(folder: Path) -> str:
    if not (record := records.number_formats(folder)):
        return f"No rows yet in bench/results/{records.FORMATS}; `python -m bench.number_formats` writes it."
    by_form: dict[str, dict[str, str]] = {}
    for row in record["rows"]:
        pair = f"{1e3 * row['err_o']:.1f} / {1e3 * row['err_state']:.1f}"
        by_form.setdefault(row["operands"], {})[row["gates"]] = pair
    gates = list(dict.fromkeys(row["gates"] for row in record["rows"]))
    lines = [[form, *(cells.get(name, "") for name in gates)] for form, cells in by_form.items()]
    table = tables.markdown(["operands", *gates], lines)
    return (
        f"{table}\n\nRows: `bench/results/{records.FORMATS}`, by `python -m bench.number_formats`, on a CPU."
    )


BLOCKS: dict[str, Callable[[Path], str]] = {
    "figure": _figure,
    "prefill": _prefill,
    "speedup": _speedup,
    "roofline": _roofline,
    "peers": _peers,
    "decode": _decode,
    "decode_peers": _decode_peers,
    "routes": _routes,
    "accuracy": _accuracy,
    "formats": _formats,
}


def rewritten(text: str, folder: Path = records.FOLDER) -> str:
    """The README's text, every marked block made anew. ValueError where the marks are not those of BLOCKS."""
    names = [found[2] for found in _MARKED.finditer(text)]
    if sorted(names) != sorted(BLOCKS) or text.count("<!-- measured:") != len(names):
        raise ValueError(f"README.md: marked are {', '.join(names)}; needed, once each: {', '.join(BLOCKS)}")
    return _MARKED.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]](folder)}\n\n{found[3]}", text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.readme",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 where it is not in step"
    )
    check = parser.parse_args(arguments).check
    before = README.read_text()
    after = rewritten(before)
    if check and before != after:
        print("README.md is not in step with bench/results: run python -m bench.readme", file=sys.stderr)
        return 1
    if before != after:
        README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
