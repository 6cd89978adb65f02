"""Tasks by name, as another process finds them again."""

import pickle

import bench_jobs
import pytest

from kerneltune import ops
from kerneltune.spec import Case, Op
from kerneltune.task import Task

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
