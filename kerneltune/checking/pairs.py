"""Check pairs of config and check case, beside the default config of each case: by facts of launches, and covering pairs."""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from kerneltune.checking.autotuned import with_knob
from kerneltune.checking.check import host_folder
from kerneltune.checking.consistency import FirstSeen
from kerneltune.checking.covering import Pair, classes, configs_by_case, covering, num_elements, uncovered
from kerneltune.checking.declarations import look_up_failures, seeds_without_effect, wrong_traffic
from kerneltune.checking.layouts import LayoutChecker
from kerneltune.errors import first_line, statement_in
from kerneltune.interpreter.facts import Fact, noting
from kerneltune.interpreter.modes import LaunchFacts, unlaunched
from kerneltune.processes.forked import Fork, ForkCrashedError
from kerneltune.processes.start import tell
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.task import CaseError, Outcome, knob_pairs
from kerneltune.wording import counted

_PROGRAM_COST = 0.2
"""MB of traffic that take the interpreter as long as a program: 8 ms per MB, 1.3 ms per program (RMSNorm, fp8 rows)."""
COVERING_S = 40.0
"""Processor seconds for the pairs of a variant. RMSNorm's 70 pairs take the longest."""
_MOST_FAILURES = 3
"""After this many failed pairs, a variant is not checked on further pairs."""
_MOST_CASES = 3
"""Cases in which inputs are judged whose layout host code never asks: a case may not read an input, such as a skipped step."""


def check_cost(op: Op, case: Case) -> float:
    """Estimate the time of a check in the interpreter, in MB of traffic: the traffic, and a program."""
    return _PROGRAM_COST + op.traffic(case).total / 1e6


def check_pairs(op: Op, variant: Variant, cases: Sequence[Case]) -> list[Outcome]:
    """Check pairs of a variant within a time limit; the pairs with new facts, and the first pair of each case, run twice.

    First are pairs with new facts, then covering pairs, pairs with new even blocks, and default configs of the remaining cases.
    Return the failed pairs, and last an outcome whose reason says how much was checked:
    `swiglu optimized: 12 configs on 4 cases, 48 of 60 pairs`; without knobs, only if a case did not run twice.

    The configs of an autotuner of a kernel are values of a knob as well.

    cases: the check cases of the operator.
    """
    cost = partial(check_cost, op)
    by_cost = sorted(configs_by_case(variant, cases), key=cost)
    facts = _facts_in_fork(op, variant, by_cost)
    kept = {case: _kept(by_config) for case, by_config in facts.items()}
    if by_cost and not any(facts.values()):
        with suppress(ForkCrashedError):
            kept = Fork(partial(_kept_in_runs, op, variant, by_cost)).result()
    if any(kept.values()):
        variant = with_knob(variant, kept)
        facts = _facts_in_fork(op, variant, by_cost)
    configs = configs_by_case(variant, cases)
    even_blocks, leading = _with_new_facts(facts)
    covered = covering(configs, lambda config, case: _cost_of_pair(cost(case), facts[case], config))
    defaults = ((configs[case][0], case) for case in by_cost)
    run = _PairChecks(op, variant, configs)
    begun_s = time.thread_time()
    for pair in itertools.chain(leading, covered, even_blocks, defaults):
        if pair in run.done and pair[1] in run.checkers:
            continue
        if time.thread_time() - begun_s > COVERING_S or len(run.failures) >= _MOST_FAILURES:
            break
        run.check(pair, is_leading=pair in leading)
    return run.outcomes()


