"""Estimated times: waves, steps and bytes each cost what they say, and the least estimate is chosen."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from kerneltune.estimate import Estimated, Speeds, Work, time_us, with_speeds
from kerneltune.spec import Case

NOTHING = 1e-6
FREE = 1e6
SPEEDS = Speeds(
    sms=100, launch_us=NOTHING, program_us=NOTHING, latency_us=NOTHING, join_us=NOTHING, read_tb_s=FREE, multiply_tflops=FREE,
    memory_tb_s=FREE, cache_tb_s=FREE, parts_tb_s=FREE,
)  # fmt: skip


def speeds(**changed: float) -> Speeds:
    return Speeds(**{name: changed.get(name, getattr(SPEEDS, name)) for name in SPEEDS.__struct_fields__})


def work(**changed: int) -> Work:
    return Work(10, 1 << 16, 1 << 21, 2, 100, 1, 0, 0, 0)._replace(**changed)


@pytest.mark.parametrize(
    ("changed", "of", "expected"),
    [
        ({"launch_us": 3.0}, {}, 3.0),
        ({"program_us": 2.0}, {"programs": 100}, 2.0),
        ({"program_us": 2.0}, {"programs": 101}, 4.0),
        ({"program_us": 2.0}, {"programs": 200, "resident": 2}, 2.0),
        ({"latency_us": 1.0}, {"steps": 7, "ahead": 2}, 3.5),
        ({"read_tb_s": 1.0}, {"steps": 1, "step_bytes": 10_000}, 1.0),
        ({"read_tb_s": 1.0}, {"steps": 1, "step_bytes": 10_000, "resident": 2, "programs": 200}, 2.0),
        ({"read_tb_s": 1.0}, {"steps": 1, "step_bytes": 10_000, "resident": 2, "programs": 30}, 1.0),
        ({"multiply_tflops": 10.0}, {"steps": 4, "step_flops": 100_000}, 4.0),
        ({"memory_tb_s": 4.0}, {"memory_bytes": 8_000_000, "step_bytes": 0}, 2.0),
        ({"memory_tb_s": 1.0}, {"step_bytes": 10_000, "resident": 2, "programs": 300}, 2.0 + 1.0),
        ({"cache_tb_s": 4.0}, {"cache_bytes": 8_000_000}, 2.0),
        ({"join_us": 1.5}, {"part_bytes": 1}, 1.5),
        ({"join_us": 1.5}, {}, 0.0),
        ({"parts_tb_s": 2.0}, {"part_bytes": 2_000_000}, 1.0),
    ],
)
def test_time_of_a_part_is_the_whole_where_nothing_else_takes_any(
    changed: dict[str, float], of: dict[str, int], expected: float
) -> None:
    assert time_us(work(**of), speeds(**changed)) == pytest.approx(expected, abs=0.01)


def test_times_of_arrays_are_those_of_their_elements() -> None:
    every = [work(programs=programs, part_bytes=programs % 2) for programs in (1, 99, 100, 101, 350)]
    given = speeds(program_us=2.0, latency_us=0.5, join_us=1.0, launch_us=1.0)
    arrays = time_us(Work(*np.array(every, dtype=float).T), given)
    assert list(arrays) == pytest.approx([time_us(one, given) for one in every])


@dataclass(frozen=True)
class Tile:
    rows: int


def of_rows(case: Case, tile: Tile) -> Work | None:
    return None if tile.rows == 1 else work(programs=-(-case["M"] // tile.rows), steps=tile.rows)


def offered(case: Case) -> Iterator[tuple[tuple[int], Work]]:
    for rows in (16, 32, 64):
        found = of_rows(case, Tile(rows))
        assert found is not None
        yield (rows,), found


DEFAULT = Estimated(
    speeds(program_us=1.0, latency_us=0.2), offered, of_rows, Tile, lambda _, tile: "no" if tile.rows == 64 else None
)


def case_of(size: int) -> Case:
    return Case("", (("M", size),), "bfloat16")


@pytest.mark.parametrize(("size", "rows"), [(1600, 16), (1601, 32), (3200, 32), (3201, 16)])
def test_an_estimated_default_fills_waves(size: int, rows: int) -> None:
    assert DEFAULT(case_of(size)) == Tile(rows)


def test_an_estimated_default_skips_what_is_not_valid() -> None:
    assert list(DEFAULT.ranked(case_of(6400))) == [Tile(32), Tile(16)]
    assert DEFAULT(case_of(6400)) == Tile(32)
    assert Estimated(DEFAULT.speeds, offered, of_rows, Tile, lambda *_: "no")(case_of(8)) is None


def test_other_speeds_choose_another_config() -> None:
    slow = with_speeds(DEFAULT, speeds(program_us=9.0, latency_us=0.2))
    assert (DEFAULT(case_of(3201)), slow(case_of(3201))) == (Tile(16), Tile(32))
    assert with_speeds(DEFAULT, None) is DEFAULT
    plain = Tile(4).__eq__
    assert with_speeds(plain, DEFAULT.speeds) is plain


def test_an_estimate_is_told_in_words() -> None:
    assert DEFAULT.told(case_of(3201), Tile(16)) == "7.8 µs: 201 programs, 100 at once: 3 waves of 16 steps of k"
    assert DEFAULT.told(case_of(3201), Tile(1)) == ""
