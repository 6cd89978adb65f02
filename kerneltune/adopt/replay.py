"""Launch a captured class again: find its kernel, make its arguments anew, launch a config.

The kernel's module is imported, so that hooks and heuristics are the author's. Of the file that the program was started with only
the statements that a kernel needs are executed: its definition, the definitions of the names in its decorators and body, and so
on. A script without `if __name__ == "__main__"` would otherwise train a model in order to be imported.
"""

import ast
import dis
import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from kerneltune.adopt import arguments, kernels
from kerneltune.adopt.arguments import Argument, KeptValues, TensorLayout, decode_value, span, torch_dtype, views, with_tuples
from kerneltune.adopt.bytecode import bytecode_digest, read_globals
from kerneltune.adopt.configs import StoredConfig, configs_digest, plain_kernel, to_triton_configs
from kerneltune.adopt.folder import VALUES, LaunchClass, missing_values
from kerneltune.adopt.kernels import KernelName, Launch
from kerneltune.adopt.program import attribute, is_interpreted, python_version
from kerneltune.errors import first_line, statement_in
from kerneltune.interpreter.modes import replaced
from kerneltune.processes.forked import run_forked, shared_bytes
from kerneltune.task import CaseError


class ReplayError(CaseError):
    """Report that a class cannot be replayed here; the message is one line."""


def live_kernel(launch_class: LaunchClass) -> Any:
    """Return the autotuner of a captured kernel, after the import of its module."""
    home, name = launch_class.home or launch_class.kernel, launch_class.kernel.text
    held = vars(_module_of(launch_class, home))
    tuners = _named_alike(launch_class, attribute(held, home.name), held)
    unchanged = [tuner for tuner in tuners if bytecode_digest(tuner.base_fn) == launch_class.bytecode_digest]
    is_other_bytecode = not unchanged
    unchanged = unchanged or [tuner for tuner in tuners if arguments.source_digest(tuner.base_fn) == launch_class.source_digest]
    if tuners and not unchanged:
        raise ReplayError(f"{name}: its source has changed since it was captured: capture again")
    if not tuners:
        raise ReplayError(f"{name}: {held.get('__file__', home.module)} {_why_no_tuner(launch_class, home, held)}")
    present = read_globals(unchanged[0].base_fn)
    for read, value in launch_class.globals.items():
        if present.get(read) != value:
            values = f"which was {value!r} when captured and is {present.get(read)!r} here"
            raise ReplayError(f"{name}: the kernel reads {read}, {values}")
    if is_other_bytecode and launch_class.versions.get("python") == python_version():  # another Python has other bytecode
        raise ReplayError(f"{name}: the file has several kernels of this name: give each a name of its own")
    return next((tuner for tuner in unchanged if configs_digest(tuner.configs) == launch_class.configs_digest), unchanged[0])


def _named_alike(launch_class: LaunchClass, holder: Any, held: Mapping[str, Any]) -> list[Any]:
    """Return the autotuners of kernels with the name of a class's kernel, in a holder first, then in all of its module."""
    unwrap = kernels.jit_of if launch_class.is_plain else kernels.autotuner_of
    tuners = [tuner for tuner in map(unwrap, (holder, *kernels.members(holder), *held.values())) if tuner is not None]
    if launch_class.is_plain:
        options = launch_class.candidates[0].config.options
        tuners = [plain_kernel(kernel, options, launch_class.key_names) for kernel in tuners]
    return [tuner for tuner in tuners if tuner.base_fn.__qualname__ == launch_class.kernel.name]


def _why_no_tuner(launch_class: LaunchClass, home: KernelName, held: Mapping[str, Any]) -> str:
    """Return why a module has no autotuner of a class's kernel: the kernel is missing, or is not autotuned here."""
    jits = [jit for jit in map(kernels.jit_of, held.values()) if jit is not None]
    if any(jit.fn.__qualname__ == launch_class.kernel.name for jit in jits):
        return "does not autotune it here: set the environment variables of the program"
    place = ' outside `if __name__ == "__main__"`' if home.module == "__main__" else ""
    return f"has no kernel of this name{place}: capture again"


def _module_of(launch_class: LaunchClass, name: KernelName) -> Any:
    """Import the module of a kernel, or of a function that is an argument of the kernel: see `_module`."""
    files = {launch_class.kernel.module: launch_class.file, "__main__": next(iter(launch_class.argv), "")}
    if launch_class.home is not None and launch_class.home_file:
        files[launch_class.home.module] = launch_class.home_file
    return _module(name, files.get(name.module, ""), launch_class.argv, launch_class.path)


