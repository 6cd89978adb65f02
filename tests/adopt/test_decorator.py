"""kerneltune.autotune: takes what triton.autotune takes, and a reference and a space that tuning uses."""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from asserting import every
from warm_python import python

import kerneltune
from kerneltune.adopt import startup
from kerneltune.adopt.folder import process_files, read_notes
from kerneltune.adopt.operators import TUNED, case_of, operators
from kerneltune.adopt.overview import read_capture
from kerneltune.checking.check import Checker
from kerneltune.checking.mutations import mutate
from kerneltune.device import may_have_gpu

CONFIGS = [triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128})]


def plus_one(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return x + 1 (N,), the wrong expectation for every config."""
    return {"y_ptr": arguments["x_ptr"] + 1}


def same(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return x (N,)."""
    return {"y_ptr": arguments["x_ptr"].clone()}


@triton.jit
def copied(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Copy x (N,) to y (N,)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N, other=0.0), mask=places < N)


@kerneltune.autotune(configs=CONFIGS, key=["N"], reference=plus_one)
@triton.jit
def copied_wrong(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Copy x (N,) to y (N,)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N, other=0.0), mask=places < N)


@kerneltune.autotune(CONFIGS, ["N"], reference=same, space={"BLOCK": (32, 256), "num_warps": (2, 8)})
@triton.jit
def copied_right(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Copy x (N,) to y (N,)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N, other=0.0), mask=places < N)


def test_autotune_returns_tritons_autotuner() -> None:
    """The result is Triton's Autotuner, which torch.compile knows."""
    assert type(copied_right) is triton.runtime.autotuner.Autotuner
    assert copied_right.configs is CONFIGS
    assert copied_right.keys == ["N"]


def test_autotune_accepts_every_argument_of_the_installed_triton() -> None:
    keywords: dict[str, Any] = {
        "prune_configs_by": {"early_config_prune": lambda configs, named, **kwargs: configs[:1]}, "reset_to_zero": ["y_ptr"],
        "restore_value": ["x_ptr"], "pre_hook": None, "post_hook": None, "warmup": None, "rep": None, "use_cuda_graph": False,
        "do_bench": lambda call, quantiles: [1.0, 1.0, 1.0], "cache_results": False,
    }  # fmt: skip
    names = triton.autotune.__code__.co_varnames[: triton.autotune.__code__.co_argcount]
    autotuner = kerneltune.autotune(CONFIGS, ["N"], **{name: value for name, value in keywords.items() if name in names})(copied)
    assert (autotuner.reset_to_zero, autotuner.restore_value) == (["y_ptr"], ["x_ptr"])
    assert autotuner.early_config_prune(CONFIGS, {}) == CONFIGS[:1]


def test_autotune_with_an_unknown_argument_lists_known_ones() -> None:
    with pytest.raises(TypeError, match=r"autotune: got an unexpected keyword argument 'sizes': triton .* takes configs, key"):
        kerneltune.autotune(CONFIGS, ["N"], sizes=3)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"configs": [*CONFIGS, triton.Config({"BLOCK": 64, "ROWS": 2})]}, r"configs\[2\]: 'ROWS'"),
        ({"key": ["N", "m"]}, "key: 'm'"),
        ({"space": {"num_warps": (2, 8), "COLS": (1, 2)}}, "space: 'COLS'"),
    ],
)
def test_autotune_with_a_name_that_the_kernel_lacks_raises_with_file_and_line(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^{__file__}:\d+: copied: {problem}: expected a parameter of the kernel: x_ptr, y_ptr, N, BL"
    ):
        kerneltune.autotune(**({"configs": CONFIGS, "key": ["N"]} | changes))(copied)


def test_program_with_a_misnamed_key_ends_with_one_line_which_capture_repeats(tmp_path: Path) -> None:
    decorated = 'import kerneltune, triton\n@kerneltune.autotune([triton.Config({})], key=["N"])\n@triton.jit\n'
    (tmp_path / "program.py").write_text(f"{decorated}def doubled(n):\n    pass\n")
    line = f"{tmp_path}/program.py:2: doubled: key: 'N': expected a parameter of the kernel: n\n"
    program = [python(), "program.py"]
    alone = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
    assert (alone.returncode, alone.stderr) == (1, f"error: {line}")
    capture = [python(), "-m", "kerneltune", "capture", "--out", "cap", "--", *program]
    captured = subprocess.run(capture, cwd=tmp_path, capture_output=True, text=True)
    assert (captured.returncode, captured.stderr) == (2, f"error: {line}error: __main__.doubled: not captured: {line}")


