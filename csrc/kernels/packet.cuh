// The packet: everything K2 needs of one chunk, in the layout that its matrix products read.
//
// A stage of shared memory first receives the raw rows of a chunk (k, q, gates, values); K1 then turns it into the packet *in place*:
//
//   offset     raw rows                              packet
//   kKeyQuery  k and q, two 64-channel panels        -Kd above Qd: [2 panels][64 rows][64] bf16, 128-byte swizzle
//   kKr        gates (bf16), two panels              Kr: [2 panels][32 rows][64] bf16, 128-byte swizzle
//   kA         -                                     (I + L)^-1, its diagonal exactly one: [32][32] bf16, 64-byte swizzle
//   kM         -                                     M: the same
//   kDecay     -                                     a = exp(G_C): [128] f32, columns in the order of decay_slot
//   kBeta      -                                     beta: [32] f32 (beside A, not in it: rounded to bf16 it would bias every write)
//   kValues    v, two 64-channel panels              the same: [2 panels][32 rows][64] bf16, 128-byte swizzle
//   kGatesF32  gates (f32), four 32-channel panels   -            (only where the gates are f32)
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
constexpr uint32_t kBeta = kDecay + kHeadDim * 4;
constexpr uint32_t kPacketBytes = kBeta + kChunk * 4;
constexpr uint32_t kValues = (kPacketBytes + 1023) / 1024 * 1024;
constexpr uint32_t kGatesF32 = kValues + 2 * kPanel;
constexpr uint32_t bytes(bool gates_f32) { return kGatesF32 + (gates_f32 ? 4 * kPanel : 0); }
}  // namespace stage

// Byte offset of 16-byte unit `unit` (0..7) of row `row` in a panel with 128-byte rows.
KDA_DEVICE constexpr uint32_t panel_unit(uint32_t row, uint32_t unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }
// Byte offset of 16-byte unit `unit` (0..3) of row `row` in a 32 x 32 square (A, M).
KDA_DEVICE constexpr uint32_t square_unit(uint32_t row, uint32_t unit) { return row * 64 + ((unit ^ ((row >> 1) & 3)) << 4); }
// Where the decay of 16 s + 8 n + 2 t + e (the columns of a fragment) stands: a lane finds its four in one 16-byte load.
KDA_DEVICE constexpr uint32_t decay_slot(uint32_t slice, uint32_t t) { return slice * 64 + t * 16; }

}  // namespace jax_kda
