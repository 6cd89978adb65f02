"""Derive check cases from bench cases, for values and facts of launches that no check case has."""

import itertools
import math
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kerneltune.checking.check import only_calls_torch, why_not_checked
from kerneltune.checking.covering import Setting, settings, width
from kerneltune.checking.pairs import around_default, check_cost, facts_by_config
from kerneltune.errors import first_line
from kerneltune.interpreter.facts import Fact
from kerneltune.interpreter.modes import LaunchFacts
from kerneltune.processes.forked import Fork, ForkCrashedError
from kerneltune.spec import Case, Config, Op, Variant

_MOST_COST = 4.0
"""Largest cost of a derived case, in units of the costliest check case. Cases of shipped kernels cost at most 1 of these."""
_FAR = 16
"""Factor over the longest size of an axis in check cases above which a size comes last: a loop may have so many iterations, 1 ms
each, which the traffic of a case does not tell."""
_FEW_PROGRAMS = 512
"""Programs that a derived case may have in any case: they take the interpreter half a second."""
_SMALLER_SIZES_S = 180
"""Processor seconds for all smaller sizes of an operator's bench cases, as host code may loop over sizes in Python."""
_LAUNCHES_S = 10.0
"""Processor seconds for the launches of bench cases, whose inputs an operator may make in spite of device `meta`."""
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

    No derived case costs more than _MOST_COST times the costliest check case: the bench cases of a workload are models of real
    size. Values of captured kernels are fixed.
    """
    by_cost = sorted((case for case in check if op.kind != "captured" and op.traffic(case).total), key=partial(check_cost, op))
    middle = len(by_cost) // 2
    deriver = _Deriver(op, check if by_cost else (), bench, [*by_cost[middle:], *reversed(by_cost[:middle])])
    if by_cost:
        deriver.add_new_values()
        deriver.add_pairs_of_values()
        deriver.add_longest_axes()
    smaller, facts = _with_smaller_sizes(deriver)
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
        self.most_cost = _MOST_COST * max(map(partial(check_cost, op), medium_first), default=0.0)
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


def _with_smaller_sizes(deriver: _Deriver) -> tuple[list[Case], set[Fact]]:
    """Return cases of smaller sizes, and all facts of bench cases.

    Host code runs in a fork. If it takes too long, a fact says so; if it ends the fork, the check of addresses says why.
    """

    def work() -> tuple[list[Case], set[Fact]]:
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        if hard == resource.RLIM_INFINITY or hard > _SMALLER_SIZES_S + 5:  # a lower limit of the user's stays
            resource.setrlimit(resource.RLIMIT_CPU, (_SMALLER_SIZES_S, _SMALLER_SIZES_S + 5))  # then SIGXCPU, and SIGKILL
        return _SizeSearch(deriver).run()

    try:
        return Fork(work).result()
    except ForkCrashedError as error:
        text = f"sizes of bench cases alone: host code takes more than {_SMALLER_SIZES_S} s"
        return [], {Fact("not judged", text)} if signal.SIGXCPU.name in str(error) else set()


class _SizeSearch:
    """Search bench cases with some sizes of a check case, whose launches have facts that no check case has.

    Attributes:
        check: all check cases, derived cases among them.
        bases: the cases that give sizes, of medium cost first: check cases with longer sizes in place of 1, because a single row
            or column hides mistakes; then check cases as they are.
        few_bases: the first base, the cheapest base without a size of 1, and the cheapest base.
        steps: axis -> greatest common divisor of its sizes; only multiples of the divisor are tried.
        found: the derived cases.
    """

    def __init__(self, deriver: _Deriver) -> None:
        self.op, self.check, self.bench = deriver.op, [*deriver.check, *deriver.cases], deriver.bench
        medium_first = deriver.medium_first
        self.bases = list(dict.fromkeys([*(_without_ones(case, medium_first) for case in medium_first), *medium_first]))
        cheapest = sorted(self.bases, key=self._cost)
        longer = [base for base in cheapest if 1 not in base.sizes.values()]
        self.few_bases = list(dict.fromkeys([*self.bases[:1], *longer[:1], *cheapest[:1]]))
        self.steps = {axis: math.gcd(*(case[axis] for case in (*self.check, *self.bench))) for axis in self.op.axes}
        self.costliest = max(map(self._cost, medium_first), default=0.0)
        self.found = list[Case]()

    def _cost(self, case: Case) -> float:
        return check_cost(self.op, case)

    def run(self) -> tuple[list[Case], set[Fact]]:
        """Search with default configs on all bench cases; then with configs around the default, on a bench case per set of facts.

        A variant that always calls `torch.bincount`, for example, is left out: its launches depend on values.
        """
        bench, facts = self.bench, set[Fact]()
        variants, without = _variants_with_facts(self.op, self.check)
        for variant, (case, reason) in without.items():
            where = f"sizes of bench cases alone of {variant.name}, in check case {case.name}: host code fails without memory"
            facts.add(Fact("not judged", f"{where}: {reason}"))
        for configs in (_default_alone, around_default) if self.check else (_default_alone,):
            launches = _Launches(self.op, variants, configs)
            by_facts = self._search(launches, bench)
            facts |= launches.not_judged.union(*by_facts)
            bench = [*by_facts.values()]
        return self.found, facts

    def _search(self, launches: "_Launches", bench: Sequence[Case]) -> dict[frozenset[Fact], Case]:
        """Find a case for each fact that only launches of bench cases have; return a bench case for each set of equal facts.

        If the time ends before the facts of all check cases are known, no case is derived.
        """
        in_checks = dict(launches.facts_of([*self.check, *self.found]))
        is_complete = not launches.not_judged
        known, by_facts = set[Fact]().union(*(each.facts for each in in_checks.values())), dict[frozenset[Fact], Case]()
        most_programs = max([_FEW_PROGRAMS, *(_MOST_COST * each.num_programs for each in in_checks.values())])
        for case, in_bench in launches.facts_of(sorted(bench, key=self._cost)):
            by_facts[frozenset(in_bench.facts)] = case
            for wants_even_blocks in (False, True) if is_complete else ():
                missing = {fact for fact in in_bench.facts - known if (fact.kind == "even blocks") is wants_even_blocks}
                candidates = self._candidates(case, wants_even_blocks, partial(launches.have_one_of, missing)) if missing else ()
                known |= self._add_cases(launches.facts_of(candidates), missing, most_programs)
            known |= in_bench.facts
        return by_facts

    def _add_cases(self, candidates: Iterable[tuple[Case, LaunchFacts]], missing: set[Fact], most_programs: float) -> set[Fact]:
        """Add candidates with missing facts, which are removed, until no fact is missing; return the facts of the added cases."""
        added = set[Fact]()
        for candidate, found in candidates:
            if found.num_programs <= most_programs and found.facts & missing and not why_not_checked(self.op, candidate):
                self.found.append(candidate)
                added |= found.facts
                missing -= found.facts
            if not missing:
                break
        return added

    def _candidates(self, case: Case, wants_even_blocks: bool, is_new: Callable[[Case], bool]) -> Iterator[Case]:
        """Yield copies of a bench case with smaller sizes, without copies that cost too much, in the order of their trial.

        1. Near copies keep some sizes, and have other sizes of a base. Copies with a new size of 1 are last: a single row, for
           example of ids, hides mistakes that further rows show. Beside that, cheaper copies come first.
        2. Least copies have all sizes of a base, except the least size of an axis with a new fact.
        3. Far copies are like near copies, and one of their sizes is far above the sizes of all bases.
        4. Copies of a case with equal sizes have sizes of a base, and equal sizes where the case has them.

        For even blocks, least copies come first: their loops are the shortest. Their search counts in the time of `facts_of`.

        Args:
            wants_even_blocks: whether facts of even blocks are sought.
            is_new: whether a case has a fact that is sought.
        """
        longest = {axis: max((base[axis] for base in self.bases), default=0) for axis, _size in case.axes}
        near, far = list[Case](), list[Case]()
        for copy in sorted(_with_sizes_of(case, self.bases), key=partial(self._order, case)):
            is_far = any(size > _FAR * longest[axis] for axis, size in copy.axes)
            (far if is_far else near).append(copy)
        least = self._with_least_sizes(case, is_new)
        order: list[Iterable[Case]] = [near, least, far]
        if wants_even_blocks:
            order = [sorted(least, key=self._doublings), near, far]
        order.append(_with_equal_sizes(case, self.bases))
        yield from (copy for copy in itertools.chain(*order) if self._cost(copy) <= _MOST_COST * self.costliest)

    def _order(self, case: Case, copy: Case) -> tuple[bool, int]:
        return any(size > copy[axis] == 1 for axis, size in case.axes), self._doublings(copy)

    def _doublings(self, case: Case) -> int:
        """Return log2 of a case's cost over the cost of the costliest check case, rounded up; 0 for a cheaper case."""
        return max(0, math.ceil(math.log2(self._cost(case) / self.costliest)))

    def _with_least_sizes(self, case: Case, is_new: Callable[[Case], bool]) -> Iterator[Case]:
        """Yield each of a few bases with the least size of one axis at which the case is new, for each axis.

        For a branch above 4096, the size is 4097. The search halves an interval, because larger sizes are usually new, too. For
        even blocks larger sizes need not be new: steps times powers of two are tried first.
        """
        for base, (axis, size) in itertools.product(self.few_bases, case.axes):
            sized = partial(_with_size, case, base, axis)
            below, step = base[axis], max(1, self.steps[axis])
            if below < size and is_new(sized(size)):
                doubled = (step << power for power in range((size // step).bit_length()))
                least = next((middle for middle in doubled if below < middle < size and is_new(sized(middle))), size)
                while least - below > step:
                    middle = below + (least - below) // 2 // step * step
                    least, below = (middle, below) if is_new(sized(middle)) else (least, middle)
                yield sized(least)


def _without_ones(case: Case, others: Sequence[Case]) -> Case:
    """Return a case with each size of 1 replaced by the smallest size above 1 that other cases have on the axis."""
    longer = {axis: min((other[axis] for other in others if other[axis] > 1), default=1) for axis, _size in case.axes}
    return replace(case, axes=tuple((axis, size if size > 1 else longer[axis]) for axis, size in case.axes))


def _with_sizes_of(case: Case, others: Sequence[Case]) -> Iterator[Case]:
    """Yield copies of a case that keep some sizes, and take smaller sizes of one of the other cases for the rest."""
    for num_kept in range(1, len(case.axes)):
        for other, kept in itertools.product(others, itertools.combinations(case.sizes, num_kept)):
            sizes = {axis: size if axis in kept else min(size, other[axis]) for axis, size in case.axes}
            yield resized(case, sizes, [axis for axis in sizes if axis not in kept])


def _with_equal_sizes(case: Case, others: Iterable[Case]) -> Iterator[Case]:
    """Yield copies of a case with smaller sizes of another case, the same size for axes that have the same size."""
    for other, (axis, tied) in itertools.product(others, case.axes):
        sizes = {its: min(size, other[axis if size == tied else its]) for its, size in case.axes}
        if list(case.sizes.values()).count(tied) > 1:
            yield resized(case, sizes, sizes)


def _with_size(case: Case, other: Case, axis: str, size: int) -> Case:
    sizes = {**case.sizes, **other.sizes, axis: size}
    return resized(case, sizes, sizes)


def resized(case: Case, sizes: Mapping[str, int], named: Iterable[str]) -> Case:
    """Return a case with other sizes; its name tells the named sizes, each once."""
    new = {axis: f"{axis}={sizes[axis]}" for axis in named}
    name = ",".join([*(part for part in case.name.split(",") if part.partition("=")[0] not in new), *new.values()])
    return replace(case, name=name, axes=tuple(sizes.items()))


def _default_alone(variant: Variant, case: Case) -> Iterator[Config]:
    yield variant.default_config(case)


def _variants_with_facts(op: Op, cases: Sequence[Case]) -> tuple[list[Variant], dict[Variant, tuple[Case, str]]]:
    """Return the own variants that have facts in a case or raise no error, and the first error of each variant with its case.

    A variant raises an error if its launches depend on values, perhaps in some cases alone, as where lengths of sequences are
    given. A variant that calls torch alone is left out: it has no launches, and its loops may take minutes.
    """
    supported = {variant: [case for case in cases if not variant.unsupported(case)] for variant in op.variants}
    variants = [each for each in op.variants if not each.is_peer and not only_calls_torch(op, each, supported[each])]
    known = set[Variant]()
    reasons = dict[Variant, tuple[Case, str]]()
    begun_s = time.thread_time()
    for case in cases:
        if time.thread_time() - begun_s > _LAUNCHES_S:
            break
        for variant in [variant for variant in variants if not variant.unsupported(case)]:
            lines = list[str]()
            if facts_by_config(op, variant, case, _default_alone(variant, case), lines):
                known.add(variant)
            for line in lines:
                reasons.setdefault(variant, (case, line))
    return [variant for variant in variants if variant in known or variant not in reasons], reasons


class _Launches:
    """Tell the facts of the launches of variants under some configs. `not_judged` gets a fact if the time is over."""

    def __init__(self, op: Op, variants: Sequence[Variant], configs: Callable[[Variant, Case], Iterable[Config]]) -> None:
        self._op, self._variants, self._configs = op, variants, configs
        self.not_judged = set[Fact]()

    def facts_of(self, cases: Iterable[Case]) -> Iterator[tuple[Case, LaunchFacts]]:
        """Yield each case with the facts of its launches, which hold the most programs of a config, until the time is over.

        Cases in which launches of all variants depend on values are left out. Facts of even blocks lose the size of the block.
        """
        begun_s = time.thread_time()
        for case in cases:
            if time.thread_time() - begun_s > _LAUNCHES_S:
                self.not_judged.add(Fact("not judged", f"further sizes of bench cases alone: {_LAUNCHES_S:g} s are over"))
                return
            supported = [variant for variant in self._variants if not variant.unsupported(case)]
            by_variant = [facts_by_config(self._op, variant, case, self._configs(variant, case)) for variant in supported]
            if any(by_variant) or not by_variant:
                facts = set[Fact]().union(*(each.facts for by_config in by_variant for each in by_config.values()))
                most_programs = (max(each.num_programs for each in by_config.values()) for by_config in by_variant if by_config)
                yield case, LaunchFacts({fact._replace(block=0) for fact in facts}, sum(most_programs))

    def have_one_of(self, facts: Set[Fact], case: Case) -> bool:
        """Return whether launches of a case have one of some facts."""
        return any(launches.facts & facts for _case, launches in self.facts_of([case]))