class _PairChecks:
    """Check pairs of config and case of a variant, and count them.

    Attributes:
        done: the checked pairs. The default config of each case counts as checked, because each case has a record of its check;
            it runs here if no other pair of the case has run.
        failures: the outcomes of failed pairs.
        checkers: the checker of each case with a pair that was due; None if the case has no inputs or no expected values.
    """

    def __init__(self, op: Op, variant: Variant, configs: Mapping[Case, Sequence[Config]]) -> None:
        self._op, self._variant, self._configs = op, variant, configs
        self._name, self._first_seen = f"{op.name} {variant.name}", FirstSeen()
        self.done: set[Pair] = {(default, case) for case, (default, *_) in configs.items()}
        self.failures: list[Outcome] = []
        self.checkers: dict[Case, LayoutChecker | None] = {}

    def check(self, pair: Pair, is_leading: bool) -> None:
        """Check a pair; a leading pair, and the first pair of a case, run twice."""
        config, case = pair
        tell(Outcome("failed", "", config, case))  # names the pair if this process dies
        is_first = case not in self.checkers
        if is_first:
            self.checkers[case] = None
            with suppress(CaseError):  # the record of the default config says why
                self.checkers[case] = LayoutChecker.make(self._op, case, first_seen=self._first_seen)
        checker = self.checkers[case]
        if checker is None:
            return
        outcome = checker.check(self._variant, config, runs=2 if is_first or is_leading else 1)
        if outcome.status == "failed":
            self.failures.append(replace(outcome, config=config, case=case))
        self.done.add(pair)

    def outcomes(self) -> list[Outcome]:
        """Return the failures, then notes about layouts and declarations, last how much was checked."""
        passed = self.done - {(failure.config, failure.case) for failure in self.failures if failure.case}
        in_order = [(config, case) for case, its in self._configs.items() for config in its if (config, case) in passed]
        self.failures = [replace(failure, passed=in_order) for failure in self.failures]
        if not self.failures:
            usable = {case: checker for case, checker in self.checkers.items() if checker is not None}
            self.failures += look_up_failures(self._op, self._variant, usable)
        notes = [] if self.failures else [*self._wrong_layouts(), *self._wrong_declarations()]
        if self._variant.config is None and len(self.checkers) == len(self._configs):
            return [*self.failures, *notes]
        return [*self.failures, *notes, Outcome("checked" if self._configs else "noted", f"{self._name}: {self._coverage()}")]

    def _wrong_layouts(self) -> Iterator[Outcome]:
        """Yield failures for inputs whose elements may not lie apart, or be transposed, though host code raises nothing.

        Each input is judged in the first case that has it. For shipped operators, yield notes instead. For other operators,
        yield notes about inputs whose layout host code never asks, judged in a few cases.
        """
        known, unasked = set[str](), dict[str, str]()
        thick = [case for case in self.checkers if min(case.sizes.values(), default=0) > 1]
        for number, case in enumerate(thick):
            checker, default = self.checkers[case], self._configs[case][0]
            if checker is None:
                continue
            if number < _MOST_CASES and self._op.kind == "foreign":
                unasked = checker.unasked_layouts(self._variant, default) | unasked
            wrong = ", and where ".join(checker.wrong_layouts(self._variant, default, known))
            text = f"wrong, without an error, where {wrong}"
            if wrong and self._op.kind != "foreign":
                yield Outcome("noted", f"{self._name}: a known limit, no failure: {text}")
            elif wrong:
                ways = "use their stride in the kernel, or raise ValueError or call .contiguous() in the host function"
                yield Outcome("failed", f"{text}: {ways}", default, case)
        yield from (Outcome("noted", f"{self._name}: {line}") for line in unasked.values())

    def _wrong_declarations(self) -> Iterator[Outcome]:
        """Yield a note for a `traffic` far from the bytes of a largest case, and for seeds without an effect in all of them.

        Small tensors count little in the largest case, which has the largest product of sizes. Because bytes may depend on an
        option, such as the number of experts that a token takes, the largest case of each value of an option is judged.
        """
        usable = {case: it for case, it in self.checkers.items() if it and num_elements(case) and self._op.kind != "captured"}
        largest = dict[object, Case]()
        for case in sorted(usable, key=lambda case: (num_elements(case), self._op.traffic(case).total), reverse=True):
            for setting in case.options or [("", "")]:
                largest.setdefault(setting, case)
        for field, judge in {"traffic": wrong_traffic, "inputs": seeds_without_effect}.items():
            judged = [judge(usable[case], self._variant, self._configs[case][0]) for case in dict.fromkeys(largest.values())]
            if any(judged) and (field == "traffic" or all(judged)):
                yield Outcome("noted", f"{self._name}: {field}: {'; '.join(next(filter(None, judged)))}")

    def _coverage(self) -> str:
        """Return how many configs, cases and pairs were checked, and which classes of cases some knob values did not meet."""
        configs, done, num_failures = self._configs, self.done, len(self.failures)
        num_possible = sum(map(len, configs.values()))
        num_configs, num_cases = len({config for config, _case in done}), len({case for _config, case in done})
        pairs = "all pairs" if len(done) == num_possible else f"{len(done):,} of {num_possible:,} pairs"
        line = f"{counted(num_configs, 'config')} on {counted(num_cases, 'case')}, {pairs}"
        if num_failures:
            is_stopped = num_failures >= _MOST_FAILURES and len(done) < num_possible
            return f"{line}; stopped after failures" if is_stopped else line
        if num_unusable := sum(checker is None for checker in self.checkers.values()):
            return f"{line}; inputs or reference of {counted(num_unusable, 'case')} fail"
        if not classes(list(configs)):
            return f"{line}; no case has an element" if configs else "not checked: no case is supported and fits the memory"
        if missed := ", ".join(uncovered(configs, done)):
            return f"{line}; time limit before every knob value met: {missed}"
        num_once = len(configs) - len(self.checkers)
        return f"{line}; time limit before {counted(num_once, 'case')} ran twice" if num_once else line


