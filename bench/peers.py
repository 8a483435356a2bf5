"""`python -m bench.peers`: other implementations beside ours, all in one process on one GPU.

    fla          flash-linear-attention's chunk_kda (package fla-core, Triton)
    cudnn_fused  cuDNN's CUDA engine for Hopper (package nvidia-cudnn-frontend), raw inputs, f32 gates, beta
    cudnn_exact  its CuTe DSL engine, which wants prepared inputs: q and k normalised, log decays, activated
                 beta. The passes that make them are not in its figure.

They come with PyTorch; one that is not there is left out, and a line says so. Every implementation gets the
same arrays, made by the native library (tests/native/library.cu), and is judged by the same f64 recurrence.
Times are GPU times, measured as `bench.prefill` measures: L2 flushed, calls queued behind a spinning kernel,
5 warm-ups, 20 timed calls. Results: bench/results/h200-peers.json.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jax_kda import routing

from . import native, prefill, progress, rows
from .digest import ROOT
from .shapes import FOLDED_GATES, HEAD_SIZE, SETS, Case, Shape, cases, floor_us, parse_names

__all__ = ["PEERS", "main"]

RESULT = ROOT / "bench" / "results" / "h200-peers.json"
LOWER_BOUND = -5.0
WARM_UPS = 5

# A peer: from the arrays of a case (by the names of kda_prefill's arguments, states [N, HV, K, V]) to a call
# without arguments that returns o and the final state, [N, HV, K, V] or V-first (then the flag is set).
Call = Callable[[], tuple[Any, Any]]
Maker = Callable[[Shape, dict[str, Any]], tuple[Call, bool]]


def _fla(shape: Shape, x: dict[str, Any]) -> tuple[Call, bool]:
    from fla.ops.kda import chunk_kda

    options: dict[str, Any] = {}
    if shape.gate != "log":
        options = {"use_gate_in_kernel": True, "A_log": x["A_log"], "dt_bias": x["dt_bias"].reshape(-1)}
    if shape.gate == "safe":
        options |= {"safe_gate": True, "lower_bound": LOWER_BOUND}
    if shape.lengths:
        options["cu_seqlens"] = x["cu_seqlens"].long()

    def call() -> tuple[Any, Any]:
        o, state = chunk_kda(
            *(x[name] for name in ("q", "k", "v", "g", "beta")),
            initial_state=x["initial_state"],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            **options,
        )
        return o, state

    return call, False


def _cudnn_fused(shape: Shape, x: dict[str, Any]) -> tuple[Call, bool]:
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    g = x["g"].float()
    if shape.gate == "safe":
        options |= {"safe_gate": True, "gate_lower_bound": LOWER_BOUND}
        options |= {"a_log": x["A_log"], "dt_bias": x["dt_bias"]}
    elif shape.gate == "softplus":
        raise NotImplementedError("it has no softplus gate")
    return _cudnn("kda_hopper_cuda", shape, x | {"g": g, "beta": x["beta"].float()}, options), True


def _cudnn_exact(shape: Shape, x: dict[str, Any]) -> tuple[Call, bool]:
    import torch

    def normalised(a: Any) -> Any:
        wide = a.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(a.dtype)

    if shape.H != shape.HV:
        raise NotImplementedError("it has no grouped heads")
    g = x["g"].float()
    if shape.gate == "safe":
        g = LOWER_BOUND * torch.sigmoid(x["A_log"].exp()[:, None] * (g + x["dt_bias"]))
    elif shape.gate == "softplus":
        g = -x["A_log"].exp()[:, None] * torch.nn.functional.softplus(g + x["dt_bias"])
    ready = {"q": normalised(x["q"]), "k": normalised(x["k"]), "g": g, "beta": x["beta"].float().sigmoid()}
    return _cudnn("kda_hopper", shape, x | ready, {}), True


def _cudnn(plan: str, shape: Shape, x: dict[str, Any], options: dict[str, Any]) -> Call:
    import torch
    from cudnn.linear_attention import kimi_delta_attention

    tokens = shape.B * shape.T
    flat = [x[name].reshape(tokens, *x[name].shape[2:]).contiguous() for name in ("q", "k", "v", "g", "beta")]
    lengths = shape.lengths or (shape.T,) * shape.B
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device="cuda")
    state = x["initial_state"].transpose(-1, -2).contiguous()

    def call() -> tuple[Any, Any]:
        o, final_state = kimi_delta_attention(
            *flat, offsets, initial_state=state, output_final_state=True, plan_name=plan, **options
        )
        return o, final_state

    return call


# By name: the package that brings it, the module that must be importable, and how it is called.
PEERS: dict[str, tuple[str, str, Maker]] = {
    "fla": ("fla-core", "fla.ops.kda", _fla),
    "cudnn_fused": ("nvidia-cudnn-frontend", "cudnn.linear_attention", _cudnn_fused),
    "cudnn_exact": ("nvidia-cudnn-frontend", "cudnn.linear_attention", _cudnn_exact),
}


def importable(names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Of these peers: those that are there, with their versions, and those that are not, with the reason."""
    there: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in names:
        package, module, _ = PEERS[name]
        try:
            importlib.import_module("torch")
            importlib.import_module(module)
            there[name] = f"{package} {importlib.metadata.version(package)}"
        except Exception as error:  # whatever is wrong with a peer, the others are timed
            missing[name] = f"{package}: {type(error).__name__}: {error}"
    return there, missing


