// The baseline kernel on the emulated block: calls with inputs of every gate regime, judged in double precision. Part of test_kernels.cpp.
#pragma once

// Memory between two pages that nobody may touch; it ends (to 16 bytes) where the second one begins.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : size_((bytes + 15) / 16 * 16) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    mapped_ = (size_ + page - 1) / page * page + 2 * page;
    start_ = static_cast<char*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    check(start_ != MAP_FAILED, "no memory");
    mprotect(start_, page, PROT_NONE), mprotect(start_ + mapped_ - page, page, PROT_NONE);
    data_ = start_ + mapped_ - page - size_;
    std::memset(data_, 0xff, size_);
  }
  Guarded(const Guarded&) = delete;
  Guarded(const Vector& x, bool f32) : Guarded(x.size() * (f32 ? 4 : 2)) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (f32) reinterpret_cast<float*>(data_)[i] = float(x[i]);
      else reinterpret_cast<uint16_t*>(data_)[i] = float_to_bf16(float(x[i]));
    }
  }
  ~Guarded() { munmap(start_, mapped_); }
  char* data() const { return data_; }

 private:
  char *start_, *data_;
  size_t size_, mapped_;
};

struct Case {
  Case(const char* name) : gates(name) {}
  std::string gates;
  int B = 1, T = 70, H = 1, HV = 1;
  std::vector<int> offsets;  // of one row, or of all
  bool g_f32 = false, beta_f32 = false, l2norm = true, has_state = true, v_first = false, wants_state = true;
  DType state_in = DType::kF32, state_out = DType::kF32;
  BetaMode beta = BetaMode::kSigmoid;
  bool warp_engine = false, dt_bias = true, tensor_maps = true;
  enum { kM128, kM64, kC4M128, kC4M64, kC8M128, kPoolM128, kPoolM64 } kernel = kM128;
  int ranks() const { return std::array{1, 2, 4, 4, 8, 1, 1}[kernel]; }  // of a cluster
  bool pooled() const { return kernel == kPoolM128 || kernel == kPoolM64; }
  int owners() const { return kernel == kM64 || kernel == kC4M64 ? 2 : 1; }
  int gate_rows = 1;
  int segment_chunks = 0;  // not 0: the segmented route, with segments of so many chunks
  int checkpoint_every = 0;
  int sm_count = 132;
};

class Call {
 public:
  explicit Call(const Case& a_case) : c(a_case) {
    const size_t rows = size_t(c.B) * c.T;
    fill(q, rows * c.H * D, [&] { return bf16(normal()); });
    fill(k, rows * c.H * D, [&] { return bf16(normal() * (c.l2norm ? 1. : 0.1)); });
    fill(v, rows * c.HV * D, [&] { return bf16(normal()); });
    fill(beta, rows * c.HV, [&] { return rounded(c.beta == BetaMode::kPlain ? uniform() : normal(), c.beta_f32); });
    fill(state, size_t(sequences()) * c.HV * D * D, [&] { return rounded(0.5 * normal(), c.state_in == DType::kF32); });
    o.resize(v.size());
    fill(a_log, size_t(c.gate_rows) * c.HV, [] { return 0.; });
    fill(dt, size_t(c.gate_rows) * c.HV * D, [] { return 0.; });
    make_gates();
  }

  int row_sequences() const { return c.offsets.empty() ? 1 : c.offsets.size() > size_t(c.B) ? int(c.offsets.size()) / c.B - 1 : 0; }
  int sequences() const { return c.B * row_sequences(); }
  bool bounded() const { return mode == GateMode::kSafe && lower_bound >= -5.f; }
  size_t offset_of(int s) const { return size_t(s) + s / row_sequences(); }
  int begin(int s) const { return c.offsets.empty() ? 0 : c.offsets[offset_of(s)]; }
  int tokens(int s) const { return c.offsets.empty() ? c.T : c.offsets[offset_of(s) + 1] - begin(s); }
  size_t row(int s) const { return size_t(s / row_sequences()) * c.T + begin(s); }
  // Of checkpoints: those of a batch row, of a sequence, and the sequence's first among all.
  int places() const { return c.checkpoint_every ? c.T / c.checkpoint_every : 0; }
  int own_places(int s) const { return tokens(s) / c.checkpoint_every; }
  int first_place(int s) const {
    int place = s / row_sequences() * places();
    for (int i = s / row_sequences() * row_sequences(); i < s; ++i) place += own_places(i);
    return place;
  }

