"""Run a program with the start-up hook in it and in all Python processes that it starts."""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_program(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program with more variables in its environment; returns its exit code, 128 + N where signal N ended it.

    Ctrl-C reaches the program, which decides what becomes of it; SIGTERM is passed on.

    Raises:
        ValueError: the program cannot be started.
    """
    require_program(command)
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(command, env=os.environ | environment | {"PYTHONPATH": python_path()})
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


def require_program(command: Sequence[str]) -> None:
    """Fail before anything is written where a program cannot be found.

    Raises:
        ValueError: no program, or a program that is neither a file nor on PATH.
    """
    if not command:
        raise ValueError("program: none: expected a program behind --, like: -- python train.py")
    if shutil.which(command[0]) is None:
        hint = f": did you mean -- python {command[0]}?" if command[0].endswith(".py") else ""
        raise ValueError(f"program: {command[0]!r}: not found, or not executable: expected a file or a command on PATH{hint}")


def python_path() -> str:
    """Return a PYTHONPATH whose first folder holds the start-up hook, and whose last folder holds this package."""
    package = Path(__file__).resolve().parents[1]
    present = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.pathsep.join([str(package / "adopt" / "site"), *present, str(package.parent)])
