"""Serving on a host with GPUs of two models: each launch gets a config of the table of its own GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adopted import author_configs, captured, example, kernel_of, of_kernel, served, write_table
from plain_kernels import captured as captured_plain
from plain_kernels import launch as launch_plain

from kerneltune.adopt import program, startup
from kerneltune.adopt.overview import read_capture


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of the present GPU, of two that Triton does not know, as the only item."""
    present = [0]
    monkeypatch.setattr(program, "is_interpreted", lambda: False)
    for name, value in (("is_initialized", lambda: True), ("device_count", lambda: 2), ("current_device", lambda: present[0])):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number=None: f"GPU {present[0] if number is None else number}")
    return present


def test_launches_on_gpus_of_two_models_get_configs_of_two_tables(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    launches = of_kernel(captured(tmp_path), "row_sum")
    configs = author_configs(launches[0])
    for number, chosen in enumerate((3, 5)):
        write_table(tmp_path, kernel_of(launches, [configs[chosen], configs[0]]), device=f"gpu_{number}")
    gpu, kernel = request.getfixturevalue("gpu"), example().row_sum
    server = served(tmp_path, miss="error", misses=None)
    blocks = []
    for gpu[0] in (0, 1, 0, 1):
        kernel[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
        blocks.append(kernel.best_config.kwargs["BLOCK"])
    assert blocks == [128, 256] * 2
    assert server.hits == 2
    gpu[0] = 1
    with pytest.raises(LookupError, match="on gpu_1"):
        kernel[(4,)](torch.ones(4, 64), torch.empty(4), 4, 64)


def test_capture_on_gpus_of_two_models_has_a_class_for_each(tmp_path: Path, gpu: list[int]) -> None:
    startup.capture(tmp_path, pattern="row_sum")
    for gpu[0] in (0, 1, 0):
        example().row_sum[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
    startup.recorder().flush()
    startup.uninstall()
    capture = read_capture(tmp_path)
    assert {one.device: capture.count(one).launches for one in capture.classes} == {"gpu_0": 2, "gpu_1": 1}


def test_launch_on_a_gpu_without_a_table_counts_as_not_tuned(
    tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    launches = of_kernel(captured(tmp_path), "row_sum")
    write_table(tmp_path, kernel_of(launches, author_configs(launches[0])[3:]), device="gpu_0")
    gpu, kernel = request.getfixturevalue("gpu"), example().row_sum
    server = served(tmp_path, miss="default", misses=None)
    for gpu[0] in (0, 1, 1, 0):
        kernel[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
        assert kernel.best_config.kwargs["BLOCK"] == (64 if gpu[0] else 128)
    assert (server.hits, server.misses) == (1, 1)
    assert caplog.text.count(f"{tmp_path} has no table for gpu_1, only for gpu_0") == 1


@pytest.mark.parametrize("tuned_on", [(0,), (1,), (0, 1)])
def test_plain_launches_on_gpus_of_two_models_get_options_of_their_own_tables(
    tmp_path: Path, module: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tuned_on: tuple[int, ...]
) -> None:
    (one,) = captured_plain(tmp_path, module, 96)
    for number in tuned_on:
        config = replace(one.candidates[0].config, num_warps=(8, 16)[number])
        write_table(tmp_path, kernel_of([one], [config], is_plain=True, shared=()), device=f"gpu_{number}")
    gpu, warps = request.getfixturevalue("gpu"), list[Any]()
    kind = type(module.doubled)
    original = kind.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        warps.append(kwargs.get("num_warps"))
        return original(kernel, *args, **kwargs)

    monkeypatch.setattr(kind, "run", run)
    startup.install(tmp_path, misses=None)
    for gpu[0] in (0, 1, 0, 1):
        launch_plain(module)
    assert warps == [(8 if 0 in tuned_on else None), (16 if 1 in tuned_on else None)] * 2
