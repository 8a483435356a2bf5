// The decode kernel on the emulated block, judged in double precision. Part of test_kernels.cpp.
#pragma once

struct DecodeCase {
  int B = 2, T = 1, H = 1, HV = 2, columns = 0, gate_rows = 1;
  GateMode gate = GateMode::kSafe;
  BetaMode beta = BetaMode::kSigmoid;
  bool state_f32 = true, v_first = false, g_f32 = false, beta_f32 = false, l2norm = true, dt_bias = true;
  std::vector<int32_t> places;  // of the sequences' states in a pool; empty: no pool
  int pool = 0;                 // its states
  double size = 1.;             // of q and k

  std::string what() const {
    return std::string("decode, ") + (v_first ? "[V, K]" : "[K, V]") + (state_f32 ? " f32" : " bf16") + ", T = " + std::to_string(T) + ", columns " +
           std::to_string(columns) + ", gate " + std::to_string(int(gate)) + (places.empty() ? "" : ", pool");
  }
};

class DecodeCall {
 public:
  explicit DecodeCall(const DecodeCase& a_case) : c(a_case), states(c.places.empty() ? c.B : c.pool) {
    const size_t rows = size_t(c.B) * c.T;
    fill(q, rows * c.H * D, [&] { return bf16(c.size * normal()); });
    fill(k, rows * c.H * D, [&] { return bf16(c.size * normal()); });
    fill(v, rows * c.HV * D, [] { return bf16(normal()); });
    fill(g, rows * c.HV * D, [&] { return rounded(c.gate == GateMode::kLog ? -log_uniform(1e-5, 30.) : 3. * normal(), c.g_f32); });
    fill(beta, rows * c.HV, [&] { return rounded(c.beta == BetaMode::kPlain ? uniform() : normal(), c.beta_f32); });
    fill(state, size_t(states) * c.HV * D * D, [&] { return rounded(0.5 * normal(), c.state_f32); });
    fill(a_log, size_t(c.gate_rows) * c.HV, [] { return double(float(uniform(-1., 1.))); });
    fill(dt, size_t(c.gate_rows) * c.HV * D, [&] { return c.dt_bias ? double(float(uniform())) : 0.; });
  }

  // Padding slots hold NaN: none may reach a result.
  void poison_padding() {
    for (int n = 0; n < c.B; ++n)
      if (!valid(n))
        for (auto [x, width] : {std::pair{&q, c.H * D}, {&k, c.H * D}, {&v, c.HV * D}, {&g, c.HV * D}, {&beta, c.HV}})
          std::fill_n(x->begin() + size_t(n) * c.T * width, c.T * width, NAN);
  }

  void run() {
    const Guarded on_q(q, false), on_k(k, false), on_v(v, false), on_g(g, c.g_f32), on_beta(beta, c.beta_f32), on_a_log(a_log, true), on_dt(dt, true),
        on_state(state, c.state_f32), on_places(c.places.size() * 4), on_o(v.size() * 2);
    std::copy(c.places.begin(), c.places.end(), reinterpret_cast<int32_t*>(on_places.data()));
    DecodeArgs a{};
    a.q = on_q.data(), a.k = on_k.data(), a.v = on_v.data(), a.g = on_g.data(), a.beta = on_beta.data(), a.state = on_state.data(), a.o = on_o.data();
    if (c.gate != GateMode::kLog) a.a_log = reinterpret_cast<float*>(on_a_log.data());
    if (c.gate != GateMode::kLog && c.dt_bias) a.dt_bias = reinterpret_cast<float*>(on_dt.data());
    if (!c.places.empty()) a.state_indices = reinterpret_cast<int32_t*>(on_places.data());
    a.B = c.B, a.T = c.T, a.H = c.H, a.HV = c.HV, a.P = states, a.gate_rows = c.gate_rows, a.columns = c.columns;
    a.g_dtype = c.g_f32 ? DType::kF32 : DType::kBF16, a.beta_dtype = c.beta_f32 ? DType::kF32 : DType::kBF16;
    a.state_dtype = c.state_f32 ? DType::kF32 : DType::kBF16;
    a.gate = c.gate, a.beta_mode = c.beta, a.l2norm = c.l2norm, a.state_v_first = c.v_first, a.scale = 0.25f, a.lower_bound = -5.f;
    emulation::on_phase = nullptr;
    emulation::ranks = 1;
    emulation::launch_seed = generator();
    const cudaError_t e = jax_kda::decode(a, nullptr);
    check(e == cudaSuccess, c.what() + ": error " + std::to_string(e));
    o = widened(on_o, v.size(), false);
    new_state = widened(on_state, state.size(), c.state_f32);
    ++cases;
  }

