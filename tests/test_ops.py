"""The contract that every operator, variant and config keeps. In the interpreter on small cases; on a GPU on all check cases."""

import math
import pickle
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from kerneltune import ops, sweep_file, workloads
from kerneltune.cache import Chooser
from kerneltune.checking.check import Checker
from kerneltune.spec import Case, Op

OPS = ops.load()
ON_GPU = torch.cuda.is_available()
WHERE = "cuda" if ON_GPU else "cpu"
SHIPPED = Path(__file__).parent.parent / "sweeps"
FOUND = [sweep_file.load(path, OPS | workloads.load()) for path in sorted(SHIPPED.glob("*.yaml"))]
SWEEPS = [found for found in FOUND if {entry.op for entry in (*found.check, *found.bench)} <= OPS.keys()]  # not the workloads'
CHECKS = [entry for found in SWEEPS for entry in found.check]
BENCHES = [entry for found in SWEEPS for entry in found.bench]
STREAM = Case("small", (("read", 40_000), ("write", 20_000)), "int32")


def elements(case: Case) -> int:
    """Return the elements of the largest input."""
    sizes = dict(case.axes)
    if "E" in sizes and "M" in sizes:  # tokens and weights, or the tokens twice
        return max(sizes["M"] * max(sizes["N"], sizes["K"]), sizes["E"] * sizes["N"] * sizes["K"])
    if "T" in sizes and "K" in sizes:  # tokens, each with its choices
        return sizes["T"] * sizes["K"] * sizes.get("H", 1)
    sizes.pop("G", None)
    if {"N", "M", "K"} == sizes.keys():  # a product of matrices: the weights
        return sizes["M"] * sizes["K"]
    widths = [sizes.pop(axis) for axis in ("N1", "N2") if axis in sizes]
    return math.prod(sizes.values()) * (sum(widths) if widths else 1)


def small(entry: sweep_file.SweepCase) -> bool:
    """Return whether a case has few enough elements for several configs of each variant in Triton's interpreter."""
    return elements(entry.case) <= (200_000 if entry.op.startswith("rmsnorm") else 50_000)


def some(name: str, case: Case) -> int:
    """Return the number of configs of a variant to try."""
    if ON_GPU or elements(case) < 100:
        return 5
    return 2 if name.startswith("rmsnorm") and elements(case) < 1000 else 1


def with_fewer_rows(name: str, case: Case) -> Case:
    """Leave of more than 48 rows of RMSNorm at most 47 in the interpreter, where each program normalizes the same few rows.

    The remainder of a division by 16 stays. Rows that are transposed fill whole tiles, and stay.
    """
    rows = dict(case.axes).get("M", 0)
    if ON_GPU or not name.startswith("rmsnorm") or case.quant == "fp8_t" or rows <= 48:
        return case
    return replace(case, axes=tuple((axis, 32 + rows % 16 if axis == "M" else size) for axis, size in case.axes))


SEARCHED = 4_000
"""Elements of a case whose random configs run in the interpreter, too; of larger cases only the default configs run."""
TOO_LARGE = re.compile(r"launch failed: .*(out of resource|too many (resources|blocks))")
CASES = [(e.op, with_fewer_rows(e.op, e.case)) for e in CHECKS if ON_GPU or small(e)] + [("stream", STREAM)]


def names(value: object) -> str:
    return value.label.replace(" ", ",") if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(("name", "case"), CASES, ids=names)
def test_variant_with_its_default_config_agrees_with_the_reference(name: str, case: Case) -> None:
    op = OPS[name]
    checker = Checker(op, case, WHERE)
    for variant in op.variants:
        if not variant.is_peer and variant.unsupported(case) is None:
            assert checker.run(variant, variant.default_config(case))[1] == [], variant.name


