"""Training curves: the file, what is wrong with a broken one, and where a report shows them."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from literal_records import literal
from typer.testing import CliRunner, Result

from kerneltune.cli import app
from kerneltune.curves import MOST_POINTS, Curves, load, save, thinned
from kerneltune.records import append
from kerneltune.reporting.page import page
from kerneltune.reporting.payload import Sources, payload
from kerneltune.reporting.tables import curves_table

HEAD = (
    "# title: A small model\n# loss: nats\n# command: python train.py --steps 3\n"
    "# device: NVIDIA H200\n# torch: 2.11.0\n# date: 2026-11-21\n"
)
FIELDS = "expected one line each of title, loss, command, device, torch, date"
GOOD = f"{HEAD}step,bf16,fp8\n0,4.000000,4.100000\n10,2.000000,2.020000\n20,1.000000,1.040000\n"


def written(folder: Path, text: str) -> Path:
    file = folder / "small.csv"
    file.write_text(text)
    return file


def long(steps: int) -> Curves:
    falling = [2.0 + math.exp(-step / 1000) for step in range(steps)]
    values = {"bf16": tuple(falling), "fp8": tuple(loss + 0.01 for loss in falling)}
    return Curves(
        title="Long", loss="nats", command="python train.py", device="NVIDIA H200", torch="2.11.0", date="2026-11-21",
        steps=tuple(range(steps)), values=values,
    )  # fmt: skip


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_a_file_is_read_and_written_again_as_it_was(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD)
    curves = load(file)
    assert (curves.steps, curves.values) == ((0, 10, 20), {"bf16": (4.0, 2.0, 1.0), "fp8": (4.1, 2.02, 1.04)})
    save(tmp_path / "again.csv", curves)
    assert (tmp_path / "again.csv").read_text() == GOOD


def test_final_losses_are_means_of_the_last_fifty_steps_beside_the_first_curve() -> None:
    losses = tuple(9.0 if step < 50 else 2.0 for step in range(100))
    curves = replace(long(100), values={"bf16": losses, "fp8": (*losses[:99], 3.0)})
    assert [(final.name, final.loss) for final in curves.finals] == [("bf16", 2.0), ("fp8", pytest.approx(2.02))]
    assert [final.difference for final in curves.finals] == [0.0, pytest.approx(0.01)]
    assert curves_table(curves).markdown() == (
        "| curve | nats, mean of the last 50 steps | difference to bf16 % |\n"
        "| --- | ---: | ---: |\n"
        "| bf16 | 2.0000 |  |\n"
        "| fp8 | 2.0200 | 1.00 |\n"
    )


def test_points_of_long_trainings_are_means() -> None:
    assert thinned(long(MOST_POINTS))[1] == 1
    curves = replace(long(4 * MOST_POINTS - 1), values={"a": tuple(map(float, range(1, 4 * MOST_POINTS)))})
    points, window = thinned(curves)
    assert (window, points.steps[:2], points.steps[-1]) == (4, (3, 7), 4 * MOST_POINTS - 2)
    assert points.values["a"][:2] == (2.5, 6.5)
    assert points.values["a"][-1] == 4 * MOST_POINTS - 2  # of three steps


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("20,1.000000,1.040000\n", "20,1.000000,1.04"), ":10: '20,1.000000,1.04': truncated, the last line has no end"),
        (("2.020000", "lost"), ":9: fp8: 'lost': expected a finite number above 0"),
        (("2.020000", "nan"), ":9: fp8: 'nan': expected a finite number above 0"),
        (("10,2.000000,2.020000", "10,2.000000"), ":9: line: '10,2.000000': expected 3 cells: step,bf16,fp8"),
        (("10,2.0", "-1,2.0"), ":9: step: '-1': expected a whole number above 0"),
        (("20,1.0", "10,1.0"), ":10: step: '10': expected a whole number above 10"),
        (("step,bf16,fp8", "bf16,fp8"), ":7: heading: 'bf16,fp8': expected step and names of curves, each once"),
        (("step,bf16,fp8", "step,fp8,fp8"), ":7: heading: 'step,fp8,fp8': expected step and names of curves, each once"),
        (("# device: NVIDIA H200\n", ""), ": device: missing: expected a line `# device: …` at the top"),
        (("# device", "# gpu"), ":4: gpu: 'NVIDIA H200': " + FIELDS),
        (("# date: 2026-11-21", "# loss: 2"), ":6: loss: '2': " + FIELDS),
        (("2026-11-21", "today"), ": date: 'today': expected a day, like 2026-11-21"),
        (("# title: A small model", "# title:"), ": title: '': expected words on one line"),
        ((GOOD, ""), ": title: missing: expected a line `# title: …` at the top"),
        ((GOOD, HEAD), ": step: missing: expected a heading and a line per step"),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_line_with_file_line_field_and_value(tmp_path: Path, change: tuple[str, str], error: str) -> None:
    file = written(tmp_path, GOOD.replace(*change))
    result = run(file, "-o", tmp_path / "x.html")
    assert (result.exit_code, result.stderr) == (2, f"error: {file}{error}\n")
    assert not (tmp_path / "x.html").exists()


def test_unreadable_files_are_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "none.csv"
    assert run(missing).stderr == f"error: cannot read {missing}: No such file or directory\n"
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    assert run(tmp_path / "binary.csv").stderr == f"error: cannot read {tmp_path / 'binary.csv'}: not UTF-8\n"


def test_a_report_of_a_results_folder_shows_its_curves_unless_cases_are_selected(tmp_path: Path) -> None:
    append(tmp_path / "nvidia_h200" / "rmsnorm.jsonl", [literal(100.0, family="rmsnorm")])
    (tmp_path / "nvidia_h200" / "curves").mkdir()
    save(tmp_path / "nvidia_h200" / "curves" / "long.csv", long(60))
    report, shown = tmp_path / "report.html", '"title":"Long"'
    assert run("--results", tmp_path, "-o", report).exit_code == 0
    assert "training curves" in report.read_text()
    assert shown in (tmp_path / "report_training.html").read_text()
    assert run("--results", tmp_path, "-o", report, "--op", "rmsnorm_fwd").exit_code == 0
    assert shown not in report.read_text()
    assert run(tmp_path / "nvidia_h200" / "rmsnorm.jsonl", "--results", tmp_path, "-o", report).exit_code == 0
    assert shown not in report.read_text()


def test_pictures_and_markdown_of_curves_alone(tmp_path: Path) -> None:
    result = run(written(tmp_path, GOOD), "--svg", tmp_path, "--png", tmp_path, "--markdown", tmp_path / "pr.md")
    assert result.exit_code == 0, result.output
    svg = (tmp_path / "small.svg").read_text()
    for words in ("A small model", "nats", "fp8 2.3867 (+2.29%)", "difference to bf16", "NVIDIA H200, torch 2.11.0, 2026-11-21"):
        assert words in svg
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "pr.md").read_text().splitlines()
    assert lines[0] == "### A small model"
    assert lines[2].startswith("NVIDIA H200, torch 2.11.0, 2026-11-21: python train.py --steps 3. Losses in `")
    assert lines[7:] == ["| fp8 | 2.3867 | 2.29 |", "", "![small](small.svg)"]


def test_pictures_do_not_replace_each_other(tmp_path: Path) -> None:
    first, second = (written(tmp_path / name, GOOD) for name in "ab" if not (tmp_path / name).mkdir())
    result = run(first, second, "--svg", tmp_path)
    assert (result.exit_code, result.stderr) == (
        2,
        "error: b/small.csv: 'small': expected a file name that no other picture has\n",
    )
    assert not list(tmp_path.glob("*.svg"))


def test_the_picture_in_the_docs_is_that_of_the_recorded_losses() -> None:
    """Make it anew with `kerneltune report results/nvidia_h200/curves/moe_learning.csv --svg docs`."""
    root = Path(__file__).parent.parent
    curves = load(root / "results" / "nvidia_h200" / "curves" / "moe_learning.csv")
    text = (root / "docs" / "moe_learning.svg").read_text()
    base, *others = curves.finals
    assert curves.source in text
    assert f">{base.name} {base.loss:.4f}<" in text
    assert all(f">{final.name} {final.loss:.4f} ({final.difference:+.2%})<" in text for final in others)


def test_a_page_of_long_trainings_stays_small() -> None:
    found = {f"{name}.csv": long(20 * MOST_POINTS) for name in "abcdefgh"}
    shown = payload(Sources([], ("", ""), curves=found))
    assert shown["curves"][0]["window"] == 20
    assert len(shown["curves"][0]["curves"][0]["losses"]) == MOST_POINTS
    assert len(page(shown).encode()) < 2_000_000


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_browser_shows_losses_where_they_end_and_where_they_come_from(tmp_path: Path, width: int, scheme: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    own = shutil.which("chromium") or pytest.skip("needs a Chromium")
    (tmp_path / "x.html").write_text(page(payload(Sources([], ("", ""), curves={"small.csv": load(written(tmp_path, GOOD))}))))
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=own, args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        said: list[str] = []
        window.on("console", lambda message: said.append(message.text))
        window.on("pageerror", lambda error: said.append(str(error)))
        window.goto((tmp_path / "x.html").as_uri())
        window.wait_for_selector("#curves figure:last-child div svg")
        assert said == []
        assert window.evaluate("document.documentElement.scrollWidth") == width
        assert not window.locator("#controls").is_visible()
        assert not window.locator("#table").is_visible()
        words = window.locator("#curves .finals").inner_text()
        for text in ("fp8", "2.3867", "+2.29 %", "python train.py --steps 3", "small.csv", "2026-11-21", "NVIDIA H200"):
            assert text in words
        chart = window.locator("#curves figure").nth(1)
        chart.scroll_into_view_if_needed()
        assert chart.locator("[aria-label=line] path").count() == 2
        chart.locator("div > svg").hover(position={"x": 180, "y": 150})
        window.wait_for_selector("#bubble:not([hidden])")
        assert "step 10" in window.locator("#bubble").inner_text()
        browser.close()
