"""Running out of memory at any stage, on a simulated GPU: only the variant or case that asked for memory is skipped."""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_tuner import CompiledAtOnce, NoBench

from kerneltune import device, sweep_run
from kerneltune.checking import memory
from kerneltune.checking.check import check_runs
from kerneltune.checking.memory import out_of_memory_reason, within_memory
from kerneltune.measuring import compare
from kerneltune.plan import Options, Selection, load_plan
from kerneltune.progress import Progress
from kerneltune.records import Record
from kerneltune.search.trials import TrialStore
from kerneltune.spec import Case, Config, Op, Space, Traffic, Variant
from kerneltune.stats import Samples
from kerneltune.sweep_run import measure_live
from kerneltune.task import Evaluation, Outcome, Run, Task
from kerneltune.tune import gpu_worker
from kerneltune.tune.tuner import Tuner

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")

TEXT = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is free."
REASON = f"OutOfMemoryError: {TEXT}"
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Knobs:
    n: int


class Gpu:
    """Has too little memory at a stage of a case; notes whether tensors of that stage were still held when memory went back."""

    def __init__(self, stage: str, case: str = "large") -> None:
        self.stage, self.case = stage, case
        self.held: list[weakref.ref[torch.Tensor]] = []
        self.still_held: list[int] = []
        self.inputs_made: list[str] = []
        self.free = 100 * GIB

    def at(self, stage: str, case: str) -> None:
        if (stage, case) != (self.stage, self.case):
            return
        partly = torch.zeros(8)
        cycle: list[Any] = [partly]
        cycle.append(cycle)  # as compilers' objects have them
        self.held.append(weakref.ref(partly))
        try:
            raise torch.OutOfMemoryError(TEXT + "\nmore")
        finally:
            if stage == "capture of second":
                raise RuntimeError("operation failed due to a previous error during capture")

    def release(self) -> None:
        if self.held:
            self.still_held.append(sum(ref() is not None for ref in self.held))

    # an operator

    def inputs(self, name: str, case: Case, *, device: str, seed: int = 0) -> Mapping[str, Any]:
        self.inputs_made.append(f"{name} {case.name}")
        first = name == "stream" or self.inputs_made.count(f"{name} {case.name}") == 1
        self.at("inputs of the ceiling" if name == "stream" else "inputs" if first else "input sets", case.name)
        return {"x": torch.ones(8), "case": case.name}

    def reference(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        self.at("reference", inputs["case"])
        return {"y": inputs["x"]}

    def run(self, name: str, inputs: Mapping[str, Any], _config: Config) -> Mapping[str, Any]:
        self.at(f"first run of {name}", inputs["case"])
        if self.stage == "less is free than was" and inputs["case"] == self.case:
            self.free = 64 * MIB
        return {"y": inputs["x"], "of": name}

    def compare(self, case: Case, _inputs: Any, outputs: Mapping[str, Any], _expected: Any) -> list[str]:
        self.at(f"comparison of {outputs['of']}", case.name)
        return []

    def op(self, name: str, variants: Sequence[str]) -> Op:
        own_variants = tuple(Variant(v, partial(self.run, v), Knobs, space, default=lambda _: Knobs(0)) for v in variants)
        axes, dtypes = (("read", "write"), ("int32",)) if name == "stream" else (("M",), ("bfloat16",))
        traffic = Traffic(MIB, MIB)
        return Op(
            name,
            axes,
            dtypes,
            partial(self.inputs, name),
            self.reference,
            self.compare,
            lambda _: traffic,
            own_variants,
            __name__,
        )

    # what times it

    def contender(self, variant: Variant, _config: Config, inputs: Sequence[Any], _policy: Any, after: Any = None) -> str:
        self.at(f"capture of {variant.name}", inputs[0]["case"])
        return str(inputs[0]["case"])

    def time_contenders(self, contenders: Mapping[str, str]) -> dict[str, Samples]:
        self.at("timing", contenders[next(iter(contenders))])
        return {name: np.linspace(9.9, 10.1, 15) for name in contenders}


def space(_case: Case) -> Space:
    return {"n": (0,)}


def pretend(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = device.Device("NVIDIA H200", "", 132, 60_000_000, "580")
    monkeypatch.setattr(device, "current", lambda: h200)
    monkeypatch.setattr(torch.cuda, "empty_cache", gpu.release)
    for module in (memory, compare):
        monkeypatch.setattr(module, "gpu_free_bytes", lambda: gpu.free)
    monkeypatch.setattr(compare, "contender", gpu.contender)
    monkeypatch.setattr(compare, "time_contenders", gpu.time_contenders)


def measured(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Record]]:
    """Return the rows of a sweep of two cases, the large case first, by case; each case has a ceiling of its own."""
    pretend(gpu, monkeypatch)
    monkeypatch.setattr(gpu_worker, "open_driver", lambda: None)

    def ceiling_task(ops: Mapping[str, Op], _op: Op, case: Case, policy: str) -> Task:
        moved = Case(case.name, (("read", MIB), ("write", MIB)), "int32")
        return Task(ops["stream"], moved, ops["stream"].variants[0], policy)

    monkeypatch.setattr(sweep_run, "ceiling_task", ceiling_task)
    monkeypatch.setattr(sweep_run, "GpuWorker", lambda **_: nullcontext(gpu_worker.GpuBench()))
    path = tmp_path / "tiny.yaml"
    cases = "bench:\n  - {name: large, M: 2}\n  - {name: small, M: 1}\n"
    path.write_text(f"family: tiny\nops: [made]\ndefaults: {{dtype: bfloat16}}\n{cases}")
    ops = {"made": gpu.op("made", ("first", "second", "third")), "stream": gpu.op("stream", ("copy",))}
    rows = measure_live(load_plan(ops, Selection(str(path)), Options(results=tmp_path)), Progress(), "test")
    return {name: [row for row in rows if row.case == name] for name in ("large", "small")}


ALL, SECOND = ["first", "second", "third"], ["second"]
FEW = "a cold L2 takes 115 input sets of 2,097,152 bytes, half of the free memory holds 16: only policy hot can time it"


@pytest.mark.parametrize(
    ("stage", "skipped"),
    [
        ("inputs", ALL),
        ("reference", ALL),
        ("input sets", ALL),
        ("timing", ALL),
        ("first run of second", SECOND),
        ("comparison of second", SECOND),
        ("capture of second", SECOND),
        ("capture of first", ["first"]),
    ],
)
def test_sweep_skips_variants_out_of_memory_and_continues(
    stage: str, skipped: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(stage)
    records = measured(gpu, tmp_path, monkeypatch)
    outcomes = {row.variant: (row.status, row.reason) for row in records["large"]}
    assert outcomes == {name: ("skipped", REASON) if name in skipped else ("passed", "") for name in ALL}
    passed = [row for row in records["large"] if row.status == "passed"]
    assert [row.variant for row in passed if row.aa_floor is None or not row.ceiling_gbps] == []
    assert [row.status for row in records["small"]] == ["passed"] * 3
    assert gpu.still_held[0] == 0, "memory went back before what held it was gone"
    assert gpu.held[0]() is None


@pytest.mark.parametrize("stage", ["inputs of the ceiling", "capture of copy"])
def test_sweep_with_a_ceiling_out_of_memory_has_rows_without_ceiling(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(stage)
    records = measured(gpu, tmp_path, monkeypatch)
    assert [(row.status, row.time_us, row.ceiling_gbps) for row in records["large"]] == [("passed", 10.0, None)] * 3
    assert gpu.still_held[0] == 0


def test_sweep_skips_a_case_with_too_little_memory_after_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = measured(Gpu("less is free than was"), tmp_path, monkeypatch)
    assert [(row.status, row.reason) for row in records["large"]] == [("skipped", FEW)] * 3


def test_sweep_keeps_a_crashed_variant_failed_if_the_case_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("reference")
    pretend(gpu, monkeypatch)
    op, case = gpu.op("made", ("first", "second")), Case("large", (("M", 2),), "bfloat16")
    runs = [Run(Task(op, case, variant), Knobs(0)) for variant in op.variants]
    fault = Outcome("failed", "it faults")
    samples, untimed = compare.time_runs(runs, None, {"second": fault})
    assert (samples, untimed) == ({}, {"first": Outcome("skipped", REASON), "second": fault})


def test_within_memory_raises_errors_other_than_out_of_memory() -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        within_memory(fails)


@pytest.mark.parametrize(
    "text", ["CUDA error: out of memory\nmore", "Triton Error [CUDA]: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"]
)
def test_out_of_memory_reason_knows_errors_of_other_allocators(text: str) -> None:
    assert out_of_memory_reason(RuntimeError(text)) == f"RuntimeError: {text.splitlines()[0]}"
    wrapped = ValueError("the compiler failed")
    wrapped.__cause__ = RuntimeError(text)
    assert out_of_memory_reason(wrapped) == out_of_memory_reason(RuntimeError(text))
    assert out_of_memory_reason(ValueError("the compiler failed")) == ""


# the search


class Timed:
    """A contender of a config: one of 2 does not fit, one of 3 does not under capture, one of 4 fails."""

    def __init__(self, run: Any, _sets: int, _policy: object, sample_us: float = 800.0) -> None:
        self.n = run(0)["n"]
        if self.n == 2:
            raise torch.OutOfMemoryError(TEXT)
        if self.n == 3:
            try:
                raise torch.OutOfMemoryError(TEXT)
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")
        if self.n == 4:
            raise RuntimeError("operation not permitted")

    def sample_us(self) -> float:
        return 10.0 + self.n


def run_checked(_inputs: Any, config: Knobs) -> dict[str, int]:
    if config.n == 1:
        raise torch.OutOfMemoryError(TEXT)
    return {"n": config.n}


def test_host_free_bytes_is_the_memory_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       24684084 kB\nMemAvailable:        3 kB\nHugePages_Total:       0\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    assert memory.host_free_bytes() == 3072


@pytest.mark.parametrize(
    ("here", "folder", "files"),
    [
        ("0::/a/b\n", "a", {"memory.max": 2000, "memory.current": 1500, "memory.stat": "anon 9\ninactive_file 7"}),
        ("0::/\n", "", {"memory.max": 2000, "memory.current": 1500, "memory.stat": "inactive_file 7"}),
        (
            "3:cpu:/\n2:memory:/docker/x\n0::/\n", "memory",
            {"memory.limit_in_bytes": 2000, "memory.usage_in_bytes": 1500, "memory.stat": "total_inactive_file 7"},
        ),
    ],
)  # fmt: skip
def test_host_free_bytes_stays_within_the_limit_of_a_cgroup(
    here: str, folder: str, files: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable:        3 kB\n")
    (tmp_path / "here").write_text(here)
    (tmp_path / "groups" / folder).mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / "groups" / folder / name).write_text(f"{content}\n")
    for name, path in (("_MEMINFO", "meminfo"), ("_CGROUPS_HERE", "here"), ("_CGROUPS", "groups")):
        monkeypatch.setattr(memory, name, tmp_path / path)
    assert memory.host_free_bytes() == 507
    (tmp_path / "groups" / folder / next(iter(files))).write_text("max\n")
    assert memory.host_free_bytes() == 3072


@pytest.mark.parametrize("large", [lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: np.empty(1 << 60, np.uint8)])
@pytest.mark.parametrize("field", ["inputs", "reference"])
def test_check_of_a_case_whose_values_exceed_the_memory_of_the_host_is_skipped(field: str, large: Any) -> None:
    op = checked_op(lambda _case, **_: large()) if field == "inputs" else replace(checked_op(), reference=lambda _: large())
    (outcome,) = check_runs([Run(Task(op, CASE, op.variants[0]), Knobs(0))])
    assert outcome.status == "skipped"
    assert "llocate" in outcome.reason


def checked_op(inputs: Any = lambda _case, **_: {}) -> Op:
    variant = Variant("optimized", run_checked, Knobs, space, default=lambda _: Knobs(0))
    return Op(
        "made", ("M",), ("bfloat16",), inputs, lambda _: {"y": 0}, lambda *_: [], lambda _: Traffic(1, 1), (variant,), __name__
    )


CASE = Case("a", (("M", 8),), "bfloat16")


@pytest.fixture
def gpu_bench(monkeypatch: pytest.MonkeyPatch) -> gpu_worker.GpuBench:
    monkeypatch.setattr(gpu_worker, "open_driver", lambda: None)
    monkeypatch.setattr(gpu_worker, "input_sets", lambda _: [{}])
    monkeypatch.setattr(compare, "Contender", Timed)
    monkeypatch.setattr(gpu_worker, "interleave", lambda cs, **_: {name: np.full(15, c.sample_us()) for name, c in cs.items()})
    return gpu_worker.GpuBench()


@pytest.fixture
def task() -> Task:
    op = checked_op()
    return Task(op, CASE, op.variants[0])


def test_tune_skips_configs_out_of_memory_and_continues(gpu_bench: gpu_worker.GpuBench, task: Task) -> None:
    trials = [gpu_bench.measure(task, Knobs(n), None) for n in (0, 1, 2, 3, 4, 5)]
    assert trials[0] == Evaluation("passed", 10.0)
    assert trials[5] == Evaluation("passed", 15.0)
    assert trials[1:4] == [Evaluation("skipped", None, REASON)] * 3
    assert trials[4] == Evaluation("failed", None, "RuntimeError: operation not permitted")


def test_final_leaves_out_configs_that_do_not_fit_beside_others(gpu_bench: gpu_worker.GpuBench, task: Task) -> None:
    samples = gpu_bench.time_interleaved(task, [Knobs(0), Knobs(2), Knobs(5)])
    assert [None if taken is None else float(taken[0]) for taken in samples] == [10.0, None, 15.0]
    with pytest.raises(torch.OutOfMemoryError):  # the incumbent: nothing can be said
        gpu_bench.time_interleaved(task, [Knobs(2), Knobs(0)])


def test_final_chooses_among_configs_that_fit(tmp_path: Path) -> None:
    class Bench(NoBench):
        def time_interleaved(self, task: Task, configs: Sequence[Config]) -> list[Samples | None]:
            return [None if config.n == 2 else np.linspace(0.99, 1.01, 15) * (20.0 - config.n) for config in configs]

    op = checked_op()
    with Tuner(Task(op, CASE, op.variants[0]), TrialStore(tmp_path / "trials"), Bench(), CompiledAtOnce(), Options()) as tuner:
        _, best, evidence = tuner.run_final([Knobs(0), Knobs(2), Knobs(5), Knobs(1)], Knobs(1))
    assert best == Knobs(5)
    assert evidence["time_us"] == 15.0
    assert evidence["default_us"] == 19.0


def test_check_out_of_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def inputs(case: Case, **_: Any) -> dict[str, Any]:
        if case.name == "large":
            raise torch.OutOfMemoryError(TEXT)
        return {}

    monkeypatch.setattr(gpu_worker, "open_driver", lambda: None)
    op, checks = checked_op(inputs), gpu_worker.GpuBench()
    large = Case("large", (("M", 9),), "bfloat16")
    asked = [(CASE, 0), (CASE, 1), (large, 0), (large, 5), (CASE, 5)]
    outcomes = [checks.check(Task(op, case, op.variants[0]), Knobs(n)) for case, n in asked]
    short = Outcome("skipped", REASON)
    assert outcomes == [Outcome("checked"), short, short, short, Outcome("checked")]
