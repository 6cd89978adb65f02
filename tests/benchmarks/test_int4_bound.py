"""The bound of `int4_fp8_gemm` on an H200, and the figures of the notes that come from it."""

import int4_bound as script
import pytest
from doc_blocks import ROOT


def test_bound_is_the_longer_of_memory_and_work_after_launches_and_cast() -> None:
    few = [script.bound_us(16, 28672, 4096, overlap) for overlap in (1, 0)]
    assert few == [pytest.approx(3 + 1.1 + 14.8, abs=0.05)] * 2
    assert script.bound_us(128, 28672, 4096, 1) == pytest.approx(3 + 1.1 + 23.1 + 64 * 108.6 / 1755, abs=0.05)
    assert script.bound_us(96, 28672, 4096, 0) == script.bound_us(128, 28672, 4096, 0)
    many = [script.bound_us(128, 28672, 4096, overlap) for overlap in (0, 0.1, script.OVERLAP)]
    assert many[0] - many[1] == pytest.approx(0.1 * 23.1, abs=0.01)
    assert many[1] - many[2] == pytest.approx(0.3 * 23.1, abs=0.01)


@pytest.mark.parametrize("row", ["the bound, with the overlap that was measured", "`int4_fp8_gemm`"])
def test_figures_of_the_notes_are_those_of_the_bound(row: str) -> None:
    of_tokens = script.table(script.recorded())[row]
    line = " | ".join([row, *(f"{ratio:.2f}x" for ratio in of_tokens.values())])
    assert f"| {line} |" in (ROOT / "docs" / "notes" / "int4.md").read_text(encoding="utf-8").splitlines()
