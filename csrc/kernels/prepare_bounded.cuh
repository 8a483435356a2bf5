// K1 for gates of at most 5 nats a token: from the raw rows of one chunk to its packet, by a group of four warps. Needs no state, so chunks are
// independent. Few registers (88), so that two groups fit beside a 128-row K2.
//
//   warp w      elementwise work: tokens 16 (w >> 1) ..., channels 64 (w & 1) ...; a lane owns two channels and walks over 16 tokens
//               products: the eight tokens 8 w ... of k and q, as rows of L and M
//
//   1. norms (products), and log decays with their running sums from the start of the 16-token block, kept in registers;
//      factors of the tokens and totals of the blocks to scratch                                                     -- group barrier
//   2. exp, and everything that is a row scaled by exponentials:
//        packet   Kd = -k e^G, Qd = q e^G, Kr = k e^(G_31 - G), decay e^G_31
//        scratch  the factors of the pair weights e^(G_i - G_j):
//                   within a block   rows e^(G_i - G_start)  x  columns e^(G_start - G_j)      (both within 2^+-116)
//                   across blocks    rows e^(G_i - G_15)     x  columns e^(G_15 - G_j)         (both <= 1)
//      For rows of block 0 the packet's Kd, Qd are those rows; block 1's rows serve both products.                    -- group barrier
//   3. L and M by 8 x 8 tiles; M to the packet, L to scratch                                    -- group barrier, where three warps only arrive
//   4. the warp whose turn it is inverts I + L and writes A; the others are at the next chunk already
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

template <bool kGatesF32> struct PrepareBounded {
  static constexpr int kWarps = 4;
  // Scratch of one group, bytes from its start. Panels as in the packet: 64 channels, rows of 128 bytes, 128-byte swizzle.
  static constexpr uint32_t kRows = 0;                       // block 1's rows: [k, q][2 panels][16]; q as far behind k as in the packet
  static constexpr uint32_t kColumns = kRows + 2 * kPanel;   // columns within blocks: [2 panels][32]
  static constexpr uint32_t kAcross = kColumns + 2 * kPanel;  // block 0's columns for block 1's rows: [2 panels][16]
  static constexpr uint32_t kTotals = kAcross + kPanel;      // running sums at the blocks' ends, base 2: [2 blocks][128] f32
  static constexpr uint32_t kFactors = kTotals + 1024;       // [2: turns alternate][32 tokens] 1/|k|, scale / |q|, M's diagonal, beta
  static constexpr uint32_t kTiles = kFactors + 1024;        // -L: [10 tiles][32 lanes] 2 f32
  static constexpr uint32_t kScratchBytes = kTiles + 10 * 256;

  // turn: how many chunks this group has prepared before. copy_next() starts the copy of its next rows.
  template <class CopyNext>
  static KDA_DEVICE void run(const PrepareContext& c, uint32_t stage, int tokens, float beta, int turn, CopyNext copy_next);
};

