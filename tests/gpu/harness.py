"""What the tests in this directory share: the routes under test, the lengths, and the judge.

With JAX_KDA_GPU_TESTS_DRY=1 everything here runs on the CPU, on the XLA route and over fewer cases: a trial
of the tests themselves, for a machine without a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fault_cases import expect_close, expect_close_states
from oracle import numpy_recurrence, relative_error

import jax_kda
from jax_kda.routing import Route

DRY = os.environ.get("JAX_KDA_GPU_TESTS_DRY", "0") not in ("", "0")
PLATFORM = "cpu" if DRY else "cuda"
ROUTES = ("xla",) if DRY else tuple(route.value for route in Route if route is not Route.XLA)
LENGTHS = (1, 33) if DRY else (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 257, 2048)

BAR = 6e-3  # relative Frobenius error of o and of a float32 state
BAR_DOUBLED = 8e-3  # where beta is doubled
BAR_COLLINEAR = 3e-2
BFLOAT16 = 2.0**-9  # what rounding to bfloat16 may add
TOKENS = ("q", "k", "v", "g", "beta")
ARRAYS = (*TOKENS, "A_log", "dt_bias", "initial_state", "cu_seqlens")

Inputs = dict[str, Any]
Run = Callable[..., tuple[Any, Any]]


class Findings:
    """Figures and failures of one test, gathered: a run on a GPU should report all that is wrong at once.

    Used as a context manager; leaving it fails the test if anything was found.
    """

    def __init__(self, record_property: Callable[[str, object], None]) -> None:
        self._record = record_property
        self._figures: dict[str, float] = {}
        self._failures: list[str] = []

    def __enter__(self) -> Findings:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for name, value in self._figures.items():
            self._record(name, value if np.isfinite(value) else str(value))
        if kind is None:
            assert not self._failures, "\n".join(self._failures)

    def figure(self, name: str, value: float, bar: float, where: str = "") -> None:
        """Keeps the largest value under this name; a failure where it passes the bar (or is NaN)."""
        self._figures[name] = max(self._figures.get(name, 0.0), value)
        self.expect(value <= bar, f"{where}: {name} is off by {value:.2e}, allowed {bar:.2e}")

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self._failures.append(otherwise)

    @contextlib.contextmanager
    def gather(self, where: str) -> Iterator[None]:
        """An AssertionError inside becomes one of the failures."""
        try:
            yield
        except AssertionError as error:
            self._failures.append(f"{where}: {str(error).splitlines()[0] if str(error) else 'assertion'}")

    def compare(self, run: Run, inputs: Inputs, where: str = "", bar: float = BAR) -> tuple[Any, Any]:
        """Runs, and compares everything with the float64 recurrence: whole tensors against the bar, each head
        and sequence and each token against looser ones, so that nothing small can be wrong unseen.
        """
        o, state = run(**inputs)
        want_o, want_state = numpy_recurrence(**inputs)
        loose = (max(2e-2, 2 * bar), max(5e-2, 8 * bar))
        with self.gather(where):
            assert o.dtype == inputs["v"].dtype
            assert o.shape == want_o.shape
            self.figure("o", relative_error(o, want_o), bar, where)
            expect_close(o, want_o, inputs.get("cu_seqlens"), loose)
            for rows in outside(inputs):
                assert not np.asarray(o)[:, rows].any(), "rows outside all sequences are not zero"
        with self.gather(where):
            if want_state is None:
                assert state is None
                return o, state
            narrow = inputs.get("initial_state") is not None and inputs["initial_state"].dtype != np.float32
            rounding = BFLOAT16 if narrow else 0.0
            assert state.dtype == (inputs["initial_state"].dtype if narrow else np.float32)
            self.figure("state", relative_error(state, want_state), bar + rounding, where)
            expect_close_states(state, want_state, loose[0])
        return o, state


def outside(inputs: Inputs) -> list[slice]:
    """The rows before the first and after the last sequence."""
    if inputs.get("cu_seqlens") is None:
        return []
    offsets = np.asarray(inputs["cu_seqlens"])
    return [slice(0, int(offsets[0])), slice(int(offsets[-1]), None)]


def on_device(inputs: Inputs) -> Inputs:
    """The same call with its arrays on the device."""
    return {name: jnp.asarray(x) if name in ARRAYS and x is not None else x for name, x in inputs.items()}


def split(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """The arrays of a call, and its other arguments."""
    arrays = {name: x for name, x in inputs.items() if name in ARRAYS and x is not None}
    return arrays, {name: x for name, x in inputs.items() if name not in ARRAYS}


def sequence(inputs: Inputs, begin: int, end: int, state: Any = None) -> Inputs:
    """Tokens begin..end as a call of their own, dense, from this state."""
    alone = {name: x for name, x in inputs.items() if name not in ("cu_seqlens", "initial_state")}
    alone |= {name: inputs[name][:, begin:end] for name in TOKENS}
    return alone if state is None else alone | {"initial_state": state}


def changed(inputs: Inputs, index: Any, value: Any, names: tuple[str, ...] = TOKENS) -> Inputs:
    """The call with `value` at `index` of these arrays: one for all of them, or one each."""
    result = dict(inputs)
    for name in names:
        result[name] = np.array(inputs[name])
        result[name][index] = value[name] if isinstance(value, dict) else value
    return result


@jax.jit
def _same_bits(x: jax.Array, y: jax.Array) -> jax.Array:
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jnp.all(jax.lax.bitcast_convert_type(x, kind) == jax.lax.bitcast_convert_type(y, kind))


def same_bits(x: Any, y: Any) -> bool:
    """Whether two results (arrays, or tuples of them) are bit for bit the same; compared on the device."""
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and bool(_same_bits(a, b)) for a, b in pairs)


def run_apart(*arguments: str, flags: str = "") -> subprocess.Popen[str]:
    """Starts fresh_process.py in a process of its own, with these XLA flags and the packages of this one."""
    environment = dict(os.environ)
    environment["XLA_FLAGS"] = flags
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if DRY:
        environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, str(Path(__file__).with_name("fresh_process.py")), *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def output_of(process: subprocess.Popen[str], seconds: float) -> str:
    """What it printed; a failure where it hangs, crashes or fails."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"no end after {seconds} s: {process.args}") from None
    assert process.returncode == 0, f"exit status {process.returncode}\n{out[-2000:]}\n{err[-6000:]}"
    return out


def emitted_routes(lowered: Any) -> list[str]:
    """The route of each of our custom calls in a lowered program."""
    calls = [line for line in lowered.as_text().splitlines() if "custom_call @jax_kda" in line]
    return [line.split('route = "')[1].split('"')[0] for line in calls]


def expected_calls(decision: Any) -> list[str]:
    """The custom calls that a program with one call of this decision must hold."""
    return [] if decision.route is Route.XLA else [decision.route.value]


def cuts(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))


def forced(route: str) -> Run:
    """`kda_prefill` on this route."""

    def run(**inputs: Any) -> tuple[Any, Any]:
        return jax_kda.kda_prefill(**inputs, route=route)

    return run
