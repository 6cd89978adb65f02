"""Blocks of kernels without an autotuner: tuned where neither host nor result depends on them, kept elsewhere."""

import functools
import math
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch
import triton
import triton.runtime.interpreter
from fake_operator import Pool
from plain_kernels import SOURCE, captured, captured_call, cdiv_grid
from test_capture_tuning import GPU, SizedBench

from kerneltune import cache
from kerneltune.adopt import program, startup, tuning
from kerneltune.adopt.folder import CLASSES, read_blocks
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.replay import make_replay
from kerneltune.adopt.table import read_table
from kerneltune.adopt.tuning import tune_capture
from kerneltune.checking.check import Checker
from kerneltune.measuring.compiler import CompileResult
from kerneltune.progress import Progress
from kerneltune.task import Outcome, Task


class CheckedBench(SizedBench):
    """Times blocks of one size as the fastest, and checks in the interpreter."""

    fastest = 64

    def time_us(self, task: Task, config: Any) -> float:
        """Return a time longer by 1 µs for each doubling away from the fastest block."""
        return 10.0 + abs(math.log2(config.BLOCK / self.fastest)) + 0.1 * config.num_warps

    def check(self, task: Task, config: Any) -> Outcome:
        """Launch the config on the CPU."""
        return Checker(task.op, task.case, "cpu").check(task.variant, config)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a GPU whose checks run in the interpreter."""
    with fake_gpu.stands_in(monkeypatch):
        monkeypatch.setattr("kerneltune.tune.session.GpuWorker", CheckedBench)
        monkeypatch.setattr(tuning, "GpuWorker", CheckedBench)
        monkeypatch.setattr(program, "device_slug", lambda *_: GPU)
        yield


def chosen_block(folder: Path) -> int:
    table = read_table(folder, GPU)
    assert table is not None
    kwargs = table.kernels[0].groups[0].rows[0].configs[0].kwargs
    assert list(kwargs) == ["BLOCK"]
    return int(kwargs["BLOCK"])


def test_tune_of_a_block_that_only_the_grid_reads_serves_another_grid(
    tmp_path: Path, module: Any, checked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, grids = tmp_path / "cap", []
    captured(folder, module, 96)
    assert tune_capture(folder, Progress()).skipped == []
    assert list(read_blocks(folder).values()) == [{"BLOCK": ""}]
    table = read_table(folder, GPU)
    assert table is not None
    (row,) = table.kernels[0].groups[0].rows
    assert (row.configs[0].kwargs, row.evidence["grid"]) == ({"BLOCK": 64}, [2])
    startup.install(folder, misses=None)

    def grid(meta: Any) -> tuple[int]:
        grids.append(meta["BLOCK"])
        return (triton.cdiv(96, meta["BLOCK"]),)

    x, y = torch.arange(96.0), torch.empty(96)
    module.doubled[grid](x, y, 96, 2.0, BLOCK=32)
    module.doubled[(3,)](x, y, 96, 2.0, BLOCK=32)  # numbers do not follow the block
    module.doubled[lambda _: (3,)](x, y, 96, 2.0, BLOCK=32)
    assert grids[-1] == 64
    assert y.tolist() == [2.0 * n for n in range(96)]
    assert startup.server().counters.by_name() == {
        "served of_plain_kernels.doubled": 1, "missed of_plain_kernels.doubled": 2,
    }  # fmt: skip


def test_tune_of_a_block_by_which_a_loop_steps_serves_it_to_grids_of_numbers(tmp_path: Path, module: Any, checked: None) -> None:
    """The program's number of programs does not depend on the block."""
    folder, x, y = tmp_path / "cap", torch.arange(192.0), torch.empty(192)
    captured_call(folder, lambda: module.stepped[(2,)](x, y, 96, BLOCK=16))
    tune_capture(folder, Progress())
    assert list(read_blocks(folder).values()) == [{"BLOCK": ""}]
    assert chosen_block(folder) == 64
    startup.install(folder, misses=None)
    module.stepped[(2,)](x, y, 96, BLOCK=16)
    assert torch.equal(y, 2 * x)
    module.stepped[(1,)](x, y.zero_(), 96, BLOCK=16)  # each program finishes its own row
    assert y.tolist() == [2.0 * n for n in range(96)] + [0.0] * 96
    counts = {"served of_plain_kernels.stepped": 2, "missed of_plain_kernels.stepped": 0}
    assert startup.server().counters.by_name() == counts


