"""The public operations: what goes in, what comes out, what a call costs."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import arrays, call, options

import jax_kda
from jax_kda import routing
from jax_kda.routing import Route

TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}

VARIANTS = {
    "dense": {},
    "one token": {"T": 1},
    "softplus": {"gate": "softplus"},
    "safe, no bias": {"gate": "safe", "bias": False, "lower_bound": -3.0},
    "everything": {
        "B": 1,
        "T": 20,
        "gate": "safe",
        "lengths": (5, 0, 13),
        "state_v_first": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "scale": 0.3,
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_against_the_reference(name):
    arguments = call(**VARIANTS[name])
    o, state = jax_kda.kda_prefill(**arguments)
    wanted_o, wanted_state = jax_kda.kda_reference(**arguments)
    np.testing.assert_allclose(o, wanted_o, **TOLERANCE)
    np.testing.assert_allclose(state, wanted_state, **TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("state", [None, "float32", "bfloat16"])
def test_result_types(dtype, state):
    arguments = call(dtype=dtype, state=state)
    o, final = jax.eval_shape(lambda: jax_kda.kda_prefill(**arguments))
    assert (o.shape, o.dtype) == ((2, 7, 4, 4), jnp.dtype(dtype))
    assert (final.shape, final.dtype) == ((2, 4, 8, 4), jnp.dtype(state or "float32"))
    o, final = jax.eval_shape(lambda: jax_kda.kda_prefill(**arguments, output_final_state=False))
    assert (o.shape, final) == ((2, 7, 4, 4), None)


def test_packed_state_shapes():
    arguments = call(B=1, lengths=(3, 0, 4), state_v_first=True)
    _, final = jax.eval_shape(lambda: jax_kda.kda_prefill(**arguments))
    assert final.shape == (3, 4, 4, 8)


@pytest.mark.parametrize("empty", [{"T": 0}, {"B": 0}, {"B": 1, "T": 0, "lengths": (0, 0)}])
def test_nothing_to_do(empty):
    arguments = call(**empty)
    o, state = jax_kda.kda_prefill(**arguments)
    assert o.shape == (arguments["q"].shape[0], arguments["q"].shape[1], 4, 4)
    np.testing.assert_array_equal(state, arguments["initial_state"])


def test_a_call_written_for_flash_linear_attention():
    arguments = call(B=1, gate="softplus", lengths=(3, 4))
    q, k, v, g, beta = (arguments[name] for name in ("q", "k", "v", "g", "beta"))
    o, final_state = jax_kda.kda_prefill(
        q,
        k,
        v,
        g,
        beta,
        A_log=arguments["A_log"],
        dt_bias=arguments["dt_bias"].reshape(-1),
        scale=None,
        initial_state=arguments["initial_state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=True,
        safe_gate=False,
        lower_bound=None,
        cu_seqlens=arguments["cu_seqlens"].astype(np.int64),
    )
    wanted_o, wanted_state = jax_kda.kda_prefill(**arguments)
    np.testing.assert_array_equal(o, wanted_o)
    np.testing.assert_array_equal(final_state, wanted_state)


def test_safe_gate_without_a_log():
    arguments = call(gate="safe")
    without = jax_kda.kda_prefill(**arguments | {"A_log": None})
    zeros = jax_kda.kda_prefill(**arguments | {"A_log": np.zeros(4, np.float32)})
    np.testing.assert_array_equal(without[0], zeros[0])


def test_arguments_never_change():
    arguments = {name: jnp.asarray(x) for name, x in arrays(call(gate="safe")).items()}
    before = {name: np.array(x) for name, x in arguments.items()}
    jax_kda.kda_prefill(**arguments, use_gate_in_kernel=True, safe_gate=True)
    for name, x in arguments.items():
        np.testing.assert_array_equal(x, before[name])


def test_donated_arguments_give_the_same_numbers():
    arguments = call()
    wanted = jax_kda.kda_prefill(**arguments)
    step = jax.jit(lambda state, x: jax_kda.kda_prefill(**x, initial_state=state), donate_argnums=0)
    state = jnp.array(arguments.pop("initial_state"))
    got = step(state, arguments)
    assert state.is_deleted()
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[1], wanted[1])


def test_decode_continues_a_prefill():
    arguments = call(T=12, gate="safe")
    o, state = jax_kda.kda_prefill(**arguments)
    rest = options(arguments) | {"A_log": arguments["A_log"], "dt_bias": arguments["dt_bias"]}
    tokens = {name: arguments[name] for name in ("q", "k", "v", "g", "beta")}

    def part(begin, end):
        return {name: x[:, begin:end] for name, x in tokens.items()} | rest

    o_part, running = jax_kda.kda_prefill(**part(0, 5), initial_state=arguments["initial_state"])
    outputs = [o_part]
    for begin, end in ((5, 6), (6, 7), (7, 12)):
        o_part, running = jax_kda.kda_decode(**part(begin, end), initial_state=running)
        outputs.append(o_part)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), o, **TOLERANCE)
    np.testing.assert_allclose(running, state, **TOLERANCE)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": np.zeros((2, 9, 2, 8), np.float32)}, ValueError, "q: got T = 9; allowed: 1 to 8 tokens"),
        ({"initial_state": None}, ValueError, "initial_state: got None; allowed: the state"),
        ({"route": "fast"}, ValueError, "route: got 'fast'; allowed: 'auto'"),
    ],
)
def test_decode_refuses(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        jax_kda.kda_decode(**call() | change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"k": np.zeros((2, 7, 2, 9), np.float32)},
            ValueError,
            "k: got shape (2, 7, 2, 9); allowed: [B, T, H, K]",
        ),
        ({"route": "fast"}, ValueError, "route: got 'fast'; allowed: 'auto', 'xla'"),
        ({"route": 3}, TypeError, "route: got int; allowed: 'auto', 'xla'"),
        (
            {"route": "baseline_m128"},
            ValueError,
            "'baseline_m128', but it needs a CUDA device, and this call is for",
        ),
        ({"chunk_size": 64}, TypeError, "chunk_size"),
    ],
)
def test_refusals_reach_the_caller(change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        jax_kda.kda_prefill(**call() | change)
    with pytest.raises(error, match=re.escape(message)):
        jax.jit(lambda: jax_kda.kda_prefill(**call() | change))()


@pytest.mark.parametrize("route", ["xla", Route.XLA])
def test_a_forced_route(route):
    arguments = call()
    forced = jax_kda.kda_prefill(**arguments, route=route)
    np.testing.assert_array_equal(forced[0], jax_kda.kda_prefill(**arguments)[0])


def test_explain_route_from_arrays_shapes_and_tracers(cuda_build):
    arguments = call(K=128, V=128, dtype="bfloat16", gate="safe")
    here = jax_kda.explain_route(**arguments)
    assert (here.route, here.device.platform) == (Route.XLA, "cpu")
    decision = jax_kda.explain_route(**arguments, device="cuda")
    assert decision.route is not Route.XLA
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays(arguments).items()}
    assert jax_kda.explain_route(**shapes, **options(arguments), device="cuda") == decision

    seen = []
    jax.eval_shape(
        lambda x: seen.append(jax_kda.explain_route(**x, **options(arguments), device="cuda")), shapes
    )
    assert seen == [decision]


def test_explain_route_for_other_devices(cuda_build):
    arguments = call(K=128, V=128, dtype="bfloat16")
    a100 = routing.Device("cuda", "NVIDIA A100", (8, 0), 108)
    assert "sm_90a" in jax_kda.explain_route(**arguments, device=a100).reason
    assert jax_kda.explain_route(**arguments, device=jax.devices("cpu")[2]).device == routing.CPU
    assert jax_kda.explain_route(**arguments, device="tpu").device == routing.Device("tpu", "TPU")
    with pytest.raises(ValueError, match="q: got shape"):
        jax_kda.explain_route(**arguments | {"q": np.zeros(3, np.float32)}, device="cuda")
    with pytest.raises(ValueError, match="route: got 'baseline_m128', but it takes bfloat16"):
        jax_kda.explain_route(**call(K=128, V=128), device="cuda", route="baseline_m128")


def test_float32_and_other_head_sizes_say_why_they_take_xla(cuda_build):
    for arguments, reason in (
        (call(K=128, V=128), "these are float32"),
        (call(K=128, V=128, dtype="float16"), "these are float16"),
        (call(K=64, V=128, dtype="bfloat16"), "these are K = 64, V = 128"),
    ):
        decision = jax_kda.explain_route(**arguments, device="cuda")
        assert decision.route is Route.XLA
        assert reason in str(decision)


def test_without_an_extension_the_reason_is_given(no_cuda_build):
    decision = jax_kda.explain_route(**call(K=128, V=128, dtype="bfloat16"), device="cuda")
    assert decision.route is Route.XLA
    assert "the CUDA extension is not there: pretended to be absent" in decision.reason


def test_an_eager_call_is_lowered_once(monkeypatch):
    arguments = call(B=3, T=5)  # shapes of no other test
    chosen = []
    choose = routing.choose
    monkeypatch.setattr(routing, "choose", lambda *args: chosen.append(args) or choose(*args))
    for _ in range(3):
        jax_kda.kda_prefill(**arguments)
    assert len(chosen) == 1


def test_public_names():
    for name in jax_kda.__all__:
        assert getattr(jax_kda, name).__doc__


def test_threads():
    """Independent calls from several host threads: the bits of one call after another."""
    calls = [call(seed=seed) for seed in range(4)]
    wanted = [jax_kda.kda_prefill(**arguments) for arguments in calls]

    def rounds(arguments):
        with jax.default_device(jax.devices("cpu")[0]):
            return [jax_kda.kda_prefill(**arguments) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for got, (o, state) in zip(pool.map(rounds, calls), wanted, strict=True):
            for again in got:
                np.testing.assert_array_equal(again[0], o)
                np.testing.assert_array_equal(again[1], state)


def test_the_persistent_cache_serves_the_next_process(tmp_path):
    script = """
import jax, jax_kda
from calls import call
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
jax.block_until_ready(jax_kda.kda_prefill(**call(T=2)))
print(sum("cache_hits" in event for event in events))
"""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": ":".join(filter(None, sys.path)),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-c", script]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
        for _ in range(2)
    )
    assert (int(first), int(second)) == (0, 1)
