"""Read and write weights of four bits in the plain packings of GPTQ and AWQ checkpoints, exactly."""

import torch

from kerneltune.ops.int4_gemm.packing import MOST_CODE, ORDER, Codes, check_codes, check_tensors, into_words, out_of_words


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor | None,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    v2: bool = False,
) -> Codes:
    """Read GPTQ's plain packing.

    qweight (K / 8, M) int32: a word has eight k of a row, the first in the lowest bits. qzeros (K / group, M / 8) int32:
    zero points of eight rows, each minus 1, or None if all zero points are 8. scales (K / group, M).

    Words of two or eight bits to a code have other shapes than words of four: either qzeros or g_idx shows it. Without both
    the codes are read as if of four bits, and the weight has half or twice as many k: pass the checkpoint's g_idx.

    Args:
        g_idx: (K,) the group of every k, if the checkpoint has it; None for groups of consecutive k. Groups must be of
            consecutive k, as they are without act-order (`desc_act`). For act-order see `group_order`.
        v2: zero points are stored as they are (`checkpoint_format: gptq_v2`).
    """
    _check(qweight, qzeros, scales, 1)
    codes = out_of_words(qweight.t()).reshape(qweight.shape[1], -1)
    zeros = None
    if qzeros is not None:
        zeros = (out_of_words(qzeros).reshape(qzeros.shape[0], -1) + (0 if v2 else 1)).t().contiguous()
    quantised = Codes(codes.contiguous(), scales.t().contiguous(), zeros)
    _, depth, group = check_codes(*quantised)
    if g_idx is not None:
        _check_order(g_idx, depth, group)
    return quantised


def to_gptq(codes: Codes, *, v2: bool = False) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return qweight, qzeros and scales as `from_gptq` reads them; zero points must be 1 … 16, under v2 0 … 15.

    Raises:
        ValueError: a wrong shape, type, device or value, k or rows with zero points that are no multiple of 8 included.
    """
    rows, depth, _ = check_codes(*codes)
    if depth % 8:
        raise ValueError(f"GPTQ packs eight k to a word, got k={depth}")
    qweight = into_words(codes.codes.reshape(rows, depth // 8, 8)).t().contiguous()
    qzeros = None
    if codes.zeros is not None:
        stored = codes.zeros.to(torch.int16) - (0 if v2 else 1)
        if rows % 8 or int(stored.min()) < 0 or int(stored.max()) > MOST_CODE:
            raise ValueError(
                f"GPTQ packs zero points {'0 … 15' if v2 else '1 … 16'} of eight rows, "
                f"got m={rows} and {int(codes.zeros.min())} … {int(codes.zeros.max())}"
            )
        qzeros = into_words(stored.t().reshape(-1, rows // 8, 8))
    return qweight, qzeros, codes.scales.t().contiguous()


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor | None, scales: torch.Tensor) -> Codes:
    """Read AWQ's plain packing.

    qweight (K, M / 8) int32: a word has eight rows of a k, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits. qzeros
    (K / group, M / 8) alike, or None for 8. scales (K / group, M).
    """
    _check(qweight, qzeros, scales, 8)
    back = [ORDER.index(t) for t in range(8)]
    codes = out_of_words(qweight)[..., back].reshape(qweight.shape[0], -1).t().contiguous()
    zeros = None
    if qzeros is not None:
        zeros = out_of_words(qzeros)[..., back].reshape(qzeros.shape[0], -1).t().contiguous()
    quantised = Codes(codes, scales.t().contiguous(), zeros)
    check_codes(*quantised)
    return quantised


def to_awq(codes: Codes) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return qweight, qzeros and scales as `from_awq` reads them; zero points must be 0 … 15.

    Raises:
        ValueError: a wrong shape, type, device or value, rows that are no multiple of 8 and a zero point of 16 included.
    """
    rows = check_codes(*codes)[0]
    most = int(codes.zeros.max()) if codes.zeros is not None else 0
    if rows % 8 or most > MOST_CODE:
        raise ValueError(f"AWQ packs zero points 0 … 15 and eight rows to a word, got m={rows} and a zero point of {most}")
    order = list(ORDER)
    qweight = into_words(codes.codes.t().reshape(-1, rows // 8, 8)[..., order])
    qzeros = None if codes.zeros is None else into_words(codes.zeros.t().reshape(-1, rows // 8, 8)[..., order])
    return qweight, qzeros, codes.scales.t().contiguous()


def _check(qweight: torch.Tensor, qzeros: torch.Tensor | None, scales: torch.Tensor, rows_per_word: int) -> None:
    """Check shapes and types before codes are read."""
    check_tensors(qweight=qweight, qzeros=qzeros, scales=scales, optional="qzeros")
    for name, words in (("qweight", qweight), ("qzeros", qzeros)):
        if words is not None and (words.ndim != 2 or words.dtype != torch.int32):
            raise ValueError(f"{name} must be a matrix of int32, got {tuple(words.shape)} {words.dtype}")
    rows = qweight.shape[1] * rows_per_word
    if scales.ndim != 2 or scales.shape[1] != rows:
        raise ValueError(f"scales must be (groups, {rows}), got {tuple(scales.shape)}")
    if qzeros is not None and (rows % 8 or qzeros.shape != (scales.shape[0], rows // 8)):
        raise ValueError(f"qzeros must be ({scales.shape[0]}, {rows} / 8), got {tuple(qzeros.shape)}")


def _check_order(g_idx: torch.Tensor, depth: int, group: int) -> None:
    check_tensors(g_idx=g_idx)
    if g_idx.shape != (depth,) or g_idx.is_floating_point():
        raise ValueError(f"g_idx must be ({depth},) integers, got {tuple(g_idx.shape)} {g_idx.dtype}")
    wrong = (g_idx != torch.arange(depth, device=g_idx.device) // group).nonzero()
    if len(wrong):
        k = int(wrong[0])
        raise ValueError(
            f"g_idx must give groups of {group} consecutive k, else take `group_order`, "
            f"got g_idx[{k}]={int(g_idx[k])}, expected {k // group}"
        )


def group_order(g_idx: torch.Tensor, group: int) -> torch.Tensor:
    """Return the k of a checkpoint with act-order (`desc_act`) sorted by their groups, for `Int4Linear.from_codes(order=…)`.

    Read the codes by `from_gptq` without g_idx.

    Args:
        g_idx: (K,) the group of every k.
        group: elements of k that share a scale.

    Raises:
        ValueError: not every group has so many k.
    """
    check_tensors(g_idx=g_idx)
    if not isinstance(group, int):
        raise ValueError(f"group must be an integer, got {group=}")
    if g_idx.ndim != 1 or g_idx.is_floating_point() or group < 1 or not g_idx.numel() or g_idx.numel() % group:
        raise ValueError(f"g_idx must be (K,) integers, K a multiple of {group=}, got {tuple(g_idx.shape)} {g_idx.dtype}")
    order = g_idx.argsort(stable=True)
    wrong = (g_idx[order] != torch.arange(len(order), device=g_idx.device) // group).nonzero()
    if len(wrong):
        raise ValueError(f"g_idx must give every group {group} k, group {int(wrong[0]) // group} has fewer or more")
    return order
