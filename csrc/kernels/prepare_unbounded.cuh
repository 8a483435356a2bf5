// K1 for gates without a bound: from the raw rows of one chunk to its packet, by a group of four warps. Needs no state, so chunks are independent.
// Few registers (88), so that two groups fit beside a 128-row K2.
//
//   warp w      tokens 8 w ...: elementwise work, where a lane owns four channels and walks over the eight tokens; and these tokens of k and q as
//               rows of L and M
//
//   1. norms (products), and log decays; their sums over the eight tokens to the group's memory                       -- group barrier
//   2. exp, and rows scaled by exponentials:
//        packet              -Kd = -k e^G, Qd = q e^G
//        over the raw rows   the factors of the pair weights e^(G_i - G_j) within the eight: rows e^(P_i - P_start), columns e^(P_start - P_j)
//        registers           k e^(G_end - G), of the last of the eight
//      the warp's own 8 x 8 tiles of L and M. After that the columns are free, and of warp 0, which has no other tiles, the rows too
//   3. for the rows of each later warp, columns k e^(G_end of the warp before it - G), to what is free; then -Kr = -k e^(G_31 - G) and the decay
//      e^G_31 to the packet                                                                                           -- group barrier
//   4. the other tiles; M to the packet, L to the group's memory                      -- group barrier, where one warp only arrives
//   5. two warps, whose turn it is, invert I + L and write A; another one sees to what is ready without A
//
// No reference depends on a later token of the chunk. P is G with each token's decay clamped at -10 nats: only so do the factors within eight tokens,
// one large and one small, stay within 2^+-116. Where a token forgets more than that, rows behind it keep 5e-5 of the chunk's older tokens instead of
// less. Columns for later warps, and all that meets the state, which may be larger than the values by any factor, are of G itself.
// The diagonal of M is q.k, its pair weight exactly one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "gate.cuh"
#include "mma.cuh"
#include "packet.cuh"
#include "pipeline.cuh"
#include "prepare.cuh"

