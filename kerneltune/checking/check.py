"""Check a variant against its reference, on poisoned outputs.

Every check of the package gives an `Outcome`. A check that runs out of memory does not end the process. The module measures
nothing and records nothing.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from kerneltune.checking.consistency import FirstSeen
from kerneltune.checking.hints import FIRST_AT, hint
from kerneltune.checking.memory import out_of_memory_reason, why_too_large, within_memory
from kerneltune.checking.quotients import AsOnGpu
from kerneltune.compat import version
from kerneltune.errors import first_line, line_of_inputs, place_of, statement_in
from kerneltune.interpreter.corrections import exact_quotients
from kerneltune.interpreter.facts import Fact, note_facts, noting
from kerneltune.interpreter.faults import fault_of
from kerneltune.interpreter.garbage import zeros_for_garbage
from kerneltune.interpreter.modes import refusing_launches, strict, unlaunched, untried
from kerneltune.records import IMPORT_FAILED
from kerneltune.spec import Case, Config, Inputs, Op, Outputs, Variant
from kerneltune.task import CaseError, Outcome, Run, SkippedError, Task

LAUNCH_FAILURE = "the launch failed"
_MOST_CHANGEABLE = 1024
"""Elements of a vector that a variant may change, such as an accumulated amax."""
_RESTORED_BYTES = 1 << 24
"""Largest input, in bytes, that is restored before each run: check cases are smaller, measured cases are larger."""


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised tensors with NaN, or with the largest integer, so that the check finds an output that is not written.

    Because torch.use_deterministic_algorithms imports torch's compiler, which takes seconds in every process, it is not called.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def on_device(device: str, function: Callable[..., Any], *values: Any) -> Any:
    """Call a function of an operator; if it mixes devices, call it again with all tensors on the device, also those it makes."""
    try:
        return function(*values)
    except RuntimeError as error:
        if device == "cpu" or "device" not in str(error):
            raise
    with torch.device(device):
        return function(*tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values))


class Checker:
    """Check the variants of one case; inputs and expected outputs are made once.

    Inputs that a variant changes, such as an accumulated amax or a parameter that is updated, are restored before every run.

    Args:
        first_seen: how variants gave their outputs in the cases checked so far; checkers of several cases share it.
        keeps_all: whether every input must keep its values, also vectors of few elements and large inputs.

    Raises:
        CaseError: inputs or expected outputs cannot be made. If the GPU is out of memory, the constructor and `run` let the
            original error pass instead.
    """

    def __init__(
        self,
        op: Op,
        case: Case,
        device: str,
        seed: int = 0,
        first_seen: FirstSeen | None = None,
        keeps_all: bool = False,
    ) -> None:
        self.op, self.case, self._device, self._seed, self._keeps_all = op, case, device, seed, keeps_all
        self._first_seen = FirstSeen() if first_seen is None else first_seen
        asked, field = op.inputs, "inputs"
        where = f"for {op.name} {case.label}"
        try:
            self.inputs: Inputs = op.inputs(case, device=device, seed=seed)
            self.inputs_before = {name: tensor.clone() for name, tensor in self._restorable()}
            asked, field = op.reference, "reference"
            self._quotients = AsOnGpu(host_folder(op)) if device == "cpu" else None
            with self._quotients or nullcontext():
                self.expected: Outputs = on_device(device, op.reference, self.inputs)
        except CaseError:
            raise
        except Exception as error:  # of a plug-in's code, or of the CPU's allocator
            if out_of_memory_reason(error):
                raise
            raise CaseError.of_contract(place_of(asked, error), field, f"{first_line(error)}, {where}") from error
        self._compared = self.inputs
        if not isinstance(self.expected, Mapping):
            given = type(self.expected).__name__
            text = f"{given}: expected a dict of output -> tensor, {where}"
            raise CaseError.of_contract(place_of(op.reference), "reference", text)
        for name in self.inputs_before:
            if self._is_changed(name):
                raise CaseError.of_contract(place_of(op.reference), "reference", f"changes its input {name}, {where}")
        if device == "cpu":
            meta_inputs(op, case)  # raises the error of inputs without memory

    @classmethod
    def make(cls, op: Op, case: Case, device: str = "cpu", first_seen: FirstSeen | None = None, **options: bool) -> Self:
        """Return the checker of a case.

        Raises:
            CaseError: the case has no inputs or no reference; `SkippedError`: the memory is too small for them.
        """
        return within_memory(partial(cls, op, case, device, first_seen=first_seen, **options))

    def check(self, variant: Variant, config: Config, runs: int = 1) -> Outcome:
        """Return the outcome of a variant under a config. A peer with a failed import is skipped.

        Args:
            runs: 1; or 2 for a second run with other values, which finds state that the first run leaves behind, such as a sum
                that is not reset, a result that is kept for a size, and an output whose memory the second run takes.
        """
        try:
            errors = within_memory(partial(self._errors, variant, config, runs))
        except SkippedError as error:
            return error.outcome
        is_skipped = bool(errors) and errors[0].startswith(IMPORT_FAILED)
        return Outcome("skipped" if is_skipped else "failed" if errors else "checked", "; ".join(errors))

    def _errors(self, variant: Variant, config: Config, runs: int) -> list[str]:
        outputs, lines = self.run(variant, config)
        if lines or runs == 1:
            return lines
        input_storages = names_by_storage(self.inputs)
        tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
        new = {name: tensor for name, tensor in tensors.items() if tensor.untyped_storage().data_ptr() not in input_storages}
        copies = {name: tensor.clone() for name, tensor in new.items()}
        try:
            second = type(self)(self.op, self.case, self._device, self._seed + 1, self._first_seen, keeps_all=self._keeps_all)
        except CaseError as error:
            return [f"run 2: {error}"]
        if lines := second.run_again(variant, config)[1]:
            return [f"run 2: {line}" for line in lines]
        if changed := ", ".join(name for name, copied in copies.items() if not have_same_bits(new[name], copied)):
            return [f"outputs: {changed} of the first run changed in the second: outputs need memory of their own"]
        return []

    def run(self, variant: Variant, config: Config) -> tuple[Outputs, list[str]]:
        """Return the outputs of a run, empty if the launch or a peer's import failed, and the errors of the run."""
        try:
            with noting() as facts:
                outputs = self.outputs(variant, config)
        except Exception as error:  # a launch may fail in any way: the config is wrong, not the search
            if out_of_memory_reason(error):
                raise
            if variant.is_peer and _is_of_import(error):
                return {}, [f"{IMPORT_FAILED}{first_line(error)}"]
            place = "" if variant.is_peer else statement_in(host_folder(self.op), error)
            return {}, [str(fault_of(error) or f"{LAUNCH_FAILURE}: {place}{first_line(error)}")]
        if lines := _not_dense(outputs) or self._overwritten(outputs) or self.disagreements(outputs):
            given: Outputs = outputs if isinstance(outputs, Mapping) else {}
            return given, self._explained(lines, given, facts, partial(self._agrees_within, variant, config))
        if all(map(_is_of_indices, outputs.values())):
            note_facts(*(fact._replace(kind="tf32 of indices") for fact in facts if fact.kind == "tf32"))
        seen = self._first_seen
        lines = seen.other_place(variant, self.case, self._placement_of_outputs(outputs))
        return outputs, lines or seen.other_type(variant, self.case, outputs, self.expected)

    def _explained(self, lines: Sequence[str], outputs: Outputs, facts: Set[Fact], agrees: Callable[..., bool]) -> list[str]:
        """Return the errors of a run with what explains them: values, rows, types, facts of the launches, and other runs.

        agrees: returns whether the run agrees within a context.
        """
        garbage = {fact.where for fact in facts if fact.kind == "garbage"}
        if garbage and agrees(zeros_for_garbage(garbage)):
            for place in sorted(garbage) if len(garbage) > 1 else ():
                garbage -= {place} if agrees(zeros_for_garbage(garbage - {place})) else set()
            places = ", ".join(sorted(map(os.path.basename, garbage)))
            return [*lines, f"right if loads under a mask without `other` give 0, {places}"]
        tuned = ", ".join(sorted({fact.text for fact in facts if fact.kind == "taken config" and fact.where != "1"}))
        if tuned and agrees(untried()):
            return [*lines, f"right if {tuned} is launched once: an autotuner launches it often: restore_value=[...]?"]
        lines = [f"{line}{hint(line, outputs, self.expected, self.inputs_before, bool(garbage))}" for line in lines]
        causes = sorted(str(fact) for fact in facts if fact.kind in ("tf32", "vector"))
        divisions = sorted(str(fact) for fact in facts if fact.kind == "division")
        return [*lines, *self._other_kinds(outputs), *causes, *self._blamed_quotients(agrees, divisions)]

    def run_again(self, variant: Variant, config: Config) -> tuple[Outputs, list[str]]:
        """Run a variant as `run` does; a subclass may change the layout of inputs."""
        return self.run(variant, config)

    def outputs(self, variant: Variant, config: Config) -> Outputs:
        """Run a variant on the inputs as they were made, with poisoned memory; return its outputs."""
        self.restore()
        self._versions = {name: version(self.inputs[name]) for name in self.inputs_before}
        with poisoned_memory(), strict(host_folder(self.op)), self._quotients or nullcontext():
            outputs = variant.run(self.inputs, config)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._keep_written(outputs)
        return outputs

    def restore(self) -> None:
        """Give the inputs that a run changed the values that they were made with."""
        for name, before in self.inputs_before.items():
            if self._is_changed(name):
                self.inputs[name].copy_(before)

    def _keep_written(self, outputs: object) -> None:
        """Keep the values that large inputs had, which a run gives as outputs, so that the next run has them."""
        storages = names_by_storage(outputs) if isinstance(outputs, Mapping) else {}
        tensors = {name: value for name, value in self.inputs.items() if isinstance(value, torch.Tensor)}
        written = [name for name, value in tensors.items() if value.untyped_storage().data_ptr() in storages]
        if not self.inputs_before.keys() >= set(written):
            made = self.op.inputs(self.case, device=self._device, seed=self._seed)
            self.inputs_before |= {name: made[name] for name in written}

    def disagreements(self, outputs: Outputs) -> list[str]:
        """Return the lines of the operator's `compare`, or a line that says why `compare` failed."""
        try:
            with self._quotients or nullcontext():
                lines: object = on_device(self._device, self.op.compare, self.case, self._compared, outputs, self.expected)
        except Exception as error:  # outputs that are missing, or of a kind that cannot be compared
            if out_of_memory_reason(error):
                raise
            if lacking := sorted(set(self.expected) - set(outputs if isinstance(outputs, Mapping) else ())):
                return [f"outputs: the reference gives {', '.join(lacking)}, the variant does not"]
            return [f"{place_of(self.op.compare, error)}compare: {first_line(error)}"]
        if isinstance(lines, list | tuple) and all(isinstance(line, str) and line for line in lines):
            if outputs and not self.expected:
                return [f"{place_of(self.op.reference)}reference: gives no output to compare with {', '.join(outputs)}"]
            unplaced = [FIRST_AT.sub("", line) for line in lines]  # `q scale: …` may repeat `scale: …`
            repeated = {text for text in unplaced for other in unplaced if text.endswith(f" {other}")}
            return [line for line, text in zip(lines, unplaced, strict=True) if text not in repeated]
        return [f"{place_of(self.op.compare)}compare: {lines!r}: expected a list of lines, empty where all is well"]

    def _overwritten(self, outputs: object) -> list[str]:
        """Return a line for each input that a run changed.

        Inputs that are also outputs may change, and, unless `keeps_all`, vectors of few elements. A change by torch counts even
        if it left all values as they were, such as a `clamp_` to wide limits.
        """
        output_storages = names_by_storage(outputs) if isinstance(outputs, Mapping) else {}
        lines = list[str]()
        for name, value in self._restorable():
            is_changeable = not self._keeps_all and value.ndim <= 1 and value.numel() <= _MOST_CHANGEABLE
            if is_changeable or value.untyped_storage().data_ptr() in output_storages:
                continue
            if version(value) != self._versions[name] or self._is_changed(name):
                lines.append(f"inputs: {name} was overwritten, and is no output")
        return lines

    def _is_changed(self, name: str) -> bool:
        return not have_same_bits(self.inputs[name], self.inputs_before[name])

    def _restorable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the inputs whose values are copied: a run that changes them is found, and each run has the same inputs."""
        for name, value in self.inputs.items():
            if isinstance(value, torch.Tensor) and (self._keeps_all or value.nbytes <= _RESTORED_BYTES):
                yield name, value

    def _blamed_quotients(self, agrees: Callable[..., bool], divisions: Sequence[str]) -> list[str]:
        """Return the divisions without which a run would agree: of the kernel, of the reference, or both; none on a GPU."""
        number = self._quotients.first if self._quotients is not None else ""
        hint = f"torch multiplies by the reciprocal of {number}: divide by a tensor on the GPU for exact quotients"
        of_kernel, of_reference = tuple(divisions), (hint,) if number else ()
        for kernel, reference in dict.fromkeys([(of_kernel, ()), ((), of_reference), (of_kernel, of_reference)]):
            if (kernel or reference) and agrees(exact_quotients() if kernel else nullcontext(), bool(reference)):
                return [*kernel, *reference]
        return []

    def _agrees_within(
        self, variant: Variant, config: Config, context: AbstractContextManager[Any], is_reference_exact: bool = False
    ) -> bool:
        """Return whether a run within a context agrees with the reference, if wanted with its exact quotients."""
        other = copy(self)
        with suppress(Exception), noting(passes_on=False), context:
            outputs = {name: value.clone() for name, value in other.outputs(variant, config).items()}  # some may be inputs
            if is_reference_exact:
                other.restore()
                other.expected = other.op.reference(other.inputs)
            return not other.disagreements(outputs)
        return False

    def _other_kinds(self, outputs: Outputs) -> list[str]:
        """Return a line for each output with fractions where the reference gives integers, a mistake of the reference."""
        lines = []
        for name, expected in self.expected.items():
            got = outputs.get(name)
            if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor):
                continue
            if got.is_floating_point() and not expected.is_floating_point():
                lines.append(f"{name} is {got.dtype}, the reference gives {expected.dtype}")
        return lines

    def _placement_of_outputs(self, outputs: Outputs) -> dict[str, bool]:
        """Return output -> whether it shares an input's storage; leave out inputs that are unchanged, or not restored."""
        input_of, are_over_inputs = names_by_storage(self.inputs), dict[str, bool]()
        for name, tensor in outputs.items():
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                owner = input_of.get(tensor.untyped_storage().data_ptr())
                if not owner or (owner in self.inputs_before and self._is_changed(owner)):
                    are_over_inputs[name] = owner is not None
        return are_over_inputs


