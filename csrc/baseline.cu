// The baseline routes: every CTA prepares packets (K1) and runs the recurrence on them (K2).
//
//   M128   one CTA per (sequence, value head), all 128 value rows
//   M64    a pair of CTAs, 64 value rows each: CTA r prepares chunks r, r + 2, r + 4, ... for both
//
//   first warps      K2: a warpgroup for 64 value rows; the state stays in its registers from the first token to the last
//   the others       K1: groups of four warps; the groups of a CTA take its chunks in turn
//
//   stage ring       chunk c lives in stage c mod kStages, in every CTA:
//                      K1: wait free -> write the packet -> full
//                      K2: wait full -> products -> free
//                    in a pair K1 also copies it: wait taken -> copy to the peer's stage, whose full it completes. So a stage of a CTA's own packets
//                    is free when its own K2 has done with it and the copy has arrived; the peer's K2 may be behind
//   barriers         full[s]: the last warp of the group (a packet of the CTA's own), or the bytes of the peer's, announced by K2 beforehand
//                    free[c mod 2 kStages], at the CTA that prepares the chunk: one arrival per K2 warp there, and one from the peer when it has the
//                    copy. Two a stage, because a group may come to wait for its stage's next turn while another still waits for this one
//                    taken[s], at the CTA that prepares the stage's packets: one arrival per K2 warp of the peer. One a stage: a chunk's group waits
//                    here behind its wait for free, and so behind the copy of the chunk before
//                    raw[g]:  the copy engine has brought group g's raw rows
//
// Values never pass through the ring: each K2 warp copies its own columns. A CTA of a pair waits for its peer only, both are resident (a cluster),
// and neither leaves before the other has done with it.
#include "kernels/launch_kernel.cuh"
#include "kernels/own.cuh"
#include "kernels/produce.cuh"
#include "launch.h"

#include <type_traits>

