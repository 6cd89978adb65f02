"""Autotuned kernels: names, source, configs and neighbours of configs, the grid and heuristics of a launch.

Reads only public attributes of Triton 3.6 to 3.9.
"""

import copy
import dataclasses
import dis
import functools
import gc
import hashlib
import inspect
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from kerneltune.adopt.arguments import (
    NotRecordableError,
    decode,
    dtype_name,
    encode,
    is_descriptor,
    is_tensor,
    parts,
)
from kerneltune.adopt.keys import NO_ARGUMENT
from kerneltune.identity import code_digest

CONFIG_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
_MOST_LAYERS = 16
DEFAULTS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1}
FACTORY = "<locals>"
"""Part of the qualified name of a kernel that a function made."""


@dataclass(frozen=True, slots=True)
class KernelName:
    """The module of a kernel and its qualified name in the module."""

    module: str
    name: str

    @property
    def text(self) -> str:
        """`module.name`."""
        return f"{self.module}.{self.name}"


def kernel_name(autotuner: Any) -> KernelName:
    """Return the name of an autotuner's kernel."""
    function = autotuner.base_fn
    return KernelName(function.__module__, function.__qualname__)


@cache
def source_digest(function: Any) -> str:
    """Return the digest of the code that a kernel runs, helpers included; names, comments and line numbers have no part.

    Empty if the source cannot be found.
    """
    try:
        return code_digest(function)
    except ValueError:
        return ""


@cache
def bytecode_digest(function: Any) -> str:
    """Return a digest of the bytecode of a kernel and of its helpers: 1000 times faster than the digest of the source.

    Equal digests mean equal code; another version of Python has other bytecode for the same source.
    """
    digest = hashlib.sha256()
    _add_bytecode(function, digest, set())
    return digest.hexdigest()[:16]


def _add_bytecode(function: Any, digest: Any, seen: set[Any]) -> None:
    seen.add(function)
    code = function.__code__
    constants = [constant for constant in code.co_consts if constant != function.__doc__]
    digest.update(repr((code.co_code, constants, code.co_names, code.co_varnames)).encode())
    package = function.__module__.partition(".")[0]
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, bool | int | float | str):
            digest.update(repr((name, value)).encode())
            continue
        for _ in range(4):
            value = getattr(value, "fn", value)
        if inspect.isfunction(value) and value not in seen and value.__module__.partition(".")[0] == package:
            _add_bytecode(value, digest, seen)


@cache
def functions_of(function: Any) -> tuple[Any, ...]:
    """Return a kernel's function and the helpers of its package that it calls, helpers of helpers as well."""
    found, package = [function], function.__module__.partition(".")[0]
    for one in found:
        for value in map(one.__globals__.get, _globals_named(one)):
            for _ in range(4):
                value = getattr(value, "fn", value)
            if inspect.isfunction(value) and value not in found and value.__module__.partition(".")[0] == package:
                found.append(value)
    return tuple(found)


