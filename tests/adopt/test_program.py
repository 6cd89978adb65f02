"""The GPU of a program is found without starting CUDA."""

import pytest
from adopted import run_python

PROGRAM = """
import os, sys, torch
from types import SimpleNamespace
from kerneltune.adopt import program
names = sys.argv[1:]
driver = {"nvmlInit": lambda: None, "nvmlDeviceGetCount": lambda: len(names)}
driver |= {"nvmlDeviceGetHandleByIndex": int, "nvmlDeviceGetName": names.__getitem__}
sys.modules["pynvml"] = SimpleNamespace(**driver)
torch.cuda.get_device_name = lambda: "NVIDIA H200"
for is_started, interpret in (False, "0"), (True, "0"), (True, "1"):
    torch.cuda.is_initialized = lambda: is_started
    os.environ["TRITON_INTERPRET"] = interpret
    print(repr(program.device_slug()))
"""


@pytest.mark.parametrize(
    ("models", "slug"), [(["The Model", "The Model"], "'the_model'"), (["RTX 3060", "RTX 4090"], "''"), ([], "''")]
)
def test_gpu_slug_is_the_drivers_only_model_until_cuda_is_initialized(models: list[str], slug: str) -> None:
    done = run_python(PROGRAM, *models, TRITON_INTERPRET="0")
    assert done.stdout.split() == [slug, "'nvidia_h200'", "'interpreter'"], done.stderr
