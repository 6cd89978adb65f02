"""Capture: contents of a class of launches."""

import importlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from adopted import author_configs, captured, example, forget, of_kernel
from safetensors import SafetensorError
from safetensors.torch import load_file
from triton.runtime.autotuner import Autotuner, OutOfResources
from triton.runtime.jit import JITFunction

from kerneltune.adopt import program, startup
from kerneltune.adopt.folder import CLASSES, VALUES, process_files, read_notes
from kerneltune.adopt.operators import case_of, operators_of
from kerneltune.adopt.overview import read_capture, seed_hint
from kerneltune.adopt.recorder import Recorder


def test_capture_of_two_sizes_has_a_class_per_size(tmp_path: Path) -> None:
    capture = captured(tmp_path, (4, 96), (4, 256), (4, 96))
    sums = of_kernel(capture, "row_sum")
    assert sorted(one.sizes["N"] for one in sums) == [96, 256]
    assert {one.sizes["N"]: capture.count(one).launches for one in sums} == {96: 2, 256: 1}
    assert [one.key_values for one in sums if one.sizes["N"] == 96] == [[96]]
    assert of_kernel(capture, "scale_chosen")[0].key_names == ()


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="libdevice is corrected in Triton's interpreter")
def test_capture_under_a_triton_whose_libdevice_cannot_be_corrected_runs_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("kerneltune.interpreter.corrections.correct_libdevice")
    assert len(captured(tmp_path, (4, 96)).classes) == 2


def test_captured_classes_can_be_read_by_whom_the_captures_folder_lets(tmp_path: Path) -> None:
    (launch, _) = captured(tmp_path).classes
    modes = [folder.stat().st_mode for folder in (tmp_path / CLASSES, tmp_path / CLASSES / launch.digest)]
    assert modes[0] == modes[1]


def test_notes_that_are_due_in_a_graph_capture_query_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA ends a graph capture in which an event is queried."""
    is_capturing, queried, seconds = [False], list[bool](), itertools.count(step=10)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self) -> None:
            pass

        synchronize = record

        def query(self) -> bool:
            queried.append(is_capturing[0])
            return False

    module = example()
    startup.capture(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(program, "is_capturing", lambda: is_capturing[0])
    monkeypatch.setattr("kerneltune.adopt.recorder.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    for is_capturing[0] in (False, False, False, True, True):
        module.row_sum[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
    assert queried
    assert not any(queried)


def test_capture_keeps_values_of_a_class_that_a_graph_capture_launched_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph capture reads no values."""
    module, is_capturing = example(), [True]
    startup.capture(tmp_path, pattern="scale_chosen")
    monkeypatch.setattr(program, "is_capturing", lambda: is_capturing[0])
    for is_capturing[0], lacks in ((True, True), (False, False), (False, False)):
        module.scale_chosen[(1, 1)](torch.ones(4, 8), torch.tensor([2]), 8, 2.0)
        (launch,) = read_capture(tmp_path).classes
        assert launch.lacks_values is lacks
    assert load_file(tmp_path / CLASSES / launch.digest / VALUES)["storage.1"].view(torch.int64).tolist() == [2]


def test_capture_evaluates_the_grid_for_every_candidate(tmp_path: Path) -> None:
    launch = of_kernel(captured(tmp_path), "scale_chosen")[0]
    grids = {one.config.kwargs["BLOCK"]: one.grid for one in launch.candidates}
    assert grids == {32: (2, 3), 128: (2, 1)}


def test_capture_that_ignores_an_argument_makes_no_class_of_its_values(tmp_path: Path) -> None:
    capture = captured(tmp_path, (2, 96), (3, 96), (4, 96), ignored=["M"], pattern="row_sum")
    assert len(capture.classes) == 3  # the tensors' shapes differ
    module = example()
    startup.capture(tmp_path / "same", ignored=["M"])
    for rows in (1, 2, 3):
        module.row_sum[(1,)](torch.ones(4, 96), torch.empty(4), rows, 96)
    startup.recorder().flush()
    startup.uninstall()
    capture = read_capture(tmp_path / "same")
    assert [capture.count(one).launches for one in capture.classes] == [3]


def test_capture_ignores_no_argument_of_the_authors_key(tmp_path: Path) -> None:
    assert len(captured(tmp_path, (2, 96), (2, 64), ignored=["N"], pattern="row_sum").classes) == 2


def test_capture_of_very_many_classes_names_the_argument_that_makes_them(tmp_path: Path) -> None:
    module = example()
    startup.capture(tmp_path, most_classes=4)
    for rows in range(1, 6):
        module.row_sum[(1,)](torch.ones(8, 96), torch.empty(8), rows, 96)
    startup.recorder().flush()
    startup.uninstall()
    capture = read_capture(tmp_path)
    assert capture.notes.refused["two_kernels.row_sum"] == "more than 4 classes of launches: the first 4 are kept"
    hint = seed_hint(capture.classes)
    assert hint == "4 classes, 1 without M: if it is a seed or a counter, capture with --ignore-arg M"


