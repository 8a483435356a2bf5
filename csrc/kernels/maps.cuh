// Maps of segments: made of the states that a chain leaves, and folded along a sequence.
#pragma once

#include <cstdint>

#include "mma.cuh"
#include "packet.cuh"
#include "pipeline.cuh"
#include "recurrence.cuh"
#include "segments.cuh"

namespace jax_kda {

// The identity, of this warp's 16 rows, from 256 f32 in shared memory of which number 128 is one and the others are zeros. (As constants the compiler
// would make them anew wherever they are used.)
constexpr uint32_t kUnitBytes = 2 * kHeadDim * 4;
KDA_DEVICE void unit_state(State& st, uint32_t unit, int first_row, int lane) {
  const uint32_t at = unit + (kHeadDim - first_row - (lane >> 2) + (lane & 3) * 2) * 4;
#pragma unroll
  for (int i = 0; i < 64; ++i) st[i] = load_shared(at + ((i >> 2) * 8 + (i & 1) - ((i >> 1) & 1) * 8) * 4);
}

// What a chain made of the identity: P^T.
KDA_DEVICE void store_map(const State& st, char* map, int first_row, int lane) {
#pragma unroll
  for (int n = 0; n < 16; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + h * 8 + (lane >> 2), channel = n * 8 + (lane & 3) * 2;
      float x = st[n * 4 + 2 * h], y = st[n * 4 + 2 * h + 1];
      if (row == channel) reinterpret_cast<float*>(map + kMapDiagonal)[row] = x, x = 0.f;
      if (row == channel + 1) reinterpret_cast<float*>(map + kMapDiagonal)[row] = y, y = 0.f;
      reinterpret_cast<uint32_t*>(map + ((first_row / 8 + h) * 16 + n) * 128)[lane] = pack_bf16(x, y);
    }
}

// A warp's 16 value rows of a state between segments. `slice` is its part of it.
KDA_DEVICE void store_slice(const State& st, char* slice, int lane) {
#pragma unroll
  for (int n = 0; n < 16; ++n)
    *reinterpret_cast<float4*>(slice + (n * 32 + lane) * 16) = {st[4 * n], st[4 * n + 1], st[4 * n + 2], st[4 * n + 3]};
}
KDA_DEVICE void load_slice(State& st, const char* slice, int lane) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const float4 x = *reinterpret_cast<const float4*>(slice + (n * 32 + lane) * 16);
    st[4 * n] = x.x, st[4 * n + 1] = x.y, st[4 * n + 2] = x.z, st[4 * n + 3] = x.w;
  }
}

// 16 value rows of a state, taken through the maps of one segment after the other by four warps, each of which holds 32 channels of it:
//
//   St <- St diag(d) + round(St) P^T + Q
//
// The rounded state goes round all warps through shared memory, in two buffers that take turns. A stage of shared memory holds a map and the slice of
// Q; thread 0 fills the stages ahead. The operands of a map come to registers while the products with the one before are under way. The states behind
// the maps are written over the slices of Q.
struct FoldLayout {
  static constexpr int kWarps = 4, kThreads = kWarps * 32, kStages = 5, kTiles = 16 / kWarps;  // tiles of 8 channels of a warp
  static constexpr uint32_t kStageBytes = kMapBytes + kSliceBytes;
  static constexpr uint32_t kRounded = kStages * kStageBytes, kRoundedBytes = 16 * kHeadDim * 2;
  static constexpr uint32_t kFull = kRounded + 2 * kRoundedBytes;
  static constexpr uint32_t kBytes = kFull + kStages * 8;
  static_assert(kBytes <= 232448, "more shared memory than a CTA can have");
};

