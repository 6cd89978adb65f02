"""Correct Triton's interpreter: casts to fp8 and arithmetic in bf16 give the values of a GPU.

The module imports torch and triton in functions, because Triton decides at its import whether it interprets.
"""

import ast
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partialmethod
from inspect import isfunction
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from kerneltune.interpreter.combining import reduced, scanned
from kerneltune.interpreter.facts import WITHOUT_MEMORY, note_here
from kerneltune.interpreter.faults import is_kernel_file, setting
from kerneltune.interpreter.loops import iterations_of
from kerneltune.interpreter.quick import OPERATORS, quick_operator, quicken, remembered_dtypes, with_quick_accesses

_USED = (
    "_LangPatchScope", "InterpreterBuilder", "TensorHandle", "ReduceOps", "ScanOps", "interpreter_builder",
    "interpreter_semantic",
)  # fmt: skip
"""Further private parts of the interpreter that this module uses, the same from triton 3.6.0 to 3.9.0."""

_CORRECTED = "is_corrected_by_kerneltune"

_CHOICES = {
    **dict.fromkeys(("create_minsi", "create_minui"), (np.minimum, np.greater)),
    **dict.fromkeys(("create_maxsi", "create_maxui"), (np.maximum, np.less)),
}
"""Minima and maxima of integers, and the comparison that is true where the second operand is taken."""
_PASS_OVER_NAN = {"create_maxnumf": np.fmax, "create_minnumf": np.fmin}
"""`tl.maximum` and `tl.minimum` return the other operand of NaN on a GPU; the interpreter returns NaN."""

_TYPED_BY = {"binary_op": 0, "unary_op": 0, "ternary_op": 2, "create_fma": 2, "create_dot": 2}
"""Methods that compute, and the operand whose type the result has. The interpreter takes the bits of bf16 for integers."""

_FNUZ = {"fp8e4b8": "get_fp8e4b8_ty", "fp8e5b16": "get_fp8e5b16_ty"}
"""Types that some interpreters have, but do not find by name (3.6.0 and 3.7.1 neither, 3.9.0 both)."""


def correct_interpreter() -> None:
    """Make Triton's interpreter compute in bf16, round to fp8 and bf16 to nearest even, have the fnuz types and pass over NaN.

    Triton's own adds, compares and multiplies the bits of bf16 as integers, and truncates in casts to bf16. Its cast to fp8 loses
    the carry into the next binade (1.98 becomes 1.0), rounds ties up, returns wrong values for subnormals and a
    finite value for NaN. The interpreter also patches its language again at every call within a kernel, which takes 3 ms each
    time (3.7.1). `quicken` replaces its slowest parts. On a GPU, and when called again, `correct_interpreter` does nothing.

    Raises:
        RuntimeError: this version's interpreter is made of other functions.
    """
    from triton import __version__, knobs

    if not knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    changes: dict[str, Callable[[Any], Any]] = {
        "_convert_float": _rounded, "_patch_lang_core": _patched_core, "_patch_lang": _once,
        "_get_np_dtype": remembered_dtypes, "_implicit_cvt": _with_fp32, "_patch_attr": _called_directly,
        "_interpreter": with_quick_accesses,
    }  # fmt: skip
    if missing := [name for name in (*changes, *_USED) if not hasattr(interpreter, name)]:
        raise RuntimeError(
            f"the interpreter of triton {__version__} has no {' and no '.join(missing)}: its casts to fp8 are not exact"
        )
    if hasattr(interpreter._convert_float, _CORRECTED):
        return
    for name, changed in changes.items():
        setattr(interpreter, name, changed(getattr(interpreter, name)))
    setattr(interpreter._convert_float, _CORRECTED, True)
    builder = interpreter.InterpreterBuilder
    for name, function in _PASS_OVER_NAN.items():
        setattr(builder, name, lambda maker, left, right, function=function: maker.binary_op(left, right, function))
    for name, functions in _CHOICES.items():
        setattr(builder, name, partialmethod(_choice, *functions))
    for name, typed_by in _TYPED_BY.items():
        setattr(builder, name, _in_fp32(getattr(builder, name), typed_by))
    builder.create_dot = partialmethod(_dot_in_tf32, builder.create_dot)
    builder.create_fdiv = partialmethod(_divide_inexactly, builder.create_fdiv)
    builder.cast_impl = _through_fp32(builder.cast_impl)
    builder.get_bf16 = lambda builder, value: builder.cast_impl(builder.get_fp32(value), interpreter.tl.bfloat16)
    correct_libdevice()
    quicken()
    interpreter.interpreter_semantic.where = _noting_scalars(interpreter.interpreter_semantic.where)
    interpreter.ReduceOps.min_max = partialmethod(_min_max_without_warning, interpreter.ReduceOps.min_max)
    interpreter.GridExecutor.__init__ = partialmethod(_with_tuple, interpreter.GridExecutor.__init__)
    interpreter.ReduceOps.generic_reduce = partialmethod(reduced, interpreter.ReduceOps.generic_reduce)
    interpreter.ScanOps.generic_scan = partialmethod(scanned, interpreter.ScanOps.generic_scan)
    rewriter = interpreter.ASTTransformer
    rewriter.visit_BoolOp = rewriter.visit_UnaryOp = _logic_of_blocks
    rewriter.visit_Assign = partialmethod(_assign_rewritten, rewriter.visit_Assign)
    interpreter.interpreter_semantic.is_block, interpreter.interpreter_semantic.of_blocks = _is_block, _of_blocks
    for reduction in (interpreter.ReduceOps, interpreter.ScanOps):
        reduction.apply_impl = partialmethod(_reduce_in_fp32, reduction.apply_impl)


