"""Fixtures for tests of kernels: `kernel_check` against a reference, `kernel_time` against another kernel.

pytest imports this module in every run of an environment that has kerneltune: torch and triton are imported by the fixtures.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any

import pytest

from kerneltune import device
from kerneltune.errors import first_line

if TYPE_CHECKING:
    from kerneltune.measuring.rounds import Contender, Policy
    from kerneltune.spec import Case, Inputs, Op, Outputs
    from kerneltune.stats import Interval, Samples

_FLOOR_US = 0.5
"""Difference below which no kernel counts as slower, because launches differ by as much."""


class KernelTime:
    """Hold the time of a call in µs; a comparison with another kernel time, or with a number, measures in interleaved rounds.

    `a <= 1.02 * b` is false only if a is surely slower than 1.02 b: by the 95 % interval of the ratio, by the noise floor of a
    against itself, and by 0.5 µs. `a < b` is true only if a is surely faster than b.
    """

    def __init__(
        self, run: Callable[..., Any], args: Sequence[Any], note: Callable[[str, object], None], factor: float = 1.0
    ) -> None:
        self.run, self.args, self.factor, self._note = run, args, factor, note
        self.samples: Samples | None = None

    @property
    def name(self) -> str:
        """Return the name of the callable."""
        return str(getattr(self.run, "__name__", None) or type(self.run).__name__)

    def __rmul__(self, factor: float) -> "KernelTime":
        return KernelTime(self.run, self.args, self._note, factor * self.factor)

    __mul__ = __rmul__

    def __le__(self, other: "KernelTime | float") -> bool:
        ratio, floor, change_us = self._against(other)
        return ratio.low <= 1 + floor or change_us <= _FLOOR_US

    def __lt__(self, other: "KernelTime | float") -> bool:
        ratio, floor, _change_us = self._against(other)
        return ratio.high < 1 - floor

    def __bool__(self) -> bool:
        raise TypeError(f"{self.name}: a time alone is neither true nor false: expected a comparison with a limit")

    def __repr__(self) -> str:
        if self.samples is None:
            return f"{self.name}: not measured"
        import numpy as np

        factor = "" if self.factor == 1 else f"{self.factor:g} x "
        return f"{factor}{self.name}: {float(np.median(self.samples)):.2f} µs"

    def _against(self, other: "KernelTime | float") -> "tuple[Interval, float, float]":
        """Return the ratio to the limit with its interval, the noise floor as a fraction, and the excess over the limit in µs."""
        import numpy as np

        from kerneltune.measuring.compare import SELF, noise_floor
        from kerneltune.stats import ratio_interval

        sides = [self, other] if isinstance(other, KernelTime) else [self]
        times = measure([(side.name, side.run, side.args) for side in sides])
        self.samples = times[0]
        if isinstance(other, KernelTime):
            other.samples, limit = times[1], other.factor * times[1]
        else:
            limit = np.full_like(times[0], float(other))
        ratio = ratio_interval(self.factor * times[0], limit)
        floor = noise_floor({"first": times[0], SELF: times[-1]}) or 0.0
        for side, samples in zip(sides, times, strict=False):
            self._note(f"time of {side.name} in µs", round(float(np.median(samples)), 3))
        self._note(f"{self.name} to its limit", f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}], floor {floor:.3f}")
        return ratio, floor, float(np.median(self.factor * times[0]) - np.median(limit))


def measure(sides: "Sequence[tuple[str, Callable[..., Any], Sequence[Any]]]") -> "list[Samples]":
    """Time callables in interleaved rounds, the first of them twice: its second samples come last.

    The L2 is cold, unless the inputs are so small that it cannot be. If a side waits for the GPU, which no CUDA graph can hold,
    all sides are timed launch by launch, with a warning.
    """
    import torch

    from kerneltune.checking.memory import gpu_free_bytes
    from kerneltune.measuring.rounds import POLICIES, interleave, num_input_sets, throttled

    values = [named_values(args).values() for _name, _run, args in sides]
    num_bytes = [sum(value.nbytes for value in each if isinstance(value, torch.Tensor)) for each in values]
    try:
        counts = [num_input_sets(POLICIES["cold"], used, device.current().l2_bytes, gpu_free_bytes()) for used in num_bytes]
        policy = POLICIES["cold"]
    except ValueError:  # inputs so small that no number of copies fills the L2
        counts, policy = [1] * len(sides), POLICIES["hot"]
    try:
        contenders = _contenders(sides, counts, policy)
    except RuntimeError as error:  # a callable that no CUDA graph can hold, or that fails in any case
        contenders = _contenders(sides, counts, POLICIES["eager"])
        warnings.warn(f"kernel_time: all sides are timed launch by launch: {error}", stacklevel=2)
    return list(interleave(contenders, throttled=throttled).values())


def _contenders(
    sides: "Sequence[tuple[str, Callable[..., Any], Sequence[Any]]]", counts: Sequence[int], policy: "Policy"
) -> "dict[str, Contender]":
    """Return each callable on copies of its arguments, the first of them again at the end; fail the test if one fails.

    Raises:
        RuntimeError: no CUDA graph can hold the calls of one, which a policy with a graph needs.
    """
    from kerneltune.measuring.rounds import Contender

    contenders = {}
    for number, ((name, run, args), count) in enumerate(zip((*sides, sides[0]), (*counts, counts[0]), strict=True)):
        try:
            sets = [rebuilt(args, lambda _name, value: copied(value)) for _ in range(count)]
            contenders[str(number)] = Contender(partial(_call, run, sets), count, policy)
        except Exception as error:  # a callable may fail in any way
            reason = f"{name}: cannot be timed: {first_line(error)}"
            if policy.graph:
                raise RuntimeError(reason) from error
            pytest.fail(f"kernel_time: {reason}", pytrace=False)
    return contenders


def _call(run: Callable[..., Any], sets: Sequence[Sequence[Any]], number: int) -> Any:
    return run(*sets[number])


@pytest.fixture
def kernel_time(request: pytest.FixtureRequest) -> Callable[[Callable[..., Any], Sequence[Any]], KernelTime]:
    """Return a function that makes the `KernelTime` of a call, for comparisons in assertions; skip the test without a GPU."""
    if not device.current().is_gpu:
        pytest.skip("kernel_time needs a GPU: times of the interpreter mean nothing")

    def note(name: str, value: object) -> None:
        request.node.user_properties.append((name, value))

    def timed(run: Callable[..., Any], args: Sequence[Any]) -> KernelTime:
        require_call("kernel_time", run, args)
        return KernelTime(run, args, note)

    return timed


def require_call(fixture: str, run: object, args: object) -> None:
    """Fail the test, in the name of a fixture, unless `run` is a function and `args` a list."""
    if not callable(run):
        pytest.fail(f"{fixture}: {run!r}: expected a function", pytrace=False)
    if not isinstance(args, tuple | list):
        pytest.fail(f"{fixture}: {type(args).__name__}: expected a list of arguments", pytrace=False)


@pytest.fixture
def kernel_check() -> Callable[..., None]:
    """Check a callable against a reference, as a sweep does: `kernel_check(mine, reference, args, rtol=1e-2)`."""
    if not device.has_gpu() and not device.wants_interpreter():
        pytest.skip("kernel_check needs a GPU, or TRITON_INTERPRET=1 before triton is imported")
    return _check


def _check(
    run: Callable[..., Any], reference: Callable[..., Any], args: Sequence[Any], *, rtol: float = 1e-5, atol: float = 0.0
) -> None:
    """Fail the test if outputs on poisoned memory disagree with the reference, or if an input is overwritten and is no output.

    A second run has half of each value, so that a result or a buffer kept from the first run is found. Tensors in lists, tuples
    and dicts are arguments as well.
    """
    require_call("kernel_check", run, args)
    require_call("kernel_check", reference, args)
    name = str(getattr(run, "__name__", "kernel"))
    if run is reference:
        pytest.fail(f"kernel_check: {name}: compared with itself: expected another function as reference", pytrace=False)
    reason = _why_not_checked(args, rtol, atol) or _mistake(_operator(name, run, reference, args, rtol, atol))
    if reason:
        pytest.fail(f"kernel_check: {name}: {reason}", pytrace=False)


def _why_not_checked(args: Sequence[Any], rtol: float, atol: float) -> str:
    """Return why arguments or a tolerance cannot be used; empty if they can."""
    import torch

    from kerneltune.kernel_lib.agreement import check_tolerance

    try:
        check_tolerance(rtol, atol)
    except ValueError as error:
        return str(error)
    for name, value in named_values(args).items():
        if isinstance(value, torch.Tensor) and (value.is_meta or value.layout is not torch.strided):
            return f"{name}: {value.layout} on {value.device}: expected a dense tensor with values"
    return ""


def _operator(
    name: str, run: Callable[..., Any], reference: Callable[..., Any], args: Sequence[Any], rtol: float, atol: float
) -> "Op":
    """Make the operator whose only variant calls a function on these arguments; its second inputs have half of each value."""
    from kerneltune.kernel_lib.agreement import close
    from kerneltune.source_modules import unwrapped
    from kerneltune.spec import Op, Traffic, Variant

    named = named_values(args)

    def compare(_case: "Case", _inputs: "Inputs", got: "Outputs", want: "Outputs") -> list[str]:
        if not want or got.keys() != want.keys():
            return [f"outputs: {', '.join(got) or 'none'}: expected {', '.join(want) or 'one, the reference gives none'}"]
        return [line for output in want for line in close(output, got[output], want[output], rtol, atol)]

    def call(function: Callable[..., Any], inputs: "Inputs") -> "Outputs":
        return _named(function(*rebuilt(args, lambda argument, _value: inputs[argument])))

    return Op(
        name=name, axes=(), dtypes=("any",), compare=compare,
        variants=(Variant("kernel", lambda inputs, _config: call(run, inputs)),),
        module=str(getattr(unwrapped(run), "__module__", "")),
        inputs=lambda _case, seed=0, **_: {name: copied(value, 0.5) if seed else value for name, value in named.items()},
        reference=update_wrapper(lambda inputs: call(reference, inputs), reference),
        traffic=lambda _case: Traffic(0, 0),
    )  # fmt: skip


def _mistake(op: "Op") -> str:
    """Return the mistake that two runs of an operator's only variant show; empty if there is none."""
    from kerneltune.checking.check import Checker
    from kerneltune.spec import Case
    from kerneltune.task import CaseError

    case = Case("kernel_check", (), "any")
    try:
        outcome = Checker.make(op, case, keeps_all=True).check(op.variants[0], None, runs=2)
    except CaseError as error:
        outcome = error.outcome
    return "" if outcome.status == "checked" else outcome.reason.removesuffix(f", for {op.name} {case.label}")


