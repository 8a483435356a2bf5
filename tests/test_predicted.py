"""The predicted time of each route: against the rows it was fitted to, and as `explain_route` shows it."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from pathlib import Path

import jax
import pytest

# `pytest` alone, unlike `python -m pytest`, does not look there.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import records, rows
from bench import regions as tool
from jax_kda import costs, regions
from jax_kda.contract import GateMode, Options, Problem
from jax_kda.routing import CPU, H200, Build, Route, choose

BUILD = Build(cuda=True, architectures=("90a",))
OPTIONS = Options(scale=128**-0.5, gate=GateMode.SAFE, lower_bound=-5.0)
PROBLEM = Problem(OPTIONS, 1, 4096, 1, 1, 128, 128, 1, "bfloat16", "bfloat16", "float32", "float32")


def predicted(tasks: int, tokens: int) -> dict[str, float]:
    return costs.predict_us((tokens,), tasks, (9, 0), 132)


@pytest.mark.parametrize("route", tool.RESIDENT)
def test_within_a_quarter_of_every_measured_row(route: str) -> None:
    found = [row for row in records.load(records.REGIONS) if row["route"] == route]
    assert len(found) > 100
    for row in found:
        assert predicted(row["HV"], row["T"])[route] == pytest.approx(row["median_us"], rel=0.25)


@pytest.mark.parametrize("route", tool.RESIDENT)
def test_more_work_never_takes_less_time(route: str) -> None:
    lengths = [1, 31, 33, *(2**n + k for n in range(6, 21) for k in (-1, 0, 1, 777))]
    for tasks in (1, 2, 30, 31, 67, 133, 500):
        times = [predicted(tasks, tokens)[route] for tokens in sorted(lengths)]
        assert times == sorted(times)
        assert times[0] < times[-1]
    for tokens in (1, 4096, 10**6):
        times = [predicted(tasks, tokens)[route] for tasks in range(1, 600)]
        assert times == sorted(times)
        assert times[0] < times[-1]


def test_the_table_is_the_one_that_the_rows_give() -> None:
    found = rows.read(records.FOLDER / records.REGIONS)
    text = tool.PAGE.read_text()
    made: dict[str, object] = {"Cost": regions.Cost, "tuple": tuple}
    exec(tool.fits(found), made)
    # Solvers differ in their last digits, so the times are compared.
    again = made["COSTS"]
    assert isinstance(again, tuple)
    for tasks, tokens in ((1, 64), (8, 8192), (64, 8192), (133, 1024)):
        assert costs.predict_us((tokens,), tasks, (9, 0), 132, again) == pytest.approx(
            predicted(tasks, tokens), rel=0.02
        )
    assert tool.table(found) in text
    with pytest.raises(ValueError, match="no part that starts with"):
        tool.rewritten("", found)


def test_a_fit_finds_the_model_it_was_drawn_from() -> None:
    truth = (3.0, 1.0, 0.0, 0.0, 0.05, 0.0, 6.0, 2.5)
    sizes = [(tasks, tokens) for tasks in (1, 8, 60, 140, 300) for tokens in (64, 512, 4096, 32768)]
    drawn = [
        {
            "HV": n,
            "T": t,
            "median_us": sum(x * y for x, y in zip(truth, costs.terms((t,), n, 132), strict=True)),
        }
        for n, t in sizes
    ]
    assert tool.fit(drawn, 132) == pytest.approx(truth, abs=0.02)


def test_only_for_the_gpu_that_was_measured() -> None:
    assert list(predicted(1, 4096)) == sorted(predicted(1, 4096), key=predicted(1, 4096).__getitem__)
    for capability, sms in (((10, 0), 148), (None, None), ((9, 0), None)):
        assert costs.predict_us((4096,), 1, capability, sms) == {}
    for tasks, tokens in ((0, 4096), (1, 0)):
        assert predicted(tasks, tokens) == {}
    fewer = costs.predict_us((4096,), 120, (9, 0), 66)  # half the SMs hold half as many
    assert fewer["baseline_m128"] > 1.8 * predicted(120, 4096)["baseline_m128"]


def test_explain_route_shows_them() -> None:
    decision = choose(PROBLEM, H200, BUILD)
    assert {route for route, _ in decision.predicted_us} == {Route(name) for name in tool.RESIDENT}
    times = [us for _, us in decision.predicted_us]
    assert times == sorted(times)
    (line,) = (line for line in str(decision).splitlines() if line.startswith("predicted"))
    assert line == f"predicted  {', '.join(f'{r.value} {us:.3g}' for r, us in decision.predicted_us)} us"


def test_and_not_where_there_is_nothing_to_show() -> None:
    (T,) = jax.export.symbolic_shape("t")
    for problem, device in (
        (PROBLEM, CPU),
        (dataclasses.replace(PROBLEM, T=T), H200),
        (dataclasses.replace(PROBLEM, dtype="float32"), H200),
    ):
        decision = choose(problem, device, BUILD)
        assert decision.predicted_us == ()
        assert "predicted" not in str(decision)


def test_uneven_lengths_are_those_of_random_cuts() -> None:
    draw = random.Random(5)
    for sequences in (2, 3, 7):
        even, uneven = costs.splits(84_000, sequences)
        assert even == (84_000 // sequences,) * sequences
        assert 84_000 <= sum(uneven) < 84_000 + sequences
        found = [0.0] * sequences
        for _ in range(4000):
            cuts = sorted(draw.uniform(0, 84_000) for _ in range(sequences - 1))
            lengths = sorted(b - a for a, b in itertools.pairwise([0, *cuts, 84_000]))
            found = [x + y / 4000 for x, y in zip(found, lengths, strict=True)]
        assert list(uneven) == pytest.approx(found, rel=0.06)


def test_the_longest_first_is_what_the_kernels_do() -> None:
    """Against tasks that are handed out one by one."""
    draw = random.Random(6)
    for _ in range(200):
        heads, resident = draw.randint(1, 9), draw.randint(1, 12)
        lengths = [draw.randint(1, 2000) for _ in range(draw.randint(1, 6))]
        ends = [0] * resident
        for tokens in sorted(lengths, reverse=True):
            for _ in range(heads):
                ends[ends.index(min(ends))] += -(-tokens // costs.CHUNK)
        deepest = costs.terms(lengths, heads, resident)[-1]
        if len(lengths) * heads <= 16 * resident:
            assert deepest == max(ends)
        else:
            assert deepest == pytest.approx(max(ends), rel=0.1)


def test_packed_calls_lose_little_whatever_their_lengths() -> None:
    """Over lengths of many kinds, as the costs predict: the route's time to the best one's."""
    draw = random.Random(7)
    packed = dataclasses.replace(OPTIONS, packed=True)
    for shape, mean_bar, bar in ((1e4, 1.06, 1.6), (5.0, 1.05, 1.6), (1.0, 1.07, 2.0), (0.4, 1.12, 2.2)):
        ratios = []
        for _ in range(150):
            sequences, heads = round(2 ** draw.uniform(1, 5)), round(2 ** draw.uniform(0, 6.6))
            tokens = sequences * 2 ** draw.uniform(5, 15)
            parts = [draw.gammavariate(shape, 1) + 1e-9 for _ in range(sequences)]
            lengths = [max(round(tokens * part / sum(parts)), 1) for part in parts]
            sizes = {"T": sum(lengths), "N": sequences, "H": heads, "HV": heads}
            route = choose(dataclasses.replace(PROBLEM, options=packed, **sizes), H200, BUILD).route.value
            times = costs.predict_us(lengths, heads, (9, 0), 132, packed=True)
            ratios.append(times[route] / min(times.values()))
        assert sum(ratios) / len(ratios) < mean_bar
        assert max(ratios) < bar
