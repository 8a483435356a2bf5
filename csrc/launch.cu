// Which route runs which kernel; what every route refuses.
#include "launch.h"

#ifndef JAX_KDA_ARCHITECTURES
#define JAX_KDA_ARCHITECTURES ""
#endif

namespace jax_kda {

cudaError_t baseline_m128(const PrefillArgs& a, cudaStream_t stream);
cudaError_t baseline_m128_warp_engine(const PrefillArgs& a, cudaStream_t stream);
cudaError_t baseline_m64(const PrefillArgs& a, cudaStream_t stream);
cudaError_t c4_m128_d15(const PrefillArgs& a, cudaStream_t stream);
cudaError_t c4_m64_d10(const PrefillArgs& a, cudaStream_t stream);
cudaError_t c8_m128_d35(const PrefillArgs& a, cudaStream_t stream);
cudaError_t pool_m128(const PrefillArgs& a, cudaStream_t stream);
cudaError_t pool_m64(const PrefillArgs& a, cudaStream_t stream);
int64_t c4_m128_d15_workspace(const PrefillArgs& a);
int64_t c4_m64_d10_workspace(const PrefillArgs& a);
int64_t c8_m128_d35_workspace(const PrefillArgs& a);
int64_t pool_m128_workspace(const PrefillArgs& a);
int64_t pool_m64_workspace(const PrefillArgs& a);
cudaError_t segmented(const PrefillArgs& a, cudaStream_t stream);
cudaError_t segmented_warp_engine(const PrefillArgs& a, cudaStream_t stream);
int64_t segmented_workspace_bytes(const PrefillArgs& a);

const char* compiled_architectures() { return JAX_KDA_ARCHITECTURES; }

int64_t workspace_bytes(Route route, const PrefillArgs& a) {
  switch (route) {
    case Route::kC4M128D15: return c4_m128_d15_workspace(a);
    case Route::kC4M64D10: return c4_m64_d10_workspace(a);
    case Route::kC8M128D35: return c8_m128_d35_workspace(a);
    case Route::kPoolM128: return pool_m128_workspace(a);
    case Route::kPoolM64: return pool_m64_workspace(a);
    case Route::kSegmented:
    case Route::kSegmentedWarpEngine: return segmented_workspace_bytes(a);
    default: return 0;
  }
}

cudaError_t prefill(Route route, const PrefillArgs& a, cudaStream_t stream) {
  const int64_t sequences = a.B * a.N;
  if (a.B < 0 || a.T < 0 || a.N < 0 || a.H <= 0 || a.HV <= 0 || a.HV % a.H != 0) return cudaErrorInvalidValue;
  if (a.T > INT32_MAX - 64 || sequences * a.HV > INT32_MAX || a.workspace_bytes < workspace_bytes(route, a)) return cudaErrorInvalidValue;
  if (a.gate != GateMode::kLog && (!a.a_log || (a.gate_rows != 1 && a.gate_rows != a.B))) return cudaErrorInvalidValue;
  if (!a.offsets && a.N != 1) return cudaErrorInvalidValue;
  if (a.checkpoint_every < 0 || a.checkpoint_every % 64 != 0) return cudaErrorInvalidValue;
  const int64_t checkpoints = a.checkpoint_every ? a.B * (a.T / a.checkpoint_every) * a.HV : 0;
  if (checkpoints > 0 && !a.checkpoints) return cudaErrorInvalidValue;
  if (a.B == 0 || (sequences == 0 && a.T == 0)) return cudaSuccess;
  if (sequences == 0) {  // every row lies outside
    if (cudaError_t e = cudaMemsetAsync(a.o, 0, size_t(a.B) * a.T * a.HV * 128 * 2, stream); e != cudaSuccess || checkpoints == 0) return e;
    return cudaMemsetAsync(a.checkpoints, 0, size_t(checkpoints) * 128 * 128 * (a.state_out_dtype == DType::kF32 ? 4 : 2), stream);
  }
  switch (route) {
    case Route::kBaselineM128: return baseline_m128(a, stream);
    case Route::kBaselineM128WarpEngine: return baseline_m128_warp_engine(a, stream);
    case Route::kBaselineM64: return baseline_m64(a, stream);
    case Route::kC4M128D15: return c4_m128_d15(a, stream);
    case Route::kC4M64D10: return c4_m64_d10(a, stream);
    case Route::kC8M128D35: return c8_m128_d35(a, stream);
    case Route::kPoolM128: return pool_m128(a, stream);
    case Route::kPoolM64: return pool_m64(a, stream);
    case Route::kSegmented: return segmented(a, stream);
    case Route::kSegmentedWarpEngine: return segmented_warp_engine(a, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_kda
