"""Grouped fp8 products: sums to the bit, groups of any sizes, bad arguments, the backend that the cache names, torch operator."""

import dataclasses
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from asserting import every
from token_groups import ends_of
from warm_python import python

from kerneltune import cache, ops, sweep_file
from kerneltune.checking.check import Checker
from kerneltune.kernel_lib.groups import align_groups, aligned_size
from kerneltune.ops.fp8_grouped_gemm import gemm, peers
from kerneltune.spec import Case

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
OP = ops.load()["fp8_grouped_gemm"]
OPTIMIZED = OP.variant("optimized")
BENCHES = [entry.case for entry in sweep_file.load(sweep_file.find("fp8_grouped_gemm"), {OP.name: OP}).bench]
E4M3 = torch.float8_e4m3fn
ENDS = [(0, 0, 5, 5, 33), (33, 33, 33), (1, 2, 3, 33), (33,), (0, 20, 20)]
TOKEN_ENDS = [(0, 16, 16, 208), (208, 208), (16, 32, 176), (208,), (0, 0), (1, 8, 8, 33, 207), (5, 205), (3, 4, 5)]


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, device=WHERE).to(E4M3)


def powers(*shape: int) -> torch.Tensor:
    return torch.exp2(torch.randint(-3, 4, shape, device=WHERE).float())


def config(**changes: object) -> gemm.GemmConfig:
    knobs = {"rows": 64, "cols": 128, "depth": 128, "warps": 4, "stages": 3, "ctas": 1, "band": 4, "run": 1, "parts": 1}
    return gemm.GemmConfig("triton", **knobs | changes)  # type: ignore[arg-type]


CONFIGS = [config(), config(cols=256, parts=4, band=1, run=2), config(rows=128, warps=8, parts=2, depth=64)]


@pytest.mark.parametrize(("ends", "c"), [*((ends, CONFIGS[0]) for ends in ENDS), *((ENDS[0], c) for c in CONFIGS[1:])], ids=str)
def test_grouped_gemm_is_exact_and_zero_for_rows_of_no_group(ends: tuple[int, ...], c: gemm.GemmConfig) -> None:
    M, N, K, E = 33, 272, 144, len(ends)
    a, b = integers(M, K), integers(E, N, K).transpose(1, 2)
    scale_a, scale_b, offs = powers(M), powers(E, N), ends_of(*ends)
    out = torch.full((M, N), 7.0, device=WHERE)
    assert gemm.fp8_grouped_gemm(a, b, scale_a, scale_b, offs, out_dtype=torch.float32, out=out, config=c) is out
    want = torch.zeros_like(out)
    for group, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        sums = a[start:end].double() @ b[group].double()
        want[start:end] = (sums * scale_a[start:end, None] * scale_b[group]).float()
    assert torch.equal(out, want)


