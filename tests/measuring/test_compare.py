"""Records of a measured case, with a GPU that is only pretended."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kerneltune import device, ops
from kerneltune.checking.check import Checker
from kerneltune.measuring import compare
from kerneltune.records import Record
from kerneltune.spec import Case, Op, Outputs, Variant
from kerneltune.task import Run, Task

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")

OP = ops.load()["rmsnorm_fwd"]
CASE = Case("c", (("M", 64), ("N", 64)), "bfloat16", "none", (("zero_centered", False),))
TASKS = [Task(OP, CASE, OP.variant(name)) for name in ("baseline", "pr593", "optimized")]
RUNS = [Run(task, task.default) for task in TASKS]


def compared(runs: Sequence[Run] = RUNS) -> list[Record]:
    return compare.compared_records("f", runs, None, compare.time_runs(runs, None, {}))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return times by variant, without noise but for the self-comparison; `pr593` is wrong."""

    class Checks(Checker):
        def __init__(self, *_: object, **_named: object) -> None: ...

        def run(self, variant: Variant, _config: object) -> tuple[Outputs, list[str]]:
            return {}, ["y differs"] if variant.name == "pr593" else []

    us = {"baseline": 20.0, compare.SELF: 20.2, "optimized": 10.0}
    rounds = np.linspace(0.99, 1.01, 15)
    h200 = device.Device("NVIDIA H200", "sm_90", 132, 60_000_000, "580", "0123456789ab")
    monkeypatch.setattr(device, "current", lambda: h200)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(compare, "Checker", Checks)
    monkeypatch.setattr(compare, "why_not_timed", lambda *_: None)
    monkeypatch.setattr(compare, "input_sets", lambda *_: [{}])
    monkeypatch.setattr(compare, "contender", lambda *_: None)
    monkeypatch.setattr(compare, "time_contenders", lambda cs: {name: us[name] * rounds for name in cs})


def test_compared_records_have_samples_of_their_process(gpu: None) -> None:
    baseline, wrong, optimized = compared()
    assert (wrong.status, wrong.reason, wrong.samples_us) == ("failed", "y differs", None)
    assert [row.time_us for row in (baseline, optimized)] == [20.0, 10.0]
    assert optimized.samples_us is not None
    assert len(optimized.samples_us) == 1
    assert optimized.samples_us[0] == pytest.approx(list(10.0 * np.linspace(0.99, 1.01, 15)), rel=1e-5)
    assert optimized.n == 15
    assert optimized.family == "f"
    assert {row.unit for row in (baseline, wrong, optimized)} == {"0123456789ab"}
    assert baseline.aa_floor == optimized.aa_floor == pytest.approx(1 - 1 / 1.01, rel=1e-4)


def test_compared_records_of_a_variant_twice_have_two_times(gpu: None) -> None:
    first, second = compared([RUNS[0]] * 2)
    assert [(row.variant, row.time_us) for row in (first, second)] == [("baseline", 20.0), ("baseline", 20.2)]
    assert first.samples_us != second.samples_us


