"""What holds whatever the route: contract.md's promises beside accuracy."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fault_cases import bits
from harness import (
    BAR,
    BAR_DOUBLED,
    DRY,
    TOKENS,
    Findings,
    Inputs,
    changed,
    cuts,
    forced,
    on_device,
    output_of,
    run_apart,
    same_bits,
    sequence,
    split,
)
from oracle import numpy_recurrence, relative_error

from jax_kda import kda_decode
from jax_kda.regimes import make_inputs

# One regime for each kernel there is: bounded and unbounded gates, each in bfloat16 and in float32.
GATES: dict[str, Inputs] = {
    "bounded": {"regime": "slow"},
    "bounded, f32": {"regime": "production", "g_dtype": "float32"},
    "log": {"regime": "mixed", "g_dtype": "bfloat16"},
    "log, f32": {"regime": "long"},
    "softplus": {"regime": "unbounded"},
}
BOUNDED = ("bounded", "bounded, f32")  # the gates that take the kernels' bounded scheme
LARGEST = 3.3895e38  # the largest finite bfloat16


def small(
    gate: str = "bounded", B: int = 1, T: int = 100, H: int = 1, HV: int = 2, **keywords: Any
) -> Inputs:
    kind = dict(GATES[gate])
    return make_inputs(kind.pop("regime"), B, T, H, HV, **kind | keywords)


def sequence_n(inputs: Inputs, n: int, begin: int, end: int) -> Inputs:
    return sequence(inputs, begin, end, inputs["initial_state"][n : n + 1])


# ---- the same bits


@pytest.mark.parametrize("gate", ["bounded", "log, f32"])
@pytest.mark.parametrize("lengths", [None, (190, 0, 1, 64, 130)], ids=["dense", "packed"])
def test_same_call_same_bits(run, gate, lengths):
    """Two inputs in turn, on more CTAs than there are multiprocessors."""
    B, T, H = (1, 385, 1 if DRY else 40) if lengths else (2, 130, 1 if DRY else 40)
    pair = [on_device(small(gate, B, T, H, 2 * H, lengths=lengths, seed=seed)) for seed in (1, 2)]
    first = [run(**inputs) for inputs in pair]
    assert not same_bits(*first)
    for _ in range(2 if DRY else 20):
        for inputs, want in zip(pair, first, strict=True):
            assert same_bits(run(**inputs), want)


# A chunk's tokens meet in matrix products: infinity, which a later token's overflow has made, times the zeros
# above the diagonal reaches the chunk's earlier rows. With the norm in the kernel this takes |q| or |k|
# beyond 1e18 (their squares leave float32).
OVERFLOWS = pytest.mark.xfail(
    not DRY, reason="an overflow reaches back to the start of its chunk", strict=True
)


@pytest.mark.parametrize("later", ["other", "huge", "largest"])
@pytest.mark.parametrize("gate", GATES)
def test_no_bit_depends_on_later_tokens(run, gate, later, record_property):
    """`largest`: each is finite, but what is made of them need not be."""
    T = 130
    inputs = small(gate, T=T)
    o = np.asarray(run(**inputs)[0])
    other: Any = {name: small(gate, T=T, seed=9)[name] for name in TOKENS}
    if later != "other":
        size = 1e30 if later == "huge" else LARGEST
        g = -100.0 if gate.startswith("log") else 1e4
        other = {"q": -size, "k": size, "v": size, "g": g, "beta": 20.0}
    with Findings(record_property) as found:
        for t in (33, 65) if DRY else (1, 15, 16, 17, 31, 32, 33, 50, 63, 64, 65, 127, 129):
            late = {name: x[:, t:] if isinstance(x, np.ndarray) else x for name, x in other.items()}
            got = np.asarray(run(**changed(inputs, np.s_[:, t:], late))[0])
            found.expect(bits(got[:, :t]) == bits(o[:, :t]), f"tokens before {t} changed")
            found.expect(bits(got[:, t:]) != bits(o[:, t:]), f"tokens after {t} did not change")


@OVERFLOWS
def test_an_overflow_does_not_reach_back(run, record_property):
    """Without a norm, products of later finite keys leave float32."""
    inputs = small() | {"use_qk_l2norm_in_kernel": False}
    inputs["k"] = inputs["k"] / inputs["k"].dtype.type(16)
    o = np.asarray(run(**inputs)[0])
    with Findings(record_property) as found:
        for t in (20, 40):
            got = np.asarray(run(**changed(inputs, np.s_[:, t], 1e30, ("k",)))[0])
            found.expect(bits(got[:, :t]) == bits(o[:, :t]), f"tokens before {t} changed")


@pytest.mark.parametrize("lengths", [None, (0, 60, 1, 30)], ids=["dense", "packed"])
@pytest.mark.parametrize("gate", ["bounded", "log, f32"])
def test_whatever_lay_in_the_memory(run, gate, lengths, record_property):
    """Outputs and workspace land where NaN, infinity or zeros lay, and shared memory holds NaN."""
    inputs = on_device(small(gate, T=100, lengths=lengths))
    nan = on_device(changed(small(gate, T=100, lengths=lengths), np.s_[:], np.nan))
    want = jax.block_until_ready(run(**inputs))
    sizes = {x.nbytes for x in want}
    landed = 0
    with Findings(record_property) as found:
        for pattern in (0xFF, 0x7F, 0x00, 0xA5):
            jax.block_until_ready(run(**nan))
            ranges = poison(sizes, pattern)
            got = run(**inputs)
            found.expect(same_bits(got, want), f"other bits over memory filled with {pattern:#x}")
            landed += sum(
                any(begin < x.unsafe_buffer_pointer() + x.nbytes and x.unsafe_buffer_pointer() < end
                    for begin, end in ranges)
                for x in got
            )  # fmt: skip
        record_property("outputs on poisoned memory", landed)
        found.expect(DRY or landed > 0, "no output lay on poisoned memory: the test shows nothing")


def poison(sizes: set[int], pattern: int) -> list[tuple[int, int]]:
    """Fills much of the free memory with this byte and frees it again; the address ranges."""
    blocks = [jnp.full((size,), pattern, jnp.uint8) for size in sizes for _ in range(2 if DRY else 32)]
    blocks += [jnp.full((2**20 if DRY else 2**30,), pattern, jnp.uint8)]
    jax.block_until_ready(blocks)
    starts = [block.unsafe_buffer_pointer() for block in blocks]
    return [(start, start + block.nbytes) for start, block in zip(starts, blocks, strict=True)]


def test_the_callers_arrays_stay(run):
    inputs = small(T=60, lengths=(20, 0, 40), state_dtype="bfloat16")
    arrays, rest = split(on_device(inputs))
    jax.block_until_ready(run(**arrays, **rest))
    for name, x in arrays.items():
        assert bits(x) == bits(inputs[name]), name


def test_donated_states(run):
    """The serving loop's way: the state's buffer is given up, and the next state may take its place."""
    arrays, rest = split(on_device(small(T=40)))
    state = arrays.pop("initial_state")
    want = run(**arrays, **rest, initial_state=state)
    want = run(**arrays, **rest, initial_state=want[1])
    step = jax.jit(lambda state, x: run(**x, **rest, initial_state=state), donate_argnums=0)
    given = jnp.copy(state)
    _, between = step(given, arrays)
    assert given.is_deleted()
    got = step(between, arrays)
    assert same_bits(got, want)


# Whoever prepares a chunk, K1 and K2 are the same code on the same chunks of 32 tokens in the same number
# formats. `segmented` cuts sequences, which is another order of sums; the contract's bars hold for it.
@pytest.mark.parametrize("case", ["dense", "packed", "many", "bf16 states"])
@pytest.mark.parametrize("gate", GATES)
def test_the_bits_of_the_baseline(route, run, gate, case):
    if route in ("baseline_m128", "segmented"):
        pytest.skip("the baseline itself, or a route that cuts sequences")
    inputs = {
        "dense": lambda: small(gate, B=2, T=515, H=2, HV=4),
        "packed": lambda: small(gate, T=430, H=2, HV=4, lengths=(190, 0, 1, 64, 130, 33)),
        "many": lambda: small(gate, T=97, H=40, HV=80),
        "bf16 states": lambda: small(gate, T=257, state_dtype="bfloat16", state_v_first=True),
    }[case]()
    inputs = on_device(inputs)
    assert same_bits(run(**inputs), forced("baseline_m128")(**inputs))


# ---- parts and the whole


def test_two_halves_equal_the_whole(run, record_property):
    inputs = small(T=100)
    o, state = run(**inputs)
    equal = 0
    with Findings(record_property) as found:
        for t in (33, 64) if DRY else (1, 16, 31, 32, 33, 37, 64, 96, 99):
            first, middle = run(**sequence(inputs, 0, t, inputs["initial_state"]))
            second, end = run(**sequence(inputs, t, 100, middle))
            both = jnp.concatenate([first, second], axis=1)
            found.figure("o", relative_error(both, o), BAR, f"cut at {t}")
            found.figure("state", relative_error(end, state), BAR, f"cut at {t}")
            equal += same_bits((both, end), (o, state))
    record_property("cuts with the same bits", equal)


@pytest.mark.parametrize("gate", ["bounded", "log, f32"])
def test_packed_equals_separate(run, gate, record_property):
    lengths = (0, 33, 64) if DRY else (1, 15, 0, 16, 33, 0, 0, 64, 65, 31, 130, 1, 0)
    inputs = small(gate, T=sum(lengths), lengths=lengths)
    o, state = run(**inputs)
    equal = 0
    with Findings(record_property) as found:
        for n, (begin, end) in enumerate(cuts(lengths)):
            alone = run(**sequence_n(inputs, n, begin, end))
            where = f"tokens {begin}..{end}"
            if begin < end:
                found.figure("o", relative_error(o[:, begin:end], alone[0]), BAR, where)
            found.figure("state", relative_error(state[n : n + 1], alone[1]), BAR, where)
            equal += same_bits((o[:, begin:end], state[n : n + 1]), alone)
    record_property("sequences with the same bits", f"{equal} of {len(lengths)}")


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_an_empty_sequence_passes_any_bits_through(run, state_dtype, state_v_first):
    lengths = (0, 60, 0, 0, 37, 0)
    inputs = small(T=100, lengths=lengths, state_dtype=state_dtype, state_v_first=state_v_first)
    state = inputs["initial_state"]
    for n in (0, 3):  # NaNs with their payloads, infinities, subnormals, both zeros
        noise = np.random.default_rng(n).bytes(state[n].nbytes)
        state[n] = np.frombuffer(noise, state.dtype).reshape(state[n].shape)
        if DRY and state_dtype == "bfloat16":  # the XLA route makes signalling NaNs quiet there
            state[n][np.isnan(state[n])] = np.nan
    o, final = run(**inputs)
    assert np.isfinite(np.asarray(o).astype(np.float32)).all()
    for n in (0, 2, 3, 5):
        assert bits(final[n]) == bits(state[n]), n
    without = {name: x for name, x in inputs.items() if name != "initial_state"}
    _, final = run(**without)
    for n in (0, 2, 3, 5):
        assert not np.any(bits(final[n]).strip(b"\0")), n


@pytest.mark.parametrize("lengths", [None, (0, 0)], ids=["dense", "packed"])
def test_no_tokens(run, lengths):
    inputs = small(B=1 if lengths else 2, T=0, lengths=lengths)
    o, state = run(**inputs)
    assert o.shape == (1 if lengths else 2, 0, 2, 128)
    assert bits(state) == bits(inputs["initial_state"])
    _, state = run(**inputs | {"initial_state": None})
    assert not np.asarray(state).any()


@pytest.mark.parametrize("lengths", [None, (30, 0, 30)], ids=["dense", "packed"])
def test_without_a_final_state(run, lengths):
    inputs = small(T=64, lengths=lengths)
    o, none = run(**inputs | {"output_final_state": False})
    assert none is None
    assert same_bits(o, run(**inputs)[0])


# ---- NaN in, NaN out, no further


@pytest.mark.parametrize("gate", ["bounded", "log, f32", "softplus"])
def test_nan_outside_all_sequences(run, gate):
    inputs = small(gate, T=110, lengths=(40, 0, 30, 20))
    inputs["cu_seqlens"] = inputs["cu_seqlens"] + 7  # 7 rows before the first, 13 after the last
    want = run(**inputs)
    rows = np.r_[0:7, 97:110]
    got = run(**changed(inputs, np.s_[:, rows], np.nan))
    assert same_bits(got, want)
    assert not np.asarray(got[0])[:, rows].any()


@pytest.mark.parametrize("gate", ["bounded", "log, f32", "softplus"])
def test_nan_stays_in_its_sequence(run, gate, record_property):
    inputs = small(gate, T=100, lengths=(20, 30, 0, 45))
    o, state = map(np.asarray, run(**inputs))
    broken, broken_state = map(np.asarray, run(**changed(inputs, np.s_[:, 20:50], np.nan)))
    others = np.r_[0:20, 50:100]
    with Findings(record_property) as found:
        found.expect(bits(broken[:, others]) == bits(o[:, others]), "o of another sequence changed")
        found.expect(bits(broken_state[[0, 2, 3]]) == bits(state[[0, 2, 3]]), "another state changed")
        found.expect(bool(np.isnan(broken[:, 20:50].astype(np.float32)).all()), "NaN was lost in o")
        found.expect(bool(np.isnan(broken_state[1]).any()), "NaN was lost in the state")


@pytest.mark.parametrize("gate", ["bounded", "log, f32", "softplus"])
def test_nan_stays_in_its_head(run, gate, record_property):
    inputs = small(gate, T=100, H=2, HV=4)
    o, state = map(np.asarray, run(**inputs))
    with Findings(record_property) as found:
        for name in ("q", "k", "v", "g", "beta", "initial_state"):
            index = np.s_[0, 1] if name == "initial_state" else np.s_[0, 40, 1]
            hit = [2, 3] if name in ("q", "k") else [1]  # the second q/k head serves value heads 2 and 3
            others = [h for h in range(4) if h not in hit]
            got, got_state = map(np.asarray, run(**changed(inputs, index, np.nan, (name,))))
            found.expect(bits(got[:, :, others]) == bits(o[:, :, others]), f"{name}: another head's o")
            found.expect(bits(got_state[:, others]) == bits(state[:, others]), f"{name}: another state")
            lost = ~np.isnan(got[:, :, hit].astype(np.float32)).any(axis=(1, 3))
            found.expect(not lost.any(), f"{name}: NaN was lost in o")
            if name != "initial_state":
                # Earlier tokens are promised their bits for finite later ones. What is not finite may
                # reach back to the start of its own chunk of 32 tokens, and no further.
                found.expect(bits(got[:, :32]) == bits(o[:, :32]), f"{name}: an earlier chunk changed")


# ---- safety


def test_wrong_offsets_on_the_device(route):
    """In a process of its own: an access out of bounds would take this one along, a hang would stop it."""
    assert "offsets: all safe" in output_of(run_apart("offsets", route), 120)


CLUSTERS = 4096  # that a cluster route serves in one call: jax_kda.routing


def has_clusters(route: str) -> bool:
    return route.startswith(("c4", "c8"))


@pytest.mark.big
def test_state_offsets_past_32_bits(run, route):
    """2,100 sequences of one tile on 64 heads: 2.2e9 elements of state in, as many out, all alike. A cluster
    route serves fewer: as many as it may, which is up to 4.7 GB of workspace.
    """
    N, H = (5, 2) if DRY else (CLUSTERS // 64 if has_clusters(route) else 2100, 64)
    tile = on_device(make_inputs("long", 1, 64, H, g_dtype="bfloat16"))
    want = run(**tile)
    tiled = {name: jnp.tile(tile[name], (1, N) + (1,) * (tile[name].ndim - 2)) for name in TOKENS}
    state = jnp.broadcast_to(tile["initial_state"], (N, *tile["initial_state"].shape[1:]))
    offsets = jnp.arange(N + 1, dtype=jnp.int32) * 64
    o, final = run(**tile | tiled | {"initial_state": state, "cu_seqlens": offsets})

    @jax.jit
    def all_alike(o: jax.Array, final: jax.Array, want: Any) -> jax.Array:
        one_o, one_state = want
        return jnp.all(o.reshape(N, *one_o.shape[1:]) == one_o) & jnp.all(final == one_state)

    assert bool(jnp.isfinite(want[1]).all())
    assert bool(all_alike(o, final, want))


@pytest.mark.skipif(DRY, reason="the CUDA routes have no dry run")
def test_a_cluster_route_says_how_many_it_serves(route):
    """Eager and under jit, before anything is allocated."""
    if not has_clusters(route):
        pytest.skip("no clusters")
    lengths = (64, *[0] * CLUSTERS)
    inputs = small(T=64, H=1, HV=1, lengths=lengths, initial_state=False) | {"output_final_state": False}
    arrays, rest = split(inputs)
    for way in (forced(route), jax.jit(lambda **x: forced(route)(**x, **rest))):
        with pytest.raises(ValueError, match=f"'{route}', but its workspace is for at most {CLUSTERS} pairs"):
            way(**arrays, **({} if hasattr(way, "lower") else rest))


@pytest.mark.big
@pytest.mark.skipif(DRY, reason="the CUDA routes have no dry run")
def test_a_cluster_route_serves_as_many_as_it_says(route):
    if not has_clusters(route):
        pytest.skip("no clusters")
    lengths = (64, *[0] * (CLUSTERS - 1))
    most = small(T=64, H=1, HV=1, lengths=lengths, initial_state=False) | {"output_final_state": False}
    assert same_bits(forced(route)(**most)[0], forced("baseline_m128")(**most)[0])


# ---- range


def _scaled(inputs: Inputs, **by: float) -> Inputs:
    """The call with these arrays times a power of two, on every third token (states: all of them)."""
    result = dict(inputs)
    for name, exponent in by.items():
        factor = inputs[name].dtype.type(2.0**exponent)
        result[name] = np.array(inputs[name])
        index = np.s_[:] if name in ("initial_state", "v") else np.s_[:, ::3]
        result[name][index] *= factor
    return result


def _large_keys(inputs: Inputs) -> Inputs:
    """|k|^2 is about 2^17 and beta 2^-17 times what it was: their product is what it was with a norm."""
    beta = (1 / (1 + np.exp(-inputs["beta"].astype(np.float32)))) * np.float32(2.0**-17)
    k = inputs["k"] * inputs["k"].dtype.type(2.0**5)
    plain = {"use_qk_l2norm_in_kernel": False, "use_beta_sigmoid_in_kernel": False}
    return inputs | plain | {"k": k, "beta": beta}


def _small_keys(inputs: Inputs) -> Inputs:
    plain = {"use_qk_l2norm_in_kernel": False}
    return inputs | plain | {"k": inputs["k"] * inputs["k"].dtype.type(2.0**-40)}


RANGES = {
    "large q and k, normalised": lambda x: _scaled(x, q=50, k=50),
    "huge q and k, normalised": lambda x: _scaled(x, q=100, k=100),
    "small q and k, normalised": lambda x: _scaled(x, q=-8, k=-8),
    "tiny q and k, normalised": lambda x: _scaled(x, q=-60, k=-60),
    "huge v and state": lambda x: _scaled(x, v=100, initial_state=100),
    "tiny v and state": lambda x: _scaled(x, v=-100, initial_state=-100),
    "v past float16": lambda x: _scaled(x, v=20, initial_state=20),
    "huge state alone": lambda x: _scaled(x, initial_state=90),
    "large keys without a norm": _large_keys,
    "small keys without a norm": _small_keys,
}


HUGE = pytest.mark.xfail(
    not DRY, reason="the kernels' norms leave float32 for |q| or |k| beyond 1e18", strict=True
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=HUGE if name.startswith("huge q") else ()) for name in RANGES]
)
def test_range(run, name, record_property):
    with Findings(record_property) as found:
        for gate in ("bounded",) if DRY else ("bounded", "log, f32"):
            found.compare(run, RANGES[name](small(gate, T=100)), gate)


def test_finite_where_the_true_result_is(run):
    """Without a norm, past beta |k|^2 = 2: no bar, but no NaN either."""
    inputs = small(T=64) | {"use_qk_l2norm_in_kernel": False, "use_beta_sigmoid_in_kernel": False}
    k = inputs["k"].astype(np.float64)
    inputs["k"] = (k * 2.5 / np.linalg.norm(k, axis=-1, keepdims=True)).astype(inputs["k"].dtype)
    inputs["beta"] = np.ones_like(inputs["beta"])  # beta |k|^2 = 6.25
    want_o, want_state = numpy_recurrence(**inputs)
    assert max(np.abs(want_o).max(), np.abs(want_state).max()) < 1e36
    o, state = run(**inputs)
    assert np.isfinite(np.asarray(o).astype(np.float64)).all()
    assert np.isfinite(np.asarray(state)).all()


# ---- transformations


@pytest.mark.parametrize("lengths", [None, (30, 0, 33)], ids=["dense", "packed"])
def test_vmap_equals_a_loop(run, lengths, record_property):
    calls = [small(T=64, lengths=lengths, seed=seed) for seed in range(3)]
    _, rest = split(calls[0])
    shared = {name: calls[0][name] for name in ("A_log", "dt_bias")}
    equal = 0
    with Findings(record_property) as found:
        for kept in ({}, shared):
            arrays = [split(call | kept)[0] for call in calls]
            stacked = {name: np.stack([x[name] for x in arrays]) for name in arrays[0]} | kept
            axes = {name: None if name in kept else 0 for name in stacked}
            mapped = jax.jit(jax.vmap(lambda x: run(**x, **rest), in_axes=(axes,)))
            o, state = mapped(stacked)
            for n, x in enumerate(arrays):
                want = run(**x, **rest)
                found.figure("o", relative_error(o[n], want[0]), BAR, f"element {n}")
                found.figure("state", relative_error(state[n], want[1]), BAR, f"element {n}")
                equal += same_bits((o[n], state[n]), want)
    record_property("elements with the same bits", f"{equal} of 6")


@pytest.mark.parametrize("gate", ["bounded"] if DRY else ["bounded", "softplus"])
def test_gradients(run, gate, record_property):
    """Forward on the route, backward in chunk form: as the XLA route's on the CPU."""
    inputs = small(gate, T=40, HV=1, lengths=(10, 0, 27))
    arrays, rest = split(inputs)
    offsets = arrays.pop("cu_seqlens")
    rng = np.random.default_rng(3)
    weights = [rng.standard_normal(inputs[name].shape).astype("f4") for name in ("v", "initial_state")]

    def gradient(of: Any) -> Any:
        def loss(arrays: Inputs) -> jax.Array:
            results = of(**arrays, **rest, cu_seqlens=offsets)
            return sum(jnp.vdot(x.astype("f4"), w) for x, w in zip(results, weights, strict=True))

        return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(arrays))

    got = gradient(run)
    with jax.default_device(jax.devices("cpu")[0]):
        want = gradient(forced("xla"))
    with Findings(record_property) as found:
        for name, x in got.items():
            found.figure(name, relative_error(x, want[name]), 5e-3 if x.dtype != np.float32 else 1e-3)


def test_64_bit_mode_changes_nothing(run):
    inputs = small(T=60, lengths=(20, 0, 40))
    want = run(**inputs)
    with jax.enable_x64(True):
        got = run(**inputs | {"cu_seqlens": jnp.asarray(inputs["cu_seqlens"], jnp.int64)})
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert all(bits(x) == bits(y) for x, y in zip(got, want, strict=True))


def test_decode_goes_on_where_prefill_stopped(route, record_property):
    inputs = small(T=9, B=2)
    want_o, want_state = numpy_recurrence(**inputs)
    state, outputs = inputs["initial_state"], []
    rest = {name: x for name, x in inputs.items() if name != "output_final_state"}
    for begin, end in itertools.pairwise((0, 1, 2, 9)):
        o, state = kda_decode(**sequence(rest, begin, end, state), route=route)
        outputs.append(np.asarray(o).astype(np.float64))
    with Findings(record_property) as found:
        found.figure("o", relative_error(np.concatenate(outputs, axis=1), want_o), BAR_DOUBLED)
        found.figure("state", relative_error(state, want_state), BAR_DOUBLED)
