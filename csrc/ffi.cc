// XLA's view of the kernels: a call decoded, checked, and handed to launch.h. The only file that includes ffi.h.
//
// The Python side has checked the whole contract already. What is checked again here is what memory safety needs, because
// a cached or exported executable reaches this handler without passing through Python. Nothing here aborts or throws.
//
//   B batch rows, T tokens a row, N sequences a row, H q/k heads, HV value heads, R gate rows (1 or B), D = 128
//
//   operand        shape                  dtype         absent
//   q, k           [B, T, H, D]           bf16
//   v              [B, T, HV, D]          bf16
//   g              [B, T, HV, D]          bf16 | f32
//   beta           [B, T, HV]             bf16 | f32
//   A_log          [R, HV]                f32           f32[0]
//   dt_bias        [R, HV, D]             f32           f32[0]
//   initial_state  [B, N, HV, D, D]       f32 | bf16    f32[0]
//   offsets        [B, N + 1]             s32           s32[0]
//
//   result         shape                  dtype         absent
//   o              [B, T, HV, D]          bf16
//   final_state    [B, N, HV, D, D]       f32 | bf16    f32[0]
//   workspace      [bytes]                u8            u8[0]
//   checkpoints    [B, T / n, HV, D, D]   as the state  f32[0]      n: checkpoint_every
//
// The decode call has no offsets and no workspace. Its state is [B, 1, HV, D, D], or a pool [P, HV, D, D] with one place a sequence:
//
//   state          [B, 1, HV, D, D] | [P, HV, D, D]     operand and result, in one buffer
//   state_indices  [B]                    s32           s32[0]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_kda {
namespace {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using ffi::DataType;
using Dims = std::initializer_list<int64_t>;

constexpr int64_t kD = 128;

// Every route of this build, by the name it has in Python. A new one is one row here.
constexpr struct {
  std::string_view name;
  Route route;
} kRoutes[] = {
    {"baseline_m128", Route::kBaselineM128}, {"baseline_m64", Route::kBaselineM64},   {"c4_m128_d15", Route::kC4M128D15},
    {"c4_m64_d10", Route::kC4M64D10},        {"c8_m128_d35", Route::kC8M128D35},   {"pool_m128", Route::kPoolM128},
    {"pool_m64", Route::kPoolM64},           {"segmented", Route::kSegmented},
};

template <typename Values>
std::string shape_text(const Values& dims) {
  std::string text = "[";
  for (int64_t dim : dims) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
}

const char* dtype_text(DataType dtype) {
  switch (dtype) {
    case DataType::F32: return "f32";
    case DataType::BF16: return "bf16";
    case DataType::F16: return "f16";
    case DataType::F64: return "f64";
    case DataType::S32: return "s32";
    case DataType::U8: return "u8";
    default: return "another dtype";
  }
}

DType launch_dtype(const AnyBuffer& buffer) {
  return buffer.element_type() == DataType::F32 ? DType::kF32 : DType::kBF16;
}

bool is_absent(const AnyBuffer& buffer) { return buffer.dimensions().size() == 1 && buffer.dimensions()[0] == 0; }

// Collects the first thing that is wrong with a call. Only what is wrong becomes text: messages made every time took 4 us of a call.
class Checks {
 public:
  template <typename Text>
  void require(bool holds, Text otherwise) {
    if (!holds && message_.empty()) message_ = "jax_kda: " + otherwise();
  }

  void shape(const char* name, const AnyBuffer& buffer, Dims expected) {
    auto dims = buffer.dimensions();
    bool same = dims.size() == expected.size() && std::equal(dims.begin(), dims.end(), expected.begin());
    require(same, [&] { return std::string(name) + " has shape " + shape_text(dims) + ", expected " + shape_text(expected); });
  }

  void dtype(const char* name, const AnyBuffer& buffer, std::initializer_list<DataType> allowed) {
    const bool known = std::find(allowed.begin(), allowed.end(), buffer.element_type()) != allowed.end();
    require(known, [&] {
      std::string names;
      for (DataType dtype : allowed) names += (names.empty() ? "" : " or ") + std::string(dtype_text(dtype));
      return std::string(name) + " is " + dtype_text(buffer.element_type()) + ", expected " + names;
    });
  }

