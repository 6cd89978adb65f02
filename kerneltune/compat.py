"""Hold the uses of private names of torch, Triton and transformers.

docs/private_names.md says for each name why kerneltune needs it, what happens without it, and which files use names themselves.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._library import custom_ops, simple_registry
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

untraced = _disable_dynamo
"""Decorate what torch.compile does not trace.

`torch.compiler.disable` imports torch's compiler with the decorated module, and the import takes as long as the import of torch.
This decorator imports the compiler at the first call; torch decorates its own functions with it.
"""
CustomOpDef = custom_ops.CustomOpDef
preserved_versions = _unsafe_preserve_version_counter
plain_tensors = torch._C.DisableTorchFunctionSubclass
scaled_mm = torch._scaled_mm
grouped_mm = torch._grouped_mm

_WITHIN: ContextVar[Callable[[], AbstractContextManager[Any]]] = ContextVar("within", default=nullcontext)
_OF_TRITON_OP = "torch._library.triton"
"""Module of the function that `torch.library.triton_op` makes of a user's."""
_LIBRARIES = list[torch.library.Library]()
"""Libraries whose functions last; torch drops those of a library that is deleted."""
_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
_GATED_EXPERTS = "has_gate", "has_bias", "is_transposed", "down_proj", "_apply_gate"
_EXPERTS_MODULE = "transformers.integrations.moe"
_NOT_REPLICATED = "_ddp_params_and_buffers_to_ignore"
"""Attribute that `_set_params_and_buffers_to_ignore_for_model` sets. The function also marks tensors, which here are replaced."""


def unsafe_view(t: Tensor, shape: list[int]) -> Tensor:
    """Return a contiguous tensor in another shape that autograd does not take for a view."""
    viewed: Tensor = torch.ops.aten._unsafe_view(t, shape)
    return viewed


def version(t: Tensor) -> int:
    """Return how often torch has seen a tensor change; 0 for a tensor of inference mode, which does not count."""
    return 0 if t.is_inference() else t._version


def assert_group_ends(offs: torch.Tensor, M: int) -> None:
    """Let the device assert that groups end in order, the last within M rows: it costs launches, and the host does not wait."""
    bounds = torch.cat([offs.new_zeros(1), offs])
    torch._assert_async((bounds.diff() >= 0).all() & (bounds[-1] <= M), "offs decrease or exceed M")


def sleep_on_gpu(cycles: int) -> None:
    """Launch a kernel that spins for so many cycles on the current stream."""
    torch.cuda._sleep(cycles)


@contextmanager
def own_functions(within: Callable[[], AbstractContextManager[Any]], judge: Callable[[str, Any, Any], None]) -> Iterator[None]:
    """Let operators that Python registers for a GPU call their own functions for tensors without memory, and of the CPU.

    The function for a GPU takes the place of the fake, and, which is lasting, of functions that are missing for the CPU and for
    tensors without memory.

    Args:
        within: makes the context in which a function runs: torch leaves its modes before it calls an operator.
        judge: gets the name of an operator, and the results of its own function and of its fake.
    """
    faked = list[Any]()
    token = _WITHIN.set(within)
    try:
        for name in _operators_of_gpus(len(torch.library._impls)):
            holder, own = simple_registry.singleton.find(name).fake_impl, partial(_run_as_on_gpu, name)
            if fake := holder.kernel:
                of_torch = custom_ops.OPDEFS.get(name)  # whose fake may be missing or, of a `triton_op`, be its function
                has_fake = of_torch is None or (of_torch._abstract_fn and of_torch._init_fn.__module__ != _OF_TRITON_OP)
                judged = partial(_judged, partial(judge, name), own, fake) if has_fake else own
                holder.kernels.append(type(fake)(judged, __name__))
                faked.append(holder)
        yield
    finally:
        _WITHIN.reset(token)
        for holder in faked:
            holder.kernels.pop()


@functools.lru_cache(maxsize=1)
def _operators_of_gpus(_num_functions: int) -> list[str]:
    """Return the operators that have a function for a GPU, but for torch's, and let it stand for functions that they lack."""
    found, torchs = list[str](), os.path.dirname(torch.__file__) + os.sep
    for namespace, name, key in sorted(registered.split("/") for registered in torch.library._impls):
        operator = f"{namespace}::{name}"
        if key not in ("CUDA", "CompositeExplicitAutograd") or operator in found:
            continue
        if operator in custom_ops.OPDEFS:
            module = custom_ops.OPDEFS[operator]._init_fn.__module__
            is_torchs = module.startswith("torch.") and module != _OF_TRITON_OP
        else:
            (place,) = re.findall(rf"\n{key}(?:\[alias\])?: registered at (.*)", torch._C._dispatch_dump(operator))
            is_torchs = place.startswith(torchs) and not place.startswith(torchs + "library.py")
        if is_torchs:
            continue
        library = torch.library.Library(namespace, "FRAGMENT")
        for device in ("CPU", "Meta"):
            if not torch._C._dispatch_has_kernel_for_dispatch_key(operator, device):
                library.impl(name, partial(_run_as_on_gpu, operator), device)
        _LIBRARIES.append(library)
        found.append(operator)
    return found


