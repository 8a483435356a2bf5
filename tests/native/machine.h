// A thread block, or a cluster of them, on the host: fibers for lanes, shared memory that knows who touched it last, barriers, asynchronous copies and products.
// emulate.h puts the device's functions on top of it.
//
// Which lane runs next is drawn at random (seeded) wherever one waits; the lanes of a warp meet only in its collective instructions. Asynchronous
// work is done at a random moment that the program allows: copies to shared memory between issue and wait, warpgroup products between commit
// and wait.
//
// Shared memory keeps, for every four bytes, who wrote and who read them last, and each lane a clock of what is ordered before it (by warp and
// group barriers, by mbarriers, by waits). So an access that nothing orders is an error in every schedule, not only in the one where it shows;
// likewise a read of what nobody wrote, and a warpgroup product or a bulk copy that meets ordinary writes without a proxy fence. A lane's
// ordinary writes count as visible to its warp's ldmatrix only behind a warp barrier, as in PTX. Collective accesses of a warp keep their order.
// When nothing can run and not everything is done, that is a deadlock, and the message says who waits for what.
//
// `planted` switches on one mistake: the tests of the tests.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_stand_in.h"

namespace jax_kda {
namespace emulation {

enum class Fault {
  kNone,
  kGroupBarrierOpen,    // sync_group lets everyone through
  kWarpBarrierOpen,     // sync_warp does nothing
  kWaitOpen,            // barrier_wait returns at once
  kLostArrival,         // the fifth barrier_arrive is lost
  kLostBytes,           // the copy engine announces less than it was asked for
  kUnorderedArrival,    // barrier_arrive without release
  kCopiesNotAwaited,    // copies_wait_all does nothing
  kProductsNotAwaited,  // wgmma_wait does nothing
  kNoProxyFence,        // fence_async_shared does nothing
  kSwizzle,             // load_tiles takes the unit that belongs to the next row
  kTransposition,       // load_tiles_transposed does not transpose
  kFragmentOrder,       // the two column groups of a bf16 left operand swapped
  kTailCopied,          // copy16_or_zero copies rows that are not valid
  kTailStored,          // store_global16_if always stores
  kNanDropped,          // max_keep_nan drops NaN
  kHalfInverse,         // to_tf32 has only f16's range
  kEarlyPublish,        // (test_kernels.cpp) packets are announced before they are written
  kClusterBarrierOpen,  // sync_cluster lets everyone through
  kLostPeerArrival,     // the fifth barrier_arrive_at is lost
  kHalfToPeer,          // copy_to_cluster brings half of the bytes
  kFlagWaitOpen,        // wait_flag returns at once
  kLostFlag,            // the third add_flag is lost
};
inline constexpr const char* kFaultNames[] = {
    "none",           "group-barrier-open", "warp-barrier-open",    "wait-open",      "lost-arrival", "lost-bytes",
    "unordered-arrival", "copies-not-awaited", "products-not-awaited", "no-proxy-fence", "swizzle",      "transposition",
    "fragment-order", "tail-copied",        "tail-stored",          "nan-dropped",    "half-inverse", "early-publish",
    "cluster-barrier-open", "lost-peer-arrival", "half-to-peer", "flag-wait-open", "lost-flag"};
static_assert(std::size(kFaultNames) == size_t(Fault::kLostFlag) + 1);
inline Fault planted = Fault::kNone;

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What is ordered before a point of a lane's program: of every agent (lanes, and copies by the barrier they complete on), its accesses up to a
// time. `fenced`: those also visible to the async proxy.
struct Order {
  std::vector<uint32_t> seen, fenced;
  explicit Order(size_t agents) : seen(agents), fenced(agents) {}
  void join(const Order& other) {
    for (size_t i = 0; i < seen.size(); ++i) seen[i] = std::max(seen[i], other.seen[i]), fenced[i] = std::max(fenced[i], other.fenced[i]);
  }
};

// A lane's copy of 16 bytes.
struct Copy {
  uint32_t to;
  const void* from;  // null: zeros
  bool moved;
  int group;
};

struct Lane {
  int index;  // in the cluster
  Order order;
  bool started = false;
  const char* waits_for = "its start";
  uint32_t detail = 0;
  std::vector<Copy> copies;
  int copy_groups = 0;
  ucontext_t start;
  jmp_buf at;
  Lane(int i, size_t agents) : index(i), order(agents) { order.seen[i] = 1; }
  int warp() const { return index >> 5; }
  uint32_t now() const { return order.seen[index]; }
};

// A warp's part of an asynchronous product: 16 rows.
struct Product {
  std::array<float*, 32> d;
  std::array<const uint32_t*, 32> a;
  uint64_t b;
  uint32_t window;  // where the block's shared memory lies in the cluster's
  int columns;
  bool transposed, accumulate, done;
  int group;
};

struct Warp {
  int arrived = 0;
  const char* instruction = nullptr;
  std::array<void*, 32> operands;
  std::deque<Product> products;
  int product_groups = 0;
  uint32_t weight = 1;
};

struct GroupBarrier {
  int arrived = 0, expected = 0;
  std::vector<Lane*> waiting;
  std::unique_ptr<Order> order;
};

struct Mbarrier {
  uint32_t arrivals, pending;
  int agent;           // the copies that complete on it
  int initialiser;
  uint32_t initialised;
  Order open, done;    // of this phase's arrivals and copies, and of the completed phases'
  int64_t bytes = 0;   // still to come
  uint32_t phase = 0;
  std::vector<Lane*> waiting;
  Mbarrier(uint32_t n, int a, const Lane& by, size_t agents)
      : arrivals(n), pending(n), agent(a), initialiser(by.index), initialised(by.now()), open(agents), done(agents) {}
};

// The copy engine's copies. Of rows of 128 bytes from global memory, swizzled; or of bytes from shared memory as they stand.
struct BoxCopy {
  uint32_t to, barrier;
  std::vector<const void*> rows;  // null: zeros
  uint32_t from = 0, bytes = 0;   // instead of rows: within the cluster's shared memory,
  const void* global = nullptr;   // or outside of it
  uint32_t announced = 0;         // what the barrier hears of
  uint32_t size() const { return bytes ? bytes : uint32_t(rows.size()) * 128; }
};

constexpr uint32_t kInFlight = UINT32_MAX;
struct Access {
  int agent = -1;
  bool collective = false;
  uint32_t time = 0;  // kInFlight: asynchronous, not waited for
};
struct Cell {  // four bytes of shared memory
  Access write;
  std::vector<Access> reads;
};

class Machine {
 public:
  static constexpr uint32_t kBase = 2048;           // address of a block's shared memory in its window
  static constexpr uint32_t kWindow = 1u << 18;     // of each block of the cluster: what a matrix descriptor can address
  // Called when an mbarrier completes a phase: the block's rank, the offset of the barrier, the number of the phase.
  std::function<void(Machine&, int, uint32_t, uint32_t)> on_phase;

