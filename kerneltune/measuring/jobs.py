"""Run checks in forks of this process, on all cores: a kernel that ends its process fails its own check alone."""

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from kerneltune.errors import first_line
from kerneltune.forked import Fork, ForkCrashedError, Tell
from kerneltune.interpreter.facts import Fact, Reached, cut_short, merged, note, noting, unnoted, unreached
from kerneltune.interpreter.modes import Launches, unlaunched
from kerneltune.measuring.addresses import address_errors
from kerneltune.measuring.check import Checker, check_only
from kerneltune.measuring.memory import memory_obstacle
from kerneltune.measuring.mutations import mutate
from kerneltune.measuring.pairs import around_default, check_cost, check_pairs, launched, settings
from kerneltune.records import grouped
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.task import Outcome, Run, Task

Begin = Callable[[Outcome], None]
"""Function that gets the outcome that the next check has if it ends the process; the cause is appended to its reason."""
_LONG = 64
"""Smallest size of an axis that is long. Longer axes have more programs, and the interpreter takes 1 ms for each program."""
_MOST_COST = 4.0
"""Largest cost of a derived case, in units of the costliest check case. Cases of shipped kernels cost at most 1 of these."""
_FAR = 16
"""Factor over the longest size of an axis in check cases above which a size comes last: it may be the turns of a loop, 1 ms each,
which the traffic of a case does not tell."""
_FEW_PROGRAMS = 512
"""Programs that a derived case may have in any case: they take the interpreter half a second."""
_MOST_NAMES = 8
"""Largest number of names in a coverage line."""
_ADDRESSES_S = 3.0
"""Processor seconds after which no further config's addresses are checked. 16 of 24 variants of six families need less for all of
their configs (timed by a script, 2026-11-27)."""
_LAUNCHES_S = 10.0
"""Processor seconds for the launches of bench cases, whose inputs an operator may make in spite of device `meta`."""
_Fork = Fork[tuple[list[Outcome], Reached]]


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """Describe checks that run in one process.

    Attributes:
        label: name of the checks on one line.
        task: the variant, and the case of the outcomes that name no case.
        work: function that runs the checks.
        parts: a job for each check alone; the parts run if an unknown check of the job ends the process.
        runs: the runs of a case that the job checks, with an outcome for each; empty for other checks.
        is_largest: whether the job checks addresses of a largest case, whose facts the other jobs should have.
        checks: cost of the job, in checks of a case.
        reached: how far the job's launches went, after `run_jobs`.
    """

    label: str
    task: Task
    work: Callable[[Begin], list[Outcome]]
    parts: "tuple[Job, ...]" = ()
    runs: Sequence[Run] = ()
    is_largest: bool = False
    checks: int = 1
    reached: Reached = field(default_factory=dict)


def case_job(runs: Sequence[Run]) -> Job:
    """Return the job that checks the runs of a case, with an outcome for each."""
    parts = tuple(case_job([run]) for run in runs) if len(runs) > 1 else ()
    return Job(runs[0].task.case_label, runs[0].task, lambda _begin: check_only(runs), parts, runs, checks=len(runs))


def pairs_job(task: Task, cases: Sequence[Case]) -> Job:
    """Return the job that checks pairs of config and case; see `check_pairs`."""
    op, variant = task.op, task.variant

    def work(begin: Begin) -> list[Outcome]:
        fitting = [case for case in cases if memory_obstacle(op, case) is None]
        return check_pairs(op, variant, fitting, partial(check_cost, op), begin)

    checks = len(cases) * (2 if variant.config is None else 4)  # a run of each case again, and pairs of its other configs
    return Job(f"{op.name} {variant.name}, configs on cases", task, work, checks=checks)


def address_job(task: Task, facts: Collection[Fact] = (), checks: Sequence[Case] = ()) -> Job:
    """Return the job that checks the addresses of a task: of the default config, then of configs with another value of a knob.

    _ADDRESSES_S limits the further configs. The facts of the default config are noted, with `facts`, which bench cases have. The
    outcome names config and case. Check cases tell the limits of whole numbers in inputs.
    """

    def work(begin: Begin) -> list[Outcome]:
        for fact in facts:
            note(fact)
        begun_s = time.thread_time()
        for number, config in enumerate(around_default(task.variant, task.case)):
            if number and time.thread_time() - begun_s > _ADDRESSES_S:
                break
            failed = Outcome("failed", "", config, task.case)
            begin(failed)
            with unnoted() if number else nullcontext():
                lines = address_errors(task.op, task.case, task.variant, config, checks)
            if lines:
                return [replace(failed, reason=line) for line in lines]
        return []

    return Job(f"{task.op.name} {task.variant.name} {task.case.name}, addresses", task, work, is_largest=True)


