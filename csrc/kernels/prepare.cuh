// What both schemes of K1 share: what a group of warps keeps from chunk to chunk, and the last step, the inverse.
#pragma once

#include <cstdint>

#include "gate.cuh"
#include "inverse.cuh"
#include "mma.cuh"
#include "packet.cuh"

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
  int warp;           // within the group
  int lane;
};

// From shared memory for every chunk: between them K1 is short of registers.
KDA_DEVICE GateConstants load_gate(const PrepareContext& c) {
  const float2 x = load_shared2(c.gate);
  return {c.mode, x.x, x.y};
}

// A 16 x 16 block of A or M, in tiles 00, 01, 10, 11, to its place in the packet.
template <class Packet>
KDA_DEVICE void store_block(Packet packet, uint32_t square, int block_row, int block_column, uint32_t t00, uint32_t t01, uint32_t t10, uint32_t t11, int lane) {
  packet.tiles(
      lane, [&](int tile, int row) { return square + square_unit(block_row * 16 + (tile >> 1) * 8 + row, block_column * 2 + (tile & 1)); }, t00, t01, t10,
      t11);
}

// (I + L)^-1 from n(row tile, column tile), tiles of -L. One warp.
template <class N, class Packet> KDA_DEVICE void invert_and_store(N n, Packet packet, int lane) {
  auto packed = [](const Tile& y) { return pack_bf16(y.v[0], y.v[1]); };
  invert(lane, n, [&](int row, int column, Tile t00, Tile t01, Tile t10, Tile t11) {
    store_block(packet, stage::kA, row, column, packed(t00), packed(t01), packed(t10), packed(t11), lane);
  });
}

}  // namespace jax_kda
