"""Rules fitted to measured times, and what leave-one-shape-out says of them. Pure numbers: needs no GPU."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kerneltune.nearness import ranked
from kerneltune.rule import Facts, Form, Leaf, Node, Rule, Split, facts_of, knobs_at, used
from kerneltune.spec import Case, Op, Variant
from kerneltune.tuning.transfer import Donor, Pairs, config_of, followed, forms_of

Times = Mapping[tuple[tuple[str, Any], ...], float | None]
"""Knobs -> µs; None for a config that has no time: it spilled, failed or was wrong."""
_Costs = npt.NDArray[np.float64]
_Rows = npt.NDArray[np.intp]
_Picks = Mapping[int, Mapping[str, Any]]
"""Case, by its place in a table -> the knobs that a look-up takes for it."""

UNKNOWN, INVALID, FAILED = 0.25, 0.3, 0.7
"""log time over the best that a config is expected to cost where it was not timed, is not valid, or has no time."""
_WORST_COUNTS = 0.25
"""Share of a leaf's largest cost that counts beside the mean."""
_DEFAULT_COSTS = 0.002
"""What the default must be better by: some operators take milliseconds to find theirs."""
_USED = 4
"""Forms of a leaf: the next serves where those before it are not valid."""
_SEVERAL = 6
"""Configs whose times tell what the best of a case without a recorded config is about."""
_LEAST = 2
"""Fewest shapes of a leaf."""
_DEEPEST = 8
"""Most questions to a leaf."""
_GAINS = (0.002, 0.008)
_NEAR = (0.0, 2.01, 4.01)
_PART_COSTS = 0.001
"""Mean log time that each part of a tree's shape must save, so that of two that do alike the plainer is kept."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A case with what is known of it.

    Attributes:
        best_us: time of the recorded config, or the least known where none is recorded.
        recorded: the knobs of the recorded config, None where there is none.
    """

    case: Case
    times: Times
    best_us: float
    recorded: Mapping[str, Any] | None = None

    @property
    def is_judged(self) -> bool:
        """Return whether enough is known to say how good a config is."""
        return self.recorded is not None or len(self.times) >= _SEVERAL

    @property
    def fastest(self) -> dict[str, Any]:
        """Return the recorded knobs, or the fastest of several; none where fewer are known."""
        timed = {knobs: time_us for knobs, time_us in self.times.items() if time_us is not None}
        if self.recorded is not None or len(timed) < _SEVERAL:
            return dict(self.recorded or {})
        return dict(min(timed.items(), key=lambda pair: pair[1])[0])


@dataclass(frozen=True, slots=True)
class Judgement:
    """What leave-one-shape-out says of a rule.

    Attributes:
        shares: recorded case -> tuned time over the rule's time; NaN where the rule's config was not timed there.
        others: the same of cases without a recorded config, of which several times are known: the least of these over the rule's.
    """

    shares: Mapping[Case, float] = field(default_factory=dict)
    others: Mapping[Case, float] = field(default_factory=dict)

    @property
    def judged(self) -> list[float]:
        """The shares that are known."""
        return [share for share in self.shares.values() if not math.isnan(share)]

    @property
    def observed(self) -> list[float]:
        """The shares that are known of cases without a recorded config."""
        return [share for share in self.others.values() if not math.isnan(share)]

    @property
    def geomean(self) -> float:
        """Return the geometric mean."""
        return _geomean(self.judged)

    @property
    def worst(self) -> float:
        """The least."""
        return min(self.judged, default=math.nan)

    @property
    def data(self) -> dict[str, Any]:
        """The judgement as JSON."""
        found: dict[str, Any] = {"cases": len(self.shares), "judged": len(self.judged)}
        if self.judged:
            label = min(case.label for case, share in self.shares.items() if share == self.worst)
            found |= {"geomean": round(self.geomean, 4), "worst": round(self.worst, 4), "worst_case": label}
        if self.observed:
            shares = {"observed_geomean": round(_geomean(self.observed), 4), "observed_worst": round(min(self.observed), 4)}
            found |= {"observed": len(self.observed), **shares}
        return found

    def merit(self, without: Sequence[Case] = ()) -> float:
        """Return what is maximised: the mean share, less what the worst lacks, less what is not known.

        without: cases that do not count.
        """
        every = [share for case, share in [*self.shares.items(), *self.others.items()] if case not in without]
        shares = [math.exp(-UNKNOWN) if math.isnan(share) else share for share in every]
        if not shares:
            return 0.0
        return float(np.mean(np.log(np.minimum(shares, 1.02)))) + 0.1 * min(0.0, math.log(min(shares)))


