// (I + L)^-1 of one 32 x 32 chunk, given N = -L (strictly lower), in registers: each 16 x 16 block of the diagonal by a warp of its own, then the
// block below them by both, one after the other.
//
// Neumann products of powers of L are useless here: for near-equal keys the powers reach thousands and must cancel. The hierarchical form
// only ever multiplies inverses of sub-blocks, whose entries stay of order one:
//   [X0 0; X1 N10 X0, X1] for [I - N0, 0; -N10, I - N1], merging blocks of 2 -> 4 -> 8 -> 16 -> 32.
// Products in tf32 with f32 sums: 11 significant bits (three bits under the bf16 rounding of the result) and f32's range, so that keys of any
// magnitude stay finite. X and its transpose are both carried, so no transposition is ever needed.
#pragma once

#include <cstdint>

#include "mma.cuh"

namespace jax_kda {

// An 8 x 8 tile in accumulator layout: row g, columns 2t and 2t + 1.
struct Tile {
  float v[2];
};
// The same as an operand of mma_tf32. As a right factor it stands for the transposed matrix.
struct TileOperand {
  uint32_t u[2];
};
KDA_DEVICE TileOperand operand(float x, float y) { return {{to_tf32(x), to_tf32(y)}}; }
KDA_DEVICE TileOperand operand(const Tile& x) { return operand(x.v[0], x.v[1]); }

// d += [upper; lower] * right, where `right` holds the transposed right factor.
KDA_DEVICE void multiply(float (&d)[4], TileOperand upper, TileOperand lower, TileOperand right) {
  mma_tf32(d, upper.u[0], upper.u[1], lower.u[0], lower.u[1], right.u[0], right.u[1]);
}

// The inverse of one 16 x 16 block of the diagonal, as operands: both 8 x 8 inverses and their transposes, the tile below, and what it is made of,
// (N10 X0)^T.
struct HalfInverse {
  TileOperand x[2], y[2], x10, below;
};

// n(row tile, column tile) gives a tile of the block of N, 0 or 1 each, when it is needed; out(tiles 00, 10, 11) takes the inverse.
template <class N, class Out> KDA_DEVICE HalfInverse invert_half(int lane, N n, Out out) {
  const int g = lane >> 2, t = lane & 3;
  const TileOperand zero = {{0u, 0u}};
  float x[4], y[4];  // both diagonal 8 x 8 inverses, and their transposes
  HalfInverse half;

  // Blocks of two: exactly I + N.
  const bool on_diagonal = t == (g >> 1), odd = g & 1;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float below = n(h, h).v[0], below_next = shuffle(below, (lane + 4) & 31);
    x[2 * h] = on_diagonal ? (odd ? below : 1.f) : 0.f;
    x[2 * h + 1] = on_diagonal && odd ? 1.f : 0.f;
    y[2 * h] = on_diagonal && !odd ? 1.f : 0.f;
    y[2 * h + 1] = on_diagonal ? (odd ? 1.f : below_next) : 0.f;
  }
  auto round_operands = [&] {
#pragma unroll
    for (int h = 0; h < 2; ++h) half.x[h] = operand(x[2 * h], x[2 * h + 1]), half.y[h] = operand(y[2 * h], y[2 * h + 1]);
  };
  round_operands();

  // 2 -> 4 and 4 -> 8: X <- X + X N' X, N' the part of N between the halves of each merged block.
#pragma unroll
  for (int merge = 0; merge < 2; ++merge) {
    const bool between = merge == 0 ? ((g >> 2) == (t >> 1) && (g & 2) && !(t & 1)) : (g >= 4 && t < 2);
    TileOperand part[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const TileOperand whole = operand(n(h, h));
      part[h] = {{between ? whole.u[0] : 0u, between ? whole.u[1] : 0u}};
    }
    float w[4] = {0.f, 0.f, 0.f, 0.f};  // (N' X)^T of both tiles
    multiply(w, half.y[0], zero, part[0]);
    multiply(w, zero, half.y[1], part[1]);
    const TileOperand w0 = operand(w[0], w[1]), w1 = operand(w[2], w[3]);
    multiply(x, half.x[0], zero, w0);
    multiply(y, w0, zero, half.x[0]);
    multiply(x, zero, half.x[1], w1);
    multiply(y, zero, w1, half.x[1]);
    round_operands();
  }

  // 8 -> 16: X10 = X11 N10 X00
  float d[4] = {0.f, 0.f, 0.f, 0.f};
  multiply(d, half.y[0], zero, operand(n(1, 0)));
  half.below = operand(d[0], d[1]);
  float x10[4] = {0.f, 0.f, 0.f, 0.f};
  multiply(x10, half.x[1], zero, half.below);
  half.x10 = operand(x10[0], x10[1]);
  out(Tile{{x[0], x[1]}}, Tile{{x10[0], x10[1]}}, Tile{{x[2], x[3]}});
  return half;
}

// 16 -> 32: X10 = X1 N10 X0. First (N10 X0)^T as right factors [row tile][column tile], from X0 and n(row tile, column tile) of N10; through
// X0^T N10^T.
template <class N> KDA_DEVICE void multiply_by_first(const HalfInverse& first, N n, TileOperand (&product)[2][2]) {
  const TileOperand zero = {{0u, 0u}};
  float below[4] = {0.f, 0.f, 0.f, 0.f};  // upper rows: the transpose of tile 10
  multiply(below, first.below, zero, first.x[1]);
  const TileOperand below_transposed = operand(below[0], below[1]);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    multiply(d, first.y[0], zero, operand(n(m, 0)));
    multiply(d, below_transposed, first.y[1], operand(n(m, 1)));
    product[m][0] = operand(d[0], d[1]);
    product[m][1] = operand(d[2], d[3]);
  }
}
// Then out(tiles 00, 01, 10, 11) takes X10.
template <class Out> KDA_DEVICE void multiply_second(const HalfInverse& second, const TileOperand (&product)[2][2], Out out) {
  const TileOperand zero = {{0u, 0u}};
  Tile square[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    multiply(d, second.x[0], second.x10, product[0][m]);
    multiply(d, zero, second.x[1], product[1][m]);
    square[0][m] = {{d[0], d[1]}};
    square[1][m] = {{d[2], d[3]}};
  }
  out(square[0][0], square[0][1], square[1][0], square[1][1]);
}

}  // namespace jax_kda
