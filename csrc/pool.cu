// The pooled routes: every task (a sequence of one value head) has its owners, and all SMs that are left prepare packets for all of them in turn. For calls
// whose tasks are too many for clusters of their own helpers, and too few for every SM to own one.
//
//   pool_m64     two owners a task, 64 value rows each; helpers prepare all chunks
//   pool_m128    one owner a task, all 128 value rows. It prepares `own` of every 64 chunks itself, helpers the others
//
//   CTAs      first the owners, task by task, then the helpers: as many as the device has SMs. A cooperative launch: all are resident at once, so that
//             no wait can starve
//
//   owner     first warps  K2 (a warpgroup for 64 value rows), its state in registers from the first token to the last
//     m64     one warp     fetches packets from the mailbox in token order; another acknowledges each as soon as it is there
//     m128    two groups   K1: they take the owner's own chunks in turn, each straight to its stage. The warp of a group that has nothing to do while
//                          another one inverts acknowledges what K2 has taken, and fetches the packets between this chunk and the next of its own
//   helper    groups       K1: group w of all helpers' prepares packets w, w + groups, ... of the list
//                            helped chunk 0 of task 0, of task 1, ..., helped chunk 1 of task 0, ...
//                          straight into the mailbox, and publishes them
//
//   stages    of an owner: chunk c lives in stage c mod kStages. full[s]: its packet is there. m64: free[s], as in kernels/fetch.cuh; m128:
//             free[c mod 2 kStages], as in baseline.cu: one arrival per K2 warp
//   mailbox   kernels/mailbox.cuh, where a task's chunks are its helped ones, in the workspace: [tasks][kSlots] flags, cleared by a memset before the
//             kernel; [tasks][kSlots] packets of 32 KB
//
// Nobody waits in a circle. A packet is late only for packets before it in the list, or chunks before its own in its task; the last to be fetched of a
// task waits for a slot whose packet came kSlots helped chunks earlier, and was acknowledged when the owner took a chunk of its own before this one.
#include "kernels/fetch.cuh"
#include "kernels/launch_kernel.cuh"
#include "kernels/own.cuh"
#include "kernels/produce.cuh"
#include "kernels/segments.cuh"
#include "kernels/shares.cuh"
#include "launch.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace jax_kda {

cudaError_t baseline_m128(const PrefillArgs& a, cudaStream_t stream);

