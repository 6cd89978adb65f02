"""Find results that hang on unwritten memory, results kept where tensors get new values, and repeated random numbers."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import CASES, values
from test_pairs import interpreted, op_with

from kerneltune.checking.check import Checker
from kerneltune.checking.jobs import pairs_job, run_jobs
from kerneltune.checking.reruns import repeated_draws, wrong_by_unwritten, wrong_for_new_values
from kerneltune.compat import version
from kerneltune.kernel_lib.agreement import close
from kerneltune.spec import Case, Inputs, Op, Outputs, Variant
from kerneltune.task import Task

Scratch = Callable[[torch.Tensor], torch.Tensor]


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    return {"x": values(seed, device, case["M"], case["N"])}


def op_of(run: Callable[..., Outputs], reference: Callable[[Inputs], Outputs]) -> Op:
    return replace(
        op_with(""), inputs=inputs, reference=reference, variants=(Variant("optimized", run),),
        compare=lambda _case, _given, outputs, expected: close("y", outputs["y"], expected["y"], 1e-5, 1e-6),
    )  # fmt: skip


def by_parts(scratch: Scratch, join: Callable[..., torch.Tensor]) -> Callable[..., Outputs]:
    """Return a function that joins one written and one unwritten part of each row."""

    def run(given: Inputs, _config: object = None) -> Outputs:
        x = given["x"]
        parts = scratch(x)
        parts[:, 0] = join(x, 1).to(parts.dtype)
        return {"y": join(parts, 1).to(x.dtype)}

    return run


def largest(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x.nan_to_num(nan=-torch.inf, posinf=torch.inf).amax(axis)  # as `tl.max` does, it passes over NaN


def least(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x.nan_to_num(nan=torch.inf, neginf=-torch.inf).amin(axis)


SCRATCH: list[Scratch] = [
    lambda x: torch.empty(x.shape[0], 2), lambda x: x.new_empty(x.shape[0], 2), lambda x: torch.empty_like(x[:, :2]),
    lambda x: torch.empty_strided((x.shape[0], 2), (2, 1)), lambda x: x.new_empty_strided((x.shape[0], 2), (1, x.shape[0])),
]  # fmt: skip


@pytest.mark.parametrize("scratch", SCRATCH)
@pytest.mark.parametrize(("join", "word"), [(largest, "largest"), (least, "least")])
def test_part_of_scratch_that_nothing_wrote_is_found_though_a_maximum_passes_over_nan(
    scratch: Scratch, join: Callable[..., torch.Tensor], word: str
) -> None:
    op = op_of(by_parts(scratch, join), lambda given: {"y": join(given["x"], 1)})
    assert Checker(op, CASES[1], "cpu").run(op.variants[0], None)[1] == []
    (outcome,) = wrong_by_unwritten(op, op.variants[0], CASES)
    assert (outcome.status, outcome.case) == ("failed", CASES[1])
    assert outcome.reason.startswith(f"if memory that nothing wrote holds the {word} numbers: y: 13 of 13 wrong")
    ((_job, outcomes),) = run_jobs([pairs_job(Task(op, CASES[0], op.variants[0]), CASES)])
    assert [it.reason for it in outcomes if it.status == "failed"] == [outcome.reason]


@pytest.mark.parametrize("fill", [torch.zeros_like, lambda x: torch.empty_like(x).fill_(2.0), torch.Tensor.clone])
def test_written_memory_is_right(fill: Scratch) -> None:
    op = op_of(lambda given, _config: {"y": fill(given["x"])}, lambda given: {"y": fill(given["x"])})
    assert wrong_by_unwritten(op, op.variants[0], CASES) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.int8, torch.int64])
def test_unwritten_memory_of_every_type_holds_its_limits(dtype: torch.dtype) -> None:
    seen = list[float]()

    def run(given: Inputs, _config: object) -> Outputs:
        seen.append(float(torch.empty(1, dtype=dtype)))
        return given

    op = op_of(run, lambda given: {"y": given["x"]})
    assert wrong_by_unwritten(op, op.variants[0], CASES) == []
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    assert {float(limits.max), float(limits.min)} <= set(seen)


def test_result_kept_by_address_is_named_and_one_kept_by_version_is_right() -> None:
    by_address: dict[object, torch.Tensor] = {}

    def kept(key: Callable[[torch.Tensor], object]) -> Callable[..., Outputs]:
        def run(given: Inputs, _config: object = None) -> Outputs:
            x = given["x"]
            held.append(x)  # so that no other tensor gets the address
            return {"y": by_address.setdefault(key(x), x * 2).clone()}

        return run

    held = list[torch.Tensor]()
    op = op_of(kept(lambda x: x.data_ptr()), lambda given: {"y": given["x"] * 2})
    (outcome,) = wrong_for_new_values(op, op.variants[0], CASES)
    assert outcome.reason.startswith("scaled: optimized is wrong if its inputs get new values in place, in case odd: y: ")
    ((_job, outcomes),) = run_jobs([pairs_job(Task(op, CASES[0], op.variants[0]), CASES)])
    assert outcome in outcomes
    by_version = op_of(kept(lambda x: (x.data_ptr(), version(x))), lambda given: {"y": given["x"] * 2})
    assert wrong_for_new_values(by_version, by_version.variants[0], CASES) == []


@triton.jit
def _noise(x_ptr, y_ptr, seed, N, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at, row = tl.arange(0, BLOCK), tl.program_id(0)
    noise = tl.rand(seed, row * N + at) if KIND == "offsets" else tl.rand(seed + row if KIND == "seeds" else 7, at)
    tl.store(y_ptr + row * N + at, tl.load(x_ptr + row * N + at, at < N, other=0.0) + noise, at < N)


@interpreted
@pytest.mark.parametrize("kind", ["offsets", "seeds", "ignored"])
def test_seed_whose_next_value_repeats_random_numbers_is_named(kind: str) -> None:
    def seeded(case: Case, *, device: str, seed: int = 0) -> Inputs:
        return {**inputs(case, device=device, seed=seed), "noise_seed": 3 + seed}

    def run(given: Inputs, _config: object = None) -> Outputs:
        y, (M, N) = torch.empty_like(given["x"]), given["x"].shape
        _noise[(M,)](given["x"], y, given["noise_seed"], N, kind, triton.next_power_of_2(N))
        return {"y": y}

    op = replace(op_of(run, lambda given: {"y": given["x"]}), inputs=seeded, compare=lambda *_: [])
    line = "optimized draws the same random numbers for noise_seed and noise_seed + 1, in case wide"
    notes = [outcome.reason for outcome in repeated_draws(op, op.variants[0], CASES)]
    assert notes == [f"{op.name}: {line}"] * (kind == "seeds")
