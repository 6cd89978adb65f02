"""Rules fitted to measured times, and what leave-one-shape-out says of them. Pure numbers: needs no GPU."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from kerneltune.rule import Node, Rule, Split, facts_of, used
from kerneltune.rules.costs import UNKNOWN, CostTable, default_knobs, near_configs
from kerneltune.rules.transfer import Donor
from kerneltune.rules.trees import TreeShape, grown
from kerneltune.spec import Case, Op, Variant

_Picks = Mapping[int, Mapping[str, Any]]
"""Case, by its place in a table -> the knobs that a look-up takes for it."""

_GAINS = (0.002, 0.008)
_NEAR = (0.0, 2.01, 4.01)
_PART_COSTS = 0.001
"""Mean log time that each part of a tree's shape must save, so that of two that do alike the plainer is kept."""


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


def chosen(op: Op, variant: Variant, rule: Rule, case: Case, recorded: Sequence[Donor]) -> Mapping[str, Any]:
    """Return the knobs that a look-up takes for an unrecorded case: near, by the rule, or by default."""
    near = next(near_configs(op, variant, case, recorded), None) if rule.near else None
    if near is not None and near[0] <= rule.near:
        return near[1]
    for knobs in rule.proposals(facts_of(case)):
        if not knobs or variant.valid_config(case, knobs) is not None:
            return knobs or default_knobs(variant, case)
    return default_knobs(variant, case)


def judgement(table: CostTable, picks: _Picks) -> Judgement:
    """Return how good the picks are."""
    shares = {place: table.share(place, knobs) for place, knobs in picks.items()}
    recorded, others = (
        {s.case: shares[i] for i, s in enumerate(table.samples) if i in shares and (s.recorded is not None) == wanted}
        for wanted in (True, False)
    )
    return Judgement(recorded, others)


def _shapes(table: CostTable) -> list[TreeShape]:
    """Return the shapes that are tried, the plainest first, nearest sizes left aside."""
    words = {one.subject for one in table.words} - {"dtype"}
    apart = ["", *(["kinds"] if words & table.kinds else []), *(["words"] if words - table.kinds else [])]
    trees = [TreeShape(asks, gain, kind) for asks in ("sizes", "ratios") for gain in _GAINS for kind in apart]
    return [TreeShape("nothing"), *(TreeShape("once", apart=kind) for kind in apart), *trees]


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
            found[replace(shape, near=near)] = judgement(table, _near_or(picks, nearest, near))
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


def left_out(table: CostTable, kind: str) -> Judgement:
    """Return how rules do that know nothing of a whole group of cases: a table of the other cases makes each of them.

    kind: `band` for cases whose first size rounds to the same power of two, `rest` for cases of the same other sizes.
    """
    groups: dict[Any, list[int]] = {}
    for place, sample in enumerate(table.samples):
        sizes = [size for _, size in sample.case.axes]
        group = round(math.log2(max(sizes[0], 1))) if kind == "band" else tuple(sizes[1:])
        groups.setdefault(group, []).append(place)
    picks: dict[int, Mapping[str, Any]] = {}
    for places in groups.values():
        others = [sample for place, sample in enumerate(table.samples) if place not in places]
        if judged := [place for place in places if others and table.samples[place].is_judged]:
            rule, _ = fitted(CostTable(table.op, table.variant, others))
            recorded = [(sample.case, dict(sample.recorded)) for sample in others if sample.recorded is not None]
            for place in judged:
                picks[place] = chosen(table.op, table.variant, rule, table.samples[place].case, recorded)
    return judgement(table, picks)


def fitted(table: CostTable) -> tuple[Rule, Judgement]:
    """Return the rule whose shape does best when shapes are left out, and how it does."""
    found = judgements(table)
    shape = best_shape(found)
    apart = unseen(table, found)
    shares = [*apart.judged, *apart.observed]
    data = found[shape].data
    if shares:
        data |= {"unseen": round(_geomean(shares), 4), "unseen_worst": round(min(shares), 4)}
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
