"""Marks every test here as one for a GPU, hands out the routes, and writes down what a run on a GPU found.

The record is bench/results/gpu-tests.json, or what JAX_KDA_GPU_TESTS_JSON names; a dry run writes only there.
Where JAX_KDA_GPU_TESTS_UPDATE is set and the file is a record of the same product and machine, the tests that
ran replace theirs there.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import harness
import jax
import pytest

import jax_kda
from jax_kda.routing import Route

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CONTROLLED = "workerinput"  # an attribute of the configuration in pytest-xdist's workers


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    if not harness.DRY:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(params=harness.ROUTES)
def route(request):
    return request.param


@pytest.fixture
def run(route):
    """kda_prefill on the route under test. The baseline serves every call here; others may refuse some."""
    forced = harness.forced(route)
    if route in (Route.XLA, Route.BASELINE_M128):
        return forced

    def run_if_served(**inputs):
        try:
            jax_kda.explain_route(**inputs, route=route)  # under jit the route is chosen when we are left
            return forced(**inputs)
        except ValueError as refusal:
            pytest.skip(str(refusal))

    return run_if_served


# ---- the record of a run


def pytest_configure(config):
    if not hasattr(config, CONTROLLED):
        config.pluginmanager.register(Recorder(config), "gpu-tests-recorder")


class Recorder:
    """Outcome, time and figures of each test in this directory."""

    def __init__(self, config):
        self.begin = time.monotonic()
        self.prefix = HERE.relative_to(config.rootpath).as_posix() + "/"
        self.tests = {}

    def pytest_runtest_logreport(self, report):
        if not report.nodeid.startswith(self.prefix):
            return
        name = report.nodeid.removeprefix(self.prefix)
        test = self.tests.setdefault(name, {"name": name, "outcome": "passed", "seconds": 0.0, "figures": {}})
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        test["figures"] |= dict(report.user_properties)
        if report.outcome != "passed" and test["outcome"] != "failed":
            if hasattr(report, "wasxfail"):  # pytest calls an expected failure skipped
                test["outcome"], reason = "xfailed", report.wasxfail
            else:
                test["outcome"] = report.outcome
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            test["reason"] = reason[-2000:]

    def pytest_sessionfinish(self):
        ran = {name: test for name, test in self.tests.items() if test["outcome"] != "skipped"}
        wanted = os.environ.get("JAX_KDA_GPU_TESTS_JSON")
        if not ran or (harness.DRY and not wanted):
            return
        path = Path(wanted or ROOT / "bench/results/gpu-tests.json")
        product = {"digest": _digest(), **_machine()}
        tests, seconds = self.tests, time.monotonic() - self.begin
        if os.environ.get("JAX_KDA_GPU_TESTS_UPDATE"):
            before = json.loads(path.read_text())
            if product.items() <= before.items():
                tests = {test["name"]: test for test in before["tests"]} | ran
                seconds += before["seconds"]
        outcomes = [test["outcome"] for test in tests.values()]
        record = {
            **product,
            "date": datetime.date.today().isoformat(),
            **{outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped", "xfailed")},
            "seconds": round(seconds, 1),
            "tests": sorted(tests.values(), key=lambda test: test["name"]),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


def _digest():
    spec = importlib.util.spec_from_file_location("digest", ROOT / "bench/digest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.digest(ROOT)


def _machine():
    # Asked of nvidia-smi: the process that gathers the workers' reports has no CUDA context, and needs none.
    gpu, driver = "none: a dry run on the CPU" if harness.DRY else "unknown", ""
    if not harness.DRY and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        gpu, _, driver = answer.partition("\n")[0].partition(", ")
    return {
        "gpu": gpu,
        "driver": driver,
        "jax": jax.__version__,
        "cuda": jax_kda.status().cuda_version,
    }
