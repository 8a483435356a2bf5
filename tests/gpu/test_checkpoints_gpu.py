"""State checkpoints on every route: right, zeros where none are, no other bits, and bits to go on from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import BAR, BFLOAT16, DRY, TOKENS, Findings, on_device, same_bits, split
from oracle import numpy_recurrence, relative_error

import jax_kda
from jax_kda.regimes import make_inputs
from jax_kda.routing import Route

# (regime, dtype of the gates): a kernel each.
KERNELS = [
    ("slow", None),
    ("production", "float32"),
    ("mixed", "bfloat16"),
    ("long", None),
    ("unbounded", None),
]
PACKED = (130, 0, 64, 1, 63, 321, 128)

# These routes prepare and meet a chunk in one way wherever it stands in the call.
SAME_BITS = [r.value for r in Route if r not in (Route.XLA, Route.SEGMENTED)]


def compare(run, inputs, every, found, where):
    got = run(**inputs, checkpoint_every=every)
    wanted = numpy_recurrence(**inputs, checkpoint_every=every)
    rounding = BFLOAT16 if got[2].dtype == jnp.bfloat16 else 0.0
    with found.gather(where):
        assert got[2].shape == wanted[2].shape
        found.figure("o", relative_error(got[0], wanted[0]), BAR, where)
        if got[1] is not None:
            assert got[1].dtype == got[2].dtype
            found.figure("state", relative_error(got[1], wanted[1]), BAR + rounding, where)
        for i, (x, y) in enumerate(zip(np.asarray(got[2]), wanted[2], strict=True)):
            for head in range(y.shape[0]):
                found.figure("checkpoint", relative_error(x[head], y[head]), 2e-2, f"{where}: {i}, {head}")
        found.figure("checkpoints", relative_error(got[2], wanted[2]), BAR + rounding, where)
    return got


@pytest.mark.parametrize("every", [64, 192])
@pytest.mark.parametrize(("regime", "g_dtype"), KERNELS[:1] if DRY else KERNELS)
def test_checkpoints(run, regime, g_dtype, every, record_property):
    calls = {
        "dense": {"B": 2, "T": 330},
        "packed": {"B": 1, "T": 800, "lengths": PACKED},
        "v first": {"B": 1, "T": 800, "lengths": PACKED, "state_v_first": True, "state_dtype": "bfloat16"},
        "no state": {"B": 1, "T": 256, "initial_state": False, "output_final_state": False},
        "too short": {"B": 2, "T": 63},
    }
    with Findings(record_property) as found:
        for where, sizes in calls.items():
            inputs = make_inputs(regime, H=1, HV=2, g_dtype=g_dtype, **sizes)
            got = compare(run, inputs, every, found, where)
            plain = run(**inputs)
            found.expect(same_bits(got[:2], plain), f"{where}: o or the state has other bits than without")


@pytest.mark.parametrize("T", [4100] if DRY else [4100, 20000])
def test_many_chunks(run, T, record_property):
    with Findings(record_property) as found:
        compare(run, make_inputs("mixed", 1, T, 1, 2), 1024, found, "dense")
        lengths = (T - 70, 0, 63, 7)
        compare(run, make_inputs("slow", 1, T, 1, 1, lengths=lengths), 64, found, "packed")


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", [(200,) * 3, (65,) * 40], ids=["few", "many"])
def test_places_without_a_checkpoint_are_zeros(run, lengths, state_dtype):
    """Whatever lay there before: NaN, here, in whatever XLA gives the result."""
    T = sum(lengths) + 500
    inputs = on_device(make_inputs("slow", 1, T, 1, 4, lengths=lengths, state_dtype=state_dtype))
    arrays, rest = split(inputs)
    function = jax.jit(lambda x: run(**x, **rest, checkpoint_every=64))
    poison = [jnp.full((T // 64, 4, 128, 128), jnp.nan, state_dtype) for _ in range(4)]
    jax.block_until_ready(poison)
    del poison
    checkpoints = np.asarray(function(arrays)[2], np.float32)
    used = int(jax_kda.checkpoint_offsets(np.cumsum([0, *lengths]), 64)[-1])
    assert used < T // 64
    assert np.isfinite(checkpoints).all()
    assert checkpoints[:used].any(axis=(1, 2, 3)).all()
    assert not checkpoints[used:].any()


@pytest.mark.parametrize("route", ["xla"] if DRY else SAME_BITS)
@pytest.mark.parametrize(("regime", "g_dtype"), KERNELS[:1] if DRY else KERNELS)
def test_going_on_gives_the_same_bits(route, regime, g_dtype):
    inputs = on_device(make_inputs(regime, 1, 700, 1, 2, g_dtype=g_dtype))
    o, state, checkpoints = jax_kda.kda_prefill(**inputs, checkpoint_every=64, route=route)
    for done in (64, 128, 640):
        tail = {name: inputs[name][:, done:] for name in TOKENS}
        start = {"initial_state": checkpoints[done // 64 - 1 : done // 64]}
        rest_o, rest_state, rest_checkpoints = jax_kda.kda_prefill(
            **inputs | tail | start, checkpoint_every=64, route=route
        )
        if DRY:  # the chunk form gives the same to rounding only
            assert relative_error(rest_o, o[:, done:]) <= 1e-2
            continue
        assert same_bits(rest_o, o[:, done:]), f"o behind token {done}"
        assert same_bits(rest_state, state), f"final state behind token {done}"
        assert same_bits(rest_checkpoints, checkpoints[done // 64 :]), f"checkpoints behind token {done}"


def test_pieces_of_one_call(run, record_property):
    """Three calls, each from the last checkpoint of the one before, give the whole to rounding."""
    inputs = make_inputs("long", 1, 700, 1, 2)
    o, state, _ = run(**inputs, checkpoint_every=128)
    pieces, start, done = [], inputs["initial_state"], 0
    for end in (256, 512, 700):
        tail = {name: inputs[name][:, done:end] for name in TOKENS}
        piece, last, kept = run(**inputs | tail | {"initial_state": start}, checkpoint_every=128)
        pieces.append(piece)
        start, done = kept[-1:], end
    with Findings(record_property) as found:
        found.figure("o", relative_error(jnp.concatenate(pieces, axis=1), o), BAR)
        found.figure("state", relative_error(last, state), BAR)


def test_wrong_offsets_on_the_device(run):
    inputs = make_inputs("slow", 1, 500, 1, 2, lengths=(100, 150, 250))
    for offsets in ([400, 10, 500, 300], [-5, 2**31 - 1, -(2**31), 500], [0, 500, 0, 500], [500] * 4):
        _, _, checkpoints = run(
            **inputs | {"cu_seqlens": jnp.asarray(offsets, jnp.int32)}, checkpoint_every=64
        )
        assert checkpoints.shape == (7, 2, 128, 128)
        jax.block_until_ready(checkpoints)


def test_with_a_pool(run, record_property):
    inputs = make_inputs("slow", 1, 500, 1, 2, lengths=(200, 130, 170))
    pool = np.concatenate([inputs["initial_state"], np.full_like(inputs["initial_state"], np.nan)])
    places = np.array([2, -1, 0], np.int32)
    _, new_pool, checkpoints = run(
        **inputs | {"initial_state": pool, "state_indices": places}, checkpoint_every=64
    )
    wanted = numpy_recurrence(**inputs | {"initial_state": pool[[2, 1, 0]]}, checkpoint_every=64)
    wanted[2][3:5] = 0  # those of the padding slot
    with Findings(record_property) as found:
        found.figure("checkpoints", relative_error(checkpoints, wanted[2]), BAR)
        found.figure("state", relative_error(np.asarray(new_pool)[[2, 0]], wanted[1][[0, 2]]), BAR)
