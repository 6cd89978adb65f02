"""Identify configs of kernels, convert them to JSON, and make the configs that tuning may try beside the author's list.

Options of a launch, such as warps, have no effect on the host. A block size may have an effect: the program may sort, pad or
allocate by the block size. For a kernel without an autotuner, tuning changes only a block size that the grid reads, as in
`cdiv(n, meta["BLOCK"])`, or by which a loop of the kernel steps, as in `range(0, n, BLOCK)`, and only after launches with twice
and half the block size have left the same results: see `tuning.probe_blocks`.
"""

import ast
import copy
import dataclasses
import hashlib
import importlib
import inspect
import itertools
import json
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from kerneltune.adopt.arguments import NotRecordableError, decode_value, encode_value, identity_of
from kerneltune.adopt.bytecode import functions_of
from kerneltune.adopt.kernels import Launch, PlainKernel, heuristics_of, jit_of
from kerneltune.wording import assignments

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Options of a launch that tuning may change without a change of the program around the kernel."""
CONFIG_OPTIONS = (*OPTIONS, "ir_override")
DEFAULTS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1}
"""Options of a config that gives none; on NVIDIA GPUs also of a launch that gives none, see `launch_defaults`."""
_STAGES, _MOST_WARPS = (1, 2, 3, 4), 32
_LEAST_BLOCK, _LARGEST_BLOCK = 8, 1 << 16
_MOST_GROWTH = 2
"""Most elements of a thread under other blocks, over the program's: with more, kernels spill and compile for minutes."""
_MOST_DOUBLINGS = 2
"""Doublings and halvings by which the blocks of a config differ from the program's, all blocks together."""


@dataclass(frozen=True, eq=False)
class StoredConfig:
    """Hold a config as JSON, under Triton's names. Configs are equal for equal values, in any order and with any pre_hook.

    Attributes:
        kwargs: constexprs by name.
        pre_hook: whether the config has a pre_hook.
    """

    kwargs: dict[str, Any]
    num_warps: int | None = None
    num_stages: int | None = None
    num_ctas: int | None = None
    maxnreg: int | None = None
    ir_override: str | None = None
    pre_hook: bool = False

    @classmethod
    def of(cls, config: Any) -> "StoredConfig":
        """Return a triton.Config as JSON."""
        kwargs = {name: encode_value(value) for name, value in config.kwargs.items()}
        options = {name: encode_value(getattr(config, name, None)) for name in CONFIG_OPTIONS}
        options |= {name: int(value) for name, value in options.items() if isinstance(value, bool | float)}
        return cls(kwargs, **options, pre_hook=getattr(config, "pre_hook", None) is not None)

    def to_triton_config(self, pre_hook: Any = None) -> Any:
        """Return the config as a triton.Config with a pre_hook."""
        make: Any = sys.modules["triton.runtime.autotuner"].Config
        kwargs = {name: decode_value(value) for name, value in self.kwargs.items()}
        options = {name: value for name, value in self.options.items() if value is not None or name in DEFAULTS}
        return make(kwargs, **options, pre_hook=pre_hook)

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the launch, None for an option that the config does not give."""
        return {name: getattr(self, name) for name in CONFIG_OPTIONS}

    @property
    def label(self) -> str:
        """Return the config in few words: `BK=64 num_warps=4`."""
        named = {name: value for name, value in self.options.items() if value not in (None, DEFAULTS.get(name, 0))}
        return assignments(self.kwargs | named) or "defaults"

    def changed(self, values: Mapping[str, Any]) -> set[str]:
        """Return the names of the constexprs whose values differ from these values."""
        return {name for name, value in self.kwargs.items() if values.get(name) != value}

    @cached_property
    def _identity(self) -> str:
        options = [DEFAULTS.get(name) if value is None else value for name, value in self.options.items()]
        return json.dumps([sorted(self.kwargs.items()), options])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredConfig) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)


def misnamed(autotuner: Any, keys: Iterable[str] = (), space: Iterable[str] = ()) -> str:
    """Return a line about the first name in a config, the key or the space that the kernel does not have; empty if it has all.

    A config may also name an option of any backend, such as AMD's `waves_per_eu`. The interpreter would ignore a wrong name.
    """
    parameters = set(autotuner.arg_names)
    knobs = [(f"configs[{place}]", name) for place, config in enumerate(autotuner.configs) for name in config.kwargs]
    knobs += [("space", name) for name in space if name not in CONFIG_OPTIONS]
    unknown = [(field, name) for field, name in knobs if name not in parameters and name not in _backend_options()]
    unknown += [("key", name) for name in keys if name not in parameters]
    if not unknown:
        return ""
    field, name = unknown[0]
    code = autotuner.base_fn.__code__
    place = f"{code.co_filename}:{code.co_firstlineno}: {autotuner.base_fn.__name__}"
    return f"{place}: {field}: {name!r}: expected a parameter of the kernel: {', '.join(autotuner.arg_names)}"


@cache
def _backend_options() -> frozenset[str]:
    """Return the names of the options of the installed Triton's backends."""
    backends: Any = sys.modules["triton.backends"]
    modules = [sys.modules[backend.compiler.__module__] for backend in backends.backends.values()]
    kinds: list[Any] = [value for module in modules for value in vars(module).values() if dataclasses.is_dataclass(value)]
    return frozenset(field.name for kind in kinds for field in dataclasses.fields(kind))


