// Barriers, asynchronous copies and register hand-over between the warps of a CTA, and between the CTAs of a cluster.
//
// Every wait is bounded: a kernel that polls more than kWaitLimit times has lost a partner, and traps instead of hanging the GPU. For tools under which
// a kernel takes minutes, builds with JAX_KDA_PATIENT_WAITS wait for ever, and poll rarely, because the polls are what keeps the others from their work.
//
// On the host (tests/native) the emulation behind mma.cuh supplies all of it.
#pragma once

#include "mma.cuh"

#if !defined(JAX_KDA_EMULATE)

#include <cuda/ptx>

#include <cstdint>

namespace jax_kda {

constexpr uint32_t kWaitLimit = 1u << 18;      // polls, of about 15 us each where nothing happens: some seconds
constexpr uint32_t kFlagWaitLimit = 1u << 23;  // of less than 1 us
#if defined(JAX_KDA_PATIENT_WAITS)
constexpr bool kPatient = true;
#else
constexpr bool kPatient = false;
#endif
KDA_DEVICE void rest() {
  if constexpr (kPatient) asm volatile("nanosleep.u32 20000;");
}

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
  for (uint32_t i = 0; i < kWaitLimit || kPatient; ++i) {
    if (barrier_try(b, parity)) return;
    rest();
  }
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

// A hint: a box that will be copied soon comes to the L2 cache.
KDA_DEVICE void prefetch_tensor(const void* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" :: "l"(map), "r"(x), "r"(y), "r"(z) : "memory");
}

// Contiguous bytes from global to shared memory (both 16-byte aligned, a multiple of 16), by one thread. The barrier is told when they are there.
KDA_DEVICE void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier) : "memory");
}

// A hint: what will be read soon.
KDA_DEVICE void prefetch_global(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(__cvta_generic_to_global(p)) : "memory"); }

// Orders this thread's ordinary writes to shared memory before later reads by wgmma and the bulk copy engine.
KDA_DEVICE void fence_async_shared() { cuda::ptx::fence_proxy_async(cuda::ptx::space_shared); }

// 16 bytes from global to shared memory, or zeros where `valid` is false (then nothing is read).
KDA_DEVICE void copy16_or_zero(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
KDA_DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending> KDA_DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory"); }
KDA_DEVICE void copies_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- clusters. An address of the CTA's own shared memory is one of the cluster's too.
KDA_DEVICE uint32_t cluster_rank() { uint32_t r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
KDA_DEVICE uint32_t at_rank(uint32_t address, uint32_t rank) { uint32_t r; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank)); return r; }
// All threads of all CTAs. What each has done before is seen by all behind it. Lanes may come one by one.
KDA_DEVICE void sync_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}
// Tells another CTA that this thread has read something. Relaxed: what was read is in registers (or was, when a wgmma was waited for) before this is
// issued, so no later write can reach it; and a release would cost a memory barrier, 1,000 cycles.
KDA_DEVICE void barrier_arrive_at(uint32_t b) { asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" :: "r"(b) : "memory"); }
KDA_DEVICE bool barrier_try_cluster(uint32_t b, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(b), "r"(parity) : "memory");
  return done;
}
// A wait for arrivals from other CTAs.
KDA_DEVICE void barrier_wait_cluster(uint32_t b, uint32_t parity) {
#pragma unroll 1
  for (uint32_t i = 0; i < kWaitLimit || kPatient; ++i) {
    if (barrier_try_cluster(b, parity)) return;
    rest();
  }
  trap();
}
// From this CTA's shared memory to another's; the bytes complete on a barrier there.
KDA_DEVICE void copy_to_cluster(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}

// ---- flags in global memory
// What this thread has seen of other threads' ordinary writes to global memory, before its later bulk copies from there.
KDA_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
KDA_DEVICE void set_flag(uint32_t* flag, uint32_t x) { asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(flag), "r"(x) : "memory"); }
// Relaxed: what it tells of are reads that are over.
KDA_DEVICE void add_flag(uint32_t* flag, uint32_t bits) { asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" :: "l"(flag), "r"(bits) : "memory"); }
// By one lane: polls until done(flag). What was written before the flag is visible then.
template <class Done> KDA_DEVICE void wait_flag(const uint32_t* flag, Done done) {
#pragma unroll 1
  for (uint32_t i = 0; i < kFlagWaitLimit || kPatient; ++i) {
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
    if (done(x)) return;
    rest();
  }
  trap();
}
// By a warp: each lane looks at a flag of its own, until that of lane 0 is done; for how many lanes in a row it is. What was written before those flags is
// visible then to the whole warp.
template <class Done> KDA_DEVICE int wait_flags(const uint32_t* flag, Done done) {
#pragma unroll 1
  for (uint32_t i = 0; i < kFlagWaitLimit || kPatient; ++i) {
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
    const int ready = leading_lanes(done(x));
    if (ready > 0) return ready;
    rest();
  }
  trap();
  return 1;
}
// By one lane, for leave to write what others have read: nothing of theirs is to become visible.
template <class Done> KDA_DEVICE void wait_room(const uint32_t* flag, Done done) {
#pragma unroll 1
  for (uint32_t i = 0; i < kFlagWaitLimit || kPatient; ++i) {
    uint32_t x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
    if (done(x)) return;
    rest();
  }
  trap();
}

// ---- kernels in a row on one stream, launched so that the next may start early (kernel_row.cuh). allow_next_kernel: it may take the room that this
// one leaves, as soon as all CTAs have come here. wait_for_previous_kernels: everything that earlier kernels wrote is visible, to the copy engine too.
// Every thread of every CTA calls it before it leaves: only then does the end of this kernel imply the end of those before.
KDA_DEVICE void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
KDA_DEVICE void wait_for_previous_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  fence_async_global();
}

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
