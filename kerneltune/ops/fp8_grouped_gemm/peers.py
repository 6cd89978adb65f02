"""Run torch's grouped products: the CUTLASS kernel of fp8, which is the baseline, and the CUTLASS kernel of bfloat16.

Neither kernel exists on the CPU. There `_emulated` replaces the fp8 kernel, so that the surrounding code can be checked.
`_emulated` is never timed.
"""

import torch

from kerneltune.kernel_lib.groups import aligned_starts, bounds
from kerneltune.spec import Case, Inputs, Outputs, Variant


def scaled_mm(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Call torch._scaled_grouped_mm, with bfloat16 results and fast accumulation; expand scales to every row and column."""
    E = offs.shape[0]
    if b.ndim == 3:
        rows = _expanded(scale_a, 1, a.shape[0]).view(-1)
        columns = _expanded(scale_b, E, b.shape[2])
    else:
        rows = _expanded(scale_a, E, a.shape[0]).view(-1)
        columns = _expanded(scale_b, E, b.shape[1]).view(-1)
    if a.device.type == "cpu":
        return _emulated(a, b, rows, columns, offs)
    result: torch.Tensor = torch._scaled_grouped_mm(a, b, rows, columns, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True)
    return result


def _expanded(scale: torch.Tensor, groups: int, each: int) -> torch.Tensor:
    """Return (groups, each) of one scale, of one per group, or of all."""
    if scale.numel() == groups * each:
        return scale.reshape(groups, each)
    return scale.reshape(-1, 1).expand(groups, each).contiguous()


def _emulated(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Return the result of torch._scaled_grouped_mm for tensors on the CPU."""
    groups = bounds(offs)
    x, y = a.float(), b.float()
    if b.ndim == 3:
        out = torch.full((a.shape[0], b.shape[2]), torch.nan, dtype=torch.bfloat16)  # rows behind the last group stay unwritten
        for group, (start, end) in enumerate(groups):
            out[start:end] = (x[start:end] @ y[group]) * rows[start:end, None] * columns[group]
        return out
    each, every = rows.view(len(groups), -1, 1), columns.view(len(groups), 1, -1)
    return torch.stack([x[:, s:e] @ y[s:e] for s, e in groups]).mul_(each).mul_(every).bfloat16()


def _run_scaled(inputs: Inputs, _config: None) -> Outputs:
    """Run `scaled_mm` on a case's inputs."""
    return {"out": scaled_mm(inputs["a"], inputs["b"], inputs["scale_a"], inputs["scale_b"], _ends(inputs))}


def _run_bf16(inputs: Inputs, _config: None) -> Outputs:
    """Run torch._grouped_mm of the same values in bfloat16, times their scales, which are made at the first call."""
    x, y = _in_bf16(inputs)
    return {"out": torch._grouped_mm(x, y, offs=_ends(inputs), out_dtype=torch.bfloat16)}


_ENDS_OF: "torch.utils.weak.WeakIdKeyDictionary" = torch.utils.weak.WeakIdKeyDictionary()
"""The ends of aligned groups, by the tensor of group ends that they were made of."""


def _ends(inputs: Inputs) -> torch.Tensor:
    """Return where groups of columns end, with the zeros behind each aligned group; made at the first call."""
    offs: torch.Tensor = inputs["offs"]
    if not inputs["aligned"]:
        return offs
    if offs not in _ENDS_OF:
        starts = aligned_starts(offs)
        _ENDS_OF[offs] = torch.cat([starts[1:], starts.new_full((1,), inputs["a"].shape[1])])
    found: torch.Tensor = _ENDS_OF[offs]
    return found


_BF16_OF: "torch.utils.weak.WeakIdKeyDictionary" = torch.utils.weak.WeakIdKeyDictionary()
"""Operands in bf16, by the fp8 operand that they were made of: the conversion is no part of the time of a peer."""


def _in_bf16(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a and b of a case's inputs times their scales, exact where these are powers of two; kept as long as a is."""
    a, b, offs = inputs["a"], inputs["b"], _ends(inputs)
    if a not in _BF16_OF:
        E = offs.shape[0]
        if b.ndim == 3:
            x = a.bfloat16() * _expanded(inputs["scale_a"], 1, a.shape[0]).view(-1, 1).bfloat16()
            y = b.transpose(1, 2).bfloat16() * _expanded(inputs["scale_b"], E, b.shape[2])[:, :, None].bfloat16()
        else:
            tokens = torch.arange(a.shape[1], device=a.device, dtype=torch.int32)
            group = torch.bucketize(tokens, offs, right=True).clamp(max=E - 1)
            x = a.bfloat16() * _expanded(inputs["scale_a"], E, a.shape[0]).t()[:, group].bfloat16()
            y = b.t().bfloat16() * _expanded(inputs["scale_b"], E, b.shape[1]).t()[:, group].bfloat16()
        _BF16_OF[a] = (x, y.transpose(-2, -1))
    found: tuple[torch.Tensor, torch.Tensor] = _BF16_OF[a]
    return found


def _unsupported(case: Case) -> str | None:
    """Say why torch's grouped products do not support a case."""
    if case.dtype != "bfloat16":
        return "gives bfloat16"
    if case.option("product") == "weights" and case.option("groups") == "ragged":
        return "takes weight gradients of groups of multiples of 16 tokens"
    if case.option("product") == "rows" and case.option("groups") == "dropped":
        return "leaves rows behind the last group unwritten"
    return None if case["M"] else "no tokens"


BASELINE = Variant("baseline", _run_scaled, unsupported=_unsupported, requires=("torch",))
BF16 = Variant("torch_bf16", _run_bf16, unsupported=_unsupported, requires=("torch",))
