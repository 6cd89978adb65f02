"""Tune a capture on a simulated GPU: configs of classes, shared configs, and skipped classes."""

import hashlib
import importlib
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fake_gpu
import numpy as np
import pytest
import torch
from adopted import captured, example, of_kernel
from fake_gpu import Bench
from typer.testing import CliRunner

from kerneltune import cache
from kerneltune.adopt import program, startup, tuning
from kerneltune.adopt.folder import CLASSES, META, VALUES, read_class
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.replay import Replay, ReplayError, make_replay
from kerneltune.adopt.table import read_table
from kerneltune.adopt.tuning import tune_capture
from kerneltune.cli import app, console
from kerneltune.progress import Progress
from kerneltune.stats import Samples
from kerneltune.task import Evaluation, Task

GPU = "nvidia_h200"


class SizedBench(Bench):
    """Times a block of as many columns as suits the number of rows: 64 up to 8 rows, 256 above."""

    gain = 1.25
    best_warps = 4
    tried: list[Any] = []

    def time_us(self, task: Task, config: Any) -> float:
        """Return a time that is longer by `gain` for the wrong block, and for other warps."""
        right = 64 if dict(task.case.axes).get("M", 4) <= 8 else 256
        return 10.0 * (1.0 if right == config.BLOCK else self.gain) * (1.0 if config.num_warps == self.best_warps else 1.1)

    def measure(self, task: Task, config: Any, best_us: float | None) -> Evaluation:
        """Return that a config is correct, and its time."""
        type(self).tried.append(config)
        return Evaluation("passed", self.time_us(task, config))

    def time_interleaved(self, task: Task, configs: Sequence[Any]) -> list[Samples]:
        """Return the same time in every round."""
        return [np.full(15, self.time_us(task, config)) for config in configs]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SizedBench]]:
    """Make a GPU whose times are a formula."""
    bench = type("ThisBench", (SizedBench,), {"tried": []})
    with fake_gpu.stands_in(monkeypatch):
        monkeypatch.setattr("kerneltune.tune.session.GpuWorker", bench)
        monkeypatch.setattr(tuning, "GpuWorker", bench)
        monkeypatch.setattr(program, "device_slug", lambda *_: GPU)
        yield bench


def capture_sums(root: Path, *sizes: tuple[int, int]) -> None:
    captured(root, *sizes, pattern="row_sum")


def test_tune_writes_the_fastest_config_of_each_class(tmp_path: Path, h200: type[SizedBench]) -> None:
    capture_sums(tmp_path, (4, 96), (64, 128))
    outcome = tune_capture(tmp_path, Progress())
    table = read_table(tmp_path, GPU)
    assert table is not None
    assert table.digest == outcome.digest
    configs = {group.key_values[0]: group.rows[0].configs[0] for group in table.kernels[0].groups}
    assert {key: (config.kwargs["BLOCK"], config.num_warps) for key, config in configs.items()} == {
        96: (64, 4),
        128: (256, 4),
    }
    assert outcome.skipped == []


def test_tune_keeps_sizes_out_of_the_key_that_gain_less_than_3_percent(tmp_path: Path, h200: type[SizedBench]) -> None:
    h200.gain = 1.02
    capture_sums(tmp_path, (4, 96), (64, 96))
    tune_capture(tmp_path, Progress())
    table = read_table(tmp_path, GPU)
    assert table is not None
    (group,) = table.kernels[0].groups
    assert (group.split, len(group.rows)) == ((), 1)


