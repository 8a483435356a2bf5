"""Every numerical fault of fault_cases.py, on each route: `--big` for those at full size."""

from __future__ import annotations

import pytest
from fault_cases import FAULT_CASES

CASES = [pytest.param(case, id=case.id, marks=pytest.mark.big if case.big else ()) for case in FAULT_CASES]


@pytest.mark.parametrize("case", CASES)
def test_fault(run, case):
    case.check(run, "bfloat16")
