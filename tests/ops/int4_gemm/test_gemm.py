"""Products with weights of four bits: exact sums in every shape of program, what configs are taken, bad inputs."""

import dataclasses
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from asserting import every
from int4_codes import DEVICE, case_of, configs_of, exact, some_codes, warpgroups, whole_numbers
from warm_python import python

from kerneltune import cache
from kerneltune.kernel_lib.workspace import counters
from kerneltune.ops import int4_gemm as ops
from kerneltune.ops.int4_gemm import gemm
from kerneltune.ops.int4_gemm.baselines import plain
from kerneltune.ops.int4_gemm.packing import Int4Weight, pack

DTYPES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "rows", "depth", "group", "zeros"), [
    (1, 64, 128, 64, False), (5, 130, 160, 32, True), (17, 64, 512, 128, False), (3, 66, 416, 416, True),
    (256, 34, 192, 64, False),
])  # fmt: skip
def test_int4_gemm_of_whole_numbers_is_exact(
    tokens: int, rows: int, depth: int, group: int, zeros: bool, dtype: torch.dtype
) -> None:
    codes = some_codes(rows, depth, group, zeros, dtype)
    x, bias = whole_numbers(tokens, depth, dtype), whole_numbers(1, rows, dtype)[0]
    got, want = ops.int4_gemm(x, pack(*codes), bias), exact(x, codes, bias)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(("tokens", "rows", "depth", "group", "zeros"), [
    (3, 66, 288, 32, True), (8, 64, 512, 128, False), (11, 130, 416, 416, True), (16, 64, 1024, 64, False),
    (21, 64, 544, 32, False),
])  # fmt: skip
def test_int4_gemm_of_every_shape_of_program_is_exact(tokens: int, rows: int, depth: int, group: int, zeros: bool) -> None:
    codes = some_codes(rows, depth, group, zeros)
    weight, x, bias = pack(*codes), whole_numbers(tokens, depth, torch.float16), whole_numbers(1, rows, torch.float16)[0]
    want = exact(x, codes, bias)
    for config in random.Random(tokens).sample(configs_of(case_of(tokens, rows, depth, group)), 4):
        assert torch.equal(ops.int4_gemm(x, weight, bias, config=config), want), config


CACHED = sorted({tuple(entry.config.items()) for entry in cache.load("int4_gemm", "nvidia_h200") if entry.variant == "optimized"})


@pytest.mark.parametrize(
    "knobs", [pytest.param(knobs, marks=() if i % 10 == 0 else pytest.mark.gpu) for i, knobs in enumerate(CACHED)]
)
def test_int4_gemm_with_every_cached_config_is_exact(knobs: tuple[tuple[str, int], ...]) -> None:
    """Tiles are whole or end in the middle; the interpreter runs some configs alone."""
    config = gemm.Int4Config(**dict(knobs))
    depth = 128 * config.along * config.splits * (3 if config.tokens == 16 or config.warpgroup else 1)  # the last apart
    odd = (config.tokens - 1, depth - 32, 0, True) if config.warpgroup else (config.tokens - 1, depth + 96, 32, True)
    for tokens, k, group, zeros in [(config.tokens, depth, 64, False), odd, (256, depth, 128, False)]:
        if tokens == 256 and DEVICE == "cpu":
            continue
        codes, x = some_codes(66, k, group or k, zeros), whole_numbers(tokens, k, torch.float16)
        assert torch.equal(ops.int4_gemm(x, pack(*codes), config=config), exact(x, codes, None)), (tokens, k, group)


LONG = [
    (21, 130, 544, 32, True, (32, 32, 2, 2)),  # an odd number of row blocks, k that ends in a block
    (17, 66, 416, 416, True, (32, 32, 2, 2)),
    (32, 64, 1024, 64, False, (32, 32, 4, 2)),
    (8, 66, 768, 64, False, (8, 32, 2, 1)),
    (16, 66, 512, 128, False, (16, 32, 2, 1)),
    (32, 66, 1536, 64, False, (16, 32, 2, 2)),  # more than two steps: the last apart
    (12, 66, 1280, 64, False, (16, 32, 2, 3)),  # three splits, of which the last has less
]
"""Tokens, rows, depth, group, zeros; tokens, rows, along and splits of a config: programs that read x a step ahead."""


