"""torch.compile as operators are compared with it."""

import torch

from kerneltune.kernel_lib.compiled import call_compiled


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x.float() * by


def test_more_cases_than_torch_compiles_of_one_function_come_back_in_turns() -> None:
    cases = [(size, by) for size in range(1, 7) for by in (2.0, 3.0)]
    assert len(cases) > torch._dynamo.config.recompile_limit
    for _ in range(2):
        for size, by in cases:
            assert call_compiled(scaled, (torch.ones(size, dtype=torch.bfloat16),), by).tolist() == [by] * size