  void run_and_check() {
    run();
    Vector want_o(o.size()), want_state = state;
    for (int n = 0; n < c.B; ++n)
      for (int h = 0; h < c.HV && valid(n); ++h) recur_exactly(n, h, want_o, want_state);
    check_close(c.what() + ": o", o.data(), want_o.data(), o.size(), 3e-3);
    check_close(c.what() + ": state", new_state.data(), want_state.data(), state.size(), c.state_f32 ? 2e-6 : 3e-3);
    for (int n = 0; n < c.B; ++n)
      for (size_t i = 0; i < size_t(c.T) * c.HV * D && !valid(n); ++i)
        check(o[size_t(n) * c.T * c.HV * D + i] == 0., c.what() + ": a padding slot's o is not zero");
    std::vector<bool> used(states);
    for (int n = 0; n < c.B; ++n)
      if (valid(n)) used[place(n)] = true;
    for (int p = 0; p < states; ++p)
      for (size_t i = 0; i < size_t(c.HV) * D * D && !used[p]; ++i) {
        const size_t at = size_t(p) * c.HV * D * D + i;
        check(new_state[at] == state[at], c.what() + ": a state that no sequence names changed");
      }
  }

  DecodeCase c;
  int states;
  Vector q, k, v, g, beta, state, a_log, dt, o, new_state;

 private:
  int place(int n) const { return c.places.empty() ? n : c.places[n]; }
  bool valid(int n) const { return 0 <= place(n) && place(n) < states; }
  static double rounded(double x, bool f32) { return f32 ? double(float(x)) : bf16(x); }
  template <class F> static void fill(Vector& x, size_t n, F f) {
    x.resize(n);
    for (double& y : x) y = f();
  }
  static Vector widened(const Guarded& from, size_t n, bool f32) {
    Vector x(n);
    for (size_t i = 0; i < n; ++i)
      x[i] = f32 ? reinterpret_cast<const float*>(from.data())[i] : bf16_to_float(reinterpret_cast<const uint16_t*>(from.data())[i]);
    return x;
  }

  void recur_exactly(int n, int h, Vector& want_o, Vector& want_state) const {
    const size_t gate_head = size_t(c.gate_rows > 1 ? n : 0) * c.HV + h, first = (size_t(place(n)) * c.HV + h) * D * D;
    for (int t = 0; t < c.T; ++t) {
      const size_t row = size_t(n) * c.T + t, key = (row * c.H + h / (c.HV / c.H)) * D, value = row * c.HV + h;
      const double rk = c.l2norm ? 1. / std::sqrt(std::pow(norm(&k[key], D), 2) + 1e-6) : 1.;
      const double rq = (c.l2norm ? 1. / std::sqrt(std::pow(norm(&q[key], D), 2) + 1e-6) : 1.) * 0.25;
      const double strength = c.beta == BetaMode::kPlain ? beta[value] : (c.beta == BetaMode::kSigmoidDoubled ? 2. : 1.) / (1. + std::exp(-beta[value]));
      auto S = [&](int a, int b) -> double& { return want_state[first + (c.v_first ? b * D + a : a * D + b)]; };
      Vector u(D);
      for (int a = 0; a < D; ++a) {
        const double raw = g[value * D + a], z = raw + dt[gate_head * D + a], rate = std::exp(a_log[gate_head]);
        const double log_decay = c.gate == GateMode::kLog    ? raw
                                 : c.gate == GateMode::kSafe ? -5. / (1. + std::exp(-rate * z))
                                                             : -rate * (std::max(z, 0.) + std::log1p(std::exp(-std::fabs(z))));
        for (int b = 0; b < D; ++b) u[b] += (S(a, b) *= std::exp(log_decay)) * k[key + a] * rk;
      }
      for (int b = 0; b < D; ++b) u[b] = strength * (v[value * D + b] - u[b]);
      for (int a = 0; a < D; ++a)
        for (int b = 0; b < D; ++b) want_o[value * D + b] += q[key + a] * rq * (S(a, b) += k[key + a] * rk * u[b]);
    }
  }
};

