"""Records: measured, checked, failed or skipped rows with everything needed to believe them, kept as JSON lines.

Does not measure, compare or print. A journal is appended to; a file of results is replaced as a whole.
Imports the standard library, filelock, cells, spec, device and files.
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from filelock import FileLock

from kerneltune.cells import pairs
from kerneltune.device import INTERPRETER
from kerneltune.files import replace_text
from kerneltune.spec import MOST, Option

STATUSES = ("passed", "failed", "skipped", "checked")

Key = tuple[str, str, str, tuple[tuple[str, int], ...], tuple[tuple[str, Option], ...], str]

_NAMES = ("op", "variant", "case", "dtype", "quant", "policy", "device")
_TEXTS = ("driver", "torch", "triton", "source_hash", "commit", "reason", "family", "unit")
_REQUIRED_MEASURES = ("time_us", "gbps", "ci_low_us", "ci_high_us")
_ADDED = ("samples_us", "unit")
"""Fields that files written before them lack."""
_OPTIONAL_MEASURES = ("ceiling_gbps", "pct_ceiling", "aa_floor", "p10_us", "p90_us")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One row: a variant on a case, and what came of it.

    Attributes:
        case: the case's name; no part of the row's identity.
        policy: how it was timed, for example `cold`.
        status: `passed` is correct and timed, `checked` correct but not timed (interpreter); only `passed` carries measures.
        time_us: median time of one call.
        gbps: logical minimum bytes over the time, GB/s (1e9).
        ceiling_gbps: GB/s of a streaming kernel with the same bytes and mix; `pct_ceiling` is percent of it.
        ci_low_us, ci_high_us: 95 % interval of the time; p10_us and p90_us are the samples' quantiles.
        n: number of samples.
        aa_floor: noise floor of the row as a fraction of the time.
        config: knob -> value; None for a variant without knobs.
        date: ISO 8601 in UTC.
        reason: why it failed or was skipped; empty when it passed.
        samples_us: time of one call in every round, a list per process; None in rows that were written without.
        unit: which GPU of the model `device`; empty in rows that were written without.

    Raises:
        ValueError: one line naming the field, its value and what is expected.
    """

    op: str
    variant: str
    case: str
    dtype: str
    quant: str
    policy: str
    status: str
    time_us: float | None = None
    gbps: float | None = None
    ceiling_gbps: float | None = None
    pct_ceiling: float | None = None
    ci_low_us: float | None = None
    ci_high_us: float | None = None
    n: int | None = None
    aa_floor: float | None = None
    config: dict[str, Any] | None = None
    device: str
    driver: str
    torch: str
    triton: str
    source_hash: str
    commit: str
    date: str
    axes: dict[str, int]
    options: dict[str, Option] = field(default_factory=dict)
    reason: str = ""
    p10_us: float | None = None
    p90_us: float | None = None
    family: str = ""
    samples_us: list[list[float]] | None = None
    unit: str = ""

    def __post_init__(self) -> None:
        _check_texts(self)
        _check_mappings(self)
        _check_measures(self)
        _check_status(self)

    @property
    def key(self) -> Key:
        """What the row measures, whoever implements it: (op, dtype, quant, axes, options, policy)."""
        return self.op, self.dtype, self.quant, tuple(self.axes.items()), tuple(self.options.items()), self.policy

    @property
    def config_label(self) -> str:
        """The config in one line: `block=1024 warps=4`; `-` where there is none."""
        return pairs(self.config or {}) or "-"

    @property
    def label(self) -> str:
        """The key in one line: `rmsnorm_fwd M=8192 N=4096 bfloat16 fp8 cold`."""
        return " ".join([self.op, pairs({**self.axes, **self.options}), self.dtype, self.quant, self.policy])


def rounded(value: float) -> float:
    """Six significant digits: more than any clock gives."""
    return float(f"{value:.6g}")


