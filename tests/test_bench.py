"""The benchmarks as far as no GPU is needed: shapes, floors, cases, result files, tables, comparisons."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jax_kda
from jax_kda import routing

# `pytest` alone, unlike `python -m pytest`, does not look there.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import compare, empty_call, kernels, native, prefill, random_points, rows, shapes, wall
from bench.shapes import Case, Shape

ROOT = Path(__file__).resolve().parent.parent

# Stands in for the native driver: the same lines, invented figures.
FAKE = """#!{python}
import json, sys
device = {{"gpu": "NVIDIA H200", "compute_capability": [9, 0], "sm_count": 132, "cuda": "13.0"}}
if sys.argv[1] == "device":
    print(json.dumps(device | {{"copy_rate": None}}))
    sys.exit()
print(json.dumps(device | {{"copy_rate": 4.3e12}}))
lines = open(sys.argv[2]).read().splitlines()
for n in range(1, int(sys.argv[3]) + 1):
    for i, line in reversed(list(enumerate(lines))):
        words = dict(word.split("=") for word in line.split())
        if {fails!r} in line:
            if n == 1:
                print(json.dumps({{"case": i, "error": "no such thing"}}))
            continue
        us = {ratio} * int(words["T"]) / 100
        error = float("nan") if words["gates"] == {wrong!r} else 4e-3
        print(json.dumps({{"case": i, "round": n, "median_us": us, "min_us": us - 1,
              "round_us": [us] * n, "calls": n * int(sys.argv[4]), "err_o": error, "err_state": 3e-3,
              "kernels": ["kernel<1>"]}}), flush=True)