  bool failed() const { return !message_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(message_); }

 private:
  std::string message_;
};

ffi::Error launch_error(cudaError_t status, std::string_view route) {
  if (status == cudaErrorNoKernelImageForDevice) {
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      "jax_kda: this build holds machine code for compute capabilities " +
                          std::string(compiled_architectures()) + ", the device has " + std::to_string(major) + "." +
                          std::to_string(minor) + "; build jax_kda for it, or pass route=\"xla\"");
  }
  return ffi::Error::Internal("jax_kda: launching route " + std::string(route) + " failed: " +
                              cudaGetErrorName(status) + " (" + cudaGetErrorString(status) + ")");
}

// The handler's parameters, apart from the stream and the route.
struct Call {
  AnyBuffer q, k, v, g, beta, a_log, dt_bias, initial_state, offsets, o, final_state, checkpoints;
  float scale, lower_bound;
  int32_t gate, beta_mode, checkpoint_every;
  bool l2norm, state_v_first;
};

// Fills args from the call, or says what is wrong with it; all but the workspace.
ffi::Error decode(const Call& call, PrefillArgs& args) {
  Checks checks;
  auto q_dims = call.q.dimensions(), v_dims = call.v.dimensions(), rows = call.offsets.dimensions();
  const bool packed = !is_absent(call.offsets);
  checks.require(q_dims.size() == 4, [&] { return "q has shape " + shape_text(q_dims) + ", expected [B, T, H, 128]"; });
  checks.require(v_dims.size() == 4, [&] { return "v has shape " + shape_text(v_dims) + ", expected [B, T, HV, 128]"; });
  checks.require(!packed || (rows.size() == 2 && rows[1] > 0), [&] { return "offsets has shape " + shape_text(rows) + ", expected [B, N + 1]"; });
  if (checks.failed()) return checks.error();

  const int64_t B = q_dims[0], T = q_dims[1], H = q_dims[2], HV = v_dims[2], N = packed ? rows[1] - 1 : 1;
  checks.require(H > 0 && HV > 0 && HV % H == 0, [&] {
    return "v has " + std::to_string(HV) + " heads, q has " + std::to_string(H) + "; expected a multiple of q's";
  });
  // Tokens and sequences are counted in int32, and a kernel's grid has at most this many blocks.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  checks.require(B <= kMost && T <= kMost && N <= kMost && HV <= kMost && B * N <= kMost && B * N * HV <= kMost, [&] {
    return "B, T, N, HV = " + shape_text(Dims{B, T, N, HV}) + "; T and B * N * HV must be below 2^31";
  });

  checks.shape("q", call.q, {B, T, H, kD});
  checks.shape("k", call.k, {B, T, H, kD});
  checks.shape("v", call.v, {B, T, HV, kD});
  checks.shape("g", call.g, {B, T, HV, kD});
  checks.shape("beta", call.beta, {B, T, HV});
  checks.shape("o", call.o, {B, T, HV, kD});
  for (auto [name, buffer] : {std::pair{"q", &call.q}, {"k", &call.k}, {"v", &call.v}, {"o", &call.o}}) {
    checks.dtype(name, *buffer, {DataType::BF16});
  }
  checks.dtype("g", call.g, {DataType::BF16, DataType::F32});
  checks.dtype("beta", call.beta, {DataType::BF16, DataType::F32});

  checks.require(0 <= call.gate && call.gate <= 2, [&] { return "gate is " + std::to_string(call.gate) + ", expected 0, 1 or 2"; });
  checks.require(0 <= call.beta_mode && call.beta_mode <= 2, [&] {
    return "beta mode is " + std::to_string(call.beta_mode) + ", expected 0, 1 or 2";
  });
  const bool gated = call.gate != static_cast<int32_t>(GateMode::kLog);
  const bool biased = !is_absent(call.dt_bias);
  const int64_t R = gated && call.a_log.dimensions().size() == 2 ? call.a_log.dimensions()[0] : 1;
  checks.require(R == 1 || R == B, [&] { return "A_log has " + std::to_string(R) + " rows, expected 1 or the batch's " + std::to_string(B); });
  if (gated) {
    checks.shape("A_log", call.a_log, {R, HV});
    checks.dtype("A_log", call.a_log, {DataType::F32});
  } else {
    checks.shape("A_log", call.a_log, {0});
    checks.shape("dt_bias", call.dt_bias, {0});
  }
  if (biased) {
    checks.shape("dt_bias", call.dt_bias, {R, HV, kD});
    checks.dtype("dt_bias", call.dt_bias, {DataType::F32});
  }
  if (packed) {
    checks.shape("offsets", call.offsets, {B, N + 1});
    checks.dtype("offsets", call.offsets, {DataType::S32});
  }
  for (auto [name, state] : {std::pair{"initial_state", &call.initial_state}, {"final_state", &call.final_state}}) {
    if (is_absent(*state)) continue;
    checks.shape(name, *state, {B, N, HV, kD, kD});
    checks.dtype(name, *state, {DataType::F32, DataType::BF16});
  }
  const int32_t every = call.checkpoint_every;
  checks.require(every >= 0 && every % 64 == 0, [&] {
    return "checkpoint_every is " + std::to_string(every) + ", expected 0 or a positive multiple of 64";
  });
  if (checks.failed()) return checks.error();
  if (every > 0) {
    checks.shape("checkpoints", call.checkpoints, {B, T / every, HV, kD, kD});
    checks.dtype("checkpoints", call.checkpoints, {DataType::F32, DataType::BF16});
    checks.require(is_absent(call.final_state) || call.final_state.element_type() == call.checkpoints.element_type(), [&] {
      return std::string("checkpoints and final_state have different dtypes");
    });
  } else {
    checks.shape("checkpoints", call.checkpoints, {0});
  }
  // The kernels move 16 bytes at a time.
  for (const AnyBuffer* buffer :
       {&call.q, &call.k, &call.v, &call.g, &call.initial_state, &call.o, &call.final_state, &call.checkpoints}) {
    checks.require(reinterpret_cast<uintptr_t>(buffer->untyped_data()) % 16 == 0, [&] {
      return "a buffer of shape " + shape_text(buffer->dimensions()) + " is not aligned to 16 bytes";
    });
  }
  if (checks.failed()) return checks.error();

  args = PrefillArgs{};
  args.q = call.q.untyped_data();
  args.k = call.k.untyped_data();
  args.v = call.v.untyped_data();
  args.g = call.g.untyped_data();
  args.beta = call.beta.untyped_data();
  args.a_log = gated ? call.a_log.typed_data<float>() : nullptr;
  args.dt_bias = biased ? call.dt_bias.typed_data<float>() : nullptr;
  args.initial_state = is_absent(call.initial_state) ? nullptr : call.initial_state.untyped_data();
  args.offsets = packed ? call.offsets.typed_data<int32_t>() : nullptr;
  args.o = call.o.untyped_data();
  args.final_state = is_absent(call.final_state) ? nullptr : call.final_state.untyped_data();
  args.B = B, args.T = T, args.N = N, args.H = H, args.HV = HV, args.gate_rows = R;
  args.g_dtype = launch_dtype(call.g);
  args.beta_dtype = launch_dtype(call.beta);
  args.state_in_dtype = launch_dtype(call.initial_state);
  args.state_out_dtype = launch_dtype(every > 0 ? call.checkpoints : call.final_state);
  args.checkpoints = every > 0 && T / every > 0 ? call.checkpoints.untyped_data() : nullptr;
  args.checkpoint_every = every;
  args.gate = static_cast<GateMode>(call.gate);
  args.beta_mode = static_cast<BetaMode>(call.beta_mode);
  args.l2norm = call.l2norm;
  args.state_v_first = call.state_v_first;
  args.scale = call.scale;
  args.lower_bound = call.lower_bound;
  return ffi::Error::Success();
}

