// The segmented route: every sequence is cut into segments of whole chunks, and all SMs work on all segments at once. Exact, whatever the gates.
//
//   1. packets   K1: a CTA a chunk; four of them share an SM. Packets to the workspace
//   2. maps      K2's chain over each segment, from the zero state (Q) and from the identity with values of zero (P): the state behind the segment is
//                P S + Q. The first segment of a sequence knows its S, so its Q is already that state; the last needs no map
//   3. states    the maps folded along each sequence, 16 value rows a CTA
//   4. outputs   K2 over each segment from the state that step 3 (or the call) says it starts from
//
// Kernels of a row: each may move in where the one before leaves room (launch_kernel.cuh). Steps 2 and 3 fall away where no sequence can be long enough
// to need them. No CTA waits for another one.
#include "kernels/chain.cuh"
#include "kernels/launch_kernel.cuh"
#include "kernels/maps.cuh"
#include "kernels/prepare_bounded.cuh"
#include "kernels/prepare_unbounded.cuh"
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

template <bool kBounded, bool kGatesF32> struct PacketsLayout {
  using Prepare = std::conditional_t<kBounded, PrepareBounded<kGatesF32>, PrepareUnbounded<kGatesF32>>;
  static constexpr int kThreads = Prepare::kWarps * 32;
  // What registers and shared memory allow (f32 gates need more of the latter).
  static constexpr int kPerSM = kBounded ? (kGatesF32 ? 2 : 4) : (kGatesF32 ? 3 : 6);
  static constexpr uint32_t kScratch = kGatesF32 ? stage::bytes(true) : stage::kValues;  // a stage without values
  static constexpr uint32_t kBias = kScratch + Prepare::kScratchBytes;
  static constexpr uint32_t kBytes = kBias + kHeadDim * 4;
  // Between packet and values is room for where the rows lie, and for a barrier: the raw rows are there (those that the copy engine brings).
  static constexpr uint32_t kRows = stage::kPacketBytes, kRaw = kRows + 24;
  static_assert(kRaw + 8 <= stage::kValues);
  static_assert(kPerSM * (kBytes + 1024) <= 233472, "more shared memory than an SM has");
};

// Rows of this slot's 32 that lie before the first sequence or behind the last are zeros.
template <int kThreads> KDA_DEVICE void zero_rows_outside(const PrefillArgs& a, int64_t row, int slot, int head, int thread) {
  const int T = int(a.T), last = int(a.N) - 1;
  const int begin = begin_of(a, row, 0), end = begin_of(a, row, last) + sequence_length(a.offsets + row * (a.N + 1), last, T);
  auto* o = static_cast<uint16_t*>(a.o) + (row * a.T * a.HV + head) * kHeadDim;
  for (int i = thread; i < kChunk * 16; i += kThreads)
    if (const int token = slot * kChunk + (i >> 4); token < T && (token < begin || token >= end))
      *reinterpret_cast<uint4*>(o + token * a.HV * kHeadDim + (i & 15) * 8) = make_uint4(0, 0, 0, 0);
}

