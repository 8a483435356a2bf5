// What one CTA (or cluster) works on: one sequence of one value head. Where its rows and states lie, and what lies outside every sequence.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "../launch.h"
#include "packet.cuh"
#include "recurrence.cuh"

namespace jax_kda {

struct Task {
  int64_t row;       // batch row
  int64_t sequence;  // over all rows
  int head, key_head;
  int begin, tokens;  // within the row; whatever the offsets hold, [begin, begin + tokens) lies in [0, T)
  bool first, last;   // of its row
};

KDA_DEVICE int clamped(int x, int low, int high) { return x < low ? low : (x > high ? high : x); }

KDA_DEVICE int sequence_length(const int32_t* offsets, int n, int T) {
  const int begin = clamped(offsets[n], 0, T);
  return clamped(offsets[n + 1], begin, T) - begin;
}

// Packed sequences go longest first, so that no long one starts when the others are done. Ordered on the device, from the lengths found there:
// every CTA finds the sequence of its rank. All threads call this; `found` is a word of shared memory.
constexpr int kOrderedSequences = 256;
KDA_DEVICE int sequence_of_rank(const PrefillArgs& a, int rank, uint32_t found) {
  if (!a.offsets || a.B != 1 || a.N == 1 || a.N > kOrderedSequences) return rank;
  const int N = int(a.N), T = int(a.T);
  for (int i = threadIdx.x; i < N; i += blockDim.x) {
    const int length = sequence_length(a.offsets, i, T);
    int before = 0;
    for (int j = 0; j < N; ++j) {
      const int other = sequence_length(a.offsets, j, T);
      before += other > length || (other == length && j < i);
    }
    if (before == rank) store_shared_word(found, uint32_t(i));
  }
  __syncthreads();
  return int(bits(load_shared(found)));
}

KDA_DEVICE Task find_task(const PrefillArgs& a, uint32_t index, uint32_t found) {
  Task k;
  k.head = int(index % uint32_t(a.HV));
  k.key_head = k.head / int(a.HV / a.H);
  k.sequence = sequence_of_rank(a, int(index / uint32_t(a.HV)), found);
  k.row = k.sequence / a.N;
  const int n = int(k.sequence - k.row * a.N), T = int(a.T);
  k.first = n == 0, k.last = n == a.N - 1;
  k.begin = 0, k.tokens = T;
  if (a.offsets) {
    const int32_t* offsets = a.offsets + k.row * (a.N + 1);
    k.begin = clamped(offsets[n], 0, T);
    k.tokens = sequence_length(offsets, n, T);
  }
  return k;
}
// First element of this task in arrays [B, T, heads, width].
KDA_DEVICE int64_t first_row(const PrefillArgs& a, const Task& k, int64_t heads, int64_t head, int64_t width) {
  return ((k.row * a.T + k.begin) * heads + head) * width;
}

// Tokens [from, to) of a batch row's o, of one head, become zeros.
KDA_DEVICE void zero_rows(const PrefillArgs& a, int64_t row, int head, int from, int to, int thread, int threads) {
  auto* o = static_cast<uint16_t*>(a.o) + ((row * a.T) * a.HV + head) * kHeadDim;
  for (int64_t i = int64_t(from) * 16 + thread; i < int64_t(to) * 16; i += threads)
    *reinterpret_cast<uint4*>(o + (i >> 4) * a.HV * kHeadDim + (i & 15) * 8) = make_uint4(0, 0, 0, 0);
}
// Rows of the batch row that belong to no sequence are zeros. Written by the tasks of its first and last sequence.
KDA_DEVICE void zero_outside(const PrefillArgs& a, const Task& k, int thread, int threads) {
  if (k.first) zero_rows(a, k.row, k.head, 0, k.begin, thread, threads);
  if (k.last) zero_rows(a, k.row, k.head, k.begin + k.tokens, int(a.T), thread, threads);
}

// Element i of a lane's state within a state stored [K, V] or [V, K], relative to the lane's first element: a constant, so that 64 accesses
// share one address.
template <bool kVFirst> KDA_DEVICE constexpr int state_offset(int i) {
  const int value = ((i >> 1) & 1) * 8, key = (i >> 2) * 8 + (i & 1);
  return kVFirst ? value * kHeadDim + key : key * kHeadDim + value;
}
// f(std::bool_constant<v_first>, pointer to the lane's first element) with the dtype that the arguments name.
template <class F> KDA_DEVICE void with_state_layout(char* base, DType dtype, bool v_first, int value_row, int lane, F f) {
  const int value = value_row + (lane >> 2), key = (lane & 3) * 2;
  const int first = v_first ? value * kHeadDim + key : key * kHeadDim + value;
  if (dtype == DType::kF32) {
    float* p = reinterpret_cast<float*>(base) + first;
    if (v_first) f(std::true_type(), p);
    else f(std::false_type(), p);
  } else {
    __nv_bfloat16* p = reinterpret_cast<__nv_bfloat16*>(base) + first;
    if (v_first) f(std::true_type(), p);
    else f(std::false_type(), p);
  }
}

KDA_DEVICE void load_state(State& st, const char* from, DType dtype, bool v_first, int value_row, int lane) {
#pragma unroll
  for (int i = 0; i < 64; ++i) st[i] = 0.f;
  if (from)
    with_state_layout(const_cast<char*>(from), dtype, v_first, value_row, lane, [&](auto kVFirst, const auto* p) {
#pragma unroll
      for (int i = 0; i < 64; ++i) st[i] = float(p[state_offset<kVFirst.value>(i)]);
    });
}

KDA_DEVICE void store_state(const State& st, char* to, DType dtype, bool v_first, int value_row, int lane) {
  with_state_layout(to, dtype, v_first, value_row, lane, [&](auto kVFirst, auto* p) {
#pragma unroll
    for (int i = 0; i < 64; ++i) p[state_offset<kVFirst.value>(i)] = std::remove_reference_t<decltype(*p)>(st[i]);
  });
}

// An empty sequence passes its state through, bit for bit.
KDA_DEVICE void copy_state(const void* from, DType from_dtype, void* to, DType to_dtype, int thread, int threads) {
  if (from && from_dtype == to_dtype) {  // bits: a conversion there and back would change NaNs
    const int words = kHeadDim * kHeadDim * (to_dtype == DType::kF32 ? 4 : 2) / 16;
    for (int i = thread; i < words; i += threads) static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
    return;
  }
  for (int i = thread; i < kHeadDim * kHeadDim; i += threads) {
    const float x = !from ? 0.f
                    : from_dtype == DType::kF32 ? static_cast<const float*>(from)[i]
                                                : __bfloat162float(static_cast<const __nv_bfloat16*>(from)[i]);
    if (to_dtype == DType::kF32) static_cast<float*>(to)[i] = x;
    else static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16(x);
  }
}

// Where a task's rows lie; `where` is shared memory: the task, as put_rows left it there.
struct Rows {
  int64_t first_token;  // over all batch rows
  int head, key_head;
};
KDA_DEVICE void put_rows(uint32_t where, const PrefillArgs& a, const Task& k) {
  const int64_t first = k.row * a.T + k.begin;
  store_shared2(where + 16, from_bits(k.tokens), from_bits(uint32_t(k.sequence * a.HV + k.head)));
  store_shared4(where, {from_bits(uint32_t(first)), from_bits(uint32_t(first >> 32)), from_bits(k.head), from_bits(k.key_head)});
}
KDA_DEVICE int get_tokens(uint32_t where) { return int(bits(load_shared(where + 16))); }
KDA_DEVICE int get_state(uint32_t where) { return int(bits(load_shared(where + 20))); }  // of all sequences' heads
KDA_DEVICE Rows get_rows(uint32_t where) {
  const float4 x = load_shared4(where);
  return {int64_t(uint64_t(bits(x.y)) << 32 | bits(x.x)), int(bits(x.z)), int(bits(x.w))};
}

// The stored bits of a token's beta, so that nothing waits for the load before its value is needed.
KDA_DEVICE uint32_t load_raw_beta(const PrefillArgs& a, const Rows& k, int token) {
  const int64_t at = (k.first_token + token) * a.HV + k.head;
  return a.beta_dtype == DType::kF32 ? static_cast<const uint32_t*>(a.beta)[at] : static_cast<const uint16_t*>(a.beta)[at];
}
KDA_DEVICE float beta_value(uint32_t raw, DType dtype) { return dtype == DType::kF32 ? from_bits(raw) : low_bf16(raw); }

// Copies of a chunk's raw rows by the threads of a group, to the group's memory: for tails, and where no tensor map can be had. Rows past the end of
// the sequence become zeros and are not read. Their gates become what is no decay: zero for log decays, minus infinity for what goes through an
// activation. Addresses are formed from the chunk each time: kept across a preparation they would cost more registers than this costs instructions.
template <class Prepare> KDA_DEVICE void load_rows(const PrefillArgs& a, const Rows& k, uint32_t buffer, int chunk, int tokens, int thread) {
  constexpr bool kF32 = Prepare::kF32;
  buffer = opaque(buffer);
  const int unit = thread & 15, first = thread >> 4, left = tokens - chunk * kChunk;
  const int64_t token = k.first_token + (chunk * kChunk + first);
  // Opaque where registers are shortest, or multiples of the steps would live through the loop around this.
  auto heads = [](int64_t n) { return Prepare::kShortOfRegisters ? int64_t(opaque64(uint64_t(n))) : n; };
  const int64_t key_step = heads(a.H) * (kHeadDim * 2), key_at = token * key_step + k.key_head * (kHeadDim * 2) + unit * 16;
  const int64_t gate_step = heads(a.HV) * (kHeadDim * (kF32 ? 4 : 2)), gate_at = token * gate_step + k.head * (kHeadDim * (kF32 ? 4 : 2)) + unit * 16;
  const char *key = static_cast<const char*>(a.k) + key_at, *query = static_cast<const char*>(a.q) + key_at;
  const char* gate = static_cast<const char*>(a.g) + gate_at;
  const uint32_t panel = buffer + (unit >> 3) * Prepare::kPanelStride;
  const uint32_t to_gate = Prepare::kGates + (kF32 ? buffer + (unit >> 3) * kPanel : panel);
  constexpr int kRows = Prepare::kWarps * 2;
  const float none = !Prepare::kBounded && a.gate == GateMode::kLog ? 0.f : kF32 ? -INFINITY : from_bits(0xff80ff80u);
#pragma unroll 2
  for (int row = first; row < kChunk; row += kRows) {
    const bool valid = row < left;
    const uint32_t at = panel_unit(row, unit & 7);
    copy16_or_zero(panel + stage::kKey + at, key, valid);
    copy16_or_zero(panel + stage::kQuery + at, query, valid);
    if (!valid) {
      store_shared4(to_gate + at, {none, none, none, none});
      if constexpr (kF32) store_shared4(to_gate + at + Prepare::kPanelStride, {none, none, none, none});
    } else {
      copy16_or_zero(to_gate + at, gate, valid);
      if constexpr (kF32) copy16_or_zero(to_gate + at + Prepare::kPanelStride, gate + 256, valid);
    }
    key += key_step * kRows, query += key_step * kRows, gate += gate_step * kRows;
  }
}

}  // namespace jax_kda
