// The judge: the token recurrence in f64, on the device. Results are compared where they are made; nothing of it is stored.
#pragma once

#include "inputs.cuh"

namespace {

constexpr int kSlices = 4, kColumns = D / kSlices, kTokens = 8;  // value channels a block; tokens that it activates at a time

__device__ inline double load(const void* from, size_t i, DType type) {
  return type == DType::kF32 ? double(static_cast<const float*>(from)[i]) : double(__bfloat162float(static_cast<const __nv_bfloat16*>(from)[i]));
}

__device__ inline double over_warp(double x) {
  for (int lanes = 16; lanes; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

// A block takes 32 value channels of one sequence and head (value channels never interact), four threads a channel: each holds 32 of its 128 key
// channels of the state. It adds up how far a.o, a.final_state and checkpoints (as states) lie from the recurrence:
//   sums[block] = |o - o'|^2, |o'|^2, |state - state'|^2, |state'|^2
__global__ void __launch_bounds__(128) judge_kernel(const __grid_constant__ PrefillArgs a, double* sums) {
  __shared__ __align__(16) double k_s[kTokens][D], q_s[kTokens][D], decay_s[kTokens][D];
  __shared__ double v_s[kTokens][kColumns], norm_k[kTokens], norm_q[kTokens], beta_s[kTokens], total[4][4];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int column = int(blockIdx.x % kSlices) * kColumns + thread / 4, quarter = thread % 4;
  const int64_t task = blockIdx.x / kSlices, sequence = task / a.HV, row = sequence / a.N, n = sequence % a.N;
  const int64_t head = task % a.HV, key_head = head / (a.HV / a.H);
  int64_t begin = 0, end = a.T;
  if (a.offsets) {
    const int32_t* offsets = a.offsets + row * (a.N + 1) + n;
    begin = min(max(int64_t(offsets[0]), int64_t(0)), a.T), end = min(max(int64_t(offsets[1]), begin), a.T);
  }
  // Key channels of this thread: 8 j + 2 quarter and the next, j < 16.
  auto channel = [&](int i) { return i / 2 * 8 + quarter * 2 + i % 2; };
  auto element_of = [&](int64_t state, int i) {
    return size_t(state) * D * D + (a.state_v_first ? size_t(column) * D + channel(i) : size_t(channel(i)) * D + column);
  };
  auto state_at = [&](int i) { return element_of(task, i); };
  const int64_t places = a.checkpoint_every ? a.T / a.checkpoint_every : 0;  // of a row's checkpoints
  int64_t place = row * places;                                               // of the next one
  for (int64_t i = 0; i < n && places; ++i) {
    const int32_t* offsets = a.offsets + row * (a.N + 1) + i;
    place += (offsets[1] - offsets[0]) / a.checkpoint_every;
  }
  double S[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) S[i] = a.initial_state ? load(a.initial_state, state_at(i), a.state_in_dtype) : 0.;

  const int64_t gate_row = a.gate_rows == 1 ? 0 : row;
  const double rate = a.gate == GateMode::kLog || !a.a_log ? 1. : exp(double(a.a_log[gate_row * a.HV + head]));
  const double bias = a.gate == GateMode::kLog || !a.dt_bias ? 0. : double(a.dt_bias[(gate_row * a.HV + head) * D + thread]);
  double far_o = 0., size_o = 0., far_state = 0., size_state = 0.;

  for (int64_t t0 = begin; t0 < end; t0 += kTokens) {
    const int m = int(min(end - t0, int64_t(kTokens)));
    __syncthreads();
    for (int i = 0; i < m; ++i) {  // a thread is a key channel here
      const size_t r = size_t(row) * a.T + t0 + i;
      k_s[i][thread] = load(a.k, (r * a.H + key_head) * D + thread, DType::kBF16);
      q_s[i][thread] = load(a.q, (r * a.H + key_head) * D + thread, DType::kBF16);
      double g = load(a.g, (r * a.HV + head) * D + thread, a.g_dtype);
      const double z = g + bias;
      if (a.gate == GateMode::kSafe) g = double(a.lower_bound) / (1. + exp(-rate * z));
      if (a.gate == GateMode::kSoftplus) g = -rate * (fmax(z, 0.) + log1p(exp(-fabs(z))));
      decay_s[i][thread] = exp(g);
    }
    for (int x = thread; x < m * kColumns; x += 128) {
      const size_t r = size_t(row) * a.T + t0 + x / kColumns;
      v_s[x / kColumns][x % kColumns] = load(a.v, (r * a.HV + head) * D + blockIdx.x % kSlices * kColumns + x % kColumns, DType::kBF16);
    }
    if (thread < m) {
      double beta = load(a.beta, (size_t(row) * a.T + t0 + thread) * a.HV + head, a.beta_dtype);
      if (a.beta_mode != BetaMode::kPlain) beta = (a.beta_mode == BetaMode::kSigmoidDoubled ? 2. : 1.) / (1. + exp(-beta));
      beta_s[thread] = beta;
    }
    __syncthreads();
    for (int i = warp; i < m; i += 4) {
      double kk = 0., qq = 0.;
      for (int d = lane; d < D; d += 32) kk += k_s[i][d] * k_s[i][d], qq += q_s[i][d] * q_s[i][d];
      kk = over_warp(kk), qq = over_warp(qq);
      if (lane == 0) norm_k[i] = a.l2norm ? 1. / sqrt(kk + 1e-6) : 1., norm_q[i] = a.l2norm ? 1. / sqrt(qq + 1e-6) : 1.;
    }
    __syncthreads();
    for (int i = 0; i < m; ++i) {
      // Norms are applied to the sums: S^T (k |k|^-1) = (S^T k) |k|^-1.
      double p[4] = {}, o[4] = {};
#pragma unroll
      for (int j = 0; j < 32; j += 2) {
        const double2 decay = *reinterpret_cast<const double2*>(&decay_s[i][channel(j)]), k = *reinterpret_cast<const double2*>(&k_s[i][channel(j)]);
        S[j] *= decay.x, S[j + 1] *= decay.y;
        p[j % 4] = fma(S[j], k.x, p[j % 4]), p[j % 4 + 1] = fma(S[j + 1], k.y, p[j % 4 + 1]);
      }
      double predicted = (p[0] + p[1]) + (p[2] + p[3]);
      predicted += __shfl_xor_sync(0xffffffffu, predicted, 1);
      predicted += __shfl_xor_sync(0xffffffffu, predicted, 2);
      const double u = beta_s[i] * (v_s[i][thread / 4] - predicted * norm_k[i]) * norm_k[i];
#pragma unroll
      for (int j = 0; j < 32; j += 2) {
        const double2 q = *reinterpret_cast<const double2*>(&q_s[i][channel(j)]), k = *reinterpret_cast<const double2*>(&k_s[i][channel(j)]);
        S[j] = fma(k.x, u, S[j]), S[j + 1] = fma(k.y, u, S[j + 1]);
        o[j % 4] = fma(S[j], q.x, o[j % 4]), o[j % 4 + 1] = fma(S[j + 1], q.y, o[j % 4 + 1]);
      }
      double read = (o[0] + o[1]) + (o[2] + o[3]);
      read += __shfl_xor_sync(0xffffffffu, read, 1);
      read += __shfl_xor_sync(0xffffffffu, read, 2);
      if (quarter == 0) {
        read *= double(a.scale) * norm_q[i];
        const double far = load(a.o, ((size_t(row) * a.T + t0 + i) * a.HV + head) * D + column, DType::kBF16) - read;
        far_o += far * far, size_o += read * read;
      }
      if (places && (t0 + i + 1 - begin) % a.checkpoint_every == 0) {
#pragma unroll
        for (int j = 0; j < 32; ++j) {
          const double far = load(a.checkpoints, element_of(place * a.HV + head, j), a.state_out_dtype) - S[j];
          far_state += far * far, size_state += S[j] * S[j];
        }
        ++place;
      }
    }
  }
  // Places that no sequence has are zeros.
  for (; n == a.N - 1 && place < (row + 1) * places; ++place)
    for (int j = 0; j < 32; ++j) {
      const double x = load(a.checkpoints, element_of(place * a.HV + head, j), a.state_out_dtype);
      far_state += x * x;
    }
  // Rows of a packed call that belong to no sequence are zeros.
  if (a.offsets && quarter == 0) {
    auto outside = [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t) {
        const double x = load(a.o, ((size_t(row) * a.T + t) * a.HV + head) * D + column, DType::kBF16);
        far_o += x * x;
      }
    };
    if (n == 0) outside(0, begin);
    if (n == a.N - 1) outside(end, a.T);
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const double far = load(a.final_state, state_at(i), a.state_out_dtype) - S[i];
    far_state += far * far, size_state += S[i] * S[i];
  }
  const double mine[4] = {over_warp(far_o), over_warp(size_o), over_warp(far_state), over_warp(size_state)};
  if (lane == 0)
    for (int i = 0; i < 4; ++i) total[warp][i] = mine[i];
  __syncthreads();
  if (thread < 4) sums[size_t(blockIdx.x) * 4 + thread] = total[0][thread] + total[1][thread] + total[2][thread] + total[3][thread];
}

struct Errors {  // relative, Frobenius, over all heads and sequences
  double o = NAN, state = NAN;
};

// What both may be at most.
inline double error_bar(const Case& c) { return c.gates == "collinear" ? 3e-2 : c.beta_mode == BetaMode::kSigmoidDoubled ? 8e-3 : 6e-3; }

// Of o and final_state as they are on the device now. Offsets must be valid.
inline Errors judge(const PrefillArgs& a) {
  const size_t blocks = size_t(a.B) * a.N * a.HV * kSlices;
  double* sums = nullptr;
  CUDA(cudaMalloc(&sums, blocks * 4 * sizeof(double)));
  judge_kernel<<<unsigned(blocks), 128>>>(a, sums);
  CUDA(cudaGetLastError());
  std::vector<double> host(blocks * 4);
  CUDA(cudaMemcpy(host.data(), sums, host.size() * sizeof(double), cudaMemcpyDeviceToHost));
  CUDA(cudaFree(sums));
  double total[4] = {};
  for (size_t i = 0; i < host.size(); ++i) total[i % 4] += host[i];
  auto relative = [](double far, double size) { return size == 0. ? (far == 0. ? 0. : INFINITY) : std::sqrt(far / size); };
  return {relative(total[0], total[1]), relative(total[2], total[3])};
}

}  // namespace
