"""The index of operators: current, sufficient for commands that only look, and not needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kerneltune import listing, ops, records, workloads
from kerneltune.files import data_root
from kerneltune.listing import facts_of


def test_index_has_the_facts_of_every_operator(tmp_path: Path) -> None:
    known = {name: ops.family(name) for name in ops.families()} | {name: workloads.family(name) for name in workloads.MODULES}
    listing.write(known, tmp_path / "index.json")
    assert listing.INDEX.read_text() == (tmp_path / "index.json").read_text(), "run `kerneltune ops --index`"
    assert ops.facts() == {name: facts_of(op) for name, op in ops.load().items()}


@pytest.mark.parametrize("path", sorted((data_root("results") / "nvidia_h200").glob("*.jsonl")), ids=lambda path: path.stem)
def test_shipped_records_have_the_roles_that_their_operators_give(path: Path) -> None:
    """Of variants that only call torch, too: they are peers."""
    known = ops.facts() | workloads.facts()
    roles = {(op.name, variant.name): variant.role for op in known.values() for variant in op.variants}
    assert roles["fp8_grouped_gemm", "baseline"] == "peer"
    found = {(record.op, record.variant, record.role) for record in records.load(path)}
    assert {(op, name, role) for op, name, role in found if roles[op, name] != role} == set()


@pytest.mark.parametrize("command", [["ops"], ["compare", "baseline", "optimized", "--family", "rmsnorm"]], ids=lambda c: c[0])
def test_command_that_only_looks_imports_no_torch(command: list[str]) -> None:
    code = "import sys; from kerneltune.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    before = os.times()
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # as on a machine without a GPU, whose driver would be asked
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True, env=environment)
    after = os.times()
    assert ("rmsnorm_fwd" if command == ["ops"] else "bfloat16") in done.stdout
    assert not {"torch", "triton", "optuna"} & set(done.stderr.split())
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert seconds < 4  # 0.5 and 0.8 on an idle machine; with torch 4.4


def test_module_that_the_index_lacks_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[None] = []
    monkeypatch.setattr(listing, "INDEX", tmp_path / "none.json")
    assert ops.facts(lambda: prepared.append(None)).keys() == ops.load().keys()
    assert len(prepared) == len(ops.families())


def test_facts_of_a_plug_in_are_those_of_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import dataclasses\nfrom kerneltune.ops.stream import OP\n"
    (tmp_path / "listed_plug_in.py").write_text(code + "OPS = (dataclasses.replace(OP, name='listed'),)\n")
    monkeypatch.setenv("KERNELTUNE_PLUGINS", str(tmp_path / "listed_plug_in.py"))
    assert ops.facts()["listed"].axes == ("read", "write")
