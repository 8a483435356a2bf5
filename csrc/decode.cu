// Decode: 1 to 8 tokens, one CTA per (sequence, value head, slice of value channels). Value channels never interact, so slices are exact.
//
//   thread    kColumns elements of the state in registers, kKeys x kValues: read once before the first token, written once after the last, 16 bytes
//             an access along the contiguous axis. The other axis is the threads': whole 128-byte lines where states are [K, V] in f32, rows of all
//             128 keys where they are [V, K].
//   before    every load is under way before anything waits for one. While the state's are, thread i turns g of key channel i into decays, and
//             warps turn rows of q and k into normed and scaled ones, in shared memory
//   a token   S <- decay S;  p = S^T k, over the thread's keys, its warp's lanes (halving: each exchange also halves what a lane holds), and the
//             warps (through shared memory);  u = beta (v - p);  S <- S + k u^T;  and its share of S^T q goes to shared memory
//   after     the shares are added up and written: tokens wait for one another once each, not twice
//
// States [V, K] have all keys of a value channel in one warp: there warps never wait for each other inside the loop. One token of a state [K, V]:
// every warp prepares all that it needs, and the warps meet only where their shares of p do.
//
// A step of few states takes as long as one thread: its loads, then a chain of dependent instructions, some 5 cycles each. So no load waits for a
// branch, a division or another load (two to one register do, even where only one is done), and what follows is short and straight.
#include "kernels/mma.cuh"
#include "kernels/pipeline.cuh"
#include "launch.h"

#include <cuda_bf16.h>

#include <cmath>
#include <type_traits>

namespace jax_kda {
namespace {

constexpr int kDim = 128, kThreads = 128, kWarps = kThreads / 32;

template <bool kVFirst, class T, int kColumns, int kTokens> struct Decode {
  static constexpr int kWide = 16 / int(sizeof(T));  // elements of one access
  static constexpr int kKeys = kVFirst ? kWide : kColumns / kWide, kValues = kColumns / kKeys;
  static constexpr int kAccesses = kColumns / kWide;
  static constexpr int kKeyGroups = kDim / kKeys, kValueGroups = kColumns / kValues;
  static constexpr int kStride = kVFirst ? 1 : kValueGroups;               // from a lane to the one with the next keys
  static constexpr int kLanes = kVFirst ? kKeyGroups : 32 / kValueGroups;  // of a warp that share value channels
  static constexpr int kParts = kVFirst ? 1 : kWarps;                      // warps that do
  static constexpr int kRows = kTokens == 1 ? 1 : kTokens / kWarps;        // of q, and of k, that a warp prepares
  static constexpr int kTurn = kTokens == 1 ? 1 : 4;                       // tokens whose decays a thread prepares together
  static constexpr int kVs = kTokens == 1 ? 1 : kTokens * kColumns / kThreads;
  static_assert(kLanes >= kValues && kLanes * kStride <= 32);

  // Shared memory, f32 throughout.
  static constexpr uint32_t kQ = 0, kK = kQ + kTokens * kDim * 4, kDecay = kK + kTokens * kDim * 4;
  static constexpr uint32_t kV = kDecay + kTokens * kDim * 4, kPredicted = kV + kTokens * kColumns * 4;  // of two tokens in turn
  static constexpr uint32_t kRead = kPredicted + 2 * kParts * kColumns * 4;
  static constexpr uint32_t kBeta = kRead + kTokens * kParts * kColumns * 4;
  static constexpr uint32_t kBytes = kBeta + kTokens * 4;
};

// n / d for n < 2^31, as a multiplication.
struct Divisor {
  uint32_t multiplier, shift = 31;
  explicit Divisor(uint32_t d) {
    while (uint64_t(d) << 31 > uint64_t(1) << shift) ++shift;
    multiplier = uint32_t((uint64_t(1) << shift) / d + 1);
  }
};
KDA_DEVICE uint32_t divide(uint32_t n, Divisor d) { return uint32_t((uint64_t(n) * d.multiplier) >> d.shift); }

// One element as it lies, without a branch: of f32 both halves, of bf16 itself twice.
struct Halves {
  uint32_t low, high;
};
KDA_DEVICE Halves load_halves(const void* from, uint32_t i, bool f32) {
  const uint16_t* half = static_cast<const uint16_t*>(from) + (uint64_t(i) << int(f32));
  return {opaque(half[0]), opaque(half[int(f32)])};
}
KDA_DEVICE float widen(Halves x, bool f32) { return from_bits(x.high << 16 | (f32 ? x.low : 0)); }
// Element i of an array whose length is even: the word that holds it.
KDA_DEVICE uint32_t load_word(const void* from, uint64_t i, bool f32) { return static_cast<const uint32_t*>(from)[i >> int(!f32)]; }
KDA_DEVICE float widen(uint32_t word, int i, bool f32) { return f32 ? from_bits(word) : i % 2 ? high_bf16(word) : low_bf16(word); }

// Four channels of bf16.
struct alignas(8) Four {
  uint32_t x, y;
};
KDA_DEVICE Four opaque_four(Four x) { return {opaque(x.x), opaque(x.y)}; }
KDA_DEVICE Four load_four(const void* from, uint64_t i) { return *reinterpret_cast<const Four*>(static_cast<const __nv_bfloat16*>(from) + i); }
KDA_DEVICE float4 widen(Four x) { return {low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y)}; }

KDA_DEVICE float4 times(float4 x, float f) { return {x.x * f, x.y * f, x.z * f, x.w * f}; }
template <int N> KDA_DEVICE void load_floats(float (&x)[N], uint32_t from) {
  if constexpr (N == 2) {
    const float2 y = load_shared2(from);
    x[0] = y.x, x[1] = y.y;
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 y = load_shared4(from + i * 4);
      x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
    }
  }
}

