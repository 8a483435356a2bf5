"""`python -m jax_kda`: one prefill of a serving-like batch, checked against the token recurrence and timed.

Several requests of uneven length, each with the state it carries from earlier tokens, are packed into one
row, as a serving engine does. The op runs under `jax.jit`; what it returns is compared, sequence by sequence,
with `kda_reference` on the same inputs. `--report` prints what a report of a problem should contain.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_kda
from jax_kda import regimes

# Sizes that show the shape of real traffic and take seconds: on two CPU cores, and on a GPU.
CPU_LENGTHS, CPU_HEADS = (300, 47, 512, 163, 271, 731), 4
GPU_LENGTHS, GPU_HEADS = (1300, 547, 2048, 963, 271, 3063), 32
# What the op promises for o and the final state, as the relative Frobenius error against the recurrence. (In
# float32 it is 1e-5 against float64; here the reference is a float32 sum itself.)
BOUND = {"bfloat16": 6e-3, "float16": 6e-3, "float32": 3e-5}
LOOSER_BOUND = {"collinear": 5.0, "unbounded": 5.0}  # regimes that amplify rounding
TIMING_SECONDS = 15.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 for an error above its bound, 2 for wrong options."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.report:
        facts = report()
        print(json.dumps(facts, indent=2) if options.json else _report_text(facts))
        return 0
    try:
        result = demonstrate(options)
    except ValueError as error:  # a forced route that cannot run here, or sizes that do not fit together
        parser.error(str(error))
    print(json.dumps(result, indent=2) if options.json else _result_text(result))
    return 0 if result["passed"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_kda",
        description="Runs Kimi Delta Attention prefill on a serving-like batch, checks it and times it.",
    )
    add = parser.add_argument
    add(
        "--lengths",
        type=_lengths,
        metavar="N,N,...",
        help="tokens of each sequence (default: by device)",
    )
    add(
        "--heads",
        type=_positive,
        metavar="H",
        help=f"query/key heads (default: {CPU_HEADS}, GPU {GPU_HEADS})",
    )
    add("--value-heads", type=_positive, metavar="HV", help="value heads, a multiple of H (default: H)")
    add(
        "--head-size",
        type=_positive,
        default=128,
        metavar="K",
        help="channels of a head (default: %(default)s)",
    )
    add("--dtype", choices=sorted(BOUND), default="bfloat16", help="of q, k and v (default: %(default)s)")
    add("--regime", choices=regimes.REGIMES, default="production", help="of the gates (default: %(default)s)")
    add("--route", choices=["auto", *(r.value for r in jax_kda.Route)], default="auto", help="force a route")
    add("--repeats", type=_positive, default=10, metavar="N", help="timed calls (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the inputs (default: %(default)s)")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--report", action="store_true", help="print versions, devices and routes, for a report of a problem")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}; it must be at least 1")
    return number


def _lengths(text: str) -> tuple[int, ...]:
    lengths = tuple(int(part) for part in text.split(","))
    if min(lengths) < 0 or sum(lengths) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; lengths are 0 or more, and not all of them 0")
    return lengths


def demonstrate(options: argparse.Namespace) -> dict[str, Any]:
    """Runs, checks and times one call. The result is what `--json` prints."""
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    lengths = options.lengths or (GPU_LENGTHS if on_gpu else CPU_LENGTHS)
    heads = options.heads or (GPU_HEADS if on_gpu else CPU_HEADS)

    # disable=None: no bar where standard error is not a terminal.
    with tqdm(
        total=5, unit="step", leave=False, disable=None, bar_format="{desc:<28}{bar:32}{elapsed}"
    ) as bar:
        bar.set_description("making the inputs")
        call = regimes.make_inputs(
            options.regime,
            B=1,
            T=sum(lengths),
            H=heads,
            HV=options.value_heads or heads,
            K=options.head_size,
            V=options.head_size,
            dtype=options.dtype,
            seed=options.seed,
            lengths=lengths,
            initial_state=True,
        )
        arrays = {name: jnp.asarray(x) for name, x in call.items() if isinstance(x, np.ndarray)}
        static = {name: x for name, x in call.items() if name not in arrays}
        decision = jax_kda.explain_route(**arrays, **static, route=options.route)

        bar.update()
        bar.set_description("compiling")
        prefill = jax.jit(functools.partial(jax_kda.kda_prefill, **static, route=options.route))
        started = time.perf_counter()
        compiled = prefill.lower(**arrays).compile()
        compile_seconds = time.perf_counter() - started

        bar.update()
        bar.set_description("running the op")
        o, state = jax.block_until_ready(compiled(**arrays))

        bar.update()
        bar.set_description("running the token recurrence")
        # float32 copies of the same numbers, so that the reference's output is not rounded.
        exact = {name: x.astype(jnp.float32) if name in ("q", "k", "v") else x for name, x in arrays.items()}
        reference = jax.jit(functools.partial(jax_kda.kda_reference, **static)).lower(**exact).compile()
        started = time.perf_counter()
        expected_o, expected_state = jax.block_until_ready(reference(**exact))
        reference_seconds = time.perf_counter() - started

        bar.update()
        bar.set_description("timing")
        seconds = _time(lambda: compiled(**arrays), options.repeats)
        bar.update()

    bound = BOUND[options.dtype] * LOOSER_BOUND.get(options.regime, 1.0)
    sequences = []
    for n, (begin, length) in enumerate(zip(np.cumsum([0, *lengths]), lengths, strict=False)):
        part = slice(int(begin), int(begin) + length)
        sequences.append(
            {
                "tokens": length,
                "error_o": _error(o[:, part], expected_o[:, part]),
                "error_state": _error(state[n], expected_state[n]),
            }
        )
    error_o, error_state = _error(o, expected_o), _error(state, expected_state)
    return {
        "device": f"{device.device_kind} ({device.platform}, {len(jax.devices())} in all)",
        "route": decision.route.value,
        "reason": decision.reason,
        "extension": jax_kda.status().summary,
        "regime": options.regime,
        "options": static,
        "dtype": options.dtype,
        "tokens": sum(lengths),
        "heads": heads,
        "value_heads": options.value_heads or heads,
        "head_size": options.head_size,
        "compile_seconds": compile_seconds,
        "median_seconds": statistics.median(seconds),
        "minimum_seconds": min(seconds),
        "timed_calls": len(seconds),
        "reference_seconds": reference_seconds,
        "bound": bound,
        "error_o": error_o,
        "error_state": error_state,
        "sequences": sequences,
        "passed": bool(error_o <= bound and error_state <= bound),
    }


def _time(call: Any, repeats: int) -> list[float]:
    """Wall seconds of each call; fewer calls where they take long."""
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) < TIMING_SECONDS:
        started = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - started)
    return seconds


def _error(actual: jax.Array, expected: jax.Array) -> float:
    """The relative Frobenius error; 0 where both are empty or zero."""
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    difference, size = float(np.linalg.norm(a - b)), float(np.linalg.norm(b))
    return difference / size if size else difference


def _result_text(result: dict[str, Any]) -> str:
    r = result
    heads = str(r["heads"]) if r["heads"] == r["value_heads"] else f"{r['heads']}/{r['value_heads']}"
    median, fastest, reference = r["median_seconds"], r["minimum_seconds"], r["reference_seconds"]
    batch = f"{len(r['sequences'])} packed sequences with carried states, {r['tokens']} tokens"
    head = [
        ("device", r["device"]),
        ("route", f"{r['route']}: {r['reason']}"),
        ("extension", r["extension"]),
        ("batch", f"{batch}, {heads} heads of {r['head_size']} channels, {r['dtype']}"),
        ("gates", r["regime"]),
        ("options", ", ".join(f"{name}={value}" for name, value in r["options"].items() if value)),
    ]
    rows = [(str(n), row["tokens"], row) for n, row in enumerate(r["sequences"])] + [("all", r["tokens"], r)]
    cells = [f"  {'sequence':>8}  {'tokens':>8}  {'error of o':>12}  {'error of state':>14}"]
    cells += [
        f"  {name:>8}  {tokens:>8}  {row['error_o']:>12.1e}  {row['error_state']:>14.1e}"
        for name, tokens, row in rows
    ]
    rule = "  " + "-" * (len(cells[0]) - 2)
    verdict = "passed" if r["passed"] else "FAILED"
    calls = f"median of {r['timed_calls']}, fastest {_duration(fastest)}"
    foot = [
        ("check", f"{verdict}: both errors against the token recurrence may be up to {r['bound']:.0e}"),
        ("time", f"{_duration(median)} a call ({calls}); {r['tokens'] / median:,.0f} tokens/s"),
        ("recurrence", f"{_duration(reference)} a call, {reference / median:.1f} times as long"),
        ("compilation", _duration(r["compile_seconds"])),
    ]
    title = f"jax_kda {_version('jax_kda') or 'from a source tree'}: Kimi Delta Attention prefill"
    table = [cells[0], rule, *cells[1:-1], rule, cells[-1]]
    return "\n".join([title, "", *_columns(head), "", *table, "", *_columns(foot)])


def _columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def report() -> dict[str, Any]:
    """Versions, devices, the extension's status and the routes of a common call."""
    names = ("jax_kda", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy")
    packages = {name: found for name in names if (found := _version(name))}
    shapes: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for name, shape in {**dict.fromkeys("qkvg", (1, 4096, 8, 128)), "beta": (1, 4096, 8)}.items()
    }
    return {
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": packages,
        "devices": [f"{d.id}: {d.device_kind} ({d.platform})" for d in jax.devices()],
        "status": str(jax_kda.status()),
        "route_1x4096x8_bfloat16": str(jax_kda.explain_route(**shapes)),
    }


def _version(package: str) -> str:
    """The installed version; "" where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _report_text(facts: dict[str, Any]) -> str:
    lines = []
    for name, value in facts.items():
        lines.append(f"## {name.replace('_', ' ')}")
        if isinstance(value, dict):
            lines += [f"{key} {text}" for key, text in value.items()]
        else:
            lines += value if isinstance(value, list) else [value]
        lines.append("")
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    sys.exit(main())
