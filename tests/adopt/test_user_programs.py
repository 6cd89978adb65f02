"""Programs as users write them, from capture to check, with the messages that a stranger reads."""

import os
import subprocess
from pathlib import Path

import pytest
from adopted import ROOT, author_configs, kernel_of, write_table
from command_line import run
from warm_python import python

from kerneltune.adopt.overview import read_capture
from kerneltune.cli import console

DROPOUT = """
import sys
import torch, triton
import triton.language as tl

@triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64}, num_warps=2)], key=["length"])
@triton.jit
def dropout(x_ptr, out_ptr, length, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, at) > p
    tl.store(out_ptr + at, tl.where(keep, tl.load(x_ptr + at, mask=at < length), 0.0), mask=at < length)

for step, length in enumerate([40, 70, 40, 70, 40, 70]):
    out = torch.empty(length)
    dropout[lambda meta: (triton.cdiv(length, meta["BLOCK"]),)](torch.ones(length), out, length, 0.5, 1000 + step)
print("trained")
"""
GATED = """
import torch, triton
import triton.language as tl

@triton.jit
def relu(x):
    return tl.maximum(x, 0.0)

@triton.jit
def gated(inputs, out, n, ACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.load(inputs[0] + at, mask=at < n), tl.load(inputs[1] + at, mask=at < n)
    tl.store(out + at, ACT(gate) * up, mask=at < n)

if __name__ == "__main__":
    for n in (50, 90):
        out = torch.empty(n)
        grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)
        gated[grid]((torch.ones(n), torch.ones(n)), out, n, ACT=relu, BLOCK=32)
"""

PAIRS = """
from collections import namedtuple
import torch, triton
import triton.language as tl

Pair = namedtuple("Pair", "first second")

@triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64}, num_warps=2)], key=["n"])
@triton.jit
def weighted(pair, terms, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(pair.first + at, mask=at < n) * tl.load(pair.second + at, mask=at < n)
    for place in tl.static_range(len(terms)):
        total += tl.load(terms[place][0] + at, mask=at < n) * terms[place][1]
    tl.store(out + at, total, mask=at < n)

for n in (0, 40, 70):
    def ones(): return torch.ones(n)
    grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)
    weighted[grid](Pair(ones(), ones()), ((ones(), 2), (ones(), 3)), ones(), n)
"""

TUNED = '@triton.autotune([triton.Config({"BM": 2, "BN": 32}), triton.Config({"BM": 4, "BN": 16}, num_warps=2)], key=["m", "n"])'
SCALED = """
@triton.jit
def scaled(x, factor, bias, out, m, n, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM)[:, None], tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    at, inside = rows * n + columns, (rows < m) & (columns < n)
    value = tl.load(x + at, mask=inside) * tl.load(factor)
    if HAS_BIAS:
        value += tl.load(bias + columns, mask=columns < n)
    tl.store(out + at, value, mask=inside)
"""
LAUNCHED = """
def run(kernel, m, n, bias):
    x, out = torch.randn(m, n), torch.empty(m, n)
    grid = lambda meta: (triton.cdiv(meta["m"], meta["BM"]), triton.cdiv(meta["n"], meta["BN"]))
    launch = functools.partial(kernel[grid], factor=torch.tensor(3.0), bias=bias, HAS_BIAS=bias.numel() > 0)
    launch(x=x, out=out, m=m, n=n)
    assert torch.allclose(out, 3 * x + (bias if bias.numel() else 0))
def work(kernel, n):
    with lock:  # two kernels at once are more than Triton's interpreter takes
        run(kernel, 3, n, torch.empty(0))
"""
SHAPES = {
    "keywords of a partial, a 0-dim, an empty tensor": (
        TUNED + SCALED,
        "run(scaled, 5, 40, torch.ones(40)); run(scaled, 5, 40, torch.empty(0))",
    ),
    "a loop over a dict, launched by threads": (
        SCALED + "KERNELS = {n: " + TUNED[1:] + "(scaled) for n in (1, 2)}\nfor scaled_by in KERNELS.values():\n    pass",
        "list(ThreadPoolExecutor(4).map(lambda i: work(KERNELS[1 + i % 2], 33 + i % 2), range(8)))",
    ),
    "arguments with names that methods of this package have": (
        TUNED + SCALED.replace("factor", "kernel").replace("bias", "autotuner"),
        "for n in (33, 40):\n"
        "    grid = lambda meta: (triton.cdiv(3, meta['BM']), triton.cdiv(n, meta['BN']))\n"
        "    other = {'kernel': torch.tensor(3.0), 'autotuner': torch.empty(0), 'HAS_BIAS': False}\n"
        "    scaled[grid](x=torch.ones(3, n), out=torch.empty(3, n), m=3, n=n, **other)",
    ),
    "a module of a folder that the program leaves": (
        "sys.path.insert(0, 'lib'); import scaled_lib; os.chdir(os.sep); sys.path.pop(0); scaled = scaled_lib.scaled",
        "run(scaled, 3, 33, torch.empty(0)); run(scaled, 2, 33, torch.empty(0))",
    ),
}
"""Ways in which programs hold and launch a kernel: what defines the kernel, and what launches two classes of it."""

