"""Read sweep files: YAML that names an operator family's check cases, bench cases and gate limits, expanded to Cases.

Every error names file, line, field and value. Time is linear in the size and in the cases.
"""

import fnmatch
import itertools
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from kerneltune.errors import unknown
from kerneltune.files import RESULTS, data_root, written_root
from kerneltune.records import grouped
from kerneltune.spec import Case, Op, Option
from kerneltune.yaml_fields import LONGEST_NAME, NAME, Field, read_yaml

Section = Literal["check", "bench"]

_TOP = ("family", "defaults", "ops", "check", "bench", "headline", "gate")
_HEADLINE = ("op", "case", "dtype", "quant")
_SMALLEST: Mapping[Section, int] = {"check": 0, "bench": 1}
_FAMILY = re.compile(r"[A-Za-z0-9_][\w.-]{0,79}", re.ASCII)
_MOST_CASES = 100_000
"""Most rows of a sweep file; an entry for two operators counts twice."""
OR_FAMILY = ", or a .yaml file; sweep, trials and tune also take the folder of a capture"
OR_OP = ", or an operator that --plugin or --captured loads"
"""End of messages about a family, or an operator: what else may be given in its place."""


class SweepCase(NamedTuple):
    """Hold the name of an operator, and a case of it."""

    op: str
    case: Case


def cases_by_op(sweep_cases: Iterable[SweepCase]) -> dict[str, list[Case]]:
    """Return the cases of each operator."""
    by_op = grouped(sweep_cases, lambda sweep_case: sweep_case.op)
    return {op: [sweep_case.case for sweep_case in members] for op, members in by_op.items()}


@dataclass(frozen=True, slots=True)
class Sweep:
    """Hold the contents of a sweep file, with all cases.

    Attributes:
        gate: the file's gate limits; `margin` is a fraction of the time.
        headline: operators, patterns of case names, element types and modes that select the bench cases of the first table.
    """

    family: str
    path: Path
    check: tuple[SweepCase, ...]
    bench: tuple[SweepCase, ...]
    gate: Mapping[str, float]
    headline: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def is_headline(self, sweep_case: SweepCase) -> bool:
        """Return whether the file's `headline` selects a bench case."""
        case = sweep_case.case
        values = {"op": sweep_case.op, "case": case.name, "dtype": case.dtype, "quant": case.quant}
        named = ((values[key], patterns) for key, patterns in self.headline.items())
        return bool(self.headline) and all(any(fnmatch.fnmatch(value, each) for each in patterns) for value, patterns in named)


def results_root(folder: Path | None) -> Path:
    """Return the folder for records: `folder`, else KERNELTUNE_RESULTS, else `results` of the current folder or checkout."""
    named = folder or os.environ.get(RESULTS)
    return Path(named) if named else written_root("results")


def recorded_root(folder: Path | None, family: str | None = None) -> Path:
    """Return the folder to read records from: `results_root`, or the packaged records if `results_root` has no records."""
    root = results_root(folder)
    is_named = bool(folder or os.environ.get(RESULTS))
    name = "*" if family is None else family_name(family)
    return root if is_named or any(root.glob(f"*/{name}.jsonl")) else data_root("results")


def family_name(family: str) -> str:
    """Return the name of a family in records; for a `.yaml` path, return the name in the file."""
    if not family.endswith((".yaml", ".yml")):
        return family
    return _read_family(read_yaml(find(family)))


def gate_margin(family: str) -> float | None:
    """Return `gate.margin` of a family's sweep file: `FAMILY.yaml` here, else as `find` finds it; None without file or margin."""
    try:
        path = find(f"{family}.yaml" if Path(f"{family}.yaml").is_file() else family)
    except ValueError:  # records of another package, whose sweep file is not here
        return None
    return _read_gate(read_yaml(path).fields().get("gate")).get("margin")


def find(family: str) -> Path:
    """Find the sweep file of a family: a `.yaml` path itself, else in `sweeps/` here, else in the checkout or package."""
    if family.endswith((".yaml", ".yml")):
        if Path(family).exists():
            return Path(family)
        raise ValueError(f"cannot read {family}: no such file")
    for folder in _folders():
        if (folder / f"{family}.yaml").is_file():
            return folder / f"{family}.yaml"
    if Path(family).is_dir() and not Path(family, "classes").is_dir():
        raise ValueError(f"{family}: no capture: expected a folder that `kerneltune capture` wrote")
    captures = sorted(str(classes.parent) for classes in Path(family).parent.glob("*/classes"))
    files = [str(path) for path in (Path(f"{family}.yaml"), Path(f"{family}.yml")) if path.is_file()]
    raise unknown("family", family, [*families(), *captures, *files], OR_FAMILY)


def families() -> list[str]:
    """Return the names of the sweep files in `sweeps/` here and in the checkout or package."""
    return sorted({path.stem for folder in _folders() for path in folder.glob("*.yaml") if path.is_file()})


