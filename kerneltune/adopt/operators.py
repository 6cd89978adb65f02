"""Make an operator of each captured kernel and a case of each class of launches, for all commands.

`operators` makes the operators of a folder; another process makes the same operators by `Op.origin`.
"""

import dataclasses
import os
from collections.abc import Collection, Iterable, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from kerneltune.adopt.configs import DEFAULTS, StoredConfig
from kerneltune.adopt.folder import CLASSES, Candidate, LaunchClass, read_class
from kerneltune.adopt.overview import Capture, read_capture
from kerneltune.files import replace_text
from kerneltune.listing import OF_EVERY_CASE
from kerneltune.spec import Case, Config, Inputs, Op, Outputs, Space, Traffic, Variant
from kerneltune.sweep_file import Section, SweepCase, sweep_text
from kerneltune.task import Knobs, knob_pairs
from kerneltune.wording import first_of

CLASS = "launch"
BYTES, BYTES_OF = "bytes", "arguments"
"""Option of every case and its value: tables then state that GB/s count the bytes of the arguments."""
AUTHOR, TUNED = "baseline", "optimized"
SWEEP = "sweep.yaml"
_ABOUT = "Launches of a capture. GB/s are those of the arguments' bytes: what a kernel reads and writes of them is not known."
_CHECKED_BYTES = 1 << 20
_MOST_CHECKED_BYTES = 64 << 20
_LAUNCH = "launch"
_OPTIONS = {**DEFAULTS, "maxnreg": 0}
_KNOB_TYPES = (bool, int, float, str)


_NUMBERED = (("candidate", int),)
"""The knob of kernels whose configs differ in the names of their knobs: the place of the candidate in its class."""


@cache
def operators(folder: str) -> tuple[Op, ...]:
    """Return the operators of a capture, see `operators_of`; the first call of a process reads the folder."""
    capture = read_capture(Path(folder))
    if capture.classes and all(launch_class.problem for launch_class in capture.classes):
        reasons = dict.fromkeys(f"{launch_class.kernel.text}: {launch_class.problem}" for launch_class in capture.classes)
        raise ValueError(f"{folder}: no launch can be made again: {first_of(list(reasons), 1)}")
    return operators_of(capture)


def operators_of(capture: Capture) -> tuple[Op, ...]:
    """Return the operators of a capture, the most expensive kernel first."""
    root = Path(os.path.abspath(capture.root))
    return tuple(_operator(root, classes) for classes in capture.by_kernel())


def write_capture_sweep(capture: Capture) -> Path:
    """Write the sweep file of a capture, by which `sweep`, `compare` and `inspect` find the launches that can be replayed."""
    sections: dict[Section, list[SweepCase]] = {"check": [], "bench": []}
    for classes in capture.by_kernel():
        good, axes = [launch_class for launch_class in classes if not launch_class.problem], _axes(classes)
        for section, chosen in zip(sections, (_checked(good), good), strict=True):
            sections[section] += [SweepCase(operator_name(each), case_of(each, axes)) for each in chosen]
    replace_text(capture.root / SWEEP, sweep_text(_ABOUT, "captured", sections))
    return capture.root / SWEEP


def _checked(classes: Sequence[LaunchClass]) -> list[LaunchClass]:
    """Return a kernel's launches that the interpreter can check in seconds; if there are none, the smallest below 64 MiB."""
    small = [launch_class for launch_class in classes if launch_class.argument_bytes < _CHECKED_BYTES]
    smallest = sorted(classes, key=lambda launch_class: launch_class.argument_bytes)[:1]
    return small or [launch_class for launch_class in smallest if launch_class.argument_bytes < _MOST_CHECKED_BYTES]


def operator_name(launch_class: LaunchClass) -> str:
    """Return the operator's name of a class's kernel: module and name, and its digest."""
    return f"{launch_class.kernel.text}-{launch_class.source_digest[:4]}{launch_class.configs_digest[:4]}"


