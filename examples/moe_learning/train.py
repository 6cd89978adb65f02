"""Train the model of model.py once per recipe, on the same text in the same order; exit code 1 if a final loss is off by 1 %.

Writes the loss of every step as CSV.
"""

import argparse
import csv
import sys
import time
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from model import BYTES, Model, Sizes
from torch import Tensor

from kerneltune.nn import update_scales

RECIPES = ("bf16", "rowwise", "tensorwise", "delayed")
LAST = 50
"""Steps at the end whose mean is the final loss."""
MOST = 0.01
"""Largest difference to the first recipe's final loss, a fraction."""
TEXT = Path(__file__).with_name("text.txt")


def batches(steps: int, batch: int, length: int, seed: int, device: str) -> Tensor:
    """Return (steps, batch, length + 1) pieces of the text."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long().to(device)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, text.numel() - length - 1, (steps, batch, 1), generator=generator).to(device)
    return text[starts + torch.arange(length + 1, device=device)]


def losses(
    recipe: str,
    sizes: Sizes,
    steps: int,
    batch: int,
    *,
    seed: int,
    device: str,
    rate: float = 1e-3,
    warmup: int = 20,
    compiled: bool = False,
) -> list[float]:
    """Return the loss of every step, nats per byte, under a recipe; `compiled` compiles each block."""
    torch.manual_seed(seed)
    model = Model(sizes, None if recipe == "bf16" else recipe).to(device)
    for block in model.blocks if compiled else ():
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup) * (1.0 - 0.9 * step / max(1, steps))
    )
    found = []
    for text in batches(steps, batch, sizes.length, seed, device):
        with torch.autocast(device, torch.bfloat16):
            logits, unevenness = model(text[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, BYTES), text[:, 1:].reshape(-1))
        (loss + 0.01 * unevenness).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        update_scales(model)
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.detach())
    return torch.stack(found).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="compile each block by torch.compile")
    parser.add_argument("--output", type=Path, default=Path("losses.csv"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    values = {}
    for recipe in options.recipes:
        started = time.time()
        values[recipe] = tuple(
            losses(recipe, Sizes(), options.steps, options.batch, seed=options.seed, device="cuda", compiled=options.compile)
        )
        print(f"{recipe}: {time.time() - started:.0f} s")
    with options.output.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *values])
        writer.writerows((step, *(f"{loss:.6f}" for loss in row)) for step, row in enumerate(zip(*values.values(), strict=True)))
    finals = {recipe: fmean(losses[-LAST:]) for recipe, losses in values.items()}
    base = next(iter(finals.values()))
    for recipe, final in finals.items():
        print(f"{recipe:12} {final:.4f} nats per byte, mean of the last {LAST} steps ({final / base - 1:+.2%})")
    print(f"wrote {options.output}")
    sys.exit(any(abs(final / base - 1) > MOST for final in finals.values()))


if __name__ == "__main__":
    main()
