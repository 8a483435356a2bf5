// The kernels of one call, each of which may start before the one in front of it has ended, launched at once.
//
// Launched one by one they take the host 4 us each, and a small call's wall time is the host's. As a graph that is made once for a stream and its
// kernels, and gets the call's sizes and arguments each time, they take 5 us together. A stream that is being captured gets the kernels one by one.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "launch_kernel.cuh"

namespace jax_kda {

class KernelRow {
 public:
  static constexpr int kMost = 8, kMostArguments = 2;

  explicit KernelRow(cudaStream_t stream) : stream_(stream) {}

  // Where the kernel in front of it calls allow_next_kernel, this one's CTAs move in as that one's leave, and are set up by the time that its results are
  // complete (wait_for_previous_kernels). The first of a row waits for all that the stream holds. The arguments are read by launch().
  template <auto kKernel, class... Arguments> cudaError_t add(int64_t blocks, int threads, int shared_bytes, const Arguments&... arguments) {
    static_assert(sizeof...(Arguments) <= kMostArguments);
    if (blocks > INT32_MAX || count_ == kMost) return cudaErrorInvalidValue;
    if (cudaError_t e = allow_shared_memory<kKernel>(shared_bytes); e != cudaSuccess) return e;
#if defined(JAX_KDA_EMULATE)
    emulation::launch(kKernel, uint32_t(blocks), threads, uint32_t(shared_bytes), stream_, arguments...);
#else
    kernels_[count_++] = {reinterpret_cast<const void*>(kKernel), unsigned(blocks), unsigned(threads), unsigned(shared_bytes),
                          {const_cast<void*>(static_cast<const void*>(&arguments))...}};
#endif
    return cudaSuccess;
  }

#if defined(JAX_KDA_EMULATE)
  cudaError_t launch() { return cudaSuccess; }
#else
  cudaError_t launch() {
    cudaStreamCaptureStatus capture;
    const bool recorded = cudaStreamIsCapturing(stream_, &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone;
    if (Graph* graph = recorded || count_ == 1 ? nullptr : graph_of()) {
      std::lock_guard<std::mutex> lock(graph->mutex);
      if (!graph->exec && !graph->refused) graph->refused = !make(*graph);
      if (!graph->refused) graph->refused = !update(*graph);
      if (!graph->refused) return cudaGraphLaunch(graph->exec, stream_);
    }
    cudaGetLastError();  // of what was tried above
    return launch_one_by_one();
  }
#endif

 private:
  struct Kernel {
    const void* function;
    unsigned blocks, threads, shared_bytes;
    void* arguments[kMostArguments];
  };

  cudaStream_t stream_;
  [[maybe_unused]] Kernel kernels_[kMost];
  int count_ = 0;

#if !defined(JAX_KDA_EMULATE)
  // One for a stream, which runs its launches in their order anyway: shared by two, they would wait for each other.
  struct Graph {
    int device, count;
    cudaStream_t stream;
    const void* functions[kMost];
    std::mutex mutex;  // of what follows
    bool refused = false;
    cudaGraphExec_t exec = nullptr;
    cudaGraphNode_t nodes[kMost];
  };

  cudaKernelNodeParams parameters(int i) {
    cudaKernelNodeParams p{};
    p.func = const_cast<void*>(kernels_[i].function);
    p.gridDim = dim3(kernels_[i].blocks), p.blockDim = dim3(kernels_[i].threads), p.sharedMemBytes = kernels_[i].shared_bytes;
    p.kernelParams = kernels_[i].arguments;
    return p;
  }

  // Null where there are too many already. They live as long as the process: a stream does not say that it ends.
  Graph* graph_of() {
    static constexpr size_t kMostGraphs = 64;
    static std::mutex mutex;
    static auto& graphs = *new std::vector<std::unique_ptr<Graph>>;
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& graph : graphs) {
      bool same = graph->stream == stream_ && graph->device == device && graph->count == count_;
      for (int i = 0; same && i < count_; ++i) same = graph->functions[i] == kernels_[i].function;
      if (same) return graph.get();
    }
    if (graphs.size() == kMostGraphs) return nullptr;
    auto made = std::make_unique<Graph>();
    made->device = device, made->count = count_, made->stream = stream_;
    for (int i = 0; i < count_; ++i) made->functions[i] = kernels_[i].function;
    return graphs.emplace_back(std::move(made)).get();
  }

  bool make(Graph& to) {
    // What it allocates may not end another thread's capture.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaGraph_t graph = nullptr;
    cudaError_t e = cudaGraphCreate(&graph, 0);
    for (int i = 0; e == cudaSuccess && i < count_; ++i) {
      const cudaKernelNodeParams p = parameters(i);
      e = cudaGraphAddKernelNode(&to.nodes[i], graph, nullptr, 0, &p);
      if (e != cudaSuccess || i == 0) continue;
      cudaGraphEdgeData early{};
      early.from_port = cudaGraphKernelNodePortProgrammatic, early.type = cudaGraphDependencyTypeProgrammatic;
#if CUDART_VERSION >= 13000
      e = cudaGraphAddDependencies(graph, &to.nodes[i - 1], &to.nodes[i], &early, 1);
#else
      e = cudaGraphAddDependencies_v2(graph, &to.nodes[i - 1], &to.nodes[i], &early, 1);
#endif
    }
    // The graph itself stays: its nodes name those of the executable one.
    if (e == cudaSuccess) e = cudaGraphInstantiate(&to.exec, graph, 0);
    cudaThreadExchangeStreamCaptureMode(&mode);
    return e == cudaSuccess;
  }

  // Of the launches to come; those that still wait keep theirs.
  bool update(Graph& graph) {
    bool done = true;
    for (int i = 0; done && i < count_; ++i) {
      const cudaKernelNodeParams p = parameters(i);
      done = cudaGraphExecKernelNodeSetParams(graph.exec, graph.nodes[i], &p) == cudaSuccess;
    }
    return done;
  }

  cudaError_t launch_one_by_one() {
    for (int i = 0; i < count_; ++i) {
      cudaLaunchAttribute early{};
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(kernels_[i].blocks), config.blockDim = dim3(kernels_[i].threads);
      config.dynamicSmemBytes = kernels_[i].shared_bytes, config.stream = stream_;
      config.attrs = &early, config.numAttrs = i > 0 ? 1 : 0;
      if (cudaError_t e = cudaLaunchKernelExC(&config, kernels_[i].function, kernels_[i].arguments); e != cudaSuccess) return e;
    }
    return cudaSuccess;
  }
#endif
};

}  // namespace jax_kda
