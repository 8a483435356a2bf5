// Launching kernels: their shared memory.
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
  if (device < 64) done[device].store(true, std::memory_order_release);
  return cudaSuccess;
}

}  // namespace jax_kda