// Both rows' sums of squares, over the warp; every lane has the same bits.
KDA_DEVICE void sum_squares(float4 x, float4 y, float& sx, float& sy, int lane) {
  sx = fma(x.x, x.x, fma(x.y, x.y, fma(x.z, x.z, x.w * x.w)));
  sy = fma(y.x, y.x, fma(y.y, y.y, fma(y.z, y.z, y.w * y.w)));
#pragma unroll
  for (int step = 1; step < 32; step *= 2) sx += shuffle(sx, lane ^ step), sy += shuffle(sy, lane ^ step);
}

KDA_DEVICE float rsqrt_rounded(float s) {
  const float r = rsqrt_approx(s);
  return fma(0.5f * r, fma(-s * r, r, 1.f), r);
}

// Two rows x, each x rsqrt(sum x^2 + 1e-6). Rows whose squares would leave float32 are scaled by a power of two first.
KDA_DEVICE void normalise(float4& x, float4& y, float factor_x, bool l2norm, int lane) {
  float factor_y = 1.f, sx, sy;
  sum_squares(x, y, sx, sy, lane);  // asked for or not: without a branch before it it fills the pauses of what comes before
  if (l2norm) {
    constexpr float kLarge = 0x1p80f, kDown = 0x1p-100f;
    float more_x = 1e-6f, more_y = 1e-6f;
    if (count_lanes(fmaxf(sx, sy) > kLarge)) {
      if (sx > kLarge) x = times(x, kDown), more_x = 0.f;
      if (sy > kLarge) y = times(y, kDown), more_y = 0.f;
      sum_squares(x, y, sx, sy, lane);
    }
    factor_x *= rsqrt_rounded(sx + more_x), factor_y = rsqrt_rounded(sy + more_y);
  }
  x = times(x, factor_x), y = times(y, factor_y);
}

