"""Derive check cases from bench cases, for values and facts of launches that no check case has."""

import itertools
import math
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kerneltune.errors import first_line
from kerneltune.forked import Fork, ForkCrashedError
from kerneltune.interpreter.facts import Fact, LaunchFacts
from kerneltune.interpreter.modes import unlaunched
from kerneltune.measuring.check import Checker, only_calls_torch
from kerneltune.measuring.pairs import Setting, around_default, check_cost, facts_by_config, settings
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.task import CaseError

_LONG = 64
"""Smallest size of an axis that is long. Longer axes have more programs, and the interpreter takes 1 ms for each program."""
_MOST_COST = 4.0
"""Largest cost of a derived case, in units of the costliest check case. Cases of shipped kernels cost at most 1 of these."""
_FAR = 16
"""Factor over the longest size of an axis in check cases above which a size comes last: a loop may have so many iterations, 1 ms
each, which the traffic of a case does not tell."""
_FEW_PROGRAMS = 512
"""Programs that a derived case may have in any case: they take the interpreter half a second."""
_MOST_PAIRED, _MOST_PAIRS, _TRIED = 8, 16, 8
"""Most cases of an operator in which values of settings meet, most pairs of values that are tried, and cases tried for a pair."""
_SMALLER_SIZES_S = 180
"""Processor seconds for all smaller sizes of an operator's bench cases, as host code may loop over sizes in Python."""
_LAUNCHES_S = 10.0
"""Processor seconds for the launches of bench cases, whose inputs an operator may make in spite of device `meta`."""


class Derived(NamedTuple):
    """Hold derived check cases, a text for each value of bench cases without a case, and the facts of bench cases."""

    cases: list[Case]
    unchecked: list[str]
    facts: set[Fact]


def derived_cases(op: Op, check: Sequence[Case], bench: Sequence[Case]) -> Derived:
    """Derive check cases for the values and facts that only bench cases have.

    No derived case costs more than _MOST_COST times the costliest check case: the bench cases of a workload are models of real
    size. Values of captured kernels are fixed.
    """
    deriver = _Deriver(op, check, bench)
    if deriver.by_cost:
        deriver.add_new_values()
        deriver.add_pairs_of_values()
        deriver.add_longest_axes()
    facts = deriver.add_smaller_sizes_in_fork()
    return Derived(deriver.derived, deriver.unchecked, facts)


