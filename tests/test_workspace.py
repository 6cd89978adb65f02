"""Workspaces without a GPU, and the sums that programs exchange through them."""

import pytest
import torch

from kerneltune.kernel_lib import launch
from kerneltune.kernel_lib import workspace as workspaces
from kerneltune.kernel_lib.workspace import HEADER_WORDS, workspace
from kerneltune.ops import fp8
from kerneltune.ops.fp8 import groups, tensorwise
from kerneltune.ops.rmsnorm import optimized, rmsnorm_fwd
from kerneltune.ops.rmsnorm.configs import FwdConfig

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
def test_a_workspace_is_a_power_of_two_of_zeroed_words_with_room_for_the_header(slots: int, words: int) -> None:
    ws = workspace(slots, CPU)
    assert ws.dtype == torch.int64 and ws.shape == (words,) and ws.is_contiguous()
    assert words >= slots + HEADER_WORDS
    assert not ws.any()


def test_a_workspace_without_a_gpu_is_not_shared() -> None:
    first = workspace(8, CPU)
    first.fill_(-1)
    assert not workspace(8, CPU).any()


def test_a_meta_workspace_has_no_memory() -> None:
    assert workspace(8, torch.device("meta")).is_meta


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("op", ["early", "twice", "columns"])
def test_launches_are_numbered_anew_before_their_numbers_come_round(
    op: str, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a workspace that is two launches short of 2^32; of a new one, which is cleared as often."""
    where = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    monkeypatch.setattr(workspaces, "_LAUNCHES_NUMBERED", 3)
    with torch.inference_mode(fresh):
        shared = workspaces._Shared(SMALLEST, where)
    number = shared._memory.view(torch.int32)[:1]
    number.fill_(0 if fresh else -3)
    for module in (tensorwise, groups):
        monkeypatch.setattr(module, "workspace", lambda *_: shared.next())
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
def test_two_launches_that_share_rows_give_what_one_program_gives(M: int, N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_out: list[tuple[int, torch.Tensor]] = []

    def spied(slots: int, device: torch.device) -> torch.Tensor:
        handed_out.append((slots, workspace(slots, device)))
        return handed_out[-1][1]

    monkeypatch.setattr(optimized, "workspace", spied)
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
    assert (partials[..., 1] != 0).all() and not words[M * parts :].any()
    padded = torch.nn.functional.pad(x, (0, parts * 512 - N)).view(M, parts, 512)
    sums = partials[..., 0].contiguous().view(torch.float32)
    torch.testing.assert_close(sums, padded.square().sum(2), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("warps", "ctas"), [(2, 5), (4, 3), (8, 2), (2, 1), (32, 1)])
def test_programs_that_wait_for_each_other_fit_the_quarters_of_a_multiprocessor(
    warps: int, ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "is_cuda", lambda: True)
    ((phase, options),) = launch.phases(warps, ctas)
    assert phase == 0 and options["launch_cooperative_grid"]
    warps_of_a_quarter = -(-warps * ctas // 4)
    assert options["maxnreg"] % 8 in (0, 7) and 32 * warps_of_a_quarter * options["maxnreg"] <= 16384
