// The loop of one K1 group: which chunks it prepares, what it waits for and whom it tells.
#pragma once

#include <cstdint>

#include "prepare_bounded.cuh"
#include "prepare_unbounded.cuh"
#include "task.cuh"
#include "tensor_maps.cuh"

namespace jax_kda {

struct Producer {
  uint32_t rows;         // shared: the task, as put_rows left it
  uint32_t raw_barrier;  // of one arrival: the copy engine has brought the group's rows
  int first, step;       // chunks first, first + step, ...
};

// acquire(chunk, turn) waits until the chunk's packet may be written, and gives it; called by all warps. all_but_a(chunk) is called by all
// lanes of one warp, publish(chunk, turn) by those of the one that finishes it. turn: how many chunks the group has prepared before.
template <class Prepare, class Acquire, class AllButA, class Publish>
KDA_DEVICE void produce(const PrefillArgs& a, const TensorMaps& maps, const PrepareContext& c, const Producer& p, Acquire acquire, AllButA all_but_a,
                        Publish publish) {
  constexpr int kThreads = Prepare::kWarps * 32;
  // From shared memory each time: a register less in the hot phases.
  auto tokens = [&] { return get_tokens(p.rows); };
  auto whole = [&](int chunk) { return maps.usable && (chunk + 1) * kChunk <= tokens(); };
  auto copy = [&](int chunk, int turn) {  // by one warp
    if (whole(chunk) && c.lane == 0) copy_rows<Prepare>(maps, get_rows(p.rows), Prepare::buffer(c.memory, turn), chunk, p.raw_barrier);
  };
  auto fetch_beta = [&](int chunk) {
    const int token = chunk * kChunk + c.lane;
    return token < tokens() ? load_raw_beta(a, get_rows(p.rows), token) : 0u;
  };
  if (c.warp == 0) copy(p.first, 0);
  uint32_t raw_beta = fetch_beta(p.first);  // of token `lane` of the next chunk
#pragma unroll 1
  for (int turn = 0; (p.first + turn * p.step) * kChunk < tokens(); ++turn) {
    auto chunk_of = [&] { return p.first + turn * p.step; };
    const int chunk = chunk_of();
    const float beta = chunk * kChunk + c.lane < tokens() ? write_strength(beta_value(raw_beta, a.beta_dtype), a.beta_mode) : 0.f;
    if (whole(chunk)) {
      barrier_wait(p.raw_barrier, turn & 1);
    } else {
      sync_group(c.barrier, kThreads);  // nobody reads the previous rows any more
      load_rows<Prepare>(a, get_rows(p.rows), Prepare::buffer(c.memory, turn), chunk, tokens(), c.warp * 32 + int(opaque(c.lane)));
      copies_wait_all();
      sync_group(c.barrier, kThreads);
    }
    if (Prepare::run(
            c, tokens() - chunk * kChunk, beta, turn, [&] { return acquire(chunk_of(), turn); }, [&] { copy(chunk_of() + p.step, turn + 1); },
            [&] { all_but_a(chunk_of()); }))
      publish(chunk_of(), turn);
    raw_beta = fetch_beta(p.first + (int(opaque(turn)) + 1) * p.step);
  }
}

}  // namespace jax_kda
