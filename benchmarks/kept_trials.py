"""Read and write kept trials: `trials/<gpu>/<op>.csv.gz` beside this file, by which the scripts judge searches and look-ups.

python benchmarks/kept_trials.py JOURNAL...    # keep the trials of searches, such as results/runs/trials/nvidia_h200/stream.log

A file is a gzipped text of blocks, the newest last. A block holds the trials of a variant from a single run: a JSON header behind
`# `, a line of column names, and a CSV row per trial. Read only files that you trust.
"""

import argparse
import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, cast

from kerneltune import device, ops
from kerneltune.records import TrialStatus
from kerneltune.search.trials import STATUS_NOW, TRANSIENT, history
from kerneltune.spec import Case
from kerneltune.task import Evaluation, Knobs, Trial, knob_pairs

ROOT = Path(__file__).parent / "trials"
SCHEMA = 2
FIXED = ("dtype", "quant", "status", "time_us", "resources", "spill_bytes", "shared_bytes", "case")
"""The first columns of every block; the columns of axes, options and knobs follow."""
PARSERS: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "bool": "True".__eq__}
Row = tuple[Case, Knobs, Evaluation]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialBlock:
    """The trials of a variant from a single run.

    Attributes:
        op, variant, policy: the task of every trial, except for its case.
        device: name of the GPU.
        driver, torch, triton, source_hash: versions of the software that the times depend on.
        commit, date: source and time of the run.
        command: command that measured a whole space; empty for other blocks.
        default: default config of a case whose whole space was measured; empty for other blocks.
        rows: case, config and result of every trial.
    """

    op: str
    variant: str
    policy: str
    device: str
    driver: str
    torch: str
    triton: str
    source_hash: str
    commit: str
    date: str
    command: str = ""
    default: Knobs = ()
    rows: tuple[Row, ...] = ()

    @property
    def case(self) -> Case:
        """Return the first case, which is the only case of a whole space."""
        return self.rows[0][0]

    @property
    def trials(self) -> dict[Knobs, Evaluation]:
        """Return the trials by config, for a whole space."""
        return {knobs: evaluation for _, knobs, evaluation in self.rows}

    @property
    def feasible(self) -> dict[Knobs, float]:
        """Return the time of every config that has a time, in microseconds."""
        return {knobs: trial.time_us for knobs, trial in self.trials.items() if trial.time_us is not None}

    @property
    def name(self) -> str:
        """Return the name of a whole space, unique on a GPU."""
        return device.slug(f"{self.op} {self.variant} {self.case.name} {self.case.dtype} {self.case.quant} {self.policy}")


def path_of(op: str, gpu: str = "nvidia_h200", root: Path = ROOT) -> Path:
    """Return the file of an operator on a GPU."""
    return root / gpu / f"{op}.csv.gz"


def read(path: Path) -> list[TrialBlock]:
    """Return the blocks of a file; none without a file."""
    if not path.exists():
        return []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("# {")]
    return [_block(lines[start:end]) for start, end in pairwise([*starts, len(lines)])]


def whole_spaces(root: Path = ROOT) -> list[TrialBlock]:
    """Return the newest measurement of every whole space."""
    blocks = (block for path in sorted(root.glob("*/*.csv.gz")) for block in read(path) if block.default)
    return list({(block.device, block.name): block for block in blocks}.values())


def _block(lines: Sequence[str]) -> TrialBlock:
    head = json.loads(lines[0].removeprefix("# "))
    axes, options, knobs = head.pop("axes"), head.pop("options"), head.pop("knobs")
    if head.pop("schema") != SCHEMA or lines[1].split(",") != [*FIXED, *axes, *options, *knobs]:
        raise ValueError(f"header: {lines[0][:200]}: expected schema {SCHEMA} and the columns of the line below")
    kinds = [*((axis, "int") for axis in axes), *options.items(), *knobs.items()]
    columns = [(name, PARSERS[kind]) for name, kind in kinds]
    rows = []
    for dtype, quant, status, time, resources, spilled, shared, name, *cells in csv.reader(lines[2:]):
        values = tuple((column, parse(cell)) for (column, parse), cell in zip(columns, cells, strict=True))
        case = Case(name, values[: len(axes)], dtype, quant, values[len(axes) : len(axes) + len(options)])
        measured = float(time) if time else None, "", int(resources), int(spilled), int(shared), head["date"], head["commit"]
        now = STATUS_NOW.get(status) or cast(TrialStatus, status)
        rows.append((case, values[len(axes) + len(options) :], Evaluation(now, *measured)))
    return TrialBlock(**{**head, "default": tuple(head["default"].items())}, rows=tuple(rows))