@pytest.mark.parametrize(("tokens", "rows", "depth", "group", "zeros", "knobs"), LONG)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_gemm_with_prefetch_is_exact(
    tokens: int, rows: int, depth: int, group: int, zeros: bool, knobs: tuple[int, ...], dtype: torch.dtype
) -> None:
    codes = some_codes(rows, depth, group, zeros, dtype)
    apart = torch.cat([whole_numbers(tokens, depth, dtype), torch.full((tokens, 3), torch.nan, device=DEVICE, dtype=dtype)], 1)
    x, bias, config = apart[:, :depth], whole_numbers(1, rows, dtype)[0], gemm.Int4Config(*knobs, prefetch=True)
    tolerance = 2.0**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0.0
    for rows_of_x in (x, x.contiguous()):
        got = ops.int4_gemm(rows_of_x, pack(*codes), bias, config=config)
        torch.testing.assert_close(got, exact(x, codes, bias), rtol=tolerance, atol=0)


BLOCKS = [
    (
        21,
        130,
        640,
        64,
        False,
        gemm.Int4Config(32, 32, 1, 2, True, 2),
    ),  # no whole number of programs in the rows, of tokens, of steps in k
    (32, 322, 544, 32, True, gemm.Int4Config(32, 32, 1, 2, True, 4)),  # k that ends in a block
    (32, 256, 1152, 64, False, gemm.Int4Config(32, 32, 2, 2, True, 2)),  # and that warps along k do not share
    (16, 194, 1280, 128, False, gemm.Int4Config(16, 32, 2, 2, True, 4)),
    (12, 66, 416, 416, True, gemm.Int4Config(16, 32, 4, 1, True, 2)),
    (33, 258, 896, 64, True, gemm.Int4Config(16, 64, 1, 3, True, 4)),
    (17, 66, 128, 32, False, gemm.Int4Config(16, 64, 1, 1, True, 4)),
    (40, 514, 256, 256, False, gemm.Int4Config(32, 32, 1, 2, True, 4)),
    (16, 64, 640, 64, False, gemm.Int4Config(32, 32, 1, 4, True, 4)),  # more splits than there are steps for
    (32, 322, 576, 64, True, warpgroups(32, 2, 2)),
    (11, 130, 896, 128, False, warpgroups(16, 3, 4)),
    (40, 66, 416, 416, True, warpgroups(32, 1, 1)),
    (70, 256, 640, 64, False, warpgroups(64, 5, 2)),
    (33, 514, 288, 288, False, warpgroups(64, 2, 4)),
]
"""Tokens, rows, depth, group, zeros, and a config."""


@pytest.mark.parametrize(
    ("tokens", "rows", "depth", "group", "zeros", "config", "dtype"),
    [(*block, dtype) for at, block in enumerate(BLOCKS) for dtype in (DTYPES if DEVICE == "cuda" else DTYPES[at % 2 :][:1])],
)
def test_int4_gemm_with_several_blocks_of_rows_is_exact(
    tokens: int, rows: int, depth: int, group: int, zeros: bool, config: gemm.Int4Config, dtype: torch.dtype
) -> None:
    codes = some_codes(rows, depth, group, zeros, dtype)
    x, bias = whole_numbers(tokens, depth, dtype), whole_numbers(1, rows, dtype)[0]
    tolerance = 2.0**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0.0
    for prefetch in (False, True) if DEVICE == "cuda" else (True,):
        got = ops.int4_gemm(x, pack(*codes), bias, config=dataclasses.replace(config, prefetch=prefetch))
        torch.testing.assert_close(got, exact(x, codes, bias), rtol=tolerance, atol=0)


