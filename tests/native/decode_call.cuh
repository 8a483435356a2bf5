// A decode step on the arrays of a Call: for the driver of decode, and for the library that times it beside others.
#pragma once

#include "reference.cuh"

namespace {

// The state that decode updates is the call's final_state, filled from its initial_state before a checked call.
class DecodeStep {
 public:
  explicit DecodeStep(Call& call) : call_(call) {
    const PrefillArgs& p = call.a;
    state_bytes_ = size_t(p.HV) * D * D * (p.state_in_dtype == DType::kF32 ? 4 : 2);
    a.q = p.q, a.k = p.k, a.v = p.v, a.g = p.g, a.beta = p.beta, a.a_log = p.gate == GateMode::kLog ? nullptr : p.a_log;
    a.dt_bias = p.gate == GateMode::kLog ? nullptr : p.dt_bias, a.state = p.final_state, a.o = p.o;
    a.B = p.B, a.T = p.T, a.H = p.H, a.HV = p.HV, a.P = p.B, a.gate_rows = p.gate_rows;
    a.g_dtype = p.g_dtype, a.beta_dtype = p.beta_dtype, a.state_dtype = p.state_in_dtype;
    a.gate = p.gate, a.beta_mode = p.beta_mode, a.l2norm = p.l2norm, a.state_v_first = p.state_v_first, a.scale = p.scale, a.lower_bound = p.lower_bound;
  }

  DecodeArgs a{};

  size_t o_bytes() const { return size_t(a.T) * a.HV * D * 2; }
  double bytes() const {  // that a call has to move
    const double rows = double(a.B) * a.T, key = rows * a.H * D, value = rows * a.HV * D;
    return 2. * a.B * state_bytes_ + 2 * key * 2 + value * (2 + 2 + (a.g_dtype == DType::kF32 ? 4 : 2)) + rows * a.HV * (a.beta_dtype == DType::kF32 ? 4 : 2);
  }

  Errors run_checked() {
    call_.poison();
    CUDA(cudaMemcpy(a.state, call_.a.initial_state, a.B * state_bytes_, cudaMemcpyDeviceToDevice));
    CUDA(decode(a, nullptr));
    CUDA(cudaDeviceSynchronize());
    return judge(call_.a);
  }

 protected:
  Call& call_;
  size_t state_bytes_;
};

}  // namespace
