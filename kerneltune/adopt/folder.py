"""Read and write a capture folder: a folder for each class of launches, with JSON and safetensors, and counts of launches.

A class is written as a whole or not at all, so that a killed program loses at most the class that it was writing. Nothing in a
capture is executed on load.
"""

import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import structs

from kerneltune.adopt.arguments import Argument, KeptValues, views
from kerneltune.adopt.configs import StoredConfig
from kerneltune.adopt.counters import SUFFIX, read_counts
from kerneltune.adopt.kernels import KernelName
from kerneltune.files import bad, checked, decode, read_bytes, replace_text

FORMAT = 1
META, VALUES, LAUNCHES, CLASSES = "class.json", "values.safetensors", "launches", "classes"
_MAX_META_BYTES = 64 << 20
_MOST_LABEL = 6


class Candidate(msgspec.Struct, frozen=True, rename={"is_listed": "is_author"}):
    """Hold a config that a class may run with.

    Attributes:
        config: the config as JSON.
        is_listed: whether the author's list has the config. Captures of earlier versions also hold configs around the list.
        grid: grid of a launch under this config; None if the grid function failed.
        problem: error of the grid function; empty without an error.
    """

    config: StoredConfig
    is_listed: bool
    grid: tuple[int, ...] | None
    problem: str = ""

    @property
    def is_offered(self) -> bool:
        """Return whether tuning may try the config."""
        return self.is_listed and self.grid is not None


NAMES_IN_FILES = {
    "source_digest": "source",
    "bytecode_digest": "bytecode",
    "configs_digest": "configs",
    "key_names": "keys",
    "key_values": "key",
}
"""Fields of classes and of served tables -> their names in files. Types with these fields are Structs, which rename fields."""


class KernelCode(msgspec.Struct, frozen=True, eq=False, kw_only=True, rename=NAMES_IN_FILES):
    """Hold the facts by which a kernel of a capture or of a served table is found in a program.

    Attributes:
        source_digest: digest of the syntax trees of the kernel and its helpers.
        bytecode_digest: digest of the kernel's bytecode, for the Python of the capture.
        configs_digest: digest of the author's whole list of configs.
        key_names: names of the arguments in the author's key.
        globals: plain values of globals that the kernel reads, as JSON; empty in tables of earlier versions.
        is_plain: whether no autotuner wraps the kernel, so that its configs are options of the launch.
    """

    source_digest: str
    bytecode_digest: str
    configs_digest: str
    key_names: tuple[str, ...]
    globals: dict[str, Any] = {}
    is_plain: bool = False


