"""Routing as pure functions: which route, which reason, which refusal."""

import dataclasses

import jax
import pytest

from jax_kda import contract, regions, routing, segments
from jax_kda.contract import GateMode, Options, Problem
from jax_kda.regions import Region
from jax_kda.routing import CPU, H200, Build, Device, Route, choose

BUILD = Build(cuda=True, architectures=("90a", "100a", "103a"))
B200 = Device("cuda", "NVIDIA B200", (10, 0), 148)
OPTIONS = Options(scale=128**-0.5, gate=GateMode.SAFE, lower_bound=-5.0)
PROBLEM = Problem(OPTIONS, 1, 8192, 8, 8, 128, 128, 1, "bfloat16", "bfloat16", "float32", "float32")


def problem(route="auto", **changes):
    return dataclasses.replace(PROBLEM, options=dataclasses.replace(OPTIONS, route=route), **changes)


@pytest.mark.parametrize("device", [H200, B200, dataclasses.replace(B200, compute_capability=(10, 3))])
def test_the_baseline_serves_the_whole_contract_at_128(device):
    for changes in (
        {},
        {"g_dtype": "float32", "beta_dtype": "bfloat16"},
        {"initial_state_dtype": "bfloat16"},
        {"HV": 16},
        {"N": 7},
        {"T": 0},
        {"B": 0},
    ):
        decision = choose(problem(**changes), device, BUILD, ())
        assert decision.route is Route.BASELINE_M128
        assert "no other route was measured faster" in decision.reason
        assert decision.workspace_bytes == 0
        assert decision.refused == ()


@pytest.mark.parametrize(
    ("changes", "device", "build", "reason"),
    [
        ({"dtype": "float32"}, H200, BUILD, "it takes bfloat16 q, k and v, and these are float32"),
        ({"dtype": "float16"}, H200, BUILD, "it takes bfloat16 q, k and v, and these are float16"),
        ({"K": 64}, H200, BUILD, "it takes heads of K = V = 128, and these are K = 64, V = 128"),
        ({"V": 256}, H200, BUILD, "it takes heads of K = V = 128, and these are K = 128, V = 256"),
        ({}, CPU, BUILD, "it needs a CUDA device, and this call is for cpu"),
        ({}, Device("tpu", "TPU v5e"), BUILD, "it needs a CUDA device, and this call is for tpu"),
        ({}, H200, Build(False, reason="not installed"), "the CUDA extension is not there: not installed"),
        (
            {},
            Device("cuda", "NVIDIA A100", (8, 0), 108),
            BUILD,
            "this build holds code for sm_90a, sm_100a, sm_103a, and the device is NVIDIA A100 "
            "(compute capability 8.0, 108 SMs)",
        ),
        ({}, Device("cuda", "unknown GPU"), BUILD, "and the device is unknown GPU"),
    ],
)
def test_what_no_kernel_serves_takes_xla_and_says_why(changes, device, build, reason):
    decision = choose(problem(**changes), device, build)
    assert decision.route is Route.XLA
    assert reason in decision.reason
    assert dict(decision.refused)[Route.BASELINE_M128] == decision.reason
    with pytest.raises(ValueError, match="route: got 'baseline_m128', but ") as caught:
        choose(problem("baseline_m128", **changes), device, build)
    assert reason in str(caught.value)
    assert "allowed here: 'auto', 'xla'" in str(caught.value)


def test_only_where_asked_for_a_cluster_of_eight():
    assert Route.C8_M128_D35.value not in {row.route for row in regions.REGIONS}


def test_packed_calls_are_routed_on_their_mean_length_where_no_cost_is_known():
    row = region()
    packed = dataclasses.replace(OPTIONS, packed=True)
    longer = dataclasses.replace(PROBLEM, options=packed, N=2, T=8192)
    assert choose(longer, H200, BUILD, (row,), ()).route is Route.XLA
    shorter = dataclasses.replace(PROBLEM, options=packed, N=2, T=8190)
    assert choose(shorter, H200, BUILD, (row,), ()).route is Route.BASELINE_M128
    published = dataclasses.replace(row, measured=False)
    assert choose(longer, H200, BUILD, (published,), ()).route is Route.BASELINE_M128