namespace {

struct PoolArgs {
  PrefillArgs a;
  int tasks, helpers;
  int step_task, step_number;  // from a group's place in the list to its next
  int gate_heads;              // value heads, times rows of gate parameters where there are several
  Shares shares;  // of the owner, and of the helpers, in a task's chunks
  char* packets;
  uint32_t* flags;
};

constexpr int kFlagStride = 8;  // words: a sector each

template <int kOwnersOf, bool kBounded, bool kGatesF32> struct Pool {
  static constexpr int kOwners = kOwnersOf, kConsumers = 2 / kOwners, kConsumerWarps = kConsumers * 4;
  static constexpr bool kOwnGroups = kOwners == 1;  // of K1, in an owner
  using Box = Mailbox<kOwners, kOwners == 1 ? 8 : 16>;

  // helpers
  using Prepare = std::conditional_t<kBounded, PrepareBounded<kGatesF32, GlobalPacket>, PrepareUnbounded<kGatesF32, GlobalPacket>>;
  static constexpr int kInstances = kOwnGroups || kGatesF32 ? 4 : 5;
  static constexpr int kMostTasks = kOwnGroups ? 112 : 64;  // whose biases find room
  static constexpr int kGroupThreads = Prepare::kWarps * 32, kThreads = kInstances * kGroupThreads;
  static constexpr uint32_t kPlaces = kInstances * Prepare::kBytes, kPlaceBytes = 4 * 32;  // see help
  static constexpr uint32_t kBiases = kPlaces + kInstances * kPlaceBytes, kBiasBytes = kHeadDim * 4 + 16;  // of a task, with its gate constants
  static constexpr uint32_t kHelperBytes = kBiases + kMostTasks * kBiasBytes;

  // an owner's own groups
  using OwnPrepare = std::conditional_t<kBounded, PrepareBounded<kGatesF32, SharedPacket>, PrepareUnbounded<kGatesF32, SharedPacket>>;
  static constexpr int kGroups = kOwnGroups ? 2 : 0;

  // Registers of a thread (in eights): a scheduler has 512 for a lane of its warps, shared equally at the start; what K2 takes beyond, others must give.
  static constexpr int kShare = 512 / ((kThreads + 127) / 128) / 8 * 8;
  static constexpr int kConsumerRegisters = kOwnGroups ? 168 : 232;
  static constexpr int kOtherRegisters = kOwnGroups ? (kThreads * kShare - kConsumerWarps * 32 * kConsumerRegisters) / (kGroups * kGroupThreads) / 8 * 8 : 48;
  static_assert(!kOwnGroups || kThreads == (kConsumerWarps + kGroups * Prepare::kWarps) * 32);
  static constexpr bool kRoomy = !kOwnGroups;
  static constexpr bool kShortOfStages = false;

  static constexpr int kStages = kOwnGroups ? 4 : 6;
  static constexpr int kFreeBarriers = kOwnGroups ? 2 * kStages : kStages;
  static constexpr uint32_t kStageBytes = stage::kBytes;
  static constexpr uint32_t kMemory = kStages * kStageBytes;  // of the own groups
  static constexpr uint32_t kValues = kMemory + kGroups * OwnPrepare::kBytes;
  static constexpr uint32_t kOnes = kValues + kConsumerWarps * kStages * 1024;
  static constexpr uint32_t kBias = kOnes + kHeadDim * 4;
  static constexpr uint32_t kOwnerBytes = kBias + kHeadDim * 4;
  // both
  static constexpr uint32_t kRows = ((kOwnerBytes > kHelperBytes ? kOwnerBytes : kHelperBytes) + 15) / 16 * 16;  // where the task's rows lie
  static constexpr uint32_t kGate = kRows + 24;
  static constexpr uint32_t kCheckpoints = kGate + 8;
  static constexpr uint32_t kFull = kCheckpoints + kCheckpointTable;
  static constexpr uint32_t kFree = kFull + kStages * 8;
  static constexpr uint32_t kRaw = kFree + kFreeBarriers * 8;
  static constexpr uint32_t kBytes = kRaw + kInstances * 8;
  static_assert(kBytes <= 232448, "more shared memory than a CTA can have");

  static KDA_DEVICE uint32_t free_barrier(uint32_t shared, int chunk) { return shared + kFree + 8 * (chunk % kFreeBarriers); }
  static KDA_DEVICE void seen(uint32_t, uint32_t, uint32_t) {}
  static KDA_DEVICE void release(uint32_t shared, uint32_t slot, uint32_t round) {
    barrier_arrive(shared + kFree + 8 * (slot + (kOwnGroups ? round * kStages : 0)));
  }
};

template <class Box> struct PoolRing {  // of one task
  char* packets;
  uint32_t* flags;
  KDA_DEVICE PoolRing(const PoolArgs& x, int task)
      : packets(x.packets + task * int64_t(Box::kSlots) * kSlotBytes), flags(x.flags + task * int(Box::kSlots) * kFlagStride) {}
  KDA_DEVICE char* packet(uint32_t slot) const { return packets + slot * kSlotBytes; }
  KDA_DEVICE uint32_t* flag(uint32_t slot) const { return flags + slot * kFlagStride; }
};

KDA_DEVICE Task pool_task(const PrefillArgs& a, int task) {
  const int sequence = int(uint32_t(task) / uint32_t(a.HV)), row = int(uint32_t(sequence) / uint32_t(a.N));
  return task_of(a, row, sequence - row * int(a.N), task - sequence * int(a.HV));
}

// The groups of K1 of an owner: its own chunks, and what lies between them.
template <class L> KDA_DEVICE void prepare_own(const PoolArgs& x, const TensorMaps& maps, const Task& task, uint32_t base, int warp, int lane) {
  using Box = typename L::Box;
  const PrefillArgs& a = x.a;
  constexpr int kWarps = L::Prepare::kWarps, kStages = L::kStages;
  const int producer = warp - L::kConsumerWarps, group = producer / kWarps;
  const PrepareContext context = {a.gate, base + L::kGate, a.scale, a.l2norm, base + L::kBias, base + L::kMemory + group * L::OwnPrepare::kBytes,
                                  1 + group, 1 + L::kGroups + group, 1 + 2 * L::kGroups + group, producer % kWarps, lane};
  auto own_chunk = [&](int turn) { return x.shares.own(turn * L::kGroups + group); };
  auto await_stage = [&](int chunk) {
    const int before = chunk - kStages;
    if (before >= 0) barrier_wait(L::free_barrier(base, before), (before / (2 * kStages)) & 1);
  };
  produce<typename L::OwnPrepare>(
      a, maps, context, Producer{base + L::kRows, base + L::kRaw + 8 * group}, own_chunk,
      [&](int chunk, int) {
        await_stage(chunk);
        return SharedPacket{base + chunk % kStages * L::kStageBytes};
      },
      [](int) {},
      // The packets between this chunk and the owner's next one. What K2 has done with is acknowledged, up to kStages before this chunk, whose
      // stage was free.
      [&](int turn) {
        if (lane == 0) {
          const PoolRing<Box> ring(x, int(opaque(blockIdx.x)));
          const int index = turn * L::kGroups + group, chunk = x.shares.own(index), next = x.shares.own(index + 1);
          const int chunks = (get_tokens(base + L::kRows) + kChunk - 1) / kChunk;
          auto taken_before = [&](int c) { return c < kStages ? 0 : x.shares.helped_before(c - kStages + 1); };
          for (int i = index == 0 ? 0 : taken_before(x.shares.own(index - 1)), end = taken_before(chunk); i < end; ++i)
            add_flag(ring.flag(Box::slot(i)), Box::taken_by(0));
          for (int c = chunk + 1; c < next && c < chunks; ++c) {
            const uint32_t i = x.shares.helped_before(c), full = base + L::kFull + 8 * (c % kStages);
            await_stage(c);
            wait_flag(ring.flag(Box::slot(i)), [&](uint32_t flag) { return Box::readable(flag, Box::generation(i)); });
            fence_async_global();
            barrier_expect(full, stage::kPacketBytes);
            copy_bulk(base + c % kStages * L::kStageBytes, ring.packet(Box::slot(i)), stage::kPacketBytes, full);
          }
        }
        sync_warp();
      },
      [&](int chunk, int) {
        if (lane == 0) barrier_arrive(base + L::kFull + 8 * (chunk % kStages));
      });
}

// A helper: biases and gate constants of all tasks to shared memory, then its groups.
template <class L> KDA_DEVICE void help(const PoolArgs& x, const TensorMaps& maps, uint32_t base, int helper, int warp, int lane) {
  using Prepare = typename L::Prepare;
  using Box = typename L::Box;
  const PrefillArgs& a = x.a;
  const int group = warp / Prepare::kWarps, member = warp % Prepare::kWarps;
  const uint32_t memory = base + group * Prepare::kBytes, places = base + L::kPlaces + group * L::kPlaceBytes;
  auto raw = [&] { return base + L::kRaw + (places - base - L::kPlaces) / (L::kPlaceBytes / 8); };  // a register fewer
  PrepareContext context = {a.gate, 0, a.scale, a.l2norm, 0, memory, 1 + group, 1 + L::kInstances + group, 1 + 2 * L::kInstances + group, member, lane};

  // What the group works on in a turn: the task's rows as put_rows leaves them (no tokens: nothing more to do), and behind them the place in the list,
  // helped chunk `number` of task `task`. Of four turns, so that who is late and who is early have their own.
  struct Place {
    int number, task;
  };
  constexpr uint32_t kOdd = 1u << 31;  // beside the task: an odd number of turns before this one had the copy engine bring their rows
  auto place_at = [&](int turn) { return places + (turn & 3) * 32; };
  auto get_place = [&](int turn) {
    const float2 at = load_shared2(place_at(turn) + 24);
    return Place{int(bits(at.x)), int(bits(at.y) & ~kOdd)};
  };
  auto chunk_of = [&](int turn) { return x.shares.helped(get_place(turn).number); };
  auto behind = [&](Place p) {
    p.task += x.step_task, p.number += x.step_number;
    if (p.task >= x.tasks) p.task -= x.tasks, ++p.number;
    return p;
  };
  auto odd = [&](int turn) { return bits(load_shared(place_at(turn) + 28)) >> 31; };
  auto whole = [&](int turn) { return maps.usable && (chunk_of(turn) + 1) * kChunk <= get_tokens(place_at(turn)); };
  // From this place on, the first whose chunk there is. By one warp.
  auto put_place = [&](int turn, Place p) {
    const int most = int(a.T + kChunk - 1) / kChunk;
    Task k;
    for (;; p = behind(p)) {
      const int chunk = x.shares.helped(p.number);
      k.tokens = 0;
      if (chunk >= most) break;
      k = pool_task(a, p.task);
      if (chunk * kChunk < k.tokens) break;
    }
    if (lane == 0) {
      put_rows(place_at(turn), a, k);
      const uint32_t parity = turn > 0 ? odd(turn - 1) ^ uint32_t(whole(turn - 1)) : 0u;
      store_shared2(place_at(turn) + 24, from_bits(uint32_t(p.number)), from_bits(uint32_t(p.task) | (parity ? kOdd : 0u)));
    }
    sync_warp();
  };
  auto copy = [&](int turn) {  // by one warp
    if (whole(turn) && lane == 0) copy_rows<Prepare>(maps, get_rows(place_at(turn)), memory, chunk_of(turn), raw());
  };
  auto fetch_beta = [&](int turn) {
    const int token = chunk_of(turn) * kChunk + lane;
    return token < get_tokens(place_at(turn)) ? load_raw_beta(a, get_rows(place_at(turn)), token) : 0u;
  };

  if (member == 0) {
    const int worker = group * x.helpers + helper;
    put_place(0, {worker / x.tasks, worker % x.tasks});
    put_place(1, behind(get_place(0)));
    copy(0);
  }
  for (int i = warp; i < x.gate_heads; i += L::kThreads / 32) {
    const GateConstants gate = gate_constants(a.gate, a.a_log ? a.a_log[i] : 0.f, a.lower_bound);
    const float4 dt = a.dt_bias ? *reinterpret_cast<const float4*>(a.dt_bias + i * kHeadDim + lane * 4) : float4{0.f, 0.f, 0.f, 0.f};
    const uint32_t at = base + L::kBiases + i * L::kBiasBytes;
    store_shared4(at + lane * 16, {dt.x * gate.slope, dt.y * gate.slope, dt.z * gate.slope, dt.w * gate.slope});
    if (lane == 0) store_shared2(at + kHeadDim * 4, gate.slope, gate.height);
  }
  __syncthreads();

  uint32_t raw_beta = fetch_beta(0);
#pragma unroll 1
  for (int turn = 0; get_tokens(place_at(turn)) > 0; ++turn) {
    const int chunk = chunk_of(turn), tokens = get_tokens(place_at(turn));
    const float beta = chunk * kChunk + lane < tokens ? write_strength(beta_value(raw_beta, a.beta_dtype), a.beta_mode) : 0.f;
    const int task = get_place(turn).task, head = task % int(a.HV), gate_head = a.gate_rows > 1 ? task / int(a.HV) / int(a.N) * int(a.HV) + head : head;
    context.bias = base + L::kBiases + gate_head * L::kBiasBytes, context.gate = context.bias + kHeadDim * 4;
    if (whole(turn)) {
      barrier_wait(raw(), odd(turn));
    } else {
      sync_group(context.barrier, L::kGroupThreads);  // nobody reads the previous rows any more
      load_rows<Prepare>(a, get_rows(place_at(turn)), memory, chunk, tokens, (int(opaque(threadIdx.x)) & (L::kGroupThreads - 1)));
      copies_wait_all();
      sync_group(context.barrier, L::kGroupThreads);
    }
    auto ring = [&] { return PoolRing<Box>(x, get_place(turn).task); };
    if (Prepare::run(
            context, beta, turn,
            [&] {
              const uint32_t number = get_place(turn).number, slot = Box::slot(number), generation = Box::generation(number);
              if (generation > 0 && lane == 0) wait_room(ring().flag(slot), [&](uint32_t flag) { return Box::writable(flag, generation); });
              sync_warp();
              return GlobalPacket(ring().packet(slot));
            },
            [&] { copy(turn + 1); },
            [&] {
              put_place(turn + 2, behind(get_place(turn + 1)));
              if (L::kOwnGroups && whole(turn + 2) && lane == 0) prefetch_rows<Prepare>(maps, get_rows(place_at(turn + 2)), chunk_of(turn + 2));
            })) {
      const uint32_t number = get_place(turn).number;
      if (lane == 0) set_flag(ring().flag(Box::slot(number)), Box::published(Box::generation(number)));
    }
    raw_beta = fetch_beta(turn + 1);
  }
}

template <class Engine, int kOwners, bool kBounded, bool kGatesF32>
__global__ void __launch_bounds__(Pool<kOwners, kBounded, kGatesF32>::kThreads, 1)
    pool_kernel(const __grid_constant__ PoolArgs x, const __grid_constant__ TensorMaps maps) {
  using L = Pool<kOwners, kBounded, kGatesF32>;
  using Box = typename L::Box;
  extern __shared__ __align__(1024) uint8_t shared[];
  const PrefillArgs& a = x.a;
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = int(uniform(thread >> 5));
  const int owners = x.tasks * kOwners;

  if (thread == 0)
    for (int g = 0; g < L::kInstances; ++g) barrier_init(base + L::kRaw + 8 * g, 1);
  if (int(blockIdx.x) >= owners) {
    fence_async_shared();
    __syncthreads();
    help<L>(x, maps, base, int(blockIdx.x) - owners, warp, lane);
    return;
  }

  const int rank = int(blockIdx.x) % kOwners;
  const Task task = pool_task(a, int(blockIdx.x) / kOwners);
  const int64_t gate_head = (a.gate_rows > 1 ? task.row : 0) * a.HV + task.head;
  if (L::kOwnGroups && thread == 0) {
    const GateConstants gate = gate_constants(a.gate, a.a_log ? a.a_log[gate_head] : 0.f, a.lower_bound);
    store_shared2(base + L::kGate, gate.slope, gate.height);
  }
  if (thread < kHeadDim) {
    const GateConstants gate = gate_constants(a.gate, a.a_log ? a.a_log[gate_head] : 0.f, a.lower_bound);
    store_shared(base + L::kBias + thread * 4, (a.dt_bias ? a.dt_bias[gate_head * kHeadDim + thread] : 0.f) * gate.slope);
    store_shared(base + L::kOnes + thread * 4, 1.f);
  }
  if (thread == 0) {
    put_rows(base + L::kRows, a, task);
    for (int s = 0; s < L::kStages; ++s) barrier_init(base + L::kFull + 8 * s, 1);
    for (int s = 0; s < L::kFreeBarriers; ++s) barrier_init(base + L::kFree + 8 * s, L::kConsumerWarps + (L::kOwnGroups ? 0 : 1));
  }
  if (a.checkpoint_every && warp == 0) put_checkpoints(base + L::kCheckpoints, a, task, 0, (task.tokens + kChunk - 1) / kChunk, lane);
  fence_async_shared();
  __syncthreads();

  if (warp < L::kConsumerWarps) {
    if constexpr (L::kConsumerRegisters > L::kShare) take_registers<L::kConsumerRegisters>();
    own<Engine, L>(a, task, base, rank, warp, lane);
    return;
  }
  if constexpr (L::kOtherRegisters < L::kShare) give_registers<L::kOtherRegisters>();
  constexpr int kOthers = L::kThreads - L::kConsumerWarps * 32;
  const int index = rank * kOthers + thread - L::kConsumerWarps * 32;
  zero_outside(a, task, index, kOwners * kOthers);
  if (a.checkpoint_every) zero_checkpoints(a, task.row, task.head, int(task.sequence - task.row * a.N), int(a.N), index, kOwners * kOthers);
  if constexpr (L::kOwnGroups) {
    prepare_own<L>(x, maps, task, base, warp, lane);
  } else {
    const int chunks = (get_tokens(base + L::kRows) + kChunk - 1) / kChunk;
    const PoolRing<Box> ring(x, int(blockIdx.x) / kOwners);
    if (warp == L::kConsumerWarps) fetch<L, Box>(ring, base, chunks, lane);
    else if (warp == L::kConsumerWarps + 1 && lane == 0) acknowledge<L, Box>(ring, base, chunks, rank);
  }
}

// Chunks that an owner prepares of every 64: what it can beside its recurrence, where the helpers do the others in the same time.
uint32_t owners_share(int64_t tasks, int64_t helpers) {
  constexpr double kOwnChunk = 5000., kHelpedChunk = 2800.;  // cycles, of a CTA
  constexpr double kLeast = 24.;                             // see free_barrier: two of a kind in every 2 kStages chunks
  const double own = 1. / kOwnChunk, helped = double(helpers) / double(tasks) / kHelpedChunk;
  return uint32_t(std::clamp(std::round(Shares::kPeriod * own / (own + helped)), kLeast, double(Shares::kPeriod - 1)));
}

template <class Box> int64_t pool_workspace(const PrefillArgs& a) {
  return a.B * a.N * a.HV * int64_t(Box::kSlots) * (kSlotBytes + kFlagStride * 4) + kSlotBytes;
}

template <int kOwners, bool kBounded, bool kGatesF32> cudaError_t launch_pool(const PrefillArgs& a, cudaStream_t stream) {
  using L = Pool<kOwners, kBounded, kGatesF32>;
  int device = 0, sms = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device); e != cudaSuccess) return e;
  const int64_t tasks = a.B * a.N * a.HV, helpers = sms - tasks * kOwners;
  if (helpers < 1 || tasks > L::kMostTasks || a.T > int64_t(Shares::kMostChunks) * kChunk) return baseline_m128(a, stream);
  const int64_t workers = helpers * L::kInstances;
  const Shares shares(L::kOwnGroups ? owners_share(tasks, helpers) : 0);
  PoolArgs x{a, int(tasks), int(helpers), int(workers % tasks), int(workers / tasks), int(a.gate_rows * a.HV), shares, nullptr, nullptr};
  const uint64_t first = (reinterpret_cast<uint64_t>(a.workspace) + kSlotBytes - 1) / kSlotBytes * kSlotBytes;
  const int64_t slots = tasks * int64_t(L::Box::kSlots);
  x.packets = reinterpret_cast<char*>(first), x.flags = reinterpret_cast<uint32_t*>(x.packets + slots * kSlotBytes);
  if (cudaError_t e = cudaMemsetAsync(x.flags, 0, size_t(slots) * kFlagStride * 4, stream); e != cudaSuccess) return e;
  const cudaError_t e = launch_resident<pool_kernel<DefaultEngine, kOwners, kBounded, kGatesF32>>(sms, L::kThreads, L::kBytes, stream, x, make_tensor_maps(a));
  if (e != cudaErrorCooperativeLaunchTooLarge) return e;
  cudaGetLastError();
  return baseline_m128(a, stream);
}

template <int kOwners> cudaError_t select_pool(const PrefillArgs& a, cudaStream_t stream) {
  // The bounded scheme's exponents fit for at most 5 nats a token.
  const bool bounded = a.gate == GateMode::kSafe && a.lower_bound >= -5.f, f32 = a.g_dtype == DType::kF32;
  if (bounded) return f32 ? launch_pool<kOwners, true, true>(a, stream) : launch_pool<kOwners, true, false>(a, stream);
  return f32 ? launch_pool<kOwners, false, true>(a, stream) : launch_pool<kOwners, false, false>(a, stream);
}

}  // namespace

cudaError_t pool_m128(const PrefillArgs& a, cudaStream_t stream) { return select_pool<1>(a, stream); }
cudaError_t pool_m64(const PrefillArgs& a, cudaStream_t stream) { return select_pool<2>(a, stream); }
int64_t pool_m128_workspace(const PrefillArgs& a) { return pool_workspace<Pool<1, true, false>::Box>(a); }
int64_t pool_m64_workspace(const PrefillArgs& a) { return pool_workspace<Pool<2, true, false>::Box>(a); }

}  // namespace jax_kda
