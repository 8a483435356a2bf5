// K1 for gates of at most 5 nats a token: from the raw rows of one chunk to its packet, by a group of four warps. Needs no state, so chunks are
// independent. Few registers (88), so that two groups fit beside a 128-row K2.
//
//   warp w      elementwise work: tokens 16 (w >> 1) ..., channels 64 (w & 1) ...; a lane owns two channels and walks over 16 tokens
//               products: the eight tokens 8 w ... of k and q, as rows of L and M
//
//   1. norms (products), and log decays with their running sums from the start of the 16-token block, kept in registers;
//      factors of the tokens and totals of the blocks to the group's memory                                          -- group barrier
//   2. exp, and everything that is a row scaled by exponentials:
//        packet   -Kd = -k e^G, Qd = q e^G, -Kr = -k e^(G_31 - G), decay e^G_31
//        over the raw rows (the columns within a block over its gates)   the factors of the pair weights e^(G_i - G_j):
//                   within a block   rows e^(G_i - G_start)  x  columns e^(G_start - G_j)      (both within 2^+-116)
//                   across blocks    rows e^(G_i - G_15)     x  columns e^(G_15 - G_j)         (both <= 1)
//      Block 0's rows are the packet's Kd and Qd (and read from there, if it can be read: then the columns for block 1 take the place of its k); block
//      1's rows serve both products.                                                                                  -- group barrier
//   3. L and M by 8 x 8 tiles; M to the packet, L to the group's memory                         -- group barrier, where one warp only arrives
//   4. two warps, whose turn it is, invert I + L and write A; another one sees to what is ready without A
//
// No reference depends on a later token of the chunk. The diagonal of M is q.k, its pair weight exactly one.
#pragma once

#include <cstdint>

#include "gate.cuh"
#include "inverse.cuh"
#include "mma.cuh"
#include "packet.cuh"
#include "pipeline.cuh"
#include "prepare.cuh"