void test_decode_arithmetic() {
  for (int i = 0; i < 20000; ++i) {
    const uint32_t n = uint32_t(generator()) >> 1, d = i < 300 ? uint32_t(i + 1) : uint32_t(generator()) >> (generator() % 32) | 1;
    check(divide(n, Divisor(d)) == n / d, "decode: " + std::to_string(n) + " / " + std::to_string(d));
    const uint32_t edge = n / d * d;  // where a quotient begins, and the one before it ends
    check(divide(edge, Divisor(d)) == edge / d, "decode: " + std::to_string(edge) + " / " + std::to_string(d));
    if (edge) check(divide(edge - 1, Divisor(d)) == (edge - 1) / d, "decode: " + std::to_string(edge - 1) + " / " + std::to_string(d));
  }
  double bias = 0.;
  constexpr int kTries = 20000;
  for (int i = 0; i < kTries; ++i) {  // the decays of slow gates, which multiply up over thousands of tokens, and any
    const bool slow = i % 2;
    const float x = float(slow ? -log_uniform(1e-6, 0.05) : uniform(-87., 88.));
    const double want = std::exp(double(x)), off = (double(exp_rounded(x)) - want) / std::ldexp(1., std::ilogb(want) - 23);
    check(std::fabs(off) <= (slow ? 0.55 : 1.1), "decode: exp of " + std::to_string(x) + ": " + std::to_string(off) + " units of the last place");
    bias += slow ? off / (kTries / 2) : 0.;
  }
  check(std::fabs(bias) < 0.015, "decode: decays near 1 are biased by " + std::to_string(bias) + " units of the last place");
  for (const float x : {0.f, -200.f, -INFINITY, 200.f, INFINITY}) check(exp_rounded(x) == std::exp(x), "decode: exp of " + std::to_string(x));
  check(std::isnan(exp_rounded(NAN)), "decode: exp of NaN");
}

void test_decode() {
  test_decode_arithmetic();
  for (const bool v_first : {false, true})
    for (const bool f32 : {true, false})
      for (const int columns : {16, 32}) {
        DecodeCase c;
        c.v_first = v_first, c.state_f32 = f32, c.columns = columns, c.B = 1;
        DecodeCall(c).run_and_check();
        c.T = 8, c.HV = 1, c.gate = GateMode::kLog, c.g_f32 = true;  // rows enough for every turn of the loop that prepares them
        DecodeCall(c).run_and_check();
        c.B = 4, c.T = 3, c.H = 1, c.HV = 2, c.gate = GateMode::kSoftplus, c.gate_rows = 4, c.beta = BetaMode::kSigmoidDoubled, c.beta_f32 = true;
        c.g_f32 = false, c.pool = 5, c.places = {3, -1, 0, 5};
        DecodeCall padded(c);
        padded.poison_padding();
        padded.run_and_check();
      }
  DecodeCase c;
  c.beta = BetaMode::kPlain, c.dt_bias = false, c.H = 2, c.HV = 4, c.l2norm = false, c.size = 0.05, c.T = 2;
  DecodeCall(c).run_and_check();
  // Squares that leave float32: the norm is right all the same.
  c = {};
  c.size = 1e30;
  DecodeCall(c).run_and_check();
  // Wrong kinds of indices: guard pages on both sides.
  c = {};
  c.B = 4, c.HV = 1, c.pool = 2, c.places = {INT32_MIN, INT32_MAX, 2, -2};
  DecodeCall nothing(c);
  nothing.poison_padding();
  nothing.run_and_check();
  // Chosen by size; NaN stays in its own sequence and head.
  c = {};
  c.B = 4, c.HV = 8, c.H = 8;
  DecodeCall call(c);
  call.g[8 * D + 5] = NAN;  // sequence 1, head 0
  call.run();
  for (size_t i = 0; i < call.o.size(); ++i)
    check(std::isnan(call.o[i]) == (i / D == 8), "decode: a NaN gate is lost, or reaches another head");
}
