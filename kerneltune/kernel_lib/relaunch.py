"""Launch a compiled kernel again, past Triton's look-up of compiled kernels.

Because `kernel[grid](…)` binds and specializes each of thirty arguments, and hashes them, a launch takes several times as long as
the driver needs. The caller must know that the arguments specialize as the first launch's arguments did: the same integers
and constants, and pointers as much aligned.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import triton

_OLDEST, _NEWEST = (3, 6), (3, 9)
"""Versions of Triton whose launchers take every argument of the kernel in its order, and integers for pointers."""
Launch = Callable[..., None]
"""Function that launches with the leading arguments of the kernel, pointers as integers."""


def relaunch(kernel: Any, compiled: Any, programs: int, leading: int, named: Mapping[str, Any]) -> Launch | None:
    """Return a function that launches a kernel again.

    The result is None if the first launch gave no compiled kernel, or if the launcher of this Triton is not known to accept
    addresses: the caller then launches by `kernel[grid](…)`.

    Args:
        kernel: the function under `triton.jit`.
        compiled: the result of its first launch.
        programs: number of programs of a launch.
        leading: number of arguments that each launch gives.
        named: the values of the other arguments, by name; other entries are options of the compilation.
    """
    if compiled is None or not _takes_addresses(kernel, compiled):
        return None
    rest = tuple(named[name] for name in kernel.arg_names[leading:])
    launch = compiled[(programs, 1, 1)]
    return lambda *arguments: launch(*arguments, *rest)


def _takes_addresses(kernel: Any, compiled: Any) -> bool:
    """Return whether Triton's launcher takes addresses in place of the tensors of a compiled kernel."""
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    signature = getattr(getattr(compiled, "src", None), "signature", {})
    return hasattr(compiled, "packed_metadata") and _OLDEST <= version <= _NEWEST and [*signature] == [*kernel.arg_names]
