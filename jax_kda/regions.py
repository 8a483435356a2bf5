"""Where each route was measured to be the fastest, and a model of the times: what routing reads.

Only data stands here. A row says on which compute capability, for which sizes, and on the word of which
measurement a route is taken in place of the baseline. A call outside every row takes the baseline. MEASURED
and COSTS are written by bench/regions.py from bench/results/h200-regions.json.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COSTS", "MEASURED_ON", "REGIONS", "Cost", "Region"]


@dataclass(frozen=True)
class Region:
    """A box of problems in which `route` won. Ranges are inclusive; tasks are B * N * HV."""

    route: str
    compute_capability: tuple[int, int]
    tasks: tuple[int, int]
    tokens: tuple[int, int]  # of a sequence; of packed ones, where no cost is known, the mean, T / N
    provenance: str
    measured: bool = True  # here, by bench/regions.py; else as published by others


@dataclass(frozen=True)
class Cost:
    """Microseconds of a call on `route`: what costs.terms are multiplied by."""

    route: str
    resident: int  # sequences x value heads that the GPU works on at once
    coefficients: tuple[float, ...]


_MEASURED = "h200-regions.json, NVIDIA H200, commit 6779085"
MEASURED: tuple[Region, ...] = (
    Region("baseline_m64", (9, 0), (1, 3), (1, 127), _MEASURED),
    Region("pool_m64", (9, 0), (1, 3), (128, 511), _MEASURED),
    Region("segmented", (9, 0), (1, 3), (512, 1048576), _MEASURED),
    Region("c4_m64_d10", (9, 0), (4, 7), (1, 127), _MEASURED),
    Region("pool_m64", (9, 0), (4, 7), (128, 511), _MEASURED),
    Region("segmented", (9, 0), (4, 7), (512, 1048576), _MEASURED),
    Region("baseline_m64", (9, 0), (8, 15), (1, 127), _MEASURED),
    Region("pool_m64", (9, 0), (8, 15), (128, 511), _MEASURED),
    Region("segmented", (9, 0), (8, 15), (512, 1048576), _MEASURED),
    Region("baseline_m64", (9, 0), (16, 21), (1, 127), _MEASURED),
    Region("pool_m64", (9, 0), (16, 21), (128, 255), _MEASURED),
    Region("segmented", (9, 0), (16, 21), (256, 1048576), _MEASURED),
    Region("baseline_m64", (9, 0), (22, 30), (1, 127), _MEASURED),
    Region("c4_m64_d10", (9, 0), (22, 30), (128, 524288), _MEASURED),
    Region("baseline_m64", (9, 0), (31, 35), (1, 255), _MEASURED),
    Region("segmented", (9, 0), (31, 35), (256, 1023), _MEASURED),
    Region("pool_m64", (9, 0), (31, 35), (1024, 524288), _MEASURED),
    Region("baseline_m64", (9, 0), (36, 39), (1, 1023), _MEASURED),
    Region("pool_m64", (9, 0), (36, 39), (1024, 262144), _MEASURED),
    Region("baseline_m64", (9, 0), (40, 43), (1, 2047), _MEASURED),
    Region("segmented", (9, 0), (40, 43), (2048, 262144), _MEASURED),
    Region("baseline_m64", (9, 0), (44, 65), (1, 16383), _MEASURED),
    Region("segmented", (9, 0), (44, 65), (16384, 262144), _MEASURED),
    Region("baseline_m64", (9, 0), (66, 66), (1, 131072), _MEASURED),
    Region("pool_m128", (9, 0), (67, 95), (512, 131072), _MEASURED),
    Region("pool_m128", (9, 0), (96, 112), (1024, 131072), _MEASURED),
    Region("baseline_m64", (9, 0), (133, 197), (512, 65536), _MEASURED),
    Region("baseline_m64", (9, 0), (198, 263), (4096, 65536), _MEASURED),
)

# The predicted times: packed calls are decided by them, and of all calls they are shown. Compute capability
# and SMs of the GPU measured.
MEASURED_ON = ((9, 0), 132)
COSTS: tuple[Cost, ...] = (
    Cost("baseline_m128", 132, (4.73, 0.286, 0.0, 0.0, 0.0411, 0.0, 4.34, 2.54)),
    Cost("baseline_m64", 66, (3.15, 1.3, 0.0, 0.0, 0.06, 0.00261, 4.5, 1.27)),
    Cost("c4_m128_d15", 30, (0.275, 0.785, 0.0, 0.25, 0.0, 0.000682, 10.2, 1.05)),
    Cost("c4_m64_d10", 30, (0.0, 1.83, 0.0, 0.273, 0.0202, 0.00265, 8.52, 0.644)),
    Cost("segmented", 132, (5.85, 0.0, 0.77, 0.0, 0.0, 0.029, 9.86, 0.00645)),
)

# The regions of the design that these routes come from, on a B200: published, not measured here. Its B300 and
# its packed calls stay on the baseline.
_PUBLISHED = "published for a B200 by the design's authors, not measured here"
PUBLISHED: tuple[Region, ...] = (
    Region("c4_m64_d10", (10, 0), (1, 1), (4096, 4096), _PUBLISHED, False),
    Region("c4_m128_d15", (10, 0), (1, 8), (2048, 4096), _PUBLISHED, False),
)

# The first row that holds the problem is taken.
REGIONS: tuple[Region, ...] = MEASURED + PUBLISHED
