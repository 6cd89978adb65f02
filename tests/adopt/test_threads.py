"""Threads that launch captured and served kernels at the same time, the launches themselves stubbed."""

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adopted import author_configs, captured, example, kernel_of, of_kernel, served, write_table
from plain_kernels import captured as captured_plain
from plain_kernels import cdiv_grid

from kerneltune.adopt import startup
from kerneltune.adopt.overview import read_capture

THREADS, LAUNCHES, SIZES = 8, 60, tuple(range(64, 96, 4))


@pytest.fixture(autouse=True)
def often_switched() -> Iterator[None]:
    """Let Python change threads every few operations."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def at_once(work: Callable[[int], object]) -> None:
    """Call work(number) in threads that begin together; raise the first error."""
    errors, together = list[BaseException](), threading.Barrier(THREADS)

    def begin(number: int) -> None:
        try:
            together.wait(timeout=60)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=800)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def sums_of_sizes(number: int) -> None:
    """Launch row_sum and scale_chosen at all sizes, each thread in an order of its own."""
    module = example()
    for step in range(LAUNCHES):
        columns = SIZES[(number + step) % len(SIZES)]
        module.row_sum[(4,)](torch.ones(4, columns), torch.empty(4), 4, columns)
        module.scale_chosen[(1, 1)](torch.ones(4, columns), torch.tensor([2]), columns, 2.0)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stub both kernels' launches, and return the list that takes the keywords of each."""
    seen: list[dict[str, Any]] = []
    for kernel in (example().row_sum, example().scale_chosen):
        monkeypatch.setattr(kernel.fn, "run", lambda *args, **kwargs: seen.append({"columns": args[0].shape[1], **kwargs}))
    return seen


def test_capture_of_threads_that_launch_at_once_counts_every_launch_of_every_class(tmp_path: Path, launched: list[Any]) -> None:
    """Under --autotune Triton's autotuner launches, which no two threads may do at once."""
    startup.capture(tmp_path)
    at_once(sums_of_sizes)
    startup.recorder().flush()
    startup.uninstall()
    capture = read_capture(tmp_path)
    assert (capture.problems, capture.notes.refused) == ([], {})
    for name in ("row_sum", "scale_chosen"):
        classes = of_kernel(capture, name)
        assert sorted(one.sizes["N"] for one in classes) == list(SIZES)
        assert sum(capture.count(one).launches for one in classes) == THREADS * LAUNCHES


@pytest.mark.parametrize("miss", ["author", "nearest", "default"])
def test_serving_threads_that_launch_at_once_gives_each_launch_the_config_of_its_row(
    tmp_path: Path, launched: list[dict[str, Any]], miss: str
) -> None:
    tuned = SIZES[::2]
    launches = of_kernel(captured(tmp_path, *((4, columns) for columns in tuned)), "row_sum")
    configs = author_configs(launches[0])
    launched.clear()
    kernels = [kernel_of([one], [configs[2 + place % 4], configs[0]]) for place, one in enumerate(launches)]
    groups = tuple(group for kernel in kernels for group in kernel.groups)
    expected = {one.sizes["N"]: kernel.groups[0].rows[0].configs[0] for one, kernel in zip(launches, kernels, strict=True)}
    write_table(tmp_path, kernel_of(launches, configs, groups=groups))
    server = served(tmp_path, miss=miss)
    at_once(sums_of_sizes)
    sums = [one for one in launched if one["grid"] == (4,) and one["columns"] in expected]
    assert len(sums) == THREADS * LAUNCHES // 2
    assert {(one["columns"], one["BLOCK"], one["num_warps"]) for one in sums} == {
        (columns, config.kwargs["BLOCK"], config.num_warps) for columns, config in expected.items()
    }
    counts = server.counters.by_name()
    both = (counts["served two_kernels.row_sum"], counts["missed two_kernels.row_sum"])
    assert both == (THREADS * LAUNCHES // 2, THREADS * LAUNCHES // 2)
    assert counts["missed two_kernels.scale_chosen"] == THREADS * LAUNCHES
    startup.uninstall()
    assert sorted(one.sizes["N"] for one in of_kernel(read_capture(tmp_path / "misses"), "row_sum")) == list(SIZES[1::2])


def test_serving_plain_kernels_in_threads_gives_each_launch_its_options(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = captured_plain(tmp_path, module, *SIZES)
    seen: list[tuple[int, Any]] = []
    kind = type(module.doubled)
    groups = []
    for place, one in enumerate(launches):
        config = replace(one.candidates[0].config, num_warps=(8, 16)[place % 2])
        groups += kernel_of([one], [config], is_plain=True, shared=()).groups
    write_table(tmp_path, kernel_of(launches, [launches[0].candidates[0].config], is_plain=True, shared=(), groups=tuple(groups)))
    monkeypatch.setattr(kind, "run", lambda _kernel, *args, **kwargs: seen.append((args[2], kwargs.get("num_warps"))))
    server = served(tmp_path, misses=None)

    def work(number: int) -> None:
        for step in range(LAUNCHES):
            size = SIZES[(number + step) % len(SIZES)]
            x = torch.ones(size)
            module.doubled[cdiv_grid(size)](x, x.clone(), size, 2.0, BLOCK=32)

    at_once(work)
    assert set(seen) == {(size, (8, 16)[place % 2]) for place, size in enumerate(SIZES)}
    assert len(seen) == THREADS * LAUNCHES
    assert server.counters.by_name()["served of_plain_kernels.doubled"] == THREADS * LAUNCHES