template <bool kBounded, bool kGatesF32>
__global__ void __launch_bounds__(PacketsLayout<kBounded, kGatesF32>::kThreads, PacketsLayout<kBounded, kGatesF32>::kPerSM)
    packets_kernel(const __grid_constant__ SegmentedArgs x, const __grid_constant__ TensorMaps maps) {
  using L = PacketsLayout<kBounded, kGatesF32>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const PrefillArgs& a = x.a;
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = __shfl_sync(0xffffffffu, thread >> 5, 0);
  allow_next_kernel();

  // Of every segment the last chunk first: the first ones, which steps 2 and 4 begin with, are then the likelier to be still in the L2 cache.
  const uint32_t over_heads = blockIdx.x / uint32_t(a.HV), head = blockIdx.x % uint32_t(a.HV);
  const uint32_t in_segment = uint32_t(x.segment / kChunk), segments = (uint32_t(x.chunk_slots) + in_segment - 1) / in_segment;
  const uint32_t row = over_heads / (segments * in_segment), place = over_heads % (segments * in_segment);
  const int slot = int((place % segments) * in_segment + (in_segment - 1 - place / segments));
  if (slot >= x.chunk_slots) return;
  if (a.offsets) zero_rows_outside<L::kThreads>(a, row, slot, int(head), thread);
  const Unit u = find_unit(a, row, slot, int(head), kChunk, lane);
  const int chunk = slot - u.first;
  if (!u.there || u.task.tokens == 0) return;

  const bool by_engine = maps.usable && (chunk + 1) * kChunk <= u.task.tokens;
  if (thread == 0) {
    put_rows(base + L::kRows, a, u.task);
    if (by_engine) {
      barrier_init(base + L::kRaw, 1);
      fence_async_shared();
      copy_rows<kGatesF32, false>(maps, get_rows(base + L::kRows), base, chunk, base + L::kRaw);
    }
  }
  const int64_t gate_head = (a.gate_rows > 1 ? u.task.row : 0) * a.HV + head;
  const GateConstants gate = gate_constants<kBounded>(a.gate, a.a_log ? a.a_log[gate_head] : 0.f, a.lower_bound);
  for (int i = thread; i < kHeadDim; i += L::kThreads)
    store_shared(base + L::kBias + i * 4, (a.dt_bias ? a.dt_bias[gate_head * kHeadDim + i] : 0.f) * gate.slope);
  __syncthreads();
  const Rows rows = get_rows(base + L::kRows);
  const int token = chunk * kChunk + lane;
  const float beta =
      token < u.task.tokens ? write_strength(beta_value(load_raw_beta(a, rows, token), a.beta_dtype), a.beta_mode) : 0.f;
  if (by_engine) {
    barrier_wait(base + L::kRaw, 0);
  } else {
    load_rows<kBounded, kGatesF32, L::kThreads, false>(a, base + L::kRows, base, chunk, u.task.tokens, thread);
    copies_wait_all();
    __syncthreads();
  }
  const PrepareContext context = {gate, a.scale, a.l2norm, base + L::kBias, base + L::kScratch, 1, 2, warp, lane};
  L::Prepare::run(context, base, u.task.tokens - chunk * kChunk, beta, 0, [] {});
  fence_async_shared();
  __syncthreads();
  if (thread == 0) {
    store_bulk(const_cast<char*>(packet_at(x, u.task, slot)), base, stage::kPacketBytes);
    store_bulk_wait();
  }
}

// ================================================================ 2. and 4., which read packets

// Of a kernel whose CTAs hold 64 kRowGroups state rows in as many warpgroups; the warp behind them loads.
template <int kRowGroups, bool kOutputs> struct ReaderLayout {
  static constexpr int kWarps = kRowGroups * 4, kThreads = kWarps * 32 + 32, kPerSM = kRowGroups == 1 ? 2 : 1;
  static constexpr int kParts = 2 / kRowGroups;  // CTAs for all value rows
  static constexpr int kStages = kRowGroups == 1 ? 3 : 5;
  static constexpr uint32_t kStageBytes = stage::kValues + kRowGroups * kPanel;  // a packet and the CTA's values
  static constexpr uint32_t kStaging = kStages * kStageBytes;
  static constexpr uint32_t kOnes = kStaging + (kOutputs ? kWarps * 1024 : 0);
  static constexpr uint32_t kUnit = kOnes + kHeadDim * 4;
  static constexpr uint32_t kFull = kUnit + (kOutputs ? 0 : kUnitBytes);
  static constexpr uint32_t kEmpty = kFull + kStages * 8;
  static constexpr uint32_t kBytes = kEmpty + kStages * 8;
  static_assert(kPerSM * (kBytes + 1024) <= 233472, "more shared memory than an SM has");
};

template <class L> KDA_DEVICE void start_reader(uint32_t base, int thread) {
  for (int i = thread; i < kHeadDim; i += L::kThreads) store_shared(base + L::kOnes + i * 4, 1.f);
  for (int i = thread; i < int(L::kFull - L::kUnit) / 4; i += L::kThreads) store_shared(base + L::kUnit + i * 4, i == kHeadDim ? 1.f : 0.f);
  if (thread == 0)
    for (int s = 0; s < L::kStages; ++s) barrier_init(base + L::kFull + 8 * s, 1), barrier_init(base + L::kEmpty + 8 * s, L::kWarps);
  fence_async_shared();
  __syncthreads();
}

