"""`python -m bench.notebook`: runs the cells of bench/bench.py and writes bench/bench.ipynb with outputs.

    --mode quick     times come from the rows in bench/results; a minute on a CPU (the default)
    --mode measure   on a GPU: times are measured anew
    --mode write     the same, and the rows in bench/results are written

`--check` runs nothing: it says whether bench.ipynb has the cells of bench.py, and was drawn from the rows
that are in bench/results now, by the code that draws them now.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat
from tqdm import tqdm

from . import records
from .digest import ROOT

__all__ = ["SOURCE", "check", "main"]

SOURCE = ROOT / "bench" / "bench.py"
NOTEBOOK = SOURCE.with_suffix(".ipynb")
MODES = ("quick", "measure", "write")
DRAWING = ("figures.py", "records.py", "tables.py")
CELL_SECONDS = 1800


def stamp(folder: Path = records.FOLDER) -> str:
    """The digest of every result file, and of what draws them: what the outputs were made from."""
    sha = hashlib.sha256()
    for path in (*sorted(folder.glob("*.json")), *(SOURCE.with_name(name) for name in DRAWING)):
        sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()[:16]


def check(notebook: Path = NOTEBOOK) -> str:
    """Why the pair is not in step, or the outputs not with the rows; "" where all is."""
    if not notebook.is_file():
        return f"{notebook.name} is missing: run python -m bench.notebook"
    found, wanted = nbformat.read(notebook, 4), jupytext.read(SOURCE)
    cells = [[(cell.cell_type, cell.source) for cell in x.cells] for x in (found, wanted)]
    if cells[0] != cells[1]:
        return f"{notebook.name} has other cells than {SOURCE.name}: run python -m bench.notebook"
    if found.metadata.get("jax_kda", {}).get("results") != stamp():
        return f"{notebook.name} was not drawn from the rows and as now: run python -m bench.notebook"
    return ""


def execute(mode: str, out: Path) -> None:
    """Runs the cells in a kernel of this interpreter. CellExecutionError, after writing, where one fails."""
    from nbclient import NotebookClient

    notebook = jupytext.read(SOURCE)
    for n, cell in enumerate(notebook.cells):
        cell.id = f"cell-{n}"  # not random: a cell that did not change is no change of the file
    code = sum(cell.cell_type == "code" for cell in notebook.cells)
    os.environ["JAX_KDA_BENCH"] = mode
    with tqdm(total=code, unit="cell", leave=False, disable=None) as bar:
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": str(ROOT)}},
            on_cell_executed=lambda **_: bar.update(),
        )
        try:
            client.execute()
        finally:
            for cell in notebook.cells:  # the bars of finished loops
                if cell.cell_type == "code":
                    cell.outputs = [x for x in cell.outputs if "\r" not in x.get("text", "")]
            kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
            notebook.metadata = nbformat.from_dict(
                {"kernelspec": kernel, "language_info": {"name": "python"}, "jax_kda": {"results": stamp()}}
            )
            nbformat.write(notebook, out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.notebook",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--mode", choices=MODES, default="quick", help="where times come from (default: quick)"
    )
    parser.add_argument(
        "--out", type=Path, default=NOTEBOOK, help="the notebook (default: bench/bench.ipynb)"
    )
    parser.add_argument(
        "--check", action="store_true", help="run nothing; exit code 1 where it is not in step"
    )
    options = parser.parse_args(arguments)
    if options.check:
        if why := check(options.out):
            print(why, file=sys.stderr)
        return 1 if why else 0
    execute(options.mode, options.out)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
