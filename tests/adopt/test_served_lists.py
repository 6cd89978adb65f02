"""Serving a program that has changed its kernel, or chooses from, prunes or assigns its list: no config that it excludes."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from adopted import author_configs, example, kernel_of, served, tuned_folder, write_table

import kerneltune.nn
from kerneltune.adopt import startup
from kerneltune.adopt.configs import StoredConfig
from kerneltune.adopt.folder import CLASSES
from kerneltune.adopt.kernels import Launch, key_function
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.replay import make_replay

PROGRAM = """
import torch
import triton
import triton.language as tl
def prune(configs, named, **_):
    most = named["most_ptr"].max().item()
    kept = [config for config in configs if config.kwargs["BLOCK"] <= most]
    assert kept, "no config is left"
    return kept
WIDTH = tl.constexpr(1)
LISTED = [triton.Config({"BLOCK": block}) for block in (16, 32, 64, 128)]
@triton.autotune(LISTED, ["N"], prune_configs_by={"early_config_prune": prune}, do_bench=lambda call, quantiles: [1.0] * 3)
@triton.jit
def noted(x_ptr, most_ptr, N, M, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + places, tl.full((BLOCK,), BLOCK * WIDTH.value, tl.float32), mask=places < N)
def step(most):
    x = torch.empty(64)
    noted[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, torch.tensor([most]), 64, most)
    return x[0].item()
"""


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str = "") -> Any:
    """Import the program anew, with more code at its end."""
    (folder / "of_lists.py").write_text(PROGRAM + code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "of_lists", raising=False)
    importlib.invalidate_caches()
    return importlib.import_module("of_lists")


def captured_and_tuned(folder: Path, module: Any, chosen: int) -> list[StoredConfig]:
    """Capture a launch of the program, and write a table that serves one of its configs."""
    startup.capture(folder)
    module.step(64)
    startup.uninstall()
    classes = read_capture(folder).classes
    configs = author_configs(classes[0])
    write_table(folder, kernel_of(classes, [configs[chosen], *configs]))
    return configs


@pytest.mark.parametrize(("chosen", "block"), [(0, 16.0), (1, 32.0)])
def test_program_that_filters_its_list_when_it_starts_is_served_from_the_filtered_list(
    chosen: int, block: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table's config for torch.compile takes the place of the tuned list alone, not of the list that is filtered."""
    filtering = "noted.configs = [config for config in noted.configs if config.kwargs['BLOCK'] <= 32]\n"
    captured_and_tuned(tmp_path, loaded(tmp_path, monkeypatch, filtering), chosen)
    server = served(tmp_path, miss="error")
    module = loaded(tmp_path, monkeypatch, filtering)
    assert [config.kwargs["BLOCK"] for config in module.noted.configs] == [16, 32]
    assert (module.step(64), server.hits) == (block, 1)


def test_program_that_takes_its_first_config_is_served_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = "noted.configs = noted.configs[:1]\n"
    captured_and_tuned(tmp_path, loaded(tmp_path, monkeypatch, first), 0)
    served(tmp_path)
    assert loaded(tmp_path, monkeypatch, first.replace(":1", "2:3")).step(64) == 64.0


def test_launch_for_which_the_pruning_fails_is_served_the_last_config_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launch twice more with a key whose first launch was pruned, as triton.autotune prunes for that launch alone."""
    module = loaded(tmp_path, monkeypatch)
    captured_and_tuned(tmp_path, module, 1)
    served(tmp_path, miss="error")
    assert [module.step(most) for most in (64, 128, 8)] == [32.0] * 3


def test_first_launch_for_which_the_pruning_fails_raises_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded(tmp_path, monkeypatch)
    captured_and_tuned(tmp_path, module, 1)
    served(tmp_path, miss="error")
    with pytest.raises(AssertionError, match="no config is left"):
        module.step(8)


def test_config_is_compiled_ahead_where_the_pruning_reads_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for config in captured_and_tuned(tmp_path, loaded(tmp_path, monkeypatch), 0):
        (launch,) = read_capture(tmp_path).classes
        make_replay(launch, tmp_path / CLASSES / launch.digest, "meta", 0).compile(config)


def test_serving_tunes_once_for_each_of_very_many_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_folder(tmp_path)
    kernel = example().row_sum
    monkeypatch.setattr(kernel, "configs", kernel.configs)
    server = served(tmp_path, misses=None)
    lists = [[triton.Config({"BLOCK": 16}, maxnreg=number), triton.Config({"BLOCK": 32})] for number in range(100)]
    for configs in lists * 2:
        kernel.configs = configs
        kernel[(4,)](torch.ones(4, 64), torch.empty(4), 4, 64)
    assert server.tunings == 100


def test_kernel_whose_constexpr_has_changed_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captured_and_tuned(tmp_path, loaded(tmp_path, monkeypatch), 1)
    server = served(tmp_path, misses=None)
    assert (loaded(tmp_path, monkeypatch).step(64), server.hits) == (32.0, 1)
    monkeypatch.setitem(globals(), "PROGRAM", PROGRAM.replace("constexpr(1)", "constexpr(1 + 1)"))
    assert (loaded(tmp_path, monkeypatch).step(64), server.hits, server.tunings) == (32.0, 1, 1)
    assert "of_lists.noted: its source has changed since it was tuned" in caplog.text


def test_torch_compile_skips_the_functions_that_serve_and_no_other_package(tmp_path: Path) -> None:
    """A launch that breaks a graph runs them in Python, where torch.compile would compile each, anew for each class."""
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    tuned_folder(tmp_path)
    served(tmp_path)
    x = torch.arange(96.0)
    key_of = key_function(Launch(example().row_sum, (x,), {}), {"x_ptr"})
    assert rules.check_file(key_of.__code__.co_filename).skipped
    assert not rules.check_file(kerneltune.nn.__file__).skipped


TWICE = """
@triton.jit
def scaled(x_ptr, N, M, BLOCK: tl.constexpr, FACTOR: tl.constexpr = 1):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + places, tl.full((BLOCK,), FACTOR * BLOCK, tl.float32), mask=places < N)
tuned = triton.autotune(LISTED[:2], ["N"])(scaled)
other = triton.autotune(OTHERS, KEY, do_bench=lambda call, quantiles: [1.0] * 3)(scaled)
def launch(kernel, m):
    x = torch.empty(64)
    kernel[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, 64, m)
    return x[0].item()
def step(m):
    return launch(tuned, m)
"""
FACTORS = "[triton.Config({'BLOCK': 16, 'FACTOR': 3}), triton.Config({'BLOCK': 32, 'FACTOR': 3})]"


@pytest.mark.parametrize(("others", "key", "first"), [(FACTORS, "['N']", 48.0), ("LISTED[:2]", "['M']", 16.0)])
def test_second_autotuner_of_a_kernel_is_served_no_config_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str, key: str, first: float
) -> None:
    """The first autotuner's config lacks FACTOR, or is of a launch with another M."""
    code = TWICE.replace("OTHERS", others).replace("KEY", key)
    captured_and_tuned(tmp_path, loaded(tmp_path, monkeypatch, code), 1)
    server = served(tmp_path, misses=None)
    module = loaded(tmp_path, monkeypatch, code)
    assert (module.step(64), module.launch(module.other, 64)) == (32.0, first)
    assert (server.hits, server.misses) == (1, 1)