@cache
def _module(name: KernelName, file: str, argv: tuple[str, ...], folders: tuple[str, ...]) -> Any:
    """Import the module that holds a kernel as the program did: from its folders, with its arguments in sys.argv."""
    path, here = Path(file), str(Path.cwd())
    is_program = name.module == "__main__"
    if is_program and not path.is_file():
        raise ReplayError(f"{path}: the program's file is gone")
    origin = str(path) if is_program else f"{name.module} ({file})" if file else name.module
    below_here = [str(path.parent)] if path.is_relative_to(here) else []
    try:
        with _first_configs(), _settings_of(argv, (*folders, here, *below_here)):
            return load_program(path, name.name) if is_program else _import(name.module, path)
    except ModuleNotFoundError as error:
        raise ReplayError(f"{origin}: {error}: set PYTHONPATH to the folders that the program imports from") from error
    except (Exception, SystemExit) as error:
        raise ReplayError(f"{origin}: importing fails here: {statement_in('', error)}{first_line(error)}") from error


@contextmanager
def _settings_of(argv: tuple[str, ...], folders: tuple[str, ...]) -> Iterator[None]:
    """Let imports see the program's arguments, and its folders in its order: an installed package may have its module's name.

    The packages of another Python come last. Later imports look into the program's folders last.
    """
    argv_before, path_before = sys.argv, list(sys.path)
    path, place = list(sys.path), len(sys.path)
    for folder in reversed(dict.fromkeys(folders)):
        if folder in path:
            place = path.index(folder)
        elif not _OF_PYTHON.search(folder):
            path.insert(place, folder)
    sys.argv, sys.path[:] = list(argv) or argv_before, list(dict.fromkeys((*path, *folders)))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv_before, list(dict.fromkeys((*path_before, *sys.path)))


def _import(name: str, file: Path) -> ModuleType:
    """Import a module; execute the file of its top package where no folder has the package, as programs do that load plug-ins."""
    top, *below = name.split(".")
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        depth = len(below) - (file.name != "__init__.py")
        place = file if depth < 0 else file.parents[depth] / "__init__.py"
        spec = importlib.util.spec_from_file_location(top, place) if place.is_file() else None
        if spec is not None and spec.loader is not None:
            sys.modules[top] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(sys.modules[top])
            except BaseException:
                del sys.modules[top]
                raise
    return importlib.import_module(name)


def _first_configs() -> AbstractContextManager[None]:
    """Let kernels that a module launches during its import run their first configs in the interpreter, which has no times."""
    from triton.runtime.autotuner import Autotuner  # in a fresh process nothing else has imported it

    def run(tuner: Any, /, *args: Any, **kwargs: Any) -> Any:
        return kernels.launch_config(tuner, tuner.configs[0], args, kwargs)

    return replaced({(Autotuner, "run"): run} if is_interpreted() else {})


_OF_PYTHON = re.compile("/python3|/(site|dist)-packages")
"""Part of the paths of Python's own modules and of installed packages."""
PROGRAM_MODULE = "__mp_main__"
"""Name of the module that holds the program's file, as in multiprocessing's workers."""
_SETTINGS = frozenset(("os.environ", "sys.path"))
"""Objects that programs change before their imports, because the imports depend on them."""
_READS = re.compile("LOAD_.*(NAME|GLOBAL).*")
_OWNERS = re.compile(r"([^\W\d]\w*)(\.\w+)?(?=[.[]|$)")
"""The first two names of a.b.c and a.b[c]; of a[b].c the first."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ANY_NAME = "*"
_FILLS = frozenset(("append", "extend", "insert", "setdefault", "update"))
"""Methods by which a loop fills a list or a dict with kernels."""


def load_program(path: Path, kernel: str) -> ModuleType:
    """Execute the statements that a kernel of a program's file needs, and return the module that holds the kernel.

    kernel: qualified name of the kernel.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    tree.body = needed(tree.body, kernel.partition(".")[0])
    module = ModuleType(PROGRAM_MODULE)
    module.__file__, module.__package__ = str(path), _package(path)
    sys.modules[PROGRAM_MODULE] = module  # inspect looks for sources there
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module


