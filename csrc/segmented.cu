// The segmented route: every sequence is cut into segments of whole chunks, and all SMs work on all segments at once. Exact, whatever the gates.
//
//   1. packets   K1, on all SMs. Packets to the workspace
//   2. maps      K2's chain over each segment, from the zero state (Q) and from the identity with values of zero (P): the state behind the segment is
//                P S + Q. The first segment of a sequence knows its S, so its Q is already that state; the last needs no map
//   3. states    the maps folded along each sequence, 16 value rows a CTA. Of many segments first the maps of each group of segments, which gives maps
//                from the group's begin to the end of each; then the states along the groups. Of few, this is left to step 4
//   4. outputs   K2 over each segment from the state that step 3 (or the call) says it starts from; within a group, that state is one map away
//
// Kernels of a row: each may move in where the one before leaves room (kernel_row.cuh). Steps 2 and 3 fall away where no sequence can be long enough
// to need them. No CTA waits for another one.
#include "kernels/chain.cuh"
#include "kernels/checkpoints.cuh"
#include "kernels/kernel_row.cuh"
#include "kernels/maps.cuh"
#include "kernels/prepare_bounded.cuh"
#include "kernels/prepare_unbounded.cuh"
#include "kernels/recurrence.cuh"
#include "kernels/segment_plan.cuh"
#include "kernels/segments.cuh"
#include "kernels/task.cuh"
#include "kernels/tensor_maps.cuh"
#include "launch.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace jax_kda {
namespace {

// ================================================================ 1. packets

// Groups of K1, each of which prepares one chunk after the other; a CTA has as many as the call has chunks for, at most kGroups.
template <bool kBounded, bool kGatesF32> struct PacketsLayout {
  using Prepare = std::conditional_t<kBounded, PrepareBounded<kGatesF32, GlobalPacket>, PrepareUnbounded<kGatesF32, GlobalPacket>>;
  // What registers and shared memory allow.
  static constexpr int kGroups = kBounded ? 5 : 4, kGroupThreads = Prepare::kWarps * 32, kThreads = kGroups * kGroupThreads;
  // Behind the groups' memory:
  static constexpr uint32_t kBias = 0, kGate = kBias + kHeadDim * 4, kRaw = kGate + 8, kStarted = kRaw + 8 * kGroups;
  static constexpr uint32_t bytes(int groups) { return groups * Prepare::kBytes + kStarted + 8 * kGroups; }
  // Groups that fetch their first rows at once. The others wait for these groups' rows, which so arrive earlier; and groups that are not in step
  // with each other share the SM better, to the end: 41 us become 35 where each has three or four chunks.
  static constexpr int kAtOnce = 2;
  static_assert(bytes(kGroups) <= 232448, "more shared memory than a CTA can have");
  static_assert(3 * kGroups <= 15, "more groups than named barriers");
};

struct PlannedChunk {
  Rows rows;
  int tokens;       // of the sequence; none where there is no more chunk
  int chunk, slot;  // in the sequence, in the batch row
  int index;        // in the order below
};

template <bool kBounded, bool kGatesF32>
__global__ void __launch_bounds__(PacketsLayout<kBounded, kGatesF32>::kThreads, 1)
    packets_kernel(const __grid_constant__ SegmentedArgs x, const __grid_constant__ TensorMaps maps) {
  using L = PacketsLayout<kBounded, kGatesF32>;
  using Prepare = typename L::Prepare;
  extern __shared__ __align__(1024) uint8_t shared[];
  const PrefillArgs& a = x.a;
  const int thread = threadIdx.x, lane = thread & 31, groups = blockDim.x / L::kGroupThreads;
  const int warp = __shfl_sync(0xffffffffu, thread >> 5, 0), group = warp / Prepare::kWarps, member = warp % Prepare::kWarps;
  const uint32_t memory = shared_address(shared) + group * Prepare::kBytes, common = shared_address(shared) + groups * Prepare::kBytes;
  const uint32_t raw = common + L::kRaw + 8 * group, started = common + L::kStarted + 8 * group;
  allow_next_kernel();

  const int task = int(blockIdx.x) / x.packet_parts, part = int(blockIdx.x) % x.packet_parts;
  const int head = task % int(a.HV), key_head = head / int(a.HV / a.H);
  const int64_t row = task / int(a.HV);
  const uint32_t in_segment = uint32_t(x.segment) / kChunk;

  // The group's next chunk from `index` on. Of every segment the last chunk comes first: the first ones, which steps 2 and 4 begin with, are then the
  // likelier to be still in the L2 cache. The last segment may have fewer chunks: it joins when the others have as many left. Called by whole warps.
  const uint32_t whole_segments = uint32_t(x.chunk_slots) / in_segment, rest = uint32_t(x.chunk_slots) % in_segment;
  const uint32_t without_last = whole_segments * (in_segment - rest);
  auto find = [&](int index) {
    PlannedChunk p{};
    p.rows.head = head, p.rows.key_head = key_head;
    for (p.index = index; p.index < x.chunk_slots; p.index += groups * x.packet_parts) {
      const bool joined = uint32_t(p.index) >= without_last;
      const uint32_t i = uint32_t(p.index) - (joined ? without_last : 0), segments = whole_segments + joined;
      p.slot = int(i % segments * in_segment + (joined ? rest : in_segment) - 1 - i / segments);
      if (!a.offsets) {
        p.rows.first_token = row * a.T, p.chunk = p.slot, p.tokens = int(a.T);
        break;
      }
      const Unit u = find_unit(a, row, p.slot, head, kChunk, lane);
      if (!u.there || u.task.tokens == 0) continue;
      p.rows.first_token = row * a.T + u.task.begin, p.chunk = p.slot - u.first, p.tokens = u.task.tokens;
      break;
    }
    return p;
  };
  auto whole = [&](const PlannedChunk& p) { return maps.usable && (p.chunk + 1) * kChunk <= p.tokens; };
  auto copy = [&](const PlannedChunk& p) {  // by one warp
    if (whole(p) && lane == 0) copy_rows<Prepare>(maps, p.rows, memory, p.chunk, raw);
  };
  auto fetch_beta = [&](const PlannedChunk& p) {
    const int token = p.chunk * kChunk + lane;
    return token < p.tokens ? load_raw_beta(a, p.rows, token) : 0u;
  };
  PlannedChunk now = find(group * x.packet_parts + part);
  if (member == 0) {
    if (lane == 0) barrier_init(raw, 1), barrier_init(started, 1);
    fence_async_shared();
    sync_warp();
    if (group < L::kAtOnce) copy(now);
  }
  uint32_t raw_beta = fetch_beta(now);
  const int64_t gate_head = (a.gate_rows > 1 ? row : 0) * a.HV + head;
  const GateConstants gate = gate_constants(a.gate, a.a_log ? a.a_log[gate_head] : 0.f, a.lower_bound);
  for (int i = thread; i < kHeadDim; i += blockDim.x)
    store_shared(common + L::kBias + i * 4, (a.dt_bias ? a.dt_bias[gate_head * kHeadDim + i] : 0.f) * gate.slope);
  if (thread == 0) store_shared2(common + L::kGate, gate.slope, gate.height);
  if (a.offsets) {
    const int last = int(a.N) - 1, threads = x.packet_parts * int(blockDim.x), first = part * int(blockDim.x) + thread;
    zero_rows(a, row, head, 0, begin_of(a, row, 0), first, threads);
    zero_rows(a, row, head, begin_of(a, row, last) + sequence_length(a.offsets + row * (a.N + 1), last, int(a.T)), int(a.T), first, threads);
    if (a.checkpoint_every) zero_checkpoints(a, row, head, part, x.packet_parts, thread, int(blockDim.x));
  }
  __syncthreads();
  if (member == 0 && group >= L::kAtOnce) {
    barrier_wait(started - 8 * L::kAtOnce, 0);
    copy(now);
  }

  const PrepareContext context = {a.gate, common + L::kGate, a.scale, a.l2norm, common + L::kBias,
                                  memory, 1 + group, 1 + L::kGroups + group, 1 + 2 * L::kGroups + group, member, lane};
  char* const packets = x.packets + task * int64_t(x.chunk_slots) * kSlotBytes;
  int brought = 0;  // by the copy engine
  if (now.tokens == 0 && member == 0 && lane == 0) barrier_arrive(started);
#pragma unroll 1
  for (int turn = 0; now.tokens > 0; ++turn) {
    const float beta = now.chunk * kChunk + lane < now.tokens ? write_strength(beta_value(raw_beta, a.beta_dtype), a.beta_mode) : 0.f;
    if (whole(now)) {
      barrier_wait(raw, brought++ & 1);
    } else {
      sync_group(context.barrier, L::kGroupThreads);  // nobody reads the previous rows any more
      load_rows<Prepare>(a, now.rows, memory, now.chunk, now.tokens, member * 32 + lane);
      copies_wait_all();
      sync_group(context.barrier, L::kGroupThreads);
    }
    if (turn == 0 && member == 0 && lane == 0) barrier_arrive(started);
    Prepare::run(
        context, beta, turn, [&] { return GlobalPacket(packets + now.slot * kSlotBytes); },
        [&] { copy(find(now.index + groups * x.packet_parts)); }, [] {});
    now = find(now.index + groups * x.packet_parts);
    raw_beta = fetch_beta(now);
  }
}

// ================================================================ 2. and 4., which read packets

// Of a kernel whose CTAs hold 64 kRowGroups state rows in as many warpgroups; the warp behind them loads packets, and each of theirs its values.
template <int kRowGroups, bool kOutputs> struct ReaderLayout {
  static constexpr int kWarps = kRowGroups * 4, kThreads = kWarps * 32 + 32;
  static constexpr int kParts = 2 / kRowGroups;  // CTAs for all value rows
  // As many as a CTA of 128 rows has room for. One of 64 rows in step 2 has fewer, and so finds room beside two groups of step 1.
  static constexpr int kStages = kRowGroups == 1 && !kOutputs ? 5 : 6;
  [[maybe_unused]] static constexpr bool kRoomy = kRowGroups == 1;
  [[maybe_unused]] static constexpr bool kShortOfStages = false;
  static constexpr uint32_t kStageBytes = stage::kBytes;
  static constexpr uint32_t kValues = kStages * kStageBytes;
  static constexpr uint32_t kOnes = kValues + (kOutputs ? kWarps * kStages * 1024 : 0);
  static constexpr uint32_t kUnit = kOnes + kHeadDim * 4;
  static constexpr uint32_t kState = kUnit + (kOutputs ? 0 : kUnitBytes);  // address of the final state, or null
  static constexpr uint32_t kCheckpoints = kState + 16;
  static constexpr uint32_t kFull = kCheckpoints + (kOutputs ? kCheckpointTable : 0);
  static constexpr uint32_t kEmpty = kFull + kStages * 8;
  // Packets that are fetched at once. What is needed first does not queue behind what is needed last, of all CTAs.
  static constexpr int kEarly = kOutputs ? 2 : 4;
  // Where the later stages will be, a ring of the maps that the CTA's first state is yet to be taken through; and its barriers.
  static constexpr int kMaps = 3;
  [[maybe_unused]] static constexpr uint32_t kMap = kEarly * kStageBytes;
  static_assert(!kOutputs || kMaps * kMapBytes <= (kStages - kEarly) * kStageBytes);
  static constexpr uint32_t kMapThere = kEmpty + kStages * 8, kMapUsed = kMapThere + kMaps * 8;
  static constexpr uint32_t kBytes = kMapUsed + kMaps * 8;
  static_assert(kBytes <= 232448, "more shared memory than a CTA can have");
  static KDA_DEVICE void seen(uint32_t, uint32_t, uint32_t) {}
  static KDA_DEVICE void release(uint32_t shared, uint32_t slot, uint32_t /*round*/) { barrier_arrive(shared + kEmpty + 8 * slot); }
};

KDA_DEVICE void put_state_at(uint32_t where, char* state) {
  const auto x = reinterpret_cast<uint64_t>(state);
  store_shared2(where, from_bits(uint32_t(x)), from_bits(uint32_t(x >> 32)));
}
KDA_DEVICE char* get_state_at(uint32_t where) {
  const float2 x = load_shared2(where);
  return reinterpret_cast<char*>(uint64_t(bits(x.y)) << 32 | bits(x.x));
}

template <class L> KDA_DEVICE void start_reader(uint32_t base, int thread) {
  for (int i = thread; i < kHeadDim; i += L::kThreads) store_shared(base + L::kOnes + i * 4, 1.f);
  for (int i = thread; i < int(L::kState - L::kUnit) / 4; i += L::kThreads) store_shared(base + L::kUnit + i * 4, i == kHeadDim ? 1.f : 0.f);
  if (thread == 0) {
    for (int s = 0; s < L::kStages; ++s) barrier_init(base + L::kFull + 8 * s, 1), barrier_init(base + L::kEmpty + 8 * s, L::kWarps);
    for (int m = 0; m < L::kMaps; ++m) barrier_init(base + L::kMapThere + 8 * m, 1), barrier_init(base + L::kMapUsed + 8 * m, L::kWarps);
  }
  fence_async_shared();
  __syncthreads();
}

// Inputs do not wait for earlier kernels: the values of the first chunks come to the L2 cache meanwhile. The loading warp.
template <int kRowGroups> KDA_DEVICE void prefetch_values(const PrefillArgs& a, const Task& task, int group_row, int first_chunk, int chunks, int lane) {
  constexpr int kMost = 8;
  const int token = first_chunk * kChunk + lane;
  const char* from = static_cast<const char*>(a.v) + (first_row(a, task, a.HV, task.head, kHeadDim) + token * a.HV * kHeadDim + group_row) * 2;
  for (int i = 0; i < chunks && i < kMost && token + i * kChunk < task.tokens; ++i)
    for (int p = 0; p < kRowGroups; ++p) prefetch_global(from + i * kChunk * a.HV * (kHeadDim * 2) + p * 128);
}

// The loading warp's first lane: the packets of chunks [first_chunk, first_chunk + chunks) of the task; between() behind the first of them.
template <class L, bool kWholePackets, class Between>
KDA_DEVICE void read_packets(const SegmentedArgs& x, const Task& task, int first_chunk, int chunks, uint32_t base, Between between) {
  const char* packet = packet_at(x, task, first_slot(task, x.a.N, kChunk) + first_chunk);
  constexpr uint32_t kBytes = kWholePackets ? stage::kPacketBytes : 4 * kPanel + (stage::kM - stage::kA) + (stage::kPacketBytes - stage::kDecay);
  uint32_t slot = 0, parity = 1;
#pragma unroll 1
  for (int i = 0; i < chunks; ++i, packet += kSlotBytes) {
    const uint32_t stage = base + slot * L::kStageBytes, full = base + L::kFull + 8 * slot;
    if (i == L::kEarly) {
      between();
      barrier_wait(base + L::kFull, 0);
    }
    if (i >= L::kStages) barrier_wait(base + L::kEmpty + 8 * slot, parity);
    barrier_expect(full, kBytes);
    if constexpr (kWholePackets) {
      copy_bulk(stage, packet, stage::kPacketBytes, full);
    } else {  // neither Qd nor M
      static_assert(stage::kKey + kPanel == stage::kKr && stage::kKr + kPanel == stage::kPanelStride && stage::kA == 2 * stage::kPanelStride);
      copy_bulk(stage + stage::kKey, packet + stage::kKey, 2 * kPanel, full);
      constexpr uint32_t kSecond = stage::kPanelStride + stage::kKey;
      copy_bulk(stage + kSecond, packet + kSecond, stage::kM - kSecond, full);
      copy_bulk(stage + stage::kDecay, packet + stage::kDecay, stage::kPacketBytes - stage::kDecay, full);
    }
    if (++slot == L::kStages) slot = 0, parity ^= 1;
  }
  if (chunks <= L::kEarly) between();
}

// Which maps lie between a segment's first state and a state that is known, behind segment `known`: those of `count` segments from `first` on.
struct MapsBefore {
  int known, first, count;
  bool prefix;  // not of a segment, but from a group's begin
};
KDA_DEVICE MapsBefore maps_before(const SegmentedArgs& x, int segment) {
  if (!x.folded) return {0, 1, segment > 1 ? segment - 1 : 0, false};
  const int in_group = x.group > 0 && segment > x.group ? segment % x.group : 0;
  return {segment - 1 - in_group, segment - 1, in_group > 0, in_group > 1};
}

// The loading warp's first lane: those maps.
template <class L> KDA_DEVICE void read_maps(const SegmentedArgs& x, const Task& task, const MapsBefore& m, int first_slot, uint32_t base) {
  auto used = [&](int i) { barrier_wait(base + L::kMapUsed + 8 * (uint32_t(i) % L::kMaps), (uint32_t(i) / L::kMaps) & 1); };
#pragma unroll 1
  for (int i = 0; i < m.count; ++i) {
    const uint32_t slot = uint32_t(i) % L::kMaps, there = base + L::kMapThere + 8 * slot;
    if (i >= L::kMaps) used(i - L::kMaps);
    barrier_expect(there, kMapBytes);
    copy_bulk(base + L::kMap + slot * kMapBytes, m.prefix ? prefix_at(x, task, first_slot + m.first + i) : map_at(x, task, first_slot + m.first + i),
              kMapBytes, there);
  }
  for (int i = m.count > L::kMaps ? m.count - L::kMaps : 0; i < m.count; ++i) used(i);
}

KDA_DEVICE const char* stored_state(const void* states, DType dtype, const PrefillArgs& a, const Task& k) {
  return states ? static_cast<const char*>(states) + (k.sequence * a.HV + k.head) * int64_t(kHeadDim * kHeadDim * (dtype == DType::kF32 ? 4 : 2))
                : nullptr;
}

template <class Engine, int kRowGroups>
__global__ void __launch_bounds__(ReaderLayout<kRowGroups, false>::kThreads, 1)
    maps_kernel(const __grid_constant__ SegmentedArgs x) {
  using L = ReaderLayout<kRowGroups, false>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const PrefillArgs& a = x.a;
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = __shfl_sync(0xffffffffu, thread >> 5, 0);

  const uint32_t part = blockIdx.x % (2 * L::kParts), unit = blockIdx.x / (2 * L::kParts);
  const uint32_t head = unit % uint32_t(a.HV), row = unit / uint32_t(a.HV) / uint32_t(x.map_slots);
  const Unit u = find_unit(a, row, int(unit / uint32_t(a.HV) % uint32_t(x.map_slots)), int(head), x.segment, lane);
  const bool of_zero = part < L::kParts;  // Q, not P
  const int chunks = x.segment / kChunk;
  const int segment = u.slot - u.first, group_row = int(part % L::kParts) * 64;
  const bool needed = u.there && (segment + 1) * x.segment < u.task.tokens && (of_zero || segment > 0);
  if (needed) {
    if (of_zero && warp == L::kWarps) prefetch_values<kRowGroups>(a, u.task, group_row, segment * chunks, chunks, lane);
    start_reader<L>(base, thread);
  }
  if (!needed || warp == L::kWarps) {
    wait_for_previous_kernels();
    allow_next_kernel();
    if (needed && lane == 0) read_packets<L, false>(x, u.task, segment * chunks, chunks, base, [] {});
    return;
  }
  State st;  // from the call's inputs: only the packets wait for step 1
  if (of_zero)
    load_state(st, segment == 0 ? stored_state(a.initial_state, a.state_in_dtype, a, u.task) : nullptr, a.state_in_dtype, a.state_v_first,
               group_row + warp * 16, lane);
  else unit_state(st, base + L::kUnit, group_row + warp * 16, lane);
  const auto* v = static_cast<const uint16_t*>(a.v) + first_row(a, u.task, a.HV, u.task.head, kHeadDim) +
                  int64_t(segment) * x.segment * a.HV * kHeadDim + group_row + warp * 16;
  chain<Engine, L>({base, warp, lane, v, int(a.HV) * kHeadDim, chunks, of_zero}, st);
  wait_for_previous_kernels();  // long done; but so step 1 has ended when this kernel ends
  if (of_zero) store_slice(st, state_at(x, u.task, u.slot) + (group_row / 16 + warp) * kSliceBytes, lane);
  else store_map(st, map_at(x, u.task, u.slot), group_row + warp * 16, lane);
}

template <class Engine, int kRowGroups>
__global__ void __launch_bounds__(ReaderLayout<kRowGroups, true>::kThreads, 1)
    outputs_kernel(const __grid_constant__ SegmentedArgs x) {
  using L = ReaderLayout<kRowGroups, true>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const PrefillArgs& a = x.a;
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = __shfl_sync(0xffffffffu, thread >> 5, 0);

  const uint32_t part = blockIdx.x % L::kParts, unit = blockIdx.x / L::kParts;
  const uint32_t head = unit % uint32_t(a.HV), row = unit / uint32_t(a.HV) / uint32_t(x.segment_slots);
  const Unit u = find_unit(a, row, int(unit / uint32_t(a.HV) % uint32_t(x.segment_slots)), int(head), x.segment, lane);
  const int segment = u.slot - u.first, group_row = int(part) * 64;
  const char* from = stored_state(a.initial_state, a.state_in_dtype, a, u.task);
  char* to = const_cast<char*>(stored_state(a.final_state, a.state_out_dtype, a, u.task));
  const int first = segment * x.segment, left = u.task.tokens - first, tokens = left < x.segment ? left : x.segment;
  const int chunks = (tokens + kChunk - 1) / kChunk;
  if (u.there) {
    if (warp == L::kWarps) prefetch_values<kRowGroups>(a, u.task, group_row, first / kChunk, chunks, lane);
    if (thread == 0) put_state_at(base + L::kState, left <= x.segment ? to : nullptr);
    if (a.checkpoint_every && warp == 0) put_checkpoints(base + L::kCheckpoints, a, u.task, first / kChunk, chunks, lane);
    start_reader<L>(base, thread);
  }
  if (u.there && u.task.tokens > 0 && warp == L::kWarps) {
    // The packets are there before the states are: no CTA of this kernel starts before one of steps 2 or 3 has seen the end of step 1 (they let it
    // start behind their own wait), and what a kernel wrote has reached global memory when it ends.
    if (x.cut) fence_async_global();
    else wait_for_previous_kernels();
    if (lane == 0)
      read_packets<L, true>(x, u.task, first / kChunk, chunks, base, [&] {
        wait_for_previous_kernels();
        fence_async_global();
        read_maps<L>(x, u.task, maps_before(x, segment), u.first, base);
      });
    wait_for_previous_kernels();
    return;
  }
  if (!u.there || u.task.tokens == 0) {
    wait_for_previous_kernels();
    if (u.there && to && part == 0) copy_state(from, a.state_in_dtype, to, a.state_out_dtype, thread, L::kThreads);
    return;
  }
  // Formed anew behind the loop, which is short of registers.
  auto value_row = [&] { return (int(opaque(part)) * L::kWarps + int(opaque(threadIdx.x)) / 32) * 16; };
  auto* o = static_cast<uint16_t*>(a.o) + first_row(a, u.task, a.HV, u.task.head, kHeadDim) + first * a.HV * kHeadDim + value_row();
  const RecurrenceContext context = {base, warp, lane, o, a, tokens};
  State st;
  recur<Engine, L>(context, st, Checkpoints{a, base + L::kCheckpoints, value_row}, [&] {
    wait_for_previous_kernels();
    if (segment == 0) load_state(st, from, a.state_in_dtype, a.state_v_first, value_row(), lane);
    else {
      const MapsBefore m = maps_before(x, segment);
      auto slice = [&](int of_segment) { return state_at(x, u.task, u.first + of_segment) + value_row() / 16 * kSliceBytes; };
      load_slice(st, slice(m.known), lane);
      State q;
      if (L::kRoomy && m.count > 0) load_slice(q, slice(m.first), lane);
#pragma unroll 1
      for (int i = 0; i < m.count; ++i) {
        const uint32_t slot = uint32_t(i) % L::kMaps, map = base + L::kMap + slot * kMapBytes;
        barrier_wait(base + L::kMapThere + 8 * slot, (uint32_t(i) / L::kMaps) & 1);
        if constexpr (L::kRoomy)
          apply_map(st, map, lane, [&](int n) -> float4 { return {q[4 * n], q[4 * n + 1], q[4 * n + 2], q[4 * n + 3]}; }, [&] {
            if (i + 1 < m.count) load_slice(q, slice(m.first + i + 1), lane);
          });
        else apply_map(st, map, lane, [&, from = slice(m.first + i)](int n) { return load_tile(from, n, lane); }, [] {});
        sync_warp();
        if (lane == 0) barrier_arrive(base + L::kMapUsed + 8 * slot);
      }
    }
  });
  if (const auto final_state = get_state_at(base + L::kState))
    store_state(st, final_state, a.state_out_dtype, a.state_v_first, value_row(), int(opaque(threadIdx.x)) & 31);
}

// ================================================================ 3. states

// A CTA's fold, `steps` of them; all threads.
template <class Fold> KDA_DEVICE void start_fold(uint32_t base, int steps, int thread, Fold fold) {
  using L = FoldLayout;
  if (steps > 0) {
    if (thread == 0)
      for (int s = 0; s < L::kStages; ++s) barrier_init(base + L::kFull + 8 * s, 1);
    fence_async_shared();
    __syncthreads();
  }
  wait_for_previous_kernels();
  allow_next_kernel();
  if (steps > 0) fold();
}

constexpr uint32_t kSlices = kHeadDim / 16;

// Within groups. Of the first one no map is needed: the state that it starts from is in its states already.
__global__ void __launch_bounds__(FoldLayout::kThreads, 1) groups_kernel(const __grid_constant__ SegmentedArgs x) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = __shfl_sync(0xffffffffu, thread >> 5, 0);
  const uint32_t part = blockIdx.x % (2 * kSlices), unit = blockIdx.x / (2 * kSlices);
  const uint32_t head = unit % uint32_t(x.a.HV), row = unit / uint32_t(x.a.HV) / uint32_t(x.group_slots);
  const Unit u = find_unit(x.a, row, int(unit / uint32_t(x.a.HV) % uint32_t(x.group_slots)), int(head), x.group * x.segment, lane);
  const bool of_maps = part >= kSlices;
  const int group = u.slot - u.first, first = group * x.group, slice = int(part % kSlices);
  const int with_maps = (u.task.tokens + x.segment - 1) / x.segment - 1 - first, segments = with_maps < x.group ? with_maps : x.group;
  start_fold(base, u.there && (group > 0 || !of_maps) ? segments - 1 : 0, thread, [&] {
    const int slot = first_slot(u.task, x.a.N, x.segment) + first;
    if (of_maps) fold<true>(map_at(x, u.task, slot), prefix_at(x, u.task, slot), 1, slice, segments - 1, base, warp, lane);
    else fold<false>(map_at(x, u.task, slot), state_at(x, u.task, slot), 1, slice, segments - 1, base, warp, lane);
  });
}

