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

  void flush() { CUDA(cudaMemsetAsync(flush_, 0x55, kFlushBytes, stream)); }

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
class Captured {
 public:
  struct Node {
    std::string name;
    CUDA_KERNEL_NODE_PARAMS kernel;  // of a kernel; its pointers live as long as this object
  };
  std::vector<Node> nodes;

  Captured(Timer& timer, Route route, const PrefillArgs& a) {
    void *params_of = nullptr, *function_name = nullptr, *kernel_name = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuGraphKernelNodeGetParams", &params_of, 12000, cudaEnableDefault, &found);
    cudaGetDriverEntryPointByVersion("cuFuncGetName", &function_name, 12030, cudaEnableDefault, &found);
    cudaGetDriverEntryPointByVersion("cuKernelGetName", &kernel_name, 12030, cudaEnableDefault, &found);
    cudaGetLastError();
    if (!params_of || !function_name || !kernel_name) return;

    if (cudaStreamBeginCapture(timer.stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) return;
    const cudaError_t status = prefill(route, a, timer.stream);
    if (cudaStreamEndCapture(timer.stream, &graph_) != cudaSuccess || status != cudaSuccess || !graph_) {
      cudaGetLastError();
      return;
    }
    size_t n = 0;
    CUDA(cudaGraphGetNodes(graph_, nullptr, &n));
    std::vector<cudaGraphNode_t> of_graph(n);
    if (n) CUDA(cudaGraphGetNodes(graph_, of_graph.data(), &n));
    for (cudaGraphNode_t node : of_graph) {
      cudaGraphNodeType type;
      CUDA(cudaGraphNodeGetType(node, &type));
      if (type == cudaGraphNodeTypeMemset) nodes.push_back({"memset", {}});
      else if (type == cudaGraphNodeTypeMemcpy) nodes.push_back({"memcpy", {}});
      else if (type == cudaGraphNodeTypeKernel) {
        CUDA_KERNEL_NODE_PARAMS p{};
        const char* name = nullptr;
        if (reinterpret_cast<CUresult (*)(CUgraphNode, CUDA_KERNEL_NODE_PARAMS*)>(params_of)(node, &p) != CUDA_SUCCESS) continue;
        if (p.func) reinterpret_cast<CUresult (*)(const char**, CUfunction)>(function_name)(&name, p.func);
        else if (p.kern) reinterpret_cast<CUresult (*)(const char**, CUkernel)>(kernel_name)(&name, p.kern);
        nodes.push_back({name ? short_name(name) : "kernel", p});
      }
    }
  }
  Captured(const Captured&) = delete;
  ~Captured() {
    if (graph_) cudaGraphDestroy(graph_);
  }

 private:
  cudaGraph_t graph_ = nullptr;
};

inline std::vector<std::string> launched(Timer& timer, Route route, const PrefillArgs& a) {
  std::vector<std::string> names;
  for (const auto& node : Captured(timer, route, a).nodes) names.push_back(node.name);
  return names;
}

// The kernels of a call one by one, with an event between them: name and median microseconds. What they take together is less where they overlap.
inline std::vector<std::pair<std::string, float>> time_kernels(Timer& timer, Route route, const PrefillArgs& a, int calls) {
  std::vector<std::pair<std::string, float>> times;
  void* launch = nullptr;
  cudaDriverEntryPointQueryResult found;
  CUDA(cudaGetDriverEntryPointByVersion("cuLaunchKernel", &launch, 12000, cudaEnableDefault, &found));
  const Captured call(timer, route, a);
  for (size_t measured = 0; measured < call.nodes.size(); ++measured) {
    auto run = [&](const Captured::Node& node) {
      const auto& p = node.kernel;
      const CUfunction f = p.func ? p.func : reinterpret_cast<CUfunction>(p.kern);
      if (f && reinterpret_cast<decltype(&cuLaunchKernel)>(launch)(f, p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ,
                                                                   p.sharedMemBytes, timer.stream, p.kernelParams, p.extra) != CUDA_SUCCESS)
        throw std::runtime_error("cannot launch " + node.name);
    };
    std::vector<float> us;
    for (int i = -kWarmUps; i < calls; ++i) {
      cudaEvent_t begin, end;
      CUDA(cudaEventCreate(&begin));
      CUDA(cudaEventCreate(&end));
      timer.flush();
      spin<<<1, 1, 0, timer.stream>>>(200000);  // until all of the call is queued
      for (size_t k = 0; k < measured; ++k) run(call.nodes[k]);
      CUDA(cudaEventRecord(begin, timer.stream));
      run(call.nodes[measured]);
      CUDA(cudaEventRecord(end, timer.stream));
      CUDA(cudaStreamSynchronize(timer.stream));
      float ms;
      CUDA(cudaEventElapsedTime(&ms, begin, end));
      if (i >= 0) us.push_back(ms * 1e3f);
      CUDA(cudaEventDestroy(begin));
      CUDA(cudaEventDestroy(end));
    }
    times.push_back({call.nodes[measured].name, median(us)});
  }
  return times;
}

}  // namespace
