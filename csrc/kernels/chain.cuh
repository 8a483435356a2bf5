// K2's chain alone: what a run of packets does to a state, without outputs. 64 state rows a warpgroup, 16 a warp, as in recurrence.cuh, whose
// arithmetic this is, operation by operation:
//
//   p  = V^T + St (-Kd)^T
//   u  = (p diag(beta)) A^T
//   St = St diag(a) + u^T Kr
//
// Order of one turn of the loop, with the same regard for what the tensor cores leave time for:
//   wait p(c) -> issue u(c) -> fetch V(c+1), copy the values of a later chunk -> wait u -> issue St halves -> wait for packet c+1
//   -> round St half by half, issuing p(c+1) -> stage c free, St *= a(c+1)
#pragma once

#include <cstdint>

#include "engines.cuh"
#include "mma.cuh"
#include "packet.cuh"
#include "pipeline.cuh"
#include "recurrence.cuh"

namespace jax_kda {

struct ChainContext {
  uint32_t shared;       // address of the CTA's shared memory
  int warp;              // of those that hold rows
  int lane;
  const uint16_t* v;     // bf16, first token, the warp's first value channel
  int stride;            // elements from token to token
  int chunks;            // at least one, all whole
  bool with_values;      // or zeros in their place
};

// Pipe as for recur, without kValues: the values lie where the stages leave room for Qd.
template <class Engine, class Pipe> KDA_DEVICE void chain(const ChainContext& c, State& st) {
  const int lane = int(opaque(c.lane));
  const uint32_t shared = opaque(c.shared);
  const int r = lane & 7, i0 = (lane >> 3) & 1, i1 = lane >> 4, t = lane & 3;
  // As in recurrence.cuh. The values of a chunk and warp take 1 KB.
  static_assert(kPanel == 4 * 1024);
  const uint32_t values = stage::kQuery + (c.warp >> 2) * stage::kPanelStride + (c.warp & 3) * 1024;
  const uint32_t tiles = values + (i1 * 8 + r) * 32 + ((i0 ^ ((r >> 2) & 1)) << 4);
  const uint32_t unit = values + (lane >> 1) * 32 + (((lane & 1) ^ ((lane >> 3) & 1)) << 4);
  const uint16_t* v_row = c.v + int64_t(lane >> 1) * c.stride + (lane & 1) * 8;
  float p[16], u[16];
  uint32_t rounded[8][4], r_operand[2][4], u_operand[2][4], v[2][4];
  float2 beta[4];  // of this lane's columns of p
  float4 a[8];     // decays of this lane's columns of the state
#pragma unroll
  for (int i = 0; i < 16; ++i) p[i] = 0.f, u[i] = 0.f;

  auto round_state = [&](int from, int to) {
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (k >= from && k < to) {
#pragma unroll
        for (int e = 0; e < 4; ++e) rounded[k][e] = pack_bf16(st[k * 8 + e * 2], st[k * 8 + e * 2 + 1]);
      }
  };
  int left = c.with_values ? c.chunks : 0;  // chunks whose values are still to be copied
  auto copy_values = [&](uint32_t stage) {
#pragma unroll
    for (int i = 0; i < 2; ++i) copy16_or_zero(stage + unit + i * 512, v_row + int64_t(i * 16) * c.stride, left > 0);
    copies_commit();
    v_row += kChunk * c.stride, --left;
  };
  auto fetch_values = [&](uint32_t stage) {
#pragma unroll
    for (int i = 0; i < 2; ++i) load_tiles_transposed(v[i], stage + tiles + i * 512);
  };
  auto start_p = [&]() {
#pragma unroll
    for (int i = 0; i < 8; ++i) p[2 * i] = low_bf16(v[i >> 2][i & 3]), p[2 * i + 1] = high_bf16(v[i >> 2][i & 3]);
  };
  auto issue_p = [&](uint32_t stage, int from, int to) {
    pin(p);
    Engine::begin();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (k >= from && k < to) Engine::rows(p, rounded[k], stage, stage::kKey, k, true, lane);
    Engine::commit();
  };
  auto fetch_beta = [&](uint32_t stage) {
#pragma unroll
    for (int n = 0; n < 4; ++n) beta[n] = load_shared2(stage + stage::kBeta + (n * 8 + 2 * t) * 4);
  };
  auto fetch_decay = [&](uint32_t from) {
#pragma unroll
    for (int s = 0; s < 8; ++s) a[s] = load_shared4(from + decay_slot(s, t));
  };
  auto decay = [&]() {
#pragma unroll
    for (int s = 0; s < 8; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        st[s * 8 + 2 * h] *= a[s].x, st[s * 8 + 2 * h + 1] *= a[s].y;
        st[s * 8 + 4 + 2 * h] *= a[s].z, st[s * 8 + 4 + 2 * h + 1] *= a[s].w;
      }
  };

  uint32_t slot = 0, parity = 0;  // of this chunk
  uint32_t stage = shared;
#pragma unroll 1
  for (int i = 0; i < Pipe::kStages; ++i) copy_values(shared + i * Pipe::kStageBytes);
  copies_wait<Pipe::kStages - 1>();
  sync_warp();
  fetch_values(stage);
  barrier_wait(shared + Pipe::kFull, 0);
  start_p();
  round_state(0, 8);
  issue_p(stage, 0, 8);
  fetch_beta(stage);
  fetch_decay(stage + stage::kDecay);
  decay();

  bool more = true;
#pragma unroll 1
  for (int chunks = c.chunks; more; --chunks) {
    more = chunks > 1;
    const uint32_t wrap = slot + 1 == Pipe::kStages;
    const uint32_t next_slot = wrap ? 0 : slot + 1;
    const uint32_t next = more ? shared + next_slot * Pipe::kStageBytes : stage;
    const uint32_t here = uniform(stage);  // as in recurrence.cuh

    Engine::template wait<0>();
    pin(p);
#pragma unroll
    for (int i = 0; i < 8; ++i) r_operand[i >> 2][i & 3] = pack_bf16(p[2 * i] * beta[i >> 1].x, p[2 * i + 1] * beta[i >> 1].y);
    pin(u);
    Engine::begin();
    Engine::square(u, r_operand, here, stage::kA, false, lane);
    Engine::commit();
    copies_wait<Pipe::kStages - 2>();
    sync_warp();
    fetch_values(next);
    copy_values(stage);
    const uint32_t still = uniform(stage);
    Engine::template wait<0>();
    pin(u);
#pragma unroll
    for (int i = 0; i < 8; ++i) u_operand[i >> 2][i & 3] = pack_bf16(u[2 * i], u[2 * i + 1]);

    pin(st);
    Engine::begin();
    Engine::outer(st, u_operand, still, 0, lane);
    Engine::commit();
    Engine::outer(st + 32, u_operand, still, 1, lane);
    Engine::commit();
    if (more) barrier_wait(shared + Pipe::kFull + 8 * next_slot, parity ^ wrap);
    const uint32_t ahead = uniform(next);
    start_p();
    Engine::template wait<1>();
    pin<32>(st);
    round_state(0, 4);
    issue_p(ahead, 0, 4);
    Engine::template wait<1>();
    pin<32>(st + 32);
    round_state(4, 8);
    issue_p(ahead, 4, 8);

    // p(c + 1) is in flight (behind the last chunk: on the same stage, its result unused)
    fetch_decay(more ? next + stage::kDecay : shared + Pipe::kOnes);
    fetch_beta(next);
    sync_warp();
    if (lane == 0 && more) Pipe::release(shared, slot, parity);
    decay();
    stage = next;
    slot = next_slot;
    parity ^= wrap;
  }
  Engine::template wait<0>();
  pin(p);
  copies_wait_all();
}

}  // namespace jax_kda
