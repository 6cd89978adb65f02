"""The GPU of a program is found without starting CUDA."""

import pytest
from adopted import run_python

PROGRAM = """
import sys, torch
from types import SimpleNamespace
from kerneltune.adopt import program
driver = {"nvmlInit": lambda: None, "nvmlDeviceGetHandleByIndex": int, "nvmlDeviceGetName": lambda index: "The First GPU"}
sys.modules["pynvml"] = SimpleNamespace(**driver)
torch.cuda.is_initialized = lambda: sys.argv[1] == "started"
torch.cuda.get_device_name = lambda: "NVIDIA H200"
print(program.device_slug())
"""


@pytest.mark.parametrize(
    ("state", "interpret", "slug"),
    [("not started", "0", "the_first_gpu"), ("started", "0", "nvidia_h200"), ("started", "1", "interpreter")],
)
def test_gpu_is_the_drivers_first_until_the_program_starts_cuda(state: str, interpret: str, slug: str) -> None:
    done = run_python(PROGRAM, state, TRITON_INTERPRET=interpret)
    assert done.stdout == f"{slug}\n", done.stderr
