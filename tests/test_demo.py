"""`python -m jax_kda`: the demonstration and the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jax_kda
from jax_kda import __main__ as demo

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--lengths", "40,0,65", "--heads", "1", "--value-heads", "2", "--head-size", "16", "--repeats", "2"]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return demo.demonstrate(demo._parser().parse_args(SMALL))


def test_the_demonstration_checks_and_times(result: dict[str, Any]) -> None:
    assert result["passed"] is True
    assert result["route"] in {route.value for route in jax_kda.Route}
    assert result["reason"]
    assert [row["tokens"] for row in result["sequences"]] == [40, 0, 65]
    assert result["sequences"][1] == {"tokens": 0, "error_o": 0.0, "error_state": 0.0}
    assert 0 < result["error_o"] <= result["bound"]
    assert 0 < result["minimum_seconds"] <= result["median_seconds"]


def test_another_regime_passes_in_float32(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*SMALL, "--regime", "unbounded", "--dtype", "float32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


@pytest.mark.parametrize("passed", [True, False])
def test_the_table_and_the_exit_code(
    result: dict[str, Any],
    passed: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "demonstrate", lambda _: {**result, "passed": passed})
    assert demo.main([]) == (0 if passed else 1)
    printed = capsys.readouterr().out
    for row in ("device", "route", "extension", "  sequence    tokens    error of o", "check", "time"):
        assert f"\n{row} " in printed
    assert ("passed" in printed, "FAILED" in printed) == (passed, not passed)
    assert max(map(len, printed.splitlines())) < 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "0,0"], "not all of them 0"),
        (["--lengths", "10,-1"], "lengths are 0 or more"),
        (["--heads", "0"], "must be at least 1"),
        (["--heads", "2", "--value-heads", "3"], "HV"),
        (["--regime", "fast"], "invalid choice"),
        # Float32 never fits this route, on no machine.
        (["--route", "baseline_m128", "--dtype", "float32"], "baseline_m128"),
    ],
)
def test_wrong_options_say_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main([*SMALL, *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_report_has_what_a_report_needs() -> None:
    command = [sys.executable, "-m", "jax_kda", "--report", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    assert {"jax_kda", "jax", "jaxlib", "numpy"} <= set(report["packages"])
    assert report["devices"]
    assert "because" in report["status"]
    assert report["route_1x4096x8_bfloat16"].startswith("route")


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for option in ("--lengths", "--heads", "--regime", "--route", "--dtype", "--json", "--report"):
        assert option in printed