ffi::Error take_workspace(const AnyBuffer& workspace, Route route, PrefillArgs& args) {
  Checks checks;
  const int64_t needed = workspace_bytes(route, args);
  args.workspace = workspace.untyped_data();
  args.workspace_bytes = workspace.element_count();
  checks.dtype("workspace", workspace, {DataType::U8});
  checks.require(args.workspace_bytes >= needed, [&] {
    return "workspace has " + std::to_string(args.workspace_bytes) + " bytes, this route needs " + std::to_string(needed);
  });
  checks.require(reinterpret_cast<uintptr_t>(args.workspace) % 16 == 0, [&] { return std::string("workspace is not aligned to 16 bytes"); });
  return checks.failed() ? checks.error() : ffi::Error::Success();
}

ffi::Error prefill_call(cudaStream_t stream, AnyBuffer q, AnyBuffer k, AnyBuffer v, AnyBuffer g, AnyBuffer beta,
                        AnyBuffer a_log, AnyBuffer dt_bias, AnyBuffer initial_state, AnyBuffer offsets,
                        ffi::Result<AnyBuffer> o, ffi::Result<AnyBuffer> final_state,
                        ffi::Result<AnyBuffer> workspace, ffi::Result<AnyBuffer> checkpoints, float scale,
                        float lower_bound, int32_t gate, int32_t beta_mode, bool l2norm, bool state_v_first,
                        std::string_view route_name, int32_t segment_chunks, int32_t checkpoint_every) {
  for (const auto& [name, route] : kRoutes) {
    if (name != route_name) continue;
    PrefillArgs args;
    ffi::Error wrong = decode({q, k, v, g, beta, a_log, dt_bias, initial_state, offsets, *o, *final_state, *checkpoints,
                               scale, lower_bound, gate, beta_mode, checkpoint_every, l2norm, state_v_first},
                              args);
    args.segment_chunks = segment_chunks < 0 ? 0 : segment_chunks;
    if (wrong.success()) wrong = take_workspace(*workspace, route, args);
    if (wrong.failure()) return wrong;
    const cudaError_t status = prefill(route, args, stream);
    return status == cudaSuccess ? ffi::Error::Success() : launch_error(status, route_name);
  }
  std::string known;
  for (const auto& entry : kRoutes) known += (known.empty() ? "" : ", ") + std::string(entry.name);
  return ffi::Error::InvalidArgument("jax_kda: route is '" + std::string(route_name) + "', this build has " + known);
}

