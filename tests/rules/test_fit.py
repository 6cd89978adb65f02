"""Rules fitted to made-up times: what they find, what leaving shapes out says, and what they would need to know."""

import math
from dataclasses import replace
from typing import Any

import pytest
from made_up import BLOCKS, WARPS, Small, nothing, op_of, small_space

from kerneltune.rounding import next_power_of_2
from kerneltune.rule import Facts, Scaled, Split
from kerneltune.rule_file import dumps, loads
from kerneltune.rules.costs import CostTable, TimedCase
from kerneltune.rules.fit import Judgement, chosen, fitted, judgements, left_out, unseen, untimed
from kerneltune.rules.transfer import followed, forms_of
from kerneltune.rules.trees import TreeShape, grown
from kerneltune.spec import Case, Op, Variant

DEFAULT = Small(256, 4)


def valid(_case: Case, config: Small) -> str | None:
    return None if config.block in BLOCKS and config.warps in WARPS else "not in the space"


VARIANT = Variant("optimized", nothing, Small, small_space, valid, default=lambda _case: DEFAULT)
SIZES = (96, 128, 200, 256, 400, 512, 800, 1024, 1500, 2048)


def case_of(size: int, dtype: str = "bfloat16", **options: Any) -> Case:
    return Case(f"c{size}", (("M", size),), dtype, "none", tuple(options.items()))


def time_us(case: Case, config: Small) -> float:
    """Best where the block is half of the next power of two; many warps for long rows."""
    best = min(1024, max(64, next_power_of_2(case["M"]) // 2))
    warps = 16 if case["M"] > 450 else 2
    return case["M"] * (1 + 0.3 * abs(math.log2(config.block / best)) + 0.2 * abs(math.log2(config.warps / warps)))


def sample(case: Case, known: Any = lambda _config: True) -> TimedCase:
    configs = [Small(block, warps) for block in BLOCKS for warps in WARPS]
    times = {(("block", c.block), ("warps", c.warps)): time_us(case, c) for c in configs if known(c)}
    best = min(times, key=lambda knobs: times[knobs])
    return TimedCase(case, times, times[best], dict(best))


def table(samples: list[TimedCase], op: Op | None = None) -> CostTable:
    return CostTable(op or op_of(VARIANT), VARIANT, samples)


def test_fit_knobs_that_follow_a_size_hold_where_sizes_are_left_out() -> None:
    rule, found = fitted(table([sample(case_of(size)) for size in SIZES]))
    assert set(found.shares) == {case_of(size) for size in SIZES}
    assert len(found.judged) == len(SIZES)
    assert found.geomean > 0.9
    assert found.worst > 0.6
    assert any(isinstance(value, Scaled) for form in rule.forms for value in form.values())
    defaults = [time_us(case_of(size), DEFAULT) / sample(case_of(size)).best_us for size in SIZES]
    assert found.geomean > 1.2 / math.exp(sum(map(math.log, defaults)) / len(defaults))
    unseen = case_of(700)
    knobs = chosen(op_of(VARIANT), VARIANT, rule, unseen, [])
    assert time_us(unseen, Small(**knobs)) < 1.05 * sample(unseen).best_us
    assert {name: value for name, value in rule.judged.items() if "unseen" not in name} == found.data
    assert 0.8 < rule.judged["unseen"] <= 1.0
    assert 0.5 < rule.judged["unseen_worst"] <= rule.judged["unseen"]
    assert rule.judged["judged"] == len(SIZES)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("band", [(96, 1), (100, 1), (110, 1), (1024, 1), (1100, 1), (2048, 1)]),
        ("rest", [(m, n) for n in (1, 8) for m in (96, 700, 2048)]),
    ],
)
def test_left_out_groups_are_judged_by_rules_that_know_none_of_their_cases(kind: str, sizes: list[tuple[int, int]]) -> None:
    samples = [sample(replace(case_of(m), axes=(("M", m), ("N", n)))) for m, n in sizes]
    op = replace(op_of(VARIANT), axes=("M", "N"))
    found = left_out(table(samples, op), kind)
    assert set(found.shares) == {one.case for one in samples}
    few, _ = fitted(table(samples[3:], op))
    expected = [time_us(one.case, Small(**chosen(op, VARIANT, few, one.case, []))) for one in samples[:3]]
    assert [found.shares[one.case] for one in samples[:3]] == pytest.approx(
        [one.best_us / time for one, time in zip(samples[:3], expected, strict=True)]
    )
    if kind == "band":
        assert found.geomean < fitted(table(samples, op))[1].geomean


def test_left_out_rest_of_cases_of_one_other_size_judges_nothing() -> None:
    samples = [sample(case_of(size)) for size in (96, 100, 1024)]
    assert not left_out(table(samples, replace(op_of(VARIANT), axes=("M",))), "rest").judged