  bool in_one_block() const { return !c.segment_chunks && !c.pooled(); }  // or cluster: all packets of a task

  void set_kernel(decltype(Case::kernel) kernel) { c.kernel = kernel; }
  void set_sm_count(int count) { c.sm_count = count; }

  // Every row that belongs to no sequence becomes NaN.
  void poison_outside() {
    std::vector<bool> inside(size_t(c.B) * c.T);
    for (int s = 0; s < sequences(); ++s)
      for (int t = 0; t < tokens(s); ++t) inside[row(s) + t] = true;
    for (size_t r = 0; r < inside.size(); ++r)
      if (!inside[r])
        for (auto [x, width] : {std::pair{&q, c.H * D}, {&k, c.H * D}, {&v, c.HV * D}, {&g, c.HV * D}, {&beta, c.HV}})
          std::fill_n(x->begin() + r * width, width, NAN);
  }

  void run() {
    const bool f32 = c.state_out == DType::kF32;
    const Guarded on_q(q, false), on_k(k, false), on_v(v, false), on_g(g, c.g_f32), on_beta(beta, c.beta_f32), on_a_log(a_log, true),
        on_dt(dt, true), on_state(state, c.state_in == DType::kF32), on_offsets(c.offsets.size() * 4), on_o(o.size() * 2),
        on_final(state.size() * (f32 ? 4 : 2)), on_checkpoints(size_t(c.B) * places() * c.HV * D * D * (f32 ? 4 : 2));
    std::copy(c.offsets.begin(), c.offsets.end(), reinterpret_cast<int32_t*>(on_offsets.data()));
    PrefillArgs a{};
    a.q = on_q.data(), a.k = on_k.data(), a.v = on_v.data(), a.g = on_g.data(), a.beta = on_beta.data();
    if (mode != GateMode::kLog) a.a_log = reinterpret_cast<float*>(on_a_log.data());
    if (mode != GateMode::kLog && c.dt_bias) a.dt_bias = reinterpret_cast<float*>(on_dt.data());
    a.initial_state = c.has_state ? on_state.data() : nullptr;
    a.offsets = c.offsets.empty() ? nullptr : reinterpret_cast<int32_t*>(on_offsets.data());
    a.o = on_o.data(), a.final_state = c.wants_state ? on_final.data() : nullptr;
    a.checkpoints = places() ? on_checkpoints.data() : nullptr, a.checkpoint_every = c.checkpoint_every;
    a.B = c.B, a.T = c.T, a.N = row_sequences(), a.H = c.H, a.HV = c.HV, a.gate_rows = c.gate_rows;
    a.g_dtype = c.g_f32 ? DType::kF32 : DType::kBF16, a.beta_dtype = c.beta_f32 ? DType::kF32 : DType::kBF16;
    a.state_in_dtype = c.state_in, a.state_out_dtype = c.state_out;
    a.gate = mode, a.beta_mode = c.beta, a.l2norm = c.l2norm, a.state_v_first = c.v_first, a.scale = float(scale()), a.lower_bound = lower_bound;
    packets.clear();
    emulation::on_phase = nullptr;
    if (c.kernel == Case::kM128 && !c.segment_chunks) observe_gates<M128>();
    if (c.kernel == Case::kM64) observe_gates<M64>();
    const bool falls_back = c.ranks() > 2 && most_clusters == 0;
    if (c.kernel == Case::kC4M128 && !falls_back) observe_gates<OfCluster<C4M128>::Layout>();
    if (c.kernel == Case::kC4M64 && !falls_back) observe_gates<OfCluster<C4M64>::Layout>();
    if (c.kernel == Case::kC8M128 && !falls_back) observe_gates<OfCluster<C8M128>::Layout>();
    emulation::ranks = falls_back ? 1 : c.ranks();
    stand_in_sm_count = c.sm_count, a.segment_chunks = c.segment_chunks;
    a.workspace_bytes = c.segment_chunks            ? segmented_workspace_bytes(a)
                        : c.kernel == Case::kC4M128 ? c4_m128_d15_workspace(a)
                        : c.kernel == Case::kC4M64  ? c4_m64_d10_workspace(a)
                        : c.kernel == Case::kC8M128 ? c8_m128_d35_workspace(a)
                        : c.kernel == Case::kPoolM128 ? pool_m128_workspace(a)
                        : c.kernel == Case::kPoolM64 ? pool_m64_workspace(a)
                                                    : 0;
    const Guarded on_workspace(size_t(a.workspace_bytes));
    a.workspace = on_workspace.data();
    emulation::launch_seed = generator();
    tensor_maps_refused = !c.tensor_maps;
    auto* run = c.segment_chunks            ? (c.warp_engine ? segmented_warp_engine : segmented)
                : c.kernel == Case::kM64    ? baseline_m64
                : c.kernel == Case::kC4M128 ? c4_m128_d15
                : c.kernel == Case::kC4M64  ? c4_m64_d10
                : c.kernel == Case::kC8M128 ? c8_m128_d35
                : c.kernel == Case::kPoolM128 ? pool_m128
                : c.kernel == Case::kPoolM64 ? pool_m64
                : c.warp_engine             ? baseline_m128_warp_engine
                                            : baseline_m128;
    const cudaError_t e = run(a, nullptr);
    check(e == cudaSuccess, what() + ": error " + std::to_string(e));
    o = decode(on_o, o.size(), false);
    final_state = decode(on_final, state.size(), f32);
    checkpoints = decode(on_checkpoints, size_t(c.B) * places() * c.HV * D * D, f32);
    ++cases;
  }

