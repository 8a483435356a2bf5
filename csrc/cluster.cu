// The owner/helper routes: a cluster of CTAs per (sequence, value head), for calls with few heads.
//
//   C4/D15 M128   rank 0 owns all 128 value rows; ranks 1..3 help; 15 slots
//   C4/D10 M64    ranks 0 and 1 own 64 value rows each; ranks 2, 3 help both; 10 slots
//   C8/D35 M128   rank 0 owns, ranks 1..7 help; 35 slots
//
//   owner     first warps  K2 (a warpgroup for 64 value rows), its state in registers from the first token to the last
//             one warp     fetches packets from the mailbox in token order: wait free -> wait for the slot's flag -> bulk copy -> full
//             one warp     acknowledges each packet as soon as it is there
//   helper    five groups  K1: group i of helper h prepares chunks c with c mod slots = i helpers + h, straight into slot c mod slots
//
//   stages    of an owner: chunk c lives in stage c mod kStages; full[s]: the packet's bytes; free[s]: one arrival per K2 warp, one of the
//             acknowledging warp
//   mailbox   kernels/mailbox.cuh, in the workspace: [clusters][slots] of 32 KB, a flag behind each packet
//
// Why the mailbox lies in global memory: a ring of stages in the owners' shared memory, filled by bulk copies across the cluster, was measured beside it
// (H200; us at 1x2048x1, 1x4096x8). M64: 70, 125 against 61, 106, because a helper must send each packet to both owners, and its engine sends 19 bytes
// a cycle; with the second copy left out, a tie. M128, four groups on both sides: 82, 149 against 83, 150. And its packets need a helper's shared memory,
// where a fifth group brings more.
//
// Only chunk-local packets cross the mailbox; the state stays with its owner. All CTAs of a cluster are resident at once, so that no wait can
// starve, and none leaves before all are done.
#include "kernels/fetch.cuh"
#include "kernels/launch_kernel.cuh"
#include "kernels/own.cuh"
#include "kernels/produce.cuh"
#include "launch.h"

#include <type_traits>

