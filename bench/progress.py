"""Where a progress bar is shown."""

from __future__ import annotations

import sys

__all__ = ["disabled"]


def disabled() -> bool | None:
    """For tqdm's `disable`: a bar in a terminal, and in a notebook (no terminal either), but not in a log."""
    return False if "ipykernel" in sys.modules else None
