"""Compute costs of configs on cases from measured times. Rules are grown on these costs and judged by them."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kerneltune.nearness import ranked
from kerneltune.rule import Facts, Form, knobs_at
from kerneltune.rules.transfer import Donor, Pairs, followed, forms_of
from kerneltune.search.task import config_values
from kerneltune.spec import Case, Op, Variant

Times = Mapping[tuple[tuple[str, Any], ...], float | None]
"""Knobs -> µs; None for a config that spilled, failed or was wrong."""
Costs = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

UNKNOWN, INVALID, FAILED = 0.25, 0.3, 0.7
"""Assumed log time over the best time of a config that was not timed, is invalid, or has no time."""
_DEFAULT_COSTS = 0.002
"""Log time by which the default must be better: some operators take milliseconds to find theirs."""
_SEVERAL = 5
"""Configs with known times that a case without a recorded config needs to be judged."""


@dataclass(frozen=True, slots=True)
class TimedCase:
    """A case with its known times.

    Attributes:
        case: the case.
        times: time of each known config.
        best_us: time of the recorded config, or the smallest known time without a recorded config.
        recorded: knobs of the recorded config, or None.
    """

    case: Case
    times: Times
    best_us: float
    recorded: Mapping[str, Any] | None = None

    @property
    def is_judged(self) -> bool:
        """True if the known times suffice to judge a config."""
        return self.recorded is not None or len(self.times) >= _SEVERAL

    @property
    def fastest(self) -> dict[str, Any]:
        """The recorded knobs, or the knobs of the fastest of at least five known configs; empty with fewer."""
        timed = {knobs: time_us for knobs, time_us in self.times.items() if time_us is not None}
        if self.recorded is not None or len(timed) < _SEVERAL:
            return dict(self.recorded or {})
        return dict(min(timed.items(), key=lambda pair: pair[1])[0])


class CostTable:
    """The costs of forms on cases: log time over the best time.

    Attributes:
        cases: cases with their known times.
        variant: the variant whose configs are compared.
        shapes: the number of every shape; numbers: of every case's shape.
        forms: forms that a rule may choose, the default first.
        costs: (cases, forms) costs; UNKNOWN, INVALID and FAILED for missing times.
        known: (cases, forms) whether the time is known.
        valid: (cases, forms) whether the config is valid.
        given: (shapes, forms) whether a form comes from a case of another shape, too.
        kinds: names of words whose values never share a config.
    """

    def __init__(self, op: Op, variant: Variant, cases: Sequence[TimedCase]) -> None:
        self.op, self.cases = op, list(cases)
        self.shapes = {axes: number for number, axes in enumerate(dict.fromkeys(timed.case.axes for timed in cases))}
        self.numbers = np.array([self.shapes[timed.case.axes] for timed in cases])
        self.variant = variant
        donors = [(timed.case, timed.fastest) for timed in cases if timed.fastest]
        follows = followed(donors)
        places: dict[Pairs, set[int]] = {(): {-1}}
        for donor in donors:
            for form in forms_of(donor, follows):
                places.setdefault(form, set()).add(self.shapes[donor[0].axes])
        self.forms: list[Form] = [dict(form) for form in places]
        self.given = np.array([[bool(by - {number}) for by in places.values()] for number in range(len(self.shapes))])
        size = len(self.cases), len(self.forms)
        self.costs, self.known, self.valid = np.full(size, UNKNOWN), np.zeros(size, bool), np.zeros(size, bool)
        for i, j in np.ndindex(size):
            knobs = knobs_at(self.forms[j], dict(self.cases[i].case.axes))
            self.costs[i, j], self.known[i, j], self.valid[i, j] = self._cost(self.cases[i], knobs)
        self._borrow()
        self.costs[:, 0] += _DEFAULT_COSTS
        self.kinds = {"quant", *op.options} - set(op.free_options)
        self.words = list(_word_questions(op, self.cases))
        self.questions = {"nothing": [], "once": [], "sizes": self._ask(op.axes), "ratios": self._ask(_expressions(op.axes))}

    def _cost(self, timed: TimedCase, knobs: Mapping[str, Any]) -> tuple[float, bool, bool]:
        knobs = knobs or default_knobs(self.variant, timed.case)
        if self.variant.valid_config(timed.case, knobs) is None:
            return INVALID, False, False
        key = tuple(knobs.items())
        if key not in timed.times:
            return UNKNOWN, False, True
        time_us = timed.times[key]
        return (FAILED, True, True) if time_us is None else (math.log(time_us / timed.best_us), True, True)

    def _borrow(self) -> None:
        """Fill unknown costs of a 16-bit type with the costs of the other 16-bit type, which has as many bytes."""
        places = {timed.case: place for place, timed in enumerate(self.cases)}
        for i, timed in enumerate(self.cases):
            other = {"bfloat16": "float16", "float16": "bfloat16"}.get(timed.case.dtype, "")
            twin = places.get(replace(timed.case, dtype=other))
            if twin is not None:
                missing = self.valid[i] & ~self.known[i] & self.known[twin]
                self.costs[i, missing] = self.costs[twin, missing]

    def _ask(self, expressions: Sequence[str]) -> "list[Question]":
        facts = [Facts.of(timed.case) for timed in self.cases]
        return [Question(text, np.array([one.number(text) for one in facts])) for text in expressions] + self.words

    def share(self, place: int, knobs: Mapping[str, Any]) -> float:
        """Return the tuned time over a config's time on a case; NaN if the time is unknown."""
        cost, known, _ = self._cost(self.cases[place], knobs)
        return math.exp(-cost) if known else math.nan

    def nearest(self, place: int) -> list[tuple[float, dict[str, Any]]]:
        """Return (log2 distance, knobs) of the recorded configs of other sizes that a look-up may take, the nearest first."""
        asked = self.cases[place].case
        donors = [(s.case, dict(s.recorded)) for s in self.cases if s.recorded is not None and s.case.axes != asked.axes]
        return list(near_configs(self.op, self.variant, asked, donors))


def near_configs(op: Op, variant: Variant, case: Case, recorded: Sequence[Donor]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield (log2 distance, knobs) of the recorded configs of other sizes that a look-up may take, the nearest first."""
    places = [((dict(other.axes), other.dtype, dict(other.options)), (other, knobs)) for other, knobs in recorded]
    asked = dict(case.axes), case.dtype, dict(case.options)
    for (_, moved, apart), (other, knobs) in ranked(asked, places, op.free_axes, op.free_options, op.bands):
        if other.quant == case.quant and moved and variant.valid_config(case, knobs) is not None:
            yield apart, dict(knobs)


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its answers: a number for every case, or whether a word has a value.

    Attributes:
        subject, equals: as in rule.Split.
        values: number of every case, or 1 where the word has the value.
    """

    subject: str
    values: Costs
    equals: Any = None


def _word_questions(op: Op, cases: Sequence[TimedCase]) -> Iterator[Question]:
    facts = [Facts.of(timed.case) for timed in cases]
    for word in ("dtype", "quant", *op.options):
        for value in list(dict.fromkeys(one.words[word] for one in facts))[:-1]:
            yield Question(word, np.array([float(one.words[word] == value) for one in facts]), value)


def _expressions(axes: Sequence[str]) -> list[str]:
    """Return sizes, bytes, and ratios of sizes."""
    return [*axes, "*".join([*axes, "bytes"]), *(f"{a}/{b}" for a, b in itertools.combinations(axes, 2))]


def default_knobs(variant: Variant, case: Case) -> dict[str, Any]:
    """Return the knobs of a variant's default; empty for a variant without knobs."""
    return config_values(variant.default_config(case)) or {}