  Machine(int threads, uint32_t shared_bytes, uint64_t seed, int ranks = 1)
      : threads_(threads), shared_bytes_(shared_bytes), shared_((ranks - 1) * kWindow + shared_bytes, 0xff), cells_((shared_.size() + 3) / 4),
        warps_(ranks * threads / 32), agents_(ranks * (threads + kMaximumBarriers)), random_(seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull) {
    left_ = ranks * threads;
    while (stacks().size() < size_t(left_)) stacks().emplace_back(new char[kStackBytes]);
    for (int i = 0; i < left_; ++i) lanes_.emplace_back(new Lane(i, agents_)), runnable_.push_back(lanes_.back().get());
    for (Warp& w : warps_) w.weight = 1u << draw(12);  // some warps hurry, some lag
    inside_.assign(ranks, threads);
  }

  // Runs the block to its end; throws Failure.
  void run(std::function<void()> body);

  Lane& lane() { return *current_; }
  Warp& warp() { return warps_[current_->warp()]; }
  Lane& warp_lane(int i) { return *lanes_[current_->warp() * 32 + i]; }
  int threads() const { return threads_; }  // of a block
  int ranks() const { return int(inside_.size()); }
  int rank() const { return current_->index / threads_; }
  uint32_t window() const { return rank() * kWindow; }
  const uint8_t* shared(int rank, uint32_t at) const { return &shared_[rank * kWindow + at]; }
  uint32_t draw(uint32_t n) {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    return uint32_t(random_ >> 33) % n;
  }
  [[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));

