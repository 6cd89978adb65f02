"""Shipped configs: the call of each config's case looks up exactly that config, and every export gives them to its consumer."""

import json
import random
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from typer.testing import CliRunner

from kerneltune import cache, exchange, ops
from kerneltune.cache import CacheEntry
from kerneltune.checking.declarations import before_look_ups
from kerneltune.cli import app
from kerneltune.spec import Case

SHIPPED = Path(__file__).parent.parent / "configs" / "nvidia_h200"
NAMES = sorted(path.stem for path in SHIPPED.glob("*.json"))
OPS = ops.load()


class LookedUpError(Exception):
    """Ends a call of a public function at its look-up."""


def entries_of(name: str) -> list[CacheEntry]:
    entries = cache.load_strict(SHIPPED / f"{name}.json")
    assert entries
    return entries


def of_call(entry: CacheEntry) -> tuple[object, ...]:
    return entry.case.axes, entry.case.dtype, entry.case.quant, entry.case.options


def end_call(chooser: cache.Chooser, case: Case) -> None:
    raise LookedUpError(chooser.op.name, chooser.variant.name, case.axes, case.dtype, case.quant, case.options)


@pytest.mark.parametrize("name", NAMES)
def test_call_for_the_case_of_a_shipped_config_looks_up_this_config(name: str) -> None:
    op = OPS[name]
    for entry in entries_of(name):
        variant, case = op.variant(entry.variant), entry.case
        choice = cache.Chooser.of(op, variant, entry.policy).find(op.case_of_call(case), "nvidia_h200")
        assert (choice.source.name, choice.config) == ("own", variant.config_from(entry.config)), case.label
        assert op.case_of_call(case) == case, f"no call looks up {case.label}"
        if variant.name == "optimized":  # the public function; other variants are given a config
            with before_look_ups(end_call), pytest.raises(LookedUpError) as raised:
                variant.run(op.inputs(case, device="meta"), None)
            assert raised.value.args == (name, variant.name, *of_call(entry))


def exported(name: str, format_: str, folder: Path) -> Iterator[tuple[list[CacheEntry], list[Path]]]:
    """Export each variant of an operator, and yield its entries and files."""
    entries = entries_of(name)
    for variant in {entry.variant for entry in entries}:
        files = folder / variant
        command = ["cache", "export", name, str(files), "--format", format_, "--gpu", "nvidia_h200", "--variant", variant]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        yield [entry for entry in entries if entry.variant == variant], sorted(files.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_python_export_answers_every_shipped_case_with_its_config(name: str, tmp_path: Path) -> None:
    for entries, (file,) in exported(name, "python", tmp_path):
        best = runpy.run_path(str(file))["best"]
        for entry in random.Random(0).sample(entries, min(len(entries), 60)):  # a call ranks all entries
            case = entry.case
            knobs = best(entry.variant, dict(case.axes), case.dtype, case.quant, dict(case.options), entry.policy)
            assert knobs == entry.config, entry.case.label


_KERNEL = """
import triton
from {module} import KEY, configs

@triton.autotune(configs=configs({policy!r}), key=KEY)
@triton.jit
def kernel({parameters}):
    pass
"""


@pytest.mark.parametrize("name", NAMES)
def test_triton_export_is_accepted_by_autotune(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS[name]
    for entries, (file,) in exported(name, "triton", tmp_path):
        policy = entries[0].policy
        script = file.with_name("autotuned.py")
        script.write_text(_KERNEL.format(module=file.stem, policy=policy, parameters=", ".join(op.axes)))
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(file.parent))
            patch.delitem(__import__("sys").modules, file.stem, raising=False)
            kernel = runpy.run_path(str(script))["kernel"]
        assert isinstance(kernel, triton.runtime.Autotuner)
        assert kernel.keys == list(op.axes)
        expected = {json.dumps(entry.config) for entry in entries if entry.policy == policy}
        assert len(kernel.configs) == len(expected)
        warps = {json.loads(text).get("warps", 4) for text in expected}
        assert {config.num_warps for config in kernel.configs} == warps


def sizes_of(table: dict[str, Any], size: str) -> dict[str, int]:
    sizes = {**table["case"]["axes"], table["by"]: int(size)}
    return {axis: sizes[axis] for axis in table["axes"]}


@pytest.mark.parametrize("name", NAMES)
def test_json_export_has_every_shipped_config_once(name: str, tmp_path: Path) -> None:
    for entries, files in exported(name, "json", tmp_path):
        exported_rows = []
        for file in files:
            table = json.loads(file.read_text())
            case = table["case"]
            exported_rows += [
                (case["policy"], case["dtype"], case["quant"], case["options"], sizes_of(table, size), config)
                for size, config in table["configs"].items()
            ]
        expected = [(e.policy, e.case.dtype, e.case.quant, dict(e.case.options), dict(e.case.axes), e.config) for e in entries]
        assert sorted(map(repr, exported_rows)) == sorted(map(repr, expected))


def test_every_export_format_has_a_test_here() -> None:
    assert set(exchange.WRITERS) == {"python", "triton", "json"}
