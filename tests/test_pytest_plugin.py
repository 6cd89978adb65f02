"""The fixtures that kerneltune gives to other packages' tests."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from subprocesses import environment
from warm_python import python

from kerneltune import pytest_plugin
from kerneltune.measuring import rounds
from kerneltune.pytest_plugin import KernelTime

ROOT = Path(__file__).parents[1]
USERS = """
import pytest, torch, triton, triton.language as tl

@triton.jit
def _double(x_ptr, y_ptr, N, BLOCK: tl.constexpr, LESS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, at < N, other=0.0) * 2, at < N - LESS)

def double(x, less=0):
    y = torch.empty_like(x)
    _double[(1,)](x, y, x.numel(), 64, less)
    return y

def test_right(kernel_check):
    kernel_check(double, lambda x: x * 2, [torch.randn(50)])

def test_unwritten(kernel_check):
    kernel_check(double, lambda x, _less: x * 2, [torch.randn(50), 1])

def test_overwrites(kernel_check):
    kernel_check(lambda x: x.mul_(2).clone(), lambda x: x * 2, [torch.randn(50, 50)])

def test_reference_raises(kernel_check):
    kernel_check(double, lambda x: x.no_such_name, [torch.randn(50)])

def test_other_outputs(kernel_check):
    kernel_check(lambda x: (x, x), lambda x: x, [torch.randn(50)])

@pytest.mark.parametrize("given", [lambda x: [], lambda x: None, lambda x: x.sum() * 1j])
def test_outputs_that_hold_nothing_to_compare(kernel_check, given):
    wrong = lambda x: given(x) if given(torch.ones(1)) in ([], None) else x.sum() * 2j
    kernel_check(given, wrong, [torch.randn(50)])

def test_whole_numbers_and_doubles(kernel_check):
    expected = [torch.tensor([200000]), torch.ones(1, dtype=torch.float64)]
    kernel_check(lambda: [expected[0] + 1, expected[1] + 1e-9], lambda: expected, [], rtol=1e-12)

WRONG = [{"rtol": float("nan")}, {"rtol": 1.0}, {"atol": -1}, {"args": 3}, {"reference": 3}, {"reference": double}]

@pytest.mark.parametrize("changes", WRONG)
def test_refused(kernel_check, changes):
    kernel_check(**{"run": double, "reference": lambda x: x * 2, "args": [torch.randn(50)]} | changes)

def test_gradient(kernel_check):
    kernel_check(
        lambda x: torch.autograd.grad((x * x).sum(), x)[0], lambda x: 2 * x.detach(), [torch.randn(9, requires_grad=True)]
    )

KEPT = []

def test_kept(kernel_check):
    def kept(x):
        KEPT.append(double(x))
        return KEPT[0]
    kernel_check(kept, lambda x: x * 2, [torch.randn(50)])

def test_vector_overwritten(kernel_check):
    kernel_check(lambda x: x.mul_(2).clone(), lambda x: x * 2, [torch.randn(50)])

def test_overwritten_in_a_list(kernel_check):
    kernel_check(lambda pair: pair["x"][1].mul_(2).clone(), lambda pair: pair["x"][1] * 2, [{"x": [3, torch.randn(50)]}])

def test_kept_of_a_list(kernel_check):
    kept = []
    def keep(values):
        kept.append(double(values[0]))
        return kept[0]
    kernel_check(keep, lambda values: values[0] * 2, [[torch.randn(50)]])

def test_kept_of_an_expanded_tensor(kernel_check):
    kept = []
    def keep_sum(x):
        kept.append(x + 1)
        return kept[0]
    kernel_check(keep_sum, lambda x: x + 1, [torch.ones(1).expand(50)])

def test_raises(kernel_check):
    def broken(x):
        raise RuntimeError("no such layout")
    kernel_check(broken, lambda x: x, [torch.randn(50)])

@pytest.mark.parametrize("given", [torch.ones(4, device="meta"), torch.ones(4).to_sparse()])
def test_without_values(kernel_check, given):
    kernel_check(lambda x: x, lambda x: x, [given])

def test_sparse_output(kernel_check):
    kernel_check(lambda x: x.to_sparse(), lambda x: x * 1, [torch.eye(4)])

def test_outputs_in_another_order(kernel_check):
    kernel_check(lambda x: {"a": x * 2, "b": x}, lambda x: {"b": x, "a": x * 2}, [torch.randn(50)])

def test_time(kernel_time):
    assert kernel_time(double, [torch.randn(50)]) <= 1.02 * kernel_time(double, [torch.randn(50)])
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="what the fixtures do without a GPU")
def test_fixtures_check_in_the_interpreter_and_skip_times(tmp_path: Path) -> None:
    (tmp_path / "test_users.py").write_text(USERS)
    plugin = [] if entry_points(group="pytest11", name="kerneltune") else ["-p", "kerneltune.pytest_plugin"]
    command = [python(), "-m", "pytest", *plugin, "-p", "no:cacheprovider", "-rsf", "test_users.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(TRITON_INTERPRET="1"), capture_output=True, text=True, timeout=800
    )
    text = done.stdout
    assert "23 failed, 3 passed, 1 skipped" in text, text[-3000:] + done.stderr[-2000:]
    assert "kernel_check: double: output: 1 of 50 wrong, first at (49,): nan, expected " in text
    assert "kernel_check: <lambda>: inputs: argument 0 was overwritten, and is no output" in text
    assert "reference: AttributeError: " in text or "reference: 'Tensor' object has no attribute 'no_such_name'" in text
    assert "outputs: output 0, output 1: expected output" in text
    for name in ("kept", "keep", "keep_sum"):
        assert f"kernel_check: {name}: run 2: output: 50 of 50 wrong" in text
    for line in (
        "<lambda>: outputs: none: expected one, the reference gives none",
        "<lambda>: output: NoneType: expected a tensor",
        "<lambda>: output: 1 of 2 wrong, first at (1,): ",
        "<lambda>: output 0: 1 of 1 wrong, first at (0,): 200001, expected 200000; "
        "output 1: 1 of 1 wrong, first at (0,): 1.000000001, expected 1",
        "double: rtol: nan: expected a number from 0 to below 1",
        "double: rtol: 1.0: expected a number from 0 to below 1",
        "double: atol: -1: expected a number from 0 to below inf",
        "<lambda>: inputs: argument 0['x'][1] was overwritten, and is no output",
        "<lambda>: outputs: output is torch.sparse_coo: expected a dense tensor",
        "broken: the launch failed: test_users.py:",
        "<lambda>: argument 0: torch.strided on meta: expected a dense tensor with values",
        "<lambda>: argument 0: torch.sparse_coo on cpu: expected a dense tensor with values",
    ):
        assert f"kernel_check: {line}" in text, text[-3000:]
    assert "kernel_check: int: expected a list of arguments" in text
    assert "kernel_check: 3: expected a function" in text
    assert "kernel_check: double: compared with itself: expected another function as reference" in text
    assert "kernel_time needs a GPU: times of the interpreter mean nothing" in text


