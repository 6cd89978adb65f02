"""Cached configs in other formats, and the same configs back."""

import errno
import json
import os
import random
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from kerneltune import cache, exchange, ops
from kerneltune.cache import CacheEntry
from kerneltune.cli import app
from kerneltune.spec import Case

SHIPPED = Path(__file__).parent.parent / "configs" / "nvidia_h200"
OPS = ops.load()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


def ours(op: str) -> list[CacheEntry]:
    return [entry for entry in cache.load_strict(SHIPPED / f"{op}.json") if entry.variant == "optimized"]


@pytest.mark.parametrize("format_", ["triton", "python", "json"])
@pytest.mark.parametrize("op", ["rmsnorm_fwd", "rmsnorm_bwd"])
def test_export_then_import_gives_the_same_configs(format_: str, op: str, tmp_path: Path) -> None:
    files, root = tmp_path / "files", tmp_path / "configs"
    assert run("export", op, files, "--format", format_, "--gpu", "nvidia_h200").exit_code == 0
    result = run("import", op, *sorted(files.iterdir()), "--gpu", "nvidia_h200", "--configs", root)
    assert result.exit_code == 0, result.output
    back = cache.load_strict(root / "nvidia_h200" / f"{op}.json")
    assert {entry.key: entry.config for entry in back} == {entry.key: entry.config for entry in ours(op)}
    assert {tuple(entry.evidence) for entry in back} == {("imported",)}


