"""Refuse more than wild addresses: undefined values, races of programs, unknown keywords, programs that do not end."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from kerneltune.interpreter import faults, undefined
from kerneltune.interpreter.facts import Fact, cut_short, noting
from kerneltune.interpreter.faults import fault_of
from kerneltune.interpreter.modes import strict

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="what Triton's interpreter finds")


def fault(launch: Callable[[], object]) -> str:
    """Return the line of a launch's fault; empty where there is none."""
    try:
        with strict():
            launch()
    except Exception as error:
        if (text := fault_of(error)) is None:
            raise
        return str(text)
    return ""


@triton.jit
def _sum_of_row(x_ptr, y_ptr, N, HAS_OTHER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < N, other=0) if HAS_OTHER else tl.load(x_ptr + at, at < N)
    tl.store(y_ptr, tl.sum(x.to(tl.float32)))
    tl.store(y_ptr + 1, tl.max(x.to(tl.float32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8])
@pytest.mark.parametrize("N", [5, 7])
def test_masked_load_without_other_gives_garbage_and_with_other_its_value(dtype: torch.dtype, N: int) -> None:
    x, y = torch.ones(8).to(dtype), torch.zeros(2)
    with strict():
        _sum_of_row[(1,)](x, y, N, True, 8)
    assert y.tolist() == [N, 1]
    with strict():
        _sum_of_row[(1,)](x, y, N, False, 8)
    assert y[0] != N
    assert y[1] > 1


@triton.jit
def _copy_tail(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, at < N) * 2, at < N)


def test_garbage_behind_the_mask_of_a_store_is_no_fault() -> None:
    x, y = torch.randn(13), torch.empty(13)
    assert fault(lambda: _copy_tail[(4,)](x, y, 13, 4)) == ""
    assert torch.equal(y, x * 2)


@triton.jit
def _pad(x_ptr, y_ptr, N, total, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, at < N, other=0), at < total)
    tl.store(x_ptr + at, tl.load(y_ptr + at, at < total), at < N)


def test_masked_access_to_an_empty_tensor_is_no_fault_and_another_is() -> None:
    x, y = torch.empty(0), torch.ones(4)
    assert fault(lambda: _pad[(1,)](x, y, 0, 4, 8)) == ""
    assert y.tolist() == [0] * 4
    assert fault(lambda: _pad[(1,)](x, y, 1, 4, 8)).startswith("load outside of x_ptr: element 0")


