"""The API reference: complete, in step with the docstrings, and its examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import pytest

import jax_kda

# `pytest` alone, unlike `python -m pytest`, does not look there.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from docs import api

MODULES = [
    "jax_kda",
    *(
        f"jax_kda.{m.name}"
        for m in pkgutil.iter_modules(jax_kda.__path__)
        if m.name not in ("_native", "__main__")
    ),
]


def test_the_page_is_in_step() -> None:
    assert api.PAGE.read_text() == api.page(), "run python -m docs.api"


def test_every_public_name_is_on_the_page() -> None:
    assert set(jax_kda.__all__) <= {*api.FUNCTIONS, *api.TYPES}
    headings = [line[3:] for line in api.PAGE.read_text().splitlines() if line.startswith("## ")]
    assert headings == [*api.FUNCTIONS, *api.TYPES]


@pytest.mark.parametrize("name", api.FUNCTIONS)
def test_every_argument_is_explained(name: str) -> None:
    function = getattr(jax_kda, name)
    explained = set(api.entries(function))
    if "those of `kda_prefill`" in function.__doc__:
        explained |= set(api.entries(jax_kda.kda_prefill))
    assert set(inspect.signature(function).parameters) <= explained
    assert api.entries(function, "Examples"), "an example, too"


def test_what_is_missing_is_seen() -> None:
    def function(a: int, b: int) -> None:
        """Something.

        Args:
            a: one: and
                a line more.

        Returns:
            b: nothing.
        """

    assert api.entries(function) == ["a"]
    assert api.entries(function, "Raises") == []


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS, report=True)
    assert found.failed == 0


def test_the_public_names_have_examples() -> None:
    finder = doctest.DocTestFinder()
    for name in api.FUNCTIONS:
        (test,) = (t for t in finder.find(getattr(jax_kda, name), name) if t.name == name)
        assert test.examples


@pytest.mark.parametrize("text", ["", "another page"])
def test_the_command(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "PAGE", tmp_path / "api.md")
    if text:
        api.PAGE.write_text(text)
    assert api.main(["--check"]) == 1
    assert api.main([]) == 0
    assert api.main(["--check"]) == 0
