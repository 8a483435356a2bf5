"""The digest of the product: equal digests mean that measurements of one tree hold for the other.

It covers what decides a result or a time: every file in csrc/, CMakeLists.txt and jax_kda/*.py. For Python
the syntax tree without docstrings counts, so prose and formatting cost no GPU time. `python bench/digest.py`
prints it, the same on every supported version of Python.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def product_files(root: Path) -> list[Path]:
    """Every file of the product, sorted by its path relative to `root`."""
    files = [path for path in (root / "csrc").rglob("*") if path.is_file()]
    files += [root / "CMakeLists.txt", *(root / "jax_kda").glob("*.py")]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def content(path: Path) -> bytes:
    """What counts of a file: its bytes, or for Python its syntax tree without docstrings."""
    if path.suffix != ".py":
        return path.read_bytes()
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return _dump(tree).encode()


def _dump(node: object) -> str:
    """A syntax tree as text, without what differs between versions of Python.

    Those are empty fields, which `ast.dump` prints or not, and empty strings that 3.12 leaves in f-strings.
    """
    if isinstance(node, ast.JoinedStr):
        node = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        return f"{type(node).__name__}({', '.join(f'{name}={_dump(value)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_dump, node))}]"
    return repr(node)


def digest(root: Path = ROOT) -> str:
    """The first 16 hex digits of a sha256 over path and content of every file of the product."""
    sha = hashlib.sha256()
    for path in product_files(root):
        for part in (path.relative_to(root).as_posix().encode(), content(path)):
            sha.update(len(part).to_bytes(8, "big") + part)
    return sha.hexdigest()[:16]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the tree (default: this one)")
    print(digest(parser.parse_args().root))
