"""Find kernels that take a constant for infinity: they are wrong where an input is far from 0."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from mistaken_ops import CASES, values
from test_pairs import op_with

from kerneltune.checking.jobs import compare_job, run_jobs
from kerneltune.checking.shifts import wrong_far_from_zero
from kerneltune.kernel_lib.agreement import close
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
    (line,) = wrong_far_from_zero(op, CASES)
    assert line.startswith(f"optimized is wrong where {where}, in case odd: y: ")
    ((_job, outcomes),) = run_jobs([compare_job(Task(op, CASES[1], op.variants[0]), CASES)])
    assert f"scaled: {line}" in [outcome.reason for outcome in outcomes]
    assert wrong_far_from_zero(_op(partial(function, sign * INF), partial(function, sign * INF), names), CASES) == []


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
    assert wrong_far_from_zero(op, CASES) == []