namespace jax_kda {

template <bool kGatesF32, class Packet> struct PrepareBounded {
  static constexpr bool kBounded = true, kF32 = kGatesF32;
  static constexpr bool kShortOfRegisters = !Packet::kReadable;  // helpers run five groups
  static constexpr int kWarps = 4;
  // A group's memory, bytes from its start. Raw rows as in the packet: two panels of 64 channels, each q, k and (where the packet has Kr) gates, with f32
  // gates in two parts of 32 channels; rows of 128 bytes, 128-byte swizzle.
  static constexpr uint32_t kGates = stage::kKr;  // within a panel
  static constexpr uint32_t kPanelStride = kGates + (kGatesF32 ? 2 : 1) * kPanel;
  static constexpr uint32_t kAcross = 2 * kPanelStride;  // block 0's columns for block 1's rows, [2 panels][16], where block 0's k stay
  static constexpr uint32_t kTotals = kAcross + (Packet::kReadable ? 0 : kPanel);  // running sums at the blocks' ends, base 2: [2 blocks][128] f32
  static constexpr uint32_t kFactors = kTotals + 1024;        // see store_factors
  static constexpr uint32_t kTiles = kFactors + kChunk * 16;  // -L: [10 tiles][32 lanes] 2 f32
  static constexpr uint32_t kBytes = (kTiles + 10 * 256 + 1023) / 1024 * 1024;

  // beta: of token `lane`; turn: how many chunks this group has prepared before. acquire() waits until the packet may be written, and gives it. The other
  // two are finish's. True for the warp that finishes the packet.
  template <class Acquire, class AllButA, class Meanwhile>
  static KDA_DEVICE bool run(const PrepareContext& c, float beta, int turn, Acquire acquire, AllButA all_but_a, Meanwhile meanwhile);
};

template <bool kGatesF32, class Packet>
template <class Acquire, class AllButA, class Meanwhile>
KDA_DEVICE bool PrepareBounded<kGatesF32, Packet>::run(const PrepareContext& c, float beta, int turn, Acquire acquire, AllButA all_but_a,
                                                       Meanwhile meanwhile) {
  const int lane = int(opaque(c.lane)), g = lane >> 2, t = lane & 3, w = c.warp;
  const int panel = w & 1, block = w >> 1;
  const uint32_t memory = opaque(c.memory);
  const uint32_t factors = memory + kFactors;
  // This lane's channel pair in the block's first row: of q, k, gates in the raw rows, and of Qd, -Kd, -Kr in the packet. Of its row r: ^ (r & 7) << 4,
  // plus 128 r.
  const uint32_t pair = block * 2048 + ((lane >> 2) << 4 | (lane & 3) << 2);
  const uint32_t raw = memory + panel * kPanelStride + pair;
  auto row_of = [](auto first, int i) { return first ^ uint32_t((i & 7) << 4); };

  // Loads from shared memory stand before the arithmetic that hides them: the compiler keeps their order.

  // ---- 1. norms of tokens 8 w ..., then
  store_factors(c, memory, kPanelStride, beta, factors, lane);
  // log decays (base 2) and their running sums, of tokens 16 block ... and this lane's two channels
  float sum[16][2];
  {
    const int channel = (int(opaque(w)) & 1) * 64 + lane * 2;
    const float2 bias = load_shared2(c.bias + channel * 4);
    const GateConstants gate = load_gate(c);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if constexpr (kGatesF32) {
        const float2 x = load_shared2(memory + panel * kPanelStride + kGates + (lane >> 4) * kPanel + panel_unit(block * 16 + i, (lane >> 1) & 7) + (lane & 1) * 8);
        sum[i][0] = x.x, sum[i][1] = x.y;
      } else {
        sum[i][0] = load_shared(row_of(raw, i) + kGates + i * 128);
      }
    }
    float total[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float raw[2] = {kGatesF32 ? sum[i][0] : low_bf16(bits(sum[i][0])), kGatesF32 ? sum[i][1] : high_bf16(bits(sum[i][0]))};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        total[e] += log_decay<GateMode::kSafe>(raw[e], e ? bias.y : bias.x, gate);  // a tail's tokens do not decay: see load_rows
        sum[i][e] = total[e];
      }
    }
    store_shared2(memory + kTotals + block * 512 + channel * 4, total[0], total[1]);
  }
  sync_group(c.barrier, kWarps * 32);
  const Packet packet = acquire();

  // ---- 2. scaled rows
  {
    const float2 here = load_shared2(memory + kTotals + block * 512 + (panel * 64 + lane * 2) * 4);
    const float2 there = load_shared2(memory + kTotals + (block ^ 1) * 512 + (panel * 64 + lane * 2) * 4);
    const float end[2] = {exp2_approx(here.x), exp2_approx(here.y)}, other[2] = {exp2_approx(there.x), exp2_approx(there.y)};
    if (block == 0) {
      const int channel = panel * 64 + lane * 2;
      Packet::two(packet.at(stage::kDecay + decay_slot(channel >> 4, (channel & 7) >> 1) + ((channel >> 3) & 1) * 8), 0, end[0] * other[0], end[1] * other[1]);
    }
    // Kr is the block's own suffix times what follows it.
    const float tail[2] = {block == 0 ? end[0] * other[0] : end[0], block == 0 ? end[1] * other[1] : end[1]};
    const auto place = packet.at(panel * stage::kPanelStride + pair);
    uint32_t local = raw, across = memory + kAcross + panel * 2048 + pair;
    if constexpr (Packet::kReadable) {
      if (block == 0) local = place.address;
      across = raw + stage::kKey;
    }
    constexpr int kBatch = 2;
    uint32_t kw[2][kBatch], qw[2][kBatch];
    float2 factor[2][kBatch];
    auto fetch = [&](int batch) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = batch * kBatch + j;
        const uint32_t at = row_of(raw, i) + i * 128;
        kw[batch & 1][j] = bits(load_shared(at + stage::kKey)), qw[batch & 1][j] = bits(load_shared(at + stage::kQuery));
        factor[batch & 1][j] = load_shared2(factors + (block * 16 + i) * 16);
      }
    };
    auto packed = [](const float (&x)[2], const float (&by)[2]) { return pack_bf16(x[0] * by[0], x[1] * by[1]); };
    fetch(0);
