// The mailbox protocol of csrc/kernels/mailbox.cuh, explored: every interleaving of its parties at small sizes.
//
//   test_mailbox [MUTANT]     exit status 1, and a line that says what, where some interleaving goes wrong
//   test_mailbox --mutants    the mistakes that can be planted
//   test_mailbox --threads    the same protocol by real threads (to be run under ThreadSanitizer)
//
// Parties, as in csrc/cluster.cu: a helper group for each slot (writes its packet in two halves, publishes); for each owner a fetching warp (waits for a
// free stage and for the flag, starts a copy), the copy engine (reads the slot in two halves, in any order against everything else), an acknowledging
// warp, and K2 (consumes in token order, frees the stage). A state is what all of them have done; all states that can be reached are visited.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "kernels/mailbox.cuh"

namespace {

enum Mutant { kNone, kAcknowledgedBeforeCopy, kWrongGeneration, kSecondOwnerForgotten, kReusedAt011, kLeavesEarly, kPublishedBeforeWritten, kStageNotAwaited, kMutants };
const char* const kNames[] = {"none",         "acknowledged-before-copy", "wrong-generation",         "second-owner-forgotten",
                              "reused-at-011", "leaves-early",             "published-before-written", "stage-not-awaited"};
Mutant mutant = kNone;

constexpr int kStages = 2, kMostSlots = 3, kMostOwners = 2;

struct State {
  uint8_t flag[kMostSlots];                    // generations stay small: they fit
  uint8_t halves[kMostSlots][2];               // which chunk (plus one) each half of a slot holds
  uint8_t turn[kMostSlots], step[kMostSlots];  // of a slot's group: packets published, and how far it is with the next
  struct Owner {
    uint8_t fetched, acknowledged, consumed;
    uint8_t stage[kStages][2];  // what has been copied
    uint8_t copy[kStages];      // 0 idle, 1 started, 2 one half read, 3 complete
    uint8_t slot[kStages];
  } owner[kMostOwners];
};

// One configuration.
template <int kOwners, int kSlots> struct Explorer {
  using Box = jax_kda::Mailbox<kOwners, kSlots>;
  int chunks;
  std::unordered_set<std::string> seen;
  std::string wrong;
  size_t ends = 0;

  bool writable(uint32_t flag, uint32_t generation) const {
    if (mutant == kReusedAt011 && generation > 0) return (flag >> 3) == generation - 1 && (flag & Box::kTaken) != 0;
    if (mutant == kSecondOwnerForgotten && generation > 0) return (flag & ~4u) == ((generation - 1) << 3 | 3u);
    return Box::writable(flag, generation);
  }
  bool readable(uint32_t flag, uint32_t generation) const {
    if (mutant == kWrongGeneration) return flag & Box::kReady;
    return Box::readable(flag, generation);
  }
  int chunk_of(int slot, int turn) const { return turn * kSlots + slot; }
  void fail(const std::string& what) {
    if (wrong.empty()) wrong = what;
  }

  // Calls go(next) for every step that some party can take.
  template <class Go> void steps(const State& s, Go go) {
    for (int i = 0; i < kSlots; ++i) {
      const int c = chunk_of(i, s.turn[i]);
      if (c >= chunks) continue;
      State n = s;
      const int last = mutant == kPublishedBeforeWritten ? 1 : 3;
      if (s.step[i] == 0) {
        if (!writable(s.flag[i], s.turn[i])) continue;
        n.step[i] = 1;
        if (mutant == kPublishedBeforeWritten) n.flag[i] = uint8_t(Box::published(s.turn[i]));
      } else if (s.step[i] <= 2) {
        n.halves[i][s.step[i] - 1] = uint8_t(c + 1), ++n.step[i];
        if (s.step[i] == 2 && last == 1) ++n.turn[i], n.step[i] = 0;
      } else {
        n.flag[i] = uint8_t(Box::published(s.turn[i])), ++n.turn[i], n.step[i] = 0;
      }
      go(n);
    }
    for (int o = 0; o < kOwners; ++o) {
      const State::Owner& x = s.owner[o];
      if (x.fetched < chunks) {
        const int c = x.fetched, stage = c % kStages, slot = int(Box::slot(c));
        // free when K2 has consumed, and the acknowledging warp has seen, what was there
        const bool free = c < kStages || (x.consumed > c - kStages && x.acknowledged > c - kStages) || mutant == kStageNotAwaited;
        if (free && readable(s.flag[slot], Box::generation(c))) {
          State n = s;
          n.owner[o].copy[stage] = 1, n.owner[o].slot[stage] = uint8_t(slot), ++n.owner[o].fetched;
          go(n);
        }
      }
      for (int stage = 0; stage < kStages; ++stage)
        if (x.copy[stage] == 1 || x.copy[stage] == 2) {
          State n = s;
          n.owner[o].stage[stage][x.copy[stage] - 1] = s.halves[x.slot[stage]][x.copy[stage] - 1];
          ++n.owner[o].copy[stage];
          go(n);
        }
      if (x.acknowledged < x.fetched) {
        const int c = x.acknowledged, stage = c % kStages;
        if (x.copy[stage] == 3 || (mutant == kAcknowledgedBeforeCopy && x.copy[stage] >= 1)) {
          State n = s;
          n.flag[Box::slot(c)] |= uint8_t(Box::taken_by(o)), ++n.owner[o].acknowledged;
          go(n);
        }
      }
      if (x.consumed < x.fetched && (x.copy[x.consumed % kStages] == 3 || mutant == kLeavesEarly)) {
        const int c = x.consumed, stage = c % kStages;
        if (x.copy[stage] != 3) fail("an owner leaves before its packets are there");
        if (x.stage[stage][0] != c + 1 || x.stage[stage][1] != c + 1)
          fail("owner " + std::to_string(o) + " takes chunks " + std::to_string(x.stage[stage][0] - 1) + ", " + std::to_string(x.stage[stage][1] - 1) +
               " for chunk " + std::to_string(c));
        State n = s;
        ++n.owner[o].consumed;
        go(n);
      }
    }
  }

  bool finished(const State& s) const {
    for (int o = 0; o < kOwners; ++o)
      if (s.owner[o].consumed < chunks || s.owner[o].acknowledged < chunks) return false;
    for (int i = 0; i < kSlots; ++i)
      if (chunk_of(i, s.turn[i]) < chunks) return false;
    return true;
  }

  void explore() {
    State first;
    std::memset(&first, 0, sizeof first);
    std::vector<State> open = {first};
    auto key = [](const State& s) { return std::string(reinterpret_cast<const char*>(&s), sizeof s); };
    seen.insert(key(first));
    while (!open.empty() && wrong.empty()) {
      const State s = open.back();
      open.pop_back();
      bool any = false;
      steps(s, [&](const State& n) {
        any = true;
        if (seen.insert(key(n)).second) open.push_back(n);
      });
      if (any) continue;
      if (finished(s)) ++ends;
      else fail("a deadlock, with " + std::to_string(s.owner[0].consumed) + " chunks consumed");
    }
    if (wrong.empty() && ends == 0) fail("nothing ever ends");
  }
};

size_t states = 0;
template <int kOwners, int kSlots> bool explore() {
  for (int chunks = 0; chunks <= 7; ++chunks) {
    Explorer<kOwners, kSlots> e{chunks, {}, {}};
    e.explore();
    states += e.seen.size();
    if (!e.wrong.empty()) {
      std::printf("%d owners, %d slots, %d chunks: %s\n", kOwners, kSlots, chunks, e.wrong.c_str());
      return false;
    }
  }
  return true;
}

// ---- real threads: plain stores to packets, ordered by nothing but the flags
template <int kOwners, int kSlots> bool run_threads(int chunks) {
  using Box = jax_kda::Mailbox<kOwners, kSlots>;
  constexpr int kWords = 64;
  std::vector<uint32_t> packets(kSlots * kWords);
  std::vector<std::atomic<uint32_t>> flags(kSlots);
  std::atomic<int> errors = 0;
  std::vector<std::thread> threads;
  for (int slot = 0; slot < kSlots; ++slot)
    threads.emplace_back([&, slot] {
      for (int c = slot, generation = 0; c < chunks; c += kSlots, ++generation) {
        while (!Box::writable(flags[slot].load(std::memory_order_acquire), generation)) std::this_thread::yield();
        for (int i = 0; i < kWords; ++i) packets[slot * kWords + i] = uint32_t(c * kWords + i);
        flags[slot].store(Box::published(generation), std::memory_order_release);
      }
    });
  for (int owner = 0; owner < kOwners; ++owner)
    threads.emplace_back([&, owner] {
      for (int c = 0; c < chunks; ++c) {
        const uint32_t slot = Box::slot(c), generation = Box::generation(c);
        while (!Box::readable(flags[slot].load(std::memory_order_acquire), generation)) std::this_thread::yield();
        for (int i = 0; i < kWords; ++i) errors += packets[slot * kWords + i] != uint32_t(c * kWords + i);
        flags[slot].fetch_or(Box::taken_by(owner), std::memory_order_release);
      }
    });
  for (std::thread& t : threads) t.join();
  if (errors) std::printf("threads, %d owners, %d slots: %d wrong words\n", kOwners, kSlots, errors.load());
  return errors == 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string word = argc > 1 ? argv[1] : "none";
  if (word == "--mutants") {
    for (const char* name : kNames) std::printf("%s\n", name);
    return 0;
  }
  if (word == "--threads") return !(run_threads<1, 3>(3000) && run_threads<2, 2>(3000) && run_threads<2, 10>(3000) && run_threads<1, 15>(3000));
  for (int i = 0; i < kMutants; ++i)
    if (word == kNames[i]) mutant = Mutant(i);
  if (word != kNames[mutant]) return std::fprintf(stderr, "no mutant %s\n", word.c_str()), 2;
  const bool right = explore<1, 1>() && explore<1, 2>() && explore<1, 3>() && explore<2, 1>() && explore<2, 2>() && explore<2, 3>();
  if (right) std::printf("%zu states\n", states);
  return !right;
}
