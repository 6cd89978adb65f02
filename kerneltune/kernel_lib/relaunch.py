"""Launch a compiled kernel again, past Triton's look-up of what was compiled for the arguments.

Because `kernel[grid](…)` binds and specializes each of thirty arguments, and hashes them, a launch takes several times what the
driver needs. Whoever launches again must know that the arguments specialize as those of the first launch did: the same integers
and constants, and pointers as much aligned.
"""

from collections.abc import Callable, Mapping
from typing import Any

Launch = Callable[..., None]
"""Takes the leading arguments of the kernel, pointers as integers."""


def relaunch(kernel: Any, compiled: Any, programs: int, leading: int, named: Mapping[str, Any]) -> Launch | None:
    """Return what launches a kernel again; None where the first launch gave no compiled kernel.

    Args:
        kernel: the function under `triton.jit`.
        compiled: what its first launch returned.
        programs: of a launch.
        leading: how many arguments each launch gives.
        named: the values of the other arguments, by name; other entries are options of the compilation.
    """
    if compiled is None or not hasattr(compiled, "packed_metadata"):
        return None
    rest = tuple(named[name] for name in kernel.arg_names[leading:])
    launch = compiled[(programs, 1, 1)]
    return lambda *arguments: launch(*arguments, *rest)
