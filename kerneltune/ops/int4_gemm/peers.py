"""Run peers, each on weights in its own layout, which are made once. A peer is imported when it runs."""

from typing import Any

import torch

from kerneltune.ops.int4_gemm import checkpoints, packing
from kerneltune.ops.int4_gemm.reference import E4M3_ROUNDING, Forms, group_size, not_empty
from kerneltune.spec import Case, Inputs, Outputs, Variant


def dequantised(inputs: Inputs, _config: None) -> Outputs:
    """Run torch's product with weights of 16 bits."""
    return {"y": torch.nn.functional.linear(inputs["x"], inputs["forms"].dequantised, inputs.get("bias"))}


def scaled_mm(inputs: Inputs, _config: None) -> Outputs:
    """Run torch's product with x and weights of fp8, one scale for each tensor."""
    forms: Forms = inputs["forms"]
    x, x_scale = forms.other("e4m3 x", lambda _: packing.to_e4m3(inputs["x"], by_row=False))
    w, w_scale = forms.other("e4m3", lambda forms: packing.to_e4m3(forms.dequantised, by_row=False))
    y = torch._scaled_mm(x, w.t(), scale_a=x_scale, scale_b=w_scale, out_dtype=inputs["x"].dtype, use_fast_accum=True)
    return {"y": y + inputs["bias"] if "bias" in inputs else y, "rounding": E4M3_ROUNDING}


def tinygemm(inputs: Inputs, _config: None) -> Outputs:
    """Run torch's own kernel for four bits."""
    forms: Forms = inputs["forms"]
    packed, scales_and_zeros = forms.other("tinygemm", _tinygemm_weight)
    y = torch.ops.aten._weight_int4pack_mm(inputs["x"], packed, forms.weight.group, scales_and_zeros)
    return {"y": y + inputs["bias"] if "bias" in inputs else y}


def humming(inputs: Inputs, _config: None) -> Outputs:
    """Run humming-kernels with its own choice of tiles."""
    layer = inputs["forms"].other("humming", _humming_layer)
    y = layer(inputs["x"])
    return {"y": y + inputs["bias"] if "bias" in inputs else y}


def gemlite(inputs: Inputs, _config: None) -> Outputs:
    """Run gemlite's Triton kernels with their own tuning."""
    y = inputs["forms"].other("gemlite", _gemlite_layer)(inputs["x"])
    return {"y": y + inputs["bias"] if "bias" in inputs else y}


def scaled_grouped_mm(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, offs: torch.Tensor
) -> torch.Tensor:
    """Return torch's grouped product of x (N, K) and w (E, M, K) in e4m3, with scales (N,) and (E, M), in bf16."""
    y: torch.Tensor = torch._scaled_grouped_mm(
        x, w.transpose(1, 2), x_scale, w_scale, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return y


def _tinygemm_weight(forms: Forms) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales, _ = packing.unpack(forms.weight)
    packed = torch.ops.aten._convert_weight_to_int4pack((codes[:, 0::2] << 4) | codes[:, 1::2], 8)
    return packed, torch.stack((scales.t(), torch.zeros_like(scales.t())), -1).contiguous()


def _humming_layer(forms: Forms) -> Any:
    from humming.layer import HummingLayer

    weight = forms.weight
    qweight, _, scales = checkpoints.to_gptq(packing.unpack(weight))
    config = {"quant_method": "gptq", "bits": 4, "group_size": weight.group, "sym": True, "desc_act": False}
    layer = HummingLayer(shape_n=weight.rows, shape_k=weight.depth, weight_config=config, torch_dtype=scales.dtype)
    layer = layer.to(qweight.device)
    layer.load_from_tensors({"qweight": qweight, "scales": scales})
    layer.transform()
    return layer


def _gemlite_layer(forms: Forms) -> Any:
    from gemlite.core import DType, GemLiteLinear

    weight = forms.weight
    codes, scales, _ = packing.unpack(weight)
    dtype = DType.FP16 if scales.dtype == torch.float16 else DType.BF16
    layer = GemLiteLinear(
        4, group_size=weight.group, in_features=weight.depth, out_features=weight.rows, input_dtype=dtype, output_dtype=dtype
    )
    layer.pack(codes, scales, packing.MIDDLE)
    return layer


def not_scaled_mm(case: Case) -> str | None:
    """Refuse sizes that are no multiples of 16, which `_scaled_mm` does not support."""
    return "needs M % 16 == 0 and K % 16 == 0" if case["M"] % 16 or case["K"] % 16 else not_empty(case)


def not_tinygemm(case: Case) -> str | None:
    """Refuse cases that tinygemm does not support: it needs bf16, a GPU, groups of 32 to 256 and whole tiles."""
    if case.dtype != "bfloat16":
        return "takes bfloat16 alone"
    if case["M"] % 8 or case["K"] % 128 or group_size(case) not in (32, 64, 128, 256):
        return "needs M % 8 == 0, K % 128 == 0 and groups of 32, 64, 128 or 256"
    return _not_symmetric_on_a_gpu(case)


def not_humming(case: Case) -> str | None:
    """Refuse cases that humming does not support: it needs whole tiles on a GPU."""
    return "needs M % 64 == 0 and K % 128 == 0" if case["M"] % 64 or case["K"] % 128 else _not_symmetric_on_a_gpu(case)


def not_gemlite(case: Case) -> str | None:
    """Refuse cases that gemlite does not support: it needs whole tiles on a GPU."""
    return "needs M % 32 == 0 and K % 32 == 0" if case["M"] % 32 or case["K"] % 32 else _not_symmetric_on_a_gpu(case)


def _not_symmetric_on_a_gpu(case: Case) -> str | None:
    if not torch.cuda.is_available():
        return "needs a GPU"
    return "is compared without zero points" if case.option("zeros") else not_empty(case)


VARIANTS = (
    Variant("dequantised", dequantised, unsupported=not_empty, requires=("torch",)),
    Variant("scaled_mm", scaled_mm, unsupported=not_scaled_mm, requires=("torch",)),
    Variant("tinygemm", tinygemm, unsupported=not_tinygemm, requires=("torch",)),
    Variant("humming", humming, unsupported=not_humming, requires=("humming",)),
    Variant("gemlite", gemlite, unsupported=not_gemlite, requires=("gemlite",)),
)
