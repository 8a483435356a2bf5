"""The native tools of tests/native: built when needed, into a cache, and run."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from .shapes import Case

__all__ = ["DriverError", "build", "cache_folder", "device", "find_nvcc", "output", "run"]

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "tests" / "native"

# What each tool is made of; a CUDA one of the kernels too.
_TOOLS = {
    # The occupancy query goes through the driver, for its `fallback`.
    "driver": ("driver.cu", ("-Xlinker", "--wrap=cudaOccupancyMaxActiveClusters")),
    "decode_driver": ("decode_driver.cu", ()),
    "library.so": ("library.cu", ("-shared",)),
    "empty_call.so": ("empty_call.cc", ("-shared",)),
}


class DriverError(RuntimeError):
    """A tool could not be built, or ended before it was done."""


def find_nvcc() -> str:
    """nvcc, found as CMakeLists.txt finds it. DriverError where there is none."""
    if "CUDACXX" in os.environ:
        return os.environ["CUDACXX"]
    folders = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [*(folder / "bin" / "nvcc" for folder in folders), Path("/usr/local/cuda/bin/nvcc")]
    found = [str(path) for path in candidates if path.is_file()]
    if on_path := shutil.which("nvcc"):
        found.insert(0, on_path)
    if not found:
        raise DriverError("no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda")
    return found[0]


def architecture() -> str:
    """The machine code to build: of the GPU that nvidia-smi lists first, else of Hopper."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return "90a"
    found = re.match(r"(\d+)\.(\d+)", text.strip())
    return f"{found[1]}{found[2]}a" if found else "90a"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jax_kda" / "bench"


def build(tool: str = "driver", cache: Path | None = None) -> Path:
    """The path of a tool; only what changed since the last time is compiled.

    tool: "driver", "decode_driver", "library.so" or "empty_call.so".
    """
    nvcc, arch = find_nvcc(), architecture()
    cache = cache or cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    flags = [
        "-std=c++20",
        "-O3",
        "-gencode",
        f"arch=compute_{arch},code=sm_{arch}",
        f'-DJAX_KDA_ARCHITECTURES="{arch}"',
        "-Xcompiler=-fPIC",
    ]
    main, link_flags = _TOOLS[tool]
    kernels = sorted((ROOT / "csrc").glob("*.cu"))
    if main.endswith(".cc"):  # a handler: of XLA's headers, without kernels
        flags += ["-I", jax.ffi.include_dir()]
        kernels = []
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    csrc = ROOT / "csrc"
    headers = [p for folder in (csrc, NATIVE) for p in folder.rglob("*") if p.suffix in (".h", ".cuh")]
    common = hashlib.sha256(repr((flags, version, jax.__version__ if not kernels else "")).encode())
    for path in sorted(headers):
        # The kernels do not read the tools' headers: a change of a tool compiles no kernel.
        if path.is_relative_to(csrc):
            common.update(path.read_bytes())
    own = common.copy()
    for path in sorted(headers):
        own.update(path.read_bytes())

    objects = {}
    for source in [NATIVE / main, *kernels]:
        sha = (own if source.parent == NATIVE else common).copy()
        sha.update(source.read_bytes())
        objects[source] = cache / f"{source.stem}-{sha.hexdigest()[:16]}.o"
    missing = [source for source, path in objects.items() if not path.is_file()]
    with concurrent.futures.ThreadPoolExecutor(max(1, len(missing))) as pool:
        list(pool.map(lambda source: _make([nvcc, *flags, "-c", str(source)], objects[source]), missing))
    name = hashlib.sha256("".join(path.name for path in objects.values()).encode()).hexdigest()[:16]
    product = cache / f"{name}-{tool}"
    if not product.is_file():
        inputs = [str(path) for path in objects.values()]
        _make([nvcc, *flags, *link_flags, *inputs], product)
    return product


def _make(command: Sequence[str], product: Path) -> None:
    """Runs a compiler; the product appears whole or not at all."""
    partial = product.with_name(f"{os.getpid()}-{product.name}")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        raise DriverError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    partial.rename(product)


def output(tool: Path, *words: str) -> str:
    """What a tool prints. DriverError, with what it says of that, where it fails."""
    done = subprocess.run([str(tool), *words], capture_output=True, text=True)
    if done.returncode != 0:
        why = done.stderr.strip() or f"exit status {done.returncode}"
        raise DriverError(f"{tool} {' '.join(words)}: {why}")
    return done.stdout


def device(driver: Path) -> dict[str, Any]:
    """What the driver runs on: gpu, compute_capability, sm_count, cuda."""
    facts: dict[str, Any] = json.loads(output(driver, "device"))
    return facts


def run(driver: Path, cases: Sequence[Case], rounds: int = 2, calls: int = 20) -> Iterator[dict[str, Any]]:
    """Times the cases. Yields the driver's lines: about the device first, then one each round of a case.

    DriverError, after the last line, where the driver ended early: what it said until then holds.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as file:
        file.write("".join(f"{case.line()}\n" for case in cases))
    try:
        command = [str(driver), "bench", file.name, str(rounds), str(calls)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield json.loads(line)
            except BaseException:
                process.kill()
                raise
        if process.returncode not in (0, 1):  # 1: a case failed, and its line said so
            raise DriverError(f"the driver ended with exit status {process.returncode}")
    finally:
        Path(file.name).unlink()