// Operands, results and attributes, in the order of prefill_call's parameters after the stream.
template <typename Binding>
auto bind_prefill(Binding binding) {
  return std::move(binding)
      .template Arg<AnyBuffer>()  // q
      .template Arg<AnyBuffer>()  // k
      .template Arg<AnyBuffer>()  // v
      .template Arg<AnyBuffer>()  // g
      .template Arg<AnyBuffer>()  // beta
      .template Arg<AnyBuffer>()  // A_log
      .template Arg<AnyBuffer>()  // dt_bias
      .template Arg<AnyBuffer>()  // initial_state
      .template Arg<AnyBuffer>()  // offsets
      .template Ret<AnyBuffer>()  // o
      .template Ret<AnyBuffer>()  // final_state
      .template Ret<AnyBuffer>()  // workspace
      .template Ret<AnyBuffer>()  // checkpoints
      .template Attr<float>("scale")
      .template Attr<float>("lower_bound")
      .template Attr<int32_t>("gate")
      .template Attr<int32_t>("beta")
      .template Attr<bool>("l2norm")
      .template Attr<bool>("state_v_first")
      .template Attr<std::string_view>("route")
      .template Attr<int32_t>("segment_chunks")
      .template Attr<int32_t>("checkpoint_every");
}

// A buffer without elements, as the Python side passes what is absent.
AnyBuffer absent_buffer() {
  static int64_t none[] = {0};
  static XLA_FFI_Buffer buffer = [] {
    XLA_FFI_Buffer empty = {};
    empty.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    empty.dtype = XLA_FFI_DataType_F32;
    empty.rank = 1;
    empty.dims = none;
    return empty;
  }();
  return AnyBuffer(&buffer);
}

