"""Test inspect: compiled configs, printed tables, refused arguments, exit codes."""

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from asserting import every
from command_line import refused, run
from subprocesses import commit_all

from kerneltune import cache, ops
from kerneltune.cli import console
from kerneltune.inspection import revision, survey
from kerneltune.inspection.static import StaticRow, Survey, save
from kerneltune.measuring.assembly import Access, Kernel
from kerneltune.measuring.compiler import CompileResult
from kerneltune.progress import Progress
from kerneltune.spec import Case
from kerneltune.task import Run, Task

KERNEL = Kernel("_rmsnorm_fwd_rows", 8, 40, 0, 32, 0, (Access("load", 128, 4), Access("store", 32, 1)))


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(console.console, "width", 80)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Run], list[str]]]:
    """Stand in for the compile pool: every config has KERNEL, with a register more for each of its warps."""
    asked: list[tuple[list[Run], list[str]]] = []

    def fake(runs: list[Run], targets: list[str], *_: Any) -> Survey:
        asked.append((runs, targets))
        return Survey("3.7.1", tuple(row(one, target) for target in targets for one in runs))

    def row(run: Run, target: str) -> StaticRow:
        task, config = run
        values = dataclasses.asdict(config)
        kernel = Kernel(KERNEL.name, 8, 32 + values["warps"], 0, 32, 0, KERNEL.accesses)
        label = (task.op.name, task.variant.name, f"{task.case.name} {task.case.label}", task.policy, target)
        return StaticRow(*label, values, (kernel,))

    monkeypatch.setattr(survey, "survey", fake)
    return asked


ONE = ("inspect", "rmsnorm_fwd", "--variant", "optimized", "--case", "te-8192x4096", "--dtype", "bfloat16", "--quant", "none")
LABEL = "te-8192x4096 M=8192 N=4096 bfloat16 none zero_centered=False fp8_format=e4m3 row_pad=0"


def test_inspect_of_a_config_prints_a_table_of_targets(compiled: list[Any]) -> None:
    result = run(*ONE)
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert f"{lines.pop(0)} {lines[0].strip()}" == f"rmsnorm_fwd optimized  {LABEL}"
    assert lines[2:5] == [
        "  _rmsnorm_fwd_rows",
        "target  regs  spill  shared  programs  warps  limiter    loads  stores",
        f"sm_90     {32 + compiled[0][0][0][1].warps}      0      32         6  48/64  registers  128x4  32x1",
    ]
    assert compiled[0][1] == ["sm_90", "sm_100", "gfx942", "gfx950"]
    assert max(map(len, lines[2:])) <= 80
    assert "regs: registers of a thread. spill, shared: bytes. programs, warps: " in " ".join(lines)


def test_inspect_compiles_the_selected_cases_only(compiled: list[Any]) -> None:
    assert run("inspect", "--target", "gfx950", "--case", "te-*", "--quant", "fp8_t").exit_code == 0
    runs, targets = compiled[0]
    assert targets == ["gfx950"]
    assert {(r.op.name, r.case.quant) for r, _ in runs} == {("rmsnorm_fwd", "fp8_t")}
    assert every(r.case.name.startswith("te-") for r, _ in runs)
    assert {"baseline", "optimized"} <= {r.variant.name for r, _ in runs}


def config(**changes: Any) -> str:
    values = {"rows": 1, "cols": 4096, "split": False, "warps": 8, "ctas": 0, "stages": 1, "reload": False}
    return json.dumps({**values, **changes})


def test_inspect_of_a_case_without_a_cached_config_compiles_the_default(compiled: list[Any], tmp_path: Path) -> None:
    assert run("inspect", "rmsnorm_bwd", "M=256", "N=3000", "--variant", "opt*", "--target", "sm_90").exit_code == 0
    ((task, chosen),) = compiled[0][0]
    assert (task.case.name, task.case.label, task.policy) == (
        "256x3000",
        "M=256 N=3000 bfloat16 none zero_centered=False",
        "cold",
    )
    assert chosen == task.variant.default_config(task.case)
    assert run(*ONE, "--configs", tmp_path, "--config", config(warps=16)).exit_code == 0
    ((task, chosen),) = compiled[1][0]
    assert (task.case.name, chosen.warps) == ("te-8192x4096", 16)
    result = run(*ONE, "--configs", tmp_path)
    assert f"{tmp_path / 'nvidia_h200'} has no config for te-8192x4096: default configs" in " ".join(result.stderr.split())
    ((task, chosen),) = compiled[2][0]
    assert (task.case.name, chosen) == ("te-8192x4096", task.variant.default_config(task.case))