  // ---- scheduling
  void wait(const char* what, uint32_t detail) {
    current_->waits_for = what, current_->detail = detail;
    leave();
  }
  void wake(Lane& lane) { runnable_.push_back(&lane); }
  void poll(const char* what, uint32_t detail) {  // lets others run
    if (++polls_ > kMaximumPolls) fail("polls for ever: %s %u", what, detail);
    wake(*current_);
    wait(what, detail);
  }

  // The lanes of a warp meet; the last to come does perform(operands of all lanes).
  template <class Operand, class Perform> void together(const char* instruction, Operand& mine, Perform perform) {
    Warp& w = warp();
    if (w.arrived && w.instruction != instruction) fail("lanes of one warp are at %s and at %s", w.instruction, instruction);
    w.instruction = instruction;
    w.operands[current_->index & 31] = &mine;
    if (++w.arrived < 32) return wait(instruction, 0);
    w.arrived = 0;
    std::array<Operand*, 32> all;
    for (int i = 0; i < 32; ++i) all[i] = static_cast<Operand*>(w.operands[i]);
    perform(all);
    for (int i = 0; i < 32; ++i)
      if (i != (current_->index & 31)) wake(warp_lane(i));
  }

  // ---- shared memory
  void read(Lane& lane, uint32_t address, void* to, uint32_t bytes, bool collective = false) {
    const uint32_t at = offset(address, bytes);
    for (uint32_t i = at / 4; i < (at + bytes) / 4; ++i) note_read(lane, i, collective, false);
    std::memcpy(to, &shared_[at], bytes);
  }
  void write(Lane& lane, uint32_t address, const void* from, uint32_t bytes, bool collective = false) {
    const uint32_t at = offset(address, bytes);
    for (uint32_t i = at / 4; i < (at + bytes) / 4; ++i) note_write(lane, i, collective) = {lane.index, collective, lane.now()};
    std::memcpy(&shared_[at], from, bytes);
  }
  void start_copy(Copy copy);
  void finish_copies(int pending);
  void start_box(BoxCopy box);

  // ---- order
  void release(Lane& lane, Order& into) {
    into.join(lane.order);
    ++lane.order.seen[lane.index];
  }
  void sync_warp();
  void group_barrier(int id, int count, bool waits);  // id -1: of the cluster
  void fence_proxy() {
    current_->order.fenced = current_->order.seen;
    ++current_->order.seen[current_->index];
  }
  void mbarrier_init(uint32_t address, uint32_t arrivals);
  void mbarrier_arrive(uint32_t address, uint32_t bytes);
  bool mbarrier_test(uint32_t address, uint32_t parity);
  void mbarrier_wait(uint32_t address, uint32_t parity);
  int arrivals = 0, peer_arrivals = 0, flags = 0;  // counted for planted faults

  // ---- asynchronous products
  void start_product(Product p);
  void commit_products();
  void finish_products(int pending);

 private:
  static constexpr size_t kStackBytes = 256 << 10;
  static constexpr int kMaximumPolls = 1 << 22, kMaximumBarriers = 64;
  static std::vector<std::unique_ptr<char[]>>& stacks() {
    static std::vector<std::unique_ptr<char[]>> all;
    return all;
  }

