// A driver over launch.h without XLA: correctness at small shapes (for compute-sanitizer), and GPU times.
//
//   driver check [ROUTE] [--small [CASES]]         every gate regime and option at small shapes against the f64 token recurrence; --small: a dozen
//                                                  cases (or the first CASES), one of each kind, for the sanitizer
//   driver guard                                   offsets of every wrong kind: must come back without touching foreign memory
//   driver stress [ROUTE] [CALLS]                  30 shapes, CALLS calls (10000) of changing data and offsets beside other work: the bits of a quiet call
//   driver streams [ROUTE] [ROUNDS]                two threads, a stream each: ROUNDS calls (200) at once have the bits of one at a time
//   driver fallback                                the cluster routes on a device that holds no cluster: what runs, and that its bits are baseline_m128's
//   driver time ROUTE GATES B T H [HV] [LENGTHS]   one shape; LENGTHS packs the T tokens: 1300,547,...
//   driver kernels CASE...                         GPU time of each kernel of one call, described as a line of `bench` is
//   driver bench [FILE|-] [ROUNDS] [CALLS]         the cases of FILE (or of standard input), one a line as parse_case reads it, route=ROUTE with it;
//                                                  every case ROUNDS times (2) in shuffled order, CALLS timed calls each time (20)
//   driver device                                  what it runs on
//
// `bench` and `device` print JSON lines. The first is about the device; then one follows each round of a case, about all its calls so far: the last
// one of a case is its result.
//
// Built with the kernels, from the root of the tree (bench/native.py builds it too; --wrap is for `fallback` alone):
//
//   nvcc -std=c++20 -O3 -lineinfo -gencode arch=compute_90a,code=sm_90a '-DJAX_KDA_ARCHITECTURES="90a"'
//        -Xlinker --wrap=cudaOccupancyMaxActiveClusters -o driver tests/native/driver.cu csrc/*.cu
//
// compute-sanitizer, for each ROUTE and TOOL of memcheck, initcheck, synccheck, racecheck; under a minute each:
//
//   compute-sanitizer --tool TOOL --error-exitcode 3 ./driver check ROUTE --small
//
// memcheck, initcheck and synccheck find nothing. racecheck does not follow a warp's writes through __syncwarp and the arrival of one lane for all, nor
// bar.arrive, and reports hazards of them in the baseline; a variant with every lane arriving (and counted) and bar.sync in their place had none, when
// it was last tried. For the cluster routes build with -DJAX_KDA_PATIENT_WAITS: under racecheck the kernel's polls, instrumented as everything, take the
// time of the warps that they wait for, until a bound ends the kernel. With rare polls and no bound that takes seconds, and it finds nothing;
// with a barrier of K1 taken out it does.
//
// Every output is poisoned with NaN bits before a checked call. Exit status 1 where something is wrong, 2 where it could not be tried; a case that
// hangs ends the process with a signal.
#include <unistd.h>

#include <fstream>
#include <iostream>

#include "reference.cuh"
#include "stress.cuh"
#include "timing.cuh"

