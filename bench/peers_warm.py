"""Compiles and tunes a peer's Triton kernels ahead: many processes fill the compiler's cache together.

flash-linear-attention compiles each kernel in a dozen variants for every number of heads, one after another,
and times them all to choose one. `ahead` starts processes that compile a share of the variants each and time
none; then the process that measures finds them compiled, and chooses among all of them on an idle GPU (a
little quicker, with `brief`).

    python -m bench.peers_warm PEER PART PARTS SHAPE...     one of those processes; SHAPE: BxTxH
"""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from .digest import ROOT
from .library import specs
from .peer_calls import PEERS
from .shapes import Shape

__all__ = ["ahead", "brief", "main"]


def ahead(peer: str, shapes: Sequence[Shape], seconds: float) -> Iterator[int]:
    """Runs the processes for at most so many seconds; yields, now and then, how many have ended."""
    commands = _commands(peer, shapes)
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.peers_warm", *words],
            cwd=ROOT,
            # A choice made on a GPU that others use is not kept: only what was compiled is.
            env={
                **os.environ,
                "FLA_CACHE_RESULTS": "0",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for words in commands
    ]
    end = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in running) and time.monotonic() < end:
            yield sum(process.poll() is not None for process in running)
            time.sleep(0.2)
    finally:
        for process in running:
            process.kill()  # one that has ended is left alone
            process.wait()


def _commands(peer: str, shapes: Sequence[Shape]) -> list[list[str]]:
    by_heads: dict[tuple[int, int], list[str]] = {}
    for shape in dict.fromkeys(shapes):
        if shape.H == shape.HV and not shape.lengths:
            by_heads.setdefault((shape.H, shape.HV), []).append(f"{shape.B}x{shape.T}x{shape.H}")
    parts = max(1, (os.cpu_count() or 1) // max(1, len(by_heads)))
    return [[peer, str(part), str(parts), *words] for words in by_heads.values() for part in range(parts)]


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
        return bench(self, *args, config=config, **meta) if mine else [math.inf] * 3

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

    share(int(part), int(parts))
    with torch.inference_mode():
        for text in shapes:
            B, T, H = map(int, text.split("x"))
            shape = Shape(B, T, H, H)
            PEERS[peer].make(shape, arrays(shape))()
    return 0


if __name__ == "__main__":
    sys.exit(main())
