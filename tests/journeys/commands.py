"""Journeys of the commands: sweep, tune, compare, gate, inspect, profile, doctor, report."""

import re
import shutil
import statistics
import sys

from journey import ROOT, NotRun, Place, journey, require

SHIPPED = {"KERNELTUNE_CONFIGS": None}
"""Environment in which the shipped configs are used."""
_MOST_GBPS = 20_000
"""GB/s that no GPU of today reads: a faster row timed nothing."""


@journey(limit_s=60, without_gpu=True)
def doctor(place: Place) -> None:
    """`doctor` names the GPU, the versions and the folders."""
    out = place.kerneltune("doctor").stdout
    for word in ("torch", "triton", "GPU", "configs", "results"):
        require(word in out, f"no line of {word}")
    if place.has_gpu:
        flat = " ".join(out.split())
        require(place.gpu["arch"] in flat and place.gpu["driver"] in flat, "architecture or driver are missing")


@journey(limit_s=420, ops=("rmsnorm",))
def sweep_quick(place: Place) -> None:
    """`sweep rmsnorm --quick` shows ten rows; `compare` and `report` read its records."""
    place.kerneltune("sweep", "rmsnorm", "--quick", env=SHIPPED)
    rows = place.rows(place.results / "rmsnorm.jsonl")
    own = [row for row in rows if row["role"] == "own"]
    require(
        {row["status"] for row in own} == {"passed"}, f"rows that did not pass: {[r for r in own if r['status'] != 'passed']}"
    )
    cases = {row["case"] for row in own if row["variant"] == "optimized"}
    require(len(cases) >= 9, f"only {len(cases)} cases: {cases}")
    out = place.kerneltune("compare", "baseline", "optimized", "--family", "rmsnorm").stdout
    require("B is " in out and "faster" in out, "compare has no summary")
    place.kerneltune("report", "-o", "page.html", env=SHIPPED)
    page = (place.folder / "page.html").read_text()
    require("te-8192x4096" in page or "8192" in page, "the page lacks the cases")
    require(not re.search(r"(src|href)=\"https?://", page), "the page asks the network")
    _beside_records(place, own)


def _beside_records(place: Place, rows: list[dict[str, object]]) -> None:
    """Hold the times against the repository's records of this model of GPU, if there are any."""
    shipped = ROOT / "results" / place.gpu["slug"] / "rmsnorm.jsonl"
    if not shipped.is_file():
        place.remarks.append("not compared with records: there are none of this GPU")
        return

    def key(row: dict[str, object]) -> tuple[object, ...]:
        return row["op"], row["variant"], row["dtype"], row["quant"], str(row["axes"]), str(row.get("options")), row["policy"]

    recorded = {key(row): row["time_us"] for row in place.rows(shipped) if row["status"] == "passed"}
    ratios = [float(str(row["time_us"])) / float(str(recorded[key(row)])) for row in rows if key(row) in recorded]
    require(len(ratios) >= 9, f"{len(ratios)} rows are recorded, expected 9")
    middle = statistics.median(ratios)
    place.remarks.append(f"{middle:.2f}x the recorded time, median of {len(ratios)} rows")
    require(0.7 < middle < 1.5, f"{middle:.2f}x the recorded time in the median")


@journey(limit_s=150, ops=("swiglu",))
def sweep_family(place: Place) -> None:
    """`sweep` of a small family checks it, tunes what lacks a config, measures, and keeps records and configs."""
    chosen = ["--case", "qwen3-30b-a3b", "--case", "llama-3-8b"]
    out = place.kerneltune("sweep", "swiglu_bwd", *chosen, "--budget", "6", "--no-peers").stdout
    require("optimized" in out, "no table")
    rows = [row for row in place.rows(place.results / "swiglu_bwd.jsonl") if row["variant"] == "optimized"]
    require(sorted(row["case"] for row in rows) == ["llama-3-8b", "qwen3-30b-a3b"], f"other rows: {rows}")
    require(all(row["status"] == "passed" and row["time_us"] > 0 for row in rows), f"not passed: {rows}")
    require(all(row["gbps"] < _MOST_GBPS for row in rows), f"faster than any memory: {rows}")
    require((place.configs / "swiglu_bwd.json").is_file(), "no configs were kept")
    out = place.kerneltune("compare", "baseline", "optimized", "--family", "swiglu_bwd", "--format", "csv").stdout
    require(len(out.strip().splitlines()) >= 3, "compare lacks rows")


