// K2: the ordered recurrence of one (sequence, value head) over its packets, 64 value rows a warpgroup, 16 a warp.
//
// The state is held transposed, St[V, K] in f32 accumulators, from the first token to the last: it is the left operand of every product, and an
// accumulator rounded to bf16 is the next product's operand as it stands. Per chunk, with packet (-Kd, Qd, Kr, A, beta, M, a) and values V:
//
//   p  = V^T + St (-Kd)^T      R^T
//   u  = (p diag(beta)) A^T    U^T
//   o  = St Qd^T               runs behind u, off the chain: nothing waits for it before the state's update is issued
//   St = St diag(a) + u^T Kr   two 64-channel halves: the second's product runs while the first is rounded
//   o += u M^T
//
// Order of one turn of the loop. Between two products of the chain there is time for other work while the tensor cores are busy, about as much as there
// is of it, so that each piece has its place:
//
//   wait p(c) -> issue u(c), o(c)
//     meanwhile  O(c-1) through shared memory and out, copy the values of a later chunk
//   wait u(c) -> issue St halves, o(c) +=
//     meanwhile  fetch V(c+1), wait for packet c+1
//   wait for the first half of St, round it, issue half of p(c+1); the same with the second
//     meanwhile  round O(c), stage c free, fetch beta(c+1), St *= a(c+1): p(c+1) reads the rounded copy of the undecayed state
//
// Where registers are short (not Pipe::kRoomy), O(c) goes out at the end of its own turn, and less is fetched ahead.
#pragma once

#include <cstdint>

#include "../launch.h"
#include "engines.cuh"
#include "mma.cuh"
#include "packet.cuh"
#include "pipeline.cuh"