namespace jax_kda {

template <bool kGatesF32, class Packet> struct PrepareUnbounded {
  static constexpr bool kBounded = false, kF32 = kGatesF32;
  static constexpr bool kShortOfRegisters = !Packet::kReadable;  // helpers run five groups
  static constexpr int kWarps = 4;
  // A group's memory, bytes from its start. Raw rows as in the packet: two panels of 64 channels, each q, k and (where the packet has Kr) gates, with f32
  // gates in two parts of 32 channels; rows of 128 bytes, 128-byte swizzle. Over q and k: rows; then, of warp 0, columns for warps 2 and 3. Over the
  // gates: columns within the eight; then those for the next warp.
  static constexpr uint32_t kGates = stage::kKr;  // within a panel
  static constexpr uint32_t kPanelStride = kGates + (kGatesF32 ? 2 : 1) * kPanel;
  // Columns of warp 1 for warp 3: over the second half of the raw f32 gates, or [2 panels][8] of their own.
  static constexpr uint32_t kFar = kGatesF32 ? kGates + kPanel : 2 * kPanelStride;
  static constexpr uint32_t kFarPanel = kGatesF32 ? kPanelStride : 1024;
  static constexpr uint32_t kTotals = 2 * kPanelStride + (kGatesF32 ? 0 : 2 * kFarPanel);     // each warp's sums of log decays, base 2: [4 warps][128] f32
  static constexpr uint32_t kFactors = kTotals + kWarps * 512;  // see store_factors
  static constexpr uint32_t kTiles = kFactors + kChunk * 16;    // -L: [10 tiles][32 lanes] 2 f32
  static constexpr uint32_t kBytes = (kTiles + 10 * 256 + 1023) / 1024 * 1024;

  // Where warp `from` leaves its columns for warp `to`: of panel 0, and the distance of panel 1.
  struct Place {
    uint32_t at, panel;
  };
  static KDA_DEVICE constexpr Place columns(int from, int to) {
    if (to == from + 1) return {kGates + from * 1024, kPanelStride};
    if (from == 1) return {kFar, kFarPanel};
    return {to == 2 ? stage::kKey : stage::kQuery, kPanelStride};
  }

  // As PrepareBounded::run.
  template <class Acquire, class AllButA, class Meanwhile>
  static KDA_DEVICE bool run(const PrepareContext& c, float beta, int turn, Acquire acquire, AllButA all_but_a, Meanwhile meanwhile);
};

template <bool kGatesF32, class Packet>
template <class Acquire, class AllButA, class Meanwhile>
KDA_DEVICE bool PrepareUnbounded<kGatesF32, Packet>::run(const PrepareContext& c, float beta, int turn, Acquire acquire, AllButA all_but_a,
                                                         Meanwhile meanwhile) {
  const int w = c.warp;
  const uint32_t memory = c.memory;
  int lane = int(opaque(c.lane));  // again below: what is derived from it need not live through the phases between
  // This lane's four channels of row i of eight, in panels of 64 that lie `distance` apart.
  auto four = [&](uint32_t distance, int i) {
    return ((uint32_t(lane >> 4) * distance + ((lane & 14) << 3 | (lane & 1) << 3)) ^ (i << 4)) + i * 128;
  };

  // ---- 1. norms of tokens 8 w ..., then
  store_factors(c, memory, kPanelStride, beta, memory + kFactors, lane);
  // their log decays
  float y[8][4];
  {
    const float4 bias = load_shared4(c.bias + lane * 16);
    const float b[4] = {bias.x, bias.y, bias.z, bias.w};
    const GateConstants gate = load_gate(c);
    if constexpr (kGatesF32) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 x = load_shared4(memory + kGates + w * 1024 + (lane >> 4) * kPanelStride + ((lane >> 3) & 1) * kPanel + panel_unit(i, lane & 7));
        y[i][0] = x.x, y[i][1] = x.y, y[i][2] = x.z, y[i][3] = x.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 x = load_shared2(memory + kGates + w * 1024 + four(kPanelStride, i));
        y[i][0] = x.x, y[i][2] = x.y;
      }
    }
    float total[4] = {0.f, 0.f, 0.f, 0.f};
    auto activate = [&](auto decay) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if constexpr (!kGatesF32) {
          const uint32_t x[2] = {bits(y[i][0]), bits(y[i][2])};
          y[i][0] = low_bf16(x[0]), y[i][1] = high_bf16(x[0]), y[i][2] = low_bf16(x[1]), y[i][3] = high_bf16(x[1]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          y[i][e] = max_keep_nan(decay(y[i][e], b[e]), -kFloorNats * kLog2E);
          total[e] += y[i][e];
        }
      }
    };
    // A tail's tokens do not decay: see load_rows.
    if (c.mode == GateMode::kLog) activate([&](float raw, float bias) { return log_decay<GateMode::kLog>(raw, bias, gate); });
    else if (c.mode == GateMode::kSoftplus) activate([&](float raw, float bias) { return log_decay<GateMode::kSoftplus>(raw, bias, gate); });
    else activate([&](float raw, float bias) { return log_decay<GateMode::kSafe>(raw, bias, gate); });
    store_shared4(memory + kTotals + w * 512 + lane * 16, {total[0], total[1], total[2], total[3]});
  }
  sync_group(c.barrier, kWarps * 32);
  const Packet packet = acquire();

  // ---- 2. scaled rows
  {
    lane = int(opaque(c.lane));
    const uint32_t rows = memory + w * 1024;
    float from_start[4] = {0.f, 0.f, 0.f, 0.f}, to_end[4];  // G, and G_end - G
    float clamped[4] = {0.f, 0.f, 0.f, 0.f};                // P - P_start
    const uint32_t totals = memory + kTotals + lane * 16;
#pragma unroll
    for (int i = 0; i < kWarps - 1; ++i)
      if (i < w) {
        const float4 x = load_shared4(totals + i * 512);
        from_start[0] += x.x, from_start[1] += x.y, from_start[2] += x.z, from_start[3] += x.w;
      }
    const float4 total = load_shared4(totals + w * 512);
    to_end[0] = total.x, to_end[1] = total.y, to_end[2] = total.z, to_end[3] = total.w;

    // A row's place in the packet, less its address here.
    const auto from_rows = packet.at(0u - memory - uint32_t(lane >> 4) * (kPanelStride - stage::kPanelStride));
    float2 raw_k[2], raw_q[2];
    auto fetch = [&](int i) {
      const uint32_t at = rows + four(kPanelStride, i);
      raw_k[i & 1] = load_shared2(at + stage::kKey), raw_q[i & 1] = load_shared2(at + stage::kQuery);
    };
    fetch(0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 factor = load_shared2(memory + kFactors + w * 128 + i * 16);
      if (i + 1 < 8) fetch(i + 1);
      const uint32_t kw[2] = {bits(raw_k[i & 1].x), bits(raw_k[i & 1].y)}, qw[2] = {bits(raw_q[i & 1].x), bits(raw_q[i & 1].y)};
      float k[4], q[4], up[4], down[4], whole_up[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        k[e] = (e & 1 ? high_bf16(kw[e >> 1]) : low_bf16(kw[e >> 1])) * factor.x;
        q[e] = (e & 1 ? high_bf16(qw[e >> 1]) : low_bf16(qw[e >> 1])) * factor.y;
        from_start[e] += y[i][e], to_end[e] -= y[i][e];
        clamped[e] += max_keep_nan(y[i][e], -kPairNats * kLog2E);
        up[e] = exp2_approx(clamped[e]), down[e] = exp2_approx(-clamped[e]), whole_up[e] = exp2_approx(from_start[e]);
        y[i][e] = k[e] * exp2_approx(to_end[e]);
      }
      auto packed = [](const float (&x)[4], const float (&by)[4]) {
        return float2{from_bits(pack_bf16(x[0] * by[0], x[1] * by[1])), from_bits(pack_bf16(x[2] * by[2], x[3] * by[3]))};
      };
      auto store = [&](uint32_t at, float2 x) { store_shared2(at, x.x, x.y); };
      const uint32_t at = rows + four(kPanelStride, i);
      const auto place = from_rows + at;
      const float2 kd = packed(k, whole_up), qd = packed(q, whole_up);
      Packet::two(place, stage::kKey, kd.x, kd.y);
      Packet::two(place, stage::kQuery, qd.x, qd.y);
      store(at + kGates, packed(k, down));
      store(at + stage::kKey, packed(k, up));
      store(at + stage::kQuery, packed(q, up));
    }
  }
  sync_warp();

  // Rows 8 w ... of L and M, in tiles of eight columns: [0..1] of L / beta, [2..3] of -M.
  lane = int(opaque(c.lane));
  auto fetch_rows = [&](uint32_t (&to)[4][4], int half) {  // {k, q} x {channels 0-7, 8-15}
    const uint32_t quad = ((lane >> 3) & 1 ? stage::kQuery : stage::kKey) + panel_unit(lane & 7, lane >> 4);
#pragma unroll
    for (int s = 0; s < 4; ++s) load_tiles(to[s], memory + w * 1024 + half * kPanelStride + (quad ^ (s << 5)));
  };
  auto fetch_columns = [&](uint32_t (&to)[2][4], Place place, int half) {  // channels {0-7, 8-15, 16-23, 24-31}
    const uint32_t quad = panel_unit(lane & 7, lane >> 3);
#pragma unroll
    for (int s = 0; s < 2; ++s) load_tiles(to[s], memory + place.at + half * place.panel + (quad ^ (s << 6)));
  };
  auto clear = [](float (&x)[4]) { x[0] = x[1] = x[2] = x[3] = 0.f; };
  const float2 token = load_shared2(memory + kFactors + (w * 8 + (lane >> 2)) * 16 + 8);  // -M's diagonal, -beta
  float own_l[2];
  uint32_t own_m;
  {
    float x[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[4][4], b[2][4];
      fetch_rows(a, half), fetch_columns(b, {kGates + w * 1024, kPanelStride}, half);
      clear(x[half]);
#pragma unroll
      for (int s = 0; s < 4; ++s) mma_bf16(x[half], a[s], b[s >> 1][(s & 1) * 2], b[s >> 1][(s & 1) * 2 + 1]);
    }
    float m[2];
    // Above the diagonal exponents may have overflowed: selected away, never multiplied.
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 2 * (lane & 3) + e, g = lane >> 2;
      own_l[e] = column < g ? (x[0][e] + x[1][e]) * token.y : 0.f;
      m[e] = column < g ? x[0][2 + e] + x[1][2 + e] : column == g ? token.x : 0.f;
    }
    own_m = pack_bf16(m[0], m[1]);
  }
  sync_warp();

  // ---- 3. columns for later warps
  {
    auto packed = [&](int i, int pair) { return from_bits(pack_bf16(y[i][2 * pair], y[i][2 * pair + 1])); };
#pragma unroll 1
    for (int to = w + 1; to < kWarps; ++to) {
      const Place place = columns(w, to);
      const float4 total = load_shared4(memory + kTotals + to * 512 + lane * 16);
      const float fall[4] = {exp2_approx(total.x), exp2_approx(total.y), exp2_approx(total.z), exp2_approx(total.w)};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        store_shared2(memory + place.at + four(place.panel, i), packed(i, 0), packed(i, 1));
#pragma unroll
        for (int e = 0; e < 4; ++e) y[i][e] *= fall[e];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) Packet::two(packet.at(w * 1024 + four(stage::kPanelStride, i)), stage::kKr, packed(i, 0), packed(i, 1));
    if (w == kWarps - 1) {
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        const float4 x = load_shared4(memory + kTotals + i * 512 + lane * 16);
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
      }
      const auto at = packet.at(stage::kDecay + decay_slot(lane >> 2, (lane & 1) * 2) + (lane & 2) * 4);
      Packet::two(at, 0, exp2_approx(sum[0]), exp2_approx(sum[1]));
      Packet::two(at, decay_slot(0, 1), exp2_approx(sum[2]), exp2_approx(sum[3]));
    }
  }
  sync_group(c.barrier, kWarps * 32);

  // ---- 4. the other tiles
  auto others = [&](auto warp) {
    constexpr int kWarp = warp.value;
    float x[kWarp + 1][2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[4][4], b[kWarp + 1][2][4];
      if (kWarp > 0) fetch_rows(a, half);
#pragma unroll
      for (int i = 0; i < kWarp; ++i) fetch_columns(b[i], columns(i, kWarp), half), clear(x[i][half]);
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int i = 0; i < kWarp; ++i) mma_bf16(x[i][half], a[s], b[i][s >> 1][(s & 1) * 2], b[i][s >> 1][(s & 1) * 2 + 1]);
    }
    uint32_t m[4] = {0u, 0u, 0u, 0u};
#pragma unroll
    for (int i = 0; i < kWarp; ++i) {
      store_shared2(tile_at(memory + kTiles, kWarp, i, lane), (x[i][0][0] + x[i][1][0]) * token.y, (x[i][0][1] + x[i][1][1]) * token.y);
      m[i] = pack_bf16(x[i][0][2] + x[i][1][2], x[i][0][3] + x[i][1][3]);
    }
    store_shared2(tile_at(memory + kTiles, kWarp, kWarp, lane), own_l[0], own_l[1]);
    m[kWarp] = own_m;
    packet.tiles(lane, [&](int tile, int row) { return stage::kM + square_unit(kWarp * 8 + row, tile); }, m[0], m[1], m[2], m[3]);
  };
  if (w == 0) others(std::integral_constant<int, 0>());
  else if (w == 1) others(std::integral_constant<int, 1>());
  else if (w == 2) others(std::integral_constant<int, 2>());
  else others(std::integral_constant<int, 3>());
  if ((lane & 3) == 0) Packet::word(packet.at(stage::kBeta + (w * 8 + (lane >> 2)) * 4), 0, bits(token.y));
  return finish(c, packet, memory + kTiles, turn, lane, all_but_a, meanwhile);
}

}  // namespace jax_kda
