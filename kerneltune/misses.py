"""Warn once of each look-up without an entry in the config cache, raise in strict mode, and make a sweep of the log of misses.

The module looks nothing up.
"""

import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kerneltune.device import INTERPRETER
from kerneltune.files import append_lines, decode, read_text
from kerneltune.spec import Case

_STRICT = "KERNELTUNE_STRICT"
_LOG = "KERNELTUNE_LOG_MISSES"
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "": False, "0": False, "false": False, "no": False, "off": False}
_Name = Annotated[str, msgspec.Meta(pattern=r"^[^\s{}:,]+$")]


class _Row(msgspec.Struct):
    """Hold a line of the log."""

    op: _Name
    variant: _Name
    device: _Name
    axes: dict[str, Annotated[int, msgspec.Meta(ge=0)]]
    dtype: _Name
    quant: _Name
    options: dict[str, bool | int | float | str]
    policy: _Name


class CacheMissWarning(UserWarning):
    """Warn of a case without a config of its own in the cache."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Hold a look-up for which the cache has no entry of exactly that case."""

    op: str
    variant: str
    device: str
    case: Case
    policy: str


_said: set[tuple[object, ...]] = set()
"""Misses that were warned of, without the sizes of their free axes."""


def report(miss: Miss, describe: Callable[[], str], free_axes: Sequence[str]) -> None:
    """Warn of a miss and name the config used instead; append the miss to the log that KERNELTUNE_LOG_MISSES names.

    Free axes may change with every call: a single warning covers all their sizes. Misses of the interpreter, for which nothing is
    tuned, are not reported.

    Raises:
        LookupError: KERNELTUNE_STRICT is on.
        ValueError: KERNELTUNE_STRICT is neither on nor off.
    """
    if miss.device == INTERPRETER:
        return
    strict = _is_strict()
    if log := os.environ.get(_LOG):
        _append(Path(log), miss)
    case, fixed = miss.case, tuple(axis for axis in miss.case.axes if axis[0] not in free_axes)
    alike = miss.op, miss.variant, miss.device, miss.policy, case.dtype, case.quant, case.options, fixed
    if not strict and alike in _said:
        return
    text = f"no config for {miss.op} {miss.variant} {miss.case.label} {miss.policy} on {miss.device}"
    if strict:
        raise LookupError(f"{text} ({_STRICT}=1); nearest: {describe()}")
    _said.add(alike)
    warnings.warn(f"{text}; using {describe()}", CacheMissWarning, stacklevel=5)


def _is_strict() -> bool:
    """Return whether a miss is an error."""
    value = os.environ.get(_STRICT, "")
    strict = _SWITCH.get(value.lower())
    if strict is None:
        raise ValueError(f"{_STRICT}: {value!r}: expected one of {', '.join(filter(None, _SWITCH))}")
    return strict


def forget() -> None:
    """Forget the misses that were warned of, so that each is warned of again."""
    _said.clear()


def _append(path: Path, miss: Miss) -> None:
    """Append a miss to the log; warn of a log that cannot be written."""
    case = miss.case
    options = dict(case.options)
    row = _Row(miss.op, miss.variant, miss.device, dict(case.axes), case.dtype, case.quant, options, miss.policy)
    try:
        append_lines(path, msgspec.json.encode(row) + b"\n")
    except ValueError as error:
        warnings.warn(str(error), stacklevel=4)


def read(path: Path) -> list[Miss]:
    """Load the misses of a log, each once."""
    misses: dict[Miss, None] = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            row = decode(line, _Row)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        case = Case("", tuple(row.axes.items()), row.dtype, row.quant, tuple(row.options.items()))
        misses[Miss(row.op, row.variant, row.device, case, row.policy)] = None
    return list(misses)


def sweep_text(misses: Sequence[Miss]) -> str:
    """Write the text of a sweep file whose bench cases are the misses, each case once."""
    if not misses:
        raise ValueError("misses: none: nothing to tune")
    lines = ["# Cases that were looked up and not found.", "family: misses"]
    lines += [f"ops: [{', '.join(dict.fromkeys(miss.op for miss in misses))}]", "", "bench:"]
    for op, case in dict.fromkeys((miss.op, miss.case) for miss in misses):
        fields = {**dict(case.axes), "dtype": case.dtype, "quant": case.quant, **dict(case.options)}
        shape = "x".join(str(size) for _, size in case.axes)
        text = ", ".join(f"{name}: {json.dumps(value)}" for name, value in fields.items())
        lines.append(f"  - {{name: {op}-{shape}, op: {op}, {text}}}")
    return "\n".join(lines) + "\n"
