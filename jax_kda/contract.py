"""What one call of Kimi Delta Attention prefill is: its shapes, dtypes and options, checked.

Everything a caller can get wrong and that is knowable from shapes, dtypes and static options is refused here,
at trace time, with a message of one form: the argument, what it got, what is allowed, what to do about it.

Dimensions, here and everywhere in the package:

| name  | meaning                                                                       |
|-------|-------------------------------------------------------------------------------|
| B     | rows of the batch                                                             |
| T     | tokens in a row                                                               |
| N     | sequences *per row* of the batch (1 unless packed)                            |
| H, HV | query/key heads, value heads; value head h reads query/key head h // (HV // H) |
| K, V  | size of a query/key head, size of a value head                                |

B, T and N may be symbolic (`jax.export`); the others are plain integers. This module imports no JAX: it reads
`shape` and `dtype`, so arrays, tracers, `jax.ShapeDtypeStruct` and NumPy arrays all pass.
"""

from __future__ import annotations

import enum
import functools
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

__all__ = [
    "BetaMode",
    "GateMode",
    "Options",
    "Problem",
    "check",
    "check_checkpoint_every",
    "check_cu_seqlens",
    "check_decode",
]


class GateMode(enum.IntEnum):
    """How `g` becomes the log decay. The numbers are those of csrc/launch.h."""

    LOG = 0  # g is the log decay itself
    SOFTPLUS = 1  # -exp(A_log) * softplus(g + dt_bias)
    SAFE = 2  # lower_bound * sigmoid(exp(A_log) * (g + dt_bias))


class BetaMode(enum.IntEnum):
    """How `beta` becomes the write strength. The numbers are those of csrc/launch.h."""

    PLAIN = 0  # beta itself
    SIGMOID = 1  # sigmoid(beta)
    SIGMOID_DOUBLED = 2  # 2 * sigmoid(beta): the state's transition may have negative eigenvalues


@dataclass(frozen=True)
class Options:
    """The static part of a call, without shapes: the one parameter of the primitive (hashable, picklable)."""

    scale: float
    gate: GateMode = GateMode.LOG
    lower_bound: float = 0.0  # of the safe gate; 0.0 where the gate has none
    beta: BetaMode = BetaMode.PLAIN
    l2norm: bool = False
    packed: bool = False
    has_dt_bias: bool = False
    has_initial_state: bool = False
    output_final_state: bool = True
    state_v_first: bool = False
    state_dtype: str = "float32"  # of the final state: "float32" or "bfloat16"
    pooled: bool = False  # the state is a pool, of which each sequence names one
    checkpoint_every: int = 0  # tokens from one checkpoint of a sequence to the next; 0: none are wanted
    route: str = "auto"

    @property
    def operand_names(self) -> tuple[str, ...]:
        """The primitive's operands, in order."""
        names = ["q", "k", "v", "g", "beta"]
        if self.gate != GateMode.LOG:
            names.append("A_log")
            if self.has_dt_bias:
                names.append("dt_bias")
        if self.has_initial_state:
            names.append(self.state_operand)
        return (*names, *self.integer_operands)

    @property
    def integer_operands(self) -> tuple[str, ...]:
        """Those without a derivative, in order: the last ones."""
        return ("offsets",) * self.packed + ("state_indices",) * self.pooled

    @property
    def state_operand(self) -> str:
        """The operand that holds the states."""
        return "pool" if self.pooled else "initial_state"

    @property
    def result_names(self) -> tuple[str, ...]:
        """The primitive's results, in order."""
        names = ["o"]
        if self.output_final_state:
            names.append("new_pool" if self.pooled else "final_state")
        return (*names, *("checkpoints",) * (self.checkpoint_every > 0))


