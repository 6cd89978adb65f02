"""Read sweep files: YAML that names an operator family's check cases, bench cases and gate limits, expanded to Cases.

Operators are passed in: this module knows no operator and runs nothing. Every error names file, line, field and value.
The size of a file and its number of cases are limited. Reading takes time linear in both.
"""

import fnmatch
import importlib.metadata
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from kerneltune.errors import meant, unknown
from kerneltune.files import RESULTS, data_root, in_checkout, read_bytes
from kerneltune.spec import GROUP, PLUGINS, Case, Op, Option, dtype_name
from kerneltune.wording import printable

Section = Literal["check", "bench"]

_TOP = ("family", "defaults", "ops", "check", "bench", "headline", "gate")
_HEADLINE = ("op", "case", "dtype", "quant")
_SMALLEST: Mapping[Section, int] = {"check": 0, "bench": 1}
_NAME = re.compile(r"[^\s{}]{1,200}")
_LONGEST_NAME = 200
_FAMILY = re.compile(r"[A-Za-z0-9_][\w.-]{0,79}", re.ASCII)
_LARGEST = 2**48
"""Largest axis size; larger than any memory in bytes."""
MAX_CASES = 100_000
"""Default limit of the rows of a sweep file; an entry for two operators counts twice."""
_MAX_BYTES = 1 << 20
_LONGEST = 1000
"""Characters of the longest value, and of the longest text of the file in a message."""
_KINDS = {bool: "a boolean", int: "an integer", float: "a fraction", type(None): "nothing"}


@dataclass(frozen=True, slots=True)
class SweepCase:
    """Hold a case of an operator in a section of the file."""

    op: str
    case: Case
    section: Section


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

    def headlines(self, entry: SweepCase) -> bool:
        """Return whether the file's `headline` selects a bench case."""
        case = entry.case
        values = {"op": entry.op, "case": case.name, "dtype": case.dtype, "quant": case.quant}
        named = self.headline.items()
        return bool(self.headline) and all(any(fnmatch.fnmatch(values[key], p) for p in patterns) for key, patterns in named)


def results_root(given: Path | None, family: str | None = None) -> Path:
    """Return the folder for records: as given, else KERNELTUNE_RESULTS, else `results`.

    For the own families of a checkout, `results` is in the checkout. Otherwise it is in the current folder: an installed package
    is never written to.
    """
    if named := given or os.environ.get(RESULTS):
        return Path(named)
    if not in_checkout():
        return Path("results")
    plugged = os.environ.get(PLUGINS) or importlib.metadata.entry_points(group=GROUP)
    own = not plugged if family is None else _is_own(family)
    return data_root("results") if own else Path("results")


def recorded_root(given: Path | None, family: str | None = None) -> Path:
    """Return the folder to read records from: `results_root`, or the packaged records if `results_root` has no records."""
    root = results_root(given, family)
    named = given or os.environ.get(RESULTS)
    name = "*" if family is None else family_name(family)
    return root if named or any(root.glob(f"*/{name}.jsonl")) else data_root("results")


def _is_own(family: str) -> bool:
    """Return whether the sweep file of a family belongs to the checkout or package."""
    try:
        return find(family).resolve().parent == data_root("sweeps").resolve()
    except ValueError:  # a family of another package: reading its records needs no sweep file
        return False


def family_name(family: str) -> str:
    """Return the name of a family in records; for a `.yaml` path, return the name in the file."""
    if not family.endswith((".yaml", ".yml")):
        return family
    path = find(family)
    return _Reader(path, {}, 0).family(_composed(path))


def gate_margin(family: str) -> float | None:
    """Return `gate.margin` of a family's sweep file: `FAMILY.yaml` here, else as `find` finds it; None without file or margin."""
    try:
        path = find(f"{family}.yaml" if Path(f"{family}.yaml").is_file() else family)
    except ValueError:  # records of another package, whose sweep file is not here
        return None
    reader = _Reader(path, {}, 0)
    return reader.gate(reader.mapping(_composed(path), "file").get("gate")).get("margin")


