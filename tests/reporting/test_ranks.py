"""Where two policies rank two variants differently."""

from typing import Any

import pytest
from literal_records import literal
from msgspec.structs import replace

from kerneltune.records import Record
from kerneltune.reporting.tables import rank_flips

X, Y = {"variant": "x"}, {"variant": "y"}
COLD, HOT = {"policy": "cold"}, {"policy": "hot"}


def row(us: float, *changes: dict[str, Any], width: float = 0.5, **more: Any) -> Record:
    changed = {name: value for change in changes for name, value in change.items()}
    return literal(us, **{"ci_low_us": us - width, "ci_high_us": us + width, **changed, **more})


FLIPPED = [row(10, X, COLD), row(12, Y, COLD), row(9, X, HOT), row(8, Y, HOT, width=0.4)]


def test_the_first_flip_is_named_and_all_are_counted() -> None:
    small = {"axes": {"M": 1, "N": 1}, "case": "small"}
    kept = [row(10, X, COLD, **small), row(12, Y, COLD, **small), row(8, X, HOT, **small), row(9, Y, HOT, **small)]
    once = [row(1, X, COLD, quant="none"), row(2, Y, COLD, quant="none")]
    such_as = "x is faster than y cold, slower hot: te-8192x4096 bfloat16 fp8"
    assert rank_flips([*kept, *once, *FLIPPED]) == f"ranks flip in 1 of 2 cases with several policies; {such_as}"


@pytest.mark.parametrize(
    "hot",
    [
        [row(9, X, HOT), row(8, Y, HOT, width=0.5)],
        [row(9, X, HOT), row(8, Y, HOT, device="NVIDIA H100", width=0)],
        [row(9, X, HOT, unit="a"), row(8, Y, HOT, unit="b", width=0)],
        [row(9, X, HOT), row(8, {"variant": "z"}, HOT, width=0)],
        [row(9, X, HOT), row(8, Y, HOT, width=0, date="2020-01-01T00:00:00Z"), row(12, Y, HOT)],
        [],
    ],
    ids=["intervals touch", "another GPU", "another unit", "another variant", "measured again", "one policy"],
)
def test_what_is_no_flip(hot: list[Record]) -> None:
    assert rank_flips([*FLIPPED[:2], *hot]) == ""


def test_a_part_of_an_operator_has_no_rank() -> None:
    assert rank_flips(FLIPPED)
    assert rank_flips([replace(r, role="part" if r.variant == "y" else "own") for r in FLIPPED]) == ""
