"""RMSNorm beyond the contract suite: the published bytes model, special values, wrong tensors, workspaces."""

import csv
import itertools
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from asserting import every

from kerneltune import ops
from kerneltune.checking.check import Checker
from kerneltune.ops.rmsnorm import BwdConfig, FwdConfig, rmsnorm_bwd, rmsnorm_fwd
from kerneltune.ops.rmsnorm.kernels import forward
from kerneltune.spec import Case

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = ops.load()
PUBLISHED = Path(__file__).parents[2] / "data" / "te_pr593_rmsnorm_ab.csv"


def published_cells() -> list[tuple[str, dict[str, str], str]]:
    with PUBLISHED.open() as file:
        return [(f"{row['kind']} {row['M']}x{row['N']}", row, side) for row in csv.DictReader(file) for side in "AB"]


def test_traffic_gives_the_published_bandwidth_in_all_160_cells() -> None:
    cells = published_cells()
    assert len(cells) == 160
    for name, row, side in cells:
        op = OPS[f"rmsnorm_{row['kind']}"]
        options = tuple((option, values[0]) for option, values in op.options.items())
        case = Case(name, (("M", int(row["M"])), ("N", int(row["N"]))), row["dtype"], row["quant"], options)
        ms, gbps = float(row[f"{side}_ms"]), float(row[f"{side}_gbps"])
        gigabytes_ms = op.traffic(case).total / 1e6  # GB/s times ms
        # both printed numbers are rounded: the box that the true point lies in
        assert gigabytes_ms / (ms + 5e-5) <= gbps + 0.05, (name, side)
        assert gigabytes_ms / (ms - 5e-5) >= gbps - 0.05, (name, side)


