"""Check promises about tensors: a wrong promise counts where it makes an access a vector."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from kerneltune.interpreter.facts import noting
from kerneltune.interpreter.faults import fault_of
from kerneltune.interpreter.modes import strict

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="what Triton's interpreter finds")


def found(launch: Callable[[], object]) -> tuple[str, set[str]]:
    """Return the line of a launch's fault, empty where there is none, and the kinds of its facts about promises."""
    line = ""
    with noting() as facts:
        try:
            with strict():
                launch()
        except Exception as error:
            if (fault := fault_of(error)) is None:
                raise
            line = str(fault)
    return line, {fact.kind for fact in facts if fact.kind in ("promise", "vector")}


@triton.jit
def _rows(x_ptr, y_ptr, N, MULTIPLE: tl.constexpr, IS_MASKED: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    at = tl.multiple_of(tl.program_id(0) * N + cols, MULTIPLE)
    mask = cols < (N if IS_MASKED else BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask) * 2, mask)


def test_offset_that_is_no_multiple_fails_where_vectors_begin_at_it() -> None:
    x = torch.randn(4, 520)
    line, kinds = found(lambda: _rows[(4,)](x, torch.empty_like(x), 514, 16, False, 512))
    assert line.startswith("load of 4 elements at no multiple of 16 bytes, by multiple_of(16), test_promises.py:")
    assert kinds == {"promise"}


@pytest.mark.parametrize(
    ("N", "multiple", "is_masked"), [(514, 2, False), (528, 16, False), (514, 1, False), (512, 16, True), (528, 16, True)]
)
def test_offset_that_is_a_multiple_is_no_fact(N: int, multiple: int, is_masked: bool) -> None:
    x = torch.randn(4, N + 6)
    assert found(lambda: _rows[(4,)](x, torch.empty_like(x), N, multiple, is_masked, 512)) == ("", set())


@pytest.mark.parametrize(("block", "warps", "is_masked"), [(1024, 4, True), (32, 4, False), (512, 16, False)])
def test_wrong_multiple_is_a_fact_alone_where_no_access_is_a_vector(block: int, warps: int, is_masked: bool) -> None:
    x = torch.randn(4, 1024)
    y, count = torch.empty(4 * 1024), 514 if is_masked else block
    assert found(lambda: _rows[(4,)](x, y, 514, 16, is_masked, block, num_warps=warps)) == ("", {"promise"})
    assert torch.equal(y[514 * 3 :][:count], x.reshape(-1)[514 * 3 :][:count] * 2)


@triton.jit
def _product(a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, BLOCK: tl.constexpr, WRAPS: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at_m = rows % M if WRAPS else tl.where(rows < M, rows, 0)
    at_n = cols % N if WRAPS else tl.where(cols < N, cols, 0)
    at_m = tl.max_contiguous(tl.multiple_of(at_m, BLOCK), BLOCK)
    at_n = tl.max_contiguous(tl.multiple_of(at_n, BLOCK), BLOCK)
    at_k = tl.arange(0, 16)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, 16):
        a = tl.load(a_ptr + at_m[:, None] * stride_am + (k + at_k)[None, :] * stride_ak, k + at_k[None, :] < K, other=0.0)
        b = tl.load(b_ptr + (k + at_k)[:, None] * stride_bk + at_n[None, :] * stride_bn, k + at_k[:, None] < K, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, (rows[:, None] < M) & (cols[None, :] < N))


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize(("M", "N", "K"), [(40, 36, 20), (48, 80, 32), (33, 100, 17), (1, 1, 1), (64, 40, 16)])
def test_product_of_the_tutorials_is_right_with_ragged_sizes(M: int, N: int, K: int, is_transposed: bool, wraps: bool) -> None:
    a, b = torch.randn(M, K), torch.randn(K, N)
    a, b = (a.T.contiguous().T, b.T.contiguous().T) if is_transposed else (a, b)
    c = torch.empty(M, N)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
    line, kinds = found(lambda: _product[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), 32, wraps))
    assert (line, "promise" in kinds) == ("", False)
    torch.testing.assert_close(c, a @ b)


