// A driver over launch.h without XLA: correctness at small shapes (for compute-sanitizer), and GPU times as bench.md asks for them.
//
//   driver check [ROUTE]                           every gate regime and option at small shapes against the f64 token recurrence
//   driver time ROUTE GATES B T H [HV] [LENGTHS]   one shape; LENGTHS packs the T tokens: 1300,547,...
//   driver guard                                   offsets of every wrong kind: must come back without touching foreign memory
//
// Every output is poisoned with NaN bits before a checked call. Exit status 1 where something is wrong.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/launch.h"

using namespace jax_kda;

#define CUDA(x)                                                                                     \
  do {                                                                                              \
    cudaError_t e_ = (x);                                                                           \
    if (e_ != cudaSuccess) { std::fprintf(stderr, "%s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); std::exit(2); } \
  } while (0)

namespace {

constexpr int D = 128;

struct Case {
  std::string gates = "production";
  int B = 1, T = 64, H = 1, HV = 1;
  std::vector<int> lengths;  // packed, where not empty
  DType g_dtype = DType::kBF16, beta_dtype = DType::kBF16, state_in = DType::kF32, state_out = DType::kF32;
  bool has_state = true, v_first = false, l2norm = true;
  BetaMode beta_mode = BetaMode::kSigmoid;
  int sequences() const { return lengths.empty() ? B : int(lengths.size()); }
};

double rounded(double x, DType d) { return d == DType::kF32 ? double(float(x)) : double(__bfloat162float(__float2bfloat16(float(x)))); }

struct Inputs {
  GateMode gate;
  float lower_bound = -5.f;
  std::vector<double> q, k, v, g, beta, a_log, dt, state;
  std::vector<int> offsets;
};

// The gate regimes of the contract. All of them but two go through the raw input of the safe gate.
Inputs make_inputs(const Case& c, unsigned seed) {
  Inputs x;
  std::mt19937 r(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  auto fill = [&](std::vector<double>& to, size_t n, DType d, std::function<double()> f) {
    to.resize(n);
    for (auto& y : to) y = rounded(f(), d);
  };
  const size_t rows = size_t(c.B) * c.T;
  fill(x.q, rows * c.H * D, DType::kBF16, [&] { return normal(r); });
  fill(x.k, rows * c.H * D, DType::kBF16, [&] { return normal(r); });
  fill(x.v, rows * c.HV * D, DType::kBF16, [&] { return normal(r); });
  fill(x.state, size_t(c.sequences()) * c.HV * D * D, c.state_in, [&] { return 0.5 * normal(r); });
  const bool plain = c.beta_mode == BetaMode::kPlain;
  fill(x.beta, rows * c.HV, c.beta_dtype, [&] { return plain ? uniform(r) : normal(r); });
  if (!c.l2norm) {
    for (auto* a : {&x.q, &x.k})
      for (auto& y : *a) y = rounded(y / std::sqrt(double(D)), DType::kBF16);
  }
  x.a_log.assign(c.HV, 0.);
  x.dt.assign(size_t(c.HV) * D, 0.);
  x.gate = GateMode::kSafe;
  auto logit = [](double p) { return std::log(p) - std::log1p(-p); };
  std::vector<double> constant(size_t(c.HV) * D);  // `long`: per channel
  for (auto& y : constant) y = std::exp(std::log(1e-5) + uniform(r) * (std::log(1e-1) - std::log(1e-5)));
  x.g.resize(rows * c.HV * D);
  if (c.gates == "production" || c.gates == "mixed") {
    for (auto& y : x.a_log) y = float(uniform(r));
    for (auto& y : x.dt) y = float(uniform(r));
  }
  if (c.gates == "slow" || c.gates == "collinear")
    for (auto& y : x.dt) y = float(std::log(std::expm1(std::exp(std::log(1e-3) + uniform(r) * std::log(100.)))));
  for (size_t i = 0; i < x.g.size(); ++i) {
    const size_t channel = i % D, head = i / D % c.HV, at = head * D + channel;
    double y = normal(r);
    if (c.gates == "long" || (c.gates == "mixed" && channel % 2)) {
      y = logit(constant[at] / 5.);
      if (c.gates == "mixed") y = y / std::exp(x.a_log[head]) - x.dt[at];
    } else if (c.gates == "bound") {
      y = 20.;
    } else if (c.gates == "none") {
      y = -1e4;
    } else if (c.gates == "unbounded") {  // log gates
      x.gate = GateMode::kLog;
      y = uniform(r) < 0.5 ? 0. : -std::exp(std::log(1e-3) + uniform(r) * (std::log(2661.) - std::log(1e-3)));
    } else if (c.gates == "log") {
      x.gate = GateMode::kLog;
      y = -std::exp(std::log(1e-3) + uniform(r) * std::log(1e3));
    } else if (c.gates == "softplus") {
      x.gate = GateMode::kSoftplus;
    } else if (c.gates == "wide") {  // a safe gate whose bound takes the unbounded scheme
      x.lower_bound = -12.f;
    }
    x.g[i] = rounded(y, c.g_dtype);
  }
  if (c.gates == "softplus") {
    for (auto& y : x.a_log) y = float(3. * uniform(r) - 1.);
    for (auto& y : x.dt) y = float(uniform(r));
  }
  if (c.gates == "collinear") {
    std::vector<double> k0(size_t(c.H) * D);
    for (auto& y : k0) y = normal(r);
    for (size_t i = 0; i < x.k.size(); ++i) x.k[i] = rounded(k0[i % k0.size()] + 0.05 * normal(r), DType::kBF16);
    for (auto& y : x.beta) y = rounded(3. + 5. * uniform(r), c.beta_dtype);
  }
  if (!c.lengths.empty()) {
    x.offsets = {0};
    for (int n : c.lengths) x.offsets.push_back(x.offsets.back() + n);
  }
  return x;
}

// The token recurrence in f64: the judge.
void reference(const Case& c, const Inputs& x, float scale, std::vector<double>& o, std::vector<double>& state) {
  o.assign(size_t(c.B) * c.T * c.HV * D, 0.);
  state.assign(size_t(c.sequences()) * c.HV * D * D, 0.);
  std::vector<std::thread> threads;
  std::vector<std::pair<int, int>> tasks;
  for (int s = 0; s < c.sequences(); ++s)
    for (int h = 0; h < c.HV; ++h) tasks.push_back({s, h});
  std::atomic<size_t> next{0};
  auto work = [&] {
    std::vector<double> S(D * D), k(D), q(D), decay(D), u(D);
    for (size_t i; (i = next++) < tasks.size();) {
      const auto [s, h] = tasks[i];
      const int kh = h / (c.HV / c.H);
      const size_t row0 = x.offsets.empty() ? size_t(s) * c.T : x.offsets[s];
      const int tokens = x.offsets.empty() ? c.T : x.offsets[s + 1] - x.offsets[s];
      const size_t base = (size_t(s) * c.HV + h) * D * D;
      auto at = [&](int kk, int vv) { return base + (c.v_first ? size_t(vv) * D + kk : size_t(kk) * D + vv); };
      for (int a = 0; a < D; ++a)
        for (int b = 0; b < D; ++b) S[a * D + b] = c.has_state ? x.state[at(a, b)] : 0.;
      for (int t = 0; t < tokens; ++t) {
        const size_t row = row0 + t;
        double kk = 0., qq = 0.;
        for (int d = 0; d < D; ++d) {
          k[d] = x.k[(row * c.H + kh) * D + d], q[d] = x.q[(row * c.H + kh) * D + d];
          kk += k[d] * k[d], qq += q[d] * q[d];
        }
        if (c.l2norm)
          for (int d = 0; d < D; ++d) k[d] /= std::sqrt(kk + 1e-6), q[d] /= std::sqrt(qq + 1e-6);
        for (int d = 0; d < D; ++d) {
          const double raw = x.g[(row * c.HV + h) * D + d], z = raw + x.dt[h * D + d], a = std::exp(x.a_log[h]);
          double g = raw;
          if (x.gate == GateMode::kSafe) g = x.lower_bound / (1. + std::exp(-a * z));
          if (x.gate == GateMode::kSoftplus) g = -a * (std::max(z, 0.) + std::log1p(std::exp(-std::fabs(z))));
          decay[d] = std::exp(g);
        }
        double beta = x.beta[row * c.HV + h];
        if (c.beta_mode != BetaMode::kPlain) beta = (c.beta_mode == BetaMode::kSigmoidDoubled ? 2. : 1.) / (1. + std::exp(-beta));
        std::fill(u.begin(), u.end(), 0.);
        for (int a = 0; a < D; ++a)
          for (int b = 0; b < D; ++b) u[b] += (S[a * D + b] *= decay[a]) * k[a];
        for (int b = 0; b < D; ++b) u[b] = beta * (x.v[(row * c.HV + h) * D + b] - u[b]);
        double* out = &o[(row * c.HV + h) * D];
        for (int a = 0; a < D; ++a)
          for (int b = 0; b < D; ++b) out[b] += scale * q[a] * (S[a * D + b] += k[a] * u[b]);
      }
      for (int a = 0; a < D; ++a)
        for (int b = 0; b < D; ++b) state[at(a, b)] = S[a * D + b];
    }
  };
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) threads.emplace_back(work);
  for (auto& t : threads) t.join();
}

// Device copies of a call's arrays. They live until the end of the process' case.
struct Device {
  std::vector<void*> owned;
  PrefillArgs a{};
  size_t o_bytes = 0, state_bytes = 0;

  void* bytes(size_t n) {
    void* p = nullptr;
    CUDA(cudaMalloc(&p, std::max<size_t>(n, 16)));
    owned.push_back(p);
    return p;
  }
  // n elements on the device: x, repeated where it is shorter (token-major arrays of large timing shapes repeat a block of tokens).
  void* upload(const std::vector<double>& x, DType d, size_t n = 0) {
    std::vector<char> host(x.size() * (d == DType::kF32 ? 4 : 2));
    for (size_t i = 0; i < x.size(); ++i) {
      if (d == DType::kF32) reinterpret_cast<float*>(host.data())[i] = float(x[i]);
      else reinterpret_cast<__nv_bfloat16*>(host.data())[i] = __float2bfloat16(float(x[i]));
    }
    const size_t total = n ? n * (d == DType::kF32 ? 4 : 2) : host.size();
    auto* p = static_cast<char*>(bytes(total));
    size_t done = std::min(total, host.size());
    CUDA(cudaMemcpy(p, host.data(), done, cudaMemcpyHostToDevice));
    for (; done < total; done += std::min(done, total - done)) CUDA(cudaMemcpy(p + done, p, std::min(done, total - done), cudaMemcpyDeviceToDevice));
    return p;
  }
  static std::vector<double> download(const void* p, size_t n, DType d) {
    std::vector<char> host(n * (d == DType::kF32 ? 4 : 2));
    CUDA(cudaMemcpy(host.data(), p, host.size(), cudaMemcpyDeviceToHost));
    std::vector<double> x(n);
    for (size_t i = 0; i < n; ++i)
      x[i] = d == DType::kF32 ? reinterpret_cast<float*>(host.data())[i] : double(__bfloat162float(reinterpret_cast<__nv_bfloat16*>(host.data())[i]));
    return x;
  }
  Device(const Case& c, const Inputs& x) {
    const size_t rows = size_t(c.B) * c.T;
    a.q = upload(x.q, DType::kBF16, rows * c.H * D), a.k = upload(x.k, DType::kBF16, rows * c.H * D);
    a.v = upload(x.v, DType::kBF16, rows * c.HV * D), a.g = upload(x.g, c.g_dtype, rows * c.HV * D);
    a.beta = upload(x.beta, c.beta_dtype, rows * c.HV);
    a.a_log = static_cast<float*>(upload(x.a_log, DType::kF32)), a.dt_bias = static_cast<float*>(upload(x.dt, DType::kF32));
    a.initial_state = c.has_state ? upload(x.state, c.state_in, size_t(c.sequences()) * c.HV * D * D) : nullptr;
    if (!x.offsets.empty()) {
      auto* p = static_cast<int32_t*>(bytes(x.offsets.size() * 4));
      CUDA(cudaMemcpy(p, x.offsets.data(), x.offsets.size() * 4, cudaMemcpyHostToDevice));
      a.offsets = p;
    }
    o_bytes = rows * c.HV * D * 2, state_bytes = size_t(c.sequences()) * c.HV * D * D * (c.state_out == DType::kF32 ? 4 : 2);
    a.o = bytes(o_bytes), a.final_state = bytes(state_bytes);
    a.B = c.B, a.T = c.T, a.N = x.offsets.empty() ? 1 : int64_t(x.offsets.size()) - 1, a.H = c.H, a.HV = c.HV, a.gate_rows = 1;
    a.g_dtype = c.g_dtype, a.beta_dtype = c.beta_dtype, a.state_in_dtype = c.state_in, a.state_out_dtype = c.state_out;
    a.gate = x.gate, a.beta_mode = c.beta_mode, a.l2norm = c.l2norm, a.state_v_first = c.v_first;
    a.scale = 1.f / std::sqrt(float(D)), a.lower_bound = x.lower_bound;
  }
  void prepare(Route route) {
    a.workspace_bytes = workspace_bytes(route, a);
    a.workspace = bytes(a.workspace_bytes);
  }
  void poison() {
    CUDA(cudaMemset(a.o, 0xff, o_bytes));
    CUDA(cudaMemset(a.final_state, 0xff, state_bytes));
    if (a.workspace_bytes) CUDA(cudaMemset(a.workspace, 0xff, a.workspace_bytes));
  }
  ~Device() {
    for (void* p : owned) cudaFree(p);
  }
};

double relative(const std::vector<double>& x, const std::vector<double>& y) {
  double e = 0., n = 0.;
  for (size_t i = 0; i < x.size(); ++i) e += (x[i] - y[i]) * (x[i] - y[i]), n += y[i] * y[i];
  return n == 0. ? (e == 0. ? 0. : INFINITY) : std::sqrt(e / n);
}

struct Errors {
  double o, state;
};
Errors run_checked(const Case& c, const Inputs& x, Device& d, Route route) {
  d.prepare(route);
  d.poison();
  CUDA(prefill(route, d.a, nullptr));
  CUDA(cudaDeviceSynchronize());
  std::vector<double> o, state;
  reference(c, x, d.a.scale, o, state);
  return {relative(Device::download(d.a.o, o.size(), DType::kBF16), o), relative(Device::download(d.a.final_state, state.size(), c.state_out), state)};
}

Route parse_route(const std::string& s) {
  if (s == "baseline_m128") return Route::kBaselineM128;
  if (s == "baseline_m128_warp_engine") return Route::kBaselineM128WarpEngine;
  std::fprintf(stderr, "unknown route %s\n", s.c_str());
  std::exit(2);
}

int check(Route route) {
  std::vector<Case> cases;
  for (const char* gates : {"production", "slow", "long", "mixed", "bound", "unbounded", "none", "collinear", "log", "softplus", "wide"}) {
    for (int T : {1, 31, 32, 33, 257}) cases.push_back({gates, 1, T, 1, 1});
    cases.push_back({gates, 2, 100, 1, 2});
    Case f32 = {gates, 1, 130, 1, 2};
    f32.g_dtype = f32.beta_dtype = DType::kF32;
    cases.push_back(f32);
    Case packed = {gates, 1, 200, 1, 1, {63, 1, 0, 64, 72}};
    packed.state_in = packed.state_out = DType::kBF16, packed.v_first = true;
    cases.push_back(packed);
    Case plain = {gates, 1, 96, 1, 1};
    plain.l2norm = false, plain.beta_mode = BetaMode::kPlain, plain.has_state = false;
    if (std::string(gates) != "collinear") cases.push_back(plain);
  }
  Case doubled = {"none", 1, 257, 1, 1};
  doubled.beta_mode = BetaMode::kSigmoidDoubled;
  cases.push_back(doubled);
  int bad = 0;
  unsigned seed = std::random_device{}();
  std::printf("seed %u\n%-11s %4s %4s %2s %2s  %-22s %9s %9s\n", seed, "gates", "B", "T", "H", "HV", "options", "err o", "err state");
  for (const Case& c : cases) {
    const Inputs x = make_inputs(c, seed++);
    Device d(c, x);
    const Errors e = run_checked(c, x, d, route);
    const double bar = c.gates == "collinear" ? 3e-2 : c.beta_mode == BetaMode::kSigmoidDoubled ? 8e-3 : 6e-3;
    // A bf16 state adds one rounding of its own (up to 2^-9); T = 1 has no average to hide behind.
    const bool ok = e.o <= bar && e.state <= bar;
    bad += !ok;
    std::printf("%-11s %4d %4d %2d %2d  %-22s %9.2e %9.2e %s\n", c.gates.c_str(), c.B, c.T, c.H, c.HV,
                (std::string(c.g_dtype == DType::kF32 ? "f32 gates " : "") + (c.lengths.empty() ? "" : "packed bf16 state") + (c.l2norm ? "" : "no norm, no state")).c_str(),
                e.o, e.state, ok ? "" : "BAD");
  }
  std::printf("%d cases, %d bad\n", int(cases.size()), bad);
  return bad != 0;
}

int guard() {
  int bad = 0;
  std::mt19937 r(7);
  for (int round = 0; round < 24; ++round) {
    Case c = {"production", 1, 96, 1, 1, {32, 32, 32}};
    Inputs x = make_inputs(c, round);
    for (int& y : x.offsets) {
      const int kind = int(r() % 5);
      y = kind == 0 ? int(r()) : kind == 1 ? INT32_MIN : kind == 2 ? INT32_MAX : int(r() % 200) - 50;
    }
    Device d(c, x);
    for (Route route : {Route::kBaselineM128, Route::kBaselineM128WarpEngine}) {
      d.prepare(route);
      d.poison();
      CUDA(prefill(route, d.a, nullptr));
      const cudaError_t e = cudaDeviceSynchronize();
      if (e != cudaSuccess) std::printf("offsets %d %d %d %d: %s\n", x.offsets[0], x.offsets[1], x.offsets[2], x.offsets[3], cudaGetErrorString(e)), ++bad;
    }
  }
  std::printf("guard: %d bad\n", bad);
  return bad != 0;
}

__global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}

int time_one(Route route, const Case& c, bool judge) {
  Case block = c;  // what is generated: all of a judged shape, else a block of tokens that repeats
  if (!judge) block.B = 1, block.T = std::min(c.T, 256), block.lengths.clear();
  Inputs x = make_inputs(block, 11);
  x.offsets.clear();
  if (!c.lengths.empty()) {
    x.offsets = {0};
    for (int n : c.lengths) x.offsets.push_back(x.offsets.back() + n);
  }
  Device d(c, x);
  Errors e = {NAN, NAN};
  if (judge) e = run_checked(c, x, d, route);
  else d.prepare(route);
  cudaStream_t s;
  CUDA(cudaStreamCreate(&s));
  const size_t flush_bytes = size_t(256) << 20;
  void* flush = d.bytes(flush_bytes);
  std::vector<float> us;
  for (int i = 0; i < 25; ++i) {
    cudaEvent_t from, to;
    CUDA(cudaEventCreate(&from));
    CUDA(cudaEventCreate(&to));
    spin<<<1, 1, 0, s>>>(100000);
    CUDA(cudaMemsetAsync(flush, i, flush_bytes, s));
    CUDA(cudaEventRecord(from, s));
    CUDA(prefill(route, d.a, s));
    CUDA(cudaEventRecord(to, s));
    CUDA(cudaStreamSynchronize(s));
    float ms;
    CUDA(cudaEventElapsedTime(&ms, from, to));
    if (i >= 5) us.push_back(ms * 1e3f);
  }
  std::sort(us.begin(), us.end());
  std::printf("%-26s %-10s %dx%dx%d HV %d%s  median %8.1f us  min %8.1f us  err %.2e %.2e\n", route == Route::kBaselineM128 ? "baseline_m128" : "baseline_m128_warp_engine",
              c.gates.c_str(), c.B, c.T, c.H, c.HV, c.lengths.empty() ? "" : " packed", us[us.size() / 2], us[0], e.o, e.state);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string what = argc > 1 ? argv[1] : "check";
  if (what == "check") return check(parse_route(argc > 2 ? argv[2] : "baseline_m128"));
  if (what == "guard") return guard();
  if (what == "time" && argc >= 7) {
    Case c;
    c.gates = argv[3], c.B = std::atoi(argv[4]), c.T = std::atoi(argv[5]), c.H = std::atoi(argv[6]), c.HV = argc > 7 ? std::atoi(argv[7]) : c.H;
    if (argc > 8)
      for (char* p = std::strtok(argv[8], ","); p; p = std::strtok(nullptr, ",")) c.lengths.push_back(std::atoi(p));
    return time_one(parse_route(argv[2]), c, int64_t(c.B) * c.T * c.HV <= 8192);
  }
  std::fprintf(stderr, "usage: driver check [ROUTE] | guard | time ROUTE GATES B T H [HV] [LENGTHS]\n");
  return 2;
}
