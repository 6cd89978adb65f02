"""Misses of the cache: a single warning, an error in strict mode, a log, and a sweep file for tune."""

import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kerneltune import cache, misses, ops, sweep_file
from kerneltune.cache import CaseOptions
from kerneltune.cli import app
from kerneltune.misses import CacheMissWarning
from kerneltune.spec import Case, TaskKey

pytestmark = pytest.mark.usefixtures("forgotten_configs")

OP = ops.load()["rmsnorm_fwd"]
OPTIMIZED = OP.variant("optimized")
MISS = {"op": "a", "variant": "b", "device": "c", "axes": {}, "dtype": "d", "quant": "e", "options": {}, "policy": "cold"}
OPTIONS = (("zero_centered", False), ("fp8_format", "e4m3"), ("row_pad", 0))
GPU = "nvidia_h200"


def axes(rows: int, columns: int) -> tuple[tuple[str, int], ...]:
    return ("M", rows), ("N", columns)


def stored(root: Path, rows: int, columns: int, options: CaseOptions = OPTIONS, **knobs: Any) -> None:
    case = Case("c", axes(rows, columns), "bfloat16", "none", options)
    config = dataclasses.asdict(OPTIMIZED.default_config(case)) | knobs
    entry = cache.CacheEntry(op="rmsnorm_fwd", variant="optimized", case=case, policy="cold", config=config)
    cache.store(GPU, entry, root)


def best(root: Path, rows: int, columns: int, gpu: str = GPU) -> Any:
    choose = cache.Chooser.of(OP, OPTIMIZED, root=root)
    return choose(axes(rows, columns), "bfloat16", "none", OPTIONS, gpu)


def test_look_up_of_an_exact_entry_warns_of_nothing(tmp_path: Path) -> None:
    stored(tmp_path, 8192, 4096)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best(tmp_path, 8192, 4096)
        best(tmp_path, 1, 1, gpu="interpreter")


def test_miss_warns_once_and_names_the_config_in_use(tmp_path: Path) -> None:
    stored(tmp_path, 8192, 4096)
    with pytest.warns(CacheMissWarning) as caught:
        for _ in range(3):
            best(tmp_path, 2048, 4096)
    assert len(caught) == 1
    assert str(caught[0].message).startswith(
        "no config for rmsnorm_fwd optimized M=2048 N=4096 bfloat16 none zero_centered=False fp8_format=e4m3 row_pad=0 cold on "
        'nvidia_h200; using that of M=8192 N=4096 bfloat16, log2 distance 2.00: {"rows": 1, '
    )
    with pytest.warns(CacheMissWarning, match="; using the default$"):
        best(tmp_path, 2048, 1024)


def test_miss_with_a_config_of_another_policy_names_that_policy(tmp_path: Path) -> None:
    stored(tmp_path, 8192, 4096)
    choose = cache.Chooser.of(OP, OPTIMIZED, "hot", tmp_path)
    with pytest.warns(
        CacheMissWarning, match=r"hot on nvidia_h200; using that of M=8192 N=4096 bfloat16 cold, log2 distance 0\.00: "
    ):
        choose(axes(8192, 4096), "bfloat16", "none", OPTIONS, GPU)


def test_miss_with_a_config_of_other_options_warns_once_and_raises_in_strict_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, 8192, 4096, options=(("zero_centered", True), ("fp8_format", "e5m2"), ("row_pad", 0)), warps=8)
    with pytest.warns(CacheMissWarning) as caught:
        used = [best(tmp_path, rows, 4096) for rows in (8192, 4096, 8192)]
    few, many = (OPTIMIZED.default_config(Case("", axes(rows, 4096), "bfloat16")) for rows in (4096, 8192))
    assert len(caught) == 1
    assert used[1] == few
    assert used[0] == used[2] == dataclasses.replace(many, warps=8)
    assert (
        str(caught[0].message)
        .partition("; using ")[2]
        .startswith('that of M=8192 N=4096 bfloat16 zero_centered=True fp8_format=e5m2, log2 distance 2.00: {"rows": 1, ')
    )
    cache.clear()
    monkeypatch.setenv("KERNELTUNE_STRICT", "1")
    nearest = r"nearest: that of M=8192 N=4096 bfloat16 zero_centered=True fp8_format=e5m2, log2 distance 2\.00: "
    with pytest.raises(LookupError, match=nearest):
        best(tmp_path, 8192, 4096)


def test_miss_of_a_further_size_of_a_free_axis_warns_of_nothing(tmp_path: Path) -> None:
    stored(tmp_path, 8192, 4096)
    stored(tmp_path, 8192, 2048)
    with pytest.warns(CacheMissWarning) as caught:
        for rows in (1024, 2048, 2049):
            best(tmp_path, rows, 4096)
        best(tmp_path, 1024, 2048)
    assert [str(w.message).split("bfloat16")[0].split("optimized ")[1] for w in caught] == ["M=1024 N=4096 ", "M=1024 N=2048 "]


