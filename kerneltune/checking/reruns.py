"""Run variants again: in reverse order of programs, with other unwritten memory, seeds, new values in place, after other sizes.

Each function judges a variant, and gives failures or notes. The module knows no operator.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kerneltune.checking.autotuned import variant_of
from kerneltune.checking.check import Checker, smallest_cases, why_not_checked
from kerneltune.checking.derived import resized
from kerneltune.checking.dispatch import Calls
from kerneltune.checking.pairs import around_default, check_cost, facts_by_config
from kerneltune.interpreter.faults import NOT_ENDED, reverse_order
from kerneltune.interpreter.modes import replaced
from kerneltune.processes.forked import Fork
from kerneltune.processes.start import tell
from kerneltune.records import RIGHT_ALONE
from kerneltune.spec import Case, Config, Inputs, Op, Variant
from kerneltune.task import Outcome, knobs_of
from kerneltune.wording import differing

_MOST_CASES, _MOST_S = 2, 4.0
"""The smallest cases, and the processor seconds after which no further config of a variant runs again."""
_CAUSE_S = 10.0
"""Seconds after which no further call is tried before a pair that failed."""
_MOST_CONFIGS = 4
"""Most configs whose call is tried before a pair that failed."""
_MOST_PROGRAMS, _MOST_COST = 256, 1.0
"""Most programs, and largest cost in MB of traffic, of a case with another size."""
_SECOND, _IS_KEPT = "run 2: ", "does host code keep a value?"
_ATEN = torch.ops.aten
_EMPTY = [_ATEN.empty, _ATEN.empty_like, _ATEN.empty_permuted, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided]
"""Functions of torch that return memory which nothing wrote."""


def wrong_in_reverse(op: Op, variant: Variant, cases: Sequence[Case]) -> list[Outcome]:
    """Return a note if a variant is wrong if the programs of each launch run in reverse order, and else is right.

    A GPU runs programs in any order, so the last program by its id is not the last to end. A variant whose programs wait for
    programs with smaller ids is not judged.
    """
    return _notes(op, variant, "its programs run in reverse order", _failures_within(reverse_order, op, variant, cases))


def wrong_by_unwritten(op: Op, variant: Variant, cases: Sequence[Case]) -> list[Outcome]:
    """Return a failure for unwritten memory that holds the largest numbers, and for the least, if the variant else is right.

    Else the memory holds NaN or the largest integers, which minima, maxima and comparisons may pass over.
    """
    failures = []
    for word, sign in (("largest", 1), ("least", -1)):
        where = f"if memory that nothing wrote holds the {word} numbers"
        found = _failures_within(partial(_Filled, sign), op, variant, cases)
        failures += [replace(failure, reason=f"{where}: {failure.reason}") for failure in found]
    return failures


def wrong_for_new_values(op: Op, variant: Variant, cases: Sequence[Case]) -> list[Outcome]:
    """Return a note if a variant is wrong if the tensors of its inputs get new values, and right in new tensors."""
    with suppress(Exception):  # the check of the case says why
        for case in _supported(op, variant, cases):
            config = variant.default_config(case)
            first, second, other = (Checker(op, case, "cpu", seed) for seed in (0, 1, 1))
            first.run(variant, config)
            second.inputs = {name: _moved(value, first.inputs.get(name)) for name, value in second.inputs.items()}
            lines = second.run(variant, config)[1]
            if lines and not other.run(variant, config)[1]:
                return _notes(op, variant, "its inputs get new values in place", [Outcome("failed", lines[0], config, case)])
    return []


def wrong_after_other_size(op: Op, variant: Variant, cases: Sequence[Case]) -> list[Outcome]:
    """Return a failure for each axis along which a case is right alone, and wrong after a case that differs in this axis alone.

    Host code may keep a number or a buffer by another size. Each order runs in a fork, where host code has kept nothing.
    """
    failures, begun_s = list[Outcome](), time.monotonic()
    with suppress(Exception):  # the check of the case says why
        (case,) = _supported(op, variant, cases)[:1]
        first = Checker(op, case, "cpu"), variant.default_config(case)
        for axis, other_case in _with_other_sizes(op, variant, case, cases):
            other = Checker(op, other_case, "cpu"), variant.default_config(other_case)
            for order in ((first, other, first), (other, first)):
                number, line = Fork(partial(_first_error, variant, order)).result()
                checker, config = order[number]
                if number and not Fork(partial(_first_error, variant, [order[number]])).result()[1]:
                    before = f"case {order[number - 1][0].case.name}, which differs in {axis}"
                    reason = f"{RIGHT_ALONE}{before}: {_IS_KEPT} {line}"
                    failures.append(Outcome("failed", reason, config, checker.case))
                    break
            if time.monotonic() - begun_s > _MOST_S:
                break
    return failures


def with_cause(op: Op, variant: Variant, failure: Outcome) -> Outcome:
    """Return the failure of a pair with another call, if the pair is right alone, and wrong after this call.

    Each order runs in a fork, so this process must have run no variant.
    """
    is_second, begun_s = failure.reason.startswith(_SECOND), time.monotonic()
    variant = variant_of(variant, failure.config)
    with suppress(Exception):  # the check of the case says why
        assert failure.case
        pair = Checker(op, failure.case, "cpu", seed=int(is_second)), failure.config
        if not Fork(partial(_first_error, variant, [pair])).result()[1]:
            for before, other in _other_calls(op, failure, is_second):
                if Fork(partial(_first_error, variant, [other, pair])).result()[0]:
                    return replace(failure, reason=f"{RIGHT_ALONE}{before}: {_IS_KEPT} {failure.reason.removeprefix(_SECOND)}")
                if time.monotonic() - begun_s > _CAUSE_S:
                    break
    return failure


def _other_calls(op: Op, failure: Outcome, is_second: bool) -> Iterator[tuple[str, tuple[Checker, Config]]]:
    """Yield calls after which a pair may be wrong: with other values, if its second run failed, configs or cases."""
    assert failure.case
    if is_second:
        yield "a call with other values", (Checker(op, failure.case, "cpu"), failure.config)
    configs = [config for config, case in failure.passed if case == failure.case]
    for config in configs[:_MOST_CONFIGS]:
        if sides := differing(knobs_of(config), knobs_of(failure.config)):
            yield "a call with {} in place of {}".format(*sides), (Checker(op, failure.case, "cpu"), config)
    first = {case: config for config, case in reversed(failure.passed)}
    for case in dict.fromkeys(case for _config, case in failure.passed if case != failure.case):
        yield f"case {case.name} {case.dtype}", (Checker(op, case, "cpu"), first[case])


def _with_other_sizes(op: Op, variant: Variant, case: Case, cases: Sequence[Case]) -> Iterator[tuple[str, Case]]:
    """Yield each axis with a copy of a case that differs in the axis alone: with a size of a check case, or twice its size."""

    def is_possible(copy: Case) -> bool:
        with suppress(Exception):  # code of an operator on sizes that its author may not have thought of
            if check_cost(op, copy) <= _MOST_COST and not variant.unsupported(copy):
                facts = facts_by_config(op, variant, copy, [variant.default_config(copy)])
                return all(each.num_programs <= _MOST_PROGRAMS for each in facts.values()) and not why_not_checked(op, copy)
        return False

    for axis, size in case.axes:
        for other in [*sorted({each[axis] for each in cases} - {0, 1, size}, reverse=True), 2 * size]:
            copy = resized(case, {**case.sizes, axis: other}, [axis])
            if Fork(partial(is_possible, copy)).result():
                yield axis, copy
                break


def _first_error(variant: Variant, runs: Sequence[tuple[Checker, Config]]) -> tuple[int, str]:
    """Return the number and the first line of the first run with an error; without an error, 0 and an empty line."""
    for number, (checker, config) in enumerate(runs):
        if lines := checker.run(variant, config)[1]:
            return number, lines[0]
    return 0, ""


def _notes(op: Op, variant: Variant, condition: str, failures: Sequence[Outcome]) -> list[Outcome]:
    """Return notes in place of failures under a condition that a GPU, or a user, may not meet."""
    where = f"{op.name}: {variant.name} is wrong if {condition}"
    return [Outcome("noted", f"{where}, in case {each.case.name}: {each.reason}") for each in failures if each.case]


def _supported(op: Op, variant: Variant, cases: Sequence[Case]) -> list[Case]:
    """Return the smallest cases, without cases that a variant does not support."""
    return [case for case in smallest_cases(op, cases, _MOST_CASES) if not variant.unsupported(case)]


def _failures_within(
    context: Callable[[], AbstractContextManager[Any]], op: Op, variant: Variant, cases: Sequence[Case]
) -> list[Outcome]:
    """Return the first failure of a variant within a context, if the same check passes without the context."""
    begun_s = time.thread_time()
    with suppress(Exception):  # the check of the case says why
        for case in _supported(op, variant, cases):
            checker = Checker(op, case, "cpu")
            for config in around_default(variant, case):
                tell(Outcome("failed", "", config, case))
                with context():
                    lines = checker.run(variant, config)[1]
                if any(NOT_ENDED in line for line in lines) or time.thread_time() - begun_s > _MOST_S:
                    return []
                if lines and not checker.run(variant, config)[1]:
                    return [Outcome("failed", lines[0], config, case)]
    return []


def repeated_draws(op: Op, variant: Variant, cases: Sequence[Case]) -> list[Outcome]:
    """Return a note for a seed whose next value gives a variant random numbers that the seed gives as well."""
    notes = list[Outcome]()
    with suppress(Exception):  # the check of the case says why
        largest = sorted(cases, key=lambda case: op.traffic(case).total, reverse=True)
        case = next(case for case in largest if not variant.unsupported(case))
        inputs = op.inputs(case, device="cpu")
        for name in (name for name, value in inputs.items() if "seed" in name.lower() and type(value) is int):
            first, second = (_draws(op, case, variant, {**inputs, name: inputs[name] + step}) for step in (0, 1))
            if first & second and first != second:  # a seed without an effect has its own line
                what = f"{variant.name} draws the same random numbers for {name} and {name} + 1"
                notes.append(Outcome("noted", f"{op.name}: {what}, in case {case.name}"))
    return notes


def _draws(op: Op, case: Case, variant: Variant, inputs: Inputs) -> set[int]:
    """Return a digest of the seeds and offsets of each draw of random numbers in a run."""
    from triton.language import random

    drawn, philox = set[int](), random.philox_impl

    def noted(*state: Any, **named: Any) -> Any:
        drawn.add(hash(tuple(part.handle.data.tobytes() for part in state if hasattr(part, "handle"))))
        return philox(*state, **named)

    with replaced({(random, "philox_impl"): noted}):
        checker = Checker(replace(op, inputs=lambda *_args, **_named: inputs), case, "cpu")
        checker.run(variant, variant.default_config(case))
    return drawn


def _moved(value: object, place: object) -> object:
    """Return `place` with the values of a tensor of the same layout; any other value as it is."""
    if not isinstance(value, torch.Tensor) or not isinstance(place, torch.Tensor):
        return value
    is_same = (value.shape, value.stride(), value.dtype) == (place.shape, place.stride(), place.dtype)
    return place.copy_(value) if is_same else value


class _Filled(Calls):
    """Fill memory that torch returns unwritten with the largest numbers of its type, or with the least for sign -1."""

    def __init__(self, sign: int) -> None:
        super().__init__()
        self._sign = sign

    def call(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call a function, and fill the memory that it returns."""
        result = func(*args, **kwargs)
        if func.overloadpacket in _EMPTY and result.device.type != "meta":
            if result.is_floating_point():
                result.fill_(self._sign * torch.finfo(result.dtype).max)
            elif not result.is_complex() and result.dtype != torch.bool:
                limits = torch.iinfo(result.dtype)
                result.fill_(limits.max if self._sign > 0 else limits.min)
        return result
