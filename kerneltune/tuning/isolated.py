"""A bench in a child process that may be lost: what it is asked, and what becomes of it.

Decides nothing and stores nothing. Imports bench, check, errors, processes, search, spec and stats.
"""

import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, Protocol

from kerneltune.errors import first_line
from kerneltune.measuring.check import broken_context
from kerneltune.measuring.compare import Ceiling, Untimed, compare
from kerneltune.processes import fast_context, in_environment, in_fresh_processes
from kerneltune.records import Record
from kerneltune.search.trials import Evaluation
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.stats import Samples
from kerneltune.tuning.bench import SCREEN_SAMPLES, GpuBench, Measuring

TRIAL_TIMEOUT_S = 60.0
FINAL_TIMEOUT_S = 300.0
_EXIT_GRACE_S = 5.0
_ENDED_FROM_OUTSIDE = (-signal.SIGTERM, 255)
"""Exit codes of a child that was sent SIGTERM, as by `timeout` to all processes at once: 255 where its server was, too."""


class Stoppable(Measuring, Protocol):
    """A bench that another thread can end."""

    def stop(self) -> None:
        """End what is being measured, at once; nothing is measured after that."""


@dataclass(frozen=True, slots=True)
class VariantName:
    """An operator's variant by name, as a child finds it again: in `OP` or `OPS` of its module or of a package that holds it."""

    module: str
    op: str
    variant: str

    def load(self) -> tuple[Op, Variant]:
        """Import the operator.

        Raises:
            ValueError: neither `OP` nor `OPS` of the module, or of a package that holds it, is or has the operator.
        """
        parts = self.module.split(".")
        for length in range(len(parts), 0, -1):
            module = importlib.import_module(".".join(parts[:length]))
            for op in (*getattr(module, "OPS", ()), getattr(module, "OP", None)):
                if op is not None and op.name == self.op:
                    return op, op.variant(self.variant)
        raise ValueError(f"no operator {self.op} in OP or OPS of {self.module} or of a package that holds it")


class ChildCrashedError(Exception):
    """The measuring process died, was killed or stopped; says how."""


class ChildStoppedError(ChildCrashedError):
    """It was ended from here or from outside, whatever it was at."""


