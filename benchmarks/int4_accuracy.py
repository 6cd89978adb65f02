"""Print the signal-to-noise ratio of products with weights and activations in 4, 8 and 16 bits, against fp64, on a CPU.

Run `python benchmarks/int4_accuracy.py`. Weights are normal. Activations are normal, of Student's t with three degrees of
freedom, or normal with 1 % of the channels 30 times as large.
"""

from collections.abc import Callable
from functools import partial

import torch

from kerneltune.ops.int4_gemm import dequantise, pack, quantise

TOKENS, ROWS, DEPTH = 64, 2048, 4096
"""Sizes of the product; the ratios of larger products are the same within 0.1 dB."""


def fp8(t: torch.Tensor, *, by_row: bool = True) -> torch.Tensor:
    """Return what remains of a matrix after a cast to e4m3 with a scale for each row, or with one scale."""
    multiplier = 448 / t.abs().amax(1 if by_row else (0, 1), keepdim=True)
    return (t * multiplier).float().to(torch.float8_e4m3fn).double() / multiplier


def int4(w: torch.Tensor, group: int, zeros: bool) -> torch.Tensor:
    """Return what remains of a matrix after rounding to four bits with a scale for each group."""
    return dequantise(pack(*quantise(w.half(), group, zeros)), torch.float16).double()


def activations(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return matrices of activations by the name of their distribution."""
    normal, second = (torch.randn(TOKENS, DEPTH, generator=generator, dtype=torch.float64) for _ in range(2))
    normals = [torch.randn(TOKENS, DEPTH, generator=generator, dtype=torch.float64) for _ in range(3)]
    squares = torch.stack(normals).square().sum(0)
    channels = torch.where(torch.rand(DEPTH, generator=generator) < 0.01, 30.0, 1.0)
    return {"normal": normal, "Student's t": second / (squares / 3).sqrt(), "outlier channels": normal * channels}


def main() -> None:
    """Print the table."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(ROWS, DEPTH, generator=generator, dtype=torch.float64) / DEPTH**0.5
    weights = {
        "16 bits": w, "e4m3": fp8(w), "int4, 128": int4(w, 128, False), "int4, 64": int4(w, 64, False),
        "int4, 64, zero points": int4(w, 64, True),
    }  # fmt: skip
    tables = activations(generator)
    print("SQNR, dB".ljust(38), *(name.rjust(17) for name in tables))
    casts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"16 bits": lambda x: x.half().double(), "e4m3": fp8}
    products = [(name, kept, cast) for name, kept in weights.items() for cast in casts]
    copy, casts["e4m3 with one scale"] = weights["int4, 128"], partial(fp8, by_row=False)
    products += [
        ("int4, 128, e4m3 copy", fp8(copy), "e4m3"),
        ("int4, 128, static", fp8(copy, by_row=False), "e4m3 with one scale"),
    ]
    for name, kept, cast in products:
        ratios = []
        for x in tables.values():
            want, got = x @ w.t(), casts[cast](x) @ kept.t()
            ratios.append(10 * float(torch.log10(want.square().sum() / (got - want).square().sum())))
        print(f"{name}, x in {cast}".ljust(38), *(f"{ratio:17.1f}" for ratio in ratios))


if __name__ == "__main__":
    main()
