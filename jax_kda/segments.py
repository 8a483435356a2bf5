"""How the segmented route cuts sequences, and the memory that takes: the host's side of csrc/segmented.cu.

Pure functions of sizes and of the number of SMs. The handler is told the length chosen here, so that the
workspace allocated for a call is the one that its kernels use.
"""

from __future__ import annotations

import math

__all__ = ["CHUNK", "segment_chunks", "workspace_bytes"]

CHUNK = 32  # tokens

# Cycles of an H200, fitted to its measured kernels: see csrc/segmented.cu.
_MOST_SEGMENTS = 512
_KERNEL = 6000.0
_MAPS_64, _MAPS_128, _MAPS_MEMORY = 770.0, 1200.0, 10.0
_OUTPUTS_64, _OUTPUTS_128, _OUTPUTS_MEMORY = 1230.0, 2300.0, 16.0
_FOLD, _APPLY = 1000.0, 2600.0

# Bytes: a chunk's packet, a segment's map, a state.
_SLOT, _MAP, _STATE = 32768, 128 * 128 * 2 + 128 * 4, 128 * 128 * 4


def segment_chunks(B: int, T: int, N: int, HV: int, sm_count: int) -> int:
    """Chunks of 32 tokens in a segment, for B rows of T tokens with N sequences each on that many SMs."""
    sequences = max(B * N, 1)
    chunks = max(-(-T // CHUNK) // max(N, 1), 1)
    tasks = sequences * HV

    def rounds(ctas: int) -> int:
        return -(-ctas // sm_count)

    def fold(segments: int) -> float:
        if segments <= 2:
            return 0.0
        along = _KERNEL + (segments - 2) * _FOLD * rounds(tasks * 8)
        group = max(math.isqrt(segments - 1) + 1, 2)
        groups = (segments - 1) // group
        in_groups = (group - 1) * _FOLD * rounds(tasks * groups * 16)
        grouped = 2 * _KERNEL + _APPLY + in_groups + (groups - 1) * _FOLD * rounds(tasks * 8)
        in_step_4 = (segments - 2) * _APPLY if 2 * tasks * segments <= sm_count and N <= 1 else math.inf
        return min(along, grouped, in_step_4)

    def reader(ctas: int, chunk_64: float, chunk_128: float, length: int) -> float:
        if 2 * ctas <= sm_count:
            return length * chunk_64
        return rounds(ctas) * (length * chunk_128 + _KERNEL) - _KERNEL

    best, least = chunks, math.inf
    for segments in range(1, min(chunks, _MOST_SEGMENTS) + 1):
        length = -(-chunks // segments)
        real = -(-chunks // length)
        outputs = reader(tasks * real, _OUTPUTS_64, _OUTPUTS_128, length)
        cycles = max(outputs, _OUTPUTS_MEMORY * tasks * chunks)
        if real > 1:
            maps = reader(2 * tasks * (real - 1), _MAPS_64, _MAPS_128, length)
            cycles += _KERNEL + max(maps, _MAPS_MEMORY * tasks * chunks)
        cycles += fold(real)
        if cycles < least:
            least, best = cycles, length
    return best


def workspace_bytes(B: int, T: int, N: int, HV: int, packed: bool, chunks: int) -> int:
    """Bytes of workspace with segments of so many chunks."""

    def slots(size: int) -> int:
        return T // size + N if packed else max(-(-T // size), 1)

    size = chunks * CHUNK
    maps = slots(size) * (2 * _MAP + _STATE) if size < T else 0
    return _SLOT + B * HV * (slots(CHUNK) * _SLOT + maps)