// exp(x) to float32's rounding: over thousands of tokens a biased last bit would add up.
KDA_DEVICE float exp_rounded(float x) {
  x = -max_keep_nan(-max_keep_nan(x, -104.f), -104.f);  // exp of 104 is infinity, of -104 zero
  const float n = rintf(x * 1.44269504f);
  const float f = fma(n, -1.42860682e-6f, fma(n, -0.693145752f, x));  // x - n ln 2
  float p = 1.99534072e-4f;                                           // least squares for |f| < 0.3466: 2^-32 of the whole
  p = fma(p, f, 1.39357592e-3f), p = fma(p, f, 8.33319779e-3f), p = fma(p, f, 4.16664556e-2f), p = fma(p, f, 1.66666667e-1f), p = fma(p, f, 0.5f);
  p = fma(p * f, f, f) + 1.f;
  const int e = int(n), half = e >> 1;  // 2^e itself may be no normal number
  return p * from_bits(uint32_t(half + 127) << 23) * from_bits(uint32_t(e - half + 127) << 23);
}

KDA_DEVICE float sigmoid(float x) {
  const float e = expf(-fabsf(x)), y = 1.f + e, r = rcp_approx(y), rounded = fma(r, fma(-y, r, 1.f), r);
  return x < 0.f ? e * rounded : rounded;
}

// Gates to decays, the factors themselves.
template <int N> KDA_DEVICE void turn_into_decays(float (&g)[N], float bias, float rate, GateMode mode, float lower_bound) {
  if (mode == GateMode::kSafe) {
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] = lower_bound * sigmoid(rate * (g[i] + bias));
  } else if (mode == GateMode::kSoftplus) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float z = g[i] + bias;
      g[i] = -rate * (fmaxf(z, 0.f) + log1pf(expf(-fabsf(z))));
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) g[i] = exp_rounded(g[i]);
}

KDA_DEVICE float strength_of(float raw, BetaMode mode) {
  if (mode == BetaMode::kPlain) return raw;
  return (mode == BetaMode::kSigmoidDoubled ? 2.f : 1.f) * sigmoid(raw);
}

// Sums x over the lanes that share value channels. Lane l of them (l < kValues) comes out with the sum of value channel `owned`.
template <class L> KDA_DEVICE float sum_over_keys(float (&x)[L::kValues], int lane, int& owned) {
  owned = 0;
  int width = L::kValues;
#pragma unroll
  for (int step = 1; step < L::kLanes; step *= 2) {
    const int partner = lane ^ (step * L::kStride);
    if (width > 1) {
      const bool upper = (lane / (step * L::kStride)) & 1;
      width /= 2;
#pragma unroll
      for (int j = 0; j < L::kValues / 2; ++j)
        if (j < width) {
          const float away = upper ? x[j] : x[j + width], mine = upper ? x[j + width] : x[j];
          x[j] = mine + shuffle(away, partner);
        }
      owned += upper ? width : 0;
    } else {
      x[0] += shuffle(x[0], partner);
    }
  }
  return x[0];
}

