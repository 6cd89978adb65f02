"""Decision trees grown on a table of costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kerneltune.rule import Facts, Leaf, Node, Rule, Split
from kerneltune.rules.costs import Costs, CostTable, Question, Rows

_WORST_COUNTS = 0.25
"""Share of a leaf's largest cost that counts beside the mean."""
_USED = 4
"""Forms of a leaf. A form serves where all forms before it are invalid."""
_LEAST = 2
"""Fewest shapes of a leaf."""
_DEEPEST = 8
"""Most questions to a leaf."""
_ROUNDS = 3
"""Number of times that the bounds move after a tree has grown. A fourth time moved no bound of the shipped rules."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The questions that a tree may ask, and the distance up to which the nearest recorded sizes serve.

    Attributes:
        asks: questions of the tree: `nothing` (the default alone), `once` (a single leaf), `sizes`, or `ratios` (sizes, ratios of
            sizes, and bytes).
        gain: mean log time per case of the whole table that a question must save.
        apart: words that separate trees: `kinds` (words whose values never share a config), `words` (also all options), or none.
        near: as in rule.Rule.
    """

    asks: str
    gain: float = 0.002
    apart: str = ""
    near: float = 0.0

    @property
    def parts(self) -> int:
        """The complexity of the shape."""
        return {"nothing": 0, "once": 1, "sizes": 3, "ratios": 4}[self.asks] + (self.near > 0)


def _best_prefixes(costs: Costs) -> Costs:
    """Return for every number of leading rows (1, 2, …) the smallest objective of a form, times the number of rows."""
    count = np.arange(1, len(costs) + 1)[:, None]
    totals = np.cumsum(costs, axis=0) + _WORST_COUNTS * np.maximum.accumulate(costs, axis=0) * count
    best: Costs = totals.min(axis=1)
    return best


def _undominated(costs: Costs) -> npt.NDArray[np.intp]:
    """Return the columns that no other column equals or undercuts in every row, and the first of equal columns."""
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
        """Return a question that separates cases into trees of their own, or None."""
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
        """Return whether the cases have enough shapes for a leaf."""
        return len(set(self.table.numbers[rows])) >= _LEAST

    def ranking(self, rows: Rows) -> Leaf:
        """Return a leaf's forms: the best form for all cases, then the best form for the cases that it is invalid for, and so on.

        If any form was timed on a case of the leaf, the first form was.
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
    """Moves the bounds of a grown tree, because a bound is chosen before the questions below it are known."""

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
        """Return the bound with the smallest cost; the present bound if no other bound costs less."""
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
        """Return the cost of every case by a tree."""
        if not isinstance(node, Split):
            forms, valid = np.array(node), self.table.valid[np.ix_(rows, np.array(node))]
            first = np.where(valid.any(axis=1), valid.argmax(axis=1), 0)
            costs: Costs = self.table.costs[rows, forms[first]]
            return costs
        holds, found = self.holds(node, rows), np.empty(len(rows))
        found[holds], found[~holds] = self.costs(node.then, rows[holds]), self.costs(node.otherwise, rows[~holds])
        return found


def grown(table: CostTable, shape: TreeShape, without: int = -1) -> Rule:
    """Return the rule of a table, or of the table without a shape."""
    rows = np.flatnonzero(table.numbers != without)
    forms = table.given[without] if without >= 0 else np.ones(len(table.forms), bool)
    node: Node = (0,) if shape.asks == "nothing" else _Grower(table, rows, forms, shape).grow(rows)
    mover = _Mover(table, table.questions[shape.asks] + table.words)
    for _ in range(_ROUNDS):
        node = mover.moved(node, rows)
    cases = [table.cases[row].case for row in rows]
    return Rule(
        variant=table.variant.name,
        policy="cold",
        near=shape.near,
        known=_known([Facts.of(case) for case in cases], table.op.free_options),
        least={axis: min(case[axis] for case in cases) for axis in table.op.axes},
        forms=tuple(table.forms),
        tree=node,
    )


def _known(facts: Sequence[Facts], free: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of every word among the cases, without the type and the free options."""
    kept = [name for name in facts[0].words if name != "dtype" and name not in free]
    words = [{**{name: one.words[name] for name in kept}, "bytes": one.itemsize} for one in facts]
    return {name: list(dict.fromkeys(one[name] for one in words)) for name in words[0]}
