"""Operators from outside: entry points, modules and files, also broken. test_documents.py runs the guide."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import install, write_files
from typer.testing import CliRunner
from warm_python import python

from kerneltune import cache, ops
from kerneltune.cli import app
from kerneltune.spec import Case

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "your_own_kernel.md"
COMPILE = """
from functools import partial
from kerneltune import ops
from kerneltune.measuring.assembly import TARGETS
from kerneltune.measuring.compiler import CompilePool
from kerneltune.task import Run, Task
from kerneltune.spec import Case

if __name__ == "__main__":
    op = ops.load()["swiglu"]
    variant = op.variant("optimized")
    case = Case("ffn", (("M", 64), ("N", 1024)), "bfloat16")
    with CompilePool(TARGETS["sm_90"], 1) as pool:
        (compiled,) = pool.compile([Run(Task(op, case, variant), variant.default_config(case))])
    print(compiled.error or [kernel.name for kernel in compiled.kernels])
"""


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    """Make a folder with the files that the guide shows, each named in its first line, and a `kerneltune` on the path."""
    write_files(GUIDE, tmp_path)
    (tmp_path / "bin").mkdir()
    for name, command in (("kerneltune", '-c "from kerneltune.cli import main; main()" "$@"'), ("python", '"$@"')):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec "{python()}" {command}\n')
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def shell(folder: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script where no GPU is seen; PYTHONPATH comes behind the package and what this process has."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": ""}
    path = [str(ROOT), os.environ.get("PYTHONPATH", ""), environment.pop("PYTHONPATH", "")]
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, path))} | environment
    return subprocess.run(["sh", "-ec", script], cwd=folder, env=env, capture_output=True, text=True, timeout=800)


def test_compile_workers_find_a_module_of_the_working_folder(guide: Path) -> None:
    (guide / "elsewhere").mkdir()
    (guide / "elsewhere" / "work.py").write_text(COMPILE)
    cache_folder = str(guide / "triton")
    done = shell(guide, "python elsewhere/work.py", KERNELTUNE_PLUGINS="swiglu", TRITON_CACHE_DIR=cache_folder)
    assert done.stdout == "['_swiglu']\n", done.stderr


def test_kernel_that_python_runs_and_triton_refuses_fails_its_check(guide: Path) -> None:
    plugin = guide / "swiglu.py"
    text = plugin.read_text().replace(
        "    mask = offsets < count\n", "    mask = offsets < count\n    is_small = 0 <= count < 5\n"
    )
    plugin.write_text(text)
    line = 1 + text.splitlines().index("    is_small = 0 <= count < 5")
    done = shell(guide, "kerneltune --plugin swiglu.py sweep ./swiglu.yaml --check-only --quick --case one")
    assert done.returncode == 1, done.stderr
    failures = " ".join(done.stdout.partition("failed: ")[2].split())
    assert failures.startswith("swiglu optimized: one M=1 N=1 bfloat16: does not compile for sm_90: ")
    assert f"swiglu.py:{line}: UnsupportedLanguageConstruct: " in failures
    assert "simultaneous multiple comparison is not supported" in failures


def test_kernel_that_triton_refuses_where_an_argument_is_1_fails_its_check(guide: Path) -> None:
    plugin = guide / "swiglu.py"
    plugin.write_text(plugin.read_text().replace("offsets < count\n", "offsets < count.to(tl.int64)\n"))
    done = shell(guide, "kerneltune --plugin swiglu.py sweep ./swiglu.yaml --check-only --quick")
    assert done.returncode == 1, done.stderr
    failures = " ".join(done.stdout.partition("failed: ")[2].split())
    assert failures.startswith("swiglu optimized: one M=1 N=1 bfloat16: does not compile for sm_90: ")
    assert "AttributeError" in failures


def test_value_of_an_option_that_no_case_has_is_named(guide: Path) -> None:
    plugin = guide / "swiglu.py"
    axes = 'free_axes=("M", "N"),\n'
    options = 'options={"limit": (7.0, 9.0, 8.0)}, unseen_options=("limit",), free_options=("limit",),\n'
    plugin.write_text(plugin.read_text().replace(axes, axes + " " * 8 + options))
    sweep = guide / "swiglu.yaml"
    sweep.write_text(sweep.read_text().replace("N: 333,", "N: 333, limit: [7.0, 9.0],"))
    done = shell(guide, "kerneltune --plugin swiglu.py sweep ./swiglu.yaml --check-only --case one")
    assert "swiglu: no case has limit=8.0: never checked here" in " ".join(done.stdout.split()), done.stdout + done.stderr


def test_inspect_and_explain_take_the_cases_of_a_sweep_in_the_current_folder(guide: Path) -> None:
    done = shell(guide, "kerneltune --plugin swiglu.py inspect swiglu --target sm_90 --case one")
    assert done.stdout.startswith("swiglu optimized  one M=1 N=1 bfloat16 none\n"), done.stderr
    (guide / "swiglu.yaml").write_text((guide / "swiglu.yaml").read_text().replace("ops: [swiglu]", "ops:\n- swiglu"))
    (guide / "folder.yaml").mkdir()
    (guide / "no_text.yaml").write_bytes(b"ops: [swiglu] \xff")
    (guide / "large.yaml").write_text("ops: [swiglu]\n" + "#" * (1 << 20))
    done = shell(guide, "kerneltune --plugin swiglu.py cache explain swiglu ffn-4096")
    assert done.stdout.startswith("case      M=4096 N=14336 bfloat16 none\n"), done.stderr


def test_files_here_that_name_the_operator_and_are_no_sweeps_are_left_out_with_a_line(guide: Path) -> None:
    (guide / "recipe.yaml").write_text("ops: [swiglu]\nsteps: 3\n")
    (guide / "two.yaml").write_text((guide / "swiglu.yaml").read_text().replace("ops: [swiglu]", "ops: [swiglu, other]"))
    done = shell(guide, "kerneltune --plugin swiglu.py cache explain swiglu ffn-4096")
    assert done.stdout.startswith("case      M=4096 N=14336 bfloat16 none\n"), done.stderr
    said = " ".join(done.stderr.split())
    assert "sweep file left out: recipe.yaml:2: field: 'steps': expected one of family" in said
    assert re.search(r"left out: two\.yaml:\d+: ops: 'other': expected one of", said)


def test_variant_whose_package_is_misspelt_is_named(guide: Path) -> None:
    plugin = guide / "swiglu.py"
    plugin.write_text(plugin.read_text().replace('"baseline", run_eager', '"baseline", run_eager, requires=("torhc",)'))
    done = shell(guide, "kerneltune --plugin swiglu.py sweep ./swiglu.yaml --check-only --quick --case one")
    assert done.returncode == 0, done.stderr
    assert "swiglu baseline: left out: its requires are not installed: torhc" in done.stdout


def test_source_hash_and_config_cache_serve_a_plug_in(guide: Path, monkeypatch: pytest.MonkeyPatch, configs_dir: Path) -> None:
    monkeypatch.setenv(ops.PLUGINS, str(guide / "swiglu.py"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    op = ops.load()["swiglu"]
    assert re.fullmatch("[0-9a-f]{12}", op.variant("optimized").source_hash)
    case = Case("ffn", (("M", 64), ("N", 1024)), "bfloat16")
    entry = cache.CacheEntry(op="swiglu", variant="optimized", case=case, policy="cold", config={"block": 2048, "warps": 8})
    stored = cache.store("nvidia_h200", entry, configs_dir)
    assert stored == configs_dir / "nvidia_h200" / "swiglu.json"
    near = Case("", (("M", 128), ("N", 1024)), "bfloat16")
    (match,) = cache.Chooser.of(op, op.variant("optimized"), root=configs_dir).matches(near, "nvidia_h200")
    assert match.config.block == 2048
    assert op.traffic(case).total == 3 * 2 * 64 * 1024
    export = ["cache", "export", "swiglu", str(guide / "out"), "--format", "triton", "--gpu", "nvidia_h200"]
    done = CliRunner().invoke(app, export)
    note = "KEY: ['M', 'N']: no arguments of a kernel: replace or delete them"
    assert f"{guide / 'out' / 'swiglu.py'}: {note}" in " ".join(done.stderr.split())
    text = (guide / "out" / "swiglu.py").read_text()
    assert f"# {note}\nKEY = ['M', 'N']\nNAMES = {{'block': 'BLOCK'}}\n" in text
    assert "{'BLOCK': 2048}" in str(runpy.run_path(str(guide / "out" / "swiglu.py"))["configs"]()[0].kwargs)
    sys.modules.pop("swiglu")


def refused(monkeypatch: pytest.MonkeyPatch, plugin: Path | str) -> str:
    """Return the one line that a command says of a broken plug-in."""
    monkeypatch.setenv(ops.PLUGINS, "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = CliRunner().invoke(app, ["--plugin", str(plugin), "ops"])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    return result.stderr.strip()


def test_broken_plug_in_raises_one_line_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(name: str, text: str) -> Path:
        (tmp_path / f"{name}.py").write_text(text)
        return tmp_path / f"{name}.py"

    raises = written("plug_raises", "\n1 / 0\n")
    assert refused(monkeypatch, raises) == f"error: plug-in {raises}: plug_raises.py:2: ZeroDivisionError: division by zero"
    leaves = written("plug_leaves", "import sys; sys.exit(3)\n")
    assert refused(monkeypatch, leaves) == f"error: plug-in {leaves}: plug_leaves.py:1: SystemExit: 3"
    renamed = written("plug_renamed", "from kerneltune.spec import Variant\nVariant('old', print, valid=print)\n")
    error = "TypeError: Variant.__init__() got an unexpected keyword argument 'valid': the field is called `invalid` now"
    assert refused(monkeypatch, renamed) == f"error: plug-in {renamed}: plug_renamed.py:2: {error}"
    asks = written("plug_asks", "from kerneltune.ops.stream import OP\nOPS = (OP,)\nOPS[0].variant('fast')\n")
    error = "ValueError: stream: variant: 'fast': expected one of baseline"
    assert refused(monkeypatch, asks) == f"error: plug-in {asks}: plug_asks.py:3: {error}"
    sums = written("plug_sums", "import torch\ntorch.einsum('i->', 3)\n")
    assert refused(monkeypatch, sums).startswith(f"error: plug-in {sums}: plug_sums.py:2: ")
    empty = written("plug_empty", "")
    assert refused(monkeypatch, empty) == f"error: plug-in {empty}: OPS: missing: expected a tuple of Op"
    alone = written("plug_alone", "from kerneltune.ops.stream import OP\nOPS = OP\n")
    assert refused(monkeypatch, alone) == f"error: plug-in {alone}: OPS: Op: expected a tuple of Op"
    single = written("plug_single", "import dataclasses\nfrom kerneltune.ops.stream import OP\nOP = dataclasses.replace(OP)\n")
    assert refused(monkeypatch, single).startswith("error: two operators are called 'stream': "), "as OP is an operator, too"
    number = written("plug_number", "OPS = (3,)\n")
    assert refused(monkeypatch, number) == f"error: plug-in {number}: OPS: 3: expected an Op"
    stream = "import dataclasses\nfrom kerneltune.ops.stream import OP\nOPS = (dataclasses.replace(OP{}),)\n"
    twin = written("plug_twin", stream.format(""))
    assert refused(monkeypatch, twin).startswith("error: two operators are called 'stream': in kerneltune.ops.stream and in ")
    step = written("plug_step", stream.format(", name='moe_step'"))
    assert refused(monkeypatch, step).startswith("error: two operators are called 'moe_step': in kerneltune.ops.stream and in ")
    two = "OPS = [dataclasses.replace(OP, name='two', module=__name__),"
    twins = written("plug_twins", f"{stream.partition('OPS')[0]}{two}\n{two.removeprefix('OPS = [')}]\n")
    error = (
        "two operators are called 'two': in plug_twins and in plug_twins (plug_twins.py:3, plug_twins.py:4): rename one of them"
    )
    assert refused(monkeypatch, twins) == f"error: {error}"
    lost = written("plug_lost", stream.format(", module='x'"))
    assert refused(monkeypatch, lost).startswith(f"error: plug-in {lost}: module of stream: 'x': expected the one")
    shadow = written("json", "OPS = ()\n")
    assert f"error: plug-in {shadow}: ImportError: another module is called json: " in refused(monkeypatch, shadow)
    absent = tmp_path / "absent.py"
    assert refused(monkeypatch, absent) == f"error: plug-in {absent}: no such file"
    both_absent = CliRunner().invoke(app, ["--plugin", str(absent), "sweep", str(tmp_path / "absent.yaml")])
    assert both_absent.stderr == f"error: plug-in {absent}: no such file\n"
    unknown = refused(monkeypatch, "no_such_module")
    assert unknown == "error: plug-in no_such_module: ModuleNotFoundError: No module named 'no_such_module'"


def test_broken_entry_point_is_named_with_its_package(guide: Path) -> None:
    install(guide)
    (guide / "swiglu.py").write_text("import nowhere\n")
    done = shell(guide, "kerneltune ops", PYTHONPATH=str(guide))
    assert done.returncode == 2
    error = "swiglu.py:1: ModuleNotFoundError: No module named 'nowhere'"
    assert done.stderr == f"error: plug-in swiglu of package swiglu-kernels: {error}\n"