def _package(path: Path) -> str:
    """Return the package of a file, empty for none; put its folders on sys.path, so that the file's imports are found."""
    folder, names = path.parent, []
    while (folder / "__init__.py").is_file():
        names.append(folder.name)
        folder = folder.parent
    for entry in (path.parent, folder):
        if str(entry) not in sys.path:
            sys.path.append(str(entry))
    return ".".join(reversed(names))


def needed(statements: Sequence[ast.stmt], name: str) -> list[ast.stmt]:
    """Return the statements of a module that a definition of a name needs, in their order.

    These statements bind a name that a chosen statement reads, or change an object that a chosen statement has bound, until no
    further statement does.
    """
    bound = [_bound(statement) for statement in statements]
    # Triton's interpreter refuses a function whose module does not hold `triton.language` as `tl`
    wanted = {name, "tl", _ANY_NAME}
    uses = [names & wanted or name in _changes(statement, _FILLS) for statement, names in zip(statements, bound, strict=True)]
    last = max((place for place, is_used in enumerate(uses) if is_used), default=0)
    changes = [_changes(statement) for statement in statements[: last + 1]]
    stores = [_changes(statement, ()) for statement in statements[: last + 1]]  # as of an attribute of a pre_hook
    chosen, data, defined = set[int](), {*_SETTINGS, name}, set[str]()
    while True:
        places = {place for place, names in enumerate(bound) if place not in chosen and names & wanted}
        places |= {place for place, names in enumerate(changes) if place not in chosen and names & data}
        places |= {place for place, names in enumerate(stores) if place not in chosen and names & defined}
        if not places:
            future = {n for n, each in enumerate(statements) if isinstance(each, ast.ImportFrom) and each.module == "__future__"}
            return [statements[place] for place in sorted(chosen | future)]
        chosen |= places
        for place in places:
            wanted |= _named(statements[place])
            if isinstance(statements[place], _DEFINITIONS):
                defined |= bound[place]
            elif not isinstance(statements[place], (ast.Import, ast.ImportFrom)):
                data |= bound[place]


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module gives a value; `_ANY_NAME` among them for `from module import *`."""
    names = {str(step.argval) for step in dis.get_instructions(_code(statement)) if step.opname in ("STORE_NAME", "STORE_GLOBAL")}
    return names | {node.name for node in ast.walk(statement) if isinstance(node, ast.alias) and node.name == _ANY_NAME}


def _named(statement: ast.stmt) -> set[str]:
    """Return the names of the module that a statement reads, inside functions as well."""
    names, codes = set(), [_code(statement)]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        names |= {str(step.argval) for step in dis.get_instructions(code) if _READS.fullmatch(step.opname)}
    return names


def _code(statement: ast.stmt) -> CodeType:
    """Compile a statement of a module by itself."""
    return compile(ast.Module([statement], []), "<statement>", "exec", dont_inherit=True)


def _changes(statement: ast.stmt, methods: Collection[str] | None = None) -> set[str]:
    """Return the objects whose items or attributes a statement stores, or whose methods it calls: `a` and `a.b` of a.b.c().

    methods: names of the methods that count; None for all.
    """
    changed = set()
    for node in _outside_definitions([statement]):
        stored = isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)
        owner: Any = node if stored else getattr(node, "func", None)
        # the launch of a kernel, k[grid](x), changes no k
        is_method = isinstance(owner, ast.Attribute) and (methods is None or owner.attr in methods)
        if (stored or is_method) and (names := _OWNERS.match(ast.unparse(owner))):
            changed |= {names[1], names[0]}
    return changed


def _outside_definitions(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes and the nodes below them, but nothing inside a function or a class."""
    for node in nodes:
        yield node
        if not isinstance(node, (*_DEFINITIONS, ast.Lambda)):
            yield from _outside_definitions(ast.iter_child_nodes(node))


_BASE_ALIGNMENT = 256
_GUARD_BYTES = 1 << 16
"""Bytes behind each storage of a kernel without an autotuner, in which writes of too large blocks are found."""


