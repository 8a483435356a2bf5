// K1 for gates without a bound: from the raw rows of one chunk to its packet, by a group of two warps. Needs no state, so chunks are independent.
//
//   warp w owns channels 64 w ..., in slices of 16; both own all 32 tokens.
//
//   1. norms    squared norms of k and q and the products q_i . k_i, as the diagonals of small matrix products; partial sums of the warps
//               meet in the group's memory                                                                        -- group barrier
//   2. slices   per slice of 16 channels and block of 16 tokens: raw gates -> log decays -> running sums (a product with a 0/1 matrix, whose
//               result has the layout of the operands it scales) -> exp -> Kd, Qd, Kr, to the packet, and the partial products for L and M
//   3. squares  partial L and M of the warps meet over the raw rows                                               -- group barrier
//               warp 1 writes M and is done                                         -- group barrier, where it only arrives
//               warp 0 inverts I + L and writes A
//
// Pair weights exp(G_i - G_j), i >= j, are products of two factors around a reference that no later token can move: the start of an 8-token group;
// each token's decay is clamped at -10 nats (5e-5 of what was there is kept instead of less), so that eight tokens stay within 2^+-116. Pairs
// across groups use the boundary between them, where both factors are <= 1. The diagonal of M is q.k exactly. What meets the state (Kd, Qd, Kr, the
// decay) and the pairs across blocks get the excess back, down to -22 nats a token: a state may be larger than the values by any factor.
// The factor 1/|k| of the keys enters as the start value of the running sums (log2 of it), so normalising costs no multiplication.
#pragma once

#include <cstdint>

#include "gate.cuh"
#include "inverse.cuh"
#include "mma.cuh"
#include "packet.cuh"
#include "pipeline.cuh"
#include "prepare.cuh"

