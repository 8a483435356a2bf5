"""Result files with every kind of row that a GPU may bring, figures invented: what shows them has to cope."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench import records, rows, shapes
from bench.digest import digest
from bench.shapes import Shape

COMMON = {
    "digest": digest(), "commit": "abc", "gpu": "NVIDIA H200", "driver": "580", "jax": "0.11.2",
    "cuda": "13.0", "kernels": [], "calls": 20, "wall_us": None, "copy_rate": 4.25e12,
    "err_o": 4e-3, "err_state": 3e-3,
}  # fmt: skip
OURS = {"baseline_m128": 1.0, "c4_m128_d15": 0.75, "c4_m64_d10": 0.7, "segmented": 0.4, "brand_new": 0.5}
PEERS = {"fla": 0.8, "cudnn_fused": 0.2, "cudnn_exact": 0.3}
DECODE_PEERS = {"fla_recurrent": 2.0, "fla_recurrent_inplace": 1.6}


def row(name: str, shape: Shape, gates: str, route: str, us: float) -> rows.Row:
    made = {
        **COMMON,
        "set": name,
        **rows.shape_fields(shape),
        "gates": gates,
        "route": route,
        "package": f"{route} 1.0" if route in PEERS | DECODE_PEERS else None,
        "median_us": us,
        "min_us": us - 0.1,
        "round_us": [us],
        "floor_us": shapes.floor_us(shape, COMMON["copy_rate"]),
    }
    return rows.ordered(made)


def write(folder: Path) -> None:
    """Every file of rows that the README and the figures show."""

    def us(shape: Shape, factor: float) -> float:
        longest = max(shape.lengths or (shape.T,))
        return 10 + factor * longest / 13 + 2 * shapes.floor_us(shape, 4.25e12)

    prefill, peers = [], []
    for name, of_set in shapes.SETS.items():
        for shape in of_set:
            for gates in shapes.GATES:
                for route, factor in OURS.items():
                    if route == "baseline_m128" or shape.sequences * shape.HV <= 16:
                        prefill.append(row(name, shape, gates, route, us(shape, factor)))
            for gates in ("production", "slow") if name not in ("modes", "checkpoints") else ():
                slower = 100 if gates == "slow" else 1
                peers.append(row(name, shape, gates, "segmented", us(shape, 0.3)))
                for route, factor in PEERS.items():
                    worse = slower if route == "cudnn_fused" else 1
                    peers.append(row(name, shape, gates, route, us(shape, worse * factor)))
    decode = [
        row(
            "decode",
            Shape(B, T, H, H),
            "production",
            route,
            3 + 0.03 * B * H * T * (2 if route == "baseline_m128" else 1),
        )
        for B in (1, 8, 64)
        for H in (8, 32)
        for T in (1, 4)
        for route in ("decode", "baseline_m128")
    ]
    steps = [
        row("decode", Shape(B, 1, H, H), "production", route, 3 + 0.03 * B * H * factor)
        for B in (1, 64)
        for H in (8, 32)
        for route, factor in ({"decode": 1.0} | DECODE_PEERS).items()
    ]
    failure = row("decode", Shape(256, 1, 8, 8), "production", "fla_recurrent", 1.0)
    for key in rows.FIGURES:
        del failure[key]
    steps.append(failure | {"failed": "RuntimeError: out of luck"})
    regions = [
        row("regions", Shape(1, T, H, H), "slow", route, 5 + factor * T / 13)
        for route, factor in OURS.items()
        for H in (1, 30, 66, 132)
        for T in (2048, 4096)
    ]
    kernels = [
        row("kernels", Shape(1, 8192, H, H), "slow", f"segmented: {name}", us) | {"kernels": [name]}
        for H in (64, 132)
        for name, us in (("packets_kernel<true, false>", 3.0 * H), ("outputs_kernel<E, 2>", 2.0 * H))
    ]
    shutil.copy(records.FOLDER / records.PROTOTYPES, folder)
    for file, found in (
        (records.REGIONS, regions),
        (records.KERNELS, kernels),
        (records.PREFILL, prefill),
        (records.PEERS, peers),
        (records.DECODE, decode),
        (records.DECODE_PEERS, steps),
    ):
        rows.write(folder / file, found)