def _globals_named(function: Any) -> list[str]:
    """Return the names of the globals that a function reads."""
    found = (str(one.argval) for one in dis.get_instructions(function) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return list(dict.fromkeys(found))


def read_globals(function: Any) -> dict[str, Any]:
    """Return the plain values of the globals that a kernel and its helpers read, as JSON, by `function.name`."""
    found = {}
    for one in functions_of(function):
        for name in _globals_named(one):
            with suppress(NotRecordableError, KeyError):
                found[f"{one.__name__}.{name}"] = encode(one.__globals__[name])
    return found


def misnamed(autotuner: Any, keys: Iterable[str] = (), space: Iterable[str] = ()) -> str:
    """Return one line for the first name in a config, in the key or in the space that the kernel does not have; empty for none.

    A config may name options of a backend as well: `waves_per_eu` of AMD's, whatever the GPU is here. The interpreter would
    ignore every other name.
    """
    known = set(autotuner.arg_names)
    given = [(f"configs[{place}]", name) for place, config in enumerate(autotuner.configs) for name in config.kwargs]
    given += [("space", name) for name in space if name not in CONFIG_OPTIONS]
    wrong = [(field, name) for field, name in given if name not in known and name not in _backend_options()]
    wrong += [("key", name) for name in keys if name not in known]
    if not wrong:
        return ""
    (field, name), code = wrong[0], autotuner.base_fn.__code__
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
    """Return a digest of a config list, by which autotuners of one kernel are told apart."""
    texts = [str(config_key(config)) for config in configs]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def config_key(config: Any) -> tuple[Any, ...]:
    """Return the values of a config without its pre_hook; equal for configs that compile to the same kernel."""
    options = tuple(getattr(config, name, None) for name in CONFIG_OPTIONS)
    return tuple(sorted(config.kwargs.items(), key=lambda item: item[0])), options


def encode_config(config: Any) -> dict[str, Any]:
    """Return a config as JSON; its pre_hook as true or false.

    Raises:
        NotRecordableError: a value that JSON cannot hold.
    """
    options = {name: getattr(config, name, None) for name in CONFIG_OPTIONS}
    kwargs = {name: encode(value) for name, value in config.kwargs.items()}
    return {"kwargs": kwargs, **options, "pre_hook": getattr(config, "pre_hook", None) is not None}


def decode_config(stored: Mapping[str, Any], make: Any, pre_hook: Any = None) -> Any:
    """Return the config of its JSON; `make` is the class triton.Config.

    Raises:
        ValueError: a value that is no config's.
    """
    require_values([stored])
    options = {name: stored.get(name, DEFAULTS.get(name)) for name in CONFIG_OPTIONS if stored.get(name) is not None}
    for name, value in options.items():
        if name != "ir_override" and type(value) is not int:
            raise ValueError(f"config: {name}: {value!r}: expected a whole number")
    return make({name: decode(value) for name, value in stored["kwargs"].items()}, **options, pre_hook=pre_hook)


def config_label(stored: Mapping[str, Any]) -> str:
    """Return an encoded config in few words: `BK=64 num_warps=4`."""
    parts = [f"{name}={value}" for name, value in stored["kwargs"].items()]
    parts += [f"{name}={stored[name]}" for name in CONFIG_OPTIONS if stored.get(name) not in (None, DEFAULTS.get(name, 0), 1)]
    return " ".join(parts) or "defaults"


def stored_key(stored: Mapping[str, Any]) -> str:
    """Return what identifies an encoded config, whatever the order of its fields; its pre_hook has no part in it."""
    options = [stored.get(name, DEFAULTS.get(name)) for name in CONFIG_OPTIONS]
    return json.dumps([sorted(stored["kwargs"].items()), options])


def require_values(configs: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError for an encoded config that has no values by name."""
    for config in configs:
        if not isinstance(kwargs := config.get("kwargs"), dict):
            raise ValueError(f"config: kwargs: {kwargs!r}: expected values by name")


def config_index(configs: Sequence[Any]) -> dict[str, Any]:
    """Return the configs of a list by their `stored_key`, for `live_config`."""
    found: dict[str, Any] = {}
    for place, config in enumerate(configs):
        try:
            found.setdefault(stored_key(encode_config(config)), config)
        except NotRecordableError:
            found[f"configs[{place}]"] = config
    return found


def live_config(index: Mapping[str, Any], stored: Mapping[str, Any], make: Any) -> Any | None:
    """Return the autotuner's own config object of these values, so that its pre_hook survives.

    A config that is not in the list is made, with the pre_hook that all configs of the list share; None if their pre_hooks
    differ.

    Args:
        index: `config_index` of the autotuner's list.
        stored: the config as JSON.
        make: the class triton.Config.
    """
    if (found := index.get(stored_key(stored))) is not None:
        return found
    hooks = {getattr(config, "pre_hook", None) for config in index.values()}
    return decode_config(stored, make, hooks.pop()) if len(hooks) == 1 else None


def autotuner_of(value: Any) -> Any:
    """Return the autotuner that an object is or wraps; None if the object is something else. Runs no code of the object."""
    kind = getattr(sys.modules.get("triton.runtime.autotuner"), "Autotuner", ())  # a module may have done without Triton
    for _ in range(_MOST_LAYERS):
        if value is None or isinstance(value, kind) or inspect.isfunction(value):
            break
        value = inspect.getattr_static(value, "fn", None)
    return value if isinstance(value, kind) else None


def jit_of(value: Any) -> Any:
    """Return the object under `triton.jit` that an object is or wraps; None if there is none. Runs no code of the object."""
    for _ in range(_MOST_LAYERS):
        inner = inspect.getattr_static(value, "fn", None)
        if inner is None or inspect.isfunction(inner):
            return None if inner is None or not hasattr(type(value), "run") else value
        value = inner
    return None


PLAIN_MARK = "kerneltune_plain"
"""Attribute of an autotuner that describes a kernel without an autotuner."""


def is_plain(autotuner: Any) -> bool:
    """Return whether an autotuner describes a kernel that no autotuner wraps."""
    return getattr(autotuner, PLAIN_MARK, False) is True


def home_of(autotuner: Any) -> KernelName | None:
    """Return the module that holds an autotuner and the name it has there; None if no module holds it.

    A program may autotune a kernel of another module.
    """
    name, unwrap = kernel_name(autotuner), autotuner_of
    held = autotuner.__dict__.get(_TWIN_OF, autotuner)
    if is_plain(autotuner):
        unwrap, held = jit_of, autotuner.fn
    own = values_of_module(name.module)
    if unwrap(attribute(own, name.name)) is held:
        return name
    found = next((key for key, value in own.items() if unwrap(value) is held), None)
    if found is not None:
        return KernelName(name.module, found)
    for module in dict.fromkeys(("__main__", *sys.modules)):
        for key, value in values_of_module(module).items():
            if value is held:
                return KernelName(module, key)
    return None


def values_of_module(module: str) -> dict[str, Any]:
    """Return the globals of a module that is imported, without running code of it; empty for none."""
    found = sys.modules.get(module)
    return dict(vars(found)) if isinstance(found, ModuleType) else {}


def attribute(held: Mapping[str, Any], name: str) -> Any:
    """Return the object of a qualified name among a module's values, None for none."""
    first, *others = name.split(".")
    return functools.reduce(lambda found, part: getattr(found, part, None), others, held.get(first))


def compiled_and_launched() -> set[Any]:
    """Return the functions of the kernels that this process has launched on a GPU."""
    kind = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
    found = (one for one in gc.get_objects() if kind is not None and issubclass(type(one), kind))
    return {one.fn for one in found if getattr(one, "device_caches", None)}


def layers(autotuner: Any) -> Iterator[Any]:
    """Yield the objects that an autotuner wraps, from the outside in: heuristics, then the kernel."""
    inner = autotuner.fn
    while not inspect.isfunction(inner):
        yield inner
        inner = inner.fn


signature_of = cache(inspect.signature)
_TWIN_OF = "_kerneltune_twin_of"
"""Attribute of a copy of an autotuner: the autotuner that a module holds."""


@dataclass(frozen=True, slots=True)
class Call:
    """A launch as the program asks for it: an autotuner, and the arguments of its `run`."""

    autotuner: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> KernelName:
        """Return the name of the kernel."""
        return kernel_name(self.autotuner)

    @property
    def given(self) -> dict[str, Any]:
        """Return the kernel's arguments that the program gives by name."""
        return {name: value for name, value in self.kwargs.items() if name not in NO_ARGUMENT}

    @property
    def named(self) -> dict[str, Any]:
        """Return the kernel's arguments by name."""
        return {**dict(zip(self.autotuner.arg_names, self.args, strict=False)), **self.given}

    def twin(self, configs: Sequence[Any] | None = None) -> Any:
        """Return a copy of the autotuner that a thread may use alone; it shares the cache of choices.

        configs: the list it chooses from, instead of the autotuner's present list.
        """
        alone = copy.copy(self.autotuner)
        alone.__dict__.setdefault(_TWIN_OF, self.autotuner)
        alone.nargs = dict(zip(self.autotuner.arg_names, self.args, strict=False))
        if configs is not None:
            alone.configs = list(configs)
        return alone

    def launched_with(self, config: Any) -> tuple[tuple[int, ...] | None, dict[str, Any]]:
        """Return the grid of the launch under a config, and the values that heuristics give; launches nothing.

        The grid is None where none was given. Whatever a grid or a heuristic raises is raised here.
        """
        given = self.given | config.all_kwargs()
        by_heuristics: dict[str, Any] = {}
        for layer in layers(self.autotuner):
            values = getattr(layer, "values", None)
            for name, heuristic in values.items() if isinstance(values, dict) else ():
                known = {**dict(zip(layer.arg_names, self.args, strict=False)), **given}
                given[name] = by_heuristics[name] = heuristic(known)
        grid = self.kwargs.get("grid")
        if callable(grid):
            grid = grid(self._bound(given))
        if grid is None:
            return None, by_heuristics
        return tuple(int(size) for size in (grid if isinstance(grid, tuple | list) else (grid,))), by_heuristics

    def _bound(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the kernel's arguments by name, defaults as well, as Triton gives them to a grid."""
        signature = signature_of(self.autotuner.base_fn)
        by_name = list(signature.parameters)[len(self.args) :]
        bound = signature.bind_partial(*self.args, **{name: given[name] for name in by_name if name in given})
        bound.apply_defaults()
        return bound.arguments

    def pruned(self, configs: Sequence[Any] | None = None, *, by_model: bool = True) -> list[Any]:
        """Return the configs that the author's pruning leaves for the launch. Whatever it raises is raised here.

        Args:
            configs: that are pruned, instead of the autotuner's present list.
            by_model: whether the author's performance model prunes, too; the model tells which configs are worth timing, not
                which configs may be launched.
        """
        alone = self.twin(configs)
        if not by_model:
            alone.perf_model = None
        return list(alone.prune_configs(dict(self.kwargs)))

    def author_key(self) -> list[Any]:
        """Return the author's key of the launch, without element types: the values of the key's arguments.

        A tensor stands for its element type and shape, as it has no value of its own.
        """
        key, named = [], self.named
        for name in self.autotuner.keys:
            if name in named:
                value = named[name]
                try:
                    key.append(encode(value))
                except NotRecordableError:
                    key.append(f"{getattr(value, 'dtype', type(value).__name__)}{list(getattr(value, 'shape', ()))}")
        return key

    @property
    def values(self) -> tuple[Any, ...]:
        """Return the values that `run` is given, by position and by name; the grid among them."""
        return (*self.args, *self.kwargs.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of `values`."""
        return (*self.autotuner.arg_names[: len(self.args)], *self.kwargs)

    def dtypes(self) -> list[str]:
        """Return the names of the tensors' element types, as a `LaunchClass` has them."""
        items = (item for name, value in self.named.items() for _, item in parts(name, value))
        below = (value.base if is_descriptor(value) else value for value in items)
        return [dtype_name(tensor.dtype) for tensor in below if is_tensor(tensor)]

    def sizes(self, names: Collection[str] | None = None) -> dict[str, int]:
        """Return the sizes of the launch by name, as a `LaunchClass` has them; names: only these sizes."""
        sizes: dict[str, int] = {}
        wanted = None if names is None else {name.partition(".")[0] for name in names}
        for name, value in (part for item in self.named.items() for part in parts(*item)):
            if wanted is None or name in wanted:
                tensor = value.base if is_descriptor(value) else value
                if is_tensor(tensor):
                    sizes |= {f"{name}.{axis}": int(size) for axis, size in enumerate(tensor.shape)}
                elif type(value) is int:
                    sizes[name] = value
        return sizes
