"""Test the report page: its data, its use without a network, its look in a browser."""

import json
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from literal_records import changed

from kerneltune.files import data_root
from kerneltune.records import Record, append, load, newest
from kerneltune.reporting import page as data
from kerneltune.reporting.naming import case_names
from kerneltune.reporting.page import Sources, page, payload
from kerneltune.reporting.pairing import ab_rows
from kerneltune.reporting.tables import ab_columns

RECORDED = data_root("results") / "nvidia_h200" / "rmsnorm.jsonl"
MOST_BYTES = 2_000_000


def record(us: float | None = 100.0, **changes: Any) -> Record:
    timed = (
        {"time_us": us, "gbps": 2e5 / us, "ceiling_gbps": 4000.0, "ci_low_us": us * 0.99, "ci_high_us": us * 1.01} if us else {}
    )
    values: dict[str, Any] = {
        "op": "scale",
        "variant": "baseline",
        "case": "one",
        "dtype": "bfloat16",
        "quant": "none",
        "policy": "cold",
        "status": "passed",
        **timed,
        "pct_ceiling": 50.0 if us else None,
        "n": 20 if us else None,
        "device": "NVIDIA H200",
        "driver": "570",
        "torch": "2.13",
        "triton": "3.7",
        "source_hash": "0",
        "commit": "abc",
        "date": "2026-11-21T06:00:00+00:00",
        "axes": {"E": 4, "N": 256},
        "family": "scale",
    }
    return Record(**{**values, **changes})


def experts() -> list[Record]:
    """Return records of two variants for four counts of experts, and a failed record."""
    rows = []
    for count in (4, 8, 16, 32):
        axes = {"E": count, "N": 256}
        rows += [
            record(10.0 * count, axes=axes, case=f"e{count}"),
            record(5.0 * count, axes=axes, case=f"e{count}", variant="optimized"),
        ]
    return [*rows, record(None, status="failed", reason="y: 3 of 9 </script><b>wrong", variant="optimized", dtype="float16")]


def test_payload_cases_have_records_by_variant_and_the_fullest_dtype_first() -> None:
    shown = payload(Sources([record(dtype="float16"), *[changed(r, flops=7) for r in experts()]], ("baseline", "optimized")))
    assert [case["dtype"] for case in shown["cases"]] == ["bfloat16"] * 4 + ["float16"]
    first = shown["cases"][0]
    assert (first["family"], first["bound"]) == ("scale", "ceiling")
    assert first["of"]["optimized"]["us"] == 20.0
    assert shown["cases"][-1]["of"]["optimized"] == {"status": "failed", "reason": "y: 3 of 9 </script><b>wrong"}
    assert shown["facts"]["records"] == "9 passed, 1 failed"


def test_page_tells_the_runs_of_records_apart() -> None:
    """The script shows no interval of a speed-up between two runs, as the tables do."""
    others = [record(variant=name, **{name: "other"}) for name in ("unit", "driver", "torch", "triton", "commit")]
    same, *of_others = payload(Sources([record(), record(variant="optimized"), *others]))["cases"][0]["of"].values()
    assert len({one["run"] for one in of_others[1:]} - {same["run"]}) == len(others)
    assert of_others[0]["run"] == same["run"]


def test_page_shows_every_measure_of_the_tables() -> None:
    """The script leaves out a column that it has no measure for."""
    script = files("kerneltune.reporting").joinpath("assets", "table.js").read_text()
    measures = re.findall(r"^  (\w+): ", script.partition("const MEASURES = {\n")[2].partition("};")[0], re.MULTILINE)
    assert {*measures, "mark"} == {column.csv_name for column in ab_columns(()) if not column.only or "page" in column.only}


def test_page_names_the_bound_of_a_family_in_the_heading_of_the_share() -> None:
    big = {"flops": 10**12, "gbps": 100.0, "ceiling_gbps": 4000.0}  # 1e12 operations in 1 ms: half of the fp8 peak of an H200
    for fields, heading in (({}, "B % ceiling"), (big, "B % peak")):
        shown = payload(
            Sources([record(1000.0, **fields), record(900.0, variant="optimized", **fields)], ("baseline", "optimized"))
        )
        assert heading in [column["name"] for column in shown["families"][0]["columns"]]