template <bool kGatesF32>
template <class CopyNext>
KDA_DEVICE void PrepareBounded<kGatesF32>::run(const PrepareContext& c, uint32_t stage, int /*tokens*/, float beta, int turn, CopyNext copy_next) {
  const int lane = int(opaque(c.lane)), g = lane >> 2, t = lane & 3, w = c.warp;
  const int panel = w & 1, block = w >> 1;
  const uint32_t scratch = opaque(c.scratch);
  // Two, because the warp that inverts may read its chunk's while the group writes the next one's.
  const uint32_t factors = scratch + kFactors + (turn & 1) * 512;
  // Byte offset of this lane's channel pair in row 0 of a panel; row r's is this ^ (r & 7) << 4, plus 128 r.
  const uint32_t pair = (lane >> 2) << 4 | (lane & 3) << 2;

  // Loads from shared memory stand before the arithmetic that hides them: the compiler keeps their order.

  // ---- 1. norms of tokens 8 w ..., as diagonals of small products
  {
    const uint32_t quad = stage + stage::kKeyQuery + ((lane >> 3) & 1) * stage::kQueryRows + panel_unit(lane & 7, lane >> 4) + w * 1024;
    float gram_k[2][4], gram_q[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) gram_k[0][i] = gram_k[1][i] = gram_q[0][i] = gram_q[1][i] = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t f[4][4];  // {k, q} x {channels 0-7, 8-15}: rows 0-7 are k's, rows 8-15 q's
#pragma unroll
      for (int s = 0; s < 4; ++s) load_tiles(f[s], (quad ^ (s << 5)) + half * stage::kKeyQueryPanel);
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
      const float rk = c.l2norm ? rsqrt_approx(kk + 1e-6f) : 1.f, rq = c.scale * (c.l2norm ? rsqrt_approx(qq + 1e-6f) : 1.f);
      store_shared4(factors + (w * 8 + g) * 16, {rk, rq, qk * rk * rq, strength});
      store_shared(stage + stage::kBeta + (w * 8 + g) * 4, strength);
    }
  }
  // log decays (base 2) and their running sums, of tokens 16 block ... and this lane's two channels
  float sum[16][2];
  {
    const int channel = (int(opaque(w)) & 1) * 64 + lane * 2;
    const float2 bias = load_shared2(c.bias + channel * 4);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if constexpr (kGatesF32) {  // four panels of 32 channels
        const float2 x = load_shared2(stage + stage::kGatesF32 + (panel * 2 + (lane >> 4)) * kPanel + panel_unit(block * 16 + i, (lane >> 1) & 7) + (lane & 1) * 8);
        sum[i][0] = x.x, sum[i][1] = x.y;
      } else {
        sum[i][0] = load_shared(stage + stage::kKr + panel * kPanel + block * 2048 + i * 128 + (pair ^ (i & 7) << 4));
      }
    }
    float total[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float raw[2] = {kGatesF32 ? sum[i][0] : low_bf16(bits(sum[i][0])), kGatesF32 ? sum[i][1] : high_bf16(bits(sum[i][0]))};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        total[e] += log_decay<true>(raw[e], e ? bias.y : bias.x, c.gate);  // a tail's tokens do not decay: see load_rows
        sum[i][e] = total[e];
      }
    }
    store_shared2(scratch + kTotals + block * 512 + channel * 4, total[0], total[1]);
  }
  sync_group(c.barrier, kWarps * 32);

  // ---- 2. scaled rows
  {
    const float2 here = load_shared2(scratch + kTotals + block * 512 + (panel * 64 + lane * 2) * 4);
    const float2 there = load_shared2(scratch + kTotals + (block ^ 1) * 512 + (panel * 64 + lane * 2) * 4);
    const float end[2] = {exp2_approx(here.x), exp2_approx(here.y)}, other[2] = {exp2_approx(there.x), exp2_approx(there.y)};
    if (block == 0) {
      const int channel = panel * 64 + lane * 2;
      store_shared2(stage + stage::kDecay + decay_slot(channel >> 4, (channel & 7) >> 1) + ((channel >> 3) & 1) * 8, end[0] * other[0], end[1] * other[1]);
    }
    const uint32_t packet = stage + stage::kKeyQuery + panel * stage::kKeyQueryPanel + block * 2048;
    const uint32_t kr = stage + stage::kKr + panel * kPanel + block * 2048;
    const uint32_t columns = scratch + kColumns + panel * kPanel + block * 2048;
    const uint32_t rows = scratch + kRows + panel * 2048, across = scratch + kAcross + panel * 2048;
    auto store_pair = [](uint32_t at, float x, float y) { store_shared_word(at, pack_bf16(x, y)); };
    // Both blocks run the same code (what the instruction cache holds is short): rows scaled within the block go to the packet (block 0) or to
    // scratch (block 1), and Kr is the block's own suffix times what follows it.
    const uint32_t local = block == 0 ? packet : rows;
    constexpr int kBatch = 2;
    uint32_t kw[2][kBatch], qw[2][kBatch];
    float2 factor[2][kBatch];
    auto fetch = [&](int batch) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = batch * kBatch + j;
        const uint32_t at = i * 128 + (pair ^ (i & 7) << 4);
        kw[batch & 1][j] = bits(load_shared(packet + at)), qw[batch & 1][j] = bits(load_shared(packet + stage::kQueryRows + at));
        factor[batch & 1][j] = load_shared2(factors + (block * 16 + i) * 16);
      }
    };
    fetch(0);