namespace jax_kda {

template <bool kGatesF32, class Packet> struct PrepareUnbounded {
  static constexpr bool kBounded = false, kF32 = kGatesF32;
  static constexpr int kWarps = 2, kSlices = 8 / kWarps;
  // A group's memory, bytes from its start. Panels as in the packet: 64 channels (f32 gates: 32), rows of 128 bytes, 128-byte swizzle.
  static constexpr uint32_t kKeyQuery = 0;        // raw [2 panels][32 of k, 32 of q]; then, over its own panel, each warp's part of a square:
                                                  // L of warp 1, M of warp 0, [10 tiles][32 lanes] 2 floats
  static constexpr uint32_t kGates = 4 * kPanel;  // raw
  static constexpr uint32_t kNorms = kGates + (kGatesF32 ? 4 : 2) * kPanel;  // [kWarps][32 tokens] (k.k, q.q)
  static constexpr uint32_t kFactors = kNorms + kWarps * kChunk * 8;         // [kWarps][32 tokens] log2(1/|k|), scale |k|/|q|, q.k of the warp, unused
  static constexpr uint32_t kColumns = kFactors + kWarps * kChunk * 16;      // [kWarps][8 rows][16 channels] f32
  static constexpr uint32_t kBytes = (kColumns + kWarps * 512 + 1023) / 1024 * 1024;
  static KDA_DEVICE uint32_t buffer(uint32_t memory, int) { return memory; }
  static KDA_DEVICE uint32_t square(uint32_t rows, int which) { return rows + kKeyQuery + (which == 0 ? stage::kKeyQueryPanel : 0u); }

  // As PrepareBounded::run.
  template <class Acquire, class RowsUsed>
  static KDA_DEVICE bool run(const PrepareContext& c, int tokens, float beta, int turn, Acquire acquire, RowsUsed rows_used);
};

// The block of 16 tokens x 16 channels of one lane: element 4 n + 2 h + e is (token 8 h + g, channel 8 n + 2 t + e).
using Block = float[8];

template <bool kGatesF32, class Packet>
template <class Acquire, class RowsUsed>
KDA_DEVICE bool PrepareUnbounded<kGatesF32, Packet>::run(const PrepareContext& c, int tokens, float beta, int /*turn*/, Acquire acquire, RowsUsed rows_used) {
  constexpr uint32_t kUnit = 0x1000;  // f16 2^-11: undoes kGateUnit inside the running sums
  const int lane = int(opaque(c.lane)), g = lane >> 2, t = lane & 3;
  const uint32_t memory = opaque(c.memory), rows = memory;

  // Fragment offsets, in the raw rows as in the packet. Mixed quad {k, q} x {channels 0-7, 8-15} of 8 tokens: A operand with rows 0-7 from k and
  // rows 8-15 from q. Square quad: {tokens 0-7, 8-15} x {channels 0-7, 8-15} of the gates, and of Kr.
  auto mixed_at = [&](int tile, int row, int slice, int b, int h) {
    return (((tile & 1) * stage::kQueryRows + panel_unit(row, tile >> 1)) ^ ((slice & 3) << 5)) + (slice >> 2) * stage::kKeyQueryPanel + (b * 16 + h * 8) * 128;
  };
  auto square_at = [&](int tile, int row, int slice, int b) {
    return (panel_unit(row + (tile & 1) * 8, tile >> 1) ^ ((slice & 3) << 5)) + (slice >> 2) * kPanel + b * 2048;
  };
  auto load_rows = [&](uint32_t (&to)[4], int slice, int b, int h) { load_tiles(to, rows + kKeyQuery + mixed_at(lane >> 3, lane & 7, slice, b, h)); };

  // ---- 1. norms
  const uint32_t factors = memory + kFactors + c.warp * kChunk * 16;  // this warp's copy: registers are what K1 is short of
  {
    float qk[2][2];
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float gram_k[4] = {0.f, 0.f, 0.f, 0.f}, gram_q[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
          uint32_t f[4];
          load_rows(f, c.warp * kSlices + s, b, h);
          mma_bf16(gram_k, f, f[0], f[2]);  // rows 0-7: k.k, rows 8-15: q.k
          mma_bf16(gram_q, f, f[1], f[3]);  // rows 8-15: q.q
        }
        qk[b][h] = g & 1 ? gram_k[3] : gram_k[2];
        if (t == (g >> 1))
          store_shared2(memory + kNorms + (c.warp * kChunk + b * 16 + h * 8 + g) * 8, g & 1 ? gram_k[1] : gram_k[0],
                        g & 1 ? gram_q[3] : gram_q[2]);
      }
    sync_group(c.barrier, kWarps * 32);
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int token = b * 16 + h * 8 + g;
        float k2 = 0.f, q2 = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const float2 part = load_shared2(memory + kNorms + (w * kChunk + token) * 8);
          k2 += part.x;
          q2 += part.y;
        }
        k2 = c.l2norm ? k2 + 1e-6f : 1.f;
        q2 = c.l2norm ? q2 + 1e-6f : 1.f;
        const float rk = rsqrt_approx(k2), rq = rsqrt_approx(q2), inverse_rk = k2 * rk;
        if (t == (g >> 1))  // the lane that holds this token's q.k
          store_shared4(factors + token * 16,
                        {c.l2norm ? -0.5f * log2_approx(k2) : 0.f, c.scale * rq * inverse_rk, qk[b][h] * (c.scale * rq * rk), 0.f});
      }
    sync_warp();
  }

  // ---- 2. slices
  const GateConstants gate = load_gate(c);
  const Packet packet = acquire();
  auto store_rows = [&](const uint32_t (&x)[4], int slice, int b, int h) {
    packet.tiles(lane, [&](int tile, int row) { return stage::kKeyQuery + mixed_at(tile, row, slice, b, h); }, x[0], x[1], x[2], x[3]);
  };
  auto store_kr = [&](const uint32_t (&x)[2][2], int slice, int b) {
    packet.tiles(lane, [&](int tile, int row) { return stage::kKr + square_at(tile, row, slice, b); }, x[0][0], x[1][0], x[0][1], x[1][1]);
  };
  // Running-sum matrices (f16 A operands). A tail's tokens have weight zero: their rows were filled with zeros, so nothing of them enters.
  uint32_t valid[2][2];  // [block][half of 8 tokens]: mask of this lane's two tokens
#pragma unroll
  for (int b = 0; b < 2; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = b * 16 + h * 8 + 2 * t;
      valid[b][h] = (token < tokens ? 0xffffu : 0u) | (token + 1 < tokens ? 0xffff0000u : 0u);
    }
  uint32_t local = 0, totals_low = 0, totals_high = 0;  // tokens 0-7 / 8-15 of a block
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int token = 2 * t + e;
    local |= (token <= g ? kUnit : 0u) << (16 * e);  // inclusive prefix inside an 8-token group
    const bool low = g == 0 || g == 2, high = g == 1 || g == 2;  // rows: 0 sum(0..7), 1 sum(8..15), 2 sum(0..15)
    totals_low |= (low ? kUnit : 0u) << (16 * e);
    totals_high |= (high ? kUnit : 0u) << (16 * e);
  }

  float acc[10][4];  // block 0: tiles 00, 10, 11; block 1 the same; square below: 4 tiles. [0..1] is -L / beta, [2..3] is M
