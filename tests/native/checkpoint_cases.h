// Checkpoints on emulated blocks, on every route. Part of test_kernels.cpp.
#pragma once

// Every route: (kernel, segment_chunks).
const std::vector<std::pair<decltype(Case::kernel), int>> kEveryRoute = {{Case::kM128, 0},  {Case::kM64, 0},   {Case::kC4M128, 0},
                                                                        {Case::kC4M64, 0}, {Case::kC8M128, 0}, {Case::kM128, 3}};

// A call that goes on from a checkpoint of this one, where `from` tokens of the one sequence are done.
Call rest_of(const Call& whole, int from) {
  Case c = whole.c;
  c.T -= from, c.has_state = true, c.state_in = c.state_out;
  Call rest(c);
  rest.mode = whole.mode, rest.lower_bound = whole.lower_bound, rest.a_log = whole.a_log, rest.dt = whole.dt;
  auto tail = [&](const Vector& x, int width) { return Vector(x.begin() + size_t(from) * width, x.end()); };
  rest.q = tail(whole.q, c.H * D), rest.k = tail(whole.k, c.H * D), rest.v = tail(whole.v, c.HV * D), rest.g = tail(whole.g, c.HV * D);
  rest.beta = tail(whole.beta, c.HV);
  const auto at = whole.checkpoints.begin() + size_t(from / c.checkpoint_every - 1) * c.HV * D * D;
  rest.state = Vector(at, at + c.HV * D * D);
  return rest;
}

void test_checkpoints() {
  int i = 0;
  for (auto [kernel, segment_chunks] : kEveryRoute)
    for (const char* gates : {"slow", "softplus"}) {
      Case c(gates);
      c.kernel = kernel, c.segment_chunks = segment_chunks, c.checkpoint_every = i % 2 ? 128 : 64, c.g_f32 = i % 3 == 0, c.v_first = i % 4 > 1;
      c.warp_engine = kernel == Case::kM128 && i % 4 == 1, c.sm_count = i % 3 ? 132 : 2;
      const DType out = i % 3 == 1 ? DType::kBF16 : DType::kF32;
      c.state_out = out, c.wants_state = i % 5 != 2;
      c.T = i % 2 ? 299 : 171, c.HV = 1 + i % 2;  // chunks behind the last checkpoint, and a tail
      Call(c).run_and_check();
      // two rows of packed sequences: uneven ones, empty ones, one that ends at a checkpoint; places that nobody needs
      Case packed = c;
      packed.B = 2, packed.T = 270, packed.HV = 1, packed.checkpoint_every = 64, packed.segment_chunks = segment_chunks ? 1 : 0;
      packed.offsets = {5, 75, 75, 139, 142, 270, 0, 63, 126, 189, 189, 252};
      Call call(packed);
      call.poison_outside();
      call.run_and_check();
      // more sequences than a warp has lanes, short ones mostly
      Case many(gates);
      many.kernel = kernel, many.segment_chunks = packed.segment_chunks, many.checkpoint_every = 64, many.offsets = {0};
      for (int n = 0; n < 45; ++n) many.offsets.push_back(many.offsets.back() + (n % 22 == 10 ? 64 + below(90) : below(2)));
      many.T = many.offsets.back() + 130;
      if (kernel == Case::kM128) Call(many).run_and_check();
      // offsets of every wrong kind: nothing outside the arrays is touched, and it ends
      Case bad(gates);
      bad.kernel = kernel, bad.segment_chunks = packed.segment_chunks, bad.checkpoint_every = 64, bad.T = 130;
      bad.offsets = i % 2 ? std::vector<int>{100, -3, 130, 0, INT32_MAX, 64} : std::vector<int>{INT32_MIN, 130, 2, 130, 0, 130};
      Call(bad).run();
      ++i;
    }
  for (int every : {128, INT32_MAX / 64 * 64}) {  // more tokens than there are
    Case none("slow");
    none.segment_chunks = every == 128 ? 0 : 1, none.checkpoint_every = every, none.T = 100;
    Call(none).run_and_check();
  }

  for (auto [kernel, segment_chunks] : kEveryRoute)
    for (const char* gates : {"mixed", "unbounded"}) {
      Case c(gates);
      c.kernel = kernel, c.segment_chunks = segment_chunks ? 2 : 0, c.T = 205, c.g_f32 = kernel == Case::kM64;
      Call plain(c);
      plain.run();
      Call call = plain;
      call.c.checkpoint_every = 64;
      call.run();
      check(call.o == plain.o && call.final_state == plain.final_state, call.what() + ": checkpoints change results");
      // going on from one gives the bits of the whole; segments begin elsewhere then, so theirs do to rounding
      const int from = call.mode == GateMode::kSafe ? 64 : 192;
      Call rest = rest_of(call, from);
      rest.run();
      const Vector tail(call.o.begin() + size_t(from) * D, call.o.end());
      if (segment_chunks) {
        check_close(rest.what() + ", gone on: o", rest.o.data(), tail.data(), tail.size(), 6e-3);
        check_close(rest.what() + ", gone on: final state", rest.final_state.data(), call.final_state.data(), call.final_state.size(), 6e-3);
      } else {
        check(rest.o == tail && rest.final_state == call.final_state, rest.what() + ": going on from a checkpoint gives other bits");
      }
    }
}