template <bool kVFirst, class T, int kColumns, int kTokens>
__global__ void __launch_bounds__(kThreads, 640 / kThreads) decode_kernel(const __grid_constant__ DecodeArgs a, Divisor by_heads, Divisor by_group) {
  using L = Decode<kVFirst, T, kColumns, kTokens>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, tokens = kTokens == 1 ? 1 : int(a.T);
  constexpr int kSlices = kDim / kColumns;
  const uint32_t heads = uint32_t(a.HV), task = uint32_t(blockIdx.x) / kSlices, n = divide(task, by_heads), head = task - n * heads;
  const int column = int(uint32_t(blockIdx.x) % kSlices) * kColumns;
  const uint32_t first = n * uint32_t(tokens), gate_head = (a.gate_rows > 1 ? n : 0) * heads + head;  // rows of tokens: fewer than 2^31
  const uint32_t value_row = first * heads + head, key_row = first * uint32_t(a.H) + divide(head, by_group);
  const bool gates_f32 = a.g_dtype == DType::kF32, beta_f32 = a.beta_dtype == DType::kF32;
  auto* o = static_cast<__nv_bfloat16*>(a.o) + uint64_t(value_row) * kDim + column;

  // What the state's place is not needed for comes first. `opaque` keeps every load here, and what is done with it behind all loads. Where there is
  // nothing to load a register is zero before the load that is not done.
  int64_t place = n;
  if (a.state_indices) place = a.state_indices[n];
  const auto* anything = static_cast<const float*>(a.q);
  const uint32_t raw_a_log = opaque(bits(*(a.a_log ? a.a_log + gate_head : anything)));  // null: log gates, which have no use for it
  const uint32_t raw_bias = opaque(bits(*(a.dt_bias ? a.dt_bias + uint64_t(gate_head) * kDim + thread : anything)));
  uint32_t gates[kTokens];  // of key channel `thread`
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    gates[t] = opaque(0);
    if (t < tokens) gates[t] = load_word(a.g, uint64_t(value_row + uint32_t(t) * heads) * kDim + thread, gates_f32);
    gates[t] = opaque(gates[t]);
  }
  // Rows of q and k: four channels a lane. Of a single token every warp prepares both rows, and keeps the keys of its threads.
  Four queries[L::kRows], keys[L::kRows];
#pragma unroll
  for (int i = 0; i < L::kRows; ++i) {
    const int t = kTokens == 1 ? 0 : warp + i * kWarps;
    const uint64_t from = uint64_t(key_row + uint32_t(t) * uint32_t(a.H)) * kDim + 4 * lane;
    queries[i] = opaque_four({0, 0}), keys[i] = opaque_four({0, 0});
    if (t < tokens) queries[i] = load_four(a.q, from), keys[i] = load_four(a.k, from);
    queries[i] = opaque_four(queries[i]), keys[i] = opaque_four(keys[i]);
  }
  uint32_t raw_v[L::kVs];
#pragma unroll
  for (int i = 0; i < L::kVs; ++i) {
    const int t = (thread + i * kThreads) / kColumns;
    raw_v[i] = opaque(0);
    if (t < tokens) raw_v[i] = static_cast<const uint16_t*>(a.v)[uint64_t(value_row + uint32_t(t) * heads) * kDim + column + thread % kColumns];
    raw_v[i] = opaque(raw_v[i]);
  }
  const Halves raw_beta = load_halves(a.beta, value_row + uint32_t(thread < tokens ? thread : 0) * heads, beta_f32);

  if (place < 0 || place >= a.P) {  // a padding slot
#pragma unroll 1
    for (int i = thread; i < tokens * kColumns; i += kThreads) o[uint64_t(i / kColumns) * heads * kDim + i % kColumns] = __float2bfloat16(0.f);
    return;
  }
  const int key_group = kVFirst ? thread % L::kKeyGroups : thread / L::kValueGroups;
  const int value_group = kVFirst ? thread / L::kKeyGroups : thread % L::kValueGroups;
  const int key = key_group * L::kKeys, value = value_group * L::kValues;  // the thread's first
  const int corner = kVFirst ? (column + value) * kDim + key : key * kDim + column + value;
  T* state = static_cast<T*>(a.state) + (place * heads + head) * (kDim * kDim) + corner;
  uint4 raw[L::kAccesses];
#pragma unroll
  for (int i = 0; i < L::kAccesses; ++i) raw[i] = *reinterpret_cast<const uint4*>(state + i * kDim);

  const float rate = expf(from_bits(raw_a_log)), bias = a.dt_bias ? from_bits(raw_bias) : 0.f;
#pragma unroll 1
  for (int t = 0; t < tokens; t += L::kTurn) {
    float decays[L::kTurn];
#pragma unroll
    for (int i = 0; i < L::kTurn; ++i) decays[i] = widen(gates[i], thread, gates_f32);
#pragma unroll
    for (int i = L::kTurn; i < kTokens; ++i) gates[i - L::kTurn] = gates[i];
    turn_into_decays(decays, bias, rate, a.gate, a.lower_bound);
#pragma unroll
    for (int i = 0; i < L::kTurn; ++i) store_shared(base + L::kDecay + ((t + i) * kDim + thread) * 4, decays[i]);
  }
