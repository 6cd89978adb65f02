"""Run attention of sageattention with queries and keys in int8: `python sage_attention.py dense|varlen`."""

import sys
from typing import Any

import torch
from measured_step import DEVICE, leaf, run, sized

HEADS, LENGTH, WIDTH = sized(16, 2), sized(2048, 128), 64


def dense() -> Any:
    """Attend in a causal layer and in one that sees all."""
    from sageattention import sageattn

    q, k, v = (leaf(2, HEADS, LENGTH, WIDTH, scale=s).detach() for s in (1.0, 0.5, 2.0))
    return [sageattn(q, k.clone(), v, is_causal=causal) for causal in (False, True)]


def varlen() -> Any:
    """Attend over sequences of unequal lengths."""
    from sageattention import sageattn_varlen

    lengths = torch.tensor([LENGTH // 4, LENGTH // 2 - 7, LENGTH // 4 + 7], dtype=torch.int32, device=DEVICE)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    q, k, v = (leaf(LENGTH, HEADS, WIDTH, scale=s).detach() for s in (1.0, 0.5, 2.0))
    longest = int(lengths.max())
    return sageattn_varlen(q, k.clone(), v, ends, ends, longest, longest)


if __name__ == "__main__":
    run({"dense": dense, "varlen": varlen}[sys.argv[1]])
