"""Hold every use of a private name of torch, Triton or transformers.

`PRIVATE_NAMES` says for each name why kerneltune needs it and what happens without it; a test looks each name up. Two kinds of
files use their names themselves: `ops/*/peers.py`, because the digests of peers' code are part of shipped records, and
`kernel_lib/bounds.py` and `kernel_lib/interpreted.py`, which replace the interpreter's functions.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._library import custom_ops
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


class PrivateName(NamedTuple):
    """A private name of another package.

    Attributes:
        path: import path of the module or class, a colon, and the attribute.
        purpose: why kerneltune needs the name.
        without: what happens where the name is missing.
    """

    path: str
    purpose: str
    without: str


PRIVATE_NAMES = (
    PrivateName(
        "torch._compile:_disable_dynamo",
        "keeps torch.compile out of a function without an import of the compiler, which takes as long as torch's own",
        "torch.compiler.disable, and each import of kerneltune takes twice as long",
    ),
    PrivateName("torch._library.custom_ops:CustomOpDef", "is the type of a registered operator", "annotations say Any"),
    PrivateName(
        "torch.autograd.grad_mode:_unsafe_preserve_version_counter",
        "writes kept fp8 weights in place without a new version, so that a backward pass under way may go on",
        "gradient accumulation with kept weights raises where a weight is cast again before the backward pass",
    ),
    PrivateName(
        "torch:Tensor._version",
        "tells whether a weight has changed since its cast was kept",
        "every microbatch casts the weights of a GroupedLinear",
    ),
    PrivateName("torch:_scaled_mm", "multiplies fp8 matrices by their scales", "Fp8Linear and the peers of fp8 do not run"),
    PrivateName(
        "torch:_grouped_mm",
        "is the product that expert layers of models call, and that conversion replaces",
        "converted modules of unknown kinds stay in bf16 where they call it",
    ),
    PrivateName("torch:_scaled_grouped_mm", "is the peer of grouped products in fp8", "records have one peer less"),
    PrivateName(
        "torch:_assert_async", "lets the GPU assert the order of group ends under TRITON_DEBUG=1", "the GPU does not assert it"
    ),
    PrivateName("torch:ops.aten._unsafe_view", "reshapes a result that autograd lets callers change in place", "a copy"),
    PrivateName("torch:ops.aten._weight_int4pack_mm", "is torch's peer of int4 products", "records have one peer less"),
    PrivateName(
        "torch:ops.aten._convert_weight_to_int4pack", "packs weights for torch's peer of int4", "records have one peer less"
    ),
    PrivateName("torch:cuda._sleep", "keeps the GPU busy while the host queues timed launches", "times hold the host's time"),
    PrivateName(
        "torch._C:_current_graph_task_id",
        "tells that a backward pass is under way, which recomputes checkpoints inside a converted module",
        "such a checkpoint recomputes in bf16",
    ),
    PrivateName(
        "torch._C:DisableTorchFunctionSubclass",
        "calls a function of torch on the memory of a tensor subclass",
        "converted modules of unknown kinds cannot multiply",
    ),
    PrivateName(
        "torch._dynamo.config:fail_on_recompile_limit_hit",
        "lets a training step fail where torch.compile would run a layer eagerly, so that no such time is recorded",
        "compiled training steps are not measured",
    ),
    PrivateName(
        "torch._dynamo.config:recompile_limit",
        "lets the variants of a model keep their compiled layers beside each other",
        "compiled training steps are not measured",
    ),
    PrivateName(
        "torch._dynamo.utils:counters",
        "tells `capture` that torch.compile has compiled a part of the program, whose kernels it does not see",
        "a capture of nothing does not name --eager",
    ),
    PrivateName(
        "torch.nn:Module._apply",
        "is overridden to drop casts of weights that move, and to keep scales in fp32",
        "casts stay on the old device, scales are rounded to bf16",
    ),
    PrivateName(
        "torch.nn:Module._load_from_state_dict",
        "is overridden to accept checkpoints without scales, and to refuse int4 weights of wrong types",
        "a strict load of a plain checkpoint raises, and torch converts int4 weights",
    ),
    PrivateName(
        "torch.nn:Module._compiled_call_impl",
        "tells that a module was compiled before its conversion",
        "the conversion does not say so",
    ),
    PrivateName(
        "torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
        "keeps fp8 weights, which each replica casts for itself, out of the broadcast of buffers before each forward pass",
        "the broadcast takes time, and Gloo, which has no fp8, refuses it",
    ),
    *(
        PrivateName(f"torch.nn:Module.{name}", "tells that somebody hooked a module", "a fused forward pass skips hooks")
        for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    ),
    PrivateName(
        "torch.nn:Module._parameters",
        "gets a parameter whose attribute is a property of the converted class",
        "converted modules of unknown kinds cannot run",
    ),
    PrivateName(
        "transformers.integrations.moe:_default_apply_gate",
        "is the gate of expert modules, so that SwiGLU runs as a kernel",
        "expert modules run their own gate, by parts",
    ),
    PrivateName(
        "transformers.models.deepseek_v3.modeling_deepseek_v3:DeepseekV3Experts._apply_gate",
        "gates the rows of expert modules that have a gate of their own",
        "expert modules count as of an unknown kind",
    ),
    # Names of Triton that no document names. `adopt` reads them itself, because serving imports neither torch nor this module.
    *(
        PrivateName(
            f"triton.runtime.autotuner:Autotuner.{name}",
            "is replaced to capture and serve autotuned kernels",
            "one line at the start of the program, which then runs as without kerneltune",
        )
        for name in ("run", "__init__")
    ),
    PrivateName(
        "triton.runtime.autotuner:Autotuner.prune_configs",
        "gives the configs that the author's pruning leaves for a launch",
        "launches are neither captured nor served, after one line for each kernel",
    ),
    PrivateName(
        "triton.runtime.interpreter:InterpretedFunction.run",
        "tells which kernels run without a GPU",
        "captures without a GPU do not start, after one line",
    ),
    PrivateName(
        "triton.runtime.jit:JITFunction.run",
        "is replaced to capture and serve kernels without an autotuner, and to name them",
        "captures do not start, after one line",
    ),
    PrivateName(
        "triton.runtime.cache:triton_key",
        "digests Triton's compiler while the program is still importing",
        "the first launch of a served program waits a second longer",
    ),
    *(
        PrivateName(
            f"triton.backends.nvidia.driver:{name}",
            "builds the host code of served kernels in a child process (Triton 3.6)",
            "the first launch of each kernel waits for the C compiler",
        )
        for name in ("CudaLauncher", "CudaUtils")
    ),
    PrivateName(
        "triton.compiler.compiler:CompiledKernel.__getitem__",
        "launches a compiled kernel again, with addresses in place of tensors",
        "fp8 casts of known shapes launch as Triton does, which takes the host longer",
    ),
    PrivateName(
        "triton.compiler.errors:CompilationError",
        "has the node of the kernel's source at which the compiler failed",
        "errors of compilation name no line of the kernel",
    ),
    PrivateName(
        "triton.runtime.interpreter:_convert_float",
        "is replaced, so that interpreted casts to bf16 and fp8 round to nearest even",
        "checks without a GPU stop with a line that names the missing function",
    ),
    *(
        PrivateName(
            f"triton.runtime.interpreter:{name}", "patches Triton's language once per launch", "a call inside a kernel takes 3 ms"
        )
        for name in ("_patch_lang", "_patch_lang_core", "_LangPatchScope")
    ),
    PrivateName(
        "triton.runtime.interpreter:_implicit_cvt",
        "is replaced, so that each tensor argument has addresses of its own",
        "accesses outside of an argument go unseen without a GPU",
    ),
    PrivateName(
        "triton.runtime.interpreter:_interpreter",
        "is replaced, so that each access of a kernel is checked",
        "bad accesses go unseen without a GPU",
    ),
    PrivateName(
        "triton.runtime.interpreter:GridExecutor._init_args_hst",
        "is replaced, so that messages name the argument of an access",
        "messages name no argument",
    ),
    PrivateName(
        "triton._C.libtriton.ir:ROUNDING_MODE", "tells how an interpreted cast is to round", "all casts round to nearest even"
    ),
    PrivateName(
        "triton._C.libtriton:get_cache_invalidating_env_vars",
        "lists the environment variables that change compiled code",
        "identities of compiled code miss these variables",
    ),
)

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


def failing_line(error: Exception) -> str:
    """Return `FILE:LINE: ` of the kernel's line at which Triton's compiler failed; empty if unknown.

    The function that compiles a kernel has another name in Triton 3.9; in every version the kernel is `self` of a frame.
    """
    from triton.runtime.jit import JITFunction

    line = getattr(getattr(error, "node", None), "lineno", None)
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    kernels = [owner for owner in owners if isinstance(owner, JITFunction)]
    if line is None or not kernels:
        return ""
    lines, first = inspect.getsourcelines(function := kernels[-1].fn)
    above = next(count for count, text in enumerate(lines) if text.lstrip().startswith("def "))  # Triton compiles no decorators
    return f"{Path(function.__code__.co_filename).name}:{first + above + line - 1}: "


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
