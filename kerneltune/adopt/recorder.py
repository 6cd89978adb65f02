"""Capture: write each class of launches once, while the program runs.

The program runs as before: with the author's first config, or with the author's own tuning. Whatever goes wrong here costs a
line on standard error, never the program.
"""

import atexit
import fnmatch
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from threading import RLock
from typing import Any

from kerneltune.adopt import program
from kerneltune.adopt.arguments import (
    Argument,
    NotRecordableError,
    Storages,
    Values,
    collect,
    counting_argument,
    describe,
    holds_addresses,
    signature,
)
from kerneltune.adopt.configs import (
    OPTIONS,
    config_key,
    configs_digest,
    encode_config,
    misnamed,
    of_space,
    plain_configs,
    plain_tuner,
    widened,
)
from kerneltune.adopt.counters import Counters
from kerneltune.adopt.folder import LAUNCHES, Candidate, Count, LaunchClass, ProcessNotes, write_class, write_notes
from kerneltune.adopt.kernels import (
    FACTORY,
    Call,
    KernelName,
    bytecode_digest,
    compiled_and_launched,
    home_of,
    is_plain,
    kernel_name,
    layout_key,
    read_globals,
    source_digest,
)

log = logging.getLogger("kerneltune.adopt")

MAX_BYTES = 256 << 20
MOST_CLASSES = 64
_TIMED_LAUNCHES = 6
_FLUSH_S = 1.0
_MAKERS = ("triton", "torch")


@dataclass(slots=True)
class KnownLaunches:
    """A class of launches as this process knows it.

    Attributes:
        digest: of the class; empty if the class is not recorded.
        configs: configs that it is launched with, the first config that works first; empty if the author's autotuner runs it.
        timed: launches that were timed or are being timed.
        is_compiled: whether a kernel without an autotuner was launched before.
        unwritten: the class and its values until the author's autotuner has made its choice; None if it is written.
    """

    digest: str = ""
    configs: list[Any] = field(default_factory=list)
    timed: int = 0
    is_compiled: bool = False
    unwritten: tuple[LaunchClass, Values] | None = None


