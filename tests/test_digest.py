"""bench/digest.py: what changes the digest of the product, and what does not."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

_spec = importlib.util.spec_from_file_location("digest", ROOT / "bench" / "digest.py")
assert _spec is not None
assert _spec.loader is not None
digest = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(digest)

MODULE = '"""Says what."""\n\n\ndef double(x: int = 1) -> int:\n    """Twice x."""\n    return 2 * x\n'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "csrc" / "kernels").mkdir(parents=True)
    (tmp_path / "jax_kda").mkdir()
    (tmp_path / "CMakeLists.txt").write_text("project(x)\n")
    (tmp_path / "csrc" / "a.cu").write_text("// a\n")
    (tmp_path / "csrc" / "kernels" / "b.cuh").write_text("// b\n")
    (tmp_path / "jax_kda" / "m.py").write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("jax_kda/m.py", MODULE.replace("Says what.", "Says it better.").replace("Twice x.", "x, doubled.")),
        ("jax_kda/m.py", MODULE.replace('    """Twice x."""\n', "    # a comment\n")),
        ("jax_kda/m.py", MODULE.replace("2 * x", "(2\n        * x)")),
        ("README.md", "prose"),
        ("tests/test_m.py", "assert True"),
        ("jax_kda/__pycache__/m.pyc", "junk"),
    ],
)
def test_prose_and_what_is_no_product_do_not_count(tree: Path, name: str, text: str) -> None:
    before = digest.digest(tree)
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_text(text)
    assert digest.digest(tree) == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("jax_kda/m.py", MODULE.replace("2 * x", "3 * x")),
        ("jax_kda/m.py", MODULE.replace("= 1", "= 2")),
        ("jax_kda/m.py", MODULE.replace("2 * x", "max(2, x)")),
        ("jax_kda/n.py", ""),
        ("csrc/a.cu", "// another comment\n"),
        ("csrc/kernels/b.cuh", ""),
        ("csrc/kernels/c.cuh", ""),
        ("CMakeLists.txt", "project(y)\n"),
    ],
)
def test_code_counts(tree: Path, name: str, text: str) -> None:
    before = digest.digest(tree)
    (tree / name).write_text(text)
    assert digest.digest(tree) != before


def test_a_renamed_file_counts(tree: Path) -> None:
    before = digest.digest(tree)
    (tree / "csrc" / "a.cu").rename(tree / "csrc" / "z.cu")
    assert digest.digest(tree) != before


def test_a_string_that_is_no_docstring_counts(tree: Path) -> None:
    (tree / "jax_kda" / "m.py").write_text("x = 1\n'one'\n")
    before = digest.digest(tree)
    (tree / "jax_kda" / "m.py").write_text("x = 1\n'two'\n")
    assert digest.digest(tree) != before


def test_an_empty_string_counts_but_not_inside_an_f_string(tree: Path) -> None:
    module = tree / "jax_kda" / "m.py"
    module.write_text('x = print("", f"{y:>{z}}")\n')
    before = digest.digest(tree)
    assert digest.content(module).count(b"value=''") == 1
    module.write_text('x = print(f"{y:>{z}}")\n')
    assert digest.digest(tree) != before


def test_the_command_prints_sixteen_hex_digits() -> None:
    command = [sys.executable, str(ROOT / "bench" / "digest.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"[0-9a-f]{16}\n", printed)
    assert printed.strip() == digest.digest()