def test_page_of_interpreter_records_says_that_nothing_is_timed() -> None:
    checked = record(None, status="checked", device="interpreter")
    text = page(Sources([checked], ("baseline", "baseline")))
    assert '<p class="remark">device: interpreter (no GPU): correctness is checked, no timing</p>' in text
    assert 'class="remark"' not in page(Sources(experts(), ("baseline", "optimized")))


def test_payload_of_no_records_raises() -> None:
    with pytest.raises(ValueError, match=r"^no records to report$"):
        payload(Sources([], ("baseline", "optimized")))


def test_page_is_one_small_file_that_escapes_text() -> None:
    text = page(Sources(experts(), ("baseline", "optimized"), command="kerneltune report <x>"))
    assert len(text.encode()) < MOST_BYTES
    assert "kerneltune report &lt;x&gt;" in text
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)""", re.sub(r"<script>.*?</script>", "", text, flags=re.S))
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert embedded is not None
    assert json.loads(embedded[1])["cases"][-1]["of"]["optimized"]["reason"] == "y: 3 of 9 </script><b>wrong"


def test_report_writes_the_page_of_recorded_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("report", RECORDED, "--results", tmp_path)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.endswith("wrote report.html\n")
    assert (tmp_path / "report.html").stat().st_size < MOST_BYTES
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_payload_share_is_of_the_peak_if_arithmetic_bounds_the_case() -> None:
    """1e12 operations in 1 ms are 1000 TFLOP/s: half of the fp8 peak of an H200, and above the one of bfloat16."""
    big = {"flops": 10**12, "pct_ceiling": 5.0, "gbps": 100.0, "ceiling_gbps": 4000.0}
    rows = [record(1000.0, quant="fp8", **big), record(10.0, flops=10, pct_ceiling=50.0)]
    first, second = payload(Sources(rows, ("baseline", "baseline")))["cases"]
    assert (first["bound"], round(first["of"]["baseline"]["pct"], 1)) == ("peak", 50.5)
    assert (second["bound"], second["of"]["baseline"]["pct"]) == ("ceiling", 50.0)


def test_looks_of_a_variant_depend_on_its_name_only() -> None:
    one = payload(Sources([record(variant=name) for name in ("baseline", "quack", "mine")], ("baseline", "mine")))
    other = payload(Sources([record(variant=name) for name in ("mine", "optimized", "quack")], ("quack", "mine")))
    assert one["looks"]["mine"] == other["looks"]["mine"]
    assert one["looks"]["quack"] == other["looks"]["quack"]
    assert len({*map(tuple, one["looks"].values()), *map(tuple, other["looks"].values())}) == 4


def test_page_names_no_folder_of_the_machine() -> None:
    odd = record(None, status="failed", reason="see /home/me/kernels/a.py:3, and /srv/x/log.txt; 1/2 of a/b", variant="optimized")
    text = page(Sources([record(), odd], ("baseline", "optimized"), command="kerneltune report /home/me/r.jsonl"))
    assert "/home/" not in text
    assert "/srv/" not in text
    assert "see a.py:3, and log.txt; 1/2 of a/b" in text
    assert "kerneltune report r.jsonl" in text


def test_page_with_too_many_cases_counts_those_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MOST_RECORDS", 5)
    shown = payload(Sources(experts(), ("baseline", "optimized")))
    assert len(shown["cases"]) == 2
    assert shown["remark"] == "3 of 5 cases are left out to keep this page small: --op, --dtype, --quant select other cases"


def test_report_of_several_families_is_one_page_with_the_slowest_row_of_each(tmp_path: Path) -> None:
    files = sorted(RECORDED.parent.glob("fp8_t*.jsonl"))
    result = run("report", *files, "--results", tmp_path, "-o", tmp_path / "x.html")
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.glob("*.html")] == ["x.html"]
    text = (tmp_path / "x.html").read_text()
    assert re.findall(r'<a href="#family=(\w+)">(\w+)</a>', text) == [
        (name, name) for name in ("fp8_tensorwise", "fp8_transpose")
    ]
    assert len(text.encode()) < MOST_BYTES


def test_payload_compares_each_family_with_its_own_baseline_or_peer() -> None:
    peer = [record(80.0, variant="liger", role="peer", family="two", axes={"E": size, "N": 1}) for size in (1, 2)]
    ours = [record(us, variant="optimized", family="two", axes={"E": size, "N": 1}) for us, size in ((100.0, 1), (40.0, 2))]
    lost = record(None, variant="optimized", status="failed", reason="x", axes={"E": 1, "N": 1})
    one = [record(), record(50.0, variant="optimized"), record(axes={"E": 1, "N": 1}), lost]
    shown = payload(Sources([*one, *peer, *ours]))
    rows = [row["cells"] for row in shown["summary"]["rows"]]
    assert [row[:9] for row in rows] == [
        ["scale", "2.00x", "2.00x scale none bf16 4×256", "1", "0", "0", "baseline", "optimized", "1 of 2"],
        ["two", "1.26x", "0.80x scale none bf16 1×1", "1", "0", "1", "fastest peer", "optimized", "2"],
    ]
    assert [(family["a"], family["b"]) for family in shown["families"]] == [("baseline", "optimized"), ("best-peer", "optimized")]
    assert payload(Sources(one))["summary"] is None


def test_report_of_a_family_named_as_a_path_writes_only_its_output(tmp_path: Path) -> None:
    rows, out = tmp_path / "in" / "a.jsonl", tmp_path / "out"
    append(rows, [record(family="../../<b>"), record(family="/abs", axes={"N": 8}), record(family="...", axes={"N": 9})])
    result = run("report", rows, "--results", tmp_path, "-o", out / "r.html")
    assert result.exit_code == 0, result.output
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {"in/a.jsonl", "in/a.jsonl.lock", "out/r.html"} or written == {"in/a.jsonl", "out/r.html"}
    assert "<b>" not in re.sub(r"<script>.*?</script>", "", (out / "r.html").read_text(), flags=re.S)


def test_report_of_bad_files_or_names_fails_with_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"op": 1}\n')
    assert run("report", broken).stderr == f"error: {broken}:1: op: 1: expected str\n"
    assert run("report", tmp_path / "none.jsonl").exit_code == 2
    assert (
        run("report", RECORDED, "--dtype", "int8").stderr == "error: dtype: 'int8': expected one of float16, bfloat16, float32\n"
    )
    assert (
        run("report", RECORDED, "--a", "fast")
        .stderr.splitlines()[-1]
        .startswith("error: a: 'fast': expected one of best-peer, baseline, pr593, optimized")
    )
    (tmp_path / "file").write_text("")
    assert run("report", RECORDED, "-o", tmp_path / "file" / "x.html").stderr.splitlines()[-1].startswith("error: cannot write ")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a headless Chromium: playwright's own or the system's."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    own = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with playwright.sync_playwright() as started:
        try:
            opened = started.chromium.launch(executable_path=own, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"needs a Chromium: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a page of a single family: recorded rows, and rows of experts."""
    rows = [*load(RECORDED), *experts()]
    rows = [changed(r, family="rmsnorm") if r.op == "scale" else r for r in rows]
    sources = Sources(rows, ("baseline", "optimized"), (), "kerneltune report", ["a.jsonl"])
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(sources), encoding="utf-8")
    return path


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_browser_shows_the_page_without_errors_requests_or_sideways_scrolling(
    browser: Any, shown: Path, width: int, scheme: str
) -> None:
    window = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors: list[str] = []
    asked: list[str] = []
    window.on("console", lambda message: errors.append(message.text))
    window.on("pageerror", lambda error: errors.append(str(error)))
    window.on("request", lambda request: asked.append(request.url))
    window.goto(shown.as_uri())
    window.wait_for_selector("#untimed")
    window.evaluate("document.querySelectorAll('details.more').forEach((part) => { part.open = true; })")
    window.wait_for_selector("#ceiling figure svg")
    assert errors == []
    assert asked == [shown.as_uri()]
    assert window.evaluate("document.documentElement.scrollWidth") == width
    sections = window.evaluate("[...document.querySelectorAll('main section')].map((section) => section.id || 'table')")
    assert sections == ["table", "ceiling", "peers", "scaling", "untimed"]
    cut = window.evaluate(
        """[...document.querySelectorAll("figure svg text")].filter((text) => {
            const [inner, outer] = [text, text.closest("figure")].map((node) => node.getBoundingClientRect());
            return inner.width && (inner.left < outer.left || inner.right > outer.right || inner.top < outer.top);
        }).map((text) => text.textContent)"""
    )
    assert cut == []
    touching = window.evaluate(
        """[...document.querySelectorAll("[aria-label='x-axis tick label']")].flatMap((axis) => {
            const boxes = [...axis.children].map((text) => text.getBoundingClientRect()).sort((a, b) => a.left - b.left);
            const upright = !axis.querySelector("[transform*=rotate]");
            return boxes.filter((box, i) => upright && i && box.left < boxes[i - 1].right).map(() => axis.textContent);
        })"""
    )
    assert touching == []
    window.close()


