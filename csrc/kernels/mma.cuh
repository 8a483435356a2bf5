// Matrix instructions and the scalar arithmetic around them: the one place with inline PTX for arithmetic.
//
// Fragment layout, used everywhere: lane = 4 g + t. A 16 x 8 accumulator tile holds (row g, columns 2t, 2t+1) in [0], [1] and
// (row g + 8, same columns) in [2], [3]; rounded to 16 bits it *is* the matching A operand of the next product.
//
// On the host (tests/native) these functions are replaced by an emulation of a warp, lane by lane.
#pragma once

#include <cstdint>

#if defined(JAX_KDA_EMULATE)
#include "emulate.h"
#else

#define KDA_DEVICE __device__ __forceinline__

namespace jax_kda {

KDA_DEVICE uint32_t bits(float x) { return __float_as_uint(x); }
KDA_DEVICE float from_bits(uint32_t x) { return __uint_as_float(x); }
KDA_DEVICE uint64_t join(uint32_t lo, uint32_t hi) { uint64_t d; asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(lo), "r"(hi)); return d; }

// ---- scalar functions. Approximate ones: absolute or relative error about 2^-22.
KDA_DEVICE float exp2_approx(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
KDA_DEVICE float log2_approx(float x) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
KDA_DEVICE float rcp_approx(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
KDA_DEVICE float rsqrt_approx(float x) { float r; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
// fmaxf would turn a NaN into the other operand; a NaN gate must stay one.
KDA_DEVICE float max_keep_nan(float x, float y) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y)); return r; }
KDA_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// ---- 16-bit pairs: the first argument is the low half (the lower column)
KDA_DEVICE uint32_t pack_bf16(float lo, float hi) { uint32_t r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
KDA_DEVICE float low_bf16(uint32_t x) { return from_bits(x << 16); }
KDA_DEVICE float high_bf16(uint32_t x) { return from_bits(x & 0xffff0000u); }
// The matrix unit cuts an f32 operand to 10 bits of mantissa. Half a unit is added first (on average over a binade), so that the cut has no bias;
// a multiplication, because the exact conversion costs four instructions, and an integer addition would lose NaN.
KDA_DEVICE uint32_t to_tf32(float x) { return bits(x * 1.00034f); }

// ---- warp products: d (+)= A B
KDA_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// m16n8k8: A is two 8 x 8 tiles (rows 0-7: a0, a1; rows 8-15: a2, a3 hold column pairs of the tile), B one transposed tile.
KDA_DEVICE void mma_tf32(float (&d)[4], uint32_t upper0, uint32_t upper1, uint32_t lower0, uint32_t lower1, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(upper0), "r"(lower0), "r"(upper1), "r"(lower1), "r"(b0), "r"(b1));
}

// ---- 8 x 8 tiles of 16-bit elements between shared memory and fragments; lane 8 m + r names row r of tile m
KDA_DEVICE void load_tiles(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
KDA_DEVICE void load_tiles_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
KDA_DEVICE void store_tiles(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               :: "r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
KDA_DEVICE void store_tiles_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               :: "r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// ---- shared memory by 32-bit address
KDA_DEVICE float load_shared(uint32_t a) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory"); return v; }
KDA_DEVICE float2 load_shared2(uint32_t a) {
  float2 v; asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a) : "memory"); return v;
}
KDA_DEVICE float4 load_shared4(uint32_t a) {
  float4 v; asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a) : "memory"); return v;
}
KDA_DEVICE void store_shared(uint32_t a, float x) { asm volatile("st.shared.f32 [%0], %1;" :: "r"(a), "f"(x) : "memory"); }
KDA_DEVICE void store_shared_word(uint32_t a, uint32_t x) { asm volatile("st.shared.b32 [%0], %1;" :: "r"(a), "r"(x) : "memory"); }
KDA_DEVICE void store_shared2(uint32_t a, float x, float y) { asm volatile("st.shared.v2.f32 [%0], {%1,%2};" :: "r"(a), "f"(x), "f"(y) : "memory"); }
KDA_DEVICE void store_shared4(uint32_t a, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" :: "r"(a), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// An address in global memory that went through an integer: as a pointer of which the compiler knows that.
KDA_DEVICE char* global_pointer(uint64_t address) { return static_cast<char*>(__cvta_global_to_generic(address)); }
KDA_DEVICE void store_global(void* p, uint32_t x) { asm volatile("st.global.b32 [%0], %1;" :: "l"(p), "r"(x) : "memory"); }
KDA_DEVICE void store_global2(void* p, float x, float y) { asm volatile("st.global.v2.f32 [%0], {%1,%2};" :: "l"(p), "f"(x), "f"(y) : "memory"); }
// Predicated rather than branched around, so that a loop body stays one basic block for the scheduler.
KDA_DEVICE void store_global16_if(bool on, void* p, float4 v) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.v4.f32 [%0], {%1,%2,%3,%4}; }"
               :: "l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(int(on)) : "memory");
}

KDA_DEVICE float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
KDA_DEVICE int count_lanes(bool x) { return __popc(__ballot_sync(0xffffffffu, x)); }
// Lanes 0, 1, ... in a row for which x holds.
KDA_DEVICE int leading_lanes(bool x) { return __clz(__brev(~__ballot_sync(0xffffffffu, x))); }
// The same value in every lane, and the compiler knows it: in a uniform register.
KDA_DEVICE uint32_t uniform(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }
KDA_DEVICE void sync_warp() { __syncwarp(); }
KDA_DEVICE void sync_group(int barrier, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory"); }

// The same barrier for those that need not wait: they count towards it and go on.
KDA_DEVICE void arrive_group(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory"); }

// ---- warpgroup products (sm_90a): d[64 x N] (+)= A[64 x 16, registers] B[16 x N, shared memory]
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KDA_HAS_WGMMA 1
KDA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KDA_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> KDA_DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory"); }

template <bool kTransposeB> KDA_DEVICE void wgmma_n32(float* d, const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "{%16,%17,%18,%19}, %20, p, 1, 1, %22; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(int(kTransposeB)));
}
template <bool kTransposeB> KDA_DEVICE void wgmma_n64(float* d, const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, %38; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(int(kTransposeB)));
}
#endif

// A value that the compiler must not carry from one turn of a loop to the next: keeps it from hoisting (and then spilling) address arithmetic.
KDA_DEVICE uint32_t opaque(uint32_t x) { asm volatile("" : "+r"(x)); return x; }
KDA_DEVICE uint64_t opaque64(uint64_t x) { asm volatile("" : "+l"(x)); return x; }

// Tells the compiler that these registers change here: keeps ordinary code on its side of an asynchronous product.
template <int N> KDA_DEVICE void pin(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i]) :: "memory");
}
template <int N> KDA_DEVICE void pin(float* r) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i]) :: "memory");
}

}  // namespace jax_kda
#endif  // JAX_KDA_EMULATE