PLAIN = DROPOUT.replace(DROPOUT[DROPOUT.index("@triton.autotune") : DROPOUT.index("@triton.jit")], "").replace(
    "1000 + step", "1000 + step, BLOCK=32"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console.console, "width", 150)
    (tmp_path / "train.py").write_text(DROPOUT)
    (tmp_path / "gate.py").write_text(GATED)
    return tmp_path


def capture(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Capture a program in processes of their own; commands on the capture run in this process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "150"}
    command = [python(), "-m", "kerneltune", "capture", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_capture_of_a_loop_with_a_seed_names_it_and_with_ignore_arg_has_one_class(folder: Path) -> None:
    program = ["--", python(), "train.py"]
    first = capture(folder, "--out", "every", *program)
    assert (first.returncode, first.stdout) == (0, "trained\n")
    message = "__main__.dropout: 6 classes, 2 without seed: if it is a seed or a counter, capture with --ignore-arg seed"
    assert message in first.stderr.splitlines()
    assert run("adopt", "lint", "every").stdout.splitlines() == [message]
    second = capture(folder, "--out", "few", "--ignore-arg", "seed", "--ignore-arg", "sead", *program)
    hints = [line for line in second.stderr.splitlines() if "--ignore-arg" in line]
    assert hints == ["--ignore-arg sead: no captured kernel has this argument; did you mean seed?"]
    assert run("tune", "few", "--dry-run").stdout.startswith("2 classes, up to 4 configs: about ")


def test_capture_of_a_plain_kernel_with_a_seed_names_it(folder: Path) -> None:
    (folder / "plain.py").write_text(PLAIN)
    captured = capture(folder, "--plain", "--out", "plain", "--", python(), "plain.py")
    message = "__main__.dropout: 6 classes, 2 without seed: if it is a seed or a counter, capture with --ignore-arg seed"
    assert message in captured.stderr.splitlines()


def test_lint_of_a_plain_kernel_with_tuple_and_function_reports_nothing(folder: Path) -> None:
    captured = capture(folder, "--plain", "--out", "cap", "--", python(), "gate.py")
    assert captured.returncode == 0, captured.stderr
    linted = run("adopt", "lint", "cap")
    assert (linted.exit_code, linted.stdout) == (0, "nothing to report; no check yet: kerneltune sweep cap --check-only\n")
    dry_run = run("tune", "cap", "--dry-run").stdout
    classes, configs = (int(word) for word in dry_run.split() if word.isdigit())
    assert classes == 2
    assert configs > 10  # the blocks that tuning may find free to change as well


def test_sweep_of_a_capture_with_numbers_in_tuples_checks_all_pairs(folder: Path) -> None:
    (folder / "pairs.py").write_text(PAIRS)
    captured = capture(folder, "--out", "cap", "--", python(), "pairs.py")
    assert captured.returncode == 0, captured.stderr
    checked = run("sweep", "cap", "--check-only")
    assert checked.exit_code == 0, checked.output
    assert "optimized: 2 configs on 2 cases, all pairs" in checked.stdout
    assert "\nno reference: __main__.weighted: " in checked.stdout
    assert run("tune", "cap", "--dry-run").stdout.startswith("2 classes, up to 4 configs: about ")


def test_capture_of_launches_without_elements_fails_with_the_reason(folder: Path) -> None:
    (folder / "pairs.py").write_text(PAIRS.replace("(0, 40, 70)", "(0,)"))
    captured = capture(folder, "--out", "cap", "--", python(), "pairs.py")
    message = captured.stderr.splitlines()[-1]
    assert (captured.returncode, message) == (1, "nothing was captured: no tensor of a launch has an element")
    assert run("sweep", "cap", "--check-only").exit_code == 2
    (folder / "pairs.py").write_text(PAIRS)
    assert capture(folder, "--out", "cap", "--", python(), "pairs.py").returncode == 0
    (folder / "pairs.py").write_text(PAIRS.replace("(0, 40, 70)", "(0,)"))
    again = capture(folder, "--out", "cap", "--", python(), "pairs.py")
    assert (again.returncode, again.stderr.splitlines()[-1]) == (1, message)  # of this run: the folder keeps earlier launches


def test_tune_of_a_kernel_defined_under_main_fails_with_the_reason(folder: Path) -> None:
    head, body = PAIRS[: PAIRS.index("@triton.autotune")], PAIRS[PAIRS.index("@triton.autotune") :]
    guarded = "".join(f"    {line}" for line in body.splitlines(keepends=True))
    (folder / "pairs.py").write_text(f'{head}if __name__ == "__main__":\n{guarded}')
    assert capture(folder, "--out", "cap", "--", python(), "pairs.py").returncode == 0
    dry_run = run("tune", "cap", "--dry-run")
    message = 'pairs.py has no kernel of this name outside `if __name__ == "__main__"`: capture again'
    assert (dry_run.exit_code, message in " ".join(dry_run.stderr.split())) == (2, True), dry_run.stderr


def test_sweep_of_a_capture_names_kernels_that_it_cannot_launch(folder: Path) -> None:
    head, body = PAIRS[: PAIRS.index("@triton.autotune")], PAIRS[PAIRS.index("@triton.autotune") :]
    definition, work = body[: body.index("for n in")], body[body.index("for n in") :]
    indented = "".join(f"    {line}" for line in definition.replace("weighted", "made").splitlines(keepends=True))
    factory = f"def make():\n{indented}    return made\nmade = make()\n"
    (folder / "pairs.py").write_text(
        f"{head}{definition}{factory}{work}    made[grid](Pair(ones(), ones()), ((ones(), 2),), ones(), n)\n"
    )
    assert capture(folder, "--out", "cap", "--", python(), "pairs.py").returncode == 0
    checked = run("sweep", "cap", "--check-only")
    message = "not checked: __main__.make.<locals>.made: a function made the kernel, so that it cannot be imported by name"
    assert (checked.exit_code, message in " ".join(checked.stdout.split())) == (0, True), checked.stdout


@pytest.mark.parametrize("shape", SHAPES)
def test_program_of_an_uncommon_shape_is_captured_forecast_and_served(folder: Path, shape: str) -> None:
    head = "import torch, triton\nimport triton.language as tl\n"
    definition, work = SHAPES[shape]
    imports = "import functools, os, sys, threading\nfrom concurrent.futures import ThreadPoolExecutor\nlock = threading.Lock()\n"
    (folder / "program.py").write_text(f"{imports}{head}{definition}\n{LAUNCHED}\n{work}\nprint('ended')\n")
    (folder / "lib").mkdir()
    (folder / "lib" / "scaled_lib.py").write_text(head + TUNED + SCALED)
    program = ["--", python(), "program.py"]
    captured = capture(folder, "--out", "cap", *program)
    assert (captured.returncode, captured.stdout) == (0, "ended\n"), captured.stderr
    forecast = run("tune", "cap", "--dry-run")
    assert (forecast.exit_code, forecast.stdout[:31]) == (0, "2 classes, up to 4 configs: abo"), forecast.stderr
    by_kernel = read_capture(folder / "cap").by_kernel()
    write_table(folder / "cap", *(kernel_of(classes, author_configs(classes[0])[1:]) for classes in by_kernel))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [python(), "-m", "kerneltune", "serve", "--configs", "cap", "--miss", "error", *program]
    served = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    launches = sum(read_capture(folder / "cap").notes.launches[one.digest].launches for classes in by_kernel for one in classes)
    assert (served.returncode, served.stdout) == (0, "ended\n"), served.stderr
    assert f"{launches} launches served, 0 not tuned" in served.stderr
