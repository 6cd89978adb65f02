"""Observations: written and read as they were, merged without a time twice, refused in one line where they are damaged."""

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import SMALL, op_of

from kerneltune.search.observations import Observation, Observed, merged, path_of, read, write

OP = replace(op_of(SMALL), options={"run": ("row", "col")})
RUN = {"date": "2026-11-23", "commit": "abc", "source_hash": "1"}


def row(size: int = 8, run: str = "row", block: int = 64, time_us: float | None = 1.5, place: int = 0) -> Observation:
    knobs = (("block", block), ("warps", 4))
    status = "ok" if time_us else "spills"
    return Observation(place, "optimized", (("M", size),), "bfloat16", "none", (("run", run),), "cold", knobs, status, time_us)


def test_observations_are_read_as_they_were_written_also_where_an_option_is_called_as_a_column(tmp_path: Path) -> None:
    stored = Observed((RUN,), (row(), row(16, "col", 128), row(16, block=256, time_us=None)))
    path = path_of("fake", "nvidia_h200", tmp_path)
    write(path, OP, stored)
    assert read(path, OP) == stored
    first = path.read_bytes()
    write(path, OP, stored)
    assert path.read_bytes() == first
    assert read(tmp_path / "none.csv.gz", OP) == Observed()


def test_merged_observations_keep_the_newest_time_and_the_runs_that_are_used() -> None:
    old, new = Observed((RUN,), (row(), row(16))), Observed(({**RUN, "commit": "def"},), (row(time_us=2.0), row(16, time_us=3.0)))
    both = merged(old, new)
    assert [(one.case["M"], one.time_us, one.run) for one in both.rows] == [(8, 2.0, 0), (16, 3.0, 0)]
    assert [run["commit"] for run in both.runs] == ["def"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda text: "", "header"),
        (lambda text: text.replace('"schema": 1', '"schema": 7'), ":1: header: schema: 7: expected 1"),
        (lambda text: text.replace(",warps\n", ",warp\n"), ":2: columns"),
        (lambda text: text.replace(",1.5,", ",-1.5,"), ":3: not an observation"),
        (lambda text: text.replace(",1.5,", ",,"), ":3: not an observation"),
        (lambda text: text.replace(",64,4", ",x,4"), ":3: not an observation"),
        (lambda text: text.replace(",64,4", ",64"), ":3: not an observation"),
        (lambda text: text.replace("\n0,", "\n9,"), ":3: not an observation"),
        (lambda text: text.replace('"int"', '"eval"'), ":1: header"),
        (lambda text: text.replace('"op": "fake"', '"op": "other"'), ":1: header: op: 'other': expected 'fake'"),
        (lambda text: text.replace('"axes": ["M"]', '"axes": ["N"]'), ":1: header: axes: ('N',): expected ('M',)"),
        (lambda text: text.replace(",64,4", f",{'6' * 200_000},4"), ":3: not an observation: field larger than field limit"),
    ],
)
def test_damaged_observations_are_one_line_with_file_and_place(change: Callable[[str], str], text: str, tmp_path: Path) -> None:
    path = path_of("fake", "nvidia_h200", tmp_path)
    write(path, OP, Observed((RUN,), (row(),)))
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()).decode()).encode()))
    with pytest.raises(ValueError) as caught:
        read(path, OP)
    assert str(caught.value).startswith(str(path))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_observations_that_are_no_gzip_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "fake.csv.gz"
    path.write_bytes(b"no gzip")
    with pytest.raises(ValueError, match="cannot read"):
        read(path, OP)