def _run_as_on_gpu(name: str, *args: Any, **kwargs: Any) -> Any:
    """Return the result of an operator's function for a GPU."""
    namespace, _, packet = name.partition("::")
    packet, _, overload = packet.partition(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    with _WITHIN.get()():
        return operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs)


def _judged(judge: Callable[[Any, Any], None], own: Callable[..., Any], fake: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of an operator's own function, and let the result of its fake be judged."""
    outputs = own(*args, **kwargs)
    judge(outputs, fake(*args, **kwargs))
    return outputs


def innermost_error(error: Exception) -> Exception:
    """Return the error of Triton's compiler in the function that it failed in, which errors in its callers wrap."""
    while type(error.__cause__) is type(error):
        error = error.__cause__
    return error


def failing_line(raised: Exception) -> str:
    """Return `FILE:LINE: ` of the line at which Triton's compiler failed, in a kernel or in a function that its module names.

    Return an empty text if the line is unknown. The function that compiles a kernel has another name in Triton 3.9; in every
    version the kernel is `self` of a frame.
    """
    from triton.runtime.jit import JITFunction

    error = innermost_error(raised)
    line = getattr(getattr(error, "node", None), "lineno", None)
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(raised.__traceback__)]
    kernels = [owner for owner in owners if isinstance(owner, JITFunction)]
    if line is None or not kernels:
        return ""
    candidates = kernels[-1:] if error is raised else [*kernels[-1:], *kernels[-1].fn.__globals__.values()]
    functions = [each.fn for each in candidates if isinstance(each, JITFunction) and each.src == getattr(error, "src", each.src)]
    if not functions:
        return ""
    lines, first = inspect.getsourcelines(functions[0])
    above = next(count for count, text in enumerate(lines) if text.lstrip().startswith("def "))  # Triton compiles no decorators
    return f"{Path(functions[0].__code__.co_filename).name}:{first + above + line - 1}: "


def fails_on_recompile_limit(num_graphs: int) -> AbstractContextManager[None]:
    """Let torch.compile keep so many graphs of a function, and raise an error before it runs the function eagerly."""
    from torch._dynamo import config

    patched: AbstractContextManager[None] = config.patch(recompile_limit=num_graphs, fail_on_recompile_limit_hit=True)
    return patched


def in_backward() -> bool:
    """Return whether a backward pass is under way, which may recompute a part of a forward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of its own."""
    return any([getattr(module, name) for name in _HOOKS])


def own_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """Return a parameter of a module, also where a property of its class has the parameter's name."""
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def apply_to_tensors(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Apply a function to the parameters and buffers of a module, as `module.to` does."""
    return nn.Module._apply(module, change, recurse)


def leave_out_of_broadcasts(model: nn.Module, names: set[str]) -> None:
    """Let DistributedDataParallel broadcast no buffer of these names, if it is the model or once it wraps the model."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.parameters_to_ignore |= {name.removeprefix("module.") for name in names}
        return
    ignored: set[str] = {*getattr(model, _NOT_REPLICATED, ())}
    setattr(model, _NOT_REPLICATED, ignored | names)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` or `torch.compile(module)` has made the module run compiled."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def is_gated_experts(module: nn.Module) -> bool:
    """Return whether a module runs the forward pass of `transformers.integrations.use_experts_implementation`."""
    forward = getattr(type(module), "forward", None)  # scripts of torch.jit have none
    dispatches = getattr(forward, "__globals__", {}).get("__name__") == _EXPERTS_MODULE
    return dispatches and all(hasattr(module, name) for name in _GATED_EXPERTS)


def has_default_gate(cls: type[nn.Module]) -> bool:
    """Return whether expert modules of a class gate by act_fn(first half) * second half of each row."""
    gate = getattr(cls, "_apply_gate", None)
    return (getattr(gate, "__module__", ""), getattr(gate, "__name__", "")) == (_EXPERTS_MODULE, "_default_apply_gate")


def has_own_gate(module: nn.Module) -> bool:
    """Return whether a gate was set on an expert module itself, beside the gate of its class."""
    return "_apply_gate" in vars(module)


def apply_gate(module: Any, rows: Tensor) -> Tensor:
    """Gate rows of gate and up as an expert module does."""
    gated: Tensor = module._apply_gate(rows)
    return gated