@pytest.mark.parametrize(
    ("name", "case"), [(n, c) for n, c in CASES if ON_GPU or elements(c) <= SEARCHED or n == "stream"], ids=names
)
def test_variant_with_random_valid_configs_agrees_with_the_reference(name: str, case: Case) -> None:
    op = OPS[name]
    checker = Checker(op, case, WHERE)
    rng = random.Random(f"{name} {case.label}")
    for variant in op.variants:
        configs = list(variant.configs(case))
        if variant.is_peer or variant.unsupported(case) is not None:
            continue
        chosen = rng.sample(configs, min(some(name, case), len(configs))) if name != "stream" else configs
        errors_of = [checker.run(variant, config)[1] for config in chosen]
        for config, errors in zip(chosen, errors_of, strict=True):
            # a config may ask for more than the GPU has; then it is not launched, and must not answer wrongly
            assert [error for error in errors if not (ON_GPU and TOO_LARGE.search(error))] == [], (variant.name, config)
        assert not chosen or [] in errors_of, variant.name


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave kernels out in the interpreter: outputs have their sizes without them."""
    if not ON_GPU:
        monkeypatch.setattr(InterpretedFunction, "run", lambda *_arguments, **_options: None)


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize(("name", "case"), CASES, ids=names)
def test_traffic_equals_the_bytes_of_the_tensors(name: str, case: Case) -> None:
    op = OPS[name]
    inputs = op.inputs(case, device=WHERE, seed=0)
    variant = op.variant("baseline") if op.variant("baseline").unsupported(case) is None else op.variants[-1]
    if variant.is_peer or variant.unsupported(case) is not None:
        variant = op.variant("optimized")
    outputs = variant.run(inputs, variant.default_config(case))
    scalars = {"scale", "amax", "scale_inv", "scales", "amaxes"} if name.startswith(("rmsnorm", "multi")) else set()
    read = sum(t.numel() * t.element_size() for k, t in inputs.items() if isinstance(t, torch.Tensor) and k not in scalars)
    written = sum(t.numel() * t.element_size() for k, t in outputs.items() if k not in scalars)
    assert (op.traffic(case).read, op.traffic(case).write) == (read, written)


@pytest.mark.parametrize("name", sorted({entry.op for entry in (*CHECKS, *BENCHES)}))
def test_defaults_are_valid_and_spaces_have_distinct_configs(name: str) -> None:
    tuned = [variant for variant in OPS[name].variants if variant.config is not None]
    entries = [(entry, is_bench) for is_bench, section in enumerate((CHECKS, BENCHES)) for entry in section if entry.op == name]
    for entry, is_bench in entries:
        for variant in tuned:
            where = (variant.name, entry.case.label)
            default = variant.default_config(entry.case)
            assert variant.invalid(entry.case, default) is None, (where, default)
            if is_bench:
                configs = list(variant.configs(entry.case))
                assert configs, where
                assert len(configs) == len(set(configs)), where


def test_default_config_of_fewer_rows_is_that_of_the_check_case() -> None:
    for entry in CHECKS:
        for variant in OPS[entry.op].variants:
            if variant.config is not None and variant.unsupported(entry.case) is None and small(entry):
                few = with_fewer_rows(entry.op, entry.case)
                assert variant.default_config(few) == variant.default_config(entry.case), (variant.name, entry.case.label)


def test_check_of_a_variant_with_wrong_results_fails() -> None:
    op: Op = OPS["rmsnorm_fwd"]
    options = (("zero_centered", False), ("fp8_format", "e4m3"), ("row_pad", 0))
    case = Case("small", (("M", 7), ("N", 72)), "bfloat16", "fp8_t", options)
    checker = Checker(op, case, WHERE)
    good = op.variant("optimized")

    def spoiled(which: str):  # type: ignore[no-untyped-def]
        def run(inputs, config):  # type: ignore[no-untyped-def]
            outputs = dict(good.run(inputs, config))
            if which == "amax":
                inputs["amax"].mul_(1.01)
            elif outputs[which].dtype.itemsize == 1:
                outputs[which].view(torch.uint8)[-1, -1] ^= 0x30
            else:
                outputs[which][-1] *= 1.001
            return outputs

        return run

    for which in ("y", "y_t", "rsigma", "scale_inv", "amax"):
        errors = checker.run(type(good)("spoiled", spoiled(which)), good.default_config(case))[1]
        assert errors, which


def test_check_of_a_variant_with_unwritten_outputs_fails() -> None:
    op = OPS["rmsnorm_bwd"]
    case = Case("small", (("M", 7), ("N", 72)), "bfloat16", options=(("zero_centered", False),))
    lazy = type(op.variants[0])("lazy", lambda i, _c: {"dx": torch.empty_like(i["x"]), "dgamma": torch.empty_like(i["weight"])})
    assert len(Checker(op, case, WHERE).run(lazy, None)[1]) == 2


def test_every_variant_can_be_pickled() -> None:
    for op in OPS.values():
        for variant in op.variants:
            if not variant.is_peer:
                pickle.dumps((op.inputs, variant.run))


def test_ceiling_of_many_reads_per_write_loads_at_most_16_streams() -> None:
    """Thousands of unrolled loads take the compiler minutes: the mix folds words instead."""
    op = OPS["stream"]
    case = Case("weights", (("read", 400_000), ("write", 1_000)), "int32")
    inputs = op.inputs(case, device=WHERE)
    assert inputs["src"].shape[0] <= 16
    assert 200 <= op.traffic(case).read / op.traffic(case).write <= 800
    variant = op.variant("baseline")
    assert Checker(op, case, WHERE).run(variant, variant.default_config(case))[1] == []


def test_choosers_of_calls_have_the_operator_and_variant_of_the_registry() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("kerneltune.ops.")]
    choosers = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, Chooser)}
    assert len(choosers) >= 17
    for chooser in choosers.values():
        assert chooser.op is OPS[chooser.op.name]
        assert chooser.variant is chooser.op.variant("optimized")
    for op in OPS.values():
        assert set(op.free_options) <= op.options.keys(), op.name
        assert set(op.free_axes) <= set(op.axes), op.name
        assert op.bands.keys() <= set(op.free_axes), op.name
        assert {axis: tuple(sorted(ends)) for axis, ends in op.bands.items()} == dict(op.bands), op.name


FP8_CASE = Case(
    "small", (("M", 7), ("N", 72)), "bfloat16", "fp8_t", (("zero_centered", False), ("fp8_format", "e4m3"), ("row_pad", 0))
)
CASTS = Case("small", (("T", 3), ("M", 7), ("N", 72)), "bfloat16", "none", (("shapes", "same"), ("fp8_format", "e4m3")))


@pytest.mark.parametrize(
    ("op_name", "case", "amax"), [("rmsnorm_fwd", FP8_CASE, "amax"), ("multi_cast_transpose", CASTS, "amaxes")]
)
def test_check_of_a_variant_that_clears_an_earlier_amax_fails(op_name: str, case: Case, amax: str) -> None:
    op: Op = OPS[op_name]
    good = op.variant("optimized")

    def clearing(inputs, config):  # type: ignore[no-untyped-def]
        inputs[amax].zero_()
        return good.run(inputs, config)

    checker = Checker(op, case, WHERE)
    assert checker.check(good, good.default_config(case), runs=2).reason == ""
    error = checker.check(type(good)("clearing", clearing), good.default_config(case), runs=2).reason
    assert error.startswith(f"run 2: {amax}"), error
