"""Words on lines: counts, lists that are cut short, named values, and characters that a terminal would obey."""

from kerneltune.wording import assignments, counted, first_of, printable, wrapped


def test_counted_and_first_of_give_plurals_and_the_number_left_out() -> None:
    assert [counted(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert counted(2, "entry", "entries") == "2 entries"
    assert first_of("abcde", 2) == "a, b and 3 more"
    assert first_of("ab", 2) == "a, b"
    assert first_of([], 2) == ""
    assert assignments({"block": 1024, "split": False}) == "block=1024 split=False"


def test_printable_escapes_control_characters() -> None:
    assert printable("a\x1b[31m\u202eb\ud800\tµ\n") == "a\\x1b[31m\\u202eb\\ud800\tµ\n"


def test_wrapped_breaks_between_words_and_keeps_longer_words_whole() -> None:
    assert wrapped("one two extraordinary", 8) == ["one two", "  extraordinary"]
    assert wrapped("one-two three", 6, "") == ["one-two", "three"]
