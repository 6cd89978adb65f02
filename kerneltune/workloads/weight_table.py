"""From how many tokens on weights of 8 or 16 bits are as fast as weights of four: a table made of records.

Pure; imports cells, records and stats, not torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kerneltune.cells import aligned, number, ratio, wrapped
from kerneltune.records import Record
from kerneltune.stats import geometric_mean

OURS = "optimized"
_NO_PEERS = ("baseline", "splitk", "streamk", OURS, "dequantised")
"""Variants of `int4_gemm` that are ours, or read 16 bits."""
_HEAD = ("n", "int4 µs", "GB/s", "% ceiling", "int4 peer µs", "fp8 µs", "fp16 µs", "x peer", "x fp8", "x fp16")


_FEW = 32
"""Tokens up to which four bits are meant to win."""


@dataclass(frozen=True, slots=True)
class WeightRow:
    """A product of `tokens` with a (M, K) weight; fastest times in microseconds, None where nothing was timed.

    Attributes:
        layer: sizes, type and group of the weight, in one line.
        gbps, pct_ceiling: of our int4 kernel; codes, scales, x and y over the time, and percent of the streaming kernel's.
        peer: another package's kernel for int4 weights.
        fp8, fp16: ours or torch's.
    """

    layer: str
    tokens: int
    int4: float | None
    gbps: float | None
    pct_ceiling: float | None
    peer: float | None
    fp8: float | None
    fp16: float | None


def weight_rows(records: Iterable[Record], policy: str = "cold") -> list[WeightRow]:
    """A row per layer and number of tokens that `int4_gemm` was timed for, layers in their order, tokens ascending; the last
    record of a kind counts."""
    last = {(r.key, r.device, r.variant): r for r in records if r.policy == policy}
    rows: dict[str, list[WeightRow]] = {}
    for record in last.values():
        if record.op == "int4_gemm" and record.variant == OURS and record.time_us is not None:
            row = _row(record, [r for r in last.values() if r.device == record.device and _shape(r) == _shape(record)])
            rows.setdefault(row.layer, []).append(row)
    return [row for found in rows.values() for row in sorted(found, key=lambda row: row.tokens)]


def _row(ours: Record, others: Sequence[Record]) -> WeightRow:
    def fastest(found: Iterable[Record]) -> float | None:
        return min((r.time_us for r in found if r.time_us is not None), default=None)

    sizes = [f"{name}={ours.axes[name]}" for name in ("M", "K")]
    settings = [f"{name}={value}" for name, value in ours.options.items() if value is not False]
    return WeightRow(
        layer=" ".join([*sizes, ours.dtype, *settings]),
        tokens=ours.axes["N"],
        int4=ours.time_us,
        gbps=ours.gbps,
        pct_ceiling=ours.pct_ceiling,
        peer=fastest(r for r in others if r.key == ours.key and r.variant not in _NO_PEERS),
        fp8=fastest(r for r in others if r.op == "fp8_gemm"),
        fp16=fastest(r for r in others if r.op == "fp16_gemm"),
    )


def _shape(record: Record) -> tuple[object, ...]:
    return tuple(record.axes.items()), record.dtype


def crossover(rows: Sequence[WeightRow], name: str) -> str:
    """From which tokens on `fp8` or `fp16` (the field `name`) is faster than int4 in rows of one layer, in words."""
    found = [(row.tokens, row.int4, other) for row in rows if row.int4 is not None and (other := getattr(row, name)) is not None]
    if not found:
        return f"{name} not timed"
    wins = [tokens for tokens, int4, other in found if other < int4]
    if not wins:
        return f"{name} never faster up to n={found[-1][0]}"
    until = next((tokens for tokens, int4, other in reversed(found) if other >= int4), 0)
    later = [tokens for tokens in wins if tokens > until]
    return f"{name} faster from n={later[0]}" if later else f"{name} faster at n={', '.join(map(str, wins))} only"


def weight_text(rows: Sequence[WeightRow], width: int = 80) -> str:
    """A table of 80 columns per layer under its crossovers, and the geometric means."""
    cells = {id(row): _cells(row) for row in rows}
    widths = [max(map(len, column)) for column in zip(_HEAD, *cells.values(), strict=True)]
    lines = []
    for layer, group in groupby(rows, key=lambda row: row.layer):
        found = list(group)
        lines += wrapped(f"{layer}: {crossover(found, 'fp8')}, {crossover(found, 'fp16')}", width)
        lines += [aligned(_HEAD, widths), *(aligned(cells[id(row)], widths) for row in found), ""]
    return "\n".join([*lines, *_means(rows)]).rstrip() + "\n"


def weight_markdown(rows: Sequence[WeightRow]) -> str:
    """The same for a README, the crossovers in a column of the first row."""
    lines: list[Sequence[str]] = [("layer", *_HEAD, "crossover"), ["---"] + ["---:"] * len(_HEAD) + ["---"]]
    for layer, group in groupby(rows, key=lambda row: row.layer):
        found = list(group)
        words = f"{crossover(found, 'fp8')}; {crossover(found, 'fp16')}"
        for row in found:
            lines.append((layer, *_cells(row), words))
            words = ""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cells(row: WeightRow) -> list[str]:
    times = [number(value, 1) for value in (row.peer, row.fp8, row.fp16)]
    ratios = [number(ratio(value, row.int4), 2) for value in (row.peer, row.fp8, row.fp16)]
    return [str(row.tokens), number(row.int4, 1), number(row.gbps, 0), number(row.pct_ceiling, 1), *times, *ratios]


def _means(rows: Sequence[WeightRow]) -> list[str]:
    """For each kind of others a line over few tokens, and one for every number of tokens where there are several."""
    lines = []
    for name, said in (("peer", "int4 peers"), ("fp8", "fp8"), ("fp16", "fp16")):
        found = [(row.tokens, r) for row in rows if (r := ratio(getattr(row, name), row.int4)) is not None]
        few = [r for tokens, r in found if tokens <= _FEW]
        if few:
            lines.append(
                f"n <= {_FEW}: {geometric_mean(few):.2f}x the fastest of {said}, worst {min(few):.2f}x ({len(few)} cases)"
            )
        counts = sorted({tokens for tokens, _ in found})
        for count in counts if len(counts) > 1 else ():
            these = [r for tokens, r in found if tokens == count]
            lines.append(
                f"  n = {count}: {geometric_mean(these):.2f}x, {min(these):.2f} to {max(these):.2f}x ({len(these)} cases)"
            )
    return lines
