"""A capture folder: one folder for each class of launches, with its metadata as JSON and its values in safetensors.

A class is written as a whole or not at all, so that a killed program loses at most the class that it was writing. Nothing in a
capture is executed on load. Imports the standard library, arguments and kernels.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kerneltune.adopt.arguments import Argument, dtypes_of, from_json, sizes_of, to_json, total_bytes
from kerneltune.adopt.encoding import read_json
from kerneltune.adopt.kernels import KernelName

FORMAT = 1
META, VALUES, LAUNCHES, CLASSES = "class.json", "values.safetensors", "launches", "classes"
_LARGEST_META = 64 << 20
_MOST_LABEL = 6


@dataclass(frozen=True, slots=True)
class Candidate:
    """A config that a class may run with.

    Attributes:
        config: as JSON.
        is_author: whether it is in the author's pruned list; others lie around it.
        grid: of a launch under this config; None where the grid failed.
        heuristics: values that heuristics give under this config.
        problem: why the grid or a heuristic failed; empty where neither did.
    """

    config: dict[str, Any]
    is_author: bool
    grid: tuple[int, ...] | None
    heuristics: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LaunchClass:
    """One class of launches of one kernel.

    Attributes:
        digest: of kernel, source, configs and the arguments' metadata; the name of the class's folder.
        kernel: where the kernel is found.
        file: source file of the kernel when it was captured.
        source: digest of the kernel's syntax tree and its helpers'.
        bytecode: digest of its bytecode, for the Python that captured it.
        configs: digest of the author's whole list.
        list_size: configs in the author's whole list.
        device: the GPU's folder name.
        versions: of triton, torch and the package that holds the kernel.
        keys: the author's key, argument names.
        key: values of the key's arguments.
        arguments: metadata of the arguments.
        candidates: what the class may run with, the author's first config first.
        storages: for every storage what is kept: `values`, `sample`, `statistics` or `missing`, and its statistics.
        reset, restored: arguments that the author's tuning zeroes or puts back.
        in_graph: whether it was seen inside a graph capture only, so that no values were read.
        choice: the author's own choice where the program tuned it, as JSON.
        problem: why it cannot be replayed; empty where it can.
    """

    digest: str
    kernel: KernelName
    file: str
    source: str
    bytecode: str
    configs: str
    list_size: int
    device: str
    versions: dict[str, str]
    keys: tuple[str, ...]
    key: list[Any]
    arguments: tuple[Argument, ...]
    candidates: tuple[Candidate, ...]
    storages: tuple[dict[str, Any], ...] = ()
    reset: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    in_graph: bool = False
    choice: dict[str, Any] | None = None
    problem: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """Return every size of the launch by name."""
        return sizes_of(self.arguments)

    @property
    def dtypes(self) -> list[str]:
        """Element types of the tensors."""
        return dtypes_of(self.arguments)

    @property
    def argument_bytes(self) -> int:
        """Return bytes of all tensor arguments."""
        return total_bytes(self.arguments)

    @property
    def label(self) -> str:
        """The kernel's name and a few of its sizes."""
        sizes = [(a.name, a.value) for a in self.arguments if type(a.value) is int and a.value > 1]
        shown = [f"{name}={size}" for name, size in sizes if "stride" not in name.lower()]
        first = next((a.tensor for a in self.arguments if a.tensor is not None), None)
        shape = "x".join(map(str, first.shape)) + f" {first.dtype}" if first else ""
        return " ".join([self.kernel.name, shape, *shown[:_MOST_LABEL]])


@dataclass(slots=True)
class Count:
    """Launches of a class in all processes.

    Attributes:
        launches: how many.
        time_us: of one launch on the GPU, the least seen; None where it was not timed.
    """

    launches: int = 0
    time_us: float | None = None

    @property
    def total_us(self) -> float:
        """Time of all launches; 0 where it was not timed."""
        return self.launches * (self.time_us or 0.0)


class DamagedClassError(ValueError):
    """A class whose files cannot be read; one line that names the file."""


def write_class(root: Path, launch: LaunchClass, values: Mapping[str, Any] | None) -> None:
    """Write a class, whole or not at all; one that is there already stays.

    values: tensors by name, for safetensors; None for none.

    Raises:
        OSError: the folder cannot be written.
    """
    parent = root / CLASSES
    parent.mkdir(parents=True, exist_ok=True)
    if (parent / launch.digest / META).exists():
        return
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=parent))
    try:
        if values:
            from safetensors.torch import save_file

            save_file(dict(values), part / VALUES)
        (part / META).write_text(json.dumps(_as_json(launch), indent=1), encoding="utf-8")
        os.replace(part, parent / launch.digest)
    except OSError:
        if not (parent / launch.digest / META).exists():  # another process was faster otherwise
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _as_json(launch: LaunchClass) -> dict[str, Any]:
    plain = {name: getattr(launch, name) for name in LaunchClass.__slots__}
    candidates = [{name: getattr(one, name) for name in Candidate.__slots__} for one in launch.candidates]
    kernel = {"module": launch.kernel.module, "name": launch.kernel.name}
    return {
        "format": FORMAT,
        **plain,
        "kernel": kernel,
        "arguments": list(map(to_json, launch.arguments)),
        "candidates": candidates,
    }