#pragma unroll
  for (int i = 0; i < 10; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[i][e] = 0.f;

#pragma unroll 1
  for (int s = 0; s < kSlices; ++s) {
    const int slice = c.warp * kSlices + s;
    const float bias[2] = {load_shared(c.bias + (slice * 16 + g) * 4), load_shared(c.bias + (slice * 16 + 8 + g) * 4)};
    float total0[4];     // decay of block 0, of this lane's four channels 8 n + 2 t + e
    Block kr0;           // k exp(G_15 - G) of block 0
    uint32_t kr0_operand[2][2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      // Log decays as pairs of f16, in the layout of a B operand: register r holds tokens 8 (r & 1) + 2 t, + 1 of channel 8 (r >> 1) + g.
      auto decays = [&](auto use) {  // use(r, both log decays of register r)
        [[maybe_unused]] uint32_t raw[4];
        if constexpr (!kGatesF32) load_tiles_transposed(raw, rows + kGates + square_at(lane >> 3, lane & 7, slice, b));
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float raw0, raw1;
          if constexpr (kGatesF32) {
            const int token = b * 16 + 8 * (r & 1) + 2 * t, channel = (slice & 1) * 16 + (r >> 1) * 8 + g;
            const uint32_t panel = rows + kGates + (slice >> 1) * kPanel + (channel & 3) * 4;
            raw0 = load_shared(panel + panel_unit(token, channel >> 2));
            raw1 = load_shared(panel + panel_unit(token + 1, channel >> 2));
          } else {
            raw0 = low_bf16(raw[r]);
            raw1 = high_bf16(raw[r]);
          }
          use(r, log_decay<false>(raw0, bias[r >> 1], gate), log_decay<false>(raw1, bias[r >> 1], gate));
        }
      };
      constexpr float kPairFloor = -kPairNats * kLog2E * kGateUnit;
      uint32_t value[4], rest[4];
      bool excess = false;
      decays([&](int r, float whole0, float whole1) {
        const float y0 = max_keep_nan(whole0, kPairFloor), y1 = max_keep_nan(whole1, kPairFloor);
        excess |= !(whole0 == y0 && whole1 == y1);
        value[r] = pack_f16(y0, y1);
        float v0, v1;
        unpack_f16(value[r], v0, v1);
        rest[r] = pack_f16(y0 - v0, y1 - v1);
      });

      // exponents: x = G - reference + log2(1/|k|); up = exp2(x), down = exp2(2 log2(1/|k|) - x)
      const uint32_t sums[4] = {local & valid[b][0], 0u, 0u, local & valid[b][1]};
      const float2 factor[2] = {load_shared2(factors + (b * 16 + g) * 16), load_shared2(factors + (b * 16 + 8 + g) * 16)};
      Block up, down;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float x[4] = {factor[0].x, factor[0].x, factor[1].x, factor[1].x};
        mma_f16(x, sums, value[2 * n], value[2 * n + 1]);
        mma_f16(x, sums, rest[2 * n], rest[2 * n + 1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          up[4 * n + i] = exp2_approx(x[i]);
          down[4 * n + i] = exp2_approx(fma(2.f, factor[i >> 1].x, -x[i]));
        }
      }

      // decay of the whole block, and of its 8-groups
      float total[4];
      float4 group[2];  // of each 8-group
      {
        const uint32_t totals[4] = {totals_low & valid[b][0], 0u, totals_high & valid[b][1], 0u};
        const uint32_t columns = memory + kColumns + c.warp * 512;
        float x[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[n][i] = 0.f;
          mma_f16(x[n], totals, value[2 * n], value[2 * n + 1]);
          mma_f16(x[n], totals, rest[2 * n], rest[2 * n + 1]);
        }
        sync_warp();  // everyone has read the previous block's
        store_shared4(columns + g * 64 + t * 16, {exp2_approx(x[0][0]), exp2_approx(x[0][1]), exp2_approx(x[1][0]), exp2_approx(x[1][1])});
        sync_warp();
#pragma unroll
        for (int h = 0; h < 2; ++h) group[h] = load_shared4(columns + h * 64 + t * 16);
        const float4 all = load_shared4(columns + 2 * 64 + t * 16);
        total[0] = all.x, total[1] = all.y, total[2] = all.z, total[3] = all.w;
      }

      // scaled rows; Kd and Qd are formed anew from `up` each time that it moves on, which costs fewer registers than keeping them in f32
      Block kr;
      uint32_t raw_rows[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        load_rows(raw_rows[h], slice, b, h);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int i = 4 * n + 2 * h + e;
            kr[i] = (e ? high_bf16(raw_rows[h][2 * n]) : low_bf16(raw_rows[h][2 * n])) * down[i];
          }
      }
      uint32_t kq[2][4], columns_kr[2][2];
      auto round_rows = [&](int h) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float up0 = up[4 * n + 2 * h], up1 = up[4 * n + 2 * h + 1];
          kq[h][2 * n] = pack_bf16(-low_bf16(raw_rows[h][2 * n]) * up0, -high_bf16(raw_rows[h][2 * n]) * up1);
          kq[h][2 * n + 1] = pack_bf16(low_bf16(raw_rows[h][2 * n + 1]) * factor[h].y * up0, high_bf16(raw_rows[h][2 * n + 1]) * factor[h].y * up1);
        }
      };
      auto round_kr = [&](uint32_t (&to)[2][2], const Block& from, int h) {
#pragma unroll
        for (int n = 0; n < 2; ++n) to[h][n] = pack_bf16(from[4 * n + 2 * h], from[4 * n + 2 * h + 1]);
      };
      auto scale = [](Block& x, int h, const float (&by)[4]) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) x[4 * n + 2 * h + e] *= by[2 * n + e];
      };

      round_rows(0), round_rows(1);
      round_kr(columns_kr, kr, 0), round_kr(columns_kr, kr, 1);
      mma_bf16(acc[3 * b], kq[0], columns_kr[0][0], columns_kr[0][1]);
      mma_bf16(acc[3 * b + 2], kq[1], columns_kr[1][0], columns_kr[1][1]);
      {
        // columns to the boundary between the 8-groups, then rows and columns to the ends of the block
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float fall[4] = {group[h].x, group[h].y, group[h].z, group[h].w};
          scale(kr, h, fall);
        }
        round_kr(columns_kr, kr, 0);
        mma_bf16(acc[3 * b + 1], kq[1], columns_kr[0][0], columns_kr[0][1]);
        const float before[4] = {group[0].x, group[0].y, group[0].z, group[0].w}, after[4] = {group[1].x, group[1].y, group[1].z, group[1].w};
        scale(up, 1, before), scale(kr, 0, after);
      }
      if (any_lane(excess)) {  // the gates are read once more: few chunks come here, and registers are short
        uint32_t more[4];
        decays([&](int r, float whole0, float whole1) {
          more[r] = pack_f16(whole0 - max_keep_nan(whole0, kPairFloor), whole1 - max_keep_nan(whole1, kPairFloor));
        });
        const uint32_t prefix[4] = {local & valid[b][0], (kUnit | kUnit << 16) & valid[b][0], 0u, local & valid[b][1]};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float x[4] = {0.f, 0.f, 0.f, 0.f};
          mma_f16(x, prefix, more[2 * n], more[2 * n + 1]);
          const float last[2] = {shuffle(x[2], 28 + t), shuffle(x[3], 28 + t)};  // of token 15
#pragma unroll
          for (int i = 0; i < 4; ++i) up[4 * n + i] *= exp2_approx(x[i]), kr[4 * n + i] *= exp2_approx(last[i & 1] - x[i]);
#pragma unroll
          for (int e = 0; e < 2; ++e) total[2 * n + e] *= exp2_approx(last[e]);
        }
        round_rows(0);
      }
      round_rows(1);
      round_kr(columns_kr, kr, 0), round_kr(columns_kr, kr, 1);  // k exp(G_15 - G) of this block

      if (b == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) store_rows(kq[h], slice, 0, h);
