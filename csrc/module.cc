// The Python module jax_kda._native: the FFI handlers as capsules, and the facts of this build.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "xla/ffi/api/c_api.h"  // for its version numbers

#ifdef JAX_KDA_WITH_CUDA
#include <cuda_runtime_api.h>

#include "launch.h"

extern "C" XLA_FFI_Error* jax_kda_prefill_v1(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* jax_kda_decode_v1(XLA_FFI_CallFrame* call_frame);
#endif

namespace nb = nanobind;

namespace {

// Target name -> capsule, as jax.ffi.register_ffi_target takes it. Empty in a build without CUDA.
nb::dict handlers() {
  nb::dict result;
#ifdef JAX_KDA_WITH_CUDA
  result["jax_kda.prefill.v1"] =
      nb::capsule(reinterpret_cast<void*>(jax_kda_prefill_v1), "xla._CUSTOM_CALL_TARGET");
  result["jax_kda.decode.v1"] = nb::capsule(reinterpret_cast<void*>(jax_kda_decode_v1), "xla._CUSTOM_CALL_TARGET");
#endif
  return result;
}

nb::dict build_info() {
  nb::dict result;
#ifdef JAX_KDA_WITH_CUDA
  result["cuda"] = true;
  result["architectures"] = nb::tuple(nb::str(jax_kda::compiled_architectures()).attr("split")(","));
  result["cuda_version"] = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
#else
  result["cuda"] = false;
  result["architectures"] = nb::tuple();
  result["cuda_version"] = "";
#endif
  result["reason"] = JAX_KDA_BUILD_REASON;
  result["ffi_api_version"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  return result;
}

}  // namespace

NB_MODULE(_native, module) {
  module.def("handlers", &handlers, "Target name -> capsule of the XLA FFI handlers in this build.");
  module.def("build_info", &build_info,
             "What this build holds: cuda, architectures, cuda_version, reason, ffi_api_version.");
}
