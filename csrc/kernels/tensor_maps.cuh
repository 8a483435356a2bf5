// Bulk tensor copies of a chunk's raw rows: the copy engine fetches 32 tokens x 64 channels of one head as a swizzled panel, so that
// one thread's few instructions replace a group's hundreds. Only for whole chunks: the engine would bring the next sequence's tokens into a tail.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../launch.h"
#include "packet.cuh"
#include "pipeline.cuh"
#include "task.cuh"

namespace jax_kda {

struct TensorMaps {
  CUtensorMap q, k, g;
  bool usable;  // false where a size exceeds what a map can describe: then every chunk is copied by the threads
};

// Maps of [B T, heads, 128] arrays. The encoder comes from the driver at run time, so that the library links and imports without one.
inline TensorMaps make_tensor_maps(const PrefillArgs& a) {
  TensorMaps maps;
  maps.usable = false;
  const int64_t tokens = a.B * a.T;
  if (tokens == 0 || tokens > INT32_MAX || a.HV > INT32_MAX) return maps;
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found) != cudaSuccess) entry = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  if (!encode) return maps;
  auto make = [&](CUtensorMap& map, const void* base, int64_t heads, bool f32) {
    const cuuint64_t width = f32 ? 4 : 2;
    const cuuint64_t sizes[3] = {kHeadDim, cuuint64_t(heads), cuuint64_t(tokens)};
    const cuuint64_t strides[2] = {kHeadDim * width, kHeadDim * width * cuuint64_t(heads)};
    const cuuint32_t box[3] = {cuuint32_t(128 / width), 1, kChunk}, steps[3] = {1, 1, 1};
    return encode(&map, f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(base), sizes, strides, box,
                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  };
  maps.usable = make(maps.q, a.q, a.H, false) && make(maps.k, a.k, a.H, false) && make(maps.g, a.g, a.HV, a.g_dtype == DType::kF32);
  return maps;
}

// By one thread. The barrier completes when all rows are there.
template <class Prepare> KDA_DEVICE void copy_rows(const TensorMaps& maps, const Rows& k, uint32_t buffer, int chunk, uint32_t barrier) {
  constexpr bool kF32 = Prepare::kF32;
  const int token = int(k.first_token) + chunk * kChunk;
  barrier_expect(barrier, (4 + (kF32 ? 4 : 2)) * kPanel);
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const uint32_t panel = buffer + p * Prepare::kPanelStride;
    copy_tensor(panel + stage::kQuery, &maps.q, 64 * p, k.key_head, token, barrier);
    copy_tensor(panel + stage::kKey, &maps.k, 64 * p, k.key_head, token, barrier);
    copy_tensor(panel + Prepare::kGates, &maps.g, 64 * p, k.head, token, barrier);
    if constexpr (kF32) copy_tensor(panel + Prepare::kGates + kPanel, &maps.g, 64 * p + 32, k.head, token, barrier);
  }
}

// By one thread: what copy_rows will bring comes to the L2 cache.
template <class Prepare> KDA_DEVICE void prefetch_rows(const TensorMaps& maps, const Rows& k, int chunk) {
  const int token = int(k.first_token) + chunk * kChunk;
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    prefetch_tensor(&maps.q, 64 * p, k.key_head, token);
    prefetch_tensor(&maps.k, 64 * p, k.key_head, token);
    prefetch_tensor(&maps.g, 64 * p, k.head, token);
    if constexpr (Prepare::kF32) prefetch_tensor(&maps.g, 64 * p + 32, k.head, token);
  }
}

}  // namespace jax_kda
