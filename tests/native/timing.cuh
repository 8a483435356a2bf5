// GPU times of calls, the rate of a copy, and the names of the kernels that a call runs.
#pragma once

#include <cuda.h>
#include <cxxabi.h>

#include "inputs.cuh"

namespace {

constexpr int kWarmUps = 5;

__global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}

// A stream, and what flushes the L2 cache.
class Timer {
 public:
  cudaStream_t stream = nullptr;

  Timer() {
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc(&flush_, kFlushBytes));
  }
  Timer(const Timer&) = delete;
  ~Timer() {
    cudaFree(flush_);
    cudaStreamDestroy(stream);
  }

  // Microseconds of each call, everything that it launches included, warm-ups left out. All calls wait in the queue behind a spinning kernel, and
  // each comes after a write of 256 MB: the host is never waited for, and inputs come from memory. `launch(stream)` must not wait either.
  template <class F> std::vector<float> time(int calls, F launch) {
    std::vector<cudaEvent_t> events(2 * size_t(calls));
    for (auto& e : events) CUDA(cudaEventCreate(&e));
    spin<<<1, 1, 0, stream>>>(1000000);  // half a millisecond
    for (int i = -kWarmUps; i < calls; ++i) {
      CUDA(cudaMemsetAsync(flush_, i & 0xff, kFlushBytes, stream));
      if (i >= 0) CUDA(cudaEventRecord(events[2 * i], stream));
      launch(stream);
      if (i >= 0) CUDA(cudaEventRecord(events[2 * i + 1], stream));
    }
    CUDA(cudaStreamSynchronize(stream));
    std::vector<float> us(calls);
    for (int i = 0; i < calls; ++i) {
      CUDA(cudaEventElapsedTime(&us[i], events[2 * i], events[2 * i + 1]));
      us[i] *= 1e3f;
    }
    for (auto& e : events) CUDA(cudaEventDestroy(e));
    return us;
  }

 private:
  static constexpr size_t kFlushBytes = size_t(256) << 20;
  void* flush_ = nullptr;
};

inline float median(std::vector<float> x) {
  std::sort(x.begin(), x.end());
  const size_t n = x.size();
  return n == 0 ? NAN : n % 2 ? x[n / 2] : 0.5f * (x[n / 2 - 1] + x[n / 2]);
}

// Bytes a second of a copy on the device, read and written ones counted.
inline double copy_rate(Timer& timer) {
  constexpr size_t kBytes = size_t(1) << 30;
  void *from, *to;
  CUDA(cudaMalloc(&from, kBytes));
  CUDA(cudaMalloc(&to, kBytes));
  CUDA(cudaMemset(from, 1, kBytes));
  CUDA(cudaDeviceSynchronize());
  const float us = median(timer.time(20, [&](cudaStream_t s) { CUDA(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice, s)); }));
  CUDA(cudaFree(from));
  CUDA(cudaFree(to));
  return 2. * double(kBytes) / (double(us) * 1e-6);
}

// "void jax_kda::(anonymous namespace)::kernel<...>(Args)" as "kernel<...>".
inline std::string short_name(const char* mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? text : mangled;
  std::free(text);
  for (const char* noise : {"void ", "(anonymous namespace)::", "jax_kda::"})
    for (size_t at; (at = name.find(noise)) != std::string::npos;) name.erase(at, std::strlen(noise));
  int depth = 0;  // cut the parameters: the first parenthesis outside <...>
  for (size_t i = 0; i < name.size(); ++i) {
    depth += name[i] == '<' ? 1 : name[i] == '>' ? -1 : 0;
    if (name[i] == '(' && depth == 0) return name.substr(0, i);
  }
  return name;
}

// What a call puts on the stream, in order, read from a capture of it: kernels by name, "memset", "memcpy". Empty where it cannot be read.
inline std::vector<std::string> launched(Timer& timer, Route route, const PrefillArgs& a) {
  std::vector<std::string> names;
  void *params_of = nullptr, *function_name = nullptr, *kernel_name = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuGraphKernelNodeGetParams", &params_of, 12000, cudaEnableDefault, &found);
  cudaGetDriverEntryPointByVersion("cuFuncGetName", &function_name, 12030, cudaEnableDefault, &found);
  cudaGetDriverEntryPointByVersion("cuKernelGetName", &kernel_name, 12030, cudaEnableDefault, &found);
  cudaGetLastError();
  if (!params_of || !function_name || !kernel_name) return names;

  cudaGraph_t graph = nullptr;
  if (cudaStreamBeginCapture(timer.stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) return names;
  const cudaError_t status = prefill(route, a, timer.stream);
  if (cudaStreamEndCapture(timer.stream, &graph) != cudaSuccess || status != cudaSuccess || !graph) {
    cudaGetLastError();
    if (graph) cudaGraphDestroy(graph);
    return names;
  }
  size_t n = 0;
  CUDA(cudaGraphGetNodes(graph, nullptr, &n));
  std::vector<cudaGraphNode_t> nodes(n);
  if (n) CUDA(cudaGraphGetNodes(graph, nodes.data(), &n));
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type;
    CUDA(cudaGraphNodeGetType(node, &type));
    if (type == cudaGraphNodeTypeMemset) names.push_back("memset");
    else if (type == cudaGraphNodeTypeMemcpy) names.push_back("memcpy");
    else if (type == cudaGraphNodeTypeKernel) {
      CUDA_KERNEL_NODE_PARAMS p{};
      const char* name = nullptr;
      if (reinterpret_cast<CUresult (*)(CUgraphNode, CUDA_KERNEL_NODE_PARAMS*)>(params_of)(node, &p) != CUDA_SUCCESS) continue;
      if (p.func) reinterpret_cast<CUresult (*)(const char**, CUfunction)>(function_name)(&name, p.func);
      else if (p.kern) reinterpret_cast<CUresult (*)(const char**, CUkernel)>(kernel_name)(&name, p.kern);
      names.push_back(name ? short_name(name) : "kernel");
    }
  }
  CUDA(cudaGraphDestroy(graph));
  return names;
}

}  // namespace
