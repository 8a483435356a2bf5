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
};

// chunk_of(turn): the chunk that the group prepares when it has prepared `turn` others. acquire(chunk, turn) waits until its packet may be written, and
// gives it; called by all warps. all_but_a(chunk) is called by all lanes of one warp, meanwhile(turn) by those of another, publish(chunk, turn) by those
// of the one that finishes it.
template <class Prepare, class ChunkOf, class Acquire, class AllButA, class Meanwhile, class Publish>
KDA_DEVICE void produce(const PrefillArgs& a, const TensorMaps& maps, const PrepareContext& c, const Producer& p, ChunkOf chunk_of, Acquire acquire,
                        AllButA all_but_a, Meanwhile meanwhile, Publish publish) {
  constexpr int kThreads = Prepare::kWarps * 32;
  // From shared memory each time: a register less in the hot phases.
  auto tokens = [&] { return get_tokens(p.rows); };
  auto whole = [&](int chunk) { return maps.usable && (chunk + 1) * kChunk <= tokens(); };
  auto copy = [&](int chunk) {  // by one warp
    if (whole(chunk) && c.lane == 0) copy_rows<Prepare>(maps, get_rows(p.rows), c.memory, chunk, p.raw_barrier);
  };
  auto fetch_beta = [&](int chunk) {
    const int token = chunk * kChunk + c.lane;
    return token < tokens() ? load_raw_beta(a, get_rows(p.rows), token) : 0u;
  };
  if (c.warp == 0) copy(chunk_of(0));
  uint32_t raw_beta = fetch_beta(chunk_of(0));  // of token `lane` of the next chunk
#pragma unroll 1
  for (int turn = 0; chunk_of(turn) * kChunk < tokens(); ++turn) {
    const int chunk = chunk_of(turn);
    const float beta = chunk * kChunk + c.lane < tokens() ? write_strength(beta_value(raw_beta, a.beta_dtype), a.beta_mode) : 0.f;
    if (whole(chunk)) {
      barrier_wait(p.raw_barrier, turn & 1);
    } else {
      sync_group(c.barrier, kThreads);  // nobody reads the previous rows any more
      load_rows<Prepare>(a, get_rows(p.rows), c.memory, chunk, tokens(), c.warp * 32 + int(opaque(c.lane)));
      copies_wait_all();
      sync_group(c.barrier, kThreads);
    }
    if (Prepare::run(
            c, beta, turn, [&] { return acquire(chunk_of(turn), turn); },
            [&] {
              all_but_a(chunk_of(turn));
              copy(chunk_of(turn + 1));
            },
            [&] { meanwhile(turn); }))
      publish(chunk_of(turn), turn);
    raw_beta = fetch_beta(chunk_of(int(opaque(turn)) + 1));
  }
}

}  // namespace jax_kda
