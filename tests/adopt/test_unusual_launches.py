"""Uncommon launches of libraries: addresses as integers, launches that fail, kernels launched in two ways."""

import linecache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from adopted import kernel_of, write_table
from plain_kernels import captured as captured_plain
from plain_kernels import cdiv_grid

from kerneltune.adopt import program, startup
from kerneltune.adopt.arguments import describe
from kerneltune.adopt.overview import Capture, read_capture
from kerneltune.adopt.tuning import forecast
from kerneltune.adopt.values import collect, holds_addresses


@triton.jit
def of_address(address, out, n, BLOCK: tl.constexpr):
    """Copy n floats from an address."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + places, tl.load(address.to(tl.pointer_type(tl.float32)) + places, mask=places < n), mask=places < n)


@triton.jit
def of_records(records, out, n, BLOCK: tl.constexpr):
    """Copy floats from the address of a record, which has their number, too."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < tl.load(records + 1)
    tl.store(out + places, tl.load(tl.load(records).to(tl.pointer_type(tl.float32)) + places, mask=mask), mask=mask)


@triton.jit
def of_number(number, out, n, BLOCK: tl.constexpr):
    """Write an integer n times."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + places, number, mask=places < n)


@triton.jit
def doubled(x, out, n, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """Double x (n,); refuse a large limit."""
    tl.static_assert(LIMIT < 5)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + places, 2 * tl.load(x + places, mask=places < n), mask=places < n)


tuned = triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64}, num_warps=2)], ["n"])(doubled)


def captured(folder: Path, kernel: Any, *args: Any) -> Capture:
    """Capture a launch of a kernel without an autotuner."""
    startup.capture(folder, plain=True)
    kernel[cdiv_grid(40)](*args, BLOCK=32)
    startup.recorder().flush()
    startup.uninstall()
    return read_capture(folder)


@pytest.mark.parametrize("kernel", [of_address, of_records], ids=["number", "records"])
def test_capture_of_an_address_that_the_kernel_makes_a_pointer_of_names_the_argument(tmp_path: Path, kernel: Any) -> None:
    x, out = torch.arange(40.0), torch.empty(40)
    first = x.data_ptr() if kernel is of_address else torch.tensor([x.data_ptr(), 40])
    (tmp_path / "classes").mkdir()
    capture = captured(tmp_path, kernel, first, out, 40)
    assert torch.equal(x, out)
    (name,) = kernel.arg_names[:1]
    reason = f"not captured: {name} holds addresses, which mean nothing in another process"
    assert (list(capture.notes.refused.values()), capture.classes, capture.plain()) == ([reason], [], [])


@pytest.mark.parametrize("in_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize(("start", "kept"), [(1 << 40, 0), (1 << 41, 1)], ids=["inside", "outside"])
def test_capture_of_a_whole_number_refuses_an_address_that_torch_has_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, kept: int, in_tensor: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"address": start, "total_size": 2 << 20}])
    monkeypatch.setattr(program, "is_capturing", lambda: False)
    (tmp_path / "classes").mkdir()
    out = torch.zeros(40, dtype=torch.int64)
    number, out[0] = (1, (1 << 40) + 512) if in_tensor else ((1 << 40) + 512, 0)
    capture = captured(tmp_path, of_number, number, out, 40)
    assert (len(capture.classes), len(capture.notes.refused)) == (kept, 1 - kept)


@pytest.mark.parametrize("sample_bytes", [0, 64 << 20])
def test_large_table_of_addresses_is_found_without_its_values(sample_bytes: int) -> None:
    described, storages = describe(["first"], [torch.full((1 << 18,), 1 << 46)], {})
    values = collect(described, storages, 64 << 20, sample_bytes)
    assert values.kept[0].kept == ("sample" if sample_bytes else "statistics")
    assert holds_addresses(of_records.fn, described, values) == "first"
    assert holds_addresses(doubled.fn, described, values) == ""


def test_forecast_of_a_class_whose_launches_all_failed_gives_the_reason(tmp_path: Path) -> None:
    x, out = torch.ones(40), torch.empty(40)
    startup.capture(tmp_path, plain=True)
    with pytest.raises(Exception, match=r"(?i)assert"):  # each version of Triton raises its own type
        doubled[cdiv_grid(40)](x, out, 40, LIMIT=9, BLOCK=32)
    doubled[cdiv_grid(40)](x, out, 40, LIMIT=3, BLOCK=32)
    startup.recorder().flush()
    startup.uninstall()
    (reason,) = read_capture(tmp_path).notes.refused.values()
    assert reason.startswith("a launch failed: ")
    work = forecast(tmp_path, 1.0, None)
    assert (work.num_classes, [text for _, text in work.skipped]) == (1, ["each of its launches failed in the program"])


def test_kernel_launched_with_and_without_its_autotuner_is_served_in_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, out, warps = torch.ones(40), torch.empty(40), list[Any]()

    def launch() -> None:
        tuned[cdiv_grid(40)](x, out, 40, LIMIT=3)
        doubled[cdiv_grid(40)](x, out, 40, LIMIT=3, BLOCK=32)

    startup.capture(tmp_path, plain=True)
    launch()
    startup.recorder().flush()
    startup.uninstall()
    capture = read_capture(tmp_path)
    (by_autotuner,), (plain,) = ([one for one in capture.classes if one.is_plain is is_plain] for is_plain in (False, True))
    assert [capture.count(one).launches for one in (by_autotuner, plain)] == [1, 1]
    assert capture.plain() == []
    chosen = next(one.config for one in plain.candidates if one.config.num_warps == 8)
    first = by_autotuner.candidates[0].config  # with the options of the plain launch
    write_table(tmp_path, kernel_of([by_autotuner], [first]), kernel_of([plain], [chosen], is_plain=True, shared=()))
    original = triton.runtime.interpreter.InterpretedFunction.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        warps.append(kwargs.get("num_warps"))
        return original(kernel, *args, **kwargs)

    monkeypatch.setattr(triton.runtime.interpreter.InterpretedFunction, "run", run)
    startup.install(tmp_path, misses=None, miss="error")
    launch()
    assert warps == [4, 8]
    counts = startup.server().counters.by_name()
    assert (counts["served test_unusual_launches.doubled"], counts["missed test_unusual_launches.doubled"]) == (2, 0)


class Wrapper:
    """Hold a kernel by an attribute that this package does not know."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel


