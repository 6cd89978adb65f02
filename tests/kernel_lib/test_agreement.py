"""When two tensors agree."""

import re
from collections.abc import Callable

import pytest
import torch

from kerneltune.kernel_lib.agreement import all_same_bits, close, rowwise, same_bits, tensorwise, within_a_step
from kerneltune.kernel_lib.check_values import draw
from kerneltune.spec import Case

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("got", "want"), [(1.0, 1.0), (1.01, 1.0), (INF, INF), (-INF, -INF), (NAN, NAN)])
def test_close_of_values_within_the_tolerance_is_empty(got: float, want: float) -> None:
    assert close("y", torch.tensor([got]), torch.tensor([want]), 2e-2, 0.0) == []


@pytest.mark.parametrize(("got", "want"), [(1.1, 1.0), (0.0, INF), (-INF, INF), (INF, 1.0), (NAN, 1.0), (1.0, NAN), (NAN, INF)])
def test_close_of_values_beyond_the_tolerance_names_the_first(got: float, want: float) -> None:
    (line,) = close("y", torch.tensor([2.0, got]), torch.tensor([2.0, want]), 2e-2, 0.0)
    assert line.startswith("y: 1 of 2 wrong, first at (1,): ")


@pytest.mark.parametrize(("got", "want"), [(1.0, 1.0), (2.0, 1.875), (-2.0, -1.875), (-0.0, 2.0**-9), (NAN, -NAN)])
def test_within_a_step_of_neighbouring_values_is_empty(got: float, want: float) -> None:
    q, expected = (torch.tensor([value]).to(torch.float8_e4m3fn) for value in (got, want))
    assert within_a_step("y", q, expected) == []
    assert (same_bits("y", q, expected) == []) == (got == want or got != got)


@pytest.mark.parametrize(("got", "want"), [(1.0, 2.0), (1.0, -1.0), (448.0, NAN), (NAN, 448.0), (0.0, NAN)])
def test_within_a_step_of_values_two_steps_apart_names_the_first(got: float, want: float) -> None:
    q, expected = (torch.tensor([value]).to(torch.float8_e4m3fn) for value in (got, want))
    for compare in (within_a_step, same_bits):
        (line,) = compare("y", q, expected)
        assert line.startswith("y: 1 of 1 wrong")


E4M3 = torch.float8_e4m3fn


def truncated(x: torch.Tensor) -> torch.Tensor:
    """Cast to fp8 towards zero."""
    q = x.to(E4M3)
    above = q.float().abs() > x.abs()
    return (q.view(torch.uint8) - above.to(torch.uint8)).view(E4M3)


def test_within_a_step_finds_truncation_to_fp8_and_accepts_rounded_bf16() -> None:
    x = torch.randn(64, 256) * 10
    assert within_a_step("y", x.bfloat16().to(E4M3), x.to(E4M3)) == []
    (line,) = within_a_step("y", truncated(x), x.to(E4M3))
    all_off = r"(\d+) of the \1 elements that are off are rounded towards zero"
    assert re.fullmatch(rf"y: \d+ of 16384 are a step off, at most 10% may be: {all_off}", line)
    (line,) = within_a_step("y", truncated(x), x.to(E4M3), share=0.6)
    assert re.fullmatch(f"y: {all_off}", line)


def test_within_a_step_names_the_side_of_truncation_to_int8() -> None:
    x = torch.randn(64, 256) * 10
    (line,) = within_a_step("q", x.to(torch.int8), x.round().to(torch.int8))
    assert line.endswith(" elements that are off are rounded towards zero")


