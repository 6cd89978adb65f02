"""Read and write records: rows that were measured, checked, failed or skipped, with their provenance, as JSON lines.

A journal is appended to; a file of results is replaced as a whole. `frame` returns records as a pandas table.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from kerneltune.device import INTERPRETER
from kerneltune.files import append_lines, bad, decode, locked, opened, replace_bytes
from kerneltune.spec import LARGEST_MEASURE, Knob, Measure, Name, Option, Role, Size, TaskKey
from kerneltune.wording import assignments

if TYPE_CHECKING:
    import pandas as pd

Status = Literal["passed", "failed", "skipped", "checked"]
"""`passed`: correct and timed; `checked`: correct, not timed; `failed`: wrong results or an error; `skipped`: the case is not
supported or does not fit in memory, or a peer's import failed."""
TrialStatus = Literal[Status, "crashed", "compile", "spills", "occupancy"]
"""Status of a trial. Beyond a record's, a config may have `crashed` its process, or failed to `compile`. A search refuses a
config before its launch if it `spills` registers, or if too few of its programs fit an SM (`occupancy`)."""

IMPORT_FAILED = "cannot be imported: "
"""Begin of the reason of a peer that was skipped because an import failed; the error follows."""
RIGHT_ALONE = "right alone in a new process, and wrong after "
"""Begin of the reason of a failure for which host code keeps a value of another call, which follows."""

Defaults = Callable[[str], Mapping[str, Option]]
"""Function of an operator's name: the default of every option; empty for an unknown operator."""

RecordKey = Callable[["Record"], object]
"""Function that returns the key of a record; two records of a file never share it."""
CHECK_SUFFIX = ".check.jsonl"
"""End of the name of a file of checks."""
T = TypeVar("T")
K = TypeVar("K")

_LEAST_US = 1e-6
"""Least time of a record in µs, below a clock cycle of any GPU: ratios of times stay finite."""
_ROUNDING = 1e-5
"""Fraction by which rounded times may exceed each other."""
_Time = Annotated[float, Meta(ge=_LEAST_US, le=LARGEST_MEASURE)]
_Rounds = Annotated[Sequence[_Time], Meta(min_length=1)]

_NAMES = ("op", "variant", "case", "dtype", "quant", "policy", "device", "family")
RUN_FIELDS = ("unit", "driver", "torch", "triton", "commit")
_REQUIRED_MEASURES = ("time_us", "gbps", "ci_low_us", "ci_high_us")
_OPTIONAL_MEASURES = ("ceiling_gbps", "pct_ceiling", "aa_floor", "p10_us", "p90_us")
_UTC = timedelta(0)


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Hold a row of a sweep: the result of a variant on a case, of a comparison or a check, as tables and gates read it.

    A copy with changes is `msgspec.structs.replace(record, …)`.

    Attributes:
        op, variant, dtype, quant, axes, options: with `policy` and `device`, the key of the row.
        case: the case's name; no part of the key.
        policy: timing policy, for example `cold`.
        status: only a record that `passed` has measures.
        time_us: median time of one call.
        gbps: fewest bytes that the operator must move, over the time, in GB/s (1e9 bytes).
        ceiling_gbps: GB/s of a streaming kernel with the same bytes and mix of reads and writes; `pct_ceiling` is `gbps` in per
            cent of `ceiling_gbps`.
        ci_low_us, ci_high_us: 95 % interval of the time; p10_us and p90_us are the samples' quantiles.
        n: number of samples.
        aa_floor: noise floor of the row as a fraction of the time.
        config: knob -> value; None for a variant without knobs.
        date: ISO 8601 in UTC.
        reason: reason why the row failed or was skipped; empty if the row passed.
        family: family of the sweep file that the row belongs to.
        samples_us: time of one call in every round, a sequence per process; None in rows of older versions.
        unit: digest of the GPU's serial; empty in rows of older versions.
        role: `own` variant, `peer` of another package, or `part` of the work only; empty in rows of older versions.
        flops: floating-point operations of one call; None where the operator states none.
    """

    op: Name
    variant: Name
    case: Name
    dtype: Name
    quant: Name
    policy: Name
    status: Status
    time_us: Measure | None = None
    gbps: Measure | None = None
    ceiling_gbps: Measure | None = None
    pct_ceiling: Measure | None = None
    ci_low_us: Measure | None = None
    ci_high_us: Measure | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    aa_floor: Measure | None = None
    config: dict[str, Knob | None] | None = None
    device: Name
    driver: str
    torch: str
    triton: str
    source_hash: str
    commit: str
    date: str
    axes: dict[str, Size]
    options: dict[str, Knob] = {}
    reason: str = ""
    p10_us: Measure | None = None
    p90_us: Measure | None = None
    family: str = ""
    samples_us: Annotated[Sequence[_Rounds], Meta(min_length=1)] | None = None
    unit: str = ""
    role: Role = ""
    flops: Size | None = None

    def __post_init__(self) -> None:
        _check_names(self)
        _check_measures(self)
        _check_status(self)

    @property
    def key(self) -> TaskKey:
        """Return the key of the record's task: with the device, the key of the row."""
        return TaskKey.of(self.op, self)

    @property
    def config_label(self) -> str:
        """Return the config in one line: `block=1024 warps=4`; `-` without a config."""
        return assignments(self.config or {}) or "-"

    @property
    def label(self) -> str:
        """Return the key in one line: `rmsnorm_fwd M=8192 N=4096 bfloat16 fp8 cold`."""
        return " ".join([self.op, assignments({**self.axes, **self.options}), self.dtype, self.quant, self.policy])


