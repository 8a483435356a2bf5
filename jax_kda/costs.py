"""The time that a route is predicted to take: a sum of terms of the sizes, fitted to measured times.

The terms are those of the kernels' work: what every call pays, chains that deepen with a sequence's length
(slower than it where segments are folded), the bytes and the packets of all tasks, and rounds, where more
tasks come than the GPU holds at once. No coefficient is negative, so more work never looks quicker.
"""

from __future__ import annotations

import math

from .regions import COSTS, MEASURED_ON, Cost

__all__ = ["CHUNK", "predict_us", "terms"]

CHUNK = 32  # tokens


def terms(tasks: int, tokens: int, resident: int) -> tuple[float, ...]:
    """The terms for so many sequences x value heads of so many tokens each.

    resident: how many of them the GPU works on at once.
    """
    chunks = max(-(-tokens // CHUNK), 1)
    rounds = -(-tasks // resident)
    return (
        1.0,
        math.log2(1 + chunks),
        math.sqrt(chunks),
        math.sqrt(tasks * chunks),
        float(tasks),
        float(tasks * chunks),
        float(rounds),
        float(rounds * chunks),
    )


def predict_us(
    tasks: int,
    tokens: int,
    compute_capability: tuple[int, int] | None,
    sm_count: int | None,
    costs: tuple[Cost, ...] = COSTS,
) -> dict[str, float]:
    """Microseconds of a call by route, the quickest first; nothing for GPUs of another kind than measured."""
    measured, sms = MEASURED_ON
    if compute_capability != measured or not sm_count or tasks < 1 or tokens < 1:
        return {}
    found = {}
    for cost in costs:
        resident = max(cost.resident * sm_count // sms, 1)
        sizes = terms(tasks, tokens, resident)
        found[cost.route] = sum(x * y for x, y in zip(cost.coefficients, sizes, strict=True))
    return dict(sorted(found.items(), key=lambda item: item[1]))