class _Deriver:
    """Derive the check cases of an operator.

    Attributes:
        bench: the bench cases.
        by_cost: the check cases with elements, of medium cost first; none of a captured kernel.
        check: all check cases; none where `by_cost` has none.
        derived: the cases derived so far; `unchecked` has a text for each value, and pair of values, without a case.
        costliest: the cost of the costliest check case.
    """

    def __init__(self, op: Op, check: Sequence[Case], bench: Sequence[Case]) -> None:
        self.op, self.bench = op, bench
        self.derived, self.unchecked = list[Case](), list[str]()
        by_cost = sorted((case for case in check if op.origin is None and op.traffic(case).total), key=self._cost)
        middle = len(by_cost) // 2
        self.by_cost = [*by_cost[middle:], *reversed(by_cost[:middle])]
        self.check = list(check) if by_cost else []
        self.costliest = max(map(self._cost, by_cost), default=0.0)

    def _cost(self, case: Case) -> float:
        return check_cost(self.op, case)

    def _is_cheap(self, case: Case) -> bool:
        return self._cost(case) <= _MOST_COST * self.costliest

    def add_new_values(self) -> None:
        """Give each element type, mode and value of an option that only bench cases have to a check case of medium cost.

        Another check case takes it, if the operator has no inputs or no reference for the first.
        """
        known = {value for case in self.check for value in settings(case)}
        for value in dict.fromkeys(value for case in self.bench for value in settings(case) if value not in known):
            try:
                self.derived.append(self._first_checkable(_with_values(case, value) for case in self.by_cost))
            except CaseError as error:
                self.unchecked.append(f"{_text(value)} ({error})")

    def add_pairs_of_values(self) -> None:
        """Derive cases in which values of settings meet that meet in no check case.

        Each case is the cheapest of the cases with the most new pairs. Sizes of 1, which hide mistakes, are left out.
        """
        checks = [*self.check, *self.derived]
        met, met_in_bench = _pairs_of_values(checks), _pairs_of_values(self.bench)
        values = dict.fromkeys(value for case in checks for value in settings(case))
        order = [name for name, _value in settings(self.by_cost[0])]
        possible = (pair for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0])
        ordered = dict.fromkeys(tuple(sorted(pair, key=lambda value: order.index(value[0]))) for pair in possible)
        missing = sorted((pair for pair in ordered if pair not in met), key=lambda pair: pair not in met_in_bench)
        thick = [case for case in sorted(self.by_cost, key=self._cost) if all(size > 1 for _axis, size in case.axes)]
        num_paired, reasons = 0, dict[tuple[Setting, ...], str]()
        while missing and num_paired < _MOST_PAIRED and num_paired + len(reasons) < _MOST_PAIRS:
            candidates = [_with_values(case, *missing[0]) for case in thick or self.by_cost]
            candidates.sort(key=lambda case: -len(_pairs_of_values([case]).intersection(missing)))
            pair, *missing = missing
            try:
                case = self._first_checkable(candidates[:_TRIED])
            except CaseError as error:
                reasons[pair] = str(error)
                continue
            self.derived.append(case)
            num_paired += 1
            met = _pairs_of_values([case])
            missing = [pair for pair in missing if pair not in met]
        reasons |= dict.fromkeys(missing, "not tried, after many other pairs")
        self.unchecked += [f"{' with '.join(map(_text, pair))} ({why})" for pair, why in reasons.items() if pair in met_in_bench]

    def add_longest_axes(self) -> None:
        """Give the longest size of a check case to each axis that is the longest in bench cases alone."""
        in_checks = set(map(_longest, self.by_cost))
        oblong = [case for case in self.by_cost if _longest(case) and min(size for _axis, size in case.axes) > 1]
        by_size = sorted(oblong, key=lambda case: (_size(case) < _LONG, _size(case)))
        for axis in dict.fromkeys(map(_longest, self.bench)):
            if axis and axis not in in_checks:
                with suppress(CaseError):
                    self.derived.append(self._first_checkable(_with_longest(case, axis) for case in by_size))

    def add_smaller_sizes_in_fork(self) -> set[Fact]:
        """Derive the cases of `_with_smaller_sizes`, and return its facts; a fork that takes too long gives one.

        If host code ends the fork, there are no cases and no facts, as the check of addresses says why.
        """

        def work() -> tuple[list[Case], set[Fact]]:
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            if hard == resource.RLIM_INFINITY or hard > _SMALLER_SIZES_S + 5:  # a lower limit of the user's stays
                resource.setrlimit(resource.RLIMIT_CPU, (_SMALLER_SIZES_S, _SMALLER_SIZES_S + 5))  # then SIGXCPU, and SIGKILL
            return self._with_smaller_sizes()

        try:
            smaller, facts = Fork(work).result()
        except ForkCrashedError as error:
            text = f"sizes of bench cases alone: host code takes more than {_SMALLER_SIZES_S} s"
            return {Fact("not judged", text)} if signal.SIGXCPU.name in str(error) else set()
        self.derived += smaller
        return facts

    def _with_smaller_sizes(self) -> tuple[list[Case], set[Fact]]:
        """Return bench cases with some sizes of a check case, for facts that no check case has, and all facts of bench cases.

        Round 1: default configs on all bench cases. Round 2: configs around the default, on one bench case for each set of equal
        facts. A variant that calls `torch.bincount`, for example, is left out: its launches depend on values.
        """
        op, check, bench = self.op, [*self.check, *self.derived], self.bench
        smaller, facts, variants = list[Case](), set[Fact](), _variants_with_facts(op, check)
        for variant in op.variants:
            if variant not in variants and not variant.is_peer and not only_calls_torch(op, variant, check):
                facts.add(Fact("not judged", f"sizes of bench cases alone of {variant.name}: host code fails without memory"))
        for configs in (_default_alone, around_default) if check else (_default_alone,):
            launches = _Launches(op, variants, configs)
            by_facts = self._add_round(smaller, bench, launches)
            facts |= launches.not_judged.union(*by_facts)
            bench = [*by_facts.values()]
        return smaller, facts

    def _add_round(self, smaller: list[Case], bench: Sequence[Case], launches: "_Launches") -> dict[frozenset[Fact], Case]:
        """Add the cases of a round to `smaller`, unless time is over; return a bench case for each set of equal facts.

        A case has at most _MOST_COST times the programs of the check cases, or _FEW_PROGRAMS.
        """
        check = [*self.check, *self.derived]
        check_facts = [case_facts for _case, case_facts in launches.facts_of([*check, *smaller])]
        known = set[Fact]().union(*check_facts)
        most_checked = max((case_facts.num_programs for case_facts in check_facts), default=0)
        most_programs = max(_FEW_PROGRAMS, _MOST_COST * most_checked)
        by_facts: dict[frozenset[Fact], Case] = {}
        for case, bench_facts in launches.facts_of(sorted(bench, key=self._cost)):
            by_facts[frozenset(bench_facts)] = case
            for wants_whole_blocks in (False, True) if len(check_facts) >= len(check) else ():
                missing = {fact for fact in bench_facts - known if (fact.kind == "whole") is wants_whole_blocks}
                if not missing:
                    continue
                candidates = self._smaller(case, wants_whole_blocks, partial(launches.have_one_of, missing))
                for candidate, facts in launches.facts_of(filter(self._is_cheap, candidates)):
                    if facts.num_programs <= most_programs and facts & missing and not _obstacle(self.op, candidate):
                        smaller.append(candidate)
                        known |= facts
                        missing -= facts
                    if not missing:
                        break
            known |= bench_facts
        return by_facts

    def _smaller(self, case: Case, wants_whole_blocks: bool, is_new: Callable[[Case], bool]) -> Iterator[Case]:
        """Yield copies of a bench case with smaller sizes: the cheapest first; last, sizes far above the sizes of check cases.

        The sizes are of check cases with longer sizes in place of 1, because a single row or column hides mistakes; then of the
        check cases as they are.

        Args:
            wants_whole_blocks: whether a fact about whole blocks is sought. Copies with the least sizes then come first: their
                loops are the shortest.
            is_new: whether a case has a fact that is sought.
        """
        bases = list(dict.fromkeys([*(_without_ones(base, self.by_cost) for base in self.by_cost), *self.by_cost]))
        by_cost = sorted(bases, key=self._cost)
        longer = [base for base in by_cost if 1 not in dict(base.axes).values()]
        others = list(dict.fromkeys([*bases[:1], *longer[:1], *by_cost[:1]]))
        steps = {axis: math.gcd(*(known[axis] for known in (*self.check, *self.derived, *self.bench))) for axis in self.op.axes}
        least = _with_least_sizes(case, others, steps, is_new)
        near, far = list[Case](), list[Case]()
        for smaller in sorted(_with_sizes_of(case, bases), key=partial(self._order, case)):
            is_far = any(size > _FAR * max((base[axis] for base in bases), default=0) for axis, size in smaller.axes)
            (far if is_far else near).append(smaller)
        if wants_whole_blocks:
            yield from itertools.chain(sorted(least, key=self._doublings), near, far)
        else:
            yield from itertools.chain(near, least, far)

    def _doublings(self, case: Case) -> int:
        """Return log2 of a case's cost over the cost of the costliest check case, rounded up; 0 for a cheaper case."""
        return max(0, math.ceil(math.log2(self._cost(case) / self.costliest)))

    def _order(self, case: Case, smaller: Case) -> tuple[bool, int]:
        """Return the place of a copy: a single row, for example of ids, hides mistakes that further rows show."""
        return any(size > smaller[axis] == 1 for axis, size in case.axes), self._doublings(smaller)

    def _first_checkable(self, cases: Iterable[Case]) -> Case:
        """Return the first case that can be checked.

        Raises:
            CaseError: no case can be checked; the message says why of the last case.
        """
        reason = "no check case to derive a case from"
        for case in cases:
            try:
                reason = self._why_uncheckable(case)
            except Exception as error:  # code of an operator on a case that its author may not have thought of
                reason = first_line(error)
            if not reason:
                return case
        raise CaseError(reason)

    def _why_uncheckable(self, case: Case) -> str:
        """Return why a case cannot be checked: cost, variants, or an obstacle, which a fork finds; empty if it can."""
        reasons = [variant.unsupported(case) for variant in self.op.variants if not variant.is_peer]
        if not self._is_cheap(case):
            return "too costly"
        if all(reasons):
            return f"unsupported: {reasons[0]}" if reasons else "no own variant"
        return Fork(partial(_obstacle, self.op, case)).result()