// A warp's copy of a chunk's values, of kPanels panels of 64 channels; rows past the end of the sequence become zeros and are not read.
template <int kPanels>
KDA_DEVICE void load_values(const PrefillArgs& a, const Rows& k, uint32_t to, int first_panel, int chunk, int tokens, int lane) {
  const char* from = static_cast<const char*>(a.v) + ((k.first_token + chunk * kChunk) * a.HV + k.head) * (kHeadDim * 2) + first_panel * 128;
  const int64_t step = a.HV * (kHeadDim * 2);
  for (int i = lane; i < kChunk * 8 * kPanels; i += 32) {
    const int row = i / (8 * kPanels), panel = i / 8 % kPanels, unit = i % 8;
    copy16_or_zero<false>(to + panel * kPanel + panel_unit(row, unit), from + row * step + panel * 128 + unit * 16, chunk * kChunk + row < tokens);
  }
}

// Inputs do not wait for earlier kernels: the values of the first chunks come to the L2 cache meanwhile. The loading warp.
template <int kPanels>
KDA_DEVICE void prefetch_values(const PrefillArgs& a, const TensorMaps& maps, const Task& task, int first_panel, int first_chunk, int chunks, int lane) {
  constexpr int kMost = 8;
  if (maps.usable && lane == 0) prefetch_map(&maps.v);
  const int token = first_chunk * kChunk + lane;
  const char* from = static_cast<const char*>(a.v) +
                     ((task.row * a.T + task.begin + token) * a.HV + task.head) * (kHeadDim * 2) + first_panel * 128;
  for (int i = 0; i < chunks && i < kMost && token + i * kChunk < task.tokens; ++i)
    for (int p = 0; p < kPanels; ++p) prefetch_global(from + i * kChunk * a.HV * (kHeadDim * 2) + p * 128);
}

// The loading warp: chunks [first_chunk, first_chunk + chunks) of the task, with the values of the CTA's rows unless there are none.
template <class L, int kPanels, bool kWithValues, bool kWholePackets>
KDA_DEVICE void read_packets(const SegmentedArgs& x, const TensorMaps& maps, const Task& task, int first_panel, int first_chunk, int chunks,
                             uint32_t base, int lane) {
  const Rows rows = {task.row * x.a.T + task.begin, task.head, task.key_head};
  const char* packet = packet_at(x, task, first_slot(task, x.a.N, kChunk) + first_chunk);
  constexpr uint32_t kValueBytes = kWithValues ? kPanels * kPanel : 0;
  constexpr uint32_t kPacket = kWholePackets ? stage::kPacketBytes
                                             : 2 * kPanel + (stage::kM - stage::kKr) + (stage::kPacketBytes - stage::kDecay);
  uint32_t slot = 0, parity = 1;
#pragma unroll 1
  for (int i = 0; i < chunks; ++i, packet += stage::kPacketBytes) {
    const int chunk = first_chunk + i;
    const uint32_t stage = base + slot * L::kStageBytes, full = base + L::kFull + 8 * slot;
    const bool by_engine = maps.usable && (chunk + 1) * kChunk <= task.tokens;
    if (i >= L::kStages) barrier_wait(base + L::kEmpty + 8 * slot, parity);
    if (kWithValues && !by_engine) {
      load_values<kPanels>(x.a, rows, stage + stage::kValues, first_panel, chunk, task.tokens, lane);
      copies_wait_all();
      sync_warp();
    }
    if (lane == 0) {
      barrier_expect(full, kPacket + (by_engine ? kValueBytes : 0));
      if constexpr (kWholePackets) {
        copy_bulk(stage, packet, stage::kPacketBytes, full);
      } else {  // neither Qd nor M
#pragma unroll
        for (int p = 0; p < 2; ++p) copy_bulk(stage + p * stage::kKeyQueryPanel, packet + p * stage::kKeyQueryPanel, kPanel, full);
        copy_bulk(stage + stage::kKr, packet + stage::kKr, stage::kM - stage::kKr, full);
        copy_bulk(stage + stage::kDecay, packet + stage::kDecay, stage::kPacketBytes - stage::kDecay, full);
      }
      if (kWithValues && by_engine)
        for (int p = 0; p < kPanels; ++p)
          copy_tensor(stage + stage::kValues + p * kPanel, &maps.v, 64 * (first_panel + p), rows.head, int(rows.first_token) + chunk * kChunk, full);
    }
    if (++slot == L::kStages) slot = 0, parity ^= 1;
  }
}

