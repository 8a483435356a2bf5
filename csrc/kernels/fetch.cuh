// The way of a packet from the mailbox to an owner's stages, for owners all of whose packets come from helpers. One warp each.
#pragma once

#include <cstdint>

#include "mailbox.cuh"
#include "packet.cuh"
#include "pipeline.cuh"

namespace jax_kda {

// Where the mailbox of one task lies: packet(slot), flag(slot). L: the owner's layout, with kStages stages of kStageBytes at the start of its shared
// memory, and barriers kFull (the packet's bytes) and kFree (one arrival per K2 warp, one of acknowledge).

// Packets in token order: wait for the slot's flag -> wait free -> bulk copy -> full. A look at a flag takes as long as K2 takes for a chunk: the lanes
// look at those of several chunks at once.
template <class L, class Box, class Ring> KDA_DEVICE void fetch(const Ring& ring, uint32_t shared, int chunks, int lane) {
  constexpr int kAhead = Box::kSlots < 8 ? Box::kSlots : 8;
  int ready = 0;  // chunks [0, ready) are there
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    const int stage = c % L::kStages, turn = c / L::kStages;
    if (c == ready) {
      const int mine = c + (lane < kAhead ? lane : 0);
      ready += wait_flags(ring.flag(Box::slot(mine)), [&](uint32_t flag) { return lane < kAhead && Box::readable(flag, Box::generation(mine)); });
      fence_async_global();
    }
    if (turn > 0) barrier_wait(shared + L::kFree + 8 * stage, (turn - 1) & 1);
    if (lane == 0) {
      const uint32_t full = shared + L::kFull + 8 * stage;
      barrier_expect(full, stage::kPacketBytes);
      copy_bulk(shared + stage * L::kStageBytes, ring.packet(Box::slot(c)), stage::kPacketBytes, full);
    }
    sync_warp();
  }
}

// Each packet is acknowledged as soon as its copy is complete, before K2 has looked at it.
template <class L, class Box, class Ring> KDA_DEVICE void acknowledge(const Ring& ring, uint32_t shared, int chunks, int owner) {
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    const int stage = c % L::kStages;
    barrier_wait(shared + L::kFull + 8 * stage, (c / L::kStages) & 1);
    barrier_arrive(shared + L::kFree + 8 * stage);
    add_flag(ring.flag(Box::slot(c)), Box::taken_by(owner));
  }
}

}  // namespace jax_kda