def test_capture_notes_kernels_that_autotune_refuses(tmp_path: Path) -> None:
    startup.capture(tmp_path)
    with pytest.raises(ValueError, match="'ROWS'"):
        kerneltune.autotune([triton.Config({"ROWS": 2})], ["N"])(copied)
    startup.recorder().flush()
    notes, _ = read_notes(process_files(tmp_path))
    assert notes.misnamed == [f"{__name__}.copied"]
    assert "'ROWS'" in notes.refused[f"{__name__}.copied"]


def test_autotune_accepts_options_of_any_backend_and_values_of_heuristics() -> None:
    configs = [triton.Config({"BLOCK": 64, "waves_per_eu": 2}, num_warps=2)]
    heuristics = triton.heuristics({"BLOCK": lambda arguments: 64})(copied)
    assert kerneltune.autotune(configs, ["N"])(heuristics).configs is configs


def checked(folder: Path, kernel: Any) -> tuple[list[Any], list[list[str]]]:
    """Capture a launch of a kernel; returns the configs that tuning tries, and the errors of each."""
    startup.capture(folder)
    kernel[lambda meta: (triton.cdiv(128, meta["BLOCK"]),)](torch.arange(128.0), torch.empty(128), 128)
    startup.uninstall()
    (op,) = operators(str(folder))
    case = case_of(read_capture(folder).classes[0], op.axes)
    variant = op.variant(TUNED)
    checker = Checker(op, case, "cpu")
    configs = list(variant.configs(case))
    return configs, [checker.run(variant, config)[1] for config in configs]


def test_tune_of_an_autotuned_kernel_compares_configs_with_its_reference(tmp_path: Path) -> None:
    _, errors = checked(tmp_path, copied_wrong)
    assert len(errors) == 2
    assert every("y_ptr: differs by" in lines[0] for lines in errors)


def normalized(arguments: Any) -> dict[str, Any]:
    x = arguments["x_ptr"]
    return {"y_ptr": (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(1, correction=0, keepdim=True) + 1e-6)}


@triton.jit
def layernorm(x_ptr, y_ptr, N, MISTAKE: tl.constexpr, BLOCK: tl.constexpr):
    """Normalize x (64, N) to y (64, N)."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * N + at, at < N, other=0.0)
    centred = x - tl.sum(x, 0) / (BLOCK if MISTAKE == "mean over BLOCK" else N)
    if MISTAKE != "variance without mask":
        centred = tl.where(at < N, centred, 0.0)
    variance = tl.sum(centred * centred, 0) / N
    scale = 1 / (tl.sqrt(variance) + 1e-6) if MISTAKE == "eps outside sqrt" else tl.rsqrt(variance + 1e-6)
    tl.store(y_ptr + tl.program_id(0) * N + at, centred * scale, at < N)


@pytest.mark.parametrize("mistake", ["", "eps outside sqrt", "variance without mask", "mean over BLOCK"])
@pytest.mark.parametrize("rtol", [None, 1e-2])
def test_check_with_a_reference_finds_mistakes_of_a_normalization(tmp_path: Path, mistake: str, rtol: float | None) -> None:
    configs = [triton.Config({"BLOCK": 128, "MISTAKE": mistake})]
    kernel = kerneltune.autotune(configs, ["N"], reference=normalized, rtol=rtol, atol=rtol)(layernorm)
    errors = errors_of_rows(tmp_path, kernel, torch.empty(64, 100))
    assert bool(errors) == bool(mistake)
    assert [line for line in errors if not line.startswith("y_ptr: ")] == []


def errors_of_rows(folder: Path, kernel: Any, y: torch.Tensor) -> list[str]:
    """Capture a launch on normal rows x (64, 100), and return the errors of the first config."""
    globals()["made"] = kernel
    startup.capture(folder)
    x = torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
    kernel[(64,)](x - x.mean(1, keepdim=True), y, 100)
    startup.uninstall()
    (op,) = operators(str(folder))
    checker = Checker(op, case_of(read_capture(folder).classes[0], op.axes), "cpu")
    return checker.run(op.variant(TUNED), next(op.variant(TUNED).configs(checker.case)))[1]


@triton.jit
def added(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Add each eighth row of x (64, N) to a row of y (8, N)."""
    at, row = tl.arange(0, BLOCK), tl.program_id(0)
    tl.atomic_add(y_ptr + row % 8 * N + at, tl.load(x_ptr + row * N + at, at < N, other=0.0), at < N)


def test_check_with_a_reference_keeps_zeros_to_which_a_kernel_adds(tmp_path: Path) -> None:
    def reference(arguments: Any) -> dict[str, Any]:
        return {"y_ptr": arguments["x_ptr"].view(8, 8, -1).sum(0)}

    kernel = kerneltune.autotune([triton.Config({"BLOCK": 128})], ["N"], reference=reference)(added)
    assert errors_of_rows(tmp_path, kernel, torch.zeros(8, 100)) == []