// maps and states: of the segment before the first of `steps`; a state's slice that this CTA works on.
KDA_DEVICE void fold(const char* maps, char* states, int steps, uint32_t shared, int warp, int lane) {
  using L = FoldLayout;
  const int thread = warp * 32 + lane;
  auto fill = [&](int step) {
    const uint32_t slot = uint32_t(step) % L::kStages, stage = shared + slot * L::kStageBytes, full = shared + L::kFull + 8 * slot;
    barrier_expect(full, L::kStageBytes);
    copy_bulk(stage, maps + (step + 1) * int64_t(kMapBytes), kMapBytes, full);
    copy_bulk(stage + kMapBytes, states + (step + 1) * int64_t(kStateBytes), kSliceBytes, full);
  };
  if (thread == 0)
    for (int step = 0; step < L::kStages && step < steps; ++step) fill(step);

  constexpr int kTiles = L::kTiles;
  const uint32_t fragment = (warp * kTiles * 32 + lane) * 16;  // of this warp's tiles, in a slice
  float st[kTiles][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const float4 x = *reinterpret_cast<const float4*>(states + fragment + i * 512);
    st[i][0] = x.x, st[i][1] = x.y, st[i][2] = x.z, st[i][3] = x.w;
  }
  auto round_state = [&](int step) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_shared_word(shared + L::kRounded + (step & 1) * L::kRoundedBytes + ((kTiles * warp + i) * 2 + h) * 128 + lane * 4,
                          pack_bf16(st[i][2 * h], st[i][2 * h + 1]));
  };
  round_state(0);

  const int tile = lane >> 3;
  const uint32_t columns = ((tile & 1) * 16 + kTiles * warp + (tile >> 1)) * 128 + (lane & 7) * 16;
  uint32_t b[8][kTiles / 2][4];
  float2 d[kTiles];
  float4 q[kTiles];
  auto await = [&](int step) {  // the step's map, and gives its stage
    const uint32_t slot = uint32_t(step) % L::kStages;
    barrier_wait(shared + L::kFull + 8 * slot, (uint32_t(step) / L::kStages) & 1);
    return shared + slot * L::kStageBytes;
  };
  auto fetch_matrix = [&](uint32_t stage, int s) {
#pragma unroll
    for (int i = 0; i < kTiles / 2; ++i) load_tiles_transposed(b[s][i], stage + columns + s * 4096 + i * 256);
  };
  auto fetch_rest = [&](uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      d[i] = load_shared2(stage + kMapDiagonal + ((warp * kTiles + i) * 8 + (lane & 3) * 2) * 4);
      q[i] = load_shared4(stage + kMapBytes + fragment + i * 512);
    }
  };
  {
    const uint32_t stage = await(0);
    fetch_rest(stage);
#pragma unroll
    for (int s = 0; s < 8; ++s) fetch_matrix(stage, s);
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    __syncthreads();  // the rounded state is there, and all have fetched this step's map
    if (thread == 0 && step + L::kStages < steps) fill(step + L::kStages);
    const uint32_t rounded = shared + L::kRounded + (step & 1) * L::kRoundedBytes + lane * 16;
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      st[i][0] = fma(st[i][0], d[i].x, q[i].x), st[i][1] = fma(st[i][1], d[i].y, q[i].y), st[i][2] = fma(st[i][2], d[i].x, q[i].z),
      st[i][3] = fma(st[i][3], d[i].y, q[i].w);
    const uint32_t next = await(step + 1 < steps ? step + 1 : step);
    float odd[kTiles][4] = {};  // two sums a tile: shorter chains of products
    uint32_t a[8][4];
#pragma unroll
    for (int s = 0; s < 8; ++s) load_tiles(a[s], rounded + s * 512);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) mma_bf16(s & 1 ? odd[i] : st[i], a[s], b[s][i >> 1][2 * (i & 1)], b[s][i >> 1][2 * (i & 1) + 1]);
      fetch_matrix(next, s);
    }
    fetch_rest(next);
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) st[i][e] += odd[i][e];
    round_state(step + 1);
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      *reinterpret_cast<float4*>(states + (step + 1) * int64_t(kStateBytes) + fragment + i * 512) = {st[i][0], st[i][1], st[i][2], st[i][3]};
  }
}

}  // namespace jax_kda
