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
    """Chunks of 32 tokens in a segment, for B rows of T tokens with N sequences each on that many SMs.

    Of packed sequences only the number is known. The longest is taken to be as long as that of a row cut at
    random places is on average; a grid has slots for whatever the lengths are, and those with work are about
    half a slot a sequence fewer.
    """
    N = max(N, 1)
    row = max(-(-T // CHUNK), 1)
    spread = 1.0 if N == 1 else math.log(N) + 0.5772 + 0.5 / N
    longest = min(max(int(row / N * spread), 1), row)
    heads = max(B, 1) * HV
    all_chunks = heads * row

    def rounds(ctas: float) -> int:
        return math.ceil(ctas / sm_count)

    def fold(segments: int) -> float:
        if segments <= 2 and N == 1:
            return 0.0
        tasks = heads * N
        along = 0.0 if segments <= 2 else _KERNEL + (segments - 2) * _FOLD * rounds(tasks * 8)
        group = max(math.isqrt(segments - 1) + 1, 2)
        groups = (segments - 1) // group
        in_groups = (group - 1) * _FOLD * rounds(tasks * groups * 16)
        grouped = 2 * _KERNEL + _APPLY + in_groups + (groups - 1) * _FOLD * rounds(tasks * 8)
        in_step_4 = (segments - 2) * _APPLY if 2 * tasks * segments <= sm_count and N == 1 else math.inf
        return min(along, grouped, in_step_4)

    def reader(slots: int, used: float, chunk_64: float, chunk_128: float, length: int) -> float:
        steps = min(length, longest)
        if 2 * slots <= sm_count:
            return steps * chunk_64
        return rounds(used) * (steps * chunk_128 + _KERNEL) - _KERNEL

    def cycles(length: int) -> float:
        of_row = -(-row // length)
        slots = of_row if N == 1 else row // length + N
        used = float(of_row) if N == 1 else max(row / length + N / 2, N)
        outputs = reader(heads * slots, heads * used, _OUTPUTS_64, _OUTPUTS_128, length)
        found = max(outputs, _OUTPUTS_MEMORY * all_chunks)
        if of_row > 1:
            mapped = 2 * heads * (slots - 1 if N == 1 else slots)
            with_map = max(2 * heads * (used - N), 1.0)
            maps = reader(mapped, with_map, _MAPS_64, _MAPS_128, length)
            found += _KERNEL + max(maps, _MAPS_MEMORY * all_chunks)
        return found + fold(-(-longest // length))

    lengths = [row, *(-(-longest // segments) for segments in range(1, min(longest, _MOST_SEGMENTS) + 1))]
    return min(lengths, key=cycles)


def workspace_bytes(B: int, T: int, N: int, HV: int, packed: bool, chunks: int) -> int:
    """Bytes of workspace with segments of so many chunks."""

    def slots(size: int) -> int:
        return T // size + N if packed else max(-(-T // size), 1)

    size = chunks * CHUNK
    maps = slots(size) * (2 * _MAP + _STATE) if size < T else 0
    return _SLOT + B * HV * (slots(CHUNK) * _SLOT + maps)
