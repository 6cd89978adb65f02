"""Run operators of flag_gems, whose launcher keeps compiled kernels: `python flag_gems_ops.py norms|products`."""

import sys
from typing import Any

from measured_step import leaf, run, sized

ROWS, WIDTH = sized(4096, 24), sized(5120, 72)


def norms() -> Any:
    """Normalize rows, take softmax, sum, sort and look for the largest."""
    import flag_gems

    x, weight = leaf(ROWS, WIDTH).detach(), leaf(WIDTH).detach()
    return (
        flag_gems.rms_norm(x, (WIDTH,), weight, 1e-6), flag_gems.layer_norm(x, (WIDTH,), weight, weight)[0],
        flag_gems.softmax(x, -1), flag_gems.log_softmax(x, -1), flag_gems.cumsum(x.float(), 1), flag_gems.argmax(x, 1),
        flag_gems.gelu(x), flag_gems.silu_and_mul(x, x), flag_gems.amax(x, [1]),
    )  # fmt: skip


def products() -> Any:
    """Multiply matrices, few rows and many, and batches of them."""
    import flag_gems

    w = leaf(WIDTH, WIDTH // 2).detach()
    few, many = leaf(16, WIDTH).detach(), leaf(ROWS // 2, WIDTH).detach()
    batch = leaf(8, sized(512, 40), sized(256, 24)).detach()
    return flag_gems.mm(few, w), flag_gems.mm(many, w), flag_gems.bmm(batch, batch.transpose(1, 2).contiguous())


if __name__ == "__main__":
    run({"norms": norms, "products": products}[sys.argv[1]])
