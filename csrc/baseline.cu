// The baseline route: one CTA per (sequence, value head), K1 and K2 fused.
//
//   warps 0-3, 4-7   K2: two warpgroups of 64 value rows; the state stays in their registers from the first token to the last
//   warps 8-11       K1: two groups of two warps; group i prepares chunks i, i + 2, i + 4, ... in place
//
//   stage ring       chunk c lives in stage c mod kStages:
//                      K1: wait empty -> copy raw rows -> (one chunk of its own later) prepare in place -> full
//                      K2: wait full -> products -> empty
//   barriers         full[s]: one arrival per K1 warp of the group; empty[s]: one per K2 warp
//
// A group copies its next chunk's rows before it prepares the present one, so that memory latency is hidden behind a whole preparation.
// No CTA waits for another one.
#include "kernels/prepare.cuh"
#include "kernels/task.cuh"
#include "launch.h"

#include <atomic>
#include <mutex>

namespace jax_kda {
namespace {

template <bool kGatesF32> struct Baseline {
  static constexpr int kConsumers = 2, kConsumerThreads = kConsumers * 128;  // warpgroups of K2
  static constexpr int kGroups = 2, kGroupWarps = 2;                         // of K1
  static constexpr int kThreads = kConsumerThreads + kGroups * kGroupWarps * 32;
  // A CTA of 384 threads is launched with 168 registers a thread; what K2 takes K1 must give: 2 x K2 + K1 = 3 x 168.
  static constexpr int kConsumerRegisters = 168, kProducerRegisters = 168;
  static_assert(2 * kConsumerRegisters + kProducerRegisters <= 3 * 168);
  static constexpr int kStages = kGatesF32 ? 4 : 5;

  static constexpr uint32_t kStageBytes = stage::bytes(kGatesF32);
  static constexpr uint32_t kScratch = kStages * kStageBytes;
  static constexpr uint32_t kScratchBytes = Scratch<kGroupWarps, kGatesF32>::kBytes;
  static constexpr uint32_t kStaging = kScratch + kGroups * kScratchBytes;  // 1 KB a K2 warp
  static constexpr uint32_t kOnes = kStaging + kConsumers * 4 * 1024;
  static constexpr uint32_t kBias = kOnes + kHeadDim * 4;
  static constexpr uint32_t kFull = kBias + kHeadDim * 4;
  static constexpr uint32_t kEmpty = kFull + kStages * 8;
  static constexpr uint32_t kBytes = kEmpty + kStages * 8;
  static_assert(kBytes <= 232448, "more shared memory than a CTA can have");
};

template <class Engine, bool kBounded, bool kGatesF32>
__global__ void __launch_bounds__(Baseline<kGatesF32>::kThreads, 1) baseline_kernel(const __grid_constant__ PrefillArgs a) {
  using L = Baseline<kGatesF32>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const Task task = find_task(a, blockIdx.x);

  const GateConstants gate = gate_constants(
      a.gate, a.a_log ? a.a_log[(a.gate_rows > 1 ? task.row : 0) * a.HV + task.head] : 0.f, a.lower_bound);
  if (thread < kHeadDim) {
    const float dt = a.dt_bias ? a.dt_bias[((a.gate_rows > 1 ? task.row : 0) * a.HV + task.head) * kHeadDim + thread] : 0.f;
    store_shared(base + L::kBias + thread * 4, dt * gate.slope);
    store_shared(base + L::kOnes + thread * 4, 1.f);
  }
  // Tiles of A and M above the diagonal are written only here.
  for (int i = thread; i < L::kStages * 256; i += L::kThreads)
    store_shared4(base + (i >> 8) * L::kStageBytes + stage::kA + (i & 255) * 16, {0.f, 0.f, 0.f, 0.f});
  if (thread == 0) {
    for (int s = 0; s < L::kStages; ++s) {
      barrier_init(base + L::kFull + 8 * s, L::kGroupWarps);
      barrier_init(base + L::kEmpty + 8 * s, L::kConsumers * 4);
    }
  }
  fence_async_shared();
  __syncthreads();

  if (thread >= L::kConsumerThreads) {
    give_registers<L::kProducerRegisters>();
    const int producer = thread - L::kConsumerThreads, group = producer / (L::kGroupWarps * 32), member = producer % (L::kGroupWarps * 32);
    const PrepareContext context = {gate, a.scale, a.l2norm, base + L::kBias, base + L::kScratch + group * L::kScratchBytes,
                                    1 + group, member >> 5, lane};
    const int chunks = (task.tokens + kChunk - 1) / kChunk;
    auto load = [&](int chunk) {
      const int slot = chunk % L::kStages, turn = chunk / L::kStages;
      if (turn > 0) barrier_wait(base + L::kEmpty + 8 * slot, (turn - 1) & 1);
      load_rows<kGatesF32, L::kGroupWarps * 32>(a, task, base + slot * L::kStageBytes, chunk, member);
    };

    if (group < chunks) load(group);
    copies_commit();
    zero_outside(a, task, producer, L::kGroups * L::kGroupWarps * 32);
#pragma unroll 1
    for (int chunk = group; chunk < chunks; chunk += L::kGroups) {
      const int token = chunk * kChunk + lane;
      float beta = 0.f;
      if (context.warp == 0 && token < task.tokens) {
        const int64_t at = first_row(a, task, a.HV, task.head, 1) + token * a.HV;
        beta = a.beta_dtype == DType::kF32 ? static_cast<const float*>(a.beta)[at] : __bfloat162float(static_cast<const __nv_bfloat16*>(a.beta)[at]);
        beta = write_strength(beta, a.beta_mode);
      }
      if (chunk + L::kGroups < chunks) load(chunk + L::kGroups);
      copies_commit();
      copies_wait<1>();
      sync_group(context.barrier, L::kGroupWarps * 32);
      const int slot = chunk % L::kStages;
      prepare_chunk<kBounded, kGatesF32, L::kGroupWarps>(context, base + slot * L::kStageBytes, task.tokens - chunk * kChunk, beta);
      fence_async_shared();
      sync_warp();
      if (lane == 0) barrier_arrive(base + L::kFull + 8 * slot);
    }
  } else {
    take_registers<L::kConsumerRegisters>();
    const int value_row = warp * 16;
    const RecurrenceContext context = {base, warp, value_row, lane,
                                       static_cast<uint16_t*>(a.o) + first_row(a, task, a.HV, task.head, kHeadDim) + value_row,
                                       int(a.HV) * kHeadDim, task.tokens};
    auto state = [&](const void* p, DType dtype) {
      return p ? static_cast<const char*>(p) + int64_t(blockIdx.x) * (kHeadDim * kHeadDim * (dtype == DType::kF32 ? 4 : 2)) : nullptr;
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

// cudaFuncSetAttribute once per kernel and device: it is no stream operation, so it is allowed (once, cheaply) inside a capture too.
template <auto kKernel> cudaError_t allow_shared_memory(int bytes) {
  static std::mutex mutex;
  static std::atomic<bool> done[64];
  int device = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (device < 64 && done[device].load(std::memory_order_acquire)) return cudaSuccess;
  std::lock_guard<std::mutex> lock(mutex);
  if (cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return e;
  if (device < 64) done[device].store(true, std::memory_order_release);
  return cudaSuccess;
}

template <class Engine, bool kBounded, bool kGatesF32> cudaError_t launch(const PrefillArgs& a, cudaStream_t stream) {
  using L = Baseline<kGatesF32>;
  constexpr auto kernel = baseline_kernel<Engine, kBounded, kGatesF32>;
  if (cudaError_t e = allow_shared_memory<kernel>(L::kBytes); e != cudaSuccess) return e;
  kernel<<<unsigned(a.B * a.N * a.HV), L::kThreads, L::kBytes, stream>>>(a);
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