@pytest.mark.parametrize(
    "made",
    [lambda x: x, lambda x: x[:, ::2], lambda x: x.T, lambda x: x[:1].expand(4, 9), lambda x: x.unfold(1, 4, 2), lambda x: x[:0]],
)
def test_copy_of_an_argument_has_its_strides_and_values(made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = made(torch.randn(7, 9))
    copies = pytest_plugin.copied(x), pytest_plugin.copied(x, 0.5)
    assert [copy.stride() for copy in copies] == [x.stride()] * 2
    assert torch.equal(copies[0], x)
    assert torch.equal(copies[1], x / 2)
    assert not x.numel() or copies[0].data_ptr() != x.data_ptr()


def test_plugin_is_an_entry_point_and_imports_neither_torch_nor_triton() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"kerneltune": "kerneltune.pytest_plugin"}
    code = "import sys, kerneltune.pytest_plugin; print({'torch', 'triton'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("mine_us", "peer_us", "factor", "is_within", "is_less"),
    [
        (100.0, 100.0, 1.02, True, True),
        (101.0, 100.0, 1.0, False, False),
        (100.0, 100.0, 1.0, True, False),
        (110.0, 100.0, 1.02, False, False),
        (4.3, 4.0, 1.0, True, False),
        (90.0, 100.0, 1.0, True, True),
    ],
)
def test_times_are_compared_by_the_interval_of_their_ratio(
    mine_us: float, peer_us: float, factor: float, is_within: bool, is_less: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)

    def measured(sides: Any) -> list[Any]:
        return [us * (1 + rng.normal(0, 0.001, 30)) for us in (*(side[1]() for side in sides), sides[0][1]())]

    monkeypatch.setattr(pytest_plugin, "measure", measured)
    noted: dict[str, object] = {}

    def mine() -> float:
        return mine_us

    def peer() -> float:
        return peer_us

    a, b = (KernelTime(run, (), noted.__setitem__) for run in (mine, peer))
    assert (a <= factor * b) == is_within
    assert (factor * b >= a) == is_within
    assert (a < factor * b) == is_less
    assert (a <= factor * peer_us) == is_within
    assert abs(float(str(noted["time of mine in µs"])) / mine_us - 1) < 0.001
    assert repr(a).startswith("mine: ")
    with pytest.raises(TypeError, match=r"^mine: a time alone is neither true nor false: expected a comparison with a limit$"):
        assert a
    assert repr(a).endswith(" µs")


@pytest.mark.parametrize("fails_at_all", [False, True])
def test_side_that_no_graph_can_hold_lets_all_sides_be_timed_launch_by_launch(
    fails_at_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def contender(run: Callable[[int], Any], sets: int, policy: rounds.Policy) -> float:
        if (policy.graph or fails_at_all) and run(0) == "waits":
            raise RuntimeError("no CUDA graph can hold it")
        made.append((run(0), sets, policy.name))
        return float(len(made))

    monkeypatch.setattr(rounds, "Contender", contender)
    monkeypatch.setattr(rounds, "interleave", lambda contenders, throttled: contenders)
    monkeypatch.setattr(rounds, "num_input_sets", lambda *_: 3)
    monkeypatch.setattr("kerneltune.checking.memory.gpu_free_bytes", lambda: 1 << 30)
    sides = [("quick", lambda: "quick", ()), ("waits", lambda: "waits", ())]
    if fails_at_all:
        with pytest.raises(pytest.fail.Exception, match=r"^kernel_time: waits: cannot be timed: RuntimeError: no CUDA graph"):
            pytest_plugin.measure(sides)
        return
    with pytest.warns(UserWarning, match=r"^kernel_time: all sides are timed launch by launch: waits: cannot be timed: "):
        assert pytest_plugin.measure(sides) == [2.0, 3.0, 4.0]
    assert made == [("quick", 3, "cold"), ("quick", 3, "eager"), ("waits", 3, "eager"), ("quick", 3, "eager")]


@pytest.mark.gpu
def test_side_that_waits_for_the_gpu_is_timed_with_a_warning() -> None:
    x = torch.randn(1 << 20, device="cuda")
    with pytest.warns(UserWarning, match=r"no CUDA graph can hold it"):
        waiting, doubled, _again = pytest_plugin.measure([("mask", lambda x: x[x > 0], (x,)), ("double", lambda x: 2 * x, (x,))])
    assert float(np.median(waiting)) > float(np.median(doubled)) > 0