KDA_DEVICE const char* stored_state(const void* states, DType dtype, const PrefillArgs& a, const Task& k) {
  return states ? static_cast<const char*>(states) + (k.sequence * a.HV + k.head) * int64_t(kHeadDim * kHeadDim * (dtype == DType::kF32 ? 4 : 2))
                : nullptr;
}

template <class Engine, int kRowGroups>
__global__ void __launch_bounds__(ReaderLayout<kRowGroups, false>::kThreads, ReaderLayout<kRowGroups, false>::kPerSM)
    maps_kernel(const __grid_constant__ SegmentedArgs x, const __grid_constant__ TensorMaps maps) {
  using L = ReaderLayout<kRowGroups, false>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const PrefillArgs& a = x.a;
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = __shfl_sync(0xffffffffu, thread >> 5, 0);
  allow_next_kernel();

  const uint32_t part = blockIdx.x % (2 * L::kParts), unit = blockIdx.x / (2 * L::kParts);
  const uint32_t head = unit % uint32_t(a.HV), row = unit / uint32_t(a.HV) / uint32_t(x.segment_slots);
  const Unit u = find_unit(a, row, int(unit / uint32_t(a.HV) % uint32_t(x.segment_slots)), int(head), x.segment, lane);
  const bool of_zero = part < L::kParts;  // Q, not P
  const int chunks = x.segment / kChunk;
  const int segment = u.slot - u.first, group_row = int(part % L::kParts) * 64;
  const bool needed = u.there && (segment + 1) * x.segment < u.task.tokens && (of_zero || segment > 0);
  if (needed) {
    if (!of_zero)  // values of zero for the rows of the identity
      for (int i = thread; i < L::kStages * kRowGroups * kPanel / 16; i += L::kThreads) {
        constexpr int kUnits = kRowGroups * kPanel / 16;
        store_shared4(base + i / kUnits * L::kStageBytes + stage::kValues + i % kUnits * 16, {0.f, 0.f, 0.f, 0.f});
      }
    if (of_zero && warp == L::kWarps) prefetch_values<kRowGroups>(a, maps, u.task, group_row / 64, segment * chunks, chunks, lane);
    start_reader<L>(base, thread);
  }
  wait_for_previous_kernels();
  if (!needed) return;

  if (warp == L::kWarps) {
    if (of_zero) read_packets<L, kRowGroups, true, false>(x, maps, u.task, group_row / 64, segment * chunks, chunks, base, lane);
    else read_packets<L, kRowGroups, false, false>(x, maps, u.task, group_row / 64, segment * chunks, chunks, base, lane);
    return;
  }
  State st;
  if (of_zero)
    load_state(st, segment == 0 ? stored_state(a.initial_state, a.state_in_dtype, a, u.task) : nullptr, a.state_in_dtype, a.state_v_first,
               group_row + warp * 16, lane);
  else unit_state(st, base + L::kUnit, group_row + warp * 16, lane);
  chain<Engine, L>({base, warp * 16, lane, chunks}, st);
  if (of_zero) store_slice(st, state_at(x, u.task, u.slot) + (group_row / 16 + warp) * kSliceBytes, lane);
  else store_map(st, map_at(x, u.task, u.slot), group_row + warp * 16, lane);
}

