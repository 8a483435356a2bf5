// What both schemes of K1 share: what a group of warps keeps from chunk to chunk, the norms, and the last steps, from products to L, M and A.
#pragma once

#include <cstdint>

#include "gate.cuh"
#include "inverse.cuh"
#include "mma.cuh"
#include "packet.cuh"
#include "pipeline.cuh"

namespace jax_kda {

struct PrepareContext {
  GateMode mode;
  uint32_t gate;      // shared: slope and height of GateConstants
  float scale;
  bool l2norm;
  uint32_t bias;      // shared: dt_bias * gate.slope, [128] f32
  uint32_t memory;    // shared: of this group
  int barrier;        // named barrier of this group
  int tiles_barrier;  // another one
  int halves_barrier;  // and one of the two warps that invert
  int warp;           // within the group
  int lane;
};

// From shared memory for every chunk: between them K1 is short of registers.
KDA_DEVICE GateConstants load_gate(const PrepareContext& c) {
  const float2 x = load_shared2(c.gate);
  return {x.x, x.y};
}

// A 16 x 16 block of A or M, in tiles 00, 01, 10, 11, to its place in the packet.
template <class Packet>
KDA_DEVICE void store_block(Packet packet, uint32_t square, int block_row, int block_column, uint32_t t00, uint32_t t01, uint32_t t10, uint32_t t11, int lane) {
  packet.tiles(
      lane, [&](int tile, int row) { return square + square_unit(block_row * 16 + (tile >> 1) * 8 + row, block_column * 2 + (tile & 1)); }, t00, t01, t10,
      t11);
}

KDA_DEVICE uint32_t tile_at(uint32_t square, int row, int column, int lane) { return square + ((row * (row + 1) / 2 + column) * 32 + lane) * 8; }

// What belongs to a token: -1/|k|, scale / |q|, -M's diagonal, -beta (the signs: packet.cuh). 16 bytes each, in shared memory: of tokens 8 warp ..., by
// the warp itself. Norms are diagonals of small products. `rows`: raw, panels `stride` apart.
KDA_DEVICE void store_factors(const PrepareContext& c, uint32_t rows, uint32_t stride, float beta, uint32_t factors, int lane) {
  const int g = lane >> 2, t = lane & 3, w = c.warp;
  const uint32_t quad = rows + ((lane >> 3) & 1 ? stage::kQuery : stage::kKey) + panel_unit(lane & 7, lane >> 4) + w * 1024;
  float gram_k[2][4], gram_q[2][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) gram_k[0][i] = gram_k[1][i] = gram_q[0][i] = gram_q[1][i] = 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t f[4][4];  // {k, q} x {channels 0-7, 8-15}: rows 0-7 are k's, rows 8-15 q's
#pragma unroll
    for (int s = 0; s < 4; ++s) load_tiles(f[s], (quad ^ (s << 5)) + half * stride);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      mma_bf16(gram_k[s & 1], f[s], f[s][0], f[s][2]);
      mma_bf16(gram_q[s & 1], f[s], f[s][1], f[s][3]);
    }
  }
  const float strength = shuffle(beta, w * 8 + g);
  if (t == (g >> 1)) {
    const int odd = g & 1;
    const float kk = odd ? gram_k[0][1] + gram_k[1][1] : gram_k[0][0] + gram_k[1][0];
    const float qk = odd ? gram_k[0][3] + gram_k[1][3] : gram_k[0][2] + gram_k[1][2];
    const float qq = odd ? gram_q[0][3] + gram_q[1][3] : gram_q[0][2] + gram_q[1][2];
    const float rk = c.l2norm ? -rsqrt_approx(kk + 1e-6f) : -1.f, rq = c.scale * (c.l2norm ? rsqrt_approx(qq + 1e-6f) : 1.f);
    store_shared4(factors + (w * 8 + g) * 16, {rk, rq, qk * rk * rq, -strength});
  }
}

// When this warp's rows of M are in the packet and its tiles of -L in the group's memory, `square`: [10 tiles][32 lanes] 2 f32. Who inverts changes from
// turn to turn: two warps, a half each; where many groups fill the SM, so that not time but work counts, one. Meanwhile another one calls all_but_a(): the
// rest of the packet is there, and the copy engine may bring the next rows, for no warp of the group reads raw ones or operands any more. A free one calls
// meanwhile(), for what the group has to do besides: the next chunk waits for the inverting warps anyhow. True for the warp that has finished the packet.
template <class Packet, class AllButA, class Meanwhile>
KDA_DEVICE bool finish(const PrepareContext& c, const Packet& packet, uint32_t square, int turn, int lane, AllButA all_but_a, Meanwhile meanwhile) {
  constexpr int kWarps = 4;
  constexpr bool kHalves = Packet::kReadable;
  enum { kFirst, kOnward, kFree, kSecond };
  const int role = (c.warp - turn) & 3;
  fence_async_shared();  // what this warp has written: the packet is read, and the rows are written, by engines
  // A barrier of its own: those that only arrive may reach the next chunk's barriers before the others come here.
  if (role == kFree || (role == kSecond && !kHalves)) {
    arrive_group(c.tiles_barrier, kWarps * 32);
    if (role == kFree) meanwhile();
    return false;
  }
  sync_group(c.tiles_barrier, kWarps * 32);
  if (role == kOnward) {
    all_but_a();
    return false;
  }
  auto tile = [&](int row, int column) {
    const float2 x = load_shared2(tile_at(square, row, column, lane));
    return Tile{{x.x, x.y}};
  };
  auto packed = [](const Tile& y) { return pack_bf16(y.v[0], y.v[1]); };
  auto half = [&](int block) {
    return invert_half(
        lane, [&](int row, int column) { return tile(2 * block + row, 2 * block + column); },
        [&](Tile t00, Tile t10, Tile t11) { store_block(packet, stage::kA, block, block, packed(t00), 0u, packed(t10), packed(t11), lane); });
  };
  auto below = [&](const HalfInverse& second, const TileOperand (&product)[2][2]) {
    multiply_second(second, product, [&](Tile t00, Tile t01, Tile t10, Tile t11) {
      store_block(packet, stage::kA, 1, 0, packed(t00), packed(t01), packed(t10), packed(t11), lane);
    });
    fence_async_shared();
    sync_warp();
  };
  TileOperand product[2][2];
  if constexpr (!kHalves) {
    const HalfInverse first = half(0), second = half(1);
    store_block(packet, stage::kA, 0, 1, 0u, 0u, 0u, 0u, lane);
    multiply_by_first(first, [&](int row, int column) { return tile(2 + row, column); }, product);
    below(second, product);
    return true;
  }
  const HalfInverse own = half(role == kFirst ? 0 : 1);
  if (role == kFirst) {
    store_block(packet, stage::kA, 0, 1, 0u, 0u, 0u, 0u, lane);
    multiply_by_first(own, [&](int row, int column) { return tile(2 + row, column); }, product);
    // Handed over where this lane has read its own tiles.
#pragma unroll
    for (int i = 0; i < 4; ++i) store_shared2(square + (i * 32 + lane) * 8, from_bits(product[i >> 1][i & 1].u[0]), from_bits(product[i >> 1][i & 1].u[1]));
    fence_async_shared();
    arrive_group(c.halves_barrier, 64);
    return false;
  }
  sync_group(c.halves_barrier, 64);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = load_shared2(square + (i * 32 + lane) * 8);
    product[i >> 1][i & 1] = {{bits(x.x), bits(x.y)}};
  }
  below(own, product);
  return true;
}

}  // namespace jax_kda
