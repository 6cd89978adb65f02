"""Write cached configs for `@triton.autotune`, as a dispatch module without dependencies or as JSON tables, and read them back.

Every generated value goes through repr or JSON, and file names are slugs: no value of a cache becomes code or a path.
The module writes no cache and checks no config.
"""

import ast
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kerneltune import nearness
from kerneltune.cache import CacheEntry, by_size, entry_from
from kerneltune.files import bad, decode, read_text
from kerneltune.spec import Op, TaskRow

_TRITON = {
    "warps": "num_warps", "stages": "num_stages",
    "num_warps": "num_warps", "num_stages": "num_stages", "num_ctas": "num_ctas", "maxnreg": "maxnreg",
}  # fmt: skip
_WRITTEN = "written by kerneltune."
_MAX_BYTES = 4 << 20
"""Bytes of the largest imported file: Python's own parser needs about a hundred times as much memory."""
_IDENTIFIER = re.compile(r"[^A-Za-z0-9_]+")
_IN_NAME = re.compile(r"[^A-Za-z0-9_.=+-]+")

Names = Mapping[str, str]
"""Knob or axis -> the name of the kernel's argument."""

_AUTOTUNE = '''

def configs(policy="cold", dtype=None, quant=None):
    """Return a triton.Config for every distinct config of the table: for `@triton.autotune(configs=configs(), key=KEY)`."""
    import triton

    distinct = {}
    for entry in ENTRIES:
        is_selected = entry["policy"] == policy and dtype in (None, entry["dtype"]) and quant in (None, entry["quant"])
        knobs = entry["config"]
        if is_selected and repr(knobs) not in distinct:
            meta = {NAMES.get(name, name): value for name, value in knobs.items() if name not in WORDS}
            words = {WORDS[name]: value for name, value in knobs.items() if name in WORDS}
            words = {word: value for word, value in words.items() if (word, value) != ("maxnreg", 0)}  # 0: no limit
            distinct[repr(knobs)] = triton.Config(meta, **words)
    return list(distinct.values())
'''


def to_triton(op: Op, device: str, entries: Sequence[CacheEntry], names: Names) -> dict[str, str]:
    """Return a Python source whose `configs()` and `KEY` are arguments of `@triton.autotune`, in the names of the kernel.

    A comment lists the knobs and axes that no kernel has as arguments.
    """
    knob_names = {knob: name for knob, name in names.items() if knob not in op.axes}
    lines = [*_head(op, device), *(f"# {line}" for line in unnamed(op, entries, names))]
    lines += [f"KEY = {list(op.axes)!r}", f"NAMES = {knob_names!r}", f"WORDS = {_TRITON!r}"]
    lines += ["ENTRIES = [", *_rows(entries), "]"]
    return {f"{_module(op.name)}.py": "\n".join(lines) + "\n" + _AUTOTUNE}


def unnamed(op: Op, entries: Sequence[CacheEntry], names: Names) -> list[str]:
    """Return a line about the axes and a line about the knobs that no kernel has as arguments; texts are literals."""
    axes = [axis for axis in op.axes if names.get(axis) != axis]  # an `e` may count other things than E
    knobs = list(dict.fromkeys(knob for entry in entries for knob in entry.config if knob not in {*names, *_TRITON}))
    tasks = (("KEY", axes, "replace or delete them"), ("NAMES", knobs, "add KNOB: ARGUMENT for each"))
    return [f"{field}: {values!r}: no arguments of a kernel: {task}" for field, values, task in tasks if values]


