"""Match the records of a row across two sets of records, and pool the records of several processes.

An operator may get a new option: newer records have it, older records lack it. If a newer record has the option at its default,
it is of the same row as the older record. The order of axes and options does not matter. This module reads no file and judges
nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from msgspec.structs import replace

from kerneltune.listing import OpFacts
from kerneltune.records import Record, grouped, timing
from kerneltune.spec import Op, Option

Identity = Callable[[Record], object]
"""Function of a record whose result is equal for two records of the same row."""
Defaults = Callable[[str], Mapping[str, Option]]
"""Function of an operator's name: the default of every option; empty for an unknown operator."""
_POOLED = ("device", "unit", "driver", "torch", "triton", "source_hash", "config")
"""Fields that all records of a pool have in common."""


def defaults_of(ops: Mapping[str, Op | OpFacts], name: str) -> Mapping[str, Option]:
    """Return the default of every option of an operator; empty for an unknown operator."""
    return {option: values[0] for option, values in ops[name].options.items()} if name in ops else {}


def identity_of(baseline: Iterable[Record], new: Iterable[Record], defaults: Defaults) -> Identity:
    """Return the function that gives a record's row: operator, types, sizes, options, policy, variant and device.

    If any record of the operator lacks an option, the function drops this option from every row where its value is the default.
    If the default is unknown, and all records that have the option have the same value, this value counts as the default.
    """
    values: dict[str, dict[str, set[Option]]] = {}
    named: dict[str, list[frozenset[str]]] = {}
    for record in (*baseline, *new):
        names = frozenset(record.options)
        if names not in named.setdefault(record.op, []):
            named[record.op].append(names)
        for name, value in record.options.items():
            values.setdefault(record.op, {}).setdefault(name, set()).add(value)
    later = {op: frozenset.union(*sets) - frozenset.intersection(*sets) for op, sets in named.items()}
    left_out = {op: _settled(values[op], names, defaults(op)) for op, names in later.items() if names}

    shared: dict[object, object] = {}  # many rows differ in sizes alone: equal tuples are kept once

    def identity(record: Record) -> object:
        options: Mapping[str, Option] = record.options
        if dropped := left_out.get(record.op):
            options = {name: value for name, value in options.items() if name not in dropped or value != dropped[name]}
        names = (record.op, record.variant, record.device, record.policy, record.dtype, record.quant, *sorted(options.items()))
        return shared.setdefault(names, names), *sorted(record.axes.items())

    return identity


def _settled(values: Mapping[str, set[Option]], names: Iterable[str], defaults: Mapping[str, Option]) -> dict[str, Option]:
    """Return, for each option in `names`, the value that a record without the option has."""
    only = {name: next(iter(values[name])) for name in names if len(values[name]) == 1}
    return only | {name: defaults[name] for name in names if name in defaults}


def pool(rows: Iterable[Record]) -> list[Record]:
    """Pool the records that share key and variant, in the order of the first record of each pool.

    The pooled time is the geometric mean of the processes' medians. Its interval is resampled by process, then by round. The
    pooled noise floor is the median of the processes' noise floors: noise that only one process met does not hide a slowdown. A
    row that failed or was skipped in any process has that status in the pooled record.

    Raises:
        ValueError: rows of the same key differ in GPU, versions, source or config, or hold no samples.
    """
    return [_pooled(group) for group in grouped(rows, lambda row: (row.key, row.variant)).values()]


def _pooled(group: Sequence[Record]) -> Record:
    last = group[-1]
    for status in ("failed", "skipped", "checked"):
        untimed = [row for row in group if row.status == status]
        if untimed:
            return untimed[-1]
    for name in _POOLED:
        if any(getattr(row, name) != getattr(last, name) for row in group):
            raise ValueError(f"{name}: {getattr(last, name)!r}: differs between the processes of {last.label} {last.variant}")
    if len(group) == 1:
        return last
    processes = [rounds for row in group for rounds in row.samples_us or ()]
    if not processes:
        raise ValueError(f"samples_us: None: expected the samples of {last.label} {last.variant}")
    traffic_bytes = (last.gbps or 0.0) * (last.time_us or 0.0) * 1e3
    ceiling_gbps, floor = (_median(getattr(row, name) for row in group) for name in ("ceiling_gbps", "aa_floor"))
    return replace(last, **timing(processes, traffic_bytes, ceiling_gbps, floor))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
