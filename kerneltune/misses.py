"""Warn once of each look-up without an entry in the config cache, raise in strict mode, and read the log of misses."""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from kerneltune.device import INTERPRETER
from kerneltune.files import append_lines, decode, read_text
from kerneltune.spec import TaskKey, TaskRow

_STRICT = "KERNELTUNE_STRICT"
_LOG = "KERNELTUNE_LOG_MISSES"
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "": False, "0": False, "false": False, "no": False, "off": False}
_Name = Annotated[str, msgspec.Meta(pattern=r"^[^\s{}:,]+$")]


class _Row(TaskRow, omit_defaults=True, kw_only=True):
    """Hold a line of the log; no line has a name of its case."""

    op: _Name
    device: _Name
    dtype: _Name
    quant: _Name


class CacheMissWarning(UserWarning):
    """Warn of a case without a config of its own in the cache."""


_said: set[tuple[object, ...]] = set()
"""Misses that were warned of, without the sizes of their free axes; and (GPU without configs, fallback GPU)."""


def report(key: TaskKey, device: str, describe: Callable[[], str], free_axes: Sequence[str]) -> None:
    """Warn of a task without an entry in the cache, name the config used, and append the task to the log of misses.

    Free axes may change with every call: a single warning covers all their sizes. Misses of the interpreter, for which nothing is
    tuned, are not reported.

    Raises:
        LookupError: KERNELTUNE_STRICT is on.
    """
    if device == INTERPRETER:
        return
    value = os.environ.get(_STRICT, "")
    strict = _SWITCH.get(value.lower())
    if strict is None:
        raise ValueError(f"{_STRICT}: {value!r}: expected one of {', '.join(filter(None, _SWITCH))}")
    log = os.environ.get(_LOG)
    if log:
        row = _Row(**{"op": key.op, "device": device, **key.fields, "case": ""})
        try:
            append_lines(Path(log), msgspec.json.encode(row) + b"\n")
        except ValueError as error:  # a log that cannot be written
            warnings.warn(str(error), stacklevel=3)
    fixed_axes = tuple((axis, size) for axis, size in key.case.axes if axis not in free_axes)
    alike = key._replace(case=replace(key.case, axes=fixed_axes)), device
    if not strict and alike in _said:
        return
    text = f"no config for {key.op} {key.variant} {key.case.label} {key.policy} on {device}"
    if strict:
        raise LookupError(f"{text} ({_STRICT}=1); nearest: {describe()}")
    _said.add(alike)
    warnings.warn(f"{text}; using {describe()}", CacheMissWarning, stacklevel=5)


def report_fallback(gpu: str, fallback_gpu: str) -> None:
    """Warn that the configs of another GPU, by its folder, serve a GPU that has none."""
    if (gpu, fallback_gpu) not in _said:
        _said.add((gpu, fallback_gpu))
        warnings.warn(f"no configs for {gpu}: those of {fallback_gpu}, the nearest known architecture, serve", stacklevel=6)


def forget() -> None:
    """Forget the misses that were warned of, so that each is warned of again."""
    _said.clear()


def read(path: Path) -> list[TaskKey]:
    """Load the misses of a log, each once, of whatever device; a log without a miss is an error."""
    misses: dict[TaskKey, None] = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            row = decode(line, _Row)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        misses[TaskKey.of(row.op, row)] = None
    if not misses:
        raise ValueError(f"{path}: misses: none: nothing to tune")
    return list(misses)
