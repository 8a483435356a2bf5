// Decode over launch.h without XLA: correctness (for compute-sanitizer too), and GPU times.
//
//   decode_driver check              every layout, slice, gate regime and option against the f64 token recurrence; pools and padding slots
//   decode_driver bench [NAME=VALUE...]
//                                    (N, HV) of {1, 8, 64, 256} x {8, 32, 64}, or N= and HV= alone; every case is judged before it is timed. Prints a
//                                    table, and with json=FILE writes that too.
//     calls=100  T=1  state=f32|bf16  v_first=0|1  columns=0|16|32  gates=production  N=  HV=  json=FILE
//
// Each timed call comes after a write of 256 MB, so that states come from memory. "of copy" is the share of the rate of a large device-to-device copy
// measured in the same run, read and written bytes counted in both; a call's bytes are its states (read and written) and its token arrays.
#include <map>

#include <unistd.h>

#include "decode_call.cuh"
#include "timing.cuh"

namespace {

constexpr unsigned kPatience = 60;  // seconds, for one case

struct OwnArrays {
  Call arrays;
};

// A decode step with arrays of its own.
class DecodeCall : OwnArrays, public DecodeStep {
 public:
  DecodeCall(const Case& c, unsigned seed) : OwnArrays{Call(c, seed)}, DecodeStep(arrays) {}

