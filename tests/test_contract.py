"""The contract: what a good call becomes, and that every bad one is refused with a message that helps."""

import pathlib
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import call

from jax_kda import contract, regions, routing
from jax_kda.contract import BetaMode, GateMode, Options, Problem


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def test_dense_call():
    problem = contract.check(**call(B=2, T=7, H=2, HV=4, K=8, V=4, state=None))
    assert problem == Problem(
        Options(scale=8**-0.5), 2, 7, 2, 4, 8, 4, 1, "float32", "float32", "float32", None
    )
    assert problem.output_shape == (2, 7, 4, 4)
    assert problem.state_shape == (2, 1, 4, 8, 4)
    assert problem.options.operand_names == ("q", "k", "v", "g", "beta")


def test_packed_call_with_everything():
    arguments = call(
        B=1,
        gate="safe",
        state="bfloat16",
        lengths=(3, 0, 4),
        state_v_first=True,
        lower_bound=-4,
        scale=2,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        output_final_state=False,
        route="xla",
    )
    problem = contract.check(**arguments)
    assert problem.options == Options(
        scale=2.0,
        gate=GateMode.SAFE,
        lower_bound=-4.0,
        beta=BetaMode.SIGMOID_DOUBLED,
        l2norm=True,
        packed=True,
        has_dt_bias=True,
        has_initial_state=True,
        output_final_state=False,
        state_v_first=True,
        state_dtype="bfloat16",
        route="xla",
    )
    assert (problem.N, problem.initial_state_dtype) == (3, "bfloat16")
    assert problem.state_shape == (1, 3, 4, 4, 8)
    assert problem.options.operand_names == (
        "q",
        "k",
        "v",
        "g",
        "beta",
        "A_log",
        "dt_bias",
        "initial_state",
        "offsets",
    )
    assert problem.options.result_names == ("o",)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, lambda x: spec(*x.shape, dtype=x.dtype)])