def _pairs_of_values(cases: Iterable[Case]) -> set[tuple[Setting, ...]]:
    """Return each two values of settings that meet in a case."""
    return {pair for case in cases for pair in itertools.combinations(settings(case), 2)}


def _without_ones(case: Case, others: Sequence[Case]) -> Case:
    """Return a case with the least longer size of other cases in place of each size of 1."""
    longer = {axis: min((other[axis] for other in others if other[axis] > 1), default=1) for axis, _size in case.axes}
    return replace(case, axes=tuple((axis, size if size > 1 else longer[axis]) for axis, size in case.axes))


def _with_sizes_of(case: Case, others: Sequence[Case]) -> Iterator[Case]:
    """Yield copies of a case that keep some sizes, and take smaller sizes of one of the other cases for the rest."""
    for num_kept in range(1, len(case.axes)):
        for other, kept in itertools.product(others, itertools.combinations(dict(case.axes), num_kept)):
            sizes = {axis: size if axis in kept else min(size, other[axis]) for axis, size in case.axes}
            yield _resized(case, sizes, [axis for axis in sizes if axis not in kept])


def _with_least_sizes(
    case: Case, others: Sequence[Case], steps: Mapping[str, int], is_new: Callable[[Case], bool]
) -> Iterator[Case]:
    """Yield, for each other case and axis, a copy with the other sizes and the least size of the axis with which it is new.

    For a branch above 4096, the size is 4097. The search halves an interval, as larger sizes are usually new, too. For whole
    blocks they are not, so that steps times powers of two are tried before.

    Args:
        steps: axis -> greatest common divisor of its sizes, of which only multiples are tried.
        is_new: whether a case has a fact that is sought.
    """
    for other, (axis, size) in itertools.product(others, case.axes):
        sized = partial(_with_size, case, other, axis)
        below, step = other[axis], max(1, steps[axis])
        if below < size and is_new(sized(size)):
            doubled = (step << power for power in range((size // step).bit_length()))
            least = next((middle for middle in doubled if below < middle < size and is_new(sized(middle))), size)
            while least - below > step:
                middle = below + (least - below) // 2 // step * step
                least, below = (middle, below) if is_new(sized(middle)) else (least, middle)
            yield sized(least)


def _resized(case: Case, sizes: Mapping[str, int], named: Iterable[str]) -> Case:
    """Return a case with other sizes; its name tells the named sizes."""
    name = ",".join([case.name, *(f"{axis}={sizes[axis]}" for axis in named)])
    return replace(case, name=name, axes=tuple(sizes.items()))


def _with_size(case: Case, other: Case, axis: str, size: int) -> Case:
    sizes = {**dict(case.axes), **dict(other.axes), axis: size}
    return _resized(case, sizes, sizes)


def _default_alone(variant: Variant, case: Case) -> Iterator[Config]:
    yield variant.default_config(case)


def _variants_with_facts(op: Op, cases: Iterable[Case]) -> list[Variant]:
    """Return the own variants whose launches are known without values, in all cases that they support until the time is over."""
    variants = [variant for variant in op.variants if not variant.is_peer]
    begun_s = time.thread_time()
    for case in cases:
        if time.thread_time() - begun_s > _LAUNCHES_S:
            break
        variants = [
            variant
            for variant in variants
            if variant.unsupported(case) or facts_by_config(op, variant, case, _default_alone(variant, case))
        ]
    return variants


class _Launches:
    """Tell the facts of the launches of variants under some configs. `not_judged` gets a fact if the time is over."""

    def __init__(self, op: Op, variants: Sequence[Variant], configs: Callable[[Variant, Case], Iterable[Config]]) -> None:
        self._op, self._variants, self._configs = op, variants, configs
        self.not_judged = set[Fact]()

    def facts_of(self, cases: Iterable[Case]) -> Iterator[tuple[Case, LaunchFacts]]:
        """Yield each case with the facts of its launches, and the most programs of a config, until the time is over.

        Cases whose launches depend on values are left out. Facts of whole blocks lose the size of the block.
        """
        begun_s = time.thread_time()
        for case in cases:
            if time.thread_time() - begun_s > _LAUNCHES_S:
                self.not_judged.add(Fact("not judged", f"further sizes of bench cases alone: {_LAUNCHES_S:g} s are over"))
                return
            supported = [variant for variant in self._variants if not variant.unsupported(case)]
            by_variant = [facts_by_config(self._op, variant, case, self._configs(variant, case)) for variant in supported]
            if all(by_variant):
                facts = set[Fact]().union(*(facts for by_config in by_variant for facts in by_config.values()))
                case_facts = LaunchFacts(fact._replace(where="") if fact.kind == "whole" else fact for fact in facts)
                case_facts.num_programs = sum(max(facts.num_programs for facts in by_config.values()) for by_config in by_variant)
                yield case, case_facts

    def have_one_of(self, facts: Set[Fact], case: Case) -> bool:
        """Return whether launches of a case have one of some facts."""
        return any(case_facts & facts for _case, case_facts in self.facts_of([case]))


def _size(case: Case) -> int:
    return max(size for _axis, size in case.axes)


def _longest(case: Case) -> str:
    """Return the longest axis; empty if several axes are the longest."""
    axes = [axis for axis, size in case.axes if size == _size(case)]
    return axes[0] if len(axes) == 1 else ""


def _with_longest(case: Case, axis: str) -> Case:
    """Exchange the sizes of an axis and of the longest axis."""
    longest, sizes = _longest(case), dict(case.axes)
    sizes[axis], sizes[longest] = sizes[longest], sizes[axis]
    return _resized(case, sizes, (axis, longest))


def _with_values(case: Case, *values: Setting) -> Case:
    """Return a case with other values of settings: of its type, its mode or its options."""
    value_of = dict(values)
    options = tuple((option, value_of.get(option, old)) for option, old in case.options)
    type_and_mode = {name: value_of[name] for name in ("dtype", "quant") if name in value_of}
    return replace(case, name=",".join((case.name, *map(_text, values))), options=options, **type_and_mode)


def _text(value: Setting) -> str:
    return "{}={}".format(*value)


def _obstacle(op: Op, case: Case) -> str:
    """Return why a case has no inputs or no expected values, or why host code refuses its sizes; empty if it can be checked."""
    try:
        checker = Checker.make(op, case)
    except CaseError as error:
        return str(error)
    with suppress(Exception), unlaunched():  # the check reports other errors
        for variant in (variant for variant in op.variants if not (variant.is_peer or variant.unsupported(case))):
            try:
                variant.run(checker.inputs, variant.default_config(case))
            except (ValueError, AssertionError) as error:
                return first_line(error)
    return ""
