"""Weights of four bits: the packed layout, GPTQ and AWQ both ways, bad weights, and the layer."""

import re
from collections.abc import Callable

import pytest
import torch
from asserting import every
from int4_codes import DEVICE, some_codes

from kerneltune.nn import Int4Linear
from kerneltune.ops import int4_gemm as ops
from kerneltune.ops.int4_gemm.packing import Codes, dequantise, pack, quantise, unpack

SIZES = [(64, 128, 64), (66, 192, 64), (130, 96, 32), (8, 416, 416), (72, 256, 128), (2, 32, 32)]


def same(a: Codes, b: Codes) -> bool:
    zeros = (a.zeros is None) == (b.zeros is None) and (a.zeros is None or b.zeros is None or torch.equal(a.zeros, b.zeros))
    return torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) and zeros


@pytest.mark.parametrize(("rows", "depth", "group"), SIZES)
@pytest.mark.parametrize("zeros", [False, True])
def test_unpack_of_packed_codes_gives_the_codes(rows: int, depth: int, group: int, zeros: bool) -> None:
    codes = some_codes(rows, depth, group, zeros)
    assert same(unpack(pack(*codes)), codes)


def test_pack_has_the_documented_layout() -> None:
    codes = some_codes(130, 256, 32)
    weight = pack(*codes)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    for row, k in [(0, 0), (1, 0), (0, 1), (77, 45), (129, 255), (64, 128), (63, 127), (5, 200)]:
        b, q, c, t = k // 128, k % 128 // 32, k % 32 // 8, k % 8
        r, j, i = row // 64, row % 64 // 8, row % 8
        word = int(weight.packed[b, r, i, j, c, q]) & 0xFFFFFFFF
        assert (word >> (4 * order.index(t))) & 15 == int(codes.codes[row, k])
        assert weight.scales[b, r, j, k % 128 // 32, i] == codes.scales[row, k // 32]
        assert codes.zeros is not None
        assert weight.zeros is not None
        assert int(weight.zeros[b, r, j, k % 128 // 32, i]) == int(codes.zeros[row, k // 32])


@pytest.mark.parametrize(("rows", "depth", "group"), [s for s in SIZES if s[0] % 8 == 0])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("there", "back"), [(ops.to_gptq, ops.from_gptq), (ops.to_awq, ops.from_awq)], ids=["gptq", "awq"])
def test_from_and_to_gptq_and_awq_give_the_same_codes(
    there: Callable, back: Callable, rows: int, depth: int, group: int, zeros: bool
) -> None:  # type: ignore[type-arg]
    codes = some_codes(rows, depth, group, zeros)
    plainly = there(codes)
    assert same(back(*plainly), codes)
    again = there(back(*plainly))
    assert every(a is b is None or torch.equal(a, b) for a, b in zip(plainly, again, strict=True))


def test_to_gptq_and_to_awq_have_the_words_of_their_packers() -> None:
    """The expected words are built bit by bit, as their packers do."""
    codes = some_codes(8, 32, 32)
    qweight, qzeros, _ = ops.to_gptq(codes)
    assert qzeros is not None
    assert codes.zeros is not None
    assert int(qweight[1, 3]) & 0xFFFFFFFF == sum(int(codes.codes[3, 8 + i]) << (4 * i) for i in range(8))
    assert int(qzeros[0, 0]) & 0xFFFFFFFF == sum((int(codes.zeros[i, 0]) - 1) << (4 * i) for i in range(8))
    qweight, qzeros, _ = ops.to_awq(codes)
    assert qzeros is not None
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    assert int(qweight[5, 0]) & 0xFFFFFFFF == sum(int(codes.codes[order[i], 5]) << (4 * i) for i in range(8))
    assert int(qzeros[0, 0]) & 0xFFFFFFFF == sum(int(codes.zeros[order[i], 0]) << (4 * i) for i in range(8))


def test_from_gptq_with_groups_out_of_order_raises() -> None:
    """With act-order they are not: scales would go to other weights than theirs."""
    codes = some_codes(8, 128, 32)
    plainly, groups = ops.to_gptq(codes), torch.arange(128, device=DEVICE) // 32
    assert same(ops.from_gptq(*plainly, groups.int()), codes)
    mixed = groups.clone()
    mixed[70], mixed[127] = 3, 2
    with pytest.raises(ValueError, match=re.escape("got g_idx[70]=3, expected 2")):
        ops.from_gptq(*plainly, mixed)
    with pytest.raises(ValueError, match=re.escape("g_idx must be (128,) integers, got (64,) torch.int64")):
        ops.from_gptq(*plainly, groups[:64])


def test_from_gptq_v2_reads_zero_points_unchanged() -> None:
    codes = some_codes(8, 64, 32)
    assert codes.zeros is not None
    codes.zeros[0] = 0
    qweight, qzeros, scales = ops.to_gptq(codes, v2=True)
    assert qzeros is not None
    assert int(qzeros[1, 0]) & 0xFFFFFFFF == sum(int(codes.zeros[i, 1]) << (4 * i) for i in range(8))
    assert same(ops.from_gptq(qweight, qzeros, scales, v2=True), codes)
    codes.zeros[3] = 16
    with pytest.raises(ValueError, match="GPTQ packs zero points 0 … 15 of eight rows, got m=8 and 0 … 16"):
        ops.to_gptq(codes, v2=True)


def test_quantized_weights_are_within_a_step() -> None:
    w = torch.randn(64, 256, device=DEVICE).half()
    for zeros in (False, True):
        codes = quantise(w, 64, zeros)
        step = codes.scales.float().repeat_interleave(64, 1)
        error = (dequantise(pack(*codes), torch.float32) - w.float()).abs()
        assert bool((error <= 1.01 * step).all())
        assert float((error / step).mean()) < 0.3


Q = torch.zeros(8, 8, dtype=torch.int32)
"""Words of 64 x 8 codes in GPTQ's packing, of 8 x 64 in AWQ's."""


@pytest.mark.parametrize(("make", "message"), [
    (lambda: pack(torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 5).half()), "k=96 is not 5 whole groups"),
    (lambda: pack(torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 2).half()), "got group=48 k=96"),
    (lambda: pack(torch.zeros(3, 64, dtype=torch.uint8), torch.ones(3, 1).half()), "m must be even and at least 2, got m=3"),
    (lambda: pack(torch.zeros(4, 64, dtype=torch.int32), torch.ones(4, 1).half()), "codes must be (M, K) uint8"),
    (lambda: pack(torch.full((4, 64), 16, dtype=torch.uint8), torch.ones(4, 1).half()), "codes must be 0 … 15, got 16"),
    (lambda: pack(torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 1)), "scales must be (4, groups) float16 or bfloat16"),
    (lambda: pack(torch.zeros(4, 64, dtype=torch.uint8), torch.full((4, 1), torch.nan).half()), "scales must be finite, got 4"),
    (lambda: pack([[0] * 64], torch.ones(1, 1).half()), "codes must be a tensor, got [[0, 0, 0, 0, 0, 0, ...]]"),
    (lambda: pack(None, torch.ones(1, 1).half()), "codes must be a tensor, got None"),
    (lambda: pack(torch.zeros(4, 64, dtype=torch.uint8), None), "scales must be a tensor, got None"),
    (lambda: pack(torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 1).half(), 8), "zeros must be a tensor, got 8"),
    (lambda: ops.from_gptq(None, None, torch.ones(2, 8).half()), "qweight must be a tensor, got None"),
    (lambda: ops.from_gptq(Q, [[8]], torch.ones(2, 8).half()), "qzeros must be a tensor, got [[8]]"),
    (lambda: ops.from_gptq(Q, None, torch.ones(2, 8).half(), [0, 1]), "g_idx must be a tensor, got [0, 1]"),
    (lambda: ops.from_gptq(torch.zeros(4, 4), None, torch.ones(1, 4)), "qweight must be a matrix of int32"),
    (lambda: ops.from_gptq(Q, None, torch.ones(2, 7).half()), "scales must be (groups, 8), got (2, 7)"),
    (lambda: ops.from_gptq(Q, None, torch.ones(8).half()), "scales must be (groups, 8), got (8,)"),
    (lambda: ops.from_gptq(Q, None, torch.ones(3, 8).half()), "k=64 is not 3 whole groups"),
    (lambda: ops.from_gptq(Q, None, torch.ones(2, 8)), "scales must be (8, groups) float16 or bfloat16"),
    (lambda: ops.from_gptq(Q, None, torch.full((2, 8), torch.nan).half()), "scales must be finite, got 16"),
    (lambda: ops.from_gptq(Q, Q[:3, :1], torch.ones(2, 8).half()), "qzeros must be (2, 8 / 8), got (3, 1)"),
    (lambda: ops.from_gptq(Q, Q[:2, :2], torch.ones(2, 8).half()), "qzeros must be (2, 8 / 8), got (2, 2)"),
    (lambda: ops.from_gptq(Q[:, :4], Q[:2, :0], torch.ones(2, 4).half()), "qzeros must be (2, 4 / 8), got (2, 0)"),
    (lambda: ops.from_gptq(Q, Q[:2, :1].long(), torch.ones(2, 8).half()), "qzeros must be a matrix of int32"),
    (lambda: ops.from_gptq(Q, None, torch.ones(2, 8).half().to("meta")), "must be on one device, got"),
    (lambda: ops.from_awq(Q, None, torch.ones(2, 8).half()), "scales must be (groups, 64), got (2, 8)"),
    (lambda: ops.from_awq(Q, None, None), "scales must be a tensor, got None"),
    (lambda: ops.from_awq(Q[:, 0], None, torch.ones(2, 8).half()), "qweight must be a matrix of int32, got (8,)"),
    (lambda: ops.from_awq(Q, Q[:2, :7], torch.ones(2, 64).half()), "qzeros must be (2, 64 / 8), got (2, 7)"),
    (lambda: ops.from_awq(Q, None, torch.ones(3, 64).half()), "k=8 is not 3 whole groups"),
    (lambda: ops.to_gptq(some_codes(8, 32, 32, zero=0)), "zero points 1 … 16 of eight rows, got m=8 and 0 … 0"),
    (lambda: ops.to_gptq(some_codes(6, 32, 32)), "eight rows, got m=6"),
    (lambda: ops.to_gptq(some_codes(8, 36, 36)), "eight k to a word, got k=36"),
    (lambda: ops.to_gptq(Codes(torch.full((8, 32), 200, dtype=torch.uint8), torch.ones(8, 1).half())), "0 … 15, got 200"),
    (lambda: ops.to_gptq(Codes(torch.zeros(8, 32), torch.ones(8, 1).half())), "codes must be (M, K) uint8"),
    (lambda: ops.to_awq(some_codes(6, 32, 32)), "eight rows to a word, got m=6"),
    (lambda: ops.to_awq(Codes(torch.full((8, 32), 200, dtype=torch.uint8), torch.ones(8, 1).half())), "0 … 15, got 200"),
    (lambda: ops.to_awq(Codes(*some_codes(8, 32, 32)[:1], torch.ones(8, 1))), "scales must be (8, groups) float16 or bfloat16"),
    (lambda: ops.from_gptq(Q[:4], None, torch.ones(1, 8).half(), torch.zeros(64)), "g_idx must be (32,) integers"),
    (lambda: quantise(torch.full((2, 32), torch.inf).half(), 32), "w must be finite, got 64 that are not"),
])  # fmt: skip
def test_packing_of_bad_weights_raises(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("zeros", [False, True])
def test_int4_linear_from_linear_gives_its_product(zeros: bool) -> None:
    linear = torch.nn.Linear(128, 64, device=DEVICE, dtype=torch.float16)
    layer = Int4Linear.from_linear(linear, group=64, zeros=zeros)
    x = torch.randn(2, 3, 128, device=DEVICE).half()
    want = torch.nn.functional.linear(x.double(), dequantise(layer.weight, torch.float64), layer.bias.double())
    torch.testing.assert_close(layer(x).double(), want, rtol=4e-3, atol=4e-3)
    assert layer(x[:0]).shape == (0, 3, 64)


def test_int4_linear_is_saved_and_loaded() -> None:
    layer = Int4Linear.from_codes(some_codes(64, 256, 128))
    other = Int4Linear(256, 64, group=128, zeros=True, bias=False, device=DEVICE)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 256, device=DEVICE).half()
    assert torch.equal(other(x), layer(x))
    assert not list(layer.parameters())
    assert str(other) == "Int4Linear(256, 64, group=128, zeros=True, bias=False)"