def configs_digest(configs: Sequence[Any]) -> str:
    """Return a digest of a config list, the same in every process, which differs between the autotuners of a kernel."""
    texts = []
    for config in configs:
        options = tuple(getattr(config, name, None) for name in CONFIG_OPTIONS)
        texts.append(str((tuple(sorted(config.kwargs.items(), key=lambda item: item[0])), options)))
    return hashlib.sha256(re.sub(" at 0x[0-9a-f]+", "", "\n".join(texts)).encode()).hexdigest()[:12]


def to_triton_configs(listed: Sequence[Any], stored_configs: Iterable[StoredConfig]) -> dict[StoredConfig, Any]:
    """Return the config objects of an autotuner's list, and objects of stored configs, by their values.

    An object of the list stands for a stored config of its values, with its pre_hook. Another object is made without a pre_hook,
    or, if the config had a pre_hook when it was captured, with the only pre_hook of the list. The config is left out where the
    list has no or several pre_hooks, or where a function in the config has changed.
    """
    object_of: dict[StoredConfig, Any] = {}
    for config in listed:
        with suppress(NotRecordableError):
            object_of.setdefault(StoredConfig.of(config), config)
    hooks = [config.pre_hook for config in listed if getattr(config, "pre_hook", None) is not None]
    distinct_hooks = list({_identity_of_hook(hook): hook for hook in hooks}.values())
    for stored in stored_configs:
        if stored in object_of and (not stored.pre_hook or object_of[stored].pre_hook is not None):
            continue
        object_of.pop(stored, None)
        with suppress(Exception):  # of the import of a function's module
            if not stored.pre_hook:
                object_of[stored] = stored.to_triton_config()
            elif len(distinct_hooks) == 1:
                object_of[stored] = stored.to_triton_config(distinct_hooks[0])
    return object_of