@pytest.mark.parametrize("name", ["strided", "shared"])
def test_capture_keeps_a_block_that_divides_the_work_among_a_number_of_programs(tmp_path: Path, module: Any, name: str) -> None:
    x, y = torch.arange(96.0), torch.empty(96)
    launch = captured_call(tmp_path, lambda: getattr(module, name)[(3,)](x, y, 96, BLOCK=32))
    assert {tuple(one.config.kwargs) for one in launch.candidates} == {()}


def test_tune_compiles_both_other_values_of_a_block_before_it_launches_one(
    tmp_path: Path, module: Any, checked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that the compiler refuses is not launched."""
    folder, seen = tmp_path / "cap", list[tuple[str, int]]()
    captured(folder, module, 96)

    def submit(pool: Pool, job: Any) -> Future[CompileResult]:
        seen.append(("compiled", job.config.BLOCK))
        return pool.done(CompileResult((), "no such block" * (job.config.BLOCK == 64)))

    def check(bench: CheckedBench, task: Task, config: Any) -> Outcome:
        seen.append(("launched", config.BLOCK))
        return Outcome("checked")

    monkeypatch.setattr(Pool, "submit", submit)
    monkeypatch.setattr(CheckedBench, "check", check)
    tune_capture(folder, Progress())
    (verdict,) = read_blocks(folder).values()
    assert verdict == {"BLOCK": "BLOCK=64: no such block"}
    assert seen[:2] == [("compiled", 64), ("compiled", 16)]
    assert ("launched", 64) not in seen


def test_blocks_that_half_of_the_budget_does_not_reach_are_tuned_by_the_next_command(
    tmp_path: Path, module: Any, checked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = tmp_path / "cap", []
    captured(folder, module, 96)

    def submit(pool: Pool, job: Any) -> Future[CompileResult]:
        asked.append(job.config.BLOCK)
        return Future() if len(asked) <= 2 else pool.done()  # the other values of the block compile for ever

    with monkeypatch.context() as slow:
        slow.setattr(Pool, "submit", submit)
        tune_capture(folder, Progress(), budget_s=0.2)
    assert asked[:2] == [64, 16]
    assert read_blocks(folder) == {}
    assert chosen_block(folder) == 32
    with monkeypatch.context() as ended:
        ended.setattr(tuning, "search_tasks", lambda *_: {})  # the budget ends once the blocks are tried
        tune_capture(folder, Progress())
    assert (list(read_blocks(folder).values()), chosen_block(folder)) == ([{"BLOCK": ""}], 32)
    tune_capture(folder, Progress())
    assert chosen_block(folder) == 64, "the class is searched again"


def test_tune_of_a_new_capture_searches_each_class_once(
    tmp_path: Path, module: Any, checked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched, search = [], tuning.search_tasks

    def counted(*arguments: Any) -> None:
        searched.append(len(arguments[3]))
        search(*arguments)

    monkeypatch.setattr(tuning, "search_tasks", counted)
    captured(tmp_path / "cap", module, 96)
    tune_capture(tmp_path / "cap", Progress())
    assert searched == [1]
    (file,) = (tmp_path / "cap" / "configs").glob("*/*.json")
    file.write_text(re.sub('"trials": ?[0-9]*', '"trials": 2', file.read_text()))  # as of a search that ends early
    cache.clear()
    tune_capture(tmp_path / "cap", Progress())
    assert searched == [1, 1], "the second command asks for classes without a config alone"


@pytest.mark.parametrize(("name", "length"), [("padded", 96), ("partial", 3), ("named", 96)])
def test_tune_never_changes_a_block_that_host_or_result_depends_on(
    tmp_path: Path, module: Any, checked: None, name: str, length: int
) -> None:
    folder, x = tmp_path / "cap", torch.arange(96.0)
    launch = captured_call(folder, lambda: getattr(module, name)[cdiv_grid(96)](x, torch.empty(length), 96, BLOCK=32))
    assert {one.config.kwargs["BLOCK"] for one in launch.candidates} > {16, 32, 64}
    tune_capture(folder, Progress())
    (verdict,) = read_blocks(folder).values()
    assert verdict["BLOCK"].startswith("BLOCK=64: ")
    (launch,) = read_capture(folder).classes
    assert {one.config.kwargs["BLOCK"] for one in launch.candidates if one.grid is not None} == {32}
    assert chosen_block(folder) == 32


def test_capture_of_a_grid_that_writes_its_arguments_is_that_of_the_launch(tmp_path: Path, module: Any) -> None:
    """A grid of vLLM's causal_conv1d_fn lists its blocks in a tensor, and resizes the tensor if there are more."""
    blocks, x, y = torch.zeros(3, dtype=torch.int32), torch.arange(96.0), torch.empty(96)

    def grid(meta: Any) -> tuple[int]:
        count = triton.cdiv(96, meta["BLOCK"])
        if blocks.numel() < count:
            blocks.resize_(count)
        blocks[:count] = torch.arange(count, dtype=torch.int32).flip(0)
        return (count,)

    launch = captured_call(tmp_path, lambda: module.listed[grid](x, blocks, y, 96, BLOCK=32))
    assert y.tolist() == x.tolist()
    assert launch.key_values == ["torch.float32[96]", "torch.int32[3]", "torch.float32[96]", 96, 32]
    replay = make_replay(launch, tmp_path / CLASSES / launch.digest, "cpu", 0)
    assert replay.named["blocks_ptr"].tolist() == [2, 1, 0]


def test_capture_with_a_grid_of_numbers_or_heuristics_keeps_the_block(tmp_path: Path, module: Any) -> None:
    x, y = torch.arange(96.0), torch.empty(96)
    for number, call in enumerate((
        lambda: module.doubled[(3,)](x, y, 96, 2.0, BLOCK=32),
        lambda: module.doubled[lambda _: (3,)](x, y, 96, 2.0, BLOCK=32),
        lambda: module.even[cdiv_grid(96)](x, y, 96, BLOCK=32),
        lambda: module.even[cdiv_grid(64)](x, y, 64, BLOCK=32),  # odd for blocks of 128
    )):  # fmt: skip
        launch = captured_call(tmp_path / str(number), call)
        assert {tuple(one.config.kwargs) for one in launch.candidates} == {()}
        assert {one.config.num_stages for one in launch.candidates} == {3}


OPTIONAL = """
@triton.jit
def optional(x_ptr, y_ptr, N, MODE: tl.constexpr = 0, BLOCK: tl.constexpr = 32):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < N, other=0.0)
    if MODE == 2:
        tl.store(y_ptr + tl.program_id(0), tl.sum(x))
    else:
        tl.store(y_ptr + places, x, mask=places < N)
"""


@pytest.mark.parametrize("first", [{}, {"MODE": 0.5}], ids=["absent", "float"])
def test_serving_tells_values_of_an_argument_apart_that_the_first_launch_did_not_give_as_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: None, first: dict[str, Any]
) -> None:
    (tmp_path / f"of_optional{len(first)}.py").write_text(SOURCE + OPTIONAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    module, folder = __import__(f"of_optional{len(first)}"), tmp_path / "cap"

    def call(options: dict[str, Any]) -> list[float]:
        y = torch.zeros(96)
        module.optional[cdiv_grid(96)](torch.arange(96.0), y, 96, BLOCK=32, **options)
        return y.tolist()

    modes: list[dict[str, Any]] = [first, {"MODE": 1}, {"MODE": 2}]
    own = [call(options) for options in modes]
    startup.capture(folder, plain=True)
    assert [call(options) for options in modes] == own
    startup.recorder().flush()
    startup.uninstall()
    tune_capture(folder, Progress())
    startup.install(folder, misses=None)
    assert [call(options) for options in modes] == own
    assert list(startup.server().counters.by_name().values()) == [3, 0]


SAME_NAME = """
whole = doubled
@triton.jit
def doubled(x_ptr, y_ptr, N, scale, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + places, mask=places < N, other=0.0)))
"""


def test_serving_the_second_kernel_of_a_name_keeps_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: None
) -> None:
    """The digest of the source is that of a name; the block of the first kernel has no effect on its results."""
    (tmp_path / "of_same_name.py").write_text(SOURCE + SAME_NAME)
    monkeypatch.syspath_prepend(str(tmp_path))
    module, folder, x, y = __import__("of_same_name"), tmp_path / "cap", torch.arange(96.0), torch.zeros(96)
    captured_call(folder, lambda: module.whole[cdiv_grid(96)](x, y, 96, 2.0, BLOCK=32))
    tune_capture(folder, Progress())
    startup.install(folder, misses=None)
    module.whole[cdiv_grid(96)](x, y, 96, 2.0, BLOCK=32)
    module.doubled[cdiv_grid(96)](x, y.zero_(), 96, 2.0, BLOCK=32)
    assert y.tolist() == [sum(range(n, n + 32)) for n in (0, 32, 64)] + [0.0] * 93
    assert startup.server().counters.by_name() == {"served of_same_name.doubled": 1, "missed of_same_name.doubled": 0}