def _is_of_indices(output: object) -> bool:
    return isinstance(output, torch.Tensor) and output.itemsize > 1 and not output.is_floating_point()


def _not_dense(outputs: object) -> list[str]:
    """Return a line for each sparse output: checks read the memory of outputs."""
    values = outputs.items() if isinstance(outputs, Mapping) else ()
    layouts = [(name, value.layout) for name, value in values if isinstance(value, torch.Tensor)]
    return [f"outputs: {name} is {layout}: expected a dense tensor" for name, layout in layouts if layout is not torch.strided]


def names_by_storage(values: Mapping[str, Any]) -> dict[int, str]:
    """Return the address of each dense tensor's storage -> the name of the tensor, the last of several that share the storage."""
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items() if tensor.layout is torch.strided}


def have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits; a NaN equals a NaN with the same bits."""
    return torch.equal(bytes_of(a), bytes_of(b))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements as uint8 (N,)."""
    adjacent = tensor.reshape(-1).contiguous()
    return adjacent.as_strided((adjacent.numel(),), (1,)).view(torch.uint8)  # an axis of one element keeps its stride


def check_runs(runs: Sequence[Run], check: Callable[[Task, Config], Outcome] | None = None) -> list[Outcome]:
    """Check the runs of one case; return an outcome for each.

    Args:
        check: checks a variant on the GPU in a subprocess; without it variants are checked on the CPU, in this process.
    """
    checker: Checker | None = None
    outcomes = []
    for task, config in runs:
        reason = task.variant.unsupported(task.case) or why_too_large(task.op, task.case)
        if reason is not None:
            outcomes.append(Outcome("skipped", reason))
        elif check is not None:
            outcomes.append(check(task, config))
        else:
            try:
                checker = checker or Checker.make(task.op, task.case)
                outcomes.append(checker.check(task.variant, config))
            except CaseError as error:
                outcomes.append(error.outcome)
    return outcomes