def test_look_up_skips_a_config_that_is_invalid_at_the_size(tmp_path: Path) -> None:
    """Entries of any size may be found; `invalid` is asked for the size that is wanted."""
    stored(tmp_path, 8192, 4096, warps=3000)
    with pytest.warns(CacheMissWarning, match="; using the default$"):
        assert best(tmp_path, 4096, 4096) == OPTIMIZED.default_config(Case("", axes(4096, 4096), "bfloat16"))


@pytest.mark.parametrize("value", ["1", "true", "Yes", "on"])
def test_strict_mode_raises_at_every_miss(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path, 8192, 4096)
    monkeypatch.setenv("KERNELTUNE_STRICT", value)
    for _ in range(2):
        with pytest.raises(LookupError, match=r"^no config for rmsnorm_fwd .*\(KERNELTUNE_STRICT=1\); nearest: that of M=8192"):
            best(tmp_path, 1024, 4096)
    assert best(tmp_path, 8192, 4096) is not None


def test_strict_mode_with_another_value_than_on_or_off_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path, 8192, 4096)
    for value in ("", "0", "False", "off"):
        monkeypatch.setenv("KERNELTUNE_STRICT", value)
        cache.clear()
        with pytest.warns(CacheMissWarning):
            assert best(tmp_path, 16, 4096) is not None
    monkeypatch.setenv("KERNELTUNE_STRICT", "maybe")
    with pytest.raises(ValueError, match=r"^KERNELTUNE_STRICT: 'maybe': expected one of 1, true, yes, on, 0, false, no, off$"):
        best(tmp_path, 32, 4096)


@pytest.mark.filterwarnings("ignore::kerneltune.misses.CacheMissWarning")
def test_log_of_misses_with_an_empty_name_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELTUNE_LOG_MISSES", "")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="cannot write")
        assert best(tmp_path, 16, 4096) is not None


@pytest.mark.filterwarnings("ignore::kerneltune.misses.CacheMissWarning")
def test_from_misses_writes_a_sweep_file_of_logged_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "new" / "misses.jsonl"
    monkeypatch.setenv("KERNELTUNE_LOG_MISSES", str(log))
    stored(tmp_path, 8192, 4096)
    for rows in (16, 32, 16):
        best(tmp_path, rows, 4096)
        cache.clear()
    assert len(log.read_text().splitlines()) == 3
    assert len(misses.read(log)) == 2
    output = tmp_path / "misses.yaml"
    result = CliRunner().invoke(app, ["cache", "from-misses", "-o", str(output)], env={"KERNELTUNE_LOG_MISSES": str(log)})
    assert result.exit_code == 0, result.output
    plan = sweep_file.load(output, ops.load())
    assert [(e.op, e.case.name, e.case.axes, e.case.quant) for e in plan.bench] == [
        ("rmsnorm_fwd", f"rmsnorm_fwd-{rows}x4096", axes(rows, 4096), "none") for rows in (16, 32)
    ]
    assert plan.bench[0].case.options == OPTIONS


def test_miss_with_an_unwritable_log_warns_and_returns_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KERNELTUNE_LOG_MISSES", str(tmp_path / "file" / "log"))
    with pytest.warns(UserWarning, match="cannot write .*file/log"):
        assert best(tmp_path / "configs", 16, 4096) is not None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":1: JSON: input data was truncated"),
        ("[]", ":1: JSON: []: expected object"),
        ("[" * 99999, ":1: JSON: expected `object`, got `array`"),
        ('{"op": 3}', ":1: op: 3: expected str"),
        ('{"op": "a b"}', r":1: op: 'a b': expected str matching regex '^[^\\s{}:,]+$'"),
        (json.dumps(MISS | {"axes": {"M": -4}}), ":1: axes: {'M': -4}: expected int >= 0"),
        (json.dumps(MISS | {"axes": {"M": "x"}}), ":1: axes: {'M': 'x'}: expected int"),
        (json.dumps(MISS | {"options": {"a": [1]}}), ":1: options: {'a': [1]}: expected bool | int | float | str"),
    ],
)
def test_from_misses_of_a_broken_log_names_its_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(line + "\n")
    result = CliRunner().invoke(app, ["cache", "from-misses", str(path)])
    assert (result.exit_code, result.stderr) == (2, f"error: {path}{message}\n")


def test_from_misses_of_an_empty_log_raises(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    result = CliRunner().invoke(app, ["cache", "from-misses", str(tmp_path / "log")])
    assert (result.exit_code, result.stderr) == (2, f"error: {tmp_path}/log: misses: none: nothing to tune\n")


def test_miss_with_a_pipe_as_log_warns_once_and_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a regular file"):
        misses.read(path)
    monkeypatch.setenv("KERNELTUNE_LOG_MISSES", str(path))
    misses.forget()
    with pytest.warns(UserWarning, match="cannot write .*pipe"):
        key = TaskKey("stream", "optimized", Case("", (("read", 8),), "int32"), "cold")
        misses.report(key, "a_gpu", lambda: "the default", ())