namespace jax_kda {

// The warp's 16 value rows: lane (g, t) holds rows g and g + 8; element 4 n + 2 h + e is (row 8 h + g, channel 8 n + 2 t + e).
using State = float[64];

// Pipe is the kernel's layout of shared memory, as constants, because registers are what the loop is short of: kStages, kStageBytes (stages from
// offset 0), kFull (barriers: the packet is there), kValues (1 KB a stage and warp), kOnes ([128] f32 ones: the decay behind the last chunk of a run),
// kRoomy (registers are free for more to be fetched ahead), kShortOfStages (a stage is let go before the next packet is there).
// Pipe::release(shared, slot, round) is called by one lane of each warp that has done with a stage, Pipe::seen(shared, slot, round) by one lane of the
// first warp when a packet is there; round: how often the ring went round, mod 2.
struct RecurrenceContext {
  uint32_t shared;   // address of the CTA's shared memory
  int warp;          // of K2
  int lane;
  uint16_t* o;       // bf16, first token of the sequence, the warp's first value channel
  const PrefillArgs& a;
  int tokens;
};

struct Loaded {
  KDA_DEVICE void operator()() const {}
};

// At least one token: an empty sequence never comes here (joining it with the state behind the loop would cost the compiler copies of the
// whole state while products are in flight). The loop runs from checkpoint to checkpoint: checkpoints.stop(chunks) says how many of the `chunks` that are
// left will be left when the run comes to its last one, 1 being the sequence's; checkpoints.store(st, stop) sees the state behind that one.
// load() brings the first state, while the first values are on their way.
template <class Engine, class Pipe, class Checkpoints, class Load = Loaded>
KDA_DEVICE void recur(const RecurrenceContext& c, State& st, const Checkpoints& checkpoints, Load load = {}) {
  static_assert(Pipe::kStages >= 3);
  // Where there is room, neither is formed anew inside the loop: reading a special register takes longer than some of the products.
  const int lane = Pipe::kRoomy ? int(opaque(c.lane)) : c.lane;
  const uint32_t shared = Pipe::kRoomy ? opaque(c.shared) : c.shared;
  const int r = lane & 7, i0 = (lane >> 3) & 1, i1 = lane >> 4, t = lane & 3;
  // A warp's values of a chunk: [32 tokens][16 values], copied by the warp itself, as many chunks ahead as there are stages; 16-byte units swapped
  // in every second group of four rows against bank conflicts. O leaves through the same place.
  const uint32_t values = shared + Pipe::kValues + c.warp * (Pipe::kStages * 1024);
  const uint32_t tiles = values + (i1 * 8 + r) * 32 + ((i0 ^ ((r >> 2) & 1)) << 4);
  const uint32_t unit = values + (lane >> 1) * 32 + (((lane & 1) ^ ((lane >> 3) & 1)) << 4);
  // Elements from token to token. Formed anew each time, as is what lies behind `a`: registers less through the loop.
  auto stride = [&] { return (Pipe::kRoomy ? int(c.a.HV) : int(opaque(uint32_t(c.a.HV)))) * kHeadDim; };
  uint16_t* o_row = c.o + int64_t(lane >> 1) * stride() + (lane & 1) * 8;
  int left = c.tokens - (lane >> 1);  // tokens from this lane's row on
  int left_before = 0;                // the same of the chunk before: before the first one there is none

  float p[16], o[16], u[16];
  uint32_t rounded[8][4], r_operand[2][4], u_operand[2][4], v[2][4], out[8];
  float2 beta[4];  // of this lane's columns of p
  float4 a[8];     // decays of this lane's columns of the state
#pragma unroll
  for (int i = 0; i < 16; ++i) o[i] = 0.f, u[i] = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = 0;

  auto round_state = [&](int from, int to) {
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (k >= from && k < to) {
#pragma unroll
        for (int e = 0; e < 4; ++e) rounded[k][e] = pack_bf16(st[k * 8 + e * 2], st[k * 8 + e * 2 + 1]);
      }
  };
  auto copy_values = [&](int ahead, uint32_t slot) {
    // From o to the same place of v.
    const int64_t from_o = int64_t(opaque64(reinterpret_cast<uint64_t>(c.a.v)) - opaque64(reinterpret_cast<uint64_t>(c.a.o)));
#pragma unroll
    for (int i = 0; i < 2; ++i)
      copy16_or_zero(unit + slot * 1024 + i * 512, reinterpret_cast<const char*>(o_row + int64_t(ahead * kChunk + i * 16) * stride()) + from_o,
                     left > ahead * kChunk + i * 16);
    copies_commit();
  };
  auto fetch_values = [&](uint32_t slot) {
#pragma unroll
    for (int i = 0; i < 2; ++i) load_tiles_transposed(v[i], tiles + slot * 1024 + i * 512);
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
  auto fetch_decay = [&](uint32_t from_shared, int from, int to) {
#pragma unroll
    for (int s = 0; s < 8; ++s)
      if (s >= from && s < to) a[s] = load_shared4(from_shared + decay_slot(s, t));
  };
  auto decay = [&](int from, int to) {
#pragma unroll
    for (int s = 0; s < 8; ++s)
      if (s >= from && s < to)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          st[s * 8 + 2 * h] *= a[s].x, st[s * 8 + 2 * h + 1] *= a[s].y;
          st[s * 8 + 4 + 2 * h] *= a[s].z, st[s * 8 + 4 + 2 * h + 1] *= a[s].w;
        }
  };
  auto round16 = [&](uint32_t (&to)[2][4], const float* x) {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i >> 2][i & 3] = pack_bf16(x[2 * i], x[2 * i + 1]);
  };
  // O from fragments to rows of 16 bytes; and out, of the chunk `back` chunks ago, where `rows` count from this lane's row on.
  auto turn_out = [&](uint32_t slot) {
#pragma unroll
    for (int i = 0; i < 2; ++i) store_tiles_transposed(tiles + slot * 1024 + i * 512, out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
    sync_warp();
  };
  auto send_out = [&](uint32_t slot, int back, int rows) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      store_global16_if(rows > i * 16, o_row + (i * 16 - back * kChunk) * stride(), load_shared4(unit + slot * 1024 + i * 512));
  };

  uint32_t slot = 0, parity = 0;  // of this chunk
  uint32_t stage = shared;
#pragma unroll
  for (int i = 0; i < Pipe::kStages - 1; ++i) copy_values(i, i);
  load();
  copies_wait<Pipe::kStages - 2>();
  sync_warp();
  fetch_values(0);
  barrier_wait(shared + Pipe::kFull, 0);
  if (c.warp == 0 && lane == 0) Pipe::seen(shared, 0, 0);
  start_p();
  round_state(0, 8);
  issue_p(stage, 0, 8);
  if constexpr (Pipe::kRoomy) fetch_beta(stage);
#pragma unroll
  for (int s = 0; s < 8; s += 4) fetch_decay(stage + stage::kDecay, s, s + 4), decay(s, s + 4);

