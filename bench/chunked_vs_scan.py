"""How much faster the chunk form is than the token scan on this machine's CPU: 1 x 4096 tokens x 4 heads,
float32.

    python bench/chunked_vs_scan.py [--regime production] [--rounds 20]

Both are jitted and take turns, so that other load hits both; the ratio is of the fastest rounds. Prints one
line and writes bench/results/cpu-chunked.json."""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jax_kda
from jax_kda.regimes import REGIMES, make_inputs

RESULT = Path(__file__).parent / "results" / "cpu-chunked.json"
WANTED = 4.0  # times as fast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--regime", choices=REGIMES, default="production")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()

    inputs = make_inputs(arguments.regime, 1, 4096, 4, dtype="float32")
    arrays = {name: x for name, x in inputs.items() if isinstance(x, np.ndarray)}
    options = {name: x for name, x in inputs.items() if name not in arrays}
    with jax.default_device(jax.devices("cpu")[0]):
        operands = jax.device_put(arrays)
        chunked = jax.jit(functools.partial(jax_kda.kda_prefill, route="xla", **options))
        scan = jax.jit(functools.partial(jax_kda.kda_reference, **options))
        times = take_turns({"chunked": chunked, "scan": scan}, operands, arguments.rounds)

    milliseconds = {name: 1e3 * min(x) for name, x in times.items()}
    medians = {name: 1e3 * float(np.median(x)) for name, x in times.items()}
    ratio = milliseconds["scan"] / milliseconds["chunked"]
    print(
        f"{arguments.regime}, 1 x 4096 x 4, float32, {os.cpu_count()} cores: "
        f"chunk form {milliseconds['chunked']:.1f} ms, token scan {milliseconds['scan']:.1f} ms, "
        f"{ratio:.2f} times as fast (wanted: {WANTED:g})"
    )
    record = {
        "regime": arguments.regime,
        "shape": {"B": 1, "T": 4096, "H": 4, "HV": 4, "K": 128, "V": 128},
        "dtype": "float32",
        "fastest_ms": milliseconds,
        "median_ms": medians,
        "rounds": arguments.rounds,
        "ratio_of_fastest": ratio,
        "ratio_of_medians": medians["scan"] / medians["chunked"],
        "jax": jax.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


def take_turns(
    functions: dict[str, Any], operands: dict[str, jax.Array], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each function, each round; compiled before the first."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for n in range(rounds + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            jax.block_until_ready(function(**operands))
            if n > 0:
                times[name].append(time.perf_counter() - begin)
    return times


if __name__ == "__main__":
    main()
