"""Facts of launches: iterations of loops, programs along axes, branches."""

from kerneltune.interpreter.facts import Fact, unreached


def test_unreached_lists_loops_and_axes_first() -> None:
    once, twice = (Fact(kind, "", "/kernels/a.py:3") for kind in ("one iteration", "two iterations"))
    largest = {Fact("branch", "N > BLOCK", "sum"), Fact("two programs", "sum", "0"), Fact("branch", "M > N", "sum"), twice}
    lines = ["two iterations of the loop at a.py:3", "two programs of sum along axis 0", "M > N in sum", "N > BLOCK in sum"]
    assert unreached({once}, largest) == lines


def test_unreached_leaves_out_a_loop_of_one_iteration_in_the_largest_cases_but_not_a_loop_without_an_iteration_there() -> None:
    none, once, twice = (Fact(kind, "", "/kernels/a.py:3") for kind in ("no iteration", "one iteration", "two iterations"))
    assert unreached({once}, {once}) == unreached({none, twice}, {none}) == []
    assert (
        unreached({once}, {none})
        == unreached({once}, {once, twice})
        == unreached(set(), {none})
        == ["two iterations of the loop at a.py:3"]
    )