def test_capture_has_a_class_per_strides_and_alignment(tmp_path: Path) -> None:
    module = example()
    startup.capture(tmp_path)
    long = torch.ones(4 * 64 + 1)
    for x in (long[:-1].view(4, 64), long[1:].view(4, 64), torch.ones(64, 4).t()):
        module.row_sum[(4,)](x, torch.empty(4), 4, 64)
    startup.uninstall()
    tensors = [launch.arguments[0].tensor for launch in read_capture(tmp_path).classes]
    assert sorted((t.stride, t.is_aligned) for t in tensors if t) == [((1, 4), True), ((64, 1), False), ((64, 1), True)]


def test_capture_again_with_autotune_adds_the_authors_choice_and_without_it_keeps_the_choice(tmp_path: Path) -> None:
    assert of_kernel(captured(tmp_path), "row_sum")[0].choice is None
    for autotune in (True, False):
        launch = of_kernel(captured(tmp_path, autotune=autotune), "row_sum")[0]
        assert launch.choice in author_configs(launch)


def test_capture_again_on_a_full_disk_lets_the_program_run_and_keeps_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    before = captured(tmp_path)
    monkeypatch.setattr("safetensors.torch.save_file", fail)
    after = captured(tmp_path, autotune=True)
    assert "two_kernels.row_sum: SafetensorError: Error while serializing" in caplog.text
    assert [one.digest for one in after.classes] == [one.digest for one in before.classes]
    assert after.problems == []