def add(path: Path, block: TrialBlock) -> None:
    """Add the rows of a block that a file does not have from the same software; a whole space is added whole."""
    blocks = read(path)
    known = {tuple(_cells(row)) for one in blocks if _software(one) == _software(block) for row in one.rows}
    rows = tuple(row for row in block.rows if tuple(_cells(row)) not in known)
    if rows:
        write(path, [*blocks, block if block.default else replace(block, rows=rows)])


def _software(block: TrialBlock) -> TrialBlock:
    """Return a block without rows, commit and date."""
    return replace(block, rows=(), commit="", date="")


def write(path: Path, blocks: Iterable[TrialBlock]) -> None:
    """Write a file; equal blocks give equal bytes."""
    text = io.StringIO()
    for block in blocks:
        case, knobs, _ = block.rows[0]
        kinds = {"options": _kinds(case.options), "knobs": _kinds(knobs)}
        run = {name: value for name, value in asdict(replace(block, rows=())).items() if name not in ("rows", "default")}
        head = {"schema": SCHEMA, **run, "axes": [axis for axis, _ in case.axes], **kinds, "default": dict(block.default)}
        text.write(f"# {json.dumps(head)}\n")
        columns = [*FIXED, *head["axes"], *kinds["options"], *kinds["knobs"]]
        csv.writer(text, lineterminator="\n").writerows([columns, *map(_cells, block.rows)])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))


def _kinds(values: Iterable[tuple[str, Any]]) -> dict[str, str]:
    return {name: type(value).__name__ for name, value in values}


def _cells(row: Row) -> list[Any]:
    case, knobs, trial = row
    time = "" if trial.time_us is None else f"{trial.time_us:.6g}"
    fixed = [
        case.dtype,
        case.quant,
        trial.status,
        time,
        trial.program_registers,
        trial.spill_bytes,
        trial.shared_bytes,
        case.name,
    ]
    return fixed + [value for pairs in (case.axes, case.options, knobs) for _, value in pairs]


def blocks_of(trials: Iterable[Trial], gpu: str) -> Iterator[TrialBlock]:
    """Yield a block for the trials of each variant, policy and software, and a block for each case whose whole space is known.

    gpu: name of the GPU.
    """
    known = ops.load()

    def run(trial: Trial) -> tuple[Any, ...]:
        return trial.key.op, trial.key.variant, trial.key.policy, *sorted(trial.fingerprint.items())

    def of_case(trial: Trial) -> str:
        return trial.key.case.label

    kept = [trial for trial in trials if trial.evaluation.status not in TRANSIENT]
    for (op, variant, policy, *_), group in groupby(sorted(kept, key=lambda one: (run(one), of_case(one))), key=run):
        chosen = known[op].variant(variant)
        others: list[Trial] = []
        spaces = []
        for _, found in groupby(group, key=of_case):
            of_one = list(found)
            case = of_one[0].key.case
            is_whole = {knob_pairs(config) for config in chosen.configs(case)} <= {trial.knobs for trial in of_one}
            spaces += [(of_one, knob_pairs(chosen.default_config(case)))] if is_whole else []
            others += [] if is_whole else of_one
        for of_block, default in [*spaces, *([(others, ())] if others else [])]:
            newest = max((trial.evaluation for trial in of_block), key=lambda one: one.date)
            rows = tuple((trial.key.case, trial.knobs, trial.evaluation) for trial in of_block)
            about = {"op": op, "variant": variant, "policy": policy, "device": gpu, "commit": newest.commit, "date": newest.date}
            yield TrialBlock(**about, **of_block[0].fingerprint, default=default, rows=rows)


def main() -> None:
    """Keep the trials of journals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal", nargs="+", type=Path, help="journals of searches; their folders name the GPU")
    for journal in parser.parse_args().journal:
        path = path_of(journal.stem, journal.parent.name)
        gpu = {block.device for block in read(path)} or {device.current().name}
        for block in blocks_of(history(journal), gpu.pop()):
            add(path, block)
        print(f"{sum(len(block.rows) for block in read(path))} trials: {path}")


if __name__ == "__main__":
    main()
