"""The protocol between helpers and owners: every interleaving at small sizes, planted mistakes, real threads.

tests/native/test_mailbox.cpp is compiled from csrc/kernels/mailbox.cuh, the file that the device uses.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_kernels_emulated import CUDA_HEADERS, ROOT

# Each planted mistake, and what the exploration must say of it.
MUTANTS = {
    "acknowledged-before-copy": "takes chunks",
    "wrong-generation": "takes chunks",
    "second-owner-forgotten": "2 owners, .* owner 1 takes chunks",
    "reused-at-011": "2 owners, .* takes chunks",
    "leaves-early": "leaves before its packets are there",
    "published-before-written": "takes chunks",
    "stage-not-awaited": "takes chunks",
}


def build(folder: Path, *options: str) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    for header in CUDA_HEADERS:
        (folder / header).write_text('#include "cuda_stand_in.h"\n')
    includes = [f"-I{path}" for path in (folder, ROOT / "tests/native", ROOT / "csrc")]
    common = ["-std=c++20", "-U_FORTIFY_SOURCE", "-DJAX_KDA_EMULATE", "-pthread", *includes, *options]
    program, main = folder / "test_mailbox", ROOT / "tests/native/test_mailbox.cpp"
    subprocess.run([compiler, *common, "-o", str(program), str(main)], check=True)
    return program


def run(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("mailbox"), "-O2")


def test_no_interleaving_goes_wrong(program: Path) -> None:
    result = run(program)
    assert result.returncode == 0, result.stdout
    found = re.fullmatch(r"(\d+) states\n", result.stdout)
    assert found is not None
    assert int(found[1]) > 100_000


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_mistake_is_seen(program: Path, mutant: str) -> None:
    result = run(program, mutant)
    assert result.returncode == 1
    assert re.search(MUTANTS[mutant], result.stdout), result.stdout


def test_every_mistake_has_a_test(program: Path) -> None:
    assert {"none", *MUTANTS} == set(run(program, "--mutants").stdout.split())


def test_threads(tmp_path: Path) -> None:
    """Under ThreadSanitizer: packets are plain memory, ordered by nothing but the flags."""
    try:
        program = build(tmp_path, "-O1", "-g", "-fsanitize=thread")
    except subprocess.CalledProcessError:
        pytest.skip("this g++ has no ThreadSanitizer")
    result = run(program, "--threads")
    assert result.returncode == 0, result.stdout + result.stderr
