"""Operators that call other operators: with `--configs DIR` each look-up reads DIR, in every process of the command."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import both, run

from kerneltune import cache
from kerneltune.processes.start import in_fresh_processes
from kerneltune.spec import Case

PLUGIN = """
from dataclasses import dataclass

import torch
from kerneltune.cache import Chooser
from kerneltune.kernel_lib.agreement import close
from kerneltune.spec import Op, Traffic, Variant


@dataclass(frozen=True, slots=True)
class Factor:
    factor: int


def make(case, *, device, seed=0):
    if device == "meta":
        return {"x": torch.empty(case["M"], device=device)}
    return {"x": torch.randn(case["M"], device=device, generator=torch.Generator(device).manual_seed(seed))}


def traffic(case):
    return Traffic(4 * case["M"], 4 * case["M"])


def compare(_case, _inputs, outputs, expected):
    return close("y", outputs["y"], expected["y"], 0.0, 0.0)


def of(name, variant, reference):
    return Op(name, ("M",), ("float32",), make, reference, compare, traffic, (variant,), __name__)


INNER = of("inner", Variant("optimized", dict, Factor, default=lambda _case: Factor(1)), dict)


def outer(inputs, _config):
    x = inputs["x"]
    return {"y": x * Chooser.of(INNER, INNER.variants[0])((("M", len(x)),), "float32").factor}


OPS = (of("outer", Variant("optimized", outer), lambda inputs: {"y": 2 * inputs["x"]}),)
"""
SWEEP = "family: outer\nops: [outer]\ndefaults: {dtype: float32}\ncheck:\n  - {name: a, M: 5}\nbench:\n  - {name: b, M: 64}\n"


def test_operator_that_another_operator_calls_reads_the_folder_of_the_option(tmp_path: Path, configs_dir: Path) -> None:
    (tmp_path / "nested.py").write_text(PLUGIN)
    (tmp_path / "outer.yaml").write_text(SWEEP)
    for size in (5, 64):
        case = Case("a", (("M", size),), "float32")
        entry = cache.CacheEntry(op="inner", variant="optimized", case=case, policy="cold", config={"factor": 2})
        cache.store("interpreter", entry, tmp_path / "dir")
    command = ["--plugin", tmp_path / "nested.py", "sweep", tmp_path / "outer.yaml", "--check-only", "--results", tmp_path]
    given = run(*command, "--configs", tmp_path / "dir")
    assert given.exit_code == 0, given.output
    assert run(*command).exit_code == 1


@pytest.mark.usefixtures("an_h200")
@pytest.mark.parametrize("command", ["tune rmsnorm", "sweep rmsnorm", "sweep rmsnorm --check-only", "gate a.jsonl --run rmsnorm"])
def test_processes_of_a_command_read_the_folder_of_the_option(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path]
) -> None:
    monkeypatch.chdir(write("a.jsonl", *both()).parent)
    (tmp_path / "dir").mkdir()
    read: list[Path] = []

    def work(*_: Any) -> list[Any]:
        read.extend(in_fresh_processes(1, cache.default_root))
        return []

    for engine in ("tune.run.run_tune", "sweep_run.run_sweep", "gating.run.run_gate"):
        monkeypatch.setattr(f"kerneltune.{engine}", work)
    run(*command.split(), "--results", tmp_path, "--configs", tmp_path / "dir")
    assert read == [tmp_path / "dir"]
