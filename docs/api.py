"""`python -m docs.api`: writes docs/api.md, the reference of every public name, from the docstrings.

With `--check` nothing is written, and the exit code says whether the page is in step.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax_kda
from jax_kda import ffi, routing

__all__ = ["FUNCTIONS", "TYPES", "entries", "main", "page"]

PAGE = Path(__file__).with_name("api.md")
FUNCTIONS = (
    "kda_prefill", "kda_decode", "explain_route", "status", "check_cu_seqlens", "checkpoint_offsets",
    "kda_reference", "export_checks",
)  # fmt: skip
# What they take and return, by the name under which a user finds it.
TYPES: dict[str, type] = {
    "Route": routing.Route,
    "routing.Decision": routing.Decision,
    "routing.Device": routing.Device,
    "ffi.Status": ffi.Status,
}
_SECTION = re.compile(r"(Args|Returns|Raises|Examples):$")
_TITLES = {"Args": "Arguments"}


def page() -> str:
    parts = [
        "# API reference",
        "Made from the docstrings by `python -m docs.api`; a test keeps it in step, and runs the examples.",
        "\n".join(f"- [`{name}`](#{_anchor(name)})" for name in (*FUNCTIONS, *TYPES)),
    ]
    for name in FUNCTIONS:
        function = getattr(jax_kda, name)
        parts += [f"## {name}", _fenced(_signature(name, function)), _text(inspect.getdoc(function) or "")]
    for name, cls in TYPES.items():
        parts += [f"## {name}", _text(inspect.getdoc(cls) or ""), _members(cls)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _anchor(name: str) -> str:
    return name.lower().replace(".", "")


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def _signature(name: str, function: Any) -> str:
    """As it stands in the source, whatever the version of Python: annotations are strings there."""
    parameters: list[str] = []
    star = False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            parameters.append("*")
            star = True
        text = f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name
        text += f": {p.annotation}" if p.annotation is not p.empty else ""
        parameters.append(text + (f" = {_default(p.default)}" if p.default is not p.empty else ""))
    returned = inspect.signature(function).return_annotation
    line = f"jax_kda.{name}({', '.join(parameters)}) -> {returned}"
    if len(line) <= 100:
        return line
    return f"jax_kda.{name}(\n" + "".join(f"    {text},\n" for text in parameters) + f") -> {returned}"


def _default(x: Any) -> str:
    if isinstance(x, str):
        return f'"{x}"'
    return f"{x.__module__}.{x.__name__}" if isinstance(x, type) else repr(x)


def _members(cls: type) -> str:
    """The members of an enumeration or the fields of a dataclass, with the comments beside them."""
    comments = _comments(cls)
    if issubclass(cls, enum.Enum):
        return "\n".join(_item(f'"{m.value}"', comments.get(m.name, "")) for m in cls)
    return "\n".join(
        _item(f"{field.name}: {field.type}", comments.get(field.name, ""))
        for field in dataclasses.fields(cls)
    )


def _item(code: str, text: str) -> str:
    return f"- `{code}`" + (f": {text}" if text else "")


def _comments(cls: type) -> dict[str, str]:
    """The comment at the end of each line of a class that gives a name."""
    return dict(re.findall(r"^    (\w+)\b.*?  # (.*)$", inspect.getsource(cls), re.MULTILINE))


def _text(doc: str) -> str:
    """A docstring as Markdown: its sections, literal blocks and examples."""
    blocks: list[str] = []
    lines = doc.splitlines()
    while lines:
        if not lines[0].strip():
            lines.pop(0)
        elif match := _SECTION.match(lines[0]):
            body = _indented(lines[1:])
            lines = lines[1 + len(body) :]
            inside = textwrap.dedent("\n".join(body)).strip("\n")
            entries_ = match[1] in ("Args", "Raises")
            blocks += [
                f"**{_TITLES.get(match[1], match[1])}**",
                _entries(inside) if entries_ else _text(inside),
            ]
        elif lines[0].startswith(">>>"):
            count = next((n for n, line in enumerate(lines) if not line.strip()), len(lines))
            blocks.append(_fenced("\n".join(lines[:count])))
            lines = lines[count:]
        else:
            count = next(
                (n for n, line in enumerate(lines) if not line.strip() or _SECTION.match(line)), len(lines)
            )
            paragraph, lines = "\n".join(lines[:count]), lines[count:]
            if paragraph.endswith("::"):
                body = _indented(lines)
                lines = lines[len(body) :]
                code = textwrap.dedent("\n".join(body)).strip("\n")
                blocks += [paragraph[:-1], f"```\n{code}\n```"]
            else:
                blocks.append(paragraph)
    return "\n\n".join(blocks)


def _indented(lines: Sequence[str]) -> list[str]:
    """The lines up to the first that is not indented."""
    count = next((n for n, line in enumerate(lines) if line.strip() and line[0] != " "), len(lines))
    return list(lines[:count])


def _entries(body: str) -> str:
    return "\n".join(f"- {_quoted(names)}: {text}" for names, text in _pairs(body))


def _pairs(body: str) -> Iterator[tuple[str, str]]:
    """The entries "name, name: text" of a section; the lines of one are joined."""
    for entry in re.split(r"\n(?! )", body):
        names, _, text = entry.partition(":")
        yield names, " ".join(text.split())


def _quoted(names: str) -> str:
    return ", ".join(f"`{name.strip()}`" for name in names.split(","))


def entries(function: Any, section: str = "Args") -> list[str]:
    """The names that a section of the docstring explains."""
    doc = (inspect.getdoc(function) or "").splitlines()
    if f"{section}:" not in doc:
        return []
    body = textwrap.dedent("\n".join(_indented(doc[doc.index(f"{section}:") + 1 :]))).strip("\n")
    return [name.strip() for names, _ in _pairs(body) for name in names.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.api", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 where it differs")
    text = page()
    if parser.parse_args(arguments).check:
        if not PAGE.is_file() or PAGE.read_text() != text:
            print("docs/api.md is not in step with the docstrings: run python -m docs.api", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