class LaunchClass(KernelCode, frozen=True, eq=False, rename=NAMES_IN_FILES):
    """Hold a class of launches of a kernel: the launches with equal shapes, strides, types and integers.

    Attributes:
        digest: digest of kernel, source, configs and the arguments' metadata; the name of the class's folder.
        kernel: module and name of the kernel.
        file: source file of the kernel when it was captured.
        list_size: number of configs in the author's whole list.
        device: the GPU's folder name.
        versions: versions of Python, triton, torch and the package that holds the kernel.
        key_values: values of the arguments in the author's key.
        arguments: metadata of the arguments.
        candidates: configs that the class may run with, the author's first config first.
        storages: a description of the kept values of each storage.
        home: the module that holds the autotuner, and the name there of the autotuner, or of its class or container; None if
            unknown or if no module holds it.
        home_file: source file of the module of `home`.
        argv: arguments of the program, its file first.
        path: folders that the program imported from.
        choice: the author's own choice if the program tuned the kernel, as JSON.
        problem: reason why the class cannot be replayed; empty if it can.
    """

    digest: str
    kernel: KernelName
    file: str
    list_size: int
    device: str
    versions: dict[str, str]
    key_values: list[Any]
    arguments: tuple[Argument, ...]
    candidates: Annotated[tuple[Candidate, ...], msgspec.Meta(min_length=1)]
    storages: tuple[KeptValues, ...] = ()
    home: KernelName | None = None
    home_file: str = ""
    argv: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    choice: StoredConfig | None = None
    problem: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """Return every size of the launch by name."""
        return {name: size for argument in self.arguments for name, size in argument.sizes.items()}

    @property
    def dtypes(self) -> list[str]:
        """Return the element types of the tensors, in the order of the arguments."""
        return [argument.tensor.dtype for argument in self.arguments if argument.tensor is not None]

    @property
    def argument_bytes(self) -> int:
        """Return the bytes of all tensor arguments; memory that several arguments share counts once."""
        num_bytes = 0
        for storage in {argument.tensor.storage for argument in self.arguments if argument.tensor is not None}:
            tensors = views(self.arguments, storage)
            num_bytes += min(sum(view.held_bytes for view in tensors), max(view.end for view in tensors))
        return num_bytes

    def autotuner_key(self) -> str:
        """Return the author's key and the element types, by which an autotuner tells launches apart; True is not 1."""
        return repr((self.key_values, self.dtypes))

    def candidate(self, config: StoredConfig) -> Candidate | None:
        """Return the candidate of a config; None if the class has none of this config."""
        return next((candidate for candidate in self.candidates if candidate.config == config), None)

    @property
    def offered(self) -> list[Candidate]:
        """Return the candidates that tuning may try."""
        return [candidate for candidate in self.candidates if candidate.is_offered]

    @property
    def first_config(self) -> StoredConfig:
        """Return the author's first config that can be launched."""
        if not (offered := self.offered):
            reason = next((candidate.problem for candidate in self.candidates if candidate.problem), "the launch has no grid")
            raise ValueError(f"{self.label}: no config can be launched: {reason}")
        return offered[0].config

    @property
    def author_choice(self) -> StoredConfig:
        """Return the author's choice if the program tuned the kernel, else the author's first config."""
        return self.choice or self.first_config

    @property
    def lacks_values(self) -> bool:
        """Return whether values were not kept: the class was seen in a graph capture only, or the values are over --max-bytes."""
        return any(values.kept == "missing" for values in self.storages)

    @property
    def label(self) -> str:
        """Return the kernel's name, names of its functions and objects, and a few sizes of the class."""
        values = [(a.name, a.named or (a.sizes.get(a.name, 0) > 1 and a.value)) for a in self.arguments]
        shown = [f"{name}={value}" for name, value in values if value and "stride" not in name.lower()]
        first = next((a.tensor for a in self.arguments if a.tensor is not None), None)
        shape = "x".join(map(str, first.shape)) + f" {first.dtype}" if first else ""
        return " ".join([self.kernel.name, shape, *shown[:_MOST_LABEL]])


class Count(msgspec.Struct, array_like=True):
    """Hold the number of launches of a class, in a process or in all, and the least GPU time of a launch, None without a time."""

    launches: int = 0
    time_us: float | None = None


class ProcessNotes(msgspec.Struct):
    """Hold the launches of a process, or of all processes, and notes about their kernels.

    Attributes:
        launches: launches by class.
        refused: kernel -> reason why its launches could not be captured.
        misnamed: the refused kernels whose decorators name an argument that the kernel does not have.
        autotuned: kernel -> the subclass of Autotuner that launched it by a `run` of its own, which this package does not see;
            empty for any other autotuned kernel.
        plain: kernels that were launched without an autotuner, if `--plain` was not given.
        has_compiled: whether torch.compile has compiled a part of the program.
    """

    launches: dict[str, Count]
    refused: dict[str, str] = {}
    misnamed: list[str] = []
    autotuned: dict[str, str] = msgspec.field(default_factory=dict, name="made")
    plain: list[str] = []
    has_compiled: bool = False
    format: int = FORMAT