def why_not_checked(op: Op, case: Case) -> str | None:
    """Return why a case has no inputs or no expected values, or why host code refuses its sizes; None if it can be checked."""
    try:
        checker = Checker.make(op, case)
    except CaseError as error:
        return str(error)
    with suppress(Exception), unlaunched():  # the check reports other errors
        for variant in (variant for variant in op.variants if not (variant.is_peer or variant.unsupported(case))):
            try:
                variant.run(checker.inputs, variant.default_config(case))
            except (ValueError, AssertionError) as error:
                return first_line(error)
    return None


def smallest_cases(op: Op, cases: Sequence[Case], count: int) -> list[Case]:
    """Return the smallest cases, none with an axis of 1 unless all have one."""
    thick = [case for case in cases if min((size for _axis, size in case.axes), default=0) > 1]
    return sorted(thick or cases, key=lambda case: op.traffic(case).total)[:count]


def host_folder(op: Op) -> str:
    """Return the folder of an operator's module, whose host code launches its kernels; empty for a capture or without a file.

    For a module that is installed without a folder of its own, return its file.
    """
    file = getattr(sys.modules.get(op.module), "__file__", None) if op.origin is None else None
    return (file if Path(file).parent.name.endswith("-packages") else f"{Path(file).parent}{os.sep}") if file else ""


