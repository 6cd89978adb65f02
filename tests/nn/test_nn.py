"""RMSNorm for models: values and gradients against the formula in fp64, shapes, compilation, bad inputs."""

import pytest
import torch

from kerneltune.nn import RMSNorm, rms_norm
from kerneltune.nn import rmsnorm as implementation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One rounding of the result, in units of its type.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@pytest.fixture(params=["kernels", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the kernels, without a GPU in the interpreter, and the formula for other devices."""
    if request.param == "plain":
        monkeypatch.setattr(implementation, "has_kernels", lambda _: False)
    return str(request.param)


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + 1 if zero_centered else weight)


def expected(
    x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, eps: float, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, dx and dweight in fp64, by autograd."""
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, weight))
    y = formula(x64, w64, eps, zero_centered)
    return y.detach(), *torch.autograd.grad(y, (x64, w64), dy.double())


def close(got: torch.Tensor, want: torch.Tensor, rtol: float) -> None:
    torch.testing.assert_close(
        got.double(), want, rtol=rtol, atol=rtol * max(1.0, float(want.detach().abs().max())) if want.numel() else 0
    )


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def leaves(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(*shape, dtype=dtype).requires_grad_(), draw(shape[-1], dtype=dtype).requires_grad_()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (37, 257), (8, 1024)])
def test_rms_norm_and_its_gradients_match_fp64(shape: tuple[int, int], zero_centered: bool, dtype: torch.dtype) -> None:
    x, weight = leaves(*shape, dtype=dtype)
    dy = draw(*shape, dtype=dtype)
    y = rms_norm(x, weight, 1e-5, zero_centered=zero_centered)
    assert y.dtype == dtype
    assert y.is_contiguous()
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    want_y, want_dx, want_dweight = expected(x, weight, dy, 1e-5, zero_centered)
    close(y, want_y, TOLERANCE[dtype])
    close(dx, want_dx, TOLERANCE[dtype])
    close(dweight, want_dweight, TOLERANCE[dtype])
    assert dx.dtype == dweight.dtype == dtype


@pytest.mark.usefixtures("path")
def test_rms_norm_gradients_match_finite_differences() -> None:
    x, weight = leaves(3, 16)
    dy = draw(3, 16)
    dx, dweight = torch.autograd.grad(rms_norm(x, weight), (x, weight), dy)
    step = 1e-3
    for leaf, gradient in ((x, dx), (weight, dweight)):
        direction = torch.randn_like(leaf)
        moved = [rms_norm(*(t + sign * step * direction if t is leaf else t for t in (x, weight))) for sign in (1, -1)]
        slope = ((moved[0] - moved[1]).double() * dy).sum() / (2 * step)
        torch.testing.assert_close(slope, (gradient.double() * direction).sum(), rtol=5e-3, atol=5e-3)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 1, 3)])
def test_rms_norm_accepts_any_leading_shape(leading: tuple[int, ...]) -> None:
    x, weight = leaves(*leading, 64)
    y = rms_norm(x, weight)
    assert y.shape == x.shape
    close(y, formula(x.double(), weight.double(), 1e-6, False), 2e-5)
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("leading", [(0,), (2, 0, 3)])
def test_rms_norm_without_rows_has_zero_gradients(leading: tuple[int, ...]) -> None:
    x, weight = leaves(*leading, 32)
    y = rms_norm(x, weight)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == dx.shape == x.shape
    assert torch.equal(dweight, torch.zeros_like(weight))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("layout", ["padded rows", "transposed", "last axis strided", "expanded"])
def test_rms_norm_accepts_inputs_of_any_layout(layout: str) -> None:
    x = {
        "padded rows": lambda: draw(6, 40)[:, :32],
        "transposed": lambda: draw(4, 6, 32).transpose(0, 1),
        "last axis strided": lambda: draw(6, 64)[:, ::2],
        "expanded": lambda: draw(1, 32).expand(6, 32),
    }[layout]()
    x.requires_grad_()
    weight, dy = draw(32).requires_grad_(), draw(1, 32).expand(x.shape)
    y = rms_norm(x, weight)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    for got, want in zip((y, dx, dweight), expected(x, weight, dy, 1e-6, False), strict=True):
        close(got, want, 2e-5)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dynamic", [False, True])
def test_rms_norm_compiles_without_a_graph_break(dynamic: bool) -> None:
    torch.compiler.reset()
    x, weight = leaves(4, 8, 64)

    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x * 2, weight, zero_centered=True).relu()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    want, got = block(x, weight), compiled(x, weight)
    assert torch.equal(got, want)
    grads = [torch.autograd.grad(y.sum(), (x, weight)) for y in (want, got)]
    for eager, traced in zip(*grads, strict=True):
        assert torch.equal(eager, traced)