@triton.jit
def exponentials(x_ptr, y_ptr, N, MISTAKE: tl.constexpr, BLOCK: tl.constexpr):
    """Write the softmax of rows x (64, N)."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * N + at, at < N, other=-float("inf"))
    e = tl.exp(x if MISTAKE else x - tl.max(x, 0))
    tl.store(y_ptr + tl.program_id(0) * N + at, e / tl.sum(e, 0), at < N)


@pytest.mark.parametrize(
    ("mistake", "overflows", "is_wrong"), [("", False, False), ("no maximum", False, True), ("no maximum", True, False)]
)
def test_check_with_a_reference_finds_an_overflow_of_large_rows(
    tmp_path: Path, mistake: str, overflows: bool, is_wrong: bool
) -> None:
    def reference(arguments: Any) -> dict[str, Any]:
        x = arguments["x_ptr"]
        return {"y_ptr": x.exp() / x.exp().sum(1, keepdim=True) if overflows else x.softmax(1)}

    configs = [triton.Config({"BLOCK": 128, "MISTAKE": mistake})]
    errors = errors_of_rows(
        tmp_path, kerneltune.autotune(configs, ["N"], reference=reference)(exponentials), torch.empty(64, 100)
    )
    wrong = r"y_ptr: \d+ of 6400 elements, first at .*, are NaN or infinite, unlike the reference, .* 48 times as large"
    assert [bool(re.fullmatch(wrong, line)) for line in errors] == [True] * is_wrong


def test_mutations_of_a_captured_kernel_are_refused(tmp_path: Path) -> None:
    startup.capture(tmp_path)
    copied_right[lambda meta: (triton.cdiv(128, meta["BLOCK"]),)](torch.randn(128), torch.empty(128), 128)
    startup.uninstall()
    (op,) = operators(str(tmp_path))
    (outcome,) = mutate(op, op.variants[0], [case_of(read_capture(tmp_path).classes[0], op.axes)])
    assert outcome.status == "checked"
    assert outcome.reason.startswith(f"{op.name} y_ptr: compare refuses one element, ")


@pytest.mark.skipif(may_have_gpu(), reason="the message is for machines without a GPU")
def test_launch_without_gpu_and_interpreter_prints_one_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import kerneltune, triton\n"
        "@kerneltune.autotune([triton.Config({})], ['n'])\n"
        "@triton.jit\n"
        "def nothing(n):\n"
        "    pass\n"
        "nothing[(1,)](1)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([python(), program], env=environment, capture_output=True, text=True, check=False)
    expected = "error: __main__.nothing: no GPU: set TRITON_INTERPRET=1 to run Triton's interpreter, or use a GPU"
    assert ran.stderr.splitlines() == [expected]
    assert ran.returncode == 1


def test_autotune_is_among_the_names_that_a_notebook_completes() -> None:
    assert "autotune" in dir(kerneltune)


def test_autotune_with_a_tolerance_but_no_reference_raises() -> None:
    with pytest.raises(TypeError, match=r"autotune: rtol, atol: expected only with reference="):
        kerneltune.autotune(CONFIGS, ["N"], rtol=1e-2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"reference": 3}, "autotune: reference: 3: expected a function of the arguments"),
        ({"rtol": float("nan")}, r"test_decorator\.py:\d+: autotune: rtol: nan: expected a number from 0 to below 1"),
        ({"rtol": 2.0}, r"test_decorator\.py:\d+: autotune: rtol: 2.0: expected a number from 0 to below 1"),
        ({"atol": "1e-3"}, r"test_decorator\.py:\d+: autotune: atol: '1e-3': expected a number from 0 to below inf"),
    ],
)
def test_autotune_with_an_unusable_reference_or_tolerance_raises(changes: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        kerneltune.autotune(CONFIGS, ["N"], **{"reference": plus_one} | changes)(copied)


def test_tune_of_an_autotuned_kernel_tries_its_space(tmp_path: Path) -> None:
    configs, errors = checked(tmp_path, copied_right)
    assert {(one.BLOCK, one.num_warps) for one in configs} == {(64, 2), (128, 4), (32, 2), (32, 8), (256, 2), (256, 8)}
    assert errors == [[]] * 6


def test_autotuned_kernel_is_served_from_the_folder_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "served").mkdir()
    monkeypatch.setenv(startup.ADOPT, str(tmp_path))
    monkeypatch.setenv(startup.ADOPT_OPTIONS, '{"miss": "default"}')
    kerneltune.autotune(CONFIGS, ["N"])(copied)
    assert startup.server().miss == "default"