def _geomean(shares: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(shares)))) if shares else math.nan


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How a tree may grow, and how far the nearest recorded sizes serve.

    Attributes:
        asks: `nothing` for the default alone, `once` for one leaf, `sizes`, or `ratios` for sizes, their ratios and bytes.
        gain: mean log time that a question must save per case of the whole table.
        is_apart: whether cases that differ in a word no config serves two values of have trees of their own.
        near: as in rule.Rule.
    """

    asks: str
    gain: float = _GAINS[0]
    is_apart: bool = False
    near: float = 0.0

    @property
    def parts(self) -> int:
        """Return what the shape costs, in parts."""
        return {"nothing": 0, "once": 1, "sizes": 3, "ratios": 4}[self.asks] + (self.near > 0)


class CostTable:
    """Costs of forms on cases: log time over the best.

    Attributes:
        samples: the cases.
        shapes: the number of every shape; numbers: of every case's shape.
        forms: what a rule may choose, the default first.
        costs: (cases, forms); UNKNOWN, INVALID and FAILED stand for what has no time.
        known: (cases, forms) whether the time is known.
        valid: (cases, forms) whether the config is valid.
        given: (shapes, forms) whether a form has other cases than those of the shape to be known from.
        kinds: words of which no config serves two values.
    """

    def __init__(self, op: Op, variant: Variant, samples: Sequence[Sample]) -> None:
        self.op, self.variant, self.samples = op, variant, list(samples)
        self.shapes = {axes: number for number, axes in enumerate(dict.fromkeys(s.case.axes for s in samples))}
        self.numbers = np.array([self.shapes[sample.case.axes] for sample in samples])
        donors = [(sample.case, sample.fastest) for sample in samples if sample.fastest]
        follows = followed(donors)
        places: dict[Pairs, set[int]] = {(): {-1}}
        for donor in donors:
            for form in forms_of(donor, follows):
                places.setdefault(form, set()).add(self.shapes[donor[0].axes])
        self.forms: list[Form] = [dict(form) for form in places]
        self.given = np.array([[bool(by - {number}) for by in places.values()] for number in range(len(self.shapes))])
        size = len(self.samples), len(self.forms)
        self.costs, self.known, self.valid = np.full(size, UNKNOWN), np.zeros(size, bool), np.zeros(size, bool)
        for i, j in np.ndindex(size):
            knobs = knobs_at(self.forms[j], dict(self.samples[i].case.axes))
            self.costs[i, j], self.known[i, j], self.valid[i, j] = self._cost(self.samples[i], knobs)
        self._borrow()
        self.costs[:, 0] += _DEFAULT_COSTS
        self.kinds = {"quant", *op.options} - set(op.free_options)
        self.words = list(_word_questions(op, self.samples))
        self.questions = {"nothing": [], "once": [], "sizes": self._ask(op.axes), "ratios": self._ask(_expressions(op.axes))}

    def _cost(self, sample: Sample, knobs: Mapping[str, Any]) -> tuple[float, bool, bool]:
        knobs = knobs or default_knobs(self.variant, sample.case)
        if config_of(self.variant, sample.case, knobs) is None:
            return INVALID, False, False
        key = tuple(knobs.items())
        if key not in sample.times:
            return UNKNOWN, False, True
        time_us = sample.times[key]
        return (FAILED, True, True) if time_us is None else (math.log(time_us / sample.best_us), True, True)

    def _borrow(self) -> None:
        """Take what is not known of one 16-bit type as it is of the other, whose bytes are as many."""
        places = {sample.case: place for place, sample in enumerate(self.samples)}
        for i, sample in enumerate(self.samples):
            other = {"bfloat16": "float16", "float16": "bfloat16"}.get(sample.case.dtype, "")
            twin = places.get(replace(sample.case, dtype=other))
            if twin is not None:
                missing = self.valid[i] & ~self.known[i] & self.known[twin]
                self.costs[i, missing] = self.costs[twin, missing]

    def _ask(self, expressions: Sequence[str]) -> "list[_Question]":
        facts = [facts_of(sample.case) for sample in self.samples]
        return [_Question(text, np.array([one.number(text) for one in facts])) for text in expressions] + self.words

    def share(self, place: int, knobs: Mapping[str, Any]) -> float:
        """Return the tuned time over that of a config on a case; NaN where it is not known."""
        cost, known, _ = self._cost(self.samples[place], knobs)
        return math.exp(-cost) if known else math.nan

    def judgement(self, picks: _Picks) -> Judgement:
        """Return how good the picks are."""
        shares = {place: self.share(place, knobs) for place, knobs in picks.items()}
        recorded, others = (
            {s.case: shares[i] for i, s in enumerate(self.samples) if i in shares and (s.recorded is not None) == wanted}
            for wanted in (True, False)
        )
        return Judgement(recorded, others)

    def nearest(self, place: int) -> list[tuple[float, dict[str, Any]]]:
        """Return (log2 distance, knobs) of the recorded configs of other sizes that a look-up may take, the nearest first."""
        asked = self.samples[place].case
        donors = [(s.case, dict(s.recorded)) for s in self.samples if s.recorded is not None and s.case.axes != asked.axes]
        return list(_near(self.op, self.variant, asked, donors))


def _near(op: Op, variant: Variant, case: Case, recorded: Sequence[Donor]) -> Iterator[tuple[float, dict[str, Any]]]:
    places = [((dict(other.axes), other.dtype, dict(other.options)), (other, knobs)) for other, knobs in recorded]
    asked = dict(case.axes), case.dtype, dict(case.options)
    for (_, moved, apart), (other, knobs) in ranked(asked, places, op.free_axes, op.free_options, op.bands):
        if other.quant == case.quant and moved and config_of(variant, case, knobs) is not None:
            yield apart, dict(knobs)


@dataclass(frozen=True, slots=True)
class _Question:
    """A number of every case, or whether an option has a value."""

    subject: str
    values: _Costs
    equals: Any = None


def _word_questions(op: Op, samples: Sequence[Sample]) -> Iterator[_Question]:
    facts = [facts_of(sample.case) for sample in samples]
    for word in ("dtype", "quant", *op.options):
        for value in list(dict.fromkeys(one.words[word] for one in facts))[:-1]:
            yield _Question(word, np.array([float(one.words[word] == value) for one in facts]), value)


def _expressions(axes: Sequence[str]) -> list[str]:
    """Return sizes, bytes, and ratios of sizes."""
    return [*axes, "*".join([*axes, "bytes"]), *(f"{a}/{b}" for a, b in itertools.combinations(axes, 2))]


def _best_prefixes(costs: _Costs) -> _Costs:
    """Return for every number of leading rows (1, 2, …) the least objective times the number, over the forms."""
    count = np.arange(1, len(costs) + 1)[:, None]
    totals = np.cumsum(costs, axis=0) + _WORST_COUNTS * np.maximum.accumulate(costs, axis=0) * count
    best: _Costs = totals.min(axis=1)
    return best


class _Grower:
    """A tree over some cases and forms of a table."""

    def __init__(self, table: CostTable, rows: _Rows, forms: npt.NDArray[np.bool_], shape: TreeShape) -> None:
        self.table, self.shape = table, shape
        self.columns = np.flatnonzero(forms)
        self.least_gain = shape.gain * len(rows)

    def grow(self, rows: _Rows, depth: int = _DEEPEST) -> Node:
        """Return the tree of some cases."""
        found, left = self.kinds(rows), depth
        if found is None and depth:
            found, left = self.split(rows), depth - 1
        if found is None:
            return self.ranking(rows)
        question, bound = found
        below = question.values[rows] <= bound
        if question.equals is not None:
            below = ~below
        then, otherwise = self.grow(rows[below], left), self.grow(rows[~below], left)
        if then == otherwise:
            return then
        asked = {"at_most": _round(bound)} if question.equals is None else {"equals": question.equals}
        return Split(subject=question.subject, **asked, then=then, otherwise=otherwise)

    def kinds(self, rows: _Rows) -> tuple[_Question, float] | None:
        """Return the question that parts cases no config serves both of; None where they are of one kind."""
        parting = (one for one in self.table.words if one.subject in self.table.kinds and len(set(one.values[rows])) > 1)
        return next(((one, 0.5) for one in parting), None) if self.shape.is_apart else None

    def split(self, rows: _Rows) -> tuple[_Question, float] | None:
        """Return the question that saves the most time, and its bound."""
        costs = self.table.costs[np.ix_(rows, self.columns)]
        best, most = None, self.least_gain
        for question in self.table.questions[self.shape.asks]:
            order = np.argsort(question.values[rows], kind="stable")
            ordered = question.values[rows][order]
            left, right = _best_prefixes(costs[order]), _best_prefixes(costs[order[::-1]])[::-1]
            for end in np.flatnonzero(np.diff(ordered) > 1e-9):
                gain = left[-1] - left[end] - right[end + 1]
                if gain > most and self.is_enough(rows[order[: end + 1]]) and self.is_enough(rows[order[end + 1 :]]):
                    low, high = ordered[end], ordered[end + 1]
                    best, most = (question, math.sqrt(low * high) if low > 0 else (low + high) / 2), gain
        return best

    def is_enough(self, rows: _Rows) -> bool:
        """Return whether cases are of as many shapes as a leaf must have."""
        return len(set(self.table.numbers[rows])) >= _LEAST

    def ranking(self, rows: _Rows) -> Leaf:
        """Return a leaf's forms: the best for all its cases, then the best for those that it is not valid for, then others."""
        chosen: list[int] = []
        left = rows
        while len(chosen) < min(_USED, len(self.columns)):
            costs = self.table.costs[np.ix_(left if len(left) else rows, self.columns)]
            scores = costs.mean(axis=0) + _WORST_COUNTS * costs.max(axis=0)
            scores[np.isin(self.columns, chosen)] = np.inf
            best = int(self.columns[int(np.argmin(scores))])
            chosen.append(best)
            left = left[~self.table.valid[left, best]]
        return tuple(chosen)