@triton.jit
def _clamped(x_ptr, y_ptr, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tl.where(at < count, at, 0)
    if KIND == "contiguous":
        inside = tl.max_contiguous(tl.multiple_of(inside, BLOCK), BLOCK)
    tl.store(y_ptr + tl.program_id(0), tl.max(tl.load(x_ptr + inside), 0))


@pytest.mark.parametrize(("count", "largest"), [(514, 9.0), (516, 3.0)])
def test_vector_over_a_clamped_offset_loads_other_elements(count: int, largest: float) -> None:
    x, y = torch.zeros(1040), torch.empty(2)
    x[1:4], x[514], x[516] = 3.0, 9.0 if count == 514 else 0.0, 9.0
    assert found(lambda: _clamped[(2,)](x, y, count, "contiguous", 512)) == ("", {"vector"})
    assert y[1] == largest
    assert found(lambda: _clamped[(2,)](x, y, count, "", 512)) == ("", set())
    assert y[1] == 0.0


def test_vector_that_reaches_behind_a_tensor_loads_garbage() -> None:
    y = torch.empty(2)
    assert found(lambda: _clamped[(2,)](torch.randn(514), y, 514, "contiguous", 512)) == ("", {"vector"})
    assert y[1] > 1e38


@triton.jit
def _gathered(x_ptr, index_ptr, y_ptr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    index = tl.load(index_ptr + at)
    if KIND == "contiguous":
        index = tl.max_contiguous(tl.multiple_of(index, 4), 4)
    if KIND == "store":
        tl.store(y_ptr + tl.max_contiguous(tl.multiple_of(index, 4), 4), tl.load(x_ptr + at))
    else:
        tl.store(y_ptr + at, tl.load(x_ptr + index))


@pytest.mark.parametrize("order", ["identity", "groups", "random"])
def test_gather_with_a_promise_takes_vectors_that_must_be_aligned(order: str) -> None:
    x, y, index = torch.randn(512), torch.empty(512), torch.arange(512)
    index = index.view(128, 4).flip(0).reshape(-1) if order == "groups" else index.flip(0) if order == "random" else index
    for kind in ("contiguous", "store"):
        line, kinds = found(lambda kind=kind: _gathered[(1,)](x, index, y, kind, 512))  # type: ignore[misc]
        if order == "random":
            accessed = "load" if kind == "contiguous" else "store"
            assert line.startswith(f"{accessed} of 4 elements at no multiple of 16 bytes")
        else:
            assert (line, kinds) == ("", set())
            assert torch.equal(y, x[index]) if kind == "contiguous" else torch.equal(y[index], x)
    assert found(lambda: _gathered[(1,)](x, index, y, "", 512)) == ("", set())


def test_store_by_vectors_to_other_elements_fails() -> None:
    index = torch.arange(512)
    index[5] = 511
    line, _kinds = found(lambda: _gathered[(1,)](torch.randn(512), index, torch.empty(512), "store", 512))
    assert line.startswith("store of 4 elements to other addresses than the program's, by max_contiguous(4), test_promises.py:")


@triton.jit
def _copied(x_ptr, y_ptr, count, IS_PROMISED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < count
    if IS_PROMISED:
        mask = tl.max_constancy(mask, 4)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask, other=0.0), mask)


def test_mask_that_changes_within_a_vector_fails_where_it_stores() -> None:
    x, y = torch.randn(512), torch.zeros(512)
    line, kinds = found(lambda: _copied[(1,)](x, y, 498, True, 512))
    assert line.startswith("store of 4 elements to other addresses than the program's, by max_constancy(4)")
    assert kinds == {"promise", "vector"}
    assert found(lambda: _copied[(1,)](x, y, 498, False, 512)) == ("", set())
    assert found(lambda: _copied[(1,)](x, y, 500, True, 512)) == ("", set())


@triton.jit
def _tile_of(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * N + tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK), BLOCK), BLOCK)
    pointers = tl.max_contiguous(tl.multiple_of(x_ptr + at, BLOCK), BLOCK)
    tl.store(y_ptr + at, tl.load(pointers))


def test_promise_about_pointers_counts_in_bytes() -> None:
    x, y = torch.randn(4, 512), torch.empty(4, 512)
    assert found(lambda: _tile_of[(4,)](x, y, 512, 512)) == ("", set())
    assert torch.equal(x, y)
    assert found(lambda: _tile_of[(4,)](x, y, 511, 512))[0].startswith("load of 4 elements at no multiple of 16 bytes")
