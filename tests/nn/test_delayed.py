"""Delayed scaling: signal to noise, what scales are made of, state, the workspace under its flag, bad arguments."""

import copy

import pytest
import torch
from asserting import every
from torch.utils.checkpoint import checkpoint
from training_step import expected, sqnr_db

from kerneltune.kernel_lib.groups import aligned_size
from kerneltune.nn import DelayedScaling, GroupedLinear, convert_to_fp8_training, fp8_grouped_mm, update_scales

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E, K, N, M = 2, 32, 16, 32
FP8_MAX = 448.0


def layer(recipe: str | DelayedScaling = "delayed") -> GroupedLinear:
    return GroupedLinear(E, K, N, recipe=recipe, device=DEVICE, dtype=torch.bfloat16)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, offs and dY."""
    x = torch.randn(M, K, device=DEVICE).bfloat16().requires_grad_()
    return x, torch.tensor([16, M], dtype=torch.int32, device=DEVICE), torch.randn(M, N, device=DEVICE).bfloat16()


def step(module: GroupedLinear, x: torch.Tensor, offs: torch.Tensor, dy: torch.Tensor, **options) -> tuple[torch.Tensor, ...]:
    y = module(x, offs, **options)
    return y.detach(), *torch.autograd.grad(y, (x, module.weight), dy)


def scaling_of(module: GroupedLinear) -> DelayedScaling:
    assert module.delayed is not None
    return module.delayed


def test_delayed_products_have_26_db_before_and_after_the_first_update() -> None:
    module, (x, offs, dy) = layer(), batch()
    want = expected(x, module.weight, offs.tolist(), dy)
    for updates in range(3):
        for name, got, exact in zip(("Y", "dA", "dW"), step(module, x, offs, dy), want, strict=True):
            assert got.dtype == torch.bfloat16, (name, updates)
            assert sqnr_db(got, exact) >= 26, (name, updates)
        assert update_scales(module) == 1


@pytest.mark.parametrize("ends", [[5, M], [1, 3]], ids=["ragged", "short"])
def test_delayed_products_of_uneven_groups_have_26_db(ends: list[int]) -> None:
    module = layer(DelayedScaling(E, device=DEVICE))
    x, dy = (torch.randn(ends[-1], width, device=DEVICE).bfloat16() for width in (K, N))
    x.requires_grad_()
    offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        for got, exact in zip(step(module, x, offs, dy), expected(x, module.weight, ends, dy), strict=True):
            assert sqnr_db(got, exact) >= 26
        update_scales(module)
    assert scaling_of(module).known


@pytest.mark.parametrize("zeros", ["x", "dy", "weight", "one expert"])
def test_delayed_products_of_an_operand_that_was_0_are_right_after_updates(zeros: str) -> None:
    """Gradients behind an output projection that starts from zeros are zeros."""
    module, (x, offs, dy) = layer(), batch()
    weight = module.weight.detach()
    filled = {"x": x.detach(), "dy": dy, "weight": weight, "one expert": weight[1]}[zeros]
    values = filled * 1e-3
    filled.zero_()
    for _ in range(2):
        results = step(module, x, offs, dy)
        assert every(got.isfinite().all() for got in results)
        assert not results[zeros == "dy"][16:].any()
        update_scales(module)
        assert not scaling_of(module).known
    filled.copy_(values)
    for is_known in (False, True):
        assert scaling_of(module).known == is_known
        want = expected(x, module.weight, offs.tolist(), dy)
        for name, got, exact in zip(("Y", "dA", "dW"), step(module, x, offs, dy), want, strict=True):
            assert sqnr_db(got, exact) >= 26, (name, is_known)
        update_scales(module)


def test_update_scales_uses_the_largest_magnitudes_of_the_history() -> None:
    module, (x, offs, dy) = layer(DelayedScaling(E, history=2, device=DEVICE)), batch()
    scaling = scaling_of(module)
    seen = torch.stack([x.abs().max(), dy.abs().max(), *module.weight.abs().amax((1, 2))]).float()
    step(module, x, offs, dy)
    scaling.update()
    torch.testing.assert_close(scaling.scales, FP8_MAX / seen, rtol=1e-5, atol=0)  # of fresh casts, which tell their scale
    for factor, kept in ((4, 4), (0.25, 4), (0.25, 0.25)):
        step(module, (x * factor).detach().requires_grad_(), offs, dy * factor)
        with torch.no_grad():
            assert torch.equal(scaling.history[0, :2], seen[:2] * factor)
        scaling.update()
        assert torch.equal(scaling.scales[:2], FP8_MAX / (seen[:2] * kept))


def test_update_scales_keeps_scales_of_nan_infinite_or_zero_magnitudes() -> None:
    scaling = DelayedScaling(1, history=1, device=DEVICE)

    def update(rows: float, grads: float, weights: float) -> list[float]:
        for is_gradient, value in ((False, rows), (True, grads)):
            offs = torch.tensor([16], dtype=torch.int32, device=DEVICE)
            scaling.cast_rows(torch.full((16, 16), value, dtype=torch.float32, device=DEVICE), offs, is_gradient=is_gradient)
        scaling.cast_weights(torch.full((1, 16, 16), weights, dtype=torch.float32, device=DEVICE))
        scaling.update()
        assert not scaling.history.any()
        return scaling.scales.tolist()

    assert update(0, 2, 4) == pytest.approx([1, 224, 112])
    assert not scaling.known
    assert update(1, 0, 8) == pytest.approx([448, 224, 56])
    assert not scaling.known
    assert update(1, 2, 4) == pytest.approx([448, 224, 112])
    assert scaling.known
    assert update(0, torch.inf, 8) == pytest.approx([448, 224, 56])
    assert scaling.known
    least = [FP8_MAX / 1e-12, FP8_MAX / 1e-12, 448]
    assert update(1e-37, 1e-14, 1) == pytest.approx(least)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_delayed_scales_stay_fp32_when_the_layer_is_cast(dtype: torch.dtype) -> None:
    module, (x, offs, dy) = GroupedLinear(E, K, N, recipe="delayed", device=DEVICE), batch()
    scaling = scaling_of(module)
    for _ in range(2):
        step(module, x, offs, dy)
        before = scaling.scales.clone(), scaling.history.clone()
        module.to(dtype)
        assert module.weight.dtype == dtype
        assert scaling.scales.dtype == scaling.history.dtype == torch.float32
        assert torch.equal(scaling.scales, before[0])
        assert torch.equal(scaling.history, before[1])
        update_scales(module)
    step(module, x, offs, dy)
    assert module.to("meta").delayed.scales.is_meta


def test_delayed_scaling_after_to_empty_is_reset() -> None:
    module, (x, offs, dy) = layer(), batch()
    step(module, x, offs, dy)
    update_scales(module)
    scaling = scaling_of(module.to_empty(device=DEVICE))
    scaling.reset_parameters()
    assert not scaling.known
    assert not scaling.history.any()
    assert scaling.scales.tolist() == [1] * (2 + E)
    scaling = DelayedScaling(E, device="meta")
    scaling.update()  # as where kernels are compiled ahead: waits for nothing
    assert scaling.known


def test_delayed_state_is_saved_and_copied() -> None:
    module, other, (x, offs, dy) = layer(), layer(), batch()
    step(module, x, offs, dy)
    update_scales(module)
    step(module, x, offs, dy)
    state = module.state_dict()
    assert {name: type(value) for name, value in state.items()} == dict.fromkeys(state, torch.Tensor)
    other.load_state_dict(state)
    for same in (other, copy.deepcopy(module)):
        for got, want in zip(step(same, x, offs, dy), step(module, x, offs, dy), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("updates", [0, 1])
def test_delayed_layer_with_kept_weights_obeys_skip_update(updates: int) -> None:
    module, (x, offs, dy) = layer(), batch()
    step(module, x, offs, dy)
    for _ in range(updates):
        update_scales(module)
    plain = step(module, x, offs, dy)
    for first in (True, False):
        for got, want in zip(step(module, x, offs, dy, is_first_microbatch=first), plain, strict=True):
            assert torch.equal(got, want)
    assert module.kept.held is not None
    kept = [t.data_ptr() for t in module.kept.held]
    with torch.no_grad():
        module.weight.mul_(-0.5)
    changed = module(x, offs)
    skip = torch.ones(1, device=DEVICE)
    assert torch.equal(module(x, offs, is_first_microbatch=False, skip_update=skip), plain[0])
    assert torch.equal(module(x, offs, is_first_microbatch=False), changed)
    with torch.no_grad():
        module.weight.mul_(-1)
    assert torch.equal(module(x, offs, is_first_microbatch=False, skip_update=skip), changed)
    changed = module(x, offs)
    skip.zero_()
    assert torch.equal(module(x, offs, is_first_microbatch=False, skip_update=skip), changed)
    assert [t.data_ptr() for t in module.kept.held] == kept


@pytest.mark.parametrize("reentrant", [True, False])
def test_delayed_layer_under_activation_checkpointing_has_the_same_gradients(reentrant: bool) -> None:
    module, (x, offs, dy) = layer(), batch()
    for _ in range(2):
        y, da, dw = step(module, x, offs, dy)
        again = checkpoint(module, x, offs, use_reentrant=reentrant)
        again.backward(dy)
        for got, want in ((again, y), (x.grad, da), (module.weight.grad, dw)):
            assert torch.equal(got, want)
        x.grad = module.weight.grad = None
        update_scales(module)


def test_delayed_layer_compiled_has_the_same_results() -> None:
    torch.compiler.reset()
    module, (x, offs, dy) = layer(), batch()
    compiled = torch.compile(module, backend="aot_eager")
    for _ in range(2):
        for got, want in zip(step(compiled, x, offs, dy), step(module, x, offs, dy), strict=True):
            assert torch.equal(got, want)
        update_scales(module)


def test_delayed_gradient_of_one_operand_alone_is_the_same() -> None:
    module, (x, offs, dy) = layer(), batch()
    for _ in range(2):
        y, *grads = step(module, x, offs, dy)
        for leaf, want in zip((x, module.weight), grads, strict=True):
            other = module.weight if leaf is x else x
            other.requires_grad_(False)
            kept: list[torch.Size] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t):
                alone = module(x, offs)
            assert torch.equal(alone, y)
            assert torch.equal(torch.autograd.grad(alone, leaf, dy)[0], want)
            assert ((aligned_size(M, E), K) in kept, (E, N, K) in kept) == (leaf is not x, leaf is x)
            other.requires_grad_()
        update_scales(module)


@pytest.mark.parametrize("updates", [0, 1])
def test_delayed_weights_of_either_memory_order_give_the_same(updates: int) -> None:
    module, (x, offs, dy) = layer(), batch()
    scaling = scaling_of(module)
    for _ in range(updates):
        step(module, x, offs, dy)
        scaling.update()
    b_t = module.weight.detach().mT
    results = []
    for b in (b_t, b_t.contiguous()):
        b.requires_grad_()
        y = fp8_grouped_mm(x, b, offs, recipe=scaling)
        results.append((y, *torch.autograd.grad(y, (x, b), dy)))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_delayed_layer_without_rows_has_zero_gradients() -> None:
    """`contiguous` keeps the strides of 0 of a gradient that was a number, as that of a sum is."""
    module = layer()
    x = torch.empty(0, K, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        dx, dw = torch.autograd.grad(module(x, torch.zeros(E, dtype=torch.int32, device=DEVICE)).sum(), (x, module.weight))
        assert dx.shape == x.shape
        assert dw.shape == module.weight.shape
        assert not dw.any()
        step(module, *batch())
        update_scales(module)


def test_delayed_backward_after_the_weight_has_changed_raises() -> None:
    module, (x, offs, dy) = layer(), batch()
    step(module, x, offs, dy)
    update_scales(module)
    late = module(x, offs, is_first_microbatch=True)
    with torch.no_grad():
        module.weight.mul_(-0.5)
    module(x, offs, is_first_microbatch=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward(dy)


def test_convert_to_delayed_adds_scales_per_expert() -> None:
    module = layer("rowwise")
    assert convert_to_fp8_training(module, "delayed") == [""]
    assert scaling_of(module).num_experts == E
    assert repr(module).splitlines()[0] == "GroupedLinear("
    assert "recipe=delayed" in repr(module)
    assert "LayerScaling(2, history=16)" in repr(module)
    convert_to_fp8_training(module, "tensorwise")
    assert module.delayed is None
    with pytest.raises(ValueError, match="Bilinear has no expert weights"):
        convert_to_fp8_training(torch.nn.Bilinear(N, K, E, device=DEVICE), "delayed")


def test_delayed_layer_with_bad_arguments_raises() -> None:
    with pytest.raises(ValueError, match="num_experts=0 history=16"):
        DelayedScaling(0)
    module, (x, offs, _) = layer(), batch()
    with pytest.raises(ValueError, match="recipe must scale 2 experts, got 3"):
        fp8_grouped_mm(x, module.weight.transpose(1, 2), offs, recipe=DelayedScaling(3, device=DEVICE))
    with pytest.raises(ValueError, match=r"recipe must be on .* as A is, got meta"):
        fp8_grouped_mm(x, module.weight.transpose(1, 2), offs, recipe=DelayedScaling(E, device="meta"))
    kept = module.recipe
    with pytest.raises(ValueError, match="recipe must scale 2 experts, got 3"):
        module.set_recipe(DelayedScaling(3, device=DEVICE))
    assert module.recipe is kept


@pytest.mark.gpu
def test_delayed_step_launches_the_expected_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
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