def rounded(value: float) -> float:
    """Round a value to six significant digits, more than any clock resolves."""
    return float(f"{value:.6g}")


def timing(
    processes: Sequence[Sequence[float]], traffic_bytes: float, ceiling_gbps: float | None, floor: float | None
) -> dict[str, Any]:
    """Return the measured fields of a record, from the samples (rounds,) of each process."""
    import numpy as np

    from kerneltune.stats import centre_interval

    interval = centre_interval([np.asarray(rounds) for rounds in processes])
    p10, p90 = np.quantile(np.concatenate(processes), [0.1, 0.9]).tolist()
    gbps = traffic_bytes / interval.median / 1e3
    values = {
        "time_us": interval.median,
        "gbps": gbps,
        "ceiling_gbps": ceiling_gbps,
        "pct_ceiling": 100 * gbps / ceiling_gbps if ceiling_gbps else None,
        "ci_low_us": interval.low,
        "ci_high_us": interval.high,
        "aa_floor": floor,
        "p10_us": p10,
        "p90_us": p90,
    }
    fields: dict[str, Any] = {name: None if value is None else rounded(value) for name, value in values.items()}
    samples = [[rounded(time_us) for time_us in rounds] for rounds in processes]
    return fields | {"n": sum(map(len, samples)), "samples_us": samples}


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the ratio; None where either value is not known."""
    return None if numerator is None or denominator is None else numerator / denominator


def row_key(record: Record) -> tuple[TaskKey, str]:
    """Return the key of a row: its task and device."""
    return record.key, record.device


def check_key(record: Record) -> object:
    """Return the key of a row in a file of checks: the row, and the config."""
    return row_key(record), record.config_label


def case_key(record: Record) -> tuple[TaskKey, str]:
    """Return the key that the rows of all variants of a case share: the case and the device."""
    return record.key.of_case, record.device


def load(path: Path) -> list[Record]:
    """Return all records of a file, oldest first; a file of checks may have several configs of a row."""
    with opened(path) as file:
        return parse(file, str(path), check_key if path.name.endswith(CHECK_SUFFIX) else row_key)


def load_if_present(path: Path) -> list[Record]:
    """Return all records of a file as `load` does; none of a missing file."""
    return load(path) if path.exists() else []


def parse(lines: Iterable[bytes], name: str, key: RecordKey | None = row_key) -> list[Record]:
    """Return all records on lines of JSON, oldest first; errors call the lines `name`.

    key: function whose value no two lines may share; None for a journal, where rows repeat.
    """
    records: list[Record] = []
    line_of: dict[object, int] = {}
    for line in lines:
        try:
            if not line.lstrip().startswith(b"{"):
                raise bad("JSON", line.decode(errors="replace").strip(), "a record, a JSON object, on each line")
            if not line.endswith(b"\n"):
                raise ValueError("JSON: truncated, the last line has no end")
            records.append(decode(line[:-1], Record))
        except ValueError as error:
            raise ValueError(f"{name}:{len(records) + 1}: {error}") from error
        record, number = records[-1], len(records)
        first = line_of.setdefault(key(record), number) if key else number
        if first != number:
            row = f"{record.label} {record.variant} on {record.device}"
            raise ValueError(f"{name}:{number}: {record.case}: {row}: the row of line {first} again; delete one of the two lines")
    return records


def append(path: Path, records: Sequence[Record]) -> None:
    """Append the records in a single write, all or none; replace a truncated last line, and make the folders."""
    append_lines(path, _lines(records))


def merge(path: Path, new: Sequence[Record]) -> None:
    """Replace the rows of a file that `new` measured later, and keep the other rows.

    The file changes as a whole or not at all. Processes that merge at the same time wait for each other.
    """
    with locked(path):
        replace_bytes(path, _lines(newest([*load_if_present(path), *new])))


def merge_checks(path: Path, new: Sequence[Record], is_kept: Callable[[Record], bool], key_of: RecordKey = row_key) -> None:
    """Replace the rows of a file of checks that `new` checked again, and keep the other rows that `is_kept` accepts.

    A file of checks has one row for each config: the failed row if there is any. A failed import replaces only a failed import.
    The file changes as `merge` changes a file.

    key_of: `row_key` if a record replaces the rows of all configs; `check_key` if only the row of its own config.
    """
    with locked(path):
        before = [record for record in load_if_present(path) if is_kept(record)]
        launched = {key_of(record) for record in before if not _is_failed_import(record)}
        replacing = [record for record in new if not (_is_failed_import(record) and key_of(record) in launched)]
        replaced = set(map(key_of, replacing))
        worst = {check_key(record): record for record in sorted(replacing, key=lambda record: record.status == "failed")}
        kept = [record for record in before if key_of(record) not in replaced]
        replace_bytes(path, _lines([*kept, *worst.values()]))


def differing_run_fields(a: Record, b: Record) -> list[str]:
    """Return the fields of the run that differ between two records; a field that a record lacks does not count."""
    present = [name for name in RUN_FIELDS if getattr(a, name) and getattr(b, name)]
    return [name for name in present if getattr(a, name) != getattr(b, name)]


def shared_case_key(a: Iterable[Record], b: Iterable[Record], defaults: Defaults = lambda _op: {}) -> RecordKey:
    """Return a function that gives records of two sets the same key if their cases, policies and devices are the same.

    An operator may get a new option, which older records lack. If any record of the operator lacks an option, the key is without
    this option where its value is the default. If the default is unknown, and all records that have the option have the same
    value, this value counts as the default.
    """
    implied = {op: _implied_options(op, rows, defaults) for op, rows in grouped((*a, *b), lambda record: record.op).items()}
    shared: dict[object, object] = {}  # many rows differ in sizes alone: equal tuples are kept once

    def key(record: Record) -> object:
        options: Mapping[str, Option] = record.options
        dropped = implied.get(record.op)
        if dropped:
            options = {name: value for name, value in options.items() if name not in dropped or value != dropped[name]}
        names = (record.op, record.device, record.policy, record.dtype, record.quant, *sorted(options.items()))
        return shared.setdefault(names, names), *sorted(record.axes.items())

    return key


def _implied_options(op: str, op_records: Sequence[Record], defaults: Defaults) -> dict[str, Option]:
    """Return the options that some records of an operator lack, each with its default, else with its only value."""
    option_sets = {frozenset(record.options) for record in op_records}
    implied: dict[str, Option] = {}
    for name in frozenset.union(*option_sets) - frozenset.intersection(*option_sets):
        values = {record.options[name] for record in op_records if name in record.options}
        if name in defaults(op):
            implied[name] = defaults(op)[name]
        elif len(values) == 1:
            implied[name] = values.pop()
    return implied


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return key -> the items with this key, keys and items in order of appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def newest(records: Iterable[Record]) -> list[Record]:
    """Return the newest record of every row, in order of the rows' appearance; of equal dates the last record wins."""
    return list(newest_by(records, row_key).values())


