// What the kernels use of the device, on the host: csrc/kernels/mma.cuh and pipeline.cuh take these functions in place of PTX where
// JAX_KDA_EMULATE is defined. They run in the lanes of the machine of machine.h.
#pragma once

#include "machine.h"

#define KDA_DEVICE inline
#define KDA_HAS_WGMMA 1

namespace jax_kda {
namespace emulation {

// ---- numbers
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }

// ---- collective instructions
// d += a b for tiles of 16 x depth and depth x 8. element(word, e) is element e of a word of a lane's operands.
struct Operands {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};
template <int kPerWord, class Element> void mma(const char* instruction, Operands mine, Element element) {
  machine->together(instruction, mine, [&](const std::array<Operands*, 32>& all) {
    constexpr int kDepth = 8 * kPerWord;
    float a[16][kDepth], b[kDepth][8];
    for (int l = 0; l < 32; ++l)
      for (int e = 0; e < kPerWord; ++e) {
        const int g = l >> 2, k = kPerWord * (l & 3) + e;
        for (int r = 0; r < 4; ++r) a[g + 8 * (r & 1)][k + kDepth / 2 * (r >> 1)] = element(all[l]->a[r], e);
        for (int r = 0; r < 2; ++r) b[k + kDepth / 2 * r][g] = element(all[l]->b[r], e);
      }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        float s = all[l]->d[i];
        for (int k = 0; k < kDepth; ++k) s += a[(l >> 2) + 8 * (i >> 1)][k] * b[k][2 * (l & 3) + (i & 1)];
        all[l]->d[i] = s;
      }
  });
}

// ldmatrix and stmatrix: four tiles of 8 x 8 elements of 16 bits.
struct Tiles {
  uint32_t address;
  uint32_t r[4];
};
inline void load_four_tiles(uint32_t (&r)[4], uint32_t address, bool transposed) {
  Tiles mine = {address, {}};
  machine->together(transposed ? "ldmatrix.trans" : "ldmatrix", mine, [&](const std::array<Tiles*, 32>& all) {
    for (int m = 0; m < 4; ++m) {
      uint16_t tile[8][8];
      for (int i = 0; i < 8; ++i) machine->read(machine->warp_lane(8 * m + i), all[8 * m + i]->address, tile[i], 16, true);
      for (int l = 0; l < 32; ++l) {
        const int g = l >> 2, t = 2 * (l & 3);
        all[l]->r[m] = transposed ? tile[t][g] | uint32_t(tile[t + 1][g]) << 16 : tile[g][t] | uint32_t(tile[g][t + 1]) << 16;
      }
    }
  });
  std::copy(mine.r, mine.r + 4, r);
}
inline void store_four_tiles(Tiles mine, bool transposed) {
  machine->together(transposed ? "stmatrix.trans" : "stmatrix", mine, [&](const std::array<Tiles*, 32>& all) {
    for (int m = 0; m < 4; ++m) {
      uint16_t tile[8][8];
      for (int l = 0; l < 32; ++l)
        for (int e = 0; e < 2; ++e) {
          const int g = l >> 2, t = 2 * (l & 3) + e;
          (transposed ? tile[t][g] : tile[g][t]) = uint16_t(all[l]->r[m] >> (16 * e));
        }
      for (int i = 0; i < 8; ++i) machine->write(machine->warp_lane(8 * m + i), all[8 * m + i]->address, tile[i], 16, true);
    }
  });
}

inline void wgmma(int columns, bool transposed, float* d, const uint32_t (&a)[4], uint64_t b, int accumulate) {
  struct Registers {
    float* d;
    const uint32_t* a;
  } mine = {d, a};
  machine->together("wgmma.mma_async", mine, [=](const std::array<Registers*, 32>& all) {
    Product p = {{}, {}, b, machine->window(), columns, transposed, accumulate != 0, false, 0};
    for (int i = 0; i < 32; ++i) p.d[i] = all[i]->d, p.a[i] = all[i]->a;
    machine->start_product(p);
  });
}

