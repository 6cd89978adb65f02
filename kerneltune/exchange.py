"""Cached configs in other people's formats: a list of triton.Config, a dispatch module without dependencies, vLLM's JSON.

Writes no cache and checks no config. Imports the standard library, cache, nearness and spec.
"""

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kerneltune import nearness
from kerneltune.cache import Entry, in_order
from kerneltune.spec import Op

_TRITON = {"warps": "num_warps", "stages": "num_stages"}
_CASE = ("variant", "case", "axes", "dtype", "quant", "options", "policy")


def to_triton(op: Op, device: str, entries: Sequence[Entry]) -> dict[str, str]:
    """A Python source with a `triton.Config` per entry; the comment before it says what the entry is for."""
    lines = [*_head(op, device), "import triton", "", "CONFIGS = ["]
    for entry in entries:
        knobs = {name: value for name, value in entry.config.items() if name not in _TRITON}
        meta = "".join(f", {_TRITON[name]}={value!r}" for name, value in entry.config.items() if name in _TRITON)
        lines += [f"    # {json.dumps(_case(entry))}", f"    triton.Config({knobs!r}{meta}),"]
    return {f"{op.name}.py": "\n".join([*lines, "]"]) + "\n"}


def from_triton(path: Path) -> list[Entry]:
    """The entries of a source that `to_triton` wrote.

    Raises:
        ValueError: it is none; names the line.
    """
    lines = _text(path).splitlines()
    entries: list[Entry] = []
    back = {theirs: ours for ours, theirs in _TRITON.items()}
    for number, line in enumerate(lines, start=1):
        if not line.strip().startswith("triton.Config("):
            continue
        try:
            call = ast.parse(line.strip().removesuffix(","), mode="eval").body
            assert isinstance(call, ast.Call)
            case = json.loads(lines[number - 2].strip().removeprefix("# "))
            knobs = ast.literal_eval(call.args[0])
            knobs |= {back[str(word.arg)]: ast.literal_eval(word.value) for word in call.keywords}
            entries.append(_entry(case, knobs, path))
        except (SyntaxError, ValueError, KeyError, IndexError, TypeError, AssertionError) as error:
            raise ValueError(f"{path}:{number}: not a config with its case in the line before: {line.strip()[:60]!r}") from error
    return _some(path, entries)


_DISPATCH = '''

def best(variant, axes, dtype, quant="none", options=(), policy="cold", valid=lambda config: True):
    """The knobs that kerneltune's cache has for a case: of the nearest entry that is valid; None where it has none.

    axes: sizes by name, such as {"M": 8192, "N": 4096}. options: a value for each. policy: how times were taken; entries of it
    and of "cold" serve, of two as near its own. valid: whether the kernel takes these knobs for the case, which the cache asks of
    the operator and this module does not know.
    """
    stored = [
        ((entry["axes"], entry["dtype"], entry["options"]), entry["config"])
        for wanted in dict.fromkeys((policy, "cold"))
        for entry in ENTRIES
        if (entry["variant"], entry["quant"], entry["policy"]) == (variant, quant, wanted)
    ]
    found = ranked((dict(axes), dtype, dict(options)), stored, FREE_AXES, FREE_OPTIONS, BANDS)
    return next((dict(config) for _, config in found if valid(config)), None)
'''


def to_python(op: Op, device: str, entries: Sequence[Entry]) -> dict[str, str]:
    """A module with a table and a function `best`, which finds what the cache does, by its rule, and needs nothing installed."""
    rows = [f"    { ({**_case(entry), 'config': entry.config})!r}," for entry in in_order(entries)]
    rule = Path(nearness.__file__).read_text(encoding="utf-8").partition('"""\n\n')[2]
    free = [f"FREE_AXES = {op.free_axes!r}", f"FREE_OPTIONS = {op.free_options!r}", f"BANDS = {dict(op.bands)!r}"]
    table = ["ENTRIES = [", *rows, "]", *free]
    return {f"{op.name}.py": "\n".join([*_head(op, device), rule, "", *table]) + "\n" + _DISPATCH}


def from_python(path: Path) -> list[Entry]:
    """The entries of a module that `to_python` wrote; it is not run.

    Raises:
        ValueError: it is none.
    """
    try:
        rows = ast.literal_eval(_assigned(path)["ENTRIES"])
        return _some(path, [_entry(row, row["config"], path) for row in rows])
    except (ValueError, KeyError, TypeError, AttributeError, MemoryError, RecursionError) as error:
        raise ValueError(f"{path}: ENTRIES: not a table of configs") from error


