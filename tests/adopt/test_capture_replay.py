"""Replay: the author's first config shows the written arguments, and every other config is compared with its results."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from adopted import captured, run_python

from kerneltune import sweep_file
from kerneltune.adopt import startup
from kerneltune.adopt.arguments import decode_value, encode_value
from kerneltune.adopt.effects import disagreement, learn, wrong_results
from kerneltune.adopt.folder import CLASSES, read_classes
from kerneltune.adopt.kernels import Launch
from kerneltune.adopt.operators import TUNED, case_of, operators, write_capture_sweep
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.replay import Replay, ReplayError, make_replay
from kerneltune.task import Task


def configs(*blocks: int) -> list[triton.Config]:
    """Return a config for each block."""
    return [triton.Config({"BLOCK": block}) for block in blocks]


@triton.autotune(configs=configs(32, 64), key=["N"])
@triton.jit
def added_up(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Add x (N,) to y (N,) in place, but forget all beyond the first 64 with blocks of 64."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (places < N) & ((BLOCK < 64) | (places < 64))
    tl.store(y_ptr + places, tl.load(y_ptr + places, mask=mask) + tl.load(x_ptr + places, mask=mask), mask=mask)


@triton.autotune(configs=configs(32, 64), key=["N"])
@triton.jit
def overwritten(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Copy x (N,) to y (N,), but leave all beyond the first 64 as it was with blocks of 64."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (places < N) & ((BLOCK < 64) | (places < 64))
    tl.store(y_ptr + places, tl.load(x_ptr + places, mask=mask), mask=mask)


@triton.autotune(configs=configs(32, 64), key=["N"])
@triton.jit
def scaled(x_ptr, y_ptr, N, dtype, launch, BLOCK: tl.constexpr):
    """Multiply x (N,) by two numbers that are called as fields of a case are."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N) * dtype * launch, mask=places < N)