  size_t state_at(int s, int h, int i) const {  // element i of [K, V]
    return (size_t(s) * c.HV + h) * D * D + (c.v_first ? i % D * D + i / D : i);
  }

  void run_and_check() {
    run();
    Vector want_o(o.size());
    const double bar = c.gates == "collinear" ? 3e-2 : c.beta == BetaMode::kSigmoidDoubled ? 8e-3 : 6e-3;
    for (int s = 0; s < sequences(); ++s)
      for (int h = 0; h < c.HV; ++h) {
        const Activations x = activate(s, h);
        Vector S(D * D);
        for (int i = 0; i < D * D; ++i) S[i] = c.has_state ? state[state_at(s, h, i)] : 0.;
        const int block = tokens(s) && in_one_block() ? find_block(x) : -1;
        for (int chunk = 0; chunk * C < tokens(s) && in_one_block(); ++chunk)
          for (int rank = 0; rank < c.owners(); ++rank) check_packet(s, block / c.ranks() * c.ranks() + rank, chunk, x);
        recur_exactly(s, h, x, S, want_o, [&](int number) {
          Vector got(D * D);
          for (int i = 0; i < D * D; ++i) got[i] = checkpoints[state_at(first_place(s) + number, h, i)];
          check_close(what() + ": checkpoint " + std::to_string(number), got.data(), S.data(), D * D, bar);
        });
        if (!c.wants_state) continue;
        Vector got(D * D);
        for (int i = 0; i < D * D; ++i) got[i] = final_state[state_at(s, h, i)];
        check_close(what() + ": final state", got.data(), S.data(), D * D, bar);
        for (int i = 0; i < D * D && tokens(s) == 0; ++i)
          check(got[i] == rounded(S[i], c.state_out == DType::kF32), what() + ": an empty sequence changes its state");
      }
    check_close(what() + ": o", o.data(), want_o.data(), o.size(), bar);
    for (int b = 0; b < c.B && places() > 0; ++b) {
      const int last = (b + 1) * row_sequences() - 1;
      for (size_t i = size_t(first_place(last) + own_places(last)) * c.HV * D * D; i < size_t(b + 1) * places() * c.HV * D * D; ++i)
        check(checkpoints[i] == 0., what() + ": a place without a checkpoint is not zero");
    }
    for (size_t i = 0; i < o.size(); ++i) check(want_o[i] != 0. || o[i] == 0., what() + ": o outside every sequence is not zero");
  }

  std::string what() const {
    return c.gates + (bounded() ? ", bounded" : ", unbounded") + (c.g_f32 ? ", f32 gates" : "") + (c.l2norm ? "" : ", no norm") +
           (c.segment_chunks ? ", segments of " + std::to_string(c.segment_chunks) : "") + (c.warp_engine ? ", warp engine" : "") +
           std::array{"", ", pair", ", C4 M128", ", C4 M64", ", C8", ", pool M128", ", pool M64"}[c.kernel] + (c.tensor_maps ? "" : ", no tensor maps") + ", T = " + std::to_string(c.T) +
           (c.offsets.empty() ? "" : ", packed") + (c.checkpoint_every ? ", checkpoints every " + std::to_string(c.checkpoint_every) : "");
  }