  // The same from a pool: every bit as before, in the place that each index names; padding slots write zeros and nothing else moves.
  // After run_checked.
  std::string pool_differs() {
    const int B = int(a.B), P = 2 * B + 3;
    std::vector<int32_t> places(B);
    for (int n = 0; n < B; ++n) places[n] = n % 3 == 1 ? (n % 2 ? -1 - n : P + n) : 2 * (B - n);
    const std::vector<char> want_o = host(a.o, B * o_bytes()), want_state = host(a.state, B * state_bytes_);
    std::vector<char> pool(P * state_bytes_, 0x3c);
    const std::vector<char> start = host(call_.a.initial_state, B * state_bytes_);
    auto used = [&](int n) { return 0 <= places[n] && places[n] < P; };
    for (int n = 0; n < B; ++n)
      if (used(n)) std::copy_n(&start[n * state_bytes_], state_bytes_, &pool[places[n] * state_bytes_]);
    DecodeArgs pooled = a;
    void *on_pool, *on_places;
    CUDA(cudaMalloc(&on_pool, pool.size()));
    CUDA(cudaMalloc(&on_places, B * 4));
    CUDA(cudaMemcpy(on_pool, pool.data(), pool.size(), cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(on_places, places.data(), B * 4, cudaMemcpyHostToDevice));
    CUDA(cudaMemset(a.o, 0xff, B * o_bytes()));
    pooled.state = on_pool, pooled.state_indices = static_cast<int32_t*>(on_places), pooled.P = P;
    CUDA(decode(pooled, nullptr));
    CUDA(cudaDeviceSynchronize());
    const std::vector<char> got_o = host(a.o, B * o_bytes()), got = host(on_pool, pool.size());
    CUDA(cudaFree(on_pool));
    CUDA(cudaFree(on_places));
    for (int n = 0; n < B; ++n) {
      const auto* o = &got_o[n * o_bytes()];
      if (!used(n) && !std::all_of(o, o + o_bytes(), [](char x) { return x == 0; })) return "a padding slot's o is not zero";
      if (!used(n)) continue;
      if (std::memcmp(o, &want_o[n * o_bytes()], o_bytes())) return "o differs from that without a pool";
      std::copy_n(&want_state[n * state_bytes_], state_bytes_, &pool[places[n] * state_bytes_]);
    }
    return got == pool ? "" : "the pool is not what the states alone become";
  }

 private:
  static std::vector<char> host(const void* from, size_t n) {
    std::vector<char> x(n);
    CUDA(cudaMemcpy(x.data(), from, n, cudaMemcpyDeviceToHost));
    return x;
  }
};

int check() {
  std::vector<Case> cases;
  for (const auto& gates : kGates)
    for (int T : {1, 2, 8}) {
      cases.push_back({gates.name, 3, T, 1, 2});
      Case f32 = {gates.name, 2, T, 2, 4};
      f32.g_dtype = f32.beta_dtype = DType::kF32, f32.v_first = true;
      cases.push_back(f32);
      Case narrow = {gates.name, 5, T, 1, 3};
      narrow.state_in = narrow.state_out = DType::kBF16, narrow.v_first = T == 2, narrow.beta_mode = BetaMode::kSigmoidDoubled;
      cases.push_back(narrow);
      if (std::string(gates.name) == "collinear") continue;
      Case plain = {gates.name, 40, T, 1, 1};
      plain.l2norm = false, plain.beta_mode = BetaMode::kPlain;
      cases.push_back(plain);
    }
  int bad = 0, tried = 0;
  unsigned seed = std::random_device{}();
  std::printf("seed %u\n%-11s %3s %2s %2s %2s %-5s %-6s %7s %9s %9s\n", seed, "gates", "N", "T", "H", "HV", "state", "layout", "columns", "err o", "err state");
  for (const Case& c : cases)
    for (int columns : {0, 16, 32}) {
      alarm(kPatience);
      DecodeCall call(c, seed++);
      call.a.columns = columns;
      const Errors e = call.run_checked();
      const std::string differs = call.pool_differs();
      // o is rounded to bf16; an f32 state to nothing but f32.
      const bool narrow = c.state_in != DType::kF32;
      const bool ok = e.o <= 3e-3 && e.state <= (narrow ? 3e-3 : 1e-5) && differs.empty();
      bad += !ok, ++tried;
      if (columns == 0 || !ok)
        std::printf("%-11s %3d %2d %2d %2d %-5s %-6s %7d %9.2e %9.2e %s%s\n", c.gates.c_str(), c.B, c.T, c.H, c.HV, narrow ? "bf16" : "f32",
                    c.v_first ? "[V, K]" : "[K, V]", columns, e.o, e.state, ok ? "" : "BAD ", differs.c_str());
    }
  std::printf("%d cases, %d bad\n", tried, bad);
  return bad != 0;
}

struct Settings {
  Case c;
  int calls = 100, columns = 0;
  std::vector<int> sequences = {1, 8, 64, 256}, heads = {8, 32, 64};
  std::string json;
};

Settings parse(const std::vector<std::string>& words) {
  Settings s;
  s.c.one_input = true;
  std::string rest = "T=1 ";
  for (const std::string& word : words) {
    const size_t equal = word.find('=');
    if (equal == std::string::npos) throw std::invalid_argument("'" + word + "' is not name=value");
    const std::string name = word.substr(0, equal), value = word.substr(equal + 1);
    if (name == "calls") s.calls = parse_number(name, value);
    else if (name == "columns") s.columns = parse_number(name, value);
    else if (name == "N") s.sequences = {parse_number(name, value)};
    else if (name == "HV") s.heads = {parse_number(name, value)};
    else if (name == "json") s.json = value;
    else if (name == "state") rest += "state_in=" + value + " state_out=" + value + " ";
    else if (name == "T" || name == "v_first" || name == "gates" || name == "gate" || name == "g") rest += word + " ";
    else throw std::invalid_argument("unknown name '" + name + "'");
  }
  s.c = parse_case(rest, nullptr);
  if (s.calls < 1) throw std::invalid_argument("calls must be 1 or more");
  if (s.c.T > kMaxDecodeTokens) throw std::invalid_argument("T: got " + std::to_string(s.c.T) + "; allowed: 1 to 8");
  return s;
}

int bench(const Settings& s) {
  alarm(kPatience);
  Timer timer;
  const double copy = copy_rate(timer);
  cudaDeviceProp device;
  CUDA(cudaGetDeviceProperties(&device, 0));
  const char* dtype = s.c.state_in == DType::kF32 ? "f32" : "bf16";
  const char* layout = s.c.v_first ? "VK" : "KV";
  std::printf("%s, copy %.0f GB/s; T = %d, %s states [%c, %c], %s, median of %d\n", device.name, copy * 1e-9, s.c.T, dtype, layout[0], layout[1],
              s.c.gates.c_str(), s.calls);
  std::printf("%5s %4s %10s %10s %9s %8s %9s %9s\n", "N", "HV", "median us", "min us", "GB/s", "of copy", "err o", "err state");
  std::string rows;
  for (int N : s.sequences)
    for (int HV : s.heads) {
      alarm(kPatience);
      Case c = s.c;
      c.B = N, c.H = c.HV = HV;
      validate(c);
      DecodeCall call(c, 11);
      call.a.columns = s.columns;
      const Errors e = call.run_checked();
      const std::vector<float> us = timer.time(s.calls, [&](cudaStream_t stream) { CUDA(decode(call.a, stream)); });
      const double mid = median(us), least = *std::min_element(us.begin(), us.end()), rate = call.bytes() / (mid * 1e-6);
      std::printf("%5d %4d %10.2f %10.2f %9.0f %7.1f%% %9.2e %9.2e\n", N, HV, mid, least, rate * 1e-9, 100. * rate / copy, e.o, e.state);
      char row[512];
      std::snprintf(row, sizeof row,
                    "%s\n  {\"N\": %d, \"HV\": %d, \"T\": %d, \"state\": \"%s\", \"layout\": \"%s\", \"gates\": \"%s\", \"columns\": %d, \"calls\": %d, "
                    "\"median_us\": %.4g, \"min_us\": %.4g, \"bytes\": %.0f, \"bytes_per_second\": %.5g, \"of_copy\": %.4g, \"err_o\": %.3g, \"err_state\": %.3g}",
                    rows.empty() ? "" : ",", N, HV, c.T, dtype, layout, c.gates.c_str(), s.columns, s.calls, mid, least, call.bytes(), rate, rate / copy, e.o,
                    e.state);
      rows += row;
    }
  if (s.json.empty()) return 0;
  std::FILE* file = std::fopen(s.json.c_str(), "w");
  if (!file) throw std::invalid_argument("json: cannot write " + s.json);
  std::fprintf(file, "{\"gpu\": \"%s\", \"copy_rate\": %.5g, \"rows\": [%s\n]}\n", device.name, copy, rows.c_str());
  return std::fclose(file) != 0;
}

int run(const std::vector<std::string>& words) {
  if (words.size() <= 1 && (words.empty() || words[0] == "check")) return check();
  if (words[0] == "bench") return bench(parse({words.begin() + 1, words.end()}));
  std::fprintf(stderr, "usage: decode_driver check | bench [calls= T= state= v_first= columns= gates= N= HV= json=]\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& e) {
    std::fprintf(stderr, "decode_driver: %s\n", e.what());
    return 2;
  }
}
