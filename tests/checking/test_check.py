"""Test the check of a run: poisoned memory, lines of `compare`, causes of wrong values."""

import re
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from planted_kernels import op_with
from subprocesses import environment
from warm_python import python

from kerneltune.checking import check
from kerneltune.kernel_lib.agreement import all_same_bits, same_bits
from kerneltune.kernel_lib.check_values import vary_rows
from kerneltune.spec import Case, Inputs, Outputs, Variant
from kerneltune.task import Outcome

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

POISONED = """
import sys
import torch
from kerneltune.checking.check import poisoned_memory

plain = torch.get_deterministic_debug_mode()
imported = set(sys.modules)
with poisoned_memory():
    assert torch.empty(1024).isnan().all()
    assert (torch.empty(1024, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
print(torch.get_deterministic_debug_mode() == plain, sorted(set(sys.modules) - imported))
"""


def test_poisoned_memory_imports_no_module() -> None:
    """torch.use_deterministic_algorithms imports 900 modules, seconds in every process that checks."""
    done = subprocess.run([python(), "-c", POISONED], capture_output=True, text=True, env=environment(), timeout=800)
    assert done.stdout == "True []\n", done.stderr[-2000:]


def test_code_compiled_under_poisoned_memory_is_compiled_anew_for_timing() -> None:
    """Under the switch that poisons memory, torch compiles other code; without it, compiles again."""
    modes = []

    def backend(graph: Any, _inputs: Any) -> Any:
        modes.append(torch.get_deterministic_debug_mode())
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=backend)
    with check.poisoned_memory():
        double(torch.ones(8))
    mode = torch.get_deterministic_debug_mode()  # 0, but for tests on a GPU, which poison all memory
    torch.set_deterministic_debug_mode(0)
    try:
        double(torch.ones(8))
    finally:
        torch.set_deterministic_debug_mode(mode)
    assert modes == [1, 0]


def test_line_of_compare_that_repeats_another_output_is_left_out() -> None:
    lines = [
        "scale: 1 of 9 wrong, first at (5,): 0, expected 1", "q scale: 1 of 9 wrong, first at (5, 0): 0, expected 1",
        "k scale: 2 of 9 wrong, first at (5, 0): 0, expected 1", "q: 1 of 9 wrong, first at (5, 0): 0, expected 1",
    ]  # fmt: skip
    op = replace(op_with(""), compare=lambda *_: lines)
    case, (variant,) = Case("small", (("M", 2), ("N", 10)), "bfloat16"), op.variants
    assert check.Checker(op, case, DEVICE).run(variant, variant.default_config(case))[1] == [lines[0], *lines[2:]]


