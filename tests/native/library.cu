// The inputs, the judge and the timer of the driver, for a process that times other implementations beside ours (bench/peers.py, through ctypes).
#include <exception>

#include "decode_call.cuh"
#include "timing.cuh"

namespace {

Timer& timer() {
  static Timer* one = new Timer;  // never destroyed: the driver may be gone by then
  return *one;
}

template <class R, class F> R guarded(R otherwise, F f) {
  try {
    return f();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "jax_kda bench: %s\n", e.what());
    return otherwise;
  }
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// A case (as parse_case reads it, without a route) with its arrays on the current device; null where the line is wrong.
API void* kda_bench_open(const char* line) {
  return guarded<void*>(nullptr, [&] { return new Call(parse_case(line, nullptr), 11); });
}

API void kda_bench_close(void* call) { delete static_cast<Call*>(call); }

// The device address of an input; null where there is none of that name.
API const void* kda_bench_array(void* call, const char* name) {
  const PrefillArgs& a = static_cast<Call*>(call)->a;
  const struct {
    const char* name;
    const void* address;
  } arrays[] = {{"q", a.q},         {"k", a.k},             {"v", a.v}, {"g", a.g}, {"beta", a.beta}, {"A_log", a.a_log},
                {"dt_bias", a.dt_bias}, {"initial_state", a.initial_state}, {"offsets", a.offsets}};
  for (const auto& x : arrays)
    if (!std::strcmp(name, x.name)) return x.address;
  return nullptr;
}

// errors[2]: of o and of the state that lie at these device addresses, laid out as the case says. They must be complete.
API void kda_bench_judge(void* call, const void* o, const void* state, double* errors) {
  PrefillArgs a = static_cast<Call*>(call)->a;
  a.o = const_cast<void*>(o), a.final_state = const_cast<void*>(state), a.checkpoint_every = 0;
  const Errors e = judge(a);
  errors[0] = e.o, errors[1] = e.state;
}

// One checked call of our route, then us[calls] timed ones. 0, a cudaError_t, or -1 for a route that there is not.
API int kda_bench_time(void* call, const char* route_name, int calls, float* us, double* errors) {
  return guarded<int>(-1, [&]() -> int {
    Call& c = *static_cast<Call*>(call);
    const Route route = route_of(route_name);
    c.prepare(route);
    c.poison();
    if (const cudaError_t status = prefill(route, c.a, nullptr); status != cudaSuccess) return status;
    if (const cudaError_t status = cudaDeviceSynchronize(); status != cudaSuccess) return status;
    const Errors e = judge(c.a);
    errors[0] = e.o, errors[1] = e.state;
    const std::vector<float> times = timer().time(calls, [&](cudaStream_t s) { CUDA(prefill(route, c.a, s)); });
    std::copy(times.begin(), times.end(), us);
    return 0;
  });
}

// The same of decode, one step of the case's tokens.
API int kda_bench_time_decode(void* call, int calls, float* us, double* errors) {
  return guarded<int>(-1, [&]() -> int {
    DecodeStep step(*static_cast<Call*>(call));
    const Errors e = step.run_checked();
    errors[0] = e.o, errors[1] = e.state;
    const std::vector<float> times = timer().time(calls, [&](cudaStream_t s) { CUDA(decode(step.a, s)); });
    std::copy(times.begin(), times.end(), us);
    return 0;
  });
}

// Bytes a second of a copy on the device, read and written ones counted.
API double kda_bench_copy_rate() { return copy_rate(timer()); }