again = Wrapper(triton.jit(of_number.fn))


def test_capture_of_a_second_object_of_a_kernel_finds_the_kernel_by_its_name(tmp_path: Path) -> None:
    (launch,) = captured(tmp_path, again.kernel, 7, torch.empty(40), 40).classes
    assert (launch.home, launch.problem) == (launch.kernel, "")


def test_capture_of_a_kernel_that_only_a_wrapper_holds_says_that_no_module_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(globals(), "of_number")
    (launch,) = captured(tmp_path, again.kernel, 7, torch.empty(40), 40).classes
    assert launch.problem == "no module holds the kernel by a name, so that it cannot be imported"


@pytest.mark.parametrize("is_served", [False, True], ids=["captured", "served"])
def test_launch_that_gives_what_its_configs_give_fails_as_without_this_package(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_served: bool
) -> None:
    x, out = torch.ones(40), torch.empty(40)
    startup.capture(tmp_path)
    if is_served:
        tuned[cdiv_grid(40)](x, out, 40, LIMIT=3)
        startup.uninstall()
        (launch,) = read_capture(tmp_path).classes
        write_table(tmp_path, kernel_of([launch], [one.config for one in launch.candidates]))
        startup.install(tmp_path, misses=None, miss="default")
    with pytest.raises(ValueError, match=r"Conflicting meta-parameters: BLOCK"):
        tuned[cdiv_grid(40)](x, out, 40, LIMIT=3, BLOCK=32)
    line = "not captured: the launch gives BLOCK, which its configs give, too: triton.autotune refuses that"
    assert caplog.text.count(line) == (not is_served)


MADE_BY_EXEC = """
import triton
import triton.language as tl
@triton.jit
def made(x, out, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + places, tl.load(x + places, mask=places < n), mask=places < n)
"""


def test_kernel_that_exec_makes_in_a_dict_is_named_when_captured_and_runs_when_served(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(linecache.cache, "<made>", (len(MADE_BY_EXEC), None, MADE_BY_EXEC.splitlines(True), "<made>"))
    values: dict[str, Any] = {}
    exec(compile(MADE_BY_EXEC, "<made>", "exec"), values)
    (launch,) = captured_plain(tmp_path / "tuned", module, 40)
    write_table(tmp_path / "tuned", kernel_of([launch], [launch.candidates[1].config], is_plain=True, shared=()))
    x, out = torch.ones(40), torch.empty(40)
    capture = captured(tmp_path, values["made"], x, out, 40)
    (reason,) = capture.notes.refused.values()
    assert reason.startswith("cannot be tuned: exec or a notebook cell defined the kernel")
    startup.install(tmp_path / "tuned", misses=None)
    out.zero_()
    values["made"][cdiv_grid(40)](x, out, 40, BLOCK=32)
    assert torch.equal(x, out)