namespace {

Errors run_checked(Call& call, Route route) {
  call.prepare(route);
  call.poison();
  CUDA(prefill(route, call.a, nullptr));
  CUDA(cudaDeviceSynchronize());
  return judge(call.a);
}

// One case of each kind.
std::vector<Case> small_cases() {
  std::vector<Case> cases;
  for (const char* gates : {"slow", "unbounded"}) {  // a scheme each
    const bool bounded = cases.empty();
    cases.push_back({gates, 1, 33, 1, 1});
    Case f32 = {gates, 1, 65, 1, 2};
    f32.g_dtype = f32.beta_dtype = DType::kF32;
    cases.push_back(f32);
    Case packed = {gates, 1, 98, 1, 1, {33, 0, 1, 64}};
    packed.state_in = packed.state_out = DType::kBF16, packed.v_first = true;
    cases.push_back(packed);
    cases.push_back({gates, 1, 60, 1, 1, {20, 31}});
    Case segments = {gates, 1, 110, 1, 1};
    segments.segment_chunks = 1;
    cases.push_back(segments);
    Case plain = {bounded ? "production" : "softplus", 2, 40, 2, 2};
    plain.l2norm = false, plain.beta_mode = BetaMode::kPlain, plain.has_state = false;
    cases.push_back(plain);
  }
  return cases;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto& gates : kGates) {
    for (int T : {1, 31, 32, 33, 257}) cases.push_back({gates.name, 1, T, 1, 1});
    cases.push_back({gates.name, 2, 100, 1, 2});
    Case f32 = {gates.name, 1, 130, 1, 2};
    f32.g_dtype = f32.beta_dtype = DType::kF32;
    cases.push_back(f32);
    Case packed = {gates.name, 1, 200, 1, 1, {63, 1, 0, 64, 72}};
    packed.state_in = packed.state_out = DType::kBF16, packed.v_first = true;
    cases.push_back(packed);
    cases.push_back({gates.name, 1, 150, 1, 1, {33, 70}});
    for (int chunks : {1, 3}) {  // of a segment; other routes see more lengths
      Case segments = {gates.name, 1, chunks * 300 + 45, 1, 2};
      segments.segment_chunks = chunks;
      cases.push_back(segments);
      Case several = {gates.name, 1, 1200, 1, 1, {321, 0, 290, 31, 500}};
      several.segment_chunks = chunks;
      cases.push_back(several);
    }
    for (int every : {64, 128}) {
      Case kept = {gates.name, 2, 300, 1, 2};
      kept.checkpoint_every = every, kept.v_first = every == 128, kept.segment_chunks = 3;
      cases.push_back(kept);
      Case packed_kept = {gates.name, 1, 700, 1, 2, {130, 0, 64, 63, 1, 257}};
      packed_kept.checkpoint_every = every, packed_kept.state_out = every == 64 ? DType::kBF16 : DType::kF32, packed_kept.segment_chunks = 1;
      cases.push_back(packed_kept);
    }
    Case plain = {gates.name, 1, 96, 1, 1};
    plain.l2norm = false, plain.beta_mode = BetaMode::kPlain, plain.has_state = false;
    if (std::string(gates.name) != "collinear") cases.push_back(plain);
    if (!gates.folds) continue;
    for (GateMode gate : {GateMode::kSafe, GateMode::kSoftplus, GateMode::kLog}) {  // as `bench` feeds it
      Case one = {gates.name, 1, 200, 2, 4};
      one.one_input = true, one.gate = gate, one.g_dtype = gate == GateMode::kLog ? DType::kF32 : DType::kBF16;
      cases.push_back(one);
    }
  }
  Case doubled = {"none", 1, 257, 1, 1};
  doubled.beta_mode = BetaMode::kSigmoidDoubled;
  cases.push_back(doubled);
  return cases;
}

int check(Route route, const std::vector<Case>& cases) {
  int bad = 0;
  unsigned seed = std::random_device{}();
  std::printf("seed %u\n%-11s %4s %4s %2s %2s  %-22s %9s %9s\n", seed, "gates", "B", "T", "H", "HV", "options", "err o", "err state");
  for (const Case& c : cases) {
    alarm(kPatience);
    Call call(c, seed++);
    const Errors e = run_checked(call, route);
    const double bar = error_bar(c);
    // A bf16 state adds one rounding of its own (up to 2^-9); T = 1 has no average to hide behind.
    const bool ok = e.o <= bar && e.state <= bar;
    bad += !ok;
    std::string options = c.one_input ? c.gate == GateMode::kSafe ? "one input, safe " : c.gate == GateMode::kLog ? "one input, log " : "one input, softplus " : "";
    if (c.g_dtype == DType::kF32) options += "f32 gates ";
    if (!c.lengths.empty()) options += c.covered() < c.T ? "packed, rows outside" : "packed bf16 state";
    if (!c.l2norm) options += "no norm, no state";
    if (c.checkpoint_every) options += " checkpoints " + std::to_string(c.checkpoint_every);
    if (c.segment_chunks) options += " segments " + std::to_string(c.segment_chunks);
    std::printf("%-11s %4d %4d %2d %2d  %-22s %9.2e %9.2e %s\n", c.gates.c_str(), c.B, c.T, c.H, c.HV, options.c_str(), e.o, e.state, ok ? "" : "BAD");
  }
  std::printf("%d cases, %d bad\n", int(cases.size()), bad);
  return bad != 0;
}