// Along a sequence: from segment to segment, or from group to group.
__global__ void __launch_bounds__(FoldLayout::kThreads, 1) states_kernel(const __grid_constant__ SegmentedArgs x) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = __shfl_sync(0xffffffffu, thread >> 5, 0);
  const uint32_t slice = blockIdx.x % kSlices, head = blockIdx.x / kSlices % uint32_t(x.a.HV);
  const int64_t sequence = blockIdx.x / kSlices / uint32_t(x.a.HV), row = sequence / x.a.N;
  const Task task = task_of(x.a, row, int(sequence - row * x.a.N), int(head));
  const int stride = x.group > 0 ? x.group : 1;
  // The state behind the first segment or group is there, that behind the last not needed.
  const int steps = ((task.tokens + x.segment - 1) / x.segment - 1) / stride - 1;
  start_fold(base, steps, thread, [&] {
    const int slot = first_slot(task, x.a.N, x.segment) + stride - 1;
    fold<false>(x.group > 0 ? prefix_at(x, task, slot) : map_at(x, task, slot), state_at(x, task, slot), stride, int(slice), steps, base, warp, lane);
  });
}

// ================================================================ launches

constexpr double kPacketsFill = 6000., kPacketsChunk = 2600.;  // cycles of a CTA of step 1, and of each of its chunks