def test_fit_times_that_are_not_known_are_not_judged_and_are_named() -> None:
    samples = [sample(case_of(size), lambda c, size=size: (c.block, c.warps) in own(size)) for size in SIZES]
    found = judgements(table(samples))[TreeShape("once")]
    unknown = [case for case, share in found.shares.items() if math.isnan(share)]
    wanted = untimed(table(samples))
    assert unknown
    assert set(unknown) <= set(wanted)
    assert Judgement(found.shares).data["judged"] == len(SIZES) - len(unknown)


def own(size: int) -> set[tuple[int, int]]:
    best = dict(sample(case_of(size)).recorded or {})
    return {(best["block"], best["warps"]), (DEFAULT.block, DEFAULT.warps)}


def test_fit_a_case_of_another_kind_gets_the_default() -> None:
    op = replace(op_of(VARIANT), options={"layout": ("row", "col")})
    rule, _ = fitted(table([sample(case_of(size, layout="row")) for size in SIZES], op))
    assert chosen(op, VARIANT, rule, case_of(512, layout="col"), []) == {"block": 256, "warps": 4}
    assert chosen(op, VARIANT, rule, case_of(512, "float32", layout="row"), []) == {"block": 256, "warps": 4}
    served = chosen(op, VARIANT, rule, case_of(512, "float16", layout="row"), [])
    assert served == chosen(op, VARIANT, rule, case_of(512, layout="row"), []) != {"block": 256, "warps": 4}
    assert list(rule.proposals(Facts.of(case_of(512, layout="col")))) == []


def test_fit_judges_cases_without_a_config_by_the_least_known_time() -> None:
    samples = [replace(sample(case_of(size)), recorded=None) for size in SIZES]
    rule, found = fitted(table(samples))
    assert not found.shares
    assert len(found.observed) == len(SIZES)
    assert {name: value for name, value in rule.judged.items() if "unseen" not in name} == {
        "cases": 0, "judged": 0, "observed": len(SIZES),
        "observed_geomean": round(math.exp(sum(map(math.log, found.observed)) / len(SIZES)), 4),
        "observed_worst": round(min(found.observed), 4),
    }  # fmt: skip
    assert rule.judged["observed_geomean"] > 0.9


def test_fit_too_few_times_to_judge_make_a_rule_that_is_read_again() -> None:
    samples = [
        TimedCase(case_of(size), {(("block", 256), ("warps", 4)): 1.0, (("block", 64), ("warps", 4)): 2.0}, 1.0) for size in SIZES
    ]
    rule, found = fitted(table(samples))
    assert not found.judged
    assert not found.observed
    assert rule.judged == {"cases": 0, "judged": 0}
    assert loads(dumps("op", "gpu", [rule], {}), "op", "gpu") == (rule,)


def test_fit_another_value_of_a_free_option_gets_what_the_rule_gives() -> None:
    op = replace(op_of(VARIANT), options={"layout": ("row", "col")}, free_options=("layout",))
    rule, _ = fitted(table([sample(case_of(size, layout="row")) for size in SIZES], op))
    served = chosen(op, VARIANT, rule, case_of(512, layout="col"), [])
    assert served == chosen(op, VARIANT, rule, case_of(512, layout="row"), []) != {"block": 256, "warps": 4}


def test_fit_cases_no_config_serves_both_of_may_have_trees_of_their_own() -> None:
    def liking(size: int, layout: str) -> TimedCase:
        """Like few warps in rows and many in columns, as if one size of both were one problem."""
        times = {knobs: 1.0 + (dict(knobs)["warps"] > 4) * (layout == "row") for knobs in sample(case_of(size)).times}
        times = {knobs: t + (dict(knobs)["warps"] <= 4) * (layout == "col") for knobs, t in times.items()}
        return TimedCase(case_of(size, layout=layout), times, 1.0, dict(min(times, key=lambda knobs: times[knobs])))

    op = replace(op_of(VARIANT), options={"layout": ("row", "col")})
    made = table([liking(size, layout) for size in SIZES for layout in ("row", "col")], op)
    found = judgements(made)
    assert found[TreeShape("once")].geomean < 0.8
    assert found[TreeShape("once", apart="kinds")].geomean == pytest.approx(1.0)
    free = judgements(table(made.cases, replace(op, free_options=("layout",))))
    assert {shape.apart for shape in free} == {"", "words"}
    assert free[TreeShape("ratios", apart="words")].geomean == pytest.approx(1.0)