def facts_by_config(
    op: Op, variant: Variant, case: Case, configs: Iterable[Config], why_not: list[str] | None = None
) -> dict[Config, LaunchFacts]:
    """Return the facts of a variant's launches by config; none if launches of the first config depend on values.

    why_not: gets the line of the error then.
    """
    by_config: dict[Config, LaunchFacts] = {}
    try:
        inputs = op.inputs(case, device="meta")
        for config in configs:
            with unlaunched(host_folder(op), "meta") as launches:
                variant.run(inputs, config)
            by_config[config] = launches
    except Exception as error:  # code that reads values fails on tensors without memory
        if why_not is not None:
            why_not.append(f"{statement_in(host_folder(op), error)}{first_line(error)}")
    return by_config


def with_configs_of_autotuners(op: Op, variant: Variant, case: Case) -> Variant:
    """Return a variant that has the configs of its kernels' autotuners in a case as values of a knob; else the variant itself."""
    kept = _kept(facts_by_config(op, variant, case, [variant.default_config(case)]))
    return with_knob(variant, {case: kept}) if kept else variant


def _kept(by_config: Mapping[Config, LaunchFacts]) -> list[int]:
    """Return the numbers of the configs among which autotuners choose in launches."""
    return sorted({fact.block for each in by_config.values() for fact in each.facts if fact.kind == "kept config"})


def _kept_in_runs(op: Op, variant: Variant, cases: Iterable[Case]) -> dict[Case, list[int]]:
    """Return for each case what `_kept` does, of a variant whose host code reads values; none if the first case has none."""
    kept = dict[Case, list[int]]()
    for case in cases:
        with noting(passes_on=False) as facts, suppress(Exception):  # the check of the case says why
            LayoutChecker(op, case, "cpu").outputs(variant, variant.default_config(case))
        kept[case] = _kept({None: LaunchFacts(facts)})
        if not any(kept.values()):
            break
    return kept


def around_default(variant: Variant, case: Case) -> Iterator[Config]:
    """Yield the default config, and for each other value of a knob a valid config that changes at most one more knob."""
    default = variant.default_config(case)
    yield default
    if variant.config is None:
        return
    offered = [(knob, value) for knob, values in variant.space(case).items() for value in values]
    for knob, value in offered:
        if value != getattr(default, knob):
            changes = ({second: its_value} | {knob: value} for second, its_value in ((knob, value), *offered))
            configs = (replace(default, **change) for change in changes)
            yield from itertools.islice((config for config in configs if variant.invalid(case, config) is None), 1)


def _facts_in_fork(op: Op, variant: Variant, cases: Iterable[Case]) -> dict[Case, dict[Config, LaunchFacts]]:
    """Return the facts of launches around the default config of each case; the fork's host code keeps buffers without memory."""

    def work() -> dict[Case, dict[Config, LaunchFacts]]:
        return {case: facts_by_config(op, variant, case, around_default(variant, case)) for case in cases}

    with suppress(ForkCrashedError):
        return Fork(work).result()
    return {case: {} for case in cases}


def _with_new_facts(facts: Mapping[Case, Mapping[Config, LaunchFacts]]) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs with a fact that no default config, the first of each case, and no earlier pair has.

    The first list has the pairs with a new even block, whose size is the value of a knob; the second, with any other new fact.
    """

    def counted_facts(config: Config, launch_facts: LaunchFacts) -> set[Fact]:
        values = {value for _knob, value in knob_pairs(config)}
        return {fact for fact in launch_facts.facts if not fact.block or fact.block in values}

    known = set[Fact]().union(*(counted_facts(*next(iter(by_config.items()))) for by_config in facts.values() if by_config))
    even, others = list[Pair](), list[Pair]()
    for case, by_config in facts.items():
        for config, launch_facts in by_config.items():
            new = counted_facts(config, launch_facts) - known
            known |= new
            kinds = {fact.kind for fact in new}
            even += [(config, case)] if "even blocks" in kinds else []
            others += [(config, case)] if kinds - {"even blocks"} else []
    return even, others


def _cost_of_pair(case_cost: float, facts: Mapping[Config, LaunchFacts], config: Config) -> float:
    """Estimate the cost of a pair: each changed knob multiplies the programs of the default config, the first, by a factor."""
    if not facts:
        return case_cost
    default, *_ = facts
    base, factor = max(1, facts[default].num_programs), 1.0
    for value in set(knob_pairs(config)).difference(knob_pairs(default)):
        factor *= next((facts[other].num_programs / base for other in facts if value in knob_pairs(other)), 1.0)
    return case_cost + _PROGRAM_COST * base * factor