sys.exit({status})
"""


@pytest.fixture
def fake(tmp_path: Path) -> Any:
    numbers = itertools.count()

    def make(ratio: float = 1.0, wrong: str = "nothing", fails: str = "nothing", status: int = 0) -> Path:
        path = tmp_path / f"driver{next(numbers)}"
        path.write_text(
            FAKE.format(python=sys.executable, ratio=ratio, wrong=wrong, fails=fails, status=status)
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return make


@pytest.fixture(autouse=True)
def _no_gpu_and_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall, "unavailable", lambda: "not in a test")
    # `prefill.main` sets it for its process; here other tests share the process.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])


# ------------------------------------------------------------------------------------------ shapes and floors


def test_the_sets() -> None:
    assert {name: len(s) for name, s in shapes.SETS.items()} == {
        "seed": 6, "small": 5, "serving": 4, "packed": 2, "modes": 3, "checkpoints": 4, "ten": 10,
        "regions": 198,
    }  # fmt: skip
    for s in itertools.chain(*shapes.SETS.values()):
        assert s.HV % s.H == 0
        assert not s.lengths or (s.B == 1 and sum(s.lengths) == s.T)


def test_floors() -> None:
    assert shapes.token_bytes(Shape(1, 1, 1, 1)) == 1282  # a token of a head, bfloat16 gates
    assert shapes.floor_us(Shape(1, 8192, 64, 64), 4.3e12) == pytest.approx(156.3, abs=0.1)
    wide = Shape(1, 8192, 64, 64, gate="log", g_dtype="float32")
    assert shapes.token_bytes(wide) == 8192 * 64 * (1282 + 256)
    assert shapes.token_bytes(Shape(2, 10, 1, 4)) == 20 * (512 + 4 * (512 + 256 + 2))
    without, kept = shapes.SETS["checkpoints"][2:]
    assert shapes.checkpoint_bytes(without) == 0
    assert shapes.checkpoint_bytes(kept) == 8 * 16 * 64 * 65536
    assert shapes.floor_us(kept, 1e12) - shapes.floor_us(without, 1e12) == pytest.approx(536.87, abs=0.01)


def test_how_shapes_print() -> None:
    assert [str(s) for s in shapes.SETS["modes"]] == [
        "1x8192x64 softplus", "1x8192x64 log f32 g", "1x8192x16/64",
    ]  # fmt: skip
    assert [str(s) for s in shapes.SETS["packed"]] == ["8*1024x64", "packed 8192x96"]
    assert [str(s) for s in shapes.SETS["checkpoints"]] == [
        "1x8192x8", "1x8192x8 checkpoints 64", "8*1024x64", "8*1024x64 checkpoints 64",
    ]  # fmt: skip
    every = set(itertools.chain(*shapes.SETS.values()))
    assert len(set(map(str, every))) == len(every)


def test_cases_once_each_and_with_their_regime() -> None:
    found = shapes.cases(["seed", "ten"], ["slow", "none"], ["auto"])
    assert len(found) == len(set(found)) == 2 * (6 + 10 - 1)  # 1x4096x8 is in both
    assert all(re.search(r"\bgates=(slow|none)\b", case.line()) for case in found)


def test_lists_of_names() -> None:
    assert shapes.parse_names("--set", "seed, small,seed", shapes.SETS) == ("seed", "small")
    with pytest.raises(ValueError, match="--gates: got 'fast'; allowed: production, slow"):
        shapes.parse_names("--gates", "slow,fast", shapes.GATES)
    with pytest.raises(ValueError, match="--set: got ''"):
        shapes.parse_names("--set", "", shapes.SETS)


def test_the_native_tools_know_these_names() -> None:
    text = (ROOT / "tests" / "native" / "case.cuh").read_text()
    foldable = set(re.findall(r'\{"(\w+)", true\}', text))
    assert set(shapes.FOLDED_GATES) == foldable
    routes = set(re.findall(r'\{"(\w+)", Route::\w+\}', text))
    assert {route.value for route in routing.Route} - {"xla"} <= routes


# ------------------------------------------------------------------------------------------ the command


def test_dry(capsys: pytest.CaptureFixture[str]) -> None:
    assert prefill.main(["--dry", "--set", "packed,modes", "--routes", "auto,baseline_m128"]) == 0
    lines = capsys.readouterr().out.splitlines()
    forced = sum(line.startswith("route=baseline_m128") for line in lines)
    # of auto, where it takes another
    other = [line for line in lines[:-1] if not line.startswith("route=baseline_m128")]
    assert forced == 5 * 5
    assert len(lines) == forced + len(other) + 1
    assert lines[0] == (
        "route=baseline_m128 gates=production B=1 T=8192 H=64 HV=64 gate=safe g=bf16 "
        "lengths=1024,1024,1024,1024,1024,1024,1024,1024  # floor 156.3 us"
    )
    assert all("gates=" in line for line in lines[:-1])


@pytest.mark.parametrize("words", [["--set", "sead"], ["--gates", "unbounded"]])
def test_wrong_names(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        prefill.main(["--dry", *words])
    assert exit_.value.code == 2
    assert "allowed: " in capsys.readouterr().err


def test_a_run(fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r" / "result.json"
    words = ["--set", "seed,ten", "--gates", "production,none", "--out", str(out), "--commit", "abc"]
    assert prefill.main([*words, "--driver", str(fake())]) == 0
    found = rows.read(out)
    assert len(found) == 2 * (6 + 10)  # a shape of two sets: timed once, a row in each
    for row in found:
        assert list(row) == list(rows.KEYS)
        assert row["gates"] in ("production", "none")
        assert row["calls"] == 40
        assert row["commit"] == "abc"
        assert row["kernels"] == ["kernel<1>"]
        assert row["wall_us"] is None
        assert re.fullmatch("[0-9a-f]{16}", row["digest"])
    printed = capsys.readouterr()
    assert "no wall times: not in a test" in printed.err
    assert re.search(r"^seed +1x2048x1 +production +segmented +20\.5 +19\.5 +- +0\.6 +3% ", printed.out, re.M)


def test_quick_keeps_no_file_and_one_round(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prefill, "RESULT", tmp_path / "result.json")
    assert prefill.main(["--quick", "--set", "packed", "--driver", str(fake())]) == 0
    assert not (tmp_path / "result.json").exists()
    assert "wall times" not in capsys.readouterr().err


def test_a_wrong_result_fails_the_run(fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    words = ["--set", "seed", "--gates", "slow,none", "--out", str(out)]
    assert prefill.main([*words, "--driver", str(fake(wrong="none"))]) == 1
    assert {row["err_o"] for row in rows.read(out) if row["gates"] == "none"} == {None}
    assert capsys.readouterr().out.count("WRONG") == 6


def test_what_is_missing_fails_the_run_and_the_rest_is_kept(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    words = ["--set", "seed", "--gates", "slow,none", "--out", str(out)]
    assert prefill.main([*words, "--driver", str(fake(fails="gates=slow", status=1))]) == 1
    assert {row["gates"] for row in rows.read(out)} == {"none"}
    assert "1x2048x1 slow segmented: no such thing" in capsys.readouterr().err
    assert prefill.main([*words, "--driver", str(fake(status=134))]) == 1
    assert len(rows.read(out)) == 12
    assert "the driver ended with exit status 134" in capsys.readouterr().err


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def nowhere() -> str:
        raise native.DriverError("no nvcc")

    monkeypatch.setattr(native, "find_nvcc", nowhere)
    assert prefill.main(["--set", "seed"]) == 2
    assert "bench.prefill: no nvcc" in capsys.readouterr().err


def test_auto_is_what_routing_says() -> None:
    case = Case(Shape(1, 4096, 8, 8), "slow", "auto")
    assert [c.route for c in prefill.resolve([case, case], routing.H200)] == ["segmented"]
    assert [c.route for c in prefill.resolve([case], routing.CPU)] == ["xla"]
    forced = Case(case.shape, "slow", "baseline_m128_warp_engine")
    assert prefill.resolve([forced], routing.H200) == [forced]


# ------------------------------------------------------------------------------------------ kernels of a call


def test_kernels_of_a_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driver, out = tmp_path / "driver", tmp_path / "kernels.json"
    driver.write_text(
        FAKE.format(python=sys.executable, ratio=1.0, wrong="nothing", fails="nothing", status=0).replace(
            'print(json.dumps(device | {"copy_rate": 4.3e12}))',
            """if sys.argv[1] == "kernels":
    print("     120.5 us  packets_kernel<true, false>\\n     200.0 us  outputs_kernel<E, 2>")
    print("   318.9 us the call, 320.5 us the sum, err 4.00e-03 3.00e-03: " + " ".join(sys.argv[2:]))
    sys.exit()
