"""Measure what a training step of an expert layer keeps for its backward pass, and its peak memory. Needs a GPU.

Run `python examples/moe_memory.py deepseek-v3-16b-up-32768`.
"""

import sys

from kerneltune import ops, sweep, workloads
from kerneltune.workloads.moe_memory import memory_text, step_memory


def main(name: str) -> None:
    """Print the memory of a bench case of `moe_training`, by its name, under balanced groups."""
    known = {**ops.load(), **workloads.load()}
    entries = sweep.load(sweep.find("moe_training"), known).bench
    cases = {entry.case.name: entry.case for entry in entries if entry.case.option("groups") == "balanced"}
    if name not in cases:
        sys.exit(f"case: {name!r}: expected one of {', '.join(cases)}")
    print(memory_text(step_memory(cases[name])))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
