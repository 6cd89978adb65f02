"""Calls of foreign kernels with small, ragged shapes, by name; `foreign_kernels.py` runs them."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from foreign_kernels import CALLS, rand, with_grad
from torch.nn.functional import logsigmoid

BF16 = torch.bfloat16


def liger(module: str, function: str, *inputs: torch.Tensor, rest: tuple[Any, ...] = ()) -> Callable[[], Any]:
    """Return a call of an autograd function of Liger on copies of inputs, with gradients."""

    def call() -> Any:
        apply = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply
        leaves = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
        # a function that works in place takes no leaf
        given = [leaf * 1 if leaf.requires_grad else leaf for leaf in leaves]
        return with_grad(apply(*given, *rest), *[leaf for leaf in leaves if leaf.requires_grad])

    return call


def of(module: str, function: str, *inputs: Any, grad: bool = True, **named: Any) -> Callable[[], Any]:
    """Return a call of a function by module and name; with gradients of the inputs that take them."""

    def call() -> Any:
        run = getattr(importlib.import_module(module), function)
        given = [
            value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
            for value in inputs
        ]
        found = run(*given, **named)
        return with_grad(found, *[v for v in given if isinstance(v, torch.Tensor) and v.requires_grad]) if grad else found

    return call


X, W, B = rand(7, 100), rand(100), rand(100)
LOGP, P = rand(5, 77).detach().log_softmax(1).requires_grad_(), rand(6, 77).detach()[:5].softmax(1)
TARGET = torch.tensor([3, 0, 76, -100, 5])
Q, K = rand(2, 3, 5, 16), rand(2, 1, 5, 16)
COS, SIN = torch.cos(rand(1, 5, 16).detach()), torch.sin(rand(1, 5, 16).detach())
CALLS |= {
    "liger rms_norm": liger("rms_norm", "LigerRMSNormFunction", X, W, rest=(1e-6,)),
    "liger rms_norm bf16": liger(
        "rms_norm", "LigerRMSNormFunction", rand(37, 192, dtype=BF16), rand(192, dtype=BF16), rest=(1e-6,)
    ),
    "liger layer_norm": liger("layer_norm", "LigerLayerNormFunction", X, W, B, rest=(1e-6,)),
    "liger group_norm": liger("group_norm", "LigerGroupNormFunction", rand(2, 6, 33), rand(6), rand(6), rest=(6, 3, 1e-6)),
    "liger fused_add_rms_norm": liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", X, rand(7, 100), W, rest=(1e-6,)),
    "liger poly_norm": liger("poly_norm", "LigerPolyNormFunction", X, rand(3), rand()),
    "liger dyt": liger("dyt", "LigerDyTFunction", X, rand(1), W, B),
    "liger silu_mul": liger("swiglu", "LigerSiLUMulFunction", X, rand(7, 100)),
    "liger fused gate_up silu_mul": liger("swiglu", "LigerFusedGateUpSiLUMulFunction", rand(7, 200)),
    "liger geglu": liger("geglu", "LigerGELUMulFunction", X, rand(7, 100)),
    "liger relu_squared": liger("relu_squared", "LigerReLUSquaredFunction", X),
    "liger softmax": liger("softmax", "LigerSoftmaxFunction", X),
    "liger sparsemax": liger("sparsemax", "LigerSparsemaxFunction", X, rest=(-1,)),
    "liger rope": liger("rope", "LigerRopeFunction", Q, K, COS, SIN),
    "liger qwen2vl_mrope": liger(
        "qwen2vl_mrope",
        "LigerQwen2VLMRopeFunction",
        Q,
        K,
        COS.expand(3, 2, 5, 16).contiguous(),
        SIN.expand(3, 2, 5, 16).contiguous(),
        rest=([2, 3, 3],),
    ),
    "liger kl_div": liger("kl_div", "LigerKLDivLossFunction", LOGP, P),
    "liger jsd": liger("jsd", "LigerJSDFunction", LOGP, P.log()),
    "liger tvd": liger("tvd", "LigerTVDLossFunction", P.clone().requires_grad_(), P.flip(0)),
    "liger cross_entropy": liger("cross_entropy", "LigerCrossEntropyFunction", rand(5, 77), TARGET, rest=(None,)),
    "liger cross_entropy weighted": liger(
        "cross_entropy",
        "LigerCrossEntropyFunction",
        rand(5, 77),
        TARGET,
        rest=(rand(77).detach().abs(), -100, 1e-4, 0.1, "mean", 30.0),
    ),
    "liger fused_linear_cross_entropy": liger(
        "fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", rand(5, 32), rand(77, 32), TARGET
    ),
    "liger fused_linear_jsd": liger(
        "fused_linear_jsd",
        "LigerFusedLinearJSDFunction",
        rand(5, 32),
        rand(77, 32),
        rand(5, 24, grad=False),
        rand(77, 24, grad=False),
    ),
    "liger attn_res": liger("attn_res", "LigerAttnResFunction", rand(3, 2, 5, 64), rand(64), rand(64), rest=(1e-6,)),
    "liger multi_token_attention": liger(
        "multi_token_attention", "LigerMultiTokenAttentionFunction", rand(1, 2, 8, 8), rand(2, 2, 3, 3), rand(2), rest=(1, 1)
    ),
}
SHAPE = (1, 40, 2, 16)
q, k, v = rand(*SHAPE), rand(1, 40, 2, 16), rand(1, 40, 2, 24)
G, GATE = logsigmoid(rand(1, 40, 2).detach()), logsigmoid(rand(*SHAPE).detach())
NORM, ACT, UTIL = "fla.modules.norm.", "fla.modules.activations.ops", "fla.ops.utils."
CALLS |= {
    "fla l2norm": of(NORM + "l2norm", "l2norm", X),
    "fla layer_norm": of(NORM + "layernorm", "layer_norm", X, W, B),
    "fla rms_norm": of(NORM + "layernorm", "rms_norm", X, W, None),
    "fla group_norm": of(NORM + "layernorm", "group_norm", rand(7, 96), rand(96), rand(96), num_groups=3),
    "fla rms_norm_gated": of(NORM + "fused_norm_gate", "rms_norm_gated", X, rand(7, 100), W, None),
    "fla rmsnorm_fn": of(NORM + "layernorm_gated", "rmsnorm_fn", X, W, None),
    "fla elu_p1": of(ACT, "elu_p1", X),
    "fla logsigmoid": of(ACT, "logsigmoid", X),
    "fla swish": of(ACT, "swish_fwd", X.detach(), grad=False),
    "fla swish_bwd": of(ACT, "swish_bwd", X.detach(), X.detach(), grad=False),
    "fla sigmoid": of(ACT, "sigmoid_fwd", X.detach(), grad=False),
    "fla swiglu": of(ACT, "swiglu", X, rand(7, 100)),
    "fla swiglu_linear": of(ACT, "swiglu_linear", X, rand(7, 100), rand(32, 100), rand(32)),
    "fla powglu": of(ACT, "powglu", X, rand(7, 100)),
    "fla rotary": of(
        "fla.modules.rotary.ops",
        "rotary_embedding",
        rand(2, 5, 3, 16),
        torch.cos(rand(5, 8).detach()),
        torch.sin(rand(5, 8).detach()),
    ),
    "fla token_shift": of("fla.modules.token_shift", "token_shift", rand(2, 5, 100)),
    "fla causal_conv1d": of("fla.modules.causal_conv1d", "causal_conv1d", rand(2, 13, 32), rand(32, 4), rand(32)),
    "fla cross_entropy": of("fla.modules.fused_cross_entropy.ops", "cross_entropy_loss", rand(5, 77), TARGET),
    "fla fused_kl_div": of(
        "fla.modules.fused_kl_div.ops",
        "fused_kl_div_loss",
        rand(5, 32),
        rand(5, 32, grad=False),
        rand(77, 32),
        rand(77, 32, grad=False),
    ),
    "fla l2_warp": of("fla.modules.l2warp", "l2_warp", rand(1), rand(2, 5, 77)),
    "fla softmax": of(UTIL + "softmax", "softmax_fwd", rand(2, 5, 77, grad=False), grad=False),
    "fla logsumexp": of(UTIL + "logsumexp", "logsumexp_fwd", rand(2, 5, 77, grad=False), grad=False),
    "fla local cumsum": of(UTIL + "cumsum", "chunk_local_cumsum", G, 16, grad=False),
    "fla local cumsum of vectors": of(UTIL + "cumsum", "chunk_local_cumsum", GATE, 16, grad=False),
    "fla global cumsum": of(UTIL + "cumsum", "chunk_global_cumsum", G, grad=False),
    "fla global cumsum of vectors": of(UTIL + "cumsum", "chunk_global_cumsum", GATE, grad=False),
    "fla mean_pooling": of(UTIL + "pooling", "mean_pooling", q, 16),
    "fla addmm": of(
        UTIL + "matmul", "addmm", rand(20, 24, grad=False), rand(20, 33, grad=False), rand(33, 24, grad=False), grad=False
    ),
    "fla solve_tril": of(UTIL + "solve_tril", "solve_tril", rand(1, 40, 2, 16, grad=False).tril(-1), grad=False),
    "fla pack_sequence": of(UTIL + "pack", "pack_sequence", rand(3, 7, 20), torch.tensor([0, 3, 8, 12]), "left"),
    "fla chunk_simple_gla": of("fla.ops.simple_gla", "chunk_simple_gla", q, k, v, G),
    "fla fused_recurrent_simple_gla": of("fla.ops.simple_gla", "fused_recurrent_simple_gla", q, k, v, G),
    "fla fused_recurrent_gla": of("fla.ops.gla", "fused_recurrent_gla", q, k, v, GATE),
    "fla chunk_gla": of("fla.ops.gla", "chunk_gla", q, k, v, GATE),
    "fla chunk_retention": of("fla.ops.retention", "chunk_retention", q, k, v),
    "fla chunk_linear_attn": of("fla.ops.linear_attn", "chunk_linear_attn", q, k, v),
    "fla chunk_gated_delta_rule": of(
        "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", q, k, v, G, rand(1, 40, 2).detach().sigmoid()
    ),
    "fla fused_recurrent_delta_rule": of(
        "fla.ops.delta_rule", "fused_recurrent_delta_rule", q, k, v, rand(1, 40, 2).detach().sigmoid()
    ),
    "fla fused_recurrent_hgrn": of("fla.ops.hgrn", "fused_recurrent_hgrn", rand(2, 9, 32), logsigmoid(rand(2, 9, 32).detach())),
    "fla chunk_hgrn": of("fla.ops.hgrn", "chunk_hgrn", rand(2, 9, 32), logsigmoid(rand(2, 9, 32).detach())),
    "fla parallel_attn": of("fla.ops.attn", "parallel_attn", q, k, v),
}
FP8, NO = "torchao.prototype.blockwise_fp8_training.kernels", "torchao.prototype.float8nocompile.kernels.fp8_dynamic_tensorwise"
MOE = "torchao.prototype.moe_training.kernels."
A = rand(40, 256, dtype=BF16, grad=False)
JAGGED, ROWS = MOE + "jagged_float8_scales", rand(64, 48, dtype=BF16, grad=False)
ENDS = torch.tensor([16, 16, 48], dtype=torch.int32)
CALLS |= {
    "torchao act_quant_lhs": of(FP8, "triton_fp8_blockwise_act_quant_lhs", A, grad=False),
    "torchao act_quant_rhs": of(FP8, "triton_fp8_blockwise_act_quant_rhs", rand(256, 128, dtype=BF16, grad=False), grad=False),
    "torchao act_quant_transposed_lhs": of(
        FP8, "triton_fp8_blockwise_act_quant_transposed_lhs", rand(256, 128, dtype=BF16, grad=False), grad=False
    ),
    "torchao weight_quant_rhs": of(
        FP8, "triton_fp8_blockwise_weight_quant_rhs", rand(256, 128, dtype=BF16, grad=False), grad=False
    ),
    "torchao weight_quant_transposed_rhs": of(
        FP8, "triton_fp8_blockwise_weight_quant_transposed_rhs", rand(256, 128, dtype=BF16, grad=False), grad=False
    ),
    "torchao fp8_blockwise_act_quant": of("torchao.kernel.blockwise_quantization", "fp8_blockwise_act_quant", A, grad=False),
    "torchao fp8_blockwise_weight_quant": of(
        "torchao.kernel.blockwise_quantization", "fp8_blockwise_weight_quant", rand(256, 128, dtype=BF16, grad=False), grad=False
    ),
    "torchao rowwise scales": of(JAGGED, "triton_fp8_per_group_rowwise_scales", ROWS.view(48, 64).t(), ENDS, grad=False),
    "torchao rowwise scales, 40 rows": of(
        JAGGED, "triton_fp8_per_group_rowwise_scales", ROWS.view(48, 64)[:, :40].t(), ENDS, grad=False
    ),
    "torchao rowwise scales, row-major": of(JAGGED, "triton_fp8_per_group_rowwise_scales", ROWS, ENDS, grad=False),
    "torchao colwise scales": of(JAGGED, "triton_fp8_per_group_colwise_scales", ROWS.view(48, 64), ENDS, grad=False),
    "torchao rowwise 3d transpose": of(
        MOE + "float8_rowwise", "triton_fp8_rowwise_3d_transpose_rhs", rand(2, 40, 48, dtype=BF16, grad=False), grad=False
    ),
    "torchao rowwise 3d reduction": of(
        MOE + "float8_rowwise",
        "triton_fp8_rowwise_3d_transpose_rhs_fused_reduction",
        rand(2, 40, 48, dtype=BF16, grad=False),
        grad=False,
    ),
    "torchao int_matmul": of(
        "torchao.kernel.intmm_triton",
        "int_matmul_cuda",
        torch.ones(33, 48, dtype=torch.int8),
        torch.ones(48, 40, dtype=torch.int8),
        grad=False,
    ),
    "torchao scaled_int8_mm": of(
        "torchao.prototype.quantized_training.int8_mm",
        "scaled_int8_mm_cuda",
        torch.ones(33, 48, dtype=torch.int8),
        torch.ones(48, 40, dtype=torch.int8),
        rand(33, grad=False),
        rand(40, grad=False),
        grad=False,
    ),
}
