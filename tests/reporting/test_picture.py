"""The picture of every family's speed-up: an SVG for light and dark pages."""

import re
from pathlib import Path

import pytest
from gate_rows import untimed
from literal_records import literal
from typer.testing import CliRunner

from kerneltune.cli import app
from kerneltune.files import data_root
from kerneltune.records import append
from kerneltune.reporting.pairing import Comparison
from kerneltune.reporting.picture import speedups

DOCS = Path(__file__).parents[2] / "docs"
RECORDED = sorted((data_root("results") / "nvidia_h200").glob("*.jsonl"))


def rows(*ratios: float) -> list[Comparison]:
    return [Comparison(literal(10.0 * ratio), literal(10.0, variant="optimized")) for ratio in ratios]


def test_picture_has_a_line_per_family_with_the_fastest_first() -> None:
    pair = "best-peer", "optimized"
    text = speedups({"slow_<x>": rows(0.5, 0.5), "fast": rows(1.0, 4.0)}, {"slow_<x>": pair, "fast": pair}, "NVIDIA H200")
    assert re.findall(r'text-anchor="end">([^<]*)<', text) == ["fast", "2.00x", "slow &lt;x&gt;", "0.50x"]
    assert "the fastest peer of every case" in text
    assert "@media (prefers-color-scheme: dark)" in text
    points = [float(x) for x in re.findall(r'cx="([\d.]+)"', text)]
    (one,) = re.findall(r'class="one" x1="([\d.]+)"', text)
    assert points[1] < float(one) < points[0]


def test_picture_draws_each_family_with_the_pair_of_its_table(tmp_path: Path) -> None:
    """The training families have no `optimized`: their tables compare `tensorwise`."""
    files = [str(path) for path in RECORDED if path.stem in ("rmsnorm", "swiglu_bwd", "moe_training")]
    picture = tmp_path / "s.svg"
    assert CliRunner().invoke(app, ["report", *files, "--svg", str(picture)]).exit_code == 0
    texts = re.findall(r'class="(?:title|small)" x="8" y="[0-9]+">([^<]*)<', picture.read_text())
    assert texts[0] == "optimized: speed relative to the fastest peer of every case (higher is faster)"
    assert "moe training: tensorwise: speed relative to the fastest peer of every case" in texts


def test_report_prints_the_picture_for_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(next(path for path in RECORDED if path.stem == "rmsnorm").absolute())
    done = CliRunner().invoke(app, ["report", file, "--svg", "-"])
    assert (done.exit_code, done.stdout[:5], done.stdout[-7:]) == (0, "<svg ", "</svg>\n"), done.output
    assert not list(tmp_path.iterdir())


def test_picture_without_a_speed_up_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^no case has a time of both a and b: nothing to draw$"):
        speedups({"family": []}, {"family": ("a", "b")}, "")
    done = CliRunner().invoke(
        app, ["report", str(RECORDED[0]), "--a", "optimized", "--b", "nothing", "--svg", str(tmp_path / "s.svg")]
    )
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("error: b: 'nothing': expected one of ")
    assert not list(tmp_path.iterdir())
    append(tmp_path / "skipped.jsonl", [untimed("skipped")])
    done = CliRunner().invoke(app, ["report", str(tmp_path / "skipped.jsonl"), "--svg", str(tmp_path / "s.svg")])
    assert (done.exit_code, done.stderr) == (2, "error: no case has a time of both optimized and optimized: nothing to draw\n")


def test_readme_picture_equals_that_of_recorded_results(tmp_path: Path) -> None:
    """Make it anew with `kerneltune report results/nvidia_h200/*.jsonl --svg docs/speedup.svg`."""
    done = CliRunner().invoke(app, ["report", *map(str, RECORDED), "--svg", str(tmp_path / "speedup.svg")])
    assert done.exit_code == 0, done.output
    assert (DOCS / "speedup.svg").read_text() == (tmp_path / "speedup.svg").read_text()