  Case c;
  GateMode mode = GateMode::kSafe;
  float lower_bound = -5.f;
  Vector q, k, v, g, beta, state, a_log, dt, o, final_state, checkpoints;
  std::map<std::pair<int, int>, Packet> packets;  // of (block, chunk)

 private:
  struct Activations {
    Vector k, q, log_decay, beta;  // [tokens, padded with zeros to whole chunks]
  };

  static double rounded(double x, bool f32) { return f32 ? double(float(x)) : bf16(x); }
  static double scale() { return double(float(1. / std::sqrt(double(D)))); }
  template <class F> static void fill(Vector& x, size_t n, F f) {
    x.resize(n);
    for (double& y : x) y = f();
  }
  static Vector decode(const Guarded& from, size_t n, bool f32) {
    Vector x(n);
    for (size_t i = 0; i < n; ++i)
      x[i] = f32 ? reinterpret_cast<const float*>(from.data())[i] : bf16_to_float(reinterpret_cast<const uint16_t*>(from.data())[i]);
    return x;
  }

  // The regimes of the contract, and a few more. `long` and `mixed` give a wanted decay through the safe gate's raw input.
  void make_gates() {
    const std::string& name = c.gates;
    auto logit = [](double p) { return std::log(p) - std::log1p(-p); };
    if (name == "log" || name == "unbounded" || name == "none, log") mode = GateMode::kLog;
    if (name == "softplus" || name == "steep") mode = GateMode::kSoftplus;
    if (name == "wide") lower_bound = -12.f;
    if (name == "production" || name == "mixed" || name == "softplus" || name == "wide") {
      for (double& x : a_log) x = float(uniform(name == "softplus" ? -1. : 0., name == "softplus" ? 2. : 1.));
      for (double& x : dt) x = c.dt_bias ? float(uniform()) : 0.;
    }
    if (name == "steep")
      for (double& x : a_log) x = float(std::log(201.));
    if (name == "slow" || name == "collinear")
      for (double& x : dt) x = c.dt_bias ? float(std::log(std::expm1(log_uniform(1e-3, 1e-1)))) : 0.;
    Vector constant(size_t(c.HV) * D);
    for (double& x : constant) x = log_uniform(1e-5, 1e-1);
    g.resize(size_t(c.B) * c.T * c.HV * D);
    for (size_t i = 0; i < g.size(); ++i) {
      const size_t at = i % (size_t(c.HV) * D);
      double x = normal();
      if (name == "bound") x = 20.;
      else if (name == "none") x = -1e4;
      else if (name == "long") x = logit(constant[at] / 5.);
      else if (name == "mixed" && at % 2) x = logit(constant[at] / 5.) / std::exp(a_log[at / D]) - dt[at];
      else if (name == "log") x = -log_uniform(1e-3, 1.);
      else if (name == "none, log") x = 0.;
      else if (name == "unbounded") x = below(2) ? 0. : -log_uniform(1e-3, 2661.);
      else if (name == "steep") x = 4. * normal();
      g[i] = rounded(x, c.g_f32);
    }
    if (name == "collinear") {
      Vector base(size_t(c.H) * D);
      for (double& x : base) x = normal();
      for (size_t i = 0; i < k.size(); ++i) k[i] = bf16(base[i % base.size()] + 0.05 * normal());
      for (double& x : beta) x = rounded(uniform(3., 8.), c.beta_f32);
    }
  }

  Activations activate(int s, int h) const {
    const int n = tokens(s), padded = (n + C - 1) / C * C;
    Activations x = {Vector(size_t(padded) * D), Vector(size_t(padded) * D), Vector(size_t(padded) * D), Vector(padded)};
    const size_t gate_head = size_t(c.gate_rows > 1 ? s / row_sequences() : 0) * c.HV + h;
    for (int t = 0; t < n; ++t) {
      const size_t key = ((row(s) + t) * c.H + h / (c.HV / c.H)) * D, value = (row(s) + t) * c.HV + h;
      const double rk = c.l2norm ? 1. / std::sqrt(std::pow(norm(&k[key], D), 2) + 1e-6) : 1.;
      const double rq = c.l2norm ? 1. / std::sqrt(std::pow(norm(&q[key], D), 2) + 1e-6) : 1.;
      for (int d = 0; d < D; ++d) {
        const double raw = g[value * D + d], z = raw + dt[gate_head * D + d], a = std::exp(a_log[gate_head]);
        x.k[t * D + d] = k[key + d] * rk, x.q[t * D + d] = q[key + d] * rq * scale();
        x.log_decay[t * D + d] = mode == GateMode::kLog    ? raw
                                 : mode == GateMode::kSafe ? double(lower_bound) / (1. + std::exp(-a * z))
                                                           : -a * (std::max(z, 0.) + std::log1p(std::exp(-std::fabs(z))));
      }
      x.beta[t] = c.beta == BetaMode::kPlain ? beta[value] : (c.beta == BetaMode::kSigmoidDoubled ? 2. : 1.) / (1. + std::exp(-beta[value]));
    }
    return x;
  }