class _Library:
    """tests/native/library.cu, in this process."""

    def __init__(self, path: Path) -> None:
        self._c = ctypes.CDLL(str(path))
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        for name, result, arguments in (
            ("open", pointer, [text]),
            ("close", None, [pointer]),
            ("array", pointer, [pointer, text]),
            ("judge", None, [pointer, pointer, pointer, pointer]),
            ("time", ctypes.c_int, [pointer, text, ctypes.c_int, pointer, pointer]),
            ("copy_rate", ctypes.c_double, []),
        ):
            function = getattr(self._c, f"kda_bench_{name}")
            function.restype, function.argtypes = result, arguments

    @contextmanager
    def case(self, case: Case) -> Iterator[_Open]:
        handle = self._c.kda_bench_open(case.line(route=False).encode())
        if not handle:
            raise native.DriverError(f"the library refused {case}")
        try:
            yield _Open(self._c, handle, case.shape)
        finally:
            self._c.kda_bench_close(handle)

    def copy_rate(self) -> float:
        return float(self._c.kda_bench_copy_rate())


class _Address:
    """Device memory that PyTorch may take as an array (it knows no bfloat16 here: two bytes are an int16)."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": typestr,
            "version": 3,
        }


class _Open:
    """A case whose arrays are on the device."""

    def __init__(self, c: ctypes.CDLL, handle: int, shape: Shape) -> None:
        self._c, self._handle, self._shape = c, handle, shape

    def arrays(self) -> dict[str, Any]:
        import torch

        s = self._shape
        tokens = (s.B, s.T)
        wanted: dict[str, tuple[tuple[int, ...], str]] = {
            "q": ((*tokens, s.H, HEAD_SIZE), "bfloat16"),
            "k": ((*tokens, s.H, HEAD_SIZE), "bfloat16"),
            "v": ((*tokens, s.HV, HEAD_SIZE), "bfloat16"),
            "g": ((*tokens, s.HV, HEAD_SIZE), s.g_dtype),
            "beta": ((*tokens, s.HV), "bfloat16"),
            "A_log": ((s.HV,), "float32"),
            "dt_bias": ((s.HV, HEAD_SIZE), "float32"),
            "initial_state": ((s.sequences, s.HV, HEAD_SIZE, HEAD_SIZE), "float32"),
            "offsets": ((s.sequences + 1,), "int32"),
        }
        typestrs = {"bfloat16": "<i2", "float32": "<f4", "int32": "<i4"}
        arrays = {}
        for name, (shape, dtype) in wanted.items():
            if address := self._c.kda_bench_array(self._handle, name.encode()):
                array = torch.as_tensor(_Address(address, shape, typestrs[dtype]), device="cuda")
                arrays[name] = array.view(torch.bfloat16) if dtype == "bfloat16" else array
        if "offsets" in arrays:
            arrays["cu_seqlens"] = arrays.pop("offsets")
        return arrays

    def judge(self, o: Any, state: Any) -> tuple[float, float]:
        """Errors of a peer's o (bfloat16) and state (float32, [N, HV, K, V])."""
        import torch

        s = self._shape
        if o.dtype != torch.bfloat16 or state.dtype != torch.float32:
            raise TypeError(f"o is {o.dtype}, the state {state.dtype}")
        sizes = (s.B * s.T * s.HV * HEAD_SIZE, s.sequences * s.HV * HEAD_SIZE**2)
        if (o.numel(), state.numel()) != sizes:
            raise TypeError(f"o is {tuple(o.shape)}, the state {tuple(state.shape)}")
        o, state = o.contiguous(), state.contiguous()
        torch.cuda.synchronize()
        errors = (ctypes.c_double * 2)()
        self._c.kda_bench_judge(self._handle, o.data_ptr(), state.data_ptr(), errors)
        return errors[0], errors[1]

    def time(self, route: str, calls: int) -> tuple[list[float], tuple[float, float]]:
        """Microseconds of calls of ours, and their errors."""
        us, errors = (ctypes.c_float * calls)(), (ctypes.c_double * 2)()
        status = self._c.kda_bench_time(self._handle, route.encode(), calls, us, errors)
        if status != 0:
            raise native.DriverError(f"route {route}: status {status}")
        return list(us), (errors[0], errors[1])


