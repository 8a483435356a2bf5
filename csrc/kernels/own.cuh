// The role of the warps that own a state: from the initial state through the recurrence to the final one.
#pragma once

#include <cstdint>

#include "checkpoints.cuh"
#include "recurrence.cuh"
#include "task.cuh"

namespace jax_kda {

// L: the kernel's layout, which is recur's Pipe, too; of it kConsumerWarps warps a CTA call this, and `rank` says which of the task's owners the CTA is.
// The task's rows lie at L::kRows, its checkpoints at L::kCheckpoints.
template <class Engine, class L> KDA_DEVICE void own(const PrefillArgs& a, const Task& task, uint32_t base, int rank, int warp, int lane) {
  // Formed anew behind the loop, which is short of registers.
  auto value_row = [&] { return (int(opaque(uint32_t(rank))) * L::kConsumerWarps + int(opaque(threadIdx.x)) / 32) * 16; };
  auto lane_again = [] { return int(opaque(threadIdx.x)) & 31; };
  auto state = [&](const void* p, DType dtype) {
    return p ? static_cast<const char*>(p) + get_state(base + L::kRows) * int64_t(kHeadDim * kHeadDim * (dtype == DType::kF32 ? 4 : 2)) : nullptr;
  };
  if (task.tokens > 0) {
    auto* o = static_cast<uint16_t*>(a.o) + first_row(a, task, a.HV, task.head, kHeadDim) + value_row();
    const RecurrenceContext context = {base, warp, lane, o, a, task.tokens};
    State st;
    load_state(st, state(a.initial_state, a.state_in_dtype), a.state_in_dtype, a.state_v_first, value_row(), lane_again());
    recur<Engine, L>(context, st, Checkpoints{a, base + L::kCheckpoints, value_row});
    if (a.final_state)
      store_state(st, const_cast<char*>(state(a.final_state, a.state_out_dtype)), a.state_out_dtype, a.state_v_first, value_row(), lane_again());
  } else if (a.final_state) {
    copy_state(state(a.initial_state, a.state_in_dtype), a.state_in_dtype, const_cast<char*>(state(a.final_state, a.state_out_dtype)),
               a.state_out_dtype, rank * L::kConsumerWarps * 32 + int(threadIdx.x), kHeadDim / 16 * 32);
  }
}

}  // namespace jax_kda
