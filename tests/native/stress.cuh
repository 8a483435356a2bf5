// Calls under disturbance: many in a row beside other work, two streams at once, a device without room for clusters. All compared bit by bit.
#pragma once

#include <unistd.h>

#include <array>
#include <memory>
#include <thread>
#include <utility>

#include "reference.cuh"
#include "timing.cuh"

namespace {

constexpr unsigned kPatience = 60;  // seconds, for one case; then a signal ends the process

// ---- results, compared on the device

__global__ void compare_bits(const uint32_t* x, const uint32_t* y, size_t words, int* differ) {
  bool far = false;
  for (size_t i = first_index(); i < words; i += index_step()) far |= x[i] != y[i];
  if (far) atomicOr(differ, 1);
}

struct DeviceMemory {
  void* p = nullptr;
  explicit DeviceMemory(size_t bytes) { CUDA(cudaMalloc(&p, std::max<size_t>(bytes, 16))); }
  DeviceMemory(DeviceMemory&& other) : p(std::exchange(other.p, nullptr)) {}
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(p); }
};

// What a call wrote, kept.
struct Results {
  size_t o_bytes, state_bytes;
  DeviceMemory o, state;

  Results(const Call& c, const PrefillArgs& a) : o_bytes(c.o_bytes()), state_bytes(c.state_bytes()), o(o_bytes), state(state_bytes) {
    CUDA(cudaMemcpy(o.p, a.o, o_bytes, cudaMemcpyDeviceToDevice));
    CUDA(cudaMemcpy(state.p, a.final_state, state_bytes, cudaMemcpyDeviceToDevice));
    CUDA(cudaDeviceSynchronize());
  }
  // *differ becomes 1 where a call's results have other bits.
  void compare(const PrefillArgs& a, int* differ, cudaStream_t stream) const {
    compare_bits<<<128, 256, 0, stream>>>(static_cast<const uint32_t*>(o.p), static_cast<const uint32_t*>(a.o), o_bytes / 4, differ);
    compare_bits<<<128, 256, 0, stream>>>(static_cast<const uint32_t*>(state.p), static_cast<const uint32_t*>(a.final_state), state_bytes / 4, differ);
    CUDA(cudaGetLastError());
  }
};

