"""Rules fitted to measured times, and what leave-one-shape-out says of them. Pure numbers: needs no GPU."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kerneltune.nearness import ranked
from kerneltune.rule import Facts, Form, Leaf, Node, Rule, Split, facts_of
from kerneltune.spec import Case, Op, Variant
from kerneltune.tuning.transfer import Donor, config_of, followed, forms_of

Times = Mapping[tuple[tuple[str, Any], ...], float | None]
"""Knobs -> µs; None for a config that has no time: it spilled, failed or was wrong."""
_Costs = npt.NDArray[np.float64]
_Expressions = tuple[str, ...]

_DEFAULT = Form(())
"""The variant's default."""
UNKNOWN, INVALID, FAILED = 0.25, 0.3, 0.7
"""log time over the best that a config is expected to cost where it was not timed, is not valid, or has no time."""
_WORST_COUNTS = 0.25
"""Share of a leaf's largest cost that counts beside the mean."""
_DEFAULT_COSTS = 0.004
"""What the default must be better by: some operators take milliseconds to find theirs."""
_USED = 4
"""Forms of a leaf: the next serves where those before it are not valid."""
_SHAPES_OF_DEPTH = ((0, 1), (2, 3), (3, 2), (4, 2), (6, 1), (6, 2), (8, 1))
"""(depth of a tree, fewest shapes of a leaf) that are tried."""
_NEAR = (0.0, 0.5, 1.01, 2.01, 4.01)
_SEVERAL = 6
"""Configs whose times tell what the best of a case without a recorded config is about."""
_GAIN = 0.002
"""Mean log time that a split must save per case of the whole table."""


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
        return _known_shares(self.shares)

    @property
    def observed(self) -> list[float]:
        """The shares that are known of cases without a recorded config."""
        return _known_shares(self.others)

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
            label = min((case for case, share in self.shares.items() if share == self.worst), key=lambda case: case.label).label
            found |= {"geomean": round(self.geomean, 4), "worst": round(self.worst, 4), "worst_case": label}
        if self.observed:
            shares = {"observed_geomean": round(_geomean(self.observed), 4), "observed_worst": round(min(self.observed), 4)}
            found |= {"observed": len(self.observed), **shares}
        return found


def _known_shares(shares: Mapping[Case, float]) -> list[float]:
    return [share for share in shares.values() if not math.isnan(share)]


