"""The GPU of a program is found without starting CUDA."""

from adopted import run_python

PROGRAM = """
import os, sys, torch
from types import SimpleNamespace
from kerneltune.adopt import program
driver = {"nvmlInit": lambda: None, "nvmlDeviceGetHandleByIndex": int, "nvmlDeviceGetName": lambda index: "The First GPU"}
sys.modules["pynvml"] = SimpleNamespace(**driver)
torch.cuda.get_device_name = lambda: "NVIDIA H200"
for is_started, interpret in (False, "0"), (True, "0"), (True, "1"):
    torch.cuda.is_initialized = lambda: is_started
    os.environ["TRITON_INTERPRET"] = interpret
    print(program.device_slug())
"""


def test_gpu_slug_is_the_drivers_first_until_cuda_is_initialized() -> None:
    done = run_python(PROGRAM, TRITON_INTERPRET="0")
    assert done.stdout.split() == ["the_first_gpu", "nvidia_h200", "interpreter"], done.stderr
