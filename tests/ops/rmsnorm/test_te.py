"""`baseline` and `pr593` of RMSNorm launch what their contract's table says: their results would not tell them apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kerneltune import ops
from kerneltune.checking.check import Checker
from kerneltune.ops.rmsnorm.baselines import te
from kerneltune.spec import Case

OPS = ops.load()
PROGRAMS = 132
"""Multiprocessors that tensors without memory are launched for."""


def case_of(op: str, M: int, N: int, dtype: str, quant: str = "none") -> Case:
    return Case("c", (("M", M), ("N", N)), dtype, quant, tuple((o, values[0]) for o, values in OPS[op].options.items()))


class Launches(list[tuple[str, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]):
    """Kernel, grid, arguments and constexprs of every launch; no kernel runs."""

    def of(self, name: str) -> Any:
        """Stands for a kernel."""

        class Kernel:
            def __getitem__(_, grid: tuple[int, ...]) -> Callable[..., None]:  # noqa: N805
                return lambda *args, **constexprs: self.append((name, grid, args, constexprs))

        return Kernel()

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    recorded = Launches()
    for name in ("_rmsnorm_fwd_te", "_transpose_te", "_rmsnorm_bwd_te", "_reduce_te"):
        monkeypatch.setattr(te, name, recorded.of(name))
    return recorded


@pytest.mark.parametrize("quant", ["none", "fp8", "fp8_t"])
@pytest.mark.parametrize(("M", "N", "dtype", "block", "blocked"), [
    (1000, 8192, "bfloat16", 8192, False), (1000, 8193, "bfloat16", 16384, True), (5, 65536, "float16", 32768, True),
    (1000, 4096, "float32", 4096, False), (5, 4097, "float32", 8192, True), (1, 65536, "float32", 16384, True),
])  # fmt: skip
def test_te_forward_launches_the_published_kernels_and_options(
    launches: Launches, M: int, N: int, dtype: str, quant: str, block: int, blocked: bool
) -> None:
    inputs = OPS["rmsnorm_fwd"].inputs(case_of("rmsnorm_fwd", M, N, dtype, quant), device="meta")
    te.run_baseline_fwd(inputs, te.TeFwdConfig(16))
    te.run_pr593_fwd(inputs, te.TePr593FwdConfig(16, 64, 128, 4))
    turned = ["_transpose_te"] if quant == "fp8_t" else []
    assert launches.names == ["_rmsnorm_fwd_te", "_rmsnorm_fwd_te", *turned]
    for (_, grid, _, options), pr593 in zip(launches, (False, True), strict=False):
        assert grid == (min(M, PROGRAMS),)
        assert (options["BLOCK"], options["BLOCKED"], options["num_warps"]) == (block, blocked, 16)
        assert options["HOIST"] == (pr593 and not blocked)
        assert options["TRANSPOSE"] == (quant == "fp8_t" and not pr593)
    for _, grid, args, options in launches[2:]:
        assert grid == (-(-M // 64), -(-N // 128))
        assert args[2:] == (M, N)
        assert options == {"ROWS": 64, "COLS": 128, "num_warps": 4}


@pytest.mark.parametrize(("M", "N", "dtype", "block", "blocked", "partials"), [
    (1000, 8192, "bfloat16", 8192, False, PROGRAMS), (5, 4096, "bfloat16", 4096, False, 5), (1, 192, "float16", 256, False, 1),
    (1000, 8193, "bfloat16", 8192, True, 1000), (5, 65536, "float16", 8192, True, 5), (1, 8193, "bfloat16", 8192, True, 1),
    (1000, 4096, "float32", 4096, False, PROGRAMS), (1000, 4097, "float32", 4096, True, 1000),
])  # fmt: skip
def test_te_backward_launches_the_published_kernels_and_options(
    launches: Launches, M: int, N: int, dtype: str, block: int, blocked: bool, partials: int
) -> None:
    inputs = OPS["rmsnorm_bwd"].inputs(case_of("rmsnorm_bwd", M, N, dtype), device="meta")
    for run, pr593 in ((te.run_baseline_bwd, False), (te.run_pr593_bwd, True)):
        launches.clear()
        dgamma = run(inputs, te.TeBwdConfig(16, 128, 64, 8))["dgamma"]
        at_once = pr593 and partials == 1  # one row of partials is the sum
        assert launches.names == ["_rmsnorm_bwd_te", "_reduce_te"][: 1 if at_once else 2]
        _, grid, args, options = launches[0]
        assert grid == (min(M, PROGRAMS),)
        assert (options["BLOCK"], options["BLOCKED"], options["PR593"], options["num_warps"]) == (block, blocked, pr593, 16)
        if at_once:
            assert args[5] is dgamma
            continue
        assert args[5].shape == (partials, N)
        assert args[5].dtype == torch.float32
        _, grid, args, options = launches[1]
        assert grid == (-(-N // 64),)
        assert args[1] is dgamma
        assert args[2:] == (partials, N)
        assert options == {"ROWS": 128, "COLS": 64, "num_warps": 8}


def test_te_configs_are_the_published_ones() -> None:
    """Three numbers of warps; six tiles each to transpose and to reduce by, which the baseline does not tune."""
    fwd, bwd = case_of("rmsnorm_fwd", 9, 9, "bfloat16", "fp8_t"), case_of("rmsnorm_bwd", 9, 9, "bfloat16")
    for op, case, counts in (("rmsnorm_fwd", fwd, (3, 18)), ("rmsnorm_bwd", bwd, (1, 18))):
        assert tuple(len(list(OPS[op].variant(name).configs(case))) for name in ("baseline", "pr593")) == counts
    assert list(OPS["rmsnorm_bwd"].variant("baseline").configs(bwd)) == [te.TeBwdConfig(8, 128, 64, 4)]


@pytest.mark.parametrize(("N", "dtype"), [(192, "float16"), (8193, "bfloat16"), (4097, "float32"), (1, "bfloat16")])
def test_te_backward_of_one_row_needs_no_reduction(N: int, dtype: str) -> None:
    op = OPS["rmsnorm_bwd"]
    checker = Checker(op, case_of("rmsnorm_bwd", 1, N, dtype), "cuda" if torch.cuda.is_available() else "cpu")
    for name in ("baseline", "pr593"):
        assert checker.run(op.variant(name), te.TeBwdConfig(8, 128, 64, 4))[1] == [], name


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter calls")
@pytest.mark.parametrize(("N", "fwd", "bwd"), [(64, (10, 4), (10, 4)), (4097, (10, 10), (40, 40))])
def test_te_kernels_load_gamma_once_per_program_unless_rows_are_blocked(
    monkeypatch: pytest.MonkeyPatch, N: int, fwd: tuple[int, int], bwd: tuple[int, int]
) -> None:
    """Ten rows, four programs. Blocked rows are one block of the forward, and two of the backward, which reads them twice."""
    counted: list[int] = []
    load = te._gamma_block  # noqa: SLF001  # device code, counted in the interpreter

    def counting(*args: Any) -> Any:
        counted[-1] += 1
        return load(*args)

    monkeypatch.setattr(te, "_gamma_block", counting)
    for op, config, want in (
        ("rmsnorm_fwd", {"baseline": te.TeFwdConfig(8), "pr593": te.TePr593FwdConfig(8, 64, 64, 4)}, fwd),
        ("rmsnorm_bwd", dict.fromkeys(("baseline", "pr593"), te.TeBwdConfig(8, 128, 64, 4)), bwd),
    ):
        inputs = OPS[op].inputs(case_of(op, 10, N, "float32"), device="cpu")
        counted.clear()
        for name in ("baseline", "pr593"):
            counted.append(0)
            OPS[op].variant(name).run(inputs, config[name])
        assert tuple(counted) == want, op
