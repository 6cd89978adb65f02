"""Workspaces without a GPU: owners of memory, and sums that programs exchange through it."""

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from kerneltune.kernel_lib import launch
from kerneltune.kernel_lib.workspace import HEADER_WORDS, Pool, workspace
from kerneltune.ops import fp8
from kerneltune.ops.fp8.kernels import columns, early
from kerneltune.ops.rmsnorm import FwdConfig, rmsnorm_fwd
from kerneltune.ops.rmsnorm.kernels import forward

CPU = torch.device("cpu")
SMALLEST = 1 << 16
SPLIT = FwdConfig(rows=1, cols=512, split=True, warps=4, ctas=1, stages=2, reload=False)
WHOLE = FwdConfig(rows=1, cols=512, split=False, warps=4, ctas=0, stages=1, reload=False)


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (0, SMALLEST),
        (1, SMALLEST),
        (SMALLEST - HEADER_WORDS, SMALLEST),
        (SMALLEST - HEADER_WORDS + 1, 2 * SMALLEST),
        (SMALLEST, 2 * SMALLEST),
        (100_000, 2 * SMALLEST),
        (5 * SMALLEST, 8 * SMALLEST),
    ],
)
def test_workspace_has_a_power_of_two_of_zeroed_words_with_its_header(slots: int, words: int) -> None:
    with workspace(slots, CPU) as ws:
        assert ws.dtype == torch.int64
        assert ws.shape == (words,)
        assert ws.is_contiguous()
        assert words >= slots + HEADER_WORDS
        assert not ws.any()


def test_workspace_on_a_cpu_is_new_for_every_caller() -> None:
    with workspace(8, CPU) as first:
        first.fill_(-1)
    with workspace(8, CPU) as second:
        assert not second.any()


def test_workspace_on_meta_has_no_memory() -> None:
    with workspace(8, torch.device("meta")) as ws:
        assert ws.is_meta


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("op", ["early", "twice", "columns"])
def test_workspace_renumbers_launches_before_their_numbers_overflow(
    op: str, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One workspace is two launches short of 2^32; a new workspace is cleared as often."""
    where = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    memory = torch.zeros(SMALLEST, dtype=torch.int64, device=where)
    pool = Pool(lambda: memory, period=3)
    number = memory.view(torch.int32)[:1]
    number.fill_(0 if fresh else -3)
    for module in (early, columns):
        monkeypatch.setattr(module, "workspace", lambda *_: pool.lend())
    numbers = []
    for exponent in range(5):
        x = torch.full((16, 16), 2.0**-exponent, dtype=torch.bfloat16, device=where)
        if op == "columns":
            scale = fp8.fp8_group_colwise(x, torch.tensor([16], dtype=torch.int32, device=where))[1]
        else:
            scale = fp8.fp8_tensorwise_2d(x, pow2=op == "early").scale
        assert (scale == (448 if op == "twice" else 256) * 2.0**exponent).all()
        numbers.append(int(number))
    assert numbers == ([1, 2, 1, 2, 3] if fresh else [-2, -1, 1, 2, 3])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's two launches")
@pytest.mark.parametrize(("M", "N"), [(5, 2000), (9, 1536)])
def test_launches_that_share_a_workspace_give_results_of_one_program(M: int, N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_out: list[tuple[int, torch.Tensor]] = []

    @contextmanager
    def spied(slots: int, device: torch.device) -> Iterator[torch.Tensor]:
        with workspace(slots, device) as ws:
            handed_out.append((slots, ws))
            yield ws

    monkeypatch.setattr(forward, "workspace", spied)
    x, weight = torch.randn(M, N) * torch.logspace(-2, 2, M)[:, None], torch.randn(N)
    whole = rmsnorm_fwd(x, weight, config=WHOLE)
    assert handed_out == []
    split = rmsnorm_fwd(x, weight, config=SPLIT)

    parts = -(-N // 512)
    assert [slots for slots, _ in handed_out] == [M * parts]
    torch.testing.assert_close(split.rsigma, whole.rsigma, rtol=1e-6, atol=0)
    torch.testing.assert_close(split.y, whole.y, rtol=2e-6, atol=0)
    exact = torch.rsqrt(x.double().square().mean(1) + 1e-6)
    torch.testing.assert_close(split.rsigma.double(), exact, rtol=1e-6, atol=0)

    # every slot holds a partial sum under a tag, nothing lies behind them
    words = handed_out[0][1][HEADER_WORDS:]
    partials = words[: M * parts].view(torch.int32).view(M, parts, 2)
    assert (partials[..., 1] != 0).all()
    assert not words[M * parts :].any()
    padded = torch.nn.functional.pad(x, (0, parts * 512 - N)).view(M, parts, 512)
    sums = partials[..., 0].contiguous().view(torch.float32)
    torch.testing.assert_close(sums, padded.square().sum(2), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("warps", "ctas"), [(2, 5), (4, 3), (8, 2), (2, 1), (32, 1)])
def test_cooperative_launch_limits_registers_to_the_quarters_of_an_sm(
    warps: int, ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "is_cuda", lambda: True)
    ((phase, options),) = launch.phases(warps, ctas)
    assert phase == 0
    assert options["launch_cooperative_grid"]
    warps_of_a_quarter = -(-warps * ctas // 4)
    assert options["maxnreg"] % 8 in (0, 7)
    assert 32 * warps_of_a_quarter * options["maxnreg"] <= 16384


def pool_of_words() -> Pool:
    """Make a pool like a stream's, of small memory on the CPU."""
    return Pool(lambda: torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("AABBCC"))), ids="".join)
