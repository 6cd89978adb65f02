"""Decision trees grown on a table of costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kerneltune.rule import Facts, Leaf, Node, Rule, Split, facts_of
from kerneltune.rules.costs import Costs, CostTable, Question, Rows

_WORST_COUNTS = 0.25
"""Share of a leaf's largest cost that counts beside the mean."""
_USED = 4
"""Forms of a leaf: the next serves where those before it are not valid."""
_LEAST = 2
"""Fewest shapes of a leaf."""
_DEEPEST = 8
"""Most questions to a leaf."""
_ROUNDS = 3
"""Of moving bounds after a tree has grown; more moved none."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How a tree may grow, and how far the nearest recorded sizes serve.

    Attributes:
        asks: `nothing` for the default alone, `once` for one leaf, `sizes`, or `ratios` for sizes, their ratios and bytes.
        gain: mean log time that a question must save per case of the whole table.
        apart: `kinds` where cases that differ in a word no config serves two values of have trees of their own; `words` where
            those do that differ in any option or in the mode.
        near: as in rule.Rule.
    """

    asks: str
    gain: float = 0.002
    apart: str = ""
    near: float = 0.0

    @property
    def parts(self) -> int:
        """Return what the shape costs, in parts."""
        return {"nothing": 0, "once": 1, "sizes": 3, "ratios": 4}[self.asks] + (self.near > 0)


def _best_prefixes(costs: Costs) -> Costs:
    """Return for every number of leading rows (1, 2, …) the least objective times the number, over the forms."""
    count = np.arange(1, len(costs) + 1)[:, None]
    totals = np.cumsum(costs, axis=0) + _WORST_COUNTS * np.maximum.accumulate(costs, axis=0) * count
    best: Costs = totals.min(axis=1)
    return best


def _undominated(costs: Costs) -> npt.NDArray[np.intp]:
    """Return the columns that no other column equals or undercuts in every row, of equal columns the first."""
    unique, first = np.unique(costs, axis=1, return_index=True)
    no_dearer = (unique[:, :, None] <= unique[:, None, :]).all(axis=0)
    kept: npt.NDArray[np.intp] = first[no_dearer.sum(axis=0) == 1]
    return kept


class _Grower:
    """A tree over some cases and forms of a table."""

    def __init__(self, table: CostTable, rows: Rows, forms: npt.NDArray[np.bool_], shape: TreeShape) -> None:
        self.table, self.shape = table, shape
        self.columns = np.flatnonzero(forms)
        self.least = table.costs[:, self.columns[_undominated(table.costs[np.ix_(rows, self.columns)])]]
        self.least_gain = shape.gain * len(rows)

    def grow(self, rows: Rows, depth: int = _DEEPEST) -> Node:
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

    def kinds(self, rows: Rows) -> tuple[Question, float] | None:
        """Return the question that parts cases which have trees of their own; None where there are none."""
        words = {"": set(), "kinds": self.table.kinds, "words": self.table.kinds | set(self.table.op.options)}[self.shape.apart]
        parting = (one for one in self.table.words if one.subject in words and len(set(one.values[rows])) > 1)
        return next(((one, 0.5) for one in parting), None)

    def split(self, rows: Rows) -> tuple[Question, float] | None:
        """Return the question that saves the most time, and its bound."""
        costs = self.least[rows]
        best, most = None, self.least_gain
        for question in self.table.questions[self.shape.asks]:
            order = np.argsort(question.values[rows], kind="stable")
            ordered = question.values[rows][order]
            left, right = _best_prefixes(costs[order]), _best_prefixes(costs[order[::-1]])[::-1]
            for end in np.flatnonzero(np.diff(ordered) > 1e-9):
                gain = left[-1] - left[end] - right[end + 1]
                if gain > most and self.is_enough(rows[order[: end + 1]]) and self.is_enough(rows[order[end + 1 :]]):
                    low, high = ordered[end], ordered[end + 1]
                    best, most = (question, _between(low, high)), gain
        return best

    def is_enough(self, rows: Rows) -> bool:
        """Return whether cases are of as many shapes as a leaf must have."""
        return len(set(self.table.numbers[rows])) >= _LEAST

    def ranking(self, rows: Rows) -> Leaf:
        """Return a leaf's forms: the best for all its cases, then the best for those that it is not valid for, then others.

        The first was timed on one of the leaf's cases at least, if any was: of a guess nothing is known.
        """
        chosen: list[int] = []
        left, timed = rows, self.table.known[np.ix_(rows, self.columns)].any(axis=0)
        while len(chosen) < min(_USED, len(self.columns)):
            costs = self.table.costs[np.ix_(left if len(left) else rows, self.columns)]
            scores = costs.mean(axis=0) + _WORST_COUNTS * costs.max(axis=0)
            scores[np.isin(self.columns, chosen)] = np.inf
            if not chosen and timed.any():
                scores[~timed] = np.inf
            best = int(self.columns[int(np.argmin(scores))])
            chosen.append(best)
            left = left[~self.table.valid[left, best]]
        return tuple(chosen)


