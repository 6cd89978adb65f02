"""Find the files that a command reads if none is named, and select their records."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from kerneltune import device, sweep_file
from kerneltune.cli import loading
from kerneltune.cli import options as o
from kerneltune.cli.console import note
from kerneltune.errors import meant
from kerneltune.files import data_root, read_text
from kerneltune.plan import Selection
from kerneltune.processes.programs import git
from kerneltune.records import Record, grouped, load, parse
from kerneltune.spec import PLUGINS, Case, Op, TaskKey
from kerneltune.sweep_file import Section
from kerneltune.table import Column, Table
from kerneltune.task import runs_folder
from kerneltune.workloads import own_tables
from kerneltune.yaml_fields import MAX_BYTES

SUFFIX = ".jsonl"
T = TypeVar("T")


def selected(rows: Sequence[T], selection: Selection, key_of: Callable[[T], TaskKey] = attrgetter("key")) -> list[T]:
    """Return the rows, such as records or configs, that the options select; a name that no row has is an error."""
    keys = [key_of(row) for row in rows]
    for field in ("op", "dtype", "quant", "variant", "case"):
        selection.require_match(field, (key.op if field == "op" else key.fields[field] for key in keys))
    return [row for row, key in zip(rows, keys, strict=True) if selection.matches(key)]


def swept_cases(op: str, sections: Sequence[Section] = ("bench", "check")) -> list[Case]:
    """Return the cases of an operator in all sweep files.

    Sweep files are those of the checkout or package, a `.yaml` file here whose `ops:` names the operator, and the sweep of
    the capture in use. A `.yaml` file here that is no valid sweep file is left out, and a line says why.
    """
    named = re.compile(rf"^ops:(?:.|\n[ -])*(?<![\w.-]){re.escape(op)}(?![\w.-])", re.MULTILINE)
    ops = loading.load_ops()
    sweeps = [sweep_file.load(path, ops) for path in sorted(data_root("sweeps").glob("*.yaml"))]
    for path in sorted(Path().glob("*.yaml")):
        with suppress(ValueError):  # other programs' files may be large, or no text
            text = read_text(path, MAX_BYTES)
            try:
                sweeps += [sweep_file.load(path, ops)] if named.search(text) else []
            except ValueError as error:
                note(f"sweep file left out: {error}")
    if o.captured():
        sweeps.append(sweep_file.load(Path(o.captured(), "sweep.yaml"), ops))
    entries = [entry for sweep in sweeps for section in sections for entry in getattr(sweep, section)]
    return [entry.case for entry in entries if entry.op == op]


def bench_case(op: Op, name: str | None, dtype: str | None, quant: str | None) -> Case:
    """Return the first bench case of an operator in any sweep file that has this name, element type and mode; None for any."""
    cases = swept_cases(op.name, ["bench"])
    cases = [case for case in cases if dtype in (None, case.dtype) and quant in (None, case.quant)]
    if not cases:
        raise ValueError(f"no sweep has a bench case of {op.name} with {dtype=} {quant=}: see `ops {op.name}`")
    named = {case.name: case for case in reversed(cases)}
    return cases[0] if name is None else named[o.one_of("case", name, dict.fromkeys(case.name for case in cases))]


def record_files(results: Path | None, family: str | None = None) -> list[Path]:
    """Return the record files of this GPU; without a GPU, return the files of all GPUs and print a remark."""
    root = sweep_file.recorded_root(results, family)
    family = None if family is None else sweep_file.family_name(family)
    model = device.model()
    is_gpu = model != device.INTERPRETER
    own = sweep_file.results_root(results)
    if family is None and os.environ.get(PLUGINS) and root != own:  # nobody asked for the records that the package ships
        raise ValueError(
            f"no records in {own}: run `kerneltune sweep FILE.yaml` on a GPU first, or show recorded results by "
            "`compare --family NAME` and `report FILE`"
        )
    pattern = f"{device.slug(model) if is_gpu else '*'}/{family or '*'}.jsonl"
    files = [path for path in sorted(root.glob(pattern)) if path.parent not in (root / device.INTERPRETER, runs_folder(root))]
    if not files:
        owner = f"of {model} in" if is_gpu else "of any GPU in"
        others = sorted({path.stem for folder in (root, sweep_file.recorded_root(results)) for path in folder.glob("*/*.jsonl")})
        near = meant(family, others)
        names_others = others and family and family not in others and not near
        more = f"; there are records of {', '.join(others)}" if names_others else ""
        raise ValueError(f"no records {owner} {own / pattern}: run a sweep first, or name a file{more}{near}")
    if not is_gpu:
        folders = ", ".join(dict.fromkeys(str(path.parent) for path in files))
        note(f"no GPU here: recorded results from {files[0] if len(files) == 1 else f'{len(files)} files of {folders}'}")
    return files


def tables_of_devices(records: Sequence[Record]) -> list[Table]:
    """Return the tables that workloads declare, see `own_tables`, for the records of each device, which is the first column."""
    tables = []
    for device_name, device_records in grouped(records, lambda record: record.device).items():
        for table in own_tables(device_records) if own_tables(records) else ():
            rows = tuple(row._replace(values=(device_name, *row.values)) for row in table.rows)
            columns = Column("device", shared=True), *table.columns
            tables.append(replace(table, columns=columns, rows=rows, repeated=table.repeated + 1))
    return tables


def load_some(path: Path) -> list[Record]:
    """Return the records of a file, one or more."""
    return _some(load(path), str(path))


def _some(records: list[Record], name: str) -> list[Record]:
    if not records:
        raise ValueError(f"{name}: no records")
    return records


def load_baseline(name: str, counterpart: Path) -> list[Record]:
    """Return the records of a baseline, one or more.

    Args:
        name: a file, `REV:PATH` with a path as git takes it, or `REV` for the file `counterpart` in that revision.
        counterpart: the records that are compared with the baseline.
    """
    if (name and Path(name).exists()) or (name.endswith(SUFFIX) and ":" not in name):
        return load_some(Path(name))
    revision, _, inside = name.partition(":")
    folder = Path() if inside else counterpart.parent
    inside = inside or f"./{counterpart.name}"
    if not revision or revision.startswith("-") or not folder.is_dir():
        raise ValueError(f"baseline: {name!r}: expected a {SUFFIX} file, or a git revision that has {counterpart}")
    try:
        data = git(folder, "cat-file", "blob", f"{revision}:{inside}")
    except ValueError as error:
        expected = f"expected a {SUFFIX} file, or a revision in which the records are committed"
        raise ValueError(f"baseline: {name!r}: no such file, and {error}: {expected}") from error
    return _some(parse(data.splitlines(keepends=True), f"{revision}:{inside}"), name)
