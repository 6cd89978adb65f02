"""Run the parts of a program at several sizes, and compare their results with another run's; imports no kerneltune."""

import json
from collections.abc import Callable, Mapping, Sequence

import torch


def run_parts(parts: Mapping[Callable[[int], None], Sequence[int]]) -> dict[str, str]:
    """Run each part at its sizes, each with its own seed; return why parts failed, by name and size."""
    failed = {}
    for part, sizes in parts.items():
        for size in sizes:
            torch.manual_seed(size)
            try:
                part(size)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
            except Exception as error:  # a package without this kernel, or a GPU that the kernel does not run on
                failed[f"{part.__name__} {size}"] = f"{type(error).__name__}: {str(error)[:150]}"
    return failed


def differences(found: Mapping[str, torch.Tensor], results: str, expected: str) -> dict[str, float]:
    """Save results; return their distance from the results of another run relative to their norm, by name.

    Args:
        found: results by name.
        results: file that they are saved to; empty for none.
        expected: file of the other run; empty for none.
    """
    if results:
        torch.save(dict(found), results)
    wanted = torch.load(expected) if expected else {}
    return {
        name: float((found[name] - value).norm() / value.norm().clamp_min(1e-30))
        for name, value in wanted.items()
        if name in found
    }


def report(
    parts: Mapping[Callable[[int], None], Sequence[int]], found: Mapping[str, torch.Tensor], results: str = "", expected: str = ""
) -> None:
    """Run every part, save the results that the parts put into `found`, and print how they compare, as a line of JSON."""
    failed = run_parts(parts)
    apart = differences(found, results, expected)
    different = {name: difference for name, difference in apart.items() if difference}
    print(json.dumps({"kept": len(found), "compared": len(apart), "different": different, "failed": failed}))
