"""Find values that host code keeps by one size, and takes for another value of a further size."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from mistaken_ops import case_of, values
from test_pairs import op_with

from kerneltune.checking.jobs import pairs_job, run_jobs
from kerneltune.checking.reruns import wrong_after_other_size
from kerneltune.kernel_lib.agreement import close
from kerneltune.spec import Case, Inputs, Op, Variant
from kerneltune.task import Task

CASES = [case_of("odd", 6, 34), case_of("wide", 20, 90)]  # they differ in both sizes
BLOCK = 16
KEPT: dict[object, object] = {}


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    KEPT.clear()


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    return {"x": values(seed, device, case["M"], case["N"])}


def op_of(run: Callable[[torch.Tensor], torch.Tensor]) -> Op:
    return replace(
        op_with(""), inputs=inputs, reference=lambda given: {"y": given["x"] * 2},
        variants=(Variant("optimized", lambda given, _config: {"y": run(given["x"])}),),
        compare=lambda _case, _given, outputs, expected: close("y", outputs["y"], expected["y"], 1e-5, 1e-6),
    )  # fmt: skip


def by_blocks(key: Callable[[torch.Tensor], object], x: torch.Tensor) -> torch.Tensor:
    """Double blocks of elements, as many as the dict keeps for a key."""
    count = KEPT.setdefault(key(x), -(-x.numel() // BLOCK))
    assert isinstance(count, int)
    y = torch.full_like(x, torch.nan)
    y.view(-1)[: count * BLOCK] = x.reshape(-1)[: count * BLOCK] * 2
    return y


def by_workspace(grows: bool, x: torch.Tensor) -> torch.Tensor:
    """Double rows in a workspace that is kept from the first call, or grows."""
    space = KEPT.get("space")
    if not isinstance(space, torch.Tensor) or (grows and space.numel() < x.numel()):
        space = KEPT["space"] = torch.empty(x.numel())
    return (space[: x.numel()].copy_(x.reshape(-1)) * 2).view_as(x)


def by_rows_of_first(x: torch.Tensor) -> torch.Tensor:
    """Double a matrix, and after a matrix of other rows lose a row."""
    y = x * 2
    if KEPT.setdefault("rows", x.shape[0]) != x.shape[0]:
        y[-1] = 0
    return y


MISTAKES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[str]]] = {
    "count by columns": (partial(by_blocks, lambda x: x.shape[1]), ["M"]),
    "count by rows": (partial(by_blocks, lambda x: x.shape[0]), ["N"]),
    "count by type": (partial(by_blocks, lambda x: x.dtype), ["M", "N"]),
    "least workspace": (partial(by_workspace, False), ["M", "N"]),
    "rows of the first call": (by_rows_of_first, ["M"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_value_that_host_code_keeps_for_another_size_fails_and_names_both_cases(mistake: str) -> None:
    run, axes = MISTAKES[mistake]
    op = op_of(run)
    failures = wrong_after_other_size(op, op.variants[0], CASES)
    assert [(failure.status, failure.config) for failure in failures] == [("failed", None)] * len(axes)
    for failure, axis in zip(failures, axes, strict=True):
        size = CASES[1][axis]
        cases = [f"odd,{axis}={size}", "odd"]
        assert failure.case
        wrong, before = cases if failure.case.name == cases[0] else reversed(cases)
        assert failure.case.name == wrong
        assert failure.reason.startswith(
            f"right alone in a new process, and wrong after case {before}, which differs in {axis}: does host code keep a value? "
        )


RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "count by shape": partial(by_blocks, lambda x: x.shape),
    "count by elements": partial(by_blocks, lambda x: x.numel()),
    "workspace that grows": partial(by_workspace, True),
    "nothing": lambda x: x * 2,
}


@pytest.mark.parametrize("name", RIGHT)
def test_value_that_is_kept_by_all_of_its_sizes_is_right(name: str) -> None:
    op = op_of(RIGHT[name])
    assert wrong_after_other_size(op, op.variants[0], CASES) == []


def test_variant_that_is_wrong_alone_is_left_to_the_check_of_its_case() -> None:
    op = op_of(lambda x: x * (2 if x.shape[0] == 6 else 3))
    assert wrong_after_other_size(op, op.variants[0], CASES) == []


def test_axis_with_one_size_in_all_cases_is_doubled() -> None:
    op = op_of(MISTAKES["count by columns"][0])
    (failure,) = wrong_after_other_size(op, op.variants[0], CASES[:1])
    assert failure.case == case_of("doubled", 12, 34)


def test_name_of_a_case_tells_each_new_size_once() -> None:
    op = op_of(MISTAKES["count by columns"][0])
    (failure,) = wrong_after_other_size(op, op.variants[0], [case_of("odd,M=6,p=0.5", 6, 34)])
    assert failure.case == case_of("odd,p=0.5,M=12", 12, 34)
    assert " after case odd,M=6,p=0.5, which differs in M: " in failure.reason


def test_size_that_the_operator_refuses_is_not_tried() -> None:
    refused = list[int]()

    def run(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in (34, 68):
            refused.append(x.shape[1])
            raise ValueError("N: expected 34 or 68")
        return MISTAKES["count by rows"][0](x)

    op = op_of(run)
    (failure,) = wrong_after_other_size(op, op.variants[0], CASES)
    assert (failure.case, refused) == (case_of("doubled", 6, 68), [])


def test_check_of_pairs_has_the_failure_of_a_kept_value() -> None:
    op = op_of(MISTAKES["count by columns"][0])
    ((_job, outcomes),) = run_jobs([pairs_job(Task(op, CASES[0], op.variants[0]), CASES)])
    (reason,) = [outcome.reason for outcome in outcomes if outcome.status == "failed"]
    before = "case odd, which differs in M"
    assert reason.startswith(f"right alone in a new process, and wrong after {before}: does host code keep a value? y: ")


@dataclass(frozen=True, slots=True)
class Block:
    block: int


def by_config_of_first(x: torch.Tensor, config: Block) -> torch.Tensor:
    return x * 2 if KEPT.setdefault(x.shape, config.block) == config.block else x


def by_first_values(x: torch.Tensor, _config: Block) -> torch.Tensor:
    first = KEPT.setdefault(x.shape, x.clone())
    assert isinstance(first, torch.Tensor)
    return first * 2


def by_type_of_first(x: torch.Tensor, _config: Block) -> torch.Tensor:
    return x * 2 if KEPT.setdefault("type", x.dtype) == x.dtype else x


def wrong_for_16(x: torch.Tensor, config: Block) -> torch.Tensor:
    return x * (3 if config.block == 16 else 2)


@pytest.mark.parametrize(
    ("run", "before"),
    [
        (by_config_of_first, "a call with block=12 in place of block="),
        (by_first_values, "a call with other values: does host code keep a value? y: "),
        (by_type_of_first, "case odd float32: does host code keep a value? y: "),
        (wrong_for_16, ""),
    ],
)
def test_failed_pair_names_the_call_whose_value_host_code_keeps(
    run: Callable[[torch.Tensor, Block], torch.Tensor], before: str
) -> None:
    def typed(case: Case, *, device: str, seed: int = 0) -> Inputs:
        return {"x": inputs(case, device=device, seed=seed)["x"].to(getattr(torch, case.dtype))}

    variant = Variant(
        "optimized", lambda given, config: {"y": run(given["x"], config)}, Block,
        space=lambda _case: {"block": (12, 16, 24)}, default=lambda _case: Block(12),
    )  # fmt: skip
    op, cases = replace(op_of(lambda x: x), variants=(variant,), inputs=typed), [CASES[0], replace(CASES[0], dtype="float64")]
    ((_job, outcomes),) = run_jobs([pairs_job(Task(op, CASES[0], variant), cases)])
    reasons = [outcome.reason for outcome in outcomes if outcome.status == "failed"]
    begin = f"right alone in a new process, and wrong after {before}" if before else "y: "
    assert reasons
    assert [reason for reason in reasons if not reason.startswith(begin)] == []
