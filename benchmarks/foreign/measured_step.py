"""Run the step of a program several times, save its results and print its times; imports no kerneltune.

The environment sets: SMALL=1 takes sizes for Triton's interpreter, FOREIGN_OUT names the file of the results.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner

SMALL = os.environ.get("SMALL") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 1 if SMALL else 12
WARM_UP = 0 if SMALL else 3
BF16 = torch.bfloat16
_timings = 0


def _counted(bench: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Autotuner._bench` that counts its calls."""

    def run(*args: Any, **kwargs: Any) -> Any:
        global _timings
        _timings += 1
        return bench(*args, **kwargs)

    return run


Autotuner._bench = _counted(Autotuner._bench)


def sized(full: int, small: int) -> int:
    """Return a size, or the size for the interpreter."""
    return small if SMALL else full


def leaf(*sizes: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return random values of a fixed seed that want a gradient."""
    torch.manual_seed(sum(sizes))
    return (torch.randn(*sizes, device=DEVICE) * scale).to(dtype).requires_grad_()


def trained(output: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return an output and the gradients of inputs for a fixed gradient of the output."""
    torch.manual_seed(1)
    gradient = torch.randn(output.shape, device=output.device).to(output.dtype)
    return [output, *torch.autograd.grad(output, inputs, gradient)]


def _tensors(results: Any) -> Iterator[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        yield results.detach()
    elif isinstance(results, Iterable):
        for part in results:
            yield from _tensors(part)


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(step: Callable[[], Any], warm_up: int = WARM_UP, steps: int = STEPS) -> float:
    """Return the median of the milliseconds of steps, the host's time included."""
    for _ in range(warm_up):
        step()
    wait()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        wait()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def gpu_milliseconds(step: Callable[[], Any]) -> list[float]:
    """Return the milliseconds of the kernels and copies of each of some steps, by the profiler. Without a GPU: none."""
    times = []
    for _ in range(STEPS if torch.cuda.is_available() else 0):
        with torch.profiler.profile() as profiled:
            step()
            wait()
        on_gpu = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        times.append(round(1e-3 * sum(event.time_range.elapsed_us() for event in on_gpu), 4))
    return times


def run(step: Callable[[], Any]) -> None:
    """Save the results of the first step, time further steps, and print the time and the count of timed configs as JSON."""
    results = [tensor.float().cpu() for tensor in _tensors(step())]
    if path := os.environ.get("FOREIGN_OUT"):
        torch.save(results, path)
    finite = all(bool(result.isfinite().all()) for result in results)
    found = {"step_ms": milliseconds(step), "gpu_ms": gpu_milliseconds(step)}
    print(json.dumps(found | {"timings": _timings, "results": len(results), "finite": finite}), flush=True)
