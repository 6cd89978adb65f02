"""The fastest of five products of int4 weights: which product runs, cached products, rounding of each, bad arguments."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from int4_codes import DEVICE, exact, some_codes, whole_numbers

from kerneltune import cache
from kerneltune.checking.check import Checker
from kerneltune.ops.int4_gemm import (
    Fp8Weight,
    ProductConfig,
    dequantise,
    fastest,
    fastest_gemm,
    int4_fp8_gemm,
    int4_gemm,
    pack,
    quantise,
    to_fp8,
)
from kerneltune.ops.int4_gemm.fastest import OP
from kerneltune.spec import Case, Option

CODES = some_codes(64, 256, 128)
WEIGHT = pack(*CODES)
COPY = to_fp8(dequantise(WEIGHT, torch.float16))
STATIC = to_fp8(dequantise(WEIGHT, torch.float16), 3.5 / 448)  # of tokens up to 3.5


def case_of(tokens: int, rows: int, depth: int, fp8_copy: Option = True, *, zeros: bool = False) -> Case:
    options = (("group", 128), ("zeros", zeros), ("bias", False), ("fp8_copy", fp8_copy))
    return Case("", (("N", tokens), ("M", rows), ("K", depth)), "float16", "int4", options)


def tokens_of(count: int) -> torch.Tensor:
    x = whole_numbers(count, 256, torch.float16)
    x[:, 0] = 3.5  # a scale that is a power of two: the cast to e4m3 is exact
    return x


@pytest.mark.parametrize(("tokens", "rows", "depth", "kept", "name"), [
    (32, 8192, 4096, True, "int4_gemm"), (32, 10240, 4096, True, "int4_fp8_gemm"), (32, 28672, 4096, True, "int4_fp8_gemm"),
    (33, 28672, 4096, True, "int4_fp8_gemm"), (64, 4096, 4096, True, "int4_gemm"),
    (65, 4096, 4096, True, "fp8_scaled"), (128, 1024, 8192, True, "int4_gemm"), (65, 28672, 4096, True, "fp8"),
    (64, 4096, 14336, True, "fp8_scaled"), (128, 24576, 1536, True, "int4_fp8_gemm"),
    (129, 24576, 1536, True, "fp8_scaled"), (256, 24576, 1536, True, "fp8"),
    (1000, 4096, 14336, True, "fp8"), (1000, 4096, 14336, False, "int4_fp8_gemm"), (1000, 4098, 14336, True, "int4_fp8_gemm"),
    (48, 4096, 14336, "static", "int4_fp8_gemm"), (64, 4096, 14336, "static", "fp8_static"),
    (64, 6144, 4096, "static", "fp8_static"), (64, 28672, 4096, "static", "int4_fp8_gemm"),
    (160, 28672, 4096, "static", "fp8_static"), (1000, 4098, 14336, "static", "int4_fp8_gemm"),
])  # fmt: skip
def test_default_product_depends_on_tokens_sizes_and_the_kept_weight(
    tokens: int, rows: int, depth: int, kept: Option, name: str
) -> None:
    case = case_of(tokens, rows, depth, kept)
    assert fastest.default(case).product == name
    assert fastest.invalid(case, fastest.default(case)) is None


@pytest.mark.parametrize(("tokens", "rows", "name"), [
    (8, 28672, "int4_gemm"), (16, 7168, "int4_gemm"), (16, 28672, "int4_fp8_gemm"), (32, 7168, "int4_fp8_gemm"),
])  # fmt: skip
def test_default_product_of_a_weight_with_zero_points(tokens: int, rows: int, name: str) -> None:
    assert fastest.default(case_of(tokens, rows, 4096, zeros=True)).product == name
    assert fastest.default(case_of(tokens, rows, 4096)).product == "int4_gemm"


@pytest.mark.parametrize("kept", [True, False, "static"])
@pytest.mark.parametrize(("rows", "depth"), [(3200, 3200), (2560, 6912), (13824, 5120), (27648, 5120), (512, 12288)])
def test_default_product_changes_in_one_order_as_tokens_grow(rows: int, depth: int, kept: Option) -> None:
    products = [fastest.default(case_of(tokens, rows, depth, kept)).product for tokens in range(1, 600)]
    order = {"int4_gemm": 0, "int4_fp8_gemm": 1, "fp8_scaled": 2, "fp8": 2, "fp8_static": 2}
    places = [order[product] for product in products]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0, 2 if kept else 1)


def test_cached_product_serves_tokens_of_its_band_and_needs_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELTUNE_CONFIGS", str(tmp_path))
    cache.clear()
    case = dataclasses.replace(case_of(96, 64, 256), name="x")
    entry = cache.CacheEntry(op=OP.name, variant="optimized", case=case, policy="cold", config={"product": "fp8"})
    try:
        cache.store("some_gpu", entry)
        chooser = cache.Chooser.of(OP, OP.variant("optimized"))
        products = {n: chooser.find(case_of(n, 64, 256), "some_gpu").config.product for n in (64, 65, 96, 97)}
        assert products == {64: "int4_gemm", 65: "fp8", 96: "fp8", 97: "int4_gemm"}
        assert chooser.find(case_of(96, 64, 256, fp8_copy=False), "some_gpu").config.product == "int4_gemm"
    finally:
        monkeypatch.undo()
        cache.clear()


@pytest.mark.parametrize("count", [1, 40])
def test_fastest_gemm_runs_the_product_of_its_config(count: int) -> None:
    x, bias = tokens_of(count), whole_numbers(1, 64, torch.float16)[0]
    want = exact(x, CODES, bias)
    for product in (int4_gemm, int4_fp8_gemm):
        assert torch.equal(fastest_gemm(x, WEIGHT, bias, config=ProductConfig(product.__name__)), want)
    for name, copy in (("fp8", COPY), ("fp8_scaled", COPY), ("fp8_static", STATIC)):
        got = fastest_gemm(x, WEIGHT, bias, copy, config=ProductConfig(name))
        torch.testing.assert_close(got, want, rtol=0.1, atol=0.1 * float(want.abs().max()))


def test_product_with_a_static_scale_of_x_counts_larger_elements_as_the_largest_of_that_scale() -> None:
    x = tokens_of(3)
    x[1, :4] = torch.tensor([100.0, -100.0, float("inf"), 7.0])
    x[2, 5] = float("nan")
    got = fastest_gemm(x, WEIGHT, None, STATIC, config=ProductConfig("fp8_static"))
    assert torch.equal(got[:2], fastest_gemm(x[:2].clamp(-3.5, 3.5), WEIGHT, None, STATIC, config=ProductConfig("fp8_static")))
    assert got[2].isnan().all()
    strided = torch.cat((x[:2], x[:2]), 1)[:, :256]
    assert torch.equal(fastest_gemm(strided, WEIGHT, None, STATIC, config=ProductConfig("fp8_static")), got[:2])
    assert fastest_gemm(x[:0], WEIGHT, None, STATIC, config=ProductConfig("fp8_static")).shape == (0, 64)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-39, 1e39])
def test_to_fp8_with_a_scale_of_x_that_fp32_cannot_invert_raises(scale: float) -> None:
    with pytest.raises(ValueError, match=r"x_scale must be 1\.175e-38 to 3\.403e\+38, got"):
        to_fp8(torch.ones(16, 16), scale)


def test_fp8_product_of_fp16_tokens_is_rounded_once() -> None:
    x = torch.randn(32, 256, device=DEVICE).half()
    got = fastest_gemm(x, WEIGHT, None, COPY, config=ProductConfig("fp8"))
    assert got.dtype == torch.float16
    assert not torch.equal(got, got.bfloat16().half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 33])
def test_fp8_product_with_scaling_in_its_own_launch_differs_by_one_rounding(dtype: torch.dtype, count: int) -> None:
    rows = 1040  # more than a program scales, and no multiple of it
    w = torch.randn(rows, 256, device=DEVICE).to(dtype)
    w[0] = 0  # the row whose scale both operands get
    weight, copy = pack(*quantise(w, 128)), to_fp8(w)
    x, bias = torch.randn(count, 256, device=DEVICE).to(dtype), torch.randn(rows, device=DEVICE).to(dtype)
    x[1:2] *= 1000
    x[5:6] = float("nan")
    want = fastest_gemm(x, weight, bias, copy, config=ProductConfig("fp8"))
    got = fastest_gemm(x, weight, bias, copy, config=ProductConfig("fp8_scaled"))
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6, equal_nan=True)
    assert got.dtype == dtype
    assert got.isnan().sum() == (rows if count > 5 else 0)


@pytest.mark.parametrize(("product", "copy", "message"), [
    ("fp8_scaled", None, "with the weight in fp8"), ("fp4", COPY, "product='fp4'"),
    ("fp8", COPY._replace(q=COPY.q[:32]), "fp8_weight.q must"),
    ("fp8", COPY._replace(scale=COPY.scale.half()), "fp8_weight.scale must"), ("fp8", STATIC, "static with a scale of x"),
    ("fp8_static", COPY, "static with a scale of x"), ("fp8_static", STATIC._replace(scale=COPY.scale), "fp8_weight.scale must"),
    ("fp8_static", STATIC._replace(x_scale=torch.ones(2, device=DEVICE)), "fp8_weight.x_scale must"),
])  # fmt: skip
def test_fastest_gemm_without_the_weight_of_its_product_raises(product: str, copy: Fp8Weight | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fastest_gemm(tokens_of(2), WEIGHT, None, copy, config=ProductConfig(product))


@pytest.mark.parametrize("name", [variant.name for variant in OP.variants])
@pytest.mark.parametrize(("dtype", "copy"), [("float16", True), ("bfloat16", True), ("bfloat16", "static")])
def test_check_of_every_variant_passes_and_of_a_wrong_row_fails(name: str, dtype: str, copy: Option) -> None:
    case = dataclasses.replace(case_of(40, 64, 256, copy), dtype=dtype)
    variant = OP.variant(name)
    checker = Checker(OP, case, DEVICE)
    configs: list[Any] = list(variant.configs(case)) if variant.config else [None]
    for config in configs:
        outputs, errors = checker.run(variant, config)
        assert errors == []
        outputs["y"][3] = outputs["y"][4]
        assert checker.disagreements(outputs)