def _geomean(shares: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(shares)))) if shares else math.nan


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How a tree may grow, and how far the nearest recorded sizes serve.

    Attributes:
        depth: most questions to a leaf.
        least: fewest shapes of a leaf.
        near: as in rule.Rule.
        is_apart: whether cases that differ in a word no config serves two values of have trees of their own.
    """

    depth: int
    least: int
    near: float
    is_apart: bool = False


class CostTable:
    """Costs of forms on cases: log time over the best.

    Attributes:
        samples: the cases.
        forms: what a rule may choose.
        costs: (cases, forms), the default first; UNKNOWN, INVALID and FAILED stand for what has no time.
        known: (cases, forms) whether the time is known.
        valid: (cases, forms) whether the config is valid.
        kinds: words of which no config serves two values.
    """

    def __init__(self, op: Op, variant: Variant, samples: Sequence[Sample]) -> None:
        self.op, self.variant, self.samples = op, variant, list(samples)
        donors = [(s.case, dict(s.recorded or _fastest(s))) for s in samples if s.recorded or _fastest(s)]
        follows = followed(donors)
        places: dict[Form, set[int]] = {}
        shapes = self.shapes
        for donor in donors:
            for form in forms_of(donor, follows):
                places.setdefault(form, set()).add(shapes[donor[0].axes])
        self.forms = [_DEFAULT, *places]
        self._given_by = [{-1}, *places.values()]
        size = len(self.samples), len(self.forms)
        self.costs, self.known, self.valid = np.full(size, UNKNOWN), np.zeros(size, bool), np.zeros(size, bool)
        for i, sample in enumerate(self.samples):
            for j, form in enumerate(self.forms):
                self.costs[i, j], self.known[i, j], self.valid[i, j] = self._cost(sample, form.at(dict(sample.case.axes)))
        self._borrow()
        self.costs[:, 0] += _DEFAULT_COSTS
        self.questions = list(_questions(op, self.samples))
        self.kinds = {"quant", *op.options} - set(op.free_options)

    @property
    def shapes(self) -> dict[tuple[tuple[str, int], ...], int]:
        """The number of every shape."""
        return {axes: number for number, axes in enumerate(dict.fromkeys(s.case.axes for s in self.samples))}

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

    @property
    def has_kinds(self) -> bool:
        """Return whether some cases differ in a word that no config serves two values of."""
        return any(one.equals is not None and one.subject in self.kinds for one in self.questions)

    def share(self, index: int, knobs: Mapping[str, Any]) -> float:
        """Return the tuned time over that of a config on a case; NaN where it is not known."""
        cost, known, _ = self._cost(self.samples[index], knobs)
        return math.exp(-cost) if known else math.nan

    def usable(self, without: int | None) -> npt.NDArray[np.bool_]:
        """Return which forms some shape other than `without` gives."""
        return np.array([bool(given - {without}) for given in self._given_by])


def _fastest(sample: Sample) -> Mapping[str, Any]:
    timed = [(time_us, knobs) for knobs, time_us in sample.times.items() if time_us is not None]
    return dict(min(timed, key=lambda pair: pair[0])[1]) if len(timed) >= _SEVERAL else {}


@dataclass(frozen=True, slots=True)
class _Question:
    """A number of every case, or whether an option has a value."""

    subject: str
    values: npt.NDArray[np.float64]
    equals: Any = None


def _questions(op: Op, samples: Sequence[Sample]) -> Iterator[_Question]:
    facts = [facts_of(sample.case) for sample in samples]
    for expression in _expressions(op.axes):
        yield _Question(expression, np.array([one.number(expression) for one in facts]))
    for word in ("dtype", "quant", *op.options):
        for value in list(dict.fromkeys(one.words[word] for one in facts))[:-1]:
            yield _Question(word, np.array([float(one.words[word] == value) for one in facts]), value)


def _expressions(axes: Sequence[str]) -> _Expressions:
    """Return sizes, their products and ratios, bytes, and how a size lies to powers of two."""
    every = "*".join([*axes, "bytes"])
    pairs = [f"{a}*{b}" for a, b in itertools.combinations(axes, 2) if len(axes) > 2]
    ratios = [f"{a}/{b}" for a, b in itertools.combinations(axes, 2)]
    shared = [f"{a}*{b}/{c}" for c in axes for a, b in itertools.combinations([axis for axis in axes if axis != c], 2)]
    return (
        *axes,
        every,
        *pairs,
        *ratios,
        *shared,
        *(f"{axis}/pow2({axis})" for axis in axes),
        *(f"low({axis})" for axis in axes),
    )


def _objective(costs: _Costs) -> float:
    return float(costs.mean() + _WORST_COUNTS * costs.max()) if len(costs) else 0.0


def _best_prefixes(costs: _Costs) -> _Costs:
    """Return for every number of leading rows (1, 2, …) the least objective times the number, over the forms."""
    count = np.arange(1, len(costs) + 1)[:, None]
    totals = np.cumsum(costs, axis=0) + _WORST_COUNTS * np.maximum.accumulate(costs, axis=0) * count
    best: _Costs = totals.min(axis=1)
    return best


class _Grower:
    """A tree over some cases and forms of a table."""

    def __init__(self, table: CostTable, rows: npt.NDArray[np.intp], forms: npt.NDArray[np.bool_], shape: TreeShape) -> None:
        self.table, self.shape = table, shape
        self.columns = np.flatnonzero(forms)
        self.least_gain = _GAIN * len(rows)
        self.numbers = np.array([table.shapes[sample.case.axes] for sample in table.samples])
        self.node = self.grow(rows, shape.depth)

    def grow(self, rows: npt.NDArray[np.intp], depth: int) -> Node:
        found, left = self.kinds(rows), depth
        if found is None and depth:
            found, left = self.split(rows), depth - 1
        if found is None:
            return Leaf(self.ranking(rows))
        question, bound = found
        below = question.values[rows] <= bound
        if question.equals is not None:
            below = ~below
        then, otherwise = self.grow(rows[below], left), self.grow(rows[~below], left)
        if then == otherwise:
            return then
        return Split(question.subject, None if question.equals is not None else _round(bound), question.equals, then, otherwise)

    def kinds(self, rows: npt.NDArray[np.intp]) -> tuple[_Question, float] | None:
        """Return the question that parts cases no config serves both of; None where they are of one kind."""
        fixed = (one for one in self.table.questions if one.equals is not None and one.subject in self.table.kinds)
        parting = (one for one in fixed if len(set(one.values[rows])) > 1) if self.shape.is_apart else ()
        return next(((one, 0.5) for one in parting), None)

    def split(self, rows: npt.NDArray[np.intp]) -> tuple[_Question, float] | None:
        """Return the question that saves the most time, and its bound."""
        costs = self.table.costs[np.ix_(rows, self.columns)]
        whole = _best_prefixes(costs)[-1]
        best, most = None, self.least_gain
        for question in self.table.questions:
            values = question.values[rows]
            order = np.argsort(values, kind="stable")
            ordered = values[order]
            ends = np.flatnonzero(np.diff(ordered) > 1e-9)
            if not len(ends):
                continue
            left = _best_prefixes(costs[order])
            right = _best_prefixes(costs[order[::-1]])[::-1]
            for end in ends:
                gain = whole - left[end] - right[end + 1]
                if gain > most and self.enough(rows[order[: end + 1]]) and self.enough(rows[order[end + 1 :]]):
                    low, high = ordered[end], ordered[end + 1]
                    best, most = (question, math.sqrt(low * high) if low > 0 else (low + high) / 2), gain
        return best

    def enough(self, rows: npt.NDArray[np.intp]) -> bool:
        return len(set(self.numbers[rows])) >= self.shape.least

    def ranking(self, rows: npt.NDArray[np.intp]) -> tuple[int, ...]:
        """Return a leaf's forms: the best for all its cases, then the best for those that it is not valid for, then others."""
        chosen: list[int] = []
        left = rows
        while len(chosen) < _USED and len(chosen) < len(self.columns):
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


