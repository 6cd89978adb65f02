"""Run kernels of Liger, flash-linear-attention and torchao under the checks of the interpreter; each alarm is printed.

    pip install --no-deps --target FOLDER liger-kernel flash-linear-attention fla-core torchao einops
    TRITON_INTERPRET=1 PYTHONPATH=FOLDER python benchmarks/foreign_kernels.py [NAME ...]

A call runs with strict accesses, garbage for masked elements and poisoned memory, then in the plain interpreter. An alarm is a
fault, or a result that differs. docs/notes/checks.md lists the alarms and whose mistake each is.
"""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import torch
import torch.utils._triton
import triton
from triton.runtime import autotuner, interpreter

from kerneltune.checking.check import poisoned_memory
from kerneltune.errors import first_line
from kerneltune.interpreter.faults import fault_of
from kerneltune.interpreter.modes import corrected, strict

LAUNCHED: set[str] = set()
CALLS: dict[str, Callable[[], Any]] = {}


def of_first_config() -> None:
    """Let autotuners launch their first config, and note the name of each launched kernel."""
    init, call = autotuner.Autotuner.__init__, interpreter.GridExecutor.__call__

    def with_first(self: Any, fn: Any, names: Any, configs: Any, *rest: Any, **named: Any) -> None:
        init(self, fn, names, configs[:1], *rest, **named)

    def noted(self: Any, *args: Any, **named: Any) -> Any:
        LAUNCHED.add(f"{self.fn.__module__.partition('.')[0]}:{self.fn.__name__}")
        return call(self, *args, **named)

    autotuner.Autotuner.__init__ = with_first
    interpreter.GridExecutor.__call__ = noted


def on_cpu() -> None:
    """Let host code that asks for a GPU find an H100 of 4 SMs, so that launches without a GPU are small."""

    class Properties:
        multi_processor_count, name, major, minor, warp_size, total_memory = 4, "NVIDIA H100", 9, 0, 32, 80 << 30
        shared_memory_per_multiprocessor, max_shared_mem = 233472, 232448

    def answer(value: Any) -> Any:
        return lambda *_a, **_k: value

    torch.cuda.get_device_properties = answer(Properties)
    torch.cuda.get_device_capability = answer((9, 0))
    torch.cuda.get_device_name = answer("NVIDIA H100")
    torch.cuda.current_device = answer(0)
    torch.cuda.device = answer(contextlib.nullcontext())  # type: ignore[misc]
    torch.utils._triton.has_triton = answer(True)
    torch.cuda.synchronize = answer(None)


def case(make: Callable[[], Any]) -> Callable[[], Any]:
    """Register a call by the name of its function."""
    CALLS[make.__name__] = make
    return make


def rand(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    """Return normal values of a fixed seed."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    return values.requires_grad_(grad and dtype.is_floating_point)


def with_grad(output: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return an output and the gradients of inputs."""
    first = output[0] if isinstance(output, tuple) else output
    gradient = torch.randn(first.shape, generator=torch.Generator().manual_seed(1)).to(first.dtype)
    return [first.detach(), *torch.autograd.grad(first, inputs, gradient, allow_unused=True)]


def flattened(result: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a result."""
    if isinstance(result, torch.Tensor):
        yield result.detach()
    elif isinstance(result, list | tuple):
        for part in result:
            yield from flattened(part)


def alarm_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Return `ok`, `alarm` or `not run`, and the reason. The strict run is first: a store out of bounds breaks the process."""
    try:
        with poisoned_memory(), strict():
            checked = list(flattened(call()))
    except Exception as error:  # code of other packages raises what it likes
        fault = fault_of(error)
        return ("alarm", str(fault)) if fault else ("not run", first_line(error))
    with corrected():
        plain = list(flattened(call()))
    for number, (a, b) in enumerate(zip(plain, checked, strict=True)):
        if wrong := int((~torch.isclose(a.float(), b.float(), rtol=1e-3, atol=1e-4, equal_nan=True)).sum()):
            return "alarm", f"output {number} of shape {tuple(a.shape)}: {wrong} elements depend on undefined values"
    return ("ok", "") if plain else ("not run", "no result")


def main() -> None:
    """Run the calls that are named, or all, and count the kernels."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    on_cpu()
    of_first_config()
    with corrected():  # imports take libdevice from here
        import foreign_calls  # noqa: F401

    wanted = sys.argv[1:] or list(CALLS)
    checked: set[str] = set()
    counts = {"ok": 0, "alarm": 0, "not run": 0}
    for name in wanted:
        LAUNCHED.clear()
        begin = time.monotonic()
        verdict, reason = alarm_of(CALLS[name])
        counts[verdict] += 1
        if verdict != "not run":
            checked |= LAUNCHED
        print(f"{verdict:8} {name:34} {time.monotonic() - begin:5.1f} s  {len(LAUNCHED)} kernels  {reason}", flush=True)
    by_package = {p: sum(k.startswith(p) for k in checked) for p in ("liger_kernel", "fla", "torchao")}
    print(f"triton {triton.__version__}: {counts}, {len(checked)} kernels: {by_package}")


if __name__ == "__main__":
    sys.modules["foreign_kernels"] = sys.modules["__main__"]
    main()
