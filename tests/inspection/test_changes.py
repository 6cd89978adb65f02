"""The static gate against a revision: what is not compiled again, what is, and what an interrupted gate keeps."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kerneltune import ops
from kerneltune.files import data_root
from kerneltune.identity import code_digest
from kerneltune.inspection import changes
from kerneltune.inspection.changes import changes_since, survey_here
from kerneltune.inspection.static import StaticRow, Survey, static_gate
from kerneltune.inspection.survey import SurveyRequest, cached_requests, case_text
from kerneltune.measuring.assembly import Kernel
from kerneltune.run_options import Quiet

OPS = {name: ops.load()[name] for name in ("rmsnorm_bwd", "rmsnorm_add_fwd")}
GPU = "nvidia_h200"
REQUESTS = cached_requests(OPS.values(), data_root("configs"), GPU)
KERNEL = Kernel("_k", 4, 40, 0, 1024)


def rows(requests: Sequence[SurveyRequest]) -> Survey:
    found = [StaticRow(r.op.name, r.variant.name, case_text(r.case), r.policy, "sm_90", {}, (KERNEL,)) for r in requests]
    return Survey("3.7.1", tuple(found))


class Revision:
    """Stands in for a work tree with the configs of this checkout, and the digests that a test says."""

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
    def checked_out(self, _revision: str) -> Iterator[Path]:
        yield self.tree

    def run_bound(self, _code: str, arguments: Sequence[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        if self.can_tell:
            Path(arguments[0]).write_text(json.dumps(self.digests))
        return subprocess.CompletedProcess([], 0 if self.can_tell else 1, None, "ImportError: code_digest")

    def inspected(self, _revision: str, _tree: Path, _rows: Path, arguments: list[str]) -> Survey:
        self.compiled.append(arguments)
        return rows([r for r in REQUESTS if [r.op.name, r.variant.name] == arguments])


@pytest.fixture
def revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Revision:
    made = Revision(tmp_path)
    for name in ("checked_out", "run_bound", "inspected"):
        monkeypatch.setattr(changes, name, getattr(made, name))
    return made


def since(requests: Sequence[SurveyRequest], folder: Path) -> changes.Changes:
    return changes_since("main", requests, ["sm_90"], GPU, lambda *named: list(named), folder, Quiet())


def test_a_revision_with_the_same_code_and_configs_compiles_nothing(revision: Revision, tmp_path: Path) -> None:
    found = since(REQUESTS, tmp_path)
    assert (found.earlier.rows, found.requests, found.unchanged) == ((), (), len(REQUESTS))
    assert revision.compiled == []
    assert static_gate(found.earlier, Survey(found.earlier.triton, ()), found.unchanged).exit_code == 0


def test_a_revision_with_other_code_compiles_the_variant_whose_code_changed(revision: Revision, tmp_path: Path) -> None:
    revision.digests["rmsnorm_add_fwd"]["optimized"] = "other"
    found = since(REQUESTS, tmp_path)
    assert {(r.op.name, r.variant.name) for r in found.requests} == {("rmsnorm_add_fwd", "optimized")}
    assert revision.compiled == [["rmsnorm_add_fwd", "optimized"]]
    assert len(found.earlier.rows) == len(found.requests) == len(REQUESTS) - found.unchanged > 0


def test_a_revision_with_another_config_compiles_only_that(revision: Revision, tmp_path: Path) -> None:
    others = {r.config for r in REQUESTS}
    first, other = next((r, c) for r in REQUESTS for c in others if type(c) is type(r.config) and c != r.config)
    found = since([replace(r, config=other) if r is first else r for r in REQUESTS], tmp_path)
    assert [(r.case, r.config) for r in found.requests] == [(first.case, other)]
    assert [row.case for row in found.earlier.rows] == [case_text(first.case)]


def test_a_revision_that_cannot_tell_its_code_is_compiled_whole(revision: Revision, tmp_path: Path) -> None:
    revision.can_tell = False
    found = since(REQUESTS, tmp_path)
    assert (len(found.requests), found.unchanged) == (len(REQUESTS), 0)
    assert len(found.earlier.rows) == len(REQUESTS)


def test_an_interrupted_gate_goes_on_with_the_operators_that_it_has_not_compiled(revision: Revision, tmp_path: Path) -> None:
    for digests in revision.digests.values():
        digests["optimized"] = "other"
    first = since(REQUESTS, tmp_path)
    asked: list[str] = []

    def compiling(requests: Sequence[SurveyRequest]) -> Survey:
        if len(asked) == 1:
            asked.append("interrupted")
            raise KeyboardInterrupt
        asked.append(requests[0].op.name)
        return rows(requests)

    with pytest.raises(KeyboardInterrupt):
        survey_here(first.requests, ["sm_90"], compiling, tmp_path)
    revision.compiled.clear()
    again = since(REQUESTS, tmp_path)
    assert revision.compiled == []
    assert {row.key for row in again.earlier.rows} == {row.key for row in first.earlier.rows}
    found = survey_here(again.requests, ["sm_90"], compiling, tmp_path)
    assert asked == ["rmsnorm_bwd", "interrupted", "rmsnorm_add_fwd"]
    assert {row.key for row in found.rows} == {row.key for row in again.earlier.rows}


def test_the_files_of_rows_that_were_used_last_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []

    def keep(decides: object) -> None:
        changes.kept(tmp_path, ["sm_90"], decides, lambda: compiled.append(decides) or rows(REQUESTS[:1]))
        for path in tmp_path.glob("*.json"):  # an hour passes
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 3600 * 10**9))

    monkeypatch.setattr(changes, "MOST_KEPT", 2)
    for decides in ("first", "second", "first", "third", "first", "second"):
        keep(decides)
    assert compiled == ["first", "second", "third", "second"]
    assert len(list(tmp_path.glob("*.json"))) == 2