def meta_inputs(op: Op, case: Case) -> Inputs:
    """Return a case's inputs without memory, with which kernels are compiled and large cases checked.

    Raises:
        CaseError: inputs cannot be made on device `meta`.
    """
    try:
        return op.inputs(case, device="meta")
    except Exception as error:  # of a plug-in's code
        where = f"on device meta, which compiling and large cases need, for {op.name} {case.label}"
        raise CaseError.of_contract(place_of(op.inputs, error), "inputs", f"{line_of_inputs(error)}, {where}") from error


def broken_context() -> str:
    """Return the error of this process's broken GPU context; empty if the context works."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return first_line(error)
    return ""


def _is_of_import(error: BaseException) -> bool:
    """Return whether an import failed: a module is missing, or its own code raised, as cutlass does without its libraries.

    Generated code, for example by torch.compile, is executed without an import: its module has no `__spec__`.
    """
    modules = [frame for frame, _line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    return isinstance(error, ImportError) or any(frame.f_globals.get("__spec__") is not None for frame in modules)


def only_calls_torch(op: Op, variant: Variant, cases: Iterable[Case]) -> bool:
    """Return whether a variant without knobs launches no kernel in any of some cases; False if this is unknown."""
    return variant.config is None and launches_kernel(op, variant, cases) is False


def launches_kernel(op: Op, variant: Variant, cases: Iterable[Case]) -> bool | None:
    """Return whether the default config of a variant launches a kernel in some case; None if a case fails before, or for none."""
    launches = None
    for case in cases:
        with noting(passes_on=False) as facts:
            try:
                with refusing_launches(host_folder(op)):
                    variant.run(op.inputs(case, device="cpu"), variant.default_config(case))
                launches = False
            except Exception:  # a launch, or an error that the record of the check names
                return any(fact.kind == "launch" for fact in facts) or None
    return launches
