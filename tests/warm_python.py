"""A Python for programs of tests that has imported torch, which takes a new process two seconds; see `python`.

A server imports torch alone and forks for each program. The fork has the arguments, environment, folder and open files of its
caller, and looks for modules as a new process does, `sitecustomize` included. Tests of the start of Python use `sys.executable`.
"""

import array
import atexit
import functools
import gc
import json
import multiprocessing.process
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

_CLIENT = """#!{python} -IS
import array, json, os, signal, socket, sys
words = sys.argv[1:]
if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")) or "PYTHONHASHSEED" in os.environ:
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([words, dict(os.environ), os.getcwd()]).encode("utf-8", "surrogateescape")
server.sendmsg([len(request).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
server.sendall(request)
answers = server.makefile()
pid = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _frame: os.kill(pid, number))
code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def python() -> str:
    """Return the path of a Python whose programs find torch imported; start its server, which ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="kt-python-")
    client, address = Path(folder.name, "python"), f"{folder.name}/socket"
    client.write_text(_CLIENT.format(python=sys.executable, address=address))
    client.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    server = subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert server.stdin
    assert server.stdout
    assert server.stdout.readline() == b"ready\n"
    atexit.register(folder.cleanup)
    atexit.register(server.wait)
    atexit.register(server.stdin.close)
    return str(client)


def _serve(address: str) -> None:
    import torch  # noqa: F401

    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as events:
        listening.bind(address)
        listening.listen()
        events.register(listening, selectors.EVENT_READ)
        events.register(sys.stdin, selectors.EVENT_READ)
        os.write(1, b"ready\n")
        while True:
            for key, _ in events.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is listening:
                    _begin(listening, events)
                else:
                    _end(key, events)


def _begin(listening: socket.socket, events: selectors.BaseSelector) -> None:
    """Fork for a program, tell its caller the process, and watch both."""
    caller, _ = listening.accept()
    length, ancillary, _, _ = caller.recvmsg(8, socket.CMSG_SPACE(12))
    files = array.array("i", ancillary[0][2])
    with caller.makefile("rb") as request:
        words, environment, folder = json.loads(request.read(int.from_bytes(length, "big")).decode("utf-8", "surrogateescape"))
    pid = os.fork()
    if pid == 0:
        for number, file in enumerate(files):
            os.dup2(file, number)
        _run(words, environment, folder)
    for file in files:
        os.close(file)
    caller.sendall(b"%d\n" % pid)
    running = (pid, os.pidfd_open(pid), caller)
    events.register(running[1], selectors.EVENT_READ, running)
    events.register(caller, selectors.EVENT_READ, running)


def _end(key: selectors.SelectorKey, events: selectors.BaseSelector) -> None:
    """Tell the caller how its program has ended; end a program whose caller has gone."""
    pid, file, caller = key.data
    if key.fileobj is caller:
        os.kill(pid, signal.SIGKILL)
        events.unregister(caller)
        return
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    events.unregister(file)
    os.close(file)
    with suppress(KeyError):
        events.unregister(caller)
    with suppress(OSError):
        caller.sendall(b"%d\n" % code)
    caller.close()


def _run(words: list[str], environment: dict[str, str], folder: str) -> None:
    """Run a program in this process as a new process would, and end."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    vars(multiprocessing.process)["ORIGINAL_DIR"] = folder
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", errors="backslashreplace", buffering=1, closefd=False)
    main: Any = ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    for name in ("warm_python", "sitecustomize"):
        sys.modules.pop(name, None)
    is_file = words[0] not in ("-c", "-m")
    first = os.path.dirname(os.path.abspath(words[0])) if is_file else "" if words[0] == "-c" else folder
    path = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [first, *map(os.path.abspath, path), *sys.path[1:]]
    sys.argv = words[:1] + words[2:] if not is_file else words
    code = 0
    try:
        with suppress(ModuleNotFoundError):
            import sitecustomize  # noqa: F401
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            exec(compile(words[1], "<string>", "exec"), vars(main))
        else:
            main.__file__ = os.path.abspath(words[0])
            exec(compile(Path(words[0]).read_bytes(), main.__file__, "exec"), vars(main))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if not isinstance(ended.code, int | None):
            sys.stderr.write(f"{ended.code}\n")
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    finally:
        vars(threading)["_shutdown"]()  # joins threads
        vars(atexit)["_run_exitfuncs"]()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)


if __name__ == "__main__":
    _serve(sys.argv[1])
