"""The examples that measure training: computations without a GPU, and arguments."""

from pathlib import Path

import pytest

from kerneltune.kernel_lib.groups import aligned_size
from kerneltune.spec import Case


@pytest.fixture(autouse=True)
def example_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))


def test_times_of_kernels_are_added_up_by_kind_of_name() -> None:
    from model_steps import by_kind

    times = by_kind([("_grouped_gemm", 2.0), ("triton_poi_fused_grouped_mm", 1.0), ("nvjet_tst", 4.0), ("unknown", 0.5)])
    assert (times["expert products"], times["fused by the compiler"], times["dense products"]) == (2.0, 1.0, 4.0)
    assert (times["other"], times["all"]) == (0.5, 7.5)


def test_model_steps_of_an_unknown_model_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    from model_steps import main

    with pytest.raises(SystemExit, match="2"):
        main(["gpt", "bf16"])
    assert "qwen3-30b-a3b" in capsys.readouterr().err


def test_model_steps_cast_twice_without_a_recipe_of_fresh_scales_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from model_steps import main

    with pytest.raises(SystemExit, match="2"):
        main(["phi-3.5-moe", "delayed", "--cast-twice"])
    assert "--cast-twice: expected with tensorwise or rowwise, not delayed" in capsys.readouterr().err


def test_memory_text_is_a_table_of_kept_bytes() -> None:
    from moe_memory import Memory, memory_text

    kept = {"bf16": Memory(470_000_000, 0, 2_000_000_000), "tensorwise, cached": Memory(235_400_000, 1_880_000_000, 900_000_000)}
    assert memory_text(kept) == (
        "                    kept MB  workspace MB  peak MB\n"
        "bf16                    470             0     2000\n"
        "tensorwise, cached      235          1880      900\n"
    )


@pytest.mark.gpu
def test_memory_kept_for_the_backward_pass_is_less_in_fp8() -> None:
    from moe_memory import step_memory

    M, K, E, N = 32768, 2048, 8, 1408
    case = Case("up", (("M", M), ("K", K), ("N", N), ("E", E)), "bfloat16", "fp8", (("groups", "balanced"),))
    kept = {name: memory.kept / 1e6 for name, memory in step_memory(case).items()}
    cast = aligned_size(M, E) * K  # of aligned groups
    assert kept["bf16"] == pytest.approx(2 * M * K / 1e6, abs=1)
    assert kept["tensorwise, cached"] == pytest.approx(cast / 1e6, abs=1)
    assert kept["tensorwise"] == pytest.approx((cast + E * K * N) / 1e6, abs=1)
