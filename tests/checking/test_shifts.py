"""Find kernels that are wrong with certain values of inputs: far from 0, floats of launches, tiny, 0, equal, ignored."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from mistaken_ops import CASES, values
from test_pairs import op_with

from kerneltune.checking import shifts
from kerneltune.checking.jobs import compare_job, run_jobs
from kerneltune.checking.shifts import wrong_by_values
from kerneltune.interpreter.faults import KernelFaultError
from kerneltune.kernel_lib.agreement import all_same_bits, close, same_bits
from kerneltune.processes.forked import shared_bytes
from kerneltune.spec import Case, Inputs, Op, Outputs, Variant
from kerneltune.task import Task

INF = torch.inf


def _inputs(names: str, case: Case, *, device: str, seed: int = 0) -> Inputs:
    return {name: values(seed + place, device, case["M"], case["N"]) for place, name in enumerate(names)}


def _softmax(least: float, inputs: Inputs, _config: object = None) -> Outputs:
    e = (inputs["x"] - inputs["x"].amax(-1, keepdim=True).clamp(min=least)).exp()
    return {"y": e / e.sum(-1, keepdim=True), "sum": inputs["x"].sum(-1)}


def _largest(mask: float, inputs: Inputs, _config: object = None) -> Outputs:
    return {"y": torch.nn.functional.pad(inputs["x"], (0, 2), value=mask).amax(-1)}


def _least(mask: float, inputs: Inputs, _config: object = None) -> Outputs:
    return {"y": torch.nn.functional.pad(inputs["x"], (0, 2), value=mask).amin(-1)}


def _causal(mask: float, inputs: Inputs, _config: object = None, scores: torch.dtype = torch.float32) -> Outputs:
    s = (inputs["q"] @ inputs["k"].T).to(scores).float() * inputs["q"].shape[1] ** -0.5
    is_hidden = torch.ones_like(s, dtype=torch.bool).triu(1)
    return {"y": torch.softmax(s.masked_fill(is_hidden, mask), -1) @ inputs["v"]}


def _variance(inputs: Inputs, _config: object = None) -> Outputs:
    return {"y": (inputs["x"] ** 2).mean(-1) - inputs["x"].mean(-1) ** 2}


def _exact_variance(inputs: Inputs) -> Outputs:
    return {"y": inputs["x"].double().var(-1, correction=0).float()}


def _op(reference: Callable[[Inputs], Outputs], run: Callable[..., Outputs], names: str = "x", rtol: float = 1e-5) -> Op:
    return replace(
        op_with(""), inputs=partial(_inputs, names), reference=reference, variants=(Variant("optimized", run),),
        compare=lambda _case, _given, outputs, expected: close("y", outputs["y"], expected["y"], rtol, 1e-6),
    )  # fmt: skip


@pytest.mark.parametrize("stand_in", [1000.0, 10000.0])
@pytest.mark.parametrize(
    ("function", "sign", "names", "where"),
    [(_softmax, -1, "x", "x is around -28672"), (_largest, -1, "x", "x is around -28672"), (_least, 1, "x", "x is around 28672"),
     (_causal, -1, "qkv", "q is around -28672")],
)  # fmt: skip
def test_constant_for_infinity_is_named(
    function: Callable[..., Outputs], sign: int, names: str, where: str, stand_in: float
) -> None:
    op = _op(partial(function, sign * INF), partial(function, sign * stand_in), names)
    (line,) = wrong_by_values(op, CASES)
    assert line.startswith(f"optimized is wrong where {where}, in case odd: y: ")
    ((_job, outcomes),) = run_jobs([compare_job(Task(op, CASES[1], op.variants[0]), CASES)])
    assert f"scaled: {line}" in [outcome.reason for outcome in outcomes]
    assert wrong_by_values(_op(partial(function, sign * INF), partial(function, sign * INF), names), CASES) == []


def _unit(form: str, inputs: Inputs, _config: object = None) -> Outputs:
    norm = inputs["x"].norm(dim=-1, keepdim=True)
    return {"y": inputs["x"] / (norm if form == "unguarded" else norm.clamp(min=1e-12 if form == "right" else 1e-4))}


def _softplus(form: str, inputs: Inputs, _config: object = None) -> Outputs:
    x = inputs["x"] * 20
    return {"y": torch.nn.functional.softplus(x) if form == "right" else x.exp().add(1).log()}


def _mean_of_marked(form: str, inputs: Inputs, _config: object = None) -> Outputs:
    is_kept = inputs["t"] >= 0
    return {"y": (inputs["x"] * is_kept[:, None]).sum(0) / is_kept.sum().clamp(min=form == "right")}


def _marked(case: Case, *, device: str, seed: int = 0) -> Inputs:
    t = torch.arange(case["M"], device=device) % 8 - 1
    return {"x": values(seed, device, case["M"], case["N"]), "t": t}


@pytest.mark.parametrize(
    ("function", "form", "where"),
    [(_unit, "right", ""), (_unit, "unguarded", "x is 0"), (_unit, "large epsilon", "x is 2^-24 times as large"),
     (_softplus, "right", ""), (_softplus, "overflows", "x is 4 times as large"), (_mean_of_marked, "right", ""),
     (_mean_of_marked, "unguarded", "t is -1")],
)  # fmt: skip
def test_epsilon_quotient_by_zero_and_overflow_are_named(function: Callable[..., Outputs], form: str, where: str) -> None:
    op = replace(_op(partial(function, "right"), partial(function, form)), inputs=_marked)
    lines = [f"optimized is wrong where {where}, in case odd: y"] * bool(where)
    named = [line for line in wrong_by_values(op, CASES) if "each row" not in line]
    assert [line.split(":")[0] + ": y" for line in named] == lines


@pytest.mark.parametrize(
    ("reference", "run", "is_named"),
    [
        (lambda x: {"y": x.relu()}, lambda x: {"y": torch.where(x > 0, x, 0)}, True),
        (lambda x: {"y": x.amax(-1)}, lambda x: {"y": x.nan_to_num(-INF).amax(-1)}, True),
        (lambda x: {"y": x.relu()}, lambda x: {"y": x.relu()}, False),
        (lambda x: {"y": torch.where(x > 0, x, 0)}, lambda x: {"y": x.relu()}, False),
        (lambda x: {"y": x.relu(), "z": x + 1}, lambda x: {"y": torch.where(x > 0, x, 0), "z": x + 1}, False),
        (lambda x: {"y": x.nan_to_num(7)}, lambda x: {"y": x.nan_to_num(3)}, False),
        (lambda x: {"y": x.relu()}, lambda x: {"y": x.relu().reshape(-1 if x.isnan().any() else x.shape)[:, :]}, False),
    ],
    ids=["relu", "maximum", "right", "more than the reference", "kept elsewhere", "lost by the reference", "host code fails"],
)
def test_nan_that_only_the_reference_keeps_is_named(
    reference: Callable[[torch.Tensor], Outputs], run: Callable[[torch.Tensor], Outputs], is_named: bool
) -> None:
    op = _op(lambda given: reference(given["x"]), lambda given, _config: run(given["x"]))
    begin = "optimized is wrong where each row of x has a NaN, which no output has, in case odd: y: "
    assert [line[: len(begin)] for line in wrong_by_values(op, CASES)] == [begin] * is_named


@pytest.mark.parametrize(
    ("reference", "run", "output"),
    [
        (lambda x: {"y": x.relu()}, lambda x: {"y": torch.cat([x[:-1].relu(), x[-1:].nan_to_num(0).relu()])}, "y"),
        (lambda x: {"y": x.amax(-1)}, lambda x: {"y": torch.cat([x[:5].amax(-1), x[5:].nan_to_num(-9).amax(-1)])}, "y"),
        (lambda x: {"z": x, "y": x.amax(-1)}, lambda x: {"z": x, "y": torch.cat([x[:1], x[1:].nan_to_num(-9)]).amax(-1)}, "y"),
        (lambda x: {"z": x, "y": x.amax(-1)}, lambda x: {"z": x, "y": x.nan_to_num(-9).amax(-1)}, ""),  # as scales of fp8
        (lambda x: {"y": x[:3].relu()}, lambda x: {"y": x[:3].relu()}, ""),
        (lambda x: {"y": x.softmax(-1)}, lambda x: {"y": torch.where(x.isnan(), x, x.nan_to_num(0).softmax(-1))}, ""),
    ],
    ids=["last row", "last elements", "first element is kept", "kept elsewhere", "right", "in each row"],
)
def test_nan_that_some_rows_lose_is_named(
    reference: Callable[[torch.Tensor], Outputs], run: Callable[[torch.Tensor], Outputs], output: str
) -> None:
    op = _op(lambda given: reference(given["x"]), lambda given, _config: run(given["x"]))
    begin = f"optimized is wrong where each row of x has a NaN, which some rows of {output} lose, in case odd: {output}: "
    assert [line[: len(begin)] for line in wrong_by_values(op, CASES)] == [begin] * bool(output)


def _causal_without_later_keys(inputs: Inputs, _config: object = None) -> Outputs:
    q, k, v = (inputs[name] for name in "qkv")
    scores = [row @ k[: place + 1].T * q.shape[1] ** -0.5 for place, row in enumerate(q)]
    return {"y": torch.stack([torch.softmax(score, -1) @ v[: len(score)] for score in scores])}


def test_nan_that_a_mask_of_the_reference_spreads_is_no_line() -> None:
    assert wrong_by_values(_op(partial(_causal, -INF), _causal_without_later_keys, "qkv"), CASES) == []


def _rounded(form: str, given: Inputs, _config: object = None) -> Outputs:
    """Round to bf16 by integers; the mistake has no case for NaN."""
    bits = given["x"].float().view(torch.int32)
    y = ((bits.long() + 0x8000 + 2**31) % 2**32 - 2**31).int().bitwise_and(-0x10000).view(torch.float32)
    return {"y": torch.where(given["x"].isnan(), given["x"], y) if form == "right" else y}


def test_nan_of_ones_that_rounding_by_integers_loses_is_named_beside_another_nan() -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        x = values(seed, device, case["M"], case["N"]).float()
        if device != "meta":
            x[0, 0] = torch.nan
        return {"x": x}

    right, wrong = (replace(_op(partial(_rounded, "right"), partial(_rounded, form)), inputs=inputs) for form in ("right", "w"))
    begin = "optimized is wrong where each row of x has the NaN 0x7fffffff, which no output has, in case odd: y: "
    assert [line[: len(begin)] for line in wrong_by_values(wrong, CASES)] == [begin]
    assert wrong_by_values(right, CASES) == []


def _sums_before(form: str, x: torch.Tensor) -> Outputs:
    if form == "right":
        return {"y": torch.nn.functional.pad(x.cumsum(-1), (1, 0))[:, :-1]}
    return {"y": x.cumsum(-1) - x}


def _first_row(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:1].cumsum(-1), torch.ones_like(x[1:])])


@pytest.mark.parametrize(
    ("reference", "run", "wheres"),
    [
        (partial(_sums_before, "right"), partial(_sums_before, "right"), []),
        (partial(_sums_before, "right"), partial(_sums_before, "difference"), ["has a NaN"]),
        (lambda x: {"y": x.tanh()}, lambda x: {"y": ((2 * x).exp() - 1) / ((2 * x).exp() + 1)}, ["has inf"]),
        (lambda x: {"y": x.clamp(-9, 9).exp()}, lambda x: {"y": x.exp().clamp(math.exp(-9), 1e38)}, []),
        (lambda x: {"y": torch.where(x > 1e6, 1, x)}, lambda x: {"y": torch.where(x == INF, 0, x * 1e30 / 1e30)}, ["has 1e+09"]),
        (lambda x: {"y": x.softmax(-1).tril()}, lambda x: {"y": x.softmax(-1) * torch.ones_like(x).tril()}, []),
        (lambda x: {"y": _first_row(x)}, lambda x: {"y": _first_row(x) + 0 * x}, []),
        (lambda x: {"y": _first_row(x).sum(-1)}, lambda x: {"y": (_first_row(x) + 0 * x).sum(-1)}, []),
    ],
    ids=[
        "right",
        "difference of sums",
        "tanh",
        "other finite values",
        "huge",
        "masked elements",
        "rows that stay",
        "elements that stay",
    ],
)
def test_output_that_is_not_finite_where_the_reference_is_is_named(
    reference: Callable[[torch.Tensor], Outputs], run: Callable[[torch.Tensor], Outputs], wheres: list[str]
) -> None:
    op = _op(lambda given: reference(given["x"]), lambda given, _config: run(given["x"]))
    text = "optimized is wrong where each row of x {}, and y is not finite where the reference is, in case odd: y: "
    begins = [line[: line.index("y: ") + 3] for line in wrong_by_values(op, CASES) if "each row" in line]
    assert begins == [text.format(where) for where in wheres]


@pytest.mark.parametrize(("type_of_sums", "is_named"), [(torch.float16, True), (torch.float32, False)])
def test_sums_of_fp8_products_that_exceed_fp16_are_named(type_of_sums: torch.dtype, is_named: bool) -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        return {name: value.to(torch.float8_e4m3fn) for name, value in _inputs("ab", case, device=device, seed=seed).items()}

    def run(sums: torch.dtype, given: Inputs, _config: object = None) -> Outputs:
        return {"y": (given["a"].float() @ given["b"].float().T).to(sums).float()}

    op = replace(_op(partial(run, torch.float32), partial(run, type_of_sums), rtol=1e-2), inputs=inputs)
    begin = "optimized is wrong where each row of a, b has the largest number of its type, in case odd: y: "
    assert [line[: len(begin)] for line in wrong_by_values(op, CASES)] == [begin] * is_named


def _quantized(form: str, inputs: Inputs, _config: object = None) -> Outputs:
    x, scale = inputs["x"], inputs["scale"]
    divisor = torch.tensor(scale)  # torch multiplies by the reciprocal of a number on a GPU
    q = (
        x * torch.tensor(1.0).div(scale)
        if form == "reciprocal"
        else x / (divisor.long() or divisor if form == "whole" else divisor)
    )
    return {"y": q.clamp(-448, 448).to(torch.float8_e4m3fn)}


@pytest.mark.parametrize(
    ("form", "where"),
    [("right", ""), ("reciprocal", "scale is 0.425"), ("whole", "scale is 1.7")],
)
def test_float_input_that_only_a_power_of_two_hides_is_named(form: str, where: str) -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        x = torch.arange(case["M"] * case["N"], device=device).reshape(case["M"], case["N"]) * 0.2125  # quotients are ties
        return {"x": x, "scale": 0.25}

    op = replace(
        _op(partial(_quantized, "right"), partial(_quantized, form)), inputs=inputs,
        compare=lambda _case, _given, outputs, expected: same_bits("y", outputs["y"], expected["y"]),
    )  # fmt: skip
    lines = [f"optimized is wrong where {where}, in case odd: y: "] * bool(where)
    assert [line[: line.index("y: ") + 3] for line in wrong_by_values(op, CASES)] == lines


@pytest.mark.parametrize(
    ("rate", "values_tried"),
    [(0.9, "0.529412, 0.132353"), (0.5, "0.85, 0.0735294"), (0.1, "0.17, 0.68, 0.0147059")],
)
def test_float_input_below_1_stays_below_1_at_first(rate: float, values_tried: str, tmp_path: Path) -> None:
    log = tmp_path / "log"  # of a fork

    def run(given: Inputs, _config: object = None) -> Outputs:
        with log.open("a") as file:
            file.write(f"{given['p']:g}\n")
        return {"y": given["x"] * given["p"]}

    op = _op(lambda given: {"y": given["x"] * given["p"]}, run)

    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        return {**_inputs("x", case, device=device, seed=seed), "p": rate}

    assert wrong_by_values(replace(op, inputs=inputs), CASES) == []
    tried = dict.fromkeys(log.read_text().split())
    assert ", ".join(value for value in tried if float(value) < 1 and value != f"{rate:g}") == values_tried


@pytest.mark.parametrize(("form", "where"), [("floor", "below"), ("ceil", "above"), ("frexp", "")])
def test_logarithm_that_rounds_to_a_whole_number_is_named(form: str, where: str) -> None:
    def run(form: str, given: Inputs, _config: object = None) -> Outputs:
        top = given["x"].abs().amax(-1)
        if form == "frexp":
            mantissa, exponent = torch.frexp(top)
            return {"y": exponent.to(torch.int8) - 1, "z": exponent.to(torch.int8) - (mantissa == 0.5).to(torch.int8)}
        log = top.log2()
        return {
            **run("frexp", given),
            **({"y": log.floor().to(torch.int8)} if form == "floor" else {"z": log.ceil().to(torch.int8)}),
        }

    op = replace(
        _op(partial(run, "frexp"), partial(run, form)),
        compare=lambda _case, _given, got, want: [line for name in want for line in same_bits(name, got[name], want[name])],
    )
    begin = f"optimized is wrong where each row of x has the number just {where} 1024, and it is right with 1024, in case odd: "
    assert [line[: len(begin)] for line in wrong_by_values(op, CASES)] == [begin] * bool(where)


def test_flags_of_0_and_1_stay() -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        given = _inputs("xz", case, device=device, seed=seed)
        return given if device == "meta" else {**given, "z": (given["z"] > 0) * 1.0}

    op = _op(lambda given: {"y": given["x"] * given["z"]}, lambda given, _: {"y": torch.where(given["z"] == 1, given["x"], 0)})
    assert wrong_by_values(replace(op, inputs=inputs), CASES) == []


def test_output_that_is_far_from_the_reference_with_plain_values_is_not_judged() -> None:
    """Stand for a dropout, whose `compare` knows the elements that are kept."""
    op = _op(lambda given: {"y": given["x"] * 1.0}, lambda given, _config: {"y": given["x"].roll(1, 0) + 1})
    rare = replace(op, compare=lambda _case, given, *_: ["y: wrong"] * bool(given["x"].abs().max() < 1e-3))
    assert wrong_by_values(rare, CASES) == []


@pytest.mark.parametrize(("zeros", "where"), [("xzw", "x, z, w are 0"), ("zw", "z, w are 0")])
def test_inputs_are_changed_together_and_all_but_one(zeros: str, where: str) -> None:
    def run(given: Inputs, _config: object) -> Outputs:
        is_wrong = {name for name in "xzw" if not given[name].any()} == set(zeros)
        return {"y": given["x"] + given["z"] + given["w"] + (torch.nan if is_wrong else 0)}

    (line,) = wrong_by_values(_op(lambda given: {"y": given["x"] + given["z"] + given["w"]}, run, "xzw"), CASES)
    assert line.startswith(f"optimized is wrong where {where}, in case odd: y: ")


@pytest.mark.parametrize(("least", "has_counts"), [(1, True), (3, False)])
def test_integers_that_may_be_no_marks_stay(least: int, has_counts: bool) -> None:
    """Several inputs of integers may depend on each other; more than two negative values are numbers."""

    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        t = torch.arange(case["M"], device=device) % 8 - least
        return {**_marked(case, device=device, seed=seed), "t": t, **({"counts": t.abs()} if has_counts else {})}

    op = _op(partial(_mean_of_marked, "right"), partial(_mean_of_marked, "unguarded"))
    assert wrong_by_values(replace(op, inputs=inputs), CASES) == []


@pytest.mark.parametrize("form", ["counted", "all different", "beside ends", "a race"])
def test_counter_that_equal_indices_overflow_is_named(form: str) -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        ids = torch.arange(case["N"] * case["M"], device=device).view(case["M"], -1).flip(-1)
        ends = {"ends": torch.arange(case["M"], device=device)} if form == "beside ends" else {}
        return {"ids": ids if form == "all different" else ids % 8, **ends}

    def counts(most: int, given: Inputs, _config: object = None) -> Outputs:
        if form == "a race" and most == 256 and not given["ids"].diff().any():
            raise KernelFaultError("two programs store different values to counts_ptr")
        return {"counts": torch.stack([row.bincount(minlength=4096) for row in given["ids"]]) % most}

    lines = wrong_by_values(
        replace(_op(partial(counts, 1 << 31), partial(counts, 256)), inputs=inputs, compare=all_same_bits), CASES
    )
    assert [line.partition(": ")[0] for line in lines] == ["optimized is wrong where all ids are 3, in case wide"] * (
        form == "counted"
    )


def test_values_that_host_code_refuses_are_no_line() -> None:
    def run(given: Inputs, _config: object) -> Outputs:
        if not given["x"].any():
            raise ValueError("x is 0")
        return {"y": given["x"] * 1.0}

    assert wrong_by_values(_op(lambda given: {"y": given["x"] * 1.0}, run), CASES) == []


def test_values_are_tried_in_no_further_case_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = shared_bytes(1)

    def run(given: Inputs, _config: object) -> Outputs:
        ran.fill_(1)
        return {"y": given["x"] * 1.0}

    monkeypatch.setattr(shifts, "KIND_SECONDS", 0.0)
    assert wrong_by_values(_op(lambda given: {"y": given["x"] * 1.0}, run), CASES) == []
    assert not ran.any()


def test_value_of_an_option_in_a_large_case_alone_is_tried() -> None:
    small = [replace(CASES[0], name=f"m{m}", axes=(("M", m), ("N", 8)), options=(("p", 0.0),)) for m in range(1, 9)]
    large = replace(small[0], name="large", axes=(("M", 9), ("N", 8)), options=(("p", 0.5),))

    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        return {**_inputs("x", case, device=device, seed=seed), "p": case.option("p")}

    def run(given: Inputs, _config: object) -> Outputs:
        return _unit("unguarded" if given["p"] else "right", given)

    op = replace(_op(partial(_unit, "right"), run), inputs=inputs, options={"p": (0.0, 0.5)})
    (line,) = wrong_by_values(op, [*small, large])
    assert line.startswith("optimized is wrong where x is 0, in case large: y: ")


@pytest.mark.parametrize("is_kept", [True, False])
def test_values_that_are_wrong_after_other_calls_alone_name_a_kept_value(is_kept: bool) -> None:
    first = dict[torch.Size, torch.Tensor]()

    def run(given: Inputs, _config: object) -> Outputs:
        x = first.setdefault(given["x"].shape, given["x"].clone()) if is_kept else given["x"]
        return {"y": x * given["x"].sign() if is_kept or given["x"].any() else x + torch.nan}

    op = _op(lambda given: {"y": given["x"].abs()}, run)
    (line,) = wrong_by_values(op, CASES)
    kept = "right alone in a new process, and wrong after other calls, in case odd: does host code keep a value? y: "
    assert line.startswith(f"optimized is {kept if is_kept else 'wrong where x is 0, in case odd: y: '}")


def test_input_that_the_reference_ignores_is_not_changed() -> None:
    op = _op(lambda given: {"y": given["x"] * 1.0}, lambda given, _config: {"y": given["x"] + 1.0 * (given["z"] == 0)}, "xz")
    assert wrong_by_values(op, CASES) == []


@pytest.mark.parametrize(
    "op",
    [
        _op(_exact_variance, _variance, rtol=1e-3),
        _op(partial(_causal, -INF), partial(_causal, -INF, scores=torch.bfloat16), "qkv", rtol=2e-2),
        _op(partial(_causal, -INF), partial(_causal, -1e6), "qkv"),
    ],
    ids=["variance that loses digits", "scores in bf16", "mask that is far enough"],
)
def test_right_variant_is_not_named(op: Op) -> None:
    assert wrong_by_values(op, CASES) == []


@pytest.mark.parametrize(("is_exact", "is_named"), [(True, True), (False, False)])
def test_scale_with_a_floor_is_named_beside_scales_of_1_if_results_are_exact(is_exact: bool, is_named: bool) -> None:
    def scale(floor: float, given: Inputs, _config: object = None) -> Outputs:
        largest = given["x"].abs().amax(-1)
        y = torch.where(torch.arange(len(largest)) % 2 > 0, 1.0, (largest / 15).clamp(min=floor))
        return {"y": y if is_exact or not floor else y * (1 + 2**-20)}

    op = _op(partial(scale, 0.0), partial(scale, 1e-5))
    op = replace(op, compare=lambda _case, _given, got, want: close("y", got["y"], want["y"], 1e-5, 0))
    lines = wrong_by_values(op, CASES)
    assert [line.partition(",")[0] for line in lines] == ["optimized is wrong where x is 2^-24 times as large"] * is_named


@pytest.mark.parametrize("floor", [0.0, 1e-6])
def test_floor_of_a_scale_that_only_codes_of_int8_show_is_named(floor: float) -> None:
    def quantized(floor: float, given: Inputs, _config: object = None) -> Outputs:
        scale = given["x"].abs().amax(-1, keepdim=True) / 127
        return {"y": (given["x"] / torch.where(scale > floor, scale, 1.0)).round().to(torch.int8), "scale": scale}

    op = _op(partial(quantized, 0.0), partial(quantized, floor))
    op = replace(op, compare=lambda _case, _given, got, want: close("y", got["y"].float(), want["y"].float(), 0, 1))
    lines = wrong_by_values(op, CASES)
    assert [line.partition(",")[0] for line in lines] == ["optimized is wrong where x is 2^-24 times as large"] * bool(floor)


@pytest.mark.parametrize("stand_in", [-INF, -1000.0])
def test_values_for_which_a_baseline_of_torch_is_wrong_as_well_are_not_named(stand_in: float) -> None:
    op = _op(partial(_softmax, -INF), partial(_softmax, -1000.0))
    op = replace(op, variants=(Variant("baseline", partial(_softmax, stand_in)), *op.variants))
    assert bool(wrong_by_values(op, CASES)) == (stand_in == -INF)