def _operator(root: Path, classes: Sequence[LaunchClass]) -> Op:
    by_digest = {launch_class.digest: launch_class for launch_class in classes}
    kind: Any = knob_class(f"Config_{classes[0].source_digest[:8]}_{classes[0].configs_digest[:8]}", _knobs(classes))

    def class_of(case: Case) -> LaunchClass:
        return by_digest[str(case.option(CLASS))]

    def space(case: Case) -> Space:
        configs = [config for config, candidate in _by_knobs(class_of(case), kind).items() if candidate.is_offered]
        names = [field.name for field in dataclasses.fields(kind)]
        return {name: tuple(dict.fromkeys(getattr(config, name) for config in configs)) for name in names}

    def invalid(case: Case, config: Config) -> str | None:
        candidate = _by_knobs(class_of(case), kind).get(config)
        return None if candidate is not None and candidate.is_offered else "not in the list"

    tuned = Variant(
        name=TUNED,
        run=run_config,
        config=kind,
        space=space,
        invalid=invalid,
        default=lambda case: config_of(class_of(case).author_choice, class_of(case), kind),
    )
    return Op(
        name=operator_name(classes[0]),
        axes=_axes(classes),
        dtypes=tuple(dict.fromkeys(_case_dtype(launch_class) for launch_class in classes)),
        inputs=partial(make_inputs, str(root)),
        reference=reference,
        compare=compare,
        traffic=lambda case: Traffic(class_of(case).argument_bytes, 0),  # the written bytes are not known before a launch
        variants=(Variant(AUTHOR, run_author), tuned),
        module=__name__,
        weighs_hot=True,
        origin=(str(root),),
        options={CLASS: tuple(by_digest), BYTES: (BYTES_OF,)},
    )


def case_of(launch_class: LaunchClass, axes: Sequence[str]) -> Case:
    """Return the case of a class."""
    name = f"{launch_class.kernel.name.rpartition('.')[2]}-{launch_class.digest[:8]}"
    pairs = tuple((axis, launch_class.sizes[axis]) for axis in axes)
    return Case(name, pairs, _case_dtype(launch_class), "none", ((CLASS, launch_class.digest), (BYTES, BYTES_OF)))


def _case_dtype(launch_class: LaunchClass) -> str:
    """Return the element types of a class's floating-point tensors, joined to a name."""
    names = sorted({a.tensor.dtype for a in launch_class.arguments if a.tensor is not None and not a.tensor.holds_integers})
    return "+".join(names) or "none"


def _axes(classes: Sequence[LaunchClass]) -> tuple[str, ...]:
    """Return the integer arguments that are 1 or more in all classes of a kernel, as sizes are.

    An argument with the name of a field of every case, such as `dtype`, or in a tuple, such as `x[0]`, is no axis; its values
    differ in the digest of the class.
    """
    taken = {*OF_EVERY_CASE, CLASS, BYTES}
    names = [a.name for a in classes[0].arguments if type(a.value) is int]
    first = [name for name in names if name.isidentifier() and name not in taken]
    return tuple(name for name in first if all(launch_class.sizes.get(name, 0) >= 1 for launch_class in classes))


def _knobs(classes: Sequence[LaunchClass]) -> tuple[tuple[str, type], ...]:
    """Return the names and types of the knobs of a kernel's configs; `_NUMBERED` where these differ, or are of no plain type."""
    configs = [candidate.config for launch_class in classes for candidate in launch_class.candidates]
    types = [(knob, type(value)) for knob, value in configs[0].kwargs.items()]
    for config in configs:
        if [(knob, type(value)) for knob, value in config.kwargs.items()] != types or config.ir_override:
            return _NUMBERED
    if any(knob in _OPTIONS or kind not in _KNOB_TYPES for knob, kind in types):
        return _NUMBERED
    return (*types, *((option, int) for option in _OPTIONS))


@cache
def knob_class(name: str, knobs: tuple[tuple[str, type], ...]) -> type[Any]:
    """Return the frozen dataclass of these knobs; its instances are pickled with the knobs, as no module holds the class."""

    def reduced(config: Any) -> tuple[Any, ...]:
        return _unpickled, (name, knobs, tuple(getattr(config, knob) for knob, _ in knobs))

    kind: type[Any] = dataclasses.make_dataclass(name, knobs, frozen=True, namespace={"__reduce__": reduced})
    kind.__module__ = __name__
    return kind


