"""Where each route was measured to be the fastest: the table that routing reads.

Only data stands here. A row says on which compute capability, for which sizes, and on the word of which
measurement a route is taken in place of the baseline. A call outside every row takes the baseline. MEASURED is
written by bench/regions.py from bench/results/h200-regions.json.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["REGIONS", "Region"]


@dataclass(frozen=True)
class Region:
    """A box of problems in which `route` won. Ranges are inclusive; tasks are B * N * HV."""

    route: str
    compute_capability: tuple[int, int]
    tasks: tuple[int, int]
    tokens: tuple[int, int]  # of a sequence; of packed ones the mean, T / N
    provenance: str
    measured: bool = True  # here, by bench/regions.py; else as published by others


_MEASURED = ""
MEASURED: tuple[Region, ...] = (
)

# The regions of the design that these routes come from, on a B200: published, not measured here. Its B300 and its
# packed calls stay on the baseline.
_PUBLISHED = "published for a B200 by the design's authors, not measured here"
PUBLISHED: tuple[Region, ...] = (
    Region("c4_m64_d10", (10, 0), (1, 1), (4096, 4096), _PUBLISHED, False),
    Region("c4_m128_d15", (10, 0), (1, 8), (2048, 4096), _PUBLISHED, False),
)

# The first row that holds the problem is taken.
REGIONS: tuple[Region, ...] = MEASURED + PUBLISHED
