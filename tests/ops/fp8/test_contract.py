"""FP8 quantisation: layouts, special values, ragged groups, bad arguments, large tensors, torch operators."""

import math
import subprocess
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from token_groups import ends_of
from warm_python import python

from kerneltune import ops, sweep_file
from kerneltune.checking.check import Checker
from kerneltune.kernel_lib.agreement import same_bits
from kerneltune.ops import fp8
from kerneltune.ops.fp8 import contract, peers, tensorwise_group
from kerneltune.ops.fp8.baselines import torchao_tensorwise
from kerneltune.ops.fp8.kernels import early as early_kernels
from kerneltune.spec import Case, Op

OPS = ops.load()
WHERE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES = ("fp8_rowwise", "fp8_weights", "fp8_groups", "fp8_tensorwise", "fp8_transpose")
CHECKS = [entry for family in FAMILIES for entry in sweep_file.load(sweep_file.find(family), OPS).check]


def quantised(x: torch.Tensor, axis: int, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return contract.quantized(x, axis, {"fp8_format": "e4m3", "pow2": True, "inverse": False} | options)


@pytest.mark.parametrize(
    "name",
    [n for n, op in OPS.items() if op.module.startswith("kerneltune.ops.fp8.") and "eager" in {v.name for v in op.variants}],
)
def test_eager_variant_agrees_with_the_reference(name: str) -> None:
    eager = OPS[name].variant("eager")
    for entry in CHECKS:
        if entry.op == name and eager.unsupported(entry.case) is None:
            assert Checker(OPS[name], entry.case, WHERE).run(eager, None)[1] == [], entry.case.label


@pytest.mark.parametrize("spoiled", ["a step", "half", "no NaN"])
def test_check_of_a_wrong_cast_fails(spoiled: str) -> None:
    options = (("fp8_format", "e4m3"), ("pow2", False), ("inverse", False), ("special", True))
    case, op = Case("small", (("M", 6), ("K", 72)), "bfloat16", "fp8", options), OPS["fp8_rowwise_2d"]
    good = op.variant("optimized")

    def run(inputs, config):  # type: ignore[no-untyped-def]
        outputs = dict(good.run(inputs, config))
        q = outputs["q"].view(torch.uint8)
        if spoiled == "a step":
            q[-1, -1] += 1
        elif spoiled == "half":
            q[-1] -= 8 * (q[-1] & 0x78 > 8)
        else:
            q[outputs["q"].isnan()] = 0
        return outputs

    checker = Checker(op, case, WHERE)
    assert checker.run(good, good.default_config(case))[1] == []
    (line,) = checker.run(replace(good, run=run), good.default_config(case))[1]
    assert line.startswith("q: ")


@pytest.mark.parametrize("K", [17389, 28672])
@pytest.mark.parametrize("reload", [False, True])
def test_rowwise_cast_of_long_rows_is_exact_held_or_reloaded(K: int, reload: bool) -> None:
    x = contract.values((2, K), torch.bfloat16, WHERE, seed=3)
    config = fp8.RowConfig(rows=1, cols=2048, warps=8, ctas=0, stages=2 if reload else 1, reload=reload)
    q, scale = fp8.fp8_rowwise_2d(x, config=config)
    want, want_scale = quantised(x, 1)
    assert same_bits("q", q, want) == []
    assert same_bits("scale", scale, want_scale) == []


@pytest.mark.parametrize("pad", [1, 8])
def test_casts_accept_any_distance_between_rows(pad: int) -> None:
    x = contract.values((9, 64 + pad), torch.bfloat16, WHERE, seed=1)[:, :64]
    q, scale = fp8.fp8_rowwise_2d(x)
    want, want_scale = quantised(x, 1)
    assert same_bits("q", q, want) == []
    assert same_bits("scale", scale, want_scale) == []
    out = fp8.fp8_tensorwise_2d(x, layout="both")
    assert out.q is not None
    assert out.q_t is not None
    want, want_scale = quantised(x.reshape(1, -1), 1)
    assert same_bits("q", out.q, want.view(x.shape)) == []
    assert same_bits("scale", out.scale, want_scale[0]) == []
    assert torch.equal(out.q_t.view(torch.uint8), out.q.view(torch.uint8))
    assert out.q_t.stride() == (1, 9)
    assert torch.equal(fp8.fp8_transpose_2d(q[:, :40]).view(torch.uint8), q[:, :40].t().view(torch.uint8))


def test_transpose_of_two_million_rows_is_exact() -> None:
    x = torch.arange(1 << 21, device=WHERE).to(torch.uint8).view(torch.float8_e4m3fn)[:, None]
    config = fp8.TransposeConfig(rows=1 << 15, cols=1, warps=4)
    assert torch.equal(fp8.fp8_transpose_2d(x, config=config).view(torch.uint8), x.t().view(torch.uint8))


def test_rowwise_cast_with_nan_or_infinity_spoils_only_its_row() -> None:
    x = torch.ones(4, 40, dtype=torch.bfloat16, device=WHERE)
    x[1, 3], x[2, 5], x[3] = torch.nan, -torch.inf, 0.0
    q, scale = fp8.fp8_rowwise_2d(x)
    assert scale[0, 0] == 256
    assert (q[0].float() == 256).all()
    assert scale[1].isnan().all()
    assert scale[2, 0] == 0
    assert (q[2, :5].float() == 0).all()
    assert scale[3, 0] == 2.0**48
    assert (q[3].float() == 0).all()


def test_tensorwise_cast_clamps_infinity_and_zeros_nan() -> None:
    x = torch.tensor([[1.0, torch.nan, -torch.inf, -0.0]], dtype=torch.bfloat16, device=WHERE)
    out = fp8.fp8_tensorwise_2d(x, pow2=False)
    limit = torch.finfo(torch.bfloat16).max
    assert out.q is not None
    assert float(out.scale) == float(torch.tensor(448 / limit, dtype=torch.float32))
    assert out.q.float().tolist() == [[0.0, 0.0, -448.0, 0.0]]
    assert bool(out.q.float().signbit()[0, 3])


@pytest.mark.parametrize("ends", [(0, 0, 5, 5, 21, 33), (33, 33, 33), (1, 2, 3, 33), (16, 33)], ids=str)
def test_tensorwise_group_cast_of_any_group_sizes_is_exact(ends: tuple[int, ...]) -> None:
    x = contract.values((33, 24), torch.bfloat16, WHERE, seed=2)
    out = fp8.fp8_tensorwise_group(x, ends_of(*ends), layout="both", inverse=True)
    assert out.q is not None
    assert out.q_t is not None
    for i, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        want, scale = quantised(x[start:end].reshape(1, -1), 1, inverse=True)
        assert same_bits("q", out.q[start:end], want.view(-1, 24)) == []
        assert same_bits("scale", out.scale[i], scale[0, 0]) == []
    assert torch.equal(out.q_t.view(torch.uint8), out.q.view(torch.uint8))


TILES = fp8.SegmentConfig(rows=16, cols=32, warps=1, ctas=0, stages=1)


@pytest.mark.parametrize("at", [0, 750, -1], ids=["first", "amid", "last"])
@pytest.mark.parametrize("K", [40, 35])
def test_tensorwise_scales_are_of_the_largest_magnitude_wherever_it_lies(at: int, K: int) -> None:
    x = contract.values((40, K), torch.bfloat16, WHERE, seed=4)
    x.view(-1)[at] = -30000.0  # in another binade than the rest: all tiles that were cast before it are cast again
    offs = ends_of(18, 18, 40)
    for out, ends in (
        (fp8.fp8_tensorwise_2d(x, layout="both", config=TILES), (40,)),
        (fp8.fp8_tensorwise_group(x, offs, layout="both", config=TILES), (18, 18, 40)),
        (fp8.fp8_tensorwise_group(x, offs, layout="both", config=replace(TILES, ctas=2, stages=2)), (18, 18, 40)),
    ):
        assert out.q is not None
        assert out.q_t is not None
        for i, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            want, scale = quantised(x[start:end].reshape(1, -1), 1)
            assert same_bits("q", out.q[start:end], want.view(-1, K)) == []
            assert same_bits("scale", out.scale[i], scale[0, 0]) == []
        assert torch.equal(out.q_t.view(torch.uint8), out.q.view(torch.uint8))


@pytest.mark.parametrize("run", [torchao_tensorwise.run, torchao_tensorwise.run_staged])
@pytest.mark.parametrize("ends", [(0, 18, 18, 40), (40,), (1, 2, 40, 40)], ids=str)
def test_torchao_tensorwise_blocks_may_hold_several_groups(run, ends: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    x = contract.values((40, 35), torch.bfloat16, WHERE, seed=8)
    inputs = {"x": x, "offs": ends_of(*ends), "fp8_format": "e4m3", "pow2": False, "inverse": False, "layout": "both"}
    outputs = run(inputs, torchao_tensorwise.FlatConfig(block=64, warps=1))
    for name, want in tensorwise_group.reference(inputs).items():
        assert same_bits(name, outputs[name], want) == []


CASTS_OF_VALUES = [op for op in OPS.values() if op.module.startswith("kerneltune.ops.fp8.") and "pow2" in op.options]


@pytest.mark.skipif(WHERE == "cuda" and not torch.version.hip, reason="NVIDIA's GPUs have no fnuz types")
@pytest.mark.parametrize(("fp8_format", "pow2"), [("e4m3fnuz", True), ("e5m2fnuz", False)])
@pytest.mark.parametrize("op", CASTS_OF_VALUES, ids=lambda op: op.name)
def test_casts_to_fnuz_types_are_exact(op: Op, fp8_format: str, pow2: bool) -> None:
    """Types fnuz have no -0: its bits are NaN, and -0 is cast to 0."""
    sizes = {"M": 21, "N": 36 if "E" in op.axes else 34, "K": 20 if "E" in op.axes else 34, "E": 2, "G": 3, "N1": 34, "N2": 20}
    options = {name: values[0] for name, values in op.options.items()}
    options |= {"fp8_format": fp8_format, "pow2": pow2, "special": True, "groups": "ragged"}
    options |= {"layout": "both"} if "layout" in op.options else {}
    axes = tuple((axis, sizes[axis]) for axis in op.axes)
    inputs = dict(op.inputs(Case("", axes, "bfloat16", "fp8", tuple(options.items())), device=WHERE, seed=1))
    for name in {"x", "x1", "x2"} & inputs.keys():
        inputs[name][3], inputs[name][4, :5] = -0.0, -1e-30
    outputs = op.variant("optimized").run(inputs, None)
    for output, want in op.reference(inputs).items():
        assert same_bits(output, outputs[output], want) == []


@pytest.mark.skipif(WHERE == "cuda", reason="there tiles arrive in any order")
@pytest.mark.parametrize("later", [False, True])
def test_tensorwise_cast_casts_tiles_again_only_after_a_larger_binade(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the first launch alone, then both: the second casts again what was cast early, here all tiles but the last, or none."""
    x = torch.ones(64, 64, dtype=torch.bfloat16, device=WHERE)
    x[-1 if later else 0, -1 if later else 0] = 900.0
    with monkeypatch.context() as only_first:
        only_first.setattr(early_kernels, "cast_again", defaultdict(lambda: lambda *_args, **_options: None))
        early = fp8.fp8_tensorwise_2d(x, config=TILES).q
    final = fp8.fp8_tensorwise_2d(x, config=TILES).q
    assert early is not None
    assert final is not None
    changed = (early.float() != final.float()).view(4, 16, 2, 32).any(3).any(1)
    assert int(changed.sum()) == (7 if later else 0)


@pytest.mark.parametrize(
    ("expected", "layout"),
    [
        *((expected, "both") for expected in (0.0, 1e-3, 1.0, 64.0, math.inf, math.nan)),
        (1e-3, "row"),
        (64.0, "col"),
    ],
)
def test_tensorwise_cast_with_expected_magnitudes_has_the_same_result(expected: float, layout: str) -> None:
    w = contract.values((3, 48, 40), torch.bfloat16, WHERE, seed=7).mT
    w[2] = 0.0
    want, largest = fp8.fp8_tensorwise_3d(w, layout=layout), w.abs().amax((1, 2)).float()
    amax = largest * expected
    for _ in range(2):
        out = fp8.fp8_tensorwise_3d(w, layout=layout, amax=amax, config=TILES)
        for name, t in out._asdict().items():
            other = getattr(want, name)
            assert (t is None) == (other is None)
            assert t is None or same_bits(name, t, other) == []
        assert torch.equal(amax, largest)


@pytest.mark.skipif(WHERE == "cuda", reason="there tiles arrive in any order")
@pytest.mark.parametrize("is_expected", [False, True])
def test_tensorwise_cast_with_the_expected_magnitude_casts_once(is_expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest comes last: a first launch alone makes the result only if it knew."""
    w = torch.full((1, 48, 40), 0.5, dtype=torch.bfloat16)
    w[:, -1, -1] = 100.0
    amax = torch.full((1,), 100.0 if is_expected else 0.0)
    final = fp8.fp8_tensorwise_3d(w.mT).q
    with monkeypatch.context() as patched:
        patched.setattr(early_kernels, "cast_again", defaultdict(lambda: lambda *_, **__: None))
        early = fp8.fp8_tensorwise_3d(w.mT, amax=amax, config=TILES).q
    assert early is not None
    assert final is not None
    assert torch.equal(early.view(torch.uint8), final.view(torch.uint8)) == is_expected


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "both"])
@pytest.mark.parametrize("std", [0.02, 1.0])
def test_tensorwise_casts_of_large_weights_are_exact_every_time(layout: str, std: float) -> None:
    """Some experts have their largest element last, in a tile alone."""
    w = torch.empty(6, 1408, 2048, dtype=torch.bfloat16, device=WHERE).normal_(std=std)
    w[1, -1, -1], w[2, 700, 9], w[3] = 40.0, -40.0, 0.0
    rising = torch.linspace(0.1, 100, 1408, device=WHERE)[:, None]
    w[4] = (w[4] * rising).bfloat16()
    amax = w.abs().amax((1, 2)).float()
    scale = contract.multiplier_of(amax, "e4m3", True)
    want = (w.float() * scale[:, None, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    for expected in (*(None,) * 10, amax * 0, amax, amax * 3, amax / 3, *(amax,) * 10):
        out = fp8.fp8_tensorwise_3d(w.transpose(1, 2), layout=layout, amax=expected)
        assert out.q is not None
        assert torch.equal(out.scale, scale)
        assert expected is None or torch.equal(expected, w.abs().amax((1, 2)).float())
        assert torch.equal(out.q.transpose(1, 2).view(torch.uint8), want)
        if out.q_t is not None:
            assert torch.equal(out.q_t.view(torch.uint8), want)


def test_casts_of_no_elements_have_the_scale_of_zeros() -> None:
    x = torch.empty(3, 0, dtype=torch.bfloat16, device=WHERE)
    assert fp8.fp8_rowwise_2d(x)[1].tolist() == [[2.0**48]] * 3
    assert fp8.fp8_tensorwise_2d(x, inverse=True).scale.tolist() == [2.0**-48]
    assert fp8.fp8_tensorwise_group(x[:0], ends_of(0, 0)).scale.tolist() == [2.0**48] * 2
    assert fp8.fp8_transpose_2d(x.to(torch.float8_e4m3fn)).shape == (0, 3)


@pytest.mark.gpu
def test_casts_of_more_than_2_to_the_31_elements_are_exact() -> None:
    K, M = 5120, (1 << 31) // 5120 + 14  # a multiple of 4
    x = torch.empty(M, K, dtype=torch.bfloat16, device=WHERE).normal_()
    tail = x[-8:]
    q, scale = fp8.fp8_rowwise_2d(x)
    want, want_scale = quantised(tail, 1)
    assert same_bits("q", q[-8:], want) == []
    assert same_bits("scale", scale[-8:], want_scale) == []
    cast = fp8.fp8_group_both(x, ends_of(M - 8, M))
    assert same_bits("q", cast.q[-8:], want) == []
    assert same_bits("scale", cast.scale[-8:], want_scale) == []
    assert same_bits("q_t", cast.q_t[-8:], quantised(tail, 0)[0]) == []
    del cast
    assert torch.equal(fp8.fp8_transpose_2d(q)[:, -8:].view(torch.uint8), q[-8:].t().view(torch.uint8))
    w = x.view(4, M // 4, K).transpose(1, 2)
    q, scale = fp8.fp8_colwise_3d(w)
    assert same_bits("q", q[-1, :, -8:], want.t()) == []
    assert same_bits("scale", scale[-1, :, -8:], want_scale.t()) == []
    out = fp8.fp8_tensorwise_3d(w, layout="both")
    assert out.q is not None
    assert out.q_t is not None
    want = (tail.float() * out.scale[-1]).to(torch.float8_e4m3fn)
    assert same_bits("scale", out.scale[-1:], contract.multiplier_of(w[-1].abs().amax(), "e4m3", True)[None]) == []
    assert same_bits("q", out.q[-1, :, -8:], want.t()) == []
    assert same_bits("q_t", out.q_t[-1, -8:], want) == []


@pytest.mark.parametrize("stride", [6, 7])
def test_casts_of_a_single_row_accept_any_stride(stride: int) -> None:
    x = contract.values((3, stride), torch.bfloat16, WHERE, seed=6)[:1, :6]
    want, scale = quantised(x.reshape(1, -1), 1)
    out = fp8.fp8_tensorwise_2d(x, layout="both")
    assert out.q is not None
    assert same_bits("q", out.q, want) == []
    assert same_bits("scale", out.scale, scale[0]) == []
    down, scale = quantised(x, 0)
    q_t, scale_t = fp8.fp8_group_colwise(x, ends_of(1))
    assert same_bits("q_t", q_t, down) == []
    assert same_bits("scale_t", scale_t, scale[0]) == []
    cast = fp8.fp8_group_both(x, ends_of(1))
    assert same_bits("q", cast.q, want) == []
    assert same_bits("q_t", cast.q_t, down) == []


def test_torchao_is_unsupported_where_its_result_is_wrong() -> None:
    def case(M: int, N: int, G: int, groups: str) -> Case:
        return Case("", (("M", M), ("N", N), ("G", G)), "bfloat16", "fp8", (("special", False), ("groups", groups)))

    assert peers.not_torchao_group(case(16640, 5120, 64, "balanced")) is None
    assert "loses the rows" in str(peers.not_torchao_group(case(16640, 5120, 64, "zipf")))
    assert "N % 128" in str(peers.not_torchao_group(case(32768, 2880, 32, "balanced")))


W8 = torch.randn(2, 24, 12, dtype=torch.bfloat16, device=WHERE).transpose(1, 2)
X8 = torch.randn(20, 24, dtype=torch.bfloat16, device=WHERE)
OFFS = ends_of(3, 3, 20)
OPERATORS: list[tuple[str, tuple[Any, ...]]] = [
    ("fp8_rowwise_2d", (X8,)),
    ("fp8_colwise_3d", (W8, "e5m2", False, True)),
    ("fp8_rowwise_3d_transpose", (W8,)),
    ("fp8_rowwise_3d_both", (W8,)),
    ("fp8_group_both", (X8, OFFS)),
    ("fp8_group_colwise", (X8, OFFS)),
    ("fp8_group_colwise_dual", (X8, X8[:, :8].contiguous(), OFFS)),
    ("fp8_tensorwise_2d", (X8, "e4m3", "both")),
    ("fp8_tensorwise_3d", (W8, "e4m3", "col")),
    ("fp8_tensorwise_group", (X8, OFFS)),
    ("fp8_transpose_2d", (X8.to(torch.float8_e4m3fn),)),
]


def names(value: object) -> str:
    return value if isinstance(value, str) else ""


def torch_operator(name: str) -> Any:
    return getattr(torch.ops.kerneltune, name).default


@pytest.mark.parametrize(("name", "arguments"), OPERATORS, ids=names)
def test_fakes_of_casts_have_shapes_and_strides_of_results(name: str, arguments: tuple[Any, ...]) -> None:
    tests = ["test_faketensor"]
    if arguments[0].dtype.itemsize > 1:  # the schema test multiplies the inputs, which torch cannot for fp8
        tests.append("test_schema")
    torch.library.opcheck(torch_operator(name), arguments, test_utils=tests)


def test_documented_import_registers_every_operator() -> None:
    """Import in a process of its own, where no test has imported anything else."""
    names = [*(name for name, _ in OPERATORS), "multi_cast_transpose", "multi_cast_transpose_out"]
    code = "import sys, torch, kerneltune.nn\nfor name in sys.argv[1:]: getattr(torch.ops.kerneltune, name).default"
    done = subprocess.run([python(), "-c", code, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_casts_compile_without_a_graph_break() -> None:
    fp8_ops = torch.ops.kerneltune

    def cast(x: torch.Tensor, offs: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [*fp8_ops.fp8_tensorwise_group(x, offs, "e5m2", "both"), *fp8_ops.fp8_rowwise_3d_both(w)]

    compiled = torch.compile(cast, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(X8, OFFS, W8), cast(X8, OFFS, W8), strict=True):
        assert same_bits("", got, want) == []
        assert got.stride() == want.stride()


@pytest.mark.parametrize(("name", "arguments"), OPERATORS[:-1], ids=names)
def test_fakes_of_casts_raise_for_bad_arguments_as_the_operators_do(name: str, arguments: tuple[Any, ...]) -> None:
    tensors = [t.to("meta") for t in arguments if isinstance(t, torch.Tensor)]
    with pytest.raises(ValueError, match=r"fp8_format must be one of e4m3.*'e3m4'"):
        torch_operator(name)(*tensors, "e3m4")
    if "tensorwise" in name:
        with pytest.raises(ValueError, match="layout must be one of row, col, both, got layout='diagonal'"):
            torch_operator(name)(*tensors, "e4m3", "diagonal")


def weights() -> torch.Tensor:
    return contract.values((3, 40, 48), torch.bfloat16, WHERE, seed=5).transpose(1, 2)


CASTS = {
    "fp8_colwise_3d": fp8.fp8_colwise_3d,
    "fp8_rowwise_3d_transpose": fp8.fp8_rowwise_3d_transpose,
    "fp8_rowwise_3d_both": fp8.fp8_rowwise_3d_both,
    "fp8_tensorwise_3d": partial(fp8.fp8_tensorwise_3d, layout="both"),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_write_into_given_tensors(name: str) -> None:
    w = weights()
    want = CASTS[name](w)
    out = type(want)(*(torch.zeros_like(t) for t in want)) if hasattr(want, "_fields") else tuple(map(torch.zeros_like, want))
    returned = CASTS[name](w, out=out)
    for got, passed, expected in zip(returned, out, want, strict=True):
        assert got.data_ptr() == passed.data_ptr()
        assert got.stride() == expected.stride()
        assert torch.equal(passed.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", CASTS)
def test_casts_into_tensors_of_another_form_raise(name: str) -> None:
    w, cast = weights(), CASTS[name](weights())
    with pytest.raises(ValueError, match=r"out.* must be column-major \(3, \d+, \d+\) torch.float8_e4m3fn on .*, got \(2, "):
        CASTS[name](w, out=type(cast)(*(t[:2] for t in cast)) if hasattr(cast, "_fields") else tuple(t[:2] for t in cast))
    with pytest.raises(ValueError, match=r"got .* torch\.float8_e5m2"):
        CASTS[name](w, out=CASTS[name](w, "e5m2"))