@triton.autotune(configs=configs(32, 64), key=["N"])
@triton.jit
def divided(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Divide x (N,) by itself, and the elements of a last block beyond N, 0 by 0."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < N, other=0.0)
    tl.store(y_ptr + places, x / x, mask=places < N)


@triton.autotune(configs=configs(32, 64), key=["N"])
@triton.jit
def picked(x_ptr, y_ptr, row, N, BLOCK: tl.constexpr):
    """Copy a row (N,) of a buffer, of which x is the first row, to y (N,), and with blocks of 64 an element behind y."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < N + BLOCK // 64
    tl.store(y_ptr + places, tl.load(x_ptr + row * N + places, mask=mask), mask=mask)


@triton.autotune(configs=configs(32, 64, 128), key=["N"])
@triton.jit
def summed(x_ptr, y_ptr, ROWS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Sum each row of x (ROWS, N) by blocks into y (ROWS,), a row behind the other; twice the last row with blocks of 128."""
    for row in range(ROWS):
        total = 0.0
        for start in range(0, N, BLOCK):
            total += tl.sum(tl.load(x_ptr + row * N + start + tl.arange(0, BLOCK)))
        wrong: tl.constexpr = BLOCK // 128
        tl.store(y_ptr + row, (total * (1 + wrong * (row // (ROWS - 1)))).to(y_ptr.dtype.element_ty))


def replayed(folder: Path, kernel: Any, *args: Any) -> tuple[Replay, list[dict[str, Any]]]:
    """Capture a launch of a kernel; returns its arguments made anew, and the author's configs."""
    startup.capture(folder)
    kernel[lambda meta: (triton.cdiv(128, meta["BLOCK"]),)](*args)
    startup.uninstall()
    ((launch_class,), _) = read_classes(folder)
    launch = make_replay(launch_class, folder / CLASSES / launch_class.digest, "cpu", 0)
    return launch, [one.config for one in launch_class.candidates]


def test_replay_of_an_in_place_kernel_restores_before_every_launch(tmp_path: Path) -> None:
    launch, (right, wrong) = replayed(tmp_path, added_up, torch.ones(128), torch.arange(128.0), 128)
    written = learn(launch, right)
    assert (written, launch.noise) == (["y_ptr"], {"y_ptr": 0.0})
    for config, wrong_names in ((right, []), (wrong, ["y_ptr"])):
        launch.restore()
        launch.run(config)
        assert [line.partition(":")[0] for line in wrong_results(launch, {})] == wrong_names


def test_argument_named_like_a_field_of_a_case_is_no_axis(tmp_path: Path) -> None:
    replayed(tmp_path, scaled, torch.ones(128), torch.ones(128), 128, 2, 3)
    (op,) = operators(str(tmp_path))
    assert op.weighs_hot
    assert op.axes == ("N",)
    (entry, *_) = sweep_file.load(write_capture_sweep(read_capture(tmp_path)), {op.name: op}).check
    assert (entry.case["N"], entry.case.dtype) == (128, "float32")


def test_reference_of_a_capture_is_silent_where_a_launch_computes_nan(tmp_path: Path) -> None:
    replayed(tmp_path, divided, torch.ones(100), torch.ones(100), 100)
    (op,) = operators(str(tmp_path))
    (entry, *_) = sweep_file.load(write_capture_sweep(read_capture(tmp_path)), {op.name: op}).check
    with np.errstate(all="raise"):  # in place of a warning for each launch
        expected = op.reference(op.inputs(entry.case, device="cpu"))
    assert bool((expected["y_ptr"] == 1).all())


def test_replay_poisons_outputs_and_reports_unwritten_elements(tmp_path: Path) -> None:
    launch, (right, wrong) = replayed(tmp_path, overwritten, torch.ones(128), torch.ones(128), 128)
    learn(launch, right)
    launch.restore()
    assert torch.isnan(launch.named["y_ptr"]).all()
    launch.run(wrong)
    assert wrong_results(launch, {}) == ["y_ptr: 64 of 128 elements never written, first at (64,)"]


def test_replay_makes_arguments_with_strides_alignment_and_shared_memory(tmp_path: Path) -> None:
    whole = torch.arange(300.0)
    launch, _ = replayed(tmp_path, overwritten, whole[1:129], whole[160:288], 128)
    x, y = launch.named["x_ptr"], launch.named["y_ptr"]
    assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert torch.equal(x, whole[1:129])
    assert x.data_ptr() % 16 == whole[1:].data_ptr() % 16 == 4


def test_replay_has_the_memory_behind_the_first_row_of_a_buffer(tmp_path: Path) -> None:
    x, y = torch.randn(4, 100), torch.zeros(2, 100)
    launch, (right, wrong) = replayed(tmp_path, picked, x[0], y[0], 3, 100)
    assert [values.behind for values in launch.launch_class.storages] == [300 * 4, 100 * 4]
    assert learn(launch, right) == ["y_ptr"]
    assert torch.equal(launch.expected["y_ptr"], x[0])  # samples are repeated
    for config, lines in ((right, []), (wrong, ["memory behind the arguments is written, unlike by the author's first config"])):
        launch.restore()
        launch.run(config)
        assert wrong_results(launch, {}) == lines
    meta = make_replay(launch.launch_class, tmp_path, "meta", 0)
    assert meta.named["x_ptr"].untyped_storage().nbytes() >= 400 * 4


@pytest.mark.parametrize(("dtype", "wrong_line"), [(torch.float32, "differs by"), (torch.int32, " wrong, first at (")])
def test_sums_in_another_order_behind_an_argument_agree(tmp_path: Path, dtype: torch.dtype, wrong_line: str) -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)) + (3 if dtype.is_floating_point else 3000)
    launch, (first, other_order, wrong) = replayed(tmp_path, summed, x, torch.zeros(4, dtype=dtype)[:2], 4, 128)
    learn(launch, first)
    launch.restore()
    launch.run(other_order)
    is_equal = torch.equal(launch.guards(launch.storages)[1].view(dtype), launch.guard_contents[1].view(dtype))
    assert is_equal == (not dtype.is_floating_point)
    assert wrong_results(launch, {}) == []
    launch.restore()
    launch.run(wrong)
    (line,) = wrong_results(launch, {})
    assert line.startswith("memory behind the arguments: ")
    assert wrong_line in line


def test_replay_of_tensors_without_elements_launches(tmp_path: Path) -> None:
    launch, (config, _) = replayed(tmp_path, added_up, torch.ones(128)[100:100], torch.empty(0), 0)
    assert [tuple(launch.named[name].shape) for name in ("x_ptr", "y_ptr")] == [(0,), (0,)]
    written = learn(launch, config)
    assert written == []


def test_replay_on_meta_keeps_the_alignment_of_pointers(tmp_path: Path) -> None:
    whole = torch.arange(300.0)
    launch, _ = replayed(tmp_path, overwritten, whole[1:129], torch.empty(128), 128)
    meta = make_replay(launch.launch_class, tmp_path, "meta", 0)
    assert meta.named["x_ptr"].is_meta
    assert meta.named["x_ptr"].storage_offset() % 4 == 1


def test_replay_of_damaged_values_raises(tmp_path: Path) -> None:
    launch, _ = replayed(tmp_path, overwritten, torch.ones(128), torch.empty(128), 128)
    folder = tmp_path / "copied"
    folder.mkdir()
    (folder / "values.safetensors").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(ReplayError, match=r"values.safetensors: SafetensorError"):
        make_replay(launch.launch_class, folder, "cpu", 0)


@pytest.mark.parametrize(
    ("factor", "noise", "text"),
    [
        (1.0, 0.0, ""),
        (1.001, 0.0, "differs by 1.00e-03"),
        (1.001, 5e-4, ""),
        (float("nan"), 0.0, "NaN in other places: 128 of 128 elements, first at (0,)"),
    ],
)
def test_disagreement_within_noise_and_rounding_is_empty(tmp_path: Path, factor: float, noise: float, text: str) -> None:
    launch, _ = replayed(tmp_path, overwritten, torch.ones(128), torch.empty(128), 128)
    expected = torch.linspace(1, 2, 128)
    assert disagreement(expected, expected * factor, noise, launch.launch_class.dtypes).startswith(text)
    assert bool(disagreement(expected, expected * factor, noise, launch.launch_class.dtypes)) == bool(text)


def test_disagreement_with_a_reference_finds_one_wrong_element(tmp_path: Path) -> None:
    launch, _ = replayed(tmp_path, overwritten, torch.ones(128), torch.empty(128), 128)
    expected = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    expected[0] = 8.0  # a share of the largest element would allow an error of 0.5
    result = expected.to(torch.bfloat16)
    assert disagreement(expected.to(torch.bfloat16), result, 0.0, launch.launch_class.dtypes, has_reference=True) == ""
    result[7] += 0.2
    text = disagreement(expected.to(torch.bfloat16), result, 0.0, launch.launch_class.dtypes, has_reference=True)
    assert re.match(
        r"differs by .* of the rms \(allowed 7.81e-03\), at most .* of an element, or of the rms if larger .*, most at \(7,\): ",
        text,
    ), text


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (lambda x: x, ""),
        (lambda x: torch.where(torch.arange(4096) == 7, -x, x), "fp8: 1 of 4096 wrong"),
        (lambda x: x * 0.9, "fp8: "),
        (lambda x: torch.where(torch.arange(4096) % 16 == 7, 0 * x, x), "fp8: "),
        (lambda x: torch.where(x.abs() < 2**-10, 2 * x, x), ""),  # a sum in another order near zero
    ],
)
def test_disagreement_of_fp8_results_within_a_step_is_empty(
    tmp_path: Path, mistake: Callable[[torch.Tensor], torch.Tensor], text: str
) -> None:
    launch, _ = replayed(tmp_path, overwritten, torch.ones(128), torch.empty(128), 128)
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    message = disagreement(x.to(torch.float8_e4m3fn), mistake(x).to(torch.float8_e4m3fn), 0.0, launch.launch_class.dtypes)
    assert message.startswith(text)
    assert bool(message) == bool(text)


def truncated(x: torch.Tensor) -> torch.Tensor:
    """Cast to bf16 towards zero."""
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


@pytest.mark.parametrize("has_reference", [False, True])
def test_disagreement_finds_16_bit_results_rounded_towards_zero(tmp_path: Path, has_reference: bool) -> None:
    launch, _ = replayed(tmp_path, overwritten, torch.ones(128), torch.empty(128), 128)
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((64, 512), (512, 64)))
    expected = (a @ b).bfloat16()
    other_order = sum(a[:, at : at + 32] @ b[at : at + 32] for at in range(0, 512, 32))
    partial = sum((a[:, at : at + 128] @ b[at : at + 128]).bfloat16().float() for at in range(0, 512, 128))
    row_factor = (1 + 2.0**-9 * (torch.arange(64) % 2 - 0.5)[:, None]) * (a @ b)
    for right in (other_order.bfloat16(), partial.bfloat16(), *([row_factor.bfloat16()] if has_reference else [])):
        assert disagreement(expected, right, 0.0, launch.launch_class.dtypes, has_reference) == ""
    message = disagreement(expected, truncated(other_order), 0.0, launch.launch_class.dtypes, has_reference)
    assert message.endswith("elements that are off are rounded towards zero")