def _folders() -> list[Path]:
    return [Path("sweeps"), data_root("sweeps")]


def load(path: Path, ops: Mapping[str, Op]) -> Sweep:
    """Load a sweep file of operators by name; a file with more than `_MOST_CASES` is refused before its cases are built."""
    return _Reader(ops).read_sweep(read_yaml(path))


def sweep_text(about: str, family: str, sections: Mapping[Section, Sequence[SweepCase]]) -> str:
    """Return a sweep file with a line for each case of an operator; a case without a name is named by its sizes.

    about: line of the file about its cases.
    """
    ops = dict.fromkeys(op for cases in sections.values() for op, _ in cases)
    lines = [f"# {about}", f"family: {family}", f"ops: [{', '.join(map(json.dumps, ops))}]"]
    for section, cases in sections.items():
        lines += ["", f"{section}:{'' if cases else ' []'}"]
        for op, case in dict.fromkeys(cases):
            name = case.name or f"{op}-{'x'.join(map(str, case.sizes.values()))}"
            fields = {"name": name, "op": op, **case.sizes, "dtype": case.dtype, "quant": case.quant, **dict(case.options)}
            lines.append("  - {" + ", ".join(f"{field}: {json.dumps(value)}" for field, value in fields.items()) + "}")
    return "\n".join(lines) + "\n"


def _read_family(root: Field) -> str:
    """Return the family that a file names."""
    fields = root.fields()
    if "family" not in fields:
        root.fail("a name", "missing", "family")
    family = fields["family"].text()
    if not _FAMILY.fullmatch(family):  # file names contain the family
        fields["family"].fail("at most 80 letters, digits, `_`, `-` and `.`", repr(family))
    return family


def _read_gate(field: Field | None) -> dict[str, float]:
    """Return the gate limits of a file."""
    limits: dict[str, float] = {}
    for key, limit in field.fields(("margin",), "gate.").items() if field else ():
        value = limit.scalar()
        if type(value) not in (int, float) or not 0 <= value < 1:
            limit.fail("a fraction from 0 to below 1", repr(value))
        limits[key] = float(value)
    return limits


def _read_headline(field: Field | None) -> dict[str, tuple[str, ...]]:
    """Return the patterns that select the headline cases of a file."""
    named: dict[str, tuple[str, ...]] = {}
    for key, patterns in field.fields(_HEADLINE, "headline.").items() if field else ():
        for item, value in patterns.values():
            if not isinstance(value, str):
                item.fail("a text", repr(value))
        named[key] = tuple(value for _, value in patterns.values())
    return named