def test_python_export_returns_the_nearest_config_without_kerneltune(tmp_path: Path) -> None:
    run("export", "rmsnorm_bwd", tmp_path, "--gpu", "nvidia_h200")
    first = runpy.run_path(str(tmp_path / "rmsnorm_bwd.py"))
    (example,) = re.findall(r"^# (best\(.*\)) returns knobs$", (tmp_path / "rmsnorm_bwd.py").read_text(), re.MULTILINE)
    assert eval(example, first) == first["ENTRIES"][0]["config"]
    wanted = next(e for e in ours("rmsnorm_bwd") if dict(e.case.axes) == {"M": 16384, "N": 4096} and e.case.dtype == "bfloat16")
    call = "rmsnorm_bwd.best('optimized', {'M': 15000, 'N': 4096}, 'bfloat16', options={'zero_centered': False})"
    script = f"import rmsnorm_bwd; print({call}); print({call.replace('15000', '1').replace('4096', '3')})"
    done = subprocess.run([sys.executable, "-S", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(wanted.config), "None"]


def test_export_replaces_no_module_of_another_format_or_origin(tmp_path: Path) -> None:
    module = tmp_path / "rmsnorm_bwd.py"
    export = ("export", "rmsnorm_bwd", tmp_path, "--gpu", "nvidia_h200", "--format")
    assert [run(*export, "triton").exit_code for _ in range(2)] == [0, 0]
    for text in (module.read_text(), "def best():\n    return None\n"):
        module.write_text(text)
        refused = run(*export, "python")
        expected = f"error: {module}: no earlier export with best(): expected another folder, or a free name\n"
        assert (refused.exit_code, refused.stderr, module.read_text()) == (2, expected, text)


def test_python_export_returns_the_cold_config_for_another_policy(tmp_path: Path) -> None:
    run("export", "rmsnorm_bwd", tmp_path, "--gpu", "nvidia_h200")
    best = runpy.run_path(str(tmp_path / "rmsnorm_bwd.py"))["best"]
    entry = ours("rmsnorm_bwd")[0]
    where = entry.variant, dict(entry.case.axes), entry.case.dtype, entry.case.quant, entry.case.options
    assert entry.policy == "cold"
    assert best(*where, policy="hot") == best(*where) == entry.config


@pytest.mark.parametrize(
    ("misspelt", "message"),
    [
        ({"variant": "optimised"}, r"^variant: 'optimised': expected one of optimized$"),
        ({"axes": {"M": 8192, "K": 4096}}, r"^axes: \['K', 'M'\]: expected \['M', 'N'\]$"),
        ({"options": {"centered": False}}, r"^options: \['centered'\]: expected \['zero_centered'\]$"),
        ({"options": ()}, r"^options: \[\]: expected \['zero_centered'\]$"),
    ],
)
def test_python_export_refuses_names_that_its_table_lacks(misspelt: dict[str, Any], message: str, tmp_path: Path) -> None:
    """None says that no entry serves a case; with None for a misspelt name a program would never get a config."""
    run("export", "rmsnorm_bwd", tmp_path, "--gpu", "nvidia_h200")
    best = runpy.run_path(str(tmp_path / "rmsnorm_bwd.py"))["best"]
    case = {"axes": {"M": 8192, "N": 4096}, "dtype": "bfloat16", "options": {"zero_centered": False}}
    assert best(**{"variant": "optimized"} | case)
    with pytest.raises(ValueError, match=message):
        best(**{"variant": "optimized"} | case | misspelt)


@pytest.mark.filterwarnings("ignore::kerneltune.misses.CacheMissWarning")
@pytest.mark.parametrize("name", ["int4_gemm", "rmsnorm_fwd", "fp8_group_colwise_dual", "fp8_grouped_gemm", "fp8_tensorwise_2d"])
def test_python_export_returns_what_the_cache_returns_for_any_case(name: str, tmp_path: Path) -> None:
    """Try sizes between tuned sizes, other options and types; some near configs are not valid there."""
    assert run("export", name, tmp_path, "--gpu", "nvidia_h200").exit_code == 0
    best = runpy.run_path(str(tmp_path / f"{name}.py"))["best"]
    op, rng = OPS[name], random.Random(0)
    variant = op.variant("optimized")

    def invalid(case: Case, config: Any) -> str | None:
        return None if config is None else variant.invalid(case, config)

    without_default = replace(variant, invalid=invalid, default=lambda _: None)
    choose = cache.Chooser.of(op, without_default)
    answers = []
    for entry in rng.choices(ours(name), k=150):
        axes = tuple((axis, max(1, int(size * rng.choice((0.1, 0.7, 1, 1, 3))))) for axis, size in entry.case.axes)
        axes = tuple((axis, size if axis in op.free_axes else dict(entry.case.axes)[axis]) for axis, size in axes)
        options = tuple((option, rng.choice((value, *op.options[option]))) for option, value in entry.case.options)
        case = Case("", axes, rng.choice((entry.case.dtype, "float16")), entry.case.quant, options)
        there = best("optimized", dict(axes), case.dtype, case.quant, options, valid=partial(without_default.valid_config, case))
        assert variant.config is not None
        answers.append(choose(axes, case.dtype, case.quant, options, "nvidia_h200"))
        assert answers[-1] == (None if there is None else variant.config(**there)), case.label
    assert len(set(answers)) > 5


def test_import_keeps_measured_entries_unless_forced(tmp_path: Path) -> None:
    files, root = tmp_path / "files", tmp_path / "configs"
    run("export", "rmsnorm_bwd", files, "--gpu", "nvidia_h200")
    (file,) = files.iterdir()
    command = ("import", "rmsnorm_bwd", file, "--gpu", "nvidia_h200", "--configs", root)
    cache.store("nvidia_h200", ours("rmsnorm_bwd")[0], root)
    path = root / "nvidia_h200" / "rmsnorm_bwd.json"
    total = len(ours("rmsnorm_bwd"))
    assert run(*command).stdout == f"{total - 1} entries stored in {path}\n"
    assert ours("rmsnorm_bwd")[0] in cache.load_strict(path)
    assert run(*command, "--force").stdout == f"{total} entries stored in {path}\n"


def test_import_on_a_full_disk_stores_all_entries_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, root = tmp_path / "files", tmp_path / "configs"
    run("export", "rmsnorm_bwd", files, "--gpu", "nvidia_h200")
    (file,) = files.iterdir()
    path = cache.store("nvidia_h200", ours("rmsnorm_bwd")[0], root)
    before = path.read_bytes()
    synced: list[int] = []

    def full(descriptor: int) -> None:
        if len(synced) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced.append(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    result = run("import", "rmsnorm_bwd", file, "--gpu", "nvidia_h200", "--configs", root)
    assert (result.exit_code, len(synced)) == (0, 1), "one write of all entries"
    path.write_bytes(before)
    synced += [0, 0]
    result = run("import", "rmsnorm_bwd", file, "--gpu", "nvidia_h200", "--configs", root)
    assert result.exit_code == 2
    assert result.output == f"error: cannot write {path}: No space left on device\n"
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == [f".{path.name}.lock", path.name]


def test_import_of_a_file_above_4_mib_raises(tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text(f"ENTRIES = [{'1,' * (3 << 20)}]")
    with pytest.raises(ValueError, match=r"^cannot read .*large\.py: \d+ bytes: expected at most 4194304$"):
        exchange.read(path, OPS["rmsnorm_bwd"])


def test_import_with_a_path_as_gpu_raises_and_stores_nothing(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    run("export", "rmsnorm_bwd", tmp_path / "files", "--gpu", "nvidia_h200")
    (file,) = (tmp_path / "files").iterdir()
    result = run("import", "rmsnorm_bwd", file, "--gpu", "../../escape", "--configs", root)
    assert result.exit_code == 2
    assert result.stderr == "error: gpu: '../../escape': expected the name of a folder, like escape\n"
    assert not (tmp_path / "escape").exists()
    assert not list(root.rglob("*.json"))


NOT_JSON = ": not a table of configs, as `cache export --format json` writes it"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", f"ENTRIES = {'-' * 50_000}1", ": not Python"),
        ("a.py", "ENTRIES = [{}]", ": ENTRIES: not a table of configs"),
        ("a.py", "import os", ": ENTRIES: not a table of configs"),
        ("a.py", "def (", ": not Python"),
        ("a.json", "{}", f"{NOT_JSON}: op: missing"),
        ("a.json", "[" * 100_000, f"{NOT_JSON}: JSON: expected `object`, got `array`"),
    ],
)
def test_import_of_an_unknown_format_raises_one_line_and_stores_nothing(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    result = run("import", "rmsnorm_bwd", tmp_path / name, "--gpu", "nvidia_h200", "--configs", tmp_path / "configs")
    assert (result.exit_code, result.stderr) == (2, f"error: {tmp_path / name}{message}\n")
    assert not (tmp_path / "configs").exists()


HAND = """{
 "op": "rmsnorm_bwd", "device": "nvidia_h200", "axes": ["M", "N"], "by": "M",
 "case": {"variant": "pr593", "axes": {"N": 4096}, "dtype": "bfloat16", "quant": "none", "options": {"zero_centered": false},
          "policy": "cold"},
 "configs": {"1024": CONFIG, "8192": CONFIG}
}"""
"""A table as a person writes it, without names of cases."""


def hand(*replaced: str) -> str:
    text = HAND.replace("CONFIG", '{"warps": 8, "reduce_rows": 128, "reduce_cols": 64, "reduce_warps": 4}')
    return text.replace(*replaced, 1) if replaced else text


def test_import_of_a_handwritten_table_exports_the_same_table(tmp_path: Path) -> None:
    (tmp_path / "hand.json").write_text(hand())
    root = tmp_path / "configs"
    result = run("import", "rmsnorm_bwd", tmp_path / "hand.json", "--gpu", "nvidia_h200", "--configs", root)
    assert (result.exit_code, result.stdout) == (0, f"2 entries stored in {root}/nvidia_h200/rmsnorm_bwd.json\n")
    chosen = ("--format", "json", "--variant", "pr593", "--configs", root)
    assert run("export", "rmsnorm_bwd", tmp_path / "files", *chosen).exit_code == 0
    (file,) = (tmp_path / "files").iterdir()
    assert json.loads(file.read_text())["configs"] == json.loads(hand())["configs"]


@pytest.mark.parametrize(
    ("was", "becomes", "message"),
    [
        ('"policy": "cold"', '"of": 1', f"{NOT_JSON}: case.policy: missing"),
        ('"by": "M"', '"by": "K"', f"{NOT_JSON}: axes: ['M', 'N']: expected those of case.axes and by, K, N"),
        ('"8192":', '"many":', f"{NOT_JSON}: configs: 'many': expected a size of M"),
        ('"configs": {', '"configs": {,', f"{NOT_JSON}: JSON: object keys must be strings at line 5"),
        ('"variant": "pr593"', '"variant": "odd"', ": M=1024 N=4096 bfloat16 none zero_centered=False: rmsnorm_bwd: variant: "),
        ('"warps"', '"WARPS"', ": M=1024 N=4096 bfloat16 none zero_centered=False: config of pr593: expected the knobs"),
    ],
)
def test_import_of_a_table_with_a_mistake_names_field_or_case(was: str, becomes: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "hand.json"
    file.write_text(hand(was, becomes))
    result = run("import", "rmsnorm_bwd", file, "--gpu", "nvidia_h200", "--configs", tmp_path / "configs")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {file}{message}")
    assert not (tmp_path / "configs").exists()


def test_export_of_many_files_prints_one_line(tmp_path: Path) -> None:
    result = run("export", "rmsnorm_bwd", tmp_path / "files", "--format", "json", "--gpu", "nvidia_h200")
    written = len(list((tmp_path / "files").iterdir()))
    assert written > 1
    assert result.stderr == f"wrote {written} files to {tmp_path / 'files'}\n"


@pytest.mark.parametrize("format_", sorted(exchange.WRITERS))
def test_import_of_a_file_of_another_operator_or_gpu_raises(format_: str, tmp_path: Path) -> None:
    """The other operator has the same axes and options, so that only the name differs."""
    op, entry, root = OPS["rmsnorm_bwd"], ours("rmsnorm_bwd")[0], tmp_path / "configs"
    written = {device: exchange.WRITERS[format_](op, device, [entry], {}) for device in ("nvidia_h200", "nvidia_h100")}
    written["renamed"] = exchange.WRITERS[format_](replace(op, name="other"), "nvidia_h200", [entry], {})
    for folder, files in written.items():
        ((name, text),) = files.items()
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)

    def imported(folder: str, *more: str) -> tuple[int, str, str]:
        (file,) = (tmp_path / folder).iterdir()
        result = run("import", "rmsnorm_bwd", file, "--gpu", "nvidia_h200", "--configs", root, *more)
        return result.exit_code, result.stdout, result.stderr.removeprefix(f"error: {file}: ").rstrip()

    assert imported("renamed", "--force") == (2, "", "op: 'other': expected 'rmsnorm_bwd'")
    assert imported("nvidia_h100") == (2, "", "device: 'nvidia_h100': expected 'nvidia_h200'")
    assert not root.exists()
    path = root / "nvidia_h200" / "rmsnorm_bwd.json"
    assert imported("nvidia_h100", "--force") == (0, f"1 entry stored in {path}\n", "")
    assert imported("nvidia_h200") == (0, f"0 entries stored in {path}\n", "")


def test_triton_export_has_knobs_and_key_in_the_spelling_of_the_kernel(tmp_path: Path) -> None:
    assert run("export", "rmsnorm_bwd", tmp_path, "--format", "triton", "--gpu", "nvidia_h200").exit_code == 0
    module = runpy.run_path(str(tmp_path / "rmsnorm_bwd.py"))
    exported = module["configs"]()
    distinct = {repr(entry.config) for entry in ours("rmsnorm_bwd") if entry.policy == "cold"}
    assert module["KEY"] == ["M", "N"]
    assert len(exported) == len(distinct) > 3
    knobs = {name for config in exported for name in config.kwargs}
    names = {name.lower() for name in knobs}
    assert names == {name for entry in ours("rmsnorm_bwd") for name in entry.config} - {"warps", "stages"}
    assert {config.num_warps for config in exported} == {entry.config["warps"] for entry in ours("rmsnorm_bwd")}
    first = ours("rmsnorm_bwd")[0]
    ((_name, text),) = exchange.to_triton(OPS["rmsnorm_bwd"], "g", [first], {"cols": "BLOCK_N"}).items()
    scope: dict[str, Any] = {}
    exec(text, scope)
    (config,) = scope["configs"](first.policy)
    assert config.kwargs["BLOCK_N"] == first.config["cols"]
    assert "COLS" not in config.kwargs


NASTY = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30) | st.sampled_from(
    [
        '"""', "\'\'\'", '\\"""\nraise SystemExit(9)\n"""', "a\nimport os", "../../x", "/abs", "..", "{__import__(1)}",
        "\\", "\u202e", "a\x00b", "'); print(1); ('", "\N{DIGIT ONE}x", "$(touch x)", "con:nul",
    ]
)  # fmt: skip


@settings(max_examples=60, derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(device=NASTY, name=NASTY, variant=NASTY, dtype=NASTY, option=NASTY, knob=NASTY, value=NASTY)
def test_python_export_of_names_with_code_in_them_runs_no_code(
    device: str, name: str, variant: str, dtype: str, option: str, knob: str, value: str
) -> None:
    """Names of folders and of a cache's entries never become code or a path."""
    case = Case("c", (("M", 8), ("N", 8)), dtype, "none", ((option, value),))
    entry = CacheEntry(op=name, variant=variant, case=case, policy="cold", config={knob: value, "warps": 4})
    op = replace(OPS["rmsnorm_bwd"], name=name)
    for format_ in ("triton", "python", "json"):
        for file, text in exchange.WRITERS[format_](op, device, [entry], {knob: value}).items():
            assert re.fullmatch(r"[A-Za-z0-9_.=+,-]{1,}", file)
            assert not file.startswith(".")
            if file.endswith(".py"):
                scope: dict[str, Any] = {"__name__": "generated"}
                exec(compile(text, file, "exec"), scope)
                assert (scope["OP"], scope["DEVICE"]) == (name, device)
                assert file[:-3].isidentifier()
                assert scope["ENTRIES"][0]["config"] == entry.config
            else:
                assert json.loads(text)["configs"] == {"8": entry.config}


def test_export_of_an_operator_that_is_not_loaded_raises(tmp_path: Path) -> None:
    file = tmp_path / "configs" / "nvidia_h200" / "gone.json"
    file.parent.mkdir(parents=True)
    file.write_text((SHIPPED / "rmsnorm_bwd.json").read_text().replace('"op": "rmsnorm_bwd"', '"op": "gone"'))
    result = run("export", "gone", tmp_path / "files", "--configs", tmp_path / "configs")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: op: 'gone': expected one of ")
    assert not (tmp_path / "files").exists()


def test_import_of_an_invalid_config_stores_nothing(tmp_path: Path) -> None:
    bad = replace(ours("rmsnorm_bwd")[0], config={**ours("rmsnorm_bwd")[0].config, "warps": 4096})
    for name, text in exchange.to_python(OPS["rmsnorm_bwd"], "g", [*ours("rmsnorm_bwd")[1:], bad], {}).items():
        (tmp_path / name).write_text(text)
    result = run("import", "rmsnorm_bwd", tmp_path / "rmsnorm_bwd.py", "--gpu", "g", "--configs", tmp_path / "configs")
    assert result.exit_code == 2
    assert ": warps: 4096: expected a value like 4, 8, 16, 32" in result.stderr
    assert not (tmp_path / "configs").exists()


def test_export_with_an_unknown_format_or_variant_raises(tmp_path: Path) -> None:
    assert run("export", "rmsnorm_bwd", tmp_path, "--format", "yaml").stderr == (
        "error: format: 'yaml': expected one of triton, python, json\n"
    )
    assert run("export", "rmsnorm_bwd", tmp_path, "--variant", "odd").stderr.endswith(
        ": variant: 'odd': expected one of baseline, optimized, pr593\n"
    )
