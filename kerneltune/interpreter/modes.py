"""Switch Triton's interpreter to a mode of a check. On a GPU the modes but `unlaunched` change nothing.

| mode | patches of the interpreter | until |
|---|---|---|
| `corrected` | values and types: `corrections`; speed: `quick` | the process ends |
| `strict` | these, and accesses, garbage, launches: `undefined`, `barriers`, `promises`, `wrapping` | the context ends |
| `unlaunched` | launches, which give their facts and run no program: `kernel_code`; host code keeps nothing | the context ends |

Importing an operator's kernels corrects the interpreter as well (`correct_or_warn`). `strict` and `unlaunched` trace host code of
a folder. `facts.noting` collects what launches note in every mode, and patches nothing.
"""

import functools
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kerneltune.errors import is_own
from kerneltune.interpreter.barriers import barrier_parts
from kerneltune.interpreter.corrections import correct_interpreter
from kerneltune.interpreter.facts import Fact, Kind, note_facts, noting
from kerneltune.interpreter.faults import setting
from kerneltune.interpreter.host_code import limits_of, noting_host, untraced
from kerneltune.interpreter.kernel_code import bound_arguments, facts_of, integers_of
from kerneltune.interpreter.promises import promise_parts
from kerneltune.interpreter.undefined import strict_parts
from kerneltune.interpreter.wrapping import wrapping_parts

_TAKEN: ContextVar[int] = ContextVar("taken", default=0)
_TRIES: ContextVar[bool] = ContextVar("tries", default=True)


@dataclass(slots=True)
class LaunchFacts:
    """Hold facts and sizes of launches that ran no program.

    Attributes:
        facts: facts of the launches, and of the host code that launches.
        num_programs: number of their programs.
        ones: (kernel, argument) of integers that are 1, which Triton makes constants.
        integers: (kernel, argument) of tensors of integers -> their largest number, and how many they hold.
        arguments: kernel, grid and arguments other than tensors of each launch.
    """

    facts: set[Fact]
    num_programs: int = 0
    ones: frozenset[tuple[str, str]] = frozenset()
    integers: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    arguments: list[tuple[Any, ...]] = field(default_factory=list)


@contextmanager
def corrected() -> Iterator[None]:
    """Correct the interpreter, and let operations give Inf and NaN without numpy's warnings, as on a GPU.

    Raises:
        RuntimeError: the interpreter of this Triton lacks a function that is replaced.
    """
    correct_interpreter()
    with np.errstate(all="ignore"):
        yield


@contextmanager
def strict(folder: str = "", largest: Mapping[tuple[str, str], int] | None = None, device: str = "cpu") -> Iterator[None]:
    """Correct the interpreter, and raise KernelFaultError if a kernel has undefined behaviour.

    The error is raised inside of the kernel. Triton raises its own error from it, so that the KernelFaultError is the cause. For
    a launch with tensors on device `meta`, only the programs at the corners of the grid run. If a program fails, all of them run
    again with other values of all loads; an access is an error if it fails with both values.

    Args:
        folder: folder of host code whose branches are noted.
        largest: kernel and argument, a tensor on device `meta` -> its largest integer. Offsets that are computed from its values
            must not overflow if the values rise along the tensor from 0 to the largest.
        device: device of the tensors.
    """
    from triton import knobs

    from kerneltune.interpreter.gpu_calls import nonzero_parts

    correct_interpreter()  # before the parts wrap its functions
    parts = dict[tuple[Any, str], Any]()
    if knobs.runtime.interpret:
        parts = strict_parts(largest or {}) | wrapping_parts() | promise_parts() | barrier_parts() | _untimed(device == "cpu")
        parts |= nonzero_parts(device)
    with corrected(), replaced(parts), noting_host(folder if parts else ""), host_on(device) if parts else nullcontext():
        yield


