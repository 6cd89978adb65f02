"""Run a part of examples/adopted_packages/liger_torchao.py at the given sizes."""

import sys

import liger_torchao
import torch
from observed import report

if __name__ == "__main__":
    for size in map(int, sys.argv[2:]):
        torch.manual_seed(size)
        getattr(liger_torchao, sys.argv[1])(size)
    torch.cuda.synchronize()
    report(*liger_torchao.FOUND.values())
