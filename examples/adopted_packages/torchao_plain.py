"""A kernel of torchao 0.18 that no autotuner wraps and whose blocks only the grid reads: the backward pass of a permutation.

`python torchao_plain.py RESULTS.pt [EXPECTED.pt]` prints one line of JSON: the results of both files that differ. Needs a GPU and
torchao; imports no kerneltune.
"""

import json
import sys

import torch
from compare_runs import differences

SIZES = ((4096, 2048), (16384, 4096), (32768, 7168))
"""Rows and columns of the gradient."""
_PADDED_ROWS, _PADDING = 16, -1


def main(results: str, expected: str = "") -> None:
    """Run every size, save samples of the results and print the line."""
    from torchao.prototype.moe_training.ep import permute

    found: dict[str, torch.Tensor] = {}
    for rows, columns in SIZES:
        torch.manual_seed(rows)
        gradient = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        indices = torch.randperm(rows, device="cuda", dtype=torch.int32)
        indices[indices >= rows - _PADDED_ROWS] = _PADDING
        y = permute._triton_permute_bwd(gradient, indices, rows, columns)
        found[f"permute {rows}x{columns}"] = y[:256].float().cpu()
    apart = differences(found, results, expected)
    different = {name: difference for name, difference in apart.items() if difference}
    print(json.dumps({"kept": len(found), "compared": len(apart), "different": different}))


if __name__ == "__main__":
    main(*sys.argv[1:])
