"""Where each route was measured to be the fastest: the table that routing reads.

Only data stands here. A row says on which compute capability, for which sizes, and on the word of which
measurement (`provenance`: a file under bench/results and the margin) a route is taken in place of the
baseline. A call outside every row takes the baseline.
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
    tokens: tuple[int, int]  # T, the tokens in a row of the batch
    provenance: str


# The first row that holds the problem is taken. No route beside the baseline has been measured yet.
REGIONS: tuple[Region, ...] = ()
