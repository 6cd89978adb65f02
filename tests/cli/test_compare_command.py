"""Test compare on records of files, of this GPU and of the package, and on live measurements."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import both, record, refused, run
from literal_records import NO_TIMES, changed

from kerneltune import ops, sweep_file
from kerneltune.plan import Plan, Selection
from kerneltune.records import Record

HEAD = "kind dtype    quant    M    N   A µs  B µs speedup   A GB/s B GB/s B % ceiling 95 % interval noise %"
ROW = "fwd  bfloat16 fp8   8192 4096 100.00 50.00   2.00x +   1000   2000        50.0 2.00x–2.00x       1.0"


def table(a: str = "baseline", b: str = "optimized", torch: str = "2.13") -> str:
    return f"""\
A: {a}; B: {b}
B is 2.00x as fast as A: geometric mean of 1 row, 2.00x to 2.00x; 1 faster (+), 0 within 5 %, 0
  slower (-)
B reaches 50.0 % of the ceiling in the median
noise, a variant against itself: at most 1.0%

{HEAD}
{ROW}

NVIDIA H200, driver 570, torch {torch}, triton 3.7, commit 0, 2026-11-21
"""


TABLE = table()


def test_compare_of_a_file_prints_its_table(write: Callable[..., Path]) -> None:
    path = write("a.jsonl", *both())
    result = run("compare", "baseline", "optimized", "--from", path)
    assert (result.exit_code, result.stdout, result.stderr) == (0, TABLE, "")


@pytest.mark.usefixtures("no_gpu")
def test_compare_shows_recorded_results_without_a_gpu(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write("nvidia_h200/rmsnorm.jsonl", *both())
    write("interpreter/rmsnorm.jsonl", *both(device="interpreter", status="checked", **NO_TIMES))
    result = run("compare", "baseline", "optimized", "--results", tmp_path)
    assert (result.exit_code, result.stdout) == (0, TABLE)
    assert result.stderr.split() == f"no GPU here: recorded results from {path}".split()


@pytest.mark.usefixtures("no_gpu")
def test_compare_plug_in_without_records_does_not_show_those_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERNELTUNE_PLUGINS", "fake_operator")
    monkeypatch.delenv("KERNELTUNE_RESULTS", raising=False)
    message = "error: no records in results: run `kerneltune sweep FILE.yaml` on a GPU first, or show recorded results by "
    message += "`compare --family NAME` and `report FILE`"
    assert refused("compare") == message
    assert "rmsnorm.jsonl" in run("compare", "baseline", "optimized", "--family", "rmsnorm").stderr


@pytest.mark.usefixtures("no_gpu")
def test_compare_family_of_a_path_is_the_name_inside_the_file(write: Callable[..., Path], tmp_path: Path) -> None:
    write("nvidia_h200/norms.jsonl", *both(family="norms"))
    (tmp_path / "x.yaml").write_text("family: norms\nops: [rmsnorm_fwd]\n")
    result = run("compare", "baseline", "optimized", "--family", tmp_path / "x.yaml", "--results", tmp_path)
    assert (result.exit_code, result.stdout) == (0, TABLE)
    (tmp_path / "x.yaml").write_text("ops: [rmsnorm_fwd]\n")
    error = refused("compare", "--family", tmp_path / "x.yaml", "--results", tmp_path)
    assert error.startswith(f"error: {tmp_path}/x.yaml:1: family: missing: expected ")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("short", ["bf16", "BF16", "torch.bfloat16"])
def test_compare_short_name_of_an_element_type_is_that_type(short: str, write: Callable[..., Path], tmp_path: Path) -> None:
    write("nvidia_h200/rmsnorm.jsonl", *both(), *both(dtype="float16"))
    result = run("compare", "baseline", "optimized", "--results", tmp_path, "--dtype", short)
    assert (result.exit_code, result.stdout) == (0, TABLE)


@pytest.mark.usefixtures("an_h200")
def test_compare_without_a_file_reads_records_of_this_gpu(write: Callable[..., Path], tmp_path: Path) -> None:
    write("nvidia_h200/rmsnorm.jsonl", *both())
    write("nvidia_h100/rmsnorm.jsonl", *both(10, 20, device="NVIDIA H100"))
    result = run("compare", "baseline", "optimized", "--results", tmp_path)
    assert (result.exit_code, result.stdout, result.stderr) == (0, TABLE, "")


@pytest.mark.usefixtures("an_h200")
def test_compare_without_records_names_the_missing_file(tmp_path: Path) -> None:
    line = refused("compare", "baseline", "optimized", "--results", tmp_path, "--family", "rmsnorm")
    path = tmp_path / "nvidia_h200" / "rmsnorm.jsonl"
    assert line == f"error: no records of NVIDIA H200 in {path}: run a sweep first, or name a file"


def test_compare_of_two_files_has_a_table_per_variant(write: Callable[..., Path]) -> None:
    old, new = write("old.jsonl", *both(100, 60)), write("new.jsonl", *both(100, 50))
    lines = run("compare", old, new).stdout.splitlines()
    assert lines[0] == "baseline"
    assert "1.20x +" in "\n".join(lines[lines.index("optimized") :])
    assert run("compare", old, new, "--format", "csv").stdout.count("\n") == 3
    assert run("compare", old, new, "--format", "markdown").stdout.startswith("### baseline\n\n- A: ")


def test_compare_of_two_files_counts_the_rows_of_one_file_alone(write: Callable[..., Path]) -> None:
    old, new = write("old.jsonl", record(axes={"M": 1, "N": 1}), *both(100, 60)), write("new.jsonl", *both(100, 50))
    assert " ".join(run("compare", old, new).stderr.split()) == f"1 row of {old} without a row of the other file"
    assert run("compare", new, write("again.jsonl", *both(100, 50))).stderr == ""


def test_compare_of_two_files_takes_the_selected_cases(write: Callable[..., Path]) -> None:
    old, new = write("old.jsonl", *both(100, 60)), write("new.jsonl", *both(100, 50))
    assert run("compare", old, new, "--op", "rmsnorm_fwd").stdout == run("compare", old, new).stdout
    assert refused("compare", old, new, "--op", "softmax").startswith("error: op: 'softmax': expected one of rmsnorm_fwd")


def test_compare_of_two_files_of_steps_pairs_rows_of_their_policy(write: Callable[..., Path]) -> None:
    old, new = (write(name, record(us, policy="eager")) for name, us in (("old.jsonl", 120), ("new.jsonl", 100)))
    assert "1.20x +" in run("compare", old, new).stdout
    mixed = write("mixed.jsonl", *both(100, 60), record(50, policy="eager", variant="optimized"))
    assert "2.40x +" in run("compare", old, "optimized", "--from", mixed).stdout
    assert refused("compare", old, new, "--policy", "hot").startswith("error: nothing to compare: ")


def test_compare_of_a_file_with_the_best_peer_has_a_table_per_variant(write: Callable[..., Path]) -> None:
    new = write("new.jsonl", record(40, variant="optimized"), record(150, variant="liger", role="peer"))
    old = write("old.jsonl", record(200, variant="liger", role="peer"))
    for arguments, speedup in (((new, "best-peer"), "0.20x -"), (("best-peer", new), "5.00x +")):
        lines = run("compare", *arguments, "--from", old).stdout.splitlines()
        assert lines[0] == "optimized"
        assert speedup in "\n".join(lines[: lines.index("liger")])


def test_compare_of_files_without_a_common_variant_fails(write: Callable[..., Path]) -> None:
    old, new = write("old.jsonl", record()), write("new.jsonl", record(50, variant="optimized"), record(200, variant="liger"))
    message = f"error: nothing to compare: {old} and {new} have no record of the same variant, case, device and policy"
    assert refused("compare", old, new) == message
    assert "2.00x +" in run("compare", old, "optimized", "--from", new).stdout


def test_compare_of_a_file_with_a_variant_pairs_their_rows(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = write("old.jsonl", record()), write("new.jsonl", *both(100, 50))
    monkeypatch.chdir(old.parent)
    assert run("compare", old.name, "optimized", "--from", new).stdout == table(a=old.name)


def test_compare_with_op_or_policy_keeps_only_their_rows(write: Callable[..., Path]) -> None:
    path = write("a.jsonl", *both(), *both(10, 20, op="rmsnorm_bwd"), *both(20, 10, policy="hot"))
    assert run("compare", "baseline", "optimized", "--from", path, "--op", "rmsnorm_fwd").stdout == TABLE
    expected = "error: op: 'softmax': expected one of rmsnorm_fwd, rmsnorm_bwd"
    assert refused("compare", "baseline", "optimized", "--from", path, "--op", "softmax") == expected


def test_compare_with_case_dtype_or_quant_keeps_only_their_rows(write: Callable[..., Path]) -> None:
    others = [*both(10, 20, quant="none"), *both(10, 20, dtype="float16"), *both(10, 20, case="other", axes={"M": 1, "N": 1})]
    path = write("a.jsonl", *both(), *others)
    part = ("--case", "te-*", "--dtype", "bfloat16", "--quant", "fp8")
    assert run("compare", "baseline", "optimized", "--from", path, *part).stdout == TABLE
    for option, message in (
        (("--case", "othr"), "case: 'othr': did you mean other? expected one of te-8192x4096, other"),
        (("--dtype", "int8"), "dtype: 'int8': expected one of bfloat16, float16"),
        (("--quant", "int4"), "quant: 'int4': expected one of fp8, none"),
    ):
        assert refused("compare", "baseline", "optimized", "--from", path, *option) == f"error: {message}"


def test_compare_with_family_keeps_only_its_rows_of_a_file(write: Callable[..., Path]) -> None:
    old, new = (write(name, *both(), *both(10, 20, op="cast", family="casts")) for name in ("old.jsonl", "new.jsonl"))
    assert run("compare", "baseline", "optimized", "--from", old, "--family", "rmsnorm").stdout == TABLE
    assert "cast" not in run("compare", old, new, "--family", "rmsnorm").stdout
    line = refused("compare", "baseline", "optimized", "--from", old, "--family", "cast")
    assert line == "error: family: 'cast': did you mean casts? expected one of rmsnorm, casts"


def test_compare_with_options_that_it_ignores_fails(write: Callable[..., Path], tmp_path: Path) -> None:
    path, other, empty = write("a.jsonl", *both()), write("b.jsonl", *both()), tmp_path / "empty.jsonl"
    empty.touch()
    unused = f"error: from: '{path}': expected only where A or B is a variant, and without --run"
    assert refused("compare", path, other, "--from", path) == unused
    assert refused("compare", "baseline", "optimized", "--from", path, "--run", "--family", "rmsnorm") == unused
    for names in (("baseline", "optimized", "--from", path, "--from", empty), (path, empty)):
        assert refused("compare", *names) == f"error: {empty}: no records"
    for same in ("baseline", str(path)):
        message = f"b: {same!r}: the same records as A: expected another variant or file, or --run to measure a variant twice"
        assert refused("compare", same, same) == f"error: {message}"


def test_compare_of_records_of_a_single_variant_fails(write: Callable[..., Path]) -> None:
    path = write("a.jsonl", record(variant="optimized"))
    message = "error: nothing to compare: A and B are both optimized: name another variant"
    assert refused("compare", "--from", path) == refused("compare", "optimized", "--from", path) == message


def test_compare_with_output_writes_the_table_into_the_file(write: Callable[..., Path], tmp_path: Path) -> None:
    path, output = write("a.jsonl", *both()), tmp_path / "table.txt"
    result = run("compare", "baseline", "optimized", "--from", path, "--output", output)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"wrote {output}\n")
    assert output.read_text() == TABLE
    line = refused("compare", "baseline", "optimized", "--from", path, "--output", tmp_path)
    assert line == f"error: cannot write {tmp_path}: Is a directory"


def test_compare_of_unknown_names_fails_with_known_names(write: Callable[..., Path], tmp_path: Path) -> None:
    path, other = write("a.jsonl", *both()), write("b.jsonl", record(variant="optimized", axes={"M": 1, "N": 1}), record())
    names = "baseline, optimized, best-peer, a .jsonl file"
    assert refused("compare", "fast", "optimized", "--from", path) == f"error: variant: 'fast': expected one of {names}"
    assert refused("compare", "baseline", tmp_path / "no.jsonl", "--from", path).startswith("error: cannot read ")
    assert refused("compare", "baseline", "optimized", "--from", path, "--format", "html").startswith("error: format: 'html': ")
    assert refused("compare", "baseline", "optimized", "--from", path, "--policy", "warm").startswith("error: policy: 'warm': ")
    line = refused("compare", "optimized", "baseline", "--from", other)
    assert line == "error: nothing to compare: optimized and baseline have no record of the same case, device and policy"
    assert refused("compare", "a", "b", "--run") == "error: family: missing: expected --family where --run is given"
    line = refused("compare", "baseline", "optimized", "--run", "--family", "rmsnorm", "--op", "rmsnorm")
    assert line.startswith("error: op: 'rmsnorm': did you mean rmsnorm_fwd? ")
    for pair in (("opt*", "baseline"), ("[bp]*", "[bp]*")):
        line = refused("compare", *pair, "--run", "--family", "rmsnorm")
        assert line.startswith(f"error: variant: '{pair[0]}': expected one of ")


def test_compare_with_run_measures_the_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def live(plan: Plan, _progress: object, command: str, repeat: int) -> list[Record]:
        seen.update(selection=plan.selection, command=command, policy=plan.options.policy, repeat=repeat)
        return both()

    monkeypatch.setattr("kerneltune.sweep_run.measure_live", live)
    part = ("--op", "rmsnorm_fwd", "--case", "te-*", "--dtype", "bfloat16", "--quant", "fp8")
    result = run("compare", "baseline", "optimized", "--run", "--family", "rmsnorm", *part)
    assert result.stdout == TABLE
    of_part = Selection("rmsnorm", ("rmsnorm_fwd",), ("te-*",), ("bfloat16",), ("fp8",), ("baseline", "optimized"))
    assert seen == {"selection": of_part, "command": "compare --run", "policy": None, "repeat": 1}


def test_compare_with_run_and_an_unwritable_output_fails_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kerneltune.sweep_run.measure_live", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "file").touch()
    arguments = ("compare", "baseline", "optimized", "--run", "--family", "rmsnorm", "-o", tmp_path / "file" / "of" / "t.md")
    assert refused(*arguments) == f"error: cannot write {tmp_path / 'file' / 'of'}: Not a directory"


def test_compare_with_run_to_standard_output_needs_no_writable_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kerneltune.sweep_run.measure_live", lambda *_, **__: both())
    monkeypatch.setattr("kerneltune.cli.loading.require_writable", lambda folder: pytest.fail(f"tried {folder}"))
    part = ("--op", "rmsnorm_fwd", "--output", "-")
    assert run("compare", "baseline", "optimized", "--run", "--family", "rmsnorm", *part).stdout == TABLE


def test_compare_of_a_variant_with_itself_reports_the_a_a_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(shift: float, noise: list[float], **changes: Any) -> Record:
        return record(100.0 * shift, samples_us=[[100.0 * (shift + x) for x in noise]], n=len(noise), **changes)

    noise = [0.01, -0.01, 0.02, -0.02, 0.0]
    good = [timed(1.0, noise), timed(1.0, noise[::-1])]
    odd = [timed(1.0, noise, quant="none"), timed(1.05, noise, quant="none")]
    monkeypatch.setattr("kerneltune.sweep_run.measure_live", lambda *_, repeat: [*good, *odd] if repeat == 2 else [])
    lines = run("compare", "baseline", "baseline", "--run", "--family", "rmsnorm").stdout.splitlines()
    assert [line.split()[0] for line in lines if line.endswith(" 1.0")] == ["fp8", "none"]
    label = "te-8192x4096 rmsnorm_fwd M=8192 N=4096 bfloat16 none cold"
    (interval_line,) = (line for line in lines if line.startswith("A/A interval"))
    assert interval_line.startswith(f"A/A interval without 1: {label}: 0.95")


@pytest.mark.parametrize("how", ["asked for", "installed"])
def test_compare_of_a_plug_in_reads_records_where_sweep_wrote_them(
    how: str, write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERNELTUNE_PLUGINS", "")
    monkeypatch.delenv("KERNELTUNE_RESULTS", raising=False)
    if how == "installed":
        info = tmp_path / "mine-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[kerneltune.ops]\nmine = fake_operator\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(ops, "load_with", ops.load_with.__wrapped__)  # which other tests have asked already
    write("mine.yaml").write_text("family: mine\n")
    assert sweep_file.results_root(None) == Path("results")
    write("results/nvidia_h200/mine.jsonl", *both())
    plugged = ("--plugin", "fake_operator") if how == "asked for" else ()
    assert "fake" in run(*plugged, "ops").stdout
    compared = run(*plugged, "compare", "baseline", "optimized", "--family", "mine")
    assert compared.exit_code == 0
    assert "mine.jsonl" in compared.stderr
    assert run(*plugged, "report", "--output", "r.html").exit_code == 0
    assert Path("r.html").is_file()
    assert any(line.split()[:2] == ["results", "results"] for line in run(*plugged, "doctor").stdout.splitlines())


@pytest.mark.usefixtures("an_h200")
def test_compare_of_a_known_family_without_records_suggests_no_other_family(write: Callable[..., Path], tmp_path: Path) -> None:
    write("nvidia_h100/rmsnorm.jsonl", *both(device="NVIDIA H100"))
    for family, hint in (
        ("rmsnorm", "name a file"),
        ("rmsnrom", "name a file; did you mean rmsnorm?"),
        ("x", "there are records of rmsnorm"),
    ):
        assert refused("compare", "baseline", "optimized", "--results", tmp_path, "--family", family).endswith(hint)


def test_compare_without_names_chooses_a_among_the_selected_operators(write: Callable[..., Path]) -> None:
    other = {"op": "rmsnorm_bwd", "family": "rmsnorm"}
    rows = [
        row
        for n in (1, 2)
        for row in (record(60.0, variant="quack", role="peer", axes={"N": n}, **other), *both(axes={"N": n}, **other))
    ]
    path = write("a.jsonl", *both(), *rows)
    assert run("compare", "--op", "rmsnorm_fwd", "--from", path).stdout.startswith("A: baseline; B: optimized")


def test_compare_without_names_sets_ours_against_the_best_peer(write: Callable[..., Path]) -> None:
    peers = [record(70.0, variant="liger", role="peer"), record(60.0, variant="quack", role="peer")]
    path = write("a.jsonl", *both(), *peers)
    text = run("compare", path).stdout
    assert text.startswith("A: the fastest peer of every case (quack 1); B: optimized\nB is 1.20x as fast as A")
    assert run("compare", "optimized", "--from", path).stdout == text
    assert run("compare", "best-peer", "baseline", "--from", path).stdout.splitlines()[0].endswith("B: baseline")
    assert run("compare", "--from", write("none.jsonl", *both())).stdout == TABLE


def test_compare_without_names_uses_the_baseline_if_most_cases_lack_a_peer(write: Callable[..., Path]) -> None:
    cases = [changed(row, axes={"M": m, "N": 4096}) for m in (1, 2, 3) for row in both()]
    peer = record(60.0, variant="quack", role="peer", axes={"M": 1, "N": 4096})
    assert run("compare", "--from", write("few.jsonl", *cases, peer)).stdout.startswith("A: baseline; B: optimized\n")
    parts = write("parts.jsonl", record(60.0, role="part"))
    assert refused("compare", "--from", parts) == "error: no records to compare"


def test_compare_from_json_imports_neither_torch_nor_pandas(write: Callable[..., Path]) -> None:
    path = write("a.jsonl", *both())
    code = "import sys; from kerneltune.cli import app; app(sys.argv[1:], standalone_mode=False)"
    heavy = "print({'torch', 'triton', 'pandas', 'optuna', 'numpy', 'scipy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {heavy}", "compare", "--from", path], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"
