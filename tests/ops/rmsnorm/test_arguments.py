"""Arguments that RMSNorm's functions refuse by name."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from kerneltune.kernel_lib import arguments
from kerneltune.ops.rmsnorm import BwdConfig, FwdConfig, rmsnorm_add_fwd, rmsnorm_bwd, rmsnorm_fwd

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
X, W, R = torch.ones(4, 8, device=WHERE), torch.ones(8, device=WHERE), torch.ones(4, device=WHERE)
ONE = torch.ones(1, device=WHERE)
ON = f"on {X.device}"
FWD = FwdConfig(rows=1, cols=64, split=False, warps=4, ctas=0, stages=1, reload=False)
BWD = BwdConfig(rows=1, cols=64, split=False, warps=4, ctas=1, stages=2)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.ones(8), W), {}, "x must be a matrix of bfloat16, float16, float32, got shape (8,) torch.float32"),
        ((X.double(), W.double()), {}, "x must be a matrix of bfloat16, float16, float32, got shape (4, 8) torch.float64"),
        ((torch.ones(8, 4).t(), W), {}, "elements of a row of x must be adjacent, got strides (1, 4)"),
        ((None, W), {}, "x must be a tensor, got None"),
        ((X, [1.0] * 3), {}, "weight must be a tensor, got [1.0, 1.0, 1.0]"),
        ((X, ONE), {}, f"weight must be (8,) torch.float32 {ON}, got (1,) torch.float32 {ON}"),
        ((X, W.half()), {}, f"weight must be (8,) torch.float32 {ON}, got (8,) torch.float16 {ON}"),
        ((X, torch.ones(8, device="meta")), {}, f"weight must be (8,) torch.float32 {ON}, got (8,) torch.float32 on meta"),
        ((X, W), {"eps": -1e-5}, "eps must not be negative, got eps=-1e-05"),
        ((X, W), {"eps": float("nan")}, "eps must not be negative, got eps=nan"),
        ((X, W), {"quant": "int8"}, "quant must be none, fp8 or fp8_t, got quant='int8'"),
        ((X, W), {"quant": "fp8", "scale": ONE, "amax": ONE, "fp8_format": "e3m4"}, "fp8_format must be one of e4m3, e5m2, "),
        ((X, W), {"quant": "fp8", "scale": ONE}, "quant='fp8' needs scale and amax"),
        ((X, W), {"quant": "fp8", "scale": R, "amax": ONE}, f"scale must be (1,) torch.float32 {ON}, got (4,)"),
        ((X, W), {"quant": "fp8", "scale": 2.0, "amax": ONE}, "scale must be a tensor, got 2.0"),
        ((X, W), {"out_dtype": torch.float64}, "out_dtype must be torch.bfloat16, torch.float16, torch.float32 for"),
        ((X.half(), W.half()), {"out_dtype": torch.bfloat16}, "out_dtype must be torch.float16 for torch.float16 x and"),
        ((X.half(), W.half()), {"out_dtype": torch.float32}, "quant='none', got out_dtype=torch.float32"),
        (
            (X, W), {"quant": "fp8", "scale": ONE, "amax": ONE, "out_dtype": torch.float16},
            "out_dtype must be None for torch.float32 x and quant='fp8', got out_dtype=torch.float16",
        ),
        (
            (torch.empty_strided((2, 8), (1 << 30, 1), device="meta"), torch.empty(8, device="meta")),
            {"config": replace(FWD, rows=2)},
            "rows of x must be less than 1073741824 numbers apart in tiles of 2, got strides (1073741824, 1)",
        ),
        ((X, W), {"config": {}}, "config must be a FwdConfig or None, got {}"),
        ((X, W), {"config": BWD}, "config must be a FwdConfig or None, got BwdConfig(rows=1"),
        ((X, W), {"config": replace(FWD, cols=0)}, "config: cols must be a power of two of at least 16, got Fwd"),
        ((X, W), {"config": replace(FWD, rows=3)}, "config: rows must be a power of two of at least 1, got FwdConfig(rows=3"),
        ((X, W), {"config": replace(FWD, warps=0)}, "config: warps must be a power of two of at least 1, got"),
        ((X, W), {"config": replace(FWD, ctas=-1)}, "config: ctas must be at least 0, got"),
        ((X, W), {"config": replace(FWD, stages=0)}, "config: stages must be at least 1, got"),
    ],
)  # fmt: skip
def test_rmsnorm_fwd_with_wrong_arguments_raises_with_their_names(
    args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rmsnorm_fwd(*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "config", "message"),
    [
        ((X[:, :7], X, R, W), None, "dz must be (4, 8)"),
        ((None, X, R, W), None, "dz must be a tensor, got None"),
        ((X, X, ONE, W), None, "rsigma must be (4,)"),
        ((X, X, R.half(), W), None, "rsigma must be (4,) torch.float32"),
        ((X, X, R, ONE), None, "weight must be (8,)"),
        ((X, X, R, W), FWD, "config must be a BwdConfig or None, got FwdConfig"),
        ((X, X, R, W), replace(BWD, cols=100), "config: cols must be a power of two of at least 16, got BwdConfig"),
        ((X, X, R, W), replace(BWD, ctas=0), "config: ctas must be at least 1, got BwdConfig"),  # there is a loop
    ],
)
def test_rmsnorm_bwd_with_wrong_arguments_raises_with_their_names(args: tuple[Any, ...], config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rmsnorm_bwd(*args, config=config)


def test_rmsnorm_of_cpu_tensors_without_the_interpreter_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is ours, not Triton's, which has no driver then."""
    monkeypatch.setattr(arguments, "INTERPRETED", False)
    x, weight = X.cpu(), W.cpu()
    message = "^x must be on a GPU, or kernels interpreted .*, got x on cpu$"
    for call in (lambda: rmsnorm_fwd(x, weight), lambda: rmsnorm_bwd(x, x, R.cpu(), weight)):
        with pytest.raises(ValueError, match=message):
            call()
    arguments.check_matrix("x", x.to("meta"))  # compiled ahead


@pytest.mark.parametrize(
    ("arguments", "kwargs", "message"),
    [
        ((X, X[:2], W), {}, "residual must be (4, 8) torch.float32"),
        ((X, X.half(), W), {}, "residual must be (4, 8) torch.float32"),
        ((X, None, W), {}, "residual must be a tensor, got None"),
        ((X, X, None), {"zero_centered": True}, "zero_centered needs a weight, got weight=None"),
        ((X, X, W), {"config": replace(FWD, reload=True)}, "config: reload must be False where a residual is added"),
    ],
)
def test_rmsnorm_add_fwd_with_wrong_arguments_raises_with_their_names(
    arguments: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rmsnorm_add_fwd(*arguments, **kwargs)
