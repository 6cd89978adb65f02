"""Ctrl-C and SIGTERM stay Python's while kernels are compiled in its process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from started import environment

COMPILE = """
import ctypes, signal
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kerneltune.interrupts import hear_interrupts
from kerneltune.ops.stream import _stream

class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("rest", ctypes.c_char * 512)]

def handlers():
    found = [Action(), Action()]
    for number, action in zip((signal.SIGINT, signal.SIGTERM), found):
        ctypes.CDLL(None).sigaction(int(number), None, ctypes.byref(action))
    return [action.handler for action in found]

signal.signal(signal.SIGTERM, signal.default_int_handler)
hear_interrupts()
python = handlers()
constants = {"READS": 1, "WRITES": 1, "FOLD": 1, "BLOCK": 128}
types = {"src_ptr": "*i32", "dst_ptr": "*i32", "words": "i32"} | dict.fromkeys(constants, "constexpr")
triton.compile(ASTSource(_stream, types, constants), target=GPUTarget("cuda", 90, 32))
print(handlers() == python)
triton.knobs.runtime.jit_post_compile_hook(key="", repr="", fn=None, compile=None, is_manual_warmup=False, already_compiled=False)
print(handlers() == python)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the C library who hears a signal")
def test_python_hears_signals_again_once_triton_says_that_it_has_compiled(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.split() == ["False", "True"], done.stderr


IMPORTS = """
import os, signal, sys, threading, time
from kerneltune.interrupts import interrupts

interrupts.take()
sys.path.insert(0, sys.argv[1])
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    import slow_module
    print("imported", slow_module.whole, flush=True)
    time.sleep(5)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
SLOW_MODULE = """
import time
try:
    time.sleep(1)
    whole = True
except BaseException:
    whole = False
"""


def test_an_interrupt_within_an_import_waits_for_its_end(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    done = subprocess.run([sys.executable, "-c", IMPORTS, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() in (["imported", "True", "interrupted"], ["interrupted"]), done.stderr
    assert "False" not in done.stdout
    assert done.returncode == 0


def test_an_interrupt_that_a_package_swallows_ends_the_command_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
        "from versus_jobs import OPS\n"
    )
    command = [sys.executable, "-m", "kerneltune", "--plugin", str(tmp_path / "swallows.py"), "ops"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 130
    assert done.stderr in ("interrupted\n", "")