IS_WHOLE = True


class Grid:
    """Gives a grid for all elements or for the first block, by a method and by a call."""

    def __init__(self, is_whole: bool) -> None:
        """Keep whether all elements are wanted."""
        self.is_whole = is_whole

    def __call__(self, meta: Any) -> tuple[int]:
        """Return the grid."""
        return (triton.cdiv(96, meta["BLOCK"]) if self.is_whole else 1,)


def of_global(is_whole: bool) -> Any:
    """Return a function that reads a global."""
    globals()["IS_WHOLE"] = is_whole
    return lambda meta: Grid(IS_WHOLE)(meta)


def asserted(meta: Any, is_whole: bool) -> tuple[int]:
    """Return a grid of blocks that are allowed."""
    assert is_whole or meta["BLOCK"] == 32
    return (triton.cdiv(96, meta["BLOCK"]),)


GRIDS = {
    "partial": lambda is_whole: functools.partial(Grid.__call__, Grid(is_whole)),
    "closure": lambda is_whole: lambda meta: Grid(is_whole)(meta),
    "default": lambda is_whole: lambda meta, *, is_whole=is_whole: Grid(is_whole)(meta),
    "global": of_global,
    "method": lambda is_whole: Grid(is_whole).__call__,
    "object": Grid,
    "limit": lambda is_whole: lambda meta: (triton.cdiv(96 if is_whole else 64, meta["BLOCK"]),),
    "assertion": lambda is_whole: lambda meta: asserted(meta, is_whole),
}


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("fastest", [64, 128])
def test_serving_another_grid_of_the_same_kind_keeps_the_block(
    tmp_path: Path, module: Any, checked: None, monkeypatch: pytest.MonkeyPatch, kind: str, fastest: int
) -> None:
    """The key of a launch cannot tell whether a grid reads the block: a function may read any value."""
    monkeypatch.setattr(CheckedBench, "fastest", fastest)
    folder, x, y = tmp_path / "cap", torch.arange(96.0), torch.zeros(96)
    captured_call(folder, lambda: module.doubled[GRIDS[kind](True)](x, y, 96, 2.0, BLOCK=32))
    tune_capture(folder, Progress())
    own = []
    for is_whole in (True, False):
        module.doubled[GRIDS[kind](is_whole)](x, y.zero_(), 96, 2.0, BLOCK=32)
        own.append(y.tolist())
    for order in ((True, False, True), (False, True)):
        startup.install(folder, misses=None)
        for is_whole in order:
            module.doubled[GRIDS[kind](is_whole)](x, y.zero_(), 96, 2.0, BLOCK=32)
            assert y.tolist() == own[not is_whole]
        counts = startup.server().counters.by_name()
        startup.uninstall()
        assert counts["missed of_plain_kernels.doubled"] >= 1
        if order[0]:
            assert counts == {"served of_plain_kernels.doubled": 2, "missed of_plain_kernels.doubled": 1}