  // at_checkpoint(number) is called where S is the state that the sequence's checkpoint of that number holds.
  template <class F> void recur_exactly(int s, int h, const Activations& x, Vector& S, Vector& want_o, F at_checkpoint) const {
    Vector u(D);
    for (int t = 0; t < tokens(s); ++t) {
      const size_t at = ((row(s) + t) * c.HV + h) * D;
      std::fill(u.begin(), u.end(), 0.);
      for (int a = 0; a < D; ++a) {
        const double decay = std::exp(x.log_decay[t * D + a]), key = x.k[t * D + a];
        for (int b = 0; b < D; ++b) u[b] += (S[a * D + b] *= decay) * key;
      }
      for (int b = 0; b < D; ++b) u[b] = x.beta[t] * (v[at + b] - u[b]);
      for (int a = 0; a < D; ++a)
        for (int b = 0; b < D; ++b) want_o[at + b] += x.q[t * D + a] * (S[a * D + b] += x.k[t * D + a] * u[b]);
      if (c.checkpoint_every && (t + 1) % c.checkpoint_every == 0) at_checkpoint((t + 1) / c.checkpoint_every - 1);
    }
  }

  template <class L> void observe() {
    emulation::on_phase = [this](emulation::Machine& m, int rank, uint32_t at, uint32_t phase) {
      const uint32_t slot = (at - L::kFull) / 8;
      if (at >= L::kFull && slot < L::kStages)
        packets[{emulation::first_block + rank, phase * L::kStages + slot}] = read_packet(m.shared(rank, slot * L::kStageBytes));
    };
  }
  template <bool kBounded, bool kF32> using M128 = Baseline<1, kBounded, kF32>;
  template <bool kBounded, bool kF32> using M64 = Baseline<2, kBounded, kF32>;
  template <class R> struct OfCluster {
    template <bool kBounded, bool kF32> using Layout = Cluster<R, kBounded, kF32>;
  };
  template <template <bool, bool> class L> void observe_gates() {
    if (bounded()) c.g_f32 ? observe<L<true, true>>() : observe<L<true, false>>();
    else c.g_f32 ? observe<L<false, true>>() : observe<L<false, false>>();
  }

  // The unbounded scheme has a floor for the decay of one token: its packets are judged with it, o and the final state without.
  Packet exact_packet(const Activations& x, int chunk) const {
    const size_t from = size_t(chunk) * C;
    Vector log_decay(&x.log_decay[from * D], &x.log_decay[from * D] + C * D);
    for (double& y : log_decay) y = bounded() ? y : std::max(y, -double(kFloorNats));
    return make_packet(&x.k[from * D], &x.q[from * D], log_decay.data(), &x.beta[from]);
  }

  // The block that worked on these tokens: which one is the kernel's choice.
  int find_block(const Activations& x) const {
    const Packet exact = exact_packet(x, 0);
    double best = INFINITY;
    int block = -1;
    for (const auto& [at, p] : packets)
      if (const double e = relative(p.kd.data(), exact.kd.data(), C * D); at.second == 0 && (e < best || block < 0)) best = e, block = at.first;
    return block;
  }