def test_compared_records_of_an_error_without_text_are_failed_with_its_type(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(variant: Variant, *_: Any) -> None:
        if variant.name == "baseline":
            raise NotImplementedError

    monkeypatch.setattr(compare, "contender", refuses)
    baseline, _, optimized = compared()
    assert (baseline.status, baseline.reason) == ("failed", "cannot be timed: NotImplementedError")
    assert (optimized.status, optimized.time_us) == ("passed", 10.0)


def test_comparison_ends_at_a_variant_that_breaks_the_gpu_context(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant costs its own row alone, where a process that knows of it measures the rest."""
    monkeypatch.setattr(compare, "broken_context", lambda: "AcceleratorError: an illegal memory access was encountered")
    launched: list[str] = []
    monkeypatch.setattr(compare, "tell", launched.append)
    with pytest.raises(RuntimeError, match=r"^y differs$"):
        compare.time_runs(RUNS, None, {})
    assert launched == ["baseline", "pr593"]
    launched.clear()
    samples, untimed = compare.time_runs(RUNS, None, {"pr593": ("failed", "it faults")})
    assert untimed == {"pr593": ("failed", "it faults")}
    assert list(samples) == ["baseline", compare.SELF, "optimized"]
    assert launched == ["baseline", "optimized", "baseline", "optimized", ""]


def test_comparison_with_a_fault_while_all_are_timed_blames_no_variant(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def faults(_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(compare, "time_contenders", faults)
    launched: list[str] = []
    monkeypatch.setattr(compare, "tell", launched.append)
    with pytest.raises(RuntimeError, match="illegal"):
        compare.time_runs(RUNS, None, {})
    assert launched[-1] == ""


def test_compared_records_of_a_variant_out_of_memory_are_skipped(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_self: Any, variant: Variant, _config: object) -> tuple[Outputs, list[str]]:
        if variant.name == "pr593":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nmore")
        return {}, []

    monkeypatch.setattr(compare.Checker, "run", run)
    statuses = [(row.status, row.reason) for row in compared()]
    assert statuses == [("passed", ""), ("skipped", "OutOfMemoryError: CUDA out of memory."), ("passed", "")]


class Launches(Checker):
    """Launches `quack` alone, without inputs."""

    def __init__(self, op: Op, *_: object, **_named: object) -> None:
        self.op = op

    def run(self, variant: Variant, config: Any) -> tuple[Outputs, list[str]]:
        return super().run(variant, config) if variant.name == "quack" else ({}, [])

    def outputs(self, variant: Variant, config: Any) -> Outputs:
        return variant.run({}, config)


@pytest.mark.parametrize(
    ("requires", "status", "begin"),
    [(("quack",), "skipped", "cannot be imported: "), ((), "failed", "the launch failed: peer_without_cutlass.py:1: ")],
)
@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("import no_such_cutlass", "ModuleNotFoundError: No module named 'no_such_cutlass'"),
        ("raise RuntimeError('no cutlass libraries')", "RuntimeError: no cutlass libraries"),
    ],
)
def test_compared_records_of_a_failed_import_are_skipped_for_a_peer_and_failed_for_an_own_variant(
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    requires: tuple[str, ...],
    status: str,
    begin: str,
    module: str,
    error: str,
) -> None:
    def imports(_inputs: Any, _config: object) -> Any:
        importlib.import_module("peer_without_cutlass")

    (tmp_path / "peer_without_cutlass.py").write_text(f"{module}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compare, "Checker", Launches)
    other = Run(Task(OP, CASE, Variant("quack", imports, requires=requires)), None)
    row, timed = compared([other, RUNS[2]])
    assert (row.status, row.reason) == (status, f"{begin}{error}")
    assert timed.time_us == 10.0


def test_compared_records_of_generated_code_that_raises_are_failed(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of torch.compile compiles its kernels while its module is executed, which is no import."""

    def compiles(_inputs: Any, _config: object) -> Any:
        exec("raise RuntimeError('out of resources')", ModuleType("generated").__dict__)

    monkeypatch.setattr(compare, "Checker", Launches)
    (row,) = compared([Run(Task(OP, CASE, Variant("quack", compiles, requires=("torch",))), None)])
    assert (row.status, row.reason) == ("failed", "the launch failed: RuntimeError: out of resources")


def test_compared_records_of_a_failed_variant_stay_failed_when_memory_runs_out(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(variant: Variant, *_: Any) -> None:
        if variant.name == "baseline":
            raise NotImplementedError

    def short(_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(compare, "contender", refuses)
    monkeypatch.setattr(compare, "time_contenders", short)
    rows = compared()
    assert [(row.status, row.reason) for row in rows] == [
        ("failed", "cannot be timed: NotImplementedError"),
        ("failed", "y differs"),
        ("skipped", "OutOfMemoryError: CUDA out of memory."),
    ]


def test_check_whose_inputs_cannot_be_restored_fails() -> None:
    """An earlier launch has broken the GPU context of the process."""

    class Gone:
        def reshape(self, _: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    op = ops.load()["rmsnorm_bwd"]
    checker = Checker(op, CASE, "cpu")
    checker.inputs = {**checker.inputs, "amax": Gone()}
    checker.inputs_before["amax"] = torch.zeros(1)
    variant = op.variants[0]
    line = Gone.reshape.__code__.co_firstlineno + 1
    assert checker.run(variant, variant.default_config(CASE))[1] == [
        f"the launch failed: test_compare.py:{line}: RuntimeError: CUDA error: an illegal memory access was encountered"
    ]


def test_compared_records_of_a_case_too_small_for_a_cold_l2_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = device.Device("NVIDIA H200", "sm_90", 132, 60_000_000, "580")
    monkeypatch.setattr(device, "current", lambda: h200)
    monkeypatch.setattr(compare, "gpu_free_bytes", lambda: 1 << 37)
    rows = compared()
    reason = "a cold L2 takes 14,313 input sets of 16,768 bytes, more than 8,192: only policy hot can time it"
    assert [(row.status, row.reason) for row in rows] == [("skipped", reason)] * 3


def test_compared_records_without_a_right_variant_are_failed_and_untimed(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr(compare, "time_contenders", never)
    (wrong,) = compared(RUNS[1:2])
    assert wrong.status == "failed"


def test_unit_is_a_digest_of_the_gpu_s_identifier() -> None:
    uuid = "5c7a2d5e-3f4b-4b0f-8d7e-0123456789ab"
    unit = device.serial_digest(uuid)
    assert unit == device.serial_digest(f"GPU-{uuid}") != device.serial_digest(uuid[::-1])
    assert len(unit) == 12
    assert unit not in uuid
    assert device.serial_digest("GPU-00000000-0000-0000-0000-000000000000") == device.serial_digest("") == ""
