"""Casts to fp8 in Triton's interpreter."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from kerneltune.kernel_lib.agreement import same_bits
from kerneltune.kernel_lib.interpreted import exact_casts
from kerneltune.kernel_lib.tl_lib import FP8_DTYPES, TL_FP8

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")


@triton.jit
def _cast(x_ptr, q_ptr, fp8: tl.constexpr, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(q_ptr + lanes, tl.load(x_ptr + lanes).to(fp8))


@pytest.mark.parametrize("fp8_format", FP8_DTYPES)
def test_every_number_of_sixteen_bits_is_cast_to_the_nearest(fp8_format: str) -> None:
    """Ties, carries, subnormals, NaN: of both 16-bit types, all that do not overflow."""
    dtype = FP8_DTYPES[fp8_format]
    bits = torch.arange(1 << 16).to(torch.int16)
    x = torch.cat([bits.view(torch.bfloat16).float(), bits.view(torch.float16).float()])
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    q = torch.empty(x.shape, dtype=dtype)
    _cast[(1,)](x, q, TL_FP8[fp8_format], x.numel())
    assert same_bits("q", q, x.to(dtype)) == []


@pytest.mark.parametrize("name", ["_convert_float", "_patch_lang_core"])
def test_another_interpreter_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(interpreter, name)
    with pytest.raises(RuntimeError, match=rf"interpreter of triton {triton.__version__} has no {name}: "), exact_casts():
        pass


def test_the_interpreter_is_put_back() -> None:
    before = interpreter._convert_float, interpreter._patch_lang_core
    with exact_casts():
        assert before[0] is not interpreter._convert_float
    assert before == (interpreter._convert_float, interpreter._patch_lang_core)