def _between(low: float, high: float) -> float:
    """Return the bound between two values."""
    return math.sqrt(low * high) if low > 0 else (low + high) / 2


def _round(bound: float) -> float:
    """Return the bound with as many digits as a reader wants."""
    return float(f"{bound:.4g}")


class _Mover:
    """Moves the bounds of a grown tree.

    A tree grows from its root: where a bound is chosen, it is not known yet what the questions below will tell apart.
    """

    def __init__(self, table: CostTable, questions: Sequence[Question]) -> None:
        self.table = table
        self.questions = {(one.subject, one.equals): one for one in questions}

    def moved(self, node: Node, rows: Rows) -> Node:
        """Return the tree with every bound where the node's cases cost least, from the leaves up."""
        if not isinstance(node, Split):
            return node
        holds = self.holds(node, rows)
        node = msgspec.structs.replace(
            node, then=self.moved(node.then, rows[holds]), otherwise=self.moved(node.otherwise, rows[~holds])
        )
        return node if node.at_most is None else msgspec.structs.replace(node, at_most=self.bound(node, rows))

    def bound(self, node: Split, rows: Rows) -> float:
        """Return the bound that costs least; that of the node where no other costs less."""
        assert node.at_most is not None
        values = self.questions[node.subject, None].values[rows]
        order = np.argsort(values, kind="stable")
        rows, values = rows[order], values[order]
        total = np.concatenate([[0.0], np.cumsum(self.costs(node.then, rows) - self.costs(node.otherwise, rows))])
        best, least = node.at_most, total[np.searchsorted(values, node.at_most, side="right")] - 1e-6
        for end in np.flatnonzero(np.diff(values) > 1e-9) + 1:
            if total[end] < least and all(len(set(self.table.numbers[part])) >= _LEAST for part in (rows[:end], rows[end:])):
                best, least = _round(_between(values[end - 1], values[end])), total[end]
        return best

    def holds(self, node: Split, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return the answer of every case."""
        values = self.questions[node.subject, node.equals].values[rows]
        answers: npt.NDArray[np.bool_] = values == 1.0 if node.at_most is None else values <= node.at_most
        return answers

    def costs(self, node: Node, rows: Rows) -> Costs:
        """Return what every case costs by a tree."""
        if not isinstance(node, Split):
            forms, valid = np.array(node), self.table.valid[np.ix_(rows, np.array(node))]
            first = np.where(valid.any(axis=1), valid.argmax(axis=1), 0)
            costs: Costs = self.table.costs[rows, forms[first]]
            return costs
        holds, found = self.holds(node, rows), np.empty(len(rows))
        found[holds], found[~holds] = self.costs(node.then, rows[holds]), self.costs(node.otherwise, rows[~holds])
        return found


def grown(table: CostTable, shape: TreeShape, without: int = -1) -> Rule:
    """Return the rule that a table without one shape makes."""
    rows = np.flatnonzero(table.numbers != without)
    forms = table.given[without] if without >= 0 else np.ones(len(table.forms), bool)
    node: Node = (0,) if shape.asks == "nothing" else _Grower(table, rows, forms, shape).grow(rows)
    mover = _Mover(table, table.questions[shape.asks] + table.words)
    for _ in range(_ROUNDS):
        node = mover.moved(node, rows)
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