def fwd(x: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> Any:
    return rmsnorm_fwd(x.to(WHERE), weight.to(WHERE), **kwargs)


def scalars(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {"scale": torch.tensor([scale], device=WHERE), "amax": torch.zeros(1, device=WHERE)}


def test_rmsnorm_fwd_to_fp8_saturates_values_beyond_the_range() -> None:
    weight = torch.zeros(128)
    weight[0] = 2.0**20
    s = scalars()
    out = fwd(torch.ones(128, 128), weight, eps=1e-5, quant="fp8_t", zero_centered=True, **s)
    y = out.y.float()
    assert y[:, 0].eq(448.0).all()
    assert y.isfinite().all()
    assert s["amax"].item() == pytest.approx(2.0**20 + 1, rel=1e-4)
    assert torch.equal(out.y_t.view(torch.uint8).t(), out.y.view(torch.uint8))


FP8_ON_GPU = [pytest.param(quant, marks=pytest.mark.gpu) for quant in ("fp8", "fp8_t")]
"""Triton's interpreter casts NaN to 384 (triton 3.7.1), so NaN under fp8 can be seen on a GPU only."""


@pytest.mark.parametrize("quant", ["none", *FP8_ON_GPU])
def test_rmsnorm_fwd_with_nan_spoils_only_its_row(quant: str) -> None:
    x = torch.full((8, 64), 0.5, dtype=torch.bfloat16)
    x[3, 7] = float("nan")
    s = {} if quant == "none" else scalars()
    y = fwd(x, torch.ones(64, dtype=torch.bfloat16), quant=quant, **s).y.float()
    assert y[3].isnan().all()
    assert y[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()
    if s:
        assert s["amax"].item() == pytest.approx(1.0, rel=1e-3), "amax passes over NaN"


def test_rmsnorm_fwd_accumulates_amax_and_never_clears_it() -> None:
    s = scalars()
    x, weight = torch.ones(4, 64), torch.ones(64)
    fwd(x, 3 * weight, quant="fp8", **s)
    first = s["amax"].item()
    fwd(x, weight, quant="fp8", **s)
    assert s["amax"].item() == first == pytest.approx(3.0, rel=1e-4)


def test_rmsnorm_gives_the_same_bits_in_every_run() -> None:
    x = torch.randn(33, 3000, device=WHERE)
    weight, dz = torch.randn(3000, device=WHERE), torch.randn(33, 3000, device=WHERE)
    first, second = rmsnorm_fwd(x, weight), rmsnorm_fwd(x, weight)
    assert torch.equal(first.y, second.y)
    assert torch.equal(first.rsigma, second.rsigma)
    a, b = rmsnorm_bwd(dz, x, first.rsigma, weight), rmsnorm_bwd(dz, x, first.rsigma, weight)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


@pytest.mark.parametrize(
    ("op_name", "M", "N", "quant", "values"),
    [
        ("rmsnorm_fwd", 3, 65536, "none", (1, 8192, False, 32, 0, 1, False)),  # held, the weight late
        ("rmsnorm_fwd", 3, 65528, "fp8", (1, 8192, False, 32, 0, 1, False)),
        ("rmsnorm_fwd", 3, 16384, "fp8", (1, 4096, False, 16, 2, 3, False)),  # the weight held, the next rows on their way
        ("rmsnorm_fwd", 3, 32760, "none", (1, 8192, False, 32, 1, 3, False)),
        ("rmsnorm_fwd", 3, 65536, "none", (1, 4096, False, 16, 0, 7, True)),  # held in part, the rest read again ahead of its use
        ("rmsnorm_fwd", 3, 65528, "fp8", (1, 8192, False, 32, 0, 2, True)),
        ("rmsnorm_fwd", 3, 17389, "fp8_t", (1, 4096, False, 16, 0, 3, True)),
        ("rmsnorm_fwd", 131, 1001, "fp8_t", (1, 1024, False, 4, 0, 1, False)),  # transposed by a second kernel
        ("rmsnorm_fwd", 1100, 300, "fp8_t", (2, 512, False, 2, 2, 3, False)),
        ("rmsnorm_fwd", 3, 16390, "fp8_t", (1, 8192, True, 8, 1, 2, False)),
        ("rmsnorm_bwd", 3, 12288, "none", (1, 4096, False, 16, 1, 3)),  # partial sums of neighbours side by side
        ("rmsnorm_bwd", 3, 12284, "none", (1, 4096, False, 16, 1, 3)),
        ("rmsnorm_bwd", 3, 12283, "none", (1, 4096, False, 16, 1, 3)),
        ("rmsnorm_bwd", 27, 5000, "none", (4, 2048, True, 4, 2, 3)),  # four rows of a tile in one of sums
        ("rmsnorm_bwd", 27, 1000, "none", (4, 1024, False, 4, 2, 3)),
    ],
)
def test_rmsnorm_configs_of_long_and_of_few_rows_agree_with_the_reference(
    op_name: str, M: int, N: int, quant: str, values: tuple[Any, ...]
) -> None:
    op = OPS[op_name]
    case = Case("c", (("M", M), ("N", N)), "bfloat16", quant, tuple((option, v[0]) for option, v in op.options.items()))
    variant = op.variant("optimized")
    assert variant.config is not None
    assert Checker(op, case, WHERE).run(variant, variant.config(*values))[1] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("quant", ["none", "fp8"])
@pytest.mark.parametrize(
    ("N", "stages"),
    [(1999, 2), (2048, 4), (2048, 5), (1537, 3)],  # the last load held or read again, whole or not, a row held as a whole
)
def test_rmsnorm_fwd_of_rows_held_in_part_agrees_with_the_reference(N: int, stages: int, quant: str, dtype: str) -> None:
    op = OPS["rmsnorm_fwd"]
    options = (("zero_centered", True), ("fp8_format", "e5m2"), ("row_pad", 3))
    case = Case("c", (("M", 5), ("N", N)), dtype, quant, options)
    config = FwdConfig(rows=2, cols=512, split=False, warps=4, ctas=0, stages=stages, reload=True)
    assert Checker(op, case, WHERE).run(op.variant("optimized"), config)[1] == []


def in_part(M: int, N: int, dtype: str = "bfloat16") -> tuple[list[tuple[int, int, int]], int]:
    """Return cols, warps and stages of the configs of a space that hold rows in part, and the number of other configs."""
    case = Case("c", (("M", M), ("N", N)), dtype)
    valid = list(OPS["rmsnorm_fwd"].variant("optimized").configs(case))
    held = [(c.cols, c.warps, c.stages) for c in valid if c.reload and c.stages > 1]
    return sorted(held), len(valid) - len(held)


def test_space_holds_only_long_rows_in_part() -> None:
    both = [(4096, 16, 2), (4096, 16, 3), (4096, 16, 5), (4096, 16, 7), (8192, 32, 2), (8192, 32, 3)]
    assert in_part(256, 65536) == (both, 37)
    assert in_part(1024, 32768) == (both, 85)
    assert in_part(29, 17389) == ([c for c in both if c != (4096, 16, 7)], 85)  # five loads: six are not held
    assert in_part(1024, 32768, "float32") == ([(4096, 16, 2), (4096, 16, 3)], 73)
    assert in_part(2048, 16384) == ([], 78)
    assert in_part(8192, 8192) == ([], 57)


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["none", "fp8", "fp8_t"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("M", "N"), [(256, 65536), (300, 40000)])
def test_rmsnorm_fwd_with_every_config_that_holds_rows_in_part_is_exact(M: int, N: int, dtype: str, quant: str) -> None:
    op = OPS["rmsnorm_fwd"]
    checker = Checker(op, Case("c", (("M", M), ("N", N)), dtype, quant, tuple((o, v[0]) for o, v in op.options.items())), "cuda")
    for cols, warps, stages in in_part(M, N)[0]:
        config = FwdConfig(1, cols, False, warps, 0, stages, True)
        assert checker.run(op.variant("optimized"), config)[1] == [], config


def transposed_beside_and_apart(
    monkeypatch: pytest.MonkeyPatch, M: int, N: int, config: FwdConfig, behind: int, runs: int
) -> None:
    """fp8_t with its transpose in the same launch, `behind` bytes later, gives the bits of two launches, in every run."""
    x, weight = torch.randn(M, N, dtype=torch.bfloat16).to(WHERE), torch.randn(N, dtype=torch.bfloat16).to(WHERE)
    launched = 0
    launch = forward.write_both

    def counted(*args: Any) -> Any:
        nonlocal launched
        launched += 1
        return launch(*args)

    monkeypatch.setattr(forward, "write_both", counted)
    monkeypatch.setattr(forward, "BEHIND_BYTES", behind)

    def outputs(cols: range) -> list[torch.Tensor]:
        monkeypatch.setattr(forward, "BEHIND_COLS", cols)
        s = scalars(3.0)
        out = fwd(x, weight, quant="fp8_t", config=config, **s)
        return [t.view(torch.uint8) for t in (out.y, out.y_t, out.rsigma, out.scale_inv, s["amax"])]

    apart = outputs(range(0))
    assert torch.equal(apart[0].t(), apart[1])
    for _ in range(runs):
        assert all(map(torch.equal, outputs(range(1, 1 << 20)), apart))
    assert launched == runs


@pytest.mark.parametrize(("M", "N"), [(388, 130), (4, 1000)])
@pytest.mark.parametrize(
    ("behind", "config"), [(1, FwdConfig(1, 1024, False, 4, 0, 1, False)), (999, FwdConfig(2, 512, False, 4, 0, 1, True))]
)
def test_rmsnorm_fwd_that_transposes_beside_other_rows_is_exact(
    monkeypatch: pytest.MonkeyPatch, M: int, N: int, behind: int, config: FwdConfig
) -> None:
    counted = torch.zeros(16, dtype=torch.int64, device=WHERE)
    monkeypatch.setattr(forward, "counters", lambda *_: nullcontext(counted))
    transposed_beside_and_apart(monkeypatch, M, N, config, behind, runs=1)
    assert not counted.any()


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N"), [(4096, 12288), (2052, 16384), (8192, 8200)])
def test_rmsnorm_fwd_that_transposes_beside_other_rows_awaits_their_writers(
    monkeypatch: pytest.MonkeyPatch, M: int, N: int
) -> None:
    for config, behind in (
        (FwdConfig(1, 4096, False, 16, 0, 1, True), 8_000_000),
        (FwdConfig(1, 4096, False, 8, 0, 1, False), 1),
    ):
        transposed_beside_and_apart(monkeypatch, M, N, config, behind, runs=50)


@pytest.mark.gpu
def test_rmsnorm_fwd_amax_of_many_programs_is_the_largest() -> None:
    x = torch.randn(2048, 16384, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(16384, device="cuda", dtype=torch.bfloat16)
    x[1777, 12345] = 60.0
    for before in (0.0, 1e4):
        s = scalars() | {"amax": torch.full((1,), before, device="cuda")}
        rmsnorm_fwd(x, weight, quant="fp8", config=FwdConfig(1, 4096, False, 16, 0, 1, False), **s)
        y = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6)
        assert s["amax"].item() == pytest.approx(max(before, y.abs().max().item()), rel=1e-5)


@pytest.mark.parametrize("config", [None, FwdConfig(1, 1024, True, 4, 1, 2, False)])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rmsnorm_fwd_of_fp32_rounds_once_to_out_dtype(
    out_dtype: torch.dtype, zero_centered: bool, config: FwdConfig | None
) -> None:
    x, weight = torch.randn(5, 1537, device=WHERE), torch.randn(1537, device=WHERE)
    out = rmsnorm_fwd(x, weight, zero_centered=zero_centered, out_dtype=out_dtype, config=config)
    want = (x * out.rsigma[:, None] * (weight + 1 if zero_centered else weight)).to(out_dtype)
    torch.testing.assert_close(out.rsigma, torch.rsqrt(x.square().mean(1) + 1e-6), rtol=1e-5, atol=0)
    unit = torch.finfo(out_dtype).eps if out_dtype == torch.float32 else 0.0
    torch.testing.assert_close(out.y, want, rtol=unit, atol=0)


@pytest.mark.gpu
def test_rmsnorm_graphs_with_shared_rows_replay_in_parallel() -> None:
    """Long rows make programs wait for each other through a workspace: every graph must have its own."""
    x = torch.randn(64, 65536, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(65536, device="cuda", dtype=torch.bfloat16)
    expected = rmsnorm_fwd(x, weight).y
    graphs, outputs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = [rmsnorm_fwd(x, weight).y for _ in range(3)]
        graphs.append(graph)
        outputs.append(out)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert every(torch.equal(y, expected) for out in outputs for y in out)


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N"), [(4096, 1024), (16384, 4096), (256, 65536)])
def test_rmsnorm_bwd_reduction_awaits_its_partial_sums(M: int, N: int) -> None:
    """Their reduction is launched before the kernel that writes them has ended, in graphs too, where steps follow each other.

    That is as the kernel begins, as its loops end, and where programs share rows.
    """
    dz, x = (torch.randn(M, N, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight, rsigma = torch.randn(N, device="cuda", dtype=torch.bfloat16), torch.rand(M, device="cuda")

    def steps() -> list[torch.Tensor]:
        gradients, gradient = [], dz
        for _ in range(4):
            gradient, dgamma = rmsnorm_bwd(gradient, x, rsigma, weight)
            gradients.append(dgamma * 2)
        return gradients

    expected = []
    gradient = dz
    for _ in range(4):
        gradient, dgamma = rmsnorm_bwd(gradient, x, rsigma, weight)
        torch.cuda.synchronize()
        expected.append(dgamma * 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = steps()
    for _ in range(20):
        graph.replay()
        assert every(map(torch.equal, captured, expected))
        assert every(map(torch.equal, steps(), expected))


@pytest.mark.gpu
def test_rmsnorm_with_every_cached_config_is_exact() -> None:
    """Compare every config that may be used, because ptxas 12.8 has wrong-code bugs for fp8 stores."""
    from kerneltune import cache, device

    for op in (OPS["rmsnorm_fwd"], OPS["rmsnorm_bwd"]):
        entries = [e for e in cache.load(op.name, device.current().slug) if e.variant == "optimized"]
        if not entries:
            pytest.skip(f"nothing is cached for {device.current().name}")
        for entry in entries:
            variant = op.variant(entry.variant)
            assert Checker(op, entry.case, "cuda", seed=7).run(variant, variant.config_from(entry.config))[1] == [], entry


def case_of(op: str, M: int, N: int, dtype: str = "bfloat16", quant: str = "none", **options: Any) -> Case:
    """Return a case with the operator's first options, except given options."""
    first = {name: values[0] for name, values in OPS[op].options.items()} | options
    return Case("c", (("M", M), ("N", N)), dtype, quant, tuple(first.items()))


@pytest.mark.parametrize(
    ("op_name", "M", "N", "quant", "values"),
    [
        ("rmsnorm_fwd", 70, 64, "none", (64, 64, False, 2, 0, 1, False)),  # the last tile is not whole
        ("rmsnorm_fwd", 70, 96, "fp8", (16, 128, False, 2, 2, 2, False)),  # resident programs, columns that are no power of two
        ("rmsnorm_fwd", 40, 100, "fp8_t", (32, 128, False, 4, 0, 1, False)),
        ("rmsnorm_fwd", 64, 100, "fp8_t", (32, 128, False, 4, 0, 1, False)),  # whole tiles
        ("rmsnorm_bwd", 70, 64, "none", (32, 64, False, 2, 2, 1)),  # four rows of a tile in one of sums
        ("rmsnorm_bwd", 70, 96, "none", (16, 128, False, 4, 2, 2)),
        ("rmsnorm_bwd", 40, 101, "none", (16, 128, False, 2, 2, 3)),  # elements one by one
    ],
)
def test_rmsnorm_of_short_rows_in_tiles_agrees_with_the_reference(
    op_name: str, M: int, N: int, quant: str, values: tuple[Any, ...]
) -> None:
    op = OPS[op_name]
    variant = op.variant("optimized")
    assert variant.config is not None
    config, case = variant.config(*values), case_of(op_name, M, N, quant=quant)
    assert variant.invalid(case, config) is None
    assert Checker(op, case, WHERE).run(variant, config)[1] == []


@pytest.mark.parametrize(("M", "launched"), [(64, ["_rmsnorm_fwd_at_once"]), (48, ["_rmsnorm_fwd_once", "transpose_bytes"])])
def test_rmsnorm_fwd_of_short_rows_in_whole_tiles_transposes_in_one_launch(
    M: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    for name in ("_rmsnorm_fwd_at_once", "_rmsnorm_fwd_once", "transpose_bytes"):
        launcher = partial(lambda kernel, *_, **__: names.append(kernel), name)
        monkeypatch.setattr(forward, name, {(M // 32,): launcher, (2,): launcher, (1,): launcher})
    x, config = torch.ones(M, 128, dtype=torch.bfloat16), FwdConfig(32, 128, False, 4, ctas=0, stages=1, reload=False)
    rmsnorm_fwd(x, None, quant="fp8_t", config=config, **{k: v.cpu() for k, v in scalars().items()})
    assert names == launched


@pytest.mark.parametrize(
    ("rows", "cols", "warps", "sums"),
    [(1, 1024, 4, 1), (4, 2048, 8, 1), (4, 1024, 8, 2), (32, 128, 4, 8), (32, 64, 4, 16), (2, 64, 8, 2)],
)
def test_sum_rows_is_the_number_of_rows_that_warps_load_at_once(rows: int, cols: int, warps: int, sums: int) -> None:
    assert BwdConfig(rows, cols, False, warps, ctas=1, stages=2).sum_rows(itemsize=2) == sums


@pytest.mark.parametrize("op_name", ["rmsnorm_fwd", "rmsnorm_bwd", "rmsnorm_add_fwd", "rmsnorm_add_bwd"])
def test_default_config_is_valid_for_rows_of_any_length(op_name: str) -> None:
    variant = OPS[op_name].variant("optimized")
    lengths = [
        1,
        16,
        64,
        96,
        128,
        192,
        300,
        512,
        1000,
        1024,
        1536,
        2560,
        2880,
        3584,
        4099,
        5376,
        7168,
        8192,
        12288,
        17389,
        65536,
        200_000,
    ]
    for dtype, M, N in itertools.product(("bfloat16", "float32"), (1, 29, 4096, 1 << 20), lengths):
        for quant in OPS[op_name].quants:
            case = case_of(op_name, M, N, dtype, quant)
            assert variant.invalid(case, variant.default_config(case)) is None, case.label


@pytest.mark.parametrize("op_name", ["rmsnorm_fwd", "rmsnorm_bwd"])
@pytest.mark.parametrize("N", [64, 128, 256, 512])
def test_default_config_of_many_short_rows_loads_at_least_2048_elements(op_name: str, N: int) -> None:
    """A program per row of 256 bytes moved 1048576 of them at 4 % of the ceiling."""
    config = OPS[op_name].variant("optimized").default_config(case_of(op_name, 1 << 20, N))
    assert config.rows * config.cols >= 2048


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N", [96, 97])
def test_rmsnorm_bwd_of_16_bit_rows_accepts_an_fp32_weight_or_none(dtype: torch.dtype, N: int) -> None:
    dz, x = (torch.randn(9, N, device=WHERE).to(dtype) for _ in range(2))
    weight = torch.randn(N, device=WHERE)
    rsigma = rmsnorm_fwd(x, weight).rsigma
    dx, dgamma = rmsnorm_bwd(dz, x, rsigma, weight, zero_centered=True)
    r, dz64, x64 = rsigma.double()[:, None], dz.double(), x.double()
    for got, gamma in ((dx, weight.double() + 1), (rmsnorm_bwd(dz, x, rsigma, None)[0], torch.ones_like(weight).double())):
        want = r * (dz64 * gamma - r * r * (dz64 * gamma * x64).mean(1, keepdim=True) * x64)
        torch.testing.assert_close(got.double(), want, rtol=2.0**-6, atol=1e-2)
    assert dgamma is not None
    assert dgamma.dtype == torch.float32
    torch.testing.assert_close(dgamma.double(), (dz64 * x64 * r).sum(0), rtol=1e-5, atol=1e-5)
    alone, nothing = rmsnorm_bwd(dz, x, rsigma, weight, zero_centered=True, with_dgamma=False)
    assert torch.equal(alone, dx)
    assert nothing is None


@pytest.mark.parametrize(
    ("rows", "columns", "is_read_again"), [(32768, 3584, True), (4096, 3584, False), (32768, 3400, False), (32768, 12296, False)]
)
@pytest.mark.parametrize("quant", ["none", "fp8", "fp8_t"])
def test_default_config_reloads_many_rows_that_vectors_fit(rows: int, columns: int, is_read_again: bool, quant: str) -> None:
    options = tuple((name, values[0]) for name, values in OPS["rmsnorm_fwd"].options.items())
    case = Case("", (("M", rows), ("N", columns)), "bfloat16", quant, options)
    config = OPS["rmsnorm_fwd"].variant("optimized").default_config(case)
    assert config.reload is is_read_again
