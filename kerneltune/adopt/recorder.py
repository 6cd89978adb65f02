"""Capture a program: write each class of launches once, while the program runs.

The program runs with the author's first config, or with the author's own tuning. An error in this module costs a line on standard
error and never ends the program.
"""

import atexit
import fnmatch
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, Literal

from msgspec import structs

from kerneltune.adopt import configs, kernels, program
from kerneltune.adopt.arguments import KeptValues, NotRecordableError
from kerneltune.adopt.classes import candidate_of_launch, describe_launch, with_candidates
from kerneltune.adopt.configs import StoredConfig
from kerneltune.adopt.counters import Counters
from kerneltune.adopt.folder import LAUNCHES, Count, LaunchClass, ProcessNotes, write_class, write_notes
from kerneltune.adopt.kernels import KernelName, Launch, LaunchMap, get_or_make, kernel_name
from kerneltune.adopt.program import log
from kerneltune.adopt.values import Effect, Values, collect, holds_addresses
from kerneltune.errors import first_line

MAX_BYTES = 256 << 20
MOST_CLASSES = 64
_TIMED_LAUNCHES = 6
_FLUSH_S = 1.0
_MOST_WITHOUT_EFFECT = 16
"""Most launches of a class whose values are kept, one after another, while the launches change nothing."""
_MAKERS = ("triton.", "torch._inductor.")
"""Beginnings of names in packages that make kernels without an autotuner while the program runs; they are not captured."""


@dataclass(slots=True)
class RecordedClass:
    """Hold the state of a class of launches in this process.

    Attributes:
        digest: digest of the class; empty if the class is not recorded.
        configs: configs of its launches, the first config that works first; empty if the program's own `run` launches.
        is_warm: whether the next launch neither compiles nor tunes, so that it may be timed.
        num_timed: number of launches that were timed or are being timed.
        held: the class with the values of a launch, until the launch has been made.
        launched: the same from then on, until the launch has shown an effect. If it shows none, as an in-place product with 1.0,
            or if no value could be read, as in a graph capture, the values of the next launch are held.
        num_without_effect: number of launches that have shown no effect.
    """

    digest: str = ""
    configs: list[Any] = field(default_factory=list)
    is_warm: bool = False
    num_timed: int = 0
    held: "_Held | None" = None
    launched: "_Held | None" = None
    num_without_effect: int = 0


@dataclass(slots=True)
class _Held:
    """Hold a class with the values of a launch.

    Attributes:
        launch_class: the class.
        values: values from before the launch.
        effect: the effect of the launch; of no storages if it cannot be seen.
        awaits: the event after which the class is written with these values. `launch`: the launch has ended. `effect`: the launch
            has shown an effect, unlike the launch whose values the folder has. Empty: the class is written.
    """

    launch_class: LaunchClass
    values: Values
    effect: Effect
    awaits: Literal["", "launch", "effect"]


