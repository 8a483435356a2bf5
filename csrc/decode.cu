// Decode: 1 to 8 tokens, one CTA per (sequence, value head, slice of value channels). Value channels never interact, so slices are exact.
//
//   thread    32 elements of the state in registers, kKeys x kValues: read once before the first token, written once after the last, 16 bytes an
//             access along the contiguous axis. The other axis is the threads': whole 128-byte lines where states are [K, V] in f32, rows of all
//             128 keys where they are [V, K].
//   before    the state's loads are under way while the warps turn q, k, g and beta into shared memory: normed, scaled, as decays
//   a token   S <- decay S;  p = S^T k, over the thread's keys, its warp's lanes (halving: each exchange also halves what a lane holds), and the
//             warps (through shared memory);  u = beta (v - p);  S <- S + k u^T;  and its share of S^T q goes to shared memory
//   after     the shares are added up and written: tokens wait for one another once each, not twice
//
// States [V, K] have all keys of a value channel in one warp: there warps never wait for each other inside the loop.
#include "kernels/mma.cuh"
#include "kernels/pipeline.cuh"
#include "launch.h"

#include <cuda_bf16.h>

#include <cmath>
#include <type_traits>

namespace jax_kda {
namespace {

constexpr int kDim = 128;
constexpr int kTokens = int(kMaxDecodeTokens);

template <bool kVFirst, class T, int kColumns> struct Decode {
  static constexpr int kWide = 16 / int(sizeof(T));  // elements of one access
  static constexpr int kKeys = kVFirst ? kWide : 32 / kWide, kValues = 32 / kKeys;
  static constexpr int kAccesses = 32 / kWide;
  static constexpr int kThreads = kColumns * 4, kWarps = kThreads / 32;
  static constexpr int kKeyGroups = kDim / kKeys, kValueGroups = kColumns / kValues;
  static constexpr int kStride = kVFirst ? 1 : kValueGroups;               // from a lane to the one with the next keys
  static constexpr int kLanes = kVFirst ? kKeyGroups : 32 / kValueGroups;  // of a warp that share value channels
  static constexpr int kParts = kVFirst ? 1 : kWarps;                      // warps that do
  static constexpr int kAhead = 4;                                         // rows of q, k, g that a warp asks for before it prepares one
  static_assert(kLanes >= kValues && kLanes * kStride <= 32);

  // Shared memory, f32 throughout.
  static constexpr uint32_t kQ = 0, kK = kQ + kTokens * kDim * 4, kDecay = kK + kTokens * kDim * 4;
  static constexpr uint32_t kV = kDecay + kTokens * kDim * 4, kBeta = kV + kTokens * kColumns * 4;
  static constexpr uint32_t kPredicted = kBeta + kTokens * 4;  // of two tokens in turn
  static constexpr uint32_t kRead = kPredicted + 2 * kParts * kColumns * 4;
  static constexpr uint32_t kBytes = kRead + kTokens * kParts * kColumns * 4;
};

// One element as it lies; bf16 in the lower half.
KDA_DEVICE uint32_t load_one(const void* from, int64_t i, bool f32) {
  return f32 ? static_cast<const uint32_t*>(from)[i] : static_cast<const uint16_t*>(from)[i];
}
// Four channels from channel i on (a multiple of 4), as they lie; bf16 in the first two words.
KDA_DEVICE uint4 load_four(const void* from, int64_t i, bool f32) {
  if (f32) return *reinterpret_cast<const uint4*>(static_cast<const float*>(from) + i);
  struct alignas(8) Pair {
    uint32_t x, y;
  };
  const Pair pair = *reinterpret_cast<const Pair*>(static_cast<const __nv_bfloat16*>(from) + i);
  return make_uint4(pair.x, pair.y, 0, 0);
}
KDA_DEVICE float4 widen_four(uint4 raw, bool f32) {
  if (f32) return {from_bits(raw.x), from_bits(raw.y), from_bits(raw.z), from_bits(raw.w)};
  return {low_bf16(raw.x), high_bf16(raw.x), low_bf16(raw.y), high_bf16(raw.y)};
}

KDA_DEVICE float sum_squares(float4 x, int lane) {  // over the warp; every lane has the same bits
  float s = fma(x.x, x.x, fma(x.y, x.y, fma(x.z, x.z, x.w * x.w)));
#pragma unroll
  for (int step = 1; step < 32; step *= 2) s += shuffle(s, lane ^ step);
  return s;
}

// x rsqrt(sum x^2 + 1e-6) times `factor`. Rows whose squares would leave float32 are scaled by a power of two first.
KDA_DEVICE float4 normalised(float4 x, bool l2norm, float factor, int lane) {
  if (l2norm) {
    float s = sum_squares(x, lane);
    if (s > 0x1p80f) {
      x = {x.x * 0x1p-100f, x.y * 0x1p-100f, x.z * 0x1p-100f, x.w * 0x1p-100f};
      s = sum_squares(x, lane);
    } else {
      s += 1e-6f;
    }
    const float r = 1.f / sqrtf(s);
    x = {x.x * r, x.y * r, x.z * r, x.w * r};
  }
  return {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}

// The factor itself, to float32's rounding: over thousands of tokens a biased last bit would add up.
KDA_DEVICE float decay_of(float raw, float bias, float rate, GateMode mode, float lower_bound) {
  const float z = raw + bias;
  float g = raw;
  if (mode == GateMode::kSafe) g = lower_bound / (1.f + expf(-rate * z));
  if (mode == GateMode::kSoftplus) g = -rate * (fmaxf(z, 0.f) + log1pf(expf(-fabsf(z))));
  return g > -0.5f ? 1.f + expm1f(g) : expf(g);
}

KDA_DEVICE float strength_of(float raw, BetaMode mode) {
  if (mode == BetaMode::kPlain) return raw;
  return (mode == BetaMode::kSigmoidDoubled ? 2.f : 1.f) / (1.f + expf(-raw));
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

template <bool kVFirst, class T, int kColumns>
__global__ void __launch_bounds__(Decode<kVFirst, T, kColumns>::kThreads, 640 / Decode<kVFirst, T, kColumns>::kThreads) decode_kernel(const __grid_constant__ DecodeArgs a) {
  using L = Decode<kVFirst, T, kColumns>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, tokens = int(a.T);
  constexpr int kSlices = kDim / kColumns;
  // 32-bit divisions: nothing starts before they are done.
  const uint32_t task = uint32_t(blockIdx.x) / kSlices, heads = uint32_t(a.HV), sequence = task / heads, head_index = task - sequence * heads;
  const int64_t n = sequence, head = head_index, key_head = head_index / (heads / uint32_t(a.H));
  const int column = int(uint32_t(blockIdx.x) % kSlices) * kColumns;
  auto* o = static_cast<__nv_bfloat16*>(a.o) + (n * a.T * a.HV + head) * kDim + column;

  const int64_t place = a.state_indices ? int64_t(a.state_indices[n]) : n;
  if (place < 0 || place >= a.P) {  // a padding slot
    for (int i = thread; i < tokens * kColumns; i += L::kThreads) o[i / kColumns * a.HV * kDim + i % kColumns] = __float2bfloat16(0.f);
    return;
  }

  // The state's loads first: all else happens while they are under way.
  const int key_group = kVFirst ? thread % L::kKeyGroups : thread / L::kValueGroups;
  const int value_group = kVFirst ? thread / L::kKeyGroups : thread % L::kValueGroups;
  const int key = key_group * L::kKeys, value = value_group * L::kValues;  // the thread's first
  T* state = static_cast<T*>(a.state) + (place * a.HV + head) * (kDim * kDim) + (kVFirst ? (column + value) * kDim + key : key * kDim + column + value);
  uint4 raw[L::kAccesses];
#pragma unroll
  for (int i = 0; i < L::kAccesses; ++i) raw[i] = *reinterpret_cast<const uint4*>(state + i * kDim);

  // All loads of the first turn before anything waits for one of them.
  const int64_t first = n * a.T, gate_head = (a.gate_rows > 1 ? n : 0) * a.HV + head;
  const bool gates_f32 = a.g_dtype == DType::kF32, beta_f32 = a.beta_dtype == DType::kF32;
  // Row j of q, k, g (q, k, g of token 0, of token 1, ...) goes to warp j % kWarps, four channels a lane.
  uint4 rows[L::kAhead];
  auto load_rows = [&](int next) {
#pragma unroll
    for (int i = 0; i < L::kAhead; ++i) {
      const int job = next + i * L::kWarps, token = job / 3, kind = job % 3;
      if (job >= 3 * tokens) break;
      if (kind == 2) rows[i] = load_four(a.g, ((first + token) * a.HV + head) * kDim + 4 * lane, gates_f32);
      else rows[i] = load_four(kind == 0 ? a.q : a.k, ((first + token) * a.H + key_head) * kDim + 4 * lane, false);
    }
  };
  load_rows(warp);
  uint32_t raw_v[2] = {}, raw_beta = 0;
  static_assert(kTokens * kColumns == 2 * L::kThreads);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = (thread + i * L::kThreads) / kColumns;
    if (token < tokens) raw_v[i] = static_cast<const uint16_t*>(a.v)[((first + token) * a.HV + head) * kDim + column + thread % kColumns];
  }
  if (thread < tokens) raw_beta = load_one(a.beta, (first + thread) * a.HV + head, beta_f32);
  const float a_log = a.a_log ? a.a_log[gate_head] : 0.f;
  float4 bias = {0.f, 0.f, 0.f, 0.f};
  if (a.dt_bias) bias = *reinterpret_cast<const float4*>(a.dt_bias + gate_head * kDim + 4 * lane);

  const float rate = expf(a_log);
#pragma unroll 1
  for (int next = warp; next < 3 * tokens; next += L::kAhead * L::kWarps) {
    if (next != warp) load_rows(next);
#pragma unroll
    for (int i = 0; i < L::kAhead; ++i) {
      const int job = next + i * L::kWarps, token = job / 3, kind = job % 3;
      if (job >= 3 * tokens) break;
      float4 x = widen_four(rows[i], kind == 2 && gates_f32);
      if (kind == 2) {
        auto decay = [&](float g, float b) { return decay_of(g, b, rate, a.gate, a.lower_bound); };
        x = {decay(x.x, bias.x), decay(x.y, bias.y), decay(x.z, bias.z), decay(x.w, bias.w)};
      } else {
        x = normalised(x, a.l2norm, kind == 0 ? a.scale : 1.f, lane);
      }
      store_shared4(base + (kind == 0 ? L::kQ : kind == 1 ? L::kK : L::kDecay) + (token * kDim + 4 * lane) * 4, x);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (thread + i * L::kThreads < tokens * kColumns) store_shared(base + L::kV + (thread + i * L::kThreads) * 4, low_bf16(raw_v[i]));
  if (thread < tokens) store_shared(base + L::kBeta + thread * 4, strength_of(beta_f32 ? from_bits(raw_beta) : low_bf16(raw_beta), a.beta_mode));

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
  __syncthreads();

  const bool owner = lane / L::kStride % L::kLanes < L::kValues;
  const int part = kVFirst ? 0 : warp;
#pragma unroll 1
  for (int t = 0; t < tokens; ++t) {
    const uint32_t row = base + (t * kDim + key) * 4;
    float sums[L::kValues] = {};
#pragma unroll
    for (int i = 0; i < L::kKeys; i += 4) {
      const float4 decays = load_shared4(row + L::kDecay + i * 4), keys = load_shared4(row + L::kK + i * 4);
      const float d[4] = {decays.x, decays.y, decays.z, decays.w}, k[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int j = 0; j < L::kValues; ++j) S[i + e][j] *= d[e], sums[j] = fma(S[i + e][j], k[e], sums[j]);
    }
    int owned;
    float sum = sum_over_keys<L>(sums, lane, owned);
    const uint32_t predicted = base + L::kPredicted + (t & 1) * (L::kParts * kColumns * 4) + value * 4;
    if (owner) store_shared(predicted + (part * kColumns + owned) * 4, sum);
    if constexpr (L::kParts == 1) sync_warp();
    else __syncthreads();

    const float beta = load_shared(base + L::kBeta + t * 4);
    float u[L::kValues];
#pragma unroll
    for (int j = 0; j < L::kValues; j += 4) {
      float4 p = load_shared4(predicted + j * 4);
#pragma unroll
      for (int i = 1; i < L::kParts; ++i) {
        const float4 more = load_shared4(predicted + (i * kColumns + j) * 4);
        p = {p.x + more.x, p.y + more.y, p.z + more.z, p.w + more.w};
      }
      const float4 v = load_shared4(base + L::kV + (t * kColumns + value + j) * 4);
      u[j] = beta * (v.x - p.x), u[j + 1] = beta * (v.y - p.y), u[j + 2] = beta * (v.z - p.z), u[j + 3] = beta * (v.w - p.w);
    }
#pragma unroll
    for (int j = 0; j < L::kValues; ++j) sums[j] = 0.f;
#pragma unroll
    for (int i = 0; i < L::kKeys; i += 4) {
      const float4 keys = load_shared4(row + L::kK + i * 4), queries = load_shared4(row + L::kQ + i * 4);
      const float k[4] = {keys.x, keys.y, keys.z, keys.w}, q[4] = {queries.x, queries.y, queries.z, queries.w};
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int j = 0; j < L::kValues; ++j) S[i + e][j] = fma(k[e], u[j], S[i + e][j]), sums[j] = fma(S[i + e][j], q[e], sums[j]);
    }
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
  for (int i = thread; i < tokens * kColumns; i += L::kThreads) {
    const int t = i / kColumns, c = i % kColumns;
    float sum = 0.f;
#pragma unroll
    for (int p = 0; p < L::kParts; ++p) sum += load_shared(base + L::kRead + ((t * L::kParts + p) * kColumns + c) * 4);
    o[t * a.HV * kDim + c] = __float2bfloat16(sum);
  }
}

template <bool kVFirst, class T, int kColumns> cudaError_t launch_decode(const DecodeArgs& a, cudaStream_t stream) {
  using L = Decode<kVFirst, T, kColumns>;
  static_assert(L::kBytes <= 48 * 1024, "beyond it a kernel has to ask for its shared memory");
  constexpr auto kernel = decode_kernel<kVFirst, T, kColumns>;
  kernel<<<unsigned(a.B * a.HV * (kDim / kColumns)), L::kThreads, L::kBytes, stream>>>(a);
  return cudaGetLastError();
}

template <int kColumns> cudaError_t select_decode(const DecodeArgs& a, cudaStream_t stream) {
  if (a.state_dtype == DType::kF32)
    return a.state_v_first ? launch_decode<true, float, kColumns>(a, stream) : launch_decode<false, float, kColumns>(a, stream);
  return a.state_v_first ? launch_decode<true, __nv_bfloat16, kColumns>(a, stream) : launch_decode<false, __nv_bfloat16, kColumns>(a, stream);
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
  return narrow ? select_decode<16>(a, stream) : select_decode<32>(a, stream);
}

}  // namespace jax_kda
