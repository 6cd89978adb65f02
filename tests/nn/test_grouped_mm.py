"""The fp8 grouped product for models: signal to noise against fp32, gradients, groups of any size, compilation, bad inputs."""

import os
import subprocess
import weakref

import pytest
import torch
from asserting import every
from training_step import DEVICE, RECIPES, expected, leaves, offsets, products, sqnr_db
from warm_python import python

from kerneltune.kernel_lib.groups import aligned_size
from kerneltune.nn import DelayedScaling, Recipe, aligned_groups, fp8_grouped_mm, grouped_mm
from kerneltune.nn.recipes import expected_weights

ENDS = {"even": [32, 64, 96], "uneven": [16, 80, 96], "empty": [0, 96, 96]}
RAGGED = {"ragged": [5, 38, 91], "one row": [95, 95, 96], "short": [1, 2, 3]}
CAST_AGAIN = [Recipe(scaling, keep_weights=False) for scaling in RECIPES]


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_mm_of_even_groups_has_26_db_against_fp64(recipe: str, ends: list[int]) -> None:
    against_fp64(recipe, ends)


@pytest.mark.parametrize("ends", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("scaling", RECIPES)
def test_grouped_mm_of_uneven_groups_has_26_db_against_fp64(scaling: str, ends: list[int]) -> None:
    against_fp64(scaling, ends)


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_mm_ignores_rows_behind_the_last_group(recipe: str) -> None:
    a, w = leaves(40, 32, 16, 2)
    dy = torch.randn(40, 16, device=DEVICE).bfloat16()
    offs = offsets([7, 23])
    want = products(a.detach()[:23].clone().requires_grad_(), w, offs, dy[:23], recipe=recipe)
    a.detach()[23:], dy[23:] = torch.nan, torch.nan
    y, da, dw = products(a, w, offs, dy, recipe=recipe)
    assert not y[23:].any()
    assert not da[23:].any()
    for got, expected_bits in zip((y[:23], da[:23], dw), want, strict=True):
        assert torch.equal(got, expected_bits)


def against_fp64(recipe: str | Recipe, ends: list[int]) -> None:
    """Assert that results have 26 dB or more, and that empty groups give zeros."""
    a, w = leaves(ends[-1], 64, 48, 3)
    dy = torch.randn(ends[-1], 48, device=DEVICE).bfloat16()
    results = products(a, w, offsets(ends), dy, recipe=recipe)
    for name, got, want in zip(("Y", "dA", "dW"), results, expected(a, w, ends, dy), strict=True):
        assert got.shape == want.shape
        assert got.dtype == torch.bfloat16
        assert got.is_contiguous()
        assert sqnr_db(got, want) >= 26, name
    sizes = torch.tensor(ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
    assert not results[2][(sizes == 0).to(DEVICE)].any()


@pytest.mark.parametrize("recipe", [*RECIPES, *CAST_AGAIN, "delayed", "delayed and known"], ids=str)
@pytest.mark.parametrize("again", [False, True])
def test_grouped_mm_backward_frees_casts_of_da_before_dw(
    recipe: Recipe | str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Find no cast of dY, nor of the weights for dA, when dW is made, the largest tensor of a step.

    Weights stay that were cast in the forward and are wanted again.
    """
    of_da: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    delays = isinstance(recipe, str) and recipe.startswith("delayed")
    kept = int(again and recipe not in CAST_AGAIN)
    scaling = DelayedScaling(2, device=DEVICE) if delays else None
    if scaling is not None:
        scaling.known = recipe == "delayed and known"
    operator, row_major = torch.ops.kerneltune.fp8_grouped_gemm, grouped_mm.row_major

    def rows_of_dy(dy: torch.Tensor) -> torch.Tensor:
        rows = row_major(dy)
        of_da.append(weakref.ref(rows))  # a copy of which rows are contiguous
        return rows

    def watched(x: torch.Tensor, w: torch.Tensor, *rest: torch.Tensor, **options: object) -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in of_da))
        if len(alive) == 1:
            of_da.extend(map(weakref.ref, (x, w)))
        return operator(x, w, *rest, **options)

    a, w = leaves(32, 64, 48, 2)
    y = fp8_grouped_mm(a, w.transpose(1, 2), offsets([16, 32]), recipe=scaling or recipe)
    monkeypatch.setattr(grouped_mm, "row_major", rows_of_dy)
    monkeypatch.setattr(torch.ops.kerneltune, "fp8_grouped_gemm", watched)
    y.backward(torch.ones(48, 32, device=DEVICE).bfloat16().t(), retain_graph=again)
    assert len(of_da) == 3
    assert alive == [0, kept]
    if again:
        first = a.grad, w.grad
        a.grad = w.grad = None
        y.backward(torch.ones_like(y))
        assert every(torch.equal(x, y) for x, y in zip(first, (a.grad, w.grad), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_mm_of_other_dtypes_returns_the_asked_dtypes(recipe: str, dtype: torch.dtype) -> None:
    ends = [16, 48]
    a, w = leaves(48, 32, 16, 2, dtype)
    dy = torch.randn(48, 16, device=DEVICE)
    results = products(a, w, offsets(ends), dy, recipe=recipe, out_dtype=torch.float32)
    assert [t.dtype for t in results] == [torch.float32, dtype, dtype]
    for got, want in zip(results, expected(a, w, ends, dy), strict=True):
        assert sqnr_db(got, want) >= 26


@pytest.mark.parametrize("recipe", [*RECIPES, *CAST_AGAIN, Recipe("tensorwise", pow2=False)], ids=str)
def test_grouped_mm_gradient_of_one_operand_alone_is_the_same(recipe: str | Recipe) -> None:
    a, w = leaves(32, 32, 16, 2)
    offs, dy = offsets([16, 32]), torch.randn(32, 16, device=DEVICE).bfloat16()
    y, da, dw = products(a, w, offs, dy, recipe=recipe)
    for leaf, want in ((a, da), (w, dw)):
        other_a, other_w = (t if t is leaf else t.detach() for t in (a, w))
        alone = fp8_grouped_mm(other_a, other_w.transpose(1, 2), offs, recipe=recipe)
        assert torch.equal(alone, y)
        assert torch.equal(torch.autograd.grad(alone, leaf, dy)[0], want)
    with torch.no_grad():
        assert torch.equal(fp8_grouped_mm(a, w.transpose(1, 2), offs, recipe=recipe), y)


@pytest.mark.parametrize("recipe", ["tensorwise", Recipe("rowwise", keep_weights=False)], ids=str)
def test_grouped_mm_weights_of_either_memory_order_give_the_same(recipe: str | Recipe) -> None:
    a, w = leaves(48, 32, 16, 2)
    offs, dy = offsets([16, 48]), torch.randn(48, 16, device=DEVICE).bfloat16()
    b_t = w.detach().mT.contiguous().requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(fp8_grouped_mm, fullgraph=True, backend="aot_eager")
    y, da, dw = products(a, w, offs, dy, recipe=recipe)
    for product in (fp8_grouped_mm, compiled):
        got = product(a, b_t, offs, recipe=recipe)
        got_da, db_t = torch.autograd.grad(got, (a, b_t), dy)
        assert torch.equal(got, y)
        assert torch.equal(got_da, da)
        assert torch.equal(db_t, dw.mT)


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_mm_with_cast_weights_gives_the_same(recipe: str) -> None:
    a, w = leaves(32, 32, 16, 2)
    offs, dy = offsets([16, 32]), torch.randn(32, 16, device=DEVICE).bfloat16()
    cast = Recipe(recipe).cast_weights(w.detach().transpose(1, 2))
    for got, want in zip(
        products(a, w, offs, dy, recipe=recipe, weights=cast), products(a, w, offs, dy, recipe=recipe), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("ends", [*ENDS.values(), *RAGGED.values(), [0, 0, 0]])
def test_aligned_groups_begin_at_multiples_of_16(ends: list[int]) -> None:
    rows, moved, total = aligned_groups(offsets(ends), ends[-1])
    assert moved.dtype == torch.int32
    assert int(moved[-1]) == total
    assert total % 16 == 0
    assert total - ends[-1] < 16 * (len(ends) + 1)
    starts = [0, *moved.tolist()]
    assert every(start % 16 == 0 for start in starts)
    for start, end, first in zip([0, *ends], ends, starts, strict=False):
        assert rows[start:end].tolist() == list(range(first, first + end - start))


def saved_bytes(recipe: str | Recipe, **options) -> int:
    """Return how many bytes are kept for the backward pass beside the parameter."""
    a, w = leaves(64, 128, 16, 2)
    seen: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() != w.untyped_storage().data_ptr():
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fp8_grouped_mm(a, w.transpose(1, 2), offsets([32, 64]), recipe=recipe, **options)
    return sum(seen.values())


def test_grouped_mm_saves_the_expected_bytes_for_the_backward_pass() -> None:
    M, K, N, E = aligned_size(64, 2), 128, 16, 2
    offs, scales = 4 * E, 4 + 4 * E
    assert saved_bytes("rowwise") == M * K + E * K * N + offs + 2 * 4 * E * K
    assert saved_bytes(Recipe("rowwise", keep_weights=False)) == M * K + offs + 4 * E * K
    assert saved_bytes("tensorwise") == M * K + E * K * N + offs + scales
    assert saved_bytes(Recipe("tensorwise", keep_weights=False)) == M * K + offs + 4


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["expanded", "transposed", "padded rows"])
def test_grouped_mm_accepts_gradients_of_any_layout(recipe: str, layout: str) -> None:
    a, w = leaves(32, 32, 16, 2)
    dy = {
        "expanded": lambda: torch.randn(16, device=DEVICE).bfloat16().expand(32, 16),
        "transposed": lambda: torch.randn(16, 32, device=DEVICE).bfloat16().t(),
        "padded rows": lambda: torch.randn(32, 48, device=DEVICE).bfloat16()[:, :16],
    }[layout]()
    offs = offsets([16, 32])
    for got, want in zip(products(a, w, offs, dy, recipe=recipe), products(a, w, offs, dy.clone(), recipe=recipe), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strides", [(16, 1), (0, 0)])
def test_grouped_mm_without_rows_has_zero_gradients(recipe: str, strides: tuple[int, int]) -> None:
    """`contiguous` keeps the strides of 0 of a gradient that was a number, as that of a sum is."""
    a, w = leaves(0, 32, 16, 2)
    dy = torch.zeros(1, 16, device=DEVICE).bfloat16().as_strided((0, 16), strides)
    y, da, dw = products(a, w, offsets([0, 0]), dy, recipe=recipe)
    assert y.shape == (0, 16)
    assert da.shape == (0, 32)
    assert dw.shape == (2, 16, 32)
    assert not dw.any()


@pytest.mark.parametrize(("recipe", "dynamic"), [("tensorwise", False), ("rowwise", True)])
def test_grouped_mm_compiles_without_a_graph_break(recipe: str | Recipe, dynamic: bool) -> None:
    torch.compiler.reset()
    a, w = leaves(32, 32, 16, 2)
    offs = offsets([16, 32])

    def block(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return fp8_grouped_mm(a * 2, w.transpose(1, 2), offs, recipe=recipe).relu()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    want, got = block(a, w), compiled(a, w)
    assert torch.equal(got, want)
    dy = torch.randn_like(want)
    for eager, traced in zip(*(torch.autograd.grad(y, (a, w), dy) for y in (want, got)), strict=True):
        assert torch.equal(eager, traced)


@pytest.mark.parametrize("column_major", [True, False])
def test_grouped_mm_with_expected_magnitudes_records_the_largest_weights(column_major: bool) -> None:
    """Taken and left in eager and in compiled code; results and gradients are those without."""
    torch.compiler.reset()
    a, w = leaves(32, 32, 16, 2)
    offs, amax, traced = offsets([16, 32]), torch.zeros(2, device=DEVICE), torch.zeros(2, device=DEVICE)

    def product(amax: torch.Tensor | None) -> torch.Tensor:
        return fp8_grouped_mm(a, w.mT if column_major else w.mT.contiguous(), offs, amax=amax)

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    want = product(None)
    dy = torch.randn_like(want)
    gradients = torch.autograd.grad(want, (a, w), dy)
    for y in (product(amax), product(amax), compiled(traced), compiled(traced)):
        assert torch.equal(y, want)
        assert every(torch.equal(*pair) for pair in zip(torch.autograd.grad(y, (a, w), dy), gradients, strict=True))
    assert torch.equal(amax, w.detach().abs().amax((1, 2)).float())
    assert torch.equal(amax, traced)
    torch.library.opcheck(expected_weights, (w.detach().mT, amax), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("scaling", RECIPES)
def test_operators_on_cast_weights_or_rows_pass_opcheck(scaling: str) -> None:
    a, w = (t.detach() for t in leaves(32, 48, 16, 2))
    dy, tests = torch.randn(32, 16, device=DEVICE).bfloat16(), ["test_faketensor"]  # other tests sum fp8 values
    q, scale, q_t, scale_t = Recipe(scaling).cast_rows(dy, None)
    for b, offs in ((w.mT, offsets([16, 32])), (w[:1].mT, None)):
        arguments = (q, scale, b, offs, scaling, True, torch.bfloat16)
        torch.library.opcheck(grouped_mm.input_gradient, arguments, test_utils=tests)
    arguments = (q_t, scale_t, a.view(2, 16, 48), scaling, True, torch.bfloat16, torch.float16)
    torch.library.opcheck(grouped_mm.late_weight_gradient, arguments, test_utils=tests)


def test_grouped_mm_second_derivative_raises() -> None:
    a, w = leaves(32, 32, 16, 2)
    y = fp8_grouped_mm(a, w.mT, offsets([16, 32]))
    da, dw = torch.autograd.grad(y.float().square().sum(), (a, w), create_graph=True)
    for gradient in (da, dw):
        with pytest.raises(RuntimeError):
            gradient.float().sum().backward(retain_graph=True)


@pytest.mark.parametrize("ends", ["8, 33", "40, 32"] if DEVICE == "cuda" else ["8, 33"])  # on the CPU the next test has the rest
def test_grouped_mm_in_debug_mode_asserts_offs(ends: str) -> None:
    code = f"""if True:
        import torch
        from kerneltune.nn import GroupedLinear
        layer = GroupedLinear(2, 32, 16, device="{DEVICE}", dtype=torch.bfloat16)
        x = torch.ones(32, 32, device="{DEVICE}").bfloat16()
        good, bad = (torch.tensor(ends, dtype=torch.int32, device="{DEVICE}") for ends in ([8, 24], [{ends}]))
        with torch.no_grad():
            layer(x, good)
        print("without a gradient")
        layer(x, bad)
        torch.cuda.synchronize()
    """  # in a process of its own: on a GPU an assertion ends the context
    done = subprocess.run([python(), "-c", code], env=os.environ | {"TRITON_DEBUG": "1"}, capture_output=True, text=True)
    assert "without a gradient" in done.stdout
    assert done.returncode
    assert "offs decrease or exceed M" in done.stdout + done.stderr


@pytest.mark.parametrize("check_offs", [True, False] if DEVICE == "cpu" else [True])
def test_grouped_mm_of_offs_out_of_order_raises_with_their_values(check_offs: bool) -> None:
    a, w = leaves(32, 32, 16, 2)
    for ends in ([20, 16], [16, 33], [-1, 32]):
        with pytest.raises(ValueError, match=rf"offs decrease or exceed M: expected .* 0 to 32 in order, got \[{ends[0]}, "):
            fp8_grouped_mm(a, w.transpose(1, 2), offsets(ends), check_offs=check_offs)
    for arguments in ((a, w.mT, [16, 32]), ([1.0], w.mT, offsets([16, 32]))):
        with pytest.raises(ValueError, match="must be a tensor, got"):
            fp8_grouped_mm(*arguments, check_offs=check_offs)


@pytest.mark.parametrize("recipe", [*RECIPES, "delayed"])
def test_grouped_mm_accepts_any_strides_of_axes_of_one_element(recipe: str) -> None:
    """Strides of an axis of a single element mean nothing."""
    scaling = DelayedScaling(1, device=DEVICE) if recipe == "delayed" else recipe
    a, w = leaves(1, 32, 16, 1)
    dy = torch.randn(16, 1, device=DEVICE).bfloat16().t()
    row, b_t = a.detach().view(32, 1).t().requires_grad_(), w.detach()[0].t().unsqueeze(0)
    offs = offsets([1])
    assert row.stride() == dy.stride() == (1, 1)
    assert b_t.stride() != w.mT.stride()
    results = []
    usual = a, w.detach().mT, dy.clone(memory_format=torch.contiguous_format)
    for x, b, grad in (usual, (row, b_t, dy)):
        y = fp8_grouped_mm(x, b, offs, recipe=scaling)
        results.append((y, *torch.autograd.grad(y, x, grad)))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_mm_under_compiled_autograd_has_the_same_gradients(recipe: str) -> None:
    torch.compiler.reset()
    a, w = leaves(32, 32, 16, 2)
    offs, dy = offsets([16, 32]), torch.randn(32, 16, device=DEVICE).bfloat16()
    _, da, dw = products(a, w, offs, dy, recipe=recipe)

    @torch.compile(backend="aot_eager")
    def trained() -> None:
        fp8_grouped_mm(a, w.mT, offs, recipe=recipe).backward(dy)

    with torch._dynamo.config.patch(compiled_autograd=True):
        trained()
    assert torch.equal(a.grad, da)
    assert torch.equal(w.grad, dw)


def test_grouped_mm_with_bad_operands_raises_before_any_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    a, w = leaves(40, 32, 16, 2)
    b_t, offs = w.mT, offsets([16, 32])
    cast = Recipe("tensorwise").cast_weights(b_t.detach())
    many = torch.empty(1025, 16, 16, device=DEVICE).bfloat16()
    monkeypatch.setattr(Recipe, "cast_rows", lambda *_, **__: pytest.fail("launched"))
    for arguments, options, message in (
        ((a[:32], b_t, offs.repeat_interleave(2)[::2]), {}, r"offs must be contiguous, got strides \(2,\)"),
        ((a[:, :16].contiguous(), many, offsets([16] * 1025)), {}, r"offs must be of 1 to 1024 groups, got \(1025,\)"),
        ((a[:32], b_t, offs), {"weights": tuple(cast)}, "weights must be an Fp8Operand, got tuple"),
        ((a[:32], b_t, offs), {"amax": a[0]}, r"amax must be \(2,\) torch.float32 on"),
        ((a[:32], b_t, offs), {"weights": cast._replace(q_t=cast.q_t.contiguous())}, r"weights\.q_t must be column-major, got"),
        ((a[:32], b_t, offs), {"weights": cast._replace(scale=cast.scale.repeat(2)[::2])}, r"weights\.scale must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            fp8_grouped_mm(*arguments, **options)


def test_grouped_mm_with_bad_arguments_raises() -> None:
    a, w = leaves(32, 32, 16, 2)
    b_t, offs = w.transpose(1, 2), offsets([16, 32])
    for wrong, message in (
        ((a[0], b_t, offs), r"got \(32,\) and"),
        ((a[:, :16].contiguous(), b_t, offs), r"got \(32, 16\) and \(2, 32, 16\)"),
        ((a[:, :24].contiguous(), b_t[:, :24].transpose(1, 2).contiguous().transpose(1, 2), offs), r"K=24 N=16"),
        ((a.double(), b_t, offs), "A must be one of .* torch.float64"),
        ((a.t().contiguous().t(), b_t, offs), r"row-major, got strides \(1, 32\)"),
        ((a, b_t[:1].expand(2, 32, 16), offs), r"column-major, strides \(512, 1, 32\), or contiguous, got \(0, 1, 32\)"),
        ((a, b_t, offs.long()), r"offs must be \(2,\) int32, got \(2,\) torch.int64"),
        ((a, b_t, offs[:1]), r"got \(1,\)"),
        ((a, b_t, offs.to("meta")), "one device, got .* meta"),
    ):
        with pytest.raises(ValueError, match=message):
            fp8_grouped_mm(*wrong)
    for recipe in RECIPES:
        with pytest.raises(ValueError, match=r"offs must .* got \(0,\)"):
            fp8_grouped_mm(a, b_t[:0].detach(), offs[:0], recipe=recipe)
    with pytest.raises(ValueError, match=r"out_dtype must be one of .* torch.float8"):
        fp8_grouped_mm(a, b_t, offs, out_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="recipe must be one of tensorwise, rowwise or a Recipe, got 'blockwise'"):
        fp8_grouped_mm(a, b_t, offs, recipe="blockwise")
    with pytest.raises(ValueError, match="scaling must be one of tensorwise, rowwise, got 'mx'"):
        Recipe("mx")
    with pytest.raises(ValueError, match=r"weights\.scale must be \(2, 16\) .* got \(2,\)"):
        fp8_grouped_mm(a, b_t, offs, recipe="rowwise", weights=Recipe("tensorwise").cast_weights(b_t.detach()))
