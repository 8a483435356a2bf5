// What both schemes of K1 share: what a group of warps keeps from chunk to chunk, and the last step, A = (I + L)^-1 diag(beta).
#pragma once

#include <cstdint>

#include "gate.cuh"
#include "inverse.cuh"
#include "mma.cuh"
#include "packet.cuh"

namespace jax_kda {

struct PrepareContext {
  GateConstants gate;
  float scale;
  bool l2norm;
  uint32_t bias;     // shared: dt_bias * gate.slope, [128] f32
  uint32_t scratch;  // shared: of this group
  int barrier;       // named barrier of this group
  int tiles_barrier;  // another one
  int warp;          // within the group
  int lane;
};

// Writes a lower triangle of tiles as a 32 x 32 square of the packet, zeros above it; factor(column tile, e) scales this lane's columns.
template <class Factor> KDA_DEVICE void store_lower(uint32_t square, const LowerTiles& x, int lane, Factor factor) {
  auto packed = [&](const Tile& y, int column) { return pack_bf16(y.v[0] * factor(column, 0), y.v[1] * factor(column, 1)); };
  const uint32_t at = square + square_unit(lane & 7, lane >> 3);  // lane 8 m + r: row r of column tile m; row tiles are 512 bytes apart
  store_tiles(at, packed(x.diagonal[0][0], 0), 0u, 0u, 0u);
  store_tiles(at + 512, packed(x.diagonal[0][1], 0), packed(x.diagonal[0][2], 1), 0u, 0u);
  store_tiles(at + 1024, packed(x.square[0][0], 0), packed(x.square[0][1], 1), packed(x.diagonal[1][0], 2), 0u);
  store_tiles(at + 1536, packed(x.square[1][0], 0), packed(x.square[1][1], 1), packed(x.diagonal[1][1], 2), packed(x.diagonal[1][2], 3));
}

// n = -L in tiles; beta of token `lane`. One warp.
KDA_DEVICE void invert_and_store(const LowerTiles& n, float beta, uint32_t stage, int lane) {
  LowerTiles x;
  invert(n, x, lane);
  float strength[4][2];  // of this lane's columns
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int e = 0; e < 2; ++e) strength[i][e] = shuffle(beta, i * 8 + 2 * (lane & 3) + e);
  store_lower(stage + stage::kA, x, lane, [&](int column, int e) { return strength[column][e]; });
}

}  // namespace jax_kda
