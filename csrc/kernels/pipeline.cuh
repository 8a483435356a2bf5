// Barriers, asynchronous copies and register hand-over between the warps of a CTA.
//
// Every wait is bounded: a kernel that polls more than kWaitLimit times has lost a partner, and traps instead of hanging the GPU.
//
// On the host (tests/native) the emulation behind mma.cuh supplies all of it.
#pragma once

#include "mma.cuh"

#if !defined(JAX_KDA_EMULATE)

#include <cuda/ptx>

#include <cstdint>

namespace jax_kda {

constexpr uint32_t kWaitLimit = 1u << 18;  // polls, of about 15 us each where nothing happens: some seconds

KDA_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
KDA_DEVICE uint64_t* barrier_pointer(uint32_t b) { return static_cast<uint64_t*>(__cvta_shared_to_generic(b)); }

KDA_DEVICE void barrier_init(uint32_t b, uint32_t arrivals) { cuda::ptx::mbarrier_init(barrier_pointer(b), arrivals); }
KDA_DEVICE void barrier_arrive(uint32_t b) { cuda::ptx::mbarrier_arrive(barrier_pointer(b)); }
// No suspend-time hint: with one the compiler emits a sleep, and the wake-up costs microseconds.
KDA_DEVICE bool barrier_try(uint32_t b, uint32_t parity) { return cuda::ptx::mbarrier_try_wait_parity(barrier_pointer(b), parity); }
// As asm rather than __trap(): a path that the compiler knows to end makes it give up on wgmma in flight across a wait.
KDA_DEVICE void trap() { asm volatile("trap;"); }
KDA_DEVICE void barrier_wait(uint32_t b, uint32_t parity) {
  if (barrier_try(b, parity)) return;
#pragma unroll 1
  for (uint32_t i = 0; i < kWaitLimit; ++i)
    if (barrier_try(b, parity)) return;
  trap();
}

// Arrives, and lets the barrier wait for `bytes` that the copy engine will bring.
KDA_DEVICE void barrier_expect(uint32_t b, uint32_t bytes) {
  cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared, barrier_pointer(b), bytes);
}
// A box of a tensor map, to shared memory.
KDA_DEVICE void copy_tensor(uint32_t to, const void* map, int x, int y, int z, uint32_t barrier) {
  const int32_t at[3] = {x, y, z};
  cuda::ptx::cp_async_bulk_tensor(cuda::ptx::space_cluster, cuda::ptx::space_global, __cvta_shared_to_generic(to), map, at, barrier_pointer(barrier));
}

// Contiguous bytes between global and shared memory (both 16-byte aligned, a multiple of 16), by one thread. The barrier is told when those to shared
// memory are there; of those to global memory, store_bulk_wait says when their source has been read.
KDA_DEVICE void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier) : "memory");
}
KDA_DEVICE void store_bulk(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(__cvta_generic_to_global(to)), "r"(from), "r"(bytes) : "memory");
}
KDA_DEVICE void store_bulk_wait() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Hints: what will be read soon.
KDA_DEVICE void prefetch_global(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(__cvta_generic_to_global(p)) : "memory"); }
KDA_DEVICE void prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }

// Kernels in a row on one stream, launched so that the next may start early (launch_kernel.cuh). allow_next_kernel: it may take the room that this
// one leaves, as soon as all CTAs have come here. wait_for_previous_kernels: everything that earlier kernels wrote is visible, to the copy engine too.
// Every thread of every CTA calls it before it leaves: only then does the end of this kernel imply the end of those before.
KDA_DEVICE void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
KDA_DEVICE void wait_for_previous_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Orders this thread's ordinary writes to shared memory before later reads by wgmma and the bulk copy engine.
KDA_DEVICE void fence_async_shared() { cuda::ptx::fence_proxy_async(cuda::ptx::space_shared); }

// 16 bytes from global to shared memory, or zeros where `valid` is false (then nothing is read).
template <bool kAlwaysValid> KDA_DEVICE void copy16_or_zero(uint32_t to, const void* from, bool valid) {
  if constexpr (kAlwaysValid) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
  else asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
KDA_DEVICE void copies_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <int kRegisters> KDA_DEVICE void give_registers() {
#if defined(KDA_HAS_WGMMA)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters));
#endif
}
template <int kRegisters> KDA_DEVICE void take_registers() {
#if defined(KDA_HAS_WGMMA)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters));
#endif
}

}  // namespace jax_kda
#endif  // JAX_KDA_EMULATE