def to_json(record: Record) -> str:
    """One line of JSON, fields in their order.

    Raises:
        ValueError: a config value that JSON cannot hold.
    """
    try:
        return json.dumps(asdict(record), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise _bad("config", record.config, "values that JSON can hold") from error


def from_json(text: str | bytes) -> Record:
    """The record on one line of JSON.

    Raises:
        ValueError: no JSON, an unknown or missing field, or a wrong value, as `field: value: expected …`.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"JSON: {error.msg} at column {error.colno}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError("JSON: not readable as UTF-8 JSON") from error
    if not isinstance(values, dict):
        raise _bad("JSON", values, "an object")
    names = [f.name for f in fields(Record)]
    for name, value in values.items():
        if name not in names:
            raise _bad(name, value, "no field of this name")
    for name in names:
        if name not in values and name not in _ADDED:
            raise ValueError(f"{name}: missing")
    return Record(**values)


def load(path: Path) -> list[Record]:
    """All records of a file, oldest first.

    Raises:
        ValueError: one line `file:line: field: …`, also for a truncated last line, or `cannot read file: …`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    return parse(data, str(path))


def parse(data: bytes, name: str) -> list[Record]:
    """All records of a file's content, oldest first; `name` is what errors call it.

    Raises:
        ValueError: one line `name:line: field: …`, also for a truncated last line.
    """
    *lines, tail = data.split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(from_json(line))
        except ValueError as error:
            raise ValueError(f"{name}:{number}: {error}") from error
    if tail:
        raise ValueError(f"{name}:{len(lines) + 1}: JSON: truncated, the last line has no end")
    return records


def append(path: Path, records: Sequence[Record]) -> None:
    """Append the records as one write, all or none; creates the folders.

    Raises:
        ValueError: `cannot write file: …` (read-only, disk full, truncated last line); the file is as before.
    """
    data = "".join(f"{to_json(record)}\n" for record in records).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _append(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def other_run(a: Record, b: Record) -> list[str]:
    """What tells the runs of two records apart, by field; a field that a record lacks tells nothing."""
    sides = ((name, getattr(a, name), getattr(b, name)) for name in ("unit", "driver", "torch", "triton", "commit"))
    return [name for name, of_a, of_b in sides if of_a and of_b and of_a != of_b]


def newest(records: Iterable[Record]) -> list[Record]:
    """The newest record of every (key, variant, device), the last of those of one time, in the order of their first."""
    found: dict[tuple[Key, str, str], Record] = {}
    for record in records:
        known = found.setdefault((record.key, record.variant, record.device), record)
        if datetime.fromisoformat(record.date) >= datetime.fromisoformat(known.date):
            found[record.key, record.variant, record.device] = record
    return list(found.values())


def _append(descriptor: int, data: bytes) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        raise OSError(errno.EIO, "its last line is truncated")
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def _bad(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{name}: {value!r}: expected {expected}")


def _check_texts(record: Record) -> None:
    for name in (*_NAMES, *_TEXTS, "date"):
        value = getattr(record, name)
        if not isinstance(value, str) or (name in _NAMES and not value):
            raise _bad(name, value, "a name" if name in _NAMES else "a string")
    try:
        offset = datetime.fromisoformat(record.date).utcoffset()
    except ValueError:
        offset = None
    if offset != timedelta(0):
        raise _bad("date", record.date, "an ISO 8601 date and time in UTC")


def _check_mappings(record: Record) -> None:
    if not isinstance(record.axes, dict) or any(type(size) is not int or size < 0 for size in record.axes.values()):
        raise _bad("axes", record.axes, "axis names with sizes of 0 or more")
    options = record.options
    if not isinstance(options, dict) or any(not isinstance(value, bool | int | float | str) for value in options.values()):
        raise _bad("options", options, "option names with plain values")
    if record.config is not None and not isinstance(record.config, dict):
        raise _bad("config", record.config, "knobs with values, or null")


def _check_measures(record: Record) -> None:
    for name in (*_REQUIRED_MEASURES, *_OPTIONAL_MEASURES):
        value = getattr(record, name)
        if value is None:
            continue
        if type(value) not in (int, float) or not 0 <= value <= MOST:
            raise _bad(name, value, f"a number from 0 to {MOST:g}, or null")
    _check_samples(record)
    if record.n is not None and (type(record.n) is not int or record.n < 1):
        raise _bad("n", record.n, "a number of samples, or null")


def _check_samples(record: Record) -> None:
    processes = record.samples_us
    if processes is None:
        return
    if not isinstance(processes, list) or not processes or not all(isinstance(rounds, list) and rounds for rounds in processes):
        raise _bad("samples_us", processes, "a list of times for every process, or null")
    for time_us in (time_us for rounds in processes for time_us in rounds):
        if type(time_us) not in (int, float) or not 0 < time_us <= MOST:
            raise _bad("samples_us", time_us, f"times above 0, at most {MOST:g}")
    if record.n is not None and sum(map(len, processes)) != record.n:
        raise _bad("n", record.n, f"the number of samples_us, {sum(map(len, processes))}")


def _check_status(record: Record) -> None:
    if record.status not in STATUSES:
        raise _bad("status", record.status, f"one of {', '.join(STATUSES)}")
    passed = record.status == "passed"
    if passed and record.device == INTERPRETER:
        raise _bad("status", record.status, f"'checked' on device {INTERPRETER!r}, where times mean nothing")
    for name in (*_REQUIRED_MEASURES, "n"):
        value = getattr(record, name)
        if passed and not value:
            raise _bad(name, value, "a value above 0 where the status is 'passed'")
    for name in (*_REQUIRED_MEASURES, *_OPTIONAL_MEASURES, "n", "samples_us"):
        if not passed and getattr(record, name) is not None:
            raise _bad(name, getattr(record, name), f"none where the status is {record.status!r}")
    if passed and float(record.ci_low_us or 0) > float(record.ci_high_us or 0):
        raise _bad("ci_low_us", record.ci_low_us, f"at most ci_high_us = {record.ci_high_us!r}")
    if record.status in ("failed", "skipped") and not record.reason:
        raise _bad("reason", record.reason, f"a reason where the status is {record.status!r}")
    if passed and record.reason:
        raise _bad("reason", record.reason, "none where the status is 'passed'")


def merge(path: Path, new: Sequence[Record]) -> None:
    """Replace the rows of a file that `new` measured again later, keep the others; the file changes as a whole or not at all.

    Processes that do so at the same time wait for each other; readers see the old file or the new one.

    Raises:
        ValueError: a broken file, or one that cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            rows = newest([*(load(path) if path.exists() else []), *new])
            replace_text(path, "".join(f"{to_json(row)}\n" for row in rows))
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
