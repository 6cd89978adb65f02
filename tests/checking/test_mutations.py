"""A comparison that accepts wrong outputs is found; the shipped operators' comparisons are not."""

from dataclasses import dataclass, replace

import pytest
import torch
from planted_kernels import inputs, op_with, reference

from kerneltune.checking.check import Checker
from kerneltune.checking.mutations import _mutated, mutate
from kerneltune.kernel_lib.agreement import close
from kerneltune.listing import check_case, check_contract
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic
from kerneltune.task import CaseError, Outcome

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutations are judged without a GPU")


@dataclass(frozen=True, slots=True)
class Warps:
    warps: int


CASES = [Case("small", (("M", 7), ("N", 100)), "bfloat16"), Case("one", (("M", 1), ("N", 1)), "bfloat16")]


def outcomes(op: Op) -> list[Outcome]:
    return mutate(op, op.variants[0], CASES)


def test_mutations_list_what_strict_and_tolerant_comparisons_refuse() -> None:
    refused = "double y: compare refuses one element, one row, exchange, zeroed tail"
    assert outcomes(op_with(""))[0] == Outcome("checked", f"{refused}, scale x 1.01, scale x 1.1; accepts truncation")
    strict = replace(op_with(""), compare=lambda _c, _i, got, want: close("y", got["y"], want["y"], 1e-4, 0.0))
    assert outcomes(strict)[0] == Outcome("checked", f"{refused}, truncation, scale x 1.01, scale x 1.1")


@pytest.mark.parametrize(("bound", "judged"), [(0.0, "refuses"), (0.2, "accepts")])
def test_mutation_of_a_scale_before_a_cast_to_fp8_is_judged(bound: float, judged: str) -> None:
    def cast(inputs: Inputs) -> Outputs:
        return {"q": inputs["x"].nan_to_num().to(torch.float8_e4m3fn)}

    def within(_case: Case, _inputs: Inputs, got: Outputs, want: Outputs) -> list[str]:
        return close("q", got["q"], want["q"], bound, 0.0)

    op = op_with("")
    variant = replace(op.variants[0], run=lambda inputs, _config: cast(inputs))
    (outcome,) = outcomes(replace(op, reference=cast, compare=within, variants=(variant,)))
    named = outcome.reason.partition(f"compare {judged} " if judged == "refuses" else f"; {judged} ")[2].partition(";")[0]
    assert "scale x 1.01" in named


def test_mutations_of_an_output_without_axes_are_judged() -> None:
    def total(inputs: Inputs) -> Outputs:
        return {"loss": inputs["x"].float().nan_to_num().abs().sum()}

    op = op_with("")
    variant = replace(op.variants[0], run=lambda inputs, _config: total(inputs))
    strict = replace(op, compare=lambda _c, _i, got, want: close("loss", got["loss"], want["loss"], 1e-4, 0.0))
    (outcome,) = outcomes(replace(strict, reference=total, variants=(variant,)))
    assert outcome.status == "checked"
    assert "loss: compare refuses one element, " in outcome.reason


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float64])
@pytest.mark.parametrize("axes", [0, 2])
def test_mutations_of_complex_and_long_floats_are_judged(dtype: torch.dtype, axes: int) -> None:
    def spectrum(inputs: Inputs) -> Outputs:
        x = inputs["x"].double().nan_to_num().clamp(-9, 9) + 0.3
        unit = torch.polar(x.abs(), x) if dtype.is_complex else x
        return {"s": (unit if axes else unit.sum()).to(dtype)}

    op = op_with("")
    variant = replace(op.variants[0], run=lambda inputs, _config: spectrum(inputs))
    strict = replace(op, compare=lambda _c, _i, got, want: close("s", got["s"], want["s"], 1e-9, 0.0))
    (outcome,) = outcomes(replace(strict, reference=spectrum, variants=(variant,)))
    assert outcome.status == "checked", outcome
    assert "s: compare refuses one element, " in outcome.reason
    assert "truncation, scale x 1.01, scale x 1.1" in outcome.reason