@pytest.mark.parametrize("rows", [0, 5])
def test_rms_norm_operators_pass_opcheck(rows: int) -> None:
    x, weight = leaves(rows, 32, dtype=torch.bfloat16)
    torch.library.opcheck(implementation.rmsnorm_fwd, (x, None, weight, 1e-6, False))
    *_, rsigma = implementation.rmsnorm_fwd(x.detach(), None, weight.detach(), 1e-6, False)
    dz = draw(rows, 32, dtype=torch.bfloat16)
    torch.library.opcheck(implementation.rmsnorm_bwd, (dz, None, x.detach(), rsigma, weight.detach(), False, True))
    torch.library.opcheck(implementation.rmsnorm_bwd, (dz, dz, x.detach(), rsigma, None, False, False))
    torch.library.opcheck(implementation.rmsnorm_fwd, (x, dz.requires_grad_(), weight, 1e-6, False))
    torch.library.opcheck(implementation.rmsnorm_fwd, (x, dz, None, 1e-6, False))


def test_rms_norm_second_derivative_raises() -> None:
    x, weight = leaves(2, 8)
    (dx,) = torch.autograd.grad(rms_norm(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


def test_rms_norm_module_equals_the_function_with_its_weight() -> None:
    module = RMSNorm(32, eps=1e-5, zero_centered=True, device=DEVICE, dtype=torch.bfloat16)
    assert repr(module) == "RMSNorm(32, eps=1e-05, zero_centered=True)"
    assert torch.equal(module.weight.detach(), torch.zeros_like(module.weight))
    with torch.no_grad():
        module.weight.copy_(draw(32))
    x = draw(4, 32, dtype=torch.bfloat16)
    assert torch.equal(module(x), rms_norm(x, module.weight, 1e-5, zero_centered=True))
    module(x).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.shape == (32,)


def test_rms_norm_module_state_is_saved_and_reset() -> None:
    module, other = RMSNorm(16, device=DEVICE), RMSNorm(16, device=DEVICE)
    assert list(module.state_dict()) == ["weight"]
    with torch.no_grad():
        module.weight.copy_(draw(16))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.weight, module.weight)
    other.reset_parameters()
    assert torch.equal(other.weight.detach(), torch.ones_like(other.weight))


@pytest.mark.parametrize(
    ("x", "weight", "eps", "message"),
    [
        ((4, 8), (9,), 1e-6, "weight must be (8,) torch.float32 on cpu, got (9,)"),
        ((4, 8), (8, 1), 1e-6, "got (8, 1)"),
        ((), (1,), 1e-6, "x must be (…, N) of bfloat16, float16, float32, got ()"),
        ((4, 0), (0,), 1e-6, "got (4, 0)"),
        ((4, 8), (8,), -1.0, "eps=-1.0"),
        ((4, 8), (8,), float("nan"), "eps=nan"),
    ],
)
def test_rms_norm_of_bad_shapes_or_eps_raises(x: tuple[int, ...], weight: tuple[int, ...], eps: float, message: str) -> None:
    with pytest.raises(ValueError) as error:
        rms_norm(torch.ones(x), torch.ones(weight), eps)
    assert message in str(error.value)


def test_rms_norm_of_bad_dtypes_or_devices_raises() -> None:
    with pytest.raises(ValueError, match=r"weight must be \(8,\) torch\.float32 on cpu, got \(8,\) torch\.float16"):
        rms_norm(torch.ones(2, 8), torch.ones(8, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"x must be .*, got \(2, 8\) torch\.float64"):
        rms_norm(torch.ones(2, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"weight must be .* on meta, got .* on cpu"):
        rms_norm(torch.ones(2, 8, device="meta"), torch.ones(8))
    with pytest.raises(ValueError, match="x must be a tensor, got None"):
        rms_norm(None, torch.ones(8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hidden_size=0"):
        RMSNorm(0)
    with pytest.raises(ValueError, match=r"eps=-1"):
        RMSNorm(8, eps=-1)


def test_rms_norm_of_meta_tensors_gives_shapes() -> None:
    y = rms_norm(torch.ones(2, 3, 8, device="meta", dtype=torch.bfloat16), torch.ones(8, device="meta", dtype=torch.bfloat16))
    assert y.shape == (2, 3, 8)
    assert y.dtype == torch.bfloat16
    assert y.is_meta


def expected_sum(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, dy: torch.Tensor, dtotal: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return y, total, dx and dweight in fp64 by autograd, of the sum rounded as the operator rounds it."""
    total = (x.detach() + residual.detach()).double().requires_grad_()
    w64 = torch.ones(x.shape[-1], device=DEVICE).double() if weight is None else weight.detach().double().requires_grad_()
    y = formula(total, w64, 1e-6, False)
    loss = (y * dy.double()).sum() + (total * dtotal.double()).sum()
    leaves_ = (total,) if weight is None else (total, w64)
    return y.detach(), total.detach(), *torch.autograd.grad(loss, leaves_)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("weight_dtype", [None, torch.bfloat16, torch.float32])
def test_rms_norm_with_a_residual_matches_fp64(weight_dtype: torch.dtype | None) -> None:
    x, residual, dy, dtotal = (draw(5, 3, 96, dtype=torch.bfloat16) for _ in range(4))
    leaves_ = [x.requires_grad_(), residual.requires_grad_()]
    weight = None if weight_dtype is None else draw(96, dtype=weight_dtype).requires_grad_()
    leaves_ += [] if weight is None else [weight]
    y, total = rms_norm(x, weight, residual=residual)
    gradients = torch.autograd.grad((y, total), leaves_, (dy, dtotal))
    want_y, want_total, want_dx, *want_dweight = expected_sum(x, residual, weight, dy, dtotal)
    assert y.dtype == total.dtype == gradients[0].dtype == torch.bfloat16
    assert y.shape == total.shape == x.shape
    for got, want in zip((y, total, gradients[0], gradients[1]), (want_y, want_total, want_dx, want_dx), strict=True):
        close(got, want, TOLERANCE[torch.bfloat16])
    if weight is not None:
        assert gradients[2].dtype == weight.dtype
        close(gradients[2], want_dweight[0], TOLERANCE[torch.bfloat16])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("used", ["y", "total"])
def test_rms_norm_with_a_residual_has_the_gradient_of_one_used_output(used: str) -> None:
    x, residual, dy = draw(7, 64).requires_grad_(), draw(7, 64), draw(7, 64)
    weight = draw(64).requires_grad_()
    y, total = rms_norm(x, weight, residual=residual)
    if used == "total":
        (dx,) = torch.autograd.grad(total, x, dy)
        assert torch.equal(dx, dy)
        return
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    _, want_dx, want_dweight = expected((x + residual).detach(), weight, dy, 1e-6, False)
    close(dx, want_dx, 2e-5)
    close(dweight, want_dweight, 2e-5)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_with_an_fp32_weight_accepts_16_bit_inputs(dtype: torch.dtype) -> None:
    x, weight, dy = draw(9, 130, dtype=dtype).requires_grad_(), draw(130).requires_grad_(), draw(9, 130, dtype=dtype)
    y = rms_norm(x, weight, 1e-5, zero_centered=True)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    assert (y.dtype, dx.dtype, dweight.dtype) == (dtype, dtype, torch.float32)
    for got, want in zip((y, dx, dweight), expected(x, weight, dy, 1e-5, True), strict=True):
        close(got, want, TOLERANCE[dtype])


@pytest.mark.usefixtures("path")
def test_rms_norm_without_a_weight_multiplies_by_1() -> None:
    x, dy = draw(6, 4, 40).requires_grad_(), draw(6, 4, 40)
    module = RMSNorm(40, elementwise_affine=False)
    assert list(module.parameters()) == []
    assert "elementwise_affine=False" in repr(module)
    y = module(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    want_y, want_dx, _ = expected(x, torch.ones(40, device=DEVICE), dy, 1e-6, False)
    close(y, want_y, 2e-5)
    close(dx, want_dx, 2e-5)


@pytest.mark.usefixtures("path")
def test_rms_norm_with_a_frozen_weight_has_no_weight_gradient() -> None:
    x, weight, dy = draw(6, 40).requires_grad_(), draw(40), draw(6, 40)
    y = rms_norm(x, weight)
    (dx,) = torch.autograd.grad(y, x, dy)
    close(dx, expected(x, weight, dy, 1e-6, False)[1], 2e-5)
    assert weight.grad is None


@pytest.mark.usefixtures("path")
def test_rms_norm_with_a_residual_compiles_without_a_graph_break() -> None:
    torch.compiler.reset()
    module = RMSNorm(64, device=DEVICE)
    x, residual = draw(3, 64).requires_grad_(), draw(3, 64).requires_grad_()

    def block(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y, total = module(x * 2, residual)
        return y.relu() + total

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    want, got = block(x, residual), compiled(x, residual)
    assert torch.equal(got, want)
    inputs = (x, residual, module.weight)
    for eager, traced in zip(*(torch.autograd.grad(y.sum(), inputs) for y in (want, got)), strict=True):
        assert torch.equal(eager, traced)


def test_rms_norm_of_bad_residuals_or_weights_raises() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"residual must be \(2, 8\) torch\.float32 on cpu, got \(2, 4\)"):
        rms_norm(x, torch.ones(8), residual=torch.ones(2, 4))
    with pytest.raises(ValueError, match="zero_centered needs a weight, got weight=None"):
        rms_norm(x, zero_centered=True)
    with pytest.raises(ValueError, match=r"zero_centered=True elementwise_affine=False"):
        RMSNorm(8, zero_centered=True, elementwise_affine=False)