#pragma unroll
        for (int i = 0; i < 4; ++i) total0[i] = total[i], kr0_operand[i >> 1][i & 1] = columns_kr[i >> 1][i & 1];
#pragma unroll
        for (int i = 0; i < 8; ++i) kr0[i] = kr[i];
      } else {
#pragma unroll
        for (int row = 0; row < 2; ++row)
#pragma unroll
          for (int column = 0; column < 2; ++column)
            mma_bf16(acc[6 + 2 * row + column], kq[row], kr0_operand[column][0], kr0_operand[column][1]);
        store_kr(columns_kr, slice, 1);
        scale(up, 0, total0), scale(up, 1, total0);
        scale(kr0, 0, total), scale(kr0, 1, total);
        round_rows(0), round_rows(1);
        round_kr(columns_kr, kr0, 0), round_kr(columns_kr, kr0, 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) store_rows(kq[h], slice, 1, h);
        store_kr(columns_kr, slice, 0);
        if (g == 0)
          packet.four(stage::kDecay + decay_slot(slice, t),
                      {total0[0] * total[0], total0[1] * total[1], total0[2] * total[2], total0[3] * total[3]});
      }
    }
  }

  // The diagonal of M has pair weight exactly one.
#pragma unroll
  for (int b = 0; b < 2; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float(&a)[4] = acc[3 * b + 2 * h];
      const float qk = load_shared(factors + (b * 16 + h * 8 + g) * 16 + 8);
      const bool on_diagonal = t == (g >> 1);
      a[2] = on_diagonal && !(g & 1) ? qk : a[2];
      a[3] = on_diagonal && (g & 1) ? qk : a[3];
    }

  // ---- 3. squares: warp 0 gathers L, warp 1 gathers M
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    auto slot = [&](int which) { return square(rows, which) + (i * 32 + lane) * 8; };
    if (c.warp == 1) store_shared2(slot(0), acc[i][0], acc[i][1]);
    else store_shared2(slot(1), acc[i][2], acc[i][3]);
  }
  sync_group(c.barrier, kWarps * 32);

  Tile sum[10];  // block 0: tiles 00, 10, 11; block 1 the same; the square below: 20, 21, 30, 31
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    const float2 part = load_shared2(square(rows, c.warp) + (i * 32 + lane) * 8);
    const float v[2] = {(c.warp == 0 ? acc[i][0] : acc[i][2]) + part.x, (c.warp == 0 ? acc[i][1] : acc[i][3]) + part.y};
    // Entries above the diagonal may have overflowed: they are selected away, never multiplied.
    const bool diagonal_tile = i < 6 && i % 3 != 1;
    const int last = c.warp == 0 ? g - 1 : g;
