"""`python -m bench.number_formats`: what the formats of the chunk form's operands cost, in a NumPy model.

Per chunk of 32 tokens the packet (Kd, Qd, Kr, A, M) is computed in float64 and rounded once; then, with a
float32 state S whose copy for the products is rounded as well::

    R = V - Kd S      U = A R      O = Qd S + M U      S <- diag(a) S + Kr^T U

Beta is a factor of A's columns, or beside A a factor of R's rows.

Errors are relative, Frobenius, of o (bfloat16) and of the state, against the token recurrence in float64 on
the same inputs. Needs no GPU; writes bench/results/number-formats.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from jax_kda import regimes

from . import progress
from .digest import ROOT

__all__ = ["CASES", "FORMATS", "errors", "main"]

RESULT = ROOT / "bench" / "results" / "number-formats.json"
TOKENS, HEADS, CHUNK = 512, 4, 32

Array = np.ndarray[Any, Any]
Rounding = Callable[[Array], Array]


def bfloat16(x: Array) -> Array:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def float16(x: Array) -> Array:
    return x.astype(np.float16).astype(np.float64)


def pair(x: Array) -> Array:
    """Two bfloat16 numbers whose sum stands for x."""
    high = bfloat16(x)
    return high + bfloat16(x - high)


@dataclass(frozen=True)
class Form:
    """How the operands are rounded that are not bfloat16, and where beta stands."""

    roundings: dict[str, Rounding] = field(default_factory=dict)
    beta_beside: bool = False


FORMATS = {
    "all bfloat16, beta beside A (taken)": Form(beta_beside=True),
    "all bfloat16": Form(),
    "A, M, Kr, R, U in float16": Form(dict.fromkeys(("A", "M", "Kr", "R", "U"), float16)),
    "U as a bfloat16 pair": Form({"U": pair}),
    "Kr and U as pairs": Form({"Kr": pair, "U": pair}),
}
# By name: the regime, and whether beta is doubled.
CASES = {
    "production": ("production", False),
    "long": ("long", False),
    "none": ("none", False),
    "none, beta doubled": ("none", True),
    "collinear": ("collinear", False),
}


def prepared(case: str) -> dict[str, Array]:
    """q (scaled) and k (normalised), v, log decays, write strengths, by head: [H, T, ...], float64."""
    regime, doubled = CASES[case]
    x = regimes.make_inputs(regime, 1, TOKENS, HEADS, allow_neg_eigval=doubled, initial_state=False)
    q, k, v, g, beta = (np.moveaxis(x[n][0].astype(np.float64), 1, 0) for n in ("q", "k", "v", "g", "beta"))
    q, k = (a / np.sqrt(np.sum(a * a, axis=-1, keepdims=True) + 1e-6) for a in (q, k))
    if "A_log" in x:
        rate, bias = np.exp(x["A_log"].astype(np.float64)), x["dt_bias"].astype(np.float64)
        g = regimes.BOUND / (1 + np.exp(-rate[:, None, None] * (g + bias[:, None])))
    beta = (2 if doubled else 1) / (1 + np.exp(-beta))
    return {"q": q * q.shape[-1] ** -0.5, "k": k, "v": v, "g": g, "beta": beta}


def exact(x: dict[str, Array]) -> tuple[Array, Array]:
    """o [H, T, V] and the state [H, K, V] by the token recurrence."""
    S = np.zeros((HEADS, x["k"].shape[-1], x["v"].shape[-1]))
    o = np.zeros_like(x["v"])
    for t in range(TOKENS):
        S = np.exp(x["g"][:, t])[..., None] * S
        k = x["k"][:, t]
        u = x["beta"][:, t, None] * (x["v"][:, t] - np.einsum("hkv,hk->hv", S, k))
        S = S + k[..., None] * u[:, None]
        o[:, t] = np.einsum("hkv,hk->hv", S, x["q"][:, t])
    return o, S


def chunked(x: dict[str, Array], form: Form) -> tuple[Array, Array]:
    """The same in chunks, with rounded operands."""

    def rounded(name: str, a: Array) -> Array:
        return form.roundings.get(name, bfloat16)(a)

    S = np.zeros((HEADS, x["k"].shape[-1], x["v"].shape[-1]), np.float32)
    o = np.zeros_like(x["v"])
    strict = np.tril(np.ones((CHUNK, CHUNK)), -1)
    for begin in range(0, TOKENS, CHUNK):
        q, k, v, g, beta = (x[n][:, begin : begin + CHUNK] for n in ("q", "k", "v", "g", "beta"))
        G = np.cumsum(g, axis=1)
        # Every weight of a pair i >= j is at most 1; the others are masked before exp.
        between = np.exp(np.minimum(G[:, :, None] - G[:, None], 0))
        L = strict * beta[..., None] * np.einsum("hik,hjk,hijk->hij", k, k, between)
        M = (strict + np.eye(CHUNK)) * np.einsum("hik,hjk,hijk->hij", q, k, between)
        A = np.linalg.inv(np.eye(CHUNK) + L) * (1 if form.beta_beside else beta[:, None])
        Kd, Qd = rounded("Kd", k * np.exp(G)), rounded("Qd", q * np.exp(G))
        Kr = rounded("Kr", k * np.exp(G[:, -1:] - G))
        A, M = rounded("A", A), rounded("M", M)

        S_operand = rounded("S", S.astype(np.float64))
        R = rounded("R", (v - Kd @ S_operand) * (beta[..., None] if form.beta_beside else 1))
        U = rounded("U", A @ R)
        o[:, begin : begin + CHUNK] = bfloat16(Qd @ S_operand + M @ U)
        S = (np.exp(G[:, -1])[..., None] * S + Kr.swapaxes(1, 2) @ U).astype(np.float32)
    return o, S


def errors(case: str, form: str) -> tuple[float, float]:
    """Of o and of the state."""
    x = prepared(case)
    found, wanted = chunked(x, FORMATS[form]), exact(x)
    o, state = (float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, wanted, strict=True))
    return o, state


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.number_formats",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=RESULT, help="(default: bench/results/number-formats.json)"
    )
    out = parser.parse_args(arguments).out
    rows = []
    wanted = [(form, case) for form in FORMATS for case in CASES]
    for form, case in tqdm(wanted, unit="case", leave=False, disable=progress.disabled()):
        o, state = errors(case, form)
        rows.append({"operands": form, "gates": case, "err_o": o, "err_state": state})
    sizes = {"tokens": TOKENS, "heads": HEADS, "chunk": CHUNK}
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    out.write_text(f'{{\n  "sizes": {json.dumps(sizes)},\n  "rows": [\n{lines}\n  ]\n}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