  int chunks = (c.tokens + kChunk - 1) / kChunk;
#pragma unroll 1
  do {
    const int stop = checkpoints.stop(chunks);
    const bool last_run = stop == 1;
    int run = chunks - stop;  // chunks of this run behind the one at hand
#pragma unroll 1
    do {
      const bool more = run > 0 || !last_run;
      const uint32_t wrap = slot + 1 == Pipe::kStages;
      const uint32_t next_slot = wrap ? 0 : slot + 1, last_slot = slot == 0 ? Pipe::kStages - 1 : slot - 1;
      const uint32_t next = more ? shared + next_slot * Pipe::kStageBytes : stage;
      const uint32_t here = uniform(stage);  // in a uniform register, where the products' descriptors are formed; they do not live across a wait

      if constexpr (!Pipe::kRoomy) fetch_beta(stage);
      Engine::template wait<0>();
      pin(p);
#pragma unroll
      for (int i = 0; i < 8; ++i) r_operand[i >> 2][i & 3] = pack_bf16(p[2 * i] * beta[i >> 1].x, p[2 * i + 1] * beta[i >> 1].y);
      pin(o);
      pin(u);
      Engine::begin();
      Engine::square(u, r_operand, here, stage::kA, false, lane);
      Engine::commit();
#pragma unroll
      for (int k = 0; k < 8; ++k) Engine::rows(o, rounded[k], here, stage::kQuery, k, k > 0, lane);
      Engine::commit();

      copies_wait<Pipe::kStages - 3>();
      if constexpr (Pipe::kRoomy) {
        turn_out(last_slot);
        send_out(last_slot, 1, left_before);
        copy_values(Pipe::kStages - 1, last_slot);
      } else {
        sync_warp();
      }
      const uint32_t still = uniform(stage);
      Engine::template wait<1>();
      pin(u);
      round16(u_operand, u);

      pin(st);
      Engine::begin();
      Engine::outer(st, u_operand, still, 0, lane);
      Engine::commit();
      Engine::outer(st + 32, u_operand, still, 1, lane);
      Engine::commit();
      Engine::square(o, u_operand, still, stage::kM, true, lane);
      Engine::commit();

      fetch_values(next_slot);
      const uint32_t full = shared + Pipe::kFull + 8 * next_slot;
      bool there = true;
      if constexpr (Pipe::kShortOfStages) {
        // Whoever prepares the next packet may be waiting for this stage: it is not held while there is nothing else to do.
        there = !more || count_lanes(barrier_try(full, parity ^ wrap)) == 32;
        if (!there) {
          Engine::template wait<0>();
          pin(st);
          pin(o);
          sync_warp();
          if (lane == 0) Pipe::release(shared, slot, parity);
          barrier_wait(full, parity ^ wrap);
        }
      } else if (more) {
        barrier_wait(full, parity ^ wrap);
      }
      if (more && c.warp == 0 && lane == 0) Pipe::seen(shared, next_slot, parity ^ wrap);
      const uint32_t ahead = uniform(next);
      const uint32_t decays = run > 0 ? next + stage::kDecay : shared + Pipe::kOnes;  // behind a run's last chunk: when the state has been stored
      start_p();
      Engine::template wait<2>();
      pin<32>(st);
      round_state(0, 4);
      issue_p(ahead, 0, 4);
      Engine::template wait<2>();
      pin<32>(st + 32);
      round_state(4, 8);
      issue_p(ahead, 4, 8);
      // Not fetched earlier, where there would be time: once the factors are there, the compiler puts the decay before the products.
      if constexpr (Pipe::kRoomy) fetch_decay(decays, 0, 8), fetch_beta(next);
      Engine::template wait<2>();
      pin(o);

      // p(c + 1) is in flight (behind the last chunk: on the same stage, its result unused)
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] = pack_bf16(o[2 * i], o[2 * i + 1]);
      sync_warp();
      if constexpr (!Pipe::kRoomy) turn_out(slot);
      if (lane == 0 && more && there) Pipe::release(shared, slot, parity);
#pragma unroll
      for (int s = 0; s < 8; s += 2) {
        if constexpr (!Pipe::kRoomy) fetch_decay(decays, s, s + 2);
        decay(s, s + 2);
      }
      if constexpr (!Pipe::kRoomy) {
        send_out(slot, 0, left);
        copy_values(Pipe::kStages - 1, last_slot);
      }
      o_row += kChunk * stride();
      left_before = left;
      left -= kChunk;
      stage = next;
      slot = next_slot;
      parity ^= wrap;
    } while (--run >= 0);
    checkpoints.store(st, stop);
    chunks = stop - 1;
    if (chunks > 0)
#pragma unroll
      for (int s = 0; s < 8; s += 4) fetch_decay(stage + stage::kDecay, s, s + 4), decay(s, s + 4);
  } while (chunks > 0);
  Engine::template wait<0>();
  pin(p);
  if constexpr (Pipe::kRoomy) {
    const uint32_t last_slot = slot == 0 ? Pipe::kStages - 1 : slot - 1;
    turn_out(last_slot);
    send_out(last_slot, 1, left_before);
  }
  copies_wait_all();
}

}  // namespace jax_kda
