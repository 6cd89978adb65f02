"""Capture a program: write each class of launches once, while the program runs.

The program runs with the author's first config, or with the author's own tuning. An error in this module costs a line on standard
error and never ends the program.
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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

from kerneltune.adopt import arguments, configs, kernels, program
from kerneltune.adopt.arguments import NotRecordableError, Values
from kerneltune.adopt.configs import StoredConfig
from kerneltune.adopt.folder import LAUNCHES, Candidate, Count, Counters, LaunchClass, ProcessNotes, write_class, write_notes
from kerneltune.adopt.kernels import KernelCall, KernelName, LaunchMap, is_plain, kernel_name, of_list
from kerneltune.errors import first_line

log = logging.getLogger("kerneltune.adopt")

MAX_BYTES = 256 << 20
MOST_CLASSES = 64
_TIMED_LAUNCHES = 6
_FLUSH_S = 1.0
_MAKERS = ("triton", "torch")
"""Packages that make kernels without an autotuner while the program runs; their kernels are not captured."""


@dataclass(slots=True)
class RecordedClass:
    """Hold the state of a class of launches in this process.

    Attributes:
        digest: digest of the class; empty if the class is not recorded.
        configs: configs of its launches, the first config that works first; empty if the program's own `run` launches.
        is_warm: whether the next launch neither compiles nor tunes, so that it may be timed.
        timed: launches that were timed or are being timed.
        unwritten: the class and its values until the author's autotuner has made its choice; None if it is written.
    """

    digest: str = ""
    configs: list[Any] = field(default_factory=list)
    is_warm: bool = False
    timed: int = 0
    unwritten: tuple[LaunchClass, Values] | None = None


class Recorder:
    """Record the launches of a process into a capture folder."""

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
            pattern: pattern of the names of the kernels that are recorded.
            max_bytes: most bytes of values that this process keeps.
            autotune: whether the author's tuning runs, in place of the author's first config.
            most_classes: most classes of one kernel that are recorded.
            ignored: names of arguments whose values make no classes of their own, such as seeds.
            plain: whether kernels without an autotuner are recorded as well.
        """
        self.root, self.pattern, self.autotune, self.most_classes = root, pattern, autotune, most_classes
        self.ignored, self.plain = frozenset(ignored), plain
        self._plain_tuners: dict[tuple[Any, ...], Any] = {}
        self._bytes_left, self._sample_bytes_left = max_bytes, max_bytes // 2
        self._lock = RLock()
        self._notes = ProcessNotes({})
        self._classes: dict[str, int] = {}
        self._launched: set[Any] = set()
        self._tuned: set[Any] = set()
        self._own_runs: dict[Any, tuple[str, str]] = {}
        self._codes: dict[tuple[str, str], str] = {}
        self._pending: list[tuple[str, Any, Any]] = []
        self._counters = Counters(root / LAUNCHES)
        self._process, self._flushed, self._has_launched = os.getpid(), 0.0, False
        atexit.register(self.flush)

    def _begin_process(self) -> None:
        """Count from zero at the first launch of a process, also of a forked process."""
        self._process, self._has_launched = os.getpid(), True
        self._notes.launches, self._pending = {}, []
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:  # workers of multiprocessing end without calling the functions of atexit
            util.Finalize(None, self.flush, exitpriority=10)

    def on_new_autotuner(self, autotuner: Any) -> None:
        """Note an autotuned kernel that the program has made."""
        kind, name = type(autotuner), kernel_name(autotuner).text
        self._tuned.add(autotuner.base_fn)
        self._notes.made.setdefault(name, "")
        if kind.run.__qualname__ != "Autotuner.run":
            self._own_runs[autotuner.base_fn] = name, f"{kind.__module__}.{kind.__qualname__}"

    def make_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of Autotuner.run."""

        def run(autotuner: Any, *args: Any, **kwargs: Any) -> Any:
            recorded = self.recorded_class(autotuner, args, kwargs)
            if not recorded.digest and program.is_interpreted():  # nothing can be timed
                recorded = RecordedClass(configs=self._pruned(KernelCall(autotuner, args, kwargs)))
            return self._launch(original, autotuner, recorded, args, kwargs)

        return run

    def make_plain_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of `run` of a kernel: it notes the kernel, and records it under `plain`."""

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            function = kernel.fn
            self._launched.add(function)
            if not self.plain or function in self._tuned or kwargs.get("warmup"):
                return original(kernel, *args, **kwargs)
            return self._launch(original, kernel, self._recorded_plain_class(kernel, args, kwargs), args, kwargs)

        return run

    def _recorded_plain_class(self, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RecordedClass:
        """Return the class of a launch of a kernel without an autotuner; the first launch of a class records it."""
        if kernel.fn.__module__.partition(".")[0] in _MAKERS:
            return RecordedClass()
        options, others = configs.split_options(kwargs)
        key = (id(kernel), *options.values())
        tuner = self._plain_tuners.get(key)
        if tuner is None:
            call = KernelCall(kernel, args, others)
            keys = kernels.all_but_floats(call) - self.ignored
            ordered = [name for name in kernel.arg_names if name in keys]
            tuner = self._plain_tuners[key] = configs.plain_tuner(kernel, options, ordered)
        return self.recorded_class(tuner, args, others)

    def _plain(self) -> list[str]:
        """Return the names of the kernels that were launched without an autotuner, except the kernels of torch and Triton."""
        names = {KernelName.of(function).text for function in self._launched - self._tuned}
        return sorted(name for name in names if name.partition(".")[0] not in _MAKERS)

    def recorded_class(self, autotuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RecordedClass:
        """Return the class of a launch; the first launch of a class records it."""
        try:
            lists: dict[Any, LaunchMap[RecordedClass]] | None = autotuner.__dict__.get(kernels.RECORDED_ATTRIBUTE)
            if lists is None:
                lists = kernels.hold(autotuner, kernels.RECORDED_ATTRIBUTE, {})
            keys = of_list(lists, autotuner.configs, LaunchMap)
            launches = keys.find(args, kwargs)
            if launches is None:
                call = KernelCall(autotuner, args, kwargs)
                deciding = kernels.all_but_floats(call) - self.ignored.difference(autotuner.keys)
                with self._lock:
                    launches = keys.find(args, kwargs) or keys.remember(call, deciding, self._first(call), True)
        except Exception as error:  # the program must not notice
            return self._refuse(kernel_name(autotuner), first_line(error))
        return launches

    def _first(self, call: KernelCall) -> RecordedClass:
        """Record the class of a launch that this process has not seen before."""
        name, tuner = call.name, call.autotuner
        if not is_plain(tuner):
            self._tuned.add(tuner.base_fn)
            self._own_runs.pop(tuner.base_fn, None)
        if not fnmatch.fnmatch(name.name, self.pattern) and not fnmatch.fnmatch(name.text, self.pattern):
            return RecordedClass()
        self._classes[name.text] = self._classes.get(name.text, 0) + 1
        if self._classes[name.text] > self.most_classes:
            most = self.most_classes
            return self._refuse(name, f"more than {most} classes of launches: the first {most} are kept")
        if problem := configs.misnamed(tuner):
            return self.refuse_misnamed(name, problem)
        try:
            allowed = self._pruned(call)
            launch, storages = describe_launch(call, allowed, self.ignored.difference(tuner.keys))
        except NotRecordableError as error:
            return self._refuse(name, f"not captured: {error}")
        if self._codes.setdefault((name.text, launch.source), launch.bytecode) != launch.bytecode:
            return self._refuse(name, "not captured: the file has several kernels of this name: give each a name of its own")
        values = self._values(launch, storages)
        if held := arguments.holds_addresses(launch.arguments, values):
            return self._refuse(name, f"not captured: {held} holds addresses, which mean nothing in another process")
        if launch.problem:
            self._refuse(name, f"cannot be tuned: {launch.problem}")
        launch = replace(launch, storages=values.kinds)
        if not self.autotune or launch.is_plain:
            write_class(self.root, launch, values.tensors)
            return RecordedClass(launch.digest, [] if launch.is_plain else allowed)
        return RecordedClass(launch.digest, unwritten=(launch, values))

    def _pruned(self, call: KernelCall) -> list[Any]:
        """Return the configs that the author's pruning leaves; all configs if the pruning fails in the interpreter.

        On a GPU an exception of the pruning is raised.
        """
        try:
            return call.pruned()
        except Exception as error:  # the author's own code
            if not program.is_interpreted():
                raise
            program.warn_once(f"{call.name.text}: pruning fails without a GPU ({first_line(error)}): no config is pruned")
            return list(call.autotuner.configs)

    def _values(self, launch: LaunchClass, storages: Sequence[Any]) -> Values:
        if program.is_capturing():
            return Values(kinds=({"kept": "missing"},) * len(storages))
        values = arguments.collect(launch.arguments, storages, self._bytes_left, self._sample_bytes_left)
        self._bytes_left -= values.bytes
        self._sample_bytes_left -= values.sampled
        if left := values.left_out:
            log.warning("kerneltune: %s: %d bytes of index values are over --max-bytes: not kept", launch.label, left)
        return values

    def record(self, autotuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the class of a launch and count the launch, without launching anything."""
        recorded = self.recorded_class(autotuner, args, kwargs)
        if recorded.digest:
            self._count(recorded.digest)

    def refuse_misnamed(self, name: KernelName, problem: str) -> RecordedClass:
        """Note a kernel whose decorator names an argument that the kernel lacks: `kerneltune capture` ends with exit code 2."""
        self._notes.misnamed.append(name.text)
        return self._refuse(name, f"not captured: {problem}")

    def _refuse(self, name: KernelName, reason: str) -> RecordedClass:
        reason = " ".join(reason.split())[:200]
        if self._notes.refused.get(name.text) != reason:
            self._notes.refused[name.text] = reason
            log.warning("kerneltune: %s: %s", name.text, reason)
        return RecordedClass()

    def _launch(self, original: Callable[..., Any], autotuner: Any, recorded: RecordedClass, args: Any, kwargs: Any) -> Any:
        if recorded.digest:
            self._count(recorded.digest)
        if not recorded.configs:
            result = self._timed(recorded, partial(original, autotuner, *args, **kwargs))
            if recorded.unwritten is not None:
                (launch, values), recorded.unwritten = recorded.unwritten, None
                try:
                    choice = StoredConfig.of(autotuner.best_config)
                    launch = replace(launch, choice=choice)
                    if launch.candidate(choice) is None:  # chosen for a launch of this key with other arguments, pruned for these
                        added = _candidate(KernelCall(autotuner, args, kwargs), autotuner.best_config)
                        launch = replace(launch, candidates=(*launch.candidates, added))
                    write_class(self.root, launch, values.tensors)
                except (OSError, ValueError, AttributeError) as error:
                    self._refuse(launch.kernel, first_line(error))
            return result
        while True:
            start = partial(kernels.launch_config, autotuner, recorded.configs[0], args)
            try:
                if not recorded.is_warm and not program.is_interpreted():
                    start({**kwargs, "warmup": True})
                    recorded.is_warm = True
                return self._timed(recorded, partial(start, kwargs))
            except Exception as error:  # Triton's launch errors share no type
                if not program.is_launch_failure(error) or len(recorded.configs) == 1:
                    raise
                recorded.configs.pop(0)
                recorded.is_warm = False

    def _timed(self, recorded: RecordedClass, work: Callable[[], Any]) -> Any:
        """Launch, and let two events time the launch while few launches of the class are timed."""
        torch: Any = sys.modules.get("torch")
        is_warm, recorded.is_warm = recorded.is_warm, True
        is_timed = recorded.digest and is_warm and recorded.timed < _TIMED_LAUNCHES
        if not is_timed or torch is None or not torch.cuda.is_available() or program.is_capturing():
            return work()
        recorded.timed += 1
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = work()
        end.record()
        self._pending.append((recorded.digest, start, end))
        return result

    def _count(self, digest: str) -> None:
        with self._lock:
            if os.getpid() != self._process or not self._has_launched:
                self._begin_process()
            self._counters.add(self._counters.slot(digest))
            if time.monotonic() - self._flushed > _FLUSH_S:
                self.flush(wait=False)

    def flush(self, wait: bool = True) -> None:
        """Write the notes of this process; `wait` waits for the launches that are being timed."""
        notes, self._flushed = self._notes, time.monotonic()
        notes.has_compiled = program.has_compiled()
        is_empty = not (self._has_launched or notes.refused or notes.made or self._launched or notes.has_compiled)
        if os.getpid() != self._process or is_empty:
            return
        with self._lock:
            try:
                self._harvest(wait)
                for digest, launches in self._counters.by_name().items():
                    if launches:
                        notes.launches.setdefault(digest, Count()).launches = launches
                notes.plain = self._plain()
                notes.made |= dict(own for function, own in self._own_runs.items() if function in self._launched)
                write_notes(self.root, f"{self._process}-{id(self):x}", notes)
            except Exception as error:  # a broken context, a full disk: the program ends as without kerneltune
                log.warning("kerneltune: notes not written: %s", first_line(error))

    def _harvest(self, wait: bool) -> None:
        """Note the times of the launches that have ended."""
        unfinished = []
        for digest, start, end in self._pending:
            if wait:
                end.synchronize()
            if not end.query():
                unfinished.append((digest, start, end))
                continue
            count = self._notes.launches.setdefault(digest, Count())
            count.time_us = min(start.elapsed_time(end) * 1e3, count.time_us or float("inf"))
        self._pending = unfinished


def describe_launch(call: KernelCall, allowed: Sequence[Any], ignored: Collection[str] = ()) -> tuple[LaunchClass, list[Any]]:
    """Return the class of a launch, and for each storage of its tensors a live tensor.

    Args:
        call: the launch.
        allowed: the configs that the author's pruning leaves.
        ignored: names of arguments whose values make no classes of their own.
    """
    tuner, name, function = call.autotuner, call.name, call.autotuner.base_fn
    home = kernels.home_of(tuner)
    held = vars(sys.modules[home.module]) if home is not None and home.module != name.module else function.__globals__
    home_file = os.path.abspath(held["__file__"]) if home is not None and held.get("__file__") else ""
    described, storages = arguments.describe(tuner.arg_names, call.args, call.given)
    key = call.author_key()
    candidates = _candidates(call, allowed)
    with suppress(Exception):  # a grid may write an argument, as vLLM's causal_conv1d_fn does: the program's own blocks come last
        call.grid(allowed[0])
    source, listed = arguments.source_digest(function), configs.configs_digest(tuner.configs)
    read = kernels.read_globals(function)
    signed = arguments.signature(described, ignored)
    parts = [name.module, name.name, source, listed, signed, *([json.dumps(read)] if read else ())]
    launch = LaunchClass(
        digest=hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16],
        kernel=name,
        file=function.__code__.co_filename,
        source=source,
        bytecode=kernels.bytecode_digest(function),
        configs=listed,
        list_size=len(tuner.configs),
        device=program.device_slug(),
        versions=program.package_versions(name.module),
        keys=tuple(tuner.keys),
        key=key,
        arguments=tuple(described),
        candidates=tuple(candidates),
        home=home,
        home_file=home_file,
        argv=_command(),
        path=program.import_folders(),
        globals=read,
        problem=_problem(function, home, home_file, candidates),
        is_plain=is_plain(tuner),
    )
    return launch, storages


def _command() -> tuple[str, ...]:
    """Return the arguments of the program, with the whole path of its file."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return (os.path.abspath(file), *sys.argv[1:]) if file else tuple(sys.argv)


def _candidates(call: KernelCall, allowed: Sequence[Any]) -> list[Candidate]:
    """Return the candidates of a class: the author's configs and the configs of `space=`, or the configs of a plain kernel."""
    if is_plain(call.autotuner):
        return [_candidate(call, config) for config in configs.plain_configs(call)]
    space = getattr(call.autotuner, "kerneltune_space", None)
    added = configs.of_space(call.autotuner.configs, space) if space else ()
    return [_candidate(call, config) for config in (*allowed, *added)]


def _candidate(call: KernelCall, config: Any) -> Candidate:
    stored = StoredConfig.of(config)
    try:
        return Candidate(stored, True, call.grid(config))
    except NotRecordableError:
        raise
    except Exception as error:  # the author's own code: this candidate is out
        return Candidate(stored, True, None, problem=first_line(error))


def _problem(function: Any, home: KernelName | None, file: str, candidates: Sequence[Candidate]) -> str:
    """Return why a replay could not find a kernel, or could launch none of the author's configs; empty if it can."""
    if kernels.FACTORY in function.__qualname__:
        return "a function made the kernel, so that it cannot be imported by name"
    source = function.__code__.co_filename  # no file in an archive, or if relative and the program has changed the folder
    own_file = function.__globals__.get("__file__") or ""
    if not os.path.isfile(source) and os.path.basename(source) != os.path.basename(own_file):
        return "exec or a notebook cell defined the kernel, so that it cannot be launched again: move it to a module"
    if home is None:
        return "no module holds its autotuner by a name, so that it cannot be imported"
    if home.module == "__main__" and not os.path.isfile(file):
        return "the program is no file, so that the kernel cannot be loaded again"
    if any(candidate.grid is not None for candidate in candidates):
        return ""
    return f"no config can be launched: {candidates[0].problem or 'the launch has no grid'}"