#pragma unroll 1
  for (int first_token = 0; first_token < tokens; first_token += kWarps) {
    const int t = kTokens == 1 ? 0 : first_token + warp;
    float4 q = widen(queries[0]), k = widen(keys[0]);
#pragma unroll
    for (int i = 1; i < L::kRows; ++i) queries[i - 1] = queries[i], keys[i - 1] = keys[i];
    normalise(q, k, a.scale, a.l2norm, lane);
    const uint32_t to = base + (t * kDim + 4 * lane) * 4;
    if (kTokens == 1 ? lane / (32 / kWarps) == warp : t < tokens) store_shared4(to + L::kQ, q), store_shared4(to + L::kK, k);
  }
#pragma unroll
  for (int i = 0; i < L::kVs; ++i)
    if (thread + i * kThreads < tokens * kColumns) store_shared(base + L::kV + (thread + i * kThreads) * 4, low_bf16(raw_v[i]));
  const float strength = strength_of(widen(raw_beta, beta_f32), a.beta_mode);
  if (thread < tokens) store_shared(base + L::kBeta + thread * 4, strength);

  float S[L::kKeys][L::kValues];
#pragma unroll
  for (int i = 0; i < L::kAccesses; ++i) {
    const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
    for (int j = 0; j < L::kWide; ++j) {
      const float x = sizeof(T) == 4 ? from_bits(words[j % 4]) : j % 2 ? high_bf16(words[j / 2]) : low_bf16(words[j / 2]);
      (kVFirst ? S[j][i] : S[i][j]) = x;
    }
  }
  if constexpr (kTokens == 1 && !kVFirst) sync_warp();
  else __syncthreads();

  const bool owner = lane / L::kStride % L::kLanes < L::kValues;
  const int part = kVFirst ? 0 : warp;
#pragma unroll 1
  for (int t = 0; t < tokens; ++t) {
    const uint32_t row = base + (t * kDim + key) * 4;
    float d[L::kKeys], k[L::kKeys], sums[L::kValues] = {};
    load_floats(d, row + L::kDecay), load_floats(k, row + L::kK);
#pragma unroll
    for (int e = 0; e < L::kKeys; ++e)
#pragma unroll
      for (int j = 0; j < L::kValues; ++j) S[e][j] *= d[e], sums[j] = fma(S[e][j], k[e], sums[j]);
    int owned;
    float sum = sum_over_keys<L>(sums, lane, owned);
    const uint32_t predicted = base + L::kPredicted + (t & 1) * (L::kParts * kColumns * 4) + value * 4;
    if (owner) store_shared(predicted + (part * kColumns + owned) * 4, sum);
    if constexpr (L::kParts == 1) sync_warp();
    else __syncthreads();

    const float beta = load_shared(base + L::kBeta + t * 4);
    float p[L::kValues], u[L::kValues], q[L::kKeys];
    load_floats(p, predicted), load_floats(u, base + L::kV + (t * kColumns + value) * 4), load_floats(q, row + L::kQ);
#pragma unroll
    for (int i = 1; i < L::kParts; ++i) {
      float more[L::kValues];
      load_floats(more, predicted + i * kColumns * 4);
#pragma unroll
      for (int j = 0; j < L::kValues; ++j) p[j] += more[j];
    }
#pragma unroll
    for (int j = 0; j < L::kValues; ++j) u[j] = beta * (u[j] - p[j]), sums[j] = 0.f;
#pragma unroll
    for (int e = 0; e < L::kKeys; ++e)
#pragma unroll
      for (int j = 0; j < L::kValues; ++j) S[e][j] = fma(k[e], u[j], S[e][j]), sums[j] = fma(S[e][j], q[e], sums[j]);
    sum = sum_over_keys<L>(sums, lane, owned);
    if (owner) store_shared(base + L::kRead + ((t * L::kParts + part) * kColumns + value + owned) * 4, sum);
  }

