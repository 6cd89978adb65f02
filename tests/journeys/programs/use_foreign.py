"""Use the foreign package at the widths that are given."""

import sys

import torch
from foreign_ops import scaled_sum, shifted
from observed import report

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    for columns in map(int, sys.argv[1:]):
        x = (torch.arange(64 * columns, device=device) % 7).float().view(64, columns)
        results += [scaled_sum(x), shifted(x, 3.0)]
    report(*results)
