// The arrays of one call, made on the device: counter-based random numbers, so that large shapes take milliseconds.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>

#include "case.cuh"

namespace {

__device__ inline void store(void* to, size_t i, float x, DType type) {
  if (type == DType::kF32) static_cast<float*>(to)[i] = x;
  else static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16(x);
}

// splitmix64: number i of the stream that the key names.
__host__ __device__ inline uint64_t random_bits(uint64_t key, uint64_t i) {
  uint64_t x = key + (i + 1) * 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__device__ inline float2 uniform_pair(uint64_t key, uint64_t i) {  // in (0, 1]
  const uint64_t x = random_bits(key, i);
  return {(float(uint32_t(x >> 32)) + 0.5f) * 0x1p-32f, (float(uint32_t(x)) + 0.5f) * 0x1p-32f};
}

__device__ inline float normal(uint64_t key, uint64_t i) {  // Box-Muller
  const float2 u = uniform_pair(key, i);
  return sqrtf(-2.f * logf(u.x)) * cospif(2.f * u.y);
}

__device__ inline size_t first_index() { return size_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline size_t index_step() { return size_t(gridDim.x) * blockDim.x; }

__global__ void fill_normal(void* to, DType type, size_t n, uint64_t key, float scale) {
  for (size_t i = first_index(); i < n; i += index_step()) store(to, i, scale * normal(key, i), type);
}

__global__ void fill_uniform(void* to, DType type, size_t n, uint64_t key, float low, float high) {
  for (size_t i = first_index(); i < n; i += index_step()) store(to, i, low + uniform_pair(key, i).x * (high - low), type);
}

// One direction a head, with noise.
__global__ void fill_collinear(void* to, DType type, size_t n, size_t channels, uint64_t key, uint64_t direction_key) {
  for (size_t i = first_index(); i < n; i += index_step()) store(to, i, normal(direction_key, i % channels) + 0.05f * normal(key, i), type);
}

// Raw gates of the safe gate, offset + slope * N(0, 1) per channel, given to `gate`: as they are, as the log decay itself, or as what softplus
// turns into that log decay.
__global__ void fill_gates(void* to, DType type, size_t n, size_t channels, uint64_t key, const float* slope, const float* offset, GateMode gate) {
  for (size_t i = first_index(); i < n; i += index_step()) {
    const size_t c = i % channels;
    float y = slope[c] == 0.f ? offset[c] : fmaf(slope[c], normal(key, i), offset[c]);
    if (gate != GateMode::kSafe) {
      const float decay = 5.f / (1.f + expf(-y));
      y = gate == GateMode::kLog ? -decay : fmaxf(logf(expm1f(decay)), -1e4f);
    }
    store(to, i, y, type);
  }
}

// Log decays -exp(U(log low, log high)), some of them 0.
__global__ void fill_log_uniform(void* to, DType type, size_t n, uint64_t key, float low, float high, float zeros) {
  for (size_t i = first_index(); i < n; i += index_step()) {
    const float2 u = uniform_pair(key, i);
    store(to, i, u.x < zeros ? 0.f : -expf(logf(low) + u.y * logf(high / low)), type);
  }
}

// The gate regimes, per channel.
struct Regime {
  GateMode gate = GateMode::kSafe;
  float lower_bound = -5.f;
  std::vector<float> slope, offset;  // raw gate: offset + slope * N(0, 1), of the safe gate unless `high` says otherwise
  std::vector<float> a_log, dt;
  float low = 0.f, high = 0.f, zeros = 0.f;  // high > 0: log-uniform log decays
};

inline Regime make_regime(const Case& c, unsigned seed) {
  Regime x;
  std::mt19937 r(seed);
  std::uniform_real_distribution<double> uniform;
  auto log_uniform = [&](double low, double high) { return std::exp(std::log(low) + uniform(r) * std::log(high / low)); };
  const size_t channels = size_t(c.HV) * D;
  const std::string& gates = c.gates;
  std::vector<double> slope(channels, 1.), offset(channels, 0.), a_log(c.HV, 0.), dt(channels, 0.);
  if (gates == "production" || gates == "mixed") {
    for (auto& y : a_log) y = uniform(r);
    for (auto& y : dt) y = uniform(r);
  }
  for (size_t i = 0; i < channels; ++i) {
    if (gates == "slow" || gates == "collinear") dt[i] = std::log(std::expm1(log_uniform(1e-3, 1e-1)));
    if (gates == "long" || (gates == "mixed" && i % 2)) {
      const double p = log_uniform(1e-5, 1e-1) / 5.;
      slope[i] = 0., offset[i] = (std::log(p) - std::log1p(-p)) / std::exp(a_log[i / D]) - dt[i];
    }
    if (gates == "bound") slope[i] = 0., offset[i] = 20.;
    if (gates == "none") slope[i] = 0., offset[i] = -1e4;
  }
  if (gates == "unbounded") x.gate = GateMode::kLog, x.low = 1e-3f, x.high = 2661.f, x.zeros = 0.5f;
  if (gates == "log") x.gate = GateMode::kLog, x.low = 1e-3f, x.high = 1.f;
  if (gates == "wide") x.lower_bound = -12.f;  // a bound that takes the unbounded scheme
  if (gates == "softplus") {
    x.gate = GateMode::kSoftplus;
    for (auto& y : a_log) y = 3. * uniform(r) - 1.;
    for (auto& y : dt) y = uniform(r);
  }
  if (c.one_input) {  // exp(A_log) and dt_bias become part of the raw gates
    x.gate = c.gate;
    for (size_t i = 0; i < channels; ++i) {
      const double a = std::exp(a_log[i / D]);
      slope[i] *= a, offset[i] = a * (offset[i] + dt[i]), dt[i] = 0.;
    }
    a_log.assign(c.HV, 0.);
  }
  x.slope.assign(slope.begin(), slope.end()), x.offset.assign(offset.begin(), offset.end());
  x.a_log.assign(a_log.begin(), a_log.end()), x.dt.assign(dt.begin(), dt.end());
  return x;
}

// One call, its arrays on the device for as long as this lives.
class Call {
 public:
  PrefillArgs a{};

  Call(const Case& c, unsigned seed) {
    const size_t rows = size_t(c.B) * c.T, channels = size_t(c.HV) * D;
    const Regime x = make_regime(c, seed);
    auto key = [&](uint64_t stream) { return random_bits(seed, stream); };
    auto grid = [](size_t n) { return unsigned(std::clamp<size_t>((n + 255) / 256, 1, 4096)); };

    const float norm = c.l2norm ? 1.f : 1.f / std::sqrt(float(D));
    const size_t keys = rows * c.H * D, values = rows * channels;
    void* q = bytes(keys * 2);
    fill_normal<<<grid(keys), 256>>>(q, DType::kBF16, keys, key(0), norm);
    void* k = bytes(keys * 2);
    if (c.gates == "collinear") fill_collinear<<<grid(keys), 256>>>(k, DType::kBF16, keys, size_t(c.H) * D, key(1), key(2));
    else fill_normal<<<grid(keys), 256>>>(k, DType::kBF16, keys, key(1), norm);
    void* v = bytes(values * 2);
    fill_normal<<<grid(values), 256>>>(v, DType::kBF16, values, key(3), 1.f);

    void* g = bytes(values * size_of(c.g_dtype));
    if (x.high > 0.f) {
      fill_log_uniform<<<grid(values), 256>>>(g, c.g_dtype, values, key(4), x.low, x.high, x.zeros);
    } else {
      const float *slope = upload(x.slope), *offset = upload(x.offset);
      fill_gates<<<grid(values), 256>>>(g, c.g_dtype, values, channels, key(4), slope, offset, c.one_input ? x.gate : GateMode::kSafe);
    }
    const size_t strengths = rows * c.HV;
    void* beta = bytes(strengths * size_of(c.beta_dtype));
    if (c.gates == "collinear") fill_uniform<<<grid(strengths), 256>>>(beta, c.beta_dtype, strengths, key(5), 3.f, 8.f);
    else if (c.beta_mode == BetaMode::kPlain) fill_uniform<<<grid(strengths), 256>>>(beta, c.beta_dtype, strengths, key(5), 0.f, 1.f);
    else fill_normal<<<grid(strengths), 256>>>(beta, c.beta_dtype, strengths, key(5), 1.f);

    const size_t states = size_t(c.sequences()) * channels * D;
    if (c.has_state) {
      void* state = bytes(states * size_of(c.state_in));
      fill_normal<<<grid(states), 256>>>(state, c.state_in, states, key(6), 0.5f);
      a.initial_state = state;
    }
    CUDA(cudaGetLastError());

    if (!c.lengths.empty()) {
      std::vector<int32_t> offsets = {0};
      for (int n : c.lengths) offsets.push_back(offsets.back() + n);
      a.offsets = upload(offsets);
      // Rows that belong to no sequence hold NaN: none may reach a result.
      auto nan = [&](void* p, size_t row_bytes) {
        const size_t done = size_t(c.covered()) * row_bytes;
        CUDA(cudaMemset(static_cast<char*>(p) + done, 0xff, rows * row_bytes - done));
      };
      if (size_t(c.covered()) < rows) {
        nan(q, size_t(c.H) * D * 2), nan(k, size_t(c.H) * D * 2), nan(v, channels * 2);
        nan(g, channels * size_of(c.g_dtype)), nan(beta, c.HV * size_of(c.beta_dtype));
      }
    }
    a.q = q, a.k = k, a.v = v, a.g = g, a.beta = beta;
    a.a_log = upload(x.a_log), a.dt_bias = upload(x.dt);
    o_bytes_ = values * 2, state_bytes_ = states * size_of(c.state_out);
    a.o = bytes(o_bytes_), a.final_state = bytes(state_bytes_);
    if (c.checkpoint_every) {
      checkpoint_bytes_ = size_t(c.B) * (c.T / c.checkpoint_every) * channels * D * size_of(c.state_out);
      a.checkpoints = bytes(checkpoint_bytes_), a.checkpoint_every = c.checkpoint_every;
    }
    a.B = c.B, a.T = c.T, a.N = c.lengths.empty() ? 1 : int64_t(c.lengths.size()), a.H = c.H, a.HV = c.HV, a.gate_rows = 1;
    a.g_dtype = c.g_dtype, a.beta_dtype = c.beta_dtype, a.state_in_dtype = c.state_in, a.state_out_dtype = c.state_out;
    a.gate = x.gate, a.beta_mode = c.beta_mode, a.l2norm = c.l2norm, a.state_v_first = c.v_first;
    a.segment_chunks = c.segment_chunks;
    a.scale = 1.f / std::sqrt(float(D)), a.lower_bound = x.lower_bound;
    CUDA(cudaDeviceSynchronize());  // what follows runs on other streams
  }
  Call(const Call&) = delete;
  ~Call() {
    for (void* p : owned_) cudaFree(p);
  }

  void set_offsets(const std::vector<int32_t>& offsets) { a.offsets = upload(offsets); }
  size_t o_bytes() const { return o_bytes_; }
  size_t state_bytes() const { return state_bytes_; }

  // The workspace of a route, in place of the one before.
  void prepare(Route route) {
    if (a.workspace) {
      cudaFree(a.workspace);
      owned_.erase(std::find(owned_.begin(), owned_.end(), a.workspace));
    }
    a.workspace_bytes = workspace_bytes(route, a);
    a.workspace = bytes(a.workspace_bytes);
  }

  // NaN bits in everything that a call writes.
  void poison() {
    CUDA(cudaMemset(a.o, 0xff, o_bytes_));
    CUDA(cudaMemset(a.final_state, 0xff, state_bytes_));
    if (checkpoint_bytes_) CUDA(cudaMemset(a.checkpoints, 0xff, checkpoint_bytes_));
    if (a.workspace_bytes) CUDA(cudaMemset(a.workspace, 0xff, a.workspace_bytes));
    CUDA(cudaDeviceSynchronize());
  }

 private:
  std::vector<void*> owned_;
  size_t o_bytes_ = 0, state_bytes_ = 0, checkpoint_bytes_ = 0;

  static size_t size_of(DType type) { return type == DType::kF32 ? 4 : 2; }

  void* bytes(size_t n) {
    void* p = nullptr;
    CUDA(cudaMalloc(&p, std::max<size_t>(n, 16)));
    owned_.push_back(p);
    return p;
  }
  template <class T> T* upload(const std::vector<T>& x) {
    void* p = bytes(x.size() * sizeof(T));
    CUDA(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
    return static_cast<T*>(p);
  }
};

}  // namespace