@pytest.mark.browser
def test_browser_table_equals_that_of_compare_and_sorts_and_filters(browser: Any, shown: Path) -> None:
    window = browser.new_page(viewport={"width": 1600, "height": 900})
    window.goto(shown.as_uri())
    rows = newest([*load(RECORDED), *experts()])
    sides = [[r for r in rows if r.variant == name] for name in ("baseline", "optimized")]
    expected = sorted(f"{row.speedup:.2f}x {row.mark}".strip() for row in ab_rows(*sides) if row.speedup is not None)

    def column(name: str) -> list[str]:
        heads = [head.strip() for head in window.locator("#table thead th").all_inner_texts()]
        cells = window.locator(f"#table tbody td:nth-child({heads.index(name) + 1})").all_inner_texts()
        return [cell.strip("\u2007 ") for cell in cells]

    assert sorted(cell for cell in column("speedup") if cell) == expected
    window.get_by_role("button", name="speedup").click()
    ascending = [float(cell.split("x")[0]) for cell in column("speedup") if cell]
    assert ascending == sorted(ascending)
    assert window.locator("th[aria-sort=ascending]").inner_text() == "speedup"
    window.keyboard.press("Enter")  # the heading has kept the focus
    descending = [float(cell.split("x")[0]) for cell in column("speedup") if cell]
    assert descending == sorted(descending, reverse=True) != ascending
    window.select_option("#filter-op", "rmsnorm_bwd")
    window.fill("#text", "8192 M=8192")
    assert set(column("kind")) == {"rmsnorm_bwd"}
    assert set(column("M")) == {"8192"}
    assert window.locator("#tiles .tile").last.inner_text().endswith("of the ceiling, B's median")
    window.fill("#text", "no such case")
    assert window.locator("#tiles .tile").last.inner_text().endswith("of the bound, B's median")
    window.fill("#text", "8192 M=8192")
    window.select_option("#a", "pr593")
    assert "A is pr593, B is optimized" in window.locator("#table caption").inner_text()
    window.close()


