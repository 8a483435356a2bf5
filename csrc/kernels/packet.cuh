// The packet: everything K2 needs of one chunk besides the values, in the layout that its matrix products read. K1 writes it to a stage of
// shared memory, or to a slot of global memory from which it is copied to a stage as it stands.
//
//   offset     contents
//   kKeyQuery  -Kd above Qd: [2 panels][64 rows][64] bf16, 128-byte swizzle
//   kKr        Kr: [2 panels][32 rows][64] bf16, 128-byte swizzle
//   kA         (I + L)^-1, its diagonal exactly one: [32][32] bf16, 64-byte swizzle
//   kM         M: the same
//   kDecay     a = exp(G_C): [128] f32, columns in the order of decay_slot
//   kBeta      beta: [32] f32 (beside A, not in it: rounded to bf16 it would bias every write)
//
// A panel is 64 channels wide. A swizzle of 128 (64) bytes XORs the index of a 16-byte unit within its row with bits 7..9 (7..8) of the byte
// offset.
#pragma once

#include <cstdint>

#include "mma.cuh"

namespace jax_kda {

constexpr int kChunk = 32;      // tokens
constexpr int kHeadDim = 128;   // key channels, and value channels
constexpr int kPanel = kChunk * 128;  // bytes of 32 rows of 64 bf16

namespace stage {
constexpr uint32_t kKeyQuery = 0;
constexpr uint32_t kKeyQueryPanel = 2 * kPanel;
constexpr uint32_t kQueryRows = kPanel;  // q rows follow the k rows inside a panel
constexpr uint32_t kKr = 4 * kPanel;
constexpr uint32_t kA = kKr + 2 * kPanel;
constexpr uint32_t kM = kA + kChunk * kChunk * 2;
constexpr uint32_t kDecay = kM + kChunk * kChunk * 2;
constexpr uint32_t kBeta = kDecay + kHeadDim * 4;
constexpr uint32_t kPacketBytes = kBeta + kChunk * 4;
constexpr uint32_t kBytes = (kPacketBytes + 1023) / 1024 * 1024;
}  // namespace stage

// Byte offset of 16-byte unit `unit` (0..7) of row `row` in a panel with 128-byte rows.
KDA_DEVICE constexpr uint32_t panel_unit(uint32_t row, uint32_t unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }
// Byte offset of 16-byte unit `unit` (0..3) of row `row` in a 32 x 32 square (A, M).
KDA_DEVICE constexpr uint32_t square_unit(uint32_t row, uint32_t unit) { return row * 64 + ((unit ^ ((row >> 1) & 3)) << 4); }
// Where the decay of 16 s + 8 n + 2 t + e (the columns of a fragment) stands: a lane finds its four in one 16-byte load.
KDA_DEVICE constexpr uint32_t decay_slot(uint32_t slice, uint32_t t) { return slice * 64 + t * 16; }

// Where K1 writes a packet. at(tile, row) gives the offset of a row of one of four 8 x 8 tiles in fragment layout.
struct SharedPacket {
  static constexpr bool kReadable = true;  // K1 may read back what it has written
  uint32_t base;
  KDA_DEVICE void word(uint32_t offset, uint32_t x) const { store_shared_word(base + offset, x); }
  KDA_DEVICE void two(uint32_t offset, float x, float y) const { store_shared2(base + offset, x, y); }
  KDA_DEVICE void four(uint32_t offset, float4 x) const { store_shared4(base + offset, x); }
  template <class At> KDA_DEVICE void tiles(int lane, At at, uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3) const {
    store_tiles(base + at(lane >> 3, lane & 7), t0, t1, t2, t3);
  }
};
// In global memory, as ordinary stores: for packets that other CTAs will fetch. The place is aligned to 32 KB, so that an offset never carries into
// the upper half of an address, which all stores share.
constexpr int64_t kSlotBytes = 32768;
struct GlobalPacket {
  static constexpr bool kReadable = false;
  uint32_t low, high;
  explicit KDA_DEVICE GlobalPacket(const char* place) : low(uint32_t(reinterpret_cast<uint64_t>(place))), high(uint32_t(reinterpret_cast<uint64_t>(place) >> 32)) {}
  KDA_DEVICE char* at(uint32_t offset) const { return reinterpret_cast<char*>(join(low + offset, high)); }
  KDA_DEVICE void word(uint32_t offset, uint32_t x) const { store_global(at(offset), x); }
  KDA_DEVICE void two(uint32_t offset, float x, float y) const { store_global2(at(offset), x, y); }
  KDA_DEVICE void four(uint32_t offset, float4 x) const { store_global16_if(true, at(offset), x); }
  template <class At> KDA_DEVICE void tiles(int lane, At place, uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3) const {
    const uint32_t t[4] = {t0, t1, t2, t3};
#pragma unroll
    for (int m = 0; m < 4; ++m) store_global(at(place(m, lane >> 2) + (lane & 3) * 4), t[m]);
  }
};

}  // namespace jax_kda
