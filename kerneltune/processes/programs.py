"""Run programs to their end: any command, git, Python code beside another copy of this package; tell the commit that runs."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_BOUND = """import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != {parent}:
        os._exit(1)
"""


def run_to_end(
    command: Sequence[str], *, timeout_s: float | None = None, must_succeed: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end and return its output. An interrupt kills it with all processes that it started.

    Args:
        command: the program and its arguments.
        timeout_s: seconds after which the program is killed.
        must_succeed: another exit code than 0 is an error, with the last line that the program says.
        options: options of subprocess.Popen.
    """
    name = Path(command[0]).name
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        with subprocess.Popen(command, start_new_session=True, **pipes | options) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except BaseException:  # an interrupt as well
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{name} took longer than {error.timeout:g} s") from None
    except OSError as error:
        raise ValueError(f"cannot run {command[0]}: {error.strerror}") from error
    if must_succeed and process.returncode:
        raise ValueError(f"{name} says: {(os.fsdecode(errors).strip().splitlines() or ['nothing'])[-1]}")
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def git(folder: Path, *arguments: str) -> bytes:
    """Return the output of git in a folder."""
    output: bytes = run_to_end(["git", "-C", str(folder), *arguments], must_succeed=True).stdout
    return output


@functools.cache
def commit(root: Path = Path(__file__).parents[2]) -> str:
    """Return the commit of the source that runs, with `+` where the package differs from it.

    Outside a checkout of this package, return the commit that `git archive` wrote into `.git_archival.txt`, or `unknown`. An
    installation below the checkout of another project counts as outside.

    root: the folder that holds the package.
    """
    with suppress(ValueError):  # no git, or no checkout
        top, head = git(root, "rev-parse", "--show-toplevel", "--short", "HEAD").decode().splitlines()
        if Path(top) == root.resolve():
            return head + ("+" if git(root, "status", "--porcelain", "kerneltune") else "")
    archived = root / ".git_archival.txt"
    node = archived.read_text().strip() if archived.exists() else ""
    return "unknown" if not node or "$" in node else node


def run_bound(code: str, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python code in a fresh process, with the package of the folder `cwd`, and return its errors and exit code.

    The folders of PYTHONPATH are searched after `cwd`, because they may hold the dependencies. The process is killed as soon as
    the calling thread ends, also by SIGKILL (Linux).
    """
    command = [sys.executable, "-c", _BOUND.format(parent=os.getpid()) + code, *arguments]
    env = {**env, "PYTHONPATH": os.pathsep.join([str(cwd), *filter(None, [env.get("PYTHONPATH")])])}
    return run_to_end(command, cwd=cwd, env=env, stdout=subprocess.DEVNULL, text=True)
