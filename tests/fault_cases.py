"""Faults that people reported in kernels like this one, each as a check that would have caught it.

A case is a function of `run`, which is `kda_prefill` on the route under test, and of the dtype of q, k and v.
So every route is put to all of them: `for case in FAULT_CASES: case.check(run, "bfloat16")`. The bars are
those of a route that computes in bfloat16; tests of accuracy hold each route to its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from oracle import numpy_recurrence

from jax_kda.regimes import make_inputs

Run = Callable[..., tuple[Any, Any]]
Inputs = dict[str, Any]

WHOLE = 2e-2  # worst single sequence and head: relative error of o and of the state
TOKEN = 5e-2  # worst single token


@dataclass(frozen=True)
class FaultCase:
    fault: str  # the report's number
    name: str
    check: Callable[[Run, str], None]
    big: bool = False  # many gigabytes or minutes: meant for a GPU

    @property
    def id(self) -> str:
        return f"{self.fault}-{self.name}"


FAULT_CASES: list[FaultCase] = []


def _case(fault: str, name: str, *, big: bool = False, **parameters: Any) -> Callable[[Any], Any]:
    """Adds the decorated check to FAULT_CASES, with these parameters bound."""

    def add(check: Callable[..., None]) -> Callable[..., None]:
        def bound(run: Run, dtype: str) -> None:
            check(run, dtype, **parameters)

        FAULT_CASES.append(FaultCase(fault, name, bound, big))
        return check

    return add


def expect_oracle(run: Run, inputs: Inputs, bars: tuple[float, float] = (WHOLE, TOKEN)) -> tuple[Any, Any]:
    """Runs, compares each sequence and head with the oracle, and returns what `run` returned."""
    o, state = run(**inputs)
    want_o, want_state = numpy_recurrence(**inputs)
    expect_close(o, want_o, inputs.get("cu_seqlens"), bars)
    if want_state is not None:
        expect_close_states(state, want_state, bars[0])
    return o, state


def expect_close(
    o: Any, want: np.ndarray, offsets: Any = None, bars: tuple[float, float] = (WHOLE, TOKEN)
) -> None:
    """o and want are [B, T, HV, V]. A token's error is measured against its norm, or a tenth of its head's
    mean one.
    """
    o = _float64(o)
    assert o.shape == want.shape
    assert np.isfinite(o).all(), f"{np.count_nonzero(~np.isfinite(o))} values of o are not finite"
    bounds = [0, o.shape[1]] if offsets is None else [int(x) for x in np.asarray(offsets)]
    for begin, end in itertools.pairwise(bounds):
        if begin == end:
            continue
        error, norm = _norms(o[:, begin:end] - want[:, begin:end]), _norms(want[:, begin:end])
        mean = np.sqrt(np.mean(norm**2, axis=1, keepdims=True))
        whole = np.sqrt(np.mean(error**2, axis=1, keepdims=True)) / np.maximum(mean, 1e-30)
        token = error / np.maximum(np.maximum(norm, 0.1 * mean), 1e-30)
        assert whole.max() <= bars[0], (
            f"tokens {begin}..{end}: o of the worst head is off by {whole.max():.1e}"
        )
        assert token.max() <= bars[1], (
            f"tokens {begin}..{end}: o of the worst token is off by {token.max():.1e}"
        )


def expect_close_states(state: Any, want: np.ndarray, bar: float = WHOLE) -> None:
    """States are [N, HV, *, *]; each is compared on its own."""
    state = _float64(state)
    assert state.shape == want.shape
    assert np.isfinite(state).all(), (
        f"{np.count_nonzero(~np.isfinite(state))} values of the state are not finite"
    )
    error = np.linalg.norm(state - want, axis=(-2, -1))
    worst = (error / np.maximum(np.linalg.norm(want, axis=(-2, -1)), 1e-30)).max(initial=0)
    assert worst <= bar, f"the worst state is off by {worst:.1e}"


def bits(x: Any) -> bytes:
    return np.asarray(x).tobytes()


def part(inputs: Inputs, n: int) -> Inputs:
    """The n-th sequence of a packed call as a call of its own."""
    begin, end = (int(x) for x in inputs["cu_seqlens"][n : n + 2])
    alone = {name: x for name, x in inputs.items() if name != "cu_seqlens"}
    alone |= {name: inputs[name][:, begin:end] for name in ("q", "k", "v", "g", "beta")}
    if inputs.get("initial_state") is not None:
        alone["initial_state"] = inputs["initial_state"][n : n + 1]
    return alone


def _float64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _norms(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x, axis=-1)


def _safe_gate(inputs: Inputs, raw: Any, bound: float = -5.0) -> Inputs:
    """These inputs with other raw gates (broadcast over g), A_log = 0 and no bias."""
    g = np.broadcast_to(raw, inputs["g"].shape).astype(inputs["g"].dtype)
    gate = {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": bound}
    plain = {name: x for name, x in inputs.items() if name != "dt_bias"}
    return plain | gate | {"g": g, "A_log": np.zeros(g.shape[2], np.float32)}


# ---- BR-01: all decays of a chunk referred to one row of it, past the range of exp


@_case("BR-01", "every channel at the bound", raw="bound", bound=-5.0)
@_case("BR-01", "every other channel at the bound", raw="alternate", bound=-5.0)
@_case("BR-01", "bound -1", raw="normal", bound=-1.0)
@_case("BR-01", "bound -2.5", raw="normal", bound=-2.5)
@_case("BR-01", "bound -3", raw="normal", bound=-3.0)
@_case("BR-01", "bound -5", raw="normal", bound=-5.0)
def _gate_range(run: Run, dtype: str, raw: str, bound: float) -> None:
    inputs = make_inputs("production", 1, 130, 2, dtype=dtype)
    gates = {
        "bound": 20.0,
        "alternate": np.where(np.arange(128) % 2, 20.0, -6.0),
        "normal": 2 * np.random.default_rng(0).standard_normal(inputs["g"].shape),
    }
    expect_oracle(run, _safe_gate(inputs, gates[raw], bound))


# ---- BR-02: an inverse through powers of L, which near-equal keys make huge


@_case("BR-02", "one key for 48 tokens", T=48)
@_case("BR-02", "one key for 2048 tokens", T=2048, bars=(0.25, 1.0))
def _one_key(run: Run, dtype: str, T: int, bars: tuple[float, float] = (WHOLE, TOKEN)) -> None:
    # At 2048 tokens flash-linear-attention's error is the bar, and it is far above 2e-2: here only nonsense
    # is refused.
    inputs = _safe_gate(make_inputs("slow", 1, T, 2, dtype=dtype, beta_dtype="float32"), -12.0)
    inputs["k"] = np.broadcast_to(inputs["k"][:, :1], inputs["k"].shape).copy()
    inputs["v"] = inputs["v"][:, np.arange(T) % 16]
    inputs["beta"] = np.full_like(inputs["beta"], 8.0)
    expect_oracle(run, inputs, bars)


@_case("BR-02", "runs of 16 equal tokens", run_length=16)
@_case("BR-02", "runs of 32 equal tokens", run_length=32)
def _equal_tokens(run: Run, dtype: str, run_length: int) -> None:
    T = 96
    inputs = _safe_gate(make_inputs("slow", 1, T, 2, dtype=dtype, beta_dtype="float32"), -12.0)
    source = np.arange(T) // run_length
    inputs |= {name: inputs[name][:, source] for name in ("q", "k", "v")}
    for logit in (2.25, 3.0, 4.0):
        expect_oracle(run, inputs | {"beta": np.full_like(inputs["beta"], logit)})


# ---- BR-03: a last sequence of a single token


@_case("BR-03", "63 and 1", lengths=(63, 1))
@_case("BR-03", "64 and 1", lengths=(64, 1))
@_case("BR-03", "127 and 1", lengths=(127, 1))
@_case("BR-03", "nine of one", lengths=(1,) * 9)
@_case("BR-03", "1 1 128 1", lengths=(1, 1, 128, 1))
def _ragged(run: Run, dtype: str, lengths: tuple[int, ...]) -> None:
    inputs = make_inputs("production", 1, sum(lengths), 2, dtype=dtype, lengths=lengths)
    o, state = expect_oracle(run, inputs)
    offsets = inputs["cu_seqlens"]
    for n in {*range(min(2, len(lengths))), len(lengths) - 1}:
        alone_o, alone_state = run(**part(inputs, n))
        expect_close(alone_o, _float64(o)[:, offsets[n] : offsets[n + 1]])
        expect_close_states(alone_state, _float64(state)[n : n + 1])


@_case("BR-03", "one token with a state", with_state=True)
@_case("BR-03", "one token alone", with_state=False)
def _one_token(run: Run, dtype: str, with_state: bool) -> None:
    inputs = make_inputs("production", 2, 1, 2, dtype=dtype, initial_state=with_state)
    o, state = expect_oracle(run, inputs)
    if not with_state:
        q, k = (
            x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
            for x in map(_float64, (inputs["q"], inputs["k"]))
        )
        v, beta = _float64(inputs["v"]), 1 / (1 + np.exp(-_float64(inputs["beta"])))[..., None]
        expect_close(o, 128**-0.5 * beta * (q * k).sum(-1, keepdims=True) * v)
        expect_close_states(state, (k[..., :, None] * (beta * v)[..., None, :])[:, 0])


# ---- BR-04: an empty sequence, whose final state was what lay in shared memory


@_case("BR-04", "empty sequences")
def _empty(run: Run, dtype: str) -> None:
    lengths = (0, 40, 0, 0, 57, 0)
    inputs = make_inputs("production", 1, 97, 2, dtype=dtype, lengths=lengths)
    run(**inputs | {"initial_state": inputs["initial_state"] * 1000})
    _, state = expect_oracle(run, inputs)
    _, from_nothing = run(**{name: x for name, x in inputs.items() if name != "initial_state"})
    for n in (0, 2, 3, 5):
        assert bits(state[n]) == bits(inputs["initial_state"][n])
        assert not np.asarray(from_nothing[n]).any()


# ---- BR-05: 32-bit element offsets


@_case("BR-05", "a repeated tile", tiles=6, heads=2)
@_case("BR-05", "a repeated tile past 2**31 elements", tiles=4100, heads=64, big=True)
def _index_width(run: Run, dtype: str, tiles: int, heads: int) -> None:
    # A log decay of -3.6 a token forgets everything within a tile, so that each tile but the first has one
    # answer.
    tile = make_inputs("none", 1, 64, heads, dtype=dtype, initial_state=False)
    tile["g"] = np.full_like(tile["g"], -3.6, dtype=tile["q"].dtype if dtype != "float16" else np.float32)
    repeated = {
        name: jnp.tile(x, (1, tiles) + (1,) * (x.ndim - 2)) if isinstance(x, np.ndarray) else x
        for name, x in tile.items()
    }
    o, _ = run(**repeated)
    first = {name: np.asarray(x[:, :128]) if hasattr(x, "ndim") else x for name, x in repeated.items()}
    want, _ = numpy_recurrence(**first)
    expect_close(o[:, :128], want)
    for n in range(2, tiles):
        difference = jnp.abs(o[:, n * 64 : (n + 1) * 64] - o[:, 64:128]).astype(jnp.float32).max()
        assert float(difference) <= 1e-2 * float(np.abs(want).max()), f"tile {n} differs by {difference}"


# ---- BR-06: a state laid out the other way round, unnoticed since K = V


@_case("BR-06", "an unsymmetric state", state_v_first=False)
@_case("BR-06", "an unsymmetric state, V first", state_v_first=True)
def _layout(run: Run, dtype: str, state_v_first: bool) -> None:
    expect_oracle(run, make_inputs("slow", 1, 130, 2, dtype=dtype, state_v_first=state_v_first))


@_case("BR-06", "one entry", state_v_first=False)
@_case("BR-06", "one entry, V first", state_v_first=True)
def _one_entry(run: Run, dtype: str, state_v_first: bool) -> None:
    inputs = make_inputs("none", 1, 1, 1, dtype=dtype, state_v_first=state_v_first)
    state = np.zeros((1, 1, 128, 128), np.float32)
    state[0, 0, 3, 77] = 1
    inputs["initial_state"] = np.swapaxes(state, -1, -2) if state_v_first else state
    inputs["q"] = np.zeros_like(inputs["q"])
    inputs["q"][..., 3] = 1
    inputs |= {"beta": np.zeros_like(inputs["beta"]), "scale": 1.0}
    inputs |= {"use_beta_sigmoid_in_kernel": False, "use_qk_l2norm_in_kernel": False}
    o, final = run(**inputs)
    assert np.flatnonzero(_float64(o)).tolist() == [77]
    assert float(np.asarray(o).ravel()[77]) == 1.0
    assert bits(final) == bits(inputs["initial_state"])


# ---- BR-07: more value heads than query/key heads


@_case("BR-07", "2 and 4 heads", H=2, HV=4)
@_case("BR-07", "1 and 8 heads", H=1, HV=8)
@_case("BR-07", "3 and 6 heads", H=3, HV=6)
def _heads(run: Run, dtype: str, H: int, HV: int) -> None:
    inputs = make_inputs("production", 1, 70, H, HV, dtype=dtype)
    o, state = expect_oracle(run, inputs)
    repeated = {name: np.repeat(inputs[name], HV // H, axis=2) for name in ("q", "k")}
    same_o, same_state = run(**inputs | repeated)
    expect_close(same_o, _float64(o), bars=(1e-2, 2e-2))
    expect_close_states(same_state, _float64(state), 1e-2)


# ---- BR-08: beta's sigmoid rounded to bfloat16 on the way


@_case("BR-08", "the slope in beta")
def _beta_width(run: Run, dtype: str) -> None:
    inputs = make_inputs("none", 1, 1, 2, dtype=dtype, beta_dtype="float32", initial_state=False)
    k, v = _float64(inputs["k"])[0, 0], _float64(inputs["v"])[0, 0]
    k /= np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    outer = k[:, :, None] * v[:, None, :]
    for value, is_logit in (
        (0.62245935, False),
        (0.57623, False),
        (0.37808, False),
        (0.8221, False),
        (0.5, True),
    ):
        beta = {"beta": np.full((1, 1, 2), value, np.float32), "use_beta_sigmoid_in_kernel": is_logit}
        _, state = run(**inputs | beta)
        want = outer * (1 / (1 + np.exp(-value)) if is_logit else value)
        slope = (_float64(state)[0] * want).sum() / (want * want).sum()
        assert abs(slope - 1) <= 8e-4, f"beta {value}: slope {slope}"


# ---- BR-09: softplus by blending two branches


@_case("BR-09", "softplus of -100 to 120", safe=False)
@_case("BR-09", "safe gate of -120 and 120", safe=True)
def _gate_extremes(run: Run, dtype: str, safe: bool) -> None:
    inputs = make_inputs("production", 1, 70, 2, dtype=dtype)
    rng = np.random.default_rng(0)
    if safe:
        expect_oracle(run, _safe_gate(inputs, rng.choice([-120.0, 120.0], inputs["g"].shape)))
        return
    raw = rng.uniform(-100, 120, inputs["g"].shape).astype(inputs["g"].dtype)
    raw[0, 0, 0, :2] = -100, 120
    inputs |= {"g": raw, "safe_gate": False, "A_log": np.full(2, np.log(0.02), np.float32)}
    expect_oracle(run, {name: x for name, x in inputs.items() if name not in ("dt_bias", "lower_bound")})


# ---- BR-10: no earlier state, but somebody else's was there


@_case("BR-10", "no state after a large one", lengths=None)
@_case("BR-10", "no state after a large one, packed", lengths=(33, 0, 64))
def _no_state(run: Run, dtype: str, lengths: tuple[int, ...] | None) -> None:
    inputs = make_inputs("slow", 1, 97, 2, dtype=dtype, lengths=lengths)
    run(**inputs | {"initial_state": inputs["initial_state"] * 1e4})
    expect_oracle(run, inputs | {"initial_state": None})


# ---- BR-11: a race that shows when two inputs take turns


@_case("BR-11", "two inputs in turn", T=1100, heads=2, rounds=20)
@_case("BR-11", "two inputs in turn, at size", T=8192, heads=12, rounds=100, big=True)
def _race(run: Run, dtype: str, T: int, heads: int, rounds: int) -> None:
    pair = [make_inputs("production", 1, T, heads, dtype=dtype, seed=seed) for seed in (1, 2)]
    pair = [{name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in i.items()} for i in pair]
    first = [[bits(x) for x in expect_oracle(run, inputs)] for inputs in pair]
    for _ in range(rounds):
        for inputs, want in zip(pair, first, strict=True):
            assert [bits(x) for x in run(**inputs)] == want


# ---- BR-12: an endless wait on a long-tailed pack with a state in and out


@_case("BR-12", "a long-tailed pack", lengths=(124, 120, 124, 122, 119, 120, 52), heads=4)
@_case(
    "BR-12",
    "a long-tailed pack, at size",
    lengths=(1238, 1199, 1240, 1216, 1187, 1203, 519),
    heads=48,
    big=True,
)
def _long_tail(run: Run, dtype: str, lengths: tuple[int, ...], heads: int) -> None:
    inputs = make_inputs("production", 1, sum(lengths), heads, dtype=dtype, lengths=lengths)
    inputs["initial_state"] = np.zeros_like(inputs["initial_state"])
    o, state = run(**inputs)
    begin = time.monotonic()
    for _ in range(20):
        again_o, again_state = run(**inputs)
        assert (bits(again_o), bits(again_state)) == (bits(o), bits(state))
    assert time.monotonic() - begin < 60
    ends = np.array([0, heads - 1])
    two = inputs | {name: inputs[name][:, :, ends] for name in ("q", "k", "v", "g", "beta")}
    two |= {name: inputs[name][ends] for name in ("A_log", "dt_bias")}
    want_o, want_state = numpy_recurrence(**two | {"initial_state": inputs["initial_state"][:, ends]})
    expect_close(_float64(o)[:, :, ends], want_o, inputs["cu_seqlens"])
    assert want_state is not None
    expect_close_states(np.asarray(state)[:, ends], want_state)
