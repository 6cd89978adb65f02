"""Start a program, and find facts about the program that is captured or served: its GPU, its packages, a capture of its stream.

The module asks the torch and triton that the program has loaded, and imports neither.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

from kerneltune import device

log = logging.getLogger("kerneltune.adopt")


@cache
def warn_once(text: str) -> None:
    """Log a warning, once in a process."""
    log.warning("kerneltune: %s", text)


LAUNCH_FAILURES = frozenset(("OutOfResources", "PTXASError", "CompilationError"))
"""Errors by which a config cannot run here, although another config may run."""
_HOOK = str(Path(__file__).resolve().parent / "site")
"""Folder of the start-up hook."""


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU."""
    triton = sys.modules.get("triton")
    knobs: Any = getattr(triton, "knobs", None)
    return bool(knobs.runtime.interpret) if knobs is not None else device.wants_interpreter()


def device_slug() -> str:
    """Return the GPU's name as a folder; `interpreter` where kernels are interpreted.

    Because a program may fork before it starts CUDA, until then the driver's GPUs stand for the GPU that will be used. The name
    is empty if the driver knows no GPU, or GPUs of several models.
    """
    torch: Any = sys.modules.get("torch")  # torch may be imported later
    if is_interpreted():
        return device.INTERPRETER
    is_started = torch is not None and torch.cuda.is_initialized()
    return device.slug(torch.cuda.get_device_name() if is_started else device.only_model())


def has_several_models() -> bool:
    """Return whether this process sees GPUs of several models; False until it starts CUDA."""
    torch: Any = sys.modules.get("torch")
    if torch is None or is_interpreted() or not torch.cuda.is_initialized():
        return False
    return len(set(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))) > 1


def main_name(module: str | None) -> str:
    """Return the name of a module; `__main__` for the program's file, also for its other name in multiprocessing's workers.

    A function that `exec` has made in a dict has no module.
    """
    return "__main__" if module == "__mp_main__" else module or "exec"


def values_of_module(module: str) -> dict[str, Any]:
    """Return the globals of an imported module without running its code; empty for a module that is not imported."""
    imported = sys.modules.get(module)
    return dict(vars(imported)) if isinstance(imported, ModuleType) else {}


def attribute(held: Mapping[str, Any], name: str) -> Any:
    """Return the object of a qualified name among a module's values, None for none."""
    first, *others = name.split(".")
    return reduce(lambda owner, part: getattr(owner, part, None), others, held.get(first))


def version_of(module: str) -> str:
    """Return `__version__` of a module's package; empty without a version."""
    package = sys.modules.get(module.partition(".")[0])
    version = getattr(package, "__version__", "")
    return version if isinstance(version, str) else ""


def package_versions(module: str) -> dict[str, str]:
    """Return the versions of Python, of triton, of torch and of the package that holds a module."""
    packages = {"triton": version_of("triton"), "torch": version_of("torch"), "package": version_of(module)}
    return {"python": python_version(), **packages}


def _current_folder() -> str:
    """Return the folder of this process; the root folder where the program has removed its folder."""
    try:
        return os.getcwd()
    except OSError:
        return os.sep


_FIRST_FOLDER = _current_folder()
"""Folder of this process when this module was imported: the program may leave the folder that its relative paths start from."""


def import_folders() -> tuple[str, ...]:
    """Return the folders that the program imports from, without the folder of our start-up hook.

    A relative path is given as a folder below the first and below the present folder of the process.
    """
    starts = dict.fromkeys((_FIRST_FOLDER, _current_folder()))
    folders = (os.path.normpath(os.path.join(start, entry)) for entry in sys.path for start in starts)
    return tuple(dict.fromkeys(folder for folder in folders if folder != _HOOK))


def python_version() -> str:
    """Return the version of Python whose bytecode this process has."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def is_capturing() -> bool:
    """Return whether the current CUDA stream is being captured into a graph."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def has_compiled() -> bool:
    """Return whether torch.compile has compiled a part of the program in this process."""
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("frames", {}).get("ok"))


_DROPPING = Lock()


def drop_failed(choices: list[Any], failed: Any, error: Exception) -> bool:
    """Remove the first choice of a launch, which fails to launch; return whether this thread removed the choice.

    Threads may fail with a choice at once. The error is raised if no other choice is left.
    """
    with _DROPPING:
        if choices[0] is not failed:
            return False
        if len(choices) == 1:
            raise error
        del choices[0]
        return True


def run_program(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program with more variables in its environment, and return its exit code, 128 + N if signal N ended it.

    The program gets Ctrl-C and decides how to react; SIGTERM is passed on to the program.
    """
    if not command:
        raise ValueError("program: none: expected a program behind --, like: -- python train.py")
    if shutil.which(command[0]) is None:
        hint = f": did you mean -- python {command[0]}?" if command[0].endswith(".py") else ""
        raise ValueError(f"program: {command[0]!r}: not found, or not executable: expected a file or a command on PATH{hint}")
    present = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    # the start-up hook first, this package last
    path = os.pathsep.join([_HOOK, *present, str(Path(__file__).resolve().parents[2])])
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(command, env=os.environ | environment | {"PYTHONPATH": path})
    except OSError as error:
        raise ValueError(f"program: {command[0]!r}: {error.strerror}") from error
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, _frame: process.send_signal(number))
        code = process.wait()
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    return code if code >= 0 else 128 - code
