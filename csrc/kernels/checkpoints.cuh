// States on the way: what a sequence's state is behind every checkpoint_every-th of its tokens.
//
// A batch row has T / checkpoint_every places for them. Its sequences' checkpoints lie there one sequence after the other, and zeros behind the last:
// the sequences share the work of writing those. With offsets of any content the place that is found lies in the row's part.
#pragma once

#include <cstdint>

#include "../launch.h"
#include "mma.cuh"
#include "packet.cuh"
#include "recurrence.cuh"
#include "task.cuh"

namespace jax_kda {

KDA_DEVICE int64_t checkpoint_bytes(const PrefillArgs& a) { return kHeadDim * kHeadDim * (a.state_out_dtype == DType::kF32 ? 4 : 2); }
KDA_DEVICE int checkpoint_places(const PrefillArgs& a) { return int(a.T) / a.checkpoint_every; }  // of a row

// Those of sequences [0, n) of a row, at most as many as it has places. The lanes of a warp count together.
KDA_DEVICE int checkpoints_before(const PrefillArgs& a, int64_t row, int n, int lane) {
  const int32_t* offsets = a.offsets + row * (a.N + 1);
  const int places = checkpoint_places(a);
  int count = 0;
#pragma unroll 1
  for (int i = lane; i < n; i += 32) {
    count += sequence_length(offsets, i, int(a.T)) / a.checkpoint_every;
    count = count < places ? count : places;
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) count += int(bits(shuffle(from_bits(uint32_t(count)), lane ^ d)));
  return count < places ? count : places;
}

// What a CTA knows of its task's checkpoints, in shared memory: registers are what recur() is short of.
//   + 0   int64   address of the place before the first
//   + 16  {chunks of 32 tokens until the last one, chunks until behind this CTA's part and one more, 2^32 / (chunks from one to the next), those chunks}
constexpr uint32_t kCheckpointTable = 32;

// first_chunk, chunks: the CTA's part of the sequence. By one warp; the CTA meets at a barrier afterwards.
KDA_DEVICE void put_checkpoints(uint32_t where, const PrefillArgs& a, const Task& k, int first_chunk, int chunks, int lane) {
  const int before = a.offsets ? checkpoints_before(a, k.row, int(k.sequence - k.row * a.N), lane) : 0;
  if (lane != 0) return;
  const int places = checkpoint_places(a), own = k.tokens / a.checkpoint_every, left = places - before;
  const uint32_t every = uint32_t(a.checkpoint_every) / kChunk;
  const auto first = reinterpret_cast<uint64_t>(a.checkpoints) + ((k.row * places + before - 1) * a.HV + k.head) * checkpoint_bytes(a);
  store_shared2(where, from_bits(uint32_t(first)), from_bits(uint32_t(first >> 32)));
  store_shared4(where + 16, {from_bits(uint32_t(own < left ? own : left) * every), from_bits(uint32_t(first_chunk + chunks + 1)),
                             from_bits(0xffffffffu / every + 1), from_bits(every)});
}

// Where recur() stops, and what it leaves there. value_row(), lane(): formed anew each time, so that nothing lives through the loop.
template <class ValueRow> struct Checkpoints {
  const PrefillArgs& a;
  uint32_t where;
  ValueRow value_row;

  KDA_DEVICE int stop(int chunks) const {
    if (a.checkpoint_every == 0) return 1;
    const float4 x = load_shared4(where + 16);
    const uint32_t done = bits(x.y) - uint32_t(chunks), number = uint32_t(uint64_t(done) * bits(x.z) >> 32);  // exact: the reciprocal is rounded up
    const uint32_t next = (number + (number * bits(x.w) != done)) * bits(x.w);
    return next > bits(x.x) || next >= bits(x.y) ? 1 : int(bits(x.y) - next);
  }
  KDA_DEVICE void store(const State& st, int chunks) const {
    if (a.checkpoint_every == 0) return;
    const float4 x = load_shared4(where + 16);
    const uint32_t done = bits(x.y) - uint32_t(chunks), number = uint32_t(uint64_t(done) * bits(x.z) >> 32);
    if (number * bits(x.w) != done || done > bits(x.x)) return;
    const float2 first = load_shared2(where);
    char* const to = global_pointer(join(bits(first.x), bits(first.y)) + number * uint64_t(a.HV * checkpoint_bytes(a)));
    store_state(st, to, a.state_out_dtype, a.state_v_first, value_row(), int(opaque(threadIdx.x)) & 31);
  }
};
template <class ValueRow> Checkpoints(const PrefillArgs&, uint32_t, ValueRow) -> Checkpoints<ValueRow>;

// Places of a row that no sequence has, of one head, become zeros: number `share` of `shares` of them. By whole warps.
KDA_DEVICE void zero_checkpoints(const PrefillArgs& a, int64_t row, int head, int share, int shares, int thread, int threads) {
  if (!a.offsets) return;
  const int places = checkpoint_places(a), units = int(checkpoint_bytes(a) / 16);
#pragma unroll 1
  for (int64_t i = checkpoints_before(a, row, int(a.N), thread & 31) + int64_t(share); i < places; i += shares) {
    auto* to = reinterpret_cast<uint4*>(static_cast<char*>(a.checkpoints) + ((row * places + i) * a.HV + head) * checkpoint_bytes(a));
    for (int unit = thread; unit < units; unit += threads) to[unit] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace jax_kda
