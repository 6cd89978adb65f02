"""Casts and transposes of many weights: in place, in one launch where sizes allow, and what wrong arguments are told."""

import re
from dataclasses import replace

import pytest
import torch

from kerneltune.kernel_lib.agreement import same_bits
from kerneltune.kernel_lib.tl_lib import FP8_DTYPES
from kerneltune.ops import multi_cast_transpose as multi
from kerneltune.ops.multi_cast_transpose import MultiCastConfig, multi_cast_transpose
from kerneltune.ops.multi_cast_transpose.kernels import tiles

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = MultiCastConfig(rows=64, cols=64, group=2, warps=4, ctas=0, stages=1)


def weights(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.randn(shape, device=WHERE, dtype=torch.bfloat16) for shape in shapes]


def scalars(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(2.0, 40.0, count, device=WHERE), torch.zeros(count, device=WHERE)


def agrees(
    xs: list[torch.Tensor],
    scales: torch.Tensor,
    amaxes: torch.Tensor,
    out: multi.MultiCast,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> None:
    limit = torch.finfo(dtype).max
    for i, x in enumerate(xs):
        want = (x.float() * scales[i]).clamp(-limit, limit).to(dtype)
        assert same_bits(f"q{i}", out.casts[i], want) == []
        assert same_bits(f"qt{i}", out.transposes[i], out.casts[i].t().contiguous()) == []
        assert float(amaxes[i]) == float(x.float().abs().nan_to_num(0.0, torch.inf).max())
    assert torch.allclose(out.scale_inv, 1 / scales, rtol=1e-6)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """Record the sizes of every launch."""
    grids: list[list[tuple[int, ...]]] = []
    table = tiles.table_of
    monkeypatch.setattr(tiles, "table_of", lambda ts, *rest: (grids.append([t[3:5] for t in ts]), table(ts, *rest))[1])
    return grids


def test_cast_transpose_of_whole_and_odd_sizes_in_one_call_is_exact(launched: list[list[tuple[int, ...]]]) -> None:
    xs = weights((64, 32), (33, 20), (16, 128), (48, 80), (5, 7), (70, 130))
    scales, amaxes = scalars(6)
    agrees(xs, scales, amaxes, multi_cast_transpose(xs, scales, amaxes, config=SMALL))
    assert launched == [[(64, 32), (16, 128), (48, 80)], [(33, 20), (5, 7), (70, 130)]]


def test_cast_transpose_of_unaligned_addresses_is_exact(launched: list[list[tuple[int, ...]]]) -> None:
    flat = torch.randn(64 * 32 + 1, device=WHERE).to(torch.bfloat16)
    xs = [flat[1:].view(64, 32), flat[:-1].view(32, 64)]
    scales, amaxes = scalars(2)
    agrees(xs, scales, amaxes, multi_cast_transpose(xs, scales, amaxes, config=SMALL))
    assert launched == [[(32, 64)], [(64, 32)]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cast_transpose_with_one_size_a_multiple_of_16_is_exact(dtype: torch.dtype) -> None:
    """There ptxas 12.8 compiles a tile of fp8 that is stored both ways into wrong code."""
    xs = [x.to(dtype) for x in weights((64, 20), (20, 64), (48, 40), (40, 48), (16, 19), (130, 144))]
    scales, amaxes = scalars(6)
    agrees(xs, scales, amaxes, multi_cast_transpose(xs, scales, amaxes, config=SMALL))


def test_cast_transpose_with_a_partial_last_group_of_row_blocks_is_exact() -> None:
    xs = weights((320, 160), (192, 80), (64, 208))
    scales, amaxes = scalars(3)
    agrees(xs, scales, amaxes, multi_cast_transpose(xs, scales, amaxes, config=SMALL))


def test_cast_transpose_of_70_weights_is_exact() -> None:
    xs = weights(*((16 * (1 + i % 3), 16 * (1 + i % 2)) for i in range(70)))
    scales, amaxes = scalars(70)
    agrees(xs, scales, amaxes, multi_cast_transpose(xs, scales, amaxes, config=SMALL))


def test_cast_transpose_writes_given_outputs_and_never_clears_amax() -> None:
    xs = weights((32, 48), (16, 16))
    scales, amaxes = scalars(2)
    first = multi_cast_transpose(xs, scales, amaxes, config=SMALL)
    xs[0] *= 0.5
    kept = amaxes.clone()
    outputs = list(zip(first.casts, first.transposes, strict=True))
    again = multi_cast_transpose(xs, scales, amaxes, outputs=outputs, config=SMALL)
    assert [q.data_ptr() for q in again.casts] == [q.data_ptr() for q in first.casts]
    assert same_bits("q0", first.casts[0], (xs[0].float() * scales[0]).clamp(-448, 448).to(torch.float8_e4m3fn)) == []
    assert torch.equal(amaxes, kept)


def test_cast_transpose_of_an_empty_weight_writes_only_its_scale() -> None:
    xs = weights((0, 16), (16, 16))
    scales, amaxes = scalars(2)
    out = multi_cast_transpose(xs, scales, amaxes, config=SMALL)
    assert torch.allclose(out.scale_inv, 1 / scales, rtol=1e-6)
    assert float(amaxes[0]) == 0.0
    assert out.transposes[0].shape == (16, 0)


@pytest.mark.parametrize("shape", [(64, 64), (65, 70), (1, 1), (16, 160)])
def test_cast_transpose_of_nan_and_infinity_updates_amax_by_infinity_only(shape: tuple[int, int]) -> None:
    xs = weights(*[shape] * 4)
    xs[0].fill_(torch.nan)
    xs[1][0, 0] = torch.nan
    xs[2][-1, 0], xs[3][0, -1] = torch.inf, -torch.inf
    scales, amaxes = scalars(4)
    # tiles wider than the matrices: of one full of NaN Triton's interpreter, other than a GPU, takes NaN for the maximum
    wide = replace(SMALL, cols=256)
    agrees(xs, scales, amaxes, multi_cast_transpose(xs, scales, amaxes, config=wide))
    assert float(amaxes[0]) == 0.0
    assert amaxes[2:].isinf().all()


@pytest.mark.parametrize("fp8_format", ["e5m2", *(["e4m3fnuz", "e5m2fnuz"] if WHERE == "cpu" or torch.version.hip else [])])
def test_cast_transpose_to_other_fp8_formats_is_exact(fp8_format: str) -> None:
    xs = weights((64, 32), (33, 20))
    xs[0][0, :4] = torch.tensor([torch.nan, -torch.inf, -1e-30, 1e30])
    scales, amaxes = scalars(2)
    out = multi_cast_transpose(xs, scales, amaxes, fp8_format, config=SMALL)
    agrees(xs, scales, amaxes, out, FP8_DTYPES[fp8_format])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"xs": []}, "xs must hold at least one matrix"),
        ({"xs": [weights((16, 32))[0].t()]}, "elements of a row of xs[0] must be adjacent"),
        ({"scales": torch.ones(3, device=WHERE)}, "scales must be (1,)"),
        ({"fp8_format": "e3m4"}, "fp8_format must be one of e4m3"),
        ({"outputs": []}, "outputs must be 1 pairs, got 0"),
        (
            {"config": replace(SMALL, warps=16)},
            "config=MultiCastConfig(rows=64, cols=64, group=2, warps=16, ctas=0, stages=1): 8 elements per thread",
        ),
    ],
)
def test_cast_transpose_with_wrong_arguments_raises_with_their_names(change: dict[str, object], text: str) -> None:
    scales, amaxes = scalars(1)
    arguments = {"xs": weights((16, 32)), "scales": scales, "amaxes": amaxes} | change
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        multi_cast_transpose(**arguments)  # type: ignore[arg-type]


