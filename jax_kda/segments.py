"""How the segmented route cuts sequences, and the memory that takes: the host's side of csrc/segmented.cu.

Pure functions of sizes and of the number of SMs. The handler is told the length chosen here, so that the
workspace allocated for a call is the one that its kernels use.
"""

from __future__ import annotations

import math

__all__ = ["CHUNK", "segment_chunks", "workspace_bytes"]

CHUNK = 32  # tokens

# Cycles of an H200, fitted to its measured kernels: see segment_chunks in csrc/segmented.cu.
_MOST_SEGMENTS = 512
_KERNEL = 3000.0
_MAPS_64, _MAPS_128, _MAPS_MEMORY = 700.0, 1000.0, 10.0
_OUTPUTS_64, _OUTPUTS_128, _OUTPUTS_MEMORY = 1000.0, 1550.0, 16.0
_FOLD = 750.0

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

    def reader(slots: int, used: float, chunk_64: float, chunk_128: float, length: int) -> float:
        steps = min(length, longest)
        return steps * (chunk_64 if 2 * slots <= sm_count else chunk_128 * math.ceil(used / sm_count))

    def cycles(length: int) -> float:
        of_row = -(-row // length)
        slots = of_row if N == 1 else row // length + N
        used = float(of_row) if N == 1 else max(row / length + N / 2, N)
        outputs = reader(heads * slots, heads * used, _OUTPUTS_64, _OUTPUTS_128, length)
        found = max(outputs, _OUTPUTS_MEMORY * all_chunks)
        if of_row > 1:
            mapped = 2 * heads * (slots - 1 if N == 1 else slots)
            maps = reader(mapped, 2 * heads * (used - N), _MAPS_64, _MAPS_128, length)
            found += _KERNEL + max(maps, _MAPS_MEMORY * all_chunks)
        if of_row > 2:
            found += _KERNEL + max(-(-longest // length) - 2, 0) * _FOLD * math.ceil(heads * N * 8 / sm_count)
        return found

    lengths = [row, *(-(-longest // segments) for segments in range(1, min(longest, _MOST_SEGMENTS) + 1))]
    return min(lengths, key=cycles)


def workspace_bytes(B: int, T: int, N: int, HV: int, packed: bool, chunks: int) -> int:
    """Bytes of workspace with segments of so many chunks."""

    def slots(size: int) -> int:
        return T // size + N if packed else max(-(-T // size), 1)

    size = chunks * CHUNK
    maps = slots(size) * (_MAP + _STATE) if size < T else 0
    return _SLOT + B * HV * (slots(CHUNK) * _SLOT + maps)
