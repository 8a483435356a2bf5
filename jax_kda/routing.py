"""Which kernel serves a call: Problem + Device + Build -> Decision, with the reason. Pure functions, no JAX.

`choose` runs while the call is lowered, on the shapes one device sees: vmap has folded and shardings have
split by then. What a route *can* serve is code here (`_ROUTES`); where it is the *fastest* is measured data
(`regions`). Of packed calls no lengths are known, so they get the route that a model of the measured times
(`costs`) says loses the least, whether the lengths are even or not.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from . import costs, segments
from .contract import Problem
from .regions import COSTS, REGIONS, Cost, Region

__all__ = ["CPU", "H200", "Build", "Decision", "Device", "Route", "choose", "decode_refuses", "route_name"]


class Route(enum.StrEnum):
    """The implementations of the operation."""

    XLA = "xla"  # the chunk form in plain JAX: every platform, dtype and head size
    BASELINE_M128 = "baseline_m128"  # one CTA per (sequence, value head), all 128 state rows in it
    BASELINE_M64 = "baseline_m64"  # a pair of CTAs, 64 state rows each, which prepare chunks for each other
    C4_M128_D15 = "c4_m128_d15"  # a cluster of four: one owner of the state, three helpers, 15 slots
    C4_M64_D10 = "c4_m64_d10"  # a cluster of four: two owners of 64 rows, two helpers, 10 slots
    POOL_M128 = "pool_m128"  # an owner a task, which prepares chunks, too; all other SMs help all of them
    POOL_M64 = "pool_m64"  # two owners of 64 rows a task; all other SMs help all of them
    SEGMENTED = "segmented"  # sequences cut into segments, exactly; a row of kernels, each on all SMs
    C8_M128_D35 = "c8_m128_d35"  # a cluster of eight: one owner, seven helpers; only where it is asked for


_NAMES = ("auto", *(route.value for route in Route))


@dataclass(frozen=True)
class Device:
    """The facts about a device that routing reads."""

    platform: str
    name: str
    compute_capability: tuple[int, int] | None = None
    sm_count: int | None = None

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.name
        major, minor = self.compute_capability
        return f"{self.name} (compute capability {major}.{minor}, {self.sm_count} SMs)"


CPU = Device("cpu", "CPU")
H200 = Device(
    "cuda", "NVIDIA H200", (9, 0), 132
)  # assumed where a CUDA lowering meets no GPU (export, tests)


@dataclass(frozen=True)
class Build:
    """What the loaded extension holds, or why there is none."""

    cuda: bool
    architectures: tuple[str, ...] = ()  # "90a", "100a", ...
    reason: str = ""

    def has_code_for(self, compute_capability: tuple[int, int]) -> bool:
        major, minor = compute_capability
        for architecture in self.architectures:
            digits = architecture.rstrip("af")
            code = (int(digits[:-1]), int(digits[-1]))
            # "90a" runs on 9.0 alone; "90" runs on every later minor of its major.
            if code == (major, minor) or (digits == architecture and code[0] == major and code[1] <= minor):
                return True
        return False


@dataclass(frozen=True)
class Decision:
    """The route of one call on one device, and why."""

    route: Route
    reason: str
    workspace_bytes: int
    problem: Problem
    device: Device
    segment_chunks: int = 0  # chunks of 32 tokens a segment; 0 where the route has none
    refused: tuple[tuple[Route, str], ...] = ()  # the routes that cannot serve this call, and why
    # Microseconds, by a model of measured times, of the routes that can; the quickest first. Of packed calls:
    # for lengths as uneven as random cuts make them.
    predicted_us: tuple[tuple[Route, float], ...] = ()

    def __str__(self) -> str:
        p, o = self.problem, self.problem.options
        rows = [
            ("route", self.route.value),
            ("because", self.reason),
            ("device", str(self.device)),
            ("shapes", f"B={p.B} T={p.T} H={p.H} HV={p.HV} K={p.K} V={p.V}, {_sequences(p)}, per device"),
            (
                "dtypes",
                f"q, k, v {p.dtype}; g {p.g_dtype}; beta {p.beta_dtype}; state {o.state_dtype}",
            ),
            (
                "gate",
                f"{o.gate.name.lower()}; beta {o.beta.name.lower()}; l2norm {'on' if o.l2norm else 'off'}",
            ),
        ]
        if self.route is not Route.XLA:
            rows.append(("workspace", f"{self.workspace_bytes} bytes"))
        if self.segment_chunks:
            rows.append(("segments", f"{self.segment_chunks * segments.CHUNK} tokens each"))
        if self.predicted_us:
            times = ", ".join(f"{route.value} {us:.3g}" for route, us in self.predicted_us)
            rows.append(("predicted", f"{times} us"))
        rows += [(f"not {route.value}", why) for route, why in self.refused]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def route_name(route: object) -> str:
    """The `route` argument of a call as a name: "auto" or one of Route."""
    if isinstance(route, str) and str(route) in _NAMES:
        return str(route)
    allowed = ", ".join(map(repr, _NAMES))
    if not isinstance(route, str):
        raise TypeError(
            f"route: got {type(route).__name__}; allowed: {allowed}. Note: a name or a jax_kda.Route."
        )
    raise ValueError(
        f"route: got {str(route)!r}; allowed: {allowed}. "
        "Note: 'auto' takes the fastest that serves the call; jax_kda.explain_route(...) says which."
    )


def choose(
    problem: Problem,
    device: Device,
    build: Build,
    regions: tuple[Region, ...] = REGIONS,
    measured: tuple[Cost, ...] = COSTS,
) -> Decision:
    """The route for `problem` on `device`. ValueError where a forced route cannot run, saying why."""
    refusals = {route: why for route, row in _ROUTES.items() if (why := row.refuses(problem, device, build))}
    predicted = _predicted(problem, device, measured, refusals)
    route, reason = _pick(problem, device, regions, predicted, refusals)
    return Decision(
        route=route,
        reason=reason,
        workspace_bytes=_ROUTES[route].workspace_bytes(problem, device),
        problem=problem,
        device=device,
        segment_chunks=_segment_chunks(problem, device) if route is Route.SEGMENTED else 0,
        refused=tuple(refusals.items()),
        predicted_us=tuple((Route(name), us) for name, us in predicted[-1].items()) if predicted else (),
    )


def _predicted(
    problem: Problem, device: Device, measured: tuple[Cost, ...], refusals: dict[Route, str]
) -> list[dict[str, float]]:
    """Microseconds by route that can serve the call, for each split of its tokens; empty if none is known."""
    if not problem.is_static or problem.N < 1:
        return []
    several = problem.options.packed and problem.N > 1
    heads = problem.B * problem.HV
    lengths = costs.splits(problem.T, problem.N) if several else ((problem.T,),)
    facts = (device.compute_capability, device.sm_count, measured, several)
    found = [costs.predict_us(of_split, heads, *facts) for of_split in lengths]
    found = [{name: us for name, us in us_of.items() if Route(name) not in refusals} for us_of in found]
    return [us_of for us_of in found if us_of]


def _sizes(problem: Problem) -> tuple[int, int]:
    """Sequences times value heads, and tokens of a sequence, on average: offsets are never read."""
    return problem.B * problem.N * problem.HV, -(-problem.T // max(problem.N, 1))


def _pick(
    problem: Problem,
    device: Device,
    regions: tuple[Region, ...],
    predicted: list[dict[str, float]],
    refusals: dict[Route, str],
) -> tuple[Route, str]:
    wanted = problem.options.route
    if wanted != "auto":
        route = Route(wanted)
        if route in refusals:
            possible = ", ".join(repr(r.value) for r in _ROUTES if r not in refusals)
            raise ValueError(
                f"route: got {wanted!r}, but {refusals[route]}; allowed here: 'auto', {possible}. "
                "Note: jax_kda.explain_route(...) lists what each route lacks."
            )
        return route, "asked for by route="
    if Route.BASELINE_M128 in refusals:
        return Route.XLA, refusals[Route.BASELINE_M128]
    if not problem.is_static:
        return Route.BASELINE_M128, "symbolic sizes: no measured region can be decided"
    if len(predicted) > 1:
        name, ratio = costs.least_regret(predicted, predicted[0])
        return Route(name), (
            "of packed sequences no lengths are known: whether even or as uneven as random cuts make them, "
            f"it is predicted within {ratio - 1:.0%} of the fastest"
        )
    for region in regions:
        if Route(region.route) not in refusals and _holds(region, problem, device):
            return Route(region.route), f"{'measured ' * region.measured}fastest here ({region.provenance})"
    return Route.BASELINE_M128, "the baseline: no other route was measured faster for these sizes"


def _holds(region: Region, problem: Problem, device: Device) -> bool:
    tasks, tokens = _sizes(problem)
    return (
        region.compute_capability == device.compute_capability
        and (region.measured or not problem.options.packed)
        and region.tasks[0] <= tasks <= region.tasks[1]
        and region.tokens[0] <= tokens <= region.tokens[1]
    )


def _m128_refuses(problem: Problem, device: Device, build: Build) -> str:
    """Why the kernels with 128-channel heads cannot serve this call; "" where they can."""
    if device.platform != "cuda":
        return f"it needs a CUDA device, and this call is for {device.platform}"
    if problem.dtype != "bfloat16":
        return f"it takes bfloat16 q, k and v, and these are {problem.dtype}"
    if (problem.K, problem.V) != (128, 128):
        return f"it takes heads of K = V = 128, and these are K = {problem.K}, V = {problem.V}"
    if not build.cuda:
        return f"the CUDA extension is not there: {build.reason}"
    if device.compute_capability is None or not build.has_code_for(device.compute_capability):
        held = ", ".join(f"sm_{a}" for a in build.architectures)
        return f"this build holds code for {held}, and the device is {device}"
    return ""


def decode_refuses(problem: Problem, device: Device, build: Build) -> str:
    """Why the decode kernel cannot serve this call of `kda_decode`; "" where it can."""
    return _m128_refuses(problem, device, build)


def _static_refuses(problem: Problem, device: Device, build: Build) -> str:
    """Why the routes with a workspace cannot serve this call; "" where they can."""
    why = _m128_refuses(problem, device, build)
    if not why and not problem.is_static:
        why = "its workspace depends on the sizes, and these are symbolic"
    return why


# Of a call: 1.3 to 4.7 GB. So many tasks keep every SM busy without helpers.
_MOST_RINGS = 4096


def _cluster_refuses(problem: Problem, device: Device, build: Build) -> str:
    """Why the routes with a ring of slots for each task cannot serve this call; "" where they can."""
    why = _static_refuses(problem, device, build)
    tasks = 0 if why else problem.B * problem.N * problem.HV
    if tasks > _MOST_RINGS:
        why = (
            f"its workspace is for at most {_MOST_RINGS} pairs of a sequence and a value head, and this "
            f"call has {tasks} (B * N * HV = {problem.B} * {problem.N} * {problem.HV}): split it"
        )
    return why


# Of csrc/pool.cu: the tasks whose gate constants a helper has room for, and the tokens that its chunk numbers
# reach.
_MOST_POOLED = {Route.POOL_M128: 112, Route.POOL_M64: 64}
_POOL_OWNERS = {Route.POOL_M128: 1, Route.POOL_M64: 2}
_MOST_POOLED_TOKENS = 2**25


def _pool_refuses(route: Route) -> Callable[[Problem, Device, Build], str]:
    """Why a pooled route cannot serve this call; "" where it can."""

    def refuses(problem: Problem, device: Device, build: Build) -> str:
        if why := _static_refuses(problem, device, build):
            return why
        tasks, sms = problem.B * problem.N * problem.HV, device.sm_count or H200.sm_count or 1
        most = min(_MOST_POOLED[route], (sms - 1) // _POOL_OWNERS[route])
        if tasks > most:
            return (
                f"its owners leave SMs to help them for at most {most} pairs of a sequence and a value head "
                f"on {sms} SMs, and this call has {tasks} "
                f"(B * N * HV = {problem.B} * {problem.N} * {problem.HV})"
            )
        if problem.T > _MOST_POOLED_TOKENS:
            return f"it takes at most {_MOST_POOLED_TOKENS} tokens a row, and this call has {problem.T}"
        return ""

    return refuses


def _nothing(*_: object) -> str:
    return ""


def _no_workspace(*_: object) -> int:
    return 0


_SLOT_BYTES = 32768  # kSlotBytes of csrc/kernels/packet.cuh


def _ring(slots: int) -> Callable[[Problem, Device], int]:
    """The workspace of an owner/helper route: a ring of slots a task, and room to align them."""

    def bytes_of(problem: Problem, _: Device) -> int:
        return (problem.B * problem.N * problem.HV * slots + 1) * _SLOT_BYTES

    return bytes_of


def _pool(slots: int) -> Callable[[Problem, Device], int]:
    """The workspace of a pooled route: a ring of slots a task, a flag of 32 bytes a slot, room to align."""

    def bytes_of(problem: Problem, _: Device) -> int:
        return problem.B * problem.N * problem.HV * slots * (_SLOT_BYTES + 32) + _SLOT_BYTES

    return bytes_of


def _segment_chunks(p: Problem, device: Device) -> int:
    return segments.segment_chunks(p.B, p.T, p.N, p.HV, device.sm_count or H200.sm_count or 1)


def _segmented_workspace(p: Problem, device: Device) -> int:
    chunks = _segment_chunks(p, device)
    return segments.workspace_bytes(p.B, p.T, p.N, p.HV, p.options.packed, chunks)


@dataclass(frozen=True)
class _Row:
    refuses: Callable[[Problem, Device, Build], str]
    workspace_bytes: Callable[[Problem, Device], int]


_ROUTES = {
    Route.XLA: _Row(_nothing, _no_workspace),
    Route.BASELINE_M128: _Row(_m128_refuses, _no_workspace),
    Route.BASELINE_M64: _Row(_m128_refuses, _no_workspace),
    Route.C4_M128_D15: _Row(_cluster_refuses, _ring(15)),
    Route.C4_M64_D10: _Row(_cluster_refuses, _ring(10)),
    Route.POOL_M128: _Row(_pool_refuses(Route.POOL_M128), _pool(8)),
    Route.POOL_M64: _Row(_pool_refuses(Route.POOL_M64), _pool(16)),
    Route.SEGMENTED: _Row(_static_refuses, _segmented_workspace),
    Route.C8_M128_D35: _Row(_cluster_refuses, _ring(35)),
}


def _sequences(problem: Problem) -> str:
    return f"{problem.N} packed sequences a row" if problem.options.packed else "one sequence a row"