@pytest.mark.parametrize("ends", [(0, 0), (16, 32), (5, 63), (16, 64)], ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_grouped_gemm_of_torch_is_zero_for_rows_of_no_group(ends: tuple[int, ...], own: bool) -> None:
    a, b, offs = integers(64, 48), integers(2, 1040, 48).transpose(1, 2), ends_of(*ends)
    out = torch.full((64, 1040), 7.0, dtype=torch.bfloat16, device=WHERE) if own else None
    product = gemm.fp8_grouped_gemm(a, b, powers(1), powers(2), offs, out=out, config=gemm.CUTLASS)
    assert not product[ends[-1] :].any()
    assert product[: ends[-1]].isfinite().all()


def test_compare_of_nonzero_rows_of_no_group_fails() -> None:
    options = (("product", "rows"), ("scales", "rowwise"), ("groups", "dropped"), ("values", "normal"))
    case = Case("dropped", (("M", 40), ("N", 32), ("K", 48), ("E", 2)), "bfloat16", "fp8", options)
    inputs = OP.inputs(case, device="cpu")
    assert inputs["offs"].tolist()[-1] == 30
    expected = OP.reference(inputs)
    wrong = expected["out"].clone()
    wrong[-1, 0] = 1.0
    assert OP.compare(case, inputs, {"out": expected["out"]}, expected) == []
    assert OP.compare(case, inputs, {"out": wrong}, expected) != []


@pytest.mark.parametrize(
    ("ends", "c"), [*((ends, CONFIGS[0]) for ends in TOKEN_ENDS), *((TOKEN_ENDS[0], c) for c in CONFIGS[1:])], ids=str
)
def test_weight_gradients_are_exact_and_those_of_empty_groups_zero(ends: tuple[int, ...], c: gemm.GemmConfig) -> None:
    _check_weight_gradients(208, ends, c)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("ends", [(48, 368, 384, 640, 640), (16, 496, 640), (304, 624, 640)], ids=str)
def test_weight_gradient_steps_before_a_group_use_no_neighbouring_rows(ends: tuple[int, ...], parts: int) -> None:
    _check_weight_gradients(640, ends, config(depth=64, parts=parts))


@pytest.mark.parametrize(
    ("ends", "c"), [((7, 7, 8, 140, 331), c) for c in CONFIGS] + [((0, 333), CONFIGS[0]), ((0, 0), CONFIGS[0])]
)
def test_weight_gradients_of_aligned_groups_equal_those_of_each_group_alone(ends: tuple[int, ...], c: gemm.GemmConfig) -> None:
    N, K, E, offs = 80, 272, len(ends), ends_of(*ends)
    x, y = integers(333, N), integers(333, K)
    a, b = (align_groups(t.view(torch.uint8), offs).t().contiguous().view(E4M3) for t in (x, y))
    scale_a, scale_b = powers(E, N), powers(E, K)
    out = gemm.fp8_grouped_gemm(a, b.t(), scale_a, scale_b, offs, out_dtype=torch.float32, aligned=True, config=c)
    for group, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        sums = x[start:end].double().t() @ y[start:end].double()
        assert torch.equal(out[group], (sums * scale_a[group, :, None] * scale_b[group]).float()), group


@pytest.mark.parametrize("ends", [(90, 40, 80), (-5, 500, 20), (2**31 - 1, -(2**31), 100), (50, 100, 129)], ids=str)
@pytest.mark.parametrize("product_of", ["rows", "weights", "aligned"])
def test_grouped_gemm_of_offs_in_disorder_accesses_nothing_outside(ends: tuple[int, ...], product_of: str) -> None:
    M, N, K, E, one = 128, 48, 32, len(ends), torch.ones(1, device=WHERE)
    padded = torch.full((M + 2 * E, K * 8), 0x7F, dtype=torch.uint8, device=WHERE).view(E4M3)  # NaN outside
    if product_of == "rows":
        a = padded[:, :K]
        a[E : M + E] = integers(M, K)
        out = torch.full((M + 2, N), 7.0, device=WHERE)
        weights = integers(E, N, K).transpose(1, 2)
        gemm.fp8_grouped_gemm(
            a[E : M + E], weights, one, one, ends_of(*ends), out_dtype=torch.float32, out=out[1:-1], config=config()
        )
        assert (out[[0, -1]] == 7).all()
        return
    size = aligned_size(M, E) if product_of == "aligned" else M
    a, b = integers(N, size), integers(K, size)
    product = gemm.fp8_grouped_gemm(a, b.t(), one, one, ends_of(*ends), aligned=product_of == "aligned", config=config())
    assert product.isfinite().all()


@pytest.mark.parametrize("ends", [(90, 40, 80), (-5, 500, 20), (2**31 - 1, -(2**31), 100), (50, 100, 129)], ids=str)
def test_grouped_gemm_of_torch_survives_offs_in_disorder(ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    one, given, scaled_mm = torch.ones(1, device=WHERE), list[list[int]](), peers.scaled_mm
    a, b = integers(128, 32), integers(len(ends), 48, 32).transpose(1, 2)
    monkeypatch.setattr(peers, "scaled_mm", lambda *operands: given.append(operands[-1].tolist()) or scaled_mm(*operands))
    gemm.fp8_grouped_gemm(a, b, one, one, ends_of(*ends), config=gemm.CUTLASS)
    assert given == [sorted(given[0])]
    assert 0 <= given[0][0] <= given[0][-1] <= 128
    product = gemm.fp8_grouped_gemm(a, b, one, one, ends_of(10, 40, 128), config=gemm.CUTLASS)
    want = gemm.fp8_grouped_gemm(a, b, one, one, ends_of(10, 40, 128), config=config())
    assert torch.equal(product, want)


def _check_weight_gradients(M: int, ends: tuple[int, ...], c: gemm.GemmConfig) -> None:
    N, K, E = 80, 272, len(ends)
    a, b = integers(N, M), integers(K, M).t()
    scale_a, scale_b = powers(E, N), powers(E * K)
    out = gemm.fp8_grouped_gemm(a, b, scale_a, scale_b, ends_of(*ends), out_dtype=torch.float32, config=c)
    for group, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        sums = a[:, start:end].double() @ b[start:end].double()
        want = sums * scale_a[group, :, None] * scale_b.view(E, K)[group]
        assert torch.equal(out[group], want.float()), group


def test_grouped_gemm_accepts_a_scale_per_tensor_or_per_group() -> None:
    a, b, offs = integers(32, 48), integers(2, 32, 48).transpose(1, 2), ends_of(16, 32)
    for scale in (torch.full((), 0.5, device=WHERE), torch.full((32, 1), 0.5, device=WHERE)):
        of_groups = powers(2)
        expected = gemm.fp8_grouped_gemm(a, b, torch.full((1,), 0.5, device=WHERE), of_groups, offs, config=config())
        each = of_groups[:, None, None].expand(2, 1, 32).contiguous()
        assert torch.equal(gemm.fp8_grouped_gemm(a, b, scale, each, offs, config=config()), expected)
    x, y = integers(16, 32), integers(48, 32).t()
    of_groups = powers(2)
    rows, columns = (of_groups[:, None].expand(2, size).contiguous() for size in (16, 48))
    expected = gemm.fp8_grouped_gemm(x, y, rows, columns, offs, config=config())
    assert torch.equal(gemm.fp8_grouped_gemm(x, y, of_groups, of_groups, offs, config=config()), expected)


@pytest.mark.gpu  # the interpreter reads NaN as 480
@pytest.mark.parametrize(("ends", "at"), [((16, 48, 64), 20), ((640, 1296, 1936), 1295), ((640, 1296, 1936), 641)], ids=str)
def test_grouped_gemm_with_nan_spoils_only_its_group(ends: tuple[int, ...], at: int) -> None:
    a, b, one = integers(16, ends[-1]), integers(32, ends[-1]).t(), powers(1)
    a.view(torch.uint8)[3, at] = 0x7F
    product = gemm.fp8_grouped_gemm(a, b, one, one, ends_of(*ends), config=config())
    assert product[1, 3].isnan().all()
    assert int(product.isnan().sum()) == product.shape[2]


def test_grouped_gemm_accepts_rows_that_lie_apart() -> None:
    a, b, offs, one = integers(24, 80)[:, :48], integers(2, 32, 48).transpose(1, 2), ends_of(8, 24), powers(1)
    assert torch.equal(
        gemm.fp8_grouped_gemm(a, b, one, one, offs, config=config()),
        gemm.fp8_grouped_gemm(a.contiguous(), b, one, one, offs, config=config()),
    )
    x, y = integers(16, 96)[:, :64], integers(32, 80)[:, :64].t()
    offs = ends_of(16, 64)
    assert torch.equal(
        gemm.fp8_grouped_gemm(x, y, one, one, offs, config=config()),
        gemm.fp8_grouped_gemm(x.contiguous(), y.t().contiguous().t(), one, one, offs, config=config()),
    )


def test_grouped_gemm_of_more_groups_than_it_sorts_is_exact() -> None:
    E = 130
    a, b, one = integers(16, 16 * E), integers(16, 16 * E).t(), torch.ones(1, device=WHERE)
    offs = ends_of(*range(16, 16 * E + 1, 16))
    product = gemm.fp8_grouped_gemm(a, b, one, one, offs, out_dtype=torch.float32, config=config())
    want = torch.bmm(a.float().view(16, E, 16).transpose(0, 1), b.float().reshape(E, 16, 16))
    assert torch.equal(product, want)


A, B, OFFS = (
    torch.zeros(32, 48).to(E4M3),
    torch.zeros(2, 64, 48).to(E4M3).transpose(1, 2),
    torch.tensor([16, 32], dtype=torch.int32),
)
X, Y = torch.zeros(16, 32).to(E4M3), torch.zeros(48, 32).to(E4M3).t()
ONE, TWO = torch.ones(1), torch.ones(2)
CALL = gemm.fp8_grouped_gemm


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CALL(A.float(), B, ONE, TWO, OFFS), r"a must be 2D float8_e4m3fn, got \(32, 48\) torch.float32"),
        (lambda: CALL(A, B.to(torch.float8_e5m2), ONE, TWO, OFFS), "b must be 2D or 3D float8_e4m3fn.*float8_e5m2"),
        (lambda: CALL(A, B[0, 0], ONE, TWO, OFFS), r"b must be 2D or 3D .* got \(64,\)"),
        (lambda: CALL(A, B, ONE, TWO, OFFS.long()), "offs must be int32 of 1 to 1024 groups.*int64"),
        (lambda: CALL(A, B, ONE, TWO, OFFS[:0]), r"offs must be int32 .* got \(0,\)"),
        (lambda: CALL(A, B, ONE, TWO, OFFS.repeat(2)[::2]), r"offs must be contiguous, got strides \(2,\)"),
        (lambda: CALL(A, B, ONE, TWO, OFFS[:1]), r"disagree: \(32, 48\), \(2, 48, 64\), \(1,\)"),
        (lambda: CALL(A[:, :32], B, ONE, TWO, OFFS), r"disagree: \(32, 32\)"),
        (lambda: CALL(A[:, :24], B[:, :24], ONE, TWO, OFFS), "K must be a multiple of 16 above 0, got K=24"),
        (lambda: CALL(A, B[:, :, :40], ONE, TWO, OFFS), "N must be a multiple of 16 above 0, got N=40"),
        (lambda: CALL(A, B.contiguous(), ONE, TWO, OFFS), r"b must be column-major, strides \(3072, 1, 48\)"),
        (lambda: CALL(A.t().contiguous().t(), B, ONE, TWO, OFFS), "rows of a must be contiguous"),
        (lambda: CALL(A.view(-1)[8:-40].view(31, 48), B, ONE, TWO, OFFS), "a must begin at a multiple of 16 bytes"),
        (lambda: CALL(A, B, torch.ones(31), TWO, OFFS), r"scale_a must be \(1,\) or \(\) or \(32,\) or \(32, 1\) .*got \(31,\)"),
        (lambda: CALL(A, B, ONE.double(), TWO, OFFS), "scale_a must be .* float32 .*float64"),
        (lambda: CALL(A, B, ONE, torch.ones(64, 2).t(), OFFS), r"scale_b must be contiguous, got strides \(1, 2\)"),
        (lambda: CALL(A, B, ONE, torch.ones(2, 48), OFFS), r"scale_b must be .*\(2, 64\).* got \(2, 48\)"),
        (lambda: CALL(X, Y[:16], ONE, ONE, OFFS), r"a \(N, M\) and b \(M, K\) disagree"),
        (lambda: CALL(X, Y, ONE, ONE, OFFS, aligned=True), "M a multiple of 128, at least 256, got M=32 for groups=2"),
        (lambda: CALL(A, B, ONE, TWO, OFFS, aligned=True), r"are those of a weight gradient, b \(M, K\), got b \(2, 48, 64\)"),
        (lambda: CALL(X, Y, ONE, ONE, OFFS, config=gemm.CUTLASS), "cutlass takes no groups of any size"),
        (lambda: CALL(X, Y.contiguous(), ONE, ONE, OFFS), r"rows of b.t\(\) must be contiguous"),
        (lambda: CALL(X, Y, torch.ones(16), ONE, OFFS), r"scale_a must be .*\(2, 16\) or \(32,\).* got \(16,\)"),
        (lambda: CALL(A, B, ONE, TWO, OFFS, out_dtype=torch.float64), "out_dtype must be one of bfloat16.*float64"),
        (lambda: CALL(A, B, ONE, TWO, OFFS, out=torch.empty(32, 64)), r"out must be \(32, 64\) torch.bfloat16"),
        (
            lambda: CALL(X, Y, ONE, ONE, OFFS, out=torch.empty(1540, dtype=torch.bfloat16)[4:].view(2, 16, 48)),
            "out must begin at a multiple of 16 bytes, got out.storage_offset.*4",
        ),
        (lambda: CALL(A, B, ONE, TWO, OFFS, out_dtype=torch.float32, config=gemm.CUTLASS), "cutlass gives torch.bfloat16"),
    ],
)
def test_grouped_gemm_with_wrong_arguments_raises_with_their_names(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("backend", ["triton", "cutlass"])
def test_grouped_gemm_runs_the_backend_of_its_cached_config(
    backend: str, configs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kerneltune import device

    c = gemm.CUTLASS if backend == "cutlass" else config()
    options = (("product", "rows"), ("scales", "rowwise"), ("groups", "balanced"), ("values", "normal"))
    case = Case("stored", (("M", 64), ("N", 32), ("K", 48), ("E", 2)), "bfloat16", "fp8", options)
    entry = cache.CacheEntry(op=OP.name, variant="optimized", case=case, policy="cold", config=dataclasses.asdict(c))
    cache.store(device.current_slug(), entry)
    took = []
    monkeypatch.setattr(peers, "scaled_mm", lambda *_: took.append("cutlass") or torch.zeros(48, 32, device=WHERE))
    monkeypatch.setattr(gemm, "multiply_groups", lambda *_: took.append("triton"))
    a, b = integers(48, 48), integers(2, 32, 48).transpose(1, 2)
    gemm.fp8_grouped_gemm(a, b, powers(1), powers(2), ends_of(16, 48))
    assert took == [backend]


ASSERTED = [(backend, ends) for backend in ("triton", "cutlass") for ends in ("20, 16", "16, 33")]


@pytest.mark.parametrize("asserted", [[each] for each in ASSERTED] if WHERE == "cuda" else [ASSERTED])
def test_grouped_gemm_in_debug_mode_asserts_offs(asserted: list[tuple[str, str]]) -> None:
    code = f"""if True:
        import torch
        from kerneltune.ops import fp8_grouped_gemm as gemm
        a, b = (torch.zeros(shape, device="{WHERE}").to(torch.float8_e4m3fn) for shape in ((32, 16), (2, 16, 16)))
        one = torch.ones(1, device="{WHERE}")
        config = {{"triton": gemm.{config()!r}, "cutlass": gemm.CUTLASS}}
        for backend, ends in {asserted}:
            offs = torch.tensor([int(end) for end in ends.split(",")], dtype=torch.int32, device="{WHERE}")
            try:
                gemm.fp8_grouped_gemm(a, b.transpose(1, 2), one, one, offs, config=config[backend])
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{{backend}} {{ends}}: {{error}}")
    """  # in a process of its own: on a GPU an assertion ends the context
    done = subprocess.run([python(), "-c", code], env=os.environ | {"TRITON_DEBUG": "1"}, capture_output=True, text=True)
    assert every(f"{backend} {ends}: " in done.stdout for backend, ends in asserted), done.stdout
    assert (done.stdout + done.stderr).count("offs decrease or exceed M") >= len(asserted)


def test_space_has_every_backend_and_searches_try_it() -> None:
    for case in BENCHES:
        configs = list(OPTIMIZED.configs(case))
        backends = [c.backend for c in configs]
        rows = case.option("product") == "rows"
        assert backends.count("cutlass") == rows
        assert backends.count("triton") > 50
        promising = OPTIMIZED.promising(case)
        assert (promising[0] == gemm.CUTLASS) == rows
        assert set(promising) <= set(configs)
        assert len(set(promising)) == len(promising) > 3


def test_fake_of_grouped_gemm_has_shape_and_dtype_of_its_result() -> None:
    offs = ends_of(16, 32)
    a, b, x, y = (t.to(WHERE) for t in (A, B, X, Y))
    one, two = powers(1), powers(2)
    operator = torch.ops.kerneltune.fp8_grouped_gemm.default
    torch.library.opcheck(operator, (a, b, one, two, offs), test_utils=["test_faketensor"])
    torch.library.opcheck(
        torch.ops.kerneltune.fp8_grouped_gemm.default, (x, y, two, one, offs, torch.float16), test_utils=["test_faketensor"]
    )


def _moderate(weights: bool) -> Case:
    options = (("product", "weights" if weights else "rows"), ("scales", "rowwise"), ("groups", "ragged"), ("values", "integers"))
    return Case("moderate", (("M", 4800), ("N", 1424), ("K", 1040), ("E", 7)), "bfloat16", "fp8", options)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [False, True])
def test_grouped_gemm_configs_are_exact_over_many_tiles(weights: bool) -> None:
    case = _moderate(weights)
    checker = Checker(OP, case, WHERE)
    configs = list(OPTIMIZED.configs(case))
    for c in random.Random(0).sample(configs, 12):
        assert checker.run(OPTIMIZED, c)[1] == [], c


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [False, True])
def test_graph_of_grouped_gemm_accepts_new_groups_without_a_synchronization(weights: bool) -> None:
    case = _moderate(weights)
    inputs = OP.inputs(case, device=WHERE)
    OPTIMIZED.run(inputs, OPTIMIZED.default_config(case))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        OPTIMIZED.run(inputs, OPTIMIZED.default_config(case))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph):
        out = OPTIMIZED.run(inputs, OPTIMIZED.default_config(case))
    inputs["offs"].copy_(ends_of(16, 16, 1600, 1616, 3200, 4800, 4800))
    graph.replay()
    assert OP.compare(case, inputs, out, OP.reference(inputs)) == []


@pytest.mark.gpu
def test_grouped_gemm_of_other_numbers_of_tokens_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    b, one, offs = integers(2, 256, 256).transpose(1, 2), powers(1), ends_of(16, 32)
    gemm.fp8_grouped_gemm(integers(37, 256), b, one, one, offs, config=config())
    compiled: list[object] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **kernel: compiled.append(kernel))
    for M in (1, 16, 48, 1000):
        gemm.fp8_grouped_gemm(integers(M, 256), b, one, one, offs.clamp(max=M), config=config())
    assert compiled == []


@pytest.mark.gpu
def test_grouped_gemm_compiles_without_a_graph_break() -> None:
    inputs = OP.inputs(_moderate(False), device=WHERE)
    tensors = [inputs[name] for name in ("a", "b", "scale_a", "scale_b", "offs")]
    compiled = torch.compile(lambda *t: torch.ops.kerneltune.fp8_grouped_gemm.default(*t) * 2, fullgraph=True)
    assert torch.equal(compiled(*tensors), torch.ops.kerneltune.fp8_grouped_gemm.default(*tensors) * 2)