int sm_count() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 132;
  return std::max(count, 1);
}

SegmentedArgs plan(const PrefillArgs& a, int64_t* bytes) {
  const int chunks = a.segment_chunks > 0 ? a.segment_chunks : segment_chunks(a.B, a.T, a.N, a.HV, sm_count());
  SegmentedArgs x{};
  x.a = a;
  x.segment = int(std::min<int64_t>(chunks, (INT32_MAX - 64) / kChunk / 2)) * kChunk;
  // With offsets any sequence may be the one that begins a unit late.
  auto slots = [&](int64_t size) { return int(std::min<int64_t>(a.offsets ? a.T / size + a.N : std::max<int64_t>((a.T + size - 1) / size, 1), INT32_MAX)); };
  x.chunk_slots = slots(kChunk), x.segment_slots = slots(x.segment);
  x.map_slots = x.segment_slots - (a.offsets ? 0 : 1);
  const int64_t heads = a.B * a.HV, length = x.segment / kChunk;
  x.cut = a.T > x.segment;
  const FoldPlan fold = plan_fold(heads * a.N, (longest_chunks(a.T, a.N) + length - 1) / length, a.N > 1, sm_count());
  x.folded = fold.folded;
  if (fold.group * x.segment < a.T) x.group = int(fold.group), x.group_slots = fold.group > 0 ? slots(fold.group * x.segment) : 0;
  const int64_t packets = heads * x.chunk_slots * kSlotBytes, of_maps = x.cut ? heads * x.segment_slots * kMapBytes : 0;
  x.packets = reinterpret_cast<char*>((reinterpret_cast<uint64_t>(a.workspace) + kSlotBytes - 1) / kSlotBytes * kSlotBytes);
  if (a.workspace) x.maps = x.packets + packets, x.prefixes = x.maps + of_maps, x.states = x.prefixes + of_maps;
  *bytes = kSlotBytes + packets + 2 * of_maps + (x.cut ? heads * x.segment_slots * kStateBytes : 0);
  return x;
}