@pytest.mark.parametrize(
    ("mistake", "hint"),
    [
        ("cast", "90 may be a cast of NaN or of a value out of range"),
        ("unwritten", "127 may be an element that is never written: checks fill memory with it"),
        ("large row", "row 5 of x and row 5 of y: large values"),
        ("first row", ""),
        ("masked", ""),
        ("another view", ""),
        ("q: first at (77, 0): 1e+3.0", ""),
        ("q: first at (): -", ""),
    ],
)
def test_failure_explains_undefined_values_and_kinds_of_rows(mistake: str, hint: str) -> None:
    def run(inputs: Inputs, _config: None) -> Outputs:
        q = torch.empty(9, 16, dtype=torch.int8)
        if mistake != "unwritten":
            q.copy_(inputs["x"] > 0)
        if mistake == "cast":
            q[7] = 90
        if mistake in ("large row", "first row", "another view"):
            q[0 if mistake == "first row" else 5] -= 1
        return {"q": q}

    def compare(case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
        if mistake == "masked":
            return ["q: 1 of 144 wrong, first at (0, 1): -1e+37, expected 2"]
        if mistake == "another view":
            return ["q: 16 of 144 wrong, first at (5, 0): 7, expected 0"]
        if mistake.startswith("q: "):
            return [mistake]
        return all_same_bits(case, inputs, outputs, expected)

    variant = Variant("baseline", run)
    op = replace(
        op_with(""),
        inputs=lambda case, *, device, seed=0: {
            name: torch.empty(9, 16, device=device) if device == "meta" else vary_rows(torch.randn(9, 16)) for name in "xy"
        },
        reference=lambda inputs: {"q": (inputs["x"] > 0).to(torch.int8)},
        compare=compare,
        variants=(variant,),
    )
    (line,) = check.Checker(op, Case("small", (("M", 9), ("N", 16)), "float32"), "cpu").run(variant, None)[1]
    assert line.partition("; ")[2] == hint


@triton.jit
def _maximum_of_row(x_ptr, y_ptr, N, shift, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = x_ptr + tl.program_id(0) * N
    x = tl.load(row + at, at < N)
    tl.store(y_ptr + tl.program_id(0), tl.max(x) + shift)
    same = tl.load(row + at, at < N)
    tl.store(row + at, same, at < N)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="a GPU gives any value")
@pytest.mark.parametrize("shift", [0, 1])
def test_failure_names_loads_without_other_if_it_hangs_on_them(shift: int) -> None:
    def run(inputs: Inputs, _config: None) -> Outputs:
        y = torch.empty(len(inputs["x"]), dtype=torch.int32)
        _maximum_of_row[(len(y),)](inputs["x"], y, inputs["x"].shape[1], shift, 16)
        return {"y": y}

    op = replace(
        op_with(""), variants=(Variant("optimized", run),), reference=lambda inputs: {"y": inputs["x"].amax(1)},
        inputs=lambda case, *, device, seed=0: {"x": torch.full((case["M"], case["N"]), 7, dtype=torch.int32, device=device)},
    )  # fmt: skip
    lines = check.Checker(op, Case("small", (("M", 3), ("N", 9)), "int32"), "cpu").run(op.variants[0], None)[1]
    place = f"test_check.py:{_maximum_of_row.fn.__code__.co_firstlineno + 4}"
    named = f"right if loads under a mask without `other` give 0, {place}"
    assert [line for line in lines if "right if" in line] == [named] * (shift == 0), lines


@pytest.mark.parametrize(
    ("value", "dtype", "hint"),
    [
        (7e4, "float16", "torch.float16 holds at most 65504"),
        (7e4, "bfloat16", ""),
        (4e-7, "float16", "torch.float16 has steps of 6e-08 near 0: atol must allow them"),
        (1e-5, "float16", ""),
    ],
)
def test_failure_explains_what_an_output_of_16_bits_cannot_hold(value: float, dtype: str, hint: str) -> None:
    def inputs(_case: Case, *, device: str, seed: int = 0) -> Inputs:
        return {"x": torch.full((4, 8), value + seed * value / 8, device=device)}

    def run(given: Inputs, _config: None) -> Outputs:
        off = 1.0 if value > 1e-6 else 1.0 + 2e-8 / value
        y = (given["x"].double() * off).to(getattr(torch, dtype))
        y[0, 0] = y[0, 0] if hint else 2 * value
        return {"y": y}

    variant = Variant("baseline", run)
    op = replace(op_with(""), inputs=inputs, reference=lambda given: {"y": given["x"].clone()}, variants=(variant,))
    case = Case("small", (("M", 4), ("N", 8)), "float32")
    lines = check.Checker(op, case, "cpu").run(variant, None)[1]
    assert lines[0].partition("; ")[2] == hint, lines


@pytest.mark.parametrize("result", [True, None, [None], [False], [""], "wrong", 0])
def test_check_with_compare_that_returns_no_list_fails_with_its_name(result: object) -> None:
    op = replace(op_with(""), compare=lambda *_: result)
    case, (variant,) = Case("small", (("M", 2), ("N", 10)), "bfloat16"), op.variants
    (line,) = check.Checker(op, case, DEVICE).run(variant, variant.default_config(case))[1]
    assert re.fullmatch(
        rf"test_check\.py:\d+: compare: {re.escape(repr(result))}: expected a list of lines, empty where all is well", line
    )


def test_check_with_a_reference_without_outputs_fails_with_its_name() -> None:
    op = replace(op_with(""), reference=lambda _given: {}, compare=lambda *_: [])
    case, (variant,) = Case("small", (("M", 2), ("N", 10)), "bfloat16"), op.variants
    (line,) = check.Checker(op, case, DEVICE).run(variant, variant.default_config(case))[1]
    assert re.fullmatch(r"test_check\.py:\d+: reference: gives no output to compare with y, rows", line)


@pytest.mark.parametrize("field", ["inputs", "reference"])
def test_check_whose_second_inputs_raise_fails(field: str) -> None:
    """An error of inputs or reference fails the check; it must not end the whole sweep."""
    op = op_with("")

    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        if seed and field == "inputs":
            raise ValueError("only seed 0")
        return {**op.inputs(case, device=device, seed=seed), "seed": seed}

    def reference(values: Inputs) -> Outputs:
        if values["seed"]:
            raise ValueError("only seed 0")
        return op.reference(values)

    case, (variant,) = Case("small", (("M", 2), ("N", 10)), "bfloat16"), op.variants
    checker = check.Checker(replace(op, inputs=inputs, reference=reference), case, DEVICE)
    outcome = checker.check(variant, variant.default_config(case), runs=2)
    assert outcome.status == "failed"
    line = rf"run 2: test_check\.py:\d+: {field}: ValueError: only seed 0, for double M=2 N=10 bfloat16 none"
    assert re.fullmatch(line, outcome.reason)


def test_failure_of_host_code_is_named_by_its_statement() -> None:
    def run(_inputs: Inputs, _config: Any) -> Outputs:
        return {"y": torch.zeros(2).view(3)}

    op = op_with("")
    op = replace(op, module=__name__, variants=(replace(op.variants[0], run=run),))
    case = Case("a", (("M", 4), ("N", 8)), "float32")
    (line,) = check.Checker(op, case, DEVICE).run(op.variants[0], op.variants[0].default_config(case))[1]
    number = run.__code__.co_firstlineno + 1
    assert line == f"the launch failed: test_check.py:{number}: RuntimeError: shape '[3]' is invalid for input of size 2"


def test_check_names_an_input_that_torch_changes_in_place_even_if_no_value_changes() -> None:
    op = op_with("")

    def clamped(inputs: Inputs, config: Any) -> Outputs:
        inputs["x"].clamp_(-1e30, 1e30)
        return op.variants[0].run(inputs, config)

    variant = replace(op.variants[0], run=clamped)
    checker = check.Checker(op, Case("small", (("M", 7), ("N", 100)), "bfloat16"), DEVICE)
    assert checker.run(variant, variant.default_config(checker.case))[1] == ["inputs: x was overwritten, and is no output"]


@pytest.mark.parametrize("device", DEVICES)
def test_large_inputs_that_a_variant_updates_are_restored_before_each_run(device: str) -> None:
    def inputs(_case: Case, *, device: str, seed: int = 0) -> Inputs:
        return {"x": torch.full((5 << 20,), 1.0 + seed, device=device), "of": torch.ones(5 << 20, device=device)}

    def added(values: Inputs, _config: Any) -> Outputs:
        values["x"].add_(values["of"])
        return {"x": values["x"]}

    op = replace(
        op_with(""),
        inputs=inputs,
        reference=lambda values: {"x": values["x"] + 1},
        compare=lambda _case, _inputs, outputs, expected: same_bits("x", outputs["x"], expected["x"]),
    )
    variant = replace(op.variants[0], run=added)
    checker = check.Checker(op, Case("large", (("M", 1), ("N", 1)), "bfloat16"), device)
    assert [checker.check(variant, None, runs=2) for _ in range(3)] == [Outcome("checked")] * 3


def test_reference_that_mixes_devices_makes_its_tensors_on_the_device() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(3)

    assert check.on_device("meta", doubled, torch.ones(3, device="meta")).is_meta
    with pytest.raises(RuntimeError, match="broadcast"):
        check.on_device("meta", doubled, torch.ones(2, device="meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("of", ["reference", "compare"])
def test_check_passes_if_a_function_of_the_operator_makes_tensors_without_their_device(of: str) -> None:
    op, case = op_with(""), Case("small", (("M", 7), ("N", 100)), "bfloat16")

    def added(values: Outputs) -> Outputs:
        return {name: value + torch.zeros(value.shape, dtype=value.dtype) for name, value in values.items()}

    planted = {
        "reference": replace(op, reference=lambda inputs: added(op.reference(inputs))),
        "compare": replace(op, compare=lambda of, inputs, outputs, expected: op.compare(of, inputs, added(outputs), expected)),
    }[of]
    (variant,) = planted.variants
    assert check.Checker(planted, case, "cuda").check(variant, variant.default_config(case)) == Outcome("checked")


@pytest.mark.parametrize(
    ("factor", "kind", "is_named"), [(1.0, torch.float32, True), (1.01, torch.float32, False), (1.0, torch.float64, False)]
)
def test_check_names_a_division_as_a_cause_if_exact_results_agree(factor: float, kind: torch.dtype, is_named: bool) -> None:
    def thirds(inputs: Inputs) -> Outputs:
        return {"y": inputs["x"].float().nan_to_num(0.0, 1.0, -1.0) / 3.0}

    def divided(inputs: Inputs, _config: Any) -> Outputs:
        y = torch.empty_like(inputs["x"], dtype=torch.float32)
        _thirds[(y.numel(),)](inputs["x"].float().nan_to_num(0.0, 1.0, -1.0).contiguous(), y, factor)
        return {"y": y.to(kind)}

    op = replace(op_with(""), reference=thirds, compare=lambda _c, _i, got, want: same_bits("y", got["y"], want["y"]))
    checker = check.Checker(op, Case("small", (("M", 7), ("N", 10)), "bfloat16"), DEVICE)
    _, (line, *causes) = checker.run(replace(op.variants[0], run=divided), None)
    assert (line.startswith("y: "), bool(causes)) == (True, is_named)


def test_check_names_a_reference_that_gives_integers_and_then_no_division() -> None:
    def divided(inputs: Inputs, _config: Any) -> Outputs:
        y = torch.empty_like(inputs["x"], dtype=torch.float32)
        _thirds[(y.numel(),)](inputs["x"].float().nan_to_num(0.0, 1.0, -1.0).contiguous(), y, 1.0)
        return {"y": y[:2] if inputs["x"].shape[0] > 2 else y}

    def integers(inputs: Inputs) -> Outputs:
        return {"y": torch.ones_like(inputs["x"], dtype=torch.int64)}

    op = replace(op_with(""), reference=integers, compare=lambda *_: ["y: wrong"])
    checker = check.Checker(op, Case("small", (("M", 7), ("N", 10)), "bfloat16"), DEVICE)
    _, lines = checker.run(replace(op.variants[0], run=divided), None)
    assert lines == ["y: wrong", "y is torch.float32, the reference gives torch.int64"]


@pytest.mark.parametrize(("factor", "is_named"), [(1.0, True), (1.01, False)])
def test_check_names_a_division_of_a_kernel_in_place_whose_codes_differ(factor: float, is_named: bool) -> None:
    def inputs(case: Case, **named: Any) -> Inputs:
        given = op_with("").inputs(case, **named)
        return {"x": given["x"].float().nan_to_num(0.0, 1.0, -1.0).contiguous(), "y": torch.zeros(given["x"].numel())}

    def codes(y: torch.Tensor) -> Outputs:
        return {"y": y, "q": y.view(torch.int32) * 1000}

    def divided(given: Inputs, _config: Any) -> Outputs:
        _thirds[(given["y"].numel(),)](given["x"], given["y"], factor)
        return codes(given["y"])

    op = replace(
        op_with(""),
        inputs=inputs,
        reference=lambda given: codes(given["x"].flatten() / torch.tensor(3.0)),
        compare=lambda _c, _i, got, want: [line for name in want for line in same_bits(name, got[name], want[name])],
    )
    checker = check.Checker(op, Case("small", (("M", 7), ("N", 10)), "bfloat16"), "cpu")
    _, (y, q, *causes) = checker.run(replace(op.variants[0], run=divided), None)
    assert (y[:3], q[:3], [cause.partition(",")[0] for cause in causes]) == (
        "y: ", "q: ", ["`/` of fp32 is not exact on a GPU"] * is_named,
    )  # fmt: skip


@triton.jit
def _thirds(x_ptr, y_ptr, factor):
    at = tl.program_id(0)
    tl.store(y_ptr + at, tl.load(x_ptr + at) / 3.0 * factor)