_DISPATCH = '''

def best(variant, axes, dtype, quant="none", options=(), policy="cold", valid=lambda config: True):
    """Return the knobs of the nearest entry that is valid for a case; None where there is none.

    Entries are ranked as kerneltune's cache ranks them. A variant, axis or option that the table lacks is a ValueError.

    axes: sizes by name, such as {"M": 8192, "N": 4096}. options: a value for each option. policy: timing policy; entries of this
    policy and of "cold" serve, and of two equally near entries the entry of this policy comes first. valid: function that returns
    whether the kernel accepts these knobs for the case; the cache asks the operator, which this module lacks.
    """
    variants = sorted({entry["variant"] for entry in ENTRIES})
    if variant not in variants:
        raise ValueError(f"variant: {variant!r}: expected one of {', '.join(variants)}")
    for field, names in (("axes", sorted(dict(axes))), ("options", sorted(dict(options)))):
        if names != sorted(ENTRIES[0][field]):
            raise ValueError(f"{field}: {names}: expected {sorted(ENTRIES[0][field])}")
    stored = [
        ((entry["axes"], entry["dtype"], entry["quant"], entry["options"]), entry["config"])
        for serving_policy in dict.fromkeys((policy, "cold"))
        for entry in ENTRIES
        if (entry["variant"], entry["policy"]) == (variant, serving_policy)
    ]
    near = ranked((dict(axes), dtype, quant, dict(options)), stored, FREE_AXES, FREE_OPTIONS, BANDS, MAX_DISTANCE)
    return next((dict(config) for _, config in near if valid(config)), None)
'''


def to_python(op: Op, device: str, entries: Sequence[CacheEntry], names: Names) -> dict[str, str]:
    """Return a module with a table and a function `best`, which ranks entries as the cache does, and needs nothing installed."""
    ranking = Path(nearness.__file__).read_text(encoding="utf-8").partition('"""\n\n')[2]
    free = {"FREE_AXES": op.free_axes, "FREE_OPTIONS": op.free_options, "BANDS": dict(op.bands), "MAX_DISTANCE": op.max_distance}
    ordered = by_size(entries)
    table = ["ENTRIES = [", *_rows(ordered), "]", *(f"{name} = {value!r}" for name, value in free.items())]
    call = tuple(ordered[0].key.fields[name] for name in ("variant", "axes", "dtype", "quant", "options"))
    lines = [*_head(op, device), f"# best{call!r} returns knobs", ranking, "", *table]
    return {f"{_module(op.name)}.py": "\n".join(lines) + "\n" + _DISPATCH}


def to_json(op: Op, device: str, entries: Sequence[CacheEntry], names: Names) -> dict[str, str]:
    """Return a JSON object for each set of entries that differ along a single axis: the case, and the configs by size."""
    axis = (op.free_axes or op.axes)[0]
    files: dict[str, dict[str, Any]] = {}
    for entry in sorted(entries, key=lambda e: e.case.sizes.get(axis, 0)):
        case = entry.key.fields
        fixed = {name: size for name, size in case["axes"].items() if name != axis}
        parts = {"variant": entry.variant, **fixed, "dtype": case["dtype"], "quant": case["quant"], **case["options"]}
        name = ",".join([op.name, *(f"{key}={value}" for key, value in parts.items()), entry.policy])
        content: dict[str, Any] = {"op": op.name, "device": device, "axes": list(case["axes"]), "by": axis}
        content |= {"case": {**case, "axes": fixed}, "configs": {}}
        table = files.setdefault(_unique(name, content, files), content)
        table["configs"][str(case["axes"][axis])] = entry.config
    return {name: json.dumps(table, indent=1, ensure_ascii=False) + "\n" for name, table in files.items()}


_Writer = Callable[[Op, str, Sequence[CacheEntry], Names], dict[str, str]]
WRITERS: Mapping[str, _Writer] = {"triton": to_triton, "python": to_python, "json": to_json}


def require_replaceable(path: Path, text: str) -> None:
    """Raise ValueError if a module would replace a Python file that is no export of the same format."""
    function = text.rpartition("\ndef ")[2].partition("(")[0]
    if path.suffix == ".py" and path.exists():
        old = read_text(path, _MAX_BYTES)
        if not (old.partition("\n")[0][:-1].endswith(_WRITTEN) and f"\ndef {function}(" in old):
            raise ValueError(f"{path}: no earlier export with {function}(): expected another folder, or a free name")


