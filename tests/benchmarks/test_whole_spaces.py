"""Whole spaces: cases without kept trials, times of their configs, and the file of a run, on a bench that times nothing."""

from concurrent.futures import Future
from pathlib import Path
from unittest.mock import create_autospec

import whole_spaces
from kept_trials import path_of, read

from kerneltune import device
from kerneltune.measuring.compiler import CompileResult
from kerneltune.spec import Config
from kerneltune.task import Evaluation, Task
from kerneltune.tune.candidates import checked_space
from kerneltune.tune.gpu_worker import GpuBench

SWEEP = Path(whole_spaces.__file__).with_name("untuned_int4.yaml")


def test_whole_space_of_a_case_is_timed_once_and_kept(tmp_path: Path) -> None:
    asked: list[tuple[Config, int]] = []

    def measure(task: Task, config: Config, best_us: float | None, samples: int) -> Evaluation:
        asked.append((config, samples))
        return Evaluation("passed", 10.0 + config.splits)

    bench = create_autospec(GpuBench, instance=True)
    bench.measure.side_effect = measure
    pending: Future[CompileResult] = Future()
    pending.set_result(CompileResult(()))
    tasks = whole_spaces.tasks_of(SWEEP, ["int4_fp8_gemm"], tmp_path, device.current_slug())
    first = tasks[0]
    configs = checked_space(first)
    with whole_spaces.Keeper(tmp_path) as keeper:
        keeper.add(first, whole_spaces.measure(bench, first, dict.fromkeys(configs, pending)))
    again = [config for config, samples in asked if samples == whole_spaces.MORE_SAMPLES]
    assert [config for config, samples in asked if samples == whole_spaces.SAMPLES] == configs
    assert again == [config for config in configs if 10 + config.splits <= whole_spaces.NEAR * 11]
    assert again
    (block,) = read(path_of("int4_fp8_gemm", device.current_slug(), tmp_path))
    assert (block.source_hash, block.case, len(block.rows)) == (first.variant.source_hash, first.case, len(configs))
    remaining = whole_spaces.tasks_of(SWEEP, ["int4_fp8_gemm"], tmp_path, device.current_slug())
    assert {task.key for task in remaining} == {task.key for task in tasks[1:]}
