"""The time that a route is predicted to take: a sum of terms of the sizes, fitted to measured times.

The terms are those of the kernels' work: what every call pays, chains that deepen with the longest sequence
(slower than it where segments are folded), the bytes and the packets of all tasks, and rounds, where more
tasks come than the GPU holds at once. No coefficient is negative, so more work never looks quicker.

Routing has no lengths of packed sequences, only their number and sum. `splits` says which lengths they may
have, and `least_regret` takes the route that loses the least to the best one whichever of them it meets.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence

from .regions import COSTS, MEASURED_ON, Cost

__all__ = ["CHUNK", "least_regret", "predict_us", "splits", "terms"]

CHUNK = 32  # tokens

# Of a packed call on `segmented`, over the same sequences one a row: its grids have a slot a sequence more,
# and all its sequences segments of one length.
_PACKED_SEGMENTED = 1.15


def terms(lengths: Sequence[int], heads: int, resident: int) -> tuple[float, ...]:
    """The terms for sequences of so many tokens, each with so many value heads.

    resident: how many tasks, a task being a sequence and a head, the GPU works on at once.
    """
    chunks = sorted((max(-(-tokens // CHUNK), 1) for tokens in lengths), reverse=True)
    longest, tasks, all_chunks = chunks[0], len(chunks) * heads, sum(chunks) * heads
    deepest = _last_done(chunks, heads, resident)
    return (
        1.0,
        math.log2(1 + longest),
        math.sqrt(longest),
        math.sqrt(all_chunks),
        float(tasks),
        float(all_chunks),
        deepest / longest,
        float(deepest),
    )


def _last_done(chunks: Sequence[int], heads: int, resident: int) -> float:
    """When all tasks are done, in chunks: the longest go first, and each next one where a place is free."""
    tasks = len(chunks) * heads
    if chunks[0] == chunks[-1]:
        return float(chunks[0] * -(-tasks // resident))
    if tasks <= resident:
        return float(chunks[0])
    if tasks > 16 * resident:  # so many that they even out
        return max(chunks[0], sum(chunks) * heads / resident)
    places = [0] * resident
    for chunk in chunks:
        for _ in range(heads):
            heapq.heapreplace(places, places[0] + chunk)
    return float(max(places))


def splits(tokens: int, sequences: int) -> tuple[tuple[int, ...], ...]:
    """Lengths that so many packed sequences of so many tokens in all may have: even ones, and uneven ones.

    The uneven ones are those of a row cut at random places, on average: the k-th longest of N sequences has
    the part (1/k + ... + 1/N) / N of all tokens.
    """
    mean = tokens / sequences
    uneven, part = [], 0.0
    for k in range(sequences, 0, -1):
        part += 1 / k
        uneven.append(math.ceil(mean * part))
    return (math.ceil(mean),) * sequences, tuple(uneven)


def predict_us(
    lengths: Sequence[int],
    heads: int,
    compute_capability: tuple[int, int] | None,
    sm_count: int | None,
    costs: tuple[Cost, ...] = COSTS,
    packed: bool = False,
) -> dict[str, float]:
    """Microseconds of a call by route, the quickest first; nothing for GPUs of another kind than measured.

    lengths: tokens of each sequence; heads: value heads of each; packed: whether they share rows.
    """
    measured, sms = MEASURED_ON
    if compute_capability != measured or not sm_count or heads < 1 or not lengths or max(lengths) < 1:
        return {}
    found = {}
    for cost in costs:
        resident = max(cost.resident * sm_count // sms, 1)
        sizes = terms(lengths, heads, resident)
        found[cost.route] = sum(x * y for x, y in zip(cost.coefficients, sizes, strict=True))
        if packed and cost.route == "segmented":
            found[cost.route] *= _PACKED_SEGMENTED
    return dict(sorted(found.items(), key=lambda item: item[1]))


def least_regret(predicted: Sequence[dict[str, float]], routes: Collection[str]) -> tuple[str, float]:
    """Of these routes the one whose largest ratio to a prediction's best is the smallest, and that ratio."""
    worst = {
        route: max(times[route] / min(times[r] for r in routes) for times in predicted) for route in routes
    }
    best = min(worst, key=worst.__getitem__)
    return best, worst[best]