class Recorder:
    """Records the launches of a process into a capture folder."""

    def __init__(
        self,
        root: Path,
        pattern: str = "*",
        max_bytes: int = MAX_BYTES,
        autotune: bool = False,
        most_classes: int = MOST_CLASSES,
        ignored: Sequence[str] = (),
        plain: bool = False,
    ) -> None:
        """Record into a folder.

        Args:
            root: the folder of the capture.
            pattern: of the names of the kernels that are recorded.
            max_bytes: bytes of values that this process may keep.
            autotune: whether the author's tuning runs, in place of the author's first config.
            most_classes: classes of one kernel that are recorded.
            ignored: names of arguments whose values make no classes of their own, such as seeds.
            plain: whether kernels without an autotuner are recorded as well.
        """
        self.plain = plain
        self._plain_tuners: dict[tuple[Any, ...], Any] = {}
        self.root, self.pattern, self.autotune, self.most_classes = root, pattern, autotune, most_classes
        self.ignored = frozenset(ignored)
        self._arguments: dict[str, list[Sequence[Argument]]] = {}
        self._bytes_left, self._sample_bytes_left = max_bytes, max_bytes // 2
        self._lock = RLock()
        self._notes = ProcessNotes({}, command=sys.argv[:1])
        self._classes: dict[str, int] = {}
        self._said: set[tuple[str, str]] = set()
        self._launched: set[Any] = set()
        self._tuned: set[Any] = set()
        self._codes: dict[tuple[str, str], str] = {}
        self._pending: list[tuple[str, Any, Any]] = []
        self._counters = Counters(root / LAUNCHES)
        self._process, self._flushed, self._has_launched = os.getpid(), 0.0, False
        atexit.register(self.flush)

    def _begin_process(self) -> None:
        """Count from zero at the first launch of a process, a forked process as well."""
        self._process, self._has_launched = os.getpid(), True
        self._notes.launches, self._pending = {}, []
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:  # workers of multiprocessing end without calling what atexit holds
            util.Finalize(None, self.flush, exitpriority=10)

    def made(self, autotuner: Any) -> None:
        """Note an autotuned kernel that the program has made."""
        kind = type(autotuner)
        self._tuned.add(autotuner.base_fn)
        own_run = kind.run.__qualname__ != "Autotuner.run"
        self._notes.made[kernel_name(autotuner).text] = f"{kind.__module__}.{kind.__qualname__}" if own_run else ""

    def make_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of Autotuner.run."""

        def run(autotuner: Any, *args: Any, **kwargs: Any) -> Any:
            known = self.known(autotuner, args, kwargs)
            if not known.digest and program.is_interpreted():  # nothing can be timed
                known = KnownLaunches(configs=self._pruned(Call(autotuner, args, kwargs)))
            if not known.digest and not known.configs:
                return original(autotuner, *args, **kwargs)
            return self._launch(original, autotuner, known, args, kwargs)

        return run

    def make_plain_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of `run` of a kernel: it notes the kernel, and records it if asked to."""

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            function = kernel.fn
            self._launched.add(function)
            if not self.plain or function in self._tuned or kwargs.get("warmup"):
                return original(kernel, *args, **kwargs)
            known = self._known_plain(kernel, args, kwargs)
            if not known.digest:
                return original(kernel, *args, **kwargs)
            self._count(known.digest)
            is_first, known.is_compiled = not known.is_compiled, True
            return self._timed(known, lambda: original(kernel, *args, **kwargs), is_first)

        return run

    def _known_plain(self, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> KnownLaunches:
        """Return the class of a launch of a kernel without an autotuner; the first launch of a class records it."""
        if kernel.fn.__module__.partition(".")[0] in _MAKERS:
            return KnownLaunches()
        options = {name: kwargs.get(name) for name in OPTIONS}
        key = (id(kernel), *options.values())
        tuner = self._plain_tuners.get(key)
        given = {name: value for name, value in kwargs.items() if name not in OPTIONS}
        if tuner is None:
            named = {**dict(zip(kernel.arg_names, args, strict=False)), **given}
            keys = [n for n in kernel.arg_names if n in named and type(named[n]) is not float and n not in self.ignored]
            tuner = self._plain_tuners[key] = plain_tuner(kernel, options, keys)
        return self.known(tuner, args, given)

    def _plain(self) -> list[str]:
        """Return the names of the kernels that were launched without an autotuner, but for kernels that torch or Triton made."""
        found = (self._launched | compiled_and_launched()) - self._tuned
        names = {f"{_main(one.__module__)}.{one.__qualname__}" for one in found}
        return sorted(name for name in names if name.partition(".")[0] not in _MAKERS)

    def known(self, autotuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> KnownLaunches:
        """Return the class of a launch; the first launch of a class records it."""
        classes: dict[Any, KnownLaunches] = autotuner.__dict__.setdefault("_kerneltune_classes", {})
        try:
            layout = layout_key(*self._without_ignored(autotuner, args, kwargs))
            key = layout, tuple(map(id, autotuner.configs))
            found = classes.get(key)
            if found is None:
                with self._lock:
                    equal = layout, tuple(autotuner.configs)  # also of configs that the program makes anew for each launch
                    found = classes.get(equal)
                    if found is None:
                        found = classes[equal] = classes[key] = self._first(Call(autotuner, args, kwargs))
        except Exception as error:  # the program must not notice
            return self._refuse(kernel_name(autotuner), f"{type(error).__name__}: {error}")
        return found

    def _ignored_of(self, autotuner: Any) -> frozenset[str]:
        """Return the arguments that make no classes; an argument of the author's key always does."""
        return self.ignored.difference(autotuner.keys)

    def _without_ignored(
        self, autotuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments of a launch with the types of the ignored ones in place of their values."""
        if not self.ignored or not (ignored := self._ignored_of(autotuner)):
            return args, kwargs
        named = zip(autotuner.arg_names, args, strict=False)
        return (
            [type(value).__name__ if name in ignored else value for name, value in named],
            {name: type(value).__name__ if name in ignored else value for name, value in kwargs.items()},
        )

    def _first(self, call: Call) -> KnownLaunches:
        name = call.name
        if not is_plain(call.autotuner):
            self._tuned.add(call.autotuner.base_fn)
        if not fnmatch.fnmatch(name.name, self.pattern) and not fnmatch.fnmatch(name.text, self.pattern):
            return KnownLaunches()
        self._classes[name.text] = self._classes.get(name.text, 0) + 1
        if self._classes[name.text] > self.most_classes:
            return self._refuse(name, self._too_many(call))
        if problem := misnamed(call.autotuner):
            return self.refuse_misnamed(name, problem)
        try:
            configs = self._pruned(call)
            launch, storages = describe_launch(call, configs, self._ignored_of(call.autotuner))
            self._arguments.setdefault(name.text, []).append(launch.arguments)
        except NotRecordableError as error:
            return self._refuse(name, f"not captured: {error}")
        if self._codes.setdefault((name.text, launch.source), launch.bytecode) != launch.bytecode:
            return self._refuse(name, "not captured: the file has several kernels of this name: give each a name of its own")
        values = self._values(launch, storages)
        if held := holds_addresses(launch.arguments, values):
            return self._refuse(name, f"not captured: {held} holds addresses, which mean nothing in another process")
        if launch.problem:
            self._refuse(name, f"cannot be tuned: {launch.problem}")
        launch = replace(launch, storages=values.kinds, in_graph=program.is_capturing())
        if not self.autotune or launch.is_plain:
            write_class(self.root, launch, values.tensors)
            return KnownLaunches(launch.digest, configs)
        return KnownLaunches(launch.digest, unwritten=(launch, values))

    def _too_many(self, call: Call) -> str:
        """Return a line about a kernel with too many classes, and the argument that makes most classes."""
        counting, left = counting_argument(self._arguments.get(call.name.text, ()), call.autotuner.keys)
        hint = f"; without {counting} {left} are left: --ignore-arg {counting} if it is a seed or a counter" if counting else ""
        return f"more than {self.most_classes} classes of launches: the first {self.most_classes} are kept{hint}"

    def _pruned(self, call: Call) -> list[Any]:
        """Return the configs that the author's pruning leaves; all configs if the pruning fails because there is no GPU.

        Whatever it raises on a GPU is raised here.
        """
        try:
            return call.pruned()
        except Exception as error:  # the author's own code
            if not program.is_interpreted():
                raise
            said = f"pruning fails without a GPU ({type(error).__name__}: {' '.join(str(error).split())[:150]})"
            if (call.name.text, said) not in self._said:
                self._said.add((call.name.text, said))
                log.warning("kerneltune: %s: %s: no config is pruned", call.name.text, said)
            return list(call.autotuner.configs)

    def _values(self, launch: LaunchClass, storages: Storages) -> Values:
        if program.is_capturing():
            return Values.missing(len(storages.live))
        values = collect(launch.arguments, storages, self._bytes_left, self._sample_bytes_left)
        self._bytes_left -= values.bytes
        self._sample_bytes_left -= values.sampled
        if values.left_out:
            left = values.left_out
            log.warning("kerneltune: %s: %d bytes of index values are over --max-bytes: not kept", launch.label, left)
        return values

    def record(self, autotuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the class of a launch and count the launch, without launching anything."""
        known = self.known(autotuner, args, kwargs)
        if known.digest:
            self._count(known.digest)

    def refuse_misnamed(self, name: KernelName, problem: str) -> KnownLaunches:
        """Note a kernel whose decorator names an argument that the kernel lacks: `kerneltune capture` ends with exit code 2."""
        self._notes.misnamed.append(name.text)
        return self._refuse(name, f"not captured: {problem}")

    def _refuse(self, name: KernelName, reason: str) -> KnownLaunches:
        reason = " ".join(reason.split())[:200]
        if self._notes.refused.get(name.text) != reason:
            self._notes.refused[name.text] = reason
            log.warning("kerneltune: %s: %s", name.text, reason)
        return KnownLaunches()

    def _launch(self, original: Callable[..., Any], autotuner: Any, known: KnownLaunches, args: Any, kwargs: Any) -> Any:
        if known.digest:
            self._count(known.digest)
        if not known.configs:
            result = self._timed(known, lambda: original(autotuner, *args, **kwargs), is_first=known.unwritten is not None)
            self._write_choice(autotuner, known)
            return result
        while True:
            config = known.configs[0]
            try:
                return self._launch_config(autotuner, known, config, args, kwargs)
            except Exception as error:  # Triton's launch errors share no type
                if not program.is_launch_failure(error) or len(known.configs) == 1:
                    raise
                known.configs.pop(0)

    def _launch_config(self, autotuner: Any, known: KnownLaunches, config: Any, args: Any, kwargs: Any) -> Any:
        options = config.all_kwargs()
        is_first = known.timed == 0
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(autotuner.arg_names, args, strict=False)), **kwargs, **options})
        if is_first and not program.is_interpreted():
            autotuner.fn.run(*args, **{**kwargs, "warmup": True}, **options)  # so that the first launch is not timed compiling
        autotuner.best_config = config
        return self._timed(known, lambda: autotuner.fn.run(*args, **kwargs, **options), is_first=False)

    def _write_choice(self, autotuner: Any, known: KnownLaunches) -> None:
        """Write a class whose first launch the author's autotuner has just tuned."""
        if known.unwritten is None:
            return
        (launch, values), known.unwritten = known.unwritten, None
        try:
            write_class(self.root, replace(launch, choice=encode_config(autotuner.best_config)), values.tensors)
        except (OSError, ValueError, AttributeError) as error:
            self._refuse(launch.kernel, f"{type(error).__name__}: {error}")

    def _timed(self, known: KnownLaunches, work: Callable[[], Any], is_first: bool) -> Any:
        """Launch, between two events while few launches of the class are timed."""
        torch: Any = sys.modules.get("torch")
        if is_first or known.timed >= _TIMED_LAUNCHES or torch is None or not torch.cuda.is_available():
            return work()
        if program.is_capturing():
            return work()
        known.timed += 1
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = work()
        end.record()
        self._pending.append((known.digest, start, end))
        return result

    def _count(self, digest: str) -> None:
        with self._lock:
            if os.getpid() != self._process or not self._has_launched:
                self._begin_process()
            is_new = digest not in self._notes.launches
            self._notes.launches.setdefault(digest, Count()).launches += 1
            self._counters.add(self._counters.slot(digest))
            now = time.monotonic()
            if is_new or now - self._flushed > _FLUSH_S:
                self._flushed = now
                self.flush(wait=False)

    def flush(self, wait: bool = True) -> None:
        """Write the launches counted so far; wait: whether to wait for the launches that are being timed."""
        notes = self._notes
        if os.getpid() != self._process or not (notes.launches or notes.refused or notes.made or self._launched):
            return
        with self._lock:
            try:
                self._harvest(wait)
                notes.plain = self._plain() if wait else notes.plain
                write_notes(self.root, f"{self._process}-{id(self):x}", notes)
            except Exception as error:  # a lost context, a full disk: the program ends as it would have
                log.warning("kerneltune: launches not counted: %s", " ".join(str(error).split())[:200])

    def _harvest(self, wait: bool) -> None:
        left = []
        for digest, start, end in self._pending:
            if wait:
                end.synchronize()
            if not end.query():
                left.append((digest, start, end))
                continue
            count = self._notes.launches.setdefault(digest, Count())
            count.time_us = min(start.elapsed_time(end) * 1e3, count.time_us or float("inf"))
        self._pending = left


