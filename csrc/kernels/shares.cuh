// How a task's chunks are shared between its owner and the helpers: of every 64 chunks in a row `of_owner` are the owner's own, spread evenly, chunk 0 among
// them; the others are helped. Both kinds are numbered in token order.
#pragma once

#include <cstdint>

#include "mma.cuh"

namespace jax_kda {

struct Shares {
  static constexpr uint32_t kPeriod = 64;
  static constexpr int kMostChunks = 1 << 20;

  uint32_t of_owner;                  // 0 to 63
  uint32_t owner_inverse, helpers_inverse;  // 2^32 over each's share, rounded up: exact divisors of what is below 2^26

  explicit Shares(uint32_t owners_share = 0)
      : of_owner(owners_share), owner_inverse(inverse(owners_share)), helpers_inverse(inverse(kPeriod - owners_share)) {}

  // Chunks [0, c) hold so many of each.
  KDA_DEVICE int own_before(int c) const { return int((uint32_t(c) * of_owner + kPeriod - 1) / kPeriod); }
  KDA_DEVICE int helped_before(int c) const { return int(uint32_t(c) * (kPeriod - of_owner) / kPeriod); }
  // The chunk that is the owner's j-th own, the helpers' i-th. There must be some of the kind.
  KDA_DEVICE int own(int j) const { return int(high_product(uint32_t(j) * kPeriod, owner_inverse)); }
  KDA_DEVICE int helped(int i) const { return int(high_product((uint32_t(i) + 1) * kPeriod - 1, helpers_inverse)); }

 private:
  static uint32_t inverse(uint32_t x) { return x > 1 ? 0xffffffffu / x + 1 : 0xffffffffu; }
  static KDA_DEVICE uint32_t high_product(uint32_t x, uint32_t y) { return uint32_t(uint64_t(x) * y >> 32); }
};

}  // namespace jax_kda