class IsolatedBench:
    """A bench in a child process, which alone touches the GPU.

    A config that hangs, faults or takes the process along is a trial of status `lost`; the next one finds a new child with a
    clean context, inputs and reference made anew. Use as a context manager. One thread asks; `stop` and the end of the context
    may come from another, and what is then being measured has no trial: it raises ChildLostError.

    Attributes:
        started: children so far.
    """

    def __init__(
        self,
        make: Callable[[], Measuring] = GpuBench,
        cores: frozenset[int] | None = None,
        trial_timeout_s: float = TRIAL_TIMEOUT_S,
    ) -> None:
        """make: the bench, made in the child; an importable function. cores: that the child may run on, None for all."""
        self._make, self._cores, self.trial_timeout_s = make, cores, trial_timeout_s
        self.child: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._opened: tuple[VariantName, Case, str] | None = None
        self._ready = False
        self._lock = Lock()
        self.is_asking = False
        self._closed = False
        self.started = 0
        self._busy: list[tuple[float, float]] = []

    def __enter__(self) -> "IsolatedBench":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the child, also while another thread waits for it, and start no other."""
        self._closed = True
        self._end_child(asked_here=False)

    def open(self, op: Op, case: Case, variant: Variant, policy: str) -> None:
        """Remember the case; the child makes its tensors when the first config is tried."""
        self.close()
        self._opened = (VariantName(op.module, op.name, variant.name), case, policy)

    def busy_since(self, moment: float) -> float:
        """Return seconds since a moment (time.monotonic) that the children spent on what they were asked for, not on starting."""
        return sum(ended - max(began, moment) for began, ended in self._busy if ended > moment)

    def begin(self) -> None:
        """Start a child, which makes ready what does not depend on the case while this process does something else.

        Raises:
            ChildLostError: the bench stopped.
        """
        if self.child is None:
            self._start()
            self._ready = False

    def prepare(self) -> None:
        """Have a child make its tensors.

        Raises:
            ChildLostError: the child was lost, or the bench stopped.
        """
        assert self._opened is not None
        self.begin()
        if not self._ready:
            self._ask("open", FINAL_TIMEOUT_S, *self._opened)
            self._ready = True

    def trial(self, config: Config, best_us: float | None, samples: int = SCREEN_SAMPLES) -> Evaluation:
        """Ask the bench in the child; the trial is `lost` where the child crashes over it.

        Raises:
            ChildLostError: the child was lost before it came to the config or sent SIGTERM, or the bench stopped.
        """
        self.prepare()
        try:
            trial: Evaluation = self._ask("trial", self.trial_timeout_s, config, best_us, samples)
            return trial
        except ChildStoppedError:
            raise
        except ChildCrashedError as error:
            return Evaluation("lost", detail=str(error))

    def samples(self, configs: Sequence[Config]) -> Sequence[Samples | None]:
        """Ask the bench in the child.

        Raises:
            ChildLostError: the child was lost, or the bench stopped.
        """
        self.prepare()
        samples: Sequence[Samples | None] = self._ask("samples", FINAL_TIMEOUT_S, configs)
        return samples

    def close(self) -> None:
        """Have the child free its tensors."""
        if self._ready:
            with suppress(ChildCrashedError):
                self._ask("close", self.trial_timeout_s)
            self._ready = False
        self._opened = None

    def _start(self) -> None:
        context = fast_context()
        with self._lock:
            self._refuse_if_closed()
            pipe, theirs = context.Pipe()
            arguments = (dict(os.environ), _serve, theirs, self._make, self._cores)
            child = context.Process(target=in_environment, args=arguments, daemon=True)
            child.start()
            self.child, self._pipe = child, pipe
        theirs.close()
        self.started += 1

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ChildStoppedError("the measuring process was stopped")

    def _ask(self, name: str, timeout_s: float, *arguments: Any) -> Any:
        with self._lock:
            self._refuse_if_closed()
            pipe, self.is_asking = self._pipe, True
        assert pipe is not None
        try:
            pipe.send((name, arguments))
            if not pipe.poll(timeout_s):
                self._end_child()
                raise ChildCrashedError(f"took longer than {timeout_s:g} s")
            answer, lost, busy = pipe.recv()
        except (EOFError, OSError) as error:
            code = self._end_child()
            self._refuse_if_closed()
            lost_to = ChildStoppedError if code in _ENDED_FROM_OUTSIDE else ChildCrashedError
            raise lost_to(f"the measuring process died: exit code {code}") from error
        finally:
            self.is_asking = False
        self._busy.append(busy)
        if lost:
            self._end_child()
            raise ChildCrashedError(lost)
        return answer

    def _end_child(self, asked_here: bool = True) -> int | None:
        """Have the child leave, by force if it must be; its exit code, None where another thread has it leave.

        asked_here: False where another thread may wait for an answer: the pipe stays open for that one to find the end of it.
        """
        with self._lock:
            child, pipe, in_use = self.child, self._pipe, self.is_asking and not asked_here
            self.child, self._pipe, self._ready = None, None, False
        if child is None or pipe is None:
            return None
        if not in_use:
            pipe.close()
            child.join(_EXIT_GRACE_S if child.exitcode is not None else 0.2)
        if child.exitcode is None:
            child.kill()
            child.join(_EXIT_GRACE_S)
        return child.exitcode


def _serve(pipe: Connection, make: Callable[[], Measuring], cores: frozenset[int] | None) -> None:
    """Answer one request after the other, in the child; end when its context is lost, or when nobody asks any more.

    It keeps to its cores once it is open: before that it waits for the GPU's and Triton's drivers, and other cores may as well.
    """
    bench = make()
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        began = time.monotonic()
        try:
            if name == "open":
                named, case, policy = arguments
                op, variant = named.load()
                arguments = (op, case, variant, policy)
            elif cores:
                os.sched_setaffinity(0, cores)
            answer, lost = getattr(bench, name)(*arguments), ""
        except Exception as error:  # no memory for the inputs as well: the next config finds a clean process
            answer, lost = None, first_line(error)
        lost = lost or broken_context()
        pipe.send((answer, lost, (began, time.monotonic())))
        if lost:
            return


def split_cores() -> tuple[frozenset[int] | None, frozenset[int] | None]:
    """Split the cores: one for the measuring process, the others for the compilers; (None, None) where there is one core only."""
    cores = sorted(os.sched_getaffinity(0))
    return (frozenset(cores[-1:]), frozenset(cores[:-1])) if len(cores) > 1 else (None, None)


def check_in_child(bench: Measuring, op: Op, case: Case, variant: Variant, config: Config) -> Untimed:
    """Say what becomes of a variant under a checking bench, also where the bench's process crashed."""
    bench.open(op, case, variant, "")
    try:
        trial = bench.trial(config, None)
    except ChildCrashedError as error:
        return "failed", f"lost: {error}"
    if trial.status == "ok":
        return "checked", ""
    if trial.status == "memory":
        return "skipped", trial.detail
    return "failed", trial.detail if trial.status == "wrong" else f"{trial.status}: {trial.detail}"


def compare_in_child(
    family: str,
    op: Op,
    case: Case,
    variants: Sequence[tuple[Variant, Config]],
    policy: str,
    ceiling: Ceiling | None,
    lost: Mapping[str, str],
) -> list[Record]:
    """Compare as measuring.compare does, in a fresh process.

    Raises:
        ContextLostError: a launch took that process's context along.
        ValueError: the process crashed, or took too long.
    """
    named = [(_named(op, variant), config) for variant, config in variants]
    beside = (_named(ceiling.op, ceiling.variant), ceiling.config, ceiling.case) if ceiling is not None else None
    (rows,) = in_fresh_processes(1, _compare, family, case, named, policy, beside, dict(lost))
    return rows


def _named(op: Op, variant: Variant) -> VariantName:
    return VariantName(op.module, op.name, variant.name)


def _compare(
    family: str,
    case: Case,
    named: Sequence[tuple[VariantName, Config]],
    policy: str,
    beside: tuple[VariantName, Config, Case] | None,
    lost: Mapping[str, str],
) -> list[Record]:
    """Compare in the subprocess."""
    loaded = [(*name.load(), config) for name, config in named]
    ceiling = Ceiling(*beside[0].load(), beside[1], beside[2]) if beside is not None else None
    return compare(family, loaded[0][0], case, [(variant, config) for _, variant, config in loaded], policy, ceiling, lost)