_LIBDEVICE: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda x: 1 / np.sqrt(x), "div_rn": np.divide, "pow": np.power, "rint": np.rint, "nearbyint": np.rint,
    "round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), "fast_expf": np.exp, "fast_logf": np.log,
    "fast_dividef": np.divide, "erf": np.vectorize(math.erf, otypes=[np.float32]),
    **{name: getattr(np, name) for name in ("tanh", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "sin", "cos")},
}  # fmt: skip
"""Functions of CUDA's libdevice: in the interpreter they return None."""


def _call_computed(*args: Any, _computed: Callable[..., Any], **named: Any) -> Any:
    return _computed(*args, **named)


def correct_libdevice() -> None:
    """Let functions of libdevice compute; change them in place, as kernels may have imported them by name.

    A function that a program has put in place of Triton's stays.
    """
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle, interpreter_semantic, tl

    def computed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **_: Any) -> Any:
            operands = [value if isinstance(value, tl.core.tensor) else interpreter_semantic.to_tensor(value) for value in args]
            widest = max(operands, key=lambda operand: operand.handle.data.size)
            values = function(*(operand.handle.data for operand in operands)).astype(widest.handle.data.dtype)
            return tl.core.tensor(TensorHandle(values, widest.dtype), widest.type)

        return call

    for name, function in _LIBDEVICE.items():
        known: Any = getattr(libdevice, name, None)
        if isfunction(known) and known.__module__ == libdevice.__name__:
            known.__code__, known.__kwdefaults__ = _call_computed.__code__, {"_computed": computed(function)}


def correct_or_warn() -> None:
    """Correct the interpreter for an operator's kernels; warn where the interpreter of this version cannot be corrected."""
    try:
        correct_interpreter()
    except RuntimeError as error:
        warnings.warn(str(error), stacklevel=2)


def _choice(builder: Any, function: Callable[..., Any], takes_second: Callable[..., Any], left: Any, right: Any) -> Any:
    """Note which operand a minimum or a maximum of integers takes in some element."""
    if takes_second(left.data, right.data).any():
        note_here("true")
    if takes_second(right.data, left.data).any():
        note_here("false")
    return builder.binary_op(left, right, function)


def _noting_scalars(where: Callable[..., Any]) -> Callable[..., Any]:
    """Note which operand `tl.where` takes for a scalar condition, as this is an `if` in another form; of a block, both."""

    def chosen(condition: Any, *operands: Any) -> Any:
        is_block, is_true = condition.type.is_block(), condition.handle.data.any()
        if is_block or is_true:
            note_here("true")
        if is_block or not is_true:
            note_here("false")
        return where(condition, *operands)

    return chosen


class _Names:
    """Give the global names of a function as attributes."""


