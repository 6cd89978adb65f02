"""Fit rules to measured times and judge them by leaving out each shape in turn. Needs no GPU."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from kerneltune.rule import Facts, Node, Rule, Split, used_forms
from kerneltune.rules.costs import UNKNOWN, CostTable, default_knobs, near_configs
from kerneltune.rules.transfer import Donor
from kerneltune.rules.trees import TreeShape, grown
from kerneltune.spec import Case, Op, Variant

_Picks = Mapping[int, Mapping[str, Any]]
"""Place of a case in a table -> knobs that a look-up takes."""

_KINDS = (("nothing", ""), ("once", ""), ("once", "kinds"), ("sizes", ""), ("sizes", "kinds"), ("ratios", "words"))
"""Questions and separating words of the trees that are tried.

Each kind does best for some operator when shapes are left out. The other combinations do best for none (H200, 2026-11-25).
"""
_GAINS = (0.002, 0.008)
_NEAR = (0.0, 2.01, 4.01)
_PART_COSTS = 0.001
"""Mean log time that each part of a tree's shape must save, so that the plainer of two equally good trees is kept."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The quality of a rule on shapes that were left out of its fit.

    Attributes:
        shares: recorded case -> tuned time over the rule's time; NaN if the rule's config was not timed on the case.
        others: case without a recorded config -> smallest known time over the rule's time; NaN as above.
    """

    shares: Mapping[Case, float] = field(default_factory=dict)
    others: Mapping[Case, float] = field(default_factory=dict)

    @property
    def judged(self) -> list[float]:
        """The known shares of recorded cases."""
        return [share for share in self.shares.values() if not math.isnan(share)]

    @property
    def observed(self) -> list[float]:
        """The known shares of cases without a recorded config."""
        return [share for share in self.others.values() if not math.isnan(share)]

    @property
    def geomean(self) -> float:
        """The geometric mean on recorded cases."""
        return _geomean(self.judged)

    @property
    def worst(self) -> float:
        """The smallest share on recorded cases."""
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
        """Return the mean log share plus a tenth of the smallest log share; an unknown share counts as UNKNOWN.

        Cases in `without` do not count.
        """
        every = [share for case, share in [*self.shares.items(), *self.others.items()] if case not in without]
        shares = [math.exp(-UNKNOWN) if math.isnan(share) else share for share in every]
        if not shares:
            return 0.0
        return float(np.mean(np.log(np.minimum(shares, 1.02)))) + 0.1 * min(0.0, math.log(min(shares)))


def _geomean(shares: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(shares)))) if shares else math.nan


def chosen(op: Op, variant: Variant, rule: Rule, case: Case, recorded: Sequence[Donor]) -> Mapping[str, Any]:
    """Return the knobs that a look-up takes for an unrecorded case: a near config, a proposal of the rule, or the default."""
    near = next(near_configs(op, variant, case, recorded), None) if rule.near else None
    if near is not None and near[0] <= rule.near:
        return near[1]
    for knobs in rule.proposals(Facts.of(case)):
        if not knobs or variant.valid_config(case, knobs) is not None:
            return knobs or default_knobs(variant, case)
    return default_knobs(variant, case)


def judgement(table: CostTable, picks: _Picks) -> Judgement:
    """Return the quality of the picks."""
    shares = {place: table.share(place, knobs) for place, knobs in picks.items()}
    recorded, others = (
        {s.case: shares[i] for i, s in enumerate(table.cases) if i in shares and (s.recorded is not None) == wanted}
        for wanted in (True, False)
    )
    return Judgement(recorded, others)


def _shapes(table: CostTable) -> list[TreeShape]:
    """Return the shapes that are tried, the plainest first, without a distance of the nearest sizes."""
    has_kinds = any(question.subject in table.kinds for question in table.words)
    kinds = [(asks, apart) for asks, apart in _KINDS if apart != "kinds" or has_kinds]
    gains = {"nothing": _GAINS[:1], "once": _GAINS[:1]}
    return [TreeShape(asks, gain, apart) for asks, apart in kinds for gain in gains.get(asks, _GAINS)]


def _picked(table: CostTable, shape: TreeShape, places: Sequence[int]) -> dict[int, Mapping[str, Any]]:
    """Return the knobs that rules of this shape choose for cases; each rule is grown without the sizes of its case."""
    found: dict[int, Mapping[str, Any]] = {}
    for number in dict.fromkeys(int(table.numbers[place]) for place in places):
        rule = grown(table, shape, number)
        for place in places:
            if table.numbers[place] == number:
                found[place] = chosen(table.op, table.variant, rule, table.cases[place].case, [])
    return found


def _near_or(picks: _Picks, nearest: Mapping[int, Sequence[tuple[float, dict[str, Any]]]], near: float) -> _Picks:
    """Return the picks, with the nearest recorded config where its sizes are near enough."""
    return {
        place: nearest[place][0][1] if near and nearest[place] and nearest[place][0][0] <= near else knobs
        for place, knobs in picks.items()
    }


def judgements(table: CostTable) -> dict[TreeShape, Judgement]:
    """Return the quality of every shape of rule on the judged cases, whose sizes the rule does not know."""
    if len(table.shapes) < 2:
        return {TreeShape("nothing"): Judgement()}
    places = [place for place, timed in enumerate(table.cases) if timed.is_judged]
    nearest = {place: table.nearest(place) for place in places}
    found = {}
    for shape in _shapes(table):
        picks = _picked(table, shape, places)
        for near in _NEAR:
            found[replace(shape, near=near)] = judgement(table, _near_or(picks, nearest, near))
    return found


def untimed(table: CostTable) -> dict[Case, list[dict[str, Any]]]:
    """Return the configs with unknown times that rules would choose for cases whose sizes they do not know."""
    every = range(len(table.cases))
    nearest = {place: table.nearest(place) for place in every}
    found: dict[Case, list[dict[str, Any]]] = {}
    for shape, near in itertools.product(_shapes(table), (0.0, _NEAR[-1])):
        for place, knobs in _near_or(_picked(table, shape, every), nearest, near).items():
            wanted = found.setdefault(table.cases[place].case, [])
            if math.isnan(table.share(place, knobs)) and knobs not in wanted:
                wanted.append(dict(knobs))
    return found


def best_shape(found: Mapping[TreeShape, Judgement], without: Sequence[Case] = ()) -> TreeShape:
    """Return the best shape of rule; each part of a shape must save `_PART_COSTS`."""
    return max(found, key=lambda shape: found[shape].merit(without) - _PART_COSTS * shape.parts)


def unseen(table: CostTable, found: Mapping[TreeShape, Judgement]) -> Judgement:
    """Return the quality of rules whose shape, too, is chosen without the left-out sizes."""
    shares: dict[Case, float] = {}
    others: dict[Case, float] = {}
    for axes in table.shapes:
        without = [timed.case for timed in table.cases if timed.case.axes == axes]
        judged = found[best_shape(found, without)]
        shares |= {case: judged.shares[case] for case in without if case in judged.shares}
        others |= {case: judged.others[case] for case in without if case in judged.others}
    return Judgement(shares, others)


def left_out(table: CostTable, kind: str) -> Judgement:
    """Return the quality of rules on groups of cases that were left out of their fit.

    `kind` is `band` (cases whose first size rounds to the same power of two) or `rest` (cases with equal other sizes).
    """
    groups: dict[Any, list[int]] = {}
    for place, timed in enumerate(table.cases):
        sizes = [size for _, size in timed.case.axes]
        group = round(math.log2(max(sizes[0], 1))) if kind == "band" else tuple(sizes[1:])
        groups.setdefault(group, []).append(place)
    picks: dict[int, Mapping[str, Any]] = {}
    for places in groups.values():
        others = [timed for place, timed in enumerate(table.cases) if place not in places]
        if judged := [place for place in places if others and table.cases[place].is_judged]:
            rule, _ = fitted(CostTable(table.op, table.variant, others))
            recorded = [(timed.case, dict(timed.recorded)) for timed in others if timed.recorded is not None]
            for place in judged:
                picks[place] = chosen(table.op, table.variant, rule, table.cases[place].case, recorded)
    return judgement(table, picks)


def fitted(table: CostTable) -> tuple[Rule, Judgement]:
    """Return the rule with the best shape, and its quality."""
    found = judgements(table)
    shape = best_shape(found)
    apart = unseen(table, found)
    shares = [*apart.judged, *apart.observed]
    data = found[shape].data
    if shares:
        data |= {"unseen": round(_geomean(shares), 4), "unseen_worst": round(min(shares), 4)}
    return _pruned(msgspec.structs.replace(grown(table, shape), judged=data)), found[shape]


def _pruned(rule: Rule) -> Rule:
    """Return the rule without unused forms."""
    kept = sorted(set(used_forms(rule.tree)))
    places = {form: place for place, form in enumerate(kept)}

    def renumbered(node: Node) -> Node:
        if isinstance(node, Split):
            return msgspec.structs.replace(node, then=renumbered(node.then), otherwise=renumbered(node.otherwise))
        return tuple(places[form] for form in node)

    return msgspec.structs.replace(rule, forms=tuple(rule.forms[form] for form in kept), tree=renumbered(rule.tree))
