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


_MEASURED = "h200-regions.json, NVIDIA H200, commit 7514c50"
MEASURED: tuple[Region, ...] = (
    Region("segmented", (9, 0), (1, 11), (1, 1048576), _MEASURED),
    Region("c4_m64_d10", (9, 0), (12, 15), (1, 127), _MEASURED),
    Region("segmented", (9, 0), (12, 15), (128, 511), _MEASURED),
    Region("c4_m64_d10", (9, 0), (12, 15), (512, 1023), _MEASURED),
    Region("segmented", (9, 0), (12, 15), (1024, 1048576), _MEASURED),
    Region("c4_m64_d10", (9, 0), (16, 21), (1, 127), _MEASURED),
    Region("segmented", (9, 0), (16, 21), (128, 511), _MEASURED),
    Region("c4_m64_d10", (9, 0), (16, 21), (512, 65535), _MEASURED),
    Region("segmented", (9, 0), (16, 21), (65536, 1048576), _MEASURED),
    Region("c4_m64_d10", (9, 0), (22, 30), (1, 127), _MEASURED),
    Region("segmented", (9, 0), (22, 30), (128, 511), _MEASURED),
    Region("c4_m64_d10", (9, 0), (22, 30), (512, 524288), _MEASURED),
    Region("baseline_m64", (9, 0), (31, 43), (1, 127), _MEASURED),
    Region("segmented", (9, 0), (31, 43), (128, 524288), _MEASURED),
    Region("baseline_m64", (9, 0), (44, 65), (1, 16383), _MEASURED),
    Region("segmented", (9, 0), (44, 65), (16384, 262144), _MEASURED),
    Region("baseline_m64", (9, 0), (66, 66), (1, 131072), _MEASURED),
    Region("segmented", (9, 0), (67, 95), (4096, 131072), _MEASURED),
    Region("baseline_m64", (9, 0), (133, 197), (512, 65536), _MEASURED),
    Region("baseline_m64", (9, 0), (198, 263), (4096, 65536), _MEASURED),
)

# The predicted times: packed calls are decided by them, and of all calls they are shown. Compute capability
# and SMs of the GPU measured.
MEASURED_ON = ((9, 0), 132)
COSTS: tuple[Cost, ...] = (
    Cost("baseline_m128", 132, (2.75, 0.0, 0.771, 0.0334, 0.0285, 0.000199, 6.4, 2.62)),
    Cost("baseline_m64", 66, (4.09, 1.01, 0.0, 0.0, 0.0584, 0.00316, 4.56, 1.3)),
    Cost("c4_m128_d15", 30, (0.0, 2.04, 0.0, 0.0347, 0.0389, 0.00301, 9.28, 1.21)),
    Cost("c4_m64_d10", 30, (0.0, 1.13, 0.0, 0.184, 0.0, 0.00396, 9.66, 0.638)),
    Cost("segmented", 132, (0.0, 1.89, 1.07, 0.133, 0.0, 0.0284, 7.19, 0.0101)),
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