print(json.dumps(device | {"copy_rate": 4.3e12}))""",
        )
    )
    driver.chmod(0o755)
    assert kernels.main(["--driver", str(driver), "--out", str(out)]) == 0
    found = rows.read(out)
    assert [(row["HV"], row["route"], row["median_us"]) for row in found] == [
        (heads, f"segmented: {name}", us)
        for heads in (64, 132)
        for name, us in (("packets_kernel<true, false>", 120.5), ("outputs_kernel<E, 2>", 200.0))
    ]
    assert found[0]["kernels"] == ["packets_kernel<true, false>"]
    capsys.readouterr()
    driver.write_text("#!/bin/sh\nexit 2\n")
    assert kernels.main(["--driver", str(driver), "--out", str(out)]) == 2
    with pytest.raises(native.DriverError, match="names no kernels"):
        kernels.parse("nothing")


# ------------------------------------------------------------------------------------------ random shapes


def test_random_shapes() -> None:
    found = random_points.draw(3, 60)
    assert found == random_points.draw(3, 60) != random_points.draw(4, 60)
    assert len(set(found)) == 60
    packed = [s for s in found if s.lengths]
    assert 10 <= len(packed) <= 20
    tokens = [s.T // s.sequences if s.lengths else s.T for s in found]
    assert min(tokens) < 500
    assert max(tokens) > 100_000
    for s, length in zip(found, tokens, strict=True):
        assert 1 <= s.sequences * s.HV <= 512
        assert s.sequences * s.HV * length <= 1 << 21
        assert s not in shapes.SETS["regions"]
        assert not s.lengths or (s.B == 1 and sum(s.lengths) == s.T and min(s.lengths) > 0)


def test_a_run_over_random_shapes(fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    words = ["--seed", "5", "--points", "4", "--out", str(out), "--driver", str(fake())]
    assert random_points.main([*words, "--routes", "baseline_m128,segmented"]) == 0
    found = rows.read(out)
    assert len(found) == 8
    assert {row["set"] for row in found} == {"random, seed 5"}
    assert "the worst ratio 1.000; 8 rows" in capsys.readouterr().out
    for row in found:
        if row["route"] != prefill.resolve([Case(rows.shape(row), "slow", "auto")], routing.H200)[0].route:
            row["median_us"] /= 2
    assert {ratio for ratio, _, _ in random_points.ratios(found).values()} <= {2.0}
    assert random_points.main([*words, "--dry"]) == 0
    lines = capsys.readouterr().out.splitlines()
    drawn = random_points.draw(5, 4)
    cases = [Case(s, "slow", route) for s in drawn for route in random_points.ROUTES]
    assert len(lines) == len(prefill.resolve(cases, routing.H200)) > 4 * 5  # some pools refuse
    assert len({line.split(" ", 1)[1] for line in lines}) == 4


# ------------------------------------------------------------------------------------------ files and tables


def row(**changes: Any) -> rows.Row:
    base = {
        "digest": "0" * 16, "commit": "c", "gpu": "g", "driver": "d", "jax": "j", "cuda": "c", "set": "seed",
        **rows.shape_fields(Shape(1, 2048, 1, 1)), "gates": "slow", "route": "baseline_m128", "package": None,
        "kernels": [], "median_us": 100.0, "min_us": 99.0, "round_us": [100.0, 100.0], "calls": 40,
        "wall_us": 103.0, "floor_us": 0.6, "copy_rate": 4.3e12, "err_o": 4e-3, "err_state": 3e-3,
    }  # fmt: skip
    return base | changes


@pytest.mark.parametrize(
    "change",
    [{"gates": ""}, {"gates": None}, {"median_us": float("nan")}, {"lengths": "8*1024"}, {"B": True}],
)
def test_rows_are_checked(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gate regime|is not finite|' is "):
        rows.write(tmp_path / "x.json", [row(**change)])
    without = row()
    del without["gates"]
    with pytest.raises(ValueError, match="lacks 'gates'"):
        rows.write(tmp_path / "x.json", [without])


def test_files_are_json_one_row_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    rows.write(path, [row(), row(gates="none", err_o=None)])
    assert len(path.read_text().splitlines()) == 4
    assert json.loads(path.read_text()) == rows.read(path) == [row(), row(gates="none", err_o=None)]
    assert rows.shape(row(lengths=[1024, 1024])) == Shape(1, 2048, 1, 1, (1024, 1024))


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "results").glob("*-p*.json")), ids=lambda p: p.name)
def test_the_result_files_that_are_kept(path: Path) -> None:
    assert rows.read(path)


def test_spreads() -> None:
    times = {"production": 100.0, "slow": 104.0}
    assert rows.spreads([row(gates=g, median_us=us) for g, us in times.items()]) == []
    times["long"] = 110.0
    (line,) = rows.spreads([row(gates=g, median_us=us) for g, us in times.items()])
    assert line == ("1x2048x1 baseline_m128: long gates 110.0 us, production gates 100.0 us, 1.10 times")


# ------------------------------------------------------------------------------------------ comparisons


@pytest.mark.parametrize(
    ("old", "new", "regressions", "says"),
    [
        (row(), row(), 0, "1 cases in both, geometric mean of new/old 1.000; 0 faster, 0 regressions"),
        (row(), row(median_us=102.0), 0, "1.020; 0 faster"),
        (row(), row(median_us=104.0), 1, "SLOWER"),
        (row(), row(median_us=90.0), 0, "faster"),
        (
            row(median_us=4.0),
            row(median_us=4.2),
            0,
            "0 faster, 0 regressions",
        ),  # within the timer's resolution
        (row(), row(err_state=7e-3), 1, "WORSE err_state"),
        (row(err_o=1e-3), row(err_o=3e-3), 1, "WORSE err_o"),
        (row(), row(err_o=None), 1, "WORSE err_o"),
        (row(), row(gates="none"), 1, "MISSING"),
        (row(), row(gpu="another"), 0, "another gpu: g -> another"),
    ],
)
def test_compare(old: rows.Row, new: rows.Row, regressions: int, says: str) -> None:
    text, found = compare.compare([old], [new])
    assert found == regressions
    assert says in text


def test_the_command_compares_two_runs(fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    for file, ratio in zip(files, (1.0, 1.2), strict=True):
        prefill.main(["--quick", "--set", "seed", "--out", str(file), "--driver", str(fake(ratio=ratio))])
    capsys.readouterr()
    assert compare.main([str(files[0]), str(files[1])]) == 1
    text = capsys.readouterr().out
    assert text.count("SLOWER") == 30
    assert "30 regressions" in text
    assert compare.main([str(files[1]), str(files[0])]) == 0
    assert "30 faster, 0 regressions" in capsys.readouterr().out
    files[0].write_text("[{}]")
    with pytest.raises(SystemExit):
        compare.main([str(files[0]), str(files[1])])


# ------------------------------------------------------------------------------------------ the other parts


@pytest.mark.parametrize("gates", ["production", "long", "mixed", "none"])
def test_wall_inputs_have_one_regime_whatever_the_gate(gates: str) -> None:
    def decays(shape: Shape) -> np.ndarray:
        call = wall.inputs(shape, gates)
        jax.eval_shape(lambda: jax_kda.kda_prefill(**call))
        assert call["g"].shape == (shape.B, shape.T, shape.HV, 128)
        assert call["g"].dtype == shape.g_dtype
        g = np.asarray(call["g"], np.float64)
        if shape.gate == "log":
            return g
        return -np.logaddexp(0, g) if shape.gate == "softplus" else -5 / (1 + np.exp(-np.clip(g, -700, 700)))

    safe = decays(Shape(1, 100, 1, 2, g_dtype="float32"))
    assert np.any(safe < -1e-30) == (gates != "none")
    packed = Shape(1, 100, 1, 2, (40, 60), gate="log", g_dtype="float32")
    np.testing.assert_allclose(decays(packed), safe, rtol=1e-4, atol=1e-30)
    np.testing.assert_allclose(
        decays(Shape(1, 100, 1, 2, (), "softplus", "float32")), safe, rtol=1e-4, atol=1e-30
    )
    np.testing.assert_allclose(decays(Shape(2, 100, 1, 2)), np.repeat(safe, 2, 0), rtol=0.06, atol=1e-30)


def test_wall_time_is_a_time() -> None:
    assert wall.wall_us(Case(Shape(1, 64, 1, 1), "slow", "xla")) > 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_empty_call_takes_the_place_of_ours(tmp_path: Path, cuda_build: routing.Build) -> None:
    library = tmp_path / "empty_call.so"
    source = ROOT / "tests/native/empty_call.cc"
    flags = ["-std=c++20", "-Wall", "-Werror", "-shared", "-fPIC", "-isystem", jax.ffi.include_dir()]
    subprocess.run(["g++", *flags, "-o", str(library), str(source)], check=True)
    empty = empty_call.EmptyCall(library, "cpu")
    result = jax.ShapeDtypeStruct((3,), "float32")
    jax.block_until_ready(jax.ffi.ffi_call(empty.TARGET, result)(np.ones(2), scale=np.float32(1)))
    assert empty.calls() == 1
    case = Case(Shape(1, 64, 1, 2), "slow", "c4_m128_d15")

    # Ours cannot run here: its program is read.
    arrays, static = wall.split(case)

    def program() -> str:
        function = jax.jit(functools.partial(jax_kda.kda_prefill, **dict(static), route=case.route))
        return str(function.trace(**arrays).lower(lowering_platforms=("cuda",)).as_text())

    ours = program()
    with empty.in_place_of_ours():
        assert program() == ours.replace("jax_kda.prefill.v1", empty_call.EmptyCall.TARGET)
    assert "jax_kda.prefill.v1" in ours
    with pytest.raises(RuntimeError, match="the empty call is not where it should be"):
        empty_call.walls_against(empty, dataclasses.replace(case, route="xla"), 1)


def test_the_cache_and_the_compiler_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.cache_folder() == tmp_path / "jax_kda" / "bench"
    monkeypatch.setenv("CUDACXX", "/somewhere/nvcc")
    assert native.find_nvcc() == "/somewhere/nvcc"
    monkeypatch.delenv("CUDACXX")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert native.find_nvcc() == str(tmp_path / "bin" / "nvcc")


def test_a_tool_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "nvcc"
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/log\n[ "$1" = --version ] && exit\n'
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo x > "$2"; shift; done\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(compiler))
    first = native.build("driver", tmp_path / "cache")
    calls = len((tmp_path / "log").read_text().splitlines())
    assert calls == 1 + 1 + len(list((ROOT / "csrc").glob("*.cu"))) + 1  # version, driver, kernels, link
    assert native.build("driver", tmp_path / "cache") == first
    assert len((tmp_path / "log").read_text().splitlines()) == calls + 1
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && exit\necho wrong >&2\nexit 1\n")
    with pytest.raises(native.DriverError, match="wrong"):
        native.build("library.so", tmp_path / "cache")
