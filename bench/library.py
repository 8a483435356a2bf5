"""tests/native/library.cu in this process: the inputs, the judge and the timer of the native driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .native import DriverError
from .shapes import HEAD_SIZE, Case, Shape

__all__ = ["Figures", "Library", "Open", "specs"]

Figures = tuple[list[float], tuple[float, float]]  # microseconds of each call; errors of o and of the state


class _Address:
    """Device memory that PyTorch may take as an array (it knows no bfloat16 here: two bytes are an int16)."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": typestr,
            "version": 3,
        }


class Open:
    """A case whose arrays are on the device."""

    def __init__(self, c: ctypes.CDLL, handle: int, shape: Shape) -> None:
        self._c, self._handle, self._shape = c, handle, shape

    def arrays(self) -> dict[str, Any]:
        """The inputs by the names of kda_prefill's arguments, states [N, HV, K, V]."""
        import torch

        arrays = {}
        for name, (shape, dtype) in specs(self._shape).items():
            native = "offsets" if name == "cu_seqlens" else name
            if address := self._c.kda_bench_array(self._handle, native.encode()):
                array = torch.as_tensor(_Address(address, shape, _TYPESTRS[dtype]), device="cuda")
                arrays[name] = array.view(torch.bfloat16) if dtype == "bfloat16" else array
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

    def time(self, route: str, calls: int) -> Figures:
        """Microseconds of calls of ours, and their errors."""
        return self._time(lambda *x: self._c.kda_bench_time(self._handle, route.encode(), *x), route, calls)

    def time_decode(self, calls: int) -> Figures:
        """The same of kda_decode's kernel."""
        return self._time(lambda *x: self._c.kda_bench_time_decode(self._handle, *x), "decode", calls)

    def _time(self, run: Callable[[int, Any, Any], int], what: str, calls: int) -> Figures:
        us, errors = (ctypes.c_float * calls)(), (ctypes.c_double * 2)()
        status = run(calls, us, errors)
        if status != 0:
            raise DriverError(f"{what}: status {status}")
        return list(us), (errors[0], errors[1])


class Library:
    """What `native.build("library.so")` made, loaded. OSError where it cannot be."""

    def __init__(self, path: Path) -> None:
        self._c = ctypes.CDLL(str(path))
        pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
        for name, result, arguments in (
            ("open", pointer, [text]),
            ("close", None, [pointer]),
            ("array", pointer, [pointer, text]),
            ("judge", None, [pointer, pointer, pointer, pointer]),
            ("time", number, [pointer, text, number, pointer, pointer]),
            ("time_decode", number, [pointer, number, pointer, pointer]),
            ("copy_rate", ctypes.c_double, []),
        ):
            function = getattr(self._c, f"kda_bench_{name}")
            function.restype, function.argtypes = result, arguments

    @contextmanager
    def case(self, case: Case) -> Iterator[Open]:
        handle = self._c.kda_bench_open(case.line(route=False).encode())
        if not handle:
            raise DriverError(f"the library refused {case}")
        try:
            yield Open(self._c, handle, case.shape)
        finally:
            self._c.kda_bench_close(handle)

    def copy_rate(self) -> float:
        """Bytes a second of a copy on the device, read and written ones counted."""
        return float(self._c.kda_bench_copy_rate())


_TYPESTRS = {"bfloat16": "<i2", "float32": "<f4", "int32": "<i4"}


def specs(s: Shape) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array that a case may have."""
    tokens = (s.B, s.T)
    return {
        "q": ((*tokens, s.H, HEAD_SIZE), "bfloat16"),
        "k": ((*tokens, s.H, HEAD_SIZE), "bfloat16"),
        "v": ((*tokens, s.HV, HEAD_SIZE), "bfloat16"),
        "g": ((*tokens, s.HV, HEAD_SIZE), s.g_dtype),
        "beta": ((*tokens, s.HV), "bfloat16"),
        "A_log": ((s.HV,), "float32"),
        "dt_bias": ((s.HV, HEAD_SIZE), "float32"),
        "initial_state": ((s.sequences, s.HV, HEAD_SIZE, HEAD_SIZE), "float32"),
        "cu_seqlens": ((s.sequences + 1,), "int32"),
    }
