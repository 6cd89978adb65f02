"""Tabulate products with weights of four bits beside products with 8 and 16 bits, by the number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import geometric_mean

from kerneltune.records import Record, ratio
from kerneltune.table import Column, Row, Table
from kerneltune.workloads import OfCase, cases_of


@dataclass(frozen=True, slots=True)
class _Layout:
    """Say which variants of an operator the columns show.

    Attributes:
        products: name of a product -> its variants; the fastest variant counts.
        ours: the product, or chosen product, whose time is compared.
        against: names of the products that it is compared with.
        peers: names of the products that are left out where the fastest is named.
        note: the meaning of the names.
    """

    products: dict[str, tuple[str, ...]]
    ours: str
    against: tuple[str, ...]
    peers: tuple[str, ...]
    note: str


_LAYOUTS = {
    "int4_gemm": _Layout(
        {"int4": ("optimized",), "fp8": ("scaled_mm",), "16 bit": ("dequantised",), "peer": ("tinygemm", "humming", "gemlite")},
        ours="int4",
        against=("peer", "fp8", "16 bit"),
        peers=("peer",),
        note="peer: the fastest other int4 kernel. fp8, 16 bit: torch's products. Times of fp8 leave out the cast of x; those of "
        "family int4_fp8 include it.",
    ),
    "int4_fastest_gemm": _Layout(
        {
            "int4_gemm": ("baseline",), "int4_fp8_gemm": ("int4_fp8",), "fp8 row": ("scaled_mm_rowwise",),
            "fp8 tensor": ("scaled_mm_static",), "16 bit": ("dequantised",), "chosen": ("optimized",),
        },
        ours="chosen",
        against=("fp8 row", "fp8 tensor"),
        peers=("fp8 tensor", "chosen"),
        note="fp8 row: torch's, with scales per token and row of w. fp8 tensor: torch's, with one scale for x, known in "
        "advance, and one for w. Times include the cast of x.",
    ),
    "int4_fp8_grouped_gemm": _Layout(
        {"int4": ("optimized",), "fp8": ("scaled_grouped_mm",), "bf16": ("baseline",)},
        ours="int4",
        against=("fp8", "bf16"),
        peers=(),
        note="fp8, bf16: torch's grouped products, fp8 with a scale for every token and row. Times include the cast of x.",
    ),
}  # fmt: skip
OPS = (*_LAYOUTS, "int4_fp8_gemm")
"""Operators of the records. `int4_fp8_gemm` has no table of its own, because `int4_fastest_gemm` times it, too."""

_Times = dict[str, float]
"""Name of a product -> µs."""


def tables(records: Sequence[Record]) -> list[Table]:
    """Return a table per operator, GPU and policy: a row per layer and number of tokens, means above and the fastest below."""
    timed = [record for record in records if record.time_us is not None]
    kinds = [(op, *place, cases) for op in _LAYOUTS for place, cases in cases_of(timed, op).items()]
    made = [_table(_LAYOUTS[op], cases, f"{op}, {gpu}, {policy}" * (len(kinds) > 1)) for op, policy, gpu, cases in kinds]
    return [table for table in made if table.rows]


def _table(layout: _Layout, of_cases: Sequence[OfCase], title: str) -> Table:
    cases = {_layer_and_tokens(next(iter(of_case.values()))): of_case for of_case in of_cases}
    times = {case: _times(layout, of_case) for case, of_case in cases.items()}
    layers = list(dict.fromkeys(layer for layer, _ in cases))
    ordered = sorted((case for case in cases if layout.ours in times[case]), key=lambda case: (layers.index(case[0]), case[1]))
    rows = []
    for case in ordered:
        of_case, ours = times[case], times[case][layout.ours]
        config = next((cases[case][name].config for name in layout.products[layout.ours] if name in cases[case]), None)
        product = () if layout.ours != "chosen" else ((config or {}).get("product", ""),)
        ratios = (ratio(of_case.get(name), ours) for name in layout.against)
        rows.append(Row((*case, *(of_case.get(name) for name in layout.products), *product, *ratios)))
    by_layer = {layer: list(of_layer) for layer, of_layer in groupby(ordered, key=lambda case: case[0])}
    fastest = (f"{layer}: {_fastest(layout, times, of_layer)}" for layer, of_layer in by_layer.items())
    means = _means(layout, [(tokens, times[layer, tokens]) for layer, tokens in ordered])
    note = f"{layout.note} x: how many times as long it takes as {layout.ours}."
    return Table(_columns(layout), tuple(rows), (*means, note), tuple(fastest), repeated=1, title=title)


def _columns(layout: _Layout) -> tuple[Column, ...]:
    def key(name: str) -> str:
        return name.replace(" ", "_")

    rank = {layout.ours: 0} | {name: 1 for name in layout.against}
    timed = (Column(f"{name} µs", digits=1, key=f"{key(name)}_us", rank=rank.get(name, 2)) for name in layout.products)
    product = (Column("chosen"),) if layout.ours == "chosen" else ()
    compared = (Column(f"x {name}", digits=2, suffix="x", key=f"times_{key(name)}") for name in layout.against)
    return Column("layer", wraps=True), Column("n", digits=0), *timed, *product, *compared


def _layer_and_tokens(record: Record) -> tuple[str, int]:
    """Return the sizes of a weight, the type of its tokens and the options that are on, in a line; and the number of tokens."""
    sizes = [f"{name}={size}" for name, size in record.axes.items() if name != "N"]
    settings = [f"{name}={value}" for name, value in record.options.items() if value is not False and name != "fp8_copy"]
    kept = {False: ["without an fp8 copy"], "static": ["static scale of x"]}.get(record.options.get("fp8_copy", True), [])
    return " ".join([*sizes, record.dtype, *settings, *kept]), record.axes["N"]


def _times(layout: _Layout, of_case: OfCase) -> _Times:
    """Return the fastest time of each product that was timed."""
    timed = {variant: record.time_us for variant, record in of_case.items() if record.time_us is not None}
    times_us = {name: [timed[v] for v in variants if v in timed] for name, variants in layout.products.items()}
    return {name: min(of_product) for name, of_product in times_us.items() if of_product}


def _fastest(layout: _Layout, times: dict[tuple[str, int], _Times], of_layer: Sequence[tuple[str, int]]) -> str:
    """Return the fastest product of a layer, and from how many tokens on."""

    def name_of(case: tuple[str, int]) -> str:
        compared = {name: time_us for name, time_us in times[case].items() if name not in layout.peers}
        return min(compared, key=compared.__getitem__) if compared else layout.ours

    return ", ".join(f"{name} from n={next(run)[1]}" for name, run in groupby(of_layer, key=name_of))


def _means(layout: _Layout, timed: Sequence[tuple[int, _Times]]) -> list[str]:
    """Return a line per number of tokens: geometric means over the cases in which a product was timed, and the smallest ratio."""
    lines = []
    for tokens in sorted({tokens for tokens, _ in timed}):
        said = []
        for name in layout.against:
            ratios = [times[name] / times[layout.ours] for n, times in timed if n == tokens and name in times]
            if ratios:
                said.append(f"{geometric_mean(ratios):.2f}x {name} (worst {min(ratios):.2f}x, {len(ratios)} cases)")
        if said:
            lines.append(f"n = {tokens}: {', '.join(said)}")
    return lines