def grown(table: CostTable, shape: TreeShape, without: int | None = None) -> Rule:
    """Return the rule that a table without one shape makes."""
    numbers = table.shapes
    rows = np.array([i for i, sample in enumerate(table.samples) if numbers[sample.case.axes] != without], dtype=np.intp)
    node = _Grower(table, rows, table.usable(without), shape).node
    known = _known([facts_of(table.samples[i].case) for i in rows], table.op.free_options)
    return Rule(table.variant.name, "cold", tuple(table.forms), node, shape.near, known=known)


def _known(facts: Sequence[Facts], free: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of every word among some cases, but of options a config of which serves other values as well."""
    kept = [name for name in facts[0].words if name != "dtype" and name not in free]
    words = [{**{name: one.words[name] for name in kept}, "bytes": one.itemsize} for one in facts]
    return {name: list(dict.fromkeys(one[name] for one in words)) for name in words[0]}


def chosen(op: Op, variant: Variant, rule: Rule, case: Case, recorded: Sequence[Donor]) -> Mapping[str, Any]:
    """Return the knobs that a look-up takes for an unrecorded case: near, by the rule, or by default."""
    if rule.near:
        places = [((dict(other.axes), other.dtype, dict(other.options)), (other, knobs)) for other, knobs in recorded]
        asked = dict(case.axes), case.dtype, dict(case.options)
        for (_, moved, apart), (other, knobs) in ranked(asked, places, op.free_axes, op.free_options, op.bands):
            if other.quant == case.quant and moved and apart <= rule.near and config_of(variant, case, knobs) is not None:
                return dict(knobs)
    for knobs in rule.proposals(facts_of(case)):
        if not knobs or config_of(variant, case, knobs) is not None:
            return knobs or default_knobs(variant, case)
    return default_knobs(variant, case)


def default_knobs(variant: Variant, case: Case) -> dict[str, Any]:
    """Return the knobs of a variant's default; none for a variant without one."""
    default = variant.default_config(case)
    return {} if default is None else {name: getattr(default, name) for name in default.__dataclass_fields__}


def judged(table: CostTable, shape: TreeShape) -> Judgement:
    """Return how a rule of this shape does on every recorded case when it knows nothing of the case's sizes."""
    numbers = table.shapes
    recorded = [(i, s) for i, s in enumerate(table.samples) if s.recorded is not None]
    several = [(i, s) for i, s in enumerate(table.samples) if s.recorded is not None or len(s.times) >= _SEVERAL]
    shares: dict[Case, float] = {}
    for axes, number in numbers.items():
        left_out = [(i, s) for i, s in several if s.case.axes == axes]
        if not left_out or len(numbers) < 2:
            continue
        rule = grown(table, shape, number)
        others = [(s.case, dict(s.recorded or {})) for _, s in recorded if s.case.axes != axes]
        for i, sample in left_out:
            knobs = chosen(table.op, table.variant, rule, sample.case, others)
            shares[sample.case] = table.share(i, knobs)
    known = {sample.case for _, sample in recorded}
    return Judgement(*({case: share for case, share in shares.items() if (case in known) == wanted} for wanted in (True, False)))


def _tree_shapes(table: CostTable) -> list[TreeShape]:
    """Return the shapes that are tried, nearest sizes left aside."""
    apart = (False, True) if table.has_kinds else (False,)
    return [TreeShape(depth, least, 0.0, is_apart) for depth, least in _SHAPES_OF_DEPTH for is_apart in apart]


def untimed(table: CostTable) -> dict[Case, list[dict[str, Any]]]:
    """Return the configs that rules would choose for cases of sizes they do not know, and whose times there are not known."""
    found: dict[Case, list[dict[str, Any]]] = {}
    recorded = [(s.case, dict(s.recorded)) for s in table.samples if s.recorded is not None]
    for shape, (axes, number) in itertools.product(_tree_shapes(table), table.shapes.items()):
        rule = grown(table, shape, number)
        others = [donor for donor in recorded if donor[0].axes != axes]
        for i, sample in enumerate(table.samples):
            if sample.case.axes != axes:
                continue
            for near in (0.0, _NEAR[-1]):
                knobs = dict(chosen(table.op, table.variant, replace(rule, near=near), sample.case, others))
                if math.isnan(table.share(i, knobs)) and knobs not in found.setdefault(sample.case, []):
                    found[sample.case].append(knobs)
    return found


def _merit(judgement: Judgement) -> float:
    """Return what is maximised: the mean share, less what the worst lacks, less what is not known."""
    every = (*judgement.shares.values(), *judgement.others.values())
    shares = [math.exp(-UNKNOWN) if math.isnan(share) else share for share in every]
    if not shares:
        return 0.0
    return float(np.mean(np.log(np.minimum(shares, 1.02)))) + 0.1 * min(0.0, math.log(min(shares)))


def fitted(
    table: CostTable, on_shape: Callable[[TreeShape, Judgement], None] = lambda _shape, _found: None
) -> tuple[Rule, Judgement]:
    """Return the rule whose shape does best when shapes are left out, and how it does."""
    best: tuple[float, TreeShape, Judgement] | None = None
    trees = {shape: judged(table, shape) for shape in _tree_shapes(table)}
    leading = sorted(trees, key=lambda one: -_merit(trees[one]))[:2]
    for bare, near in itertools.product(leading, _NEAR):
        shape = replace(bare, near=near)
        found = judged(table, shape) if near else trees[bare]
        on_shape(shape, found)
        merit = _merit(found) - 0.0005 * shape.depth
        if best is None or merit > best[0]:
            best = merit, shape, found
    assert best is not None
    _, shape, found = best
    return _pruned(replace(grown(table, shape), judged=found.data)), found


def _pruned(rule: Rule) -> Rule:
    """Return the rule without the forms that no leaf uses."""
    used = sorted(set(_used(rule.tree)))
    places = {form: place for place, form in enumerate(used)}

    def renumbered(node: Node) -> Node:
        if isinstance(node, Leaf):
            return Leaf(tuple(places[form] for form in node.use))
        return replace(node, then=renumbered(node.then), otherwise=renumbered(node.otherwise))

    return replace(rule, forms=tuple(rule.forms[form] for form in used), tree=renumbered(rule.tree))


def _used(node: Node) -> Iterable[int]:
    if isinstance(node, Leaf):
        return node.use
    return [*_used(node.then), *_used(node.otherwise)]