def find(family: str, root: Path | None = None) -> Path:
    """Find the sweep file of a family: a `.yaml` path itself, else in `sweeps/` here, else in the checkout or package."""
    if family.endswith((".yaml", ".yml")):
        if Path(family).is_file():
            return Path(family)
        raise ValueError(f"cannot read {family}: no such file")
    for folder in _folders(root):
        if (folder / f"{family}.yaml").is_file():
            return folder / f"{family}.yaml"
    raise unknown("family", family, families(root), ", or a .yaml file")


def families(root: Path | None = None) -> list[str]:
    """Return the names of the sweep files in `root`; by default, in `sweeps/` here and in the checkout or package."""
    return sorted({path.stem for folder in _folders(root) for path in folder.glob("*.yaml")})


def _folders(root: Path | None) -> list[Path]:
    return [root] if root else [Path("sweeps"), data_root("sweeps")]


def load(path: Path, ops: Mapping[str, Op], max_cases: int = MAX_CASES) -> Sweep:
    """Load a sweep file.

    Args:
        path: the sweep file.
        ops: operators by name.
        max_cases: most rows of all operators and sections together; a file with more rows is refused before they are built.
    """
    return _Reader(path, ops, max_cases).sweep(_composed(path))


def _composed(path: Path) -> yaml.Node:
    """Return the YAML tree of a file."""
    data = read_bytes(path, _MAX_BYTES)
    try:
        text = data.decode()
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: byte {data[error.start]:#04x}: expected UTF-8") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"{path}:{line}: YAML: {str(error).splitlines()[0]}") from error
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"{path}:{_plain(_yaml_problem(error))}") from error
    except RecursionError as error:
        raise ValueError(f"{path}:1: YAML: nested too deeply") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML raises the last two for an escape beyond Unicode
        raise ValueError(f"{path}:1: YAML: {str(error).splitlines()[0]}") from error
    if root is None:
        raise ValueError(f"{path}:1: file: empty: expected family, ops and cases")
    return root


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    """Return the line and the mistake; if the context began on an earlier line, add this line."""
    line = error.problem_mark.line + 1 if error.problem_mark else 1
    began = error.context_mark.line + 1 if error.context_mark else line
    context = error.context or ""
    if not context.startswith("while"):
        return f"{line}: YAML: {' '.join(filter(None, [context, error.problem]))}"
    return f"{line}: YAML: {error.problem}" + (f", in what begins on line {began}" if began < line else "")


@dataclass(frozen=True, slots=True)
class _Item:
    """Hold the nodes of `key: value` in a mapping."""

    key: yaml.Node
    value: yaml.Node


@dataclass(frozen=True, slots=True)
class _Entry:
    """Hold an entry of a section: its node, its operators, and its fields beside the defaults.

    Attributes:
        is_named: whether the entry names its operators, which must have all of its fields.
    """

    node: yaml.Node
    ops: list[Op]
    fields: Mapping[str, _Item]
    is_named: bool