def test_inspect_of_a_case_without_a_launch_tells_each_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(runs: list[Run], targets: list[str], *_: Any) -> Survey:
        task = runs[0].task
        label = (task.op.name, task.variant.name, f"{task.case.name} {task.case.label}", task.policy)
        return Survey("3.7.1", tuple(StaticRow(*label, target, {}) for target in targets))

    monkeypatch.setattr(survey, "survey", empty)
    result = run("inspect", "rmsnorm_fwd", "M=0", "N=4096", "--variant", "optimized", "--target", "sm_90")
    assert (result.exit_code, "  sm_90: launches no kernel in this case\n" in result.stdout) == (0, True), result.output


def test_inspect_of_a_config_that_does_not_compile_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(runs: list[Run], targets: list[str], *_: Any) -> Survey:
        ((task, config),) = runs
        label = (task.op.name, task.variant.name, f"{task.case.name} {task.case.label}", task.policy, targets[0])
        return Survey("3.7.1", (StaticRow(*label, dataclasses.asdict(config), (), "out of resources"),))

    monkeypatch.setattr(survey, "survey", fake)
    result = run(*ONE, "--target", "sm_90", "--config", config(warps=16))
    assert (result.exit_code, "  sm_90: out of resources" in result.stdout) == (1, True)
    assert run(*ONE, "--target", "sm_90").exit_code == 0


def test_inspect_all_compiles_every_valid_config_and_lists_spills_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fake(runs: list[Run], targets: list[str], *_: Any) -> Survey:
        asked.extend(config for _, config in runs)
        rows = []
        for number, (task, config) in enumerate(runs):
            kernel = dataclasses.replace(KERNEL, spill_bytes=24 if number == 1 else 0)
            label = (task.op.name, task.variant.name, f"{task.case.name} {task.case.label}", task.policy, targets[0])
            error = "shared memory: 300,000 bytes, sm_90 has 232,448" if number == 2 else ""
            rows.append(StaticRow(*label, dataclasses.asdict(config), () if error else (kernel,), error))
        return Survey("3.7.1", tuple(rows))

    monkeypatch.setattr(survey, "survey", fake)
    result = run("inspect", "fp8_transpose_2d", "M=4096", "N=4096", "--all", "--target", "sm_90")
    case = Case("given", (("M", 4096), ("N", 4096)), "uint8", "fp8", (("fp8_format", "e4m3"),))
    variant = ops.load()["fp8_transpose_2d"].variant("optimized")
    assert asked == list(variant.configs(case))
    text = " ".join(result.stdout.split())
    assert text.index("shared memory: 300,000 bytes") < text.index("spills 24 bytes a thread")
    assert text.endswith(f"sm_90: {len(asked)} configs, 1 fail or exceed a limit, 1 spill")


def test_inspect_all_lists_an_error_of_every_config_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(runs: list[Run], targets: list[str], *_: Any) -> Survey:
        error, rows = "host.py:7: Tensor.item() cannot be called on meta tensors", []
        for target, (task, config) in itertools.product(targets, runs):
            label = (task.op.name, task.variant.name, f"{task.case.name} {task.case.label}", task.policy, target)
            rows.append(StaticRow(*label, dataclasses.asdict(config), (), error))
        return Survey("3.7.1", tuple(rows))

    monkeypatch.setattr(survey, "survey", fake)
    result = run("inspect", "fp8_transpose_2d", "M=4096", "N=4096", "--all", "--target", "sm_90", "--target", "sm_100")
    assert (result.exit_code, result.stdout.count("Tensor.item()")) == (1, 1), result.stdout


def test_inspect_without_an_operator_compiles_nothing_unless_all_is_given(compiled: list[Any]) -> None:
    error = refused("inspect", "--target", "sm_90")
    assert re.fullmatch(
        r"error: op: missing: expected an operator, or --all to compile \d{4} configs of all operators for 1 target", error
    )
    assert compiled == []
    assert run("inspect", "--all", "--quant", "fp8_t", "--target", "sm_90").exit_code == 0
    assert {(task.op.name, task.case.quant) for task, _ in compiled[0][0]} >= {("rmsnorm_fwd", "fp8_t")}


