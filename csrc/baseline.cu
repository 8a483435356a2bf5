// The baseline route: one CTA per (sequence, value head), K1 and K2 fused.
//
//   warps 0-3, 4-7   K2: two warpgroups of 64 value rows; the state stays in their registers from the first token to the last
//   warps 8 on       K1: two groups of four warps (bounded gates) or two (unbounded); group i prepares chunks i, i + 2, i + 4, ... in place
//
//   stage ring       chunk c lives in stage c mod kStages:
//                      K1: wait empty -> copy raw rows -> (one chunk of its own later) prepare in place -> full
//                      K2: wait full -> products -> empty
//   barriers         full[s]: one arrival per K1 warp of the group; empty[s]: one per K2 warp
//
// A group copies its next chunk's rows in the middle of preparing the present one. Not earlier: the stage they go to is free only when K2 has
// seen the other group's packet (it starts on a packet before it lets go of the one before), and the groups would take turns. With three stages
// it waits for the group's own packet: there the copy comes after it.
// No CTA waits for another one.
#include "kernels/launch_kernel.cuh"
#include "kernels/prepare_bounded.cuh"
#include "kernels/prepare_unbounded.cuh"
#include "kernels/task.cuh"
#include "kernels/tensor_maps.cuh"
#include "launch.h"

#include <type_traits>