def _identity_of_hook(hook: Any) -> Any:
    """Return a key that tells a pre_hook from other hooks: the code and held values of a function, as a list may make many."""
    if not inspect.isfunction(hook):
        return hook if isinstance(hook, Hashable) else id(hook)
    values = [*(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values()]
    with suppress(ValueError):  # an enclosed value that is not set yet
        values += [cell.cell_contents for cell in hook.__closure__ or ()]
    return hook.__code__, *map(identity_of, values)


def launch_defaults() -> dict[str, int]:
    """Return the options of a launch that gives none, by the backend of the GPU in use; without a GPU as on NVIDIA GPUs."""
    try:
        compiler: Any = importlib.import_module("triton.compiler")
        runtime: Any = importlib.import_module("triton.runtime.driver")
        options = compiler.make_backend(runtime.driver.active.get_current_target()).parse_options({})
    except Exception:  # Triton has no driver, or no backend for it: no reason to end the program
        return DEFAULTS
    return {name: getattr(options, name, default) for name, default in DEFAULTS.items()}


def free_options(kernel: Any) -> tuple[str, ...]:
    """Return the names of the options that no argument of a kernel has; Triton gives the same value to both."""
    return tuple(name for name in OPTIONS if name not in kernel.arg_names)


def split_options(kernel: Any, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a launch, None for an option that it does not give, and its other arguments by name."""
    options = free_options(kernel)
    return {name: kwargs.get(name) for name in options}, {name: kwargs[name] for name in kwargs if name not in options}


def plain_kernel(kernel: Any, options: Mapping[str, Any], keys: Sequence[str]) -> PlainKernel:
    """Return a kernel without an autotuner, with configs of warps and stages around the options of a launch.

    options: the options of the program's launch, by name; None for an option that the launch does not give.
    """
    make, free = sys.modules["triton.runtime.autotuner"].Config, free_options(kernel)
    program_options = {name: options[name] for name in free if options.get(name) is not None}
    defaults = launch_defaults() if DEFAULTS.keys() - program_options.keys() else {}
    own = defaults | program_options | dict.fromkeys(DEFAULTS.keys() - free)
    # in a loop without a product of matrices, Triton stages loads only by the argument `num_stages` of the loop itself
    is_staged = "num_stages" in free and any({"dot", "dot_scaled"} & {*fn.__code__.co_names} for fn in functions_of(kernel.fn))
    stages = [own["num_stages"], *(_STAGES if is_staged else ())]
    warps = own["num_warps"] or 0
    counts = [count for count in (warps // 2, warps * 2, warps // 4, warps * 4) if 1 <= count <= _MOST_WARPS]
    warps_and_stages = itertools.product((own["num_warps"], *counts), dict.fromkeys(stages))
    configs = [make({}, **{**own, "num_warps": count, "num_stages": stage}) for count, stage in warps_and_stages]
    return PlainKernel(kernel, kernel.fn, kernel.arg_names, keys, configs)


def plain_configs(launch: Launch) -> list[Any]:
    """Return the configs that tuning may try for a launch of a kernel without an autotuner, the program's first.

    All of them name the blocks that may change. Configs with other blocks come last, with the program's stages.
    """
    configs, blocks = launch.autotuner.configs, free_blocks(launch)
    own = configs[0]

    def with_blocks(config: Any, sizes: Mapping[str, int]) -> Any:
        return type(own)(dict(sizes), **{name: getattr(config, name) for name in OPTIONS})

    tried = [with_blocks(config, blocks) for config in configs]
    for sizes in _around(blocks):
        growth = math.prod(sizes.values()) * (own.num_warps or 1) / math.prod(blocks.values())
        for config in configs:
            if config.num_stages == own.num_stages and growth <= _MOST_GROWTH * (config.num_warps or 1):
                tried.append(with_blocks(config, sizes))
    return tried


def _around(blocks: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield powers of two around the program's blocks, without the program's blocks."""
    steps = range(-_MOST_DOUBLINGS, _MOST_DOUBLINGS + 1)
    for doublings in itertools.product(steps, repeat=len(blocks)):
        sizes = {name: int(size * 2.0**step) for (name, size), step in zip(blocks.items(), doublings, strict=True)}
        if 0 < sum(map(abs, doublings)) <= _MOST_DOUBLINGS and all(map(is_block, sizes.values())):
            yield sizes


def is_block(value: Any) -> bool:
    """Return whether a value is a block size that tuning may try."""
    return type(value) is int and _LEAST_BLOCK <= value <= _LARGEST_BLOCK and value & (value - 1) == 0


def free_blocks(launch: Launch) -> dict[str, int]:
    """Return the block sizes that the host depends on by nothing but the grid: powers of two that the program gives by name.

    The grid reads them, or a loop of the kernel steps by them. No heuristic may read them, because its value has become an
    argument of the launch.
    """
    annotations = launch.autotuner.base_fn.__annotations__
    blocks = {name: value for name, value in launch.keyword_arguments.items() if is_block(value)}
    constexprs = {name: size for name, size in blocks.items() if "constexpr" in str(annotations.get(name))}
    return {name: size for name, size in constexprs.items() if _is_free(launch, name, size)}


def _is_free(launch: Launch, name: str, size: int) -> bool:
    """Return whether a loop steps by a constexpr, or another value gives another grid; False if a heuristic depends on it."""
    config_class, kernel = type(launch.autotuner.configs[0]), launch.autotuner.fn
    wrappers = [value for value in list(launch.autotuner.base_fn.__globals__.values()) if jit_of(value) is kernel]
    heuristics = [(argument, function) for value in wrappers for _, argument, function in heuristics_of(value)]
    try:
        is_free, own_grid = name in _steps(launch.autotuner.base_fn), launch.grid(config_class({name: size}))
        is_free |= any(launch.grid(config_class({name: other})) != own_grid for other in (size // 2, size * 2))
        for doublings in range(-_MOST_DOUBLINGS, _MOST_DOUBLINGS + 1):
            named = {**launch.named, name: int(size * 2.0**doublings)}
            if any(heuristic(named) != launch.named.get(argument) for argument, heuristic in heuristics):
                return False
    except Exception:  # the program's own code
        return False
    return is_free


@cache
def _steps(function: Any) -> set[str]:
    """Return the names by which a kernel's loops step, and which it reads in `arange` alone otherwise.

    A name in other arithmetic, as in `program_id(0) * BLOCK`, may divide the work among programs, whose number the host gives.
    """
    read, steps, ranges = Counter[str](), Counter[str](), Counter[str]()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Name):
            read[node.id] += 1
        elif isinstance(node, ast.Call):
            called, names = ast.unparse(node.func).split(".")[-1], [ast.unparse(argument) for argument in node.args]
            steps.update(names[2:3] if called == "range" else ())
            ranges.update(names[1:2] if called == "arange" else ())
    return {name for name in steps if steps[name] + ranges[name] == read[name]}


def of_space(configs: Sequence[Any], space: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return the configs of a space, each knob not named in it as in the first config; without the configs of the list."""
    object_of: dict[StoredConfig, Any] = {}
    for values in itertools.product(*space.values()):
        config = copy.copy(configs[0])
        config.kwargs = {**configs[0].kwargs, **dict(zip(space, values, strict=True))}
        for name in CONFIG_OPTIONS:
            setattr(config, name, config.kwargs.pop(name, getattr(config, name, None)))
        object_of[StoredConfig.of(config)] = config
    for config in configs:
        object_of.pop(StoredConfig.of(config), None)
    return list(object_of.values())