def describe_launch(call: Call, configs: Sequence[Any], ignored: Collection[str] = ()) -> tuple[LaunchClass, Storages]:
    """Return the class of a launch and the memory below its tensors.

    Args:
        call: the launch.
        configs: the configs that the author's pruning leaves.
        ignored: names of arguments whose values make no classes of their own.

    Raises:
        NotRecordableError: an argument or a config that cannot be recorded.
    """
    autotuner, name = call.autotuner, call.name
    module, home = _main(name.module), home_of(autotuner)
    home_file = _file_of(home.module) if home is not None else ""
    arguments, storages = describe(autotuner.arg_names, call.args, call.given)
    space = getattr(autotuner, "kerneltune_space", None)
    offered = [*configs, *(of_space(autotuner.configs, space) if space else ())]
    offered = plain_configs(call) if is_plain(autotuner) else offered
    keys = set(map(config_key, offered))
    around = [] if is_plain(autotuner) else [config for config in widened(autotuner.configs) if config_key(config) not in keys]
    candidates = [_candidate(call, config, True) for config in offered]
    candidates += [_candidate(call, config, False) for config in around]
    source, listed = source_digest(autotuner.base_fn), configs_digest(autotuner.configs)
    read = read_globals(autotuner.base_fn)
    launch = LaunchClass(
        digest=class_digest(
            module, name.name, source, listed, signature(arguments, ignored), *([json.dumps(read)] if read else ())
        ),
        kernel=KernelName(module, name.name),
        file=autotuner.base_fn.__code__.co_filename,
        source=source,
        bytecode=bytecode_digest(autotuner.base_fn),
        configs=listed,
        list_size=len(autotuner.configs),
        device=program.device_slug(),
        versions=program.versions(name.module),
        keys=tuple(autotuner.keys),
        key=call.author_key(),
        arguments=tuple(arguments),
        candidates=tuple(candidates),
        reset=tuple(autotuner.reset_to_zero),
        restored=tuple(autotuner.restore_value),
        home=KernelName(_main(home.module), home.name) if home is not None else None,
        home_file=home_file,
        argv=tuple(sys.argv),
        path=program.import_folders(),
        globals=read,
        problem=_problem(name, home, home_file) or _unlaunchable(candidates),
        is_plain=is_plain(autotuner),
    )
    return launch, storages