def test_fit_a_bound_moves_to_where_the_questions_below_it_leave_least() -> None:
    """Bounds are chosen from the root down: M <= 4 is best before the layout is asked, M <= 8 after."""
    op = replace(op_of(VARIANT), options={"layout": ("row", "col")}, free_options=("layout",))

    def of(size: int, layout: str) -> TimedCase:
        wanted = 4 if size <= 8 else 2 if layout == "row" else 16
        costs = {warps: 0.0 if warps == wanted else 0.5 for warps in (2, 4, 16)}
        if size == 8:
            costs = {2: 0.0, 4: 0.0, 16: 0.5} if layout == "row" else {2: 0.0, 4: 0.2, 16: 0.6}
        times = {(("block", 256), ("warps", warps)): math.exp(cost) for warps, cost in costs.items()}
        return TimedCase(case_of(size, layout=layout), times, 1.0, {"block": 256, "warps": wanted})

    made = table([of(size, layout) for size in (1, 2, 4, 8, 16, 32) for layout in ("row", "col")], op)
    tree = grown(made, TreeShape("sizes")).tree
    assert isinstance(tree, Split)
    assert (tree.subject, 8 < (tree.at_most or 0) < 16) == ("M", True)


def test_fit_a_leaf_begins_with_a_config_that_one_of_its_cases_was_timed_with() -> None:
    """What is known is 0.4 from the best, a guess counts as 0.25."""
    large = [
        TimedCase(case_of(size), {(("block", 256), ("warps", 4)): 1.5, (("block", 512), ("warps", 8)): 1.6}, 1.0)
        for size in (4096, 8192)
    ]
    small = [sample(case_of(size), lambda config: config.warps == 2) for size in (96, 128, 200, 256)]
    rule = grown(table([*small, *large]), TreeShape("sizes"))
    leaf, _ = rule.leaf(Facts.of(case_of(4096)))
    assert rule.forms[leaf[0]].get("warps", DEFAULT.warps) in (4, 8)


def test_fit_the_default_is_chosen_where_it_is_as_good() -> None:
    def flat(size: int) -> TimedCase:
        made = sample(case_of(size))
        times = {knobs: 100.0 if dict(knobs) == {"block": 256, "warps": 4} else 130.0 for knobs in made.times}
        return TimedCase(made.case, times, 100.0, {"block": 256, "warps": 4})

    rule, found = fitted(table([flat(size) for size in SIZES]))
    assert found.worst == pytest.approx(1.0)
    assert (rule.forms, rule.tree) == (({},), (0,))
    assert chosen(op_of(VARIANT), VARIANT, rule, case_of(333), []) == {"block": 256, "warps": 4}


def test_fit_one_16_bit_type_borrows_what_is_known_of_the_other() -> None:
    known = [sample(case_of(size)) for size in SIZES]
    sparse = [sample(case_of(size, "float16"), lambda c, size=size: (c.block, c.warps) in own(size)) for size in SIZES]
    made = table([*known, *sparse])
    assert made.costs[len(SIZES) :] == pytest.approx(made.costs[: len(SIZES)], abs=1e-9)
    assert (made.known == made.valid)[: len(SIZES)].all()
    assert not (made.known == made.valid)[len(SIZES) :].all()


def test_fit_times_that_follow_nothing_leave_the_default() -> None:
    def noise(size: int) -> TimedCase:
        """Give every config the default's time but one, another for each size, which is 2 % faster."""
        times = dict.fromkeys(sample(case_of(size)).times, 100.0)
        best = list(times)[SIZES.index(size)]
        return TimedCase(case_of(size), times | {best: 98.0}, 98.0, dict(best))

    rule, found = fitted(table([noise(size) for size in SIZES]))
    assert rule.tree == (0,)
    assert rule.near == 0.0
    assert found.geomean == pytest.approx(0.98, abs=0.005)


def test_fit_a_shape_chosen_without_the_left_out_sizes_promises_no_more() -> None:
    made = table([sample(case_of(size)) for size in SIZES])
    found = judgements(made)
    nested = unseen(made, found)
    assert set(nested.shares) == {case_of(size) for size in SIZES}
    assert nested.merit() <= max(judgement.merit() for judgement in found.values())


def test_followed_a_knob_stays_between_its_least_and_largest_value() -> None:
    donors = [(case_of(size), {"block": min(128, max(16, size)), "warps": 4}) for size in (1, 4, 16, 32, 64, 256)]
    follows = followed(donors)
    assert follows == {"block": Scaled("M", 1.0, 16, 128)}
    assert [follows["block"].at({"M": size}) for size in (1, 8, 33, 4096)] == [16, 16, 64, 128]
    assert forms_of(donors[0], follows)[1] == (("block", follows["block"]), ("warps", 4))
    odd = forms_of((case_of(64), {"block": 32, "warps": 4}), follows)
    assert odd[1] == (("block", Scaled("M", 0.5, 16, 128)), ("warps", 4))