def to_vllm(op: Op, device: str, entries: Sequence[Entry]) -> dict[str, str]:
    """A JSON object for every set of entries that differ along one axis only, keyed by the size; the file's name says the
    rest: `fused_op,variant=optimized,N=4096,dtype=bfloat16,…,device_name=nvidia_h200.json`."""
    files: dict[str, dict[str, Any]] = {}
    free_axis = _first_axis(op)
    for entry in sorted(entries, key=lambda e: dict(e.axes).get(free_axis, 0)):
        fixed = {"variant": entry.variant, **{a: s for a, s in entry.axes if a != free_axis}, "dtype": entry.dtype}
        fixed |= {"quant": entry.quant, **dict(entry.options), "policy": entry.policy, "device_name": device}
        name = ",".join([op.name, *(f"{key}={value}" for key, value in fixed.items())]) + ".json"
        files.setdefault(name, {})[str(dict(entry.axes)[free_axis])] = entry.config
    return {name: json.dumps(table, indent=4) + "\n" for name, table in files.items()}


def from_vllm(path: Path, op: Op) -> list[Entry]:
    """The entries of a file that `to_vllm` wrote for an operator.

    Raises:
        ValueError: the name or the content is none of such a file.
    """
    free_axis = _first_axis(op)
    try:
        fixed = _fixed(path)
        fields = {"variant", "dtype", "quant", "policy", "device_name", *op.axes, *op.options} - {free_axis}
        if fixed.keys() != fields:
            raise ValueError("keys of another operator")
        table = json.loads(_text(path))
        given = {name: next(v for v in offered if str(v) == fixed[name]) for name, offered in op.options.items()}
        entries = []
        for size, knobs in table.items():
            sizes = {axis: int(size if axis == free_axis else fixed[axis]) for axis in op.axes}
            case = {name: fixed[name] for name in ("variant", "dtype", "quant", "policy")}
            label = "x".join(map(str, sizes.values()))
            entries.append(_entry({**case, "case": label, "axes": sizes, "options": given}, knobs, path))
        return _some(path, entries)
    except (ValueError, KeyError, StopIteration, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path}: not a table of {op.name} by {free_axis}, named as `cache export --format vllm` does"
        ) from error


WRITERS: Mapping[str, Callable[[Op, str, Sequence[Entry]], dict[str, str]]] = {
    "triton": to_triton,
    "python": to_python,
    "vllm": to_vllm,
}


def read(path: Path, op: Op, device: str | None = None) -> list[Entry]:
    """The entries of a file of any of the formats.

    device: the only GPU, as its folder is called, of which they may be; any if not given.

    Raises:
        ValueError: it is of none of the formats, of another operator or GPU, or cannot be read.
    """
    found: tuple[object, object]
    if path.suffix == ".json":
        entries = from_vllm(path, op)
        found = (path.name.partition(",")[0], _fixed(path)["device_name"])
    else:
        entries = from_triton(path) if "import triton" in _text(path) else from_python(path)
        constants = {name: node.value for name, node in _assigned(path).items() if isinstance(node, ast.Constant)}
        found = (constants.get("OP"), constants.get("DEVICE"))
    for field, of, expected in (("op", found[0], op.name), ("device", found[1], device or found[1])):
        if of != expected:
            raise ValueError(f"{path}: {field}: {of!r}: expected {expected!r}")
    return entries


def _head(op: Op, device: str) -> list[str]:
    """How a Python source begins."""
    doc = f'"""Configs of {op.name} on {device}, written by kerneltune."""'
    return [doc, "", f"OP = {op.name!r}", f"DEVICE = {device!r}", ""]


def _assigned(path: Path) -> dict[str, ast.expr]:
    """What a source, which is not run, assigns to which name.

    Raises:
        ValueError: it is no Python.
    """
    try:
        tree = ast.parse(_text(path))
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{path}: not Python") from error
    return {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}


def _fixed(path: Path) -> dict[str, str]:
    """What the name of a file in vLLM's format says besides the operator."""
    return dict(part.split("=", 1) for part in path.name.removesuffix(".json").split(",")[1:])


def _first_axis(op: Op) -> str:
    """The axis along which entries of an operator are told apart in vLLM's format."""
    return (op.free_axes or op.axes)[0]


def _case(entry: Entry) -> dict[str, Any]:
    values = {name: getattr(entry, name) for name in _CASE}
    return values | {"axes": dict(entry.axes), "options": dict(entry.options)}


def _entry(case: Mapping[str, Any], knobs: Mapping[str, Any], path: Path) -> Entry:
    values = {name: case[name] for name in _CASE}
    values |= {"axes": tuple(case["axes"].items()), "options": tuple(case["options"].items())}
    return Entry(**values, config=dict(knobs), evidence={"imported": path.name})


def _some(path: Path, entries: list[Entry]) -> list[Entry]:
    if not entries:
        raise ValueError(f"{path}: configs: none")
    return entries


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error