@contextmanager
def unlaunched(folder: str = "", device: str = "cpu") -> Iterator[LaunchFacts]:
    """Collect launches of interpreted kernels, with facts of these and of host code in a folder, and run no program.

    What host code keeps for a further call, such as a workspace that grows, is forgotten, as each case is checked by itself.

    device: device of the tensors.
    """
    from triton.runtime.interpreter import GridExecutor

    from kerneltune.interpreter.gpu_calls import nonzero_parts

    def collect(executor: Any, *args: Any, **kwargs: Any) -> None:
        with untraced():
            bound = bound_arguments(executor, args, kwargs)
            grid = executor.grid(bound) if callable(executor.grid) else executor.grid
            launches.num_programs += math.prod(map(int, grid))
            note_facts(*facts_of(executor, bound))
            integers = bound.keys() - set(executor.constexprs)
            ones = {name for name in integers if type(bound[name]) is int and bound[name] == 1}
            launches.ones |= {(executor.fn.__name__, name) for name in ones}
            launches.integers |= integers_of(executor.fn.__name__, bound)
            plain = [(name, value) for name, value in bound.items() if isinstance(value, int | float | str)]
            launches.arguments.append((executor.fn.__name__, *map(int, grid), *plain))

    uncalled = replaced({(GridExecutor, "__call__"): collect} | _untimed() | nonzero_parts(device))
    with noting() as facts, uncalled, _forgetting(folder), noting_host(folder), host_on(device):
        launches = LaunchFacts(facts)
        yield launches


def read_sources(folder: str) -> None:
    """Read the host code and rewrite the kernels of a folder, which forks of this process then need not do again.

    `kerneltune sweep rmsnorm --check-only` takes 70 forks, and each fork took 0.1 s for this (2026-11-28).
    """
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.interpreter import InterpretedFunction

    correct_interpreter()
    for variables in list(_variables_in(folder, len(sys.modules))):
        limits_of(variables.get("__file__", ""))
        for kernel in list(variables.values()):
            while isinstance(kernel, Autotuner | Heuristics):
                kernel = kernel.fn
            if isinstance(kernel, InterpretedFunction):
                kernel.rewrite()


def taking(number: int) -> AbstractContextManager[int]:
    """Let each autotuner take the config with this number in its list, or the first that it keeps if it drops this config."""
    return setting(_TAKEN, number)


def untried() -> AbstractContextManager[bool]:
    """Let autotuners launch a config once within, to tell whether a disagreement hangs on the launches that a GPU times."""
    return setting(_TRIES, False)


def _untimed(tries: bool = False) -> dict[tuple[Any, str], Any]:
    """Return the patches with which autotuners take a config by its number, as they can time none; else the first they keep.

    An autotuner forgets the config after the launch, because the next launch may be of another number.

    tries: whether an autotuner launches the config once before, as a GPU's does to time it: a kernel that works in place needs
        `restore_value` then.
    """
    from triton.runtime.autotuner import Autotuner

    run, bench = Autotuner.run, Autotuner._bench

    def untimed(autotuner: Any, *args: Any, config: Any, **named: Any) -> float:
        note_facts(_fact_of_config("kept config", autotuner, config))
        is_taken = _number_of(autotuner, config) == _TAKEN.get()
        if tries and is_taken and _TRIES.get():
            vars(autotuner)["do_bench"] = lambda launch, **_: launch()
            bench(autotuner, *args, config=config, **named)
        return float(not is_taken)

    def forgetting(autotuner: Any, *args: Any, **named: Any) -> Any:
        autotuner.cache.clear()
        result = run(autotuner, *args, **named)
        for kind in ("taken config", "kept config"):  # Triton 3.9 times no config that pruning leaves alone
            note_facts(_fact_of_config(kind, autotuner, autotuner.best_config))
        return result

    return {(Autotuner, "_bench"): untimed, (Autotuner, "run"): forgetting}


def _fact_of_config(kind: Kind, autotuner: Any, config: Any) -> Fact:
    return Fact(kind, autotuner.base_fn.__name__, str(len(autotuner.configs)), _number_of(autotuner, config))