class _Reader:
    """Read a file; remember its path, its operators and the names used so far."""

    def __init__(self, path: Path, ops: Mapping[str, Op], max_cases: int) -> None:
        self.path = path
        self.room = self.max_cases = max_cases
        self.known = ops
        self.ops: list[Op] = []
        self.defaults: dict[str, _Item] = {}
        self.lines: dict[object, int] = {}
        self.sizes: dict[object, object] = {}
        self.named: dict[object, tuple[str, int]] = {}

    def sweep(self, root: yaml.Node) -> Sweep:
        items = self.known_fields(root, "file", _TOP)
        family = self.family(root)
        if "ops" not in items:
            self.fail(root, "ops", "missing", "names of operators")
        self.ops = self.operators(items["ops"].value, "ops")
        if "defaults" in items:
            self.defaults = self.mapping(items["defaults"].value, "defaults")
            self.check_defaults()
        check, bench = (tuple(self.section(section, items.get(section))) for section in _SMALLEST)
        if not check and not bench:
            self.fail(root, "check", "missing", "at least one entry in check or bench")
        loaded = Sweep(family, self.path, check, bench, self.gate(items.get("gate")), self.headline(items.get("headline")))
        if loaded.headline and not any(map(loaded.headlines, bench)):
            shown = ", ".join(f"{key} {' '.join(patterns)}" for key, patterns in loaded.headline.items())
            self.fail(items["headline"].value, "headline", shown, "what at least one bench case has")
        return loaded

    def family(self, root: yaml.Node) -> str:
        """Return the family that the file names."""
        items = self.mapping(root, "file")
        if "family" not in items:
            self.fail(root, "family", "missing", "a name")
        node = items["family"].value
        family = self.name(node, "family")
        if not _FAMILY.fullmatch(family):  # file names contain the family
            self.fail(node, "family", repr(family), "at most 80 letters, digits, `_`, `-` and `.`")
        return family

    def section(self, section: Section, item: _Item | None) -> Iterator[SweepCase]:
        if item is None:
            return
        if not isinstance(item.value, yaml.SequenceNode):
            self.fail(item.key, section, self.shown(item.value), "a list of entries")
        for node in item.value.value:
            yield from self.entries(section, node)

    def entries(self, section: Section, node: yaml.Node) -> Iterator[SweepCase]:
        """Yield all cases of an entry of the file, operator by operator."""
        items = self.mapping(node, section)
        if "name" not in items:
            self.fail(node, "name", "missing", "a name")
        name_node, is_named = items["name"].value, "op" in items
        template = self.name(name_node, "name", placeholders=True)
        ops = self.operators(items["op"].value, "op") if is_named else self.ops
        own = {key: item for key, item in items.items() if key not in ("name", "op")}
        self.check_fields(own, ops, is_named)
        entry, count = _Entry(node, ops, self.defaults | own, is_named), 0
        for op in ops:
            sizes = [self.sizes_of(entry, op, axis, _SMALLEST[section]) for axis in op.axes]
            for axis, of_axis in zip(op.axes, sizes, strict=True):
                if len(of_axis) > 1 and f"{{{axis}}}" not in template:
                    self.fail(name_node, "name", repr(template), f"a name with {{{axis}}} in it, as {axis} has several sizes")
            fields = {"dtype": op.dtypes[:1], "quant": op.quants, **{name: values[:1] for name, values in op.options.items()}}
            values = [self.choices(entry, op, field, default) for field, default in fields.items()]
            count += self.take(math.prod([*map(len, sizes), *map(len, values)]), node)
            for point in itertools.product(*sizes):
                axes = tuple(zip(op.axes, point, strict=True))
                name = self.sized_name(template, axes, name_node)
                for dtype, quant, *options in itertools.product(*values):
                    case = Case(name, axes, str(dtype), str(quant), tuple(zip(op.options, options, strict=True)))
                    self.remember(section, op.name, case, name_node)
                    yield SweepCase(op.name, case, section)
        if not count:
            self.fail(node, "name", repr(template), "values that at least one operator takes together")

    def sized_name(self, template: str, axes: tuple[tuple[str, int], ...], node: yaml.Node) -> str:
        """Return a name with the sizes in place of the axes in braces."""
        name = template
        for axis, size in axes:
            name = name.replace(f"{{{axis}}}", str(size))
        if len(name) > _LONGEST_NAME:
            self.fail(node, "name", f"{len(name)} characters", f"at most {_LONGEST_NAME}, with the sizes in it")
        if not _NAME.fullmatch(name):
            self.fail(node, "name", repr(template), f"no placeholders but {', '.join(f'{{{axis}}}' for axis, _ in axes)}")
        return name

    def take(self, rows: int, node: yaml.Node) -> int:
        """Add rows to the count that the file's limit holds for, before the rows are built; return their number."""
        if rows > self.room:
            total = self.max_cases - self.room + rows
            self.fail(node, "cases", f"{total} or more", f"at most {self.max_cases}; see --max-cases")
        self.room -= rows
        return rows

    def sizes_of(self, entry: "_Entry", op: Op, axis: str, smallest: int) -> list[int]:
        """Return the sizes of an axis in an entry."""
        if axis not in entry.fields:
            self.fail(entry.node, axis, "missing", f"the size of this axis of {op.name}")
        return self.axis(axis, entry.fields[axis].value, smallest)

    def axis(self, axis: str, node: yaml.Node, smallest: int) -> list[int]:
        sizes = []
        for child, value in self.values(node, axis):
            if type(value) is not int or value < smallest:
                self.fail(child, axis, repr(value), f"an integer of {smallest} or more")
            if value > _LARGEST:
                self.fail(child, axis, str(value)[:40], f"at most {_LARGEST}")
            sizes.append(value)
        return sizes

    def choices(self, entry: "_Entry", op: Op, field: str, default: tuple[Option, ...]) -> list[Option]:
        """Return the values of a field that `op` offers.

        A value that only other operators of the entry offer is dropped; it is an error if the entry names its operators.
        """
        if field not in entry.fields:
            return list(default)
        taken = []
        for node, given in self.values(entry.fields[field].value, field):
            value = dtype_name(given) if field == "dtype" and isinstance(given, str) else given
            match = _match(value, _offered(op, field))
            if match is not None:
                taken.append(match)
            elif entry.is_named or all(_match(value, _offered(other, field)) is None for other in entry.ops):
                offering = [op] if entry.is_named else entry.ops
                offered = dict.fromkeys(str(v).lower() for one in offering for v in _offered(one, field))
                self.fail(node, field, repr(value), f"one of {', '.join(offered)}{meant(value, offered)}")
        return taken

    def check_fields(self, items: Mapping[str, _Item], ops: list[Op], named: bool) -> None:
        """Check that every field belongs to an operator of the entry, or to all of them if the entry names its operators."""
        for key, item in items.items():
            lacking = [op for op in ops if key not in _fields(op)]
            if len(lacking) == len(ops) or (named and lacking):
                known = dict.fromkeys(field for op in (lacking if named else ops) for field in _fields(op))
                first = [] if items is self.defaults else ["name", "op"]
                fields = [*first, *known]
                self.fail(item.key, key, self.shown(item.value), f"a field among {', '.join(fields)}{meant(key, fields)}")

    def check_defaults(self) -> None:
        """Check the fields and values under `defaults`, also if no entry uses them."""
        self.check_fields(self.defaults, self.ops, named=False)
        for key, item in self.defaults.items():
            if any(key in op.axes for op in self.ops):
                self.axis(key, item.value, 0)
            else:
                self.choices(_Entry(item.key, self.ops, self.defaults, False), self.ops[0], key, ())

    def operators(self, node: yaml.Node, field: str) -> list[Op]:
        known = self.known if field == "ops" else {op.name: op for op in self.ops}
        ops = []
        for child, value in self.values(node, field):
            if not isinstance(value, str) or value not in known:
                more = ", or an operator that --plugin loads" if field == "ops" else ""
                self.fail(child, field, repr(value), f"one of {', '.join(known)}{more}{meant(value, known)}")
            ops.append(known[value])
        return ops

    def gate(self, item: _Item | None) -> dict[str, float]:
        limits: dict[str, float] = {}
        for key, limit in self.known_fields(item.value, "gate", ("margin",)).items() if item else ():
            value = self.scalar(limit.value, "gate.margin")
            if type(value) not in (int, float) or not 0 <= value < 1:
                self.fail(limit.value, "gate.margin", repr(value), "a fraction from 0 to below 1")
            limits[key] = float(value)
        return limits

    def headline(self, item: _Item | None) -> dict[str, tuple[str, ...]]:
        named: dict[str, tuple[str, ...]] = {}
        for key, entry in self.known_fields(item.value, "headline", _HEADLINE).items() if item else ():
            texts = self.values(entry.value, f"headline.{key}")
            for node, value in texts:
                if not isinstance(value, str):
                    self.fail(node, f"headline.{key}", repr(value), "a text")
            named[key] = tuple(dtype_name(value) if key == "dtype" else value for _, value in texts)
        return named

    def remember(self, section: Section, op: str, case: Case, node: yaml.Node) -> None:
        """Refuse a name with two rows or two shapes, and a row with two names.

        A row needs a single name, because the name is no part of a record's key.
        """
        row, shape = (section, op, case.name, case.dtype, case.quant, case.options), (section, op, case.name)
        if row in self.lines or self.sizes.get(shape, case.axes) != case.axes:
            used = self.lines.get(row, self.lines.get(shape))
            self.fail(node, "name", repr(case.name), f"a name not used for {op} on line {used}")
        first, line = self.named.setdefault((section, op, case), (case.name, node.start_mark.line + 1))
        if first != case.name:
            self.fail(node, "name", repr(case.name), f"sizes or options of {op} not used by {first!r} on line {line}")
        self.sizes[shape] = case.axes
        self.lines[row] = node.start_mark.line + 1
        self.lines.setdefault(shape, node.start_mark.line + 1)

    def mapping(self, node: yaml.Node, field: str) -> dict[str, _Item]:
        if not isinstance(node, yaml.MappingNode):
            self.fail(node, field, self.shown(node), "fields with values")
        items: dict[str, _Item] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.fail(key, field, self.shown(key), "plain field names")
            if key.value in items:
                self.fail(key, key.value, self.shown(value), "each field once")
            items[key.value] = _Item(key, value)
        return items

    def known_fields(self, node: yaml.Node, field: str, known: tuple[str, ...]) -> dict[str, _Item]:
        """Return the items of a mapping whose keys are all known."""
        items = self.mapping(node, field)
        for key, item in items.items():
            if key not in known:
                place = key if field == "file" else f"{field}.{key}"
                self.fail(item.key, place, self.shown(item.value), f"one of {', '.join(known)}{meant(key, known)}")
        return items

    def values(self, node: yaml.Node, field: str) -> list[tuple[yaml.Node, Any]]:
        """Return the values of a list that is not empty, or a single value as a list."""
        children = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not children:
            self.fail(node, field, "[]", "at least one value")
        distinct: list[tuple[yaml.Node, Any]] = []
        seen: set[tuple[type, object]] = set()
        for child in children:
            value = self.scalar(child, field)
            if (type(value), value) in seen:
                self.fail(child, field, repr(value), "each value once")
            seen.add((type(value), value))
            distinct.append((child, value))
        return distinct

    def name(self, node: yaml.Node, field: str, placeholders: bool = False) -> str:
        value = self.scalar(node, field)
        if not isinstance(value, str):
            written = node.value or "empty"
            self.fail(node, field, written, f'text; YAML reads {_KINDS.get(type(value), "something else")}: write "{node.value}"')
        if len(value) > _LONGEST_NAME:
            self.fail(node, field, f"{len(value)} characters", f"at most {_LONGEST_NAME}")
        if printable(value) != value:
            self.fail(node, field, repr(value), "a name without control characters, bidirectional marks and surrogates")
        if not _NAME.fullmatch(re.sub(r"[{}]", "", value) if placeholders else value):
            self.fail(node, field, repr(value), "a name without blanks")
        return value

    def scalar(self, node: yaml.Node, field: str) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            self.fail(node, field, self.shown(node), "a plain value")
        if len(node.value) > _LONGEST:
            self.fail(node, field, f"{len(node.value)} characters", f"at most {_LONGEST}")
        try:
            value = yaml.constructor.SafeConstructor().construct_object(node)
            hash(value)
        except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError):
            # PyYAML fails if a tag does not fit its value
            self.fail(node, field, repr(node.value), "a plain value")
        return value

    def shown(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.ScalarNode):
            return repr(node.value)
        return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"

    def fail(self, node: yaml.Node, field: str, shown: str, expected: str) -> NoReturn:
        line = node.start_mark.line + 1
        raise ValueError(f"{self.path}:{line}: {_plain(field)}: {_plain(shown)}: expected {_plain(expected)}")


def _plain(text: str) -> str:
    """Return a text of the file for a message: a single printable line, shortened to _LONGEST characters."""
    text = printable(text.replace("\n", "\\n").replace("\t", "\\t"))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _fields(op: Op) -> tuple[str, ...]:
    return (*op.axes, "dtype", "quant", *op.options)


def _offered(op: Op, field: str) -> tuple[Option, ...]:
    return {"dtype": op.dtypes, "quant": op.quants}.get(field, op.options.get(field, ()))


def _match(value: Any, offered: tuple[Option, ...]) -> Option | None:
    """Return the offered value that a YAML value stands for; 1 is not true, but 1 is 1.0."""
    for option in offered:
        if value == option and (type(value) is type(option) or (type(value) is int and type(option) is float)):
            return option
    return None
