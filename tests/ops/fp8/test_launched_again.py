"""Casts whose kernels are launched again: the bytes of the first launch, whatever the addresses and amounts are."""

import pytest
import torch

from kerneltune.ops import fp8


def bytes_of(x: torch.Tensor) -> list[torch.Tensor]:
    cast = fp8.fp8_tensorwise_2d(x, layout="both", inverse=True)
    assert cast.q is not None
    assert cast.q_t is not None
    return [cast.q.view(torch.uint8), cast.q_t.t().contiguous().view(torch.uint8), cast.scale]


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "K"), [(300, 66), (1000, 72), (512, 1024)])
def test_casts_relaunched_have_the_bytes_of_the_formula(M: int, K: int) -> None:
    for factor in (1.0, 37.0, 2.0**-20):
        x = torch.randn(M, K, device="cuda").mul_(factor).bfloat16()
        scale = torch.exp2(torch.floor(torch.log2(448 / x.float().abs().max())))
        q = (x.float() * scale).to(torch.float8_e4m3fn).view(torch.uint8)
        for _ in range(3):
            got = bytes_of(x)
            assert torch.equal(got[0], q)
            assert torch.equal(got[1], q.t())
            assert torch.equal(got[2], 1 / scale.view(1))


@pytest.mark.gpu
def test_casts_relaunched_at_other_addresses_have_the_same_bytes() -> None:
    x = torch.randn(512, 256, device="cuda").bfloat16()
    shifted = torch.empty(512 * 256 + 8, dtype=torch.bfloat16, device="cuda")[1 : 1 + 512 * 256].view(512, 256).copy_(x)
    want = bytes_of(x)
    for tensor in (x, shifted, x.clone(), shifted):
        for got, expected in zip(bytes_of(tensor), want, strict=True):
            assert torch.equal(got, expected)