def newest_by(records: Iterable[Record], key: RecordKey) -> dict[object, Record]:
    """Return key -> the newest record with this key, in order of the keys' first records.

    A failure, and a case that is no longer supported, replace a time. Because a failed import says nothing about the peer, its
    record replaces none.
    """
    found: dict[object, Record] = {}
    for row, alike in grouped(records, key).items():
        launched = [record for record in alike if not _is_failed_import(record)]
        found[row] = max(reversed(launched or alike), key=lambda record: datetime.fromisoformat(record.date))
    return found


def _is_failed_import(record: Record) -> bool:
    return record.reason.startswith(IMPORT_FAILED)


def frame(paths: Path | str | Iterable[Path | str]) -> "pd.DataFrame":
    """Return the records of files as a pandas table, a row per record, oldest first within a file.

    Columns and dtypes:
        op, variant, role, family, case, dtype, quant, policy, status, device, unit, driver, torch, triton, source_hash, commit,
            reason, file: string; `file` is the path that the row comes from.
        date: datetime64[us, UTC].
        time_us, ci_low_us, ci_high_us, p10_us, p90_us: float64, microseconds; NaN where the row is not timed.
        gbps, ceiling_gbps: float64, GB/s (1e9 bytes); pct_ceiling: float64, percent; aa_floor: float64, a fraction.
        n, flops: Int64; <NA> where unknown.
        axes.NAME: Int64, a column per axis; options.NAME, config.NAME: object, a column per option and knob; <NA> where the row
            has none of that name.
        samples_us: object, a sequence of times per process, or None.
    """
    import pandas as pd

    files = [Path(paths)] if isinstance(paths, Path | str) else [Path(path) for path in paths]
    rows = [(str(path), record) for path in files for record in load(path)]
    dtypes = dict.fromkeys((*_REQUIRED_MEASURES, *_OPTIONAL_MEASURES), "float64")
    dtypes |= {"n": "Int64", "flops": "Int64", "samples_us": "object"}
    columns: dict[str, Any] = {
        name: pd.Series([getattr(record, name) for _, record in rows], dtype=dtypes.get(name, "string"))
        for name in Record.__struct_fields__
        if name not in ("axes", "options", "config")
    }
    columns["date"] = pd.to_datetime(columns["date"], format="ISO8601", utc=True).astype("datetime64[us, UTC]")
    columns["file"] = pd.Series([file for file, _ in rows], dtype="string")
    for group, dtype in (("axes", "Int64"), ("options", "object"), ("config", "object")):
        parts = [getattr(record, group) or {} for _, record in rows]
        for name in dict.fromkeys(name for part in parts for name in part):
            columns[f"{group}.{name}"] = pd.Series([part.get(name, pd.NA) for part in parts], dtype=dtype)
    return pd.DataFrame(columns)


