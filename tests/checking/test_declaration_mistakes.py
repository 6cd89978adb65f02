"""Name bytes that `traffic` counts wrong, seeds that are ignored, and places that a cast changes in bench cases alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import CASES, all_close, case_of, values
from row_sums import summing
from test_pairs import op_with

from kerneltune.checking.declarations import wrong_flops
from kerneltune.checking.jobs import CaseJob, address_job, coverage_lines, run_jobs
from kerneltune.checking.pairs import check_pairs
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant
from kerneltune.task import Run, Task

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="accesses are noted in Triton's interpreter")


def traffic_lines(op: Op) -> list[str]:
    outcomes = check_pairs(op, op.variants[0], CASES)
    assert not [outcome for outcome in outcomes if outcome.status == "failed"]
    return [outcome.reason for outcome in outcomes if outcome.status == "noted" and "traffic" in outcome.reason]


@pytest.mark.parametrize(
    ("read", "write", "named"),
    [
        (4, 4, ""),
        (4.5, 3.5, ""),
        (8, 4, "read=16,640 in case wide, and all tensors have 8,320"),
        (4, 2, "write=4,160 in case wide, and kernels store 8,320"),
        (0, 4000, "read=0 in case wide, and kernels load 8,320; write=8,320,000 in case wide, and all tensors have 8,320"),
    ],
)
def test_traffic_far_from_the_accesses_of_the_largest_case_is_named(read: float, write: float, named: str) -> None:
    def traffic(case: Case) -> Traffic:
        return Traffic(int(read * case["M"] * case["N"]), int(write * case["M"] * case["N"]))

    lines = traffic_lines(replace(op_with(""), traffic=traffic))
    assert lines == ([f"scaled optimized: traffic: {named}"] if named else [])


def test_traffic_of_a_launch_that_loads_a_part_of_an_input_may_count_the_part() -> None:
    def halves(given: Inputs, config: object) -> Outputs:
        half = op_with("").variants[0].run({"x": given["x"][: len(given["x"]) // 2]}, config)["y"]
        return {"y": half.repeat(2, 1)}

    def reference(given: Inputs) -> Outputs:
        half = given["x"][: len(given["x"]) // 2]
        return {"y": (half / half.abs().amax(1, keepdim=True) if half.numel() else half).repeat(2, 1)}

    op = op_with("")
    half = replace(
        op, reference=reference, variants=(replace(op.variants[0], run=halves),),
        traffic=lambda case: Traffic(2 * case["M"] * case["N"], 4 * case["M"] * case["N"]),
    )  # fmt: skip
    cases = [case_of("odd", 14, 34), case_of("wide", 8, 260)]
    outcomes = check_pairs(half, half.variants[0], cases)
    assert [outcome.reason for outcome in outcomes if "traffic" in outcome.reason] == []


def test_traffic_that_ignores_an_option_is_named_though_the_largest_case_has_its_first_value() -> None:
    def copies(given: Inputs, y: Callable[[Inputs], Outputs]) -> Outputs:
        return {f"y{number}": y(given)["y"] for number in range(given["copies"])}

    op, options = op_with(""), {"copies": (1, 3)}
    flat = op.variants[0]
    copying = replace(
        op, options=options, compare=all_close, reference=lambda given: copies(given, op.reference),
        inputs=lambda case, *, device, seed=0: op.inputs(case, device=device, seed=seed) | {"copies": case.option("copies")},
        variants=(replace(flat, run=lambda given, config: copies(given, lambda its: flat.run(its, config))),),
    )  # fmt: skip
    cases = [
        replace(case_of("odd", 13, 34), options=(("copies", 3),)),
        replace(case_of("wide", 8, 260), options=(("copies", 1),)),
    ]
    outcomes = check_pairs(copying, copying.variants[0], cases)
    named = "scaled optimized: traffic: write=1,768 in case odd, and kernels store 5,304"
    assert [outcome.reason for outcome in outcomes if "traffic" in outcome.reason] == [named]


def attention(given: Inputs) -> torch.Tensor:
    return (given["x"] @ given["w"]).tril().softmax(1) @ given["w"].T


@pytest.mark.parametrize(
    ("product", "factor", "is_named"),
    [
        (lambda given: given["x"] @ given["w"], 2, False),
        (lambda given: given["x"] @ given["w"], 1, True),
        (lambda given: given["x"] @ given["w"], 4, True),
        (lambda given: given["x"] @ given["w"] + given["x"].abs() @ given["w"].abs(), 2, False),
        (lambda given: given["x"] @ given["w"] + given["x"].abs() @ given["w"].abs(), 8, True),
        (lambda given: torch.stack([row @ given["w"] for row in given["x"]]), 1, True),
        (lambda given: given["x"].sum(1), 1, False),
        (attention, 2, False),
        (attention, 8, True),
        (lambda given: torch.autograd.grad((given["w"].requires_grad_() @ given["w"]).sum(), given["w"]), 1, False),
    ],
)
def test_flops_far_from_the_products_of_the_reference_are_named(product: Callable[..., Any], factor: int, is_named: bool) -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        return {"x": values(seed, device, case["M"], case["N"]), "w": values(seed + 1, device, case["N"], case["N"])}

    op = replace(
        op_with(""), inputs=inputs, reference=lambda given: {"y": product(given)},
        flops=lambda case: factor * case["M"] * case["N"] * case["N"],
    )  # fmt: skip
    lines = wrong_flops(op, case_of("odd", 7, 33))
    assert [line.partition(" in case odd, and products of the reference take ")[0] for line in lines] == (
        [f"flops={factor * 7 * 33 * 33:,}"] * is_named
    )


@dataclass
class Held:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("keep", "take", "read", "named"),
    [
        (lambda x: [x], lambda kept: kept[0], 4, ""),
        (lambda x: {"weights": (x,)}, lambda kept: kept["weights"][0], 4, ""),
        (lambda x: [x], lambda kept: kept[0], 40, "read=83,200 in case wide, and all tensors have 8,320"),
        (Held, lambda kept: kept.x, 4, ""),
    ],
)
def test_traffic_counts_tensors_in_lists_and_not_inputs_of_other_classes(
    keep: Callable[[torch.Tensor], Any], take: Callable[[Any], torch.Tensor], read: int, named: str
) -> None:
    op = op_with("")
    flat = op.variants[0]
    held = replace(
        op,
        inputs=lambda case, *, device, seed=0: {"held": keep(op.inputs(case, device=device, seed=seed)["x"])},
        reference=lambda given: op.reference({"x": take(given["held"])}),
        compare=lambda case, given, *results: op.compare(case, {"x": take(given["held"])}, *results),
        traffic=lambda case: Traffic(read * case["M"] * case["N"], 4 * case["M"] * case["N"]),
        variants=(replace(flat, run=lambda given, config: flat.run({"x": take(given["held"])}, config)),),
    )
    assert traffic_lines(held) == ([f"scaled optimized: traffic: {named}"] if named else [])


@triton.jit
def _noise(x_ptr, y_ptr, seed, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * N + at, at < N, other=0.0)
    tl.store(y_ptr + tl.program_id(0) * N + at, x + tl.rand(seed, tl.program_id(0) * N + at), at < N)


def noise(is_ignored: bool, given: Inputs, _config: object) -> Outputs:
    x = given["x"]
    y, seed = torch.empty_like(x), 7 if is_ignored else int(given["noise_seed"])
    _noise[(len(x),)](x, y, seed, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return {"y": y}


@pytest.mark.parametrize("kind", [int, torch.tensor])
@pytest.mark.parametrize("is_ignored", [False, True])
def test_seed_whose_next_value_gives_the_same_outputs_is_named(is_ignored: bool, kind: Callable[[int], Any]) -> None:
    op = op_with("")
    inputs = lambda case, *, device, seed=0: {**op.inputs(case, device=device, seed=seed), "noise_seed": kind(3)}  # noqa: E731
    variant = Variant("optimized", partial(noise, is_ignored))
    seeded = replace(
        op, inputs=inputs, reference=lambda given: {"y": given["x"]}, variants=(variant,),
        compare=lambda _case, given, outputs, _expected: ["y: wrong"] * bool((outputs["y"] < given["x"]).any()),
    )  # fmt: skip
    outcomes = check_pairs(seeded, variant, CASES)
    line = "scaled optimized: inputs: noise_seed + 1 gives the same outputs in case wide: is it ignored?"
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [("noted", line)] * is_ignored


@pytest.mark.parametrize("option", ["p", "none"])
def test_seed_without_an_effect_for_a_value_of_an_option_is_not_named(option: str) -> None:
    op, cases = op_with(""), [replace(case, options=(("p", p),)) for case in CASES for p in (0.0, 0.5)]

    def run(given: Inputs, config: object) -> Outputs:
        return noise(not given["p"], {"x": given["x"], "noise_seed": given["noise_seed"] if option == "p" else 7}, config)

    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        return {**op.inputs(case, device=device, seed=seed), "noise_seed": 3, "p": case.option("p")}

    variant = Variant("optimized", run)
    seeded = replace(
        op,
        inputs=inputs,
        reference=lambda given: {"y": given["x"]},
        variants=(variant,),
        compare=lambda *_: [],
        options={"p": (0.0, 0.5)},
    )
    outcomes = check_pairs(seeded, variant, cases)
    assert [outcome.reason.startswith("scaled optimized: inputs: noise_seed") for outcome in outcomes] == [True] * (
        option == "none"
    )


@triton.jit
def _shifted(x_ptr, y_ptr, N, KIND: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, 64)
    place = at.to(KIND).to(tl.int32)
    mask = tl.arange(0, 64) < N
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask, other=0.0) + place, mask)


def shifted(kind: tl.dtype, given: Inputs, _config: None) -> Outputs:
    y = torch.empty_like(given["x"])
    _shifted[(len(y),)](given["x"], y, y.shape[1], KIND=kind)
    return {"y": y}


@pytest.mark.parametrize(
    ("kind", "rows", "is_named"),
    [
        (tl.int16, 600, True),
        (tl.int16, 2000, False),
        (tl.uint16, 1100, True),
        (tl.uint16, 600, False),
        (tl.float16, 100, True),
        (tl.bfloat16, 10, True),
        (tl.int32, 5000, False),
    ],
)
def test_cast_that_changes_places_of_the_largest_case_alone_is_named(kind: tl.dtype, rows: int, is_named: bool) -> None:
    """Checks that pass where the cast changes numbers, here with 2,000 rows, tell that a kernel takes low bits on purpose."""
    variant = Variant("optimized", partial(shifted, kind))
    op = replace(summing(""), compare=lambda *_: [], variants=(variant,))
    checked = case_of("checked", 2000 if rows == 2000 else 3, 64)
    jobs = [CaseJob.of([Run(Task(op, checked, variant), None)]), address_job(Task(op, case_of("large", rows + 1, 64), variant))]
    assert not [outcome for _job, outcomes in run_jobs(jobs) for outcome in outcomes if outcome.reason]
    named = f"integers that {kind.name} does not hold at test_declaration_mistakes.py:"
    assert (named in " ".join(coverage_lines(jobs))) == is_named