@journey(limit_s=120, ops=("swiglu",), without_gpu=True)
def sweep_stale(place: Place) -> None:
    """Run `sweep --stale` twice on a copy of configs and records: it measures for the budget, then goes on."""
    shutil.copytree(ROOT / "configs", place.configs.parent, dirs_exist_ok=True)
    shutil.copytree(ROOT / "results", place.results.parent, ignore=shutil.ignore_patterns("runs"))
    for _ in range(2):
        done = place.kerneltune("sweep", "swiglu_bwd", "--stale", "--budget", "15")
        require("stale" in done.stdout + done.stderr, "nothing is said of stale configs and cases")


@journey(limit_s=150, ops=("fp8",))
def tune_two(place: Place) -> None:
    """`tune` of two cases; the next call runs with the config, and a call at other sizes says that there is none."""
    family = place.folder / "two.yaml"
    family.write_text(
        "family: two\nops: [fp8_rowwise_2d]\ndefaults: {dtype: bfloat16}\ncheck:\n  - {name: odd, M: 37, K: 1409}\n"
        'bench:\n  - {name: "rows-{M}", M: [4096, 16384], K: 3328}\n'
    )
    place.kerneltune("tune", "two.yaml", "--trials", "12", "--budget", "10")
    require((place.configs / "fp8_rowwise_2d.json").is_file(), "no configs were kept")
    again = place.kerneltune("tune", "two.yaml")
    require("nothing to tune" in again.stdout + again.stderr, "a second tune searches again")
    call = (
        "import sys, torch\n"
        "from kerneltune.ops.fp8 import fp8_rowwise_2d\n"
        "x = torch.randn(int(sys.argv[1]), 3328, device='cuda', dtype=torch.bfloat16)\n"
        "q, scale = fp8_rowwise_2d(x)\n"
        "error = (q.float() * scale.reshape(-1, 1) - x.float()).abs().max().item()\n"
        "other = (q.float() / scale.reshape(-1, 1) - x.float()).abs().max().item()\n"
        "assert min(error, other) < 0.5, (error, other)\n"
        "print('cast')\n"
    )
    for rows in ("4096", "16384"):
        done = place.python("-c", call, rows, env={"KERNELTUNE_STRICT": "1"})
        require("cast" in done.stdout and "no config" not in done.stderr, "the call does not use the config")
    done = place.python("-c", call, "48", code=[0, 1], env={"KERNELTUNE_STRICT": "1"})
    require("no config for fp8_rowwise_2d" in done.stderr, "a call at sizes that nobody tuned says nothing")


@journey(limit_s=120, ops=("swiglu",))
def compare_run(place: Place) -> None:
    """`compare X X --run` measures a variant against itself: what differs is noise."""
    chosen = ["--family", "swiglu_bwd", "--case", "llama-3-8b"]
    out = place.kerneltune("compare", "optimized", "optimized", "--run", *chosen, "--format", "csv", env=SHIPPED).stdout
    lines = out.strip().splitlines()
    require(len(lines) >= 2, "no row")
    text = place.kerneltune("compare", "baseline", "optimized", "--run", *chosen, env=SHIPPED).stdout
    matched = re.search(r"B is ([0-9.]+)x as fast as A", " ".join(text.split()))
    require(matched is not None, "no summary")
    assert matched is not None
    require(float(matched[1]) > 1.2, f"the kernel is {matched[1]}x as fast as torch's own operations")


