"""docs/features.md names tests that there are, and says which of those for GPUs have not been run.

`python tests/test_features.py` brings the marks in the page up to date with bench/results/gpu-tests*.json.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/features.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(\[[^`]*\])?`( \(not run yet\))?")
GPU = "tests/gpu/"
COLUMNS = 4


def rows(page: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def passed() -> list[str]:
    """The GPU tests that passed in some record; those that failed in any are not among them."""
    outcomes: dict[str, set[str]] = {}
    for path in sorted((ROOT / "bench/results").glob("gpu-tests*.json")):
        for test in json.loads(path.read_text())["tests"]:
            outcomes.setdefault(GPU + test["name"], set()).add(test["outcome"])
    return [name for name, seen in outcomes.items() if "passed" in seen and "failed" not in seen]


def marked(page: str, ran: Iterable[str]) -> str:
    """The page with "(not run yet)" after each GPU test that is not among those which ran, and only there."""
    ran = list(ran)

    def mark(found: re.Match[str]) -> str:
        file, name, cases, _ = found.groups()
        plain = f"`{file}::{name}{cases or ''}`"
        if not file.startswith(GPU):
            return plain
        # A test without cases in the page may have any: that of a route, above all.
        any_case = re.escape(cases).replace(r"\*", ".*") if cases else r"(\[.*\])?"
        pattern = re.escape(f"{file}::{name}") + any_case
        return plain + ("" if any(re.fullmatch(pattern, test) for test in ran) else " (not run yet)")

    return TEST.sub(mark, page)


def test_no_cell_is_empty() -> None:
    for row in rows(PAGE.read_text()):
        assert len(row) == COLUMNS, row
        assert all(row), row
        for cell in row[1:]:
            assert TEST.search(cell) or len(cell.split()) >= 2, f"{row[0]}: no test and no reason: {cell}"


def test_every_named_test_exists() -> None:
    named = {(file, name) for file, name, _, _ in TEST.findall(PAGE.read_text())}
    assert len(named) > 50
    for file in {file for file, _ in named}:
        tree = ast.parse((ROOT / file).read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        missing = {name for f, name in named if f == file} - defined
        assert not missing, f"{file} has no {', '.join(sorted(missing))}"
    # And nothing that looks like a test's name is written so that it is not found above.
    assert len(re.findall(r"::test_", PAGE.read_text())) == len(TEST.findall(PAGE.read_text()))


def test_what_has_not_run_is_said() -> None:
    page = PAGE.read_text()
    assert page == marked(page, passed()), "run `python tests/test_features.py`"


def test_the_marks() -> None:
    b, d, e = "tests/gpu/test_a.py::test_b[*-2]", "tests/test_c.py::test_d", "tests/gpu/test_a.py::test_e"
    page = f"`{b}` and `{d}` and `{e}` (not run yet)"
    assert marked(page, ["tests/gpu/test_a.py::test_b[x-1]"]).count("(not run yet)") == 2
    ran = ["tests/gpu/test_a.py::test_b[x-2]", "tests/gpu/test_a.py::test_e[y]"]
    assert "(not run yet)" not in marked(page, ran)


if __name__ == "__main__":
    PAGE.write_text(marked(PAGE.read_text(), passed()))