@dataclass(slots=True)
class Replay:
    """Hold the arguments of a class, made anew, and the results that every launch must leave in them: see `effects.learn`.

    Attributes:
        named: arguments by name, in the kernel's order.
        storages: bytes of each storage, (bytes,) uint8.
        guard_bytes: for each storage, the bytes behind the arguments.
        before: contents of each storage before a launch; outputs that are overwritten as a whole are poisoned. None if launches
            follow each other to be timed.
        expected: by argument, the contents after a launch of the author's first config, or the values of the author's reference.
        noise: by argument, the relative difference between launches of the first config, root mean square.
        guard_contents: contents of the guard of each storage after a launch of the first config.
        guard_noise: for each guard, the relative difference between launches of the first config, root mean square.
        has_reference: whether `expected` holds the values of the author's reference.
        tolerance: the author's relative and absolute tolerance; None for a tolerance by the element types.
        overflows: by argument, where large rows give NaN or infinity, and the author's reference does not.
    """

    launch_class: LaunchClass
    named: dict[str, Any]
    storages: list[torch.Tensor]
    guard_bytes: Sequence[int] = ()
    before: list[torch.Tensor] | None = None
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    guard_contents: list[torch.Tensor] = field(default_factory=list)
    guard_noise: list[float] = field(default_factory=list)
    has_reference: bool = False
    tolerance: tuple[float, float] | None = None
    overflows: dict[str, torch.Tensor] = field(default_factory=dict)
    _prepared: dict[StoredConfig, Callable[[], Any]] = field(default_factory=dict)

    def guards(self, storages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the memory behind the arguments of each storage: floating-point values where all arguments are, else bytes."""
        guards = []
        for number, (storage, size) in enumerate(zip(storages, self.guard_bytes, strict=True)):
            kind, *others = {torch_dtype(view.dtype) for view in views(self.launch_class.arguments, number)}
            is_whole = not (storage.numel() % kind.itemsize or size % kind.itemsize)
            has_elements = kind.is_floating_point and not others and is_whole
            guards.append(storage[storage.numel() - size :].view(kind if has_elements else torch.uint8))
        return guards

    def restore(self) -> None:
        """Restore the contents that launches have changed."""
        for storage, before in zip(self.storages, self.before or (), strict=True):
            storage.copy_(before)

    def run(self, stored: StoredConfig) -> None:
        """Call the pre_hook of a config and launch with the config; in the interpreter in a fork.

        Raises:
            ForkCrashedError: the launch ended the fork.
        """
        call = self._prepared.get(stored)
        if call is None:
            call = partial(self._prepare(stored), False)
            if is_interpreted() and not any(storage.is_cuda for storage in self.storages):
                call = partial(run_forked, call)
            self._prepared[stored] = call
        call()

    def compile(self, stored: StoredConfig) -> Any:
        """Compile a config without launching it, and return Triton's compiled kernel."""
        return self._prepare(stored)(True)

    def _prepare(self, stored: StoredConfig) -> Callable[[bool], Any]:
        """Return a function that launches a config, or only compiles it."""
        import triton

        launch_class = self.launch_class
        autotuner = live_kernel(launch_class)
        candidate = launch_class.candidate(stored)
        if candidate is None or candidate.grid is None:
            raise ReplayError(f"{launch_class.kernel.text}: no grid is known for {stored.label}")
        grid = candidate.grid
        args = list(with_tuples({a.name: self.named[a.name] for a in launch_class.arguments if a.is_positional}).values())
        kwargs = with_tuples({a.name: self.named[a.name] for a in launch_class.arguments if not a.is_positional})
        config = _triton_config(Launch(autotuner, args, {**kwargs, "grid": grid}), stored)
        named_arguments = {**kwargs, **config.all_kwargs()}  # of a kernel without an autotuner, the program gives the blocks, too
        named, hook = {**with_tuples(self.named), **named_arguments}, config.pre_hook
        run = _triton_run(autotuner.fn) if launch_class.is_plain else autotuner.fn.run
        device = self.storages[0].device if self.storages else "cpu"

        def call(warmup: bool) -> Any:
            # a kernel that makes descriptors needs memory, whose allocator the program's host code sets
            triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device=device))
            if hook is not None:
                hook(named)
            return run(*args, grid=grid, warmup=warmup, **named_arguments)

        return call


def _triton_config(launch: Launch, stored: StoredConfig) -> Any:
    """Return a stored config as an object of the author's list, or of the author's pruning, which may make configs."""
    pruned = []
    with suppress(Exception):  # of the author's pruning, which may read values that are not there
        pruned = launch.pruned(by_model=False)
    config = to_triton_configs([*pruned, *launch.autotuner.configs], [stored]).get(stored)
    if config is None:
        reason = "its pre_hook is unknown here, as the author's list and pruning do not make it without the program"
        raise ReplayError(f"{launch.name.text}: {stored.label}: {reason}")
    return config


