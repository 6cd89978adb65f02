"""SwiGLU's gradient by one kernel: values, compilation, and the modules that take it."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kerneltune.compat import has_default_gate
from kerneltune.nn import convert_to_fp8_training
from kerneltune.nn.swiglu import is_plain_silu, swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_swiglu_equals_torch_and_its_gradient_is_within_1_percent() -> None:
    x = torch.randn(37, 48, device=DEVICE).bfloat16().requires_grad_()
    dy = torch.randn(24, 37, device=DEVICE).bfloat16().t()  # rows that are not adjacent
    gate, up = x.chunk(2, dim=-1)
    want = F.silu(gate) * up
    (dx,) = torch.autograd.grad(want, x, dy)
    got = swiglu(x)
    assert torch.equal(got, want)
    (gradient,) = torch.autograd.grad(got, x, dy)
    assert (gradient - dx).norm() < 0.01 * dx.norm()


def test_swiglu_compiles_without_a_graph_break() -> None:
    x = torch.randn(16, 32, device=DEVICE).bfloat16().requires_grad_()
    compiled = torch.compile(swiglu, backend="aot_eager", fullgraph=True)
    (want,), (got,) = (torch.autograd.grad(f(x).sum(), x) for f in (swiglu, compiled))
    assert torch.equal(got, want)


def test_is_plain_silu_is_true_for_silu_without_hooks_only() -> None:
    hooked = nn.SiLU()
    hooked.register_forward_hook(lambda *_: None)
    assert [is_plain_silu(a) for a in (nn.SiLU(), nn.GELU(), hooked)] == [True, False, False]


def test_converted_experts_use_the_swiglu_kernel_in_the_backward_pass() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

    module = DeepseekV3Experts(transformers.DeepseekV3Config(hidden_size=32, moe_intermediate_size=16, n_routed_experts=2))
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    module.to(DEVICE, torch.bfloat16)
    convert_to_fp8_training(module, "rowwise")
    x = torch.randn(4, 32, device=DEVICE).bfloat16().requires_grad_()
    with torch.profiler.profile() as profiled:
        module(x, torch.zeros(4, 1, dtype=torch.long, device=DEVICE), torch.ones(4, 1, device=DEVICE)).sum().backward()
    assert "kerneltune::swiglu_bwd" in {event.key for event in profiled.key_averages()}


def test_default_gate_of_transformers_is_recognized() -> None:
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    classes = (DeepseekV3Experts, GptOssExperts, nn.Linear, SimpleNamespace)
    assert [has_default_gate(cls) for cls in classes] == [True, False, False, False]
