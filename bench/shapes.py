"""The one list of what is timed: shapes by set, gate regimes, and the bytes that a call cannot avoid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = [
    "FOLDED_GATES",
    "GATES",
    "REGION_HEADS",
    "REGION_TOKENS",
    "SETS",
    "Case",
    "Shape",
    "cases",
    "checkpoint_bytes",
    "floor_us",
    "parse_names",
    "state_bytes",
    "token_bytes",
]

HEAD_SIZE = 128

# The gate regimes of a benchmark, all through one gate input: two of them differ in nothing but the decays.
GATES = ("production", "slow", "long", "mixed", "none")
# What else can be timed so.
FOLDED_GATES = (*GATES, "bound", "collinear")

_DRIVER_DTYPES = {"bfloat16": "bf16", "float32": "f32"}
_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Shape:
    """One shape. q, k, v and the logits of beta are bfloat16; l2norm, gate and sigmoid are taken in the
    kernel; float32 states go in and come out."""

    B: int
    T: int
    H: int
    HV: int
    lengths: tuple[int, ...] = ()  # of packed sequences; () where a row is one sequence
    gate: str = "safe"  # or "softplus", or "log": g is the log decay itself
    g_dtype: str = "bfloat16"
    checkpoint_every: int = 0  # tokens from one state checkpoint to the next; 0: none

    @property
    def sequences(self) -> int:
        return len(self.lengths) or self.B

    def __str__(self) -> str:
        heads = str(self.H) if self.H == self.HV else f"{self.H}/{self.HV}"
        if self.lengths and len(set(self.lengths)) == 1:
            size = f"{len(self.lengths)}*{self.lengths[0]}"
        elif self.lengths:
            size = f"packed {self.T}"
        else:
            size = f"{self.B}x{self.T}"
        options = "" if self.gate == "safe" else f" {self.gate}"
        options += " f32 g" if self.g_dtype == "float32" else ""
        options += f" checkpoints {self.checkpoint_every}" if self.checkpoint_every else ""
        return f"{size}x{heads}{options}"


def _dense(B: int, T: int, heads: Iterable[int]) -> tuple[Shape, ...]:
    return tuple(Shape(B, T, H, H) for H in heads)


def _equal(T: int, H: int, N: int) -> Shape:
    return Shape(1, T, H, H, (T // N,) * N if N > 1 else ())


# The grid on which every route is measured against every other (bench/regions.py). Heads at both sides of
# what an H200 holds at once: 30 clusters of four, 66 pairs, 132 CTAs; of the pooled routes 64 and 112 tasks.
REGION_HEADS = (1, 2, 4, 8, 12, 16, 22, 30, 31, 36, 40, 44, 66, 67, 80, 96, 112, 113, 132, 133, 198, 264)
REGION_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
REGION_LIMIT = 1 << 20  # tokens times heads

SETS: dict[str, tuple[Shape, ...]] = {
    "seed": _dense(1, 2048, (1, 4, 8)) + _dense(1, 4096, (1, 4, 8)),
    "small": _dense(1, 512, (8,)) + _dense(1, 8192, (1, 8)) + _dense(1, 32768, (1, 4)),
    "serving": _dense(4, 2048, (32,)) + _dense(1, 8192, (32, 64, 96)),
    "packed": (_equal(8192, 64, 8), Shape(1, 8192, 96, 96, (1300, 547, 2048, 963, 271, 3063))),
    "modes": (
        Shape(1, 8192, 64, 64, gate="softplus"),
        Shape(1, 8192, 64, 64, gate="log", g_dtype="float32"),
        Shape(1, 8192, 16, 64),
    ),
    # What checkpoints cost: each shape without and with them.
    "checkpoints": tuple(
        replace(shape, checkpoint_every=every)
        for shape in (Shape(1, 8192, 8, 8), _equal(8192, 64, 8))
        for every in (0, 64)
    ),
    "ten": tuple(
        _equal(T, H, N)
        for T, H, N in (
            (2048, 12, 1),
            (2048, 16, 1),
            (4096, 8, 1),
            (4096, 12, 1),
            (8192, 12, 4),
            (8192, 16, 1),
            (1024, 4, 1),
            (3072, 10, 1),
            (8192, 24, 1),
            (16384, 16, 8),
        )
    ),
    "regions": tuple(Shape(1, T, H, H) for H in REGION_HEADS for T in REGION_TOKENS if H * T <= REGION_LIMIT),
}


@dataclass(frozen=True)
class Case:
    """What one figure is about."""

    shape: Shape
    gates: str
    route: str

    def __str__(self) -> str:
        return f"{self.shape} {self.gates} {self.route}"

    def line(self, *, route: bool = True) -> str:
        """The case as the native tools read it (tests/native/case.cuh)."""
        s = self.shape
        words = [f"route={self.route}"] if route else []
        words += [f"gates={self.gates}", f"B={s.B}", f"T={s.T}", f"H={s.H}", f"HV={s.HV}", f"gate={s.gate}"]
        words.append(f"g={_DRIVER_DTYPES[s.g_dtype]}")
        if s.lengths:
            words.append(f"lengths={','.join(map(str, s.lengths))}")
        if s.checkpoint_every:
            words.append(f"checkpoint_every={s.checkpoint_every}")
        return " ".join(words)


def cases(sets: Sequence[str], gates: Sequence[str], routes: Sequence[str]) -> list[Case]:
    """Every case once, also where a shape is in several sets."""
    shapes = dict.fromkeys(shape for name in sets for shape in SETS[name])
    return [Case(shape, g, route) for shape in shapes for route in routes for g in gates]


def parse_names(what: str, text: str, allowed: Iterable[str]) -> tuple[str, ...]:
    """The names of a comma-separated list, each once. ValueError where one is unknown, or there is none."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    known = tuple(allowed)
    for name in names or (text,):
        if name not in known:
            raise ValueError(f"{what}: got {name!r}; allowed: {', '.join(known)}")
    return names


def token_bytes(shape: Shape) -> int:
    """Bytes that the arrays with a token axis take: each read or written once. States are not in it."""
    row = HEAD_SIZE * 2
    return (
        shape.B
        * shape.T
        * (2 * shape.H * row + shape.HV * (2 * row + HEAD_SIZE * _BYTES[shape.g_dtype] + _BYTES["bfloat16"]))
    )


def state_bytes(shape: Shape) -> int:
    """Bytes of float32 states, each read and written once: what a step of decode moves beside its tokens."""
    return 2 * 4 * shape.sequences * shape.HV * HEAD_SIZE**2


def checkpoint_bytes(shape: Shape) -> int:
    """Bytes of the checkpoints, in float32; each written once."""
    rows = shape.B * (shape.T // shape.checkpoint_every) if shape.checkpoint_every else 0
    return rows * shape.HV * HEAD_SIZE * HEAD_SIZE * 4


def floor_us(shape: Shape, bytes_per_second: float) -> float:
    """The time that the memory needs for all of them."""
    return (token_bytes(shape) + checkpoint_bytes(shape)) / bytes_per_second * 1e6