@pytest.mark.browser
@pytest.mark.parametrize("width", [400, 1600])
def test_browser_names_cases_as_tables_do(browser: Any, tmp_path: Path, width: int) -> None:
    rows = [record(options={"pow2": True, "layout": layout}) for layout in ("row", "both")]
    rows.append(record(op="scale_rows", axes={"M": 2}))
    (tmp_path / "x.html").write_text(page(Sources(rows, ("baseline", "baseline"))), encoding="utf-8")
    window = browser.new_page(viewport={"width": width, "height": 900})
    window.goto((tmp_path / "x.html").as_uri())
    heads = [head.strip() for head in window.locator("#table thead th:visible").all_inner_texts()]
    assert heads[:6] == ["kind", "speedup", "dtype", "quant", "options", "shape"]
    lines = [line.split("\t") for line in window.locator("#table tbody tr").all_inner_texts()]
    shown = [(cells[0], cells[4], cells[5]) for cells in lines]
    assert shown == [(name.kind, name.settings, name.shape) for name in case_names(rows)]
    window.evaluate("document.querySelectorAll('details.more').forEach((part) => { part.open = true; })")
    titles = window.locator("#ceiling h3").evaluate_all("heads => heads.map((head) => head.firstChild.textContent)")
    assert titles == [name.title for name in case_names(rows)]
    window.select_option("#filter-op", "scale_rows")
    assert [head.strip() for head in window.locator("#table thead th:visible").all_inner_texts()][4] == "M"
    window.close()