  void check_packet(int s, int block, int chunk, const Activations& x) const {
    const auto found = packets.find({block, chunk});
    check(found != packets.end(), what() + ": no packet of chunk " + std::to_string(chunk));
    const Packet &p = found->second, exact = exact_packet(x, chunk);
    const int left = tokens(s) - chunk * C;
    const std::string in = what() + ": chunk " + std::to_string(chunk) + ": ";
    auto rows = [&](const char* name, const Vector& got, const Vector& want, int width, double bar, double floor) {
      for (int i = 0; i < C; ++i) {
        check_close(in + name + ", row " + std::to_string(i), &got[i * width], &want[i * width], width, bar, floor * norm(want.data(), want.size()));
        for (int j = 0; j < width && i >= left; ++j)
          check(got[i * width + j] == (&got == &p.a && i == j), in + name + " is not empty behind the tail");
      }
    };
    rows("Kd", p.kd, exact.kd, D, 4e-3, 1e-6), rows("Qd", p.qd, exact.qd, D, 4e-3, 1e-6), rows("Kr", p.kr, exact.kr, D, 4e-3, 1e-6);
    rows("M", p.m, exact.m, C, 1e-2, 0.3), rows("A", p.a, exact.a, C, c.gates == "collinear" ? 2e-2 : 1e-2, 0.3);
    for (int i = 0; i < C; ++i) {
      check(std::fabs(p.beta[i] - exact.beta[i]) <= 2e-6 * std::fabs(exact.beta[i]), in + "beta of token " + std::to_string(i));
      check(p.a[i * C + i] == 1., in + "the diagonal of A is not one");
      for (int j = i + 1; j < C; ++j) check(p.a[i * C + j] == 0. && p.m[i * C + j] == 0., in + "A or M is not zero above the diagonal");
    }
    for (int d = 0; d < D; ++d)
      check(std::fabs(p.decay[d] - exact.decay[d]) <= 3e-5 * exact.decay[d] + 1e-8,
            in + "decay of channel " + std::to_string(d) + " is " + std::to_string(p.decay[d]) + ", not " + std::to_string(exact.decay[d]));
  }
};

void test_packets() {
  int i = 0;
  for (const char* gates : {"production", "slow", "long", "mixed", "bound", "none", "collinear",  // bounded
                            "unbounded", "log", "softplus", "steep", "wide", "none, log"})
    for (bool f32 : {false, true}) {
      Case c(gates);
      c.T = 97 + 7 * (i % 9), c.g_f32 = f32, c.warp_engine = i % 4 == 1, c.beta_f32 = i % 3 == 0, c.tensor_maps = i % 5 != 2;
      Call(c).run_and_check();
      c.kernel = Case::kM64, c.T = 33 + 29 * (i % 9);
      Call(c).run_and_check();
      ++i;
    }
  for (const char* gates : {"slow", "log"})
    for (bool f32 : {false, true}) {
      Case plain(gates);
      plain.l2norm = false, plain.beta = BetaMode::kPlain, plain.has_state = false, plain.g_f32 = f32;
      Call(plain).run_and_check();
      Case doubled(gates);
      doubled.beta = BetaMode::kSigmoidDoubled, doubled.dt_bias = false, doubled.g_f32 = f32;
      Call(doubled).run_and_check();
    }
}

void test_cluster() {
  int i = 0;
  for (const char* gates : {"production", "long", "none", "collinear", "unbounded", "softplus"})
    for (auto kernel : {Case::kC4M128, Case::kC4M64}) {
      Case c(gates);
      c.kernel = kernel, c.T = std::array{700, 33, 331, 1, 96, 530}[i % 6], c.g_f32 = i % 3 == 1, c.tensor_maps = i % 5 != 2;
      Call(c).run_and_check();
      ++i;
    }
  for (auto kernel : {Case::kC4M128, Case::kC4M64, Case::kC8M128}) {
    Case packed("mixed");
    packed.kernel = kernel, packed.B = 1, packed.T = 150, packed.HV = 2, packed.offsets = {2, 5, 70, 70, 134, 149};
    packed.state_in = DType::kBF16, packed.v_first = true;
    Call call(packed);
    call.poison_outside();
    call.run_and_check();
    packed.offsets = {40, -3, 90, INT32_MAX, 20}, packed.kernel = kernel;  // wrong: nothing outside is touched, and it ends
    Call(packed).run();
  }
}

// Whoever prepares a chunk and wherever its packet lies on the way, K1 and K2 are the same code on the same chunks: so are the bits.
void test_same_bits() {
  int i = 0;
  for (const char* gates : {"production", "mixed", "collinear", "unbounded", "softplus"})
    for (bool f32 : {false, true}) {
      Case c(gates);
      c.g_f32 = f32, c.tensor_maps = i % 3 != 2;
      if (i % 2) c.T = 72, c.offsets = {2, 5, 5, 70}, c.state_in = DType::kBF16, c.v_first = true;
      else c.T = std::array{530, 33, 97, 1, 200}[i / 2];
      Call call(c);
      call.run();
      const Vector o = call.o, final_state = call.final_state;
      for (auto kernel : {Case::kM64, Case::kC4M128, Case::kC4M64, Case::kC8M128}) {
        if (kernel == Case::kC8M128 && c.T > 100) continue;  // eight blocks take the machine long
        call.set_kernel(kernel);
        call.run();
        check(call.o == o && call.final_state == final_state, call.what() + ": other bits than baseline_m128's");
      }
      ++i;
    }
}

