// The segmented route on emulated blocks: its kernels one after the other, judged in double precision. Part of test_kernels.cpp.
#pragma once

void test_segmented() {
  int i = 0;
  for (const char* gates : {"production", "slow", "long", "mixed", "bound", "none", "collinear",  // bounded
                            "unbounded", "log", "softplus", "steep", "none, log"})
    for (bool f32 : {false, true}) {
      Case c(gates);
      c.segment_chunks = 1 + i % 3;
      c.T = c.segment_chunks * C * (2 + i % 4) + 7 * (i % 9) - 20;
      c.g_f32 = f32, c.warp_engine = i % 4 == 1, c.beta_f32 = i % 3 == 0, c.tensor_maps = i % 5 != 2, c.has_state = i % 7 != 3;
      c.sm_count = i % 2 ? 132 : 2;  // readers of 64 rows, of 128
      Call(c).run_and_check();
      ++i;
    }
  // the rings of stages, of maps too, go round more than twice
  for (int kind = 0; kind < 4; ++kind) {
    Case ring(kind < 2 ? "slow" : "none, log");
    ring.T = 13 * C + 5, ring.segment_chunks = kind % 2 ? 1 : 11, ring.sm_count = kind % 3 ? 132 : 2;
    Call(ring).run_and_check();
  }
  // so many segments that they are folded in groups: the last group whole or not, the last segment the first of its group or not
  for (int segments : {16, 17, 18, 20, 21, 33}) {
    Case groups(segments % 2 ? "slow" : segments % 4 ? "none" : "unbounded");
    groups.T = segments * C - below(C), groups.segment_chunks = 1, groups.sm_count = segments == 33 ? 60 : 132;  // readers of 128 rows, of 64
    Call(groups).run_and_check();
  }
  // a length of every remainder, and none at all where no segment is cut
  for (int tokens : {1, 31, 32, 33, 63, 64, 65, 96, 97}) {
    Case c(tokens % 2 ? "softplus" : "slow");
    c.T = tokens, c.segment_chunks = 1, c.state_in = tokens % 3 ? DType::kF32 : DType::kBF16, c.v_first = tokens % 3 == 1;
    Call(c).run_and_check();
  }
  Case one("mixed");
  one.T = 100, one.segment_chunks = 4;
  Call(one).run_and_check();
}

void test_segmented_calls() {
  // everything at once
  Case c("mixed");
  c.B = 2, c.T = 135, c.H = 1, c.HV = 2, c.offsets = {3, 36, 36, 134, 0, 1, 65, 131}, c.state_in = DType::kBF16, c.v_first = true, c.gate_rows = 2;
  c.segment_chunks = 1;
  for (const char* gates : {"mixed", "softplus"}) {
    c.gates = gates;
    Call call(c);
    call.poison_outside();
    call.run_and_check();
    std::swap(c.state_in, c.state_out), c.g_f32 = true, c.sm_count = 8;
  }
  for (int round = 0; round < 8; ++round) {  // many sequences, of any lengths, with gaps at both ends
    Case packed(round % 2 ? "slow" : "log");
    packed.segment_chunks = 1 + round % 2, packed.tensor_maps = round % 3 != 1, packed.sm_count = round % 4 == 3 ? 4 : 132;
    const int sequences = round < 6 ? 1 + below(5) : 40 + below(30);
    packed.offsets = {below(50)};
    for (int n = 0; n < sequences; ++n) packed.offsets.push_back(packed.offsets.back() + (below(3) ? below(round < 6 ? 150 : 8) : 0));
    packed.T = packed.offsets.back() + below(70);
    Call call(packed);
    call.poison_outside();
    call.run_and_check();
  }
  for (int first : {1, 310, 590}) {  // of them groups of segments, of one sequence or both, or with nothing to fold
    Case groups("long");
    groups.T = 1000, groups.segment_chunks = 1, groups.offsets = {3, 3 + first, 998};
    Call call(groups);
    call.poison_outside();
    call.run_and_check();
  }
  Case dense("production");
  dense.B = 2, dense.H = 2, dense.HV = 4, dense.T = 70, dense.state_in = dense.state_out = DType::kBF16, dense.segment_chunks = 1;
  Call(dense).run_and_check();
  dense.wants_state = false, dense.has_state = false, dense.B = dense.HV = dense.H = 1;
  Call(dense).run_and_check();
  for (const char* gates : {"slow", "log"}) {
    Case plain(gates);
    plain.T = 140, plain.l2norm = false, plain.beta = BetaMode::kPlain, plain.has_state = false, plain.segment_chunks = 1;
    Call(plain).run_and_check();
    Case doubled(gates);
    doubled.T = 140, doubled.beta = BetaMode::kSigmoidDoubled, doubled.dt_bias = false, doubled.segment_chunks = 2;
    Call(doubled).run_and_check();
  }
  // A state far from the values, in either direction, goes through the maps as it is; so does one that no key meets.
  for (double size : {1e-9, 1e6}) {
    Case far("long");
    far.T = 140, far.segment_chunks = 1;
    Call call(far);
    for (double& x : call.state) x = float(size * x);
    for (double& x : call.v) x = bf16(size * x);
    call.run_and_check();
  }

  // offsets of every wrong kind: nothing outside the arrays is touched, and it ends
  for (int round = 0; round < 8; ++round) {
    Case bad(round % 2 ? "production" : "softplus");
    bad.T = 100, bad.segment_chunks = 1 + round % 2;
    for (int n = 0; n < (round < 6 ? 4 : 45); ++n) {
      const int kind = below(5);
      bad.offsets.push_back(kind == 0 ? int(generator()) : kind == 1 ? INT32_MIN : kind == 2 ? INT32_MAX : below(150) - 30);
    }
    bad.has_state = round % 3 == 0;
    Call(bad).run();
  }

  for (int kind = 0; kind < 4; ++kind) {
    Case base(kind < 2 ? "slow" : "unbounded");
    base.T = 5 * C, base.g_f32 = kind % 2, base.segment_chunks = 1;
    Call call(base);
    // the schedule changes no bit
    call.run();
    const Vector o = call.o, final_state = call.final_state;
    call.run();
    check(call.o == o && call.final_state == final_state, call.what() + ": two runs differ");
    // nor do later tokens, of what comes before
    const int same = C + below(3 * C);
    for (size_t i = size_t(same) * D; i < call.k.size(); ++i) {
      call.k[i] = bf16(9. * normal()), call.q[i] = bf16(normal()), call.v[i] = bf16(normal());
      call.g[i] = bf16(call.mode == GateMode::kLog ? -10. * uniform() : 20. * normal());
    }
    for (size_t i = same; i < call.beta.size(); ++i) call.beta[i] = bf16(normal());
    call.run();
    check(std::equal(o.begin(), o.begin() + same * D, call.o.begin()), call.what() + ": later tokens change o of earlier ones");
    // a NaN stays in its head
    Case two = base;
    two.H = two.HV = 2;
    Call heads(two);
    for (int d = 0; d < D; ++d) heads.v[(C + 3) * 2 * D + d] = NAN;
    heads.run();
    for (int t = 0; t < two.T; ++t) {
      check(t < C || t >= C + 3 ? std::isnan(heads.o[t * 2 * D]) == (t >= C) : true, heads.what() + ": a NaN value is lost, or travels to earlier chunks");
      check(!std::isnan(heads.o[(t * 2 + 1) * D]), heads.what() + ": a NaN travels to another head");
    }
  }
}
