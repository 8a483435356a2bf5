"""The kernels on an emulated thread block, on the CPU: against double precision, and with planted mistakes.

tests/native/test_kernels.cpp is compiled from the kernels' own sources; tests/native/machine.h says what its
machine sees: races, deadlocks, reads of what nobody wrote, missing proxy fences, besides wrong numbers.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jax_kda import contract, routing, segments

ROOT = Path(__file__).resolve().parent.parent
CUDA_HEADERS = ("cuda.h", "cuda_bf16.h", "cuda_runtime.h", "cuda_runtime_api.h")

# Each planted mistake, a part of the tests that must see it, and what it must say.
FAULTS = {
    "group-barrier-open": ("packets", "race|nobody wrote"),
    "warp-barrier-open": ("recurrence", "race"),
    "wait-open": ("recurrence", "race|nobody wrote"),
    "lost-arrival": ("recurrence", "deadlock: .* waits for .* mbarrier"),
    "lost-bytes": ("packets", "deadlock: .* waits for .* mbarrier"),
    "unordered-arrival": ("recurrence", "race"),
    "copies-not-awaited": ("tails", "race"),
    "products-not-awaited": ("recurrence", "race|error"),
    "no-proxy-fence": ("recurrence", "no proxy fence"),
    "swizzle": ("packets", "error"),
    "transposition": ("recurrence", "error"),
    "fragment-order": ("packets", "error"),
    "tail-copied": ("tails", "error|outside the arrays"),
    "tail-stored": ("recurrence", "o is written at token"),
    "nan-dropped": ("calls", "NaN gate is lost"),
    "half-inverse": ("inverse", "large"),
    "early-publish": ("recurrence", "race|nobody wrote"),
    "cluster-barrier-open": ("packets", "nothing orders its initialisation"),
    "lost-peer-arrival": ("packets", "deadlock: .* waits for .* mbarrier"),
    "half-to-peer": ("packets", "nobody wrote"),
    "flag-wait-open": ("cluster", "error|race|nobody wrote"),
    "lost-flag": ("cluster", "polls for ever"),
}
PLANTED = [
    *((fault, *seen) for fault, seen in FAULTS.items()),
    ("warp-barrier-open", "decode", "race|nobody wrote"),
]


def build(folder: Path, compiler: str) -> None:
    """Compiles the program, if that is not done: with stand-ins for CUDA's headers and the launch syntax."""
    if (folder / "built").exists():
        return
    folder.mkdir(exist_ok=True)
    for header in CUDA_HEADERS:
        (folder / header).write_text('#include "cuda_stand_in.h"\n')
    launch = re.compile(r"(\w+)<<<(.*?)>>>\((.*?)\);")
    for name in ("baseline", "cluster", "decode"):
        kernel = (ROOT / f"csrc/{name}.cu").read_text()
        source, launches = launch.subn(r"emulation::launch(\1, \2, \3);", kernel)
        assert launches == 1
        (folder / f"{name}_on_host.cuh").write_text(source)
    includes = [f"-I{path}" for path in (folder, ROOT / "tests/native", ROOT / "csrc")]
    # The fortified longjmp refuses to change stacks.
    options = ["-std=c++20", "-O1", "-U_FORTIFY_SOURCE", "-DJAX_KDA_EMULATE", *includes]
    program, main = folder / "test_kernels", ROOT / "tests/native/test_kernels.cpp"
    subprocess.run([compiler, *options, "-o", str(program), str(main)], check=True)
    (folder / "built").touch()


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one program for all workers
        base = base.parent
    with open(base / "test_kernels.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(base / "test_kernels", compiler)
    return base / "test_kernels" / "test_kernels"


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    "part",
    [
        "inverse",
        "recurrence",
        "packets",
        "tails",
        "calls",
        "cluster",
        "pool",
        "same-bits",
        "fallback",
        "prefix-bounded",
        "prefix-unbounded",
        "resets",
        "decode",
        "segmented",
        "segmented-calls",
        "checkpoints",
    ],
)
def test_the_kernels_are_right(program: Path, part: str) -> None:
    result = run(program, part)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("fault", "part", "message"), PLANTED, ids=["-".join(x[:2]) for x in PLANTED])
def test_a_planted_mistake_is_seen(program: Path, fault: str, part: str, message: str) -> None:
    result = run(program, part, "--fault", fault)
    assert result.returncode == 1, f"passed, or crashed: {result.returncode}"
    assert re.search(message, result.stdout), result.stdout


@pytest.mark.parametrize("sms", [132, 78])
@pytest.mark.parametrize(
    ("B", "T", "N", "HV"),
    [
        (1, 0, 1, 1), (1, 1, 1, 1), (1, 2048, 1, 1), (4, 2048, 1, 32),
        (1, 8192, 8, 64), (2, 999, 3, 5), (1, 2**20, 1, 1),
        (1, 352, 2, 1), (1, 14058, 11, 1), (1, 10**5, 700, 2),
    ],
)  # fmt: skip
def test_the_host_counts_as_the_kernels_do(program: Path, B: int, T: int, N: int, HV: int, sms: int) -> None:
    """Lengths of segments and workspaces: jax_kda/segments.py and routing.py against csrc/."""
    for packed in (False, True) if N == 1 else (True,):
        said = run(program, "--sizes", *map(str, (B, T, N, HV, sms, int(packed))))
        chunks, *workspaces = map(int, said.stdout.split())
        assert chunks == segments.segment_chunks(B, T, N, HV, sms)
        device = dataclasses.replace(routing.H200, sm_count=sms)
        options = contract.Options(scale=1.0, packed=packed)
        dtypes = ("bfloat16", "bfloat16", "float32", "float32")
        problem = contract.Problem(options, B, T, HV, HV, 128, 128, N, *dtypes)
        for name, needed in zip(
            ("segmented", "c4_m128_d15", "c4_m64_d10", "c8_m128_d35", "pool_m128", "pool_m64"),
            workspaces,
            strict=True,
        ):
            assert routing._ROUTES[routing.Route(name)].workspace_bytes(problem, device) == needed, name


def test_every_mistake_has_a_test(program: Path) -> None:
    assert {"none", *FAULTS} == set(run(program, "--faults").stdout.split())