  uint32_t offset(uint32_t address, uint32_t bytes) {
    const uint32_t block = address / kWindow, at = address % kWindow;
    if (at < kBase || at - kBase + bytes > shared_bytes_ || block >= inside_.size()) fail("offset %d lies outside shared memory", int(at - kBase));
    if (address % bytes) fail("offset %u is not aligned to %u bytes", address - kBase, bytes);
    if (inside_[block] == 0) fail("block %u has left, and its shared memory is used", block);
    return address - kBase;
  }
  std::string name(int agent) const {
    if (agent >= int(lanes_.size())) return "a copy";
    return "warp " + std::to_string(agent >> 5) + " lane " + std::to_string(agent & 31);
  }
  static bool ordered(const Lane& lane, const Access& a) { return a.time != kInFlight && lane.order.seen[a.agent] >= a.time; }
  static bool of_warp(const Lane& lane, const Access& a) { return a.collective && a.agent >> 5 == lane.warp(); }
  void note_read(Lane& lane, uint32_t cell, bool collective, bool async);
  Access& note_write(Lane& lane, uint32_t cell, bool collective);
  void move(Copy& copy) {
    static constexpr uint8_t kZeros[16] = {};
    if (!copy.moved) std::memcpy(&shared_[copy.to - kBase], copy.from ? copy.from : kZeros, 16);
    copy.moved = true;
  }
  void finish_box(const BoxCopy& box);
  Mbarrier& mbarrier(uint32_t address) {
    auto found = mbarriers_.find(address);
    if (found == mbarriers_.end() || current_->order.seen[found->second.initialiser] < found->second.initialised)
      fail("there is no mbarrier at %u, or nothing orders its initialisation before this", address - kBase);
    return found->second;
  }
  void complete(uint32_t address, Mbarrier& b);
  template <class F> void for_elements(const Product& p, F f);
  void multiply(Product& p);

  void leave();
  Lane* pick();
  void enter(Lane* lane);
  static void entry();