class _Reader:
    """Expand the sections of a file to cases; remember its operators and the names used so far."""

    def __init__(self, ops: Mapping[str, Op]) -> None:
        self.rows_left = _MOST_CASES
        self.known = ops
        self.ops: list[Op] = []
        self.defaults: dict[str, Field] = {}
        self.shapes: dict[object, tuple[object, int]] = {}
        self.rows: dict[object, tuple[str, int]] = {}

    def read_sweep(self, root: Field) -> Sweep:
        """Return the contents of a file."""
        fields, family = root.fields(_TOP), _read_family(root)
        if "ops" not in fields:
            root.fail("names of operators", "missing", "ops")
        self.ops = _operators(fields["ops"], self.known, OR_OP)
        if "defaults" in fields:
            self.defaults = fields["defaults"].fields()
            self.check_defaults()
        check, bench = (tuple(self.section(section, fields.get(section))) for section in _SMALLEST)
        if not check and not bench:
            root.fail("at least one entry in check or bench", "missing", "check")
        loaded = Sweep(family, root.path, check, bench, _read_gate(fields.get("gate")), _read_headline(fields.get("headline")))
        if loaded.headline and not any(map(loaded.is_headline, bench)):
            shown = ", ".join(f"{key} {' '.join(patterns)}" for key, patterns in loaded.headline.items())
            fields["headline"].fail("what at least one bench case has", shown)
        return loaded

    def section(self, section: Section, field: Field | None) -> Iterator[SweepCase]:
        """Yield the cases of a section."""
        if field is not None and not isinstance(field.node, yaml.SequenceNode):
            field.fail("a list of entries")
        for entry in field.items() if field is not None else ():
            yield from self.entries(section, entry)

    def entries(self, section: Section, entry: Field) -> Iterator[SweepCase]:
        """Yield all cases of an entry, operator by operator. An operator that the entry names must have all of its fields."""
        own = entry.fields()
        if "name" not in own:
            entry.fail("a name", "missing", "name")
        name, named = own.pop("name"), own.pop("op", None)
        template = name.text(placeholders=True)
        ops = _operators(named, {op.name: op for op in self.ops}) if named else self.ops
        self.check_fields(own, ops, named is not None)
        fields, count = self.defaults | own, 0
        for op in ops:
            sizes = []
            for axis in op.axes:
                if axis not in fields:
                    entry.fail(f"the size of this axis of {op.name}", "missing", axis)
                sizes.append(fields[axis].sizes(_SMALLEST[section]))
                if len(sizes[-1]) > 1 and f"{{{axis}}}" not in template:
                    name.fail(f"a name with {{{axis}}} in it, as {axis} has several sizes", repr(template))
            usual = {key: offered if key == "quant" else offered[:1] for key, offered in _offered(op).items()}
            among = [op] if named else ops
            values = [_choices(fields[key], op, among) if key in fields else list(default) for key, default in usual.items()]
            rows = math.prod([*map(len, sizes), *map(len, values)])
            count += rows
            self.rows_left -= rows
            if self.rows_left < 0:  # before the rows are built
                entry.fail(f"at most {_MOST_CASES}", f"{_MOST_CASES - self.rows_left} or more", "cases")
            for point in itertools.product(*sizes):
                axes = tuple(zip(op.axes, point, strict=True))
                sized = _sized_name(name, template, axes)
                for dtype, quant, *options in itertools.product(*values):
                    case = Case(sized, axes, str(dtype), str(quant), tuple(zip(op.options, options, strict=True)))
                    self.require_unique(section, op.name, case, name)
                    yield SweepCase(op.name, case)
        if not count:
            name.fail("values that at least one operator takes together", repr(template))

    def check_fields(self, fields: Mapping[str, Field], ops: Sequence[Op], named: bool) -> None:
        """Check that every field belongs to an operator of the entry, or to all of them if the entry names its operators."""
        for key, item in fields.items():
            lacking = [op for op in ops if key not in _fields(op)]
            if len(lacking) == len(ops) or (named and lacking):
                first = [] if fields is self.defaults else ["name", "op"]
                known = [*first, *dict.fromkeys(name for op in (lacking if named else ops) for name in _fields(op))]
                item.refuse(key, known, name="field")

    def check_defaults(self) -> None:
        """Check the fields and values under `defaults`, also if no entry uses them."""
        self.check_fields(self.defaults, self.ops, named=False)
        for key, item in self.defaults.items():
            if any(key in op.axes for op in self.ops):
                item.sizes(0)
            else:
                _choices(item, self.ops[0], self.ops)

    def require_unique(self, section: Section, op: str, case: Case, name: Field) -> None:
        """Refuse a name with two rows or two shapes, and a row with two names.

        A row needs a single name, because the name is no part of a record's key.
        """
        axes, line = self.shapes.setdefault((section, op, case.name), (case.axes, name.line))
        first, line = self.rows.get((section, op, case), ("", line))
        if axes != case.axes or first == case.name:
            name.fail(f"a name not used for {op} on line {line}", repr(case.name))
        if first:
            name.fail(f"sizes or options of {op} not used by {first!r} on line {line}", repr(case.name))
        self.rows[section, op, case] = case.name, name.line


def _sized_name(field: Field, template: str, axes: tuple[tuple[str, int], ...]) -> str:
    """Return a name with the sizes in place of the axes in braces."""
    name = template
    for axis, size in axes:
        name = name.replace(f"{{{axis}}}", str(size))
    if len(name) > LONGEST_NAME:
        field.fail(f"at most {LONGEST_NAME}, with the sizes in it", f"{len(name)} characters")
    if not NAME.fullmatch(name):
        field.fail(f"no placeholders but {', '.join(f'{{{axis}}}' for axis, _ in axes)}", repr(template))
    return name


def _offered(op: Op) -> dict[str, tuple[Option, ...]]:
    """Return the values of each field of an entry that is no axis."""
    return {"dtype": op.dtypes, "quant": op.quants, **op.options}


def _fields(op: Op) -> tuple[str, ...]:
    return (*op.axes, *_offered(op))


def _operators(field: Field, known: Mapping[str, Op], more: str = "") -> list[Op]:
    """Return the named operators; `more` adds to the known names of a message."""
    ops = []
    for item, value in field.values():
        if not isinstance(value, str) or value not in known:
            item.refuse(value, known, more)
        ops.append(known[value])
    return ops


def _choices(field: Field, op: Op, among: Sequence[Op]) -> list[Option]:
    """Return the values that `op` offers; drop values that only other operators of `among` offer."""
    offered = [option for other in among for option in _offered(other).get(field.name, ())]
    chosen = []
    for item, value in field.values():
        if _match(value, offered) is None:
            item.refuse(value, dict.fromkeys(str(option).lower() for option in offered))
        chosen.append(_match(value, _offered(op).get(field.name, ())))
    return [option for option in chosen if option is not None]


def _match(value: Any, offered: Collection[Option]) -> Option | None:
    """Return the offered value that a YAML value stands for; 1 is not true, but 1 is 1.0."""
    for option in offered:
        if value == option and (type(value) is type(option) or (type(value) is int and type(option) is float)):
            return option
    return None