// ---- launches: one cluster of blocks after the other. What the kernel's attribute says on the device, `ranks` says here.
inline uint32_t first_block = 0;
inline int ranks = 1;
inline uint64_t launch_seed = 1;
inline std::function<void(Machine&, int, uint32_t, uint32_t)> on_phase;  // of every cluster
template <class Kernel, class... Arguments>
void launch(Kernel kernel, uint32_t blocks, int threads, uint32_t shared_bytes, cudaStream_t, const Arguments&... arguments) {
  for (first_block = 0; first_block < blocks; first_block += ranks) {
    Machine m(threads, shared_bytes, ++launch_seed, ranks);
    m.on_phase = on_phase;
    m.run([&] { kernel(arguments...); });
  }
}
// All blocks at once, as far as they may wait for one another.
template <class Kernel, class... Arguments>
void launch_resident(Kernel kernel, uint32_t blocks, int threads, uint32_t shared_bytes, cudaStream_t, const Arguments&... arguments) {
  first_block = 0;
  Machine m(threads, shared_bytes, ++launch_seed, int(blocks));
  m.on_phase = on_phase;
  m.run([&] { kernel(arguments...); });
}
struct ThreadIndex {
  operator int() const { return machine->lane().index % machine->threads(); }
};
struct BlockSize {
  operator int() const { return machine->threads(); }
};
struct BlockIndex {
  operator uint32_t() const { return first_block + machine->rank(); }
};

}  // namespace emulation

using emulation::Fault;
using emulation::machine;
using emulation::planted;

// ================================================================ what mma.cuh defines on the device

inline uint32_t bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float from_bits(uint32_t x) {
  float f;
  std::memcpy(&f, &x, 4);
  return f;
}
inline uint64_t join(uint32_t lo, uint32_t hi) { return uint64_t(hi) << 32 | lo; }
inline float exp2_approx(float x) { return emulation::flushed(std::exp2(emulation::flushed(x))); }
inline float log2_approx(float x) { return std::log2(emulation::flushed(x)); }
inline float rcp_approx(float x) { return emulation::flushed(1.f / emulation::flushed(x)); }
inline float rsqrt_approx(float x) { return 1.f / std::sqrt(emulation::flushed(x)); }
inline float max_keep_nan(float x, float y) {
  if (planted != Fault::kNanDropped && (std::isnan(x) || std::isnan(y))) return NAN;
  return std::fmax(x, y);
}
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }

inline uint32_t pack_bf16(float lo, float hi) { return float_to_bf16(lo) | uint32_t(float_to_bf16(hi)) << 16; }
inline float low_bf16(uint32_t x) { return from_bits(x << 16); }
inline float high_bf16(uint32_t x) { return from_bits(x & 0xffff0000u); }
inline uint32_t to_tf32(float x) {
  if (planted == Fault::kHalfInverse && std::fabs(x) > 65504.f) x = std::copysign(INFINITY, x);
  return bits(x * 1.00034f);
}

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const bool swapped = planted == Fault::kFragmentOrder;
  const uint32_t ordered[4] = {a[0], a[swapped ? 2 : 1], a[swapped ? 1 : 2], a[3]};
  emulation::mma<2>("mma.bf16", {d, ordered, {b0, b1}}, [](uint32_t x, int e) { return bf16_to_float(uint16_t(x >> (16 * e))); });
}
inline void mma_tf32(float (&d)[4], uint32_t upper0, uint32_t upper1, uint32_t lower0, uint32_t lower1, uint32_t b0, uint32_t b1) {
  const uint32_t a[4] = {upper0, lower0, upper1, lower1};
  emulation::mma<1>("mma.tf32", {d, a, {b0, b1}}, [](uint32_t x, int) { return from_bits(x & 0xffffe000u); });
}

inline void load_tiles(uint32_t (&r)[4], uint32_t address) {
  const uint32_t row = address >> 7 & 7;
  emulation::load_four_tiles(r, planted == Fault::kSwizzle ? address ^ (row ^ ((row + 1) & 7)) << 4 : address, false);
}
inline void load_tiles_transposed(uint32_t (&r)[4], uint32_t address) { emulation::load_four_tiles(r, address, planted != Fault::kTransposition); }
inline void store_tiles(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  emulation::store_four_tiles({address, {a, b, c, d}}, false);
}
inline void store_tiles_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  emulation::store_four_tiles({address, {a, b, c, d}}, true);
}

