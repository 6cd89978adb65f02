"""Provide `kerneltune.autotune`: triton.autotune for authors, with a reference and a space that tuning uses.

Imports triton when a kernel is decorated.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from kerneltune.adopt.configs import misnamed
from kerneltune.adopt.kernels import jit_of, kernel_name
from kerneltune.adopt.startup import recorder, start_from_environment
from kerneltune.device import may_have_gpu, wants_interpreter
from kerneltune.errors import place_of


class AutotuneError(RuntimeError, ValueError, SystemExit):
    """Report a launch without a GPU, or a name that the kernel lacks; a program that does not catch it ends with its line."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = f"error: {text}"


def _run_if_possible(autotuner: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Launch a kernel that was decorated where no GPU was found.

    Raises:
        AutotuneError: Triton has no driver, as on a machine without a GPU.
    """
    from triton.runtime.driver import driver

    try:
        driver.active.get_current_target()
    except RuntimeError:
        name = kernel_name(autotuner).text
        raise AutotuneError(f"{name}: no GPU: set TRITON_INTERPRET=1 to run Triton's interpreter, or use a GPU") from None
    del autotuner.run
    return autotuner.run(*args, **kwargs)


def autotune(
    configs: Sequence[Any],
    key: Sequence[str],
    *args: Any,
    reference: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    space: Mapping[str, Sequence[Any]] | None = None,
    **kwargs: Any,
) -> Callable[[Any], Any]:
    """Decorate a kernel as triton.autotune does, with every argument of the installed version of triton.autotune.

    The result is Triton's own Autotuner. If KERNELTUNE_ADOPT names a tuned folder, the Autotuner launches the configs of that
    folder.

    Args:
        configs: list of triton.Config; captures run with the first config.
        key: names of arguments.
        args: further arguments of triton.autotune by position.
        reference: copies of the arguments by name -> expected values by name, of each argument that the kernel writes and of any
            other tensor; when the kernel is tuned, the results of every config are compared with these values instead of the
            results of the first config.
        rtol, atol: tolerance of each element against the reference, atol + rtol |expected|; without both, the element types give
            a tolerance of the root mean square, and results in 16 bits must not lean towards zero.
        space: knob -> values that tuning tries beside the list: names of constexprs, `num_warps`, `num_stages`, `num_ctas`,
            `maxnreg`. Triton itself chooses from `configs` only.
        kwargs: further arguments of triton.autotune.

    Raises:
        AutotuneError: the kernel lacks a name of an argument.
        TypeError: the installed Triton does not know an argument, the reference is no function, or a tolerance has no reference.
        ValueError: a tolerance is no number, or accepts any values.
    """
    import triton

    from kerneltune.kernel_lib.agreement import check_tolerance

    start_from_environment()
    if reference is None and (rtol, atol) != (None, None):
        raise TypeError("autotune: rtol, atol: expected only with reference=")
    if reference is not None and not callable(reference):
        raise TypeError(f"autotune: reference: {reference!r}: expected a function of the arguments")
    tolerance = None if rtol is None and atol is None else (rtol or 0.0, atol or 0.0)
    known = inspect.signature(triton.autotune)
    try:
        given = known.bind(configs, key, *args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"autotune: {error}: triton {triton.__version__} takes {', '.join(known.parameters)}") from None
    if wants_interpreter() and "do_bench" in known.parameters and "do_bench" not in given:
        # the interpreter has no times: where all are equal, the first config runs
        kwargs["do_bench"] = lambda _call, quantiles: [0.0 for _ in quantiles]
    decorate = triton.autotune(configs, key, *args, **kwargs)

    def decorator(fn: Any) -> Any:
        if tolerance is not None:
            check_tolerance(*tolerance, f"{place_of(jit_of(fn).fn)}autotune: ")
        # before Triton's own check, which names no place (3.9)
        described = SimpleNamespace(arg_names=fn.arg_names, configs=configs, base_fn=jit_of(fn).fn)
        if problem := misnamed(described, key, space or ()):
            if (recording := recorder()) is not None:
                recording.note_misnamed(kernel_name(jit_of(fn)), problem)
            raise AutotuneError(problem)
        autotuner = decorate(fn)
        if not wants_interpreter() and not may_have_gpu():
            autotuner.run = partial(_run_if_possible, autotuner)
        autotuner.kerneltune_reference = reference
        autotuner.kerneltune_tolerance = tolerance
        autotuner.kerneltune_space = None if space is None else {name: tuple(values) for name, values in space.items()}
        return autotuner

    return decorator