class _Timer:
    """Times calls that PyTorch launches, as tests/native/timing.cuh times ours."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def time(self, call: Call, calls: int) -> list[float]:
        torch = self._torch
        for _ in range(WARM_UPS):  # they compile and choose
            call()
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        host = time.perf_counter() - started  # that the queue takes to fill; the device must not run out
        torch.cuda.synchronize()
        spin = int(2e9 * min(max(3 * host, 5e-4), 0.2))  # cycles, at no more than 2 GHz
        us = []
        for n in range(calls):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(spin)
            self._flush.fill_(n % 256)
            before.record()
            call()
            after.record()
            torch.cuda.synchronize()
            us.append(1e3 * before.elapsed_time(after))
        return us


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 for a missing figure, 2 for what cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--set", default="seed,small,serving,packed", help="sets of shapes (default: %(default)s)")
    add("--gates", default="production,slow", help="gate regimes (default: %(default)s)")
    add("--peers", default=",".join(PEERS), help="which (default: %(default)s)")
    add("--routes", default="auto", help="ours, beside them (default: %(default)s)")
    add("--calls", type=int, default=20, help="timed calls (default: %(default)s)")
    add("--out", type=Path, default=RESULT, help="the result file (default: bench/results/h200-peers.json)")
    add("--library", type=Path, help="the native library, if it is built already (default: build it)")
    add("--commit", help="for the rows (default: what git says)")
    options = parser.parse_args(arguments)
    try:
        sets = parse_names("--set", options.set, SETS)
        gates = parse_names("--gates", options.gates, FOLDED_GATES)
        peers = parse_names("--peers", options.peers, PEERS)
    except ValueError as error:
        parser.error(str(error))
    there, missing = importable(peers)
    for name, why in missing.items():
        print(f"skipped {name}: {why}", file=sys.stderr)
    if not there:
        print("bench.peers: no peer is installed; pip install 'jax_kda[bench]' brings them", file=sys.stderr)
        return 2

    import torch

    if not torch.cuda.is_available():
        print("bench.peers: PyTorch sees no GPU", file=sys.stderr)
        return 2
    try:
        library = _Library(options.library or native.build("library.so"))
    except (native.DriverError, OSError) as error:
        print(f"bench.peers: {error}", file=sys.stderr)
        return 2
    properties = torch.cuda.get_device_properties(0)
    gpu = routing.Device(
        "cuda", properties.name, (properties.major, properties.minor), properties.multi_processor_count
    )
    ours = prefill.resolve(cases(sets, gates, options.routes.split(",")), gpu)
    common = prefill.provenance({"gpu": gpu.name, "cuda": torch.version.cuda}, options.commit)
    common["copy_rate"] = library.copy_rate()
    found = _time_all(library, ours, there, sets, options.calls, common)
    if not found:
        print("bench.peers: no figure", file=sys.stderr)
        return 1
    rows.write(options.out, found)
    print(rows.table(found))
    print(f"\n{', '.join(dict.fromkeys(there.values()))}\n{len(found)} rows in {options.out}")
    return 0


def _time_all(
    library: _Library,
    ours: Sequence[Case],
    there: dict[str, str],
    sets: Sequence[str],
    calls: int,
    common: rows.Row,
) -> list[rows.Row]:
    import torch

    timer = _Timer()
    found: list[rows.Row] = []
    # One opening of a case's arrays serves everyone: routes of ours that share a shape and a regime follow.
    groups: dict[tuple[Shape, str], list[str]] = {}
    for case in ours:
        groups.setdefault((case.shape, case.gates), []).append(case.route)
    total = sum(len(routes) + len(there) for routes in groups.values())
    hidden = progress.disabled()
    with tqdm(total=total, unit="case", leave=False, disable=hidden) as bar, torch.inference_mode():
        for (shape, gates), routes in groups.items():
            with library.case(Case(shape, gates, "")) as opened:
                for name in (*routes, *there):
                    bar.set_description(f"{shape} {gates} {name}")
                    try:
                        if name in there:
                            us, errors = _time_peer(name, opened, shape, timer, calls)
                        else:
                            us, errors = opened.time(name, calls)
                    except Exception as error:  # one that cannot serve a shape leaves the others
                        why = str(error).strip().splitlines()
                        tqdm.write(
                            f"skipped {name} at {shape}, {gates} gates: {type(error).__name__}: "
                            f"{why[0] if why else ''}",
                            file=sys.stderr,
                        )
                    else:
                        found += [
                            _row(n, Case(shape, gates, name), us, errors, there.get(name), common)
                            for n in sets
                            if shape in SETS[n]
                        ]
                    bar.update()
            torch.cuda.empty_cache()
    return sorted(found, key=lambda row: sets.index(row["set"]))


def _time_peer(
    name: str, opened: _Open, shape: Shape, timer: _Timer, calls: int
) -> tuple[list[float], tuple[float, float]]:
    call, v_first = PEERS[name][2](shape, opened.arrays())
    o, state = call()
    errors = opened.judge(o, state.transpose(-1, -2) if v_first else state)
    return timer.time(call, calls), errors


def _row(
    name: str,
    case: Case,
    us: Sequence[float],
    errors: tuple[float, float],
    package: str | None,
    common: rows.Row,
) -> rows.Row:
    median = statistics.median(us)
    row = {
        **common,
        "set": name,
        **rows.shape_fields(case.shape),
        "gates": case.gates,
        "route": case.route,
        "package": package,
        "kernels": [],  # the engine is pinned by name; PyTorch gives no list without a profiler
        "median_us": median,
        "min_us": min(us),
        "round_us": [median],
        "calls": len(us),
        "wall_us": None,
        "floor_us": floor_us(case.shape, common["copy_rate"]),
        "err_o": errors[0] if math.isfinite(errors[0]) else None,
        "err_state": errors[1] if math.isfinite(errors[1]) else None,
    }
    return {key: row[key] for key in rows.KEYS}


if __name__ == "__main__":
    sys.exit(main())