def read(path: Path, op: Op, device: str | None = None) -> list[CacheEntry]:
    """Return the entries of a file that a writer of `WRITERS` wrote; run nothing of the file.

    device: folder of a GPU, so that a file of another GPU is an error; None for any GPU.
    """
    read_entries = _from_json if path.suffix == ".json" else _from_source
    (file_op, file_gpu), entries = read_entries(path, op.name)
    for field, value, expected in (("op", file_op, op.name), ("device", file_gpu, device or file_gpu)):
        if value != expected:
            raise ValueError(f"{path}: {field}: {value!r}: expected {expected!r}")
    if not entries:
        raise ValueError(f"{path}: configs: none")
    return entries


_Read = tuple[tuple[object, object], list[CacheEntry]]


def _from_source(path: Path, op: str) -> _Read:
    """Return (operator, device) and the entries of a Python source."""
    try:
        tree = ast.parse(read_text(path, _MAX_BYTES))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(str(error) if str(error).startswith("cannot read") else f"{path}: not Python") from error
    values = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    try:
        rows = ast.literal_eval(values["ENTRIES"])
        entries = [_entry(op, row, row["config"], path) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError, MemoryError, RecursionError) as error:
        raise ValueError(f"{path}: ENTRIES: not a table of configs") from error
    constants = {name: node.value for name, node in values.items() if isinstance(node, ast.Constant)}
    return (constants.get("OP"), constants.get("DEVICE")), entries


class _JsonTable(msgspec.Struct):
    """Hold a table by size: `case` has the axes but `by`, and `configs` a config for each size of `by`."""

    op: str
    device: str
    axes: list[str]
    by: str
    case: TaskRow
    configs: dict[str, dict[str, Any]]


def _from_json(path: Path, op: str) -> _Read:
    """Return (operator, device) and the entries of a table by size."""
    text = read_text(path, _MAX_BYTES)
    try:
        table, entries = decode(text, _JsonTable), []
        case = msgspec.structs.asdict(table.case)
        expected = sorted([*table.case.axes, table.by])
        if expected != sorted(table.axes):
            raise bad("axes", table.axes, f"those of case.axes and by, {', '.join(expected)}")
        for size, knobs in table.configs.items():
            if not size.isdecimal():
                raise bad("configs", size, f"a size of {table.by}")
            sizes = {**table.case.axes, table.by: int(size)}
            axes = {name: sizes[name] for name in table.axes}
            entries.append(_entry(op, {**case, "axes": axes, "case": "x".join(map(str, axes.values()))}, knobs, path))
        return (table.op, table.device), entries
    except ValueError as error:
        raise ValueError(f"{path}: not a table of configs, as `cache export --format json` writes it: {error}") from error


def _head(op: Op, device: str) -> list[str]:
    """Return the first lines of a Python source; the description is a literal, whatever the name of the folder."""
    return [repr(f"Configs of {op.name} on {device}, {_WRITTEN}"), "", f"OP = {op.name!r}", f"DEVICE = {device!r}", ""]


def _rows(entries: Sequence[CacheEntry]) -> list[str]:
    return [f"    { ({**entry.key.fields, 'config': entry.config})!r}," for entry in entries]


def _module(name: str) -> str:
    """Return a name that Python can import."""
    identifier = _IDENTIFIER.sub("_", name).strip("_") or "configs"
    return f"_{identifier}" if identifier[0].isdigit() else identifier


def _unique(name: str, content: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a file name for a table: a slug, with a number if the table of another case has the same slug."""
    stem = ",".join(_IN_NAME.sub("_", part) for part in name.split(",")).lstrip(".-") or "configs"
    case = {**content["case"], "case": ""}
    names = (f"{stem}{f'_{n}' if n else ''}.json" for n in itertools.count())
    return next(file for file in names if file not in files or {**files[file]["case"], "case": ""} == case)


def _entry(op: str, case: Mapping[str, Any], knobs: Mapping[str, Any], path: Path) -> CacheEntry:
    values = {name: case[name] for name in ("variant", "case", "axes", "dtype", "quant", "options", "policy")}
    return entry_from(op, {**values, "config": dict(knobs), "evidence": {"imported": path.name}})