def read_class(folder: Path) -> LaunchClass:
    """Return the class of a folder, without its values.

    Raises:
        DamagedClassError: a file is missing, cut off or holds something else.
    """
    path = folder / META
    try:
        return _from_json(read_json(path, _LARGEST_META), folder.name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedClassError(f"{path}: {type(error).__name__}: {' '.join(str(error).split())[:150]}") from None


def _from_json(stored: dict[str, Any], digest: str) -> LaunchClass:
    if stored.get("format") != FORMAT:
        raise ValueError(f"format: {stored.get('format')!r}: expected {FORMAT}")
    if stored["digest"] != digest:
        raise ValueError(f"digest: {stored['digest']!r}: expected {digest!r}, the folder's name")
    texts = {name: _typed(stored, name, str) for name in ("file", "source", "bytecode", "configs", "device", "problem")}
    kernel = KernelName(_typed(stored["kernel"], "module", str), _typed(stored["kernel"], "name", str))
    return LaunchClass(
        digest=digest,
        kernel=kernel,
        list_size=_typed(stored, "list_size", int),
        versions={str(name): str(value) for name, value in _typed(stored, "versions", dict).items()},
        keys=tuple(map(str, stored["keys"])),
        key=_typed(stored, "key", list),
        arguments=tuple(from_json(one) for one in _typed(stored, "arguments", list)),
        candidates=tuple(_candidate(one) for one in _typed(stored, "candidates", list)),
        storages=tuple(dict(one) for one in stored["storages"]),
        reset=tuple(map(str, stored["reset"])),
        restored=tuple(map(str, stored["restored"])),
        in_graph=bool(stored["in_graph"]),
        choice=stored["choice"],
        **texts,
    )


def _typed(stored: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = stored[name]
    if not isinstance(value, kind):
        raise ValueError(f"{name}: {value!r}: expected {kind.__name__}")
    return value


def _candidate(stored: dict[str, Any]) -> Candidate:
    config, grid = _typed(stored, "config", dict), stored["grid"]
    _typed(config, "kwargs", dict)
    if grid is not None and not all(type(size) is int for size in grid):
        raise ValueError(f"grid: {grid!r}: expected whole numbers")
    heuristics = _typed(stored, "heuristics", dict)
    return Candidate(config, bool(stored["is_author"]), None if grid is None else tuple(grid), heuristics, str(stored["problem"]))


def read_classes(root: Path, problems: list[str]) -> Iterator[LaunchClass]:
    """Yield the classes of a capture; one that is damaged is skipped, and a line about it added to `problems`.

    Raises:
        ValueError: the folder holds no capture.
    """
    parent = root / CLASSES
    if not parent.is_dir():
        raise ValueError(f"{root}: no capture: expected a folder that `kerneltune capture` wrote")
    for folder in sorted(parent.iterdir()):
        if folder.is_dir() and not folder.name.startswith("."):
            try:
                yield read_class(folder)
            except DamagedClassError as error:
                problems.append(f"skipped {error}")


def write_counts(root: Path, process: str, counts: Mapping[str, Count], notes: Mapping[str, Any]) -> None:
    """Write what one process has launched so far, as a whole.

    notes: what else the process has to say: kernels that it made, launches that could not be captured, its command.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = root / LAUNCHES
    folder.mkdir(parents=True, exist_ok=True)
    rows = {digest: [count.launches, count.time_us] for digest, count in counts.items()}
    part = folder / f".{process}.part"
    part.write_text(json.dumps({"format": FORMAT, "launches": rows, **notes}), encoding="utf-8")
    os.replace(part, folder / f"{process}.json")


def read_counts(root: Path, problems: list[str]) -> tuple[dict[str, Count], list[dict[str, Any]]]:
    """Return the launches of all processes by class, and what the processes say."""
    found: dict[str, Count] = {}
    said = []
    for path in sorted((root / LAUNCHES).glob("*.json")):
        try:
            stored = read_json(path, _LARGEST_META)
            for digest, (launches, time_us) in stored.pop("launches").items():
                count = found.setdefault(digest, Count())
                count.launches += int(launches)
                if time_us is not None:
                    count.time_us = min(float(time_us), count.time_us or float("inf"))
            said.append(stored)
        except (ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"skipped {path}: {type(error).__name__}: {str(error)[:100]}")
    return found, said