def _round(bound: float) -> float:
    """Return the bound with as many digits as a reader wants."""
    return float(f"{bound:.4g}")


def grown(table: CostTable, shape: TreeShape, without: int = -1) -> Rule:
    """Return the rule that a table without one shape makes."""
    rows = np.flatnonzero(table.numbers != without)
    forms = table.given[without] if without >= 0 else np.ones(len(table.forms), bool)
    node: Node = (0,) if shape.asks == "nothing" else _Grower(table, rows, forms, shape).grow(rows)
    cases = [table.samples[row].case for row in rows]
    return Rule(
        variant=table.variant.name,
        policy="cold",
        near=shape.near,
        known=_known([facts_of(case) for case in cases], table.op.free_options),
        least={axis: min(case[axis] for case in cases) for axis in table.op.axes},
        forms=tuple(table.forms),
        tree=node,
    )


def _known(facts: Sequence[Facts], free: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of every word among some cases, but of options a config of which serves other values as well."""
    kept = [name for name in facts[0].words if name != "dtype" and name not in free]
    words = [{**{name: one.words[name] for name in kept}, "bytes": one.itemsize} for one in facts]
    return {name: list(dict.fromkeys(one[name] for one in words)) for name in words[0]}


def chosen(op: Op, variant: Variant, rule: Rule, case: Case, recorded: Sequence[Donor]) -> Mapping[str, Any]:
    """Return the knobs that a look-up takes for an unrecorded case: near, by the rule, or by default."""
    near = next(_near(op, variant, case, recorded), None) if rule.near else None
    if near is not None and near[0] <= rule.near:
        return near[1]
    for knobs in rule.proposals(facts_of(case)):
        if not knobs or config_of(variant, case, knobs) is not None:
            return knobs or default_knobs(variant, case)
    return default_knobs(variant, case)


def default_knobs(variant: Variant, case: Case) -> dict[str, Any]:
    """Return the knobs of a variant's default; none for a variant without one."""
    default = variant.default_config(case)
    return {} if default is None else {name: getattr(default, name) for name in default.__dataclass_fields__}


def _shapes(table: CostTable) -> list[TreeShape]:
    """Return the shapes that are tried, the plainest first, nearest sizes left aside."""
    apart = (False, True) if any(one.subject in table.kinds for one in table.words) else (False,)
    trees = [TreeShape(asks, gain, kind) for asks in ("sizes", "ratios") for gain in _GAINS for kind in apart]
    return [TreeShape("nothing"), *(TreeShape("once", is_apart=kind) for kind in apart), *trees]


def _picked(table: CostTable, shape: TreeShape, places: Sequence[int]) -> dict[int, Mapping[str, Any]]:
    """Return what rules of this shape choose for cases, each rule made without the case's sizes."""
    found: dict[int, Mapping[str, Any]] = {}
    for number in dict.fromkeys(int(table.numbers[place]) for place in places):
        rule = grown(table, shape, number)
        for place in places:
            if table.numbers[place] == number:
                found[place] = chosen(table.op, table.variant, rule, table.samples[place].case, [])
    return found


def _near_or(picks: _Picks, nearest: Mapping[int, Sequence[tuple[float, dict[str, Any]]]], near: float) -> _Picks:
    """Return the picks, of cases that have recorded sizes near enough the config of the nearest."""
    return {
        place: nearest[place][0][1] if near and nearest[place] and nearest[place][0][0] <= near else knobs
        for place, knobs in picks.items()
    }


def judgements(table: CostTable) -> dict[TreeShape, Judgement]:
    """Return how rules of every shape do on the judged cases when they know nothing of the case's sizes."""
    if len(table.shapes) < 2:
        return {TreeShape("nothing"): Judgement()}
    places = [place for place, sample in enumerate(table.samples) if sample.is_judged]
    nearest = {place: table.nearest(place) for place in places}
    found = {}
    for shape in _shapes(table):
        picks = _picked(table, shape, places)
        for near in _NEAR:
            found[replace(shape, near=near)] = table.judgement(_near_or(picks, nearest, near))
    return found


def untimed(table: CostTable) -> dict[Case, list[dict[str, Any]]]:
    """Return the configs that rules would choose for cases of sizes they do not know, and whose times there are not known."""
    every = range(len(table.samples))
    nearest = {place: table.nearest(place) for place in every}
    found: dict[Case, list[dict[str, Any]]] = {}
    for shape, near in itertools.product(_shapes(table), (0.0, _NEAR[-1])):
        for place, knobs in _near_or(_picked(table, shape, every), nearest, near).items():
            wanted = found.setdefault(table.samples[place].case, [])
            if math.isnan(table.share(place, knobs)) and knobs not in wanted:
                wanted.append(dict(knobs))
    return found


def best_shape(found: Mapping[TreeShape, Judgement], without: Sequence[Case] = ()) -> TreeShape:
    """Return the shape that does best when shapes are left out; a part more must save `_PART_COSTS`."""
    return max(found, key=lambda shape: found[shape].merit(without) - _PART_COSTS * shape.parts)


def unseen(table: CostTable, found: Mapping[TreeShape, Judgement]) -> Judgement:
    """Return how rules do whose shape, too, is chosen without the sizes that are left out."""
    shares: dict[Case, float] = {}
    others: dict[Case, float] = {}
    for axes in table.shapes:
        without = [sample.case for sample in table.samples if sample.case.axes == axes]
        judged = found[best_shape(found, without)]
        shares |= {case: judged.shares[case] for case in without if case in judged.shares}
        others |= {case: judged.others[case] for case in without if case in judged.others}
    return Judgement(shares, others)


def fitted(table: CostTable) -> tuple[Rule, Judgement]:
    """Return the rule whose shape does best when shapes are left out, and how it does."""
    found = judgements(table)
    shape = best_shape(found)
    apart = unseen(table, found)
    data = found[shape].data | {"unseen": round(_geomean([*apart.judged, *apart.observed]), 4)}
    return _pruned(msgspec.structs.replace(grown(table, shape), judged=data)), found[shape]


def _pruned(rule: Rule) -> Rule:
    """Return the rule without the forms that no leaf uses."""
    kept = sorted(set(used(rule.tree)))
    places = {form: place for place, form in enumerate(kept)}

    def renumbered(node: Node) -> Node:
        if isinstance(node, Split):
            return msgspec.structs.replace(node, then=renumbered(node.then), otherwise=renumbered(node.otherwise))
        return tuple(places[form] for form in node)

    return msgspec.structs.replace(rule, forms=tuple(rule.forms[form] for form in kept), tree=renumbered(rule.tree))
