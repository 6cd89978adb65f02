"""Serving: a config of a table that is none of the kernel's, or that fails here, never ends the program."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adopted import author_configs, captured, example, kernel_of, of_kernel, served, write_table
from plain_kernels import cdiv_grid

from kerneltune.adopt import startup
from kerneltune.adopt.configs import StoredConfig
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.table import Group, ServingRow


def folder_with(root: Path, *configs: StoredConfig, **kwargs: Any) -> None:
    """Write a table that serves the example's row_sum at 96 columns with a changed config, then with the configs."""
    launches = of_kernel(captured(root), "row_sum")
    first = author_configs(launches[0])[3]
    changed = replace(first, kwargs={name: value for name, value in (first.kwargs | kwargs).items() if value is not None})
    write_table(root, kernel_of(launches, [changed, *configs]))


def row_sums() -> list[float]:
    """Launch row_sum at 96 columns and return the sums."""
    sums = torch.empty(4)
    example().row_sum[(4,)](torch.ones(4, 96), sums, 4, 96)
    return sums.tolist()


@pytest.mark.parametrize("block", [None, "wide", 100])
def test_config_of_a_table_that_the_kernel_cannot_take_falls_back_to_the_programs_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, block: Any
) -> None:
    folder_with(tmp_path, BLOCK=block)
    served(tmp_path, miss="default", misses=None)
    for _ in range(2):
        assert row_sums() == [96.0] * 4
    assert example().row_sum.best_config.kwargs == {"BLOCK": 64}
    assert caplog.text.count("fails here") == caplog.text.count("falling back to BLOCK=64") == 1
    assert startup.server().counters.by_name()["fell back two_kernels.row_sum"] == 2


def test_served_config_that_fails_by_any_error_falls_back_to_the_programs_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_with(tmp_path)  # the table has no other config
    kernel, blocks = example().row_sum, list[int]()
    original = kernel.fn.run

    def run(*args: Any, **kwargs: Any) -> Any:
        blocks.append(kwargs["BLOCK"])
        if kwargs["BLOCK"] == 128:
            raise RuntimeError("PassManager::run failed")
        return original(*args, **kwargs)

    monkeypatch.setattr(kernel.fn, "run", run)
    served(tmp_path, misses=None)
    for _ in range(2):
        assert row_sums() == [96.0] * 4
    assert blocks == [128, 64, 64]
    assert startup.server().counters.by_name()["fell back two_kernels.row_sum"] == 2
    assert caplog.text.count("fails here (RuntimeError: PassManager::run failed): falling back to BLOCK=64") == 1


def test_launch_that_fails_with_every_config_raises_the_programs_error_and_keeps_the_served_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_with(tmp_path)
    kernel = example().row_sum
    original = kernel.fn.run
    served(tmp_path, misses=None)
    with pytest.raises(ValueError, match="no such place") as raised, monkeypatch.context() as failing:
        failing.setattr(kernel.fn, "run", lambda *_args, **_kwargs: [][0] if _kwargs["BLOCK"] == 128 else int("no such place"))
        row_sums()
    assert raised.value.__context__ is None
    monkeypatch.setattr(kernel.fn, "run", original)
    assert row_sums() == [96.0] * 4
    assert kernel.best_config.kwargs == {"BLOCK": 128}
    assert "falling back" not in caplog.text
    counts = startup.server().counters.by_name()
    assert (counts["served two_kernels.row_sum"], counts["fell back two_kernels.row_sum"]) == (1, 0)


def test_config_by_which_the_authors_pruning_fails_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_with(tmp_path, BLOCK=96)
    kernel = example().row_sum

    def prune(configs: list[Any], _named: Any, **_given: Any) -> list[Any]:
        return [config for config in configs if [32, 64, 128, 256].index(config.kwargs["BLOCK"]) < 2]

    monkeypatch.setattr(kernel, "early_config_prune", prune)
    served(tmp_path, miss="default", misses=None)
    assert row_sums() == [96.0] * 4
    assert kernel.best_config.kwargs == {"BLOCK": 64}


@pytest.mark.parametrize("block", ["wide", 100, 64])
def test_plain_kernel_whose_served_block_cannot_be_launched_runs_with_the_programs_own(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, block: Any
) -> None:
    x, blocks = torch.ones(100), list[int]()

    def launch() -> list[float]:
        out = torch.empty(100)
        module.doubled[cdiv_grid(100)](x, out, 100, 2.0, BLOCK=32)
        return out.tolist()

    startup.capture(tmp_path, plain=True)
    launch()
    startup.recorder().flush()
    startup.uninstall()
    (one,) = of_kernel(read_capture(tmp_path), "doubled")
    chosen = replace(one.candidates[0].config, kwargs={"BLOCK": block})
    evidence = {"grid": [2], "program_grid": [4]}
    group = Group(one.key_values, one.dtypes, (), (ServingRow(one.sizes, (chosen,), evidence),))
    write_table(tmp_path, kernel_of([one], [chosen], is_plain=True, shared=(), groups=(group,)))
    kind = type(module.doubled)
    original = kind.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        blocks.append(kwargs["BLOCK"])
        if kwargs["BLOCK"] == 64:
            raise RuntimeError("PassManager::run failed")
        return original(kernel, *args, **kwargs)

    monkeypatch.setattr(kind, "run", run)
    served(tmp_path, misses=None)
    for _ in range(2):
        assert launch() == [2.0] * 100
    assert blocks == ([64, 32, 32] if block == 64 else [32, 32])
    assert caplog.text.count("config BLOCK=64 fails here (RuntimeError") == (block == 64)


def test_serving_from_a_folder_that_cannot_be_written_warns_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_with(tmp_path)
    monkeypatch.setattr("kerneltune.adopt.recorder.os.access", lambda *_: False)
    served(tmp_path, miss="nearest")
    caplog.clear()
    for columns in (64, 72):
        example().step(4, columns)
    assert [line for line in caplog.messages if "misses" in line or "not written" in line] == [
        f"kerneltune: misses are not recorded: PermissionError: cannot write {tmp_path / 'misses'}"
    ]
