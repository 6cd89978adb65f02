"""Operators that keep memory between programs, called from many threads: how many calls give other bits than one thread gets."""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from kerneltune.nn import fp8_grouped_mm
from kerneltune.ops import fp8, rmsnorm
from kerneltune.ops.int4_gemm import gemm as int4
from kerneltune.ops.int4_gemm.packing import pack
from kerneltune.ops.multi_cast_transpose import multi_cast_transpose
from kerneltune.ops.rmsnorm import BwdConfig, FwdConfig

Call = Callable[[], Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(result: Any) -> Iterator[torch.Tensor]:
    """Return all tensors of a result, also nested tensors."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, list | tuple):
        yield from itertools.chain.from_iterable(map(tensors, result))


def bits(t: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in the order of its memory."""
    dense_ = t.mT if t.ndim > 1 and t.mT.is_contiguous() else t
    return dense_.reshape(-1).view(torch.uint8)


def wrong_calls(calls: list[Call], each: int, *, own_streams: bool = False) -> int:
    """Make every call `each` times from a thread of its own; return how often its results were other bits than before.

    Args:
        calls: one per thread, on data of its own.
        own_streams: give each thread a stream; else all launch on the current one.
    """
    expected = [[bits(t).clone() for t in tensors(call())] for call in calls]
    torch.cuda.synchronize()
    counts = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in calls]
    start = threading.Barrier(len(calls))
    failures: list[BaseException] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream() if own_streams else torch.cuda.current_stream()
        try:
            start.wait(60)
            with torch.cuda.stream(stream):
                for _ in range(each):
                    wrong = [(bits(t) != want).any() for t, want in zip(tensors(calls[number]()), expected[number], strict=True)]
                    counts[number] += torch.stack(wrong).any()
            stream.synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    torch.cuda.synchronize()
    return int(sum(int(count) for count in counts))


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return values whose largest differs from seed to seed by powers of two, so that another seed's scale gives other bytes."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=DEVICE) * 8.0**seed).to(dtype)


def ends(rows: int, groups: int) -> torch.Tensor:
    """Return the ends of groups of equal size."""
    return torch.arange(1, groups + 1, device=DEVICE, dtype=torch.int32) * (rows // groups)


def tensorwise(seed: int, pow2: bool) -> Call:
    return partial(fp8.fp8_tensorwise_2d, normal(seed, 256, 512), layout="both", pow2=pow2)


def rmsnorm_split(seed: int) -> Call:
    x, weight = normal(seed, 64, 16384), normal(0, 16384)
    config = FwdConfig(rows=1, cols=4096, split=True, warps=8, ctas=1, stages=2, reload=False)
    return partial(rmsnorm.rmsnorm_fwd, x, weight, config=config)


def rmsnorm_bwd_split(seed: int) -> Call:
    x, dz, weight = normal(seed, 64, 16384), normal(seed + 1, 64, 16384), normal(0, 16384)
    rsigma = rmsnorm.rmsnorm_fwd(x, weight).rsigma
    config = BwdConfig(rows=1, cols=4096, split=True, warps=8, ctas=1, stages=2)
    return partial(rmsnorm.rmsnorm_bwd, dz, x, rsigma, weight, config=config)


def rmsnorm_turned(seed: int) -> Call:
    x, weight = normal(seed, 3072, 8192), normal(0, 8192)
    config = FwdConfig(rows=1, cols=4096, split=False, warps=8, ctas=0, stages=1, reload=True)
    scale = torch.ones(1, device=DEVICE)

    def call() -> Any:
        amax = torch.zeros(1, device=DEVICE)
        out = rmsnorm.rmsnorm_fwd(x, weight, quant="fp8_t", scale=scale, amax=amax, config=config)
        return out.y, out.y_t, amax

    return call


def int4_split(seed: int) -> Call:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    codes = torch.randint(0, 16, (512, 2048), generator=generator, device=DEVICE, dtype=torch.uint8)
    weight = pack(codes, torch.rand(512, 2048 // 64, generator=generator, device=DEVICE).half())
    config = int4.Int4Config(16, 32, 2, 2, prefetch=False)
    return partial(int4.int4_gemm, normal(0, 16, 2048, dtype=torch.float16), weight, config=config)


def step(seed: int) -> Call:
    """Run a grouped product forward and backward, the backward pass in autograd's thread."""
    a, w, dy = normal(seed, 256, 256), normal(0, 4, 256, 256), normal(seed, 256, 256)
    offs = ends(256, 4)

    def call() -> Any:
        leaves = a.detach().requires_grad_(), w.detach().requires_grad_()
        y = fp8_grouped_mm(leaves[0], leaves[1].transpose(1, 2), offs)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    return call


def multi_cast(seed: int) -> Call:
    xs = [normal(seed, 256, 512), normal(seed, 512, 256)]
    return lambda: (lambda out: [out.casts, out.transposes])(
        multi_cast_transpose(xs, torch.ones(2, device=DEVICE), torch.zeros(2, device=DEVICE))
    )


CALLS: Mapping[str, Callable[[int], Call]] = {
    "tensorwise pow2": partial(tensorwise, pow2=True),
    "tensorwise": partial(tensorwise, pow2=False),
    "tensorwise 3d": lambda seed: partial(fp8.fp8_tensorwise_3d, normal(seed, 4, 256, 256).transpose(1, 2), layout="both"),
    "tensorwise group": lambda seed: partial(fp8.fp8_tensorwise_group, normal(seed, 512, 256), ends(512, 4)),
    "group colwise": lambda seed: partial(fp8.fp8_group_colwise, normal(seed, 512, 256), ends(512, 4)),
    "group both": lambda seed: partial(fp8.fp8_group_both, normal(seed, 512, 256), ends(512, 4)),
    "colwise 3d": lambda seed: partial(fp8.fp8_colwise_3d, normal(seed, 4, 256, 256).transpose(1, 2)),
    "rowwise 3d both": lambda seed: partial(fp8.fp8_rowwise_3d_both, normal(seed, 4, 256, 256).transpose(1, 2)),
    "multi cast": multi_cast,
    "rmsnorm fwd split": rmsnorm_split,
    "rmsnorm bwd split": rmsnorm_bwd_split,
    "rmsnorm fp8_t": rmsnorm_turned,
    "int4 split": int4_split,
    "grouped step": step,
}
"""By name, what gives thread `seed` a call."""
