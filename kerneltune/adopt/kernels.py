"""Describe kernels and their launches: names, digests, the grid of a launch, and the keys by which launches are looked up.

The module reads only public attributes of Triton 3.6 to 3.9.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from kerneltune.adopt import arguments
from kerneltune.adopt.arguments import NotRecordableError, encode_value, is_descriptor, is_function, is_integer, is_tensor, parts
from kerneltune.adopt.program import attribute, has_several_models, main_name, values_of_module

NO_ARGUMENT = ("grid", "warmup")
"""Arguments of a launch that are no arguments of its kernel."""
FACTORY = "<locals>"
"""Part of the qualified name of a kernel that a function made."""
SERVED_ATTRIBUTE, RECORDED_ATTRIBUTE = "kerneltune_served", "_kerneltune_recorded"
"""Attributes of autotuners: the ServedList of the author's list, and by list of configs the RecordedClass of each launch."""
_COPY_OF = "_kerneltune_copy_of"
"""Attribute of a copy of an autotuner: the autotuner that a module holds."""
_MOST_LAYERS = 16
"""Most decorators around a kernel."""
_MOST_KEYS, _MOST_FORMS, _MOST_LISTS = 4096, 32, 1024
"""Most keys of a form, most forms of a kernel, most lists of configs of an autotuner that are remembered."""
_OTHER_KIND = (LookupError, AttributeError, TypeError, ValueError)
"""Errors of the key function of a form for launches with other names, types or numbers of arguments."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class KernelName:
    """Hold the module of a kernel and its qualified name in the module."""

    module: str
    name: str

    @classmethod
    def of(cls, function: Any) -> "KernelName":
        """Return the name of a kernel's function."""
        return cls(main_name(function.__module__), function.__qualname__)

    @property
    def text(self) -> str:
        """Return `module.name`."""
        return f"{self.module}.{self.name}"


def kernel_name(kernel: Any) -> KernelName:
    """Return the name of an autotuner's kernel, or of a kernel without an autotuner."""
    return KernelName.of(getattr(kernel, "base_fn", kernel.fn))


def layers(value: Any) -> Iterator[Any]:
    """Yield an object and the objects that it wraps, from the outside in, down to a function. Runs no code of the objects."""
    for _ in range(_MOST_LAYERS):
        if value is None:
            return
        yield value
        value = None if inspect.isfunction(value) else inspect.getattr_static(value, "fn", None)


def autotuner_of(value: Any) -> Any:
    """Return the autotuner that an object is or wraps; None if the object is something else. Runs no code of the object."""
    kind = getattr(sys.modules.get("triton.runtime.autotuner"), "Autotuner", ())  # () if the program has not imported Triton
    return next((layer for layer in layers(value) if isinstance(layer, kind)), None)


def jit_of(value: Any) -> Any:
    """Return the object under `triton.jit` that an object is or wraps; None if there is none. Runs no code of the object."""
    *_, kernel, function = None, None, *layers(value)
    return kernel if inspect.isfunction(function) and hasattr(type(kernel), "run") else None