namespace jax_kda {
namespace {

template <int kRanks, bool kBounded, bool kGatesF32> struct Baseline {
  static constexpr int kConsumers = 2 / kRanks, kConsumerWarps = kConsumers * 4, kConsumerThreads = kConsumerWarps * 32;  // warpgroups of K2
  static constexpr bool kRoomy = false;
  static constexpr bool kShortOfStages = kRanks == 2;
  static constexpr int kStages = 4;
  using Prepare = std::conditional_t<kBounded, PrepareBounded<kGatesF32, SharedPacket>, PrepareUnbounded<kGatesF32, SharedPacket>>;
  static constexpr int kGroups = kRanks == 2 && !kGatesF32 ? 3 : 2, kGroupThreads = Prepare::kWarps * 32;  // of K1
  static constexpr int kThreads = kConsumerThreads + kGroups * kGroupThreads;
  // Registers of a thread (in eights): a scheduler has 512 for a lane of its warps, shared equally at the start; what K2 takes beyond, K1 must give.
  static constexpr int kShare = 512 / ((kThreads + 127) / 128) / 8 * 8;
  static constexpr int kConsumerRegisters = kShare < 168 ? 168 : kShare;
  static constexpr int kProducerRegisters = (kThreads * kShare - kConsumerThreads * kConsumerRegisters) / (kThreads - kConsumerThreads) / 8 * 8;

  static constexpr uint32_t kStageBytes = stage::kBytes;
  static constexpr uint32_t kMemory = kStages * kStageBytes;  // of the groups
  static constexpr uint32_t kValues = kMemory + kGroups * Prepare::kBytes;
  static constexpr uint32_t kOnes = kValues + kConsumers * 4 * kStages * 1024;
  static constexpr uint32_t kBias = kOnes + kHeadDim * 4;
  static constexpr uint32_t kRows = kBias + kHeadDim * 4;  // where the task's rows lie
  static constexpr uint32_t kGate = kRows + 24;
  static constexpr uint32_t kCheckpoints = kGate + 8;
  static constexpr uint32_t kFull = kCheckpoints + kCheckpointTable;
  static constexpr uint32_t kFree = kFull + kStages * 8;
  static constexpr uint32_t kTaken = kFree + 2 * kStages * 8;
  static constexpr uint32_t kRaw = kTaken + (kRanks == 2 ? kStages * 8 : 0);
  static constexpr uint32_t kFound = kRaw + kGroups * 8;
  static constexpr uint32_t kBytes = kFound + 8;
  static_assert(kBytes <= 232448, "more shared memory than a CTA can have");
  static_assert(kStages % kRanks == 0, "a stage's packets come from one CTA");
  // Who waits for a barrier's next phase has prepared a chunk `groups` earlier, so its stage was free, so this phase is over.
  static_assert(kGroups * kRanks <= 2 * kStages, "waits for one barrier may be two phases apart");

  static constexpr uint32_t kAnnounced = stage::kPacketBytes / kConsumerWarps;  // bytes of a peer's packet, by each K2 warp
  static_assert(kAnnounced * kConsumerWarps == stage::kPacketBytes);

  static KDA_DEVICE bool is_guest(uint32_t slot) { return kRanks == 2 && slot % kRanks != cluster_rank(); }
  // The first warp of K2 sees a packet. The peer's: it may overwrite what it has copied.
  static KDA_DEVICE void seen(uint32_t shared, uint32_t slot, uint32_t round) {
    if (is_guest(slot)) barrier_arrive_at(at_rank(shared + kFree + 8 * (slot + round * kStages), slot % kRanks));
  }
  // A K2 warp has done with a stage. Of a peer's packet it announces its share of the next one, and tells the peer that there is room for it.
  static KDA_DEVICE void release(uint32_t shared, uint32_t slot, uint32_t round) {
    if (is_guest(slot)) {
      barrier_expect(shared + kFull + 8 * slot, kAnnounced);
      barrier_arrive_at(at_rank(shared + kTaken + 8 * slot, slot % kRanks));
    } else {
      barrier_arrive(shared + kFree + 8 * (slot + round * kStages));
    }
  }
};

template <class Engine, int kRanks, bool kBounded, bool kGatesF32>
__global__ void __cluster_dims__(kRanks, 1, 1) __launch_bounds__(Baseline<kRanks, kBounded, kGatesF32>::kThreads, 1)
    baseline_kernel(const __grid_constant__ PrefillArgs a, const __grid_constant__ TensorMaps maps) {
  using L = Baseline<kRanks, kBounded, kGatesF32>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = int(uniform(thread >> 5));
  const int rank = kRanks == 1 ? 0 : int(uniform(cluster_rank()));
  const Task task = find_task(a, blockIdx.x / kRanks, base + L::kFound);

  const GateConstants gate = gate_constants(
      a.gate, a.a_log ? a.a_log[(a.gate_rows > 1 ? task.row : 0) * a.HV + task.head] : 0.f, a.lower_bound);
  if (thread < kHeadDim) {
    const float dt = a.dt_bias ? a.dt_bias[((a.gate_rows > 1 ? task.row : 0) * a.HV + task.head) * kHeadDim + thread] : 0.f;
    store_shared(base + L::kBias + thread * 4, dt * gate.slope);
    store_shared(base + L::kOnes + thread * 4, 1.f);
  }
  if (thread == 0) {
    put_rows(base + L::kRows, a, task);
    store_shared2(base + L::kGate, gate.slope, gate.height);
    for (int s = 0; s < L::kStages; ++s) {
      const bool own = s % kRanks == rank;
      barrier_init(base + L::kFull + 8 * s, own ? 1 : L::kConsumerWarps);
      for (int round = 0; round < 2; ++round) barrier_init(base + L::kFree + 8 * (s + round * L::kStages), L::kConsumerWarps + kRanks - 1);
      if constexpr (kRanks == 2) barrier_init(base + L::kTaken + 8 * s, L::kConsumerWarps);
      for (int i = 0; i < L::kConsumerWarps && !own; ++i) barrier_expect(base + L::kFull + 8 * s, L::kAnnounced);
    }
    for (int g = 0; g < L::kGroups; ++g) barrier_init(base + L::kRaw + 8 * g, 1);
  }
  if (a.checkpoint_every && warp == 0) put_checkpoints(base + L::kCheckpoints, a, task, 0, (task.tokens + kChunk - 1) / kChunk, lane);
  fence_async_shared();
  if constexpr (kRanks == 1) __syncthreads();
  else sync_cluster();

  if (warp >= L::kConsumerWarps) {
    if constexpr (L::kProducerRegisters < L::kShare) give_registers<L::kProducerRegisters>();
    const int producer = warp - L::kConsumerWarps, group = producer / L::Prepare::kWarps, member = producer % L::Prepare::kWarps;
    const PrepareContext context = {a.gate, base + L::kGate, a.scale, a.l2norm, base + L::kBias, base + L::kMemory + group * L::Prepare::kBytes,
                                    1 + group, 1 + L::kGroups + group, 1 + 2 * L::kGroups + group, member, lane};
    const Producer role = {base + L::kRows, base + L::kRaw + 8 * group};
    auto send = [&](int chunk, uint32_t from, uint32_t to) {  // bytes of a packet, to the peer
      if (kRanks == 1 || lane != 0) return;
      if (chunk >= L::kStages) barrier_wait_cluster(base + L::kTaken + 8 * (chunk % L::kStages), (chunk / L::kStages - 1) & 1);
      const uint32_t packet = base + chunk % L::kStages * L::kStageBytes + from, full = base + L::kFull + 8 * (chunk % L::kStages);
      copy_to_cluster(at_rank(packet, rank ^ 1), packet, to - from, at_rank(full, rank ^ 1));
    };
    const int index = (rank * L::kGroups * L::Prepare::kWarps + producer) * 32 + lane;
    zero_outside(a, task, index, kRanks * L::kGroups * L::kGroupThreads);
    if (a.checkpoint_every)
      zero_checkpoints(a, task.row, task.head, int(task.sequence - task.row * a.N), int(a.N), index, kRanks * L::kGroups * L::kGroupThreads);
    produce<typename L::Prepare>(
        a, maps, context, role, [&](int turn) { return (turn * L::kGroups + group) * kRanks + rank; },
        [&](int chunk, int) {
          if (chunk >= L::kStages) {
            const int before = chunk - L::kStages, turn = before / (2 * L::kStages);
            const uint32_t free = base + L::kFree + 8 * (before % (2 * L::kStages));
            kRanks == 1 ? barrier_wait(free, turn & 1) : barrier_wait_cluster(free, turn & 1);
          }
          return SharedPacket{base + chunk % L::kStages * L::kStageBytes};
        },
        [&](int chunk) {  // so that this is on its way while A is made
          send(chunk, 0, stage::kA);
          send(chunk, stage::kM, stage::kPacketBytes);
        },
        [](int) {},
        [&](int chunk, int) {
          if (lane == 0) barrier_arrive(base + L::kFull + 8 * (chunk % L::kStages));
          send(chunk, stage::kA, stage::kM);
        });
  } else {
    if constexpr (L::kConsumerRegisters > L::kShare) take_registers<L::kConsumerRegisters>();
    own<Engine, L>(a, task, base, rank, warp, lane);
  }
  if constexpr (kRanks > 1) sync_cluster();
}

template <class Engine, int kRanks, bool kBounded, bool kGatesF32> cudaError_t launch(const PrefillArgs& a, cudaStream_t stream) {
  using L = Baseline<kRanks, kBounded, kGatesF32>;
  constexpr auto kernel = baseline_kernel<Engine, kRanks, kBounded, kGatesF32>;
  if (cudaError_t e = allow_shared_memory<kernel>(L::kBytes); e != cudaSuccess) return e;
  kernel<<<unsigned(a.B * a.N * a.HV * kRanks), L::kThreads, L::kBytes, stream>>>(a, make_tensor_maps(a));
  return cudaGetLastError();
}

template <class Engine, int kRanks> cudaError_t select(const PrefillArgs& a, cudaStream_t stream) {
  // The bounded scheme's exponents fit for at most 5 nats a token.
  const bool bounded = a.gate == GateMode::kSafe && a.lower_bound >= -5.f, f32 = a.g_dtype == DType::kF32;
  if (bounded) return f32 ? launch<Engine, kRanks, true, true>(a, stream) : launch<Engine, kRanks, true, false>(a, stream);
  return f32 ? launch<Engine, kRanks, false, true>(a, stream) : launch<Engine, kRanks, false, false>(a, stream);
}

}  // namespace

cudaError_t baseline_m128(const PrefillArgs& a, cudaStream_t stream) { return select<DefaultEngine, 1>(a, stream); }
cudaError_t baseline_m128_warp_engine(const PrefillArgs& a, cudaStream_t stream) { return select<WarpEngine, 1>(a, stream); }
cudaError_t baseline_m64(const PrefillArgs& a, cudaStream_t stream) { return select<DefaultEngine, 2>(a, stream); }

}  // namespace jax_kda
