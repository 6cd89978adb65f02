"""Count how far launches in Triton's interpreter go: the turns of each loop, and the programs along each axis of a grid."""

from pathlib import Path

from kerneltune.kernel_lib.faults import statement

Reached = dict[str, int]
"""Name of a loop or of an axis -> the most turns or programs of all launches."""
_LOOP = "turns of the loop at "

REACHED: Reached = {}
"""Counts of this process. A job of checks runs in its own fork."""


def _note(name: str, count: int) -> None:
    REACHED[name] = max(count, REACHED.get(name, 0))


def note_loop(num_turns: int) -> None:
    """Note the turns of the loop that begins."""
    file, line = statement()
    _note(f"{_LOOP}{Path(file).name}:{line}", num_turns)


def note_grid(kernel: str, sizes: tuple[int, ...]) -> None:
    """Note the programs of a launch along each axis."""
    for axis, size in enumerate(sizes):
        _note(f"programs of {kernel} along axis {axis}", size)


def merged(parts: list[Reached]) -> Reached:
    """Return the most of each loop and each axis."""
    return {name: max(part.get(name, 0) for part in parts) for name in dict.fromkeys(name for part in parts for name in part)}


def unreached(checks: list[Reached], largest: list[Reached]) -> list[str]:
    """Return loops that no check turns twice, and axes that have two programs in no check.

    A loop with a single turn and an axis with a single program in the largest cases are left out. Because launches without
    memory load zeros, a loop without a turn there has an unknown number of turns.
    """
    most, beyond = merged(checks), merged(largest)
    few = [name for name in merged([most, beyond]) if most.get(name, 0) < 2]
    return [name for name in few if beyond.get(name, 0) > 1 or (name.startswith(_LOOP) and not beyond.get(name))]
