"""The final losses that train.py wrote, beside bf16's; the curves as SVG where asked. Exit code 1 if one is not within 1 %."""

import argparse
import csv
import sys
from pathlib import Path

LAST = 50
MOST = 0.01


def read(file: Path) -> dict[str, list[float]]:
    """Recipe -> losses. Lines that begin with # say where they come from."""
    with file.open(newline="") as rows:
        columns = list(zip(*csv.reader(row for row in rows if not row.startswith("#")), strict=True))
    return {str(name): [float(value) for value in values] for name, *values in columns[1:]}


def final(losses: list[float]) -> float:
    """The mean of the last steps."""
    last = losses[-LAST:]
    return sum(last) / len(last)


def differences(columns: dict[str, list[float]]) -> dict[str, float]:
    """Recipe -> how far its final loss is above bf16's, as a fraction."""
    base = final(columns["bf16"])
    return {recipe: final(losses) / base - 1 for recipe, losses in columns.items()}


def draw(columns: dict[str, list[float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for recipe, losses in columns.items():
        axes.plot(losses, label=f"{recipe}: {final(losses):.4f}", linewidth=1)
    axes.set(xlabel="step", ylabel="nats per byte", title="A small mixture-of-experts transformer")
    axes.legend()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("losses", type=Path)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    columns = read(options.losses)
    found = differences(columns)
    for recipe, difference in found.items():
        print(f"{recipe:12} {final(columns[recipe]):.4f} nats per byte, mean of the last {LAST} steps ({difference:+.2%})")
    if options.svg:
        draw(columns, options.svg)
    sys.exit(any(abs(difference) > MOST for difference in found.values()))


if __name__ == "__main__":
    main()