int guard() {
  int bad = 0;
  std::mt19937 r(7);
  for (int round = 0; round < 24; ++round) {
    alarm(kPatience);
    Call call({"production", 1, 96, 1, 1, {32, 32, 32}}, round);
    std::vector<int32_t> x = {0, 32, 64, 96};
    for (int32_t& y : x) {
      const int kind = int(r() % 5);
      y = kind == 0 ? int(r()) : kind == 1 ? INT32_MIN : kind == 2 ? INT32_MAX : int(r() % 200) - 50;
    }
    call.set_offsets(x);
    for (const auto& [name, route] : kRoutes) {
      call.prepare(route);
      call.poison();
      CUDA(prefill(route, call.a, nullptr));
      const cudaError_t e = cudaDeviceSynchronize();
      if (e != cudaSuccess) std::printf("%s, offsets %d %d %d %d: %s\n", name, x[0], x[1], x[2], x[3], cudaGetErrorString(e)), ++bad;
    }
  }
  std::printf("guard: %d bad\n", bad);
  return bad != 0;
}

int time_one(Route route, const Case& c) {
  alarm(kPatience);
  validate(c);
  Timer timer;
  Call call(c, 11);
  const Errors e = run_checked(call, route);
  const std::vector<float> us = timer.time(20, [&](cudaStream_t s) { CUDA(prefill(route, call.a, s)); });
  std::printf("%-26s %-10s %dx%dx%d HV %d%s  median %8.1f us  min %8.1f us  err %.2e %.2e\n", name_of(route), c.gates.c_str(), c.B, c.T, c.H, c.HV,
              c.lengths.empty() ? "" : " packed", median(us), *std::min_element(us.begin(), us.end()), e.o, e.state);
  return 0;
}

int kernels(const std::string& line) {
  alarm(kPatience);
  std::string route_name;
  const Case c = parse_case(line, &route_name);
  const Route route = route_of(route_name);
  Timer timer;
  Call call(c, 11);
  const Errors e = run_checked(call, route);
  const std::vector<float> us = timer.time(20, [&](cudaStream_t s) { CUDA(prefill(route, call.a, s)); });
  float sum = 0.f;
  for (const auto& [name, each] : time_kernels(timer, route, call.a, 20)) std::printf("  %8.1f us  %s\n", each, name.c_str()), sum += each;
  std::printf("%8.1f us the call, %.1f us the sum, err %.2e %.2e: %s\n", median(us), sum, e.o, e.state, line.c_str());
  return 0;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out + "\"";
}

std::string number(double x) {  // NaN and infinity as Python's json reads them
  if (!std::isfinite(x)) return std::isnan(x) ? "NaN" : x > 0 ? "Infinity" : "-Infinity";
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", x);
  return text;
}

void print_device(double rate) {
  int device = 0, runtime = 0, driver = 0;
  cudaDeviceProp p;
  CUDA(cudaGetDevice(&device));
  CUDA(cudaGetDeviceProperties(&p, device));
  CUDA(cudaRuntimeGetVersion(&runtime));
  CUDA(cudaDriverGetVersion(&driver));
  auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  std::printf("{\"gpu\": %s, \"compute_capability\": [%d, %d], \"sm_count\": %d, \"cuda\": \"%s\", \"cuda_of_driver\": \"%s\", \"copy_rate\": %s}\n",
              quoted(p.name).c_str(), p.major, p.minor, p.multiProcessorCount, version(runtime).c_str(), version(driver).c_str(),
              rate > 0. ? number(rate).c_str() : "null");
}

struct Measured {
  std::string line;
  Case c;
  std::string route_name;
  Route route{};
  Errors errors;
  std::vector<std::string> names;
  std::vector<float> us, rounds;  // of all calls; the medians of the rounds
  bool failed = false;
};

void print_failure(size_t index, const std::string& what) {
  std::printf("{\"case\": %zu, \"error\": %s}\n", index, quoted(what).c_str());
}

void print_result(size_t index, const Measured& m, int round, int rounds) {
  std::string medians, names;
  for (float us : m.rounds) medians += (medians.empty() ? "" : ", ") + number(us);
  for (const auto& name : m.names) names += (names.empty() ? "" : ", ") + quoted(name);
  std::printf("{\"case\": %zu, \"round\": %d, \"rounds\": %d, \"route\": %s, \"gates\": %s, \"calls\": %zu, \"median_us\": %s, \"min_us\": %s, "
              "\"round_us\": [%s], \"err_o\": %s, \"err_state\": %s, \"kernels\": [%s]}\n",
              index, round, rounds, quoted(m.route_name).c_str(), quoted(m.c.gates).c_str(), m.us.size(), number(median(m.us)).c_str(),
              number(*std::min_element(m.us.begin(), m.us.end())).c_str(), medians.c_str(), number(m.errors.o).c_str(), number(m.errors.state).c_str(),
              names.c_str());
}

