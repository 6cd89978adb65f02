"""Run kernels of three packages: `python author_kernels.py cross_entropy|mlstm|scan`.

cross_entropy: cut-cross-entropy, which autotunes where CCE_AUTOTUNE is 1; mlstm: chunks of mlstm-kernels; scan: accelerated-scan.
"""

import sys
from typing import Any

import torch
from measured_step import DEVICE, leaf, run, sized, trained


def cross_entropy() -> Any:
    """Train a head of 32000 words, whose kernels keep sums behind locks."""
    from cut_cross_entropy import linear_cross_entropy

    tokens, hidden, words = sized(4096, 32), sized(2048, 64), sized(32000, 96)
    embeddings, head = leaf(tokens, hidden), leaf(words, hidden, scale=0.05)
    targets = torch.arange(tokens, device=DEVICE) * 7919 % words
    loss = linear_cross_entropy(embeddings, head, targets, reduction="none")
    return trained(loss, embeddings, head)


def mlstm() -> Any:
    """Train a matrix LSTM over chunks, in kernels without an autotuner."""
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk

    batch, heads, length, width = sized(2, 1), sized(8, 1), sized(4096, 128), sized(128, 32)
    q, k, v = (leaf(batch, heads, length, width, scale=s) for s in (1.0, 0.5, 0.8))
    i, f = leaf(batch, heads, length), leaf(batch, heads, length, scale=2.0)
    output = mlstm_chunkwise__xl_chunk(q, k, v, i, f + 3, chunk_size=sized(128, 64), autocast_kernel_dtype=torch.bfloat16)
    return trained(output, q, k, v)


def scan() -> Any:
    """Train a first-order recurrence by an associative scan of the whole row."""
    from accelerated_scan.scalar import scan as scanned

    gates = leaf(sized(8, 1), sized(1024, 2), sized(8192, 256), dtype=torch.float32)
    inputs = leaf(*gates.shape, scale=0.5, dtype=torch.float32)
    return trained(scanned(gates.sigmoid(), inputs), gates, inputs)


if __name__ == "__main__":
    run({"cross_entropy": cross_entropy, "mlstm": mlstm, "scan": scan}[sys.argv[1]])
