// The packet: everything K2 needs of one chunk besides the values, in the layout that its matrix products read. K1 writes it to a stage of
// shared memory, or to a slot of global memory from which it is copied to a stage as it stands.
//
//   two panels of 64 channels, each
//     kQuery   Qd: [32][64] bf16, 128-byte swizzle
//     kKey     -Kd: the same
//     kKr      -Kr: the same
//   kA         (I + L)^-1, its diagonal exactly one: [32][32] bf16, 64-byte swizzle
//   kM         -M: the same
//   kDecay     a = exp(G_C): [128] f32, columns in the order of decay_slot
//   kBeta      -beta: [32] f32 (beside A, not in it: rounded to bf16 it would bias every write)
//
// Keys are negated from the start, and beta with them: so K2 has R = V - Kd S as a plain sum, and U, whose sign turns with beta's, meets -Kr and -M.
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
constexpr uint32_t kQuery = 0, kKey = kPanel, kKr = 2 * kPanel;  // within a panel
constexpr uint32_t kPanelStride = 3 * kPanel;
constexpr uint32_t kA = 2 * kPanelStride;
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

// Where K1 writes a packet. A Place is an address within it; `^` with bits 4..6 finds the place that a row's swizzle puts in place of row 0's.
// at(tile, row) gives the offset of a row of one of four 8 x 8 tiles in fragment layout.
struct SharedPacket {
  static constexpr bool kReadable = true;  // K1 may read back what it has written
  struct Place {
    uint32_t address;
    KDA_DEVICE Place operator^(uint32_t x) const { return {address ^ x}; }
    KDA_DEVICE Place operator+(uint32_t x) const { return {address + x}; }
  };
  uint32_t base;
  KDA_DEVICE Place at(uint32_t offset) const { return {base + offset}; }
  static KDA_DEVICE void word(Place p, uint32_t offset, uint32_t x) { store_shared_word(p.address + offset, x); }
  static KDA_DEVICE void two(Place p, uint32_t offset, float x, float y) { store_shared2(p.address + offset, x, y); }
  template <class At> KDA_DEVICE void tiles(int lane, At at, uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3) const {
    store_tiles(base + at(lane >> 3, lane & 7), t0, t1, t2, t3);
  }
};
// In global memory, as ordinary stores: for packets that other CTAs will fetch. It is aligned to 32 KB, so that an offset never carries into the upper
// half of an address, which all places share.
constexpr int64_t kSlotBytes = 32768;
struct GlobalPacket {
  static constexpr bool kReadable = false;
  struct Place {
    uint32_t low, high;
    KDA_DEVICE Place operator^(uint32_t x) const { return {low ^ x, high}; }
    KDA_DEVICE Place operator+(uint32_t x) const { return {low + x, high}; }
    KDA_DEVICE char* address() const { return reinterpret_cast<char*>(join(low, high)); }
  };
  uint32_t low, high;
  explicit KDA_DEVICE GlobalPacket(const char* place) : low(uint32_t(reinterpret_cast<uint64_t>(place))), high(uint32_t(reinterpret_cast<uint64_t>(place) >> 32)) {}
  KDA_DEVICE Place at(uint32_t offset) const { return {low + offset, high}; }
  static KDA_DEVICE void word(Place p, uint32_t offset, uint32_t x) { store_global(p.address() + offset, x); }
  static KDA_DEVICE void two(Place p, uint32_t offset, float x, float y) { store_global2(p.address() + offset, x, y); }
  template <class At> KDA_DEVICE void tiles(int lane, At place, uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3) const {
    const uint32_t t[4] = {t0, t1, t2, t3};
#pragma unroll
    for (int m = 0; m < 4; ++m) word(at(place(m, lane >> 2) + (lane & 3) * 4), 0, t[m]);
  }
};

}  // namespace jax_kda