template <class Engine, bool kBounded, bool kGatesF32> cudaError_t launch_segmented(const PrefillArgs& a, cudaStream_t stream) {
  int64_t bytes;
  SegmentedArgs x = plan(a, &bytes);
  using P = PacketsLayout<kBounded, kGatesF32>;
  const int64_t tasks = a.B * a.HV, sms = sm_count();
  // Parts of a task: so many that the SMs get through all CTAs the soonest.
  double least = INFINITY;
  for (int64_t parts = 1; parts <= x.chunk_slots && parts <= 2 * sms; ++parts) {
    const int64_t rounds = (tasks * parts + sms - 1) / sms;
    const double cycles = double(rounds) * (kPacketsFill + kPacketsChunk * double((x.chunk_slots + parts - 1) / parts));
    if (cycles < least) least = cycles, x.packet_parts = int(parts);
  }
  const int groups = int(std::min<int64_t>((x.chunk_slots + x.packet_parts - 1) / x.packet_parts, P::kGroups));
  constexpr auto packets = packets_kernel<kBounded, kGatesF32>;
  if (cudaError_t e = allow_shared_memory<packets>(P::bytes(P::kGroups)); e != cudaSuccess) return e;
  KernelRow row(stream);
  const TensorMaps tensor_maps = make_tensor_maps(a);
  if (cudaError_t e = row.add<packets>(tasks * x.packet_parts, groups * P::kGroupThreads, P::bytes(groups), x, tensor_maps); e != cudaSuccess) return e;
  // A CTA of 64 rows is the faster one, of 128 the thriftier: it loads a packet once for both halves.
  auto add_reader = [&](auto one, auto two, int64_t ctas) {  // ctas: of 128 rows
    return ctas * 2 <= sms ? one(ctas * 2) : two(ctas);
  };
  const int64_t most = (a.T + x.segment - 1) / x.segment;  // segments that a sequence can have
  if (most > 1) {
    const cudaError_t e = add_reader(
        [&](int64_t blocks) {
          using L = ReaderLayout<1, false>;
          return row.add<maps_kernel<Engine, 1>>(blocks, L::kThreads, L::kBytes, x);
        },
        [&](int64_t blocks) {
          using L = ReaderLayout<2, false>;
          return row.add<maps_kernel<Engine, 2>>(blocks, L::kThreads, L::kBytes, x);
        },
        tasks * x.map_slots * 2);
    if (e != cudaSuccess) return e;
  }
  if (most > 2 && x.folded) {
    using L = FoldLayout;
    const int64_t blocks = a.B * a.N * a.HV * kSlices;
    if (x.group > 0)
      if (cudaError_t e = row.add<groups_kernel>(tasks * x.group_slots * 2 * kSlices, L::kThreads, L::kBytes, x); e != cudaSuccess) return e;
    if (cudaError_t e = row.add<states_kernel>(blocks, L::kThreads, L::kBytes, x); e != cudaSuccess) return e;
  }
  const cudaError_t e = add_reader(
      [&](int64_t blocks) {
        using L = ReaderLayout<1, true>;
        return row.add<outputs_kernel<Engine, 1>>(blocks, L::kThreads, L::kBytes, x);
      },
      [&](int64_t blocks) {
        using L = ReaderLayout<2, true>;
        return row.add<outputs_kernel<Engine, 2>>(blocks, L::kThreads, L::kBytes, x);
      },
      tasks * x.segment_slots);
  return e == cudaSuccess ? row.launch() : e;
}

