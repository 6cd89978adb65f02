"""The selected part of a sweep: its cases, variants and records."""

from dataclasses import replace
from pathlib import Path

import fake_operator
import pytest

from kerneltune.plan import Options, Plan, Selection
from kerneltune.spec import Case, Op, Variant
from kerneltune.sweep_file import Sweep
from kerneltune.task import Task

CASE = Case("m8", (("M", 8),), "bfloat16")
PEERS = tuple(Variant(name, fake_operator.nothing, requires=(package,)) for name, package in (
    ("present", "pytest"), ("absent", "no_such_package"),
))  # fmt: skip
OP = replace(fake_operator.OP, variants=(fake_operator.VARIANT, *PEERS))


@pytest.mark.parametrize(("selection", "taken"), [
    (Selection("f"), True),
    (Selection("f", ops=("fake",), variants=("opt*",), cases=("m?",)), True),
    (Selection("f", ops=("fake",), variants=("baseline",)), False),
    (Selection("f", ops=("other",), variants=("optimized",)), False),
    (Selection("f", cases=("m16",)), False),
    (Selection("f", dtypes=("float16",)), False),
])  # fmt: skip
def test_selection_takes_tasks_whose_case_and_variant_it_names(selection: Selection, taken: bool) -> None:
    assert selection.matches(Task(OP, CASE, fake_operator.VARIANT).key) is taken


@pytest.mark.parametrize(("variants", "peers", "expected"), [
    ((), True, ["optimized", "present"]), ((), False, ["optimized"]), (("present",), False, ["present"]), (("absent",), True, []),
])  # fmt: skip
def test_plan_has_installed_peers_unless_they_are_left_out_and_not_named(
    variants: tuple[str, ...], peers: bool, expected: list[str]
) -> None:
    ops: dict[str, Op] = {"fake": OP}
    plan = Plan(ops, Sweep("f", Path("f.yaml"), (), (), {}), Selection("f", variants=variants), Options(peers=peers))
    assert [variant.name for variant in plan.variants("fake")] == expected
