"""Show training steps of models: tokens per second of each variant, and how many times bf16's and torchao's.

Pure: imports no torch.
"""

from collections.abc import Iterable

from kerneltune.records import Record, other_run
from kerneltune.table import Column, Row, Table, ratio

OPS = ("model_step",)
_COLUMNS = (
    Column("case"),
    Column("layers"),
    Column("variant"),
    Column("step ms", digits=1, key="step_ms"),
    Column("tokens/s", digits=0, key="tokens_per_s"),
    Column("x bf16", digits=2, suffix="x", key="times_bf16"),
    Column("x torchao", digits=2, suffix="x", key="times_torchao", rank=1),
)
_SPLIT = "_dense"


def tables(records: Iterable[Record]) -> list[Table]:
    """Return the table of all steps that have a time; the last record of a kind counts."""
    cases: dict[object, dict[str, Record]] = {}
    for record in records:
        if record.op in OPS:
            cases.setdefault((record.key, record.device, record.policy), {})[record.variant] = record
    rows = [_row(record, found) for found in cases.values() for record in found.values()]
    return [Table(_COLUMNS, tuple(rows), repeated=2)] if rows else []


def _row(record: Record, found: dict[str, Record]) -> Row:
    layers = "compiled" if record.options.get("compiled") else "eager"
    name = "bf16" if record.variant == "baseline" else record.variant
    peer = "torchao_dense" if record.variant.endswith(_SPLIT) else "torchao"
    step = record.time_us
    tokens = None if step is None else record.axes["T"] / step * 1e6
    beside = (_beside(record, found.get(other)) for other in ("baseline", peer))
    return Row((record.case, layers, name, None if step is None else step / 1e3, tokens, *beside), record.reason)


def _beside(record: Record, other: Record | None) -> float | None:
    """Return how many times as long another variant of the same run takes."""
    return None if other is None or other_run(record, other) else ratio(other.time_us, record.time_us)
