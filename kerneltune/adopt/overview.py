"""Read a capture, and find suspicious keys, lists of configs, and results that depend on the config; launch nothing."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from kerneltune.adopt.arguments import signature
from kerneltune.adopt.configs import StoredConfig
from kerneltune.adopt.folder import (
    Count,
    LaunchClass,
    ProcessNotes,
    process_files,
    read_blocks,
    read_classes,
    read_notes,
    without_coupled_blocks,
)
from kerneltune.adopt.table import read_table
from kerneltune.records import Record, grouped, load
from kerneltune.task import runs_folder, trials_file
from kerneltune.wording import counted, first_of


@dataclass(slots=True)
class Capture:
    """Hold the classes of a capture folder, the notes of its processes, and a line for each skipped file."""

    root: Path
    classes: list[LaunchClass]
    notes: ProcessNotes
    problems: list[str] = field(default_factory=list)

    def count(self, launch_class: LaunchClass) -> Count:
        """Return the launches of a class; 0 launches if no process has counted any."""
        return self.notes.launches.get(launch_class.digest, Count())

    def cost_us(self, launch_class: LaunchClass) -> float:
        """Return the GPU time of a class's launches; if none was timed, the time to move their arguments at 1 TB/s."""
        count = self.count(launch_class)
        return count.launches * (count.time_us or 0.0) or max(count.launches, 1) * launch_class.argument_bytes / 1e6

    def shares(self) -> dict[str, float]:
        """Return each class's share of the time of all captured launches."""
        total = sum(map(self.cost_us, self.classes)) or 1.0
        return {launch_class.digest: self.cost_us(launch_class) / total for launch_class in self.classes}

    def by_kernel(self) -> list[list[LaunchClass]]:
        """Return the classes of each kernel, the most expensive kernel first."""
        by_kernel = grouped(self.classes, lambda each: (each.kernel, each.source_digest, each.configs_digest))
        return sorted(by_kernel.values(), key=lambda classes: -sum(map(self.cost_us, classes)))

    def plain(self) -> list[str]:
        """Return the kernels that were launched without an autotuner and not captured, for no reason of their own."""
        names = {launch_class.kernel.text for launch_class in self.classes} | self.notes.refused.keys()
        return sorted(set(self.notes.plain) - names)

    def own_runs(self) -> dict[str, list[str]]:
        """Return subclass of Autotuner -> the kernels that it launched by a `run` of its own, which does not call Triton's."""
        subclasses = self.notes.autotuned
        return grouped(sorted(kernel for kernel, subclass in subclasses.items() if subclass), subclasses.__getitem__)


def read_capture(root: Path, untried: str = "other values were not tried yet") -> Capture:
    """Return the capture of a folder, without launches whose tensors have no element: they have no time and no result.

    untried: reason why a block of a plain kernel may not change before a launch has tried other values; empty if it may.
    """
    read, problems = read_classes(root)
    files, blocks = process_files(root), read_blocks(root)
    notes, damaged_notes = read_notes(files)
    with_elements = [launch_class for launch_class in read if launch_class.argument_bytes]
    classes = [without_coupled_blocks(each, blocks.get(each.digest, {}), untried) for each in with_elements]
    if problems and not classes:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"{problems[0]}{more}: no class can be read")
    for kernel in {each.kernel.text for each in classes}.intersection(notes.misnamed):  # of an earlier run: since then corrected
        notes.refused.pop(kernel, None)
    failed = "each of its launches failed in the program" if files else ""
    for place, each in enumerate(classes):
        if each.digest not in notes.launches:
            classes[place] = structs.replace(each, problem=each.problem or failed)
    return Capture(root, classes, notes, problems + damaged_notes)


_NO_SIZES = ("stride", "seed", "num_warps", "num_stages", "num_ctas", "maxnreg")
"""Parts of the names of integer arguments that are no sizes."""


def _is_size(name: str) -> bool:
    return not any(part in name.lower() for part in _NO_SIZES)


