// How a call is cut into chunks and segments, and where their packets, maps and states lie in the workspace.
//
// Chunks and segments have numbered slots, per batch row. Sequence n, which begins at token b_n, has its units of `size` tokens in the slots from
// b_n / size + n on. Those of the next sequence lie behind them whatever the lengths (an empty one has a slot, too), so that
//   - the slot of a unit needs no sum over sequences, and the unit of a slot one search over the offsets;
//   - T / size + N slots are enough for a row (the units of T, where one sequence takes all of it): shapes alone size grids and workspace.
// Slots between two sequences' may stay empty. With offsets of any content a unit that is found lies in [0, T), and its slot among the row's.
#pragma once

#include <cstdint>

#include "../launch.h"
#include "mma.cuh"
#include "packet.cuh"
#include "task.cuh"

namespace jax_kda {

constexpr int kStateBytes = kHeadDim * kHeadDim * 4;
// A segment's map St -> St diag(d) + round(St) P + Q, as far as it stands apart from Q: P^T without its diagonal, in bf16, and the diagonal d in f32.
// (Rounding the diagonal too would lose a state that nothing else changes: 1.8e-2 instead of 3.6e-3 with weak writes and no decay.)
//   P^T  [16 rows of tiles][16 tiles] of 8 x 8: row j is what channel j of the state before becomes, in columns of the state behind
//   d    [128] f32
constexpr int kMapDiagonal = kHeadDim * kHeadDim * 2, kMapBytes = kMapDiagonal + kHeadDim * 4;
// Q and states between segments: [8 slices of 16 value rows][16 tiles of 8 channels][32 lanes][4] f32, fragments of accumulators as they stand.
constexpr int kSliceBytes = 16 * kHeadDim * 4;

struct SegmentedArgs {
  PrefillArgs a;
  int segment;  // tokens
  int chunk_slots, segment_slots, map_slots;  // of a row; the last are those of segments that may need a map
  bool cut;          // into more than one segment: then there are maps
  bool folded;       // in step 3; where there are few segments, every CTA of step 4 takes its state through all maps before its segment itself
  int group;         // segments that are folded together first; none: all of a sequence at once
  int group_slots;   // of a row
  int packet_parts;  // CTAs that share the packets of a row and head
  char* packets;  // [B, HV, chunk slots] packets, each at a multiple of kSlotBytes
  char* maps;     // [B, HV, segment slots] maps
  char* states;   // [B, HV, segment slots] first Q, then the state behind the segment (in groups: behind each one's last and all of the first's)
  char* prefixes; // [B, HV, segment slots] maps from a group's begin to the segment's end, with their Q in `states`; those of a group's first: `maps`
};

// One unit (chunk or segment) of a sequence and value head.
struct Unit {
  Task task;
  int slot;   // of the unit
  int first;  // slot of the sequence's first
  bool there;
};

KDA_DEVICE int begin_of(const PrefillArgs& a, int64_t row, int n) {
  return a.offsets ? clamped(a.offsets[row * (a.N + 1) + n], 0, int(a.T)) : 0;
}
KDA_DEVICE int first_slot(const Task& k, int64_t N, int size) { return k.begin / size + int(k.sequence - k.row * N); }

// The last sequence whose first slot is not behind `slot` (0 where there is none). The lanes of a warp search together.
KDA_DEVICE int sequence_of_slot(const PrefillArgs& a, int64_t row, int slot, int size, int lane) {
  int low = 0, high = int(a.N);
#pragma unroll 1
  while (high - low > 1) {
    const int step = (high - low + 31) / 32, n = low + (lane + 1) * step;
    const bool before = n < high && begin_of(a, row, n) / size + n <= slot;
    low += count_lanes(before) * step;
    high = high - low < step ? high : low + step;
  }
  return low;
}

KDA_DEVICE Task task_of(const PrefillArgs& a, int64_t row, int n, int head) {
  Task k;
  k.row = row, k.sequence = row * a.N + n;
  k.head = head, k.key_head = head / int(a.HV / a.H);
  k.begin = begin_of(a, row, n);
  k.tokens = a.offsets ? sequence_length(a.offsets + row * (a.N + 1), n, int(a.T)) : int(a.T);
  k.first = n == 0, k.last = n == a.N - 1;
  return k;
}

KDA_DEVICE Unit find_unit(const PrefillArgs& a, int64_t row, int slot, int head, int size, int lane) {
  Unit u;
  u.task = task_of(a, row, a.N > 1 ? sequence_of_slot(a, row, slot, size, lane) : 0, head);
  u.slot = slot;
  u.first = first_slot(u.task, a.N, size);
  const int units = (u.task.tokens + size - 1) / size;
  u.there = slot >= u.first && slot - u.first < (units > 1 ? units : 1);  // an empty sequence has one, without tokens
  return u;
}

KDA_DEVICE const char* packet_at(const SegmentedArgs& x, const Task& k, int slot) {
  return x.packets + ((k.row * x.a.HV + k.head) * x.chunk_slots + slot) * kSlotBytes;
}
KDA_DEVICE char* map_at(const SegmentedArgs& x, const Task& k, int slot) {
  return x.maps + ((k.row * x.a.HV + k.head) * x.segment_slots + slot) * int64_t(kMapBytes);
}
KDA_DEVICE char* prefix_at(const SegmentedArgs& x, const Task& k, int slot) {
  return x.prefixes + ((k.row * x.a.HV + k.head) * x.segment_slots + slot) * int64_t(kMapBytes);
}
KDA_DEVICE char* state_at(const SegmentedArgs& x, const Task& k, int slot) {
  return x.states + ((k.row * x.a.HV + k.head) * x.segment_slots + slot) * int64_t(kStateBytes);
}

}  // namespace jax_kda