#pragma unroll
    for (int e = 0; e < 2; ++e) sum[i].v[e] = !diagonal_tile || 2 * t + e <= last ? v[e] : 0.f;
  }
  auto tile = [&](int row, int column) -> Tile& { return sum[column >= 2 || row < 2 ? 3 * (row >> 1) + (row & 1) + (column & 1) : 6 + 2 * (row & 1) + column]; };
  if (c.warp == 1) {
    auto packed = [&](int row, int column) { return pack_bf16(tile(row, column).v[0], tile(row, column).v[1]); };
#pragma unroll
    for (int b = 0; b < 2; ++b) store_block(packet, stage::kM, b, b, packed(2 * b, 2 * b), 0u, packed(2 * b + 1, 2 * b), packed(2 * b + 1, 2 * b + 1), lane);
    store_block(packet, stage::kM, 1, 0, packed(2, 0), packed(2, 1), packed(3, 0), packed(3, 1), lane);
    store_block(packet, stage::kM, 0, 1, 0u, 0u, 0u, 0u, lane);
    fence_async_shared();  // what this warp has written: the packet is read, and the rows are written, by engines
    arrive_group(c.tiles_barrier, kWarps * 32);
    return false;
  }
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    const float strength = shuffle(beta, row * 8 + g);
#pragma unroll
    for (int column = 0; column <= row; ++column) tile(row, column).v[0] *= strength, tile(row, column).v[1] *= strength;
  }
  fence_async_shared();
  sync_group(c.tiles_barrier, kWarps * 32);
  rows_used();
  invert_and_store(tile, packet, lane);
  packet.word(stage::kBeta + lane * 4, bits(beta));
  fence_async_shared();
  sync_warp();
  return true;
}

}  // namespace jax_kda