#pragma unroll
    for (int batch = 0; batch < 16 / kBatch; ++batch) {
      if (batch + 1 < 16 / kBatch) fetch(batch + 1);
      float k[kBatch][2], q[kBatch][2], up[kBatch][2], down[kBatch][2];
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
        const uint32_t at = i * 128 + (pair ^ (i & 7) << 4);
        store_pair(columns + at, down[j][0], down[j][1]);
        store_pair(local + at, -k[j][0] * up[j][0], -k[j][1] * up[j][1]);
        store_pair(local + stage::kQueryRows + at, q[j][0] * up[j][0], q[j][1] * up[j][1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) down[j][e] *= end[e], up[j][e] *= other[e];
        if (block == 0) {
          store_pair(across + at, down[j][0], down[j][1]);
          down[j][0] *= other[0], down[j][1] *= other[1];
        } else {
          store_pair(packet + at, -k[j][0] * up[j][0], -k[j][1] * up[j][1]);
          store_pair(packet + stage::kQueryRows + at, q[j][0] * up[j][0], q[j][1] * up[j][1]);
        }
        store_pair(kr + at, down[j][0], down[j][1]);
      }
    }
  }
  sync_group(c.barrier, kWarps * 32);
  copy_next();

  // ---- 3. rows 8 w ... of L and M: tiles [column], [0..1] of -L / beta, [2..3] of M
  float tiles[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) tiles[i][e] = 0.f;
  {
    const uint32_t row_quad = panel_unit(lane & 7, lane >> 4) + (w & 1) * 1024;
    const uint32_t row_at = (w < 2 ? stage + stage::kKeyQuery + ((lane >> 3) & 1) * stage::kQueryRows : scratch + kRows + ((lane >> 3) & 1) * stage::kQueryRows) + row_quad;
    const uint32_t row_panel = w < 2 ? uint32_t(stage::kKeyQueryPanel) : 2048u;
    // columns of two 8-token tiles: {tile, tile + 1} x {channels 0-7, 8-15}
    const uint32_t column_quad = panel_unit(lane & 7, (lane >> 3) & 1) + (lane >> 4) * 1024;
    const uint32_t within = scratch + kColumns + block * 2048 + column_quad, across = scratch + kAcross + column_quad;
    auto fetch = [&](uint32_t (&to)[4], uint32_t from, int s, uint32_t panel_bytes) { load_tiles(to, (from ^ ((s & 3) << 5)) + (s >> 2) * panel_bytes); };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[4][4], b[4][4];
#pragma unroll
      for (int s = 0; s < 4; ++s) fetch(a[s], row_at, half * 4 + s, row_panel), fetch(b[s], within, half * 4 + s, kPanel);
      if (block == 0) {
#pragma unroll
        for (int s = 0; s < 4; ++s) mma_bf16(tiles[0], a[s], b[s][0], b[s][1]), mma_bf16(tiles[1], a[s], b[s][2], b[s][3]);
      } else {
#pragma unroll
        for (int s = 0; s < 4; ++s) mma_bf16(tiles[2], a[s], b[s][0], b[s][1]), mma_bf16(tiles[3], a[s], b[s][2], b[s][3]);
#pragma unroll
        for (int s = 0; s < 4; ++s) fetch(b[s], across, half * 4 + s, 2048);
#pragma unroll
        for (int s = 0; s < 4; ++s) mma_bf16(tiles[0], a[s], b[s][0], b[s][1]), mma_bf16(tiles[1], a[s], b[s][2], b[s][3]);
      }
    }
  }
  const float2 own = load_shared2(factors + (w * 8 + g) * 16 + 8);  // M's diagonal, beta
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
    if (i <= w) store_shared2(scratch + kTiles + ((w * (w + 1) / 2 + i) * 32 + lane) * 8, tiles[i][0], tiles[i][1]);
  }
  store_tiles(stage + stage::kM + square_unit(w * 8 + (lane & 7), lane >> 3), m[0], m[1], m[2], m[3]);
  // A barrier of its own: the three that only arrive may reach the next chunk's barriers before the fourth comes here.
  if ((turn & 3) != w) {
    arrive_group(c.tiles_barrier, kWarps * 32);
    return;
  }
  sync_group(c.tiles_barrier, kWarps * 32);

  // ---- 4. A
  invert_and_store(
      [&](int row, int column) {
        const float2 x = load_shared2(scratch + kTiles + ((row * (row + 1) / 2 + column) * 32 + lane) * 8);
        return Tile{{x.x, x.y}};
      },
      stage, lane);
}

}  // namespace jax_kda