namespace jax_kda {

cudaError_t baseline_m128(const PrefillArgs& a, cudaStream_t stream);

namespace {

constexpr int kInstances = 5;  // K1 groups of a helper

template <int kOwnersOf, int kHelpersOf> struct Roles {
  static constexpr int kOwners = kOwnersOf, kHelpers = kHelpersOf, kRanks = kOwners + kHelpers;
  using Box = Mailbox<kOwners, kHelpers * kInstances>;
  // A cluster's part of the workspace: its slots, aligned to their size; a slot's flag lies behind its packet.
  static constexpr int64_t kWorkspace = Box::kSlots * kSlotBytes;
  static_assert(stage::kPacketBytes + 4 <= kSlotBytes);
};

template <class R, bool kBounded, bool kGatesF32> struct Cluster : R {
  using Box = typename R::Box;
  using Prepare = std::conditional_t<kBounded, PrepareBounded<kGatesF32, GlobalPacket>, PrepareUnbounded<kGatesF32, GlobalPacket>>;
  static constexpr int kConsumers = 2 / R::kOwners, kConsumerWarps = kConsumers * 4;
  static constexpr int kGroupThreads = Prepare::kWarps * 32;
  static constexpr int kThreads = kInstances * kGroupThreads;
  static_assert(kThreads >= (kConsumerWarps + 2) * 32);
  // Registers of a thread (in eights): a scheduler has 512 for a lane of its warps, shared equally at the start; what K2 takes beyond, the other warps
  // of an owner give.
  static constexpr int kShare = 512 / ((kThreads + 127) / 128) / 8 * 8;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 232 : 192;
  static constexpr int kOtherRegisters = kConsumers == 1 ? 48 : 32;
  static_assert(kConsumers * 128 * kConsumerRegisters + (kThreads - kConsumers * 128) * kOtherRegisters <= kThreads * kShare);
  static constexpr bool kRoomy = true;
  static constexpr bool kShortOfStages = false;

  static constexpr int kStages = 6;
  static constexpr uint32_t kStageBytes = stage::kBytes;
  // an owner's memory
  static constexpr uint32_t kValues = kStages * kStageBytes;
  static constexpr uint32_t kOnes = kValues + kConsumerWarps * kStages * 1024;
  static constexpr uint32_t kOwnerBytes = kOnes + kHeadDim * 4;
  // a helper's
  static constexpr uint32_t kBias = kInstances * Prepare::kBytes;
  static constexpr uint32_t kHelperBytes = kBias + kHeadDim * 4;
  // both
  static constexpr uint32_t kRows = (kOwnerBytes > kHelperBytes ? kOwnerBytes : kHelperBytes);  // where the task's rows lie
  static constexpr uint32_t kGate = kRows + 24;
  static constexpr uint32_t kCheckpoints = kGate + 8;
  static constexpr uint32_t kFull = kCheckpoints + kCheckpointTable;
  static constexpr uint32_t kFree = kFull + kStages * 8;
  static constexpr uint32_t kRaw = kFree + kStages * 8;
  static constexpr uint32_t kFound = kRaw + kInstances * 8;
  static constexpr uint32_t kRing = kFound + 8;  // the mailbox's address
  static constexpr uint32_t kBytes = kRing + 8;
  static_assert(kBytes <= 232448, "more shared memory than a CTA can have");

  static KDA_DEVICE void seen(uint32_t, uint32_t, uint32_t) {}
  static KDA_DEVICE void release(uint32_t shared, uint32_t slot, uint32_t) { barrier_arrive(shared + kFree + 8 * slot); }
};

struct Ring {  // of one cluster, in global memory
  char* base;
  KDA_DEVICE char* packet(uint32_t slot) const { return base + slot * kSlotBytes; }
  KDA_DEVICE uint32_t* flag(uint32_t slot) const { return reinterpret_cast<uint32_t*>(packet(slot) + kSlotBytes - 128); }
};

template <class Engine, class R, bool kBounded, bool kGatesF32>
__global__ void __cluster_dims__(R::kRanks, 1, 1) __launch_bounds__(Cluster<R, kBounded, kGatesF32>::kThreads, 1)
    cluster_kernel(const __grid_constant__ PrefillArgs a, const __grid_constant__ TensorMaps maps) {
  using L = Cluster<R, kBounded, kGatesF32>;
  using Box = typename L::Box;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = int(uniform(thread >> 5));
  const int rank = int(uniform(cluster_rank()));
  const Task task = find_task(a, blockIdx.x / L::kRanks, base + L::kFound);
  auto ring = [&] {
    const uint64_t first = (reinterpret_cast<uint64_t>(a.workspace) + kSlotBytes - 1) / kSlotBytes * kSlotBytes;
    return Ring{reinterpret_cast<char*>(first) + int(opaque(blockIdx.x)) / L::kRanks * L::kWorkspace};
  };

  const GateConstants gate = gate_constants(
      a.gate, a.a_log ? a.a_log[(a.gate_rows > 1 ? task.row : 0) * a.HV + task.head] : 0.f, a.lower_bound);
  if (rank == 0 && thread < Box::kSlots) *ring().flag(thread) = 0;
  if (thread < kHeadDim) {
    const float dt = a.dt_bias ? a.dt_bias[((a.gate_rows > 1 ? task.row : 0) * a.HV + task.head) * kHeadDim + thread] : 0.f;
    if (rank >= L::kOwners) store_shared(base + L::kBias + thread * 4, dt * gate.slope);
    else store_shared(base + L::kOnes + thread * 4, 1.f);
  }
  if (thread == 0) {
    put_rows(base + L::kRows, a, task);
    store_shared2(base + L::kGate, gate.slope, gate.height);
    const auto mailbox = reinterpret_cast<uint64_t>(ring().base);
    store_shared2(base + L::kRing, from_bits(uint32_t(mailbox)), from_bits(uint32_t(mailbox >> 32)));
    for (int s = 0; s < L::kStages; ++s) {
      barrier_init(base + L::kFull + 8 * s, 1);
      barrier_init(base + L::kFree + 8 * s, L::kConsumerWarps + 1);
    }
    for (int g = 0; g < kInstances; ++g) barrier_init(base + L::kRaw + 8 * g, 1);
  }
  if (a.checkpoint_every && warp == 0) put_checkpoints(base + L::kCheckpoints, a, task, 0, (task.tokens + kChunk - 1) / kChunk, lane);
  fence_async_shared();
  sync_cluster();

  if (rank >= L::kOwners) {
    const int group = warp / L::Prepare::kWarps, helper = rank - L::kOwners;
    const PrepareContext context = {a.gate, base + L::kGate, a.scale, a.l2norm, base + L::kBias, base + group * L::Prepare::kBytes,
                                    1 + group, 1 + kInstances + group, 1 + 2 * kInstances + group, warp % L::Prepare::kWarps, lane};
    const Producer role = {base + L::kRows, base + L::kRaw + 8 * group};
    // The group's slot. Formed anew each time, in uniform registers: K1 is short of others. The compiler would still keep the address of the flag that
    // it waits for; not so if the mailbox's comes from shared memory.
    auto slot = [&] { return uint32_t(group * L::kHelpers + helper); };
    auto stored_ring = [&] {
      const float2 at = load_shared2(base + L::kRing);
      return Ring{global_pointer(join(bits(at.x), bits(at.y)))};
    };
    zero_outside(a, task, helper * L::kThreads + thread, L::kHelpers * L::kThreads);
    if (a.checkpoint_every)
      zero_checkpoints(a, task.row, task.head, int(task.sequence - task.row * a.N), int(a.N), helper * L::kThreads + thread, L::kHelpers * L::kThreads);
    produce<typename L::Prepare>(
        a, maps, context, role, [&](int turn) { return turn * int(Box::kSlots) + int(slot()); },
        [&](int, int turn) {
          if (turn > 0 && lane == 0) wait_room(stored_ring().flag(slot()), [&](uint32_t flag) { return Box::writable(flag, turn); });
          sync_warp();
          return GlobalPacket(ring().packet(slot()));
        },
        [](int) {}, [](int) {},
        [&](int, int turn) {
          if (lane == 0) set_flag(ring().flag(slot()), Box::published(turn));
        });
  } else if (warp < L::kConsumerWarps) {
    take_registers<L::kConsumerRegisters>();
    own<Engine, L>(a, task, base, rank, warp, lane);
  } else {
    give_registers<L::kOtherRegisters>();
    const int chunks = (get_tokens(base + L::kRows) + kChunk - 1) / kChunk;
    if (warp == L::kConsumerWarps) fetch<L, Box>(ring(), base, chunks, lane);
    else if (warp == L::kConsumerWarps + 1 && lane == 0) acknowledge<L, Box>(ring(), base, chunks, rank);
  }
  sync_cluster();
}

template <class R, bool kBounded, bool kGatesF32> cudaError_t launch(const PrefillArgs& a, cudaStream_t stream) {
  using L = Cluster<R, kBounded, kGatesF32>;
  constexpr auto kernel = cluster_kernel<DefaultEngine, R, kBounded, kGatesF32>;
  if (cudaError_t e = allow_shared_memory<kernel>(L::kBytes); e != cudaSuccess) return e;
  bool fits = false;
  if (cudaError_t e = cluster_fits<kernel>(L::kRanks, L::kThreads, L::kBytes, fits); e != cudaSuccess) return e;
  if (!fits) return baseline_m128(a, stream);
  kernel<<<unsigned(a.B * a.N * a.HV * L::kRanks), L::kThreads, L::kBytes, stream>>>(a, make_tensor_maps(a));
  return cudaGetLastError();
}

template <class R> cudaError_t select(const PrefillArgs& a, cudaStream_t stream) {
  // The bounded scheme's exponents fit for at most 5 nats a token.
  const bool bounded = a.gate == GateMode::kSafe && a.lower_bound >= -5.f, f32 = a.g_dtype == DType::kF32;
  if (bounded) return f32 ? launch<R, true, true>(a, stream) : launch<R, true, false>(a, stream);
  return f32 ? launch<R, false, true>(a, stream) : launch<R, false, false>(a, stream);
}

template <class R> int64_t workspace(const PrefillArgs& a) { return a.B * a.N * a.HV * R::kWorkspace + kSlotBytes; }

using C4M128 = Roles<1, 3>;
using C4M64 = Roles<2, 2>;
using C8M128 = Roles<1, 7>;

}  // namespace

cudaError_t c4_m128_d15(const PrefillArgs& a, cudaStream_t stream) { return select<C4M128>(a, stream); }
cudaError_t c4_m64_d10(const PrefillArgs& a, cudaStream_t stream) { return select<C4M64>(a, stream); }
cudaError_t c8_m128_d35(const PrefillArgs& a, cudaStream_t stream) { return select<C8M128>(a, stream); }
int64_t c4_m128_d15_workspace(const PrefillArgs& a) { return workspace<C4M128>(a); }
int64_t c4_m64_d10_workspace(const PrefillArgs& a) { return workspace<C4M64>(a); }
int64_t c8_m128_d35_workspace(const PrefillArgs& a) { return workspace<C8M128>(a); }

}  // namespace jax_kda
