// The loop of one K1 group of the one-CTA kernels: which chunks it prepares, what it waits for and whom it tells.
// Layout is the kernel's shared memory: see baseline.cu.
#pragma once

#include <cstdint>

#include "prepare_bounded.cuh"
#include "prepare_unbounded.cuh"
#include "task.cuh"
#include "tensor_maps.cuh"

namespace jax_kda {

struct Producer {
  uint32_t shared;  // address of the CTA's shared memory
  int group, member, lane;
};

// Betas of a chunk, in two steps: the load of its bits, and (when they are needed) the value. 0 past the end of the sequence.
struct Betas {
  const PrefillArgs& a;
  uint32_t rows;
  int chunk, tokens;
  KDA_DEVICE uint32_t fetch(int i) const {
    const int token = chunk * kChunk + i;
    return token < tokens ? load_raw_beta(a, get_rows(rows), token) : 0u;
  }
  KDA_DEVICE float value(uint32_t raw, int i) const {
    return chunk * kChunk + i < tokens ? write_strength(beta_value(raw, a.beta_dtype), a.beta_mode) : 0.f;
  }
};

// Raw rows come to the group's own memory; the stage is needed only from step 2 on.
template <class Layout, bool kGatesF32>
KDA_DEVICE void produce_bounded(const PrefillArgs& a, const TensorMaps& maps, const PrepareContext& context, const Producer& p) {
  using Prepare = PrepareBounded<kGatesF32>;
  constexpr int kThreads = Prepare::kWarps * 32;
  // From shared memory each time: a register less in the hot phases.
  auto tokens = [&] { return get_tokens(p.shared + Layout::kRows); };
  auto thread = [&] { return int(opaque(p.member * 32 + p.lane)); };
  const uint32_t rows = p.shared + Layout::kRows, raw_barrier = p.shared + Layout::kRaw + 8 * p.group;
  auto whole = [&](int chunk) { return maps.usable && (chunk + 1) * kChunk <= tokens(); };
  auto copy = [&](int chunk, int turn) {  // by one warp
    const uint32_t buffer = Prepare::buffer(context.memory, turn);
    if (whole(chunk) && p.lane == 0) copy_raw<kGatesF32>(maps, get_rows(rows), buffer + Prepare::kKeyQuery, buffer + Prepare::kGates, chunk, raw_barrier);
  };
  if (p.member == 0) copy(p.group, 0);
#pragma unroll 1
  for (int chunk = p.group, turn = 0; chunk * kChunk < tokens(); chunk += Layout::kGroups, ++turn) {
    const int slot = chunk % Layout::kStages;
    const uint32_t stage = p.shared + slot * Layout::kStageBytes, full = p.shared + Layout::kFull + 8 * slot;
    if (whole(chunk)) {
      barrier_wait(raw_barrier, turn & 1);
    } else {
      sync_group(context.barrier, kThreads);  // nobody reads the previous rows any more
      const uint32_t buffer = Prepare::buffer(context.memory, turn), gates = buffer + Prepare::kGates;
      load_raw<kGatesF32, kThreads>(a, rows, buffer + Prepare::kKeyQuery, gates, chunk, tokens(), thread());
      copies_wait_all();
      sync_group(context.barrier, kThreads);
      silence_tail<kGatesF32, kThreads>(gates, tokens() - chunk * kChunk, thread());
      sync_group(context.barrier, kThreads);
    }
    Prepare::run(
        context, stage, Betas{a, rows, chunk, tokens()}, turn,
        [&] {
          const int round = chunk / Layout::kStages;
          if (round > 0) barrier_wait(p.shared + Layout::kEmpty + 8 * slot, (round - 1) & 1);
          if (!whole(chunk)) {
            load_values<2, kThreads>(a, rows, stage + stage::kValues, 0, chunk, tokens(), thread());
            copies_wait_all();
          }
          if (p.member == 0 && p.lane == 0) {
            if (whole(chunk)) copy_values<2>(maps, get_rows(rows), stage + stage::kValues, 0, chunk, full);
            else barrier_arrive(full);
          }
        },
        [&] { copy(chunk + Layout::kGroups, turn + 1); });
    sync_warp();
    if (p.lane == 0) barrier_arrive(full);
  }
}

// In place: the stage receives the raw rows. They are copied in the middle of the preparation before, and not earlier: the stage they go to is free
// only when K2 has seen the other group's packet (it starts on a packet before it lets go of the one before), and the groups would take turns.
template <class Layout, bool kGatesF32>
KDA_DEVICE void produce_unbounded(const PrefillArgs& a, const TensorMaps& maps, const PrepareContext& context, const Producer& p) {
  using Prepare = PrepareUnbounded<kGatesF32>;
  constexpr int kThreads = Prepare::kWarps * 32;
  const int thread = p.member * 32 + p.lane;
  auto tokens = [&] { return get_tokens(p.shared + Layout::kRows); };
  const uint32_t rows = p.shared + Layout::kRows, raw_barrier = p.shared + Layout::kRaw + 8 * p.group;
  constexpr uint32_t kGates = kGatesF32 ? stage::kGatesF32 : stage::kKr;
  auto whole = [&](int chunk) { return maps.usable && (chunk + 1) * kChunk <= tokens(); };
  uint32_t raw_beta = 0;  // of token `lane` of the chunk whose rows are on their way
  auto load = [&](int chunk) {
    if (chunk * kChunk >= tokens()) return;
    const int slot = chunk % Layout::kStages, round = chunk / Layout::kStages;
    const uint32_t stage = p.shared + slot * Layout::kStageBytes;
    if (!whole(chunk) || p.member == 0) {
      if (round > 0) barrier_wait(p.shared + Layout::kEmpty + 8 * slot, (round - 1) & 1);
      if (!whole(chunk)) {
        load_raw<kGatesF32, kThreads>(a, rows, stage + stage::kKeyQuery, stage + kGates, chunk, tokens(), thread);
        load_values<2, kThreads>(a, rows, stage + stage::kValues, 0, chunk, tokens(), thread);
      } else if (p.lane == 0) {
        copy_raw<kGatesF32>(maps, get_rows(rows), stage + stage::kKeyQuery, stage + kGates, chunk, raw_barrier);
        copy_values<2>(maps, get_rows(rows), stage + stage::kValues, 0, chunk, raw_barrier);
      }
    }
    raw_beta = Betas{a, rows, chunk, tokens()}.fetch(p.lane);
  };
  load(p.group);
#pragma unroll 1
  for (int chunk = p.group, turn = 0; chunk * kChunk < tokens(); chunk += Layout::kGroups, ++turn) {
    const int slot = chunk % Layout::kStages;
    const float beta = Betas{a, rows, chunk, tokens()}.value(raw_beta, p.lane);
    if (whole(chunk)) {
      barrier_wait(raw_barrier, turn & 1);
    } else {
      copies_wait_all();
      sync_group(context.barrier, kThreads);
    }
    Prepare::run(context, p.shared + slot * Layout::kStageBytes, tokens() - chunk * kChunk, beta, [&] { load(chunk + Layout::kGroups); });
    fence_async_shared();
    sync_warp();
    if (p.lane == 0) barrier_arrive(p.shared + Layout::kFull + 8 * slot);
  }
}

}  // namespace jax_kda