def test_any_kind_of_array(kind):
    arguments = call(gate="softplus", lengths=(7,), B=1)
    made = {name: kind(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    assert contract.check(**made) == contract.check(**arguments)


def test_options_hash_and_pickle():
    options = contract.check(**call(gate="safe")).options
    assert hash(options) == hash(pickle.loads(pickle.dumps(options)))
    assert pickle.loads(pickle.dumps(options)) == options
    assert {options: 1}[contract.check(**call(gate="safe")).options] == 1


def test_gate_modes():
    assert contract.check(**call(gate="softplus", bias=False)).options.has_dt_bias is False
    # The safe gate alone may do without A_log, as in flash-linear-attention.
    assert contract.check(**call(gate="safe") | {"A_log": None}).options.gate == GateMode.SAFE
    # There, safe_gate is also passed beside ready-made log decays, as a hint.
    assert contract.check(**call(safe_gate=True)).options.gate == GateMode.LOG
    assert contract.check(**call(lower_bound=None)).options.lower_bound == 0.0
    assert contract.check(**call(gate="softplus") | {"dt_bias": spec(32)}).options.has_dt_bias


@pytest.mark.parametrize("flag", [np.True_, True])
def test_numpy_bools_and_numbers_are_static_too(flag):
    options = contract.check(**call(use_qk_l2norm_in_kernel=flag, scale=np.float32(0.5))).options
    assert options.l2norm is True
    assert type(options.scale) is float


def test_symbolic_sizes():
    B, T = jax.export.symbolic_shape("b, t")
    arguments = call(B=1, T=1, state=None)
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name] = spec(B, T, *arguments[name].shape[2:])
    problem = contract.check(**arguments, initial_state=spec(B, 4, 8, 4))
    assert not problem.is_static
    assert problem.state_shape == (B, 1, 4, 8, 4)


REFUSALS = {
    "q a list": ({"q": [1.0]}, TypeError, "q: got list; allowed: an array", "jax.numpy.asarray(q)"),
    "q rank": ({"q": spec(2, 7, 16)}, ValueError, "q: got shape (2, 7, 16)", "4 dimensions [B, T, H, K]"),
    "q dtype": (
        {"q": spec(2, 7, 2, 8, dtype="int32")},
        TypeError,
        "q: got int32",
        "bfloat16 or float16 or float32",
    ),
    "q no heads": ({"q": spec(2, 7, 0, 8)}, ValueError, "q: got H = 0", "H >= 1"),
    "q no channels": ({"q": spec(2, 7, 2, 0)}, ValueError, "q: got K = 0", "K >= 1"),
    "k rank": ({"k": spec(2, 7, 8)}, ValueError, "k: got shape (2, 7, 8)", "[B, T, H, K] = [2, 7, 2, 8]"),
    "k shape": (
        {"k": spec(2, 7, 4, 8)},
        ValueError,
        "k: got shape (2, 7, 4, 8)",
        "[2, 7, 2, 8]",
        "same shape",
    ),
    "k dtype": (
        {"k": spec(2, 7, 2, 8, dtype="float16")},
        TypeError,
        "k: got float16",
        "dtype of q, float32",
        "astype",
    ),
    "v rank": ({"v": spec(2, 7, 4)}, ValueError, "v: got shape (2, 7, 4)", "[B, T, HV, V]"),
    "v tokens": ({"v": spec(2, 8, 4, 4)}, ValueError, "v: got shape (2, 8, 4, 4)", "[2, 7, 4, 4]"),
    "v heads": ({"v": spec(2, 7, 3, 4)}, ValueError, "v: got HV = 3 value heads with H = 2", "multiple of H"),
    "v no channels": ({"v": spec(2, 7, 4, 0)}, ValueError, "v: got V = 0", "V >= 1"),
    "v dtype": ({"v": spec(2, 7, 4, 4, dtype="bfloat16")}, TypeError, "v: got bfloat16", "float32"),
    "g shape": (
        {"g": spec(2, 7, 2, 8)},
        ValueError,
        "g: got shape (2, 7, 2, 8)",
        "[2, 7, 4, 8]",
        "value head",
    ),
    "g dtype": ({"g": spec(2, 7, 4, 8, dtype="float16")}, TypeError, "g: got float16", "bfloat16 or float32"),
    "beta shape": (
        {"beta": spec(2, 7, 4, 1)},
        ValueError,
        "beta: got shape (2, 7, 4, 1)",
        "[B, T, HV] = [2, 7, 4]",
    ),
    "beta dtype": ({"beta": spec(2, 7, 4, dtype="int8")}, TypeError, "beta: got int8", "bfloat16 or float32"),
    "scale traced": (
        {"scale": spec()},
        TypeError,
        "scale: got ShapeDtypeStruct",
        "a Python number",
        "float(scale)",
    ),
    "scale bool": ({"scale": True}, TypeError, "scale: got bool", "a Python number"),
    "scale nan": ({"scale": float("nan")}, ValueError, "scale: got nan", "a finite number"),
    "state shape": (
        {"initial_state": spec(3, 4, 8, 4)},
        ValueError,
        "initial_state: got shape (3, 4, 8, 4)",
        "[N, HV, K, V] = [2, 4, 8, 4]",
        "None stands for zeros",
    ),
    "state turned": ({"initial_state": spec(2, 4, 4, 8)}, ValueError, "initial_state:", "state_v_first=True"),
    "state not turned": (
        {"state_v_first": True},
        ValueError,
        "[N, HV, V, K] = [2, 4, 4, 8]",
        "state_v_first=False",
    ),
    "state dtype": (
        {"initial_state": spec(2, 4, 8, 4, dtype="float16")},
        TypeError,
        "initial_state: got float16",
        "float32 or bfloat16",
    ),
    "offsets with B": (
        {"cu_seqlens": np.array([0, 7], np.int32)},
        ValueError,
        "cu_seqlens: got packed sequences with B = 2",
        "B = 1",
        "jax.vmap",
    ),
    "offsets rank": (
        {"cu_seqlens": spec(1, 3, dtype="int32")},
        ValueError,
        "cu_seqlens: got shape (1, 3)",
        "[N + 1]",
    ),
    "offsets short": (
        {"cu_seqlens": spec(1, dtype="int32")},
        ValueError,
        "cu_seqlens: got shape (1,)",
        "N >= 1",
    ),
    "offsets dtype": ({"cu_seqlens": spec(3)}, TypeError, "cu_seqlens: got float32", "int32 or int64"),
    "A_log unused": (
        {"A_log": spec(4)},
        ValueError,
        "A_log: got an array with use_gate_in_kernel=False",
        "None",
        "use_gate_in_kernel=True",
    ),
    "dt_bias unused": (
        {"dt_bias": spec(4, 8)},
        ValueError,
        "dt_bias: got an array",
        "use_gate_in_kernel=True",
    ),
    "A_log missing": (
        {"use_gate_in_kernel": True},
        ValueError,
        "A_log: got None with use_gate_in_kernel=True",
        "[HV] = [4]",
    ),
    "A_log shape": (
        {"use_gate_in_kernel": True, "A_log": spec(2)},
        ValueError,
        "A_log: got shape (2,)",
        "[HV] = [4]",
    ),
    "A_log dtype": (
        {"use_gate_in_kernel": True, "A_log": spec(4, dtype="bfloat16")},
        TypeError,
        "A_log: got bfloat16",
        "float32",
    ),
    "dt_bias shape": (
        {"use_gate_in_kernel": True, "A_log": spec(4), "dt_bias": spec(8, 4)},
        ValueError,
        "dt_bias: got shape (8, 4)",
        "[HV, K] = [4, 8] or [HV * K] = [32]",
    ),
    "dt_bias dtype": (
        {"use_gate_in_kernel": True, "A_log": spec(4), "dt_bias": spec(4, 8, dtype="bfloat16")},
        TypeError,
        "dt_bias: got bfloat16",
        "float32",
    ),
    "bound missing": (
        {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": None},
        ValueError,
        "lower_bound: got None with safe_gate=True",
        "-5.0",
    ),
    "bound positive": (
        {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": 5.0},
        ValueError,
        "lower_bound: got 5.0",
        "a negative number",
    ),
    "bound text": (
        {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": "-5"},
        TypeError,
        "lower_bound: got str",
        "a Python number",
    ),
    "negative eigenvalues": (
        {"allow_neg_eigval": True},
        ValueError,
        "allow_neg_eigval: got True with use_beta_sigmoid_in_kernel=False",
        "use_beta_sigmoid_in_kernel=True",
    ),
} | {
    f"{name} not a bool": ({name: 1}, TypeError, f"{name}: got 1", "a Python bool", "static")
    for name in (
        "output_final_state",
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "safe_gate",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "state_v_first",
    )
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case):
    change, error, *parts = REFUSALS[case]
    with pytest.raises(error) as caught:
        contract.check(**call() | change)
    message = str(caught.value)
    for part in (*parts, "; allowed: ", " Note: "):
        assert part in message, message
    assert re.match(r"\w+: got ", message), message


def test_symbolic_heads_are_refused():
    (heads,) = jax.export.symbolic_shape("h")
    with pytest.raises(ValueError, match=r"q: got a symbolic H \(h\); allowed: a plain integer"):
        contract.check(**call() | {"q": spec(2, 7, heads, 8)})


def test_packed_rows_are_counted_in_int32():
    T = 2**31
    long = {
        name: spec(1, T, *x.shape[2:]) for name, x in call().items() if name in ("q", "k", "v", "g", "beta")
    }
    with pytest.raises(ValueError, match=r"q: got T = 2147483648 with cu_seqlens; allowed: T < 2\*\*31"):
        contract.check(**long, cu_seqlens=spec(2, dtype="int32"))
    contract.check(**long)


def test_numpy_offsets_are_checked_and_others_are_not():
    arguments = call(B=1, lengths=(3, 4))
    with pytest.raises(ValueError, match=r"cu_seqlens\[-1\] = 8; allowed: at most T = 7"):
        contract.check(**arguments | {"cu_seqlens": np.array([0, 3, 8])})
    contract.check(**arguments | {"cu_seqlens": jnp.array([0, 3, 8])})
    contract.check(**arguments | {"cu_seqlens": np.array([2, 2, 5])})


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        ([-1, 3], ValueError, "cu_seqlens: got cu_seqlens[0] = -1; allowed: cu_seqlens[0] >= 0"),
        (
            [0, 5, 4, 9],
            ValueError,
            "cu_seqlens: got cu_seqlens[1] = 5 > cu_seqlens[2] = 4; allowed: offsets that never",
        ),
        ([0, 11], ValueError, "cu_seqlens: got cu_seqlens[-1] = 11; allowed: at most T = 10"),
        ([0], ValueError, "cu_seqlens: got shape (1,); allowed: [N + 1] with N >= 1"),
        ([[0, 1]], ValueError, "cu_seqlens: got shape (1, 2); allowed: [N + 1]"),
        ([0.0, 1.0], TypeError, "cu_seqlens: got float64; allowed: int32 or int64"),
    ],
)
def test_check_cu_seqlens(offsets, error, message):
    with pytest.raises(error, match=re.escape(message)):
        contract.check_cu_seqlens(offsets, 10)


def test_good_cu_seqlens():
    contract.check_cu_seqlens([0, 0, 4, 10], 10)
    contract.check_cu_seqlens(jnp.array([2, 12]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": spec(2, 9, 2, 8)}, "q: got T = 9; allowed: 1 to 8 tokens a call"),
        ({"q": spec(2, 0, 2, 8)}, "q: got T = 0; allowed: 1 to 8 tokens a call"),
        ({"initial_state": None}, "initial_state: got None; allowed: the state [N, HV, K, V]"),
    ],
)
def test_decode_refusals(change, message):
    good = {"q": spec(2, 1, 2, 8), "initial_state": spec(2, 4, 8, 4)}
    with pytest.raises(ValueError, match=re.escape(message)):
        contract.check_decode(**good | change)


@pytest.mark.parametrize("module", [contract, regions, routing])
def test_readable_without_jax(module):
    assert not re.search(r"^\s*(import|from) jax\b", pathlib.Path(module.__file__).read_text(), re.MULTILINE)