def test_packed_calls_get_the_route_that_loses_least():
    # A chunk of the longest sequence costs 10 on one route, and a chunk of all of them 1 on the other.
    ordered = regions.Cost("baseline_m128", 132, (0, 0, 0, 0, 0, 0, 0, 10.0))
    spread = regions.Cost("baseline_m64", 132, (0, 0, 0, 0, 0, 1.0, 0, 0))
    packed = dataclasses.replace(OPTIONS, packed=True)

    def decide(N, HV, route="auto"):
        options = dataclasses.replace(packed, route=route)
        asked = dataclasses.replace(PROBLEM, options=options, T=32 * 60 * N, N=N, H=HV, HV=HV)
        return choose(asked, H200, BUILD, (), (ordered, spread))

    # Of two sequences the longest has 60 chunks, or 90; all have 120 a head.
    assert decide(2, 4).route is Route.BASELINE_M64  # 480 to 600 and 900
    assert decide(2, 7).route is Route.BASELINE_M128  # 840 to 600 and 900
    decision = decide(2, 6)  # 720 to 600 and 900: 1.2 times the best to 1.25 times
    assert decision.route is Route.BASELINE_M64
    assert "predicted within 20% of the fastest" in decision.reason
    # What is shown is for uneven lengths.
    assert decision.predicted_us == ((Route.BASELINE_M64, 720.0), (Route.BASELINE_M128, 900.0))
    assert decide(2, 4, "baseline_m128").reason == "asked for by route="
    # One packed sequence is as one that has the row.
    assert "no other route was measured faster" in decide(1, 4).reason
    b200 = choose(dataclasses.replace(PROBLEM, options=packed, N=2), B200, BUILD, (), (ordered, spread))
    assert "no other route was measured faster" in b200.reason


@pytest.mark.parametrize(
    ("T", "HV", "packed", "N"), [(0, 1, False, 1), (8192, 8, False, 1), (100, 3, True, 7)]
)
def test_workspaces(T, HV, packed, N):
    options = dataclasses.replace(OPTIONS, packed=packed)
    p = dataclasses.replace(PROBLEM, options=options, T=T, HV=HV, N=N)

    def forced(route):
        wanted = dataclasses.replace(options, route=route.value)
        return choose(dataclasses.replace(p, options=wanted), H200, BUILD)

    assert forced(Route.C4_M64_D10).workspace_bytes == (N * HV * 10 + 1) * 32768
    decision = forced(Route.SEGMENTED)
    assert decision.segment_chunks == segments.segment_chunks(1, T, N, HV, 132)
    # a packet of 32 KB for every chunk there may be
    assert decision.workspace_bytes >= 32768 * HV * (T // 32 + (N if packed else 1))
    assert f"{decision.segment_chunks * 32} tokens each" in str(decision)


@pytest.mark.parametrize("route", [Route.C4_M128_D15, Route.C4_M64_D10, Route.C8_M128_D35])
def test_a_cluster_route_has_a_largest_workspace(route):
    most = choose(problem(route.value, B=64, HV=64), H200, BUILD)
    assert most.workspace_bytes < 5e9
    with pytest.raises(ValueError, match="its workspace is for at most 4096 pairs") as caught:
        choose(problem(route.value, B=3, N=437, HV=8), H200, BUILD)
    for part in (
        f"route: got '{route.value}', but its workspace",
        "this call has 10488 (B * N * HV = 3 * 437 * 8): split it",
        "allowed here: 'auto', 'xla', 'baseline_m128', 'baseline_m64', 'segmented'. Note:",
    ):
        assert part in str(caught.value)
    row = region(route=route.value, tasks=(1, 100_000))
    assert choose(problem(B=64, HV=64), H200, BUILD, (row,)).route is route
    larger = choose(problem(B=65, HV=64), H200, BUILD, (row,))
    assert larger.route is Route.BASELINE_M128
    assert "at most 4096" in dict(larger.refused)[route]


def test_a_workspace_wants_static_sizes():
    (T,) = jax.export.symbolic_shape("t")
    with pytest.raises(ValueError, match="its workspace depends on the sizes"):
        choose(problem("segmented", T=T), H200, BUILD)


def test_forced_routes():
    for route in Route:
        decision = choose(problem(route.value), H200, BUILD)
        assert (decision.route, decision.reason) == (route, "asked for by route=")


def test_symbolic_sizes_take_the_baseline():
    B, T = jax.export.symbolic_shape("b, t")
    decision = choose(problem(B=B, T=T), H200, BUILD, (region(),))
    assert decision.route is Route.BASELINE_M128
    assert "symbolic" in decision.reason
    assert choose(problem(B=B, dtype="float32"), H200, BUILD).route is Route.XLA


def region(**changes):
    row = Region(Route.XLA.value, (9, 0), tasks=(1, 16), tokens=(4096, 65536), provenance="a test, 2x")
    return dataclasses.replace(row, **changes)


@pytest.mark.parametrize(
    ("row", "changes", "inside"),
    [
        (region(), {}, True),
        (region(), {"HV": 16}, True),
        (region(), {"HV": 24}, False),
        (region(), {"B": 2, "HV": 16}, False),
        (region(), {"N": 4}, False),
        (region(), {"T": 4095}, False),
        (region(), {"T": 65537}, False),
        (region(compute_capability=(10, 0)), {}, False),
    ],
)
def test_regions(row, changes, inside):
    decision = choose(problem(**changes), H200, BUILD, (row,))
    assert (decision.route is Route.XLA) == inside
    if inside:
        assert decision.reason == "measured fastest here (a test, 2x)"


def test_a_region_cannot_pick_a_route_that_cannot_run():
    row = region(route=Route.BASELINE_M128.value)
    assert choose(problem(K=64), H200, BUILD, (row,)).route is Route.XLA


def test_every_measured_region_is_well_formed():
    for row in regions.REGIONS:
        assert row.route in set(Route)
        assert row.tasks[0] <= row.tasks[1]
        assert row.tokens[0] <= row.tokens[1]
        assert row.provenance


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("90a",), (9, 0), True),
        (("90a",), (9, 1), False),
        (("90",), (9, 1), True),
        (("90",), (10, 0), False),
        (("100a", "103a"), (10, 3), True),
        (("100a",), (10, 3), False),
        (("100f",), (10, 0), True),
        ((), (9, 0), False),
    ],
)
def test_architectures(architectures, capability, runs):
    assert Build(True, architectures).has_code_for(capability) == runs