#pragma unroll
    for (int batch = 0; batch < 16 / kBatch; ++batch) {
      if (batch + 1 < 16 / kBatch) fetch(batch + 1);
      float k[kBatch][2], q[kBatch][2], up[kBatch][2], down[kBatch][2];
      uint32_t row_k[kBatch], row_q[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const uint32_t kj = kw[batch & 1][j], qj = qw[batch & 1][j];
        const float2 f = factor[batch & 1][j];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          k[j][e] = (e ? high_bf16(kj) : low_bf16(kj)) * f.x, q[j][e] = (e ? high_bf16(qj) : low_bf16(qj)) * f.y;
          const float x = sum[batch * kBatch + j][e];
          up[j][e] = exp2_approx(x), down[j][e] = k[j][e] * exp2_approx(-x);
        }
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = batch * kBatch + j;
        store_shared_word(row_of(raw, i) + kGates + i * 128, pack_bf16(down[j][0], down[j][1]));
        row_k[j] = packed(k[j], up[j]), row_q[j] = packed(q[j], up[j]);
        store_shared_word(row_of(local, i) + stage::kKey + i * 128, row_k[j]);
        store_shared_word(row_of(local, i) + stage::kQuery + i * 128, row_q[j]);
        Packet::word(row_of(place, i), stage::kKr + i * 128, packed(down[j], tail));
      }
      // What is common to both blocks runs the same code: what the instruction cache holds is short.
      if (block == 0) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int i = batch * kBatch + j;
          store_shared_word(row_of(across, i) + i * 128, packed(down[j], end));
          if constexpr (!Packet::kReadable) {
            Packet::word(row_of(place, i), stage::kKey + i * 128, row_k[j]);
            Packet::word(row_of(place, i), stage::kQuery + i * 128, row_q[j]);
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int i = batch * kBatch + j;
          const float whole[2] = {up[j][0] * other[0], up[j][1] * other[1]};
          Packet::word(row_of(place, i), stage::kKey + i * 128, packed(k[j], whole));
          Packet::word(row_of(place, i), stage::kQuery + i * 128, packed(q[j], whole));
        }
      }
    }
  }
  sync_group(c.barrier, kWarps * 32);

  // ---- 3. rows 8 w ... of L and M: tiles [column], [0..1] of L / beta, [2..3] of -M
  float tiles[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) tiles[i][e] = 0.f;
  {
    // A lane reads rows of k or of q. Those of block 0 (warps 0 and 1) are the packet's, where it can be read.
    const uint32_t row_in_panel = ((lane >> 3) & 1 ? stage::kQuery : stage::kKey) + panel_unit(lane & 7, lane >> 4) + w * 1024;
    uint32_t row_at = memory + row_in_panel, row_panel = kPanelStride;
    if constexpr (Packet::kReadable)
      if (w < 2) row_at = packet.base + row_in_panel, row_panel = stage::kPanelStride;
    // columns of two 8-token tiles: {tile, tile + 1} x {channels 0-7, 8-15}
    const uint32_t column_quad = panel_unit(lane & 7, (lane >> 3) & 1) + (lane >> 4) * 1024;
    const uint32_t within = memory + kGates + block * 2048 + column_quad;
    const uint32_t across = (Packet::kReadable ? memory + stage::kKey : memory + kAcross) + column_quad;
    constexpr uint32_t kAcrossPanel = Packet::kReadable ? kPanelStride : 2048;
    auto fetch = [&](uint32_t (&to)[4], uint32_t from, int s, uint32_t panel_bytes) { load_tiles(to, (from ^ ((s & 3) << 5)) + (s >> 2) * panel_bytes); };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[4][4], b[4][4];
#pragma unroll
      for (int s = 0; s < 4; ++s) fetch(a[s], row_at, half * 4 + s, row_panel), fetch(b[s], within, half * 4 + s, kPanelStride);
      if (block == 0) {
#pragma unroll
        for (int s = 0; s < 4; ++s) mma_bf16(tiles[0], a[s], b[s][0], b[s][1]), mma_bf16(tiles[1], a[s], b[s][2], b[s][3]);
      } else {
#pragma unroll
        for (int s = 0; s < 4; ++s) mma_bf16(tiles[2], a[s], b[s][0], b[s][1]), mma_bf16(tiles[3], a[s], b[s][2], b[s][3]);
#pragma unroll
        for (int s = 0; s < 4; ++s) fetch(b[s], across, half * 4 + s, kAcrossPanel);
#pragma unroll
        for (int s = 0; s < 4; ++s) mma_bf16(tiles[0], a[s], b[s][0], b[s][1]), mma_bf16(tiles[1], a[s], b[s][2], b[s][3]);
      }
    }
  }
  const float2 own = load_shared2(factors + (w * 8 + g) * 16 + 8);  // -M's diagonal, -beta
  if (t == 0) Packet::word(packet.at(stage::kBeta + (w * 8 + g) * 4), 0, bits(own.y));
  uint32_t m[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Above the diagonal exponents may have overflowed: selected away, never multiplied.
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = i * 8 + 2 * t + e, row = w * 8 + g;
      tiles[i][e] = column < row ? tiles[i][e] * own.y : 0.f;
      tiles[i][2 + e] = column < row ? tiles[i][2 + e] : column == row ? own.x : 0.f;
    }
    m[i] = pack_bf16(tiles[i][2], tiles[i][3]);
    if (i <= w) store_shared2(tile_at(memory + kTiles, w, i, lane), tiles[i][0], tiles[i][1]);
  }
  packet.tiles(lane, [&](int tile, int row) { return stage::kM + square_unit(w * 8 + row, tile); }, m[0], m[1], m[2], m[3]);

  // ---- 4. A
  return finish(c, packet, memory + kTiles, turn, lane, all_but_a, meanwhile);
}

}  // namespace jax_kda
