"""Kernels without an autotuner: captured on request, tuned over options of the launch, served for the captured launches alone."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_gpu
import pytest
import torch
import triton
import triton.runtime.interpreter
from adopted import kernel_of, write_table
from plain_kernels import SOURCE, captured, captured_call, cdiv_grid, launch
from test_capture_tuning import GPU, SizedBench
from triton.backends.compiler import GPUTarget

from kerneltune.adopt import kernels, program, startup, tuning
from kerneltune.adopt.configs import plain_kernel
from kerneltune.adopt.folder import CLASSES, LaunchClass
from kerneltune.adopt.kernels import key_function
from kerneltune.adopt.operators import TUNED, case_of, operators_of
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.replay import live_kernel, make_replay
from kerneltune.adopt.table import read_table
from kerneltune.adopt.tuning import tune_capture
from kerneltune.progress import Progress
from kerneltune.task import Outcome, Task

InterpretedFunction = triton.runtime.interpreter.InterpretedFunction


def test_capture_of_plain_kernels_lists_the_programs_options_first(tmp_path: Path, module: Any) -> None:
    (small, large) = captured(tmp_path / "cap", module, 64, 96, 96, num_warps=8)
    options = [(one.config.num_warps, one.config.num_stages) for one in small.candidates]
    assert options[0] == (8, 3)
    assert {warps for warps, _ in options} == {2, 4, 8, 16, 32}
    assert {stages for _, stages in options} == {3}  # because the kernel has no product
    assert (small.is_plain, small.key_names, small.candidates[0].grid) == (True, ("x_ptr", "y_ptr", "N", "scale", "BLOCK"), (2,))
    counts = read_capture(tmp_path / "cap").notes.launches
    assert (counts[small.digest].launches, counts[large.digest].launches) == (1, 2)
    assert not small.problem


def test_capture_without_plain_records_no_plain_kernel(tmp_path: Path, module: Any) -> None:
    startup.capture(tmp_path / "cap")
    launch(module)
    startup.recorder().flush()
    startup.uninstall()
    assert not (tmp_path / "cap" / CLASSES).exists()


@pytest.mark.parametrize("name", ["torch.sparse._triton_ops", "torch._inductor.runtime.compile_tasks"])
def test_capture_of_plain_kernels_leaves_out_what_torchs_compiler_makes(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(module.doubled.fn, "__module__", name)
    startup.capture(tmp_path / "cap", plain=True)
    launch(module)
    startup.recorder().flush()
    startup.uninstall()
    assert (tmp_path / "cap" / CLASSES).exists() == ("sparse" in name)


def test_capture_of_plain_kernels_has_one_class_for_all_scales(tmp_path: Path, module: Any) -> None:
    startup.capture(tmp_path / "cap", plain=True)
    for scale in (1.0, 2.0, 3.0):
        launch(module, scale=scale)
    startup.uninstall()
    assert len(read_capture(tmp_path / "cap").classes) == 1


def test_replay_of_a_plain_kernel_launches_it_with_other_options(tmp_path: Path, module: Any) -> None:
    (launch_class,) = captured(tmp_path / "cap", module, 96)
    assert live_kernel(launch_class).fn is module.doubled
    replay = make_replay(launch_class, tmp_path / "cap" / CLASSES / launch_class.digest, "cpu", 0)
    replay.run([one.config for one in launch_class.candidates if one.grid is not None][-1])
    assert replay.named["y_ptr"].tolist() == [2.0 * n for n in range(96)]


@pytest.fixture
def launched_options(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the options of all launches from now on."""
    seen: list[dict[str, Any]] = []
    original = InterpretedFunction.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append({name: value for name, value in kwargs.items() if name.startswith("num_")})
        if kwargs.get("num_warps") == 1:
            raise OutOfResources("registers")
        return original(kernel, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return seen


class OutOfResources(Exception):  # noqa: N818
    """Stands for Triton's, which is known by its name."""


def serve(folder: Path, launches: list[LaunchClass], warps: int) -> Any:
    """Write a table that serves the first class with these warps, and serve it."""
    chosen = next(one.config for one in launches[0].candidates if one.config.num_warps == warps)
    write_table(folder, kernel_of(launches[:1], [chosen], is_plain=True, shared=()))
    startup.install(folder, misses=None)
    return startup.server()


def test_serving_plain_kernels_changes_options_of_captured_launches_only(
    tmp_path: Path, module: Any, launched_options: list[dict[str, Any]]
) -> None:
    launches = captured(tmp_path / "cap", module, 64)
    launched_options.clear()
    server = serve(tmp_path / "cap", launches, 16)
    for size, scale in ((64, 2.0), (64, 5.0), (96, 2.0)):
        assert launch(module, size, scale).tolist() == [scale * n for n in range(size)]
    launch(module, 64, num_warps=2)  # the program's options are others than the captured options
    assert launched_options == [{"num_warps": 16}, {"num_warps": 16}, {}, {"num_warps": 2}]
    assert sorted(server.counters.by_name().items()) == [
        ("missed of_plain_kernels.doubled", 2),
        ("served of_plain_kernels.doubled", 2),
    ]


def test_serving_a_launch_of_a_plain_kernel_without_elements_is_no_miss(tmp_path: Path, module: Any) -> None:
    server = serve(tmp_path / "cap", captured(tmp_path / "cap", module, 64), 16)
    launch(module, 0)
    assert server.counters.by_name() == {"served of_plain_kernels.doubled": 1, "missed of_plain_kernels.doubled": 0}


def test_serving_compiles_a_kernel_for_warmup_as_the_program_asks_and_counts_no_launch(
    tmp_path: Path, module: Any, launched_options: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = captured(tmp_path / "cap", module, 64)
    server = serve(tmp_path / "cap", launches, 16)
    launched_options.clear()
    module.doubled.run(torch.ones(64), torch.empty(64), 64, 2.0, BLOCK=32, grid=(1,), warmup=True)
    assert launched_options == [{}]
    assert sum(server.counters.by_name().values()) == 0


def test_serving_plain_kernels_with_fastest_own_options_changes_nothing(
    tmp_path: Path, module: Any, launched_options: list[dict[str, Any]]
) -> None:
    launches = captured(tmp_path / "cap", module, 64)
    launched_options.clear()
    server = serve(tmp_path / "cap", launches, 4)
    launch(module, 64)
    assert launched_options == [{}]
    assert server.counters.by_name() == {"served of_plain_kernels.doubled": 1, "missed of_plain_kernels.doubled": 0}


ADDING = """
class Adding(type(doubled)):
    def run(self, *args, **kwargs):
        return super().run(*args, scale=2.0, BLOCK=32, **kwargs)
adding = Adding(doubled.fn)
"""


def test_replay_and_serving_of_a_subclass_whose_run_adds_arguments_launch_as_the_program(tmp_path: Path, module: Any) -> None:
    exec(ADDING, vars(module))
    folder, x, y = tmp_path / "cap", torch.arange(96.0), torch.zeros(96)
    launch_class = captured_call(folder, lambda: module.adding[cdiv_grid(96)](x, y, 96))
    replay = make_replay(launch_class, folder / CLASSES / launch_class.digest, "cpu", 0)
    replay.run(launch_class.first_config)
    assert torch.equal(replay.named["y_ptr"], replay.named["x_ptr"] * 2)
    server = serve(folder, [launch_class], 16)
    module.adding[cdiv_grid(96)](x, y.zero_(), 96)
    assert y.tolist() == [2.0 * n for n in range(96)]
    assert server.counters.by_name()["served of_plain_kernels.doubled"] == 1


@pytest.mark.parametrize(("given", "named", "stages"), [((2,), {}, 2), ((), {"num_stages": 5}, 5), ((), {}, 7)])
def test_capture_keeps_an_argument_with_the_name_of_an_option_an_argument(
    tmp_path: Path,
    module: Any,
    given: tuple[int, ...],
    named: dict[str, int],
    stages: int,
    launched_options: list[dict[str, Any]],
) -> None:
    """Another number of stages would be another value of the argument, whether the program gives it by position or by name."""

    def call() -> torch.Tensor:
        y = torch.empty(64)
        module.staged[(1,)](torch.ones(64), y, 64, 32, *given, **named, num_warps=8)
        return y

    folder = tmp_path / "cap"
    launch_class = captured_call(folder, call)
    configs = [one.config for one in launch_class.candidates]
    assert ({config.num_stages for config in configs}, configs[0].num_warps) == ({None}, 8)
    replay = make_replay(launch_class, folder / CLASSES / launch_class.digest, "cpu", 0)
    replay.run(configs[2])
    assert set((replay.named["y_ptr"] / replay.named["x_ptr"]).tolist()) == {stages}
    launched_options.clear()
    server = serve(folder, [launch_class], 16)
    assert set(call().tolist()) == {stages}
    assert launched_options == [{**named, "num_warps": 16}]
    assert server.counters.by_name()["served of_plain_kernels.staged"] == 1


def test_serving_options_that_fail_falls_back_to_the_programs(
    tmp_path: Path, module: Any, launched_options: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    launches = captured(tmp_path / "cap", module, 64)
    launched_options.clear()
    server = serve(tmp_path / "cap", launches, 1)
    for _ in range(2):
        assert launch(module, 64).tolist() == [2.0 * n for n in range(64)]
    assert [one.get("num_warps") for one in launched_options] == [1, None, None]
    counts = server.counters.by_name()
    assert (counts["served of_plain_kernels.doubled"], counts["fell back of_plain_kernels.doubled"]) == (0, 2)
    message = "config num_warps=1 fails here (OutOfResources: registers): falling back to the program's own arguments"
    assert caplog.text.count(message) == 1


def test_capture_of_a_launch_without_options_has_those_of_the_backend(
    tmp_path: Path, module: Any, launched_options: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    active = SimpleNamespace(get_current_target=lambda: GPUTarget("hip", "gfx942", 64))
    monkeypatch.setattr(sys.modules["triton.runtime.driver"], "driver", SimpleNamespace(active=active))
    launches = captured(tmp_path / "cap", module, 64)
    own = launches[0].candidates[0].config
    assert (own.num_warps, own.num_stages) == (4, 2)  # NVIDIA's backend has 3 stages
    write_table(tmp_path / "cap", kernel_of(launches, [dataclasses.replace(own, num_stages=3)], is_plain=True, shared=()))
    startup.install(tmp_path / "cap", misses=None)
    launched_options.clear()
    launch(module, 64)
    assert launched_options == [{"num_stages": 3}]


class PlainBench(SizedBench):
    """Times two warps and a single stage as the fastest."""

    def check(self, task: Task, config: Any) -> Outcome:
        """Refuse other blocks."""
        return Outcome("failed", "y_ptr: differs")

    def time_us(self, task: Task, config: Any) -> float:
        """Return a time longer by 1 µs for each further warp, and by 0.5 µs for each further stage."""
        return 10.0 + abs(config.num_warps - 2) + 0.5 * (config.num_stages - 1)


def test_tune_of_a_plain_kernel_serves_the_fastest_options(
    tmp_path: Path, module: Any, launched_options: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cap"
    with fake_gpu.stands_in(monkeypatch):
        monkeypatch.setattr("kerneltune.tune.session.GpuWorker", PlainBench)
        monkeypatch.setattr(tuning, "GpuWorker", PlainBench)
        monkeypatch.setattr(program, "device_slug", lambda *_: GPU)
        captured(folder, module, 64, 96)
        outcome = tune_capture(folder, Progress())
        assert outcome.skipped == []
        table = read_table(folder, GPU)
        assert table is not None
        (kernel,) = table.kernels
        assert (kernel.is_plain, len(kernel.groups), kernel.shared) == (True, 2, ())
        startup.install(folder, miss="error", misses=None)
        launched_options.clear()
        assert launch(module, 96).tolist() == [2.0 * n for n in range(96)]
    assert launched_options == [{"num_warps": 2}]


def test_plain_kernel_with_a_product_varies_stages(module: Any) -> None:
    kernel = plain_kernel(module.product, {"num_stages": 5}, ())
    assert [config.num_stages for config in kernel.configs[:5]] == [5, 1, 2, 3, 4]


def test_serving_plans_launches_with_and_without_an_optional_tensor_once_each(
    tmp_path: Path, module: Any, launched_options: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, bias = torch.arange(96.0), torch.empty(96), torch.ones(96)

    def call(tensor: torch.Tensor | None) -> list[float]:
        module.biased[cdiv_grid(96)](x, tensor, y, 96, HAS_BIAS=tensor is not None, BLOCK=32)
        return y.tolist()

    startup.capture(tmp_path, plain=True)
    for tensor in (None, bias):
        call(tensor)
    startup.recorder().flush()
    startup.uninstall()
    launches = read_capture(tmp_path).classes
    chosen = next(one.config for one in launches[0].candidates if one.config.num_warps == 8 and one.grid is not None)
    write_table(tmp_path, kernel_of(launches, [chosen], is_plain=True, shared=()))
    planned: list[Any] = []
    monkeypatch.setattr(
        kernels, "key_function", lambda *args, **launched_options: planned.append(args) or key_function(*args, **launched_options)
    )
    startup.install(tmp_path, misses=None)
    launched_options.clear()
    for tensor in (None, bias, None, bias):
        assert call(tensor) == [n + (tensor is not None) for n in range(96)]
    assert [one["num_warps"] for one in launched_options] == [8, 8, 8, 8]
    assert len(planned) == 2


@pytest.mark.parametrize("size", [[64], object(), None, torch.ones(2)])
def test_serving_a_launch_with_an_argument_of_another_type_launches_it_unchanged(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch, size: object
) -> None:
    launches, seen = captured(tmp_path / "cap", module, 64), []
    monkeypatch.setattr(InterpretedFunction, "run", lambda _kernel, *args, **kwargs: seen.append((args[2], kwargs)))
    serve(tmp_path / "cap", launches, 16)
    x, y = torch.arange(64.0), torch.empty(64)
    for argument in (64, size, 64):
        module.doubled[(2,)](x, y, argument, 2.0, BLOCK=32)
    assert [kwargs.get("num_warps") for _, kwargs in seen] == [16, None, 16]
    assert seen[1][0] is size


def test_read_blocks_of_a_damaged_file_raises_one_line(tmp_path: Path, module: Any) -> None:
    captured(tmp_path / "cap", module, 96)
    (tmp_path / "cap" / "blocks.json").write_text('{"classes": 3}')
    with pytest.raises(ValueError, match=r"blocks.json: .*classes"):
        read_capture(tmp_path / "cap")


def test_capture_command_passes_plain_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from kerneltune.cli import app

    program = tmp_path / "program.sh"
    program.write_text(f'printf "%s" "$KERNELTUNE_CAPTURE_OPTIONS" > "{tmp_path}/options"\n')
    CliRunner().invoke(
        app, ["capture", "--plain", "--ignore-arg", "seed", "--out", str(tmp_path / "cap"), "--", "sh", str(program)]
    )
    options = json.loads((tmp_path / "options").read_text())
    assert (options["plain"], options["ignored"]) == (True, ["seed"])


def test_capture_of_a_kernel_without_a_module_lets_the_program_run(tmp_path: Path) -> None:
    """A function that `exec` defines without `__name__` has no module; an argument may have a name of this package's methods."""
    path = tmp_path / "nameless.py"
    path.write_text(SOURCE.replace("scale", "kernel"))
    held: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), held)
    startup.capture(tmp_path / "cap", plain=True)
    y = torch.zeros(4)
    held["doubled"][(1,)](torch.ones(4), y, 4, kernel=2.0, BLOCK=16)
    assert (held["doubled"].fn.__module__, y.tolist()) == (None, [2.0] * 4)


@pytest.mark.parametrize(("warps", "kept"), [(True, 1), (8.0, 8), (triton.language.constexpr(8), 8)])
def test_capture_of_an_option_of_an_odd_type_keeps_its_whole_number(tmp_path: Path, module: Any, warps: Any, kept: int) -> None:
    (launch_class,) = captured(tmp_path, module, 96, num_warps=warps)
    assert launch_class.candidates[0].config.num_warps == kept


def test_capture_of_an_option_that_is_no_plain_number_names_its_type(
    tmp_path: Path, module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    startup.capture(tmp_path, plain=True)
    launch(module, num_warps=torch.tensor(4))
    assert [record.message for record in caplog.records] == [
        "kerneltune: of_plain_kernels.doubled: not captured: a value of type torch.Tensor"
    ]


def test_operator_of_a_capture_tells_no_stages_from_the_default(tmp_path: Path, module: Any) -> None:
    (launch_class,) = captured(tmp_path, module, 96, num_stages=0)
    (op,) = operators_of(read_capture(tmp_path))
    assert op.variant(TUNED).default_config(case_of(launch_class, op.axes)).num_stages == 0