template <class Engine, int kRowGroups>
__global__ void __launch_bounds__(ReaderLayout<kRowGroups, true>::kThreads, ReaderLayout<kRowGroups, true>::kPerSM)
    outputs_kernel(const __grid_constant__ SegmentedArgs x, const __grid_constant__ TensorMaps maps) {
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
    if (warp == L::kWarps) prefetch_values<kRowGroups>(a, maps, u.task, group_row / 64, first / kChunk, chunks, lane);
    start_reader<L>(base, thread);
  }
  wait_for_previous_kernels();
  if (!u.there) return;
  if (u.task.tokens == 0) {
    if (to && part == 0) copy_state(from, a.state_in_dtype, to, a.state_out_dtype, thread, L::kThreads);
    return;
  }

  if (warp == L::kWarps) {
    read_packets<L, kRowGroups, true, true>(x, maps, u.task, group_row / 64, first / kChunk, chunks, base, lane);
    return;
  }
  State st;
  const int value_row = group_row + warp * 16;
  if (segment == 0) load_state(st, from, a.state_in_dtype, a.state_v_first, value_row, lane);
  else load_slice(st, state_at(x, u.task, u.slot - 1) + value_row / 16 * kSliceBytes, lane);
  const RecurrenceContext context = {base, warp, warp * 16, lane,
                                     static_cast<uint16_t*>(a.o) + first_row(a, u.task, a.HV, u.task.head, kHeadDim) + first * a.HV * kHeadDim + value_row, int(a.HV) * kHeadDim, tokens};
  recur<Engine, L>(context, st);
  if (to && left <= x.segment) store_state(st, to, a.state_out_dtype, a.state_v_first, value_row, lane);
}

// ================================================================ 3. states

__global__ void __launch_bounds__(FoldLayout::kThreads, 1) states_kernel(const __grid_constant__ SegmentedArgs x) {
  using L = FoldLayout;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = __shfl_sync(0xffffffffu, thread >> 5, 0);
  allow_next_kernel();
  constexpr uint32_t kSlices = kHeadDim / 16;
  const uint32_t slice = blockIdx.x % kSlices, head = blockIdx.x / kSlices % uint32_t(x.a.HV);
  const int64_t sequence = blockIdx.x / kSlices / uint32_t(x.a.HV), row = sequence / x.a.N;
  const Task task = task_of(x.a, row, int(sequence - row * x.a.N), int(head));
  const int steps = (task.tokens + x.segment - 1) / x.segment - 2;  // the state behind the first segment is there, that behind the last not needed
  if (steps > 0) {
    if (thread == 0)
      for (int s = 0; s < L::kStages; ++s) barrier_init(base + L::kFull + 8 * s, 1);
    fence_async_shared();
    __syncthreads();
  }
  wait_for_previous_kernels();
  if (steps <= 0) return;
  const int slot = first_slot(task, x.a.N, x.segment);
  fold(map_at(x, task, slot), state_at(x, task, slot) + slice * kSliceBytes, steps, base, warp, lane);
}

// ================================================================ launches

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
  const int64_t heads = a.B * a.HV;
  const bool cut = a.T > x.segment;
  const int64_t packets = heads * x.chunk_slots * stage::kPacketBytes, of_maps = cut ? heads * x.segment_slots * kMapBytes : 0;
  x.packets = static_cast<char*>(a.workspace);
  if (a.workspace) x.maps = x.packets + packets, x.states = x.maps + of_maps;
  *bytes = packets + of_maps + (cut ? heads * x.segment_slots * kStateBytes : 0);
  return x;
}