def varying_sizes(classes: Sequence[LaunchClass]) -> list[str]:
    """Return the sizes that differ between classes with equal author's keys; none if the list has a single config."""
    differing: dict[str, None] = {}
    for alike in grouped(filter(lambda launch_class: launch_class.list_size > 1, classes), LaunchClass.autotuner_key).values():
        names = sorted({name for launch_class in alike for name in launch_class.sizes if _is_size(name)})
        differing |= dict.fromkeys(name for name in names if len({launch_class.sizes.get(name) for launch_class in alike}) > 1)
    return list(differing)


_LEAST_COUNTED = 4
"""Fewest values of an argument that may be a seed or a counter."""


def seed_hint(classes: Sequence[LaunchClass]) -> str:
    """Return a line about a kernel's argument that makes most classes, as a seed or a step counter does; empty for none.

    Integers of the author's key are left out, because the key tells classes apart.
    """
    key_names = () if classes[0].is_plain else classes[0].key_names
    values_of: dict[str, set[int]] = {}
    for argument in (argument for launch_class in classes for argument in launch_class.arguments):
        if type(argument.value) is int and argument.name not in key_names:
            values_of.setdefault(argument.name, set()).add(argument.value)
    names = sorted(name for name, values in values_of.items() if len(values) >= _LEAST_COUNTED)
    num_without = {name: len({signature(launch_class.arguments, {name}) for launch_class in classes}) for name in names}
    name = min(num_without, key=lambda ignored: num_without[ignored], default="")
    if not name or 2 * num_without[name] > len(classes):
        return ""
    count = f"{len(classes)} classes, {num_without[name]} without {name}"
    return f"{count}: if it is a seed or a counter, capture with --ignore-arg {name}"


def unkeyed_dimensions(classes: Sequence[LaunchClass]) -> list[str]:
    """Return the arguments that the author's key lacks and that equal a dimension of a tensor in the first class of a kernel.

    An argument that equals an argument of the key in all classes, as strides of contiguous matrices do, is no such argument, nor
    is one of a single config.
    """
    first = classes[0]
    shapes = [argument.tensor.shape for argument in first.arguments if argument.tensor is not None]
    dimensions = {size for shape in shapes for size in (*shape, math.prod(shape)) if size > 1}
    integers = [{a.name: a.value for a in each.arguments if type(a.value) is int} for each in classes]
    named = {*first.key_names, *(name for candidate in first.candidates for name in candidate.config.kwargs)}
    sizes = [name for name, value in integers[0].items() if value in dimensions and name not in named and first.list_size > 1]
    keyed = [[each.get(key) for each in integers] for key in first.key_names]
    follow = {name for name in sizes if [each.get(name) for each in integers] in keyed}
    return [name for name in sizes if name not in follow and _is_size(name) and not name.startswith("BLOCK")]


_SHOWN, _LABELS = 6, 3
_NUMBERS = re.compile(r"[\d.]+(e[+-]\d+)?|inf")
"""Parts of the reason of a failed check in which checks of other sizes and configs differ."""


def findings(capture: Capture) -> list[str]:
    """Return one line for each finding, kernel by kernel."""
    wins, wrong, checked = _chosen_configs(capture.root), _wrong_trials(capture.root), check_records(capture.root)
    lines: list[str] = []
    for classes in capture.by_kernel():
        records = [record for launch_class in classes for record in checked.get(launch_class.digest, {}).values()]
        failed = [record for record in records if record.status == "failed"]
        by_reason = grouped(failed, lambda record: _NUMBERS.sub("", record.reason))
        texts = [*_kernel_findings(classes, wins, wrong)]
        for alike in by_reason.values():
            cases = first_of((record.case for record in alike), 1)
            texts.append(f"the check of {alike[0].variant} failed: {cases}: {alike[0].reason}")
        lines += [f"{classes[0].kernel.text}: {text}" for text in texts]
    return [*lines, *_several_lists(capture.classes), *capture.problems]


