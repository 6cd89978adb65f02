"""Facts of launches: turns of loops, programs along axes, branches."""

from kerneltune.interpreter.facts import Fact, unreached


def test_unreached_lists_loops_and_axes_first_in_any_order_of_facts() -> None:
    loop, axis = Fact("loop", "", "/kernels/a.py:3"), Fact("programs", "sum", "0")
    largest = {Fact("branch", "N > BLOCK", "sum"): 1, axis: 4, Fact("branch", "M > N", "sum"): 1, loop: 9}
    backwards = dict(reversed(largest.items()))
    lines = ["two programs of sum along axis 0", "two turns of the loop at a.py:3", "M > N in sum", "N > BLOCK in sum"]
    assert unreached({loop: 1}, largest) == unreached({loop: 1}, backwards) == lines
