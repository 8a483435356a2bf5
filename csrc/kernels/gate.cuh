// From gate and beta inputs to log decays (base 2) and write strengths.
#pragma once

#include "../launch.h"
#include "mma.cuh"

namespace jax_kda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kPairNats = 10.f;    // the unbounded scheme's floor for one token in pair weights: exp(-10) = 5e-5, a fiftieth of bf16's rounding
constexpr float kFloorNats = 22.f;   // its floor for one token in everything that meets the state: exp(-22) = 3e-10

// What the activation of one value head's gates needs. Log decays need none.
struct GateConstants {
  float slope;   // safe: -exp(A_log) log2 e; softplus: log2 e
  float height;  // safe: 1 / (lower_bound log2 e); softplus: -exp(A_log)
};

KDA_DEVICE GateConstants gate_constants(GateMode mode, float a_log, float lower_bound) {
  const float a = fmaxf(exp2_approx(a_log * kLog2E), 1e-30f);  // not zero: a tail's gates are infinite
  if (mode == GateMode::kSafe) return {-a * kLog2E, 1.f / (lower_bound * kLog2E)};
  if (mode == GateMode::kSoftplus) return {kLog2E, -a};
  return {0.f, 0.f};
}

// log2(1 + 2^z), the softplus in base 2. lg2.approx has an absolute error near 1, which exp(A_log) would multiply: there the series is used.
KDA_DEVICE float softplus2(float z) {
  const float small = exp2_approx(-fabsf(z));
  const float series = small * fma(small, fma(small, kLog2E / 3.f, -0.5f * kLog2E), kLog2E);
  return max_keep_nan(z, 0.f) + (small < 0.0078125f ? series : log2_approx(1.f + small));
}

// Raw gate to log decay. bias = dt_bias * slope.
template <GateMode kMode> KDA_DEVICE float log_decay(float raw, float bias, const GateConstants& c) {
  if constexpr (kMode == GateMode::kLog) return raw * kLog2E;
  else if constexpr (kMode == GateMode::kSoftplus) return c.height * softplus2(fma(raw, c.slope, bias));
  else return rcp_approx(fma(exp2_approx(fma(raw, c.slope, bias)), c.height, c.height));
}

KDA_DEVICE float write_strength(float raw, BetaMode mode) {
  if (mode == BetaMode::kPlain) return raw;
  const float s = rcp_approx(1.f + exp2_approx(-raw * kLog2E));
  return mode == BetaMode::kSigmoidDoubled ? 2.f * s : s;
}

}  // namespace jax_kda