def _several_lists(classes: Sequence[LaunchClass]) -> Iterator[str]:
    """Yield a line for each autotuned kernel whose launches with equal keys had different lists of configs."""
    autotuned = [launch_class for launch_class in classes if not launch_class.is_plain]
    for name, kernel_classes in grouped(autotuned, lambda launch_class: launch_class.kernel.text).items():
        by_key = grouped(kernel_classes, lambda each: (each.source_digest, each.home, each.autotuner_key()))
        most = max(len({each.configs_digest for each in key_classes}) for key_classes in by_key.values())
        if most > 1:
            effect = "triton.autotune runs later launches with a choice from the first list"
            yield f"{name}: {most} lists of configs for one key: {effect}"


def _kernel_findings(
    classes: Sequence[LaunchClass], wins: dict[str, set[StoredConfig]], wrong: dict[str, list[str]]
) -> Iterator[str]:
    """Yield a line for each finding about a kernel.

    Args:
        wins: class -> the configs that tuning has chosen.
        wrong: class -> a line for each config that failed.
    """
    first = classes[0]
    present = {argument.name.partition("[")[0] for argument in first.arguments}
    if first.problem:
        yield f"cannot be tuned: {first.problem}"
    if unknown := [name for name in first.key_names if name not in present and not first.is_plain]:
        yield f"key names what no launch gives, which triton.autotune leaves out: {', '.join(unknown)}"
    if hint := seed_hint(classes):
        yield hint
    if varying := varying_sizes(classes):
        yield f"key omits sizes that differ between captured launches: {', '.join(varying[:_SHOWN])}"
    if sizes := [name for name in unkeyed_dimensions(classes) if name not in varying]:
        yield f"key omits sizes: {', '.join(sizes[:_SHOWN])}"
    chosen = {config for launch_class in classes for config in wins.get(launch_class.digest, ())}
    never = [candidate.config for candidate in first.candidates if candidate.is_listed and candidate.config not in chosen]
    if chosen and never and not first.is_plain:  # the other configs of a plain kernel are no author's
        labels = "; ".join(config.label for config in never[:_LABELS]) + ("…" if len(never) > _LABELS else "")
        yield f"{len(never)} of {first.list_size} configs never win in {counted(len(classes), 'class', 'classes')}: {labels}"
    if results := [text for launch_class in classes for text in wrong.get(launch_class.digest, ())]:
        yield f"results change with the config: {len(results)} configs disagree with the author's first: {results[0]}"


def _chosen_configs(root: Path) -> dict[str, set[StoredConfig]]:
    """Return the configs that tuning has chosen, by class."""
    by_class: dict[str, set[StoredConfig]] = {}
    for path in sorted((root / "served").glob("*.json")):
        with suppress(ValueError):
            table = read_table(root, path.stem)
            groups = [group for kernel in (table.kernels if table is not None else ()) for group in kernel.groups]
            for row in (row for group in groups for row in group.rows):
                by_class.setdefault(str(row.evidence.get("class")), set()).add(row.configs[0])
    return by_class


def check_records(root: Path) -> dict[str, dict[str, Record]]:
    """Return the record of the last check of each variant and config that `sweep` has made, by class."""
    last: dict[str, dict[str, Record]] = {}
    for path in sorted(runs_folder(root / "results").glob("*/captured.check.jsonl")):
        with suppress(ValueError):
            for record in load(path):
                last.setdefault(str(record.options.get("launch")), {})[f"{record.variant} {record.config}"] = record
    return last


def _wrong_trials(root: Path) -> dict[str, list[str]]:
    """Return class -> a line for each config that failed: results other than of the author's first config, or an error."""
    from kerneltune.search.trials import history  # imports Optuna

    by_class: dict[str, list[str]] = {}
    for path in sorted(root.glob(str(trials_file(Path("results"), "*", "*")))):
        try:
            trials = history(path)
        except ValueError:
            continue
        for trial in trials:
            digest = dict(trial.key.case.options).get("launch")
            if trial.evaluation.status == "failed" and digest is not None:
                by_class.setdefault(str(digest), []).append(f"{dict(trial.knobs)}: {trial.evaluation.reason}")
    return by_class
