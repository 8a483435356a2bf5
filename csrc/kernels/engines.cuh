// The matrix products of K2, on two engines with one face. A warp owns 16 rows (value channels) of every left operand, in registers;
// right operands are read from a packet in shared memory.
//
//   rows     -St Kd^T, St Qd^T     d[16 x 32] (+)= St[16 x 16 step of K] (32 rows of the key/query panels)^T
//   square   R A^T, U M^T          d[16 x 32] (+)= x[16 x 32] (square)^T
//   outer    U^T Kr                st[16 x 64 half of K] += u[16 x 32] Kr[32 x 64]
//
// WarpgroupEngine (sm_90a): asynchronous, four warps issue together; begin / commit / wait as for wgmma.
// WarpEngine (everything from sm_80 on): mma.sync on fragments fetched by ldmatrix; synchronous, so begin / commit / wait do nothing.
#pragma once

#include <cstdint>

#include "mma.cuh"
#include "packet.cuh"

namespace jax_kda {

#if defined(KDA_HAS_WGMMA)
struct WarpgroupEngine {
  // A shared-memory matrix descriptor in halves, so that a step costs one addition: {leading offset | address, swizzle | row-group stride}.
  static constexpr uint32_t kSwizzle128 = 1u << 30, kSwizzle64 = 2u << 30;
  static constexpr uint32_t kKMajor = 1u << 16, kKrPanels = uint32_t(kPanel >> 4) << 16;
  static KDA_DEVICE uint64_t descriptor(uint32_t base, uint32_t offset, uint32_t low, uint32_t high) {
    return uint64_t(high) << 32 | ((base >> 4) + (low + (offset >> 4)));
  }

  static KDA_DEVICE void begin() { wgmma_fence(); }
  static KDA_DEVICE void commit() { wgmma_commit(); }
  template <int kPending> static KDA_DEVICE void wait() { wgmma_wait<kPending>(); }

  static KDA_DEVICE void rows(float (&d)[16], const uint32_t (&st)[4], uint32_t stage, uint32_t which, int step, bool accumulate, int /*lane*/) {
    const uint32_t offset = which + (step >> 2) * stage::kPanelStride + (step & 3) * 32;
    wgmma_n32<false>(d, st, descriptor(stage, offset, kKMajor, kSwizzle128 | (1024 >> 4)), accumulate);
  }
  static KDA_DEVICE void square(float (&d)[16], const uint32_t (&x)[2][4], uint32_t stage, uint32_t which, bool accumulate, int /*lane*/) {
#pragma unroll
    for (int step = 0; step < 2; ++step)
      wgmma_n32<false>(d, x[step], descriptor(stage, which + step * 32, kKMajor, kSwizzle64 | (512 >> 4)), accumulate || step > 0);
  }
  static KDA_DEVICE void outer(float* st_half, const uint32_t (&u)[2][4], uint32_t stage, int half, int /*lane*/) {
#pragma unroll
    for (int step = 0; step < 2; ++step)
      wgmma_n64<true>(st_half, u[step],
                      descriptor(stage, stage::kKr + half * stage::kPanelStride + step * 2048, kKrPanels, kSwizzle128 | (1024 >> 4)), 1);
  }
};
#endif

struct WarpEngine {
  static KDA_DEVICE void begin() {}
  static KDA_DEVICE void commit() {}
  template <int kPending> static KDA_DEVICE void wait() {}

  static KDA_DEVICE void product(float* d, const uint32_t (&a)[4], const uint32_t (&b)[4]) {  // two tiles of 8 columns
    mma_bf16(*reinterpret_cast<float(*)[4]>(d), a, b[0], b[1]);
    mma_bf16(*reinterpret_cast<float(*)[4]>(d + 4), a, b[2], b[3]);
  }
  static KDA_DEVICE void clear(float (&d)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) d[i] = 0.f;
  }
  static KDA_DEVICE void rows(float (&p)[16], const uint32_t (&st)[4], uint32_t stage, uint32_t which, int step, bool accumulate, int lane) {
    if (!accumulate) clear(p);
    const uint32_t panel = stage + which + (step >> 2) * stage::kPanelStride;
    const uint32_t row = (lane >> 4) * 8 + (lane & 7), unit = (step & 3) * 2 + ((lane >> 3) & 1);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t b[4];
      load_tiles(b, panel + panel_unit(n * 16 + row, unit));
      product(p + 8 * n, st, b);
    }
  }
  static KDA_DEVICE void square(float (&d)[16], const uint32_t (&x)[2][4], uint32_t stage, uint32_t which, bool accumulate, int lane) {
    if (!accumulate) clear(d);
    const uint32_t row = (lane >> 4) * 8 + (lane & 7);
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int n = step; n < 2; ++n) {  // lower triangle: columns of step 1 meet rows 16..31 only
        uint32_t b[4];
        load_tiles(b, stage + which + square_unit(n * 16 + row, step * 2 + ((lane >> 3) & 1)));
        product(d + 8 * n, x[step], b);
      }
  }
  static KDA_DEVICE void outer(float* st_half, const uint32_t (&u)[2][4], uint32_t stage, int half, int lane) {
    const uint32_t panel = stage + stage::kKr + half * stage::kPanelStride;
    const uint32_t row = ((lane >> 3) & 1) * 8 + (lane & 7);
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t b[4];
        load_tiles_transposed(b, panel + panel_unit(step * 16 + row, n * 2 + (lane >> 4)));
        product(st_half + 8 * n, u[step], b);
      }
  }
};

// A template argument must be the same type in the host's pass and in every device pass, so the choice is made inside.
struct DefaultEngine
#if defined(KDA_HAS_WGMMA)
    : WarpgroupEngine
#else
    : WarpEngine
#endif
{
};

}  // namespace jax_kda
