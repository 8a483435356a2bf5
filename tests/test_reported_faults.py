"""Every numerical fault of fault_cases.py on the XLA route."""

from __future__ import annotations

import functools

import pytest
from fault_cases import FAULT_CASES, FaultCase

import jax_kda

SMALL = [case for case in FAULT_CASES if not case.big]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_xla(case: FaultCase) -> None:
    case.check(functools.partial(jax_kda.kda_prefill, route="xla"), "bfloat16")


def test_every_report_has_a_case() -> None:
    assert {case.fault for case in SMALL} == {f"BR-{n:02}" for n in range(1, 13)}
    assert {case.fault for case in FAULT_CASES if case.big} == {"BR-05", "BR-11", "BR-12"}
