// One call as the native tools describe it: shapes, gate regime, options; the names of routes; a line of text as a case.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../csrc/launch.h"

#define CUDA(x)                                                                                     \
  do {                                                                                              \
    cudaError_t e_ = (x);                                                                           \
    if (e_ != cudaSuccess) { std::fprintf(stderr, "%s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); std::exit(2); } \
  } while (0)

namespace {

using namespace jax_kda;

constexpr int D = 128;

// Every route that the tools run. A new one is one row here.
constexpr struct {
  const char* name;
  Route route;
} kRoutes[] = {
    {"baseline_m128", Route::kBaselineM128},
    {"baseline_m128_warp_engine", Route::kBaselineM128WarpEngine},
    {"baseline_m64", Route::kBaselineM64},
    {"c4_m128_d15", Route::kC4M128D15},
    {"c4_m64_d10", Route::kC4M64D10},
    {"c8_m128_d35", Route::kC8M128D35},
    {"pool_m128", Route::kPoolM128},
    {"pool_m64", Route::kPoolM64},
    {"segmented", Route::kSegmented},
    {"segmented_warp_engine", Route::kSegmentedWarpEngine},
};

inline Route route_of(const std::string& name) {
  std::string known;
  for (const auto& r : kRoutes) {
    if (name == r.name) return r.route;
    known += std::string(" ") + r.name;
  }
  throw std::invalid_argument("route: got '" + name + "'; allowed:" + known);
}

inline const char* name_of(Route route) {
  for (const auto& r : kRoutes)
    if (route == r.route) return r.name;
  return "?";
}

// The gate regimes. "folds": the safe gate with bound -5, so that the regime can go through any gate input (Case::one_input).
constexpr struct {
  const char* name;
  bool folds;
} kGates[] = {
    {"production", true}, {"slow", true},       {"long", true}, {"mixed", true},     {"bound", true}, {"none", true}, {"collinear", true},
    {"unbounded", false}, {"log", false}, {"softplus", false}, {"wide", false},
};

inline bool folds(const std::string& gates) {
  std::string known;
  for (const auto& g : kGates) {
    if (gates == g.name) return g.folds;
    known += std::string(" ") + g.name;
  }
  throw std::invalid_argument("gates: got '" + gates + "'; allowed:" + known);
}

struct Case {
  std::string gates = "production";
  int B = 1, T = 64, H = 1, HV = 1;
  std::vector<int> lengths;  // packed, where not empty; rows beyond their sum belong to no sequence
  DType g_dtype = DType::kBF16, beta_dtype = DType::kBF16, state_in = DType::kF32, state_out = DType::kF32;
  bool has_state = true, v_first = false, l2norm = true;
  BetaMode beta_mode = BetaMode::kSigmoid;
  // As benchmarks want it: the regime's decays as raw inputs of one gate, `gate`, with A_log = 0 and dt_bias = 0, so that two regimes differ in
  // nothing but their decays. Else the regime names the gate, and brings an A_log and a dt_bias of its own.
  bool one_input = false;
  GateMode gate = GateMode::kSafe;
  int segment_chunks = 0;  // of the segmented routes; 0: their own choice
  int checkpoint_every = 0;  // tokens; 0: no checkpoints

  int sequences() const { return lengths.empty() ? B : int(lengths.size()); }
  int covered() const {  // rows of a packed call that belong to a sequence
    int sum = 0;
    for (int n : lengths) sum += n;
    return sum;
  }
};

inline int parse_number(const std::string& name, const std::string& text) {
  char* end = nullptr;
  const long x = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end || x < INT32_MIN || x > INT32_MAX) throw std::invalid_argument(name + ": got '" + text + "', no whole number");
  return int(x);
}

inline int parse_count(const std::string& name, const std::string& text) {
  const int n = parse_number(name, text);
  if (n < 1) throw std::invalid_argument(name + ": got " + text + ", must be 1 or more");
  return n;
}

inline std::vector<int> parse_lengths(const std::string& text) {
  std::vector<int> lengths;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) lengths.push_back(parse_number("lengths", part));
  return lengths;
}

// Throws std::invalid_argument where a case breaks a rule that the tools rely on.
inline void validate(const Case& c) {
  folds(c.gates);
  if (c.B < 1 || c.T < 1 || c.H < 1 || c.HV < 1 || c.HV % c.H) throw std::invalid_argument("shape: B, T, H, HV must be 1 or more, HV a multiple of H");
  if (c.checkpoint_every < 0 || c.checkpoint_every % 64) throw std::invalid_argument("checkpoint_every: must be 0 or a positive multiple of 64");
  if (c.lengths.empty()) return;
  for (int n : c.lengths)
    if (n < 0) throw std::invalid_argument("lengths: must be 0 or more");
  if (c.B != 1 || c.covered() > c.T) throw std::invalid_argument("lengths: need B = 1 and a sum of at most T");
}

// "gates=slow B=1 T=8192 H=16 HV=64 lengths=1300,547 gate=softplus g=f32 ...", in any order; what is not named has Case's default, HV that of H.
// `route` (where not null) takes the value of route=.
inline Case parse_case(const std::string& line, std::string* route) {
  Case c;
  c.one_input = true;
  c.HV = 0;
  bool gate_given = false;
  std::stringstream words(line);
  auto choose = [](const std::string& name, const std::string& value, std::vector<std::pair<std::string, int>> from) {
    std::string known;
    for (const auto& [text, number] : from) {
      if (value == text) return number;
      known += " " + text;
    }
    throw std::invalid_argument(name + ": got '" + value + "'; allowed:" + known);
  };
  const std::vector<std::pair<std::string, int>> dtypes = {{"f32", int(DType::kF32)}, {"bf16", int(DType::kBF16)}}, yes = {{"0", 0}, {"1", 1}};
  for (std::string word; words >> word;) {
    const size_t equal = word.find('=');
    if (equal == std::string::npos) throw std::invalid_argument("'" + word + "' is not name=value");
    const std::string name = word.substr(0, equal), value = word.substr(equal + 1);
    if (name == "route" && route) *route = value;
    else if (name == "gates") c.gates = value;
    else if (name == "B") c.B = parse_number(name, value);
    else if (name == "T") c.T = parse_number(name, value);
    else if (name == "H") c.H = parse_number(name, value);
    else if (name == "HV") c.HV = parse_number(name, value);
    else if (name == "lengths") c.lengths = parse_lengths(value);
    else if (name == "gate") {
      gate_given = true;
      c.gate = GateMode(choose(name, value, {{"safe", int(GateMode::kSafe)}, {"softplus", int(GateMode::kSoftplus)}, {"log", int(GateMode::kLog)}}));
    } else if (name == "g") c.g_dtype = DType(choose(name, value, dtypes));
    else if (name == "beta") c.beta_dtype = DType(choose(name, value, dtypes));
    else if (name == "state_in") c.state_in = DType(choose(name, value, dtypes));
    else if (name == "state_out") c.state_out = DType(choose(name, value, dtypes));
    else if (name == "v_first") c.v_first = choose(name, value, yes);
    else if (name == "l2norm") c.l2norm = choose(name, value, yes);
    else if (name == "segment_chunks") c.segment_chunks = parse_number(name, value);
    else if (name == "checkpoint_every") c.checkpoint_every = parse_number(name, value);
    else if (name == "has_state") c.has_state = choose(name, value, yes);
    else throw std::invalid_argument("unknown name '" + name + "'");
  }
  if (c.HV == 0) c.HV = c.H;
  validate(c);
  if (!folds(c.gates)) {
    if (gate_given) throw std::invalid_argument("gate: regime '" + c.gates + "' brings its own");
    c.one_input = false;
  }
  return c;
}

}  // namespace
