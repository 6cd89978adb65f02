"""Find results that hang on the order in which the interpreter runs programs. The module knows no operator."""

import time
from collections.abc import Sequence
from contextlib import suppress

from kerneltune.checking.check import Checker, smallest_cases
from kerneltune.checking.pairs import around_default
from kerneltune.interpreter.faults import NOT_ENDED, reverse_order
from kerneltune.spec import Case, Op, Variant

_MOST_CASES, _MOST_S = 2, 4.0
"""The smallest cases, and the processor seconds after which no further config of a variant runs in reverse order."""


def wrong_in_reverse(op: Op, cases: Sequence[Case]) -> list[str]:
    """Return a line for each own variant that is wrong if the programs of each launch run in reverse order, and else is right.

    A GPU runs programs in any order, so the last program by its id is not the last to end. A variant whose programs wait for
    programs with smaller ids is not judged.
    """
    smallest = smallest_cases(op, cases, _MOST_CASES)
    found = {variant.name: _wrong(op, variant, smallest) for variant in op.variants if not variant.is_peer}
    return [f"{name} is wrong if its programs run in reverse order, {line}" for name, line in found.items() if line]


def _wrong(op: Op, variant: Variant, cases: Sequence[Case]) -> str:
    begun_s = time.thread_time()
    with suppress(Exception):  # the check of the case says why
        for case in cases:
            checker = Checker(op, case, "cpu")
            for config in around_default(variant, case) if not variant.unsupported(case) else ():
                with reverse_order():
                    lines = checker.run(variant, config)[1]
                if any(NOT_ENDED in line for line in lines) or time.thread_time() - begun_s > _MOST_S:
                    return ""
                if lines and not checker.run(variant, config)[1]:
                    return f"in case {case.name}: {lines[0]}"
    return ""