@dataclass(frozen=True)
class Problem:
    """Options and shapes of one call: all that routing reads."""

    options: Options
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    dtype: str
    g_dtype: str
    beta_dtype: str
    initial_state_dtype: str | None = None

    @classmethod
    def from_operands(cls, options: Options, operands: Sequence[Any]) -> Problem:
        """The problem of the primitive's operands (anything with `shape` and `dtype`)."""
        named = dict(zip(options.operand_names, operands, strict=True))
        batch, tokens, heads, key_size = named["q"].shape
        state = named.get(options.state_operand)
        return cls(
            options=options,
            B=batch,
            T=tokens,
            H=heads,
            HV=named["v"].shape[2],
            K=key_size,
            V=named["v"].shape[3],
            N=named["offsets"].shape[1] - 1 if options.packed else 1,
            dtype=_dtype_name(named["q"]),
            g_dtype=_dtype_name(named["g"]),
            beta_dtype=_dtype_name(named["beta"]),
            initial_state_dtype=None if state is None else _dtype_name(state),
        )

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.B, self.T, self.HV, self.V)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.B, self.N, *self._one_state)

    @property
    def checkpoints_shape(self) -> tuple[int, ...]:
        """T // n places a row: enough for any offsets, since each sequence has length // n checkpoints."""
        return (self.B, self.T // self.options.checkpoint_every, *self._one_state)

    @property
    def _one_state(self) -> tuple[int, int, int]:
        inner = (self.V, self.K) if self.options.state_v_first else (self.K, self.V)
        return (self.HV, *inner)

    @property
    def is_static(self) -> bool:
        """Whether every size is a number (no symbolic dimension of `jax.export`)."""
        return all(isinstance(size, int) for size in (self.B, self.T, self.N))


def check(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = True,
    cu_seqlens: Any = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Any = None,
    dt_bias: Any = None,
    safe_gate: bool = False,
    lower_bound: float | None = -5.0,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    state_indices: Any = None,
    checkpoint_every: int | None = None,
    route: str = "auto",
) -> Problem:
    """Checks the public call's arguments and returns its Problem, `options` included.

    Raises ValueError for a wrong shape or value and TypeError for a wrong kind or dtype.
    """
    for name, flag in (
        ("output_final_state", output_final_state),
        ("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        ("use_gate_in_kernel", use_gate_in_kernel),
        ("safe_gate", safe_gate),
        ("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel),
        ("allow_neg_eigval", allow_neg_eigval),
        ("state_v_first", state_v_first),
    ):
        if not isinstance(flag, (bool, np.bool_)):
            _refuse(
                TypeError,
                name,
                repr(flag),
                "a Python bool",
                "options are static: pass True or False, not an array",
            )

    q_shape = _shape("q", q, ("B", "T", "H", "K"))
    B, T, H, K = q_shape
    dtype = _dtype("q", q, ("bfloat16", "float16", "float32"))
    v_shape = _shape("v", v, ("B", "T", "HV", "V"))
    HV, V = v_shape[2:]
    for name, letter, size in (("q", "H", H), ("q", "K", K), ("v", "HV", HV), ("v", "V", V)):
        if not isinstance(size, int):
            _refuse(
                ValueError,
                name,
                f"a symbolic {letter} ({size})",
                "a plain integer",
                "only B, T and N may be symbolic",
            )
        if size < 1:
            _refuse(
                ValueError, name, f"{letter} = {size}", f"{letter} >= 1", "heads and channels cannot be empty"
            )
    if HV % H != 0:
        _refuse(
            ValueError,
            "v",
            f"HV = {HV} value heads with H = {H} query/key heads (q has shape {q_shape})",
            "HV a multiple of H",
            "each query/key head serves HV // H value heads",
        )
    _expect_shape("k", k, ("B", "T", "H", "K"), q_shape, "q and k must have the same shape")
    _expect_shape("v", v, ("B", "T", "HV", "V"), (B, T, HV, V), "B and T come from q")
    _expect_shape("g", g, ("B", "T", "HV", "K"), (B, T, HV, K), "one decay per value head and key channel")
    _expect_shape("beta", beta, ("B", "T", "HV"), (B, T, HV), "one write strength per value head")
    for name, array in (("k", k), ("v", v)):
        if _dtype(name, array, ("bfloat16", "float16", "float32")) != dtype:
            _refuse(
                TypeError,
                name,
                _dtype_name(array),
                f"the dtype of q, {dtype}",
                f"cast it: {name}.astype(q.dtype)",
            )
    g_dtype = _dtype("g", g, ("bfloat16", "float32"))
    beta_dtype = _dtype("beta", beta, ("bfloat16", "float32"))

    gate, bound = _check_gate(use_gate_in_kernel, safe_gate, lower_bound, A_log, dt_bias, HV, K)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        _refuse(
            ValueError,
            "allow_neg_eigval",
            "True with use_beta_sigmoid_in_kernel=False",
            "True only with use_beta_sigmoid_in_kernel=True",
            "a ready-made beta is used as it is: pass logits and set use_beta_sigmoid_in_kernel=True",
        )

    sequences = 1 if cu_seqlens is None else _check_offsets(cu_seqlens, B, T)
    state_dtype = "float32"
    initial_state_dtype = None
    states = B if cu_seqlens is None else sequences
    if state_indices is not None:
        states = _check_pool(initial_state, state_indices, states, output_final_state)
    if initial_state is not None:
        initial_state_dtype = _check_state(
            initial_state, "N" if state_indices is None else "P", states, HV, K, V, state_v_first
        )
        state_dtype = initial_state_dtype

    options = Options(
        scale=K**-0.5 if scale is None else _number("scale", scale),
        gate=gate,
        lower_bound=bound,
        beta=BetaMode(int(use_beta_sigmoid_in_kernel) + int(allow_neg_eigval)),
        l2norm=bool(use_qk_l2norm_in_kernel),
        packed=cu_seqlens is not None,
        has_dt_bias=dt_bias is not None,
        has_initial_state=initial_state is not None,
        output_final_state=bool(output_final_state),
        state_v_first=bool(state_v_first),
        state_dtype=state_dtype,
        pooled=state_indices is not None,
        checkpoint_every=0 if checkpoint_every is None else check_checkpoint_every(checkpoint_every),
        route=route,
    )
    return Problem(options, B, T, H, HV, K, V, sequences, dtype, g_dtype, beta_dtype, initial_state_dtype)


def check_cu_seqlens(cu_seqlens: Any, T: int | None = None) -> None:
    """Checks the *values* of packed offsets on the host: integers, `0 <= c[0] <= c[1] <= ... <= c[N] <= T`.

    `kda_prefill` calls it for NumPy offsets. A device array is read back to the host here, which is why
    `kda_prefill` never does it by itself: call this where your offsets are made.

    Args:
        cu_seqlens: `[N + 1]`, an array of any kind.
        T: the tokens of the row that they cut up; None leaves the last offset unchecked.

    Raises:
        ValueError, TypeError: for the first offset that is wrong, naming it.

    Examples:
        >>> import jax_kda
        >>> jax_kda.check_cu_seqlens([0, 25, 40], T=40)
        >>> jax_kda.check_cu_seqlens([0, 25, 20])
        Traceback (most recent call last):
        ValueError: cu_seqlens: got cu_seqlens[1] = 25 > cu_seqlens[2] = 20; ...
    """
    offsets = np.asarray(cu_seqlens)
    if offsets.ndim != 1 or offsets.shape[0] < 2:
        _refuse(
            ValueError,
            "cu_seqlens",
            f"shape {offsets.shape}",
            "[N + 1] with N >= 1",
            "N sequences have N + 1 bounds",
        )
    if offsets.dtype.kind not in "iu":
        _refuse(
            TypeError,
            "cu_seqlens",
            str(offsets.dtype),
            "int32 or int64",
            "cast it: cu_seqlens.astype('int32')",
        )
    if offsets[0] < 0:
        _refuse(
            ValueError,
            "cu_seqlens",
            f"cu_seqlens[0] = {offsets[0]}",
            "cu_seqlens[0] >= 0",
            "offsets count tokens",
        )
    if (offsets[1:] < offsets[:-1]).any():
        i = int(np.argmax(offsets[1:] < offsets[:-1]))
        _refuse(
            ValueError,
            "cu_seqlens",
            f"cu_seqlens[{i}] = {offsets[i]} > cu_seqlens[{i + 1}] = {offsets[i + 1]}",
            "offsets that never decrease",
            "pass cumulative lengths, e.g. numpy.cumsum([0, *lengths])",
        )
    if T is not None and offsets[-1] > T:
        _refuse(
            ValueError,
            "cu_seqlens",
            f"cu_seqlens[-1] = {offsets[-1]}",
            f"at most T = {T}",
            "the sequences must fit in T",
        )


def check_checkpoint_every(checkpoint_every: Any) -> int:
    """Returns it, a positive multiple of 64 below 2**31; ValueError or TypeError for anything else."""
    if isinstance(checkpoint_every, (bool, np.bool_)) or not isinstance(
        checkpoint_every, (numbers.Integral, np.integer)
    ):
        _refuse(
            TypeError,
            "checkpoint_every",
            type(checkpoint_every).__name__,
            "None or a Python integer",
            "it is static: the shape of the checkpoints follows from it",
        )
    every = int(checkpoint_every)
    if every < 64 or every % 64 != 0 or every >= 2**31:
        _refuse(
            ValueError,
            "checkpoint_every",
            str(every),
            "a positive multiple of 64 below 2**31",
            "states are at hand between chunks of tokens only; None leaves checkpoints out",
        )
    return every


def check_decode(q: Any, initial_state: Any) -> None:
    """What `kda_decode` asks beyond `check`: a state, and 1 to 8 tokens."""
    tokens = _shape("q", q, ("B", "T", "H", "K"))[1]
    if not isinstance(tokens, int) or not 1 <= tokens <= 8:
        _refuse(ValueError, "q", f"T = {tokens}", "1 to 8 tokens a call", "use kda_prefill for longer runs")
    if initial_state is None:
        _refuse(
            ValueError,
            "initial_state",
            "None",
            "the state [N, HV, K, V]",
            "pass kda_prefill's final state, or zeros",
        )


def _check_gate(
    use_gate_in_kernel: bool, safe_gate: bool, lower_bound: Any, A_log: Any, dt_bias: Any, HV: int, K: int
) -> tuple[GateMode, float]:
    if not use_gate_in_kernel:
        for name, array in (("A_log", A_log), ("dt_bias", dt_bias)):
            if array is not None:
                _refuse(
                    ValueError,
                    name,
                    "an array with use_gate_in_kernel=False",
                    "None, since g is then the log decay itself",
                    f"drop {name}, or set use_gate_in_kernel=True to have the gate computed from it",
                )
        # flash-linear-attention reads safe_gate as a hint about ready-made log decays: nothing to do here.
        return GateMode.LOG, 0.0
    if A_log is None:
        if not safe_gate:
            _refuse(
                ValueError,
                "A_log",
                "None with use_gate_in_kernel=True",
                f"a float32 array [HV] = [{HV}]",
                "the softplus gate needs it; only the safe gate may leave it out (exp(A_log) is then 1)",
            )
    else:
        _dtype("A_log", A_log, ("float32",))
        _expect_shape("A_log", A_log, ("HV",), (HV,), "one per value head")
    if dt_bias is not None:
        _dtype("dt_bias", dt_bias, ("float32",))
        if _shape_of("dt_bias", dt_bias) not in ((HV, K), (HV * K,)):
            _refuse(
                ValueError,
                "dt_bias",
                f"shape {_shape_of('dt_bias', dt_bias)}",
                f"[HV, K] = [{HV}, {K}] or [HV * K] = [{HV * K}]",
                "one per value head and key channel",
            )
    if not safe_gate:
        return GateMode.SOFTPLUS, 0.0
    if lower_bound is None:
        _refuse(
            ValueError,
            "lower_bound",
            "None with safe_gate=True",
            "a negative number",
            "-5.0 is the usual choice",
        )
    bound = _number("lower_bound", lower_bound)
    if bound >= 0:
        _refuse(
            ValueError,
            "lower_bound",
            repr(lower_bound),
            "a negative number",
            "it bounds a log decay; -5.0 is the usual one",
        )
    return GateMode.SAFE, bound


def _check_offsets(cu_seqlens: Any, B: Any, T: Any) -> Any:
    """Returns N. Values are looked at for NumPy offsets only: a device array must not be waited for."""
    shape = _shape_of("cu_seqlens", cu_seqlens)
    if len(shape) != 1 or (isinstance(shape[0], int) and shape[0] < 2):
        _refuse(
            ValueError,
            "cu_seqlens",
            f"shape {shape}",
            "[N + 1] with N >= 1",
            "N packed sequences have N + 1 bounds, e.g. numpy.cumsum([0, *lengths])",
        )
    _dtype("cu_seqlens", cu_seqlens, ("int32", "int64"))
    if B != 1:
        _refuse(
            ValueError,
            "cu_seqlens",
            f"packed sequences with B = {B} (q has {B} rows)",
            "B = 1",
            "flatten the batch into one row, or jax.vmap over it",
        )
    if isinstance(T, int) and T > 2**31 - 1:
        _refuse(ValueError, "q", f"T = {T} with cu_seqlens", "T < 2**31", "offsets are int32: split the pack")
    if isinstance(cu_seqlens, np.ndarray):
        check_cu_seqlens(cu_seqlens, T if isinstance(T, int) else None)
    return shape[0] - 1


def _check_pool(pool: Any, state_indices: Any, sequences: Any, output_final_state: bool) -> Any:
    """Returns P. The values of the indices are never looked at: those out of range are padding slots."""
    if pool is None:
        _refuse(
            ValueError,
            "initial_state",
            "None with state_indices",
            "the pool of states [P, HV, K, V]",
            "state_indices name its rows",
        )
    if not output_final_state:
        _refuse(
            ValueError,
            "output_final_state",
            "False with state_indices",
            "True: the updated pool is returned in the final state's place",
            "drop state_indices where no state is kept",
        )
    _expect_shape(
        "state_indices",
        state_indices,
        ("N",),
        (sequences,),
        "one index into the pool per sequence, -1 for padding",
    )
    _dtype("state_indices", state_indices, ("int32", "int64"))
    size = (_shape_of("initial_state", pool) or (0,))[0]
    if isinstance(size, int) and not 1 <= size < 2**31:
        _refuse(
            ValueError, "initial_state", f"a pool of {size} states", "1 to 2**31 - 1", "indices are int32"
        )
    return size


def _check_state(
    initial_state: Any, letter: str, N: Any, HV: int, K: int, V: int, state_v_first: bool
) -> str:
    kv, vk = (N, HV, K, V), (N, HV, V, K)
    wanted, other = (vk, kv) if state_v_first else (kv, vk)
    hint = "N is B, or the number of packed sequences; None stands for zeros"
    if letter == "P":
        hint = "a pool has any number of states, and state_indices name one per sequence"
    if _shape_of("initial_state", initial_state) == other:
        hint = f"the state is laid out the other way round: pass state_v_first={not state_v_first}"
    letters = (letter, "HV", "V", "K") if state_v_first else (letter, "HV", "K", "V")
    _expect_shape("initial_state", initial_state, letters, wanted, hint)
    return _dtype("initial_state", initial_state, ("float32", "bfloat16"))


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.floating, np.integer)):
        _refuse(
            TypeError,
            name,
            f"{type(value).__name__}",
            "a Python number",
            f"it is static: pass float({name}), or fold a traced factor into the arrays",
        )
    if not math.isfinite(float(value)):
        _refuse(ValueError, name, repr(value), "a finite number", f"check how {name} is computed")
    return float(value)


def _dtype_name(array: Any) -> str:
    return _name_of(array.dtype)


@functools.cache  # NumPy makes the name anew each time, which an eager call would pay six times over
def _name_of(dtype: Any) -> str:
    return str(getattr(dtype, "name", dtype))


def _dtype(name: str, array: Any, allowed: tuple[str, ...]) -> str:
    _shape_of(name, array)
    got = _dtype_name(array)
    if got not in allowed:
        _refuse(TypeError, name, got, " or ".join(allowed), f"cast it: {name}.astype('{allowed[0]}')")
    return got


def _shape_of(name: str, array: Any) -> tuple[Any, ...]:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        _refuse(
            TypeError,
            name,
            type(array).__name__,
            "an array (JAX or NumPy)",
            f"convert it: jax.numpy.asarray({name})",
        )
    return tuple(array.shape)


def _shape(name: str, array: Any, letters: tuple[str, ...]) -> tuple[Any, ...]:
    shape = _shape_of(name, array)
    if len(shape) != len(letters):
        _refuse(
            ValueError,
            name,
            f"shape {shape}",
            f"{len(letters)} dimensions [{', '.join(letters)}]",
            "reshape it, or jax.vmap over further axes",
        )
    return shape


def _expect_shape(
    name: str, array: Any, letters: tuple[str, ...], wanted: tuple[Any, ...], hint: str
) -> None:
    shape = _shape_of(name, array)
    if shape != wanted:
        sizes = ", ".join(map(str, wanted))
        _refuse(ValueError, name, f"shape {shape}", f"[{', '.join(letters)}] = [{sizes}]", hint)


def _refuse(error: type[Exception], name: str, got: str, allowed: str, advice: str) -> NoReturn:
    raise error(f"{name}: got {got}; allowed: {allowed}. Note: {advice}.")
