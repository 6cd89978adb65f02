"""Read the fields of a YAML file with their lines, so that an error names file, line, field and value."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from kerneltune.errors import unknown
from kerneltune.files import read_bytes
from kerneltune.wording import dtype_name, printable

NAME = re.compile(r"[^\s{}]{1,200}")
LONGEST_NAME = 200
_SIZE = re.compile(r"\+?([1-9][0-9_]*|0|0x[0-9a-fA-F_]+)")
"""Size without the octal and sexagesimal forms of YAML, where 010 is 8 and 1:30 is 90."""
_LARGEST = 2**48
"""Largest axis size; larger than any memory in bytes."""
MAX_BYTES = 1 << 20
"""Bytes of the largest file that is read."""
_LONGEST = 1000
"""Characters of the longest value, and of the longest text of the file in a message."""
_KINDS = {bool: "a boolean", int: "an integer", float: "a fraction", type(None): "nothing"}


def read_yaml(path: Path) -> "Field":
    """Return the content of a file."""
    data = read_bytes(path, MAX_BYTES)
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
        raise ValueError(f"{path}:{plain(_yaml_problem(error))}") from error
    except RecursionError as error:
        raise ValueError(f"{path}:1: YAML: nested too deeply") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML raises the last two for an escape beyond Unicode
        raise ValueError(f"{path}:1: YAML: {str(error).splitlines()[0]}") from error
    if root is None:
        raise ValueError(f"{path}:1: file: empty: expected fields with values")
    return Field(path, "file", root)


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    """Return the line and the mistake; if the context began on an earlier line, add this line."""
    line = error.problem_mark.line + 1 if error.problem_mark else 1
    began = error.context_mark.line + 1 if error.context_mark else line
    context = error.context or ""
    if not context.startswith("while"):
        return f"{line}: YAML: {' '.join(filter(None, [context, error.problem]))}"
    return f"{line}: YAML: {error.problem}" + (f", in what begins on line {began}" if began < line else "")


@dataclass(frozen=True, slots=True)
class Field:
    """Hold a value of a file with the name of its field.

    Attributes:
        key: the field's key; None for the file and for an item of a list.
    """

    path: Path
    name: str
    node: yaml.Node
    key: yaml.Node | None = None

    @property
    def line(self) -> int:
        """Return the line of the key, else of the value."""
        return (self.key or self.node).start_mark.line + 1

    def fail(self, expected: str, shown: str = "", name: str = "") -> NoReturn:
        """Raise the error of a wrong value, `shown` in the message, or of a field within it, `name`."""
        if not shown:
            kind = "a list" if isinstance(self.node, yaml.SequenceNode) else "a mapping"
            shown = repr(self.node.value) if isinstance(self.node, yaml.ScalarNode) else kind
        raise ValueError(f"{self.path}:{self.line}: {plain(name or self.name)}: {plain(shown)}: expected {plain(expected)}")

    def fields(self, known: Collection[str] = (), prefix: str = "") -> "dict[str, Field]":
        """Return the fields of a mapping by key; `prefix` begins their names. Without `known` any key is good."""
        if not isinstance(self.node, yaml.MappingNode):
            self.fail("fields with values")
        fields: dict[str, Field] = {}
        for key, value in self.node.value:
            if not isinstance(key, yaml.ScalarNode):
                Field(self.path, self.name, key).fail("plain field names")
            field = Field(self.path, prefix + key.value, value, key)
            if key.value in fields:
                field.fail("each field once")
            if known and key.value not in known:
                field.refuse(key.value, known, name=prefix.rstrip(".") or "field")
            fields[key.value] = field
        return fields

    def refuse(self, value: object, known: Iterable[object], more: str = "", name: str = "") -> NoReturn:
        """Raise the error of a value, or of a key, that is not among the known values; see `unknown`."""
        raise unknown(f"{self.path}:{self.line}: {name or self.name}", value, known, more)

    def items(self) -> "list[Field]":
        """Return the items of a list, or a single value as the only item."""
        is_list = isinstance(self.node, yaml.SequenceNode)
        return [Field(self.path, self.name, node) for node in self.node.value] if is_list else [self]

    def values(self) -> "list[tuple[Field, Any]]":
        """Return the items with their plain values, one or more and each once; an element type has torch's name."""
        items = self.items()
        if not items:
            self.fail("at least one value", "[]")
        distinct: dict[tuple[type, object], tuple[Field, Any]] = {}
        for item in items:
            value = item.scalar()
            if self.name.endswith("dtype") and isinstance(value, str):
                value = dtype_name(value)
            if (type(value), value) in distinct:
                item.fail("each value once", repr(value))
            distinct[type(value), value] = item, value
        return list(distinct.values())

    def text(self, placeholders: bool = False) -> str:
        """Return a name, which may have `placeholders` for sizes."""
        value = self.scalar()
        if not self.node.value:
            self.fail("a name", "empty")
        if not isinstance(value, str):
            self.fail(f'text; YAML reads {_KINDS.get(type(value), "something else")}: write "{self.node.value}"', self.node.value)
        if len(value) > LONGEST_NAME:
            self.fail(f"at most {LONGEST_NAME}", f"{len(value)} characters")
        if printable(value) != value:
            self.fail("a name without control characters, bidirectional marks and surrogates", repr(value))
        if not NAME.fullmatch(re.sub(r"[{}]", "", value) if placeholders else value):
            self.fail("a name without blanks", repr(value))
        return value

    def scalar(self) -> Any:
        """Return a plain value, such as a number or a text."""
        if not isinstance(self.node, yaml.ScalarNode):
            self.fail("a plain value")
        if len(self.node.value) > _LONGEST:
            self.fail(f"at most {_LONGEST}", f"{len(self.node.value)} characters")
        try:
            value = yaml.constructor.SafeConstructor().construct_object(self.node)
            hash(value)
        except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError):
            self.fail("a plain value")  # PyYAML fails if a tag does not fit its value
        return value

    def sizes(self, smallest: int) -> list[int]:
        """Return the sizes of an axis."""
        values = self.values()
        for item, value in values:
            if type(value) is not int or value < smallest:
                item.fail(f"an integer of {smallest} or more", repr(value))
            if not _SIZE.fullmatch(item.node.value):
                item.fail("a size in decimal or hexadecimal digits", f"{item.node.value}, which YAML reads as {str(value)[:40]}")
            if value > _LARGEST:
                item.fail(f"at most {_LARGEST}", str(value)[:40])
        return [value for _item, value in values]


def plain(text: str) -> str:
    """Return a text of the file for a message: a single printable line, shortened to _LONGEST characters."""
    text = printable(text.replace("\n", "\\n").replace("\t", "\\t"))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