def test_inspect_of_a_capture_compiles_its_kernels_only(
    compiled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("rmsnorm_bwd", "moe_permute")
    monkeypatch.setattr("kerneltune.cli.loading.captured_ops", lambda _folder="": {name: ops.load()[name] for name in names})
    assert run("inspect", "--target", "sm_90", "--configs", tmp_path).exit_code == 0
    assert {task.op.name for task, _ in compiled[0][0]} == set(names)
    assert run("inspect", "rmsnorm_fwd", "--target", "sm_90", "--configs", tmp_path).exit_code == 0
    assert {task.op.name for task, _ in compiled[1][0]} == {"rmsnorm_fwd"}


def test_inspect_with_an_unwritable_file_fails_before_it_compiles(compiled: list[Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "of"
    assert refused(*ONE, "--save", folder / "rows.json") == f"error: cannot write {folder}: Not a directory"
    assert not compiled


def test_static_gate_exits_with_1_for_a_worse_kernel_and_0_else(compiled: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    assert run(*ONE, "--save", path).exit_code == 0
    gate = ("gate", path, "--static", "--op", *ONE[1:])
    passed = run(*gate)
    assert (passed.exit_code, passed.stdout.split("; ")[0]) == (
        0, "gate: pass: no new spills, no narrower accesses, nothing over a limit"
    )  # fmt: skip
    text = path.read_text()
    path.write_text(text.replace('"bits": 32', '"bits": 64'))
    worse = run(*gate)
    assert worse.exit_code == 1
    finding = f"rmsnorm_fwd optimized {LABEL} sm_90: _rmsnorm_fwd_rows: stores are 32 bits wide, were 64"
    assert " ".join(worse.stdout.split()).startswith(f"failed: {finding} ")
    assert run(*gate, "--junit", tmp_path / "gate.xml").exit_code == 1
    assert finding in (tmp_path / "gate.xml").read_text()
    accepted = run(*gate, "--accept", "stores are 32 bits wide", "--accept", "no such")
    assert accepted.stderr.endswith("--accept 'no such': no line has this text\n")
    assert (accepted.exit_code, f"note: accepted: {finding} " in " ".join(accepted.stdout.split())) == (0, True)
    assert "\ngate: pass: 4 found and accepted; 4 compared, " in accepted.stdout
    assert run(*gate, "--accept", "loads").exit_code == 1
    path.write_text(text.replace("te-8192x4096", "renamed"))
    assert run(*gate).exit_code == 0
    path.write_text(text.replace("M=8192", "M=8191"))
    other = run(*gate)
    assert (other.exit_code, other.stdout.split("; ")[0].split(": ")[:3]) == (2, ["gate", "not usable", "nothing compared"])


def test_gate_compares_a_file_with_the_configs_of_its_gpu(compiled: list[Any], tmp_path: Path) -> None:
    path, configs = tmp_path / "baseline.json", tmp_path / "configs"
    entries = cache.load("rmsnorm_fwd", "nvidia_h200")
    b200 = [dataclasses.replace(entry, config={**entry.config, "warps": 16}) for entry in entries if entry.variant == "optimized"]
    cache.store("nvidia_h200", entries, configs)
    cache.store("nvidia_b200", b200, configs)
    assert run(*ONE, "--gpu", "nvidia_b200", "--configs", configs, "--save", path).exit_code == 0
    for gpu, warps in (("nvidia_b200", 16), ("nvidia_h200", 4), ("", 4)):
        path.write_text(path.read_text().replace("nvidia_b200", gpu).replace("nvidia_h200", gpu))
        run("gate", path, "--static", "--op", *ONE[1:], "--configs", configs)
        assert {config.warps for _, config in compiled[-1][0]} == {warps}
    path.write_text(path.read_text().replace('"op": "rmsnorm_fwd"', '"op": "of_plug_in"'))
    assert refused("gate", path, "--static").startswith(f"error: {path}: op: 'of_plug_in': expected one of ")
    path.write_text(path.read_text().replace('"gpu": ""', '"gpu": "../b200"'))
    assert refused("gate", path, "--static") == f"error: {path}: gpu: '../b200': expected the name of a folder"


def test_static_gate_compiles_operators_and_targets_of_the_file_and_names_another_config(
    compiled: list[Any], tmp_path: Path
) -> None:
    path, selected = tmp_path / "baseline.json", ("--quant", "none", "--target", "sm_90")
    config = json.dumps(cache.load("moe_permute", "nvidia_h200")[0].config | {"warps": 2})
    assert run("inspect", "moe_permute", *selected, "--config", config, "--save", path).exit_code == 0
    judged = run("gate", path, "--static", "--quant", "none")
    runs, targets = compiled[-1]
    assert ({task.op.name for task, _ in runs}, targets) == ({"moe_permute"}, ["sm_90"])
    assert re.search(r"compared, [1-9]\d* of them with another config, ", " ".join(judged.stdout.split()))


def test_gate_compares_a_file_of_sizes_of_an_operator_without_configs(compiled: list[Any], tmp_path: Path) -> None:
    """The gate looked for cached configs, found none, and asked for sizes, which it does not take."""
    path, options = tmp_path / "baseline.json", ("--target", "sm_90", "--configs", tmp_path)
    sizes = ("M=512", "N=1000", "zero_centered=True")
    saved = run("inspect", "rmsnorm_fwd", *sizes, "--dtype", "float16", "--variant", "optimized", "--save", path, *options)
    assert saved.exit_code == 0
    judged = run("gate", path, "--static", "--op", "rmsnorm_fwd", *options)
    assert judged.exit_code == 0
    assert " ".join(judged.stdout.split()).endswith("; 1 compared, 0 new, 0 gone, 0 broken in both")
    assert run("gate", path, "--static", *options).stdout == judged.stdout
    assert compiled[2] == compiled[1] == compiled[0]
    path.write_text(path.read_text().replace('"bits": 32', '"bits": 64'))
    assert run("gate", path, "--static", "--op", "rmsnorm_fwd", *options).exit_code == 1
    path.write_text(path.read_text().replace("N=1000", "L=1000"))
    error = refused("gate", path, "--static", "--op", "rmsnorm_fwd", *options)
    assert error.startswith(f"error: {path}: case: '512x1000 M=512 L=1000 float16 none zero_centered=True ")


def test_static_gate_of_one_case_counts_no_other_row_of_the_file_as_gone(compiled: list[Any], tmp_path: Path) -> None:
    run("inspect", "rmsnorm_fwd", "--quant", "none", "--target", "sm_90", "--save", path := tmp_path / "baseline.json")
    assert path.read_text().count('"variant": ') > 10
    said = run("gate", path, "--static", "--quant", "none", "--case", "te-8192x4096", "--dtype", "bfloat16").stdout
    assert re.search(r"^gate: pass: .*; [1-9]\d* compared, 0 new, 0 gone, 0 broken in both$", " ".join(said.split()))


def test_static_gate_of_an_operator_without_rows_fails_and_compiles_nothing(compiled: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    save(path, Survey("3.7.1", ()))
    message = f"error: {path}: no row of rmsnorm_fwd for sm_90"
    assert refused("gate", path, "--static", "--op", "rmsnorm_fwd", "--target", "sm_90") == message
    assert compiled == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "error: op: 'nope': expected one of "),
        (["--target", "sm_70"], "error: target: 'sm_70': did you mean sm_90? expected one of sm_90, sm_100, gfx942, gfx950, all"),
        (["--gpu", "b200"], "error: nothing to compile: "),
        (["rmsnorm_bwd", "--gpu", "../b200"], "error: gpu: '../b200': expected the name of a folder, like b200"),
        (["--workers", "0"], "error: workers: 0: expected 1 or more"),
        (["rmsnorm_bwd", "--variant", "optimized", "--config", "{"], "error: config: '{': JSON: "),
        (["rmsnorm_bwd", "--variant", "optimized", "--config", "{}"], "error: config of optimized: expected the knobs ["),
        (["rmsnorm_bwd", "--config", "{}"], "error: config: '{}': expected OP and --variant beside it, for there are "),
        (["rmsnorm_bwd", "K=3"], "error: axis: 'K': expected one of M, N"),
        (["rmsnorm_bwd", "M=3", "--case", "te-*"], "error: case: 'te-*': expected sizes or --case, one of them"),
        (["rmsnorm_bwd", "--case", "nope"], "error: case: 'nope': expected one of te-29x17389, "),
        (["rmsnorm_bwd", "--case", "nope", "--config", "{}"], "error: case: 'nope': expected one of te-29x17389, "),
        (
            ["rmsnorm_bwd", "--case", "M=4096,N=4096"],
            "error: case: 'M=4096,N=4096': expected a case's name; sizes follow OP: rmsnorm_bwd M=4096 N=4096",
        ),
        (["moe_sort"], "error: nothing to compile: moe_sort has no variant with knobs"),
        (["stream", "--case", "nope"], "error: case: 'nope': expected one of 1043340+504397, "),
    ],
)
def test_inspect_with_bad_arguments_fails_and_compiles_nothing(arguments: list[str], message: str, compiled: list[Any]) -> None:
    assert refused("inspect", *arguments).startswith(message)
    assert compiled == []


def test_inspect_of_an_operator_without_configs_and_cases_names_all_axes() -> None:
    advice = "b200 has no config of stream: name sizes, like read=4096 write=4096"
    assert refused("inspect", "stream", "--gpu", "b200").endswith(advice)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.json", "--static"], "error: cannot read nowhere.json: No such file or directory"),
        (["main", "--static", "--run", "rmsnorm"], "error: run: 'rmsnorm': expected without --static"),
        (["main", "--static", "--margin", "0.1"], "error: margin: 0.1: expected without --static"),
        (["main", "--static", "--op", "rmsnorm_fwd", "--op", "rmsnorm_bwd"], "error: op: 'rmsnorm_bwd': expected one operator"),
        (["main", "new.jsonl", "--target", "sm_90"], "error: target: 'sm_90': expected only with --static"),
        (["main", "new.jsonl", "--workers", "2"], "error: workers: 2: expected only with --static"),
    ],
)
def test_static_gate_with_bad_arguments_fails_and_compiles_nothing(
    arguments: list[str], message: str, compiled: list[Any]
) -> None:
    assert refused("gate", *arguments).startswith(message)
    assert compiled == []