// One int a call, all zeros at first.
class Flags {
 public:
  explicit Flags(int n) : n_(n), memory_(n * sizeof(int)) {
    CUDA(cudaMemset(memory_.p, 0, n * sizeof(int)));
    CUDA(cudaDeviceSynchronize());  // other streams do not wait for it
  }
  int* of(int i) const { return static_cast<int*>(memory_.p) + i; }
  std::vector<int> read() const {
    std::vector<int> host(n_);
    CUDA(cudaMemcpy(host.data(), memory_.p, n_ * sizeof(int), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  int n_;
  DeviceMemory memory_;
};

inline void overwrite(const Call& c, const PrefillArgs& a, int byte, bool workspace, cudaStream_t stream) {
  CUDA(cudaMemsetAsync(a.o, byte, c.o_bytes(), stream));
  CUDA(cudaMemsetAsync(a.final_state, byte, c.state_bytes(), stream));
  if (workspace && a.workspace_bytes) CUDA(cudaMemsetAsync(a.workspace, byte, a.workspace_bytes, stream));
}

// ---- other work

// Holds its SMs, with the shared memory that the launch asks for, and reads and writes memory, for so many cycles.
__global__ void occupy(long long cycles, uint32_t* memory, size_t words) {
  const long long start = clock64();
  for (size_t i = first_index(); clock64() - start < cycles; i += index_step()) memory[i % words] += uint32_t(i);
}

// On a stream of its own: kernels of 5 to 60 us on some or all SMs, and copies of 64 MB.
class Rival {
 public:
  Rival() : from_(kBytes), to_(kBytes) {
    CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CUDA(cudaFuncSetAttribute(occupy, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
    int device = 0;
    CUDA(cudaGetDevice(&device));
    CUDA(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device));
  }
  Rival(const Rival&) = delete;
  ~Rival() { cudaStreamDestroy(stream_); }

  void work(std::mt19937& r) {
    if (r() % 8 == 0) {
      CUDA(cudaMemcpyAsync(to_.p, from_.p, kBytes, cudaMemcpyDeviceToDevice, stream_));
      return;
    }
    const unsigned blocks = 1 + r() % unsigned(2 * sms_), shared = r() % 3 == 0 ? 0 : r() % kShared;
    occupy<<<blocks, 64 << r() % 4, shared, stream_>>>(10000 + r() % 100000, static_cast<uint32_t*>(from_.p), kBytes / 4);
    CUDA(cudaGetLastError());
  }

 private:
  static constexpr size_t kBytes = size_t(64) << 20;
  static constexpr unsigned kShared = 200 << 10;
  cudaStream_t stream_ = nullptr;
  DeviceMemory from_, to_;
  int sms_ = 0;
};

// ---- stress

// As parse_case reads them. Where there are lengths, calls have other ones too, as many.
constexpr const char* kStressed[] = {
    "gates=production T=1", "gates=slow T=31 H=2 HV=4", "gates=mixed T=64 H=8", "gates=long T=100 H=3 g=f32",
    "gates=unbounded T=33 H=2", "gates=log T=257 H=4 g=f32", "gates=softplus T=512 H=2 HV=8", "gates=collinear T=130 H=2",
    "gates=production T=512 H=8", "gates=none T=1000 H=1", "gates=bound T=333 H=5", "gates=wide T=200 H=2",
    "gates=production B=2 T=300 H=4", "gates=slow B=3 T=65 H=2 HV=4 state_in=bf16 state_out=bf16", "gates=unbounded B=4 T=97 H=4 g=f32",
    "gates=mixed T=70 H=36 HV=144", "gates=softplus T=40 H=70 HV=140 v_first=1", "gates=slow T=90 H=40 has_state=0",
    "gates=slow T=1500 H=2 segment_chunks=3", "gates=log T=700 H=3 segment_chunks=2", "gates=production T=900 H=1 HV=6 segment_chunks=1",
    "gates=production T=200 H=1 lengths=63,1,0,64,72", "gates=slow T=600 H=4 lengths=200,400", "gates=unbounded T=300 H=2 HV=4 lengths=33,0,0,267",
    "gates=mixed T=257 H=8 lengths=1,31,32,33,64,96 v_first=1 state_in=bf16", "gates=log T=150 H=2 g=f32 lengths=149,1",
    "gates=softplus T=400 H=1 HV=2 lengths=10,20,30,40,50,60,70,50,40,30", "gates=long T=128 H=4 lengths=4,4,4,4,4,4,4,4,8,8,16,64",
    "gates=slow T=1200 H=1 lengths=321,0,348,31,500 segment_chunks=2", "gates=unbounded T=1000 H=2 lengths=1000,0,0 segment_chunks=3",
};
constexpr int kShapes = std::size(kStressed);
static_assert(kShapes == 30);

// Cuts of [0, T], some sequences empty, some rows outside.
inline std::vector<int32_t> random_offsets(int T, int sequences, std::mt19937& r) {
  std::vector<int32_t> x(sequences + 1);
  for (int32_t& y : x) y = int32_t(r() % unsigned(T + 1));
  std::sort(x.begin(), x.end());
  return x;
}

struct Stressed {
  int mismatches = 0;
  Errors worst{0., 0.};  // of the quiet calls
};

// Quiet calls of one shape, judged and kept; then calls beside the rival's work, compared with them.
inline Stressed stress_shape(Route route, const Case& c, int calls, unsigned seed, Rival& rival, cudaStream_t stream) {
  constexpr int kDataSets = 3;
  constexpr std::array<int, 3> kBytes = {0xff, 0x00, 0x7f};
  Stressed result;
  const int kinds = c.lengths.empty() ? 1 : 5;
  std::mt19937 r(seed);
  std::vector<std::unique_ptr<Call>> data;
  for (int d = 0; d < kDataSets; ++d) data.push_back(std::make_unique<Call>(c, seed + d));
  const Call& first = *data[0];
  data[0]->prepare(route);

  // All calls write the same memory, and read their offsets from the same.
  const size_t offset_bytes = (c.sequences() + 1) * sizeof(int32_t);
  DeviceMemory offsets(kinds * offset_bytes), current(offset_bytes);
  auto kind_of = [&](int kind) { return static_cast<char*>(offsets.p) + kind * offset_bytes; };
  for (int kind = 0; kind < kinds && !c.lengths.empty(); ++kind) {
    std::vector<int32_t> x = {0};
    for (int n : c.lengths) x.push_back(x.back() + n);
    if (kind > 0) x = random_offsets(c.T, c.sequences(), r);
    CUDA(cudaMemcpy(kind_of(kind), x.data(), offset_bytes, cudaMemcpyHostToDevice));
  }
  auto launch = [&](int d, int kind) {
    PrefillArgs a = data[d]->a;
    a.o = first.a.o, a.final_state = first.a.final_state, a.workspace = first.a.workspace, a.workspace_bytes = first.a.workspace_bytes;
    if (a.offsets) {
      a.offsets = static_cast<const int32_t*>(current.p);
      CUDA(cudaMemcpyAsync(current.p, kind_of(kind), offset_bytes, cudaMemcpyDeviceToDevice, stream));
    }
    CUDA(prefill(route, a, stream));
    return a;
  };

  CUDA(cudaDeviceSynchronize());
  std::vector<Results> quiet;
  for (int i = 0; i < kDataSets * kinds; ++i) {
    overwrite(first, first.a, 0xff, true, stream);
    const PrefillArgs a = launch(i / kinds, i % kinds);
    CUDA(cudaStreamSynchronize(stream));
    quiet.emplace_back(first, a);
    const Errors e = judge(a);
    auto keep = [](double& worst, double error) { worst = std::isnan(worst) || error <= worst ? worst : error; };
    keep(result.worst.o, e.o), keep(result.worst.state, e.state);
  }

  const Flags differ(calls);
  for (int i = 0; i < calls; ++i) {
    rival.work(r);
    // Every call's results land on other bits. Flags and packets of the call before stay in the workspace, or not.
    overwrite(first, first.a, kBytes[i % 3], r() % 3 == 0, stream);
    const int which = int(r() % quiet.size());
    quiet[which].compare(launch(which / kinds, which % kinds), differ.of(i), stream);
  }
  CUDA(cudaDeviceSynchronize());
  const std::vector<int> found = differ.read();
  result.mismatches = int(std::count(found.begin(), found.end(), 1));
  return result;
}

inline int stress(Route route, int calls) {
  const unsigned seed = std::random_device{}();
  std::printf("%s, seed %u\n", name_of(route), seed);
  cudaStream_t stream = nullptr;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Rival rival;
  int different = 0, wrong = 0;
  for (int i = 0; i < kShapes; ++i) {
    alarm(kPatience);
    const int of_shape = int(int64_t(calls) * (i + 1) / kShapes - int64_t(calls) * i / kShapes);
    const Case c = parse_case(kStressed[i], nullptr);
    const Stressed s = stress_shape(route, c, of_shape, seed + 100 * i, rival, stream);
    const bool right = s.worst.o <= error_bar(c) && s.worst.state <= error_bar(c);
    different += s.mismatches, wrong += !right;
    std::printf("%5d calls  %5d differ, err %.2e %.2e%s  %s\n", of_shape, s.mismatches, s.worst.o, s.worst.state, right ? "" : " WRONG WHEN QUIET", kStressed[i]);
  }
  CUDA(cudaStreamDestroy(stream));
  std::printf("stress %s: %d shapes, %d calls, %d mismatches, %d shapes wrong when quiet\n", name_of(route), kShapes, calls, different, wrong);
  return different != 0 || wrong != 0;
}

// ---- two streams

// One thread's calls: its own stream, data, outputs and workspace.
class Side {
 public:
  Side(Route route, const Case& c, unsigned seed, int rounds) : route_(route), rounds_(rounds), call_(c, seed), differ_(rounds) {
    CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    call_.prepare(route);
    call_.poison();
    CUDA(prefill(route, call_.a, stream_));
    CUDA(cudaStreamSynchronize(stream_));
    alone_ = std::make_unique<Results>(call_, call_.a);
    const Errors e = judge(call_.a);
    right = e.o <= error_bar(c) && e.state <= error_bar(c);
  }
  Side(const Side&) = delete;
  ~Side() { cudaStreamDestroy(stream_); }

  void run() {
    for (int i = 0; i < rounds_; ++i) {
      overwrite(call_, call_.a, 0xff, i % 2, stream_);
      CUDA(prefill(route_, call_.a, stream_));
      alone_->compare(call_.a, differ_.of(i), stream_);
    }
    CUDA(cudaStreamSynchronize(stream_));
  }
  int mismatches() const {
    const std::vector<int> found = differ_.read();
    return int(std::count(found.begin(), found.end(), 1));
  }

  bool right = false;

 private:
  Route route_;
  int rounds_;
  Call call_;
  Flags differ_;
  std::unique_ptr<Results> alone_;
  cudaStream_t stream_ = nullptr;
};

inline int streams(Route route, int rounds) {
  constexpr const char* kPairs[][2] = {
      {"gates=production T=512 H=8", "gates=slow T=300 H=4 HV=8"},
      {"gates=unbounded T=257 H=4", "gates=mixed T=400 H=2 lengths=100,0,250,50"},
      {"gates=slow T=1000 H=1 segment_chunks=2", "gates=softplus T=900 H=2 segment_chunks=1"},
      {"gates=mixed T=70 H=80", "gates=log T=64 H=100 g=f32"},
  };
  int different = 0, wrong = 0, calls = 0;
  for (const auto& pair : kPairs) {
    alarm(kPatience);
    Side one(route, parse_case(pair[0], nullptr), 1, rounds), two(route, parse_case(pair[1], nullptr), 2, rounds);
    CUDA(cudaDeviceSynchronize());
    std::thread other([&] { two.run(); });
    one.run();
    other.join();
    const int n = one.mismatches() + two.mismatches();
    different += n, wrong += !one.right + !two.right, calls += 2 * rounds;
    std::printf("%5d calls  %5d differ%s  %s | %s\n", 2 * rounds, n, one.right && two.right ? "" : ", WRONG ALONE", pair[0], pair[1]);
  }
  std::printf("streams %s: %d calls, %d mismatches, %d wrong alone\n", name_of(route), calls, different, wrong);
  return different != 0 || wrong != 0;
}

// ---- no room for clusters

bool no_clusters = false;
int clusters_asked = 0;

}  // namespace

// The linker's --wrap puts this in the place of CUDA's own, for the kernels too.
extern "C" cudaError_t __attribute__((weak)) __real_cudaOccupancyMaxActiveClusters(int*, const void*, const cudaLaunchConfig_t*);
extern "C" cudaError_t __wrap_cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel, const cudaLaunchConfig_t* config) {
  ++clusters_asked;
  if (!no_clusters) return __real_cudaOccupancyMaxActiveClusters(clusters, kernel, config);
  *clusters = 0;
  return cudaSuccess;
}

namespace {

// Each kernel asks once in a process, so this is a command of its own.
inline int fallback() {
  no_clusters = true;
  Timer timer;
  int bad = 0;
  for (Route route : {Route::kC4M128D15, Route::kC4M64D10, Route::kC8M128D35})
    for (const char* line : {"gates=slow T=200 H=2", "gates=slow T=200 H=2 g=f32", "gates=unbounded T=130 H=1 HV=2 lengths=64,0,66",
                             "gates=unbounded T=130 H=1 HV=2 g=f32"}) {
      alarm(kPatience);
      const Case c = parse_case(line, nullptr);
      Call call(c, 11);
      call.prepare(route);
      call.poison();
      CUDA(prefill(Route::kBaselineM128, call.a, nullptr));
      CUDA(cudaDeviceSynchronize());
      const Results want(call, call.a);
      const int asked = clusters_asked;
      call.poison();
      CUDA(prefill(route, call.a, nullptr));
      const Flags differ(1);
      want.compare(call.a, differ.of(0), nullptr);
      CUDA(cudaDeviceSynchronize());
      if (clusters_asked == asked) throw std::runtime_error("fallback: nobody asked for room; link with -Xlinker --wrap=cudaOccupancyMaxActiveClusters");
      const bool same = differ.read()[0] == 0;
      const std::vector<std::string> names = launched(timer, route, call.a);
      const bool baseline = names.empty() || (names.size() == 1 && names[0].find("baseline_kernel") != std::string::npos);
      bad += !same || !baseline;
      std::printf("%-12s %s: %s%s\n", name_of(route), line, names.empty() ? "kernel unknown" : names[0].c_str(),
                  !baseline ? " IS NOT THE BASELINE" : same ? ", same bits" : " WITH OTHER BITS");
    }
  std::printf("fallback: %d bad\n", bad);
  return bad != 0;
}

}  // namespace