def _unpickled(name: str, knobs: tuple[tuple[str, type], ...], values: tuple[Any, ...]) -> Config:
    return knob_class(name, knobs)(*values)


@lru_cache(maxsize=256)
def _by_knobs(launch_class: LaunchClass, kind: Any) -> dict[Config, Candidate]:
    """Return the candidates of a class by instances of the kernel's `knob_class`; of candidates with equal configs, the first."""
    candidates: dict[Config, Candidate] = {}
    is_numbered = list(kind.__dataclass_fields__) == [name for name, _ in _NUMBERED]
    for place, candidate in enumerate(launch_class.candidates):
        given = {name: getattr(candidate.config, name) for name in _OPTIONS}
        options = {name: _OPTIONS[name] if value is None else value for name, value in given.items()}
        candidates.setdefault(kind(place) if is_numbered else kind(**candidate.config.kwargs, **options), candidate)
    return candidates


def config_of(stored: StoredConfig, launch_class: LaunchClass, kind: Any) -> Config:
    """Return the config of a class's candidate as an instance of the kernel's `knob_class`."""
    return next(config for config, candidate in _by_knobs(launch_class, kind).items() if candidate.config == stored)


def candidate_of(config: Config, launch_class: LaunchClass) -> Candidate:
    """Return the candidate of a class that an instance of the kernel's `knob_class` stands for."""
    kind: Any = type(config)
    candidate = _by_knobs(launch_class, kind).get(config)
    if candidate is None:
        raise ValueError(f"{launch_class.label}: {config}: no candidate of this class")
    return candidate


def lacks_blocks(launch_class: LaunchClass, space: Iterable[Config], trials: Collection[Knobs]) -> bool:
    """Return whether all trials of a class have the same blocks, and its space has others."""
    if not launch_class.is_plain:
        return False
    blocks = {knob_pairs(config): repr(candidate_of(config, launch_class).config.kwargs) for config in space}
    return len({blocks[knobs] for knobs in trials if knobs in blocks}) < 2 <= len(set(blocks.values()))


def make_inputs(root: str, case: Case, device: str = "cuda", seed: int = 0) -> Inputs:
    """Make the arguments of a class; launches do not restore them before `reference` has learned the results."""
    from kerneltune.adopt.replay import make_replay

    folder = Path(root) / CLASSES / str(case.option(CLASS))
    return {_LAUNCH: make_replay(read_class(folder), folder, device, seed)}


def run_config(inputs: Inputs, config: Config) -> Outputs:
    """Launch a config; after `reference`, restore the arguments before the launch."""
    return _run(inputs, candidate_of(config, inputs[_LAUNCH].launch_class).config)


def run_author(inputs: Inputs, config: Config) -> Outputs:
    """Launch the author's choice."""
    return _run(inputs, inputs[_LAUNCH].launch_class.author_choice)


def _run(inputs: Inputs, stored: StoredConfig) -> Outputs:
    replay = inputs[_LAUNCH]
    if replay.before is None:
        replay.run(stored)
        return {}
    from kerneltune.adopt.effects import results_of

    replay.restore()
    replay.run(stored)
    return dict(results_of(replay))


def reference(inputs: Inputs) -> Outputs:
    """Learn from the author's first config which arguments a launch writes, and how much their values vary."""
    from kerneltune.adopt.effects import learn
    from kerneltune.interpreter.facts import Fact, note_facts
    from kerneltune.interpreter.modes import corrected

    replay = inputs[_LAUNCH]
    with corrected():
        learn(replay, replay.launch_class.first_config)
    if not replay.has_reference:
        note_facts(Fact("no reference", replay.launch_class.kernel.text))
    return dict(replay.expected)


def compare(case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Return one line for each written argument that disagrees."""
    from kerneltune.adopt.effects import wrong_results

    return list(wrong_results(inputs[_LAUNCH], outputs))
