"""The switch under which a check finds what is not written: what it does, and what it costs."""

import subprocess
import sys
from typing import Any

import torch
from started import environment

from kerneltune.measuring import check

POISONED = """
import sys
import torch
from kerneltune.measuring.check import poisoned_memory

plain = torch.get_deterministic_debug_mode()
imported = set(sys.modules)
with poisoned_memory():
    assert torch.empty(1024).isnan().all()
    assert (torch.empty(1024, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
print(torch.get_deterministic_debug_mode() == plain, sorted(set(sys.modules) - imported))
"""


def test_memory_is_poisoned_without_an_import() -> None:
    """torch.use_deterministic_algorithms imports 900 modules, seconds in every process that checks."""
    done = subprocess.run([sys.executable, "-c", POISONED], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.stdout == "True []\n", done.stderr[-2000:]


def test_what_is_compiled_for_a_check_is_not_what_is_timed() -> None:
    """Under the switch that poisons memory, torch compiles other code; without it, compiles again."""
    modes = []

    def backend(graph: Any, _inputs: Any) -> Any:
        modes.append(torch.get_deterministic_debug_mode())
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=backend)
    with check.poisoned_memory():
        double(torch.ones(8))
    mode = torch.get_deterministic_debug_mode()  # 0, but for tests on a GPU, which poison all memory
    torch.set_deterministic_debug_mode(0)
    try:
        double(torch.ones(8))
    finally:
        torch.set_deterministic_debug_mode(mode)
    assert modes == [1, 0]