ffi::Error decode_call(cudaStream_t stream, AnyBuffer q, AnyBuffer k, AnyBuffer v, AnyBuffer g, AnyBuffer beta,
                       AnyBuffer a_log, AnyBuffer dt_bias, AnyBuffer state, AnyBuffer state_indices,
                       ffi::Result<AnyBuffer> o, ffi::Result<AnyBuffer> new_state, float scale, float lower_bound,
                       int32_t gate, int32_t beta_mode, bool l2norm, bool state_v_first) {
  const bool pooled = !is_absent(state_indices);
  const AnyBuffer absent = absent_buffer();
  PrefillArgs call;
  ffi::Error wrong = decode({q, k, v, g, beta, a_log, dt_bias, pooled ? absent : state, absent, *o,
                             pooled ? absent : *new_state, absent, scale, lower_bound, gate, beta_mode,
                             /*checkpoint_every=*/0, l2norm, state_v_first},
                            call);
  if (wrong.failure()) return wrong;
  Checks checks;
  const int64_t P = !pooled ? call.B : state.dimensions().size() == 4 ? state.dimensions()[0] : 0;
  checks.require(1 <= call.T && call.T <= kMaxDecodeTokens, [&] {
    return "q has T = " + std::to_string(call.T) + " tokens, expected 1 to " + std::to_string(kMaxDecodeTokens);
  });
  for (auto [name, buffer] : {std::pair{"the state", &state}, {"the new state", &*new_state}}) {
    if (pooled) checks.shape(name, *buffer, {P, call.HV, kD, kD});
    else checks.shape(name, *buffer, {call.B, 1, call.HV, kD, kD});
    checks.dtype(name, *buffer, {DataType::F32, DataType::BF16});
  }
  if (pooled) {
    checks.shape("state_indices", state_indices, {call.B});
    checks.dtype("state_indices", state_indices, {DataType::S32});
  }
  checks.require(state.untyped_data() == new_state->untyped_data() && state.element_type() == new_state->element_type(), [&] {
    return std::string("the state and the new state must be one buffer (input_output_aliases of the custom call)");
  });
  checks.require(reinterpret_cast<uintptr_t>(state.untyped_data()) % 16 == 0, [&] { return std::string("the state is not aligned to 16 bytes"); });
  if (checks.failed()) return checks.error();

  DecodeArgs args{};
  args.q = call.q, args.k = call.k, args.v = call.v, args.g = call.g, args.beta = call.beta;
  args.a_log = call.a_log, args.dt_bias = call.dt_bias, args.o = call.o;
  args.state = new_state->untyped_data();
  args.state_indices = pooled ? state_indices.typed_data<int32_t>() : nullptr;
  args.B = call.B, args.T = call.T, args.H = call.H, args.HV = call.HV, args.P = P, args.gate_rows = call.gate_rows;
  args.g_dtype = call.g_dtype, args.beta_dtype = call.beta_dtype, args.state_dtype = launch_dtype(state);
  args.gate = call.gate, args.beta_mode = call.beta_mode, args.l2norm = call.l2norm;
  args.state_v_first = call.state_v_first, args.scale = call.scale, args.lower_bound = call.lower_bound;
  const cudaError_t status = decode(args, stream);
  return status == cudaSuccess ? ffi::Error::Success() : launch_error(status, "decode");
}

// In the order of decode_call's parameters after the stream.
template <typename Binding>
auto bind_decode(Binding binding) {
  return std::move(binding)
      .template Arg<AnyBuffer>()  // q
      .template Arg<AnyBuffer>()  // k
      .template Arg<AnyBuffer>()  // v
      .template Arg<AnyBuffer>()  // g
      .template Arg<AnyBuffer>()  // beta
      .template Arg<AnyBuffer>()  // A_log
      .template Arg<AnyBuffer>()  // dt_bias
      .template Arg<AnyBuffer>()  // state
      .template Arg<AnyBuffer>()  // state_indices
      .template Ret<AnyBuffer>()  // o
      .template Ret<AnyBuffer>()  // new state
      .template Attr<float>("scale")
      .template Attr<float>("lower_bound")
      .template Attr<int32_t>("gate")
      .template Attr<int32_t>("beta")
      .template Attr<bool>("l2norm")
      .template Attr<bool>("state_v_first");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_kda_decode_v1, decode_call,
                              bind_decode(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                              {ffi::Traits::kCmdBufferCompatible});

// Nothing in prefill or decode waits or reads the device, or allocates while the stream is recorded: XLA may have it in a command buffer (a CUDA graph).
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_kda_prefill_v1, prefill_call,
                              bind_prefill(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_kda
