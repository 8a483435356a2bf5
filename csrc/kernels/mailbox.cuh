// The mailbox between helpers, which prepare packets, and owners, which run the recurrence on them: a ring of slots in global memory, one flag word a
// slot. One file for the device and for the host: tests/native/test_mailbox.cpp explores every interleaving of these functions.
//
//   slot        c mod slots, used for the c div slots-th time (its generation). A helper group owns its slots for ever: nobody else writes there
//   flag        generation << 3 | bits: 001 the packet is there; owner 0 adds 010, owner 1 adds 100 when it has taken its copy
//               zero before anyone looks: generation 0, nothing there
//   helper      generation 0 waits for nothing; else until the slot's last packet has been taken by every owner -> packet -> publish
//   owner       in token order: until the packet is there -> copy to shared memory -> acknowledge, independently of the other owner
//
// Packets may be published in any order. A slot can be written only when all owners have acknowledged, so a flag never skips a generation, and an
// owner that is late sees the generation it waits for.
//
// Why a packet that is read is the one that was written (GPU scope throughout):
//   1. The warps of a group write the packet (ordinary stores), each arrives at the group's barrier; the finishing warp waits there, writes the rest,
//      and synchronises its lanes: all stores happen before its lane 0's next instruction.
//   2. That lane publishes with release: a thread that reads the flag with acquire has all of those stores behind it.
//   3. The owner's thread reads the flag with acquire, then fences the proxies: its bulk copy, which another engine performs, reads what the ordinary
//      stores have written.
//   4. The bulk copy completes on an mbarrier. Who has seen it complete knows that all reads of the slot are over, and only then adds the owner's bit,
//      with release.
//   5. The helper's warps read all bits with acquire before they write the slot anew: the reads of 4 are behind them.
// The flags are zeroed by one CTA of the cluster, and a cluster barrier stands between that and the first look.
#pragma once

#include <cstdint>

#include "mma.cuh"

namespace jax_kda {

template <int kOwnersOf, int kSlotsOf> struct Mailbox {
  static constexpr int kOwners = kOwnersOf, kSlots = kSlotsOf;
  static constexpr uint32_t kReady = 1, kTaken = ((1u << kOwners) - 1) << 1;

  static KDA_DEVICE uint32_t slot(uint32_t chunk) { return chunk % kSlots; }
  static KDA_DEVICE uint32_t generation(uint32_t chunk) { return chunk / kSlots; }

  static KDA_DEVICE uint32_t published(uint32_t generation) { return generation << 3 | kReady; }
  static KDA_DEVICE uint32_t taken_by(uint32_t owner) { return 2u << owner; }

  // May the packet of this generation be written?
  static KDA_DEVICE bool writable(uint32_t flag, uint32_t generation) { return generation == 0 || flag == ((generation - 1) << 3 | kReady | kTaken); }
  // Is it there? (What owners have added does not matter.)
  static KDA_DEVICE bool readable(uint32_t flag, uint32_t generation) { return (flag & ~kTaken) == published(generation); }
};

}  // namespace jax_kda
