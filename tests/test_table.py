"""Tables as text: wrapped cells, alignment, and values that all rows share."""

import pytest

from kerneltune.cli import console
from kerneltune.table import Column, Row, Table, join_tables

WORDS = Table(
    (Column("op"), Column("says", wraps=True), Column("count", digits=0)),
    (Row(("cast", "one two three", 5)), Row(("permute", "four", 12), "failed: no memory")),
)
CASES = Table(
    (Column("groups", shared=True), Column("policy", shared=True), Column("M", digits=0), Column("time µs", digits=2)),
    tuple(Row((groups, "cold", size, size / 2)) for groups in ("zipf", "even") for size in (8, 16)),
)


def test_table_text_with_room_has_a_line_per_row() -> None:
    assert WORDS.text(60).splitlines() == [
        "op       says           count",
        "cast     one two three      5",
        "permute  four              12",
        "        failed: no memory",
    ]


def test_table_text_too_wide_wraps_cells_between_words_and_keeps_notes_below() -> None:
    assert WORDS.text(24).splitlines() == [
        "op       says      count",
        "cast     one two       5",
        "         three",
        "permute  four         12",
        "        failed: no",
        "        memory",
    ]


def test_table_text_narrows_gaps_before_it_breaks_words() -> None:
    assert WORDS.text(19).splitlines()[:4] == ["op      says  count", "cast    one       5", "        two", "        three"]


def test_table_text_folds_a_long_name_before_it_narrows_other_columns() -> None:
    columns = (Column("op", wraps=True), Column("failed", digits=0), Column("types", wraps=True))
    table = Table(columns, (Row(("package.rotary.rotary_embedding_kernel-f3d763d0", 0, "fp32")),))
    assert table.text(40).splitlines() == [
        "op                          failed types",
        "package.rotary.rotary_embed      0 fp32",
        "ding_kernel-f3d763d0",
    ]


def test_table_text_keeps_cells_of_columns_that_do_not_wrap() -> None:
    whole = Table((Column("case"), Column("config", wraps=True)), (Row(("a b c", "x=1 y=2 z=3")),))
    assert whole.text(12).splitlines() == ["case  config", "a b c x=1", "      y=2", "      z=3"]


def test_table_text_aligns_columns_behind_letters_that_are_two_wide() -> None:
    columns = (Column("case", wraps=True), Column("µs", digits=1))
    table = Table(columns, (Row(("行列計算", 1.5), "failed: 2 of 4 wrong"), Row(("cafe\u0301", 10.0))))
    assert table.text(60).splitlines() == [
        "case        µs",
        "行列計算   1.5  failed: 2 of 4 wrong",
        "cafe\u0301      10.0",
    ]
    assert table.text(9).splitlines()[:3] == ["case   µs", "行列  1.5", "計算"]


def test_table_text_prints_values_that_all_rows_share_once() -> None:
    assert CASES.text(30).splitlines() == [
        "all rows: policy cold",
        "",
        "groups  M time µs",
        "zipf    8    4.00",
        "zipf   16    8.00",
        "even    8    4.00",
        "even   16    8.00",
    ]
    assert CASES.text(16).splitlines()[3:] == [
        " M time µs",
        "-- groups zipf",
        " 8    4.00",
        "16    8.00",
        "-- groups even",
        " 8    4.00",
        "16    8.00",
    ]


def test_table_text_prints_a_shared_column_of_a_rank_on_its_own_lines() -> None:
    columns = (Column("variant", shared=True, rank=2), Column("first", digits=0, rank=3), Column("day", rank=1), Column("cause"))
    table = Table(columns, (Row(("fast", 1, "Monday", "code")), Row(("slow", 2, "Friday", "config"))))
    assert table.text(20).splitlines() == [
        "not shown in 20", "  columns: first; a", "  wider terminal", "  shows all", "",
        "day    cause", "-- variant fast", "Monday code", "-- variant slow", "Friday config",
    ]  # fmt: skip
    assert "variant day    cause" in table.text(21).splitlines()
    assert "\n\ncause\n-- variant\n" in table.text(10)


@pytest.mark.parametrize("columns", [1, 7, 12])
def test_table_text_of_any_width_keeps_every_letter(columns: int) -> None:
    plain = Table(WORDS.columns, tuple(Row(row.values) for row in WORDS.rows))
    assert sorted("".join(plain.text(columns).split())) == sorted("".join(plain.text(200).split()))


def test_table_text_aligns_columns_of_numbers_right_and_of_dashes_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.console, "width", 60)
    console.show_table(("kernel", "share", "key", "speedup"), [("a", "9.5 %", "-", "1.25x"), ("b", "100.0 %", "-", "-")])
    assert capsys.readouterr().out.splitlines() == [
        "kernel    share  key  speedup",
        "a         9.5 %  -      1.25x",
        "b       100.0 %  -          -",
    ]


def test_table_text_omits_a_blank_note() -> None:
    assert Table((Column("case"),), (Row(("a",), " \n"),)).text() == "case\na\n"


def test_table_markdown_escapes_pipes_and_backslashes() -> None:
    """GitHub takes two backslashes before a pipe for a backslash and the end of the cell, so each is escaped."""
    table = Table((Column("x|y"), Column("b")), (Row(("a|b", "c\\|d <e> \\f")),))
    assert table.markdown() == "| x\\|y | b |\n| --- | --- |\n| a\\|b | c\\\\\\|d \\<e> \\f |\n"


def test_table_too_narrow_for_long_words_keeps_its_headings_whole() -> None:
    rows = [[f"{'kernel_of_a_capture_' * 4}{number}", "bf16", "none"] for number in range(3)]
    heading, *_ = Table.of_texts(("op", "types", "modes"), rows).text(60).splitlines()
    assert heading.split() == ["op", "types", "modes"]


def test_joined_tables_repeat_a_heading_in_markdown_and_where_columns_differ() -> None:
    one, other, third = (Table.of_texts(head, [["x", "1"]]) for head in (("a", "b"), ("a", "b"), ("a", "c")))
    assert join_tables([one, other], "csv", 0) == "a,b,note\nx,1,\nx,1,\n"
    assert join_tables([one, third], "csv", 0) == "a,b,note\nx,1,\n\na,c,note\nx,1,\n"
    assert join_tables([one, other], "markdown", 0) == f"{one.markdown()}\n{other.markdown()}"
