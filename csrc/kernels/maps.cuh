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
KDA_DEVICE float4 load_tile(const char* slice, int n, int lane) { return *reinterpret_cast<const float4*>(slice + (n * 32 + lane) * 16); }
KDA_DEVICE void load_slice(State& st, const char* slice, int lane) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const float4 x = load_tile(slice, n, lane);
    st[4 * n] = x.x, st[4 * n + 1] = x.y, st[4 * n + 2] = x.z, st[4 * n + 3] = x.w;
  }
}

// A warp's 16 value rows of a state taken through one map: St <- St diag(d) + round(St) P^T + Q. `map` is in shared memory. q(n) gives
// this lane's part of Q's tile n; next() may bring the next map's Q, now that this one's is used.
template <class Q, class Next> KDA_DEVICE void apply_map(State& st, uint32_t map, int lane, Q q, Next next) {
  uint32_t rounded[8][4];
#pragma unroll
  for (int s = 0; s < 8; ++s)
#pragma unroll
    for (int e = 0; e < 4; ++e) rounded[s][e] = pack_bf16(st[s * 8 + e * 2], st[s * 8 + e * 2 + 1]);
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const float2 d = load_shared2(map + kMapDiagonal + (n * 8 + (lane & 3) * 2) * 4);
    const float4 x = q(n);
    st[4 * n] = fma(st[4 * n], d.x, x.x), st[4 * n + 1] = fma(st[4 * n + 1], d.y, x.y);
    st[4 * n + 2] = fma(st[4 * n + 2], d.x, x.z), st[4 * n + 3] = fma(st[4 * n + 3], d.y, x.w);
  }
  next();
  const int tile = lane >> 3;
  const uint32_t columns = map + ((tile & 1) * 16 + (tile >> 1)) * 128 + (lane & 7) * 16;
#pragma unroll
  for (int s = 0; s < 8; ++s)
#pragma unroll
    for (int n = 0; n < 16; n += 2) {
      uint32_t b[4];
      load_tiles_transposed(b, columns + s * 4096 + n * 128);
      mma_bf16(*reinterpret_cast<float(*)[4]>(st + 4 * n), rounded[s], b[0], b[1]);
      mma_bf16(*reinterpret_cast<float(*)[4]>(st + 4 * n + 4), rounded[s], b[2], b[3]);
    }
}

// 16 value rows of a state, taken through the maps of one segment after the other by four warps, each of which holds 32 channels of it:
//
//   St <- St diag(d) + round(St) P^T + Q
//
// or 16 rows of a map in the state's place, with no Q, which makes one map of several.
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

// maps, folded: of the segment before the first of `steps`, `stride` segments from one to the next. `folded` are slices of states, of number `slice`,
// or (kOfMaps) maps, of which the first is not there: it is the first of `maps`.
template <bool kOfMaps>
KDA_DEVICE void fold(const char* maps, char* folded, int stride, int slice, int steps, uint32_t shared, int warp, int lane) {
  using L = FoldLayout;
  const int thread = warp * 32 + lane;
  const int64_t map_step = stride * int64_t(kMapBytes), state_step = stride * int64_t(kStateBytes);
  char* const states = folded + slice * kSliceBytes;
  auto fill = [&](int step) {
    const uint32_t slot = uint32_t(step) % L::kStages, stage = shared + slot * L::kStageBytes, full = shared + L::kFull + 8 * slot;
    barrier_expect(full, kOfMaps ? kMapBytes : L::kStageBytes);
    copy_bulk(stage, maps + (step + 1) * map_step, kMapBytes, full);
    if constexpr (!kOfMaps) copy_bulk(stage + kMapBytes, states + (step + 1) * state_step, kSliceBytes, full);
  };
  if (thread == 0)
    for (int step = 0; step < L::kStages && step < steps; ++step) fill(step);

  constexpr int kTiles = L::kTiles;
  const uint32_t fragment = (warp * kTiles * 32 + lane) * 16;  // of this warp's tiles, in a slice
  float st[kTiles][4];
  // Rows h * 8 + lane / 4 of the slice, columns 8 (kTiles warp + i) + 2 (lane % 4) + {0, 1}, of a map.
  auto word_at = [&](int i, int h) { return uint32_t(((slice * 2 + h) * 16 + kTiles * warp + i) * 128 + lane * 4); };
  auto on_diagonal = [&](int i, int h, int e) { return kTiles * warp + i == slice * 2 + h && (lane & 3) * 2 + e == lane >> 2; };
  const uint32_t diagonal = kMapDiagonal + (slice * 16 + (lane >> 2)) * 4;  // of row lane / 4
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if constexpr (kOfMaps) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t x = *reinterpret_cast<const uint32_t*>(maps + word_at(i, h));
        const float d = *reinterpret_cast<const float*>(maps + diagonal + h * 32);
        st[i][2 * h] = on_diagonal(i, h, 0) ? d : low_bf16(x), st[i][2 * h + 1] = on_diagonal(i, h, 1) ? d : high_bf16(x);
      }
    } else {
      const float4 x = *reinterpret_cast<const float4*>(states + fragment + i * 512);
      st[i][0] = x.x, st[i][1] = x.y, st[i][2] = x.z, st[i][3] = x.w;
    }
  }
  auto store = [&](int step) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if constexpr (kOfMaps) {
        char* const to = folded + step * map_step;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float x[2] = {st[i][2 * h], st[i][2 * h + 1]};
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (on_diagonal(i, h, e)) *reinterpret_cast<float*>(to + diagonal + h * 32) = x[e], x[e] = 0.f;
          *reinterpret_cast<uint32_t*>(to + word_at(i, h)) = pack_bf16(x[0], x[1]);
        }
      } else {
        *reinterpret_cast<float4*>(states + step * state_step + fragment + i * 512) = {st[i][0], st[i][1], st[i][2], st[i][3]};
      }
    }
  };
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
  float4 q[kTiles] = {};
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
      if constexpr (!kOfMaps) q[i] = load_shared4(stage + kMapBytes + fragment + i * 512);
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
    store(step + 1);
  }
}

}  // namespace jax_kda