template <class Engine> cudaError_t select_segmented(const PrefillArgs& a, cudaStream_t stream) {
  // The bounded scheme's exponents fit for at most 5 nats a token.
  const bool bounded = a.gate == GateMode::kSafe && a.lower_bound >= -5.f, f32 = a.g_dtype == DType::kF32;
  if (bounded) return f32 ? launch_segmented<Engine, true, true>(a, stream) : launch_segmented<Engine, true, false>(a, stream);
  return f32 ? launch_segmented<Engine, false, true>(a, stream) : launch_segmented<Engine, false, false>(a, stream);
}

}  // namespace

// The least of a model of steps 2 to 4, in cycles: what a CTA takes a chunk (or a map), times the rounds in which the SMs get through all CTAs, or
// what the memory takes for all of it. Step 1 does not depend on the choice. A grid has slots for whatever the lengths of packed sequences are
// (segments.cuh); those with work are about half a slot a sequence fewer.
int segment_chunks(int64_t B, int64_t T, int64_t N, int64_t HV, int sm_count) {
  constexpr int64_t kMostSegments = 512;
  N = std::max<int64_t>(N, 1);
  const int64_t row = std::max<int64_t>((T + kChunk - 1) / kChunk, 1), longest = longest_chunks(T, N), heads = std::max<int64_t>(B, 1) * HV;
  const double all_chunks = double(heads * row);
  auto reader = [&](int64_t slots, double used, double chunk64, double chunk128, int64_t length) {  // of 128 rows: slots of the grid, those with work
    const double steps = double(std::min(length, longest));
    return 2 * slots <= sm_count ? steps * chunk64 : std::ceil(used / sm_count) * (steps * chunk128 + kKernel) - kKernel;
  };
  auto cycles = [&](int64_t length) {
    const int64_t of_row = (row + length - 1) / length, slots = N == 1 ? of_row : row / length + N;
    const double used = N == 1 ? double(of_row) : std::max(double(row) / double(length) + double(N) / 2, double(N));
    double found = std::max(reader(heads * slots, double(heads) * used, kOutputs64, kOutputs128, length), kOutputsMemory * all_chunks);
    if (of_row > 1) {
      const int64_t mapped = 2 * heads * (N == 1 ? slots - 1 : slots);
      const double with_map = std::max(2 * double(heads) * (used - double(N)), 1.);
      found += kKernel + std::max(reader(mapped, with_map, kMaps64, kMaps128, length), kMapsMemory * all_chunks);
    }
    return found + plan_fold(heads * N, (longest + length - 1) / length, N > 1, sm_count).cycles;
  };
  int64_t best = row;
  double least = cycles(row);
  for (int64_t segments = 1; segments <= std::min(longest, kMostSegments); ++segments) {
    const int64_t length = (longest + segments - 1) / segments;
    if (const double found = cycles(length); found < least) least = found, best = length;
  }
  return int(best);
}

int64_t segmented_workspace_bytes(const PrefillArgs& a) {
  int64_t bytes;
  plan(a, &bytes);
  return bytes;
}

cudaError_t segmented(const PrefillArgs& a, cudaStream_t stream) { return select_segmented<DefaultEngine>(a, stream); }
cudaError_t segmented_warp_engine(const PrefillArgs& a, cudaStream_t stream) { return select_segmented<WarpEngine>(a, stream); }

}  // namespace jax_kda