template <class T> T load_shared_as(uint32_t address) {
  T x;
  machine->read(machine->lane(), address, &x, sizeof x);
  return x;
}
inline float load_shared(uint32_t a) { return load_shared_as<float>(a); }
inline float2 load_shared2(uint32_t a) { return load_shared_as<float2>(a); }
inline float4 load_shared4(uint32_t a) { return load_shared_as<float4>(a); }
inline void store_shared(uint32_t a, float x) { machine->write(machine->lane(), a, &x, 4); }
inline void store_shared_word(uint32_t a, uint32_t x) { machine->write(machine->lane(), a, &x, 4); }
inline void store_shared2(uint32_t a, float x, float y) {
  const float v[2] = {x, y};
  machine->write(machine->lane(), a, v, 8);
}
inline void store_shared4(uint32_t a, float4 v) { machine->write(machine->lane(), a, &v, 16); }
inline char* global_pointer(uint64_t address) { return reinterpret_cast<char*>(address); }
inline void store_global(void* p, uint32_t x) { std::memcpy(p, &x, 4); }
inline void store_global2(void* p, float x, float y) {
  const float v[2] = {x, y};
  std::memcpy(p, v, 8);
}
inline void store_global16_if(bool on, void* p, float4 v) {
  if (!on && planted != Fault::kTailStored) return;
  if (reinterpret_cast<uintptr_t>(p) % 16) machine->fail("a store to global memory is not aligned");
  std::memcpy(p, &v, 16);
}

// The lanes vote; all get what count(the votes) makes of them.
template <class Count> int ballot(bool x, Count count) {
  struct Vote {
    bool x;
    int result;
  } mine = {x, 0};
  machine->together("ballot", mine, [&](const std::array<Vote*, 32>& all) {
    const int result = count(all);
    for (Vote* lane : all) lane->result = result;
  });
  return mine.result;
}
inline int leading_lanes(bool x) {
  return ballot(x, [](const auto& all) { return int(std::find_if(all.begin(), all.end(), [](auto* lane) { return !lane->x; }) - all.begin()); });
}
inline int count_lanes(bool x) {
  return ballot(x, [](const auto& all) { return int(std::count_if(all.begin(), all.end(), [](auto* lane) { return lane->x; })); });
}
inline float shuffle(float x, int lane) {
  struct Operand {
    float x, result;
    int from;
  } mine = {x, 0.f, lane};
  machine->together("shfl", mine, [](const std::array<Operand*, 32>& all) {
    for (Operand* y : all) y->result = all[y->from & 31]->x;
  });
  return mine.result;
}
inline uint32_t uniform(uint32_t x) {
  const uint32_t same = bits(shuffle(from_bits(x), 0));
  if (same != x) machine->fail("a value is not uniform");
  return x;
}
inline void sync_warp() {
  if (planted != Fault::kWarpBarrierOpen) machine->sync_warp();
}
inline void sync_group(int barrier, int threads) {
  if (planted != Fault::kGroupBarrierOpen || barrier == 0) machine->group_barrier(barrier, threads, true);
}
inline void arrive_group(int barrier, int threads) { machine->group_barrier(barrier, threads, false); }

inline void wgmma_fence() {}
inline void wgmma_commit() {
  int none = 0;
  machine->together("wgmma.commit_group", none, [](auto&) { machine->commit_products(); });
}
template <int kPending> void wgmma_wait() {
  int none = 0;
  if (planted != Fault::kProductsNotAwaited) machine->together("wgmma.wait_group", none, [](auto&) { machine->finish_products(kPending); });
}
template <bool kTransposeB> void wgmma_n32(float* d, const uint32_t (&a)[4], uint64_t b, int accumulate) {
  emulation::wgmma(32, kTransposeB, d, a, b, accumulate);
}
template <bool kTransposeB> void wgmma_n64(float* d, const uint32_t (&a)[4], uint64_t b, int accumulate) {
  emulation::wgmma(64, kTransposeB, d, a, b, accumulate);
}

inline uint32_t opaque(uint32_t x) { return x; }
inline uint64_t opaque64(uint64_t x) { return x; }
template <int N> void pin(float (&)[N]) {}
template <int N> void pin(float*) {}

// ================================================================ what pipeline.cuh defines on the device

inline uint32_t shared_address(const void*) { return emulation::Machine::kBase + machine->window(); }  // of the block's dynamic shared memory, the only one
inline void barrier_init(uint32_t b, uint32_t arrivals) { machine->mbarrier_init(b, arrivals); }
inline void barrier_arrive(uint32_t b) {
  if (planted != Fault::kLostArrival || ++machine->arrivals != 5) machine->mbarrier_arrive(b, 0);
}
inline void barrier_expect(uint32_t b, uint32_t bytes) { machine->mbarrier_arrive(b, bytes); }
inline bool barrier_try(uint32_t b, uint32_t parity) {
  if (machine->mbarrier_test(b, parity)) return true;
  machine->poll("mbarrier", b);
  return machine->mbarrier_test(b, parity);
}
inline void barrier_wait(uint32_t b, uint32_t parity) {
  if (planted != Fault::kWaitOpen) machine->mbarrier_wait(b, parity);
}
inline void trap() { machine->fail("trap"); }
inline void fence_async_shared() {
  if (planted != Fault::kNoProxyFence) machine->fence_proxy();
}

