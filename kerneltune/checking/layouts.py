"""Check a variant on inputs with gaps between rows or elements, where host code reads the layout of the inputs."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import torch

from kerneltune.checking.check import LAUNCH_FAILURE, Checker, host_folder, names_by_storage
from kerneltune.errors import is_own
from kerneltune.interpreter.modes import replaced
from kerneltune.spec import Config, Inputs, Outputs, Variant

_COMPUTED = " that the kernel computes, such as 0 / 0 or inf - inf"
EVERY_OUTER_AXIS, ROWS, ELEMENTS, TRANSPOSED = 0, 1, -1, 1 << 8
"""Places of gaps: at every outer axis, so that no stride follows from another; between rows; between elements and rows; nowhere,
but the two outermost axes have changed places in memory.

If host code refuses gaps in an input of three axes, these are tried in turn: at every outer axis (0), between rows (1), between
matrices (2), none.
"""


class _GapRun(NamedTuple):
    """Hold a run on inputs with gaps: by input the gaps that host code accepts, the outputs, and the errors.

    Without accepted gaps, there are no outputs and no errors.
    """

    gaps: dict[str, int]
    outputs: Outputs
    lines: list[str]


def _with_gaps(inputs: Inputs, around: Mapping[str, int] | None = None) -> Inputs:
    """Return copies of the matrices among some inputs, with gaps of different sizes between rows, multiples of 16 bytes.

    Args:
        around: place of the gaps of an input, `ROWS` without it: one of the constants, or the number of inner axes around which
            the gaps lie, such as 2 for gaps between matrices.
    """
    copies: dict[str, torch.Tensor] = {}
    owners = Counter(value.untyped_storage().data_ptr() for value in inputs.values() if isinstance(value, torch.Tensor))
    for name, value in inputs.items():
        if type(value) is not torch.Tensor or value.ndim < 2 or not value.numel():
            continue
        order = sorted(range(value.ndim), key=value.stride)
        if owners[value.untyped_storage().data_ptr()] == 1 and value.stride(order[0]) == 1 and 0 not in value.stride():
            strides, inner_axes = [0] * value.ndim, (around or {}).get(name, ROWS)
            order = [*order[:-2], order[-1], order[-2]] if inner_axes == TRANSPOSED else order
            step = 2 if inner_axes == ELEMENTS else 1
            for number, axis in enumerate(order, 1):
                strides[axis] = step
                step *= value.shape[axis]
                if inner_axes == EVERY_OUTER_AXIS or number == abs(inner_axes):
                    step += (32 * (len(copies) + 1)) // value.element_size()
            memory = torch.full((step * value.element_size(),), 0xFF, dtype=torch.uint8, device=value.device).view(value.dtype)
            copies[name] = memory.as_strided(value.shape, strides).copy_(value.detach()).requires_grad_(value.requires_grad)
    return copies


@contextmanager
def noting_layouts(inputs: Inputs, folder: str) -> Iterator[list[str]]:
    """List the inputs that code in a folder asks for strides, for `is_contiguous` or for a contiguous copy, in order.

    A copy of another view, such as `x.t().contiguous()`, tells nothing of the input.
    """
    owners = names_by_storage(inputs)
    read = list[str]()

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
            frame = inspect.currentframe()
            caller = frame.f_back if frame else None
            owner = None
            if caller and is_own(folder, caller.f_code.co_filename):
                owner = owners.get(tensor.untyped_storage().data_ptr())
            if owner and not (method is contiguous and tensor.shape != inputs[owner].shape):
                read.append(owner)
            return method(tensor, *args, **named)

        return call

    contiguous = torch.Tensor.contiguous
    names = ("stride", "is_contiguous", "contiguous") if folder else ()
    with replaced({(torch.Tensor, name): noted(getattr(torch.Tensor, name)) for name in names}):
        yield read


class LayoutChecker(Checker):
    """Check the variants of one case; the inputs of a second run have gaps."""

    def run_again(self, variant: Variant, config: Config) -> tuple[Outputs, list[str]]:
        """Run a variant on inputs with gaps at all outer axes, then with gaps between rows alone, if host code accepts gaps.

        So a kernel is found that takes the strides of another tensor, the number of columns, or a multiple of the stride between
        rows for the stride of an input. `reshape(-1, N)` copies the first inputs, and takes the second as they are.
        """
        matrices = _with_gaps(self.inputs) if host_folder(self.op) else {}
        rows = dict.fromkeys(matrices, ROWS)
        widest = {name: ROWS if matrix.ndim == 2 else EVERY_OUTER_AXIS for name, matrix in matrices.items()}
        run = self._run_with_accepted_gaps(variant, config, widest)
        if run.gaps and run.gaps != rows and not run.lines:
            run = self._run_with_accepted_gaps(variant, config, rows)
        return (run.outputs, run.lines) if run.gaps else self.run(variant, config)

    def _run_with_accepted_gaps(self, variant: Variant, config: Config, gaps: dict[str, int]) -> _GapRun:
        """Run a variant on inputs with gaps where host code accepts gaps.

        Host code accepts gaps if it reads an input's strides, or whether the input is contiguous, and raises nothing. If it
        refuses the gaps of an input, gaps around a further axis are tried.
        """
        while gaps:
            gapped = copy(self)  # `compare` still gets the inputs without gaps
            gapped.inputs = {**self.inputs, **_with_gaps({name: self.inputs[name] for name in gaps}, gaps)}
            with noting_layouts(gapped.inputs, host_folder(self.op)) as read:
                outputs, lines = gapped.run(variant, config)
            if not lines:
                return _GapRun(gaps, outputs, lines)
            last = next((name for name in reversed(read) if name in gaps), None)
            if lines[0].startswith(LAUNCH_FAILURE):  # the input that host code looked at last is refused
                if last is None:
                    return _GapRun({}, {}, [])
                further = gaps[last] + 1
                gaps = {name: inner_axes for name, inner_axes in gaps.items() if name != last}
                gaps |= {last: further} if 0 < further < self.inputs[last].ndim else {}
            elif gaps.keys() <= set(read):
                break
            else:
                gaps = {name: inner_axes for name, inner_axes in gaps.items() if name in read}
        if not gaps:
            return _GapRun({}, {}, [])
        outputs, lines_without = self.run(variant, config)
        where = f"with gaps between rows of {', '.join(gaps)}, which host code accepts"
        lines = [f"{where}: {line.replace(_COMPUTED, ', as in the gaps')}" for line in lines]
        return _GapRun(gaps, outputs, lines_without or lines)

    def wrong_layouts(self, variant: Variant, config: Config, known: set[str]) -> list[str]:
        """Return the layouts of inputs with which a variant is wrong, without an error: elements that lie apart, transposes.

        known: names of inputs that were judged before, which are left out; gets the names of the inputs that are judged now.
        """
        names = [name for name in _with_gaps(self.inputs) if name not in known] if host_folder(self.op) else []
        known.update(names)
        texts = {ELEMENTS: "elements within a row of {} lie apart", TRANSPOSED: "{} is a transpose, as torch.empty_like of it is"}
        wrong = dict[int, list[str]]()
        for name in names:
            for place in texts:
                if self._run_with_accepted_gaps(variant, config, {name: place}).lines:
                    wrong.setdefault(place, []).append(name)
                    break
        return [texts[place].format(", ".join(its)) for place, its in wrong.items()]

    def unasked_layouts(self, variant: Variant, config: Config) -> dict[str, str]:
        """Return a line for each input with which a variant is wrong if rows have gaps, and whose layout host code never asks.

        If host code asks no input, the operator takes contiguous inputs alone.
        """
        gapped, lines = copy(self), dict[str, str]()
        with noting_layouts(self.inputs, host_folder(self.op)) as read:
            self.run(variant, config)
        for name, matrix in _with_gaps(self.inputs).items() if read else ():
            if name in read:
                continue
            gapped.inputs = {**self.inputs, name: matrix}
            wrong = gapped.run(variant, config)[1]
            if wrong and not wrong[0].startswith(LAUNCH_FAILURE):
                asked = ", ".join(dict.fromkeys(read))
                where = f"with gaps between rows of {name}"
                lines[name] = f"wrong, without an error, {where}: host code asks only {asked} for strides"
        return lines
