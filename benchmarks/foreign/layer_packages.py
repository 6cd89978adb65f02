"""Run layers of packages: `python layer_packages.py NAME`.

norms: flash-attn's norms, rotation and cross entropy; convolution: spconv-triton's sparse convolutions, whose autotuners keep
choices on disk; diffusion: comfy-kitchen's int8 layers and casts; optimizers: bitsandbytes, whose kernels update in place;
ternary: onebitllms, whose kernels reduce over a grid; experts: Transformer Engine's routing, hyper-connections and loss; xlstm:
mlstm_kernels; attention: xformers, which writes the source of a kernel at run time; engine: flashinfer's kernels in Triton;
int4: LightLLM's products of int4 and int8 weights, with configs that add by atomics.
"""

import sys
from typing import Any

import torch
from measured_step import BF16, DEVICE, leaf, run, sized, trained

TOKENS, WIDTH = sized(8192, 48), sized(4096, 128)


def norms() -> Any:
    """Train a norm with a residual, a rotation and a loss."""
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
    from flash_attn.ops.triton.rotary import apply_rotary

    x, residual, weight = leaf(TOKENS, WIDTH), leaf(TOKENS, WIDTH, scale=0.5), leaf(WIDTH, scale=0.2)
    y, kept = rms_norm_fn(x, weight, None, residual=residual, prenorm=True, eps=1e-6)
    z = layer_norm_fn(y, weight, leaf(WIDTH, scale=0.3), eps=1e-5)
    heads = leaf(2, TOKENS // 2, sized(32, 2), 64).detach()
    turned = apply_rotary(heads, *(leaf(TOKENS // 2, 32, scale=s).detach() for s in (0.9, 0.4)))
    words = sized(32000, 96)
    logits = leaf(TOKENS // 4, words)
    losses, _ = cross_entropy_loss(logits, torch.arange(TOKENS // 4, device=DEVICE) * 7919 % words)
    return [*trained(z + kept, x, residual, weight), turned, *trained(losses, logits)]


def convolution() -> Any:
    """Train two sparse convolutions over voxels."""
    import spconv_triton.pytorch as spconv

    torch.manual_seed(11)
    side, count, channels = sized(64, 8), sized(40000, 60), sized(64, 16)
    cells = torch.randperm(side**3, device="cpu")[:count]
    places = torch.stack([torch.zeros_like(cells), cells // side**2, cells // side % side, cells % side], 1).int().to(DEVICE)
    layers = spconv.SparseSequential(
        spconv.SubMConv3d(channels, channels, 3, bias=False, indice_key="same"),
        spconv.SparseConv3d(channels, 2 * channels, 3, stride=2, padding=1, bias=False),
    ).to(DEVICE, torch.float16)
    features = leaf(count, channels, dtype=torch.float16)
    out = layers(spconv.SparseConvTensor(features, places, [side] * 3, 1))
    return trained(out.features, features, *layers.parameters())


def diffusion() -> Any:
    """Multiply in int8, modulate, rotate and cast."""
    from comfy_kitchen.backends.triton import adaln, quantization

    x, weight = leaf(TOKENS, WIDTH).detach(), leaf(WIDTH, WIDTH, scale=40.0).detach().to(torch.int8)
    scales = torch.rand(WIDTH, device=DEVICE) * 0.01
    found = [
        quantization.int8_linear(x, weight, scales, bias=leaf(WIDTH).detach()),
        quantization.int8_linear(x, weight, scales[:1]),
    ]
    one = torch.full((1,), 0.05, device=DEVICE)
    narrow = quantization.quantize_per_tensor_fp8(x, one)
    found += [narrow.float(), quantization.dequantize_per_tensor_fp8(narrow, one, BF16)]
    picture = x.reshape(2, TOKENS // 2, WIDTH)
    return [*found, adaln.adaln(picture, leaf(2, 1, WIDTH).detach(), leaf(2, 1, WIDTH, scale=0.1).detach())]


def optimizers() -> Any:
    """Cast to four and eight bits and back, and take steps of optimizers from the same state."""
    from bitsandbytes.backends.triton import kernels_4bit, kernels_8bit_quant, kernels_optim

    x = leaf(TOKENS, WIDTH).detach()
    block, found = 64, list[torch.Tensor]()
    packed, largest = (
        torch.empty(x.numel() // 2, 1, dtype=torch.uint8, device=DEVICE),
        torch.empty(x.numel() // block, device=DEVICE),
    )
    kernels_4bit.quantize_4bit_blockwise_triton(x, block, "nf4", x.numel() // block, largest, x.numel(), packed)
    back = torch.empty_like(x)
    kernels_4bit.dequantize_4bit_impl(packed, largest, block, "nf4", BF16, out=back)
    code = torch.linspace(-1, 1, 256, device=DEVICE)
    narrow, scales = kernels_8bit_quant.quantize_blockwise_triton(x, code, 256)
    found += [packed, largest, back, kernels_8bit_quant.dequant_8bit_blockwise(narrow, scales, code, 256, dtype=BF16)]
    for name in ("adam", "momentum"):
        weight, gradient = (
            leaf(TOKENS * WIDTH // 4, dtype=torch.float32).detach().clone(),
            x.flatten()[: TOKENS * WIDTH // 4].float(),
        )
        states = torch.zeros_like(weight), torch.zeros_like(weight)
        for step in (1, 2):
            kernels_optim.optimizer_update_32bit_impl(
                name, gradient, weight, *states, None, 0.0, 0.0, 0.9, 0.99, 0.0, 0.0, 1e-8, 0.01, step, 1e-3
            )
        found += [weight, *states]
    return found


def ternary() -> Any:
    """Cast activations by their largest value in each row, and weights by their mean."""
    from onebitllms.kernels.activation_quant import activation_quant_triton
    from onebitllms.kernels.weight_quant import weight_quant_triton

    return activation_quant_triton(leaf(2, TOKENS // 2, WIDTH).detach()), weight_quant_triton(leaf(WIDTH, WIDTH).detach())


def experts() -> Any:
    """Route tokens to experts and back, mix four streams of hyper-connections, and take a loss."""
    from transformer_engine.pytorch.triton import mhc, permutation
    from transformer_engine.pytorch.triton.cross_entropy import cross_entropy_forward

    tokens, count = sized(4096, 32), sized(32, 4)
    x, probabilities = leaf(tokens, WIDTH).detach(), leaf(tokens, count, dtype=torch.float32).detach().softmax(1)
    routing = probabilities >= probabilities.topk(2, 1).values[:, -1:]
    rows = permutation.make_row_id_map(routing, tokens, count)
    sent, _, sent_probabilities = permutation.permute_with_mask_map(
        x, rows, probabilities, None, None, tokens, count, int(routing.sum()), WIDTH, 0
    )
    back, _ = permutation.unpermute_with_mask_map(sent, rows, probabilities, None, None, tokens, count, WIDTH)
    streams = leaf(tokens // 2, 2, sized(1024, 64), 4)
    phi = leaf(24, 4 * sized(1024, 64), scale=0.02, dtype=torch.float32)
    alpha, beta = leaf(3, dtype=torch.float32), leaf(1, 24, dtype=torch.float32)
    mixed, post, rest = mhc.mhc_generate_mix_and_aggregate(streams, phi, alpha, beta)
    streams = mhc.mhc_fused_expand_combine(mixed, None, post, streams, rest, 4)
    words = sized(32000, 96)
    losses, *kept = cross_entropy_forward(
        leaf(1, tokens // 4, words).detach(),
        torch.arange(tokens // 4, device=DEVICE)[None] * 7919 % words,
        0.1,
        False,
        None,
        -100,
        False,
    )
    return [sent, sent_probabilities, back, mixed, streams, losses, kept[0]]


def xlstm() -> Any:
    """Train the chunks of an mLSTM, one with autotuned kernels as well, and take a step of decoding."""
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk
    from mlstm_kernels.torch.parallel.triton_limit_headdim import mlstm_parallel__limit_headdim
    from mlstm_kernels.torch.recurrent.triton_step_alternate import mlstm_recurrent_step__triton_alternate_fw

    heads, tokens, width, wide = sized(8, 1), sized(2048, 64), 64, 256
    q, k, v = (leaf(2, heads, tokens, width, scale=scale) for scale in (0.3, 0.2, 0.5))
    i, f = leaf(2, heads, tokens, dtype=torch.float32), leaf(2, heads, tokens, scale=2.0, dtype=torch.float32)
    chunks = mlstm_chunkwise__xl_chunk(q, k, v, i, f, chunk_size=sized(128, 32), autocast_kernel_dtype=BF16)
    found = trained(chunks, q, k, v, i, f)
    found += trained(mlstm_parallel__limit_headdim(q, k, v, i, f, autocast_kernel_dtype=BF16), q, k, v)
    state = [torch.zeros(2, heads, *sizes, device=DEVICE) for sizes in ((wide, wide), (wide,), (1,))]
    row = [leaf(2, heads, wide, scale=scale, dtype=torch.float32).detach() for scale in (0.3, 0.2, 0.5)]
    gates = [one[:, :, :1].detach().float().contiguous() for one in (i, f)]
    h, new = mlstm_recurrent_step__triton_alternate_fw(*state, *row, *gates)
    return [*found, h, *new]


def attention() -> Any:
    """Attend with keys split over programs, multiply tiles of lists of tensors, and normalise."""
    from xformers.ops import fmha, tiled_matmul
    from xformers.ops.rmsnorm import rms_norm, rms_norm_add

    q = leaf(sized(16, 1), 1, sized(32, 2), 128).detach()
    k, v = (leaf(sized(16, 1), sized(4096, 64), sized(32, 2), 128, scale=scale).detach() for scale in (0.4, 0.6))
    fmha.triton_splitk.FwOp.AUTOTUNE = True  # the module holds the autotuned kernels, no other
    attended, _ = fmha.triton_splitk.FwOp.apply(fmha.Inputs(q, k, v), needs_gradient=False)
    rows, columns = sized(2048, 32), sized(1024, 32)
    left = [[leaf(rows, columns, scale=scale).detach() for scale in (0.5, 0.7)]]
    right = [[leaf(columns, columns, scale=0.1).detach()] for _ in range(2)]
    x, y, weight = leaf(TOKENS, WIDTH).detach(), leaf(TOKENS, WIDTH, scale=0.5).detach(), leaf(WIDTH).detach()
    return [attended, tiled_matmul(left, right), rms_norm(x, weight), rms_norm_add(x.clone(), y, weight)]


def engine() -> Any:
    """Multiply with all multiprocessors but some, gate, normalise, and merge partial attentions."""
    from flashinfer.triton import activation, cascade, norm, sm_constraint_gemm

    tokens = sized(2048, 48)
    x, weight = leaf(tokens, WIDTH).detach(), leaf(WIDTH, WIDTH, scale=0.02).detach()
    found = [
        sm_constraint_gemm.gemm_persistent(x, weight.T, torch.zeros_like(x), num_sms=100),
        sm_constraint_gemm.gemm_persistent(x, weight, torch.ones_like(x), alpha=0.5, beta=0.25),
        sm_constraint_gemm.gemm(x, weight.T, torch.zeros_like(x)),
        activation.silu_and_mul(x),
    ]
    y, residual = torch.empty_like(x), torch.empty_like(x)
    norm.rms_norm_add_residual(x.clone(), x * 0.5, weight[0], 1e-6, x_out=y)
    norm.rms_norm(x, weight[0], residual, 1e-6)
    states, sums = leaf(tokens, 8, sized(32, 2), 128).detach(), leaf(tokens, 8, sized(32, 2), dtype=torch.float32).detach()
    merged = (
        cascade.merge_states(states, sums),
        cascade.merge_state(
            states[:, 0].contiguous(), sums[:, 0].contiguous(), states[:, 1].contiguous(), sums[:, 1].contiguous()
        ),
    )
    return [*found, y, residual, merged]


def int4() -> Any:
    """Multiply with int4 and int8 weights, few tokens and many."""
    from lightllm.common.basemodel.triton_kernel import dequantize_gemm_int4, quantize_gemm_int8

    width = sized(1024, 128)
    weight, found = leaf(width, width, scale=0.02, dtype=torch.float16).detach(), list[Any]()
    packed, scales, zeros, group = dequantize_gemm_int4.quantize_int4(weight, group_size=sized(128, 32))
    narrow, narrow_scales = quantize_gemm_int8.quantize_int8(weight)
    for tokens in (16, sized(1024, 32)):
        x = leaf(tokens, width, dtype=torch.float16).detach()
        found += [
            dequantize_gemm_int4.matmul_dequantize_int4_gptq(x, packed, scales, zeros, group),
            dequantize_gemm_int4.matmul_dequantize_int4_s2(x, packed, scales, zeros, group),
            quantize_gemm_int8.matmul_quantize_int8(x, narrow, narrow_scales, out=torch.empty_like(x)),
        ]
    return [*found, dequantize_gemm_int4.dequantize_int4(packed, scales, zeros, DEVICE, torch.float16, group)]


PARTS = {
    part.__name__: part for part in (norms, convolution, diffusion, optimizers, ternary, experts, xlstm, attention, engine, int4)
}

if __name__ == "__main__":
    run(PARTS[sys.argv[1]])