// The pooled kernels: the same bits as baseline_m128, whoever prepares the chunks.
void test_pool() {
  int i = 0;
  for (const char* gates : {"production", "mixed", "unbounded", "softplus"})
    for (int kind = 0; kind < 4; ++kind, ++i) {
      Case c(gates);
      c.g_f32 = kind % 2, c.tensor_maps = i % 5 != 4, c.has_state = i % 3 != 1;
      if (kind < 2) c.T = std::array{40 * C + 7, 530, 97, 24 * C, 1, 33, 200, 290}[i / 4 * 2 + kind];
      else c.HV = 2, c.H = 1 + i % 2, c.T = 230, c.offsets = {2, 5, 5, 222}, c.state_in = DType::kBF16, c.v_first = true;
      Call call(c);
      if (kind >= 2) call.poison_outside();
      call.run();
      const Vector o = call.o, final_state = call.final_state;
      const int tasks = call.sequences() * c.HV;
      for (auto [kernel, owners] : {std::pair{Case::kPoolM128, 1}, {Case::kPoolM64, 2}})
        for (int helpers : {1, 3}) {
          if (tasks > 1 && helpers == 3 && owners == 2) continue;  // many blocks take the machine long
          call.set_sm_count(tasks * owners + helpers);
          call.set_kernel(kernel);
          call.run();
          check(call.o == o && call.final_state == final_state, call.what() + ": other bits than baseline_m128's");
        }
    }
  // more owners than there are SMs, and not one SM for a helper: the baseline
  for (auto kernel : {Case::kPoolM128, Case::kPoolM64}) {
    Case c("slow");
    c.HV = 2, c.H = 1, c.sm_count = kernel == Case::kPoolM128 ? 2 : 4, c.kernel = kernel;
    Call(c).run_and_check();
    --c.sm_count;
    Call(c).run_and_check();
  }
}

// On a device without room for a cluster. Asked once in a process: this part runs alone.
void test_fallback() {
  most_clusters = 0;
  for (const char* gates : {"mixed", "softplus"})
    for (bool f32 : {false, true}) {
      Case c(gates);
      c.g_f32 = f32, c.T = 97;
      Call call(c);
      call.run();
      const Vector o = call.o, final_state = call.final_state;
      for (auto kernel : {Case::kC4M128, Case::kC4M64, Case::kC8M128}) {
        call.set_kernel(kernel);
        call.run();
        check(call.o == o && call.final_state == final_state, call.what() + ": not what baseline_m128 gives");
      }
    }
}

void test_tails() {
  for (int tokens = 1; tokens <= C + 1; ++tokens)
    for (int kind = 0; kind < 4; ++kind) {
      if (kind % 2 != tokens % 2 && tokens < C - 1) continue;
      Case c(kind < 2 ? "slow" : "softplus");
      const int before = below(4);
      c.T = before + tokens + (tokens % 4 == 1 ? C : below(5)), c.offsets = {before, before + tokens};
      c.g_f32 = kind % 2, c.warp_engine = tokens % 4 < 2, c.has_state = tokens % 3 == 0;
      Call call(c);
      call.poison_outside();
      call.run_and_check();
    }
}