def _number_of(autotuner: Any, config: Any) -> int:
    """Return the place of a config in an autotuner's list; the length of the list for a config that pruning has made."""
    configs = autotuner.configs
    return configs.index(config) if config in configs else len(configs)


def without_gpu() -> AbstractContextManager[Any]:
    """Answer what a module asks about the GPU while it is imported, if there is none."""
    import torch

    from kerneltune.interpreter.gpu_calls import gpu_parts

    return nullcontext() if torch.cuda.is_available() else replaced(gpu_parts("cpu"))


@contextmanager
def host_on(device: str) -> Iterator[None]:
    """Let host code run as it is written for a GPU, on tensors of a device: `cpu`, or `meta` without memory.

    Functions of torch.compile run as they are written: for a CPU they compile for seconds, to code that no GPU runs. A registered
    operator runs the function that it runs on a GPU; without memory, a fact is noted if its fake gives other outputs.
    """
    import torch

    from kerneltune.compat import own_functions
    from kerneltune.interpreter.gpu_calls import OnDevice, gpu_parts

    is_compiling = "torch._dynamo" in sys.modules
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager") if is_compiling else nullcontext()
    with replaced(gpu_parts(device)), OnDevice(device), own_functions(partial(OnDevice, device), _judge_fake), stance:
        yield


def _judge_fake(name: str, outputs: Any, faked: Any) -> None:
    """Note a fact if the function of `register_fake` gives other outputs than the operator."""
    from torch.utils._pytree import tree_leaves

    pairs = itertools.zip_longest(tree_leaves(outputs), tree_leaves(faked))
    for number, (output, fake) in enumerate(pairs):
        for what in ("dtype", "shape"):
            if getattr(output, what, None) != getattr(fake, what, None):
                note_facts(Fact("fake", name, f"{what} of output {number}"))


@contextmanager
def refusing_launches(folder: str) -> Iterator[None]:
    """Note a launch of an interpreted kernel, and raise RuntimeError; what host code keeps is forgotten as by `unlaunched`."""
    from triton.runtime.interpreter import GridExecutor

    def refuse(executor: Any, *_args: Any, **_kwargs: Any) -> None:
        note_facts(Fact("launch", executor.fn.__name__))
        raise RuntimeError("launched")

    with replaced({(GridExecutor, "__call__"): refuse} | _untimed()), _forgetting(folder), host_on("cpu"):
        yield


@contextmanager
def _forgetting(folder: str) -> Iterator[None]:
    """Put back the global variables of the modules in a folder, and the items of their dicts.

    After an import within, nothing is put back: an imported module may register itself.
    """
    from triton.runtime import interpreter

    num_modules, of_interpreter = len(sys.modules), vars(interpreter)
    before = [(variables, variables.copy()) for variables in (_variables_in(folder, num_modules) if folder else ())]
    try:
        yield
    finally:
        for variables, items in before if len(sys.modules) == num_modules else ():
            if added := variables.keys() - items.keys():
                kept = {name: variables[name] for name in added & of_interpreter.keys()}  # rewritten kernels need these
                variables.clear()
                variables.update(kept)
            variables.update(items)


@functools.lru_cache(maxsize=1)
def _variables_in(folder: str, _num_modules: int) -> list[dict[str, Any]]:
    """Return the global variables of each module in a folder, and each dict among them, as long as no module is imported."""
    modules = [module for module in list(sys.modules.values()) if is_own(folder, getattr(module, "__file__", None) or "")]
    dicts = [held for module in modules for name, held in vars(module).items() if type(held) is dict and name != "__builtins__"]
    return [*map(vars, modules), *dicts]


@contextmanager
def replaced(parts: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Replace attributes of owners, and put the former values back."""
    before = {(owner, name): getattr(owner, name) for owner, name in parts}
    try:
        for (owner, name), value in parts.items():
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)