def test_disagreement_of_integers_is_exact(tmp_path: Path) -> None:
    launch, _ = replayed(tmp_path, overwritten, torch.ones(128), torch.empty(128), 128)
    assert disagreement(torch.arange(4), torch.tensor([0, 1, 2, 4]), 0.0, launch.launch_class.dtypes) == (
        "1 of 4 wrong, first at (3,): 4, expected 3"
    )


@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["N"])
@triton.jit
def added_of_tuple(xs, y_ptr, N, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(xs[0] + places, mask=places < N)
    second = tl.load(xs[1] + places, mask=places < N)
    tl.store(y_ptr + places, first + second, mask=places < N)


def test_replay_of_a_tuple_of_tensors_launches_with_a_tuple(tmp_path: Path) -> None:
    tensors = (torch.ones(128), torch.arange(128.0))
    launch, (config, _) = replayed(tmp_path, added_of_tuple, tensors, torch.empty(128), 128)
    assert list(launch.named) == ["xs[0]", "xs[1]", "y_ptr", "N"]
    launch.run(config)
    assert torch.equal(launch.named["y_ptr"], tensors[0] + tensors[1])


class Pair(NamedTuple):
    """Two tensors and a factor."""

    a: torch.Tensor
    b: torch.Tensor
    factor: int


@triton.autotune(configs=configs(32, 64), key=["N"])
@triton.jit
def added_of_pair(pairs, y_ptr, N, BLOCK: tl.constexpr):
    """Add both tensors (N,) of the only pair, and multiply the sum."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(pairs[0].a + places, mask=places < N)
    second = tl.load(pairs[0].b + places, mask=places < N)
    tl.store(y_ptr + places, (first + second) * pairs[0].factor, mask=places < N)


def test_replay_of_a_named_tuple_launches_with_its_names(tmp_path: Path) -> None:
    pair = Pair(torch.ones(128), torch.arange(128.0), 3)
    launch, (config, _) = replayed(tmp_path, added_of_pair, (pair,), torch.empty(128), 128)
    assert list(launch.named) == ["pairs[0][a]", "pairs[0][b]", "pairs[0][factor]", "y_ptr", "N"]
    launch.run(config)
    assert torch.equal(launch.named["y_ptr"], 3 * (pair.a + pair.b))
    call = Launch(added_of_pair, ((pair,), torch.empty(128), 128), {})
    assert (call.size("pairs[0][a].0"), call.size("pairs[0][factor]"), call.size("pairs[0][a].1")) == (128, 3, None)


def test_encoded_named_tuple_of_plain_values_keeps_its_names() -> None:
    value = Pair(1, (2.0, 3), 4)
    assert decode_value(encode_value(value))._asdict() == value._asdict()


def test_tuple_of_tensors_has_the_same_dtypes_in_capture_and_serving(tmp_path: Path) -> None:
    arguments = ((torch.ones(128), torch.arange(128)), torch.empty(128), 128)
    launch, _ = replayed(tmp_path, added_of_tuple, *arguments)
    call = Launch(added_of_tuple, arguments, {})
    assert (call.dtypes(), call.sizes()) == (launch.launch_class.dtypes, launch.launch_class.sizes)
    assert launch.launch_class.dtypes == ["float32", "int64", "float32"]


def test_replay_of_a_kernel_that_makes_descriptors_sets_an_allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, (config, _) = replayed(tmp_path, added_up, torch.ones(128), torch.arange(128.0), 128)
    allocators: list[Callable[[int, int, None], torch.Tensor]] = []
    monkeypatch.setattr(triton, "set_allocator", allocators.append)
    launch.compile(config)
    assert [allocate(256, 128, None).nbytes for allocate in allocators] == [256]


@triton.autotune(configs=configs(32, 64), key=["N"])
@triton.jit
def widened(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Copy x (N,) of any element type to y (N,) float32."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N).to(tl.float32), mask=places < N)


def test_replay_of_a_reinterpreted_tensor_has_its_dtype(tmp_path: Path) -> None:
    stored = torch.arange(128.0).to(torch.float8_e4m3fn)
    launch, (config, _) = replayed(
        tmp_path, widened, triton.reinterpret(stored.view(torch.uint8), tl.float8e4nv), torch.empty(128), 128
    )
    assert [a.tensor.dtype for a in launch.launch_class.arguments if a.tensor is not None] == ["float8_e4m3fn", "float32"]
    learn(launch, config)
    assert torch.equal(launch.expected["y_ptr"], stored.float())


def test_capture_of_a_tensor_reinterpreted_with_another_width_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    startup.capture(tmp_path)
    widened[(4,)](triton.reinterpret(torch.zeros(128, dtype=torch.int64), tl.float32), torch.empty(128), 128)
    startup.uninstall()
    assert "not captured: a tensor of torch.int64 that the program reinterprets as fp32" in caplog.text


LOADED = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    task, config = pickle.load(file)
print(task.op.name, task.case.label, config, config == task.default)
assert type(config) is type(task.default)
inputs = task.op.inputs(task.case, device="cpu", seed=0)
task.variant.run(inputs, config)
print(inputs["launch"].named["y_ptr"].tolist()[:2])
"""


def test_pickled_task_of_a_capture_loads_in_a_process_without_its_environment(tmp_path: Path) -> None:
    captured(tmp_path / "cap", (4, 96), pattern="row_sum")
    (launch,) = read_capture(tmp_path / "cap").classes
    (op,) = operators(str(tmp_path / "cap"))
    task = Task(op, case_of(launch, op.axes), op.variant(TUNED))
    (tmp_path / "task").write_bytes(pickle.dumps((task, task.default)))
    done = run_python(LOADED, str(tmp_path / "task"), TRITON_INTERPRET="1")
    shown = [op.name, *task.case.label.split(), *str(task.default).split(), "True", "[566.0,", "287.0]"]
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == shown
