"""Tabulate from how many tokens on weights of 8 or 16 bits are as fast as weights of four.

Pure: imports no torch.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import geometric_mean
from typing import Any

from kerneltune.records import Record
from kerneltune.table import Column, Row, Table, ratio

OURS = "optimized"
_FP8 = "scaled_mm"
"""The variant that is torch's product in fp8."""
_FP16 = ("dequantised", "torch")
"""The variants that are torch's product in 16 bits."""
_NO_PEERS = ("baseline", "splitk", "streamk", OURS, _FP8, *_FP16)
"""Variants of `int4_gemm` that are ours, or read 8 or 16 bits."""
OPS = ("int4_gemm", "fp8_gemm", "fp16_gemm")
"""Operators of the records. `fp8_gemm` and `fp16_gemm` no longer exist; files of 2026-11-22 and before hold them."""
_COLUMNS = (
    Column("layer"),
    Column("n", digits=0),
    Column("int4 µs", digits=1, key="int4_us"),
    Column("fp8 µs", digits=1, key="fp8_us"),
    Column("fp16 µs", digits=1, key="fp16_us", rank=2),
    Column("peer µs", digits=1, key="peer_us", rank=2),
    Column("x peer", digits=2, suffix="x", key="times_peer", rank=1),
    Column("x fp8", digits=2, suffix="x", key="times_fp8"),
    Column("x fp16", digits=2, suffix="x", key="times_fp16", rank=1),
    Column("GB/s", digits=0, key="gbps", rank=4),
    Column("% ceiling", digits=1, key="pct_ceiling", rank=3),
)
_FEW = 32
"""Tokens up to which four bits are meant to win."""


WeightRow = dict[str, Any]
"""The values of a product of n tokens with a (M, K) weight by the keys of the columns; None where nothing was timed."""


def weight_rows(records: Iterable[Record], policy: str = "cold") -> list[WeightRow]:
    """Return a row per layer and number of tokens that `int4_gemm` was timed for, tokens ascending.

    The last record of a kind counts.
    """
    last = {(r.key, r.device, r.variant): r for r in records if r.policy == policy}
    rows: dict[str, list[WeightRow]] = {}
    for record in last.values():
        if record.op == "int4_gemm" and record.variant == OURS and record.time_us is not None:
            row = _row(record, [r for r in last.values() if r.device == record.device and _shape(r) == _shape(record)])
            rows.setdefault(row["layer"], []).append(row)
    return [row for found in rows.values() for row in sorted(found, key=lambda row: row["n"])]


def _row(ours: Record, others: Sequence[Record]) -> WeightRow:
    def fastest(found: Iterable[Record]) -> float | None:
        return min((r.time_us for r in found if r.time_us is not None), default=None)

    sizes = [f"{name}={ours.axes[name]}" for name in ("M", "K")]
    settings = [f"{name}={value}" for name, value in ours.options.items() if value is not False]
    others_us = {
        "fp8": fastest(r for r in others if r.variant == _FP8),
        "fp16": fastest(r for r in others if r.variant in _FP16),
        "peer": fastest(r for r in others if r.key == ours.key and r.variant not in _NO_PEERS),
    }
    return {
        "layer": " ".join([*sizes, ours.dtype, *settings]),
        "n": ours.axes["N"],
        "int4_us": ours.time_us,
        **{f"{name}_us": time_us for name, time_us in others_us.items()},
        **{f"times_{name}": ratio(time_us, ours.time_us) for name, time_us in others_us.items()},
        "gbps": ours.gbps,
        "pct_ceiling": ours.pct_ceiling,
    }


def _shape(record: Record) -> tuple[object, ...]:
    return tuple(record.axes.items()), record.dtype


def crossover(rows: Sequence[WeightRow], name: str) -> str:
    """Describe the number of tokens from which on `fp8`, `fp16` or `peer` is faster than int4 in the rows of a layer."""
    found = [(row["n"], row["int4_us"], other) for row in rows if (other := row[f"{name}_us"]) is not None]
    if not found:
        return f"{name} not timed"
    wins = [tokens for tokens, int4, other in found if other < int4]
    if not wins:
        return f"{name} never faster up to n={found[-1][0]}"
    until = next((tokens for tokens, int4, other in reversed(found) if other >= int4), 0)
    later = [tokens for tokens in wins if tokens > until]
    return f"{name} faster from n={later[0]}" if later else f"{name} faster at n={', '.join(map(str, wins))} only"


def tables(records: Sequence[Record]) -> list[Table]:
    """Return a table per policy: a row per layer and number of tokens, the crossovers and the geometric means above it."""
    policies = dict.fromkeys(record.policy for record in records)
    found = {policy: weight_rows(records, policy) for policy in policies}
    return [_table(rows, policy if len(found) > 1 else "") for policy, rows in found.items() if rows]


def _table(rows: Sequence[WeightRow], title: str) -> Table:
    lines = tuple(Row(tuple(row[column.csv_name] for column in _COLUMNS)) for row in rows)
    crossovers = []
    for layer, group in groupby(rows, key=lambda row: row["layer"]):
        found = list(group)
        crossovers.append(f"{layer}: {crossover(found, 'fp8')}, {crossover(found, 'fp16')}")
    foot = (
        "peer: the fastest other int4 kernel. fp8, fp16: torch's products. x: how many times as long it takes as int4.",
        *crossovers,
    )
    return Table(_COLUMNS, lines, tuple(_means(rows)), foot, repeated=1, title=title)


def _means(rows: Sequence[WeightRow]) -> list[str]:
    """Return for each kind of peer a line over few tokens, and a line per number of tokens if several numbers were timed."""
    lines = []
    for name, said in (("peer", "the fastest of int4 peers"), ("fp8", "torch's fp8"), ("fp16", "torch's fp16")):
        found = [(row["n"], r) for row in rows if (r := row[f"times_{name}"]) is not None]
        few = [r for tokens, r in found if tokens <= _FEW]
        if few:
            lines.append(f"n <= {_FEW}: {geometric_mean(few):.2f}x {said}, worst {min(few):.2f}x ({len(few)} cases)")
        counts = sorted({tokens for tokens, _ in found})
        for count in counts if len(counts) > 1 else ():
            these = [r for tokens, r in found if tokens == count]
            lines.append(
                f"  n = {count}: {geometric_mean(these):.2f}x, {min(these):.2f} to {max(these):.2f}x ({len(these)} cases)"
            )
    return lines
