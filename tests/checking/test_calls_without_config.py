"""Calls without `config=` that look up another case than the sweep tunes: each is found without a launch, right calls pass."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from mistaken_ops import case_of

from kerneltune.cache import Chooser
from kerneltune.checking.check import Checker
from kerneltune.checking.declarations import look_up_failures
from kerneltune.kernel_lib.agreement import close
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant


@dataclass(frozen=True, slots=True)
class Block:
    """block: elements per program."""

    block: int


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    return {"x": torch.ones(case["M"], case["N"], device=device), "shift": case.option("shift")}


def _reference(inputs: Inputs) -> Outputs:
    return {"y": 2 * inputs["x"] + inputs["shift"]}


def op_with(look_up: Callable[[Chooser, Inputs, int, int], Block], config_is_used: bool = False) -> Op:
    """Return an operator of two options whose function looks up as `look_up` does, given the chooser, inputs and sizes."""

    def run(inputs: Inputs, config: Any) -> Outputs:
        config = config or (inputs if config_is_used else look_up(Chooser.of(op, variant), inputs, *inputs["x"].shape))
        return {"y": 2 * inputs["x"] + inputs["shift"] + 0 * config.block}

    variant = Variant("optimized", run, Block, lambda _case: {"block": (64, 128)}, default=lambda _case: Block(64))
    op = Op(
        name="doubled", axes=("M", "N"), dtypes=("float32",), options={"shift": (0, 1)}, inputs=_inputs, reference=_reference,
        compare=lambda _case, _inputs, outputs, expected: close("y", outputs["y"], expected["y"], 0.0, 0.0),
        traffic=lambda case: Traffic(4 * case["M"] * case["N"], 4 * case["M"] * case["N"]), variants=(variant,), module=__name__,
    )  # fmt: skip
    return op


def failures(op: Op) -> list[str]:
    cases = [replace(case_of("a", 4, 8), options=(("shift", shift),)) for shift in (0, 1)]
    return [failed.reason for failed in look_up_failures(op, op.variants[0], {it: Checker(op, it, "cpu") for it in cases})]


def sizes(M: int, N: int) -> tuple[tuple[str, int], ...]:
    return ("M", M), ("N", N)


HINT = "; an option that no argument of a call tells belongs in free_options: shift"
RIGHT = "where configs are stored for M=4 N=8 float32 none shift=0"


def test_call_that_looks_up_the_case_of_the_sweep_passes() -> None:
    assert failures(op_with(lambda choose, x, M, N: choose(sizes(M, N), "float32", options=(("shift", x["shift"]),)))) == []


def test_call_that_looks_up_another_value_of_a_free_option_passes() -> None:
    op = op_with(lambda choose, _x, M, N: choose(sizes(M, N), "float32", options=(("shift", 1),)))
    assert len(failures(op)) == 1
    assert failures(replace(op, free_options=("shift",))) == []


def test_run_that_needs_a_config_passes() -> None:
    assert failures(op_with(lambda _choose, _inputs, _M, _N: Block(64), config_is_used=True)) == []


@pytest.mark.parametrize(
    ("look_up", "line"),
    [
        (lambda choose, _x, M, N: choose(sizes(M, N), "float32"), f"looks up M=4 N=8 float32 none, {RIGHT}{HINT}"),
        (
            lambda choose, x, M, N: choose(sizes(M, N), "float32", options=(("shifts", x["shift"]),)),
            f"looks up M=4 N=8 float32 none shifts=0, {RIGHT}{HINT}",
        ),
        (
            lambda choose, x, M, N: choose(sizes(N, M), "float32", options=(("shift", x["shift"]),)),
            f"looks up M=8 N=4 float32 none shift=0, {RIGHT}",
        ),
        (
            lambda choose, _x, M, N: choose(sizes(M, N), "float32", options=(("shift", 0),)),
            f"looks up M=4 N=8 float32 none shift=0, where configs are stored for M=4 N=8 float32 none shift=1{HINT}",
        ),
    ],
)
def test_call_that_looks_up_another_case_fails(look_up: Callable[..., Block], line: str) -> None:
    assert failures(op_with(look_up)) == [f"a call without `config=` {line}"]


def test_call_with_a_misspelt_keyword_of_the_look_up_fails_at_its_line() -> None:
    def look_up(choose: Chooser, _inputs: Inputs, M: int, N: int) -> Block:
        block: Block = choose(sizes(M, N), "float32", option=())  # type: ignore[call-arg]
        return block

    (line,) = failures(op_with(look_up))
    place = f"test_calls_without_config.py:{look_up.__code__.co_firstlineno + 1}"
    assert line.startswith(f"a call without `config=` fails: {place}: TypeError: Chooser.__call__() got an unexpected keyword")


def test_call_whose_look_up_gives_wrong_outputs_fails() -> None:
    def run(inputs: Inputs, config: Block | None) -> Outputs:
        wrong = 0 if config else Chooser.of(op, op.variants[0])(sizes(4, 8), "float32", options=(("shift", 0),)).block
        return {"y": 2 * inputs["x"] + inputs["shift"] + wrong}

    op = op_with(lambda _choose, _inputs, _M, _N: Block(64))
    op = replace(op, variants=(replace(op.variants[0], run=run),))
    (line,) = failures(op)
    assert line.startswith("a call without `config=`: y: 32 of 32 ")