def test_row_of_several_classes_falls_back_to_no_config_that_is_wrong_in_a_class(
    tmp_path: Path, h200: type[SizedBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    h200.gain = 1.02

    def measure(self: SizedBench, task: Task, config: Any, best_us: float | None) -> Evaluation:
        """Return that blocks of 256 are the fastest for 64 rows, and wrong for 4 rows."""
        is_wrong = config.BLOCK == 256 and dict(task.case.axes)["M"] == 4
        return Evaluation("failed", reason="wrong") if is_wrong else Evaluation("passed", self.time_us(task, config))

    monkeypatch.setattr(h200, "measure", measure)
    capture_sums(tmp_path, (4, 96), (64, 96))
    tune_capture(tmp_path, Progress())
    table = read_table(tmp_path, GPU)
    assert table is not None
    ((row,),) = [group.rows for group in table.kernels[0].groups]
    assert {config.kwargs["BLOCK"] for config in row.configs} == {64, 128}


@pytest.mark.parametrize("raised", ["", "an illegal memory access"])
def test_tune_of_a_class_without_a_correct_config_gives_the_reason(
    tmp_path: Path, h200: type[SizedBench], monkeypatch: pytest.MonkeyPatch, raised: str
) -> None:
    def measure(*_: object) -> Evaluation:
        if raised:
            raise RuntimeError(raised)
        return Evaluation("failed", reason="y_ptr: is wrong")

    monkeypatch.setattr(h200, "measure", measure)
    capture_sums(tmp_path, (4, 96))
    ((_, reason),) = tune_capture(tmp_path, Progress()).skipped
    assert reason.endswith(f"RuntimeError: {raised}" if raised else "no config passed: y_ptr: is wrong")


def test_tune_adds_omitted_sizes_to_the_key_if_they_gain(tmp_path: Path, h200: type[SizedBench]) -> None:
    capture_sums(tmp_path, (4, 96), (64, 96))
    tune_capture(tmp_path, Progress())
    table = read_table(tmp_path, GPU)
    assert table is not None
    (group,) = table.kernels[0].groups
    assert group.split == ("M",)
    assert {row.sizes["M"]: row.configs[0].kwargs["BLOCK"] for row in group.rows} == {4: 64, 64: 256}
    assert len(table.kernels[0].shared) == 1


MIXED = """
import triton
import triton.language as tl
def pruned(configs, named, **_):
    return configs[1:] if named["M"] > 4 else configs
listed = [triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128, "PARTS": 2})]
@triton.autotune(listed, ["N"], prune_configs_by={"early_config_prune": pruned})
@triton.jit
def mixed(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr, PARTS: tl.constexpr = 1):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N), mask=places < N)
"""


class MixedBench(SizedBench):
    """Times a block of 64 as the fastest, for configs with different knobs."""

    def time_us(self, task: Task, config: Any) -> float:
        """Return a time by the block alone."""
        launch = read_class(Path(task.op.origin[0]) / CLASSES / str(task.case.option("launch")))
        return {32: 12.0, 64: 10.0, 128: 11.0}[launch.candidates[config.candidate].config.kwargs["BLOCK"]]


def test_tune_lets_classes_with_different_pruned_lists_share_a_config(
    tmp_path: Path, h200: type[SizedBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_mixed_knobs.py").write_text(MIXED)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("kerneltune.tune.session.GpuWorker", "kerneltune.adopt.shared_rows.GpuWorker"):
        monkeypatch.setattr(name, MixedBench)
    startup.capture(tmp_path / "cap")
    for rows in (4, 8):
        importlib.import_module("of_mixed_knobs").mixed[(3,)](torch.ones(96), torch.empty(96), rows, 96)
    startup.recorder().flush()
    startup.uninstall()
    assert tune_capture(tmp_path / "cap", Progress()).skipped == []
    table = read_table(tmp_path / "cap", GPU)
    assert table is not None
    (group,) = table.kernels[0].groups
    assert (group.split, [row.configs[0].kwargs for row in group.rows]) == ((), [{"BLOCK": 64}])


MADE = """
import triton
import triton.language as tl
most = 2
def zeroed(name):
    return lambda named: named[name].zero_()
def pruned(configs, named, **_):
    for config in configs:
        for parts in range(most, 0, -1):
            kwargs = {"PARTS": parts, "BLOCK": min(config.kwargs["BLOCK"], 64)}
            yield triton.Config(kwargs, num_warps=4, pre_hook=zeroed("y_ptr"))
listed = [triton.Config({"BLOCK": 128, "PARTS": 1}), triton.Config({"BLOCK": 32, "PARTS": 1})]
@triton.autotune(listed, ["N"], prune_configs_by={"early_config_prune": pruned})
@triton.jit
def added(x_ptr, y_ptr, N, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + places, tl.load(x_ptr + places, mask=places < N, other=0.0) / PARTS, mask=places < N)
def step(x, y):
    grid = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]), meta["PARTS"])
    added[grid](x, y, x.numel())
    return y
"""


def test_table_of_classes_without_a_common_config_has_none_for_torch_compile(
    tmp_path: Path, h200: type[SizedBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(self: SizedBench, task: Task, config: Any, best_us: float | None) -> Evaluation:
        """Return that blocks of 256 are correct for 64 rows alone, and all other blocks for 4 rows alone."""
        is_right = (config.BLOCK == 256) == (dict(task.case.axes)["M"] == 64)
        return Evaluation("passed", self.time_us(task, config)) if is_right else Evaluation("failed", reason="wrong")

    monkeypatch.setattr(h200, "measure", measure)
    capture_sums(tmp_path, (4, 96), (64, 96))
    tune_capture(tmp_path, Progress())
    table = read_table(tmp_path, GPU)
    assert table is not None
    assert table.kernels[0].shared == ()
    listed = example().row_sum.configs
    startup.install(tmp_path)
    assert startup.server().attach(example().row_sum).shown == listed


@pytest.mark.parametrize("most", [2, 1])  # without the program, pruning makes all configs, or fewer
def test_configs_that_pruning_makes_are_checked_and_served_with_their_pre_hooks(
    most: int, tmp_path: Path, h200: type[SizedBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_made_configs.py").write_text(MADE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "of_made_configs", raising=False)
    module = importlib.import_module("of_made_configs")
    monkeypatch.setattr(h200, "time_us", lambda *_: 10.0)
    startup.capture(tmp_path / "cap")
    module.step(torch.ones(96), torch.zeros(96))
    startup.recorder().flush()
    startup.uninstall()
    (launch,) = read_capture(tmp_path / "cap").classes
    assert [each.config.kwargs["PARTS"] for each in launch.candidates] == [2, 1, 2, 1]
    replay = make_replay(launch, tmp_path / "cap" / CLASSES / launch.digest, "cpu", 0)
    module.most = most
    for candidate in launch.candidates:
        replay.named["y_ptr"].fill_(float("nan"))
        replay.run(candidate.config)
        assert torch.equal(replay.named["y_ptr"], replay.named["x_ptr"])
    assert tune_capture(tmp_path / "cap", Progress()).skipped == []
    module.most = 2
    startup.install(tmp_path / "cap", miss="error")
    assert torch.equal(module.step(torch.ones(96), torch.full((96,), torch.nan)), torch.ones(96))
    assert module.added.best_config.kwargs in [each.config.kwargs for each in launch.candidates]


APART = """
import triton
import triton.language as tl
def pruned(configs, named, **_):
    return configs[:1] if named["x_ptr"].is_contiguous() else configs[1:]
listed = [triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})]
@triton.autotune(listed, ["N"], prune_configs_by={"early_config_prune": pruned})
@triton.jit
def apart(x_ptr, N, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + places, places, mask=places < N)
"""


def test_tune_of_classes_that_sizes_do_not_tell_apart_writes_a_table(
    tmp_path: Path, h200: type[SizedBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_strides.py").write_text(APART)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(h200, "time_us", lambda *_: 10.0)
    startup.capture(tmp_path / "cap")
    for x in (torch.ones(96), torch.ones(192)[::2]):
        importlib.import_module("of_strides").apart[(3,)](x, 96)
    startup.recorder().flush()
    startup.uninstall()
    assert len(tune_capture(tmp_path / "cap", Progress()).tuned) == 2


def test_tune_of_two_autotuners_of_a_kernel_keeps_their_keys_apart(
    tmp_path: Path, h200: type[SizedBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_two_keys.py").write_text(APART + "by_size = triton.autotune(listed, ['x_ptr'])(apart.fn)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(h200, "time_us", lambda *_: 10.0)
    module = importlib.import_module("of_two_keys")
    startup.capture(tmp_path / "cap")
    for kernel, size in ((module.apart, 96), (module.by_size, 64)):
        kernel[(3,)](torch.ones(size), size)
    startup.recorder().flush()
    startup.uninstall()
    assert len(tune_capture(tmp_path / "cap", Progress()).tuned) == 2
    table = read_table(tmp_path / "cap", GPU)
    assert table is not None
    assert {kernel.key_names: len(kernel.groups) for kernel in table.kernels} == {("N",): 1, ("x_ptr",): 1}


def test_tune_writes_its_table_where_a_kernel_cannot_be_kept_compiled(
    tmp_path: Path, h200: type[SizedBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_sums(tmp_path, (4, 96))

    def refuse(*_: object) -> None:
        raise RuntimeError("no such target")

    monkeypatch.setattr(Replay, "compile", refuse)
    notes: list[str] = []
    monkeypatch.setattr(Progress, "note", lambda _self, text: notes.append(text))
    assert len(tune_capture(tmp_path, Progress()).tuned) == 1
    assert (tmp_path / "served" / f"{GPU}.json").is_file()
    assert [note for note in notes if note.startswith("a compiled kernel of row_sum 4x96") and "no such target" in note]


def test_tune_command_prints_each_class_against_its_author_and_the_table_file(
    tmp_path: Path, h200: type[SizedBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.console, "width", 400)
    monkeypatch.setattr("kerneltune.processes.start.start_server", lambda: None)
    capture_sums(tmp_path, (4, 96), (64, 128))
    result = CliRunner().invoke(app, ["tune", str(tmp_path), "--share", "0.5"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["launch", "author's", "first", "µs", "ours", "µs", "speedup", "95", "%", "config"]
    row = "row_sum 64x128 float32 M=64 N=128  13.8  10.0  1.375x  1.375-1.375  BLOCK=256"  # the author's: 1.25 * 1.1 slower
    assert lines[1].split() == row.split()
    digest = hashlib.sha256((tmp_path / "served" / f"{GPU}.json").read_bytes()).hexdigest()
    assert re.fullmatch(rf"1 class tuned in \d+ s; SHA-256 {digest[:16]} {tmp_path}/served/{GPU}.json", lines[-1])
    assert "skipped: row_sum 4x96 float32 M=4 N=96: below --share 0.5: keeps the author's choice" in result.stderr


def test_tuned_table_is_served_with_configs_of_the_program(tmp_path: Path, h200: type[SizedBench]) -> None:
    capture_sums(tmp_path, (4, 96))
    digest = tune_capture(tmp_path, Progress()).digest
    startup.install(tmp_path, miss="error", manifest=digest)
    module = example()
    module.row_sum[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
    assert module.row_sum.best_config.kwargs == {"BLOCK": 64}
    assert module.row_sum.best_config.num_warps == 4


def test_tune_again_tunes_launches_that_serving_missed(tmp_path: Path, h200: type[SizedBench]) -> None:
    capture_sums(tmp_path, (4, 96))
    tune_capture(tmp_path, Progress())
    for columns, is_tuned in ((128, False), (128, True)):
        startup.install(tmp_path, miss="default")
        example().row_sum[(4,)](torch.ones(4, columns), torch.empty(4), 4, columns)
        assert (startup.server().hits == 1) is is_tuned
        startup.uninstall()
        outcome = tune_capture(tmp_path, Progress())
        assert sorted(one.launch_class.sizes["N"] for one in outcome.tuned) == [96, 128]


def test_tune_keeps_an_author_choice_that_is_as_fast(tmp_path: Path, h200: type[SizedBench]) -> None:
    h200.gain, h200.best_warps = 1.0, 3
    capture_sums(tmp_path, (4, 96))
    (one,) = tune_capture(tmp_path, Progress()).tuned
    assert one.best == one.author


def test_tune_again_measures_no_config_again(tmp_path: Path, h200: type[SizedBench]) -> None:
    capture_sums(tmp_path, (4, 96))
    first = tune_capture(tmp_path, Progress())
    tried = len(h200.tried)
    again = tune_capture(tmp_path, Progress())
    assert (len(h200.tried), again.digest) == (tried, first.digest)


def test_tune_of_an_older_capture_tries_configs_of_the_list_only(tmp_path: Path, h200: type[SizedBench]) -> None:
    capture_sums(tmp_path, (4, 96))
    (path,) = (tmp_path / CLASSES).glob(f"*/{META}")
    stored = json.loads(path.read_text())
    around = dict(stored["candidates"][0], is_author=False)
    around["config"] = around["config"] | {"kwargs": {"BLOCK": 512}}
    path.write_text(json.dumps(stored | {"candidates": [*stored["candidates"], around]}))
    tune_capture(tmp_path, Progress())
    assert {config.BLOCK for config in h200.tried} == {64, 128, 256}


def test_tune_with_a_share_skips_cheap_classes(tmp_path: Path, h200: type[SizedBench]) -> None:
    capture_sums(tmp_path, (4, 96), (64, 384))
    outcome = tune_capture(tmp_path, Progress(), share=0.9)
    assert [one.launch_class.sizes["M"] for one in outcome.tuned] == [64]
    assert [reason for _, reason in outcome.skipped if "below --share 0.9" in reason]


def test_tune_out_of_time_names_classes_that_it_did_not_reach(tmp_path: Path, h200: type[SizedBench]) -> None:
    capture_sums(tmp_path, (4, 96), (64, 384))
    outcome = tune_capture(tmp_path, Progress(), budget_s=1e-9)
    assert [one.launch_class.sizes["M"] for one in outcome.tuned] == [64]
    assert outcome.skipped == [("row_sum 4x96 float32 M=4 N=96", "not reached: run the command again")]
    assert [len(tune_capture(tmp_path, Progress()).tuned)] == [2]


def test_tune_out_of_time_goes_on_with_the_class_whose_search_it_ended(
    tmp_path: Path, h200: type[SizedBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_sums(tmp_path, (64, 384))
    with monkeypatch.context() as slow:
        slow.setattr(h200, "time_us", lambda *asked: time.sleep(0.2) or SizedBench.time_us(*asked))
        tune_capture(tmp_path, Progress(), budget_s=1e-9)
    (file,) = (tmp_path / "configs").glob("*/*.json")
    num_early = len(set(h200.tried))
    assert "ended_early" in file.read_text()
    tune_capture(tmp_path, Progress())
    assert len(set(h200.tried)) == len(h200.tried) > num_early, "the search goes on with what is left"
    assert "ended_early" not in file.read_text()


def test_force_out_of_time_goes_on_with_the_classes_that_it_did_not_reach(tmp_path: Path, h200: type[SizedBench]) -> None:
    capture_sums(tmp_path, (4, 96), (8, 96), (64, 384))
    tune_capture(tmp_path, Progress())
    (file,) = (tmp_path / "configs").glob("*/*.json")
    file.write_text(re.sub('"date": ?"[^"]*"', '"date": "2026-01-01T00:00:00+00:00"', file.read_text()))
    for num_early in (2, 1, 0):
        cache.clear()
        tune_capture(tmp_path, Progress(), budget_s=1e-9, force=True)
        assert file.read_text().count("2026-01-01") == num_early


def test_tune_of_a_capture_of_another_gpu_skips_its_classes(
    tmp_path: Path, h200: type[SizedBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "device_slug", lambda *_: "nvidia_b200")
    capture_sums(tmp_path, (4, 96))
    outcome = tune_capture(tmp_path, Progress())
    assert outcome.tuned == []
    assert "captured on nvidia_b200, this is nvidia_h200: capture again here" in outcome.skipped[0][1]


def test_tune_of_a_changed_kernel_skips_it(tmp_path: Path, h200: type[SizedBench]) -> None:
    capture_sums(tmp_path, (4, 96))
    path = tmp_path / CLASSES / of_kernel(read_capture(tmp_path), "row_sum")[0].digest / META
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"source": "0" * 12, "bytecode": "0" * 16}))
    outcome = tune_capture(tmp_path, Progress())
    assert "its source has changed since it was captured" in outcome.skipped[0][1]


def test_tune_skips_a_damaged_class_with_one_line(tmp_path: Path, h200: type[SizedBench]) -> None:
    capture_sums(tmp_path, (4, 96), (4, 128))
    path = sorted((tmp_path / CLASSES).iterdir())[0] / META
    path.write_text('{"kernel": ')
    outcome = tune_capture(tmp_path, Progress())
    assert len(outcome.tuned) == 1
    ((name, reason),) = outcome.skipped
    assert (name, reason) == (str(path), "JSON: input data was truncated")


def test_tune_of_a_class_with_missing_values_skips_it_and_its_check_raises(tmp_path: Path, h200: type[SizedBench]) -> None:
    capture_sums(tmp_path, (4, 96), (4, 128))
    folder = sorted((tmp_path / CLASSES).iterdir())[0]
    (folder / VALUES).unlink()
    ((_, reason),) = tune_capture(tmp_path, Progress()).skipped
    assert reason == f"{folder / VALUES}: missing: capture again"
    with pytest.raises(ReplayError, match="missing: capture again"):
        make_replay(read_class(folder), folder, "cpu", 0)


def test_tune_of_a_capture_with_only_damaged_classes_fails_with_one_line(tmp_path: Path) -> None:
    capture_sums(tmp_path, (4, 96))
    (folder,) = (tmp_path / CLASSES).iterdir()
    (folder / META).write_text("{")
    result = CliRunner().invoke(app, ["tune", str(tmp_path), "--dry-run"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"error: {folder / META}: JSON: ")


def test_tune_of_a_kernel_that_its_module_lacks_skips_it(tmp_path: Path, h200: type[SizedBench]) -> None:
    capture_sums(tmp_path, (4, 96))
    (folder,) = (tmp_path / CLASSES).iterdir()
    stored = json.loads((folder / META).read_text())
    gone = {"module": stored["kernel"]["module"], "name": "row_gone"}
    (folder / META).write_text(json.dumps(stored | {"kernel": gone, "home": gone}))
    assert "has no kernel of this name: capture again" in tune_capture(tmp_path, Progress()).skipped[0][1]


def test_tune_of_a_class_without_index_values_skips_it(tmp_path: Path, h200: type[SizedBench]) -> None:
    captured(tmp_path, max_bytes=8, pattern="scale_chosen")
    outcome = tune_capture(tmp_path, Progress())
    assert "values were not kept" in outcome.skipped[0][1]


def test_tune_without_a_gpu_raises(tmp_path: Path) -> None:
    capture_sums(tmp_path, (4, 96))
    with pytest.raises(ValueError, match="tune needs a GPU"):
        tune_capture(tmp_path, Progress())