def write_class(root: Path, launch_class: LaunchClass, values: Mapping[str, Any] | None, is_better: bool = False) -> None:
    """Write a class, whole or not at all; a class that the folder has already stays, unless the new class has more.

    values: tensors by name, for safetensors; None for no values. is_better: whether they replace the values of the folder.
    """
    folder = root / CLASSES / launch_class.digest
    if (folder / META).exists() and not is_better and not _has_more(launch_class, folder):
        return
    with replaced_folder(folder) as part:
        if values:
            from safetensors.torch import save_file

            save_file(dict(values), part / VALUES)
        stored = {"format": FORMAT, **msgspec.to_builtins(launch_class, enc_hook=builtin)}
        (part / META).write_bytes(msgspec.json.format(msgspec.json.encode(stored), indent=1))


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder that takes the place of `folder` once it is filled, whole or not at all.

    A folder that another process makes meanwhile stays.
    """
    is_replaced = folder.exists()
    part = folder.parent / f".part-{secrets.token_hex(8)}"
    part.mkdir(parents=True)
    try:
        yield part
        if is_replaced:
            shutil.rmtree(folder, ignore_errors=True)  # another process may remove it, too
        try:
            os.replace(part, folder)
        except OSError:
            if not folder.exists():  # another process was faster otherwise
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


_STALE_S = 3600
"""Seconds after which a folder that was never filled is no process's any more."""


def remove_parts(root: Path) -> None:
    """Remove the folders below a capture that killed processes have left: see `replaced_folder`."""
    for part in (*root.glob("*/.part-*"), *root.glob(f"{MISSES}/*/.part-*")):
        with suppress(OSError):  # another process removes it
            if time.time() - part.stat().st_mtime > _STALE_S:
                shutil.rmtree(part, ignore_errors=True)


def _has_more(launch_class: LaunchClass, folder: Path) -> bool:
    """Return whether a class has values or an author's choice that a folder lacks; true where the folder's class is damaged."""
    try:
        present = read_class(folder)
    except ValueError:
        return True
    has_values = not (present.lacks_values or missing_values(present, folder))
    return not (has_values or launch_class.lacks_values) or (launch_class.choice is not None and present.choice is None)


def builtin(value: Any) -> Any:
    """Return a value of a subclass of a plain type, such as torch's version, as the plain type."""
    return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))


T = TypeVar("T")


def read_json(path: Path, kind: type[T], *, data: bytes | None = None, is_versioned: bool = False) -> T:
    """Return the content of a JSON file as a msgspec schema has it; the error of other content names the file.

    Args:
        path: path of the file.
        kind: the schema.
        data: bytes of the file; None to read them.
        is_versioned: whether the file says which version of the format it has.
    """
    data = read_bytes(path, _MAX_META_BYTES) if data is None else data
    try:
        if not is_versioned:
            return decode(data, kind)
        stored = decode(data, dict[str, Any])
        if stored.get("format") != FORMAT:
            raise bad("format", stored.get("format"), repr(FORMAT))
        return checked(stored, kind)
    except ValueError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())[:200]}") from None