def heuristics_of(value: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the layer, the name of the argument and the function of each heuristic around a kernel, from the outside in."""
    for layer in layers(value):
        values = getattr(layer, "values", None)
        yield from ((layer, *item) for item in (values.items() if isinstance(values, dict) else ()))


@dataclass(eq=False)
class PlainKernel:
    """Describe a kernel without an autotuner under the names of an autotuner's attributes; nothing is launched through it.

    Attributes:
        fn: the object under `triton.jit`.
        base_fn: the kernel's function.
        keys: names of the arguments whose values make classes of launches.
        configs: options of a launch, the program's options first.
    """

    fn: Any
    base_fn: Any
    arg_names: list[str]
    keys: Sequence[str]
    configs: list[Any]

    def prune_configs(self, _named: Mapping[str, Any]) -> list[Any]:
        """Return all configs, as an autotuner without the author's pruning does."""
        return self.configs


def is_by_autotuner(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a launch comes from an autotuner, which always passes `num_ctas`, not from the program."""
    return "num_ctas" in kwargs


def members(value: Any) -> Iterator[Any]:
    """Yield the objects that a class, a dict, a list or a tuple of a module holds. Runs no code of the objects."""
    if issubclass(type(value), type):
        yield from (getattr(member, "__func__", member) for member in vars(value).values())
    elif type(value) in (dict, list, tuple):
        yield from value.values() if type(value) is dict else value


def _is_member(sought: Any, key: str, value: Any) -> bool:
    """Return whether a global of a module, given by name and value, is a class or a container that holds an object."""
    return key != "__builtins__" and any(member is sought for member in members(value))


def home_of(autotuner: Any) -> KernelName | None:
    """Return the module that holds an autotuner, and the global through which it is reached; None if no module holds it.

    A program may autotune a kernel of another module. The kernel's own module need not be in `sys.modules`. Of several names the
    first that the module bound is returned, because a later name may be the variable of a loop that launches the kernel.
    """
    name, is_plain = kernel_name(autotuner), isinstance(autotuner, PlainKernel)
    unwrap, sought = (jit_of, autotuner.fn) if is_plain else (autotuner_of, autotuner.__dict__.get(_COPY_OF, autotuner))
    own_globals = dict(autotuner.base_fn.__globals__)
    named_alike = unwrap(attribute(own_globals, name.name))
    if named_alike is sought or (is_plain and getattr(named_alike, "fn", None) is sought.fn):  # the same kernel
        return name
    kernel = jit_of(autotuner)
    own_module = sys.modules.get(name.module, kernel)
    users = [(name.module, own_globals)]  # that hold the kernel or its module, so that a class or container there may hold it
    for module, values in (*users, *((module, values_of_module(module)) for module in ("__main__", *sys.modules))):
        for key, value in values.items():
            if (unwrap(value) if values is own_globals else value) is sought:
                first = next(other for other in values if other == key or _is_member(sought, other, values[other]))
                return KernelName(main_name(module), first)
            if value is kernel or value is own_module:
                users.append((module, values))
    for module, values in users:
        for key, value in values.items():
            if _is_member(sought, key, value):
                return KernelName(main_name(module), key)
    return None


holders: WeakSet[Any] = WeakSet()
"""Autotuners that hold a value of this package. `gc.get_objects` may not find them: a program may call `gc.freeze`."""


def hold(autotuner: Any, name: str, value: V) -> V:
    """Let an autotuner hold a value as an attribute until `startup.uninstall`, and return the value."""
    setattr(autotuner, name, value)
    with suppress(TypeError):  # a subclass of the program may have no hash
        holders.add(autotuner)
    return value


def launch_config(autotuner: Any, config: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Launch an autotuner's kernel with a config, after the config's pre_hook, as the autotuner does."""
    named = {**kwargs, **config.all_kwargs()}
    if config.pre_hook is not None:
        config.pre_hook({**dict(zip(autotuner.arg_names, args, strict=False)), **named})
    autotuner.best_config = config
    return autotuner.fn.run(*args, **named)


_signature_of = cache(inspect.signature)


@dataclass(frozen=True, slots=True)
class Launch:
    """Hold a launch of the program: an autotuner or a PlainKernel, and the arguments of its `run`."""

    autotuner: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> KernelName:
        """Return the name of the kernel."""
        return kernel_name(self.autotuner)

    @property
    def is_plain(self) -> bool:
        """Return whether no autotuner wraps the kernel."""
        return isinstance(self.autotuner, PlainKernel)

    @property
    def keyword_arguments(self) -> dict[str, Any]:
        """Return the kernel's arguments that the program gives by name."""
        return {name: value for name, value in self.kwargs.items() if name not in NO_ARGUMENT}

    @property
    def named(self) -> dict[str, Any]:
        """Return the kernel's arguments by name."""
        return {**dict(zip(self.autotuner.arg_names, self.args, strict=False)), **self.keyword_arguments}

    @property
    def values(self) -> tuple[Any, ...]:
        """Return the values that `run` is given, by position and by name; the grid among them."""
        return (*self.args, *self.kwargs.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of `values`."""
        return (*self.autotuner.arg_names[: len(self.args)], *self.kwargs)

    @property
    def conflict(self) -> str:
        """Return a line about an argument that the launch and its configs give, which triton.autotune refuses; empty for none."""
        names = self.names
        twice = [name for config in self.autotuner.configs[:1] for name in config.all_kwargs() if name in names]
        return f"the launch gives {twice[0]}, which its configs give, too: triton.autotune refuses that" if twice else ""

    def private_copy(self, configs: Sequence[Any] | None = None) -> Any:
        """Return a copy of the autotuner that a thread may use alone; it shares the cache of choices.

        configs: list of the copy; None for the autotuner's present list.
        """
        alone = copy.copy(self.autotuner)
        alone.__dict__.setdefault(_COPY_OF, self.autotuner)
        alone.nargs = dict(zip(self.autotuner.arg_names, self.args, strict=False))
        if configs is not None:
            alone.configs = list(configs)
        return alone

    def grid(self, config: Any) -> tuple[int, ...] | None:
        """Return the grid of the launch under a config, None if the program gave no grid; launch nothing.

        An exception of the author's grid or of a heuristic is raised.
        """
        keywords = self.keyword_arguments | config.all_kwargs()
        for layer, name, heuristic in heuristics_of(self.autotuner.fn):
            keywords[name] = heuristic({**dict(zip(layer.arg_names, self.args, strict=False)), **keywords})
        grid = self.kwargs.get("grid")
        if callable(grid):
            grid = grid(self._bound(keywords))
        if grid is None:
            return None
        return tuple(int(size) for size in (grid if isinstance(grid, tuple | list) else (grid,)))

    def _bound(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return the kernel's arguments by name, defaults as well, as Triton gives them to a grid."""
        signature = _signature_of(self.autotuner.base_fn)
        others = list(signature.parameters)[len(self.args) :]
        bound = signature.bind_partial(*self.args, **{name: keywords[name] for name in others if name in keywords})
        bound.apply_defaults()
        return bound.arguments

    def pruned(self, configs: Sequence[Any] | None = None, *, by_model: bool = True) -> list[Any]:
        """Return the configs that the author's pruning leaves for the launch; an exception of the pruning is raised.

        Args:
            configs: configs to prune; None for the autotuner's present list.
            by_model: whether the author's performance model prunes, too; the model decides which configs are worth timing, not
                which configs may be launched.
        """
        alone = self.private_copy(configs)
        if not by_model:
            alone.perf_model = None
        return list(alone.prune_configs(dict(self.kwargs)))

    def author_key(self) -> list[Any]:
        """Return the author's key of the launch, without element types: the values of the key's arguments.

        A tensor stands for its element type and shape, as it has no value of its own. Of a kernel without an autotuner, whose
        key has every argument, the key has the signs of floats, True for a positive float, and False for an argument that is not
        given.
        """
        key, named = list[Any](), self.named
        for name in self.autotuner.keys:
            value = named.get(name)
            if self.is_plain and (name not in named or isinstance(value, float)):
                sign = arguments.sign_of(value or 0.0)
                key.append({"float": name in named and (sign == 1 or sign)})
            elif name in named:
                try:
                    key.append(encode_value(value))
                except NotRecordableError:
                    key.append(f"{getattr(value, 'dtype', type(value).__name__)}{list(getattr(value, 'shape', ()))}")
        return key

    def dtypes(self) -> list[str]:
        """Return the names of the tensors' element types, as a `LaunchClass` has them."""
        return [arguments.element_type(value.dtype) for _, value in self._parts() if is_tensor(value)]

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the launch by name, as a `LaunchClass` has them."""
        sizes: dict[str, int] = {}
        for name, value in self._parts():
            if is_tensor(value):
                sizes |= {f"{name}.{axis}": int(size) for axis, size in enumerate(getattr(value, "shape", ()))}
            elif is_integer(value):
                sizes[name] = int(value)
        return sizes

    def size(self, name: str) -> int | None:
        """Return a size of the launch by its name, `N`, `x.0` or `x[1].0`; None if the launch has no size of this name."""
        argument, _, axis = name.partition(".")
        if "[" in argument:
            return self.sizes().get(name)
        names = self.autotuner.arg_names
        place = names.index(argument) if argument in names else len(names)
        value: Any = self.args[place] if place < len(self.args) else self.kwargs.get(argument)
        if not axis:
            return int(value) if is_integer(value) else None
        shape = getattr(value.base if is_descriptor(value) else value, "shape", ())
        return int(shape[int(axis)]) if int(axis) < len(shape) else None

    def _parts(self) -> Iterator[tuple[str, Any]]:
        """Yield the kernel's arguments by name, items of tuples with tensors each, tensors in place of their descriptors."""
        for name, value in (part for item in self.named.items() for part in parts(*item)):
            yield name, value.base if is_descriptor(value) else value


@dataclass(slots=True)
class _Form(Generic[V]):
    """Hold values for the launches whose arguments have the same names and types.

    Attributes:
        kind: names and types.
        key_of: function that returns the key of a launch from its arguments.
        values: values by key.
        last: key and value of the last launch.
    """

    kind: tuple[Any, ...]
    key_of: Callable[..., tuple[Any, ...]]
    values: dict[tuple[Any, ...], V] = field(default_factory=dict)
    last: tuple[Any, V | None] = (None, None)


class LaunchMap(Generic[V]):
    """Hold a value for each key of a kernel's launches, in a form for each combination of names and types, the newest first.

    Because the layers of a model repeat launches, `find` compares the last key first, in half the time of a look-up.
    """

    __slots__ = ("_forms", "_has_layout", "_has_signs", "_is_kept")

    def __init__(
        self, has_layout: bool = False, has_signs: bool = False, is_kept: Callable[[V], bool] = lambda _value: False
    ) -> None:
        """Make an empty map.

        Args:
            has_layout, has_signs: whether the layout of tensors and the signs of floats are part of the keys, see
                `key_function`.
            is_kept: whether a value stays when the map forgets values, because it has very many keys or forms.
        """
        self._forms: list[_Form[V]] = []
        self._has_layout, self._has_signs, self._is_kept = has_layout, has_signs, is_kept

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> V | None:
        """Return the value of a launch's key, None for a key without a value. The hot path of serving."""
        for form in self._forms:
            try:  # in place of `suppress`, which costs more than the key
                key, (last_key, value) = form.key_of(args, kwargs), form.last
                if key != last_key:
                    value = form.values[key]
                    form.last = key, value
                return value
            except _OTHER_KIND:
                pass
        return None

    @property
    def num_keys(self) -> int:
        """Return the number of keys that have a value."""
        return sum(len(form.values) for form in self._forms)

    def remember(self, launch: Launch, deciding: Collection[str], value: V) -> V:
        """Hold a value for the key of a launch, and return the value; `deciding`: see `key_function`."""
        kind = (*launch.kwargs, *map(type, launch.values))
        form = next((form for form in self._forms if form.kind == kind), None)
        if form is None:
            form = _Form(kind, key_function(launch, deciding, self._has_layout, self._has_signs))
            newest, oldest = self._forms[: _MOST_FORMS - 1], self._forms[_MOST_FORMS - 1 :]
            self._forms = [form, *newest, *(old for old in oldest if any(map(self._is_kept, old.values.values())))]
        if form.values and len(form.values) % _MOST_KEYS == 0:
            for forgotten in [key for key, held in form.values.items() if not self._is_kept(held)]:
                del form.values[forgotten]
        key = form.key_of(launch.args, launch.kwargs)
        form.values[key] = value
        form.last = key, value
        return value


def get_or_make(lists: dict[Any, V], configs: Sequence[Any], make: Callable[[], V]) -> V:
    """Return the value of an autotuner's list of configs, `make()` for a new list.

    Programs may make equal configs anew for each launch. Lists are found by the identities of their configs, then by the configs;
    the dict keeps the configs alive, so that no other config gets their identities.
    """
    by_identity = tuple(map(id, configs))
    value = lists.get(by_identity)
    if value is None:
        equal = tuple(configs)
        value = lists.get(equal)
    if value is None:
        if len(lists) >= 2 * _MOST_LISTS:
            lists.clear()
        lists[equal] = lists[by_identity] = value = make()
    return value


def key_function(
    launch: Launch, deciding: Collection[str], has_layout: bool = False, has_signs: bool = False
) -> Callable[..., tuple[Any, ...]]:
    """Return a function of args and kwargs that returns the key of a launch with the names and types of this launch.

    The key has the element types of all tensors and the types of all other arguments; in a process that sees GPUs of several
    models, also the present GPU. Types come before values, because a tensor may not be compared with a key. For a launch with
    other names or types the function raises an error of `_OTHER_KIND`, or returns a key that none of its own launches has.

    Because a loop over the arguments takes 2.5 times as long, the function is compiled from text, such as `[v0, v1] = args`, then
    `v2 = kwargs['N']`, then `return (len(kwargs), v0.dtype, v1.__class__, v1, v2.__class__, v2)`.

    Args:
        launch: a launch.
        deciding: names of the arguments whose values or shapes are part of the key; `grid` for the code of its function.
        has_layout: whether the strides of tensors, the alignment of their first bytes, and which of them begin at the same byte,
            are part of the key.
        has_signs: whether the signs of floats whose values are no part of the key are.
    """
    sources, num_args = [f"v{place}" for place in range(len(launch.values))], len(launch.args)
    parts = ", ".join(_key_parts(launch, sources, deciding, has_layout, has_signs))
    names: dict[str, Any] = {"other": _other_key, "shared": _shared, "device": lambda: sys.modules["torch"].cuda.current_device()}
    given = [f"{source} = kwargs[{name!r}]" for source, name in zip(sources[num_args:], launch.kwargs, strict=True)]
    lines = [f"[{', '.join(sources[:num_args])}] = args", *given, f"return ({parts},)"]
    exec(compile("\n ".join(["def key_of(args, kwargs):", *lines]), __file__, "exec"), names)  # torch.compile skips our files
    key_of: Callable[..., tuple[Any, ...]] = names["key_of"]
    return key_of


def _key_parts(
    launch: Launch, sources: Sequence[str], deciding: Collection[str], has_layout: bool, has_signs: bool
) -> Iterator[str]:
    """Yield the expressions of the parts of a key, in which `sources` name the values of a launch; see `key_function`."""
    yield from ["len(kwargs)", *(["device()"] if has_several_models() else ())]
    pointers = list[str]()
    for name, value, source in zip(launch.names, launch.values, sources, strict=True):
        is_deciding = name in deciding
        if name in NO_ARGUMENT:
            yield f"{source}.__code__" if is_deciding and inspect.isfunction(value) else f"{source}.__class__"
        elif is_descriptor(value):
            yield f"other({source})" if is_deciding else f"{source}.base.dtype"
        elif is_tensor(value):
            yield from [f"{source}.dtype", *([f"{source}.shape"] if is_deciding and hasattr(value, "shape") else ())]
            pointers.append(f"p{source}")
            is_aligned = f"(p{source} := {source}.data_ptr()) % {arguments.ALIGNMENT} == 0"
            yield from [f"{source}.stride()", is_aligned] if has_layout else ()
        elif is_deciding and type(value) in arguments.SCALAR_TYPES:
            yield from [f"{source}.__class__", *([] if value is None else [source])]  # because True == 1 == 1.0
        elif is_deciding and is_function(value):
            yield f"{source}.fn"
        elif is_deciding or arguments.holds_tensor(value):
            yield f"other({source})"
        else:
            yield f"{source}.__class__"
            yield from [f"{source} > 0", f"{source} < 0"] if has_signs and isinstance(value, float) else ()
    if has_layout:
        yield f"shared([{', '.join(pointers)}])"


def all_but_floats(launch: Launch) -> set[str]:
    """Return the arguments that may make classes: all but floats, because scales and step sizes change with every launch."""
    return {name for name, value in launch.named.items() if not isinstance(value, float)}


def _shared(pointers: list[int]) -> tuple[int, ...]:
    """Return the first place of each address in the list; empty if all addresses differ, as they do in most launches."""
    return () if len(set(pointers)) == len(pointers) else tuple(map(pointers.index, pointers))


def _other_key(value: Any) -> Any:
    """Return the item of a key for a value of no plain type."""
    if is_descriptor(value):
        return "descriptor", value.base.dtype, tuple(value.shape), tuple(value.strides), tuple(value.block_shape)
    if is_tensor(value):
        return value.dtype, value.shape
    if isinstance(value, tuple | list):
        return tuple((float, arguments.sign_of(item)) if type(item) is float else _other_key(item) for item in value)
    return arguments.identity_of(value)
