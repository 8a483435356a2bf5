"""Every numerical fault of fault_cases.py on the XLA route, and of the others what needs no GPU."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from fault_cases import FAULT_CASES, FaultCase

import jax_kda

ROOT = Path(__file__).resolve().parent.parent

SMALL = [case for case in FAULT_CASES if not case.big]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_xla(case: FaultCase) -> None:
    case.check(functools.partial(jax_kda.kda_prefill, route="xla"), "bfloat16")


def test_every_report_has_a_case() -> None:
    assert {case.fault for case in SMALL} == {f"BR-{n:02}" for n in range(1, 13)}
    assert {case.fault for case in FAULT_CASES if case.big} == {"BR-05", "BR-11", "BR-12"}


# Faults of how a kernel is called, and the tests on GPUs that put every route to them.
CALLED = {
    "BR-13": {"test_capture.py": ["test_first_use_inside_a_captured_loop"]},
    "BR-14": {
        "test_sharding_gpu.py": [
            "test_data_on_the_second_device_alone",
            "test_no_kernel_on_the_idle_device",
            "test_pmap",
            "test_shard_map",
            "test_two_threads_one_device_each",
        ]
    },
}


@pytest.mark.parametrize("fault", CALLED)
def test_faults_of_calling_have_tests_on_every_route(fault: str) -> None:
    for file, tests in CALLED[fault].items():
        tree = ast.parse((ROOT / "tests/gpu" / file).read_text())
        arguments = {
            f.name: {a.arg for a in f.args.args} for f in tree.body if isinstance(f, ast.FunctionDef)
        }
        for test in tests:
            assert arguments[test] & {"run", "route"}, f"{fault}: {file}::{test} does not go over the routes"


# What would break the recording of a graph, wait for the device, read its memory on the host, or leave the
# stream and the device that XLA gave. Tables that are filled once per device are none of these.
FORBIDDEN = re.compile(
    r"\b(cuda(?:Malloc|Free|Host|MemPool)\w*|cuda\w*Synchronize|cudaMemcpy\w*"
    r"|cudaStream(?:Create|BeginCapture|Wait)\w*|cudaEvent\w*|cudaLaunchHostFunc|cudaSetDevice|cudaDeviceReset)\s*\("
)


def test_br_13_and_14_nothing_is_allocated_awaited_or_read_back() -> None:
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cu", ".cuh", ".cc", ".h")]
    assert len(sources) > 5
    for path in sources:
        found = FORBIDDEN.findall(path.read_text())
        assert not found, f"{path.name}: {', '.join(found)}"
    assert "kCmdBufferCompatible" in (ROOT / "csrc/ffi.cc").read_text()


@pytest.mark.parametrize("call", ["cudaMalloc(&p, n)", "cudaStreamSynchronize(stream)", "cudaSetDevice(0)"])
def test_what_is_forbidden_is_found(call: str) -> None:
    assert FORBIDDEN.search(f"  CUDA({call});")
    assert not FORBIDDEN.search("cudaMemsetAsync(p, 0, n, stream); cudaFuncSetAttribute(f, a, v);")
