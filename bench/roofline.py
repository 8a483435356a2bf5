"""Cycles that pass for 16 tokens of a head: of the kernels, beside the prototypes and the memory's floor.

Everything is a measured time through the clock that the prototypes were measured at. A route's figure is the
slope between two lengths, so that launches are not in it; a kernel's is its time over its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .rows import Row
from .shapes import Shape, token_bytes
from .tables import markdown

__all__ = ["cycles", "table"]

TOKENS = 16

# Of the routes: route, tasks that fill the GPU once, what it is.
_ROUTES = (
    ("baseline_m128", 132, "both in one CTA: `baseline_m128`"),
    ("baseline_m64", 66, "both in each CTA of a pair: `baseline_m64`"),
    ("c4_m128_d15", 30, "one owner, three helpers: `c4_m128_d15`"),
    ("pool_m128", 96, "an owner of 96, which prepares chunks, too, and 36 helpers: `pool_m128`"),
    ("pool_m64", 31, "two owners each of 31, and 70 helpers: `pool_m64`"),
    ("c4_m64_d10", 30, "two owners, two helpers: `c4_m64_d10`"),
)
# Of the kernels: the prototype's name, the kernel's start, heads that fill the GPU once, what it is.
_KERNELS = (
    ("k1", "packets_kernel", 132, "K1 alone: `segmented`'s packets"),
    ("k2_128", "outputs_kernel", 132, "K2 alone, 128 rows of the state a CTA"),
    ("k2_64", "outputs_kernel", 64, "K2 alone, 64 rows of the state a CTA"),
)


def cycles(us_a_token: float, clock_mhz: float) -> float:
    """Cycles for 16 tokens, from the microseconds of one."""
    return us_a_token * TOKENS * clock_mhz


def slope(found: Sequence[Row], route: str, heads: int) -> float | None:
    """Microseconds a token: between the longest measured length up to 8192 and the half of it."""
    times = {row["T"]: row["median_us"] for row in found if (row["route"], row["HV"]) == (route, heads)}
    for longest in sorted((T for T in times if T <= 8192), reverse=True):
        if longest // 2 in times:
            return float((times[longest] - times[longest // 2]) / (longest - longest // 2))
    return None


def table(regions: Sequence[Row], kernels: Sequence[Row], prototypes: dict[str, Any]) -> str:
    """The table, as far as there are rows for it; "" without any."""
    clock = prototypes["clock_mhz"]
    modelled = {row["what"]: "{} to {}".format(*row["cycles"]) for row in prototypes["rows"]}
    rate = (*regions, *kernels)[0]["copy_rate"] if regions or kernels else 1.0

    def floor(heads: int) -> str:
        return f"{cycles(token_bytes(Shape(1, 1, heads, heads)) / rate * 1e6, clock):.0f}"

    lines = []
    for what, start, heads, name in _KERNELS:
        for row in kernels:
            if row["HV"] == heads and row["kernels"][0].startswith(start):
                measured = f"{cycles(row['median_us'] / row['T'], clock):.0f}"
                lines.append([name, "", measured, str(heads), floor(heads), modelled[what]])
    for route, full, name in _ROUTES:
        pair = [cycles(x, clock) if (x := slope(regions, route, heads)) else None for heads in (1, full)]
        if any(pair):
            measured_pair = (f"{x:.0f}" if x else "" for x in pair)
            lines.append([name, *measured_pair, str(full), floor(full), modelled.get(route, "")])
    head = ["cycles for 16 tokens", "one task", "GPU full", "tasks then", "floor then", "prototypes"]
    return markdown(head, lines) if lines else ""
