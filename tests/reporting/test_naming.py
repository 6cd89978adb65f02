"""Test the names of cases: the words that tell a case from its neighbours, equal in tables, charts and pages."""

from typing import Any

from literal_records import literal

from kerneltune.records import Record
from kerneltune.reporting import pairing, tables
from kerneltune.reporting.naming import case_names, look
from kerneltune.reporting.page import Sources, payload


def cast(layout: str, op: str = "cast_2d", **changes: Any) -> Record:
    return literal(100.0, **{"op": op, "options": {"pow2": True, "layout": layout}, **changes})


def test_case_names_omit_what_all_cases_share() -> None:
    first, second = case_names([cast("row"), cast("both")])
    assert (first.kind, first.options, first.settings, first.shape) == ("2d", {"layout": "row"}, "layout=row", "8192×4096")
    assert second.title == "cast_2d · fp8 · bfloat16 · layout=both"
    assert case_names([cast("row"), literal(1.0)])[0].settings == ""


def test_case_names_include_policy_and_device_as_settings() -> None:
    names = case_names([cast("row"), cast("row", policy="hot"), cast("row", device="NVIDIA H100")])
    assert [name.settings for name in names] == [
        "policy=cold device=NVIDIA H200",
        "policy=hot device=NVIDIA H200",
        "policy=cold device=NVIDIA H100",
    ]


def test_case_names_shorten_operators_to_their_differences() -> None:
    together = case_names([cast("row", op=op) for op in ("fp8_colwise_3d", "fp8_group_colwise", "fp8_rowwise_2d")])
    assert [name.kind for name in together] == ["colwise_3d", "group_colwise", "rowwise_2d"]
    assert [name.kind for name in case_names([cast("row"), cast("row", op="cast_2d_both")])] == ["2d", "2d_both"]
    assert [name.kind for name in case_names([cast("row"), literal(1.0)])] == ["cast_2d", "rmsnorm_fwd"]


def test_case_names_are_the_same_in_tables_and_page() -> None:
    others = cast("both", time_us=50.0, case="other", family="cast"), cast("row", op="cast_3d", family="cast")
    records = [cast("row", family="cast"), *others]
    shown = payload(Sources(records, ("baseline", "baseline")))["cases"]
    for case, name in zip(shown, case_names(records), strict=True):
        assert [case[field] for field in ("kind", "settings", "shape", "title")] == [
            name.kind,
            name.settings,
            name.shape,
            name.title,
        ]
    rows = pairing.ab_rows(records, records)
    assert "| 2d | bfloat16 | fp8 | both | 8192 | 4096 |" in tables.ab_table(rows).markdown()
    assert "| both |" in tables.sweep_table(records).markdown()


def test_look_of_a_known_variant_differs_from_that_of_every_other() -> None:
    own, peers = ("baseline", "optimized"), ("pr593", "eager", "compile", "max-autotune", "liger", "quack", "torchao", "humming")
    assert [look(variant) for variant in own] == [(0, 0), (2, 2)]
    assert len({look(variant) for variant in (*own, *peers)}) == 10
    assert {look(variant)[0] for variant in (*peers, "a variant of a plug-in")}.isdisjoint({0, 2})