def test_pool_lends_memory_to_one_caller_at_a_time(order: tuple[str, ...]) -> None:
    """Try every order in which three callers begin (their first step) and end (their second)."""
    pool = pool_of_words()
    stacks: dict[str, ExitStack] = {}
    lent: dict[str, int] = {}
    most, addresses = 0, set()
    for caller in order:
        if caller in lent:
            stacks[caller].close()
            del lent[caller]
            continue
        stacks[caller] = ExitStack()
        address = stacks[caller].enter_context(pool.lend()).data_ptr()
        assert address not in lent.values()
        lent[caller] = address
        addresses.add(address)
        most = max(most, len(lent))
    assert len(addresses) == most, "no more memory than callers at once"


def test_pool_lends_the_same_memory_to_successive_callers() -> None:
    pool = pool_of_words()
    addresses = set()
    for _ in range(5):
        with pool.lend() as memory:
            addresses.add(memory.data_ptr())
    assert len(addresses) == 1


def test_pool_lends_memory_of_a_failed_operation_to_nobody() -> None:
    pool = pool_of_words()
    with pytest.raises(KeyboardInterrupt), pool.lend() as memory:
        memory.fill_(-1)
        raise KeyboardInterrupt
    with pool.lend() as other:
        assert other is not memory
        assert not other.any()


def test_pool_lends_threads_different_memory() -> None:
    """Python's interpreter switches between four threads at any instruction."""
    pool, failures = pool_of_words(), []

    def borrow(name: int) -> None:
        for _ in range(3000):
            with pool.lend() as memory:
                words = memory.numpy()
                words[0] = name
                if words[0] != name or words[1] != 0:
                    failures.append(name)
                words[1] = 1  # a second borrower at this time would see it
                words[1] = 0

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=borrow, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switching)
    assert failures == []


class Turns:
    """Lets the launches of several threads happen in a given order."""

    def __init__(self, order: str) -> None:
        self._order, self._done, self._changed = order, 0, threading.Condition()

    def kernel(self, kernel: Any) -> Any:
        """Return a kernel that launches when it is the calling thread's turn."""
        turns = self

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                def launch(*arguments: Any, **constants: Any) -> None:
                    name = threading.current_thread().name
                    with turns._changed:
                        assert turns._changed.wait_for(lambda: turns._order[turns._done] == name, timeout=60)
                        kernel[grid](*arguments, **constants)
                        turns._done += 1
                        turns._changed.notify_all()

                return launch

        return Kernel()


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches in the interpreter, one at a time")
@pytest.mark.parametrize("order", ["ABAB", "ABBA", "AABB"])
@pytest.mark.parametrize("pow2", [False, True])
def test_casts_of_two_threads_on_one_stream_have_their_own_scales(
    order: str, pow2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cast is two launches: where both threads had the same memory, A's scale was B's in the orders ABAB and ABBA."""
    pool, turns = Pool(lambda: torch.zeros(SMALLEST, dtype=torch.int64)), Turns(order)
    monkeypatch.setattr(early, "workspace", lambda *_: pool.lend())
    for name in ("cast_early", "cast_again", "amax_segments", "cast_segments"):
        monkeypatch.setattr(early, name, turns.kernel(getattr(early, name)))
    scales: dict[str, float] = {}

    def cast(name: str, value: float) -> None:
        scales[name] = fp8.fp8_tensorwise_2d(torch.full((16, 16), value), pow2=pow2).scale.item()

    threads = [threading.Thread(target=cast, args=pair, name=pair[0]) for pair in (("A", 1.0), ("B", 64.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    largest = 256.0 if pow2 else 448.0
    assert scales == {"A": largest, "B": largest / 64}
