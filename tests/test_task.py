"""Tasks by name, as another process finds them again, and where their trials are stored."""

import pickle
import tomllib
from pathlib import Path

import bench_jobs
import pytest

from kerneltune import ops
from kerneltune.spec import Case, Op
from kerneltune.task import Task, trials_file

CASE = Case("a", (("M", 8),), "bfloat16")


@pytest.mark.parametrize("op", [*ops.load().values(), bench_jobs.OPS[0]], ids=lambda op: op.name)
def test_pickled_task_has_the_same_operator_and_variant(op: Op) -> None:
    for variant in op.variants:
        task = Task(op, CASE, variant, "hot")
        assert pickle.loads(pickle.dumps(task)) == task


def test_pickled_task_of_an_unregistered_operator_raises_one_line() -> None:
    gone = pickle.dumps(Task(bench_jobs.OPS[0], CASE, bench_jobs.VARIANT)).replace(b"fake", b"gone")
    with pytest.raises(ValueError, match=r"^no operator gone in OP or OPS of bench_jobs or of a package that holds it$"):
        pickle.loads(gone)


def test_git_and_both_distributions_leave_the_files_of_runs_out() -> None:
    root = Path(__file__).parent.parent
    trials = trials_file(root / "results", "nvidia_h200", "stream").relative_to(root)
    build = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    for kind in ("wheel", "sdist"):
        assert any(trials.is_relative_to(pattern.strip("/")) for pattern in build[kind]["exclude"]), kind
    ignored = filter(None, (root / ".gitignore").read_text().splitlines())
    assert any(trials.is_relative_to(pattern.strip("/")) for pattern in ignored), ".gitignore"
