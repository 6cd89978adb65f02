"""Triton's interpreter, mended: casts to fp8 as a GPU makes them, in less time. Knows no operator.

Imports torch and triton in functions: Triton must not be imported before it is known whether it shall interpret.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_REPLACED = ("_convert_float", "_patch_lang_core", "_patch_lang")
_USED = ("_LangPatchScope",)
"""Functions of the interpreter that are replaced and used, the same from triton 3.6.0 to 3.9.0. None is public."""

_MENDED = "is_mended_by_kerneltune"

_PASS_OVER_NAN = {"create_maxnumf": np.fmax, "create_minnumf": np.fmin}
"""`tl.maximum` and `tl.minimum` return the other operand of NaN on a GPU; the interpreter returns NaN."""

_FNUZ = {"fp8e4b8": "get_fp8e4b8_ty", "fp8e5b16": "get_fp8e5b16_ty"}
"""Types that some interpreters have, but do not find by name (3.6.0 and 3.7.1 neither, 3.9.0 both)."""


@contextmanager
def mended() -> Iterator[None]:
    """Mend the interpreter as `mend` does, and let Inf and NaN come about without numpy's warnings, as on a GPU.

    Raises:
        RuntimeError: this version's interpreter is made of other functions.
    """
    mend()
    with np.errstate(all="ignore"):
        yield


def mend() -> None:
    """Make Triton's interpreter round fp32 to fp8 to nearest even, have the fnuz types and pass over NaN.

    By itself it loses the carry of a cast that rounds up into the next binade (1.98 becomes 1.0), rounds ties up, casts
    subnormals to anything and NaN to a number. It also patches its language again at every call within a kernel, which takes
    3 ms each time (3.7.1). Does nothing on a GPU and when called again.

    Raises:
        RuntimeError: this version's interpreter is made of other functions.
    """
    from triton import __version__, knobs

    if not knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    missing = [name for name in (*_REPLACED, *_USED) if not hasattr(interpreter, name)]
    if missing:
        raise RuntimeError(
            f"the interpreter of triton {__version__} has no {' and no '.join(missing)}: its casts to fp8 are not exact"
        )
    if hasattr(interpreter._convert_float, _MENDED):
        return
    for name, changed in zip(_REPLACED, (_rounded, _patched_core, _once), strict=True):
        setattr(interpreter, name, changed(getattr(interpreter, name)))
    setattr(interpreter._convert_float, _MENDED, True)
    for name, function in _PASS_OVER_NAN.items():
        setattr(interpreter.InterpreterBuilder, name, _elementwise(function))


def mend_or_warn() -> None:
    """Mend the interpreter for an operator's kernels; warn where this version's interpreter cannot be mended."""
    try:
        mend()
    except RuntimeError as error:
        warnings.warn(str(error), stacklevel=2)


def _elementwise(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda builder, left, right: builder.binary_op(left, right, function)


def _once(patch_language: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Patches the language for a kernel, and not again for every device function that it calls."""
    from triton.runtime import interpreter

    core = interpreter.tl.core

    def patched(function: Any) -> Any:
        seen = [lang for lang in (interpreter.tl, core) if any(value is lang for value in function.__globals__.values())]
        if any(map(core.is_builtin, [core.tensor.__add__, *(lang.load for lang in seen)])):
            return patch_language(function)
        return interpreter._LangPatchScope()

    return patched


def _rounded(convert: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    fp8 = {
        "fp8e4nv": torch.float8_e4m3fn,
        "fp8e5": torch.float8_e5m2,
        "fp8e4b8": torch.float8_e4m3fnuz,
        "fp8e5b16": torch.float8_e5m2fnuz,
    }

    def rounded(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        dtype = fp8.get(target.name)
        if dtype is None or source.name != "fp32":
            return convert(data, source, target, rounding)
        return torch.from_numpy(data.copy()).to(dtype).view(torch.uint8).numpy()

    return rounded


def _patched_core(patch_language: Callable[..., None]) -> Callable[..., None]:
    """Add the fnuz types, and ranges over tensors with numpy 2.4, which makes no int of an array of one axis (Triton 3.6.0)."""

    def patched(language: Any, scope: Any) -> None:
        patch_language(language, scope)
        named = language.dtype.to_ir

        def to_ir(self: Any, builder: Any) -> Any:
            return getattr(builder, _FNUZ[self.name])() if self.name in _FNUZ else named(self, builder)

        scope.set_attr(language.dtype, "to_ir", to_ir)
        scope.set_attr(language.tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    return patched
