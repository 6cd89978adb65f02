"""Run linear layers of gemlite: `python gemlite_layers.py int8|int4`."""

import sys
from typing import Any

import torch
from measured_step import DEVICE, leaf, run, sized

K, N = sized(4096, 256), sized(6144, 128)
TOKENS = (1, 8, 48, 300)


def _layer(bits: int) -> Any:
    from gemlite.core import DType, GemLiteLinearTriton
    from gemlite.helper import A8W8_int8_dynamic

    torch.manual_seed(0)
    if bits == 8:
        layer = torch.nn.Linear(K, N, bias=False, dtype=torch.float16, device=DEVICE)
        return A8W8_int8_dynamic(device=DEVICE, dtype=torch.float16).from_linear(layer)
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, device=DEVICE)
    scales = torch.rand(N * K // 64, 1, device=DEVICE).half() / 64
    zeros = torch.full_like(scales, 8)
    layer = GemLiteLinearTriton(4, 64, K, N, input_dtype=DType.FP16, output_dtype=DType.FP16)
    layer.pack(codes, scales, zeros, None)
    return layer


_layers: dict[int, Any] = {}


def step(bits: int) -> Any:
    """Multiply few and many tokens."""
    if bits not in _layers:
        import gemlite

        gemlite.reset_config()  # its own table for this GPU leaves one config for each size
        _layers[bits] = _layer(bits)
    return [_layers[bits](leaf(tokens, K, dtype=torch.float16).detach()) for tokens in TOKENS]


if __name__ == "__main__":
    run(lambda: step({"int8": 8, "int4": 4}[sys.argv[1]]))