template <class Engine, bool kBounded, bool kGatesF32> cudaError_t launch_segmented(const PrefillArgs& a, cudaStream_t stream) {
  int64_t bytes;
  const SegmentedArgs x = plan(a, &bytes);
  TensorMaps maps;
  if (cudaError_t e = make_tensor_maps(a, maps); e != cudaSuccess) return e;
  using P = PacketsLayout<kBounded, kGatesF32>;
  const int64_t heads = a.B * a.HV, in_segment = x.segment / kChunk, segments = heads * x.segment_slots;
  const int64_t chunks = (x.chunk_slots + in_segment - 1) / in_segment * in_segment;
  if (cudaError_t e = launch_kernel<packets_kernel<kBounded, kGatesF32>>(true, heads * chunks, P::kThreads, P::kBytes, stream, x, maps); e != cudaSuccess)
    return e;
  // A CTA of 64 rows is the faster one, of 128 the thriftier: it loads a packet once for both halves.
  auto launch_reader = [&](auto one, auto two, int64_t parts) {  // parts: of 128 rows
    return segments * parts * 2 <= sm_count() ? one(segments * parts * 2) : two(segments * parts);
  };
  const int64_t most = (a.T + x.segment - 1) / x.segment;  // segments that a sequence can have
  if (most > 1) {
    const cudaError_t e = launch_reader(
        [&](int64_t blocks) {
          using L = ReaderLayout<1, false>;
          return launch_kernel<maps_kernel<Engine, 1>>(false, blocks, L::kThreads, L::kBytes, stream, x, maps);
        },
        [&](int64_t blocks) {
          using L = ReaderLayout<2, false>;
          return launch_kernel<maps_kernel<Engine, 2>>(false, blocks, L::kThreads, L::kBytes, stream, x, maps);
        },
        2);
    if (e != cudaSuccess) return e;
  }
  if (most > 2) {
    using L = FoldLayout;
    const int64_t blocks = a.B * a.N * a.HV * (kHeadDim / 16);
    if (cudaError_t e = launch_kernel<states_kernel>(false, blocks, L::kThreads, L::kBytes, stream, x); e != cudaSuccess) return e;
  }
  return launch_reader(
      [&](int64_t blocks) {
        using L = ReaderLayout<1, true>;
        return launch_kernel<outputs_kernel<Engine, 1>>(false, blocks, L::kThreads, L::kBytes, stream, x, maps);
      },
      [&](int64_t blocks) {
        using L = ReaderLayout<2, true>;
        return launch_kernel<outputs_kernel<Engine, 2>>(false, blocks, L::kThreads, L::kBytes, stream, x, maps);
      },
      1);
}

template <class Engine> cudaError_t select_segmented(const PrefillArgs& a, cudaStream_t stream) {
  // The bounded scheme's exponents fit for at most 5 nats a token.
  const bool bounded = a.gate == GateMode::kSafe && a.lower_bound >= -5.f, f32 = a.g_dtype == DType::kF32;
  if (bounded) return f32 ? launch_segmented<Engine, true, true>(a, stream) : launch_segmented<Engine, true, false>(a, stream);
  return f32 ? launch_segmented<Engine, false, true>(a, stream) : launch_segmented<Engine, false, false>(a, stream);
}

}  // namespace

// The least of a model of steps 2 to 4, in cycles: what a CTA takes a chunk (or a map), times the rounds in which the SMs get through all CTAs. Step 1 does
// not depend on the choice.
int segment_chunks(int64_t B, int64_t T, int64_t N, int64_t HV, int sm_count) {
  constexpr int64_t kMostSegments = 512;
  const int64_t sequences = std::max<int64_t>(B * N, 1), chunks = std::max<int64_t>((T + kChunk - 1) / kChunk / std::max<int64_t>(N, 1), 1);
  const int64_t tasks = sequences * HV;
  auto rounds = [&](int64_t ctas) { return double((ctas + sm_count - 1) / sm_count); };
  auto reader = [&](int64_t ctas, double chunk64, double chunk128, int64_t length) {  // ctas: of 128 rows
    return 2 * ctas <= sm_count ? length * chunk64 : rounds(ctas) * length * chunk128;
  };
  int64_t best = chunks;
  double least = INFINITY;
  for (int64_t segments = 1; segments <= std::min(chunks, kMostSegments); ++segments) {
    const int64_t length = (chunks + segments - 1) / segments, real = (chunks + length - 1) / length;
    double cycles = reader(tasks * real, 960., 1500., length);
    if (real > 1) cycles += 4000. + reader(2 * tasks * (real - 1), 650., 960., length);
    if (real > 2) cycles += 4000. + double(real - 2) * 800. * rounds(tasks * (kHeadDim / 16));
    if (cycles < least) least = cycles, best = length;
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
