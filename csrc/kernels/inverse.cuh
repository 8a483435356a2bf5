// (I + L)^-1 of one 32 x 32 chunk by one warp, given N = -L (strictly lower), without leaving the registers.
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

// n(row tile, column tile) gives a tile of N when it is needed; out(block row, block column, tiles 00, 01, 10, 11) takes a finished 16 x 16 block
// of the inverse. So that few tiles are alive at a time.
template <class N, class Out> KDA_DEVICE void invert(int lane, N n, Out out) {
  const int g = lane >> 2, t = lane & 3;
  const TileOperand zero = {{0u, 0u}};
  float x[2][4], y[2][4];  // of each 16-block: both diagonal 8 x 8 inverses ([0..1], [2..3]), and their transposes
  TileOperand xo[2][2], yo[2][2];

  // Blocks of two: exactly I + N.
  const bool on_diagonal = t == (g >> 1), odd = g & 1;
#pragma unroll
  for (int b = 0; b < 2; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float below = n(2 * b + h, 2 * b + h).v[0], below_next = shuffle(below, (lane + 4) & 31);
      x[b][2 * h] = on_diagonal ? (odd ? below : 1.f) : 0.f;
      x[b][2 * h + 1] = on_diagonal && odd ? 1.f : 0.f;
      y[b][2 * h] = on_diagonal && !odd ? 1.f : 0.f;
      y[b][2 * h + 1] = on_diagonal ? (odd ? 1.f : below_next) : 0.f;
    }
  auto round_operands = [&](int b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      xo[b][h] = operand(x[b][2 * h], x[b][2 * h + 1]);
      yo[b][h] = operand(y[b][2 * h], y[b][2 * h + 1]);
    }
  };
#pragma unroll
  for (int b = 0; b < 2; ++b) round_operands(b);

  // 2 -> 4 and 4 -> 8: X <- X + X N' X, N' the part of N between the halves of each merged block.
#pragma unroll
  for (int merge = 0; merge < 2; ++merge) {
    const bool between = merge == 0 ? ((g >> 2) == (t >> 1) && (g & 2) && !(t & 1)) : (g >= 4 && t < 2);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      TileOperand part[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const TileOperand whole = operand(n(2 * b + h, 2 * b + h));
        part[h] = {{between ? whole.u[0] : 0u, between ? whole.u[1] : 0u}};
      }
      float w[4] = {0.f, 0.f, 0.f, 0.f};  // (N' X)^T of both tiles
      multiply(w, yo[b][0], zero, part[0]);
      multiply(w, zero, yo[b][1], part[1]);
      const TileOperand w0 = operand(w[0], w[1]), w1 = operand(w[2], w[3]);
      multiply(x[b], xo[b][0], zero, w0);
      multiply(x[b], zero, xo[b][1], w1);
      multiply(y[b], w0, zero, xo[b][0]);
      multiply(y[b], zero, w1, xo[b][1]);
      round_operands(b);
    }
  }

  // 8 -> 16: X10 = X11 N10 X00, both blocks in one product.
  TileOperand w[2];
  {
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    multiply(d, yo[0][0], zero, operand(n(1, 0)));
    multiply(d, zero, yo[1][0], operand(n(3, 2)));
    w[0] = operand(d[0], d[1]);
    w[1] = operand(d[2], d[3]);
  }
  float x10[4] = {0.f, 0.f, 0.f, 0.f};
  multiply(x10, xo[0][1], zero, w[0]);
  multiply(x10, zero, xo[1][1], w[1]);
  const Tile none = {{0.f, 0.f}};
#pragma unroll
  for (int b = 0; b < 2; ++b) out(b, b, Tile{{x[b][0], x[b][1]}}, none, Tile{{x10[2 * b], x10[2 * b + 1]}}, Tile{{x[b][2], x[b][3]}});
  out(0, 1, none, none, none, none);

  // 16 -> 32: X10 = X1 N10 X0, through (N10 X0)^T = X0^T N10^T.
  float x0_transposed[4] = {0.f, 0.f, 0.f, 0.f};  // upper rows: the transpose of block 0's tile 10
  multiply(x0_transposed, w[0], zero, xo[0][1]);
  const TileOperand x0t10 = operand(x0_transposed[0], x0_transposed[1]);
  TileOperand nx[2][2];  // [row tile of N10][column tile of X0], transposed
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    multiply(d, yo[0][0], zero, operand(n(2 + m, 0)));
    multiply(d, x0t10, yo[0][1], operand(n(2 + m, 1)));
    nx[m][0] = operand(d[0], d[1]);
    nx[m][1] = operand(d[2], d[3]);
  }
  const TileOperand x1_10 = operand(x10[2], x10[3]);
  Tile square[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    multiply(d, xo[1][0], x1_10, nx[0][m]);
    multiply(d, zero, xo[1][1], nx[1][m]);
    square[0][m] = {{d[0], d[1]}};
    square[1][m] = {{d[2], d[3]}};
  }
  out(1, 0, square[0][0], square[0][1], square[1][0], square[1][1]);
}

}  // namespace jax_kda