@pytest.mark.parametrize(("apart", "first"), [(2, 0), (8, 2), (8, 3), (3, 0), (5, 1)])
def test_int4_gemm_with_warpgroups_accepts_unaligned_rows(apart: int, first: int) -> None:
    """Some rows begin at odd addresses, some are at odd distances."""
    codes = some_codes(130, 288, 288, True)
    wide = torch.full((33, 288 + apart), torch.nan, device=DEVICE, dtype=torch.float16)
    x = wide[:, first : first + 288]
    x.copy_(whole_numbers(33, 288, torch.float16))
    config = warpgroups(32, 2, 2)
    for rows in (x, x[1:], x[:1], x[::2]):
        assert torch.equal(ops.int4_gemm(rows, pack(*codes), config=config), exact(rows, codes, None))


@pytest.mark.gpu
@pytest.mark.parametrize(("zeros", "group"), [(False, 64), (True, 32), (False, 128), (True, 4096)])
def test_int4_gemm_with_several_blocks_is_exact_and_deterministic(zeros: bool, group: int) -> None:
    """Rows are long enough for prefetches into L2, and the last split has fewer steps."""
    codes = some_codes(1090, 4096, group, zeros)
    weight, x = pack(*codes), whole_numbers(32, 4096, torch.float16)
    want, noise = exact(x, codes, None), torch.randn(32, 4096, device=DEVICE).half()
    together = [warpgroups(32, splits, blocks) for splits in (1, 5) for blocks in (1, 2, 4)]
    together = [] if group == 32 else [*together, warpgroups(16, 3, 2), warpgroups(64, 3, 4)]
    apart = ((32, 32, 1, 3, True, 4), (32, 32, 2, 1, True, 2), (16, 64, 1, 3, True, 4), (16, 32, 2, 3, False, 4))
    for config in (*(gemm.Int4Config(*knobs) for knobs in apart), *together):
        assert torch.equal(ops.int4_gemm(x, weight, config=config), want), config
        answer = ops.int4_gemm(noise, weight, config=config)
        for _ in range(20):
            assert torch.equal(ops.int4_gemm(noise, weight, config=config), answer), config


def test_int4_gemm_with_warpgroups_refuses_groups_below_half_a_block() -> None:
    config = warpgroups(32, 1)
    assert gemm.invalid(case_of(32, 4096, 4096, 32), config) == "groups of 32, of which half a block of k has two"
    codes = some_codes(64, 128, 32, False)
    with pytest.raises(ValueError, match=r"warpgroup=True.*: groups of 32, of which half a block of k has two"):
        ops.int4_gemm(whole_numbers(32, 128, torch.float16), pack(*codes), config=config)
    one = case_of(200, 28672, 32, 0)
    assert gemm.invalid(one, gemm.default(one)) is None
    assert not gemm.default(one).warpgroup