def _triton_run(kernel: Any) -> Callable[..., Any]:
    """Return Triton's own `run` of a kernel, because a capture has the arguments that a subclass of the program adds."""
    kinds = [kind for kind in type(kernel).__mro__ if kind.__module__.startswith("triton.") and "run" in vars(kind)]
    return partial(vars(kinds[0])["run"], kernel) if kinds else kernel.run


def make_replay(launch_class: LaunchClass, folder: Path, device: str, seed: int) -> Replay:
    """Make a class's arguments: indices as captured, data from the sample or the statistics; on device `meta` without values."""
    storages = []
    has_guard = launch_class.is_plain and device not in ("cpu", "meta")  # the interpreter checks accesses
    guards = [values.behind + has_guard * _GUARD_BYTES for values in launch_class.storages]
    if device != "meta" and (problem := missing_values(launch_class, folder)):
        raise ReplayError(problem)
    kept = _read_values(folder / VALUES) if device != "meta" else {}
    for number, values in enumerate(launch_class.storages):
        tensors = views(launch_class.arguments, number)
        begin, end = span(tensors)
        if device == "meta":
            storages.append(torch.empty(_aligned(begin) + end - begin + guards[number], dtype=torch.uint8, device=device))
            continue
        if values.kept == "missing" and any(tensor.holds_integers for tensor in tensors):
            raise ReplayError(f"{launch_class.label}: index values were not kept: capture again, with more --max-bytes")
        storages.append(_storage(kept.get(f"storage.{number}"), values, tensors, device, seed + number, guards[number]))
    return Replay(launch_class, live_arguments(launch_class, storages), storages, guards)


def live_arguments(launch_class: LaunchClass, storages: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the arguments of a class by name, tensors as views of its storages."""
    return {a.name: _live(a, launch_class, storages) for a in launch_class.arguments}


def _aligned(begin: int) -> int:
    """Return the offset of a storage's first byte that gives pointers the alignment that they had in the program."""
    return begin % _BASE_ALIGNMENT


@cache
def _read_values(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    try:
        return dict(load_file(path)) if path.is_file() else {}
    except Exception as error:  # SafetensorError, OSError
        raise ReplayError(f"{path}: {first_line(error)}") from error


def _storage(
    kept: torch.Tensor | None, about: KeptValues, tensors: Sequence[TensorLayout], device: str, seed: int, guard_bytes: int
) -> torch.Tensor:
    """Return a storage with the kept bytes, repeated, or with normal values that have the captured statistics."""
    begin, end = span(tensors)
    size = _aligned(begin) + end - begin + guard_bytes
    count = end - begin + about.behind
    whole: torch.Tensor = shared_bytes(size) if device == "cpu" else torch.zeros(size, dtype=torch.uint8, device=device)
    values = whole[_aligned(begin) : _aligned(begin) + count]
    if kept is not None and kept.numel():
        sizes = [step * tensor.element_bytes for tensor in tensors for step in tensor.stride]
        row = max((size for size in sizes if 0 < size <= kept.numel()), default=1)
        sample = (kept[: kept.numel() // row * row] if kept.numel() < count else kept).to(device)  # a row keeps its columns
        repeats = -(-count // sample.numel())
        values.copy_(sample.repeat(repeats)[:count] if repeats > 1 else sample[:count])
    elif count and (known := about.statistics):
        source = torch.Generator(device).manual_seed(seed)  # on the CPU, 300 million values take seconds
        floats = torch.randn(-(-count // tensors[0].element_bytes), generator=source, device=device)
        floats = floats.mul_(known.std).add_(known.mean).clamp_(known.least, known.largest).to(torch_dtype(tensors[0].dtype))
        values.copy_(floats.view(torch.uint8)[:count])
    return whole


def _live(argument: Argument, launch_class: LaunchClass, storages: Sequence[torch.Tensor]) -> Any:
    if argument.tensor is None:
        try:
            return decode_value(argument.value, lambda module, name: _module_of(launch_class, KernelName(module, name)))
        except ValueError as error:
            raise ReplayError(f"{launch_class.label}: {argument.name}: {error}") from error
    tensor = argument.tensor
    begin, _ = span(views(launch_class.arguments, tensor.storage))
    storage = storages[tensor.storage]
    offset = _aligned(begin) + tensor.offset - begin
    kind = torch_dtype(tensor.dtype)
    live = torch.empty(0, dtype=kind, device=storage.device)
    live.set_(storage.untyped_storage(), offset // tensor.element_bytes, tensor.shape, tensor.stride)
    if argument.kind == "descriptor":
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(live, *map(list, argument.block))
    return live
