"""Derive check cases from bench cases, for values and facts of launches that no check case has."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kerneltune.checking.check import why_not_checked
from kerneltune.checking.covering import Setting, settings, width
from kerneltune.checking.pairs import check_cost
from kerneltune.checking.smaller_sizes import MOST_COST, resized, with_smaller_sizes
from kerneltune.errors import first_line
from kerneltune.interpreter.facts import Fact
from kerneltune.processes.forked import Fork
from kerneltune.spec import Case, Op

_LONG = 64
"""Smallest size of an axis that is long. Longer axes have more programs, and the interpreter takes 1 ms for each program."""
_MOST_PAIRED = 8
"""Most cases that are derived for pairs of values."""
_MOST_PAIRS = 16
"""Most pairs of values that a case is sought for."""
_TRIED = 8
"""Most cases that are tried for a pair."""

ValuePair = tuple[Setting, Setting]


class Derived(NamedTuple):
    """Hold derived check cases, a text for each value of bench cases without a case, and the facts of bench cases."""

    cases: list[Case]
    unchecked: list[str]
    facts: set[Fact]


def derived_cases(op: Op, check: Sequence[Case], bench: Sequence[Case]) -> Derived:
    """Derive check cases for the values and facts that only bench cases have.

    No derived case costs more than MOST_COST times the costliest check case: the bench cases of a workload are models of real
    size. Values of captured kernels are fixed.
    """
    by_cost = sorted((case for case in check if op.kind != "captured" and op.traffic(case).total), key=partial(check_cost, op))
    middle = len(by_cost) // 2
    deriver = _Deriver(op, check if by_cost else (), bench, [*by_cost[middle:], *reversed(by_cost[:middle])])
    if by_cost:
        deriver.add_new_values()
        deriver.add_pairs_of_values()
        deriver.add_longest_axes()
    smaller, facts = with_smaller_sizes(op, deriver.medium_first, [*deriver.check, *deriver.cases], bench)
    return Derived([*deriver.cases, *smaller], deriver.unchecked, facts)


class _Deriver:
    """Derive the check cases of an operator from its check cases, with values and orders of sizes of its bench cases.

    Attributes:
        check, bench: the check cases, none of a captured kernel, and the bench cases.
        medium_first: the check cases with elements: of medium cost, then the costlier, last the cheaper cases.
        most_cost: largest cost of a derived case.
        cases: the cases derived so far.
        unchecked: a text for each value, and pair of values, without a case.
    """

    def __init__(self, op: Op, check: Sequence[Case], bench: Sequence[Case], medium_first: Sequence[Case]) -> None:
        self.op, self.check, self.bench, self.medium_first = op, check, bench, medium_first
        self.most_cost = MOST_COST * max(map(partial(check_cost, op), medium_first), default=0.0)
        self.cases, self.unchecked = list[Case](), list[str]()

    def add_new_values(self) -> None:
        """Give each element type, mode and value of an option that only bench cases have to a check case of medium cost.

        Another check case takes it, if the operator has no inputs or no reference for the first.
        """
        known = {value for case in self.check for value in settings(case)}
        for value in dict.fromkeys(value for case in self.bench for value in settings(case) if value not in known):
            if reason := self._add_first(_with_values(case, value) for case in self.medium_first):
                self.unchecked.append(f"{_text(value)} ({reason})")

    def add_pairs_of_values(self) -> None:
        """Derive cases in which values of settings meet that meet in no check case.

        Each case is the cheapest of the cases with the most new pairs. Sizes of 1, which hide mistakes, are left out.
        """
        met_in_bench, reasons = _pairs_of_values(self.bench), dict[ValuePair, str]()
        missing = sorted(_new_pairs([*self.check, *self.cases]), key=lambda pair: pair not in met_in_bench)
        cheapest = sorted(self.medium_first, key=partial(check_cost, self.op))
        thick = [case for case in cheapest if all(size > 1 for size in case.sizes.values())]
        num_before = len(self.cases)
        for _pair in range(_MOST_PAIRS):
            if not missing or len(self.cases) - num_before == _MOST_PAIRED:
                break
            pair, *missing = missing
            candidates = [_with_values(case, *pair) for case in thick or self.medium_first]
            candidates.sort(key=lambda case: -len(_pairs_of_values([case]).intersection(missing)))
            if reason := self._add_first(candidates[:_TRIED]):
                reasons[pair] = reason
            else:
                met = _pairs_of_values(self.cases[-1:])
                missing = [pair for pair in missing if pair not in met]
        reasons |= dict.fromkeys(missing, "not tried, after many other pairs")
        texts = {pair: f"{' with '.join(map(_text, pair))} ({reason})" for pair, reason in reasons.items()}
        self.unchecked += [text for pair, text in texts.items() if pair in met_in_bench]

    def add_longest_axes(self) -> None:
        """Give the longest size of a check case to each axis that is the longest in bench cases alone."""
        in_checks = set(map(_longest, self.medium_first))
        oblong = [case for case in self.medium_first if _longest(case) and min(case.sizes.values()) > 1]
        by_size = sorted(oblong, key=lambda case: (width(case) < _LONG, width(case)))
        for axis in dict.fromkeys(map(_longest, self.bench)):
            if axis and axis not in in_checks:
                self._add_first(_with_longest(case, axis) for case in by_size)

    def _add_first(self, cases: Iterable[Case]) -> str | None:
        """Add the first case that can be checked; return None then, else why the last case cannot be checked."""
        reason: str | None = "no check case to derive a case from"
        for case in cases:
            try:
                reason = self._why_not_checked(case)
            except Exception as error:  # code of an operator on a case that its author may not have thought of
                reason = first_line(error)
            if not reason:
                self.cases.append(case)
                break
        return reason

    def _why_not_checked(self, case: Case) -> str | None:
        """Return why a case cannot be checked: cost, variants, or a cause that a fork finds; None if it can be checked."""
        reasons = [variant.unsupported(case) for variant in self.op.variants if not variant.is_peer]
        if check_cost(self.op, case) > self.most_cost:
            return "too costly"
        if all(reasons):
            return f"unsupported: {reasons[0]}" if reasons else "no own variant"
        return Fork(partial(why_not_checked, self.op, case)).result()


def _pairs_of_values(cases: Iterable[Case]) -> set[ValuePair]:
    """Return each two values of settings that meet in a case."""
    return {pair for case in cases for pair in itertools.combinations(settings(case), 2)}


def _new_pairs(cases: Sequence[Case]) -> list[ValuePair]:
    """Return the pairs of values of two settings that each have a case and have no case together."""
    met, names = _pairs_of_values(cases), [name for name, _value in settings(cases[0])]
    values = dict.fromkeys(value for case in cases for value in settings(case))
    pairs = [sorted(pair, key=lambda value: names.index(value[0])) for pair in itertools.combinations(values, 2)]
    return [(one, other) for one, other in pairs if one[0] != other[0] and (one, other) not in met]


def _longest(case: Case) -> str:
    """Return the longest axis; empty if several axes are the longest."""
    axes = [axis for axis, size in case.axes if size == width(case)]
    return axes[0] if len(axes) == 1 else ""


def _with_longest(case: Case, axis: str) -> Case:
    """Exchange the sizes of an axis and of the longest axis."""
    longest, sizes = _longest(case), case.sizes
    sizes[axis], sizes[longest] = sizes[longest], sizes[axis]
    return resized(case, sizes, (axis, longest))


def _with_values(case: Case, *values: Setting) -> Case:
    """Return a case with other values of settings: of its type, its mode or its options."""
    value_of = dict(values)
    options = tuple((option, value_of.get(option, old)) for option, old in case.options)
    type_and_mode = {name: value_of[name] for name in ("dtype", "quant") if name in value_of}
    return replace(case, name=",".join((case.name, *map(_text, values))), options=options, **type_and_mode)


def _text(value: Setting) -> str:
    return "{}={}".format(*value)
