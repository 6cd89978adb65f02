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


def test_unreached_names_one_of_several_sizes_above_a_limit() -> None:
    limit = "- 1 > 32767 beside `positions.to(torch.int16)`"
    others = {Fact("branch", "N - 1 > BLOCK", "rope"), Fact("branch", "N > 255 beside a cast to int8", "_rope")}
    largest = {Fact("branch", f"{size} {limit}", "rope") for size in ("k.shape[0]", "T", "q.shape[0]")} | others
    lines = ["N - 1 > BLOCK in rope", "N > 255 beside a cast to int8 in _rope", f"T {limit} in rope"]
    assert unreached(set(), largest | {Fact("branch", "stride > 255 beside a cast to int8", "_rope")}) == lines
