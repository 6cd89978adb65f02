"""The layer of expert weights: its kept fp8 stays in place and never goes stale, through all changes of weight and layer."""

import copy
import io
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from asserting import every
from torch.utils.checkpoint import checkpoint

from kerneltune import cache, device
from kerneltune.compat import preserved_versions, sleep_on_gpu
from kerneltune.nn import GroupedLinear, Recipe, fp8_grouped_mm, set_first_microbatch, update_scales
from kerneltune.ops.fp8_grouped_gemm import gemm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = ["tensorwise", "rowwise"]
E, K, N, M = 2, 32, 16, 32


def layer(recipe: str | Recipe | None = "tensorwise") -> GroupedLinear:
    return GroupedLinear(E, K, N, recipe=recipe, device=DEVICE, dtype=torch.bfloat16)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(M, K, device=DEVICE).bfloat16(), torch.tensor([16, M], dtype=torch.int32, device=DEVICE)


def fresh(module: GroupedLinear, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Return the product with a fresh cast of the weight."""
    assert module.recipe is not None
    return fp8_grouped_mm(x, module.weight.transpose(1, 2), offs, recipe=module.recipe)


def addresses(module: GroupedLinear) -> list[int]:
    assert module.kept.held is not None
    return [t.data_ptr() for t in module.kept.held]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets a name with each cast of weights, in place or into new tensors."""
    casts: list[str] = []
    for name in ("cast_weights", "write_weights"):
        cast = getattr(Recipe, name)
        monkeypatch.setattr(
            Recipe, name, lambda *args, name=name, cast=cast, **options: casts.append(name) or cast(*args, **options)
        )
    return casts


def change(module: GroupedLinear) -> None:
    with torch.no_grad():
        module.weight.mul_(-2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_linear_casts_its_weight_once_for_all_microbatches(recipe: str) -> None:
    module, (x, offs) = layer(recipe), batch()
    want = fresh(module, x, offs)
    assert torch.equal(module(x, offs), want)
    assert module.kept.nbytes == 0
    assert torch.equal(module(x, offs, is_first_microbatch=True), want)
    scales = 4 * E if recipe == "tensorwise" else 4 * E * (K + N)
    assert module.kept.nbytes == 2 * E * K * N + scales
    kept = addresses(module)
    module.weight.data = module.weight.data.clone()  # elsewhere, but of the same values
    assert torch.equal(module(x, offs, is_first_microbatch=False), want)
    change(module)
    assert torch.equal(module(x, offs, is_first_microbatch=True), fresh(module, x, offs))
    assert addresses(module) == kept


@pytest.mark.parametrize("recipe", [*RECIPES, "delayed"])
def test_grouped_linear_with_a_column_major_weight_has_the_same_results(recipe: str) -> None:
    module, (x, offs) = layer(recipe), batch()
    x.requires_grad_()
    dy = torch.randn(M, N, device=DEVICE).bfloat16()
    module.weight = torch.nn.Parameter(module.weight.detach().mT.contiguous().mT)
    for _ in range(2 if recipe == "delayed" else 1):
        y = module(x, offs)
        want = y, *torch.autograd.grad(y, (x, module.weight), dy)
        module(x, offs, is_first_microbatch=True)
        y = module(x, offs, is_first_microbatch=True)  # in the same place
        for got, exact in zip((y, *torch.autograd.grad(y, (x, module.weight), dy)), want, strict=True):
            assert torch.equal(got, exact)
        update_scales(module)


def test_grouped_linear_in_a_later_microbatch_does_not_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    casts = counted(monkeypatch)
    module, (x, offs) = layer(), batch()
    for first, so_far in ((True, 1), (False, 1), (False, 1), (True, 2), (None, 3), (False, 3)):
        module(x, offs, is_first_microbatch=first)
        assert len(casts) == so_far


@pytest.mark.parametrize("first", [None, True])
def test_grouped_linear_expects_the_last_largest_magnitude_in_its_next_cast(first: bool | None) -> None:
    module, (x, offs) = layer(), batch()
    x.requires_grad_()
    for _ in range(2):
        want = fresh(module, x, offs)
        assert torch.equal(module(x, offs, is_first_microbatch=first), want)
        assert torch.equal(module.kept.amax, module.weight.detach().abs().amax((1, 2)).float())
        with torch.no_grad():
            module.weight *= 3
    assert set(module.state_dict()) == {"weight"}
    assert module.kept.amax.any()
    assert not copy.deepcopy(module).half().kept.amax.any()
    assert module.kept.amax.dtype == torch.float32
    elsewhere = GroupedLinear(E, K, N, device="meta", dtype=torch.bfloat16)
    elsewhere.load_state_dict(module.state_dict(), assign=True)
    assert torch.equal(elsewhere(x, offs, is_first_microbatch=first), fresh(module, x, offs))


def test_set_first_microbatch_serves_layers_unless_the_argument_is_given() -> None:
    module, (x, offs) = layer(), batch()
    before = module(x, offs)
    for is_first in (True, False):
        assert set_first_microbatch(module, is_first) == 1
        assert torch.equal(module(x, offs), before)
    change(module)
    assert torch.equal(module(x, offs), before)
    assert torch.equal(module(x, offs, is_first_microbatch=False), fresh(module, x, offs))
    set_first_microbatch(module, None)
    assert module.kept.held is None
    assert torch.equal(module(x, offs), fresh(module, x, offs))


def test_set_first_microbatch_casts_in_place_and_a_backward_of_older_bytes_raises() -> None:
    module, (x, offs) = layer(), batch()
    x.requires_grad_()
    set_first_microbatch(module, True)
    late = module(x, offs)
    kept = addresses(module)
    change(module)
    assert torch.equal(module(x, offs), fresh(module, x, offs))
    assert addresses(module) == kept
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.sum().backward()


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_through_kept_weights_equal_those_of_fresh_casts(recipe: str) -> None:
    module, (x, offs) = layer(recipe), batch()
    x.requires_grad_()
    dy = torch.randn(M, N, device=DEVICE).bfloat16()
    want = torch.autograd.grad(module(x, offs), (x, module.weight), dy)
    for first in (True, False):
        gradients = torch.autograd.grad(module(x, offs, is_first_microbatch=first), (x, module.weight), dy)
        assert every(torch.equal(got, expected) for got, expected in zip(gradients, want, strict=True))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_grouped_linear_after_an_optimizer_step_casts_again(optimizer: type[torch.optim.Optimizer]) -> None:
    module, (x, offs) = layer(), batch()
    steps = optimizer(module.parameters(), lr=0.5)
    before = module(x, offs, is_first_microbatch=True)
    before.float().square().sum().backward()
    kept = addresses(module)
    steps.step()
    after = module(x, offs, is_first_microbatch=False)
    assert torch.equal(after, fresh(module, x, offs))
    assert not torch.equal(after, before)
    assert addresses(module) == kept


def test_grouped_linear_after_a_step_without_a_new_version_casts_again() -> None:
    """Under FSDP the optimizer has the shards: the gathered weight has no new version."""
    module, (x, offs) = layer(), batch()
    steps = torch.optim.SGD(module.parameters(), lr=0.5)
    before = module(x, offs, is_first_microbatch=True)
    before.float().square().sum().backward()
    kept = addresses(module)
    with preserved_versions(module.weight):
        steps.step()
    after = module(x, offs, is_first_microbatch=False)
    assert torch.equal(after, fresh(module, x, offs))
    assert not torch.equal(after, before)
    assert addresses(module) == kept


def test_grouped_linear_after_a_step_of_other_weights_keeps_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    casts = counted(monkeypatch)
    module, (x, offs) = layer(), batch()
    other = torch.ones(1, requires_grad=True)
    other.sum().backward()
    for trains in (True, False):
        module.weight.requires_grad_(trains)
        x.requires_grad_()
        y = module(x, offs, is_first_microbatch=True)
        torch.optim.SGD([other], lr=0.5).step()
        before = len(casts)
        module(x, offs, is_first_microbatch=False)
        assert len(casts) == before + trains  # a frozen weight is none that an optimiser changes
        y.sum().backward()


def test_grouped_linear_backward_after_the_weight_has_changed_raises() -> None:
    module, (x, offs) = layer(), batch()
    x.requires_grad_()
    late = module(x, offs, is_first_microbatch=True)
    change(module)
    module(x, offs, is_first_microbatch=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.float().square().sum().backward()


def test_grouped_linear_backward_after_a_cast_of_the_same_weight_works() -> None:
    module, (x, offs) = layer(), batch()
    x.requires_grad_()
    dy = torch.randn(M, N, device=DEVICE).bfloat16()
    late = module(x, offs, is_first_microbatch=True)
    module(x, offs, is_first_microbatch=True)
    (got,), (want,) = (torch.autograd.grad(y, x, dy) for y in (late, module(x, offs)))
    assert torch.equal(got, want)


def test_grouped_linear_after_a_failed_cast_casts_in_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    module, (x, offs) = layer(), batch()
    module(x, offs, is_first_microbatch=True)
    change(module)
    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(Recipe, "write_weights", fail)
        module(x, offs, is_first_microbatch=False)
    assert torch.equal(module(x, offs, is_first_microbatch=False), fresh(module, x, offs))


def test_grouped_linear_state_is_its_weight_and_a_loaded_weight_is_cast_again() -> None:
    module, other, (x, offs) = layer(), layer(), batch()
    module(x, offs, is_first_microbatch=True)
    other(x, offs, is_first_microbatch=True)
    assert list(module.state_dict()) == ["weight"]
    for assign in (False, True):
        change(other)
        module.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
        assert torch.equal(module(x, offs, is_first_microbatch=False), fresh(other, x, offs))


def test_grouped_linear_with_a_new_parameter_casts_again() -> None:
    module, (x, offs) = layer(), batch()
    module(x, offs, is_first_microbatch=True)
    values = -3 * module.weight.detach().cpu()
    del module.weight  # the next one may get its memory
    module.weight = torch.nn.Parameter(values.to(DEVICE))
    assert torch.equal(module(x, offs, is_first_microbatch=False), fresh(module, x, offs))


def test_grouped_linear_moved_or_cast_releases_kept_weights() -> None:
    module, (x, offs) = layer(), batch()
    module(x, offs, is_first_microbatch=True)
    module.float()
    assert module.kept.nbytes == 0
    y = module(x.float(), offs, is_first_microbatch=False)
    assert y.dtype == torch.float32
    assert torch.equal(y, fresh(module, x.float(), offs))
    assert module.to("meta").kept.nbytes == 0


def test_grouped_linear_copies_keep_weights_of_their_own() -> None:
    module, (x, offs) = layer(), batch()
    module(x, offs, is_first_microbatch=True)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert other.kept.nbytes == 0
        change(other)
        assert torch.equal(other(x, offs, is_first_microbatch=False), fresh(other, x, offs))
        assert torch.equal(module(x, offs, is_first_microbatch=False), fresh(module, x, offs))


@pytest.mark.parametrize("recipe", [*RECIPES, "delayed"])
def test_grouped_linear_cast_in_evaluation_serves_training(recipe: str) -> None:
    module, (x, offs) = layer(recipe), batch()
    with torch.inference_mode():
        want = module(x, offs, is_first_microbatch=True)
    for first in (False, True):
        y = module(x, offs, is_first_microbatch=first)
        y.float().sum().backward()
        assert torch.equal(y, want)
    with torch.inference_mode():
        assert torch.equal(module(x, offs, is_first_microbatch=False), want)


def test_grouped_linear_made_under_inference_mode_gives_the_same_results() -> None:
    with torch.inference_mode():
        module, (x, offs) = layer(), batch()
        for first in (True, False, None):
            assert torch.equal(module(x, offs, is_first_microbatch=first), fresh(module, x, offs))


def test_grouped_linears_that_share_a_weight_add_their_gradients() -> None:
    module, twin, (x, offs) = layer(), layer(), batch()
    twin.weight = module.weight
    for one in (module, twin):
        one(x, offs, is_first_microbatch=True)
    change(module)
    for one in (module, twin):
        assert torch.equal(one(x, offs, is_first_microbatch=False), fresh(module, x, offs))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_grouped_linear_under_activation_checkpointing_has_the_same_gradients(first: bool, reentrant: bool) -> None:
    module, (x, offs) = layer(), batch()
    x.requires_grad_()
    dy = torch.randn(M, N, device=DEVICE).bfloat16()
    other = module(x, offs, is_first_microbatch=True)  # another microbatch, whose backward comes last
    y = checkpoint(lambda x: module(x, offs, is_first_microbatch=first), x, use_reentrant=reentrant)
    want = torch.autograd.grad(module(x, offs), (x, module.weight), dy)
    y.backward(dy)
    assert torch.equal(x.grad, want[0])
    assert torch.equal(module.weight.grad, want[1])
    assert torch.equal(torch.autograd.grad(other, x, dy)[0], want[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_linear_with_skip_update_keeps_the_cast_weights(recipe: str) -> None:
    module, (x, offs) = layer(recipe), batch()
    skip = torch.ones(1, device=DEVICE)
    old = module(x, offs, is_first_microbatch=True, skip_update=skip)  # the first call casts anyway
    assert torch.equal(old, fresh(module, x, offs))
    change(module)
    for _ in range(2):
        assert torch.equal(module(x, offs, is_first_microbatch=False, skip_update=skip), old)
    skip.zero_()
    assert torch.equal(module(x, offs, is_first_microbatch=False, skip_update=skip), fresh(module, x, offs))


def test_grouped_linear_after_skip_update_casts_again_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (x, offs) = layer(), batch()
    skip = torch.ones(1, device=DEVICE)
    module(x, offs, is_first_microbatch=True)
    change(module)
    late = module(x.detach().requires_grad_(), offs, is_first_microbatch=False, skip_update=skip)
    want = fresh(module, x, offs)
    assert torch.equal(module(x, offs, is_first_microbatch=False), want)
    assert not torch.equal(late, want)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.sum().backward()
    monkeypatch.setattr(module.kept, "_write", lambda *_: pytest.fail("cast again"))
    assert torch.equal(module(x, offs, is_first_microbatch=False), want)


def test_grouped_linear_backward_after_skip_update_works() -> None:
    module, (x, offs) = layer(), batch()
    skip, dy = torch.ones(1, device=DEVICE), torch.randn(M, N, device=DEVICE).bfloat16()
    module(x, offs, is_first_microbatch=True)
    change(module)
    x.requires_grad_()
    late, other = (module(x, offs, is_first_microbatch=False, skip_update=skip) for _ in range(2))
    (got,), (want,) = (torch.autograd.grad(y, x, dy) for y in (late, other))
    assert torch.equal(got, want)


def test_grouped_linear_with_another_recipe_releases_kept_weights() -> None:
    module, (x, offs) = layer("tensorwise"), batch()
    module(x, offs, is_first_microbatch=True)
    for recipe in (Recipe("rowwise"), Recipe("rowwise", pow2=False), None):
        module.set_recipe(recipe)
        assert module.kept.nbytes == 0
        y = module(x, offs, is_first_microbatch=False)
        want = torch._grouped_mm(x, module.weight.transpose(1, 2), offs) if recipe is None else fresh(module, x, offs)
        assert torch.equal(y, want)


def test_grouped_linear_without_kept_weights_compiles_without_a_graph_break() -> None:
    torch.compiler.reset()
    module, (x, offs) = layer(), batch()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, offs), module(x, offs))
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager")
    for first in (True, False):
        assert torch.equal(compiled(x, offs, is_first_microbatch=first), module(x, offs))
    change(module)
    assert torch.equal(compiled(x, offs, is_first_microbatch=False), fresh(module, x, offs))


def test_grouped_linear_with_bad_arguments_raises() -> None:
    module, (x, offs) = layer(), batch()
    assert "2, 32, 16, recipe=Recipe(scaling='tensorwise'" in repr(module)
    for sizes in ((0, 32, 16), (2, 24, 16), (2, 32, 0)):
        with pytest.raises(ValueError, match=f"num_experts={sizes[0]} in_features={sizes[1]} out_features={sizes[2]}"):
            GroupedLinear(*sizes)
    with pytest.raises(ValueError, match="one of tensorwise, rowwise, delayed or a Recipe, got 'fp4'"):
        GroupedLinear(2, 32, 16, recipe="fp4")
    with pytest.raises(ValueError, match="True or False, got None"):
        module(x, offs, skip_update=torch.ones(1, device=DEVICE))
    with pytest.raises(ValueError, match=r"one number on .*, got \(2,\) on"):
        module(x, offs, is_first_microbatch=True, skip_update=torch.ones(2, device=DEVICE))
    with pytest.raises(ValueError, match=r"one number on .*, got True"):
        module(x, offs, is_first_microbatch=True, skip_update=True)
    for first in (None, True):
        with pytest.raises(ValueError, match="one device, got meta"):
            module(x.to("meta"), offs, is_first_microbatch=first)
    assert module.kept.nbytes == 0  # nothing was cast
    module.weight = torch.nn.Parameter(torch.empty(E, N, 2 * K, device=DEVICE, dtype=torch.bfloat16)[..., ::2])
    with pytest.raises(ValueError, match=r"B_t must be column-major, .* got \(1024, 2, 64\)"):
        module(x, offs, is_first_microbatch=True)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_linear_graph_serves_first_and_later_microbatches(recipe: str) -> None:
    module, (x, offs) = layer(recipe), batch()
    skip = torch.zeros(1, device=DEVICE)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        module(x, offs, is_first_microbatch=True, skip_update=skip).float().sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x, offs, is_first_microbatch=False, skip_update=skip)
    graph.replay()
    assert torch.equal(y, fresh(module, x, offs))
    old = fresh(module, x, offs)
    change(module)
    skip.fill_(1)
    graph.replay()
    assert torch.equal(y, old)
    skip.zero_()
    graph.replay()
    assert torch.equal(y, fresh(module, x, offs))


@pytest.mark.gpu
@torch.no_grad()
def test_grouped_linear_on_two_streams_orders_casts_and_reads() -> None:
    module, (x, offs) = layer(), batch()
    module(x, offs, is_first_microbatch=True)
    change(module)
    want = fresh(module, x, offs)
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(writer):
        sleep_on_gpu(100_000_000)
        module(x, offs, is_first_microbatch=True)
    with torch.cuda.stream(reader):
        read = module(x, offs, is_first_microbatch=False)
        sleep_on_gpu(100_000_000)
        late = module(x, offs, is_first_microbatch=False)
    torch.cuda.current_stream().wait_stream(writer)  # who changes a weight waits for its casts
    change(module)
    writer.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(writer):
        module(x, offs, is_first_microbatch=True)
    torch.cuda.synchronize()
    assert torch.equal(read, want)
    assert torch.equal(late, want)
    assert torch.equal(module(x, offs, is_first_microbatch=False), fresh(module, x, offs))


def test_grouped_linear_uses_a_newly_stored_config_in_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELTUNE_CONFIGS", str(tmp_path))
    used: list[gemm.GemmConfig] = []
    multiply = gemm.multiply_groups
    monkeypatch.setattr(gemm, "multiply_groups", lambda *args: used.append(args[-1]) or multiply(*args))
    module = GroupedLinear(2, 64, 48, device=DEVICE, dtype=torch.bfloat16)
    x, offs = torch.randn(64, 64, device=DEVICE).bfloat16(), torch.tensor([32, 64], dtype=torch.int32, device=DEVICE)
    want = module(x, offs)
    config = gemm.GemmConfig("triton", 64, 128, 128, warps=4, stages=3, ctas=2, band=1, run=1, parts=1)
    entry = {
        "variant": "optimized", "case": "mine", "dtype": "bfloat16", "quant": "fp8", "policy": "cold", "config": asdict(config),
        "evidence": {}, "axes": {"M": 64, "N": 48, "K": 64, "E": 2},
        "options": {"product": "rows", "scales": "rowwise", "groups": "balanced", "values": "normal"},
    }  # fmt: skip
    assert used[0] != config
    cache.store(device.current_slug(), cache.entry_from("fp8_grouped_gemm", entry))
    assert torch.equal(module(x, offs), want)
    assert used[1] == config


def test_grouped_linear_without_recipe_has_gradients_and_checks_offs() -> None:
    layer, x = GroupedLinear(2, 32, 16, recipe=None), torch.randn(16, 32, requires_grad=True)
    y = layer(x, torch.tensor([6, 16], dtype=torch.int32))
    y.sum().backward()
    wanted = torch.cat([layer.weight[0].sum(0).expand(6, 32), layer.weight[1].sum(0).expand(10, 32)])
    assert x.grad is not None
    assert torch.allclose(x.grad, wanted, atol=1e-5)
    y.add_(1)
    for ends in ([16, 6], [6, 20]):
        with pytest.raises(ValueError, match="offs decrease or exceed M"):
            layer(x, torch.tensor(ends, dtype=torch.int32))
