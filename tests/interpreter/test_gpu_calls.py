"""Host code that is written for a GPU, on tensors of the CPU and without memory."""

import contextvars
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from pool_jobs import op_of, run_of
from triton.tools.tensor_descriptor import TensorDescriptor

from kerneltune.interpreter.modes import noting, strict, unlaunched, without_gpu
from kerneltune.measuring.assembly import TARGETS
from kerneltune.measuring.compiler import CompilePool
from kerneltune.ops import load_with

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU where there is none")


@triton.jit
def _doubled(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    for begin in range(tl.program_id(0) * BLOCK, N, tl.num_programs(0) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, at < N, other=0.0), at < N)


def doubled(given: Any, _config: Any = None) -> dict[str, torch.Tensor]:
    x = given["x"]
    assert x.is_cuda
    assert x.device.type == "cuda"
    assert x.device == torch.device("cuda", x.get_device())
    assert torch.cuda.get_device_capability(x.device)[0] >= 8
    side, ready = torch.cuda.Stream(), torch.cuda.Event()
    ready.record(torch.cuda.current_stream())
    with torch.cuda.device(x.device.index), torch.cuda.device(x.device), torch.cuda.stream(side):
        side.wait_event(ready)
        x.record_stream(side)
        y = torch.empty(x.shape, dtype=x.dtype, device="cuda")
        limits = torch.tensor([1, 2]).pin_memory().to("cuda:0", non_blocking=True)
        more = torch.ones(2, device=torch.device("cuda")) + x.new_ones(2, device=0) + torch.ones(2).cuda()
    num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    assert triton.runtime.driver.active.utils.get_device_properties(0)["multiprocessor_count"] > 1
    assert {limits.device, more.device, y.device, torch.ones(2).to(0).device} == {x.device}
    assert torch.zeros(2, device=x.device).is_cuda
    assert torch.empty_like(x, device="cpu", dtype=torch.int8).dtype == torch.int8
    torch.rand(2, generator=torch.Generator(device=x.device).manual_seed(1), device=x.device)
    _doubled[[min(num_sms, triton.cdiv(x.numel(), 64))]](x, y, x.numel(), 64)
    torch.cuda.synchronize()
    return {"y": y}


@torch.library.custom_op("kerneltune_tests::of_a_gpu", mutates_args=(), device_types="cuda")
def _of_a_gpu(x: torch.Tensor) -> torch.Tensor:
    return doubled({"x": x})["y"]


@_of_a_gpu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("kerneltune_tests::of_the_cpu", mutates_args=(), device_types="cpu")
def _of_the_cpu(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape, device=x.device)


def test_function_of_an_operator_for_the_cpu_sees_tensors_of_the_cpu() -> None:
    with strict():
        assert torch.ops.kerneltune_tests.of_the_cpu(torch.empty(3)).tolist() == [1, 1, 1]


@torch.library.triton_op("kerneltune_tests::of_triton", mutates_args=())
def _of_triton(x: torch.Tensor) -> torch.Tensor:
    return doubled({"x": x})["y"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("operator", [torch.ops.kerneltune_tests.of_a_gpu, torch.ops.kerneltune_tests.of_triton])
def test_registered_operator_for_a_gpu_runs_on_other_tensors(operator: Any, device: str) -> None:
    x = torch.randn(3000, device=device)
    with strict(device=device), noting() as facts:
        y = operator(x)
    assert device == "meta" or torch.equal(y, 2 * x)
    assert "launch" in {fact.kind for fact in facts}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_host_code_for_a_gpu_runs_on_other_tensors(device: str) -> None:
    x = torch.randn(3000, device=device)
    with strict(device=device), noting() as facts:
        y = doubled({"x": x})["y"]
    assert device == "meta" or torch.equal(y, 2 * x)
    with unlaunched(device=device) as launches:
        doubled({"x": x})
    assert 1 < launches.num_programs < 3000 // 64, "a persistent kernel loops in a small case"
    assert {fact.text for fact in facts if fact.kind == "launch"} == {"_doubled"}
    assert not x.is_cuda, "the stand-in ends with the check"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.synchronize()


class _Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return doubled({"x": x})["y"]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return doubled({"x": grad.contiguous()})["y"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", ["grad", "backward"])
def test_backward_pass_for_a_gpu_runs_on_other_tensors(way: str, device: str) -> None:
    x = torch.randn(3000, device=device, requires_grad=True)
    with strict(device=device):
        y = _Doubling.apply(x)
        if way == "grad":
            (grad,) = torch.autograd.grad(y.sum(), x)
        else:
            y.sum().backward()
            grad = x.grad
    assert device == "meta" or torch.equal(grad, torch.full_like(x, 2))
    assert grad.shape == x.shape


@triton.jit
def _doubled_by_descriptor(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [BLOCK, BLOCK])
    y = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BLOCK, BLOCK])
    y.store([tl.program_id(0) * BLOCK, 0], 2 * x.load([tl.program_id(0) * BLOCK, 0]))


@triton.jit
def _doubled_by_descriptor_of_host(x, y, BLOCK: tl.constexpr):
    y.store([tl.program_id(0) * BLOCK, 0], 2 * x.load([tl.program_id(0) * BLOCK, 0]))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", ["allocator", "no allocator", "host"])
def test_descriptor_of_a_kernel_without_an_allocator_is_noted(way: str, device: str) -> None:
    def double() -> None:
        x = torch.ones(32, 16, device=device)
        y = torch.empty_like(x)
        if way == "host":
            _doubled_by_descriptor_of_host[(2,)](*(TensorDescriptor.from_tensor(t, [16, 16]) for t in (x, y)), 16)
            return
        if way == "allocator":
            triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device=x.device))
        _doubled_by_descriptor[(2,)](x, y, 32, 16, 16)

    with strict(device=device), noting() as facts:
        contextvars.copy_context().run(double)
    assert ("no allocator" in {fact.kind for fact in facts}) == (way == "no allocator")
    assert "launch" in {fact.kind for fact in facts}


OP = op_of(__name__, lambda _case, device: {"x": torch.empty(3000, device=device)}, doubled)


@pytest.fixture
def compiling() -> Iterator[CompilePool]:
    with CompilePool(TARGETS["sm_90"], 1) as pool:
        yield pool


def test_host_code_for_a_gpu_is_compiled(compiling: CompilePool) -> None:
    (result,) = compiling.compile([run_of(OP, doubled)])
    assert (result.error, [kernel.name for kernel in result.kernels]) == ("", ["_doubled"])


def test_module_that_asks_about_the_gpu_while_it_is_imported_is_a_plugin(tmp_path: Path) -> None:
    file = tmp_path / "asks_at_import.py"
    asking = "torch.cuda.get_device_properties(0).multi_processor_count"
    file.write_text(f"import torch\nfrom fake_operator import OP\nassert {asking} > 1\n")
    assert "fake" in load_with(str(file))
    with without_gpu():
        assert torch.cuda.current_device() == 0