def mutation_job(task: Task, cases: Sequence[Case]) -> Job:
    """Return the job that perturbs outputs; see `mutate`."""

    def work(begin: Begin) -> list[Outcome]:
        begin(Outcome("failed", f"{task.op.name} {task.variant.name}: "))
        return mutate(task.op, task.variant, cases)

    return Job(f"{task.op.name}, mutations", task, work)


def run_jobs(jobs: Iterable[Job]) -> Iterator[tuple[Job, list[Outcome]]]:
    """Run a job on each core at a time, and yield each finished job with its outcomes."""
    waiting, running = deque(jobs), dict[_Fork, Job]()
    num_processes = len(os.sched_getaffinity(0))
    try:
        while waiting or running:
            while waiting and len(running) < num_processes:
                job = waiting.popleft()
                running[Fork(partial(_work, job))] = job
            told = wait([fork.pipe for fork in running])
            for fork in [fork for fork in running if fork.pipe in told]:
                if fork.is_done():
                    job = running.pop(fork)
                    yield job, _outcomes(fork, job)
    finally:
        for fork in running:
            fork.end()


def _work(job: Job, begin: Begin) -> tuple[list[Outcome], Reached]:
    with noting() as reached:
        return job.work(begin), reached


def _outcomes(fork: _Fork, job: Job) -> list[Outcome]:
    """Return the outcomes of a job; if a check ended the fork, only the outcome of this check or of the job's parts."""
    try:
        outcomes, reached = fork.result()
    except ForkCrashedError as error:
        if not job.parts:
            crashed = fork.last_note or Outcome("failed")
            return [replace(crashed, reason=f"{crashed.reason}{error}")]
        outcomes = [outcome for part in job.parts for outcome in _outcomes(Fork(partial(_work, part)), part)]
        reached = merged(part.reached for part in job.parts)
    job.reached.update(reached)
    return outcomes