def _with_fp32(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make a floating-point argument a tensor of fp32, as compiled kernels have it: its product with 16 bits is in fp32."""
    from triton.runtime.interpreter import TensorHandle, tl

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        return tl.core.tensor(TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)

    return converted


_LEFT = "_left_of_and_or"


def _with_tuple(executor: Any, initialize: Callable[..., None], fn: Any, names: Any, grid: Any, *hooks: Any) -> None:
    """Let a grid be a list, as on a GPU."""
    initialize(executor, fn, names, (lambda bound: tuple(grid(bound))) if callable(grid) else tuple(grid), *hooks)


def _logic_of_blocks(transformer: Any, node: Any) -> Any:
    """Rewrite `and`, `or` and `not`: of blocks, Triton's compiler combines all elements, where Python takes one of the operands.

    `a and b` becomes `of_blocks("And", a, b) if is_block(a) else a and b`, and evaluates `a` once.
    """
    transformer.generic_visit(node)
    if not isinstance(node, ast.BoolOp) and not isinstance(node.op, ast.Not):
        return node
    result, *others = node.values if isinstance(node, ast.BoolOp) else (node.operand, None)
    left, kept = ast.Name(_LEFT, ast.Store()), ast.Name(_LEFT, ast.Load())
    for other in others:
        operands: list[ast.expr] = [kept] if other is None else [kept, other]
        of_python = ast.UnaryOp(node.op, kept) if other is None else ast.BoolOp(node.op, operands)
        of_blocks = _call("of_blocks", ast.Constant(type(node.op).__name__), *operands)
        result = ast.IfExp(_call("is_block", ast.NamedExpr(left, result)), of_blocks, of_python)
    return ast.copy_location(result, node)


def _assign_rewritten(transformer: Any, assign: Callable[[Any, ast.Assign], ast.AST], node: ast.Assign) -> ast.AST:
    node.value = transformer.visit(node.value)  # which the interpreter leaves out
    return assign(transformer, node)


def _call(name: str, *args: ast.expr) -> ast.Call:
    """Return a call of a method of `interpreter_semantic`, which Triton adds to the names of a kernel's module."""
    return ast.Call(ast.Attribute(ast.Name("interpreter_semantic", ast.Load()), name, ast.Load()), list(args), [])


def _is_block(value: Any) -> bool:
    return bool(getattr(getattr(value, "type", None), "is_block", bool)())


def _of_blocks(operator: str, left: Any, right: Any = None) -> Any:
    """Return `and`, `or` or `not` of a block; a constant that decides nothing has no effect, as in compiled kernels."""
    if operator == "Not":
        return left == 0
    if not hasattr(right, "handle"):
        return left if bool(right) == (operator == "And") else right
    return left.logical_and(right) if operator == "And" else left.logical_or(right)


def _range(*bounds: Any, **_: Any) -> Iterator[Any]:
    from triton.runtime.interpreter import TensorHandle, tl

    is_wide = any(getattr(bound, "dtype", None) is tl.int64 for bound in bounds)
    dtype, values = (tl.int64, np.int64) if is_wide else (tl.int32, np.int32)
    return (tl.core.tensor(TensorHandle(np.array([at], values), dtype), dtype) for at in iterations_of(range(*bounds)))


def _once(patch_language: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Patch the language once per launch, not once per call of a device function, with the changes of the launch before."""
    from triton.runtime import interpreter

    core = interpreter.tl.core
    languages: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
    changes: dict[tuple[str, ...], list[tuple[Any, str, Any]]] = {}
    prepared: WeakSet[Any] = WeakSet()

    def patched_anew(function: Any, seen: list[Any]) -> Any:
        names = tuple(lang.__name__ for lang in seen)
        scope = patch_language(function) if names not in changes else interpreter._LangPatchScope()
        for change in changes.get(names, ()):
            scope.set_attr(*change)
        if names not in changes and hasattr(scope, "_changes"):
            changes[names] = [(owner, name, getattr(owner, name)) for owner, name, _before in scope._changes]
        return scope

    def patched(function: Any) -> Any:
        if core.is_builtin(core.tensor.__add__):  # a launch begins
            prepared.clear()
        elif function in prepared:
            return None  # nothing restores the changes of a call of a device function
        prepared.add(function)
        seen = languages.get(function)
        if seen is None:
            seen = [lang for lang in (interpreter.tl, core) if any(value is lang for value in function.__globals__.values())]
            languages[function] = seen
        is_patched = not any(map(core.is_builtin, [core.tensor.__add__, *(lang.load for lang in seen)]))
        scope = interpreter._LangPatchScope() if is_patched else patched_anew(function, seen)
        names = _Names()
        names.__dict__ = function.__globals__
        scope.set_attr(names, "range", _range)
        return scope

    return patched


def _called_directly(_patch: Callable[..., None]) -> Callable[..., None]:
    """Call the function of an operation, without the two layers around it that pass and check `_semantic`."""
    from triton.runtime.interpreter import interpreter_semantic, tl

    def patched(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter_semantic
            return function(*args, **kwargs)

        operator = name.strip("_")
        operator = operator if operator in OPERATORS else operator.removeprefix("r")
        is_quick = owner is tl.core.tensor and name.startswith("__") and operator in OPERATORS
        scope.set_attr(owner, name, quick_operator(operator, name == f"__r{operator}__", called) if is_quick else called)

    return patched


def _in_fp32(method: Callable[..., Any], typed_by: int) -> Callable[..., Any]:
    """Cast bf16 operands of a method to fp32, and round its result once if the result type is bf16."""
    from triton.runtime.interpreter import TensorHandle, tl

    def computed(builder: Any, *operands: Any) -> Any:
        is_bf16 = [type(operand) is TensorHandle and operand.dtype.scalar is tl.bfloat16 for operand in operands]
        if not any(is_bf16) or np.where in operands:
            return method(builder, *operands)
        wide = [builder.cast_impl(o, tl.float32) if b else o for o, b in zip(operands, is_bf16, strict=True)]
        result = method(builder, *wide)
        is_number = result.data.dtype == np.float32  # no answer of a comparison
        return builder.cast_impl(result, tl.bfloat16) if is_bf16[typed_by] and is_number else result

    return computed


def _dot_in_tf32(builder: Any, dot: Callable[..., Any], left: Any, right: Any, total: Any, precision: Any, *rest: Any) -> Any:
    """Round fp32 operands of a product to tf32, unless its `input_precision` is another: tensor cores of NVIDIA do by default.

    A product of int8 is made in fp64, where it is exact: numpy has no fast product of integers. Without memory there is nothing
    to multiply.
    """
    from triton.runtime.interpreter import TensorHandle

    if WITHOUT_MEMORY.get():
        return TensorHandle(total.data.copy(), total.dtype.scalar)
    if left.dtype.scalar.is_int8() and right.dtype.scalar.is_int8():
        product = np.matmul(left.data.astype(np.float64), right.data.astype(np.float64))
        return TensorHandle(total.data + product.astype(total.data.dtype), total.dtype.scalar)

    def rounded(operand: Any) -> Any:
        bits = operand.data.astype(np.float32).view(np.uint32)
        values = ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)
        return TensorHandle(np.where(np.isfinite(operand.data), values, operand.data), operand.dtype)

    if str(precision).endswith(".TF32") and left.dtype.scalar.name == "fp32":
        operands = left, right
        left, right = map(rounded, operands)
        if any((new.data != old.data).any() for new, old in zip((left, right), operands, strict=True)):
            note_here("tf32")
    return dot(builder, left, right, total, precision, *rest)


_EXACT = ContextVar("exact", default=False)


def exact_quotients() -> AbstractContextManager[bool]:
    """Let `/` of fp32 be exact within, to tell whether a disagreement hangs on it."""
    return setting(_EXACT, True)


def _divide_inexactly(builder: Any, divide: Callable[..., Any], left: Any, right: Any) -> Any:
    """Move every other rounded quotient of fp32 a step away from zero: `/` is up to two steps off on a GPU, `tl.div_rn` exact."""
    from triton.runtime.interpreter import TensorHandle

    result = divide(builder, left, right)
    if result.dtype.scalar.name != "fp32" or _EXACT.get():
        return result
    quotients = np.asarray(result.data)
    with np.errstate(all="ignore"):  # 0 times infinity, and the number after the largest
        further = np.nextafter(quotients, np.copysign(np.float32(np.inf), quotients))
        is_rounded = quotients.astype(np.float64) * right.data != left.data
    is_moved = is_rounded & (quotients.view(np.uint32) % 2 == 1) & np.isfinite(further)
    if is_moved.any():
        note_here("division")
    return TensorHandle(np.where(is_moved, further, quotients), result.dtype)


def _through_fp32(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Cast from bf16 and to bf16 through fp32, because the interpreter casts bf16 only from fp32 and to fp32."""
    from triton.runtime.interpreter import tl

    def through(builder: Any, source: Any, target: Any) -> Any:
        types = (source.dtype.scalar, target.scalar)
        if tl.bfloat16 in types and tl.float32 not in types:
            source = cast(builder, source, tl.float32)
        return cast(builder, source, target)

    return through


def _reduce_in_fp32(reduction: Any, apply: Callable[..., Any], tensors: tuple[Any, ...]) -> Any:
    """Reduce or scan bf16 in fp32, and round once."""
    from triton.runtime.interpreter import interpreter_builder, tl

    def cast(tensor: Any, dtype: Any) -> Any:
        kind = tl.block_type(dtype, list(tensor.shape)) if tensor.type.is_block() else dtype
        return tl.core.tensor(interpreter_builder.cast_impl(tensor.handle, dtype), kind)

    if all(tensor.dtype != tl.bfloat16 for tensor in tensors):
        return apply(reduction, tensors)
    wide = tuple(cast(tensor, tl.float32) if tensor.dtype == tl.bfloat16 else tensor for tensor in tensors)
    reduced = apply(reduction, wide)
    results = reduced if isinstance(reduced, list | tuple) else (reduced,)
    return tuple(
        cast(result, tl.bfloat16) if tensor.dtype == tl.bfloat16 and result.dtype == tl.float32 else result
        for tensor, result in zip(tensors, results, strict=False)
    ) + tuple(results[len(tensors) :])


def _min_max_without_warning(
    reduction: Any, min_max: Callable[..., Any], values: Any, val_reduce_op: Any, idx_reduce_op: Any = None
) -> Any:
    """Reduce by functions that equal `np.nanmax` and `np.nanmin`, and do not warn where all elements are NaN."""
    silent = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}
    return min_max(reduction, values, silent.get(val_reduce_op, val_reduce_op), idx_reduce_op)


def _rounded(convert: Callable[..., Any]) -> Callable[..., Any]:
    import torch
    from triton._C.libtriton.ir import ROUNDING_MODE

    bits = {1: torch.uint8, 2: torch.uint16}
    narrow = {
        "bf16": torch.bfloat16,
        "fp8e4nv": torch.float8_e4m3fn,
        "fp8e5": torch.float8_e5m2,
        "fp8e4b8": torch.float8_e4m3fnuz,
        "fp8e5b16": torch.float8_e5m2fnuz,
    }

    def rounded(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.name, target.name) == ("bf16", "fp32"):
            return data.astype(np.uint32) << 16
        dtype = narrow.get(target.name)
        if source.name not in ("fp32", "bf16", "fp16") or dtype is None or rounding == ROUNDING_MODE.RTZ:
            return convert(data, source, target, rounding)
        exact = (data.astype(np.uint32) << 16).view(np.float32) if source.name == "bf16" else data.astype(np.float32)
        codes = torch.from_numpy(exact).to(dtype).view(bits[dtype.itemsize]).numpy()
        if target.name == "bf16" and np.isnan(exact).any():  # torch drops the sign, which tells computed from poisoned NaN
            codes = np.where(np.isnan(exact), np.where(np.signbit(exact), 0xFFC0, 0x7FC0).astype(np.uint16), codes)
        return codes

    return rounded


def _is_true(tensor: Any) -> bool:
    """Return whether a scalar is true, and note it of a kernel's own question; a tensor is true, as in the interpreter."""
    data = tensor.handle.data
    is_true = bool(data.squeeze()) if data.size == 1 else True
    if is_kernel_file(sys._getframe(1).f_code.co_filename):  # Triton asks whether a load has a mask
        note_here("true" if is_true else "false")
    return is_true


def _patched_core(patch_language: Callable[..., None]) -> Callable[..., None]:
    """Add the fnuz types, and ranges over tensors: numpy 2.4 casts no array with an axis to int (Triton 3.6.0)."""

    def patched(language: Any, scope: Any) -> None:
        patch_language(language, scope)
        named = language.dtype.to_ir

        def to_ir(self: Any, builder: Any) -> Any:
            return getattr(builder, _FNUZ[self.name])() if self.name in _FNUZ else named(self, builder)

        scope.set_attr(language.dtype, "to_ir", to_ir)
        scope.set_attr(language, "range", _range)
        scope.set_attr(language.tensor, "__index__", lambda self: int(self.handle.data.squeeze()))
        scope.set_attr(language.tensor, "__bool__", _is_true)

    return patched