def _file_of(module: str) -> str:
    """Return the absolute path of a module's file; empty where the module has none."""
    file = getattr(sys.modules[module], "__file__", None)
    return os.path.abspath(file) if file else ""


def _main(module: str) -> str:
    """Return the name of a module, as multiprocessing's workers call the program's file otherwise."""
    return "__main__" if module == "__mp_main__" else module


def _problem(name: KernelName, home: KernelName | None, file: str) -> str:
    """Return why a replay could not find a kernel; empty if it can."""
    if FACTORY in name.name:
        return "a function made the kernel, so that it cannot be imported by name"
    if home is None:
        return "no module holds its autotuner by a name, so that it cannot be imported"
    if _main(home.module) == "__main__" and not os.path.isfile(file):
        return "the program is no file, so that the kernel cannot be loaded again"
    return ""


def _unlaunchable(candidates: Sequence[Candidate]) -> str:
    """Return why no config of the author's can be launched; empty if a config can."""
    by_author = [one for one in candidates if one.is_author]
    if any(one.grid is not None for one in by_author):
        return ""
    return f"no config can be launched: {by_author[0].problem or 'the launch has no grid'}"


def class_digest(*parts: str) -> str:
    """Return what names the class of a kernel, its source, its configs and its arguments."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _candidate(call: Call, config: Any, is_author: bool) -> Candidate:
    encoded = encode_config(config)
    try:
        grid, heuristics = call.launched_with(config)
        return Candidate(encoded, is_author, grid, {name: _plain(value) for name, value in heuristics.items()})
    except NotRecordableError:
        raise
    except Exception as error:  # the author's own code: this candidate is out
        return Candidate(encoded, is_author, None, problem=f"{type(error).__name__}: {error}"[:200])


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | str | None) or (isinstance(value, float) and isfinite(value)) else str(value)
