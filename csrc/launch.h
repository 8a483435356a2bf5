// The plain C++ face of the kernels: pointers, sizes and a stream in, a cudaError_t out. Nothing of XLA, nothing of Python.
//
// Everything here is callable while the stream is being captured: no allocation then, and never a synchronisation or another stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace jax_kda {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// The numbers are those of jax_kda.contract.GateMode and BetaMode.
enum class GateMode : int32_t { kLog = 0, kSoftplus = 1, kSafe = 2 };
enum class BetaMode : int32_t { kPlain = 0, kSigmoid = 1, kSigmoidDoubled = 2 };

enum class Route : int32_t {
  kBaselineM128 = 0,
  // The same with the recurrence that architectures without wgmma use (mma.sync), on any architecture: how that path is tested on Hopper.
  kBaselineM128WarpEngine = 1,
  kBaselineM64 = 2,
  kC4M128D15 = 3,
  kC4M64D10 = 4,
  kC8M128D35 = 5,
  // Owners, and helpers for all of them on the SMs that are left.
  kPoolM128 = 6,
  kPoolM64 = 7,
  // Sequences cut into segments that all SMs work on at once: exact, whatever the gates. With the other engine likewise.
  kSegmented = 8,
  kSegmentedWarpEngine = 9,
};

// One call of the operation. Arrays are dense, row-major, on the current device; a null pointer means "absent".
//   B batch rows, T tokens a row, N sequences a row (1 where offsets are absent), H q/k heads, HV value heads, D = K = V = 128.
struct PrefillArgs {
  const void* q;              // [B, T, H, 128] bf16
  const void* k;              // [B, T, H, 128] bf16
  const void* v;              // [B, T, HV, 128] bf16
  const void* g;              // [B, T, HV, 128] g_dtype
  const void* beta;           // [B, T, HV] beta_dtype
  const float* a_log;         // [gate_rows, HV] or null (log gates)
  const float* dt_bias;       // [gate_rows, HV, 128] or null
  const void* initial_state;  // [B, N, HV, 128, 128] state_in_dtype, or null (zeros)
  const int32_t* offsets;     // [B, N + 1], or null (one sequence a row, all T tokens)
  void* o;                    // [B, T, HV, 128] bf16
  void* final_state;          // [B, N, HV, 128, 128] state_out_dtype, or null (not wanted)
  void* checkpoints;          // [B, T / checkpoint_every, HV, 128, 128] state_out_dtype, or null (not wanted)
  void* workspace;            // workspace_bytes of arbitrary contents
  int64_t workspace_bytes;

  int64_t B, T, N, H, HV;
  int64_t gate_rows;  // 1 (shared by the batch rows) or B
  DType g_dtype, beta_dtype, state_in_dtype, state_out_dtype;
  GateMode gate;
  BetaMode beta_mode;
  bool l2norm;
  bool state_v_first;  // states are [.., V, K] instead of [.., K, V]
  float scale;
  float lower_bound;  // of the safe gate

  // Tokens from one checkpoint of a sequence to the next: a multiple of 64, or 0 where none are wanted. Sequence s of a row has length / checkpoint_every
  // of them, behind those of the sequences before it; places that are left over become zeros.
  int32_t checkpoint_every;
  int32_t segment_chunks;  // segmented routes: chunks of 32 tokens a segment, or 0 for what segment_chunks() says of the current device
};

// What this build holds machine code for, as compute capabilities ("90a", "100a", ...), comma separated.
const char* compiled_architectures();

// Chunks of 32 tokens in a segment that suit a call of these shapes: of B rows of T tokens with N sequences each, on this many SMs.
int segment_chunks(int64_t B, int64_t T, int64_t N, int64_t HV, int sm_count);

// The workspace that a route needs for this call.
int64_t workspace_bytes(Route route, const PrefillArgs& args);

// Launches the call on the stream. cudaErrorNoKernelImageForDevice where this build has no code for the current device,
// cudaErrorInvalidValue where the arguments break a rule above.
cudaError_t prefill(Route route, const PrefillArgs& args, cudaStream_t stream);

constexpr int64_t kMaxDecodeTokens = 8;

// The next few tokens of B sequences, by the token recurrence itself. The state is read and written in place.
// Two sequences with one state index race; an index outside [0, P) is a padding slot: zeros in o, no state read or written.
struct DecodeArgs {
  const void* q;                 // [B, T, H, 128] bf16
  const void* k;                 // [B, T, H, 128] bf16
  const void* v;                 // [B, T, HV, 128] bf16
  const void* g;                 // [B, T, HV, 128] g_dtype
  const void* beta;              // [B, T, HV] beta_dtype
  const float* a_log;            // [gate_rows, HV] or null (log gates)
  const float* dt_bias;          // [gate_rows, HV, 128] or null
  void* state;                   // [P, HV, 128, 128] state_dtype, aligned to 16 bytes as the arrays above
  const int32_t* state_indices;  // [B], or null: sequence n has state n, and P is B
  void* o;                       // [B, T, HV, 128] bf16

  int64_t B, T, H, HV, P;  // T from 1 to kMaxDecodeTokens
  int64_t gate_rows;       // 1 (shared by the sequences) or B
  DType g_dtype, beta_dtype, state_dtype;
  GateMode gate;
  BetaMode beta_mode;
  bool l2norm;
  bool state_v_first;
  float scale;
  float lower_bound;
  int columns;  // value channels a CTA: 16 or 32; 0: chosen by size
};

// Launches it on the stream. Errors as those of prefill.
cudaError_t decode(const DecodeArgs& args, cudaStream_t stream);

}  // namespace jax_kda