def test_mutations_fail_a_comparison_that_accepts_all_or_compares_means() -> None:
    results = outcomes(replace(op_with(""), compare=lambda *_: []))
    assert {outcome.status for outcome in results} == {"failed"}
    assert results[0].reason.startswith("double y: compare refuses nothing; accepts one element, ")

    def mean(_case: Case, _inputs: Inputs, got: Outputs, want: Outputs) -> list[str]:
        apart = (got["y"].float().nanmean() - want["y"].nanmean()).abs()
        return ["y: mean differs"] if apart > 0.1 else []

    assert outcomes(replace(op_with(""), compare=mean))[0].status == "failed"


def test_mutations_fail_a_comparison_of_the_first_row_alone_though_a_case_has_a_single_row() -> None:
    first = lambda _c, _i, got, want: close("y", got["y"][:1], want["y"][:1], 1e-2, 0.0)  # noqa: E731
    (outcome, *_) = outcomes(replace(op_with(""), compare=first))
    assert (outcome.status, outcome.reason.partition("accepts ")[2]) == ("failed", "one element, one row, truncation")


@pytest.mark.parametrize("values", [
    torch.tensor([2**31 + 5] * 3), torch.tensor([1.0, torch.nan, torch.nan]), torch.tensor([torch.inf, torch.inf, 3.0]),
])  # fmt: skip
def test_one_element_of_large_integers_nan_and_infinity_changes(values: torch.Tensor) -> None:
    changed = dict((mutation, it) for _, mutation, it in _mutated({"y": values}))["one element"]
    assert int((changed != values).sum() - values.isnan().sum()) == 1


def test_one_element_changes_though_the_middle_is_the_largest_of_fp8() -> None:
    y = torch.tensor([1.0, 448.0, 448.0, 448.0]).to(torch.float8_e4m3fn)
    changed = dict((mutation, it) for _, mutation, it in _mutated({"y": y}))["one element"]
    assert changed.float().tolist() == [3.0, 448.0, 448.0, 448.0]


def test_exchange_changes_the_places_of_two_integers_in_each_row() -> None:
    ids = torch.tensor([[3, 1, 2], [5, 4, 6]])
    changed = dict((mutation, it) for _, mutation, it in _mutated({"ids": ids}))
    assert changed["exchange"].tolist() == [[1, 3, 2], [4, 5, 6]]
    assert "truncation" not in changed


def test_mutations_of_a_wrong_variant_raise() -> None:
    with pytest.raises(CaseError, match="only outputs of a right variant can be perturbed"):
        outcomes(op_with("wrong_scale"))


def test_reference_that_changes_its_inputs_or_returns_no_dict_raises() -> None:
    def changing(values: Inputs) -> Outputs:
        values["x"].mul_(2)
        return reference(values)

    with pytest.raises(CaseError, match=r"test_mutations\.py:\d+: reference: changes its input x, for double "):
        Checker(replace(op_with(""), reference=changing), CASES[0], "cpu")
    with pytest.raises(CaseError, match="reference: Tensor: expected a dict of output -> tensor"):
        Checker(replace(op_with(""), reference=lambda values: values["x"]), CASES[0], "cpu")
    assert inputs(CASES[0], device="cpu")["x"].shape == (7, 100)


def test_traffic_of_0_bytes_and_a_space_with_3_warps_raise() -> None:
    with pytest.raises(ValueError, match="expected the bytes that are read and written"):
        check_case(replace(op_with(""), traffic=lambda _case: Traffic(0, 0)), CASES[0])
    for counts in ((4, 3), (64,)):
        variant = replace(
            op_with("").variants[0], config=Warps, space=lambda _case: {"warps": counts}, default=lambda _case: Warps(4)  # noqa: B023
        )  # fmt: skip
        with pytest.raises(ValueError, match=f"space: 'warps': {counts[-1]}: expected powers of two up to 32, for double "):
            check_contract(replace(op_with(""), variants=(variant,)))