@pytest.fixture(scope="module")
def of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of all recorded results."""
    path = tmp_path_factory.mktemp("all") / "report.html"
    assert run("report", *sorted(RECORDED.parent.glob("*.jsonl")), "-o", path).exit_code == 0
    return path


def test_page_names_the_gpu_of_a_table_of_a_workload(of_all: Path) -> None:
    titles = re.findall("<h2>(.*: table of the workload.*?)</h2>", of_all.read_text(encoding="utf-8"))
    assert "moe_training: table of the workload, NVIDIA H200" in titles


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1000])
def test_browser_keeps_labels_within_their_charts_in_every_family(browser: Any, of_all: Path, width: int) -> None:
    window = browser.new_page(bypass_csp=True, viewport={"width": width, "height": 900})
    window.goto(of_all.as_uri())
    for family in window.evaluate("data.families.map((family) => family.name)"):
        window.evaluate(f"location.hash = 'family={family}'")
        window.wait_for_function(f"state.family === '{family}' && document.querySelector('#speedups figure svg, #table-hint')")
        cut = window.evaluate(
            """[...document.querySelectorAll("[aria-label$='axis tick label'] text")].filter((text) => {
                const [inner, outer] = [text, text.closest("figure")].map((node) => node.getBoundingClientRect());
                return inner.left < outer.left || inner.right > outer.right;
            }).map((text) => text.textContent)"""
        )
        assert cut == []
        assert window.evaluate("document.documentElement.scrollWidth") == width
    window.close()


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1200])
def test_browser_speed_ups_are_in_view_and_the_keyboard_reaches_configs(browser: Any, of_all: Path, width: int) -> None:
    window = browser.new_page(bypass_csp=True, viewport={"width": width, "height": 900})
    window.goto(of_all.as_uri())
    window.locator("#families a", has_text="rmsnorm_add").focus()
    window.keyboard.press("Enter")
    window.wait_for_function("state.family === 'rmsnorm_add' && document.activeElement.id === 'table'")
    for table in ("#families", "#table"):
        (head,) = [th for th in window.locator(f"{table} thead th").all() if th.inner_text().strip() in ("speed-up", "speedup")]
        box = head.bounding_box()
        assert box["x"] + box["width"] <= width
    summary = window.locator("#table tbody summary").first
    summary.focus()
    window.keyboard.press("Enter")
    assert "B " in window.locator("#table tbody details").first.inner_text()
    window.select_option("#a", "baseline")
    assert "A is baseline, B is optimized" in window.locator("#table caption").inner_text()
    window.fill("#text", "no such case")
    assert window.locator("#table-hint").inner_text() == "No case that is left has both baseline and optimized."
    window.close()


@pytest.mark.browser
def test_browser_shows_values_under_the_pointer_hides_variants_and_changes_theme(browser: Any, shown: Path) -> None:
    window = browser.new_page(bypass_csp=True, viewport={"width": 400, "height": 900}, color_scheme="light")
    window.goto(shown.as_uri())
    window.evaluate("document.querySelectorAll('details.more').forEach((part) => { part.open = true; })")
    chart = window.locator("#scaling figure").first
    chart.scroll_into_view_if_needed()
    chart.locator("svg").hover(position={"x": 150, "y": 150})
    window.wait_for_selector("#bubble:not([hidden])")
    assert re.search(r"µs, \d+ GB/s", window.locator("#bubble").inner_text())
    box = window.locator("#bubble").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 400
    window.mouse.wheel(0, 300)
    window.wait_for_selector("#bubble", state="hidden")
    bars = window.locator("#ceiling figure").first.locator("[aria-label=bar] rect")
    before = bars.count()
    window.locator("#ceiling .chip", has_text="pr593").click()
    assert window.locator("#ceiling .chip", has_text="pr593").get_attribute("aria-pressed") == "false"
    window.wait_for_function(
        f"document.querySelector('#ceiling figure').querySelectorAll('[aria-label=bar] rect').length < {before}"
    )
    light = window.evaluate("getComputedStyle(document.body).backgroundColor")
    window.locator("#theme").click()
    assert window.evaluate("getComputedStyle(document.body).backgroundColor") != light
    window.close()
