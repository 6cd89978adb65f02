"""Pictures for a pull request: their names, that they are pictures, and that they are the same each time."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from literal_records import literal
from typer.testing import CliRunner

from kerneltune.cli import app
from kerneltune.files import data_root
from kerneltune.records import load
from kerneltune.reporting.naming import short_commit
from kerneltune.reporting.pictures import draw

RECORDED = data_root("results") / "nvidia_h200" / "rmsnorm.jsonl"
PAIR = ("baseline", "optimized")


def one_type() -> list[Any]:
    return [record for record in load(RECORDED) if record.dtype == "bfloat16"]


def test_svg_is_the_same_for_the_same_records_and_says_what_it_shows() -> None:
    first, again = (draw(one_type(), PAIR, "svg") for _ in range(2))
    assert list(first) == ["rmsnorm_ceiling", "rmsnorm_peers", "rmsnorm_bandwidth"]
    assert first == again
    text = first["rmsnorm_ceiling"].decode()
    for words in (
        "rmsnorm_fwd · fp8 · bfloat16",
        "16384×4096",
        "max-autotune",
        "% of the ceiling",
        "NVIDIA H200, driver 580.159.04",
    ):
        assert words in text
    assert len(first["rmsnorm_ceiling"]) < 200_000


def test_png_is_a_picture() -> None:
    records = [record for record in one_type() if record.op == "rmsnorm_bwd"]
    assert all(content.startswith(b"\x89PNG") for content in draw(records, PAIR, "png").values())


def test_every_family_has_pictures_of_its_own() -> None:
    records = [
        literal(us, variant=variant, op=family, family=family, pct_ceiling=50.0)
        for family in ("casts", "norms")
        for us, variant in zip((9.0, 5.0), PAIR, strict=True)
    ]
    names = ("ceiling", "peers", "bandwidth")
    assert list(draw(records, PAIR, "svg")) == [f"{family}_{name}" for family in ("casts", "norms") for name in names]


def test_long_titles_and_many_variants_stay_within_the_picture() -> None:
    variants = [f"a_variant_with_a_long_name_{nth}" for nth in range(17)]
    records = [
        literal(
            5.0 + nth, variant=variant, pct_ceiling=50.0, options={"groups": groups, "product": f"of_{groups}"}, family="casts"
        )
        for groups in ("balanced", "zipf")
        for nth, variant in enumerate(variants)
    ]
    text = draw(records, PAIR, "svg")["casts_ceiling"].decode()
    assert "rmsnorm_fwd · fp8 · bfloat16 ·<" in text
    width = float(re.findall(r'viewBox="0 0 ([\d.]+)', text)[0])
    legend = [float(x) for x in re.findall(r'x="([\d.]+)"[^>]*>a_variant_with_a_long_name_\d+<', text)]
    assert len(legend) == len(variants)
    assert max(legend) + 150 < width


def test_a_chart_of_one_size_says_which() -> None:
    records = [literal(10.0, variant=variant, gbps=5000.0, family="casts") for variant in PAIR]
    assert ">50<" in draw(records, PAIR, "svg")["casts_bandwidth"].decode()


def test_charts_without_data_are_left_out() -> None:
    records = [record for record in one_type() if record.variant == "baseline" and record.op == "rmsnorm_bwd"]
    assert list(draw(records, PAIR, "svg")) == ["rmsnorm_ceiling", "rmsnorm_bandwidth"]
    with pytest.raises(ValueError, match=r"^no timed records to draw$"):
        draw([record for record in one_type() if record.time_us is None], PAIR, "svg")


def test_missing_matplotlib_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["report", str(RECORDED), "--results", str(tmp_path), "--svg", str(tmp_path / "pictures")])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "error: pictures need matplotlib: pip install 'kerneltune[report]'"
    assert not (tmp_path / "pictures").exists()


def test_the_readme_picture_is_that_of_the_recorded_results() -> None:
    """Make it anew with `kerneltune report --dtype bfloat16 --svg docs results/nvidia_h200/rmsnorm.jsonl`."""
    text = (Path(__file__).parents[2] / "docs" / "rmsnorm_ceiling.svg").read_text()
    timed = [record for record in one_type() if record.time_us is not None]
    for name in ("device", "driver", "triton", "commit"):
        assert " and ".join(dict.fromkeys(short_commit(getattr(record, name)) for record in timed)) in text
