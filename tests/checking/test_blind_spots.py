"""Name types, modes and options that `inputs` ignores, and inputs that are the same in all check cases."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from mistaken_ops import CASES, Knobs, values
from test_pairs import op_with

from kerneltune.checking.blind_spots import blind_spots
from kerneltune.checking.jobs import compare_job, run_jobs
from kerneltune.kernel_lib.check_values import vary_rows
from kerneltune.spec import Case, Inputs, Op, Variant
from kerneltune.task import Task


def biased(
    bias: Any = None, is_option_used: bool = True, is_dtype_used: bool = True, is_ignored: bool = False, factor: Any = 2.0
) -> Op:
    """Return y = factor * x + bias, whose bias is drawn unless it is given, and which has an option and two types."""

    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        dtype = getattr(torch, case.dtype) if is_dtype_used else torch.float32
        drawn = values(seed + 7, device, case["N"])
        given = drawn if bias is None else torch.full_like(drawn, bias, dtype=torch.int64 if type(bias) is int else torch.float32)
        x = values(seed, device, case["M"], case["N"]).to(dtype)
        return {
            "x": x,
            "bias": given,
            "act": case.option("act") if is_option_used else "none",
            "unused": torch.zeros(4),
            "factor": factor,
        }

    def reference(given: Inputs) -> Inputs:
        y = (given["factor"] if len(given["x"]) > 1 else 1) * given["x"].float() + given["bias"]
        return {"y": y if is_ignored or given["act"] == "none" else -y}

    same = lambda _case, _given, outputs, expected: [] if torch.equal(outputs["y"], expected["y"]) else ["y: wrong"]  # noqa: E731
    return replace(
        op_with(""), inputs=inputs, reference=reference, compare=same, options={"act": ("none", "silu")},
        dtypes=("float32", "bfloat16"), variants=(Variant("optimized", lambda given, _config: reference(given)),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("op", "texts"),
    [
        (biased(), []),
        (biased(bias=0.0), ["input bias is 0 in all check cases"]),
        (biased(bias=1), ["input bias is 1 in all check cases"]),
        (biased(bias=None, factor=1.0), ["input factor is 1.0 in all check cases"]),
        (biased(bias=None, factor=False), ["input factor is False in all check cases"]),
        (biased(bias=None, factor=0.5), []),
        (biased(is_option_used=False), ["inputs are equal for every act"]),
        (biased(is_ignored=True), ["results are equal for every act"]),
        (biased(is_dtype_used=False), ["inputs are equal for every dtype"]),
    ],
)
def test_values_that_no_check_tells_apart_are_named(op: Op, texts: list[str]) -> None:
    cases = [replace(case, options=(("act", act),)) for case in CASES for act in ("none", "silu")]
    lines = [f"{text}: a kernel that ignores it passes" for text in texts]
    assert blind_spots(op, op.variants[0], cases) == lines
    ((_job, outcomes),) = run_jobs([compare_job(Task(op, cases[0], op.variants[0]), cases)])
    assert [(it.status, it.reason) for it in outcomes] == [("noted", f"scaled: {line}") for line in lines]


@triton.jit
def _doubled(x_ptr, y_ptr, N, NUM_PROGRAMS: tl.constexpr):
    for at in range(tl.program_id(0), N, tl.num_programs(0)):
        tl.store(y_ptr + at, 2 * tl.load(x_ptr + at))


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="launches are read in Triton's interpreter")
@pytest.mark.parametrize(("way", "is_named"), [("grid", False), ("constexpr", False), ("nothing", True)])
def test_option_of_which_the_results_are_independent_is_named_unless_launches_depend_on_it(way: str, is_named: bool) -> None:
    def run(given: Inputs, _config: None) -> Inputs:
        y, num_programs = torch.empty_like(given["x"]), given["programs"]
        _doubled[(num_programs if way == "grid" else 2,)](given["x"], y, y.numel(), num_programs if way == "constexpr" else 2)
        return {"y": y}

    op = replace(
        op_with(""), options={"programs": (1, 3)}, reference=lambda it: {"y": 2 * it["x"]},
        variants=(Variant("baseline", lambda given, _config: {"y": 2 * given["x"]}), Variant("optimized", run)),
        inputs=lambda case, *, device, seed=0: {**drawn(case, seed, "drawn"), "programs": case.option("programs")},
    )  # fmt: skip
    cases = [replace(case, options=(("programs", number),)) for case in CASES for number in (1, 3)]
    line = "results are equal for every programs: a kernel that ignores it passes"
    assert [it for it in blind_spots(op, op.variants[0], cases) if "every" in it] == [line] * is_named


def drawn(case: Case, seed: int, kind: str) -> Inputs:
    assert kind != "raising"
    x = values(seed if kind != "seed" else 3, "cpu", case["M"], case["N"])
    return {
        "x": x,
        "residual": x.clone()
        if kind == "equal" and case["M"] > 1
        else x + 1
        if kind == "seed"
        else values(seed + 1, "cpu", *x.shape),
    }


@pytest.mark.parametrize(("kind", "lines"), [
    ("drawn", []), ("equal", []), ("raising", []),
    ("seed", ["inputs are equal for every seed: a kernel that keeps its first results passes"]),
])  # fmt: skip
def test_equal_inputs_are_named(kind: str, lines: list[str]) -> None:
    op = replace(
        op_with(""), inputs=lambda case, *, device, seed=0: drawn(case, seed, kind),
        reference=lambda given: {"y": given["x"].cumsum(1)}, variants=(Variant("optimized", lambda given, _config: given),),
    )  # fmt: skip
    assert blind_spots(op, op.variants[0], CASES) == lines
    line = "inputs x and residual are equal in all check cases: a kernel that reads one twice passes"
    assert blind_spots(op, op.variants[0], [case for case in CASES if case["M"] > 1]) == ([line] if kind == "equal" else lines)


@pytest.mark.parametrize(("read", "unread"), [("parts", "block"), ("block", "parts"), ("", "block, parts"), ("block parts", "")])
def test_knobs_that_the_host_function_never_reads_are_named(read: str, unread: str) -> None:
    def run(given: Inputs, config: Knobs) -> Inputs:
        return {"y": given["x"] + 0 * sum(getattr(config, name) for name in read.split())}

    space: Any = {"parts": (1, 2), "block": (16, 32)}
    variant = Variant("optimized", run, Knobs, lambda _case: space, default=lambda _case: Knobs(1, 16))
    op = replace(biased(), options={}, inputs=lambda case, *, device, seed=0: drawn(case, seed, "drawn"), variants=(variant,))
    op = replace(op, reference=lambda given: {"y": given["x"].clone()}, dtypes=("float32",))
    line = f"optimized reads no {unread} of its config: all values are checked and timed alike"
    assert [it for it in blind_spots(op, variant, CASES) if "config" in it] == [line] * bool(unread)


@pytest.mark.parametrize("reads", [True, False])
def test_knobs_are_not_named_where_a_case_fails(reads: bool) -> None:
    def run(given: Inputs, config: Knobs) -> Inputs:
        if given["x"].shape[1] > CASES[0]["N"]:
            raise RuntimeError(f"{config.parts} {config.block}" if reads else "out of bounds")
        return {"y": given["x"] + 0}

    space: Any = {"parts": (1, 2), "block": (16, 32)}
    variant = Variant("optimized", run, Knobs, lambda _case: space, default=lambda _case: Knobs(1, 16))
    op = replace(biased(), options={}, inputs=lambda case, *, device, seed=0: drawn(case, seed, "drawn"), variants=(variant,))
    op = replace(op, reference=lambda given: {"y": given["x"].clone()}, dtypes=("float32",))
    assert not [it for it in blind_spots(op, variant, CASES) if "config" in it]


def test_output_that_the_reference_does_not_give_is_no_output_of_one_type() -> None:
    op = biased()
    variant = Variant("optimized", lambda given, _config: {"y": op.reference(given)["y"], "more": given["x"]})
    cases = [replace(case, dtype=dtype, options=(("act", "none"),)) for case in CASES for dtype in ("float32", "bfloat16")]
    assert not [line for line in blind_spots(op, variant, cases) if "for every dtype" in line]


@pytest.mark.parametrize("cast", [torch.Tensor.bfloat16, lambda y: y, torch.Tensor.double])
@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("bfloat16",)])
def test_output_of_16_bits_for_every_type_of_cases_is_named(cast: Callable[[torch.Tensor], torch.Tensor], types: Any) -> None:
    op = biased()
    variant = Variant("optimized", lambda given, _config: {"y": cast(op.reference(given)["y"])})
    cases = [replace(case, dtype=dtype, options=(("act", act),)) for case in CASES for dtype in types for act in ("none", "silu")]
    is_named = cast is torch.Tensor.bfloat16 and len(types) == 2
    line = "y is torch.bfloat16 for every dtype: a kernel that ignores it passes"
    assert blind_spots(op, variant, cases) == [line] * is_named


def test_output_that_the_smallest_cases_of_one_type_alone_give_is_not_named() -> None:
    plain = biased()

    def outputs(given: Inputs, _config: None = None) -> Inputs:
        y = plain.reference(given)["y"]
        return {"y": y} | ({"db": y.to(given["x"].dtype)} if given["x"].dtype == torch.bfloat16 else {})

    variant = Variant("optimized", outputs)
    acts = plain.options["act"]
    cases = [replace(case, dtype=dtype, options=(("act", act),)) for case in CASES for dtype in plain.dtypes for act in acts]
    op = replace(plain, reference=lambda given: {name: value.float() for name, value in outputs(given).items()})
    assert blind_spots(op, variant, cases) == []


@pytest.mark.parametrize(("is_varied", "is_linear"), [(True, False), (False, True), (False, False)])
def test_rows_of_normal_values_alone_are_named_unless_the_reference_is_linear(is_varied: bool, is_linear: bool) -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        x = values(seed, device, case["M"], case["N"])
        return {"x": vary_rows(x) if is_varied else x}

    op = replace(
        op_with(""), inputs=inputs, reference=lambda given: {"y": given["x"].cumsum(1) if is_linear else given["x"].exp()}
    )
    line = "no row of an input is constant or has a value above 10: draw rows by `vary_rows`"
    lines = [it for it in blind_spots(op, op.variants[0], CASES) if "of its config" not in it]
    assert lines == [line] * (not is_varied and not is_linear)


@pytest.mark.parametrize(
    ("lengths", "is_named"), [((5, 40, 0), True), ((5, 33, 0), False), ((1, 16, 64), True), ((0, 0, 0), False)]
)
def test_ends_of_sequences_none_of_which_has_a_block_and_an_element_are_named(lengths: tuple[int, ...], is_named: bool) -> None:
    def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return {"x": vary_rows(values(seed, device, int(ends[-1]), case["N"])), "ends": ends}

    space: Any = {"parts": (1,), "block": (16, 32)}
    variant = Variant("optimized", lambda *_: {}, Knobs, lambda _case: space, default=lambda _case: Knobs(1, 16))
    op = replace(op_with(""), inputs=inputs, reference=lambda given: {"y": given["x"]}, variants=(variant,))
    line = "no sequence of ends has a block and an element, such as 17: an end that is too small by 1 passes"
    assert [it for it in blind_spots(op, variant, CASES) if "sequence" in it] == [line] * is_named