def given_outputs(xs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    casts = [torch.zeros_like(x, dtype=torch.float8_e4m3fn) for x in xs]
    return casts, [cast.t().contiguous() for cast in casts]


def test_operator_of_cast_transpose_has_a_fake_and_compiles() -> None:
    xs = weights((32, 64), (33, 20))
    scales, amaxes = scalars(2)
    torch.library.opcheck(
        torch.ops.kerneltune.multi_cast_transpose, (xs, scales, amaxes), test_utils=["test_schema", "test_faketensor"]
    )
    compiled = torch.compile(lambda *t: torch.ops.kerneltune.multi_cast_transpose(*t), fullgraph=True, backend="aot_eager")
    *out, raised = compiled(xs, scales, amaxes)
    agrees(xs, scales, raised, multi.MultiCast(*out))
    assert not amaxes.any()
    with pytest.raises(ValueError, match=r"fp8_format must be one of e4m3.*'e3m4'"):
        torch.ops.kerneltune.multi_cast_transpose([x.to("meta") for x in xs], scales.to("meta"), amaxes.to("meta"), "e3m4")


@pytest.mark.parametrize("skipped", [False, True])
def test_operator_of_cast_transpose_in_place_compiles(skipped: bool) -> None:
    xs = weights((32, 64), (16, 48))
    scales, amaxes = scalars(2)
    skip, scale_inv = torch.full((1,), float(skipped), device=WHERE), torch.zeros_like(scales)
    casts, transposes = given_outputs(xs)
    arguments = (xs, scales, amaxes, casts, transposes, scale_inv, skip)
    torch.library.opcheck(
        torch.ops.kerneltune.multi_cast_transpose_out, arguments, test_utils=["test_faketensor", "test_autograd_registration"]
    )
    for t in (*casts, *transposes, scale_inv, amaxes):
        t.view(torch.uint8).zero_()
    compiled = torch.compile(lambda *t: torch.ops.kerneltune.multi_cast_transpose_out(*t), fullgraph=True, backend="aot_eager")
    compiled(*arguments)
    if skipped:
        assert not any(t.float().any() for t in (*casts, *transposes, scale_inv, amaxes))
    else:
        agrees(xs, scales, amaxes, multi.MultiCast(casts, transposes, scale_inv))


@pytest.mark.gpu
def test_graphs_of_cast_transpose_of_the_same_weights_share_no_table() -> None:
    xs = weights((64, 32), (48, 80))
    scales, amaxes = scalars(2)
    outputs = [
        (torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty_like(x.t().contiguous(), dtype=torch.float8_e4m3fn))
        for x in xs
    ]
    multi_cast_transpose(xs, scales, amaxes, outputs=outputs, config=SMALL)
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    results = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append(multi_cast_transpose(xs, scales, amaxes, outputs=outputs, config=SMALL))
    for cast, transpose in outputs:
        cast.view(torch.uint8).zero_()
        transpose.view(torch.uint8).zero_()
    graphs[1].replay()  # the first never ran
    torch.cuda.synchronize()
    agrees(xs, scales, amaxes, results[1])


@pytest.mark.parametrize("skipped", [False, True])
def test_cast_transpose_with_skip_set_writes_nothing(skipped: bool) -> None:
    xs = weights((32, 64), (33, 20))
    scales, amaxes = torch.full((2,), 32.0, device=WHERE), torch.zeros(2, device=WHERE)
    outputs = [tuple(torch.zeros(s, device=WHERE).to(torch.float8_e4m3fn) for s in (x.shape, x.t().shape)) for x in xs]
    scale_inv, skip = torch.zeros(2, device=WHERE), torch.full((1,), float(skipped), device=WHERE)
    result = multi_cast_transpose(xs, scales, amaxes, outputs=outputs, scale_inv=scale_inv, skip=skip)
    assert result.scale_inv is scale_inv
    if skipped:
        assert not any(t.float().any() for t in (scale_inv, amaxes, *(t for pair in outputs for t in pair)))
    else:
        agrees(xs, scales, amaxes, result)


@pytest.mark.parametrize("rows", [1, 3, 256])
def test_cast_transpose_of_rows_too_long_for_a_tile_raises(rows: int) -> None:
    """Before anything is launched: tensors without memory come as far."""
    most = 2**31 // rows
    xs = [torch.empty(rows, most, dtype=torch.bfloat16, device="meta")]
    one = torch.ones(1, device="meta")
    if rows > 1:
        with pytest.raises(ValueError, match=rf"rows of xs\[0\] must be less than {most} numbers apart in tiles of {rows}"):
            multi_cast_transpose(xs, one, one.clone())
    else:
        with pytest.raises(ValueError, match=r"xs\[0\] must have less than 2\^31 columns"):
            multi_cast_transpose(xs, one, one.clone())


def test_cast_transpose_with_skip_needs_outputs_and_scale_inv() -> None:
    xs, one = weights((32, 64)), torch.ones(1, device=WHERE)
    skip = {"skip": torch.zeros(1, device=WHERE), "scale_inv": torch.ones(1, device=WHERE)}
    with pytest.raises(ValueError, match="skip takes outputs and scale_inv"):
        multi_cast_transpose(xs, one, one.clone(), **skip)
    empty = weights((0, 64))
    outputs = [tuple(torch.empty(s, dtype=torch.float8_e4m3fn, device=WHERE) for s in ((0, 64), (64, 0)))]
    with pytest.raises(ValueError, match=r"not empty, got xs\[0\] \(0, 64\)"):
        multi_cast_transpose(empty, one, one.clone(), outputs=outputs, **skip)