def test_static_gate_of_a_revision_outside_of_the_checkout_or_beside_plugins_fails(
    compiled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "error: revision: 'HEAD': only revisions of kerneltune's checkout are compared, without plug-ins and captures: "
    with monkeypatch.context() as patch:
        patch.setenv("KERNELTUNE_PLUGINS", "mine")
        assert refused("gate", "HEAD", "--static").startswith(message)
    monkeypatch.chdir(tmp_path)
    assert refused("gate", "HEAD", "--static").startswith(message)
    assert compiled == []


def test_inspect_of_an_entry_of_an_unknown_variant_fails(compiled: list[Any], tmp_path: Path) -> None:
    values = {"variant": "fast", "case": "c", "axes": {"M": 1, "N": 8}, "dtype": "bfloat16", "quant": "none", "options": {}}
    entry = {**values, "policy": "cold", "config": {}, "evidence": {}}
    path = tmp_path / "nvidia_h200" / "rmsnorm_bwd.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"schema": 1, "op": "rmsnorm_bwd", "device": "nvidia_h200", "entries": [entry]}))
    error = refused("inspect", "rmsnorm_bwd", "--configs", tmp_path)
    assert error.startswith(f"error: {path}: c: rmsnorm_bwd: variant: 'fast': expected one of ")


def test_unpacked_of_an_unknown_revision_raises() -> None:
    with pytest.raises(ValueError, match="'nonesuch': no such revision"), revision.unpacked("nonesuch"):
        pass


def test_inspected_compiles_a_revision_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of a checkout at HEAD says another thing than its files do now."""
    package = tmp_path / "kerneltune" / "cli"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    row = StaticRow("a", "b", "c M=8 bfloat16 none", "cold", "sm_90", {}, (KERNEL,))
    save(tmp_path / "rows.json", Survey("3.7.1", (row,)))
    (tmp_path / "kerneltune" / "__init__.py").touch()
    says = "import shutil, sys\n\ndef main():\n    assert sys.argv[1:3] == ['inspect', 'a']\n"
    says += "    shutil.copy('rows.json', sys.argv[-1])\n"
    (package / "__init__.py").write_text(says)
    commit_all(tmp_path)
    (package / "__init__.py").write_text("raise RuntimeError('changed since')\n")
    monkeypatch.setattr(revision, "data_root", lambda folder: tmp_path / folder)
    with revision.unpacked("HEAD") as tree:
        assert revision.inspected("HEAD", tree, ["a"]) == Survey("3.7.1", (row,))
    with revision.unpacked("HEAD") as tree, pytest.raises(ValueError, match="revision 'HEAD' cannot be inspected: Assertion"):
        revision.inspected("HEAD", tree, ["b"])
    assert not (tmp_path / ".git" / "worktrees").exists()


def test_inspect_lists_a_kernel_launched_for_every_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None: ...
        def compile(self, jobs: list[Any]) -> list[CompileResult]:
            kernels = (KERNEL, KERNEL, dataclasses.replace(KERNEL, registers=64), KERNEL)
            return [CompileResult(kernels)] * len(jobs)

    monkeypatch.setattr(survey, "CompilePool", Pool)
    lines = run(*ONE, "--target", "sm_90").stdout.splitlines()
    assert [line.strip() for line in lines if "_rmsnorm" in line] == ["_rmsnorm_fwd_rows", "_rmsnorm_fwd_rows (2)"]


def test_inspect_of_a_program_that_fits_no_sm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    unfit = dataclasses.replace(KERNEL, warps=32)
    monkeypatch.setattr(survey.CompilePool, "compile", lambda _pool, jobs: [CompileResult((unfit,))] * len(jobs))
    result = run(*ONE, "--target", "gfx942", "--workers", "1")
    last = "  gfx942: _rmsnorm_fwd_rows: no program fits an SM: threads of a program"
    assert last in result.stdout.splitlines()


@pytest.mark.parametrize(
    ("cooperative", "registers", "error"),
    [
        (True, 120, "_rmsnorm_fwd_rows: 2 programs fit an SM, not 3: registers"),
        (True, 80, ""),
        (False, 120, ""),  # its programs do not wait for each other
    ],
)
def test_inspect_of_cooperative_programs_that_do_not_all_fit_fails(
    cooperative: bool, registers: int, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = dataclasses.replace(KERNEL, warps=8, registers=registers, shared_bytes=0, cooperative=cooperative)
    monkeypatch.setattr(survey.CompilePool, "compile", lambda _pool, jobs: [CompileResult((kernel,))] * len(jobs))
    op = ops.load()["rmsnorm_bwd"]
    variant, case = op.variant("optimized"), Case("c", (("M", 8192), ("N", 4096)), "bfloat16")
    config = dataclasses.replace(variant.default_config(case), ctas=3)
    (row,) = survey.survey([Run(Task(op, case, variant), config)], ["sm_90"], 1, Progress()).rows
    assert row.error == error


def test_inspect_compiles_for_nvidia_and_amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    case = ("--case", "te-29x17389", "--quant", "fp8_t", "--dtype", "bfloat16", "--variant", "optimized")
    save = ("--save", tmp_path / "rows.json")
    result = run("inspect", "rmsnorm_fwd", *case, "--target", "sm_90", "--target", "gfx942", "--workers", "1", *save)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    launches = {row["target"]: len(row["kernels"]) for row in rows if "fp8_t" in row["case"]}
    assert launches == {"sm_90": 2, "gfx942": 3}  # programs wait for each other on CUDA alone
    for row in rows:
        assert row["error"] == "", row
        assert len(row["kernels"]) >= 1, row
        for kernel in row["kernels"]:
            assert kernel["registers"] >= 8
            assert {access["kind"] for access in kernel["accesses"]} == {"load", "store"}


def test_survey_of_many_configs_first_prints_the_number_of_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    class Noted(Progress):
        def stage(self, name: str, total: int, kept: int = 0, work: int = 0) -> None:
            notes.append(f"{name} {total}")

        def note(self, text: str) -> None:
            notes.append(text)

    monkeypatch.setattr(survey.CompilePool, "compile", lambda _pool, jobs: [CompileResult((KERNEL,))] * len(jobs))
    op = ops.load()["rmsnorm_fwd"]
    variant, case = op.variant("optimized"), Case("c", (("M", 8192), ("N", 4096)), "bfloat16")
    runs = [Run(Task(op, case, variant), config) for config in itertools.islice(variant.configs(case), 30)]
    survey.survey(runs, ["sm_90", "sm_100"], 2, Noted())
    first, stage = notes
    assert re.fullmatch(r"60 compilations, 30 configs for 2 targets: about \d+ s on 2 cores, less what Triton has cached", first)
    assert stage == "compile 60"
    notes.clear()
    survey.survey(runs[:3], ["sm_90"], 2, Noted())
    assert notes == ["compile 3"]
