"""Print how far a product of int4 weights and e4m3 tokens can be ahead of torch's fp8 product on an H200, from its records.

Run `python benchmarks/int4_bound.py`. A figure is the time of torch's product with scales known in advance over the bound of
`int4_fp8_gemm` or over its time, the geometric mean of all weights with groups of 128.
"""

import csv
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean

from kerneltune.rounding import cdiv

RECORDS = Path(__file__).parents[1] / "results" / "nvidia_h200" / "int4_fp8.csv"
READ_TB_S = 4.16
"""Measured: 61.6 MB of codes, scales, x and y of 28672×4096 with 16 tokens in 14.8 µs."""
PRODUCT_TFLOP_S = 1300
"""Near the most that products in e4m3 sustain: torch's of 28672×4096 with 256 tokens has 1261, launches and cast taken off."""
LAUNCHES_US, CAST_US = 3.0, 1.1
"""Both launches, and the cast of 4096 k of a token."""
CLOCK_GHZ, SMS = 1.755, 132
CLOCKS = {16: 149, 32: 157, 64: 172.5, 128: 252}
"""Instructions of a scheduler for 64 rows of w and 128 k, by tokens of a program: counted in the code for sm_90."""
OVERLAP = 0.4
"""Measured: 257 clocks of tensor cores hide 103 of 238 of integer instructions, and none of FFMA; see docs/notes/int4.md."""
Times = dict[tuple[int, int, int], dict[tuple[str, str], float]]


def bound_us(tokens: int, rows: int, depth: int, overlap: float) -> float:
    """Return the least time of a product: launches and cast, then the longer of memory and work.

    Args:
        tokens, rows, depth: N, M and K. Programs have 16, 32, 64 or 128 tokens, and also work for tokens that are not there.
        overlap: share of the time of products that hides instructions other than FFMA, one for each sum of a thread and step.
    """
    tile = next((tile for tile in CLOCKS if tokens <= tile), max(CLOCKS))
    tiles = cdiv(tokens, tile)
    steps = tiles * cdiv(rows, 64) * depth / 128 / SMS
    scaling, others = (steps * clocks / CLOCK_GHZ / 1e3 for clocks in (tile / 2, CLOCKS[tile] - tile / 2))
    product = 2 * tiles * tile * rows * depth / PRODUCT_TFLOP_S / 1e6
    work = product + scaling + others - min(others, overlap * product)
    memory = (rows * depth * (1 / 2 + 2 / 128) + 2 * tokens * (rows + depth)) / READ_TB_S / 1e6
    return LAUNCHES_US + CAST_US * depth / 4096 + max(memory, work)


def recorded() -> Times:
    """Return the µs of each operator and variant by N, M and K, of groups of 128 without zero points."""
    times: Times = {}
    with RECORDS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if (row["group"], row["zeros"], row["status"]) == ("128", "False", "passed"):
                sizes = int(row["N"]), int(row["M"]), int(row["K"])
                times.setdefault(sizes, {})[row["op"], row["variant"]] = float(row["time_us"])
    return times


def table(times: Times) -> dict[str, dict[int, float]]:
    """Return the figures by the name of their row and by tokens."""
    columns: dict[str, Callable[[int, int, int], float]] = {
        "the bound, if products hide all instructions but FFMA": lambda n, m, k: bound_us(n, m, k, 1),
        "the bound, with the overlap that was measured": lambda n, m, k: bound_us(n, m, k, OVERLAP),
        "the bound without overlap": lambda n, m, k: bound_us(n, m, k, 0),
        "`int4_fp8_gemm`": lambda *sizes: times[sizes]["int4_fp8_gemm", "optimized"],
    }
    known = {sizes: of_sizes["int4_fastest_gemm", "scaled_mm_static"] for sizes, of_sizes in times.items()}
    return {
        name: {
            tokens: geometric_mean(us / time_of(*sizes) for sizes, us in known.items() if sizes[0] == tokens)
            for tokens in sorted({sizes[0] for sizes in known})
        }
        for name, time_of in columns.items()
    }


if __name__ == "__main__":
    figures = table(recorded())
    tokens = next(iter(figures.values()))
    print(f"| tokens | {' | '.join(map(str, tokens))} |\n|{'---|' * (len(tokens) + 1)}")
    for name, of_tokens in figures.items():
        print(f"| {name} | {' | '.join(f'{ratio:.2f}x' for ratio in of_tokens.values())} |")