def test_decisions_print_well():
    text = str(choose(problem(N=3), H200, BUILD, ()))
    assert text.splitlines()[0] == "route      baseline_m128"
    for part in (
        "NVIDIA H200 (compute capability 9.0, 132 SMs)",
        "B=1 T=8192 H=8 HV=8 K=128 V=128",
        "0 bytes",
    ):
        assert part in text
    text = str(choose(problem(dtype="float32"), CPU, BUILD))
    assert "not baseline_m128  it needs a CUDA device" in text
    assert "workspace" not in text


@pytest.mark.parametrize("name", ["auto", "xla", Route.BASELINE_M128])
def test_route_names(name):
    assert type(routing.route_name(name)) is str
    assert routing.route_name(name) == name


def test_bad_route_names():
    names = ", ".join(f"'{route.value}'" for route in Route)
    with pytest.raises(ValueError, match=rf"route: got 'fast'; allowed: 'auto', {names}\. Note: 'auto'"):
        routing.route_name("fast")
    with pytest.raises(TypeError, match="route: got int; allowed: 'auto', 'xla'"):
        routing.route_name(1)


def test_problem_of_operands_is_that_of_the_call():
    shapes = [
        (2, 7, 2, 128),
        (2, 7, 2, 128),
        (2, 7, 4, 128),
        (2, 7, 4, 128),
        (2, 7, 4),
        (1, 4),
        (2, 3, 4, 128, 128),
    ]
    options = Options(1.0, gate=GateMode.SOFTPLUS, has_initial_state=True, packed=True)
    operands = [jax.ShapeDtypeStruct(shape, "float32") for shape in [*shapes, (2, 4)]]
    found = contract.Problem.from_operands(options, operands)
    assert found == Problem(options, 2, 7, 2, 4, 128, 128, 3, "float32", "float32", "float32", "float32")