@journey(limit_s=240, alone=True)
def gate_run(place: Place) -> None:
    """`gate --run` of a kernel against itself passes; with work for a tenth of its rows added it fails with exit code 1."""
    document = (ROOT / "docs" / "your_own_kernel.md").read_text()
    source = re.search(r"```python\n# swiglu.py\n(.*?)```", document, re.DOTALL)
    require(source is not None, "docs/your_own_kernel.md has no swiglu.py")
    assert source is not None
    plugin = place.folder / "swiglu.py"
    plugin.write_text(source[1])
    (place.folder / "swiglu.yaml").write_text(
        "family: swiglu\nops: [swiglu]\ndefaults: {dtype: bfloat16}\ncheck:\n  - {name: odd, M: 7, N: 333}\n"
        "bench:\n  - {name: ffn, M: 8192, N: 14336}\ngate: {margin: 0.03}\n"
    )
    run = ["--run", "./swiglu.yaml", "--variant", "optimized", "--processes", "2"]
    place.kerneltune("--plugin", "swiglu.py", "gate", "baseline.jsonl", *run, "--update")
    rows = place.rows(place.folder / "baseline.jsonl")
    require(all(len(row["samples_us"]) == 2 for row in rows), "a row without the times of two processes")
    place.kerneltune("--plugin", "swiglu.py", "gate", "baseline.jsonl", *run, "--junit", "passed.xml")
    planted = 'return {"y": swiglu(inputs["gate"], inputs["up"], config=config)}'
    require(planted in source[1], "swiglu.py of the document has another run_optimized")
    slower = (
        "tenth = len(inputs['gate']) // 10\n"
        "    swiglu(inputs['gate'][:tenth], inputs['up'][:tenth], config=config)\n"
        f"    {planted}"
    )
    plugin.write_text(source[1].replace(planted, slower))
    out = place.kerneltune("--plugin", "swiglu.py", "gate", "baseline.jsonl", *run, "--junit", "failed.xml", code=1).stdout
    require("swiglu" in out, "the report does not name the row")
    require("<failure" in (place.folder / "failed.xml").read_text(), "the JUnit report has no failure")
    require("<failure" not in (place.folder / "passed.xml").read_text(), "the JUnit report of the first run has a failure")


@journey(limit_s=120, without_gpu=True, ops=("rmsnorm", "fp8"))
def inspect(place: Place) -> None:
    """`inspect` compiles a config without a GPU and shows its registers."""
    chosen = ["rmsnorm_fwd", "--variant", "optimized", "--case", "te-8192x4096", "--dtype", "bfloat16", "--quant", "none"]
    out = place.kerneltune("inspect", *chosen, "--target", "sm_90", env=SHIPPED).stdout
    require(re.search(r"sm_90 +\d+ +0 ", out) is not None, "no row of sm_90 without spills")
    if place.has_gpu:
        place.kerneltune("inspect", "fp8_rowwise_2d", "M=4096", "K=3328", "--target", place.gpu["arch"])


@journey(limit_s=120, ops=("swiglu",))
def profile(place: Place) -> None:
    """`profile` shows the counters of two variants, or says in one line what keeps it from them."""
    done = place.kerneltune("profile", "swiglu_bwd", "baseline", "optimized", "--case", "llama-3-8b", code=[0, 2])
    if done.returncode:
        require(len(done.stderr.strip().splitlines()) <= 3 and "error:" in done.stderr, "more than a line says why")
        raise NotRun(f"the counters cannot be read here: {done.stderr.strip().splitlines()[-1]}")
    require("DRAM" in done.stdout, "no DRAM throughput")


@journey(limit_s=60, without_gpu=True, ops=("rmsnorm",))
def report_records(place: Place) -> None:
    """`compare`, `report` and `gate` read the records that the repository ships."""
    records = ROOT / "results" / "nvidia_h200" / "rmsnorm.jsonl"
    chosen = ["pr593", "optimized", "--dtype", "bfloat16", "--quant", "fp8_t", "--case", "te-8192*"]
    out = place.kerneltune("compare", *chosen, "--from", records).stdout
    require(len(re.findall(r"^ *8192 ", out, re.MULTILINE)) == 3, "expected 3 rows")
    place.kerneltune("report", records, "-o", "page.html")
    require((place.folder / "page.html").stat().st_size > 50_000, "the page is empty")
    place.kerneltune("gate", records, records, "--allow-stale")  # what kernels of a later commit reach is measured by gate_run


@journey(limit_s=460, ops=None)
def gpu_tests(place: Place) -> None:
    """Run the tests that need a GPU and may share it, with eight workers."""
    _tests(place, "gpu and not alone", "-n", "8", "--dist", "worksteal")


@journey(limit_s=200, alone=True, ops=None)
def gpu_tests_alone(place: Place) -> None:
    """Run the tests that need a GPU for themselves."""
    _tests(place, "gpu and alone")


def _tests(place: Place, marked: str, *options: str) -> None:
    command = [sys.executable, "-m", "pytest", "-m", marked, *options, "--durations=10", "-p", "no:cacheprovider"]
    done = place.call(command, env={"KERNELTUNE_CONFIGS": None, "KERNELTUNE_RESULTS": None}, cwd=ROOT)
    passed = re.search(r"(\d+) passed", done.stdout)
    require(passed is not None, "no test ran")
    assert passed is not None
    place.remarks.append(f"{passed[1]} tests")
