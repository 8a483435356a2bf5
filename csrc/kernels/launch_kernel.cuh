// What a kernel needs before it is launched: its shared memory, and whether its clusters find room.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <mutex>

#include "mma.cuh"

namespace jax_kda {

// cudaFuncSetAttribute once per kernel and device: it is no stream operation, so it is allowed (once, cheaply) inside a capture too.
template <auto kKernel> inline cudaError_t allow_shared_memory(int bytes) {
  static std::mutex mutex;
  static std::atomic<bool> done[64];
  int device = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (device < 64 && done[device].load(std::memory_order_acquire)) return cudaSuccess;
  std::lock_guard<std::mutex> lock(mutex);
  if (cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return e;
  // All of an SM's memory as shared memory: several CTAs find room, and an SM need not be emptied between kernels to be divided anew.
  if (cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100); e != cudaSuccess) return e;
  if (device < 64) done[device].store(true, std::memory_order_release);
  return cudaSuccess;
}

// Whether a cluster of the kernel finds room on the current device at all (it may be partitioned); asked once per kernel and device.
template <auto kKernel> inline cudaError_t cluster_fits(int ranks, int threads, int bytes, bool& fits) {
  static std::atomic<int> known[64];  // 0 not yet, 1 no, 2 yes
  int device = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  const int before = device < 64 ? known[device].load(std::memory_order_acquire) : 0;
  fits = before == 2;
  if (before != 0) return cudaSuccess;
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = unsigned(ranks), cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.gridDim = dim3(unsigned(ranks)), config.blockDim = dim3(unsigned(threads)), config.dynamicSmemBytes = size_t(bytes);
  config.attrs = &cluster, config.numAttrs = 1;
  int clusters = 0;
  const cudaError_t e = cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config);
  if (e == cudaErrorInvalidClusterSize || e == cudaErrorInvalidConfiguration) cudaGetLastError(), clusters = 0;
  else if (e != cudaSuccess) return e;
  fits = clusters > 0;
  if (device < 64) known[device].store(fits ? 2 : 1, std::memory_order_release);
  return cudaSuccess;
}

// All CTAs resident at once, so that they may wait for one another; cudaErrorCooperativeLaunchTooLarge where the device has no room for that.
template <auto kKernel, class... Arguments>
cudaError_t launch_resident(int64_t blocks, int threads, int shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  if (cudaError_t e = allow_shared_memory<kKernel>(shared_bytes); e != cudaSuccess) return e;
#if defined(JAX_KDA_EMULATE)
  emulation::launch_resident(kKernel, uint32_t(blocks), threads, uint32_t(shared_bytes), stream, arguments...);
  return cudaSuccess;
#else
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks)), config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(shared_bytes), config.stream = stream;
  config.attrs = &cooperative, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kKernel, arguments...);
#endif
}

}  // namespace jax_kda