void test_calls() {
  // everything at once
  Case c("mixed");
  c.B = 2, c.T = 75, c.H = 1, c.HV = 2, c.offsets = {3, 36, 36, 70, 0, 1, 65, 74}, c.state_in = DType::kBF16, c.v_first = true, c.gate_rows = 2;
  for (const char* gates : {"mixed", "softplus"}) {
    c.gates = gates;
    Call call(c);
    call.poison_outside();
    call.run_and_check();
    std::swap(c.state_in, c.state_out), c.g_f32 = true;
  }
  Case dense("production");
  dense.B = 2, dense.H = 2, dense.HV = 2, dense.T = 33, dense.state_in = dense.state_out = DType::kBF16;
  Call(dense).run_and_check();
  dense.wants_state = false, dense.has_state = false, dense.B = dense.HV = dense.H = 1;
  Call(dense).run_and_check();
  Case lengths("log");
  lengths.T = 150, lengths.HV = 2, lengths.offsets = {2, 5, 70, 70, 134, 149};
  Call(lengths).run_and_check();

  // the ring of stages goes round more than twice
  for (int kind = 0; kind < 4; ++kind) {
    Case ring(kind < 2 ? "slow" : "softplus");
    ring.T = 12 * C + 5, ring.g_f32 = kind % 2, ring.warp_engine = kind == 1 || kind == 2;
    Call(ring).run_and_check();
  }

  // offsets of every wrong kind: nothing outside the arrays is touched, and it ends
  for (int round = 0; round < 6; ++round) {
    Case bad(round % 2 ? "production" : "softplus");
    bad.T = 40;
    for (int n = 0; n < 4; ++n) {
      const int kind = below(5);
      bad.offsets.push_back(kind == 0 ? int(generator()) : kind == 1 ? INT32_MIN : kind == 2 ? INT32_MAX : below(90) - 30);
    }
    bad.has_state = round % 3 == 0;
    Call(bad).run();
  }

  for (int kind = 0; kind < 4; ++kind) {
    Case base(kind < 2 ? "slow" : "unbounded");
    base.T = 64, base.g_f32 = kind % 2;
    Call call(base);
    // the schedule changes no bit
    call.run();
    const Vector o = call.o, final_state = call.final_state;
    call.run();
    check(call.o == o && call.final_state == final_state, call.what() + ": two runs differ");
    // a NaN gate stays one: in its channel from its token on
    const int token = below(60), channel = below(D);
    call.g[token * D + channel] = NAN;
    call.run();
    const Packet& p = call.packets.at({0, token / C});
    check(std::isnan(p.decay[channel]), call.what() + ": a NaN gate is lost in the decay");
    for (int t = token; t < (token / C + 1) * C; ++t) check(std::isnan(p.kd[t % C * D + channel]), call.what() + ": a NaN gate is lost in Kd");
    for (int i = token * D; i < 64 * D; ++i) check(std::isnan(call.o[i]), call.what() + ": a NaN gate is lost in o");
  }
}

// A token whose gates forget everything, where the state is large beside the values: nothing of it may be left.
void test_resets() {
  for (const char* gates : {"unbounded", "softplus"})
    for (bool f32 : {false, true}) {
      Case c(gates);
      c.T = 2 * C, c.g_f32 = f32;
      Call call(c);
      for (double& x : call.state) x = float(1000. * x);
      for (int d = 0; d < D; ++d) call.g[d] = bf16(call.mode == GateMode::kLog ? -2656. : 1e4);
      call.run_and_check();
    }
}

// What comes later changes no bit of what came before.
void test_prefix(bool bounded) {
  for (int round = 0; round < 12; ++round) {
    Case c(bounded ? (round % 4 < 2 ? "slow" : "production") : (round % 4 < 2 ? "unbounded" : "softplus"));
    c.T = 2 * C, c.g_f32 = round % 2;
    Call call(c);
    call.run();
    const Vector o = call.o;
    const Packet before = call.packets.at({0, 1});
    const int same = 1 + below(C - 1), rows = same * D, squares = same * C;  // tokens of the second chunk that stay
    for (size_t i = size_t(C + same) * D; i < call.k.size(); ++i) {
      call.k[i] = bf16(9. * normal()), call.q[i] = bf16(normal()), call.v[i] = bf16(normal());
      call.g[i] = bf16(call.mode == GateMode::kLog ? -10. * uniform() : 20. * normal());
    }
    for (size_t i = C + same; i < call.beta.size(); ++i) call.beta[i] = bf16(normal());
    call.run();
    const Packet& after = call.packets.at({0, 1});
    auto check_same = [&](const char* name, const Vector& x, const Vector& y, int n) {
      for (int i = 0; i < n; ++i)
        check(x[i] == y[i], call.what() + ": tokens from " + std::to_string(C + same) + " on change " + name + " of earlier ones");
    };
    check_same("Kd", after.kd, before.kd, rows), check_same("Qd", after.qd, before.qd, rows);
    check_same("M", after.m, before.m, squares), check_same("A", after.a, before.a, squares);
    check_same("o", call.o, o, (C + same) * D);
  }
}
void test_prefix_bounded() { test_prefix(true); }
void test_prefix_unbounded() { test_prefix(false); }
