"""Start capture or serving in a process: by environment variables, which subprocesses inherit, or by `install`.

In a user's program this module alone changes Triton: it replaces `Autotuner.run` and `Autotuner.__init__` as soon as the program
imports them. The replaced methods see subclasses that call `super().run`, and kernels that were decorated before. For kernels
without an autotuner it replaces `JITFunction.run`, and in the interpreter `InterpretedFunction.run`.
"""

import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

TARGET, INTERPRETER, COMPILER = "triton.runtime.autotuner", "triton.runtime.interpreter", "triton.runtime.jit"
_MARK = "_kerneltune_original"


class _Waiting(importlib.abc.MetaPathFinder):
    """Wait for a module to be imported, then act on it once."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Let the other finders find the module, and let its loader act on the module after its execution."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                self._act(module)
            except Exception as error:  # the program imports this module: it must not notice
                _say_not_started(error)

        loader.exec_module = exec_module
        return spec


def _when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Act on a module now if it is loaded, else as soon as the program has imported it."""
    module = sys.modules.get(name)
    if module is not None:
        act(module)
    else:
        sys.meta_path.insert(0, _Waiting(name, act))


def replace_method(owner: type[Any], name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method by `make(original)`; `make` gets Triton's own method even if the method was replaced before."""
    present = getattr(owner, name)
    original = getattr(present, _MARK, present)
    replaced: Any = functools.update_wrapper(make(original), original)  # torch.compile reads the signature
    setattr(replaced, _MARK, original)
    setattr(owner, name, replaced)


CAPTURE, CAPTURE_OPTIONS = "KERNELTUNE_CAPTURE", "KERNELTUNE_CAPTURE_OPTIONS"
ADOPT, ADOPT_OPTIONS = "KERNELTUNE_ADOPT", "KERNELTUNE_ADOPT_OPTIONS"
"""Environment variables: a folder, and as JSON the options of `capture` or of `install`."""
STARTED = "KERNELTUNE_STARTED"
"""Environment variable: the file by which a process shows that it has found this package."""
MISS_POLICIES = ("author", "nearest", "default", "error")
"""Choices of the config of launches that were not tuned."""
_PATCHED = {TARGET: "Autotuner", INTERPRETER: "InterpretedFunction", COMPILER: "JITFunction"}
"""Modules of Triton, and their classes whose methods are replaced."""
_MISS_BYTES, _MOST_MISSES = 64 << 20, 16
"""Most bytes of values, and most classes of each kernel, that a served process records: a class takes the host milliseconds."""

_state: dict[str, Any] = {}  # of this process: whether it has `started` from the environment, its `recorder`, its `server`


def start_from_environment() -> None:
    """Start the capture or the serving that the environment asks for; a failure costs one line on standard error."""
    if _state.get("started"):
        return
    _state["started"] = True
    if os.environ.get(STARTED):
        with suppress(OSError):  # the command has ended before its program
            Path(os.environ[STARTED]).touch()
    if os.environ.get(CAPTURE) or os.environ.get(ADOPT):
        _say_on_standard_error()
    try:
        for name in (CAPTURE, ADOPT):  # a subprocess may start in another folder
            if os.environ.get(name):
                os.environ[name] = os.path.abspath(os.environ[name])
        if os.environ.get(CAPTURE):
            capture(Path(os.environ[CAPTURE]), **_options(CAPTURE_OPTIONS))
        elif os.environ.get(ADOPT):
            install(os.environ[ADOPT], **_options(ADOPT_OPTIONS))
    except Exception as error:  # wrong options, or a package that this environment lacks
        _say_not_started(error)


def _options(variable: str) -> dict[str, Any]:
    """Return the options that an environment variable holds as JSON; none if it is not set."""
    text = os.environ.get(variable) or "{}"
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise ValueError(f"{variable}: {text!r}: expected options as a JSON object") from None


def _say_on_standard_error() -> None:
    """Write warnings to the process's own standard error, past the handlers and the `sys.stderr` that the program sets up.

    A program that logs to standard output would print them there.
    """
    log, handler = logging.getLogger("kerneltune.adopt"), logging.StreamHandler(sys.__stderr__)
    handler.setLevel(logging.WARNING)
    log.addHandler(handler)
    log.propagate = False


def _say_not_started(error: Exception) -> None:
    """Log one line about a failed start; the program runs as without kerneltune."""
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        reason += f": install kerneltune with its dependencies for {sys.executable}"
    logging.getLogger("kerneltune.adopt").error("kerneltune: not started: %s", reason)


def capture(root: Path, **options: Any) -> None:
    """Record the launches of this process from now on; `options` are the arguments of `Recorder`."""
    root = root.absolute()  # the program may change its folder

    def begin(autotuning: ModuleType) -> None:
        from kerneltune.adopt.recorder import Recorder

        _forget_kernels()
        _state["recorder"] = recorder = Recorder(root, **options)
        _patch(autotuning, recorder)

    _when_imported(TARGET, begin)


def install(
    folder: str | Path,
    *,
    miss: str = "author",
    manifest: str = "",
    misses: str | Path | None = "",
    counts: str | Path | None = None,
) -> None:
    """Serve the tuned configs of a capture folder in this process from now on.

    Kernels that were decorated before are served as well.

    Args:
        folder: folder that `kerneltune tune` has written.
        miss: policy for launches that were not tuned: `author` (the author's autotuner), `nearest` (the nearest tuned launch),
            `default` (the author's first config) or `error`.
        manifest: SHA-256 of the table, or its beginning; another table is refused.
        misses: folder that untuned launches are recorded into, as a capture; `misses` in `folder` if empty, None for none.
        counts: folder that each process writes its counts of launches into; None to count in memory.

    Raises:
        ValueError: the folder holds no table, or none that the manifest names, or the policy is unknown.
    """
    root = Path(folder).absolute()  # the program may change its folder
    missed, counted = (Path(path).absolute() if path else None for path in (misses, counts))
    if not (root / "served").is_dir():
        raise ValueError(f"{root}: no tuned configs: expected a folder that `kerneltune tune` wrote")
    if miss not in MISS_POLICIES:
        raise ValueError(f"miss: {miss!r}: expected one of {', '.join(MISS_POLICIES)}")
    if manifest:
        from kerneltune.adopt.table import check_manifest

        check_manifest(root, manifest)

    def begin(autotuning: ModuleType) -> None:
        from kerneltune.adopt.counters import Counters
        from kerneltune.adopt.recorder import Recorder
        from kerneltune.adopt.serving import Server

        _forget_kernels()
        missing = None
        if misses is not None:
            missing = Recorder(missed or root / "misses", max_bytes=_MISS_BYTES, most_classes=_MOST_MISSES)
        counters = Counters(counted)
        prepared = _prepared(root, autotuning)
        server = Server(root, miss, manifest, missing, prepared, counters)
        _state["server"] = server
        has_plain = any(b'"is_plain": true' in path.read_bytes() for path in (root / "served").glob("*.json"))
        _patch(autotuning, server, has_plain)  # a launch of any kernel costs a look-up
        for value in gc.get_objects():  # decorated before: torch.compile is to see one config of each
            if issubclass(type(value), autotuning.Autotuner):  # by type, because `__class__` may run the object's code
                server.on_new_autotuner(value)

    _when_imported(TARGET, begin)


def _prepared(root: Path, autotuning: ModuleType) -> Thread | None:
    """Put the compiled kernels of a tuned folder where Triton looks for them; return a thread for the rest, if there is any."""
    from kerneltune.adopt.ahead import FOLDER, copy_entries, prepare

    knobs: Any = getattr(autotuning, "knobs", None)
    if knobs is None or knobs.runtime.interpret or not knobs.cache.dir:
        return None
    is_cache_new = False
    try:
        is_cache_new = copy_entries(root / FOLDER, Path(knobs.cache.dir)) > 0
    except OSError as error:
        logging.getLogger("kerneltune.adopt").warning("kerneltune: compiled kernels are not used: %s", error)
    return Thread(target=prepare, args=(root, is_cache_new), name="kerneltune-ahead", daemon=True)


def server() -> Any:
    """Return the Server of this process, None where nothing is served."""
    return _state.get("server")


def recorder() -> Any:
    """Return the Recorder of this process, None where nothing is captured."""
    return _state.get("recorder")


def uninstall() -> None:
    """Put Triton's own methods back, and the authors' lists; start nothing that still waits for an import."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Waiting)]
    for name, kind in _PATCHED.items():
        owner = getattr(sys.modules.get(name), kind, None)
        for method in ("run", "__init__") if owner is not None else ():
            present = getattr(owner, method)
            setattr(owner, method, getattr(present, _MARK, present))
    _forget_kernels()
    _state.clear()


def _forget_kernels() -> None:
    """Drop the attributes of an earlier capture or serving from autotuners, and restore their authors' lists."""
    from kerneltune.adopt import kernels

    for autotuner in kernels.holders:
        served = autotuner.__dict__.pop(kernels.SERVED_ATTRIBUTE, None)
        if served is not None and autotuner.configs is served.shown:
            autotuner.configs = served.configs
        autotuner.__dict__.pop(kernels.RECORDED_ATTRIBUTE, None)
    kernels.holders.clear()


def _patch(autotuning: ModuleType, by: Any, has_plain: bool = True) -> None:
    """Let a Recorder or a Server replace `Autotuner.run`, and note each autotuner that the program makes.

    has_plain: whether to replace `run` of kernels without an autotuner, too, as soon as Triton's modules are imported.
    """

    def make_init(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(autotuner: Any, /, *args: Any, **kwargs: Any) -> None:
            original(autotuner, *args, **kwargs)
            by.on_new_autotuner(autotuner)

        return init

    def patch_kernels(module: ModuleType) -> None:
        replace_method(getattr(module, _PATCHED[module.__name__]), "run", by.make_plain_run)

    def skip_package(rules: ModuleType) -> None:
        with suppress(Exception):  # another version of torch
            rules.add(__package__)

    # where a launch breaks a graph, torch.compile would compile our functions, anew for each class
    _when_imported("torch._dynamo.trace_rules", skip_package)
    replace_method(autotuning.Autotuner, "run", by.make_run)
    for name in (INTERPRETER, COMPILER) if has_plain else ():
        _when_imported(name, patch_kernels)
    replace_method(autotuning.Autotuner, "__init__", make_init)
