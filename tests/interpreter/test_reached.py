"""Facts of launches: turns of loops, programs along axes, branches."""

from kerneltune.interpreter.reached import unreached


def test_unreached_lists_loops_and_axes_first_in_any_order_of_facts() -> None:
    loop, axis = "turns of the loop at a.py:3", "programs of sum along axis 0"
    bench = {"N > BLOCK in sum": 1, axis: 4, "M > N in sum": 1, loop: 9}
    backwards = dict(reversed(bench.items()))
    assert unreached([{loop: 1}], [bench]) == [f"two {axis}", f"two {loop}", "M > N in sum", "N > BLOCK in sum"]
    assert unreached([{loop: 1}], [backwards]) == unreached([{loop: 1}], [bench])