  int threads_;
  uint32_t shared_bytes_;
  std::vector<int> inside_;  // of each block: lanes that have not left
  std::vector<uint8_t> shared_;
  std::vector<Cell> cells_;
  std::vector<Warp> warps_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  size_t agents_;
  std::map<int, GroupBarrier> groups_;
  std::map<uint32_t, Mbarrier> mbarriers_;
  std::vector<BoxCopy> boxes_;
  uint64_t random_;
  std::vector<Lane*> runnable_;
  Lane* current_ = nullptr;
  int left_ = 0, polls_ = 0;
  std::function<void()> body_;
  jmp_buf main_;
  std::string failure_;
};

inline Machine* machine = nullptr;

inline void Machine::run(std::function<void()> body) {
  body_ = std::move(body);
  machine = this;
  if (!_setjmp(main_)) enter(pick());
  machine = nullptr;
  if (failure_.empty())
    for (auto& [id, group] : groups_)
      if (group.arrived) failure_ = "group barrier " + std::to_string(id) + " is left with " + std::to_string(group.arrived) + " arrivals";
  if (failure_.empty() && !boxes_.empty()) failure_ = "the block ends before its copies";
  if (!failure_.empty()) throw Failure(failure_);
}

inline void Machine::fail(const char* format, ...) {
  char text[600];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  failure_ = current_ ? name(current_->index) + ": " + text : text;
  _longjmp(main_, 1);
}

// Not inlined, so that no compiler carries anything across the switch.
__attribute__((noinline)) inline void Machine::leave() {
  Lane* next = pick();
  if (next == current_ || _setjmp(current_->at)) return;
  enter(next);
}

inline void Machine::enter(Lane* lane) {
  current_ = lane;
  if (lane->started) _longjmp(lane->at, 1);
  lane->started = true;
  getcontext(&lane->start);
  lane->start.uc_stack.ss_sp = stacks()[lane->index].get();
  lane->start.uc_stack.ss_size = kStackBytes;
  lane->start.uc_link = nullptr;
  makecontext(&lane->start, &Machine::entry, 0);
  setcontext(&lane->start);
}

inline void Machine::entry() {
  Machine& m = *machine;
  m.body_();
  if (!m.current_->copies.empty() || !m.warp().products.empty()) m.fail("ends before its copies or products");
  m.current_->waits_for = nullptr;
  --m.inside_[m.rank()];
  if (--m.left_ == 0) _longjmp(m.main_, 1);
  m.enter(m.pick());
}

inline Lane* Machine::pick() {
  while (!boxes_.empty() && (runnable_.empty() || draw(64) == 0)) {
    std::swap(boxes_[draw(uint32_t(boxes_.size()))], boxes_.back());
    const BoxCopy box = std::move(boxes_.back());
    boxes_.pop_back();
    finish_box(box);
  }
  if (runnable_.empty()) {
    std::string who;
    int last = -1;
    for (auto& lane : lanes_)
      if (lane->waits_for && lane->warp() != last) {
        last = lane->warp();
        who += (who.empty() ? "warp " : "; warp ") + std::to_string(last) + " waits for " + lane->waits_for + " " + std::to_string(lane->detail);
      }
    current_ = nullptr;
    fail("deadlock: %s", who.c_str());
  }
  size_t best = draw(uint32_t(runnable_.size()));
  const size_t other = draw(uint32_t(runnable_.size()));
  if (warps_[runnable_[other]->warp()].weight > warps_[runnable_[best]->warp()].weight) best = other;
  std::swap(runnable_[best], runnable_.back());
  Lane* lane = runnable_.back();
  runnable_.pop_back();
  return lane;
}

// ---- shared memory
inline void Machine::note_read(Lane& lane, uint32_t cell, bool collective, bool async) {
  Cell& c = cells_[cell];
  if (c.write.agent < 0) fail("reads at %u what nobody wrote", cell * 4);
  if (!ordered(lane, c.write) && !(collective && of_warp(lane, c.write)))
    fail("race: reads at %u what %s writes, and nothing orders the two", cell * 4, name(c.write.agent).c_str());
  if (async && lane.order.fenced[c.write.agent] < c.write.time)
    fail("no proxy fence between the write at %u of %s and its read by a product", cell * 4, name(c.write.agent).c_str());
  std::erase_if(c.reads, [&](const Access& r) { return ordered(lane, r); });  // what is ordered behind this read is so behind those
  c.reads.push_back({lane.index, collective, async ? kInFlight : lane.now()});
}

inline Access& Machine::note_write(Lane& lane, uint32_t cell, bool collective) {
  if (mbarriers_.count((cell & ~1u) * 4 + kBase)) fail("writes at %u, over an mbarrier", cell * 4);
  Cell& c = cells_[cell];
  if (c.write.agent >= 0 && !ordered(lane, c.write) && !(collective && of_warp(lane, c.write)))
    fail("race: writes at %u as %s does, and nothing orders the two", cell * 4, name(c.write.agent).c_str());
  for (const Access& r : c.reads)  // a collective read is over when its warp goes on
    if (!ordered(lane, r) && !of_warp(lane, r))
      fail("race: writes at %u what %s reads, and nothing orders the two", cell * 4, name(r.agent).c_str());
  c.reads.clear();
  return c.write;
}

inline void Machine::start_copy(Copy copy) {
  const uint32_t at = offset(copy.to, 16);
  for (uint32_t i = at / 4; i < at / 4 + 4; ++i) note_write(*current_, i, false) = {current_->index, false, kInFlight};
  current_->copies.push_back(copy);
  if (draw(2)) move(current_->copies.back());
}

inline void Machine::finish_copies(int pending) {
  std::vector<Copy> left;
  for (Copy& copy : current_->copies) {
    if (copy.group >= current_->copy_groups - pending) {
      left.push_back(copy);
      continue;
    }
    move(copy);
    for (uint32_t i = 0; i < 4; ++i) {
      Access& w = cells_[(copy.to - kBase) / 4 + i].write;
      if (w.agent == current_->index && w.time == kInFlight) w.time = current_->now();
    }
  }
  current_->copies = left;
}

inline void Machine::start_box(BoxCopy box) {
  const uint32_t at = offset(box.to, 16), end = at + box.size();
  if (box.to % (box.bytes ? 16 : 1024)) fail("a box at %u", at);
  offset(box.to + (box.size() - 1) / 16 * 16, 16);
  const Mbarrier& b = mbarrier(box.barrier);
  if (current_->order.fenced[b.initialiser] < b.initialised)
    fail("no proxy fence between the initialisation of mbarrier %u and a copy", box.barrier - kBase);
  const int agent = b.agent;
  for (uint32_t i = 0; i < box.bytes / 4 && !box.global; ++i) {
    const uint32_t cell = offset(box.from, 16) / 4 + i;
    note_read(*current_, cell, false, true);
    cells_[cell].reads.back() = {agent, false, kInFlight};
  }
  for (uint32_t i = at / 4; i < end / 4; ++i) {
    const Access& last = cells_[i].write;
    if (last.agent >= 0 && ordered(*current_, last) && current_->order.fenced[last.agent] < last.time)
      fail("no proxy fence between the write at %u of %s and the copy over it", i * 4, name(last.agent).c_str());
    note_write(*current_, i, false) = {agent, false, kInFlight};
  }
  boxes_.push_back(std::move(box));
}

inline void Machine::finish_box(const BoxCopy& box) {
  Mbarrier& b = mbarriers_.at(box.barrier);
  const uint32_t time = std::max(b.open.seen[b.agent], b.done.seen[b.agent]) + 1;
  b.open.seen[b.agent] = b.open.fenced[b.agent] = time;
  if (box.bytes) {
    const uint32_t to = box.to - kBase, from = box.global ? to : box.from - kBase;
    std::memcpy(&shared_[to], box.global ? box.global : &shared_[from], box.bytes);
    for (uint32_t i = 0; i < box.bytes / 4; ++i) {
      if (cells_[to / 4 + i].write.agent == b.agent && cells_[to / 4 + i].write.time == kInFlight) cells_[to / 4 + i].write.time = time;
      for (Access& r : cells_[from / 4 + i].reads)
        if (!box.global && r.agent == b.agent && r.time == kInFlight) r.time = time;
    }
  }
  for (uint32_t row = 0; row < box.rows.size(); ++row) {
    const uint32_t at = box.to - kBase + row * 128;
    for (uint32_t unit = 0; unit < 8; ++unit) {
      uint8_t* to = &shared_[at + ((unit ^ (row & 7)) << 4)];
      if (box.rows[row]) std::memcpy(to, static_cast<const char*>(box.rows[row]) + unit * 16, 16);
      else std::memset(to, 0, 16);
    }
    for (uint32_t i = at / 4; i < at / 4 + 32; ++i)
      if (cells_[i].write.agent == b.agent && cells_[i].write.time == kInFlight) cells_[i].write.time = time;
  }
  b.bytes -= planted == Fault::kLostBytes ? 16 : box.announced ? int64_t(box.announced) : int64_t(box.size());
  complete(box.barrier, b);
}

// ---- order
inline void Machine::sync_warp() {
  int none = 0;
  together("__syncwarp", none, [&](auto&) {
    Order order(agents_);
    for (int i = 0; i < 32; ++i) release(warp_lane(i), order);
    for (int i = 0; i < 32; ++i) warp_lane(i).order.join(order);
  });
}

inline void Machine::group_barrier(int id, int count, bool waits) {
  if (id < -1 || id > 15 || count % 32 || count <= 0 || count > (id < 0 ? int(lanes_.size()) : threads())) fail("group barrier %d of %d threads", id, count);
  GroupBarrier& b = groups_[id < 0 ? id : rank() * 16 + id];
  if (b.arrived && b.expected != count) fail("group barrier %d of %d and of %d threads", id, b.expected, count);
  if (!b.order) b.order.reset(new Order(agents_));
  b.expected = count;
  release(*current_, *b.order);
  if (waits) b.waiting.push_back(current_);
  if (++b.arrived < count) {
    if (waits) wait("group barrier", uint32_t(id));
    return;
  }
  for (Lane* x : b.waiting) {
    x->order.join(*b.order);
    if (x != current_) wake(*x);
  }
  b.arrived = 0;
  b.waiting.clear();
  b.order.reset();
}

inline void Machine::mbarrier_init(uint32_t address, uint32_t arrivals) {
  offset(address, 8);
  if (mbarriers_.size() == size_t(kMaximumBarriers) * ranks() || arrivals == 0) fail("mbarrier %u of %u arrivals", uint32_t(mbarriers_.size()), arrivals);
  const int agent = int(lanes_.size() + mbarriers_.size());
  mbarriers_.insert_or_assign(address, Mbarrier(arrivals, agent, *current_, agents_));
}

inline void Machine::mbarrier_arrive(uint32_t address, uint32_t bytes) {
  offset(address, 8);
  Mbarrier& b = mbarrier(address);
  if (planted != Fault::kUnorderedArrival) release(*current_, b.open);
  b.bytes += bytes;
  if (b.pending-- == 0) fail("one arrival too many at mbarrier %u", address - kBase);
  complete(address, b);
}

inline void Machine::complete(uint32_t address, Mbarrier& b) {
  if (b.pending || b.bytes) return;
  if (on_phase) on_phase(*this, int(address / kWindow), address % kWindow - kBase, b.phase);
  b.pending = b.arrivals;
  ++b.phase;
  b.done.join(b.open);
  b.open = Order(agents_);
  for (Lane* x : b.waiting) x->order.join(b.done), wake(*x);
  b.waiting.clear();
}

inline bool Machine::mbarrier_test(uint32_t address, uint32_t parity) {
  Mbarrier& b = mbarrier(address);
  if ((b.phase & 1) == parity) return false;
  current_->order.join(b.done);
  return true;
}

inline void Machine::mbarrier_wait(uint32_t address, uint32_t parity) {
  if (mbarrier_test(address, parity)) return;
  mbarrier(address).waiting.push_back(current_);
  wait(parity ? "parity 1 of mbarrier" : "parity 0 of mbarrier", address - kBase);
}

// ---- asynchronous products
// f(n, k, address) for every element of the right operand (16 of k, p.columns of n).
template <class F> void Machine::for_elements(const Product& p, F f) {
  const uint32_t start = p.window + (uint32_t(p.b & 0x3fff) << 4), leading = uint32_t(p.b >> 16 & 0x3fff) << 4, stride = uint32_t(p.b >> 32 & 0x3fff) << 4;
  const uint32_t swizzle = uint32_t(p.b >> 62);  // 1: 128 bytes, 2: 64, 3: 32
  if (swizzle == 0 || (p.transposed && swizzle != 1)) fail("a descriptor that is not emulated");
  const uint32_t mask = (16u >> swizzle) - 1, row = 256u >> swizzle;
  for (uint32_t k = 0; k < 16; ++k)
    for (uint32_t n = 0; n < uint32_t(p.columns); ++n) {
      uint32_t at = start + (p.transposed ? n / 64 * leading + n % 64 * 2 + k / 8 * stride + k % 8 * 128 : n / 8 * stride + n % 8 * row + k * 2);
      at ^= (at >> 7 & mask) << 4;
      f(n, k, at);
    }
}

inline void Machine::start_product(Product p) {
  Lane& reader = warp_lane(0);
  for_elements(p, [&](uint32_t, uint32_t, uint32_t at) {
    if (at % 4 == 0) note_read(reader, offset(at, 4) / 4, false, true);
  });
  p.group = warp().product_groups;
  warp().products.push_back(p);
}

inline void Machine::commit_products() {
  ++warp().product_groups;
  if (draw(2))
    for (Product& p : warp().products) multiply(p);
}

inline void Machine::finish_products(int pending) {
  Lane& reader = warp_lane(0);
  auto& products = warp().products;
  for (; !products.empty() && products.front().group < warp().product_groups - pending; products.pop_front()) {
    multiply(products.front());
    for_elements(products.front(), [&](uint32_t, uint32_t, uint32_t at) {
      if (at % 4) return;
      auto& reads = cells_[(at - kBase) / 4].reads;
      auto mine = std::find_if(reads.begin(), reads.end(), [&](const Access& r) { return r.agent == reader.index && r.time == kInFlight; });
      if (mine != reads.end()) mine->time = reader.now();
    });
  }
}

inline void Machine::multiply(Product& p) {
  if (p.done) return;
  p.done = true;
  float a[16][16], b[16][64];
  for_elements(p, [&](uint32_t n, uint32_t k, uint32_t at) {
    uint16_t x;
    std::memcpy(&x, &shared_[at - kBase], 2);
    b[k][n] = bf16_to_float(x);
  });
  for (int l = 0; l < 32; ++l)
    for (int r = 0; r < 4; ++r)
      for (int e = 0; e < 2; ++e) a[(l >> 2) + 8 * (r & 1)][2 * (l & 3) + e + 8 * (r >> 1)] = bf16_to_float(uint16_t(p.a[l][r] >> (16 * e)));
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < p.columns / 2; ++i) {
      const int row = (l >> 2) + 8 * (i >> 1 & 1), n = (i >> 2) * 8 + 2 * (l & 3) + (i & 1);
      float s = p.accumulate ? p.d[l][i] : 0.f;
      for (int k = 0; k < 16; ++k) s += a[row][k] * b[k][n];
      p.d[l][i] = s;
    }
}

}  // namespace emulation
}  // namespace jax_kda
