"""torch.compile as operators are compared with it."""

import pickle

import pytest
import torch

from kerneltune.kernel_lib.compiled import DEFAULT, EAGER, call_compiled, torch_run


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x.float() * by


def test_call_compiled_beyond_the_recompile_limit_gives_right_results() -> None:
    cases = [(size, by) for size in range(1, 7) for by in (2.0, 3.0)]
    assert len(cases) > torch._dynamo.config.recompile_limit
    for _ in range(2):
        for size, by in cases:
            assert call_compiled(scaled, (torch.ones(size, dtype=torch.bfloat16),), by).tolist() == [by] * size


def scaled_and_shifted(x: torch.Tensor, shift: torch.Tensor | None, by: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x * by, x if shift is None else x + shift


@pytest.mark.parametrize("mode", [EAGER, DEFAULT])
def test_torch_run_passes_inputs_by_name_and_names_results(mode: str) -> None:
    run = pickle.loads(pickle.dumps(torch_run(scaled_and_shifted, "x shift", "scaled shifted", "by")))
    x = torch.arange(3.0)
    for shift, want in ((None, x), (torch.ones(3), x + 1)):
        results = run(mode, {"x": x, "shift": shift, "by": 2.0, "unused": 1}, None)
        assert list(results) == ["scaled", "shifted"]
        assert torch.equal(results["scaled"], x * 2)
        assert torch.equal(results["shifted"], want)


def test_torch_run_with_fewer_results_than_names_raises() -> None:
    with pytest.raises(ValueError, match="zip"):
        torch_run(scaled_and_shifted, "x shift", "scaled", "by")(EAGER, {"x": torch.ones(1), "shift": None, "by": 2.0}, None)
