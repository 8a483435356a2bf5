// What the kernels' sources take from CUDA's own headers, for a host compiler: types, and a runtime that launches into the emulation.
// The test puts cuda.h, cuda_runtime.h, cuda_runtime_api.h and cuda_bf16.h on the include path; each only includes this.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#define __global__
#define __shared__
#define __align__(bytes)
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline uint16_t float_to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return uint16_t((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
inline float bf16_to_float(uint16_t x) {
  const uint32_t u = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
struct __nv_bfloat16 {
  uint16_t stored;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) : stored(float_to_bf16(x)) {}
  explicit operator float() const { return bf16_to_float(stored); }
};
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return float(x); }

// ---- the runtime: one device, one stream, nothing fails
using cudaError_t = int;
using cudaStream_t = void*;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNoKernelImageForDevice = 209, cudaErrorCooperativeLaunchTooLarge = 720 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
inline int stand_in_sm_count = 132;
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = stand_in_sm_count, cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned n = 1) : x(n), y(1), z(1) {}
};
enum { cudaLaunchAttributeClusterDimension, cudaErrorInvalidConfiguration = 9, cudaErrorInvalidClusterSize = 912 };
struct cudaLaunchAttribute {
  int id;
  struct {
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};
inline int most_clusters = 30;  // that the device holds
template <class Kernel> cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel, const cudaLaunchConfig_t*) {
  *clusters = most_clusters;
  return cudaSuccess;
}
template <class Kernel> cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) { return cudaSuccess; }

inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) { return std::memset(to, value, bytes), cudaSuccess; }

// ---- tensor maps: tiles of three dimensions with a 128-byte swizzle
using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
using CUresult = int;
enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
struct CUtensorMap {
  const char* base;
  uint32_t width;  // bytes of an element
  std::array<uint64_t, 3> sizes, strides;
  std::array<uint32_t, 3> box;
};
inline bool tensor_maps_refused = false;  // then the kernels have to copy by their threads
inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* sizes,
                                       const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
                                       CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const uint32_t width = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  *map = {static_cast<const char*>(base), width, {sizes[0], sizes[1], sizes[2]}, {width, strides[0], strides[1]}, {box[0], box[1], box[2]}};
  const bool right = !tensor_maps_refused && rank == 3 && steps[0] == 1 && steps[1] == 1 && steps[2] == 1 && box[0] * width == 128 &&
                     reinterpret_cast<uintptr_t>(base) % 16 == 0 && strides[0] % 16 == 0 && strides[1] % 16 == 0;
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, int, cudaDriverEntryPointQueryResult*) {
  *entry = !std::strcmp(name, "cuTensorMapEncodeTiled") ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  return cudaSuccess;
}
