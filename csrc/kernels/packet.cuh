// The packet: everything K2 needs of one chunk, in the layout that its matrix products read.
//
// A stage of shared memory holds a chunk's packet and its values. The bounded scheme's K1 reads the raw rows from a buffer of its own; the
// unbounded scheme's receives them in the stage and turns them into the packet in place:
//
//   offset     packet                                                            raw rows, where in place
//   kKeyQuery  -Kd above Qd: [2 panels][64 rows][64] bf16, 128-byte swizzle      k above q
//   kKr        Kr: [2 panels][32 rows][64] bf16, 128-byte swizzle                gates (bf16)
//   kA         A = (I + L)^-1 diag(beta): [32][32] bf16, 64-byte swizzle
//   kM         M: the same
//   kDecay     a = exp(G_C): [128] f32, columns in the order of decay_slot
//   kValues    v: [1 or 2 panels][32 rows][64] bf16, 128-byte swizzle            v
//   kGatesF32  -                                                                 gates (f32): [4 panels][32 rows][32]
//
// A swizzle of 128 (64) bytes XORs the index of a 16-byte unit within its row with bits 7..9 (7..8) of the byte offset.
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
constexpr uint32_t kPacketBytes = kDecay + kHeadDim * 4;
constexpr uint32_t kValues = (kPacketBytes + 1023) / 1024 * 1024;
constexpr uint32_t kGatesF32 = kValues + 2 * kPanel;
constexpr uint32_t bytes(bool gates_f32_in_place) { return kGatesF32 + (gates_f32_in_place ? 4 * kPanel : 0); }
}  // namespace stage

// Byte offset of 16-byte unit `unit` (0..7) of row `row` in a panel with 128-byte rows.
KDA_DEVICE constexpr uint32_t panel_unit(uint32_t row, uint32_t unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }
// Byte offset of 16-byte unit `unit` (0..3) of row `row` in a 32 x 32 square (A, M).
KDA_DEVICE constexpr uint32_t square_unit(uint32_t row, uint32_t unit) { return row * 64 + ((unit ^ ((row >> 1) & 3)) << 4); }
// Where the decay of 16 s + 8 n + 2 t + e (the columns of a fragment) stands: a lane finds its four in one 16-byte load.
KDA_DEVICE constexpr uint32_t decay_slot(uint32_t slice, uint32_t t) { return slice * 64 + t * 16; }

}  // namespace jax_kda