@pytest.mark.parametrize("options", [{"pattern": "other"}, {"most_classes": 1}])
def test_capture_on_a_gpu_tunes_no_launch_that_it_does_not_record(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = list[object]()
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
    kernel = triton.autotune(configs, key=["N"], do_bench=lambda *_, **__: timed.append(1) or [1.0] * 3)(example().row_sum.fn)
    startup.capture(tmp_path, **options)
    monkeypatch.setattr(program, "is_interpreted", lambda: False)
    for columns in (96, 64, 64):
        sums = torch.empty(4)
        kernel[(4,)](torch.ones(4, columns), sums, 4, columns)
        assert sums.tolist() == [columns] * 4
    assert kernel.best_config is configs[0]
    assert not timed


def test_capture_runs_the_first_config_of_the_pruned_list(tmp_path: Path) -> None:
    module = example()
    before = module.step(4, 96)
    forget(module)
    startup.capture(tmp_path)
    after = module.step(4, 96)
    assert torch.equal(before, after)
    assert module.row_sum.best_config is module.row_sum.configs[0]


def test_capture_with_autotune_records_the_authors_choice(tmp_path: Path) -> None:
    launch = of_kernel(captured(tmp_path, autotune=True), "row_sum")[0]
    assert launch.choice in author_configs(launch)


PRUNED = """
import triton
import triton.language as tl
def prune(configs, named, **_):
    return [one for one in configs if one.kwargs["BLOCK"] >= named["N"]]
@triton.autotune(
    [triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=[], prune_configs_by={"early_config_prune": prune},
    do_bench=lambda call, quantiles: [call() or 1.0] * 3,
)
@triton.jit
def doubled(x_ptr, N, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(x_ptr + places, 2 * tl.load(x_ptr + places, mask=places < N), mask=places < N)
"""


def test_capture_with_autotune_keeps_a_choice_that_is_pruned_for_other_sizes_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_pruned_choice.py").write_text(PRUNED)
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel = importlib.import_module("of_pruned_choice").doubled
    startup.capture(tmp_path / "cap", autotune=True)
    for size in (16, 20):
        kernel[(1,)](torch.ones(size), size)
    startup.recorder().flush()
    startup.uninstall()
    launch = next(one for one in read_capture(tmp_path / "cap").classes if one.sizes["N"] == 20)
    blocks = [one.config.kwargs["BLOCK"] for one in launch.candidates]
    assert (launch.choice.kwargs, blocks) == ({"BLOCK": 16}, [32, 16])
    (op,) = operators_of(read_capture(tmp_path / "cap"))
    variant, case = op.variant("optimized"), case_of(launch, op.axes)
    assert variant.invalid(case, variant.default_config(case)) is None


def test_capture_with_autotune_gives_a_launch_that_failed_no_count_and_no_other_kernels_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise RuntimeError("out of memory")

    module = example()
    startup.capture(tmp_path, autotune=True)
    module.scale_chosen[(1, 1)](torch.ones(4, 8), torch.zeros(1, dtype=torch.int64), 8, 2.0)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(module.row_sum.fn, "run", fail)
        module.row_sum[(4,)](torch.ones(4, 8), torch.empty(4), 4, 8)
    module.scale_chosen[(1, 1)](torch.ones(4, 8), torch.zeros(1, dtype=torch.int64), 8, 2.0)
    startup.recorder().flush()
    startup.uninstall()
    capture = read_capture(tmp_path)
    (launch,) = capture.classes
    assert launch.kernel.name == "scale_chosen"
    assert launch.choice in author_configs(launch)
    assert {digest: count.launches for digest, count in capture.notes.launches.items()} == {launch.digest: 2}


def test_capture_of_a_list_that_the_program_assigns_launches_its_first_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = example().row_sum
    whole = kernel.configs
    monkeypatch.setattr(kernel, "configs", whole)
    startup.capture(tmp_path)
    blocks = []
    for block in (64, 256, 64):
        kernel.configs = [config for config in whole if config.kwargs["BLOCK"] == block]
        kernel[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
        blocks.append(kernel.best_config.kwargs["BLOCK"])
    startup.uninstall()
    assert blocks == [64, 256, 64]
    assert [one.list_size for one in read_capture(tmp_path).classes] == [2, 2]


def test_capture_of_equal_lists_made_for_each_launch_has_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = example().row_sum
    monkeypatch.setattr(kernel, "configs", kernel.configs)
    startup.capture(tmp_path, most_classes=1)
    for _ in range(3):
        kernel.configs = [triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 64}, num_warps=4)]
        kernel[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
    startup.recorder().flush()
    startup.uninstall()
    capture = read_capture(tmp_path)
    assert [capture.count(one).launches for one in capture.classes] == [3]
    assert not capture.notes.refused


def test_capture_of_a_pattern_records_matching_kernels_only(tmp_path: Path) -> None:
    assert [one.kernel.name for one in captured(tmp_path, pattern="row_*").classes] == ["row_sum"]


def test_capture_keeps_the_first_classes_of_very_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    capture = captured(tmp_path, (2, 32), (2, 64), (2, 96), most_classes=2, pattern="row_sum")
    assert sorted(one.sizes["N"] for one in capture.classes) == [32, 64]
    assert "more than 2 classes of launches" in capture.notes.refused["two_kernels.row_sum"]


def test_capture_counts_launches_of_recorded_classes_beside_very_many_other_keys(tmp_path: Path) -> None:
    kernel, recorder = example().row_sum, Recorder(tmp_path, most_classes=2)
    args, grid = (torch.ones(4, 96), torch.empty(4), 4), {"grid": (4,)}
    for columns in (96, 64, *range(1000, 6000), 96, 64):
        recorder.record(kernel, (*args, columns), grid)
    for option in range(40):
        recorder.record(kernel, (*args, 96), {**grid, f"option{option}": 1})
    recorder.record(kernel, (*args, 96), grid)
    recorder.flush()
    capture = read_capture(tmp_path)
    assert {one.sizes["N"]: capture.count(one).launches for one in capture.classes} == {96: 3, 64: 2}


def test_capture_of_an_autotuner_made_for_each_launch_has_a_class_per_size(tmp_path: Path) -> None:
    recorder, grid = Recorder(tmp_path, most_classes=2), {"grid": (4,)}
    for columns in (96, 64, 32, 96, 64):
        kernel = triton.autotune([triton.Config({"BLOCK": 64})], key=["N"])(example().row_sum.fn)
        recorder.record(kernel, (torch.ones(4, columns), torch.empty(4), 4, columns), grid)
    recorder.record(kernel, (torch.ones(4, 96), torch.empty(4)), {"M": 4, "N": 96, **grid})
    recorder.flush()
    capture = read_capture(tmp_path)
    assert {one.sizes["N"]: capture.count(one).launches for one in capture.classes} == {96: 3, 64: 2}
    assert "more than 2 classes" in capture.notes.refused["two_kernels.row_sum"]


def test_capture_of_a_launch_whose_configs_are_all_pruned_names_the_pruning(tmp_path: Path) -> None:
    model = {"perf_model": lambda **_: 1.0, "top_k": 0}
    kernel = triton.autotune([triton.Config({"BLOCK": b}) for b in (64, 128)], ["N"], prune_configs_by=model)(
        example().row_sum.fn
    )
    recorder = Recorder(tmp_path)
    recorder.record(kernel, (torch.ones(4, 96), torch.empty(4), 4, 96), {"grid": (4,)})
    recorder.flush()
    notes, _ = read_notes(process_files(tmp_path))
    assert notes.refused == {"two_kernels.row_sum": "not captured: the author's pruning leaves no config"}


def test_captured_config_that_fails_in_two_threads_at_once_is_replaced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both threads launch the first of two configs before either fails."""
    both, kernel, lock = threading.Barrier(2), example().row_sum, threading.Lock()
    first, original = kernel.configs[0], kernel.fn.run
    monkeypatch.setattr(kernel, "configs", kernel.configs[:2])
    startup.capture(tmp_path, pattern="row_sum")
    kernel[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)  # records the class

    def run(*args: Any, **options: Any) -> None:
        if (options["BLOCK"], options["num_warps"]) == (first.kwargs["BLOCK"], first.num_warps):
            both.wait(timeout=60)
            raise OutOfResources(1, 0, "shared memory")
        with lock:
            original(*args, **options)

    monkeypatch.setattr(kernel.fn, "run", run)
    sums = [torch.empty(4), torch.empty(4)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda out: kernel[(4,)](torch.ones(4, 96), out, 4, 96), sums))
    assert [out.tolist() for out in sums] == [[96.0] * 4] * 2


def test_capture_that_cannot_write_lets_the_program_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    startup.capture(blocked)
    assert example().step(4, 96).tolist() == [566.0, 287.0, 582.0, 288.0]
    assert "row_sum" in caplog.text


@triton.jit
def alone(x_ptr, N: tl.constexpr):
    """Double x (N,)."""
    places = tl.arange(0, N)
    tl.store(x_ptr + places, 2 * tl.load(x_ptr + places))


def test_capture_notes_kernels_without_an_autotuner(tmp_path: Path) -> None:
    x, module = torch.ones(8), example()
    startup.capture(tmp_path)
    alone[(1,)](x, N=8)
    module.row_sum[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
    startup.recorder().flush()
    startup.uninstall()
    assert (x.tolist(), read_capture(tmp_path).plain()) == ([2.0] * 8, [f"{__name__}.alone"])
    assert triton.runtime.interpreter.InterpretedFunction.run.__qualname__ == "InterpretedFunction.run"


@triton.jit
def second(x_ptr, N: tl.constexpr):
    """Double x (N,) as well."""
    places = tl.arange(0, N)
    tl.store(x_ptr + places, 2 * tl.load(x_ptr + places))


@triton.jit
def third(x_ptr, N: tl.constexpr):
    """Double x (N,), if it is launched."""
    places = tl.arange(0, N)
    tl.store(x_ptr + places, 2 * tl.load(x_ptr + places))


class Calling(Autotuner):
    """A subclass whose `run` calls Triton's, as that of flash-linear-attention does."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return super().run(*args, **kwargs)


class Alone(Autotuner):
    """A subclass whose `run` launches the kernel itself."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, N=8)


def test_capture_notes_only_kernels_that_a_subclass_launched(tmp_path: Path) -> None:
    startup.capture(tmp_path)
    configs = [triton.Config({"N": 8})]
    kinds = ((Calling, alone), (Alone, second), (Alone, third))
    seen, hidden, idle = (kind(one, one.arg_names, configs, [], None, None) for kind, one in kinds)
    seen[(1,)](torch.ones(8))
    hidden[(1,)](torch.ones(8))
    startup.recorder().flush()
    startup.uninstall()
    assert idle.configs == configs
    capture = read_capture(tmp_path)
    assert capture.own_runs() == {f"{__name__}.Alone": [f"{__name__}.second"]}
    assert {f"{__name__}.third", f"{__name__}.alone"} <= capture.notes.autotuned.keys()


def test_capture_notes_plain_kernels_launched_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: "launched")
    startup.capture(tmp_path)
    assert JITFunction(alone.fn).run(torch.ones(8), N=8, grid=(1,), warmup=False) == "launched"
    startup.recorder().flush()
    startup.uninstall()
    assert read_notes(process_files(tmp_path))[0].plain == [f"{__name__}.alone"]


def test_capture_of_an_argument_that_is_no_data_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = example()
    startup.capture(tmp_path)

    key = startup.recorder().recorded_class(module.row_sum, (torch.ones(4, 64), torch.empty(4), 4, object()), {"grid": (4,)})
    assert key.digest == ""
    assert "argument N: a value of type builtins.object" in caplog.text


def test_capture_of_an_invalid_config_names_file_line_and_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = example().row_sum
    monkeypatch.setattr(kernel, "configs", [triton.Config({"BLOCK": 64, "ROWS": 2})])
    with pytest.raises(ValueError, match="no capture"):
        captured(tmp_path, pattern="row_sum")
    assert "two_kernels.py:" in caplog.text
    assert ": row_sum: configs[0]: 'ROWS': expected a parameter of the kernel: x_ptr, y_ptr, M, N, BLOCK" in caplog.text
    assert read_notes(process_files(tmp_path))[0].misnamed == ["two_kernels.row_sum"]
