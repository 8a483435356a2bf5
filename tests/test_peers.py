"""The benchmark of other implementations as far as neither they nor a GPU are needed: PyTorch, the native
library and the peers are stand-ins."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# `pytest` alone, unlike `python -m pytest`, does not look there.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import native, peer_calls, peers, peers_warm, rows
from bench.peer_calls import DECODE_PEERS, PEERS, Peer
from bench.shapes import SETS, Case, Shape


class Array:
    def transpose(self, *_: int) -> Array:
        return self


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 0.05


class Opened:
    def __init__(self, case: Case) -> None:
        self.case = case

    def arrays(self) -> dict[str, Any]:
        return {}

    def judge(self, o: Any, state: Any) -> tuple[float, float]:
        return (0.5 if self.case.shape.HV == 96 else 4e-3), 3e-3

    def time(self, route: str, calls: int) -> Any:
        return [40.0] * calls, (3e-3, 3e-3)

    def time_decode(self, calls: int) -> Any:
        return [7.0] * calls, (2e-3, 1e-6)


class Library:
    def __init__(self, path: Path) -> None: ...

    @contextlib.contextmanager
    def case(self, case: Case) -> Iterator[Opened]:
        if case.shape == Shape(1, 4096, 1, 1):
            raise native.DriverError("no memory")
        yield Opened(case)

    def copy_rate(self) -> float:
        return 4.2e12


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        get_device_properties=lambda _: types.SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0, multi_processor_count=132
        ),
        synchronize=lambda: None,
        empty_cache=lambda: None,
        Event=Event,
        _sleep=lambda cycles: None,
    )
    torch = types.SimpleNamespace(
        cuda=cuda,
        version=types.SimpleNamespace(cuda="13.0"),
        inference_mode=contextlib.nullcontext,
        uint8=None,
        empty=lambda *_, **__: types.SimpleNamespace(fill_=lambda _: None),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(peers, "Library", Library)
    monkeypatch.setattr(peers, "importable", lambda wanted: ({name: f"{name} 1" for name in wanted}, {}))
    monkeypatch.setattr(peers_warm, "ahead", lambda *_: iter(["1 of 2", "1 processes were stopped"]))
    monkeypatch.setattr(peers_warm, "brief", lambda: None)

    def works(shape: Shape, x: dict[str, Any]) -> Any:
        return lambda: (Array(), Array())

    def never(shape: Shape, x: dict[str, Any]) -> Any:
        raise NotImplementedError("it wants\nanother GPU")

    for table in (PEERS, DECODE_PEERS):
        for name in table:
            make = never if name == "cudnn_exact" else works
            monkeypatch.setitem(table, name, Peer("package", "module", make, tunes=name == "fla"))


def run(tmp_path: Path, *words: str) -> tuple[int, Path, Path]:
    files = tmp_path / "peers.json", tmp_path / "decode.json"
    code = peers.main(["--out", str(files[0]), "--decode-out", str(files[1]), "--library", "x", *words])
    return code, *files


def test_a_run(stand_ins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, decode_out = run(tmp_path)
    assert code == 1  # ours could not be timed at 1x4096x1
    found, failed = rows.read(out), rows.failures(out)
    # five shapes of six and two regimes; nobody at one of them, and whatever a peer got wrong at another
    assert len(found) == 5 * 2 * 1 + 4 * 2 * 2
    assert {row["route"] for row in found if row["package"]} == {"fla", "cudnn_fused"}
    assert all(row["median_us"] == (50.0 if row["package"] else 40.0) for row in found)
    whys = {(row["T"], row["route"]): row["failed"] for row in failed if row["HV"] in (1, 8)}
    assert whys[512, "cudnn_exact"] == "NotImplementedError: it wants"
    assert whys[4096, "fla"] == whys[4096, "segmented"] == "no memory"
    assert any(row["failed"].startswith("wrong: errors of o and of the state are 5.0e-01") for row in failed)
    steps = rows.read(decode_out)
    assert {(row["B"], row["HV"]) for row in steps} == {(N, H) for N in (1, 8, 64, 256) for H in (8, 32, 64)}
    assert {row["route"] for row in steps} == {"decode", *DECODE_PEERS}
    (step,) = (r for r in steps if (r["B"], r["HV"], r["route"]) == (1, 8, "decode"))
    assert step["floor_us"] == pytest.approx(1e6 * (8 * 1282 + 8 * 8 * 128**2) / 4.2e12)
    printed = capsys.readouterr()
    assert "skipped 1x512x8 slow cudnn_exact: NotImplementedError: it wants" in printed.err
    assert "fla_recurrent_inplace" in printed.out


def test_what_the_budget_leaves_out_says_so(stand_ins: None, tmp_path: Path) -> None:
    code, out, decode_out = run(tmp_path, "--budget", "0", "--set", "small", "--no-decode")
    assert code == 1
    assert rows.read(out) == []
    failed = rows.failures(out)
    assert {row["failed"] for row in failed} == {"the 0 s given to the run were over"}
    assert len(failed) == len(SETS["small"]) * 2 * (1 + len(PEERS))
    assert not decode_out.exists()


def test_one_peer_alone(stand_ins: None, tmp_path: Path) -> None:
    code, out, decode_out = run(tmp_path, "--peers", "fla_recurrent", "--set", "none")
    assert code == 0
    assert not out.exists()
    assert {row["route"] for row in rows.read(decode_out)} == {"decode", "fla_recurrent"}


def test_wrong_names(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--peers", "flo"], ["--set", "sead"], ["--gates", "unbounded"]):
        with pytest.raises(SystemExit):
            peers.main(words)
        assert "allowed: " in capsys.readouterr().err


def test_peers_that_are_not_there_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert peers.main([]) == 2
    err = capsys.readouterr().err
    assert all(f"skipped {name}: " in err for name in peer_calls.PEERS | peer_calls.DECODE_PEERS)
    assert "no peer is installed" in err


def test_failures_are_rows_without_figures(tmp_path: Path, stand_ins: None) -> None:
    _, out, _ = run(tmp_path, "--set", "seed", "--no-decode")
    (row, *_) = rows.failures(out)
    for change in ({"median_us": 1.0}, {"failed": ""}):
        with pytest.raises(ValueError, match="a figure, or no reason"):
            rows.check(row | change)


def test_the_processes_that_compile_share_the_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    packed = Shape(1, 64, 8, 8, (32, 32))
    wanted = {"fla": [*peers.BRIEF, packed], "cudnn_fused": peers.BRIEF, "fla_recurrent": peers.STEPS}
    found = peers_warm.commands(wanted)
    assert found[:2] == [
        ["cudnn_fused", "0", "1", "1x512x8", "1x2048x1", "1x8192x64", "1x8192x96"],
        ["fla_recurrent", "0", "1", "1x1x8", "1x1x32", "1x1x64"],
    ]
    heads = [["1x512x8", "1x8192x8"], ["1x2048x1", "1x4096x1"], ["1x8192x64"], ["1x8192x96"]]
    assert found[2:] == [["fla", str(part), "3", *shapes] for shapes in heads for part in range(3)]


def test_processes_that_fail_or_take_long_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n[ $3 = cudnn_fused ] && exec sleep 60\necho no luck >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    *_, last = peers_warm.ahead({"fla": peers.BRIEF[:1], "cudnn_fused": peers.BRIEF[:1]}, 1.5)
    assert last == "1 of 2 processes that compile ahead were stopped after 2 s, 1 failed: no luck"
