"""Compiles the peers' kernels ahead: many processes fill the compilers' caches together.

flash-linear-attention's prefill compiles each kernel in a dozen variants for every number of heads, one after
another, and times them all to choose one. `ahead` starts processes that compile a share of the variants each
and time none; then the process that measures finds them compiled, and chooses among all of them on an idle
GPU (a little quicker, with `brief`).

    python -m bench.peers_warm PEER PART PARTS SHAPE...     one of those processes; SHAPE: BxTxH
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from .digest import ROOT
from .library import specs
from .peer_calls import DECODE_PEERS, PEERS
from .shapes import Shape

__all__ = ["ahead", "brief", "commands", "main"]


def ahead(wanted: dict[str, Sequence[Shape]], seconds: float) -> Iterator[str]:
    """Compiles these peers at these shapes, for at most so many seconds; yields at times how it stands."""
    with contextlib.ExitStack() as stack:
        running = []
        for words in commands(wanted):
            said = stack.enter_context(tempfile.TemporaryFile())
            # A choice made on a GPU that others use is not kept: only what was compiled is.
            path = os.pathsep.join(filter(None, sys.path))
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.peers_warm", *words],
                cwd=ROOT,
                env={**os.environ, "FLA_CACHE_RESULTS": "0", "PYTHONPATH": path},
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)  # one that has ended is left alone
            running.append((process, said))
        end = time.monotonic() + seconds
        while any(p.poll() is None for p, _ in running) and time.monotonic() < end:
            ended = sum(p.poll() is not None for p, _ in running)
            yield f"{ended} of {len(running)} processes have compiled"
            time.sleep(0.2)
        late = sum(p.poll() is None for p, _ in running)
        failed = [said for p, said in running if p.poll()]
        if late or failed:
            yield (
                f"{late} of {len(running)} processes that compile ahead were stopped after {seconds:.0f} s, "
                f"{len(failed)} failed{': ' if failed else ''}{'; '.join(map(_last_line, failed))}"
            )


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no word"


def commands(wanted: dict[str, Sequence[Shape]]) -> list[list[str]]:
    """The arguments of each process."""
    whole, shared = [], []
    for name, shapes in wanted.items():
        by_heads: dict[int, list[str]] = {}
        for shape in dict.fromkeys(shapes):
            if shape.H == shape.HV and not shape.lengths:
                by_heads.setdefault(shape.H, []).append(f"{shape.B}x{shape.T}x{shape.H}")
        if (PEERS | DECODE_PEERS)[name].tunes:
            shared += [(name, words) for words in by_heads.values()]
        elif by_heads:
            whole.append([name, "0", "1", *(words[0] for words in by_heads.values())])
    parts = max(1, ((os.cpu_count() or 1) - len(whole)) // max(1, len(shared)))
    return whole + [[name, str(n), str(parts), *words] for name, words in shared for n in range(parts)]


def brief() -> None:
    """Makes Triton's autotuners time each variant for 20 ms in place of 100, in this process."""
    import triton.testing

    _time_variants_with(functools.partial(triton.testing.do_bench, warmup=5, rep=20))


def _time_variants_with(timer: Any) -> None:
    from triton.runtime.autotuner import Autotuner

    Autotuner.do_bench = property(lambda self: self._do_bench or timer)


def share(part: int, parts: int) -> None:
    """Makes the autotuners compile every variant whose number is `part` modulo `parts`, and time none."""
    from triton.runtime.autotuner import Autotuner

    bench = Autotuner._bench

    def compiled(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        mine = self.configs.index(config) % parts == part
        # Not infinite, as what does not fit the GPU is: the one chosen must run, or no later kernel is seen.
        return bench(self, *args, config=config, **meta) if mine else [1e9] * 3

    def once(call: Any, quantiles: Any = None) -> list[float]:
        call()
        return [1.0] * 3

    Autotuner._bench = compiled
    _time_variants_with(once)


def arrays(shape: Shape, device: str = "cuda") -> dict[str, Any]:
    """Random arrays of a case; what they hold does not matter."""
    import torch

    made = {}
    for name, (size, dtype) in specs(shape).items():
        if name != "cu_seqlens":
            made[name] = torch.randn(size, device=device).to(getattr(torch, dtype))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    peer, part, parts, *shapes = sys.argv[1:] if arguments is None else arguments
    import torch

    if int(parts) > 1:
        share(int(part), int(parts))
    with torch.inference_mode():
        for text in shapes:
            B, T, H = map(int, text.split("x"))
            shape = Shape(B, T, H, H)
            (PEERS | DECODE_PEERS)[peer].make(shape, arrays(shape))()
    return 0


if __name__ == "__main__":
    sys.exit(main())