def test_int4_linear_of_a_symmetric_checkpoint_has_no_zero_points() -> None:
    """GPTQ stores them nevertheless, all 8."""
    codes = some_codes(64, 128, 64, zero=8)
    layer = Int4Linear.from_codes(ops.from_gptq(*ops.to_gptq(codes)))
    assert layer.zeros is None
    assert torch.equal(dequantise(layer.weight, torch.float32), dequantise(pack(*codes), torch.float32))
    assert codes.zeros is not None
    codes.zeros[63, 1] = 7
    assert Int4Linear.from_codes(codes).zeros is not None


@pytest.mark.parametrize(("name", "change", "message"), [
    ("scales", lambda t: t.index_fill(0, torch.tensor(0, device=DEVICE), torch.nan), "1.scales must be finite, got 128 that are"),
    ("scales", lambda t: t.bfloat16(), "1.scales must be torch.float16, got torch.bfloat16"),
    ("zeros", lambda t: torch.full_like(t, torch.inf), "1.zeros must be finite, got 128 that are not"),
    ("zeros", lambda t: torch.full_like(t, 200.5), "1.zeros must be integers 0 … 16, got 200.5"),
    ("zeros", lambda t: torch.full_like(t, 2.5), "1.zeros must be integers 0 … 16, got 2.5"),
    ("zeros", lambda t: torch.full_like(t, -1), "1.zeros must be integers 0 … 16, got -1.0"),
    ("packed", lambda t: t.float() + 0.5, "1.packed must be torch.int32, got torch.float32"),
    ("packed", lambda t: t[..., :2], "size mismatch for 1.packed"),
    ("bias", lambda t: t.float(), "1.bias must be torch.float16, got torch.float32"),
])  # fmt: skip
def test_int4_linear_refuses_a_broken_state(name: str, change: Callable, message: str) -> None:  # type: ignore[type-arg]
    def layer(fill: float) -> Int4Linear:
        return Int4Linear.from_codes(some_codes(64, 128, 64), torch.full((64,), fill, device=DEVICE))

    model, state = torch.nn.Sequential(torch.nn.Identity(), layer(1)), {f"1.{k}": v for k, v in layer(2).state_dict().items()}
    before = getattr(model[1], name).clone()
    with pytest.raises(RuntimeError, match=re.escape(message)):
        model.load_state_dict(state | {f"1.{name}": change(state[f"1.{name}"])})
    assert torch.equal(getattr(model[1], name), before)


