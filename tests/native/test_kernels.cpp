// The kernels on an emulated thread block, against double precision.
//
//   test_kernels PART... [--seed N] [--fault NAME]     exit status 1, and a line that says what, where something is wrong
//   test_kernels --faults                              the mistakes that can be planted
//   test_kernels --sizes B T N HV SMS PACKED           chunks of a segment, and workspaces: segmented, c4_m128_d15, c4_m64_d10, c8_m128_d35,
//                                                      pool_m128, pool_m64
//
//   inverse      invert alone
//   recurrence   K2 alone, both engines, fed with packets made here
//   packets      the baseline kernels in every gate regime: K1's packets as they are announced to K2, o and the final state
//   cluster      the owner/helper kernels likewise
//   pool         the pooled kernels likewise
//   same-bits    every kernel of chunks in order has the bits of baseline_m128
//   fallback     the owner/helper routes where no cluster finds room; alone in its process
//   tails        every length of the last chunk, between neighbours that are all NaN
//   calls        states, grouped heads, packed sequences, offsets of every wrong kind, NaN
//   resets       gates that forget a large state
//   decode       the decode kernel: layouts, slices, gates, pools
//   checkpoints  states behind every n-th token, on every route: against double precision, against the call that ends there, and gone on from
//   segmented, segmented-calls
//                the segmented route: gate regimes and lengths of segments; options, packed sequences, offsets of every wrong kind, prefixes
//   prefix-bounded, prefix-unbounded
//                later tokens change no bit of what belongs to earlier ones
//
// NAME_on_host.cuh is csrc/NAME.cu with its launch turned into emulation::launch.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <random>

#include "baseline_on_host.cuh"
#include "cluster_on_host.cuh"
#include "decode_on_host.cuh"
#include "pool.cu"
#include "segmented.cu"

