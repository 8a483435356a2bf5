// An XLA custom call that does nothing, whatever its arguments: what a call costs apart from ours (bench/wall.py).
//
// It does not say that a command buffer may hold it: a recorded graph must not be empty.
#include <atomic>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

std::atomic<long long> calls{0};

ffi::Error nothing(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  calls.fetch_add(1, std::memory_order_relaxed);
  return ffi::Error::Success();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) long long kda_bench_empty_calls() { return calls.load(); }

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(kda_bench_empty_call, nothing, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
#pragma GCC visibility pop
