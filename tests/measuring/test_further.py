"""Further checks: results come in order from this process and from others, also where no other process finds the operator."""

import os

import pytest
import triton
from test_pairs import CASES, op_with

from kerneltune import ops
from kerneltune.measuring import further
from kerneltune.measuring.further import FurtherCheck, FurtherChecks
from kerneltune.search.task import Task
from kerneltune.spec import Case

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="further checks run in Triton's interpreter")


def pairs_of(mistake: str) -> FurtherCheck:
    op = op_with(mistake)
    return FurtherCheck(Task(op, CASES[0], op.variants[0]), tuple(CASES), False)


@pytest.mark.parametrize("worth", [1e9, 0.0], ids=["in this process", "in two processes"])
def test_further_checks_give_the_results_of_every_check_in_order(worth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(further, "_WORTH_A_PROCESS", worth)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    op = ops.load()["swiglu_bwd"]
    small = Case("small", (("M", 3), ("N", 40)), "bfloat16")
    shipped = FurtherCheck(Task(op, small, op.variant("optimized")), (small,), True)
    unknown_elsewhere, wrong = pairs_of(""), pairs_of("maximum of the whole tile")
    checks, seen = FurtherChecks([shipped, unknown_elsewhere, wrong]), list[str]()
    with checks.begun():
        found = checks.finish(seen.append)
    assert sorted(seen) == sorted(check.label for check in (shipped, unknown_elsewhere, wrong))
    assert [(len(one.failures), one.line) for one in found[:2]] == [
        (0, ""),
        (0, "scaled optimized: 12 configs on 4 cases, all pairs"),
    ]
    assert len(found[2].failures) == 3
    assert found[2].line.endswith("stopped after 3 failures")
