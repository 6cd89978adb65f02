"""Triton's interpreter, corrected."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from subprocesses import environment
from triton.language.extra import libdevice
from triton.language.extra.libdevice import tanh  # before the interpreter is corrected, as kernels import it
from triton.runtime import interpreter
from warm_python import python

from kerneltune.checking.check import poisoned_memory
from kerneltune.interpreter.corrections import correct_interpreter, correct_libdevice
from kerneltune.interpreter.facts import noting
from kerneltune.interpreter.modes import corrected, strict
from kerneltune.kernel_lib.agreement import close, same_bits
from kerneltune.kernel_lib.tl_lib import FP8_DTYPES, TL_FP8

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")


@triton.jit
def _cast(x_ptr, q_ptr, fp8: tl.constexpr, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(q_ptr + lanes, tl.load(x_ptr + lanes).to(fp8))


@pytest.mark.parametrize("fp8_format", FP8_DTYPES)
def test_cast_to_fp8_of_every_16_bit_value_rounds_to_the_nearest(fp8_format: str) -> None:
    """All values of both 16-bit types that do not overflow are cast: ties, carries, subnormals, NaN."""
    dtype = FP8_DTYPES[fp8_format]
    bits = torch.arange(1 << 16).to(torch.int16)
    x = torch.cat([bits.view(torch.bfloat16).float(), bits.view(torch.float16).float()])
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    q = torch.empty(x.shape, dtype=dtype)
    _cast[(1,)](x, q, TL_FP8[fp8_format], x.numel())
    assert same_bits("q", q, x.to(dtype)) == []


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8_format", FP8_DTYPES)
def test_cast_to_fp8_from_16_bits_equals_that_from_fp32(fp8_format: str, source: torch.dtype) -> None:
    dtype = FP8_DTYPES[fp8_format]
    x = torch.arange(1 << 16).to(torch.int16).view(source)
    x = x.float().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(source)
    q = torch.empty(x.shape, dtype=dtype)
    _cast[(1,)](x, q, TL_FP8[fp8_format], x.numel())
    assert same_bits("q", q, x.float().to(dtype)) == []


@triton.jit
def _largest_of_all(x_ptr, y_ptr, i_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(y_ptr, tl.max(x, axis=0))
    tl.store(i_ptr + tl.arange(0, N), x.to(tl.int32))


@pytest.mark.filterwarnings("error")
def test_maximum_and_cast_of_nan_alone_print_no_warning() -> None:
    y, index = torch.zeros(1), torch.zeros(16, dtype=torch.int32)
    with corrected():
        _largest_of_all[(1,)](torch.full((16,), float("nan")), y, index, 16)
    assert y.isnan().all()
    with strict():
        _largest_of_all[(1,)](*(torch.empty_like(tensor, device="meta") for tensor in (index.float(), y, index)), 16)


@pytest.mark.parametrize("name", ["_convert_float", "_patch_lang_core", "_patch_lang", "_LangPatchScope"])
def test_corrected_with_an_unknown_interpreter_raises_with_its_version(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(interpreter, name)
    with pytest.raises(RuntimeError, match=rf"interpreter of triton {triton.__version__} has no {name}: "), corrected():
        pass


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _twice_twice(x_ptr):
    tl.store(x_ptr, _twice(_twice(tl.load(x_ptr))))


def test_mended_interpreter_patches_the_language_once_per_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = []
    scopes = vars(interpreter)["_LangPatchScope"]
    before = scopes.set_attr

    def noted(scope: Any, owner: Any, name: str, value: Any) -> None:
        patched.append((owner, name))
        before(scope, owner, name, value)

    monkeypatch.setattr(scopes, "set_attr", noted)
    with corrected():
        for launch in range(2):
            x = torch.ones(1)
            _twice_twice[(1,)](x)
            assert x.item() == 4
            assert patched.count((tl.tensor, "__add__")) == launch + 1
    assert tl.core.is_builtin(tl.load)


def test_corrected_interpreter_corrected_again_is_the_same() -> None:
    correct_interpreter()
    before = [getattr(interpreter, name) for name in ("_convert_float", "_patch_lang_core", "_patch_lang")]
    correct_interpreter()
    assert before == [getattr(interpreter, name) for name in ("_convert_float", "_patch_lang_core", "_patch_lang")]


def test_call_of_an_operator_outside_of_a_check_casts_exactly() -> None:
    code = """
