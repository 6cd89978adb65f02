"""Facts that are read from the code of a kernel."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import triton.language as tl

from kerneltune.interpreter.kernel_code import facts_of


def two_sides(flag_ptr, N, rows) -> None:  # type: ignore[no-untyped-def]
    limit = 8
    if flag_ptr > rows:
        limit = 1024
        N = 4
    elif limit > N:
        rows = 0
    if rows > 2:
        limit = 0


def test_names_that_one_side_of_an_if_assigns_are_unchanged_on_its_other_side() -> None:
    arguments = {"flag_ptr": SimpleNamespace(data_ptr=None), "N": 64, "rows": 3}
    facts = facts_of(SimpleNamespace(fn=two_sides, constexprs=()), arguments)
    branches = {fact.text for fact in facts if fact.kind == "branch"}
    assert branches == {"not (limit > N)"}, "8 > 64, and behind the ifs rows is unknown"


def counts_of_a_tuple(x_ptr, M, N) -> None:  # type: ignore[no-untyped-def]
    rows, columns = M // 16, N // 16
    rows, columns = columns, rows
    if rows > columns:
        return


def test_names_that_are_assigned_together_have_their_values() -> None:
    for sizes, text in (((64, 128), "rows > columns"), ((128, 64), "not (rows > columns)")):
        arguments = {"x_ptr": SimpleNamespace(data_ptr=None), "M": sizes[0], "N": sizes[1]}
        facts = facts_of(SimpleNamespace(fn=counts_of_a_tuple, constexprs=()), arguments)
        assert text in {fact.text for fact in facts if fact.kind == "branch"}


def small_types(x_ptr, N) -> None:  # type: ignore[no-untyped-def]
    zero = tl.minimum(tl.load(x_ptr) / 3, 15.0)
    zero.to(tl.uint8)
    (tl.load(x_ptr) + 0.5).to(tl.int8)
    place = tl.where(tl.load(x_ptr) > 0.0, N, 0)
    place.to(tl.int16)


def small_numbers(x_ptr, N) -> None:  # type: ignore[no-untyped-def]
    code = tl.zeros((8,), tl.int32)
    for bit in tl.static_range(8):
        half = 128 >> bit
        code = tl.where(tl.load(x_ptr + code) > 0.0, code + half, code)
    code.to(tl.uint8)
    (tl.load(x_ptr) > 0.0).to(tl.uint8)
    (tl.load(x_ptr) & 15).to(tl.int8)


def floats_of_a_loop(x_ptr, N) -> None:  # type: ignore[no-untyped-def]
    rounded = 0.0
    for at in range(N):
        rounded = tl.floor(tl.load(x_ptr + at))
    rounded.to(tl.int8)


def counter(x_ptr, N) -> None:  # type: ignore[no-untyped-def]
    count = 0
    for at in range(0, N):
        count += tl.where(tl.load(x_ptr + at) > 0.0, 1, 0)
    count.to(tl.int16)


@pytest.mark.parametrize(
    ("function", "kinds"), [(small_types, ["int16"]), (small_numbers, []), (floats_of_a_loop, []), (counter, ["int16"])]
)
def test_cast_of_what_is_certainly_no_place_or_count_limits_no_size(function: Callable[..., None], kinds: list[str]) -> None:
    arguments = {"x_ptr": SimpleNamespace(data_ptr=None), "N": 70_000}
    facts = facts_of(SimpleNamespace(fn=function, constexprs=()), arguments)
    assert [fact.text for fact in facts if "cast" in fact.text] == [f"N > 65535 beside a cast to {kind}" for kind in kinds]
