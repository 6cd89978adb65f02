"""Match the records of a row across two sets of records, and find the records that were measured with other code.

An operator may get a new option: newer records have it, older records lack it. If a newer record has the option at its default,
it is of the same row as the older record. The order of axes and options does not matter. This module reads no file.
"""

from collections.abc import Callable, Iterable, Mapping

from kerneltune.listing import OpFacts
from kerneltune.records import Record, grouped, newest
from kerneltune.spec import Op, Option
from kerneltune.table import counted

Identity = Callable[[Record], object]
"""Function of a record whose result is equal for two records of the same row."""
Defaults = Callable[[str], Mapping[str, Option]]
"""Function of an operator's name: the default of every option; empty for an unknown operator."""


def defaults_of(ops: Mapping[str, Op | OpFacts], name: str) -> Mapping[str, Option]:
    """Return the default of every option of an operator; empty for an unknown operator."""
    return {option: values[0] for option, values in ops[name].options.items()} if name in ops else {}


def stale_lines(records: Iterable[Record], ops: Mapping[str, Op]) -> list[str]:
    """Return a line for each own variant whose newest timed records were measured with other code than `ops` has."""
    timed = [record for record in newest(records) if record.status == "passed" and record.role != "peer"]
    lines = []
    for (name, variant), rows in grouped(timed, lambda record: (record.op, record.variant)).items():
        here = next((v.source_hash for v in ops[name].variants if v.name == variant), None) if name in ops else None
        stale = [row for row in rows if row.source_hash != here]
        if not stale:
            continue
        count = f"{len(stale)} of {counted(len(rows), 'row')}"
        if here is None:
            missing = f"no variant {variant}" if name in ops else "no such operator here: --plugin loads those of other packages"
            lines.append(f"{name} {variant}: {count}: {missing}")
        else:
            of = ", ".join(dict.fromkeys(row.source_hash[:8] for row in stale))
            lines.append(f"{name} {variant}: {count} measured with other code ({of}, here {here[:8]}): measure again")
    return lines


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