def test_int4_linear_compiles_without_a_graph_break() -> None:
    layer = Int4Linear.from_codes(some_codes(64, 128, 64, False), torch.ones(64, device=DEVICE))
    x = torch.randn(3, 128, device=DEVICE).half()
    compiled = torch.compile(lambda t: layer(t) * 2, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x) * 2)
    torch.library.opcheck(
        torch.ops.kerneltune.int4_linear.default, (x, layer.packed, layer.scales, None, layer.bias, 64, 64),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_int4_linear_with_bad_arguments_raises() -> None:
    with pytest.raises(ValueError, match="got group=48"):
        Int4Linear(96, 64, group=48)
    with pytest.raises(ValueError, match="Int4Linear takes float16 or bfloat16"):
        Int4Linear(128, 64, dtype=torch.float32)
    for bias in (torch.ones(1), torch.ones(64, 1), torch.ones(64, device="meta")):
        with pytest.raises(ValueError, match=re.escape(f"bias must be (64,) on {DEVICE}")):
            Int4Linear.from_codes(some_codes(64, 128, 64), bias if bias.is_meta else bias.to(DEVICE))
    for value, dtype in ((1e6, torch.float16), (torch.nan, torch.bfloat16)):
        with pytest.raises(ValueError, match=f"bias must be finite in {dtype}, got 64 that are not"):
            Int4Linear.from_codes(some_codes(64, 128, 64, dtype=dtype), torch.full((64,), value, device=DEVICE))
    with pytest.raises(ValueError, match=r"bias must be a tensor, got \[1.0\]"):
        Int4Linear.from_codes(some_codes(64, 128, 64), [1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"takes \(…, 128\) torch.float16"):
        Int4Linear(128, 64, device=DEVICE)(torch.zeros(2, 64, device=DEVICE).half())