_launch_map = partial(LaunchMap, has_layout=True, has_signs=True, is_kept=lambda recorded: bool(recorded.digest))
"""Make a map that keeps recorded classes, so that their launches are counted however many other keys a kernel has."""


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
        self._plain_kernels: dict[tuple[Any, ...], kernels.PlainKernel] = {}
        self._bytes_left, self._sample_bytes_left = max_bytes, max_bytes // 2
        self._lock = RLock()
        self._notes = ProcessNotes({})
        self._classes: dict[str, dict[str, RecordedClass]] = {}
        """The classes of each kernel by digest; a class that could not be written has an empty RecordedClass."""
        self._plain_functions: set[Any] = set()
        self._subclass_of: dict[Any, str] = {}
        """Map an autotuned function to the subclass of Autotuner that has a `run` of its own, to "" for any other autotuner."""
        self._bytecode_of: dict[tuple[str, str], str] = {}
        self._unread_times: list[tuple[str, Any, Any]] = []
        self._counters = Counters(root / LAUNCHES)
        self._process_id, self._flushed_s, self._has_launched = os.getpid(), 0.0, False
        atexit.register(self.flush)

    def _begin_process(self) -> None:
        """Count from zero at the first launch of a process, also of a forked process."""
        self._process_id, self._has_launched = os.getpid(), True
        self._notes.launches, self._unread_times = {}, []
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:  # workers of multiprocessing end without calling the functions of atexit
            util.Finalize(None, self.flush, exitpriority=10)

    def on_new_autotuner(self, autotuner: Any) -> None:
        """Note an autotuned kernel that the program has made."""
        kind, function = type(autotuner), autotuner.base_fn
        self._notes.autotuned.setdefault(kernel_name(autotuner).text, "")
        self._subclass_of.setdefault(function, "")
        if kind.run.__qualname__ != "Autotuner.run":
            self._subclass_of[function] = f"{kind.__module__}.{kind.__qualname__}"

    def make_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of Autotuner.run."""

        def run(autotuner: Any, /, *args: Any, **kwargs: Any) -> Any:
            recorded = self.recorded_class(autotuner, args, kwargs)
            if not (recorded.digest or recorded.configs) and (program.is_interpreted() or not self.autotune):
                with suppress(Exception):  # an error of the author's pruning: the author's autotuner raises it again
                    recorded.configs = self._pruned(Launch(autotuner, args, kwargs))
            return self._launch(original, autotuner, recorded, args, kwargs)

        return run

    def make_plain_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of `run` of a kernel: it notes the kernel, and records it under `plain`."""

        def run(kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
            subclass = self._subclass_of.get(kernel.fn)
            if subclass:
                self._notes.autotuned[kernel_name(kernel).text] = subclass
            if subclass or (subclass is not None and kernels.is_by_autotuner(kwargs)):
                return original(kernel, *args, **kwargs)
            self._plain_functions.add(kernel.fn)
            if not self.plain or kwargs.get("warmup"):
                return original(kernel, *args, **kwargs)
            return self._launch(original, kernel, self._recorded_plain_class(kernel, args, kwargs), args, kwargs)

        return run

    def _recorded_plain_class(self, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RecordedClass:
        """Return the class of a launch of a kernel without an autotuner; the first launch of a class records it."""
        if kernel_name(kernel).text.startswith(_MAKERS):
            return RecordedClass()
        options, others = configs.split_options(kernel, kwargs)
        key = (id(kernel), *options.values())
        plain = self._plain_kernels.get(key)
        if plain is None:
            keys = [name for name in kernel.arg_names if name not in self.ignored]
            plain = self._plain_kernels[key] = configs.plain_kernel(kernel, options, keys)
        return self.recorded_class(plain, args, others)

    def recorded_class(self, autotuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RecordedClass:
        """Return the class of a launch; the first launch of a class records it."""
        try:
            by_list: dict[Any, LaunchMap[RecordedClass]] | None = autotuner.__dict__.get(kernels.RECORDED_ATTRIBUTE)
            if by_list is None:
                by_list = kernels.hold(autotuner, kernels.RECORDED_ATTRIBUTE, {})
            by_launch = get_or_make(by_list, autotuner.configs, _launch_map)
            recorded = by_launch.find(args, kwargs)
            if recorded is None:
                launch = Launch(autotuner, args, kwargs)
                deciding = kernels.all_but_floats(launch) - self.ignored.difference(autotuner.keys)
                with self._lock:
                    recorded = by_launch.find(args, kwargs)
                    if recorded is None:
                        recorded = by_launch.remember(launch, deciding, self._class_of(launch, by_launch.num_keys))
            if (before := self._without_effect(recorded)) is not None:
                self._hold_values(recorded, before, Launch(autotuner, args, kwargs))
        except Exception as error:  # the program must not notice
            return self._refuse(kernel_name(autotuner), first_line(error))
        return recorded

    def _class_of(self, launch: Launch, num_keys: int) -> RecordedClass:
        """Return the class of a launch whose key is new; record a class that this process has not seen before.

        num_keys: number of other keys of the launch's list of configs; none for an autotuner that is made for each launch.
        """
        name, tuner = launch.name, launch.autotuner
        if not launch.is_plain:
            self._subclass_of[tuner.base_fn] = ""
        if not fnmatch.fnmatch(name.name, self.pattern) and not fnmatch.fnmatch(name.text, self.pattern):
            return RecordedClass()
        classes, most = self._classes.setdefault(name.text, {}), self.most_classes
        too_many = f"more than {most} classes of launches: the first {most} are kept"
        if min(len(classes), num_keys) >= most:  # the usual case, because describing a launch takes up to 0.4 ms
            return self._refuse(name, too_many)
        if problem := configs.misnamed(tuner):
            self._notes.misnamed.append(name.text)
            return self._refuse(name, f"not captured: {problem}")
        try:
            launch_class, storages = describe_launch(launch, self.ignored.difference(tuner.keys))
            bytecode = launch_class.bytecode_digest
            if self._bytecode_of.setdefault((name.text, launch_class.source_digest), bytecode) != bytecode:
                return self._refuse(name, "not captured: the file has several kernels of this name: give each a name of its own")
            if launch_class.digest not in classes:
                if len(classes) >= most:
                    return self._refuse(name, too_many)
                classes[launch_class.digest] = RecordedClass()
                classes[launch_class.digest] = self._new_class(launch, launch_class, storages)
        except NotRecordableError as error:
            return self._refuse(name, f"not captured: {error}")
        return classes[launch_class.digest]

    def _new_class(self, launch: Launch, launch_class: LaunchClass, storages: Sequence[Any]) -> RecordedClass:
        """Record a class that this process has not seen before: see `describe_launch`."""
        name, allowed = launch.name, self._pruned(launch)
        if not allowed:
            return self._refuse(name, "not captured: the author's pruning leaves no config")
        launch_class = with_candidates(launch_class, launch, allowed)
        values = self._values(launch_class, storages)
        if argument := holds_addresses(launch.autotuner.base_fn, launch_class.arguments, values):
            return self._refuse(name, f"not captured: {argument} holds addresses, which mean nothing in another process")
        if launch_class.problem:
            self._refuse(name, f"cannot be tuned: {launch_class.problem}")
        launch_class = structs.replace(launch_class, storages=values.kept)
        is_tuning = self.autotune and not launch_class.is_plain
        if not is_tuning:
            write_class(self.root, launch_class, values.tensors)
        recorded = RecordedClass(launch_class.digest, [] if is_tuning or launch_class.is_plain else allowed)
        effect = Effect(launch_class.arguments, () if program.is_capturing() else storages)
        recorded.held = _Held(launch_class, values, effect, "launch" if is_tuning else "")
        return recorded

    def _hold_values(self, recorded: RecordedClass, before: _Held, launch: Launch) -> None:
        """Hold the values of a launch, as the launch before, whose values are kept, has shown no effect."""
        recorded.launched, recorded.num_without_effect = None, recorded.num_without_effect + 1
        if recorded.num_without_effect > _MOST_WITHOUT_EFFECT:
            return
        described, storages = describe_launch(launch)
        values = self._values(described, storages)
        if not before.launch_class.lacks_values:  # the values would replace as many bytes
            self._bytes_left += values.bytes
            self._sample_bytes_left += values.sampled
        if not holds_addresses(launch.autotuner.base_fn, described.arguments, values):
            launch_class = structs.replace(before.launch_class, arguments=described.arguments, storages=values.kept)
            is_missing = before.awaits == "launch" or before.launch_class.lacks_values
            effect = Effect(described.arguments, storages)
            recorded.held = _Held(launch_class, values, effect, "launch" if is_missing else "effect")

    def _without_effect(self, recorded: RecordedClass, wait: bool = False) -> _Held | None:
        """Return the values of a launch that is known to have shown no effect; write values that have shown an effect."""
        held = recorded.launched
        if held is None or program.is_capturing() or not held.effect.is_known(wait):
            return None
        if not held.effect.is_seen:
            return held
        recorded.launched = None
        if held.awaits == "effect":
            write_class(self.root, held.launch_class, held.values.tensors, is_better=True)
        return None

    def _pruned(self, launch: Launch) -> list[Any]:
        """Return the configs that the author's pruning leaves; all configs if the pruning fails in the interpreter.

        On a GPU an exception of the pruning is raised.

        Raises:
            NotRecordableError: the program's own launch will fail.
        """
        if not launch.is_plain and launch.conflict:
            raise NotRecordableError(launch.conflict)
        try:
            return launch.pruned()
        except Exception as error:  # the author's own code
            if not program.is_interpreted():
                raise
            program.warn_once(f"{launch.name.text}: pruning fails without a GPU ({first_line(error)}): no config is pruned")
            return list(launch.autotuner.configs)

    def _values(self, launch_class: LaunchClass, storages: Sequence[Any]) -> Values:
        """Return the values of a class that are kept; none during a graph capture, in which no value can be read."""
        if program.is_capturing():
            return Values(kept=(KeptValues("missing"),) * len(storages))
        values = collect(launch_class.arguments, storages, self._bytes_left, self._sample_bytes_left)
        self._bytes_left -= values.bytes
        self._sample_bytes_left -= values.sampled
        if values.left_out:
            text = "kerneltune: %s: %d bytes of index values are over --max-bytes: not kept"
            log.warning(text, launch_class.label, values.left_out)
        return values

    def record(self, autotuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the class of a launch and count the launch, without launching anything."""
        recorded = self.recorded_class(autotuner, args, kwargs)
        recorded.held = None
        if recorded.digest:
            self._count(recorded.digest)

    def require_writable(self) -> None:
        """Raise OSError if the folder cannot be written."""
        self.root.mkdir(parents=True, exist_ok=True)
        if not os.access(self.root, os.W_OK):
            raise PermissionError(f"cannot write {self.root}")

    def note_misnamed(self, name: KernelName, problem: str) -> None:
        """Note a kernel whose decorator names an argument that the kernel lacks: `kerneltune capture` ends with exit code 2."""
        self._notes.misnamed.append(name.text)
        self._notes.refused[name.text] = f"not captured: {problem}"

    def _refuse(self, name: KernelName, reason: str) -> RecordedClass:
        reason = " ".join(reason.split())[:200]
        if self._notes.refused.get(name.text) != reason:
            self._notes.refused[name.text] = reason
            log.warning("kerneltune: %s: %s", name.text, reason)
        return RecordedClass()

    def _launch(self, original: Callable[..., Any], autotuner: Any, recorded: RecordedClass, args: Any, kwargs: Any) -> Any:
        """Launch with a config of the class, or else by the program's own `run`, and count the launch."""
        held, recorded.held = recorded.held, None
        if not recorded.is_warm and program.is_interpreted():
            with suppress(Exception):  # another version of triton: its libdevice stays
                from kerneltune.interpreter.corrections import correct_libdevice

                correct_libdevice()
        try:
            if recorded.configs:
                result = self._launch_config(autotuner, recorded, args, kwargs)
            else:
                result = self._timed(recorded, partial(original, autotuner, *args, **kwargs))
        except Exception as error:
            if held is not None:
                held.effect, recorded.launched = Effect((), ()), held
            if recorded.digest:
                self._notes.refused.setdefault(kernel_name(autotuner).text, f"a launch failed: {first_line(error)}")
            raise
        if held is not None:
            self._note_launched(recorded, held, Launch(autotuner, args, kwargs))
        if recorded.digest:
            self._count(recorded.digest)
        return result

    def _note_launched(self, recorded: RecordedClass, held: _Held, launch: Launch) -> None:
        """Write a class that is missing, with the choice of the author's autotuner, and compare the launch's memory."""
        launch_class = held.launch_class
        try:
            if self.autotune and not launch_class.is_plain and launch_class.choice is None:
                choice = StoredConfig.of(launch.autotuner.best_config)
                launch_class = structs.replace(launch_class, choice=choice)
                if launch_class.candidate(choice) is None:  # chosen for other arguments, pruned for these
                    added = candidate_of_launch(launch, launch.autotuner.best_config)
                    launch_class = structs.replace(launch_class, candidates=(*launch_class.candidates, added))
            if held.awaits == "launch":
                write_class(self.root, launch_class, held.values.tensors)
                held.awaits = ""
            if not held.awaits:
                held.values = Values()
            held.effect.end()
            held.launch_class, recorded.launched = launch_class, held
        except Exception as error:  # a full disk, for example: the program must not notice
            self._refuse(launch_class.kernel, first_line(error))

    def _launch_config(self, autotuner: Any, recorded: RecordedClass, args: Any, kwargs: Any) -> Any:
        """Launch with the first config of the class that works."""
        while True:
            config = recorded.configs[0]
            start = partial(kernels.launch_config, autotuner, config, args)
            try:
                if not recorded.is_warm and not program.is_interpreted():
                    start({**kwargs, "warmup": True})
                    recorded.is_warm = True
                return self._timed(recorded, partial(start, kwargs))
            except Exception as error:  # Triton's launch errors share no type
                if program.LAUNCH_FAILURES.isdisjoint(kind.__name__ for kind in type(error).__mro__):
                    raise
                program.drop_failed(recorded.configs, config, error)
                recorded.is_warm = False

    def _timed(self, recorded: RecordedClass, work: Callable[[], Any]) -> Any:
        """Launch, and let two events time the launch while few launches of the class are timed."""
        torch: Any = sys.modules.get("torch")
        is_warm, recorded.is_warm = recorded.is_warm, True
        is_timed = recorded.digest and is_warm and recorded.num_timed < _TIMED_LAUNCHES
        if not is_timed or torch is None or not torch.cuda.is_available() or program.is_capturing():
            return work()
        recorded.num_timed += 1
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = work()
        end.record()
        self._unread_times.append((recorded.digest, start, end))
        return result

    def _count(self, digest: str) -> None:
        with self._lock:
            if os.getpid() != self._process_id or not self._has_launched:
                self._begin_process()
            self._counters.add(self._counters.slot(digest))
            if time.monotonic() - self._flushed_s > _FLUSH_S:
                self.flush(wait=False)

    def flush(self, wait: bool = True) -> None:
        """Write the notes of this process; `wait` waits for the launches that are being timed."""
        notes, self._flushed_s = self._notes, time.monotonic()
        notes.has_compiled = program.has_compiled()
        is_empty = not (self._has_launched or notes.refused or notes.autotuned or self._plain_functions or notes.has_compiled)
        if os.getpid() != self._process_id or is_empty:
            return
        with self._lock:
            try:
                self._harvest(wait)
                for recorded in [each for classes in list(self._classes.values()) for each in list(classes.values())]:
                    self._without_effect(recorded, wait)
                for digest, launches in self._counters.by_name().items():
                    if launches:
                        notes.launches.setdefault(digest, Count()).launches = launches
                plain = () if self.plain else {KernelName.of(function).text for function in self._plain_functions}
                notes.plain = sorted(name for name in plain if not name.startswith(_MAKERS))
                write_notes(self.root, f"{self._process_id}-{id(self):x}", notes)
            except Exception as error:  # a broken context, a full disk: the program ends as without kerneltune
                log.warning("kerneltune: notes not written: %s", first_line(error))

    def _harvest(self, wait: bool) -> None:
        """Note the times of the launches that have ended; none during a graph capture, which the query of an event would end."""
        if program.is_capturing():
            return
        unfinished = []
        for digest, start, end in self._unread_times:
            if wait:
                end.synchronize()
            if not end.query():
                unfinished.append((digest, start, end))
                continue
            count = self._notes.launches.setdefault(digest, Count())
            count.time_us = min(start.elapsed_time(end) * 1e3, count.time_us or float("inf"))
        self._unread_times = unfinished
