"""Find the records of one row in two sets of records: whatever the order of keys, and with an option at its default.

An option that an operator got later stands in newer records and not in older ones. Where its value is the default, the row is
the one that the older record holds. Also says which records are of other code than the operators at hand. Reads no file.
"""

from collections.abc import Callable, Iterable, Mapping

from kerneltune.listing import OpFacts
from kerneltune.records import Record, grouped, newest
from kerneltune.spec import Op, Option
from kerneltune.table import counted

Identity = Callable[[Record], object]
"""Gives what is equal for two records of one row."""
Defaults = Callable[[str], Mapping[str, Option]]
"""Gives the default of every option of an operator; empty for one that is not known."""


def defaults_of(ops: Mapping[str, Op | OpFacts], name: str) -> Mapping[str, Option]:
    """Return the default of every option of an operator; empty for one that is not known."""
    return {option: values[0] for option, values in ops[name].options.items()} if name in ops else {}


def stale_lines(records: Iterable[Record], ops: Mapping[str, Op]) -> list[str]:
    """Return a line for each own variant whose newest timed records are of other code than the operators at hand."""
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
    """Return the identity of rows within two sets of records: operator, types, sizes, options, policy, variant and device.

    An option that some record of the operator lacks is left out where it has its default. Where the default is not known, and
    all records that have the option have one value, that value is taken for it.
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

    shared: dict[object, object] = {}  # one of equal tuples: all but the sizes is the same in many rows

    def identity(record: Record) -> object:
        options: Mapping[str, Option] = record.options
        if dropped := left_out.get(record.op):
            options = {name: value for name, value in options.items() if name not in dropped or value != dropped[name]}
        names = (record.op, record.variant, record.device, record.policy, record.dtype, record.quant, *sorted(options.items()))
        return shared.setdefault(names, names), *sorted(record.axes.items())

    return identity


def _settled(values: Mapping[str, set[Option]], names: Iterable[str], defaults: Mapping[str, Option]) -> dict[str, Option]:
    """Return the values that stand for the options' absence."""
    only = {name: next(iter(values[name])) for name in names if len(values[name]) == 1}
    return only | {name: defaults[name] for name in names if name in defaults}
