"""Pairs of config and check case: the choice of pairs, and mistakes that only a pair shows."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import case_of

from kerneltune.checking import covering, pairs
from kerneltune.checking.check import Checker
from kerneltune.kernel_lib.agreement import close
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant
from kerneltune.task import Outcome

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="pairs are checked in Triton's interpreter")


CASES = [case_of("one", 1, 1), case_of("odd", 7, 33), case_of("wide", 4, 2048), case_of("no-rows", 0, 64)]


_WRONG_WHERE = (
    "wrong, without an error, where {}: use their stride in the kernel, or raise ValueError "
    "or call .contiguous() in the host function"
)


def cost_of_pair(_config: object, case: Case) -> float:
    return 1.0 + case["M"] * case["N"]


@dataclass(frozen=True, slots=True)
class Rows:
    """rows: rows per program; warps."""

    rows: int
    warps: int


@triton.jit
def _scaled_rows(x_ptr, y_ptr, M, N, MISTAKE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * (1 if MISTAKE == "pid times 1" else ROWS) + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = ((tl.program_id(1) if MISTAKE == "mask of the wrong program id" else row[:, None]) < M) & (col[None, :] < N)
    if MISTAKE == "no row mask":
        mask = (row[:, None] <= M) & (col[None, :] < N)
    x = tl.load(x_ptr + row[:, None] * N + col[None, :], mask, other=0.0)
    top = tl.max(tl.abs(x), 1)[:, None]
    if MISTAKE == "maximum of the whole tile":
        top = tl.max(tl.max(tl.abs(x), 1), 0)
    tl.store(y_ptr + row[:, None] * N + col[None, :], x / top, mask)


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    shape = case["M"], case["N"]
    if device == "meta":
        return {"x": torch.empty(shape, device=device)}
    return {"x": torch.randn(shape, generator=torch.Generator().manual_seed(seed))}


def _run(mistake: str, inputs: Inputs, config: Rows) -> Outputs:
    x = inputs["x"]
    y = torch.empty_like(x)
    M, N = x.shape
    if x.numel():
        block = triton.next_power_of_2(N)
        _scaled_rows[(triton.cdiv(M, config.rows),)](
            x, y, M, N, MISTAKE=mistake, ROWS=config.rows, BLOCK=block, num_warps=config.warps
        )  # fmt: skip
    return {"y": y}


def _reference(inputs: Inputs) -> Outputs:
    x = inputs["x"]
    return {"y": x / x.abs().amax(1, keepdim=True) if x.numel() else x}


def op_with(mistake: str) -> Op:
    variant = Variant(
        "optimized", partial(_run, mistake), Rows, lambda _case: {"rows": (1, 2, 4), "warps": (1, 2, 4, 8)},
        default=lambda _case: Rows(1, 4),
    )  # fmt: skip
    return Op(
        name="scaled", axes=("M", "N"), dtypes=("float32",), inputs=_inputs, reference=_reference,
        compare=lambda _case, _inputs, outputs, expected: close("y", outputs["y"], expected["y"], 1e-6, 0.0),
        traffic=lambda case: Traffic(4 * case["M"] * case["N"], 4 * case["M"] * case["N"]), variants=(variant,), module=__name__,
    )  # fmt: skip


@interpreted
@pytest.mark.parametrize("mistake", ["pid times 1", "mask of the wrong program id", "no row mask", "maximum of the whole tile"])
def test_check_of_pairs_finds_a_mistake_that_the_first_case_and_the_default_hide(mistake: str) -> None:
    op = op_with(mistake)
    *failed, coverage = pairs.check_pairs(op, op.variants[0], CASES)
    assert [outcome.status for outcome in failed] == ["failed"] * 3
    assert all(outcome.config.rows > 1 and outcome.case in CASES and outcome.reason for outcome in failed), failed
    assert coverage.reason.endswith(" pairs; stopped after failures")


@interpreted
def test_check_of_pairs_passes_a_right_kernel_and_counts_pairs() -> None:
    op = op_with("")
    assert pairs.check_pairs(op, op.variants[0], CASES) == [
        Outcome("checked", "scaled optimized: 12 configs on 4 cases, 19 of 48 pairs")
    ]


@interpreted
def test_check_of_pairs_with_a_failing_reference_names_its_error() -> None:
    def fail(_given: Inputs) -> Outputs:
        raise RuntimeError("not written yet")

    op = replace(op_with(""), reference=fail)
    (coverage,) = pairs.check_pairs(op, op.variants[0], CASES)
    assert coverage.reason.endswith("; inputs or reference of 4 cases fail")


def test_check_of_pairs_without_a_supported_case_says_that_nothing_is_checked() -> None:
    op = op_with("")
    none = replace(op.variants[0], unsupported=lambda _case: "no")
    (coverage,) = pairs.check_pairs(op, none, CASES)
    assert coverage == Outcome("noted", "scaled optimized: not checked: no case is supported and fits the memory")


KNOBLESS = Variant("knobless", lambda inputs, _config: _reference(inputs))


def test_check_of_pairs_finds_a_result_kept_per_size() -> None:
    """Every case ran once, so that no size came twice."""
    kept: dict[torch.Size, Outputs] = {}

    def run(inputs: Inputs, _config: None) -> Outputs:
        return kept.setdefault(inputs["x"].shape, _reference(inputs))

    op = op_with("")
    failed = pairs.check_pairs(op, replace(KNOBLESS, run=run), CASES[1:])
    assert [(outcome.case, outcome.reason[:6]) for outcome in failed] == [(CASES[1], "run 2:"), (CASES[2], "run 2:")]
    assert pairs.check_pairs(op, KNOBLESS, CASES) == []


def test_check_of_pairs_finds_a_result_kept_for_a_case_with_one_config() -> None:
    kept: dict[torch.Size, Outputs] = {}

    def run(inputs: Inputs, _config: Rows) -> Outputs:
        x = inputs["x"]
        return kept.setdefault(x.shape, _reference(inputs)) if x.shape[0] == 7 else _reference(inputs)

    op = op_with("")
    space = {7: {"rows": (1,), "warps": (4,)}}
    variant = replace(op.variants[0], run=run, space=lambda case: space.get(case["M"], {"rows": (1, 2), "warps": (4,)}))
    failed, coverage = pairs.check_pairs(op, variant, CASES)
    assert (failed.case, failed.config, failed.reason[:6]) == (CASES[1], Rows(1, 4), "run 2:")
    assert coverage.reason.endswith(" pairs")


@interpreted
def test_check_of_pairs_finds_a_buffer_kept_per_knob() -> None:
    kept: dict[torch.Size, torch.Tensor] = {}

    def run(inputs: Inputs, config: Rows) -> Outputs:
        x = inputs["x"]
        if config.rows == 4:
            x = kept.setdefault(x.shape, x)
        return _run("", {"x": x}, config)

    op = op_with("")
    failed, _coverage = pairs.check_pairs(op, replace(op.variants[0], run=run), CASES[2:3])
    assert (failed.config.rows, failed.reason[:6]) == (4, "run 2:")


@triton.jit
def _rows_by_maximum(x_ptr, y_ptr, N, stride_x, stride_y, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + col, col < N, other=0.0)
    tl.store(y_ptr + row * stride_y + col, x / tl.max(tl.abs(x), 0), col < N)


def _strided(mistake: str, inputs: Inputs, _config: None) -> Outputs:
    x = inputs["x"]
    y = torch.empty_like(x) if mistake in ("empty_like", "dense") else torch.empty(x.shape)
    if mistake == "refused" and not x.is_contiguous():
        raise ValueError("x must be contiguous")
    if mistake == "empty_like" and x.stride(0) == 1:
        x = x.contiguous()
    elif x.stride(1) != 1 and mistake != "apart":
        raise ValueError("elements of a row must be adjacent")
    stride = x.shape[1] if mistake == "refused" else x.stride(0)
    if mistake == "columns for a stride":
        stride = x.shape[1]
    if mistake == "in place if contiguous":
        y, stride = x.contiguous(), x.shape[1]
    if x.numel():
        strides = (y.stride(0), stride) if mistake == "exchanged" else (stride, x.shape[1])
        _rows_by_maximum[(len(x),)](
            y if mistake.startswith("in") else x, y, x.shape[1], *strides, BLOCK=triton.next_power_of_2(x.shape[1])
        )
    return {"y": y}


@interpreted
@pytest.mark.parametrize("mistake", ["exchanged", "in place if contiguous", "", "refused", "columns for a stride"])
def test_check_of_pairs_finds_wrong_strides_of_rows_with_gaps(mistake: str) -> None:
    op, variant = op_with(""), replace(KNOBLESS, run=partial(_strided, mistake))
    reasons = [outcome.reason for outcome in pairs.check_pairs(op, variant, CASES) if outcome.status == "failed"]
    assert all(reason.startswith("run 2: with gaps between rows of x, which host code accepts: ") for reason in reasons)
    assert bool(reasons) == (mistake not in ("", "refused"))
    assert all("are NaN, as in the gaps" in reason for reason in reasons if mistake == "columns for a stride")


@interpreted
@pytest.mark.parametrize("is_copied", [True, False])
def test_check_of_pairs_finds_work_in_place_on_a_contiguous_copy_of_an_input(is_copied: bool) -> None:
    """A copy of another view of the input says nothing of the input."""

    def run(inputs: Inputs, _config: None) -> Outputs:
        x = inputs["x"].contiguous() if is_copied else inputs["x"]
        inputs["x"].t().contiguous()
        y = torch.empty(x.shape)
        if x.numel():
            _rows_by_maximum[(len(x),)](x, y, *[x.shape[1]] * 3, BLOCK=triton.next_power_of_2(x.shape[1]))
        return {"y": x.copy_(y)}

    found = pairs.check_pairs(op_with(""), replace(KNOBLESS, run=run), CASES)
    start = "run 2: with gaps between rows of x, which host code accepts: outputs: y is written over an input in case "
    assert all(outcome.reason.startswith(start) for outcome in found)
    assert bool(found) == is_copied


@triton.jit
def _copied_heads(x_ptr, y_ptr, N, stride_m, stride_h, H, BLOCK: tl.constexpr):
    row, head, at = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_m + head * stride_h + at, at < N, other=0.0)
    tl.store(y_ptr + (row * H + head) * N + at, x, at < N)


def _heads(mistake: str, given: Inputs, _config: None) -> Outputs:
    x = given["x"]
    M, H, N = shape = x.shape
    if x.stride(2) != 1 or ("heads" in mistake and x.stride(1) != N):
        raise ValueError("x: heads must be contiguous")
    if "flat" in mistake:
        x = x.reshape(M * H, 1, N)
    m, h = x.stride(0), x.stride(1)
    wrong = {"rows": (H * h, h), "columns": (m, N), "columns of flat": (N, N), "heads": (H * N, N)}
    stride_m, stride_h = wrong.get(mistake, (m, h))
    y = torch.empty(shape)
    _copied_heads[x.shape[:2]](x, y, N, stride_m, stride_h, x.shape[1], BLOCK=triton.next_power_of_2(N))
    return {"y": y}


@interpreted
@pytest.mark.parametrize("is_first_alone", [False, True])
@pytest.mark.parametrize("mistake", ["", "rows", "columns", "flat", "columns of flat", "right heads", "heads"])
def test_check_of_pairs_finds_wrong_strides_of_matrices_with_gaps_that_host_code_accepts(
    mistake: str, is_first_alone: bool
) -> None:
    """A stride between matrices as a multiple of the stride between rows shows where all axes have gaps.

    Gaps at all axes hide a mistake behind `reshape`, which copies, or are refused.
    """

    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        x = torch.empty(1 if is_first_alone else case["M"], 3, case["N"], device=device)
        return {"x": x if device == "meta" else x.normal_(generator=torch.Generator().manual_seed(seed))}

    same = lambda _case, _given, outputs, expected: [] if torch.equal(outputs["y"], expected["y"]) else ["y: wrong"]  # noqa: E731
    op = replace(op_with(""), inputs=inputs, reference=lambda given: {"y": given["x"].clone()}, compare=same)
    cases = [case for case in CASES if case["M"] > 1 and case["N"] > 1]
    found = pairs.check_pairs(op, replace(KNOBLESS, run=partial(_heads, mistake)), cases)
    line = "run 2: with gaps between rows of x, which host code accepts: y: wrong"
    is_found = "columns" in mistake or (mistake in ("rows", "heads") and not is_first_alone)
    assert [outcome.reason for outcome in found if outcome.status == "failed"] == [line] * (is_found * len(cases))


@interpreted
@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        ("", ""),
        ("refused", ""),
        ("dense", ""),
        ("apart", "elements within a row of x lie apart"),
        ("empty_like", "x is a transpose, as torch.empty_like of it is"),
    ],
)
def test_input_whose_elements_may_not_lie_apart_fails_unless_host_code_refuses_it(mistake: str, where: str) -> None:
    op, variant = op_with(""), replace(KNOBLESS, run=partial(_strided, mistake))
    wrong = pairs.check_pairs(op, variant, CASES)
    assert wrong == ([Outcome("failed", _WRONG_WHERE.format(where), None, CASES[1])] if where else [])


@interpreted
def test_layout_that_a_shipped_operator_takes_wrong_is_a_line_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Op, "kind", "shipped")
    variant = replace(KNOBLESS, run=partial(_strided, "apart"))
    named = "scaled knobless: a known limit, no failure: wrong, without an error, where elements within a row of x lie apart"
    assert pairs.check_pairs(op_with(""), variant, CASES) == [Outcome("noted", named)]


@interpreted
@pytest.mark.parametrize(("asked", "is_named"), [("x", True), ("", False), ("both", False)])
def test_input_that_host_code_forgets_to_ask_for_its_strides_is_a_line(asked: str, is_named: bool) -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        return {"x": _inputs(case, device=device, seed=seed)["x"], "y": _inputs(case, device=device, seed=seed + 9)["x"]}

    def run(given: Inputs, _config: None) -> Outputs:
        for name in {"x": ["x"], "both": ["x", "y"]}.get(asked, []):
            if not given[name].is_contiguous():
                raise ValueError("contiguous")
        y = torch.empty(given["y"].shape)
        if y.numel():
            columns = y.shape[1]
            _rows_by_maximum[(len(y),)](given["y"], y, columns, columns, columns, BLOCK=triton.next_power_of_2(columns))
        return {"y": y}

    op = replace(op_with(""), inputs=inputs, reference=lambda given: _reference({"x": given["y"]}))
    line = "scaled knobless: wrong, without an error, with gaps between rows of y: host code asks only x for strides"
    named = [Outcome("noted", line)] if is_named else []
    assert pairs.check_pairs(op, replace(KNOBLESS, run=run), CASES) == named


def test_each_input_whose_elements_may_not_lie_apart_fails_in_a_case_that_has_it() -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        given = _inputs(case, device=device, seed=seed)
        return {**given, "more": None if case.name == "odd" else given["x"] + 1.0}

    def run(given: Inputs, _config: None) -> Outputs:
        x, more = given["x"], given["more"]
        return {"y": x if more is None else x + more.as_strided(x.shape, (more.stride(0), 1))}

    reference = lambda given: {"y": given["x"] + (0.0 if given["more"] is None else given["more"])}  # noqa: E731
    op = replace(op_with(""), inputs=inputs, reference=reference)
    found = pairs.check_pairs(op, replace(KNOBLESS, run=run), CASES)
    assert [outcome.reason for outcome in found] == [_WRONG_WHERE.format("elements within a row of more lie apart")]


@interpreted
def test_check_of_pairs_begins_with_few_programs_if_time_is_short() -> None:
    programs: list[int] = []

    def run(inputs: Inputs, config: Rows) -> Outputs:
        if not inputs["x"].is_meta:
            programs.append(-(-inputs["x"].shape[0] // config.rows))
        return _run("", inputs, config)

    tall, op = case_of("tall", 64, 16), op_with("")
    assert len(pairs.check_pairs(op, replace(op.variants[0], run=run), [tall])) == 1
    assert programs[0] == 16
    assert programs.index(64) >= 6, programs


def test_check_of_pairs_finds_an_output_over_an_input_of_some_dtypes() -> None:
    def run(inputs: Inputs, _config: None) -> Outputs:
        y = inputs["x"].to(torch.float32)
        return {"y": y.copy_(_reference(inputs)["y"])}

    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        return {"x": _inputs(case, device=device, seed=seed)["x"].to(getattr(torch, case.dtype))}

    op = replace(op_with(""), inputs=inputs, reference=lambda inputs: _reference({"x": inputs["x"].to(torch.float32)}))
    op = replace(op, compare=lambda *_: [])
    cases = [CASES[1], replace(CASES[1], dtype="float16")]
    (failed,) = pairs.check_pairs(op, replace(KNOBLESS, run=run), cases)
    assert failed.case == cases[1]
    assert failed.reason == "outputs: y is written over an input in case odd float32 none, and not in case odd float16 none"
    modes = [CASES[1], replace(cases[1], quant="fp8")]
    assert pairs.check_pairs(op, replace(KNOBLESS, run=lambda inputs, _: run(inputs, None)), modes) == []


def test_coverage_counts_cases_that_did_not_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "COVERING_S", 0.0)
    (coverage,) = pairs.check_pairs(op_with(""), KNOBLESS, CASES)
    assert coverage.reason.endswith("time limit before 4 cases ran twice")


@interpreted
def test_coverage_at_the_time_limit_names_classes_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "COVERING_S", 0.0)
    op = op_with("")
    (coverage,) = pairs.check_pairs(op, op.variants[0], CASES)
    assert coverage.reason == (
        "scaled optimized: 1 config on 4 cases, 4 of 48 pairs; time limit before every knob value met: "
        "ragged M (5 of 7 left), ragged N (5 of 7 left), wide (5 of 7 left), tiny (5 of 7 left), first (5 of 7 left), "
        "values of other knobs (11 of 12 left)"
    )


def test_covering_pairs_every_knob_value_with_every_class_in_at_most_17_pairs() -> None:
    variant = op_with("").variants[0]
    configs = covering.configs_by_case(variant, CASES)
    chosen = list(covering.covering(configs, cost_of_pair))
    done = {*chosen, *((listed[0], case) for case, listed in configs.items())}
    assert list(covering.uncovered(configs, done)) == []
    assert len(chosen) == len(set(chosen)) <= 17
    assert len({config for config, case in done if case["M"] * case["N"] > 1}) == 12
    assert not any(case["M"] == 0 for _config, case in chosen)
    assert list(covering.uncovered(configs, done - {chosen[-1]}))


def test_covering_pairs_values_of_two_knobs_in_a_case_of_several_tiles() -> None:
    odd, row = case_of("odd", 7, 33), case_of("row", 1, 64)
    configs = {case: [Rows(rows, warps) for rows in (1, 2, 4) for warps in (1, 2, 4)] for case in (odd, row)}
    chosen = list(covering.covering(configs, cost_of_pair))
    assert {config for config, case in chosen if case is odd} == set(configs[odd][1:])
    assert list(covering.uncovered(configs, {*chosen, *((configs[case][0], case) for case in configs)})) == []


def test_covering_pairs_values_of_two_knobs_where_an_axis_is_longer_than_both() -> None:
    odd, tall = case_of("odd", 41, 57), case_of("tall", 70, 40)
    configs = {case: [Rows(rows, warps) for rows in (16, 64) for warps in (1, 2, 4)] for case in (odd, tall)}
    chosen = list(covering.covering(configs, cost_of_pair))
    assert {config for config, case in chosen if case is tall} >= set(configs[odd][3:])
    assert list(covering.uncovered(configs, {*chosen, *((configs[case][0], case) for case in configs)})) == []


def test_covering_pairs_a_knob_value_with_an_aligned_size_below_it_and_with_an_aligned_size_that_it_does_not_divide() -> None:
    short, even, uneven = case_of("short", 7, 64), case_of("even", 7, 256), case_of("uneven", 7, 192)
    cases = [case_of("one", 1, 1), case_of("odd", 7, 200), short, even, uneven]
    configs = {case: [Rows(rows, 1) for rows in (32, 64, 128)] for case in cases}
    done = {*covering.covering(configs, cost_of_pair), *((listed[0], case) for case, listed in configs.items())}
    assert {(Rows(128, 1), short), (Rows(128, 1), uneven)} <= done
    assert list(covering.uncovered(configs, done)) == []
    left = ["aligned N below a knob (1 of 1 left)", "aligned N not divided by a knob (1 of 1 left)"]
    assert list(covering.uncovered(configs, done - {(Rows(128, 1), short), (Rows(128, 1), uneven)})) == left


def test_classes_name_ragged_axes_wide_tiny_and_first_cases() -> None:
    names = {name: [case.name for case in members] for name, members in covering.classes(CASES).items()}
    assert names == {"ragged M": ["odd", "wide"], "ragged N": ["odd"], "wide": ["wide"], "tiny": ["one"], "first": ["one"]}
    assert covering.classes([*CASES, replace(CASES[1], dtype="float16")])["dtype=float16"] == [replace(CASES[1], dtype="float16")]


def test_covering_has_no_pairs_of_unsupported_cases_or_variants_without_knobs() -> None:
    variant = op_with("").variants[0]
    ragged = replace(variant, unsupported=lambda case: "ragged" if case["N"] % 16 else None)
    assert set(covering.configs_by_case(ragged, CASES)) == {CASES[2], CASES[3]}
    configs = covering.configs_by_case(Variant("eager", lambda inputs, _: inputs), CASES)
    assert list(covering.covering(configs, cost_of_pair)) == []


@interpreted
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_check_finds_an_output_of_another_type_that_is_no_narrower(kind: torch.dtype) -> None:
    def reference(inputs: Inputs) -> Outputs:
        return {"y": op_with("").reference(inputs)["y"].bfloat16()}

    def run(inputs: Inputs, config: Rows) -> Outputs:
        return {"y": _run("", inputs, config)["y"].to(kind)}

    def agree(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
        return close("y", outputs["y"].float(), expected["y"].float(), 1e-2, 1e-2)

    op = replace(op_with(""), compare=agree, reference=reference)
    variant = replace(op.variants[0], run=run)
    errors = Checker(op, CASES[0], "cpu").run(variant, variant.default_config(CASES[0]))[1]
    wrong = [f"y: {kind}, expected torch.bfloat16 as of the reference"]
    assert errors == ([] if kind == torch.bfloat16 else wrong)


@interpreted
@pytest.mark.parametrize("mistake", ["", "other type of a config", "wider than the reference"])
def test_check_of_pairs_finds_an_output_of_another_type(mistake: str) -> None:
    def run(inputs: Inputs, config: Rows) -> Outputs:
        y = _run("", inputs, config)["y"]
        if mistake == "other type of a config" and config.rows == 4:
            y = y.half()
        return {"y": y.double() if mistake == "wider than the reference" else y}

    op = op_with("")
    op = replace(op, compare=lambda _case, _inputs, outputs, expected: close("y", outputs["y"], expected["y"], 1e-2, 1e-3))
    *failed, _coverage = pairs.check_pairs(op, replace(op.variants[0], run=run), CASES)
    text = "with another config or in case" if mistake == "other type of a config" else "y: torch.float64, expected torch.float32"
    assert [text in outcome.reason for outcome in failed] == [True] * (3 if mistake else 0), failed
