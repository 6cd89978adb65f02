"""Delayed scaling: signal to noise, what scales are made of, state, the workspace under its flag, bad arguments."""

import copy

import pytest
import torch

from kerneltune.nn import DelayedScaling, GroupedLinear, convert_to_fp8_training, fp8_grouped_mm, update_scales

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E, K, N, M = 2, 32, 16, 64
FP8_MAX = 448.0


def layer(recipe: str | DelayedScaling = "delayed") -> GroupedLinear:
    return GroupedLinear(E, K, N, recipe=recipe, device=DEVICE, dtype=torch.bfloat16)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, offs and dY."""
    x = torch.randn(M, K, device=DEVICE).bfloat16().requires_grad_()
    return x, torch.tensor([16, M], dtype=torch.int32, device=DEVICE), torch.randn(M, N, device=DEVICE).bfloat16()


def step(module: GroupedLinear, x: torch.Tensor, offs: torch.Tensor, dy: torch.Tensor, **options) -> tuple[torch.Tensor, ...]:
    y = module(x, offs, **options)
    return y.detach(), *torch.autograd.grad(y, (x, module.weight), dy)


def sqnr_db(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(20 * torch.log10(want.norm() / (got.double() - want).norm()))


def scaling_of(module: GroupedLinear) -> DelayedScaling:
    assert module.delayed is not None
    return module.delayed


@pytest.mark.usefixtures("exact_casts")
def test_signal_to_noise_before_and_after_the_first_update() -> None:
    module, (x, offs, dy) = layer(), batch()
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, module.weight))
    y64 = torch.cat([x64[:16] @ w64[0].t(), x64[16:] @ w64[1].t()])
    want = y64.detach(), *torch.autograd.grad(y64, (x64, w64), dy.double())
    for updates in range(3):
        for name, got, expected in zip(("Y", "dA", "dW"), step(module, x, offs, dy), want, strict=True):
            assert got.dtype == torch.bfloat16 and sqnr_db(got, expected) >= 26, (name, updates)
        assert update_scales(module) == 1


def test_scales_are_of_the_largest_magnitudes_of_the_history() -> None:
    module, (x, offs, dy) = layer(DelayedScaling(E, history=2, device=DEVICE)), batch()
    scaling = scaling_of(module)
    seen = torch.stack([x.abs().max(), dy.abs().max(), *module.weight.abs().amax((1, 2))]).float()
    step(module, x, offs, dy)
    scaling.update()
    torch.testing.assert_close(scaling.scales, FP8_MAX / seen, rtol=1e-5, atol=0)  # of fresh casts, which tell their scale
    for factor, expected in ((4, 4), (0.25, 4), (0.25, 0.25)):
        step(module, (x * factor).detach().requires_grad_(), offs, dy * factor)
        with torch.no_grad():
            assert torch.equal(scaling.history[0, :2], seen[:2] * factor)
        scaling.update()
        assert torch.equal(scaling.scales[:2], FP8_MAX / (seen[:2] * expected))


def test_what_cannot_scale_keeps_what_there_was() -> None:
    scaling = DelayedScaling(1, history=1, device=DEVICE)
    for values in ([1.0, 2.0, 4.0], [0.0, torch.inf, 8.0]):
        scaling.history[0] = torch.tensor(values, device=DEVICE)
        scaling.update()
    assert scaling.scales.tolist() == [448, 224, 56]
    assert not scaling.history.any()


def test_state_is_saved_and_copied() -> None:
    module, other, (x, offs, dy) = layer(), layer(), batch()
    step(module, x, offs, dy)
    update_scales(module)
    step(module, x, offs, dy)
    other.load_state_dict(module.state_dict())
    for same in (other, copy.deepcopy(module)):
        for got, want in zip(step(same, x, offs, dy), step(module, x, offs, dy), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("updates", [0, 1])
def test_the_workspace_keeps_its_place_and_its_flag(updates: int) -> None:
    module, (x, offs, dy) = layer(), batch()
    step(module, x, offs, dy)
    for _ in range(updates):
        update_scales(module)
    plain = step(module, x, offs, dy)
    for first in (True, False):
        for got, want in zip(step(module, x, offs, dy, is_first_microbatch=first), plain, strict=True):
            assert torch.equal(got, want)
    assert module.workspace._cast is not None
    kept = [t.data_ptr() for t in module.workspace._cast]
    with torch.no_grad():
        module.weight.mul_(-0.5)
    changed = module(x, offs)
    skip = torch.ones(1, device=DEVICE)
    assert torch.equal(module(x, offs, is_first_microbatch=False, skip_update=skip), plain[0])
    skip.zero_()
    assert torch.equal(module(x, offs, is_first_microbatch=False, skip_update=skip), changed)
    assert [t.data_ptr() for t in module.workspace._cast] == kept


def test_a_backward_after_the_weight_has_changed_is_refused() -> None:
    module, (x, offs, dy) = layer(), batch()
    step(module, x, offs, dy)
    update_scales(module)
    late = module(x, offs, is_first_microbatch=True)
    with torch.no_grad():
        module.weight.mul_(-0.5)
    module(x, offs, is_first_microbatch=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward(dy)


def test_conversion() -> None:
    module = layer("rowwise")
    assert convert_to_fp8_training(module, "delayed") == [""] and scaling_of(module).num_experts == E
    assert repr(module).splitlines()[0] == "GroupedLinear("
    assert "recipe=delayed" in repr(module) and "DelayedScaling(2, history=16)" in repr(module)
    convert_to_fp8_training(module, "tensorwise")
    assert module.delayed is None
    foreign = torch.nn.Module()
    foreign.experts = torch.nn.Parameter(torch.zeros(E, N, K))
    with pytest.raises(ValueError, match="delayed scaling keeps state, which only GroupedLinear has"):
        convert_to_fp8_training(foreign, "delayed")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="num_experts=0 history=16"):
        DelayedScaling(0)
    module, (x, offs, _) = layer(), batch()
    with pytest.raises(ValueError, match="recipe must scale 2 experts, got 3"):
        fp8_grouped_mm(x, module.weight.transpose(1, 2), offs, recipe=DelayedScaling(3, device=DEVICE))


@pytest.mark.gpu
def test_launches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # launches of their own
    module, (x, offs, dy) = layer(), batch()
    for _ in range(2):
        step(module, x, offs, dy)
        update_scales(module)
    step(module, x, offs, dy)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(module, x, offs, dy)
        torch.cuda.synchronize()
    launched = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len([name for name in launched if "Memcpy" not in name]) <= 6, launched