#pragma unroll
  for (int i = 0; i < L::kAccesses; ++i) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      auto at = [&](int e) { return kVFirst ? S[e][i] : S[i][e]; };
      if constexpr (sizeof(T) == 4) words[j] = bits(at(j));
      else words[j] = pack_bf16(at(2 * j), at(2 * j + 1));
    }
    *reinterpret_cast<uint4*>(state + i * kDim) = make_uint4(words[0], words[1], words[2], words[3]);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < tokens * kColumns; i += kThreads) {
    const int t = i / kColumns, c = i % kColumns;
    float sum = 0.f;
#pragma unroll
    for (int p = 0; p < L::kParts; ++p) sum += load_shared(base + L::kRead + ((t * L::kParts + p) * kColumns + c) * 4);
    o[uint64_t(t) * heads * kDim + c] = __float2bfloat16(sum);
  }
}

template <bool kVFirst, class T, int kColumns, int kTokens> cudaError_t launch_decode(const DecodeArgs& a, cudaStream_t stream) {
  constexpr uint32_t kBytes = Decode<kVFirst, T, kColumns, kTokens>::kBytes;
  static_assert(kBytes <= 48 * 1024, "beyond it a kernel has to ask for its shared memory");
  constexpr auto kernel = decode_kernel<kVFirst, T, kColumns, kTokens>;
  const Divisor by_heads{uint32_t(a.HV)}, by_group{uint32_t(a.HV / a.H)};
  kernel<<<unsigned(a.B * a.HV * (kDim / kColumns)), kThreads, kBytes, stream>>>(a, by_heads, by_group);
  return cudaGetLastError();
}

template <int kColumns, int kTokens> cudaError_t select_decode(const DecodeArgs& a, cudaStream_t stream) {
  if (a.state_dtype == DType::kF32)
    return a.state_v_first ? launch_decode<true, float, kColumns, kTokens>(a, stream) : launch_decode<false, float, kColumns, kTokens>(a, stream);
  return a.state_v_first ? launch_decode<true, __nv_bfloat16, kColumns, kTokens>(a, stream)
                         : launch_decode<false, __nv_bfloat16, kColumns, kTokens>(a, stream);
}

// Below this many (sequence, head) pairs slices of 32 channels leave multiprocessors without a CTA (H100 and H200 have 132).
constexpr int64_t kNarrowBelow = 32;

}  // namespace

cudaError_t decode(const DecodeArgs& a, cudaStream_t stream) {
  if (a.B < 0 || a.T < 1 || a.T > kMaxDecodeTokens || a.H <= 0 || a.HV <= 0 || a.HV % a.H != 0 || a.P < 0) return cudaErrorInvalidValue;
  if (!a.state_indices && a.P != a.B) return cudaErrorInvalidValue;
  if (a.B > INT32_MAX || a.HV > INT32_MAX || a.B * a.HV > INT32_MAX / 8) return cudaErrorInvalidValue;
  if (a.gate != GateMode::kLog && (!a.a_log || (a.gate_rows != 1 && a.gate_rows != a.B))) return cudaErrorInvalidValue;
  if (a.columns != 0 && a.columns != 16 && a.columns != 32) return cudaErrorInvalidValue;
  if (a.B == 0) return cudaSuccess;
  const bool narrow = a.columns ? a.columns == 16 : a.B * a.HV < kNarrowBelow;
  constexpr int kMost = int(kMaxDecodeTokens);
  if (a.T == 1) return narrow ? select_decode<16, 1>(a, stream) : select_decode<32, 1>(a, stream);
  return narrow ? select_decode<16, kMost>(a, stream) : select_decode<32, kMost>(a, stream);
}

}  // namespace jax_kda