def _lines(records: Iterable[Record]) -> bytes:
    return b"".join(msgspec.json.encode(_require_finite(record)) + b"\n" for record in records)


def _require_finite(record: Record) -> Record:
    """Return the record; raise ValueError if JSON cannot hold its options or its config."""
    for name in ("options", "config"):
        values = getattr(record, name) or {}
        if any(value != value or value in (float("inf"), -float("inf")) for value in values.values()):
            raise bad(name, values, "values that JSON can hold")
    return record


def _check_names(record: Record) -> None:
    for name in _NAMES:
        value: str = getattr(record, name)
        if not value and name != "family":
            raise bad(name, value, "a name")
        if not value.isprintable():
            raise bad(name, value, "a name without control characters")
    for name in ("axes", "options", "config"):
        if not "".join(getattr(record, name) or ()).isprintable():
            raise bad(name, getattr(record, name), "names without control characters")
    try:
        offset = datetime.fromisoformat(record.date).utcoffset()
    except ValueError:
        offset = None
    if offset != _UTC:
        raise bad("date", record.date, "an ISO 8601 date and time in UTC")


def _check_measures(record: Record) -> None:
    for name in (*_REQUIRED_MEASURES, *_OPTIONAL_MEASURES):
        value = getattr(record, name)
        if value is not None and not 0 <= value <= LARGEST_MEASURE:
            raise bad(name, value, f"a number from 0 to {LARGEST_MEASURE:g}, or null")
    if record.n is None or record.samples_us is None:
        return
    samples = sum(map(len, record.samples_us))
    if samples != record.n:
        raise bad("n", record.n, f"the number of samples_us, {samples}")
    least, most = min(map(min, record.samples_us)), max(map(max, record.samples_us))
    if record.time_us is not None and not least * (1 - _ROUNDING) <= record.time_us <= most * (1 + _ROUNDING):
        raise bad("time_us", record.time_us, f"a time within samples_us, {least!r} to {most!r}")


def _check_status(record: Record) -> None:
    if record.status != "passed":
        _check_untimed(record)
        return
    if record.device == INTERPRETER:
        raise bad("status", record.status, f"'checked' on device {INTERPRETER!r}, where times mean nothing")
    for name in (*_REQUIRED_MEASURES, "n"):
        if not getattr(record, name):
            raise bad(name, getattr(record, name), "a value above 0 where the status is 'passed'")
    low, time_us, high = float(record.ci_low_us or 0), float(record.time_us or 0), float(record.ci_high_us or 0)
    if low < _LEAST_US:
        raise bad("ci_low_us", record.ci_low_us, f"at least {_LEAST_US:g} µs")
    if low > high:
        raise bad("ci_low_us", record.ci_low_us, f"at most ci_high_us = {record.ci_high_us!r}")
    if not low <= time_us <= high:
        raise bad("time_us", record.time_us, f"a time within its interval, {record.ci_low_us!r} to {record.ci_high_us!r}")
    if record.reason:
        raise bad("reason", record.reason, "none where the status is 'passed'")


def _check_untimed(record: Record) -> None:
    for name in (*_REQUIRED_MEASURES, *_OPTIONAL_MEASURES, "n", "samples_us"):
        if getattr(record, name) is not None:
            raise bad(name, getattr(record, name), f"none where the status is {record.status!r}")
    if record.status != "checked" and not record.reason:
        raise bad("reason", record.reason, f"a reason where the status is {record.status!r}")