def rebuilt(args: Sequence[Any], change: Callable[[str, Any], Any]) -> list[Any]:
    """Return arguments with `change(name, value)` in place of each value, also within lists, tuples and dicts.

    A name is the way to the value: `argument 0['x'][1]`.
    """
    from torch.utils._pytree import keystr, tree_map_with_path

    def changed(path: Any, value: Any) -> Any:
        return change(f"argument {path[0].idx}{keystr(path[1:])}", value)

    return list(tree_map_with_path(changed, list(args)))


def named_values(args: Sequence[Any]) -> dict[str, Any]:
    """Return the values of arguments by name, as `rebuilt` names them."""
    values: dict[str, Any] = {}
    rebuilt(args, values.__setitem__)
    return values


def copied(value: Any, factor: float = 1.0) -> Any:
    """Return a copy of a dense tensor with the same strides, of real numbers times a factor; return everything else as it is."""
    import torch

    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.numel():
        return value
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    memory = value.detach().as_strided((extent,), (1,)).clone()
    if factor != 1.0 and value.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        memory.mul_(factor)
    return memory.as_strided(value.shape, value.stride()).requires_grad_(value.requires_grad)


def _named(outputs: Any) -> dict[str, Any]:
    """Return outputs by name: a dict as it is, the values of a tuple or list by number, another value as `output`."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    return {f"output {n}": value for n, value in enumerate(outputs)} if isinstance(outputs, tuple | list) else {"output": outputs}
