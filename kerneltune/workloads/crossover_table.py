"""Tabulate which product with int4 weights is the fastest for how many tokens, and how it compares with fp8.

Pure: imports no torch.
"""

from collections.abc import Sequence
from itertools import groupby
from statistics import geometric_mean

from kerneltune.records import Record
from kerneltune.table import Column, Row, Table, ratio

_OP = "int4_fastest_gemm"
OPS = (_OP, "int4_fp8_gemm")
_CHOSEN = "optimized"
_INT4 = ("baseline", "int4_fp8")
"""Variants that read weights of four bits."""
_FP8 = {"scaled_mm_rowwise": "row-wise fp8", "scaled_mm_static": "tensor-wise fp8"}
"""Variants that are torch's products in fp8, and their names in the foot."""
_TIMED = (*_INT4, *_FP8, "dequantised", _CHOSEN)
_COLUMNS = (
    Column("layer"),
    Column("n", digits=0),
    Column("int4_gemm µs", digits=1, key="int4_gemm_us", rank=2),
    Column("int4_fp8_gemm µs", digits=1, key="int4_fp8_gemm_us", rank=2),
    Column("fp8 row µs", digits=1, key="fp8_row_us", rank=3),
    Column("fp8 tensor µs", digits=1, key="fp8_tensor_us", rank=3),
    Column("16 bits µs", digits=1, key="dequantised_us", rank=4),
    Column("chosen µs", digits=1, key="chosen_us", rank=1),
    Column("chosen"),
    Column("x row", digits=2, suffix="x", key="times_row"),
    Column("x tensor", digits=2, suffix="x", key="times_tensor"),
)


def tables(records: Sequence[Record]) -> list[Table]:
    """Return a table per GPU and policy: a row per layer and number of tokens, crossovers and geometric means below."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.op == _OP and record.time_us is not None:
            found.setdefault((record.device, record.policy), []).append(record)
    titles = ["" if len(found) == 1 else f"{device}, {policy}" for device, policy in found]
    return [_table(of_gpu, title) for of_gpu, title in zip(found.values(), titles, strict=True)]


def _table(records: Sequence[Record], title: str) -> Table:
    cases: dict[tuple[str, int], dict[str, Record]] = {}
    for record in records:  # the last record of a variant counts
        cases.setdefault((_layer(record), record.axes["N"]), {})[record.variant] = record
    layers = list(dict.fromkeys(layer for layer, _ in cases))
    ordered = sorted(cases, key=lambda case: (layers.index(case[0]), case[1]))
    rows = tuple(Row((*case, *_values(cases[case]))) for case in ordered)
    foot = (
        "fp8 row: a scale for every token and row of w. fp8 tensor: a scale for x, known in advance, and a scale for w.",
        "Every time includes the cast of x. x: how many times as long fp8 takes as the chosen product.",
        *(f"{layer}: {_crossovers(cases, list(of_layer))}" for layer, of_layer in groupby(ordered, key=lambda case: case[0])),
        *_means(cases),
    )
    return Table(_COLUMNS, rows, (), foot, repeated=1, title=title)


def _layer(record: Record) -> str:
    settings = [f"{name}={value}" for name, value in record.options.items() if value is not False and name != "fp8_copy"]
    kept = [] if record.options.get("fp8_copy", True) else ["without an fp8 copy"]
    return " ".join([*(f"{name}={record.axes[name]}" for name in ("M", "K")), record.dtype, *settings, *kept])


def _values(found: dict[str, Record]) -> tuple[str | float | None, ...]:
    times = {name: found[name].time_us if name in found else None for name in _TIMED}
    return *times.values(), _product(found), *(ratio(times[name], times[_CHOSEN]) for name in _FP8)


def _product(found: dict[str, Record]) -> str:
    """Return the product that the recorded config names."""
    return str((found[_CHOSEN].config or {}).get("product", "")) if _CHOSEN in found else ""


def _crossovers(cases: dict[tuple[str, int], dict[str, Record]], of_layer: Sequence[tuple[str, int]]) -> str:
    """Return from how many tokens on each product is chosen."""
    runs = groupby(of_layer, key=lambda case: _product(cases[case]))
    return ", ".join(f"{product or 'nothing'} from {next(iter(run))[1]}" for product, run in runs)


def _means(cases: dict[tuple[str, int], dict[str, Record]]) -> list[str]:
    """Return a line per number of tokens: geometric means over the cases in which all that is compared was timed."""
    lines = []
    for tokens in sorted({tokens for _, tokens in cases}):
        of_tokens = [{v: r.time_us for v, r in found.items() if r.time_us} for (_, n), found in cases.items() if n == tokens]
        whole = [times for times in of_tokens if times.keys() >= {*_INT4, *_FP8, _CHOSEN}]
        if whole:
            int4 = [geometric_mean(times[name] / min(times[v] for v in _INT4) for times in whole) for name in _FP8]
            chosen = [geometric_mean(times[name] / times[_CHOSEN] for times in whole) for name in _FP8]
            said = [f"{a:.2f}x {name} ({b:.2f}x as chosen)" for a, b, name in zip(int4, chosen, _FP8.values(), strict=True)]
            lines.append(f"n = {tokens}: the faster int4 product: {', '.join(said)}, {len(whole)} cases")
    return lines
