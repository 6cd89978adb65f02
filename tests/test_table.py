"""Tables as text: which cells wrap, what stands to the right, what is said once."""

import pytest

from kerneltune.cli import console
from kerneltune.table import Column, Row, Table

WORDS = Table(
    (Column("op"), Column("says", wraps=True), Column("count", digits=0)),
    (Row(("cast", "one two three", 5)), Row(("permute", "four", 12), "failed: no memory")),
)
CASES = Table(
    (Column("groups", shared=True), Column("policy", shared=True), Column("M", digits=0), Column("time µs", digits=2)),
    tuple(Row((groups, "cold", size, size / 2)) for groups in ("zipf", "even") for size in (8, 16)),
)


def test_text_of_a_table_with_room_has_a_line_per_row() -> None:
    assert WORDS.text(60).splitlines() == [
        "op       says           count",
        "cast     one two three      5",
        "permute  four              12",
        "        failed: no memory",
    ]


def test_cells_wrap_between_words_where_a_line_is_too_wide_and_notes_stay_below() -> None:
    assert WORDS.text(24).splitlines() == [
        "op       says      count",
        "cast     one two       5",
        "         three",
        "permute  four         12",
        "        failed: no",
        "        memory",
    ]


def test_gaps_are_smaller_where_words_would_break_otherwise() -> None:
    assert WORDS.text(19).splitlines()[:4] == ["op      says  count", "cast    one       5", "        two", "        three"]


def test_a_long_name_folds_before_other_columns_become_narrow() -> None:
    columns = (Column("op", wraps=True), Column("failed", digits=0), Column("types", wraps=True))
    table = Table(columns, (Row(("package.rotary.rotary_embedding_kernel-f3d763d0", 0, "fp32")),))
    assert table.text(40).splitlines() == [
        "op                          failed types",
        "package.rotary.rotary_embed      0 fp32",
        "ding_kernel-f3d763d0",
    ]


def test_columns_that_do_not_wrap_keep_their_cells_whole() -> None:
    whole = Table((Column("case"), Column("config", wraps=True)), (Row(("a b c", "x=1 y=2 z=3")),))
    assert whole.text(12).splitlines() == ["case  config", "a b c x=1", "      y=2", "      z=3"]


def test_what_all_rows_share_is_said_once_and_headings_name_their_columns() -> None:
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


def test_shared_column_of_a_rank_is_said_on_lines_of_its_own_in_its_turn() -> None:
    columns = (Column("variant", shared=True, rank=2), Column("first", digits=0, rank=3), Column("day", rank=1), Column("cause"))
    table = Table(columns, (Row(("fast", 1, "Monday", "code")), Row(("slow", 2, "Friday", "config"))))
    assert table.text(20).splitlines() == [
        "not shown in 20", "  columns: first; a", "  wider terminal", "  shows all", "",
        "day    cause", "-- variant fast", "Monday code", "-- variant slow", "Friday config",
    ]  # fmt: skip
    assert "variant day    cause" in table.text(21).splitlines()
    assert "\n\ncause\n-- variant\n" in table.text(10)


@pytest.mark.parametrize("columns", [1, 7, 12])
def test_narrow_text_loses_no_letter(columns: int) -> None:
    plain = Table(WORDS.columns, tuple(Row(row.values) for row in WORDS.rows))
    assert sorted("".join(plain.text(columns).split())) == sorted("".join(plain.text(200).split()))


def test_columns_of_numbers_stand_to_the_right_and_columns_of_dashes_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.console, "width", 60)
    console.show_table(("kernel", "share", "key", "speedup"), [("a", "9.5 %", "-", "1.25x"), ("b", "100.0 %", "-", "-")])
    assert capsys.readouterr().out.splitlines() == [
        "kernel    share  key  speedup",
        "a         9.5 %  -      1.25x",
        "b       100.0 %  -          -",
    ]


def test_blank_note_is_no_note() -> None:
    assert Table((Column("case"),), (Row(("a",), " \n"),)).text() == "case\na\n"


def test_markdown_keeps_pipes_and_backslashes_inside_their_cell() -> None:
    """GitHub takes two backslashes before a pipe for a backslash and the end of the cell, so each is escaped."""
    table = Table((Column("x|y"), Column("b")), (Row(("a|b", "c\\|d <e> \\f")),))
    assert table.markdown() == "| x\\|y | b |\n| --- | --- |\n| a\\|b | c\\\\\\|d \\<e> \\f |\n"
