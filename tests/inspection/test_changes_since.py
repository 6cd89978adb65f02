"""Test the static gate against a revision: it compiles changed configs alone."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kerneltune import ops
from kerneltune.files import data_root
from kerneltune.gating.static_gate import static_gate
from kerneltune.identity import code_digest
from kerneltune.inspection import revision as of_revision
from kerneltune.inspection.revision import changes_since
from kerneltune.inspection.static import StaticRow, Survey
from kerneltune.measuring.assembly import Kernel
from kerneltune.plan import cached_runs
from kerneltune.progress import Progress
from kerneltune.task import Run

OPS = {name: ops.load()[name] for name in ("rmsnorm_bwd", "rmsnorm_add_fwd")}
GPU = "nvidia_h200"
RUNS = cached_runs(OPS.values(), GPU)
KERNEL = Kernel("_k", 4, 40, 0, 1024)


def rows(runs: Sequence[Run]) -> Survey:
    static_rows = [
        StaticRow(t.op.name, t.variant.name, f"{t.case.name} {t.case.label}", t.policy, "sm_90", {}, (KERNEL,)) for t, _ in runs
    ]
    return Survey("3.7.1", tuple(static_rows))


class Revision:
    """Stands in for the files of a revision with the configs of this checkout, and the digests that a test says."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        configs = self.tree / "configs" / GPU
        configs.mkdir(parents=True)
        for name in OPS:
            (configs / f"{name}.json").write_bytes((data_root("configs") / GPU / f"{name}.json").read_bytes())
        self.digests = {n: {v.name: v.source_hash + code_digest(op.inputs) for v in op.variants} for n, op in OPS.items()}
        self.compiled: list[list[str]] = []
        self.can_tell = True

    @contextmanager
    def unpacked(self, _revision: str) -> Iterator[Path]:
        yield self.tree

    def run_bound(self, _code: str, arguments: Sequence[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        if self.can_tell:
            Path(arguments[0]).write_text(json.dumps(self.digests))
        return subprocess.CompletedProcess([], 0 if self.can_tell else 1, None, "ImportError: code_digest")

    def inspected(self, _revision: str, _tree: Path, arguments: list[str]) -> Survey:
        self.compiled.append(arguments)
        return rows([run for run in RUNS if [run[0].op.name, f"--variant={run[0].variant.name}"] == arguments[:2]])


@pytest.fixture
def revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Revision:
    new_revision = Revision(tmp_path)
    for name in ("unpacked", "run_bound", "inspected"):
        monkeypatch.setattr(of_revision, name, getattr(new_revision, name))
    return new_revision


def since(runs: Sequence[Run]) -> tuple[Survey, list[Run]]:
    return changes_since("main", runs, GPU, ["--target=sm_90"], Progress())


def test_since_a_revision_with_the_same_code_and_configs_compiles_nothing(revision: Revision) -> None:
    earlier, changed = since(RUNS)
    assert (earlier.rows, changed) == ((), [])
    assert revision.compiled == []
    assert static_gate(earlier, Survey(earlier.triton, ()), len(RUNS)).exit_code == 0


def test_since_a_revision_with_other_code_compiles_the_changed_variant(revision: Revision) -> None:
    revision.digests["rmsnorm_add_fwd"]["optimized"] = "other"
    earlier, changed = since(RUNS)
    assert {(task.op.name, task.variant.name) for task, _ in changed} == {("rmsnorm_add_fwd", "optimized")}
    assert revision.compiled == [["rmsnorm_add_fwd", "--variant=optimized", "--target=sm_90"]]
    assert len(RUNS) > len(earlier.rows) == len(changed) > 0


def test_since_a_revision_with_another_config_compiles_that_config(revision: Revision) -> None:
    others = {config for _, config in RUNS}
    first, other = next((r, c) for r in RUNS for c in others if type(c) is type(r[1]) and c != r[1])
    earlier, changed = since([first._replace(config=other) if run is first else run for run in RUNS])
    assert [(task.case, config) for task, config in changed] == [(first[0].case, other)]
    assert [row.case for row in earlier.rows] == [f"{first[0].case.name} {first[0].case.label}"]


def test_since_a_revision_without_digests_compiles_all(revision: Revision) -> None:
    revision.can_tell = False
    earlier, changed = since(RUNS)
    assert len(changed) == len(earlier.rows) == len(RUNS)