@triton.jit
def _fill_columns_of_tiles(y_ptr, rows, columns, TAKES_TURNS: tl.constexpr):
    num_down = rows // 16
    num_tiles = num_down * (columns // 16)
    for tile in range(tl.program_id(0), num_tiles if TAKES_TURNS else 8, tl.num_programs(0)):
        row = tile % num_down * 16 + tl.arange(0, 16)[:, None]
        column = tile // num_down * 16 + tl.arange(0, 16)[None, :]
        tl.store(y_ptr + row * columns + column, 1.0)


@pytest.mark.parametrize("takes_turns", [True, False])
def test_fixed_grid_that_takes_columns_of_tiles_in_turns_is_not_cut_short(takes_turns: bool) -> None:
    reached: list[set[Fact]] = []
    for y in (torch.empty(64, 32), torch.empty(64, 48, device="meta")):  # 8 and 12 tiles
        with noting() as facts, strict():
            _fill_columns_of_tiles[(8,)](y, *y.shape, TAKES_TURNS=takes_turns)
        reached.append(facts)
    short = [Fact("last not stored", "y_ptr", "_fill_columns_of_tiles")]
    assert cut_short(*reached) == ([] if takes_turns else short)


@triton.jit
def _numbers_to(y_ptr, first, COUNT: tl.constexpr, LAST: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(y_ptr + at, first + at, at < LAST)


@pytest.mark.parametrize(
    ("dtype", "first", "last", "stored"),
    [
        (torch.int16, -32768, 4, None),
        (torch.int16, 65534, 2, None),  # the bits of unsigned numbers, as of packed values
        (torch.int16, 65534, 3, 65536),
        (torch.int8, -130, 4, -130),
        (torch.uint8, 254, 4, 256),
        (torch.int64, 1 << 30, 4, None),
    ],
)
def test_store_of_a_number_that_the_element_cannot_hold_is_a_fault_without_memory(
    dtype: torch.dtype, first: int, last: int, stored: int | None
) -> None:
    kind = str(dtype).removeprefix("torch.")
    line = f"store of {stored} to elements of {kind}, program (0, 0, 0)" if stored else ""
    for device, expected in (("meta", line), ("cpu", "")):  # with memory the results are compared
        text = fault(lambda: _numbers_to[(1,)](torch.zeros(4, dtype=dtype, device=device), first, 4, last))  # noqa: B023
        assert text.startswith(expected), text
        assert bool(text) == bool(expected)


@triton.jit
def _overlapping(y_ptr, STEP: tl.constexpr, VALUE: tl.constexpr):
    at = tl.program_id(0) * STEP + tl.arange(0, 4)
    tl.store(y_ptr + at, tl.program_id(0).to(tl.float32) if VALUE == "program" else at.to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stores_of_different_values_by_two_programs_are_a_fault_with_both_lines(dtype: torch.dtype) -> None:
    y = torch.empty(32, dtype=dtype)
    text = fault(lambda: _overlapping[(3,)](y, 3, "program"))
    assert text.startswith("two programs store different values to y_ptr: element 3 of 32 "), text
    assert "program (0, 0, 0), test_undefined.py:" in text
    assert "; program (1, 0, 0), test_undefined.py:" in text


def test_stores_of_one_value_by_two_programs_are_no_fault() -> None:
    assert fault(lambda: _overlapping[(3,)](torch.empty(32), 3, "place")) == ""
    assert fault(lambda: _overlapping[(3,)](torch.empty(32), 4, "program")) == ""


@triton.jit
def _phases(x_ptr, part_ptr, y_ptr, ORDER: tl.constexpr):
    me, count = tl.program_id(0), tl.num_programs(0)
    if ORDER == "counter before store":
        last = tl.atomic_add(y_ptr + 1, 1.0) == count - 1
    tl.store(part_ptr + me, tl.load(x_ptr + me))
    if ORDER == "none":
        last = me == count - 1
    elif ORDER == "relaxed":
        last = tl.atomic_add(y_ptr + 1, 1.0, sem="relaxed") == count - 1
    elif ORDER == "last arriver":
        last = tl.atomic_add(y_ptr + 1, 1.0) == count - 1
    if last:
        tl.store(y_ptr, tl.sum(tl.load(part_ptr + tl.arange(0, 4))))


@pytest.mark.parametrize("order", ["none", "relaxed", "counter before store"])
def test_load_of_another_programs_store_without_an_order_is_a_fault(order: str) -> None:
    text = fault(lambda: _phases[(4,)](torch.ones(4), torch.empty(4), torch.zeros(2), order))
    assert text.startswith("two programs store and load without an order of part_ptr: element "), text
    assert "program (3, 0, 0), test_undefined.py:" in text


def test_load_behind_an_acquiring_atomic_of_the_last_arriver_is_no_fault() -> None:
    y = torch.zeros(2)
    assert fault(lambda: _phases[(4,)](torch.ones(4), torch.empty(4), y, "last arriver")) == ""
    assert y[0] == 4


@triton.jit
def _declared(part_ptr, y_ptr):
    me = tl.program_id(0)
    tl.store(part_ptr + me, 1.0)  # unordered: for this test
    if me == 3:
        tl.store(y_ptr, tl.sum(tl.load(part_ptr + tl.arange(0, 4))))  # unordered: for this test


def test_accesses_that_a_comment_declares_unordered_are_no_fault() -> None:
    y = torch.zeros(1)
    assert fault(lambda: _declared[(4,)](torch.zeros(4), y)) == ""
    assert y[0] == 4


@triton.jit
def _neighbour(x_ptr, SELF: tl.constexpr):
    me = tl.program_id(0)
    x = tl.load(x_ptr + (me if SELF else me + 1))
    tl.store(x_ptr + me, x + 1)


def test_in_place_kernel_that_reads_elements_of_another_program_is_a_fault() -> None:
    assert fault(lambda: _neighbour[(4,)](torch.zeros(5), True)) == ""
    text = fault(lambda: _neighbour[(4,)](torch.zeros(5), False))
    assert text.startswith("two programs load and store without an order of x_ptr: element 1 of 5 float32: program (0, 0, 0)")


@triton.jit
def _amax_then_use(x_ptr, top_ptr, y_ptr):
    me = tl.program_id(0)
    x = tl.load(x_ptr + me)
    tl.atomic_max(top_ptr, x)
    tl.store(y_ptr + me, x / tl.load(top_ptr))


def test_load_of_an_atomic_maximum_in_the_same_launch_is_a_fault() -> None:
    text = fault(lambda: _amax_then_use[(4,)](torch.arange(4.0) + 1, torch.zeros(1), torch.empty(4)))
    assert text.startswith("two programs load and atomically update without an order of top_ptr: element 0 of 1 float32"), text


@triton.jit
def _bytes_of_words(y_ptr):
    me = tl.program_id(0)
    tl.store(y_ptr.to(tl.pointer_type(tl.uint8)) + me, me.to(tl.uint8))


def test_stores_of_bytes_of_one_word_by_several_programs_are_no_fault() -> None:
    y = torch.zeros(2, dtype=torch.int32)
    assert fault(lambda: _bytes_of_words[(8,)](y)) == ""
    assert y.view(torch.uint8).tolist() == list(range(8))


def test_unknown_keyword_of_a_launch_is_a_fault_with_the_nearest_keyword() -> None:
    text = fault(lambda: _copy_tail[(1,)](torch.ones(4), torch.empty(4), 4, 4, num_stage=3))
    assert text == "_copy_tail: 'num_stage': no parameter of the kernel and no option of a launch; did you mean num_stages?"
    options = {"num_warps": 4, "num_stages": 2, "maxnreg": 64, "enable_fp_fusion": False, "num_ctas": 1}
    assert fault(lambda: _copy_tail[(1,)](torch.ones(4), torch.empty(4), 4, BLOCK=4, **options)) == ""


@triton.jit
def _computed(a_ptr, b_ptr, y_ptr, OPERATION: tl.constexpr):
    a, b = tl.load(a_ptr + tl.arange(0, 2)), tl.load(b_ptr)
    if OPERATION == "add":
        y = a + b
    elif OPERATION == "sub":
        y = a - b
    else:
        y = a * b
    tl.store(y_ptr + tl.arange(0, 2), y)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint32])
@pytest.mark.parametrize(
    ("operation", "pick", "smaller", "by"),
    [("add", max, -1, 1), ("sub", min, 1, 1), ("mul", max, 0, 2), ("mul", min, 0, -1)],
)
def test_integer_operation_overflows_only_beyond_the_last_value_of_its_type(
    dtype: torch.dtype, operation: str, pick: Callable[[int, int], int], smaller: int, by: int
) -> None:
    if by < torch.iinfo(dtype).min:
        pytest.skip("an unsigned type has no negative value")
    last = pick(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    within = last + smaller if smaller else last // 2 + (by < 0)
    y, b = torch.zeros(2).to(dtype), torch.tensor([by]).to(dtype)
    assert fault(lambda: _computed[(1,)](torch.tensor([1, within]).to(dtype), b, y, operation)) == ""
    exact = {"add": within + by, "sub": within - by, "mul": within * by}
    assert y[1].item() == exact[operation]
    text = fault(lambda: _computed[(1,)](torch.tensor([1, last]).to(dtype), b, y, operation))
    if dtype == torch.uint32:
        assert text == "", "a hash wraps around"
        return
    assert text.startswith(f"{str(dtype).removeprefix('torch.')} overflow detected for operation {operation}, test_undefined.py:")


@triton.jit
def _endless(x_ptr, N):
    i = tl.program_id(0)
    while i < N:
        i += 0
    tl.store(x_ptr, 1.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(faults, "PROGRAM_SECONDS", 0.3)
    yield
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)  # no exception comes late


@pytest.mark.usefixtures("quick")
def test_program_that_does_not_end_is_a_fault_with_kernel_and_line() -> None:
    first = _endless.fn.__code__.co_firstlineno
    lines = [f"_endless: program (0, 0, 0) has not ended after 0.3 s, test_undefined.py:{first + 3 + line}" for line in (0, 1)]
    assert {fault(lambda: _endless[(2,)](torch.zeros(1), 1)) for _ in range(3)} <= set(lines)
    assert fault(lambda: _endless[(2,)](torch.zeros(1), 0)) == ""


def _compute(seconds: float) -> None:
    ends = time.process_time() + seconds
    while time.process_time() < ends:
        pass


class _SlowToEnd:
    def __del__(self) -> None:
        _compute(5.0)


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_time_limit_that_falls_into_a_destructor_is_not_lost() -> None:
    """Python prints an exception of a destructor, and goes on."""
    with pytest.raises(faults.KernelFaultError, match=r"^here has not ended after 0\.3 s"), faults.time_limit(lambda: "here"):
        faults.begin_time()
        _SlowToEnd()
        _compute(5.0)


@triton.jit
def _slow(x_ptr, N):
    for i in range(N):
        tl.store(x_ptr + tl.program_id(0), i)


@pytest.mark.usefixtures("quick")
def test_launch_of_many_programs_may_take_longer_than_one_program() -> None:
    programs, took_s = 64, 0.0
    while took_s < 0.4:
        programs *= 4
        x, begun = torch.zeros(programs), os.times().user
        assert fault(lambda: _slow[(programs,)](x, 20)) == ""  # noqa: B023
        took_s = os.times().user - begun
        assert x.eq(19).all()


@triton.jit
def _block_pointer(x_ptr, y_ptr, N):
    block = tl.make_block_ptr(x_ptr, (N,), (1,), (0,), (16,), (0,))
    tl.store(y_ptr + tl.arange(0, 16), tl.load(block, boundary_check=(0,)))


@pytest.mark.skipif(not hasattr(interpreter, "BlockPointerHandle"), reason="Triton 3.9 has no block pointers")
def test_block_pointer_without_padding_gives_garbage_behind_the_boundary() -> None:
    x, y = torch.arange(10.0), torch.zeros(16)
    assert fault(lambda: _block_pointer[(1,)](x, y, 10)) == ""
    assert torch.equal(y[:10], x)
    assert bool(y[10:].isnan().any())


@triton.jit
def _before_first(x_ptr, y_ptr):
    at = tl.program_id(0) - 1
    if tl.load(x_ptr + at, mask=at >= 0, other=-1) >= 0:
        tl.store(y_ptr + at, 1)


def test_load_of_a_meta_tensor_gives_other_where_the_mask_is_false() -> None:
    x, y = (torch.empty(3, dtype=torch.int32, device="meta") for _ in range(2))
    assert fault(lambda: _before_first[(3,)](x, y)) == ""


@triton.jit
def _behind_a_far_first(x_ptr, y_ptr):
    at = tl.arange(0, 16).to(tl.int64)
    tl.store(y_ptr + at, tl.load(x_ptr + tl.where(at > 0, at, 1 << 60), mask=at > 0, other=0))


def test_load_of_a_meta_tensor_may_mask_an_address_in_no_argument() -> None:
    x, y = (torch.empty(16, dtype=torch.int32, device="meta") for _ in range(2))
    assert fault(lambda: _behind_a_far_first[(1,)](x, y)) == ""


@triton.jit
def _group_of_row(ends_ptr, y_ptr, SHIFT: tl.constexpr, TURNS: tl.constexpr):
    row, group = tl.program_id(0), 0
    while tl.load(ends_ptr + group) <= row:
        group += 1
    for _ in range(tl.load(ends_ptr) if TURNS else 0):
        tl.load(ends_ptr)
    tl.store(y_ptr + row + SHIFT, group)


@pytest.mark.parametrize(
    ("shift", "turns", "expected"),
    [
        (0, False, ""),
        (1, False, "load outside of ends_ptr: element 4 of 4 int32"),
        (1, True, "load outside of ends_ptr: element 4 of 4 int32"),
    ],
    ids=["right", "wrong for each loaded value", "endless for a large loaded value"],
)
def test_load_of_a_meta_tensor_in_a_search_is_a_fault_only_outside(
    shift: int, turns: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undefined, "LAUNCH_SECONDS", 0.5)
    ends, y = (torch.empty(size, dtype=torch.int32, device="meta") for size in (4, 100))
    assert fault(lambda: _group_of_row[(100,)](ends, y, shift, turns)).partition(", program")[0] == expected


def test_access_outside_is_no_fault_if_the_time_is_over_before_other_values_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(step=0.1)
    monkeypatch.setattr(undefined.time, "thread_time", lambda: next(seconds))
    ends, y = (torch.empty(size, dtype=torch.int32, device="meta") for size in (4, 100))
    assert fault(lambda: _group_of_row[(100,)](ends, y, 0, True)) == ""


@triton.jit
def _grid_of_arguments(y_ptr, N):
    tl.store(y_ptr + tl.program_id(0), 1.0)


def test_grid_that_is_computed_from_arguments_is_launched() -> None:
    y = torch.zeros(3)
    assert fault(lambda: _grid_of_arguments[lambda arguments: (triton.cdiv(arguments["N"], 4),)](y, 11)) == ""
    assert y.tolist() == [1.0, 1.0, 1.0]


def test_grid_that_is_computed_from_arguments_is_checked_without_memory() -> None:
    y = torch.empty(3, device="meta")
    assert fault(lambda: _grid_of_arguments[lambda arguments: (triton.cdiv(arguments["N"], 4),)](y, 11)) == ""
    text = fault(lambda: _grid_of_arguments[lambda arguments: (triton.cdiv(arguments["N"], 4),)](y, 13))
    assert text.startswith("store outside of y_ptr: element 3 of 3 float32, program (3, 0, 0), test_undefined.py:")


@triton.jit
def _rows_of_constant_length(x_ptr, M, N: tl.constexpr, IS_STATIC: tl.constexpr):
    if IS_STATIC:
        for i in tl.static_range(2):
            tl.store(x_ptr + i * (1 << 32), 0.0)
    else:
        for row in range(M):
            tl.store(x_ptr + row * N, 0.0)


def test_product_of_a_loop_index_and_a_constant_overflows_past_32_bits_alone() -> None:
    x = torch.empty((1 << 32) + 1, device="meta")
    assert fault(lambda: _rows_of_constant_length[(1,)](x, 1 << 16, (1 << 15) - 1, False)) == ""
    assert fault(lambda: _rows_of_constant_length[(1,)](x, 0, 0, True)) == ""
    text = fault(lambda: _rows_of_constant_length[(1,)](x, (1 << 16) + 1, 1 << 15, False))
    assert text.startswith("int32 overflow detected for operation mul, test_undefined.py:")