def test_serving_a_launch_that_raises_counts_nothing_and_raises_the_error_of_the_program(
    tmp_path: Path, module: Any, checked: None
) -> None:
    folder, wrong = tmp_path / "cap", []
    captured(folder, module, 96)
    tune_capture(folder, Progress())

    def grid(meta: Any) -> tuple[int]:
        return (triton.cdiv(96, meta["BLOCK"]) // (not wrong),)

    startup.install(folder, misses=None)
    for number in range(2):
        module.doubled[grid](torch.arange(96.0), torch.empty(96), 96, 2.0, BLOCK=32)
        wrong.append(number)
        with pytest.raises(ZeroDivisionError) as raised:
            module.doubled[grid](torch.arange(96.0), torch.empty(96), 96, 2.0, BLOCK=32)
        assert raised.value.__context__ is None
        wrong.clear()
    counts = {"served of_plain_kernels.doubled": 2, "missed of_plain_kernels.doubled": 0}
    assert startup.server().counters.by_name() == counts


@pytest.mark.parametrize("seen", [(0.0,), (0.0, 1.0), (1.0, 0.0)], ids=str)
def test_block_that_is_free_under_one_sign_of_a_float_is_served_to_no_other_sign(
    tmp_path: Path, module: Any, checked: None, seen: tuple[float, ...]
) -> None:
    folder, x, y = tmp_path / "cap", torch.ones(96), torch.empty(96)

    def result(flag: float) -> float:
        module.flagged[cdiv_grid(96)](x, y, 96, flag, 0.5 + flag, BLOCK=32)
        return float(y.sum())

    startup.capture(folder, plain=True)
    expected = {flag: result(flag) for flag in seen} | {flag: 96.0 * (32 + 0.5 + flag) for flag in (1.0, 2.0)}
    startup.uninstall()
    tune_capture(folder, Progress())
    verdicts = [reason[:8] for blocks in read_blocks(folder).values() for reason in blocks.values()]
    assert sorted(verdicts) == ["", "BLOCK=64"][: len(seen)]
    startup.install(folder, misses=None)
    assert {flag: result(flag) for flag in expected} == expected
    counts = startup.server().counters.by_name()
    assert counts["served of_plain_kernels.flagged"] == (3 if len(seen) == 2 else 1)


def test_block_that_is_free_out_of_place_alone_is_changed_in_no_launch(tmp_path: Path, module: Any, checked: None) -> None:
    """Launch in place and out of place, with equal keys: in place a second program would read what the first has written."""
    folder, x, y = tmp_path / "cap", torch.arange(96.0), torch.empty(96)
    startup.capture(folder, plain=True)
    for out in (y, x):
        module.turned[cdiv_grid(96)](x, out, 96, BLOCK=128)
    startup.uninstall()
    tune_capture(folder, Progress())
    verdicts = [reason[:8] for blocks in read_blocks(folder).values() for reason in blocks.values()]
    assert sorted(verdicts) == ["", "BLOCK=64"]
    table = read_table(folder, GPU)
    assert table is not None
    assert [row.configs[0].kwargs for group in table.kernels[0].groups for row in group.rows] == [{"BLOCK": 128}]