namespace jax_kda {
namespace {

uint8_t shared[1];  // stands for the block's dynamic shared memory, which the machine holds

constexpr int C = kChunk, D = kHeadDim;
using Vector = std::vector<double>;
std::mt19937 generator;
int cases = 0;

double uniform(double low = 0., double high = 1.) { return std::uniform_real_distribution<double>(low, high)(generator); }
double normal() { return std::normal_distribution<double>()(generator); }
double log_uniform(double low, double high) { return std::exp(uniform(std::log(low), std::log(high))); }
int below(int n) { return int(generator() % unsigned(n)); }
double bf16(double x) { return bf16_to_float(float_to_bf16(float(x))); }

[[noreturn]] void wrong(const std::string& what) { throw emulation::Failure(what); }
void check(bool right, const std::string& what) {
  if (!right) wrong(what);
}

// Relative Frobenius error. NaN anywhere is an infinite error.
double relative(const double* x, const double* y, size_t n, double floor = 0.) {
  double error = 0., norm = 0.;
  for (size_t i = 0; i < n; ++i) error += (x[i] - y[i]) * (x[i] - y[i]), norm += y[i] * y[i];
  const double bar = std::sqrt(norm) + floor;
  return std::isfinite(error) ? (bar == 0. ? (error == 0. ? 0. : INFINITY) : std::sqrt(error) / bar) : INFINITY;
}
double norm(const double* x, size_t n) {
  double s = 0.;
  for (size_t i = 0; i < n; ++i) s += x[i] * x[i];
  return std::sqrt(s);
}
void check_close(const std::string& what, const double* x, const double* y, size_t n, double bar, double floor = 0.) {
  const double e = relative(x, y, n, floor);
  char text[64];
  std::snprintf(text, sizeof text, ": error %.2e, at most %.0e", e, bar);
  check(e <= bar, what + text);
}

// ================================================================ double precision

// (I + L)^-1 of n = -L by forward substitution.
void invert_exactly(const double* n, double* x) {
  for (int i = 0; i < C; ++i)
    for (int j = 0; j < C; ++j) {
      double s = i == j;
      for (int k = j; k < i; ++k) s += n[i * C + k] * x[k * C + j];
      x[i * C + j] = j <= i ? s : 0.;
    }
}

// What K1 makes of one chunk. Rows of k, q are as they enter the products (normalised, scaled); a tail's rows are zero.
struct Packet {
  Vector kd = Vector(C * D), qd = kd, kr = kd, a = Vector(C * C), m = a, decay = Vector(D), beta = Vector(C);
};
Packet make_packet(const double* k, const double* q, const double* log_decay, const double* beta) {
  Packet p;
  Vector sum(C * D), n(C * C);
  for (int i = 0; i < C; ++i)
    for (int d = 0; d < D; ++d) sum[i * D + d] = (i ? sum[(i - 1) * D + d] : 0.) + log_decay[i * D + d];
  for (int i = 0; i < C; ++i)
    for (int d = 0; d < D; ++d) {
      const int at = i * D + d;
      p.kd[at] = -k[at] * std::exp(sum[at]), p.qd[at] = q[at] * std::exp(sum[at]);
      p.kr[at] = -k[at] * std::exp(sum[(C - 1) * D + d] - sum[at]);
    }
  for (int i = 0; i < C; ++i)
    for (int j = 0; j <= i; ++j)
      for (int d = 0; d < D; ++d) {
        const double weight = k[j * D + d] * std::exp(sum[i * D + d] - sum[j * D + d]);
        p.m[i * C + j] -= q[i * D + d] * weight;
        if (j < i) n[i * C + j] -= beta[i] * k[i * D + d] * weight;
      }
  invert_exactly(n.data(), p.a.data());
  for (int i = 0; i < C; ++i) p.beta[i] = -beta[i];
  for (int d = 0; d < D; ++d) p.decay[d] = std::exp(sum[(C - 1) * D + d]);
  return p;
}

// Where a packet's elements lie in a stage: packet.cuh.
uint32_t row_at(int row, int channel) {
  return channel / 64 * stage::kPanelStride + panel_unit(row, channel % 64 / 8) + channel % 8 * 2;
}
uint32_t square_at(int row, int column) { return square_unit(row, column / 8) + column % 8 * 2; }
uint32_t decay_at(int channel) { return decay_slot(channel / 16, channel % 8 / 2) + (channel % 16 / 8 * 2 + channel % 2) * 4; }
// f(offset, element) for all bf16 elements, and float_f for all f32 ones; in either direction.
template <class F, class FloatF> void for_packet(Packet& p, F f, FloatF float_f) {
  for (int i = 0; i < C; ++i) float_f(stage::kBeta + i * 4, p.beta[i]);
  for (int d = 0; d < D; ++d) float_f(stage::kDecay + decay_at(d), p.decay[d]);
  for (int i = 0; i < C; ++i) {
    for (int d = 0; d < D; ++d) {
      f(stage::kKey + row_at(i, d), p.kd[i * D + d]);
      f(stage::kQuery + row_at(i, d), p.qd[i * D + d]);
      f(stage::kKr + row_at(i, d), p.kr[i * D + d]);
    }
    for (int j = 0; j < C; ++j) f(stage::kA + square_at(i, j), p.a[i * C + j]), f(stage::kM + square_at(i, j), p.m[i * C + j]);
  }
}
Packet read_packet(const uint8_t* stage) {
  Packet p;
  for_packet(
      p,
      [&](uint32_t at, double& x) {
        uint16_t u;
        std::memcpy(&u, stage + at, 2);
        x = bf16_to_float(u);
      },
      [&](uint32_t at, double& x) {
        float f;
        std::memcpy(&f, stage + at, 4);
        x = f;
      });
  return p;
}

// ================================================================ inverse

void run_inverse(const char* name, const Vector& n, double bar) {
  Vector x(C * C, NAN), exact(C * C);
  emulation::Machine(32, 1024, generator()).run([&] {
    const int lane = int(threadIdx.x), g = lane >> 2, t = lane & 3;
    auto tile = [&](int row, int column) {
      const int at = (row * 8 + g) * C + column * 8 + 2 * t;
      return Tile{{float(n[at]), float(n[at + 1])}};
    };
    auto out = [&](int row, int column, Tile t00, Tile t01, Tile t10, Tile t11) {
      const Tile tiles[4] = {t00, t01, t10, t11};
      for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e) x[(row * 16 + (i >> 1) * 8 + g) * C + column * 16 + (i & 1) * 8 + 2 * t + e] = tiles[i].v[e];
    };
    const Tile none = {{0.f, 0.f}};
    HalfInverse half[2];
    for (int b = 0; b < 2; ++b)
      half[b] = invert_half(
          lane, [&](int row, int column) { return tile(2 * b + row, 2 * b + column); },
          [&](Tile t00, Tile t10, Tile t11) { out(b, b, t00, none, t10, t11); });
    out(0, 1, none, none, none, none);
    TileOperand product[2][2];
    multiply_by_first(half[0], [&](int row, int column) { return tile(2 + row, column); }, product);
    multiply_second(half[1], product, [&](Tile t00, Tile t01, Tile t10, Tile t11) { out(1, 0, t00, t01, t10, t11); });
  });
  invert_exactly(n.data(), exact.data());
  // Componentwise: rounding N and the inverses of sub-blocks to 11 bits is, to first order, an error of |X| |I + L| |X| 2^-11.
  Vector half(C * C);
  for (int i = 0; i < C; ++i)
    for (int j = 0; j <= i; ++j)
      for (int k = j; k <= i; ++k) half[i * C + j] += (i == k ? 1. : std::fabs(n[i * C + k])) * std::fabs(exact[k * C + j]);
  for (int i = 0; i < C; ++i)
    for (int j = 0; j < C; ++j) {
      double allowed = 0.;
      for (int k = j; k <= i; ++k) allowed += std::fabs(exact[i * C + k]) * half[k * C + j];
      const double error = std::fabs(x[i * C + j] - exact[i * C + j]);
      check(error <= 4. * 0x1p-11 * allowed, std::string("inverse, ") + name + ": element " + std::to_string(i) + ", " + std::to_string(j) + " is " +
                                                std::to_string(x[i * C + j]) + ", not " + std::to_string(exact[i * C + j]));
    }
  check_close(std::string("inverse, ") + name, x.data(), exact.data(), C * C, bar);
  ++cases;
}

void test_inverse() {
  Vector n(C * C);
  auto fill = [&](auto f) {
    for (int i = 0; i < C; ++i)
      for (int j = 0; j < C; ++j) n[i * C + j] = j < i ? double(float(f(i, j))) : 0.;
  };
  for (int i = 1; i < C; ++i)  // every place, alone
    for (int j = i % 3; j < i; j += 3) fill([&](int a, int b) { return a == i && b == j ? 3.25 : 0.; }), run_inverse("one element", n, 1e-9);
  for (int round = 0; round < 8; ++round) {
    fill([&](int, int) { return 0.1 * normal(); }), run_inverse("random", n, 1e-3);
    fill([&](int, int) { return 0.5 * normal(); }), run_inverse("random, growing", n, 3e-2);
    fill([&](int, int) { return -1. + 2e-3 * normal(); }), run_inverse("near-identical keys", n, 2e-3);
    fill([&](int, int) { return -2. + 2e-3 * normal(); }), run_inverse("near-identical keys, doubled beta", n, 2e-2);
    const double decay = uniform(0.5, 1.);
    fill([&](int i, int j) { return -std::pow(decay, i - j); }), run_inverse("identical keys, decaying", n, 2e-3);
    fill([&](int i, int j) { return i / 8 == 1 + j / 8 && below(8) == 0 ? normal() * 1e6 : 0.; }), run_inverse("large", n, 3e-3);
    fill([&](int i, int j) { return i >= 16 && j < 16 ? normal() * 1e20 : 0.01 * normal(); }), run_inverse("very large below", n, 3e-3);
  }
}

// ================================================================ recurrence

struct TestPipe {
  static constexpr bool kRoomy = true, kShortOfStages = true;  // the routes have the other kind too
  static constexpr int kStages = 3;
  static constexpr uint32_t kStageBytes = stage::kBytes;
  static constexpr uint32_t kValues = kStages * kStageBytes;
  static constexpr uint32_t kOnes = kValues + 4 * kStages * 1024;
  static constexpr uint32_t kFull = kOnes + D * 4;
  static constexpr uint32_t kEmpty = kFull + kStages * 8;
  static constexpr uint32_t kBytes = kEmpty + kStages * 8;
  static void seen(uint32_t, uint32_t, uint32_t) {}
  static void release(uint32_t shared, uint32_t slot, uint32_t) { barrier_arrive(shared + kEmpty + 8 * slot); }
};

template <class Engine> void run_recurrence(const char* name, int tokens, bool decays) {
  using P = TestPipe;
  const int chunks = (tokens + C - 1) / C, rows = 64, first_value = 64, stride = 2 * D;
  std::vector<float4> values((size_t(tokens) * stride * 2 + 15) / 16);  // (aligned)
  std::vector<std::vector<uint8_t>> stages(chunks, std::vector<uint8_t>(P::kStageBytes, 0xff));
  Vector state(D * rows), want_o(tokens * rows);
  for (double& x : state) x = double(float(normal()));
  std::vector<float> start(state.begin(), state.end());  // [K][rows]
  for (int c = 0; c < chunks; ++c) {
    Vector k(C * D), q(C * D), g(C * D), beta(C), v(C * rows);
    for (int i = 0; i < C; ++i) {
      const bool there = c * C + i < tokens;
      for (int d = 0; d < D; ++d) k[i * D + d] = there * normal() / std::sqrt(D), q[i * D + d] = there * normal() / D;
      for (int d = 0; d < D; ++d) g[i * D + d] = there && decays ? -log_uniform(1e-3, 0.3) : 0.;
      for (int d = 0; d < rows; ++d) v[i * rows + d] = there * bf16(normal());
      beta[i] = there * uniform();
    }
    Packet p = make_packet(k.data(), q.data(), g.data(), beta.data());
    for_packet(
        p,
        [&](uint32_t at, double& x) {
          const uint16_t u = float_to_bf16(float(x));
          std::memcpy(&stages[c][at], &u, 2);
          x = bf16_to_float(u);
        },
        [&](uint32_t at, double& x) {
          const float f = float(x);
          std::memcpy(&stages[c][at], &f, 4);
          x = f;
        });
    for (int i = 0; i < C && c * C + i < tokens; ++i)
      for (int d = 0; d < rows; ++d)
        reinterpret_cast<uint16_t*>(values.data())[size_t(c * C + i) * stride + first_value + d] = float_to_bf16(float(v[i * rows + d]));
    // U = A diag(beta) (V + Kd S) with Kd negative as in the packet; O = Qd S + M U; S = diag(a) S + Kr^T U
    Vector r = v, u(C * rows), o(C * rows);
    auto add = [&](Vector& to, const Vector& left, const Vector& right, int inner, bool transposed, int outer) {
      for (int i = 0; i < outer; ++i)
        for (int l = 0; l < inner; ++l)
          for (int d = 0; d < rows; ++d) to[i * rows + d] += (transposed ? left[l * outer + i] : left[i * inner + l]) * right[l * rows + d];
    };
    add(r, p.kd, state, D, false, C);
    for (int i = 0; i < C * rows; ++i) r[i] *= p.beta[i / rows];
    add(u, p.a, r, C, false, C), add(o, p.qd, state, D, false, C), add(o, p.m, u, C, false, C);
    for (int i = 0; i < D * rows; ++i) state[i] *= p.decay[i / rows];
    add(state, p.kr, u, C, true, D);
    for (int i = 0; i < C && c * C + i < tokens; ++i) std::copy(&o[i * rows], &o[(i + 1) * rows], &want_o[(c * C + i) * rows]);
  }

  std::vector<float4> out_memory((size_t(chunks * C + 1) * stride * 2 + 15) / 16);
  uint16_t* out = reinterpret_cast<uint16_t*>(out_memory.data());
  const size_t out_size = size_t(chunks * C + 1) * stride;
  std::fill_n(out, out_size, uint16_t(0x7fc1));
  Vector end(D * rows);
  emulation::Machine(5 * 32, P::kBytes, generator()).run([&] {
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const uint32_t base = shared_address(nullptr);
    if (thread < D) store_shared(base + P::kOnes + thread * 4, 1.f);
    if (thread == 0)
      for (int s = 0; s < P::kStages; ++s) barrier_init(base + P::kFull + 8 * s, 1), barrier_init(base + P::kEmpty + 8 * s, 4);
    __syncthreads();
    if (warp == 4) {
      for (int c = 0; c < chunks; ++c) {
        const uint32_t slot = c % P::kStages, to = base + slot * P::kStageBytes;
        if (c >= P::kStages) barrier_wait(base + P::kEmpty + 8 * slot, (c / P::kStages - 1) & 1);
        if (planted == Fault::kEarlyPublish && lane == 0) barrier_arrive(base + P::kFull + 8 * slot);
        for (uint32_t at = lane * 16; at < P::kStageBytes; at += 512) {
          float4 x;
          std::memcpy(&x, &stages[c][at], 16);
          store_shared4(to + at, x);
        }
        fence_async_shared();
        sync_warp();
        if (planted != Fault::kEarlyPublish && lane == 0) barrier_arrive(base + P::kFull + 8 * slot);
      }
    } else {
      const int g = lane >> 2, t = lane & 3;
      State st;
      auto element = [&](int i) { return (8 * (i >> 2) + 2 * t + (i & 1)) * rows + warp * 16 + 8 * ((i >> 1) & 1) + g; };
      for (int i = 0; i < 64; ++i) st[i] = start[element(i)];
      struct EverySecond {  // chunk
        int stop(int left) const { return left > 2 ? left - 1 : 1; }
        void store(const State& st, int left) const { check(left == stop(left + 1) || left == 1, "a run ends where it should not"); (void)st; }
      };
      PrefillArgs a{};
      a.HV = stride / D, a.v = values.data(), a.o = out;
      recur<Engine, P>({base, warp, lane, out + first_value + warp * 16, a, tokens}, st, EverySecond());
      for (int i = 0; i < 64; ++i) end[element(i)] = st[i];
    }
  });
  Vector got(tokens * rows);
  for (size_t i = 0; i < out_size; ++i) {
    const int token = int(i) / stride, channel = int(i) % stride - first_value;
    if (token < tokens && channel >= 0 && channel < rows) got[token * rows + channel] = bf16_to_float(out[i]);
    else check(out[i] == 0x7fc1, std::string(name) + ": o is written at token " + std::to_string(token) + " of " + std::to_string(tokens));
  }
  const std::string what = std::string(name) + ", " + std::to_string(tokens) + " tokens";
  check_close(what + ": o", got.data(), want_o.data(), got.size(), 6e-3);
  check_close(what + ": state", end.data(), state.data(), end.size(), 6e-3);
  ++cases;
}

void test_recurrence() {
  for (int tokens : {5 * C - 1, 1, C, 4 * C + 16, 2 * C + 17}) {
    run_recurrence<DefaultEngine>("warpgroup engine", tokens, tokens % 2);
    run_recurrence<WarpEngine>("warp engine", tokens, tokens % 2);
  }
}

#include "baseline_cases.h"
#include "decode_cases.h"
#include "segmented_cases.h"
#include "checkpoint_cases.h"

// A touched guard page is a failure like any other. On a stack of its own: the lanes' may be what ran over.
void report_touch(int) {
  static const char text[] = "memory outside the arrays is touched\n";
  _exit(write(STDOUT_FILENO, text, sizeof text - 1) < 0 ? 2 : 1);
}
void catch_touches() {
  static char stack[1 << 16];
  stack_t there{};
  there.ss_sp = stack, there.ss_size = sizeof stack;
  sigaltstack(&there, nullptr);
  struct sigaction action{};
  action.sa_handler = report_touch, action.sa_flags = SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
}

int run(int argc, char** argv) {
  catch_touches();
  const std::map<std::string, void (*)()> parts = {
      {"inverse", test_inverse}, {"recurrence", test_recurrence},         {"packets", test_packets}, {"cluster", test_cluster},
      {"tails", test_tails},     {"calls", test_calls},                   {"prefix-bounded", test_prefix_bounded},
      {"resets", test_resets},   {"prefix-unbounded", test_prefix_unbounded}, {"decode", test_decode},
      {"segmented", test_segmented}, {"segmented-calls", test_segmented_calls}, {"same-bits", test_same_bits}, {"fallback", test_fallback},
      {"checkpoints", test_checkpoints}, {"pool", test_pool}};
  std::vector<std::string> names;
  unsigned seed = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--faults") {
      for (const char* name : emulation::kFaultNames) std::printf("%s\n", name);
      return 0;
    }
    if (word == "--sizes" && i + 6 < argc) {
      PrefillArgs a{};
      a.B = std::stoll(argv[i + 1]), a.T = std::stoll(argv[i + 2]), a.N = std::stoll(argv[i + 3]), a.HV = std::stoll(argv[i + 4]);
      const int32_t any = 0;
      a.offsets = std::stoi(argv[i + 6]) ? &any : nullptr;
      a.segment_chunks = segment_chunks(a.B, a.T, a.N, a.HV, std::stoi(argv[i + 5]));
      std::printf("%d %lld %lld %lld %lld %lld %lld\n", a.segment_chunks, (long long)segmented_workspace_bytes(a), (long long)c4_m128_d15_workspace(a),
                  (long long)c4_m64_d10_workspace(a), (long long)c8_m128_d35_workspace(a), (long long)pool_m128_workspace(a), (long long)pool_m64_workspace(a));
      return 0;
    }
    const bool has_value = i + 1 < argc;
    if (word == "--seed" && has_value) {
      seed = unsigned(std::stoul(argv[++i]));
    } else if (word == "--fault" && has_value) {
      const auto* found = std::find(std::begin(emulation::kFaultNames), std::end(emulation::kFaultNames), std::string(argv[++i]));
      if (found == std::end(emulation::kFaultNames)) return std::fprintf(stderr, "no fault %s\n", argv[i]), 2;
      planted = Fault(found - std::begin(emulation::kFaultNames));
    } else if (parts.count(word)) {
      names.push_back(word);
    } else {
      return std::fprintf(stderr, "no part %s\n", word.c_str()), 2;
    }
  }
  for (const std::string& name : names) {
    generator.seed(seed);
    cases = 0;
    const auto start = std::chrono::steady_clock::now();
    try {
      parts.at(name)();
    } catch (const emulation::Failure& failure) {
      return std::printf("%s, seed %u, case %d: %s\n", name.c_str(), seed, cases, failure.what()), 1;
    }
    std::printf("%s: %d cases, %.1f s\n", name.c_str(), cases, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace jax_kda

int main(int argc, char** argv) { return jax_kda::run(argc, argv); }
