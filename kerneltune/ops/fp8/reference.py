"""What FP8 quantisation with fresh scales is: values, formula, comparison. Shares no code with the kernels.

    s = fp32(FP8_MAX / max(amax, 1e-12)), rounded down to a power of two if asked       q = fp8(x * s), to nearest even

amax is the largest |x| of whatever shares a scale. NaN is not sanitised: its scale and all that share it are NaN. Infinity
gives scale 0: the finite become 0, the infinite NaN. Source: torchao's amax_to_scale and to_fp8_saturated.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kerneltune.kernel_lib.agreement import same_bits
from kerneltune.spec import Case, Inputs, Option, Outputs

FP8 = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}
OPTIONS: dict[str, tuple[Option, ...]] = {
    "fp8_format": tuple(FP8),
    "pow2": (True, False),
    "inverse": (False, True),
    "special": (False, True),
}
"""Type of the output; power-of-two scales; scale or its inverse returned; rows of zeros, subnormals, NaN and infinity in x."""


def values(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int, special: bool = False) -> torch.Tensor:
    """Normal numbers, the columns and rows of each matrix of eight magnitudes."""
    x = torch.empty(shape, dtype=dtype, device=device)
    if device == "meta" or not x.numel():
        return x
    generator = torch.Generator(device=device).manual_seed(seed)
    x.normal_(generator=generator)
    for axis in (-1, -2):
        size = [1] * x.ndim
        size[axis] = x.shape[axis]
        x *= torch.exp2(torch.randint(-3, 5, size, generator=generator, device=device)).to(dtype)
    if special:
        _plant(x.view(-1, x.shape[-1]))
    return x


def _plant(x: torch.Tensor) -> None:
    """Special values at both ends of a matrix, where they meet the edges of tiles."""
    tiny = 2.0**-24 if x.dtype == torch.float16 else 2.0**-130
    for row, value in ((0, 0.0), (1, tiny), (2, torch.nan), (3, torch.inf), (4, -torch.inf)):
        if row < x.shape[0]:
            x[row] = value if row < 2 else x[row]
            x[row, -1] = value
    for column, value in ((0, 0.0), (1, tiny)):
        if column + 8 < x.shape[1]:
            x[:, column + 8] = value


def options(case: Case) -> dict[str, Option]:
    """The options of a case that its variants are told."""
    return {name: case.option(name) for name in ("fp8_format", "pow2", "inverse")}


def chosen(inputs: Inputs) -> dict[str, Any]:
    """The same out of inputs, as keyword arguments."""
    return {name: inputs[name] for name in ("fp8_format", "pow2", "inverse")}


def scale_of(amax: torch.Tensor, fp8_format: str, pow2: bool) -> torch.Tensor:
    """The multiplier for what has this largest magnitude."""
    scale = (torch.finfo(FP8[fp8_format]).max / amax.double().clamp(min=1e-12)).float()
    if not pow2:
        return scale
    return torch.where(scale.isnan(), scale, (scale.view(torch.int32) & 0x7F800000).view(torch.float32))


def quantised(x: torch.Tensor, axis: int, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """x in fp8 with one scale per slice along `axis`, and the scales, inverted if the inputs ask for it; axis kept."""
    dtype = FP8[inputs["fp8_format"]]
    amax = x.abs().amax(axis, keepdim=True) if x.shape[axis] else x.sum(axis, keepdim=True)
    scale = scale_of(amax, inputs["fp8_format"], inputs["pow2"])
    limit = torch.finfo(dtype).max
    q = (x.float() * scale).clamp(-limit, limit).to(dtype)
    return q, 1.0 / scale if inputs["inverse"] else scale


def compare(outputs: Outputs, expected: Outputs) -> Iterator[str]:
    """One line per wrong output; all are held to their bits."""
    for name, want in expected.items():
        yield from same_bits(name, outputs[name], want)