int bench(std::istream& from, int rounds, int calls) {
  std::vector<Measured> cases;
  for (std::string line; std::getline(from, line);) {
    line.erase(std::min(line.find('#'), line.size()));  // a comment
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    Measured m;
    m.line = line;
    m.c = parse_case(line, &m.route_name);
    m.route = route_of(m.route_name);
    cases.push_back(std::move(m));
  }
  alarm(kPatience);
  Timer timer;
  print_device(copy_rate(timer));
  bool failed = false;
  std::vector<size_t> order(cases.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (int round = 1; round <= rounds; ++round) {
    std::mt19937 r(round);
    std::shuffle(order.begin(), order.end(), r);
    for (size_t index : order) {
      alarm(kPatience);
      Measured& m = cases[index];
      if (m.failed) continue;
      Call call(m.c, 11);
      call.prepare(m.route);
      if (round == 1) {
        call.poison();
        const cudaError_t status = prefill(m.route, call.a, nullptr);
        const cudaError_t after = cudaDeviceSynchronize();
        if (status != cudaSuccess || after != cudaSuccess) {
          m.failed = failed = true;
          print_failure(index, std::string(cudaGetErrorString(after != cudaSuccess ? after : status)) + ": " + m.line);
          if (after != cudaSuccess) return 2;  // nothing more runs in this process
          cudaGetLastError();
          continue;
        }
        m.errors = judge(call.a);
        m.names = launched(timer, m.route, call.a);
      }
      const std::vector<float> us = timer.time(calls, [&](cudaStream_t s) { CUDA(prefill(m.route, call.a, s)); });
      m.us.insert(m.us.end(), us.begin(), us.end());
      m.rounds.push_back(median(us));
      print_result(index, m, round, rounds);
    }
  }
  return failed;
}

int run(const std::vector<std::string>& words) {
  auto word = [&](size_t i, const char* otherwise) { return i < words.size() ? words[i] : std::string(otherwise); };
  const std::string what = word(0, "check");
  if (what == "check") {
    const size_t option = size_t(std::find(words.begin(), words.end(), "--small") - words.begin());
    std::vector<Case> cases = option < words.size() ? small_cases() : all_cases();
    if (option + 1 < words.size()) cases.resize(std::min(cases.size(), size_t(parse_count("CASES", words[option + 1]))), cases[0]);
    return check(route_of(option > 1 && words.size() > 1 ? words[1] : "baseline_m128"), cases);
  }
  if (what == "guard") return guard();
  if (what == "stress") return stress(route_of(word(1, "baseline_m128")), parse_count("CALLS", word(2, "10000")));
  if (what == "streams") return streams(route_of(word(1, "baseline_m128")), parse_count("ROUNDS", word(2, "200")));
  if (what == "fallback") return fallback();
  if (what == "device") return print_device(0.), 0;
  if (what == "bench") {
    const std::string path = word(1, "-");
    const int rounds = parse_count("ROUNDS", word(2, "2")), calls = parse_count("CALLS", word(3, "20"));
    if (path == "-") return bench(std::cin, rounds, calls);
    std::ifstream file(path);
    if (!file) throw std::invalid_argument("cannot read " + path);
    return bench(file, rounds, calls);
  }
  if (what == "time" && words.size() >= 6) {
    Case c;
    c.gates = words[2], c.B = parse_number("B", words[3]), c.T = parse_number("T", words[4]), c.H = parse_number("H", words[5]);
    c.HV = parse_number("HV", word(6, words[5].c_str()));
    c.lengths = parse_lengths(word(7, ""));
    return time_one(route_of(words[1]), c);
  }
  if (what == "kernels" && words.size() > 1) {
    std::string line;
    for (size_t i = 1; i < words.size(); ++i) line += words[i] + " ";
    return kernels(line);
  }
  std::fprintf(stderr, "usage: driver check [ROUTE] [--small] | guard | stress [ROUTE] [CALLS] | streams [ROUTE] [ROUNDS] | fallback |\n"
                       "              time ROUTE GATES B T H [HV] [LENGTHS] | kernels CASE... | bench [FILE|-] [ROUNDS] [CALLS] | device\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& e) {
    std::fprintf(stderr, "driver: %s\n", e.what());
    return 2;
  }
}