namespace jax_kda {
namespace {

template <bool kBounded, bool kGatesF32> struct Baseline {
  using Prepare = std::conditional_t<kBounded, PrepareBounded<kGatesF32>, PrepareUnbounded<kGatesF32>>;
  static constexpr int kConsumers = 2, kConsumerThreads = kConsumers * 128;  // warpgroups of K2
  static constexpr int kGroups = 2, kGroupThreads = Prepare::kWarps * 32;    // of K1
  static constexpr int kThreads = kConsumerThreads + kGroups * kGroupThreads;
  // A CTA starts with an equal share of 65,536 registers a thread (in eights); what K2 takes beyond it, K1 must give.
  static constexpr int kShare = 65536 / kThreads / 8 * 8;
  static constexpr int kConsumerRegisters = 168, kProducerRegisters = kBounded ? 88 : 168;
  static_assert(kConsumerThreads * kConsumerRegisters + (kThreads - kConsumerThreads) * kProducerRegisters <= kThreads * kShare);
  static constexpr int kStages = kBounded ? (kGatesF32 ? 3 : 4) : (kGatesF32 ? 4 : 5);

  static constexpr bool kCopyAhead = kStages > kGroups + 1;

  static constexpr uint32_t kStageBytes = stage::bytes(kGatesF32);
  static constexpr uint32_t kScratch = kStages * kStageBytes;
  static constexpr uint32_t kStaging = kScratch + kGroups * Prepare::kScratchBytes;  // 1 KB a K2 warp
  static constexpr uint32_t kOnes = kStaging + kConsumers * 4 * 1024;
  static constexpr uint32_t kBias = kOnes + kHeadDim * 4;
  static constexpr uint32_t kRows = kBias + kHeadDim * 4;  // where the task's rows lie
  static constexpr uint32_t kFull = kRows + 24;
  static constexpr uint32_t kEmpty = kFull + kStages * 8;
  static constexpr uint32_t kRaw = kEmpty + kStages * 8;  // a group's raw rows are there (those that the copy engine brings)
  static constexpr uint32_t kFound = kRaw + kGroups * 8;
  static constexpr uint32_t kBytes = kFound + 8;
  static_assert(kBytes <= 232448, "more shared memory than a CTA can have");
};

template <class Engine, bool kBounded, bool kGatesF32>
__global__ void __launch_bounds__(Baseline<kBounded, kGatesF32>::kThreads, 1) baseline_kernel(const __grid_constant__ PrefillArgs a, const __grid_constant__ TensorMaps maps) {
  using L = Baseline<kBounded, kGatesF32>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = __shfl_sync(0xffffffffu, thread >> 5, 0);  // known to be uniform: no divergence code around the roles
  const Task task = find_task(a, blockIdx.x, base + L::kFound);

  const GateConstants gate = gate_constants<kBounded>(
      a.gate, a.a_log ? a.a_log[(a.gate_rows > 1 ? task.row : 0) * a.HV + task.head] : 0.f, a.lower_bound);
  if (thread < kHeadDim) {
    const float dt = a.dt_bias ? a.dt_bias[((a.gate_rows > 1 ? task.row : 0) * a.HV + task.head) * kHeadDim + thread] : 0.f;
    store_shared(base + L::kBias + thread * 4, dt * gate.slope);
    store_shared(base + L::kOnes + thread * 4, 1.f);
  }
  if (thread == 0) {
    put_rows(base + L::kRows, a, task);
    for (int s = 0; s < L::kStages; ++s) {
      barrier_init(base + L::kFull + 8 * s, L::Prepare::kWarps);
      barrier_init(base + L::kEmpty + 8 * s, L::kConsumers * 4);
    }
    for (int g = 0; g < L::kGroups; ++g) barrier_init(base + L::kRaw + 8 * g, 1);
  }
  fence_async_shared();
  __syncthreads();

  if (warp >= L::kConsumers * 4) {
    if constexpr (L::kProducerRegisters < L::kShare) give_registers<L::kProducerRegisters>();
    const int producer = warp - L::kConsumers * 4, group = producer / L::Prepare::kWarps, member = producer % L::Prepare::kWarps;
    const PrepareContext context = {gate, a.scale, a.l2norm, base + L::kBias, base + L::kScratch + group * L::Prepare::kScratchBytes,
                                    1 + group, 1 + L::kGroups + group, member, lane};
    // From shared memory each time: a register less in the hot phases.
    auto tokens = [&] { return get_tokens(base + L::kRows); };
    uint32_t raw_beta = 0;  // of token `lane` of the chunk whose rows are on their way
    auto load = [&](int chunk) {
      if (chunk * kChunk >= tokens()) return;
      const int slot = chunk % L::kStages, turn = chunk / L::kStages;
      const uint32_t stage = base + slot * L::kStageBytes;
      const bool by_engine = maps.usable && (chunk + 1) * kChunk <= tokens();
      if (!by_engine || member == 0) {
        if (turn > 0) barrier_wait(base + L::kEmpty + 8 * slot, (turn - 1) & 1);
        if (!by_engine) load_rows<kBounded, kGatesF32, L::kGroupThreads>(a, base + L::kRows, stage, chunk, tokens(), member * 32 + lane);
        else if (lane == 0) copy_rows<kGatesF32>(maps, get_rows(base + L::kRows), stage, chunk, base + L::kRaw + 8 * group);
      }
      const int token = chunk * kChunk + lane;
      if (token < tokens()) raw_beta = load_raw_beta(a, get_rows(base + L::kRows), token);
    };

    load(group);
    zero_outside(a, task, producer * 32 + lane, L::kGroups * L::kGroupThreads);
#pragma unroll 1
    for (int chunk = group; chunk * kChunk < tokens(); chunk += L::kGroups) {
      const float beta = chunk * kChunk + lane < tokens() ? write_strength(beta_value(raw_beta, a.beta_dtype), a.beta_mode) : 0.f;
      if (maps.usable && (chunk + 1) * kChunk <= tokens()) {
        barrier_wait(base + L::kRaw + 8 * group, (chunk / L::kGroups) & 1);
      } else {
        copies_wait_all();
        sync_group(context.barrier, L::kGroupThreads);
      }
      const int slot = chunk % L::kStages;
      L::Prepare::run(context, base + slot * L::kStageBytes, tokens() - chunk * kChunk, beta, chunk / L::kGroups,
                      [&] { if constexpr (L::kCopyAhead) load(chunk + L::kGroups); });
      fence_async_shared();
      sync_warp();
      if (lane == 0) barrier_arrive(base + L::kFull + 8 * slot);
      if constexpr (!L::kCopyAhead) load(chunk + L::kGroups);
    }
  } else {
    if constexpr (L::kConsumerRegisters > L::kShare) take_registers<L::kConsumerRegisters>();
    const int value_row = warp * 16;
    const RecurrenceContext context = {base, warp, value_row, lane,
                                       static_cast<uint16_t*>(a.o) + first_row(a, task, a.HV, task.head, kHeadDim) + value_row,
                                       int(a.HV) * kHeadDim, task.tokens};
    const int64_t state_at = task.sequence * a.HV + task.head;
    auto state = [&](const void* p, DType dtype) {
      return p ? static_cast<const char*>(p) + state_at * (kHeadDim * kHeadDim * (dtype == DType::kF32 ? 4 : 2)) : nullptr;
    };
    if (task.tokens > 0) {
      State st;
      load_state(st, state(a.initial_state, a.state_in_dtype), a.state_in_dtype, a.state_v_first, value_row, lane);
      recur<Engine, L>(context, st);
      if (a.final_state)
        store_state(st, const_cast<char*>(state(a.final_state, a.state_out_dtype)), a.state_out_dtype, a.state_v_first, value_row, lane);
    } else if (a.final_state) {
      copy_state(state(a.initial_state, a.state_in_dtype), a.state_in_dtype, const_cast<char*>(state(a.final_state, a.state_out_dtype)),
                 a.state_out_dtype, thread, L::kConsumerThreads);
    }
  }
}

template <class Engine, bool kBounded, bool kGatesF32> cudaError_t launch(const PrefillArgs& a, cudaStream_t stream) {
  using L = Baseline<kBounded, kGatesF32>;
  constexpr auto kernel = baseline_kernel<Engine, kBounded, kGatesF32>;
  if (cudaError_t e = allow_shared_memory<kernel>(L::kBytes); e != cudaSuccess) return e;
  TensorMaps maps;
  if (cudaError_t e = make_tensor_maps(a, maps); e != cudaSuccess) return e;
  kernel<<<unsigned(a.B * a.N * a.HV), L::kThreads, L::kBytes, stream>>>(a, maps);
  return cudaGetLastError();
}

template <class Engine> cudaError_t select(const PrefillArgs& a, cudaStream_t stream) {
  // The bounded scheme's exponents fit for at most 5 nats a token.
  const bool bounded = a.gate == GateMode::kSafe && a.lower_bound >= -5.f, f32 = a.g_dtype == DType::kF32;
  if (bounded) return f32 ? launch<Engine, true, true>(a, stream) : launch<Engine, true, false>(a, stream);
  return f32 ? launch<Engine, false, true>(a, stream) : launch<Engine, false, false>(a, stream);
}

}  // namespace

cudaError_t baseline(const PrefillArgs& a, cudaStream_t stream) { return select<DefaultEngine>(a, stream); }
cudaError_t baseline_warp_engine(const PrefillArgs& a, cudaStream_t stream) { return select<WarpEngine>(a, stream); }

}  // namespace jax_kda