@pytest.mark.parametrize(("knobs", "message"), [
    ({"along": 2}, "2 warps along k, of which each multiplies with three other warps"),
    ({"splits": 4}, "4 programs along 5 blocks of k"),
    ({"rows": 32}, "32 rows of a warpgroup, which has 64"),
])  # fmt: skip
def test_int4_gemm_with_invalid_warpgroup_configs_raises(knobs: dict[str, int], message: str) -> None:
    config = dataclasses.replace(warpgroups(32, 1), **knobs)
    assert gemm.invalid(case_of(32, 64, 640), config) is not None
    with pytest.raises(ValueError, match=message):
        ops.int4_gemm(whole_numbers(32, 640, torch.float16), pack(*some_codes(64, 640, 64, False)), config=config)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_int4_gemm_split_sums_of_any_value_are_exact_and_clear_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word of zero means that a part is not there yet."""
    handed_out: list[torch.Tensor] = []

    @contextmanager
    def spied(count: int, device: torch.device) -> Iterator[torch.Tensor]:
        with counters(count, device) as words:
            handed_out.append(words)
            yield words

    monkeypatch.setattr(gemm, "counters", spied)
    codes = some_codes(66, 512, 64, True)
    x = whole_numbers(10, 512, torch.float16)
    x[0], x[1, 3], x[2, 500], x[3, 1] = 0.0, torch.nan, torch.inf, -torch.inf
    x[4].view(torch.int16).fill_(-1)  # NaN of ones alone
    for along, splits in ((2, 2), (1, 4)):
        config = gemm.Int4Config(16, 32, along, splits, prefetch=False)
        got, want = ops.int4_gemm(x, pack(*codes), config=config), exact(x, codes, None)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert handed_out
    assert not any(bool(words.any()) for words in handed_out)


@pytest.mark.skipif(DEVICE != "cpu", reason="CUDA's programs do wait")
def test_int4_gemm_without_cooperative_launch_splits_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, x = some_codes(64, 512, 64, False), whole_numbers(5, 512, torch.float16)
    monkeypatch.setattr(gemm, "INTERPRETED", False)  # as on a GPU that is not CUDA's
    monkeypatch.setattr(gemm, "counters", lambda *_: pytest.fail("memory for parts"))
    config = gemm.Int4Config(8, 32, 2, 2, prefetch=False)
    assert torch.equal(ops.int4_gemm(x, pack(*codes), config=config), exact(x, codes, None))


def test_int4_gemm_of_large_whole_numbers_is_exact() -> None:
    """The sums over k of |x| |q - z| stay below 2^24."""
    codes = some_codes(64, 256, 64, False)
    codes.scales.fill_(2.0**-12)
    x = torch.randint(-2048, 2049, (2, 256), device=DEVICE).half()
    assert torch.equal(ops.int4_gemm(x, pack(*codes)), exact(x, codes, None))


@pytest.mark.filterwarnings("ignore::kerneltune.misses.CacheMissWarning")
def test_cached_int4_config_serves_other_tokens_but_no_other_rows(tmp_path: Path) -> None:
    """It serves no tokens that other programs suit, and no groups whose scales take more registers than there are."""
    stored, options = gemm.Int4Config(16, 32, 4, 2, prefetch=False), case_of(16, 3584, 8192).options
    case = dataclasses.replace(case_of(16, 3584, 8192), name="seed")
    entry = cache.CacheEntry(op="int4_gemm", variant="optimized", case=case, policy="cold", config=dataclasses.asdict(stored))
    cache.store("a_gpu", entry, tmp_path)
    choose = cache.Chooser.of(gemm.OP, gemm.OP.variant("optimized"), root=tmp_path)
    sizes = [(12, 3584, 8192), (16, 10240, 8192), (8, 3584, 8192), (17, 3584, 8192), (32, 3584, 8192)]
    assert gemm.invalid(case_of(*sizes[-1]), stored) is None
    got = [choose(case_of(*s).axes, "float16", "int4", options, gpu="a_gpu") for s in sizes]
    assert got == [stored, *(gemm.default(case_of(*s)) for s in sizes[1:])]
    larger, smaller = (case_of(16, 3584, 8192, group=group) for group in (128, 32))
    assert choose(larger.axes, "float16", "int4", larger.options, gpu="a_gpu") == stored
    assert choose(smaller.axes, "float16", "int4", smaller.options, gpu="a_gpu") == gemm.default(smaller)


def test_int4_gemm_accepts_unaligned_weights() -> None:
    """Prefetches want 16 bytes aligned."""
    codes = some_codes(64, 256, 64, False)
    weight, x = pack(*codes), whole_numbers(16, 256, torch.float16)
    moved = torch.empty(weight.packed.numel() + 1, dtype=torch.int32, device=DEVICE)[1:].view(weight.packed.shape)
    config = gemm.Int4Config(16, 32, 2, 1, prefetch=True)
    assert torch.equal(ops.int4_gemm(x, weight._replace(packed=moved.copy_(weight.packed)), config=config), exact(x, codes, None))


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("config", [warpgroups(16, 4), gemm.Int4Config(16, 32, 4, 4, True), gemm.Int4Config(16, 64, 4, 4, True)])
def test_int4_gemm_reads_weights_after_the_preceding_kernel_wrote_them(config: gemm.Int4Config, prefetch: bool) -> None:
    """A prefetch into L2 sees old bytes; the reads must not."""
    first, second = some_codes(3584, 8192, 64, False), some_codes(3584, 8192, 64, False)
    weight, other, x = pack(*first), pack(*second), whole_numbers(16, 8192, torch.float16)
    wants = exact(x, first, None), exact(x, second, None)
    kept = weight._replace(packed=weight.packed.clone(), scales=weight.scales.clone())
    sources, config = (kept, other), dataclasses.replace(config, prefetch=prefetch)
    for turn in range(20):
        weight.packed.copy_(sources[turn % 2].packed)
        weight.scales.copy_(sources[turn % 2].scales)
        assert torch.equal(ops.int4_gemm(x, weight, config=config), wants[turn % 2])
    one, two = (ops.int4_gemm(x, source, config=config) for source in (sources[0], other))
    assert torch.equal(one, wants[0])
    assert torch.equal(two, wants[1])


@pytest.mark.gpu
@pytest.mark.parametrize("config", [warpgroups(16, 4), gemm.Int4Config(16, 32, 4, 4, True), gemm.Int4Config(16, 64, 4, 4, True)])
def test_int4_gemm_reads_the_result_of_the_preceding_int4_gemm(config: gemm.Int4Config) -> None:
    """Two launches may overlap: the second's x is the first's y."""
    square, x = some_codes(4096, 4096, 64, False), whole_numbers(16, 4096, torch.float16)
    square.scales.fill_(2.0**-10)
    weight = pack(*square)
    middle = ops.int4_gemm(x, weight, config=config)
    torch.cuda.synchronize()
    want = ops.int4_gemm(middle.clone(), weight, config=config)
    for _ in range(20):
        assert torch.equal(ops.int4_gemm(ops.int4_gemm(x, weight, config=config), weight, config=config), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "zeros", "group"), [(16, False, 64), (5, True, 32), (32, False, 128), (50, True, 64)])
def test_int4_gemm_of_every_shape_of_program_on_a_gpu_is_deterministic(
    tokens: int, zeros: bool, group: int, dtype: torch.dtype
) -> None:
    codes = some_codes(256, 4096, group, zeros, dtype)
    weight, x = pack(*codes), whole_numbers(tokens, 4096, dtype)
    want = exact(x, codes, None)
    noise, answers = torch.randn(tokens, 4096, device=DEVICE).to(dtype), {}
    configs = configs_of(case_of(tokens, 256, 4096))
    for config in {(c.tokens, c.rows, c.splits, c.blocks): c for c in configs}.values():
        assert torch.equal(ops.int4_gemm(x, weight, config=config), want), config
        answers[config] = ops.int4_gemm(noise, weight, config=config)
        for _ in range(20):
            assert torch.equal(ops.int4_gemm(noise, weight, config=config), answers[config]), config


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "zeros", "group", "dtype"), [
    (16, True, 32, torch.float16), (32, False, 64, torch.float16), (47, True, 128, torch.bfloat16),
    (128, False, 64, torch.float16),
])  # fmt: skip
def test_int4_gemm_of_many_tokens_is_exact_and_deterministic(tokens: int, zeros: bool, group: int, dtype: torch.dtype) -> None:
    codes = some_codes(3584, 8192, group, zeros, dtype)
    weight, x = pack(*codes), whole_numbers(tokens, 8192, dtype)
    want, noise = exact(x, codes, None), torch.randn(tokens, 8192, device=DEVICE).to(dtype)
    for config in gemm.promising(case_of(tokens, 3584, 8192, group, zeros)):
        assert torch.equal(ops.int4_gemm(x, weight, config=config), want), config
        answer = ops.int4_gemm(noise, weight, config=config)
        for _ in range(20):
            assert torch.equal(ops.int4_gemm(noise, weight, config=config), answer), config


@pytest.mark.gpu
def test_int4_gemm_plain_variants_on_a_gpu_are_exact() -> None:
    codes = some_codes(256, 4096, 64, False)
    weight, x = pack(*codes), whole_numbers(16, 4096, torch.float16)
    from kerneltune.ops.int4_gemm.reference import Forms

    inputs = {"x": x, "weight": weight, "forms": Forms(weight)}
    want = exact(x, codes, None)
    assert torch.equal(plain.run_baseline(inputs, plain.PlainConfig(16, 64, 64, 4, 3))["y"], want)
    assert torch.equal(plain.run_splitk(inputs, plain.SplitConfig(16, 64, 64, 4, 3, 8))["y"], want)
    assert torch.equal(plain.run_streamk(inputs, plain.StreamKConfig(16, 64, 64, 4, 3, 2))["y"], want)


def a_weight() -> Int4Weight:
    return pack(*some_codes(64, 128, 64, False))


@pytest.mark.parametrize(("change", "message"), [
    (lambda x, w: (x.float(), w, None), "x must be (N, 128) float16 or bfloat16, got (4, 128) torch.float32"),
    (lambda x, w: (x[:, :64], w, None), "got (4, 64)"),
    (lambda x, w: (x[:, :1].expand(4, 128), w, None), "elements of a row of x must be adjacent"),
    (lambda x, w: (x.bfloat16(), w, None), "scales must be (1, 1, 8, 2, 8) torch.bfloat16"),
    (lambda x, w: (x, w._replace(packed=w.packed.long()), None), "packed must be (1, 1, 8, 8, 4, 4) torch.int32"),
    (lambda x, w: (x, w._replace(packed=w.packed[:, :, :4]), None), "got (1, 1, 4, 8, 4, 4)"),
    (lambda x, w: (x, w._replace(rows=63), None), "got m=63"),
    (lambda x, w: (x, w._replace(depth=96), None), "k must be a multiple of the group and of 32, got k=96 group=64"),
    (lambda x, w: (x, w, torch.zeros(63, device=DEVICE).half()), "bias must be (64,)"),
    (lambda x, w: (x.to("meta"), w, None), "on meta, got"),
    (lambda x, w: (x.as_strided((4, 128), (64, 1)), w, None), "rows of x must not overlap, got strides (64, 1)"),
    (lambda x, w: (x.tolist(), w, None), "x must be a tensor, got [["),
    (lambda x, w: (x, w.packed, None), "weight must be an Int4Weight, as `pack` makes it, got Tensor"),
    (lambda x, w: (x, w, 0.5), "bias must be a tensor, got 0.5"),
    (lambda x, w: (x, w._replace(scales=w.scales.transpose(2, 4)), None), "scales must be contiguous, got strides"),
])  # fmt: skip
def test_int4_gemm_of_bad_operands_raises(change: Callable, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.int4_gemm(*change(whole_numbers(4, 128, torch.float16), a_weight()))


WAITS = r"""
import os
import re
import kerneltune.measuring.compiler as compiler
from kerneltune import ops
from kerneltune.spec import Case
from triton.runtime.jit import JITFunction