@pytest.mark.parametrize("pow2", [False, True])
def test_rowwise_and_tensorwise_compare_scales_and_values(pow2: bool) -> None:
    x = torch.randn(8, 64)
    x[3] = 0.0
    for check, amax in ((rowwise, x.abs().amax(1, keepdim=True)), (tensorwise, x.abs().amax().reshape(1, 1))):
        scale = amax / 448
        scale = torch.exp2(torch.ceil(torch.log2(scale))) if pow2 else scale
        scale[scale == 0] = 1.0
        q = (x / scale).to(E4M3)
        assert check("y", q, scale, x, pow2) == []
        assert check("y", q, scale * 1.01, x, pow2)[0].startswith("y scale: ")
        assert check("y", truncated(x / scale), scale, x, pow2)
        assert check("y", q, torch.cat([scale, scale]), x, pow2)[0].startswith(
            f"y scale: {2 * scale.numel()} elements, expected "
        )
    whole_tile = x.abs().amax().expand(8, 1) / 448
    assert rowwise("y", (x / whole_tile).to(E4M3), whole_tile, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_that_differ_in_the_last_place_are_named_with_all_digits(dtype: torch.dtype) -> None:
    want = torch.tensor([0.1], dtype=dtype)
    (line,) = close("y", want.nextafter(torch.tensor([1.0], dtype=dtype)), want, 0.0, 0.0)
    got, expected = line.removeprefix("y: 1 of 1 wrong, first at (0,): ").split(", expected ")
    assert got != expected


@pytest.mark.parametrize(("rtol", "atol", "named"), [(-1e-4, 0.0, "rtol of y: -0.0001"), (1e-4, NAN, "atol of y: nan")])
def test_close_refuses_a_tolerance_below_0(rtol: float, atol: float, named: str) -> None:
    with pytest.raises(ValueError, match=f"close: {named}: expected 0 or more"):
        close("y", torch.ones(1), torch.ones(1), rtol, atol)


def test_close_compares_64_bit_integers_exactly() -> None:
    want = torch.tensor([1 << 60, 5])
    assert same_bits("y", want, want.clone()) == close("y", want, want.clone(), 0.0, 0.0) == []
    for lines in (same_bits("y", want + 1, want), close("y", want + 1, want, 1e-2, 0.0)):
        assert lines == [f"y: 2 of 2 wrong, first at (0,): {(1 << 60) + 1}, expected {1 << 60}"]


def test_all_same_bits_names_each_wrong_output() -> None:
    expected = {"q": torch.zeros(4), "scale": torch.ones(2), "q_t": torch.zeros(3)}
    outputs = expected | {"q": torch.tensor([0.0, -0.0, 1.0, 0.0]), "scale": torch.ones(3)}
    wrong = all_same_bits(Case("", (), "float32"), {}, outputs, expected)
    assert [line.partition(":")[0] for line in wrong] == ["q", "scale"]
    assert "2 of 4 wrong" in wrong[0]


def test_draw_repeats_a_seed_within_its_bounds() -> None:
    first, again, other = (draw("random_", (1000,), torch.int32, "cpu", seed, 3, 6) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert set(first.tolist()) == {3, 4, 5}
    assert draw("normal_", (2, 0), torch.float32, "cpu", 0).shape == (2, 0)
    assert draw("normal_", (2,), torch.int8, "meta", 0).is_meta


@pytest.mark.parametrize(
    ("divide", "is_wrong"),
    [
        (lambda x, scale: x / scale.bfloat16().float(), True),
        (lambda x, scale: x * (1 / scale).bfloat16().float(), True),
        (lambda x, scale: x * (1 / scale), False),
        (lambda x, scale: (x / scale).bfloat16().float(), False),
        (lambda x, scale: x.bfloat16().float() / scale, False),
    ],
    ids=["divisor", "reciprocal", "product in fp32", "quotient in bf16", "x in bf16"],
)
def test_rowwise_finds_a_factor_of_rows_that_is_rounded_to_bf16(divide: Callable[..., torch.Tensor], is_wrong: bool) -> None:
    x = torch.randn(200, 128, generator=torch.Generator().manual_seed(0))
    scale = x.abs().amax(1) / 448
    lines = rowwise("q", divide(x, scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn), scale, x)
    assert [("to one side in" in line) for line in lines] == [True] * is_wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_close_finds_truncation_within_its_tolerance_and_no_rounded_factor(dtype: torch.dtype) -> None:
    want = torch.randn(40, 333, generator=torch.Generator().manual_seed(1))
    want[3] = float("inf")
    towards_zero = (want.view(torch.int32) & (-65536 if dtype == torch.bfloat16 else -8192)).view(torch.float32).to(dtype)
    (line,) = close("y", towards_zero, want, rtol=2e-2, atol=1e-3)
    assert line.endswith("elements that round up are truncated")
    for right in (want.to(dtype), (want * 0.998).to(dtype), (want / 3).to(torch.bfloat16).float().mul(3).to(dtype)):
        assert close("y", right, want, rtol=2e-2, atol=1e-3) == []