import torch
from kerneltune.ops.fp8 import fp8_tensorwise_2d
x = torch.tensor([[448.0, 1.98] * 16] * 16, dtype=torch.bfloat16)
q = fp8_tensorwise_2d(x)[0].float()
assert q[0, 0].item() / q[0, 1].item() == 448 / 2, q[0, :2]
"""
    done = subprocess.run([python(), "-c", code], env=environment(TRITON_INTERPRET="1"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@triton.jit
def bf16_kernel(x_ptr, y_ptr, sum_ptr, product_ptr, total_ptr, top_ptr, cumulated_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tile = at[:, None] * N + at[None, :]
    x, y = tl.load(x_ptr + tile), tl.load(y_ptr + tile)
    tl.store(sum_ptr + tile, tl.where(x < y, x + y, x * 2 - 0.5))
    tl.store(product_ptr + tile, tl.dot(x, y).to(tl.bfloat16))
    tl.store(total_ptr + at, tl.sum(x, 1))
    tl.store(top_ptr + at, tl.max(x, 0))
    tl.store(cumulated_ptr + tile, tl.cumsum(x, 1))


def test_bf16_operations_are_rounded_to_the_nearest() -> None:
    n = 16
    torch.manual_seed(0)
    x, y = (torch.randn(n, n).bfloat16() for _ in range(2))
    sums, product, cumulated = (torch.empty_like(x) for _ in range(3))
    totals, tops = (torch.empty(n, dtype=torch.bfloat16) for _ in range(2))
    with corrected():
        bf16_kernel[(1,)](x, y, sums, product, totals, tops, cumulated, n)
    assert torch.equal(sums, torch.where(x < y, x + y, x * 2 - 0.5))
    torch.testing.assert_close(product, (x.float() @ y.float()).bfloat16(), rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(totals, x.float().sum(1).bfloat16(), rtol=2**-8, atol=1e-6)
    assert torch.equal(tops, x.amax(0))
    torch.testing.assert_close(cumulated, x.float().cumsum(1).bfloat16(), rtol=2**-8, atol=1e-6)


@triton.jit
def to_bf16_kernel(x_ptr, y_ptr, i_ptr, whole_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_ptr + at, tl.load(x_ptr + at))
    tl.store(whole_ptr + at, tl.load(i_ptr + at).to(tl.bfloat16))


def test_casts_to_bf16_round_ties_to_even_and_keep_nan_and_whole_numbers() -> None:
    x = torch.cat(
        [torch.tensor([1.00390625, 1.01171875, -1.99999, 3.4e38, 1e-40, torch.inf, -torch.inf, torch.nan]), torch.randn(120)]
    )
    whole = torch.arange(-64, 64) * 1001
    y, z = (torch.empty(128, dtype=torch.bfloat16) for _ in range(2))
    with corrected():
        to_bf16_kernel[(1,)](x, y, whole, z, 128)
    assert torch.equal(y.nan_to_num(nan=7.0), x.bfloat16().nan_to_num(nan=7.0))
    assert torch.equal(z, whole.float().bfloat16())


@triton.jit
def looping_kernel(y_ptr, count, N: tl.constexpr):
    at = tl.arange(0, N)
    for i in range(tl.program_id(0), count, 2):
        tl.store(y_ptr + i.to(tl.int64) * N + at, i.to(tl.float32) + at)
    for i in tl.range(1, count, 2, num_stages=2):
        tl.store(y_ptr + i.to(tl.int64) * N + at, i.to(tl.float32) + at)


def test_loop_index_can_be_cast_as_a_tensor_of_the_kernel() -> None:
    y = torch.empty(5, 4)
    with corrected():
        looping_kernel[(1,)](y, 5, 4)
    assert torch.equal(y, torch.arange(5)[:, None] + torch.arange(4.0))
    assert type(next(iter(range(1)))) is int


@triton.jit
def counting_kernel(y_ptr, begin, factor):
    for i in range(begin.to(tl.int64), begin.to(tl.int64) + 1):
        tl.store(y_ptr, i * factor)


def test_loop_index_over_64_bit_bounds_has_64_bits() -> None:
    y = torch.empty(1, dtype=torch.int64)
    with corrected():
        counting_kernel[(1,)](y, 100_000, 100_000)
    assert y.item() == 10**10


@triton.jit
def _products_with_an_index(x_ptr, y_ptr):
    for i in range(4):
        tl.store(y_ptr + i, tl.load(x_ptr) * i)


def test_product_with_a_loop_index_has_its_32_bits() -> None:
    x, y = torch.tensor([100], dtype=torch.int8), torch.empty(4, dtype=torch.int32)
    with corrected():
        _products_with_an_index[(1,)](x, y)
    assert y.tolist() == [0, 100, 200, 300]


@triton.jit
def scaling_kernel(x_ptr, y_ptr, factor):
    tl.store(y_ptr, (tl.load(x_ptr) * factor).to(tl.float32) + factor.to(tl.float32) * 0)


def test_floating_point_argument_is_a_tensor_of_fp32_as_in_a_compiled_kernel() -> None:
    x, y = torch.tensor([3.0], dtype=torch.bfloat16), torch.empty(1)
    with corrected():
        scaling_kernel[(1,)](x, y, 0.1)
    assert y.item() == np.float32(0.1) * np.float32(3), "the product is not rounded to bf16"


@triton.jit
def _of_libdevice(x_ptr, y_ptr):
    at = tl.arange(0, 16)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, libdevice.rsqrt(x) + tanh(x) + libdevice.pow(x, 3.0) + libdevice.round(x))


def test_libdevice_functions_equal_those_of_torch() -> None:
    x, y = torch.linspace(0.1, 4, 16), torch.empty(16)
    with corrected():
        _of_libdevice[(1,)](x, y)
    torch.testing.assert_close(y, x.rsqrt() + x.tanh() + x**3 + (x + 0.5).floor())


def test_function_that_a_program_has_put_into_libdevice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = 2
    monkeypatch.setattr(libdevice, "erf", lambda x: factor * x)
    monkeypatch.setattr(libdevice, "tanh", abs)
    correct_libdevice()
    assert (libdevice.erf(3), libdevice.tanh(-3)) == (6, 3)


@triton.jit
def _sums_of_a_loop(y_ptr, N):
    for i in range(tl.cdiv(N, 4) - 1, -1, -1):
        tl.store(y_ptr + i, (i * 4 - 1).to(tl.int64) + (i & 1).to(tl.int64) * 100 + (-i).to(tl.int64) * 1000)


def test_cast_of_an_expression_of_loop_indices_is_as_in_compiled_kernels() -> None:
    y = torch.zeros(3, dtype=torch.int64)
    with corrected():
        _sums_of_a_loop[(1,)](y, 11)
    assert y.tolist() == [-1, -897, -1993]


@triton.jit
def _divided(y_ptr):
    for i in range(0, 8):
        tl.store(y_ptr + i * 4, (i - 5) // 3)
        tl.store(y_ptr + i * 4 + 1, (i - 5) % 3)
        tl.store(y_ptr + i * 4 + 2, (2 - i) // 3)
        tl.store(y_ptr + i * 4 + 3, (2 - i) % 3)


def test_loop_indices_are_divided_towards_zero_as_in_compiled_kernels() -> None:
    y = torch.empty(8, 4, dtype=torch.int32)
    with corrected():
        _divided[(1,)](y)
    i = torch.arange(8)
    for column, values in enumerate((i - 5, 2 - i)):
        assert y[:, 2 * column].tolist() == torch.div(values, 3, rounding_mode="trunc").tolist()
        assert y[:, 2 * column + 1].tolist() == torch.fmod(values, 3).tolist()


@triton.jit
def _half_poisoned(x_ptr, y_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))  # 1 and infinity; memory that was never written in the second half of x
    tl.store(y_ptr + tl.arange(0, N), (x - x).to(y_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_nan_that_a_kernel_computes_is_reported_apart_from_unwritten_memory(dtype: torch.dtype) -> None:
    with corrected(), poisoned_memory():
        x, y = torch.empty(16), torch.empty(16, dtype=dtype)
        x[:8] = torch.tensor([1.0, 1.0, float("inf"), 1.0, 1.0, float("inf"), float("inf"), 1.0])
        _half_poisoned[(1,)](x, y, 16)
    (line,) = close("y", y, torch.zeros(16), 0.0, 0.0)
    assert "; 8 are NaN, as elements that are never written" in line
    assert line.endswith("; 3 are NaN that the kernel computes, such as 0 / 0 or inf - inf")


@triton.jit
def _product(a_ptr, b_ptr, y_ptr, PRECISION: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(y_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), input_precision=PRECISION))


@pytest.mark.parametrize(
    ("precision", "least", "most"), [("tf32", 1e-5, 2**-10), ("ieee", 0.0, 1e-6), ("tf32x3", 0.0, 1e-6), (None, 1e-5, 2**-10)]
)
def test_dot_of_fp32_rounds_to_tf32_unless_ieee(precision: str | None, least: float, most: float) -> None:
    a, b = torch.rand(2, 16, 16, generator=torch.Generator().manual_seed(0))
    y = torch.empty(16, 16)
    with corrected():
        _product[(1,)](a, b, y, precision)
    error = float(((y - (a.double() @ b.double())) / (a @ b)).abs().max())
    assert least <= error <= most


@triton.jit
def _quotients(x_ptr, y_ptr, EXACT: tl.constexpr):
    at = tl.arange(0, 64)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.div_rn(x, 448.0) if EXACT else x / 448.0)


@pytest.mark.parametrize("is_exact", [False, True])
def test_division_of_fp32_is_a_step_off_where_it_rounds_unless_div_rn(is_exact: bool) -> None:
    x, y = torch.rand(64, generator=torch.Generator().manual_seed(0)), torch.empty(64)
    x[:4] = torch.tensor([0.0, 448.0, float("inf"), float("nan")])
    with corrected(), noting() as reached:
        _quotients[(1,)](x, y, is_exact)
    off = (y.view(torch.int32) - (x / 448.0).view(torch.int32)).abs()
    assert off[:4].tolist() == [0] * 4
    assert (int(off.max()), 8 < int(off.sum()) < 56) == ((0, False) if is_exact else (1, True))
    assert any("`/` of fp32 is not exact on a GPU, test_corrections.py:" in str(fact) for fact in reached) is not is_exact


FIRST = """
import torch, triton, triton.language as tl
from kerneltune.interpreter.modes import strict

@triton.jit
def product(x_ptr, y_ptr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.dot(x, x))

x, y = torch.full((16, 16), 1.0 + 2**-12), torch.empty(16, 16)
with strict():
    product[(1,)](x, y)
print(y[0, 0].item())
"""


def test_first_launch_of_a_process_is_corrected(tmp_path: Path) -> None:
    file = tmp_path / "first.py"
    file.write_text(FIRST)
    printed = subprocess.check_output([sys.executable, str(file)], text=True, env=environment())
    assert printed.split() == ["16.0"], "operands are rounded to tf32"