compiler.Compiler(compiler.TARGETS["sm_90"], None)
run, texts = JITFunction.run, []


def keeping(self, *args, **kwargs):
    kernel = run(self, *args, **kwargs)
    texts.append(kernel.asm["ptx"])
    return kernel


JITFunction.run = keeping
op = ops.load()["int4_gemm"]
variant = op.variant("optimized")
for tokens, rows, along, splits, blocks in %r:
    options = (("group", 64), ("zeros", False), ("bias", False))
    case = Case("some", (("N", tokens), ("M", 3584), ("K", 8192)), "float16", "int4", options)
    knobs = {"tokens": max(8, tokens), "rows": rows, "along": along, "splits": splits, "prefetch": False, "blocks": blocks}
    variant.run(op.inputs(case, device="meta"), variant.config_from(knobs))
    threads = int(texts[-1].split(".reqntid ")[1].split()[0].rstrip(","))
    waited = sum(int(words or 1) for words in re.findall(r"ld\.relaxed\.gpu\.global(?:\.v(\d))?\.b32", texts[-1]))
    print(waited * threads, (splits - 1) * max(8, tokens) * 64 * blocks)
"""


def test_int4_gemm_code_awaits_every_partial_sum_once() -> None:
    """Parts are set to zero by who has waited for them: a second copy of that code, which a compiler may make, waits for ever."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    configs = [(16, 32, 8, 2, 1), (32, 32, 4, 2, 1), (32, 32, 2, 12, 2), (16, 16, 1, 4, 1), (64, 64, 1, 3, 4)]
    script = WAITS % (configs,)
    done = subprocess.run([python(), "-c", script], capture_output=True, text=True, env=env, timeout=800)
    pairs = [line.split() for line in done.stdout.splitlines()]
    assert len(pairs) == len(configs), done.stderr[-600:]
    assert every(count == wanted for count, wanted in pairs), pairs