def coverage_lines(jobs: Sequence[Job]) -> list[str]:
    """Return a line for each operator with loops, axes of grids or facts of bench cases that no check reached."""
    lines = []
    for op, of_op in grouped(jobs, lambda job: job.task.op.name).items():
        checks, largest = (merged(job.reached for job in of_op if job.is_largest is wanted) for wanted in (False, True))
        if names := unreached(checks, largest):
            more = [f"and {len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
            lines.append(f"{op}: no check has {', '.join(names[:_MOST_NAMES] + more)}")
        lines += [
            f"{op}: the largest case stores no last element of {fact}, as all checks do: a grid cut short?"
            for fact in cut_short(merged(job.reached for job in of_op if job.runs), largest)
        ]
    return lines


def derived_cases(op: Op, check: Sequence[Case], bench: Sequence[Case]) -> tuple[list[Case], list[str], set[Fact]]:
    """Return check cases for what only bench cases have, a text for each value without a case, and the facts of bench cases.

    For each type, mode and option, a check case of medium cost takes the value, or another check case if the operator has no
    inputs or no reference for the first. If an axis is the longest in bench cases alone, it takes the longest size of a check
    case. No derived case costs more than _MOST_COST times the costliest check case: the bench cases of a workload are models of
    real size. Values of captured kernels are fixed.
    """
    derived, without = list[Case](), list[str]()
    by_cost = sorted((case for case in check if op.traffic(case).total), key=partial(check_cost, op))
    middle = len(by_cost) // 2
    by_cost = [*by_cost[middle:], *reversed(by_cost[:middle])]
    if not by_cost or op.origin is not None:
        return [], [], _shortened_in_fork(op, [], [], bench, 0.0)[1]
    most = _MOST_COST * max(check_cost(op, case) for case in by_cost)
    known = {value for case in check for value in settings(case)}
    for name, value in dict.fromkeys(value for case in bench for value in settings(case) if value not in known):
        found, reason = _first_checkable(op, (_with_value(case, name, value) for case in by_cost), most)
        derived += found
        without += [] if found else [f"{name}={value} ({reason})"]
    longest = {axis for case in by_cost for axis in _longest(case)}
    oblong = [case for case in by_cost if _longest(case) and min(size for _axis, size in case.axes) > 1]
    by_size = sorted(oblong, key=lambda case: (_size(case) < _LONG, _size(case)))
    for axis in dict.fromkeys(axis for case in bench for axis in _longest(case) if axis not in longest):
        derived += _first_checkable(op, (_with_longest(case, axis) for case in by_size), most)[0]
    shortened, facts = _shortened_in_fork(op, by_cost, [*check, *derived], bench, most)
    return [*derived, *shortened], without, facts


def _shortened_in_fork(
    op: Op, by_cost: Sequence[Case], check: Sequence[Case], bench: Sequence[Case], most: float
) -> tuple[list[Case], set[Fact]]:
    """Return what `_shortened` returns; nothing if host code ends the fork, as the check of addresses says then."""
    with suppress(ForkCrashedError):
        return Fork(partial(_shortened, op, by_cost, check, bench, most)).result()
    return [], set()


def _shortened(
    op: Op, by_cost: Sequence[Case], check: Sequence[Case], bench: Sequence[Case], most: float, tell: Tell
) -> tuple[list[Case], set[Fact]]:
    """Return bench cases with some sizes of a check case, each for facts that no check case has, and all facts of bench cases.

    Facts of default configs come first. Configs around the default follow, on one of the bench cases with equal facts. Whole
    blocks are sought last, and from the least sizes, which make the fewest turns of loops. A case has at most _MOST_COST times
    the programs of the check cases, or _FEW_PROGRAMS. A variant that calls `torch.bincount`, for example, is left out: its
    launches depend on values.
    """
    derived, facts = list[Case](), set[Fact]()
    variants = _launched_variants(op, check)
    longest = {axis: max((case[axis] for case in by_cost), default=0) for axis in op.axes}

    def is_far(case: Case) -> bool:
        return any(size > _FAR * longest[axis] for axis, size in case.axes)

    steps = {axis: math.gcd(*(case[axis] for case in (*check, *bench))) for axis in op.axes}
    for configs in (_default_alone, around_default) if check else (_default_alone,):
        of_check = [launches for _case, launches in _launches(op, variants, configs, [*check, *derived])]
        smaller_of = by_cost if len(of_check) >= len(check) else []
        known = {fact for launches in of_check for fact in launches.facts}
        most_programs = max(_FEW_PROGRAMS, _MOST_COST * max((launches.num_programs for launches in of_check), default=0))
        of_facts: dict[frozenset[Fact], Case] = {}
        for case, launches in _launches(op, variants, configs, sorted(bench, key=partial(check_cost, op))):
            facts |= launches.facts
            of_facts[frozenset(launches.facts)] = case
            if launches.facts <= known:
                continue
            for of_whole in (False, True):
                wanted = {fact for fact in launches.facts - known if (fact.kind == "whole") is of_whole}
                if not wanted:
                    continue
                is_new = partial(_has_new_fact, op, variants, configs, wanted, known)
                least = _with_least_sizes(case, [*smaller_of[:1], *smaller_of[1:][-1:]], steps, is_new)
                doublings = partial(_doublings, op, most / _MOST_COST)
                others = sorted(_with_sizes_of(case, smaller_of), key=doublings)
                near, far = ([it for it in others if is_far(it) is wanted_far] for wanted_far in (False, True))
                in_order = (sorted(least, key=doublings), near, far) if of_whole else (near, least, far)
                affordable = (it for it in itertools.chain(*in_order) if check_cost(op, it) <= most)
                for smaller, its in _launches(op, variants, configs, affordable):
                    if its.num_programs <= most_programs and its.facts & wanted - known and not _obstacle(op, smaller, tell):
                        derived.append(smaller)
                        known |= its.facts
                    if wanted <= known:
                        break
            known |= launches.facts
        bench = [*of_facts.values()]
    return derived, facts


def _doublings(op: Op, costliest: float, case: Case) -> int:
    """Return log2 of a case's cost over the cost of the costliest check case, rounded up; 0 for a cheaper case."""
    return max(0, math.ceil(math.log2(check_cost(op, case) / costliest)))


def _with_sizes_of(case: Case, others: Sequence[Case]) -> Iterator[Case]:
    """Yield a case with the sizes of each other case except a few."""
    for num_kept in range(1, len(case.axes)):
        for other, kept in itertools.product(others, itertools.combinations(dict(case.axes), num_kept)):
            sizes = {axis: size if axis in kept else min(size, other[axis]) for axis, size in case.axes}
            changed = ",".join(f"{axis}={size}" for axis, size in sizes.items() if axis not in kept)
            yield replace(case, name=f"{case.name},{changed}", axes=tuple(sizes.items()))


def _with_least_sizes(
    case: Case, others: Sequence[Case], steps: Mapping[str, int], is_new: Callable[[Case], bool]
) -> Iterator[Case]:
    """Yield a case with the sizes of each other case except the least size of an axis that is new: 4097 for a branch above 4096.

    Args:
        steps: the greatest common divisor of the sizes of an axis.
        is_new: whether a case is new; if it is, then so is a case whose size of the axis is larger, but for whole blocks, of
            which `step` times a power of two is tried.
    """
    for other, (axis, size) in itertools.product(others, case.axes):
        sized = partial(_with_size, case, other, axis)
        below, step = other[axis], max(1, steps[axis])
        if below < size and is_new(sized(size)):
            doubled = (step << power for power in range((size // step).bit_length()))
            least = next((it for it in doubled if below < it < size and is_new(sized(it))), size)
            while least - below > step:
                middle = below + (least - below) // 2 // step * step
                least, below = (middle, below) if is_new(sized(middle)) else (least, middle)
            yield sized(least)


def _with_size(case: Case, other: Case, axis: str, size: int) -> Case:
    sizes = {**dict(case.axes), **dict(other.axes), axis: size}
    changed = ",".join(f"{name}={its}" for name, its in sizes.items())
    return replace(case, name=f"{case.name},{changed}", axes=tuple(sizes.items()))


def _has_new_fact(
    op: Op,
    variants: Sequence[Variant],
    configs: Callable[[Variant, Case], Iterable[Config]],
    facts: Collection[Fact],
    known: Collection[Fact],
    case: Case,
) -> bool:
    """Return whether launches of a case have one of some facts that is not known."""
    return any(
        fact in facts and fact not in known for _case, its in _launches(op, variants, configs, [case]) for fact in its.facts
    )


def _default_alone(variant: Variant, case: Case) -> Iterator[Config]:
    yield variant.default_config(case)


def _launched_variants(op: Op, cases: Iterable[Case]) -> list[Variant]:
    """Return the own variants whose launches are known without values, in all cases that they support until the time is over."""
    variants = [variant for variant in op.variants if not variant.is_peer]
    begun_s = time.thread_time()
    for case in cases:
        if time.thread_time() - begun_s > _LAUNCHES_S:
            break
        variants = [it for it in variants if it.unsupported(case) or launched(op, it, case, _default_alone(it, case))]
    return variants


def _launches(
    op: Op, variants: Sequence[Variant], configs: Callable[[Variant, Case], Iterable[Config]], cases: Iterable[Case]
) -> Iterator[tuple[Case, Launches]]:
    """Yield each case with the facts of the variants' launches, and the most programs of a config, until the time is over.

    Cases whose launches depend on values are left out. Whole blocks of any size count as a single fact.
    """
    begun_s = time.thread_time()
    for case in cases:
        if time.thread_time() - begun_s > _LAUNCHES_S:
            return
        supporting = [variant for variant in variants if not variant.unsupported(case)]
        made = [launched(op, variant, case, configs(variant, case)) for variant in supporting]
        if all(made):
            each = [launches for of_variant in made for launches in of_variant.values()]
            most = sum(max(launches.num_programs for launches in of_variant.values()) for of_variant in made)
            facts = {fact for launches in each for fact in launches.facts}
            yield case, Launches({fact._replace(place="") if fact.kind == "whole" else fact for fact in facts}, most)


def _size(case: Case) -> int:
    return max(size for _axis, size in case.axes)


def _longest(case: Case) -> list[str]:
    """Return the axis that is longer than all other axes, if there is such an axis."""
    axes = [axis for axis, size in case.axes if size == _size(case)]
    return axes if len(axes) == 1 else []


def _with_longest(case: Case, axis: str) -> Case:
    """Exchange the sizes of an axis and of the longest axis."""
    (longest,) = _longest(case)
    sizes = dict(case.axes)
    sizes[axis], sizes[longest] = sizes[longest], sizes[axis]
    return replace(case, name=f"{case.name},{axis}={sizes[axis]},{longest}={sizes[longest]}", axes=tuple(sizes.items()))


def _with_value(case: Case, name: str, value: Any) -> Case:
    named = f"{case.name},{name}={value}"
    if name in ("dtype", "quant"):
        return replace(case, name=named, **{name: value})
    return replace(case, name=named, options=tuple((option, value if option == name else old) for option, old in case.options))


def _obstacle(op: Op, case: Case, _tell: Tell) -> str:
    """Return why a case has no inputs or no expected values, or why host code refuses its sizes; empty if it can be checked."""
    made = Checker.make(op, case)
    if isinstance(made, Outcome):
        return made.reason
    with suppress(Exception), unlaunched():  # the check reports other errors
        for variant in (variant for variant in op.variants if not (variant.is_peer or variant.unsupported(case))):
            try:
                variant.run(made.inputs, variant.default_config(case))
            except (ValueError, AssertionError) as error:
                return first_line(error)
    return ""


def _first_checkable(op: Op, cases: Iterable[Case], most: float) -> tuple[list[Case], str]:
    """Return the first case that costs `most` at most, that an own variant supports, and that has inputs and expected values.

    A case that host code of an own variant refuses by a ValueError does not count. Forks make the values. Without such a case
    return the last reason.
    """
    reason = "no check case to derive a case from"
    for case in cases:
        try:
            own = [variant.unsupported(case) for variant in op.variants if not variant.is_peer]
            if check_cost(op, case) > most:
                reason = "too costly"
            elif all(own):
                reason = f"unsupported: {own[0]}" if own else "no own variant"
            elif not (reason := Fork(partial(_obstacle, op, case)).result()):
                return [case], ""
        except Exception as error:  # code of an operator on a case that its author may not have thought of
            reason = first_line(error)
    return [], reason