inline void copy16_or_zero(uint32_t to, const void* from, bool valid) {
  const bool copies = valid || planted == Fault::kTailCopied;
  if (copies && reinterpret_cast<uintptr_t>(from) % 16) machine->fail("a copy's source is not aligned");
  machine->start_copy({to, copies ? from : nullptr, false, machine->lane().copy_groups});
}
inline void copies_commit() { ++machine->lane().copy_groups; }
template <int kPending> void copies_wait() {
  if (planted != Fault::kCopiesNotAwaited) machine->finish_copies(kPending);
}
inline void copies_wait_all() {
  if (planted != Fault::kCopiesNotAwaited) machine->finish_copies(-1);
}

inline uint32_t cluster_rank() { return uint32_t(machine->rank()); }
inline uint32_t at_rank(uint32_t address, uint32_t rank) { return address % emulation::Machine::kWindow + rank * emulation::Machine::kWindow; }
inline void sync_cluster() {
  if (planted == Fault::kClusterBarrierOpen) sync_group(0, machine->threads());
  else machine->group_barrier(-1, machine->threads() * machine->ranks(), true);
}
inline void barrier_arrive_at(uint32_t b) {
  if (planted != Fault::kLostPeerArrival || ++machine->peer_arrivals != 5) machine->mbarrier_arrive(b, 0);
}
inline void barrier_wait_cluster(uint32_t b, uint32_t parity) { barrier_wait(b, parity); }
inline void copy_to_cluster(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  emulation::BoxCopy box = {to, barrier, {}};
  box.from = from, box.bytes = planted == Fault::kHalfToPeer ? bytes / 32 * 16 : bytes, box.announced = bytes;
  machine->start_box(std::move(box));
}
inline void copy_tensor(uint32_t to, const void* map, int x, int y, int z, uint32_t barrier) {
  const auto& m = *static_cast<const CUtensorMap*>(map);
  emulation::BoxCopy box = {to, barrier, {}};
  if (x < 0 || x + m.box[0] > m.sizes[0] || y < 0 || z < 0) machine->fail("a box that is not emulated");
  for (uint64_t k = z; k < uint64_t(z) + m.box[2]; ++k)
    for (uint64_t j = y; j < uint64_t(y) + m.box[1]; ++j)
      box.rows.push_back(j < m.sizes[1] && k < m.sizes[2] ? m.base + x * m.strides[0] + j * m.strides[1] + k * m.strides[2] : nullptr);
  machine->start_box(std::move(box));
}

inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  emulation::BoxCopy box = {to, barrier, {}};
  box.global = from, box.bytes = bytes;
  machine->start_box(std::move(box));
}
inline void fence_async_global() {}
inline void set_flag(uint32_t* flag, uint32_t x) { *flag = x; }
inline void add_flag(uint32_t* flag, uint32_t bits) {
  if (planted != Fault::kLostFlag || ++machine->flags != 3) *flag |= bits;
}
template <class Done> void wait_flag(const uint32_t* flag, Done done) {
  while (planted != Fault::kFlagWaitOpen && !done(*flag)) machine->poll("flag", *flag);
}
template <class Done> void wait_room(const uint32_t* flag, Done done) { wait_flag(flag, done); }
template <class Done> int wait_flags(const uint32_t* flag, Done done) {
  for (;;) {
    const int ready = leading_lanes(planted == Fault::kFlagWaitOpen || done(*flag));
    if (ready > 0) return ready;
    machine->poll("flag", *flag);
  }
}

inline void prefetch_global(const void*) {}
inline void prefetch_tensor(const void*, int, int, int) {}
inline void allow_next_kernel() {}
inline void wait_for_previous_kernels() {}

template <int kRegisters> void give_registers() {}
template <int kRegisters> void take_registers() {}

}  // namespace jax_kda

inline struct {
  jax_kda::emulation::ThreadIndex x;
} threadIdx;
inline struct {
  jax_kda::emulation::BlockSize x;
} blockDim;
inline struct {
  jax_kda::emulation::BlockIndex x;
} blockIdx;
inline void __syncthreads() { jax_kda::sync_group(0, jax_kda::machine->threads()); }
inline int __shfl_sync(uint32_t, int x, int lane) { return int(jax_kda::bits(jax_kda::shuffle(jax_kda::from_bits(uint32_t(x)), lane))); }