def write_json(path: Path, value: object) -> None:
    """Write what `read_json` reads."""
    replace_text(path, msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")


def read_class(folder: Path) -> LaunchClass:
    """Return the class of a folder, without its values."""
    launch_class = read_json(folder / META, LaunchClass, is_versioned=True)
    if launch_class.digest != folder.name:
        raise ValueError(f"{folder / META}: digest: {launch_class.digest!r}: expected {folder.name!r}, the folder's name")
    return launch_class


def read_classes(root: Path) -> tuple[list[LaunchClass], list[str]]:
    """Return the classes of a capture, and a line about each damaged class."""
    parent, classes, problems = root / CLASSES, list[LaunchClass](), list[str]()
    if not parent.is_dir():
        raise ValueError(f"{root}: no capture: expected a folder that `kerneltune capture` wrote")
    for folder in sorted(parent.iterdir()):
        if folder.is_dir() and not folder.name.startswith("."):
            try:
                launch_class = read_class(folder)
                problem = launch_class.problem or missing_values(launch_class, folder)
                classes.append(structs.replace(launch_class, problem=problem))
            except ValueError as error:
                problems.append(str(error))
    return classes, problems


def missing_values(launch_class: LaunchClass, folder: Path) -> str:
    """Return a line where the values of a class are gone from its folder; empty if they are there."""
    is_kept = any(values.kept in ("values", "sample") and values.bytes for values in launch_class.storages)
    return f"{folder / VALUES}: missing: capture again" if is_kept and not (folder / VALUES).is_file() else ""


BLOCKS = "blocks.json"
"""File in a capture: `classes` with what `read_blocks` returns."""


class _Blocks(msgspec.Struct):
    classes: dict[str, dict[str, str]]


def read_blocks(root: Path) -> dict[str, dict[str, str]]:
    """Return why blocks of kernels without an autotuner may not change, by class and name; empty where a block may.

    A block that nobody has tried yet is missing.
    """
    return read_json(root / BLOCKS, _Blocks).classes if (root / BLOCKS).is_file() else {}


def without_coupled_blocks(launch_class: LaunchClass, blocks: Mapping[str, str], untried: str) -> LaunchClass:
    """Return a class without the grids of candidates whose blocks the program depends on, see `tuning.probe_blocks`.

    blocks: name of a block -> why it may not change; empty if it may. untried: why a block without an entry may not change.
    """
    if not launch_class.is_plain:
        return launch_class
    own = launch_class.candidates[0].config

    def judge(candidate: Candidate) -> Candidate:
        reasons = [blocks.get(name, untried) for name in candidate.config.changed(own.kwargs)]
        problem = next(filter(None, reasons), "")
        return structs.replace(candidate, grid=None, problem=problem) if problem else candidate

    return structs.replace(launch_class, candidates=tuple(map(judge, launch_class.candidates)))


MISSES = "misses"
"""Folder in a tuned folder: a capture of the launches that serving had no config for."""


def add_misses(root: Path) -> int:
    """Move the launches that serving has recorded into the capture, so that they are tuned with it; returns their number."""
    added = 0
    for part in (LAUNCHES, CLASSES):
        for entry in sorted((root / MISSES / part).glob("[!.]*")):
            target = root / part / entry.name
            if not target.exists():
                target.parent.mkdir(exist_ok=True)
                os.replace(entry, target)
                added += part == CLASSES
    return added


def remove_stale(root: Path, launched: Collection[str]) -> list[LaunchClass]:
    """Remove the classes of launched kernels that were captured when these had other source; returns them.

    launched: digests of the classes that were launched just now.
    """
    classes, _ = read_classes(root)
    present = {(launch_class.kernel, launch_class.source_digest) for launch_class in classes if launch_class.digest in launched}
    kernels = {kernel for kernel, _ in present}
    stale = [other for other in classes if other.kernel in kernels and (other.kernel, other.source_digest) not in present]
    for launch_class in stale:
        shutil.rmtree(root / CLASSES / launch_class.digest, ignore_errors=True)  # another rank may remove it, too
    return stale


def write_notes(root: Path, process: str, notes: ProcessNotes) -> None:
    """Write the notes of a process, as a whole."""
    (root / LAUNCHES).mkdir(parents=True, exist_ok=True)
    part = root / LAUNCHES / f".{process}.part"
    part.write_bytes(msgspec.json.encode(notes))
    os.replace(part, root / LAUNCHES / f"{process}.json")


def process_files(root: Path) -> list[Path]:
    """Return the files of a capture in which processes have written their notes and counts."""
    return sorted((root / LAUNCHES).glob("[!.]*"))


def read_notes(files: Collection[Path]) -> tuple[ProcessNotes, list[str]]:
    """Return the notes and counts of processes as the notes of a single process, and a line about each damaged file."""
    merged, problems = ProcessNotes({}), list[str]()
    for path in (path for path in files if path.suffix == ".json"):
        try:
            notes = read_json(path, ProcessNotes)
        except ValueError as error:
            problems.append(str(error))
            continue
        for digest, count in notes.launches.items():
            total = merged.launches.setdefault(digest, Count())
            total.launches += count.launches
            if count.time_us is not None:
                total.time_us = min(count.time_us, total.time_us or float("inf"))
        merged.refused |= notes.refused
        merged.misnamed += notes.misnamed
        merged.autotuned |= {kernel: own for kernel, own in notes.autotuned.items() if own or kernel not in merged.autotuned}
        merged.plain += notes.plain
        merged.has_compiled |= notes.has_compiled
    counts = read_counts(path for path in files if path.suffix == SUFFIX)
    for digest, launches in ((digest, launches) for digest, launches in counts.items() if launches):
        total = merged.launches.setdefault(digest, Count())
        total.launches = max(total.launches, launches)  # a killed process has written its counts, but no notes
    return merged, problems
