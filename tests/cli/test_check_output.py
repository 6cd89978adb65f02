"""Test the output of checks: failures, lines to read, the verdict."""

from pathlib import Path
from typing import Any

import pytest
from command_line import record, run
from literal_records import NO_TIMES

from kerneltune.reporting.naming import failure_lines
from kerneltune.sweep_run import SweepResult
from kerneltune.task import Outcome


def test_sweep_failures_of_one_case_and_reason_name_their_configs_once(engine: dict[str, Any], tmp_path: Path) -> None:
    fault = "load outside of x_ptr, for rmsnorm_fwd M=8192 N=4096 bfloat16 fp8"
    failed: dict[str, Any] = {"status": "failed", "reason": fault, **NO_TIMES}
    blocks = [record(variant="optimized", config={"block": 2**at}, **failed) for at in range(4)]
    engine["answer"] = [record(config=None, **failed), record(config=None, **failed), *blocks]
    result = run("sweep", "rmsnorm", "--results", tmp_path)
    assert result.stdout.splitlines()[-3:-1] == [
        "failed: rmsnorm_fwd baseline, optimized: te-8192x4096 M=8192 N=4096 bfloat16 fp8: load outside of",
        "  x_ptr; with 4 configs",
    ]


def test_sweep_failures_of_several_cases_with_one_reason_are_told_once(engine: dict[str, Any], tmp_path: Path) -> None:
    failed: dict[str, Any] = {
        "variant": "optimized",
        "status": "failed",
        "reason": "the launch failed: k.py:5: KeyError",
        **NO_TIMES,
    }
    rows = [record(axes={"M": 2**at, "N": 64}, **failed) for at in range(3)]
    engine["answer"] = [*rows, record(axes={"M": 9, "N": 64}, **{**failed, "reason": "y: 3 of 4 wrong"})]
    result = run("sweep", "rmsnorm", "--results", tmp_path)
    assert result.stdout.splitlines()[-4:-1] == [
        "failed: rmsnorm_fwd optimized: te-8192x4096 M=1 N=64 bfloat16 fp8 and 2 more cases: the launch",
        "  failed: k.py:5: KeyError",
        "failed: rmsnorm_fwd optimized: te-8192x4096 M=9 N=64 bfloat16 fp8: y: 3 of 4 wrong",
    ]


def test_sweep_failures_of_one_mistake_are_told_once(engine: dict[str, Any], tmp_path: Path) -> None:
    """The place of a Python error is the mistake, whatever stands around; without a place, reasons may differ in numbers."""
    reasons = ["the launch failed: k.py:5: KeyError", "does not compile for sm_90: k.py:5: CompilationError", "k.py:6: KeyError"]
    causes = ("; row 5 of x: large values", "; row 4 of x: negative values", "; 90 may be a cast of NaN")
    numbers = zip((3, 40, 500), causes, strict=True)
    reasons += [f"y: {number} of {4 * number} wrong, at most {number / 2}{cause}" for number, cause in numbers]
    rows = [
        record(
            variant="optimized", axes={"M": 2**at, "N": 64}, config={"block": 2**at}, status="failed", reason=reason, **NO_TIMES
        )
        for at, reason in enumerate(reasons)
    ]
    engine["answer"] = rows
    result = run("sweep", "rmsnorm", "--results", tmp_path)
    lines = " ".join(result.stdout.partition("FAILED")[0].split()).split("failed: rmsnorm_fwd optimized: te-8192x4096 ")[1:]
    assert [line.strip() for line in lines] == [
        f"M=1 N=64 bfloat16 fp8 and 1 more case: {reasons[0]}; with 2 configs",
        f"M=4 N=64 bfloat16 fp8: {reasons[2]}; with block=4",
        f"M=8 N=64 bfloat16 fp8 and 2 more cases: {reasons[3]}; with 3 configs",
    ]


@pytest.mark.parametrize(
    ("failing", "passing", "shown"),
    [
        ([(512, 2), (512, 8)], [(1024, 4), (2048, 8)], "block=512"),
        ([(512, 2), (256, 2)], [(1024, 4)], "block=512/256 warps=2"),
        ([(1, 1), (2, 1), (4, 1), (8, 1)], [(16, 1)], "block=1/2/4/…"),
        ([(512, 2), (1024, 4)], [(512, 4)], "2 configs"),
        ([(512, 2)], [(512, 4), (1024, 2)], "block=512 warps=2"),
        ([(512, 2)], [(512, 2)], ""),
    ],
)
def test_failure_names_knobs_in_which_its_configs_differ_from_those_that_passed(
    failing: list[tuple[int, int]], passing: list[tuple[int, int]], shown: str
) -> None:
    failed: dict[str, Any] = {**NO_TIMES, "status": "failed", "reason": "y: 3 of 4 wrong"}
    passed = {**NO_TIMES, "status": "checked"}
    rows = [record(config={"block": block, "warps": warps}, **failed) for block, warps in failing]
    rows += [record(config={"block": block, "warps": warps}, **passed) for block, warps in passing]
    (line,) = failure_lines([*rows, record(variant="optimized", config={"block": 512, "warps": 2}, **passed)])
    assert (
        line
        == f"rmsnorm_fwd baseline: te-8192x4096 M=8192 N=4096 bfloat16 fp8: y: 3 of 4 wrong{f'; with {shown}' if shown else ''}"
    )


def test_further_configs_that_passed_in_the_failed_case_tell_configs_apart() -> None:
    failed = record(**NO_TIMES, status="failed", reason="y: 3 of 4 wrong", config={"block": 512, "warps": 8})
    passed: dict[str, Any] = {**NO_TIMES, "status": "checked"}
    default = record(config={"block": 1024, "warps": 4}, **passed)
    assert failure_lines([default, failed])[0].endswith("wrong; with block=512 warps=8")
    for axes, shown in ((failed.axes, "warps=8"), ({"M": 1, "N": 64}, "block=512 warps=8")):
        others = [record(config={"block": 512, "warps": 2}, axes=axes, **passed)]
        assert failure_lines([default, failed], others)[0].endswith(f"wrong; with {shown}")


def test_values_that_host_code_keeps_are_one_mistake_without_a_config() -> None:
    begin = "right alone in a new process, and wrong after"
    rows = [
        record(**NO_TIMES, status="failed", reason=f"{begin} {call}: y: 3 of 4 wrong", config={"block": block}, axes={"M": block})
        for block, call in ((512, "case one"), (1024, "a call with other values"))
    ]
    (line,) = failure_lines([record(**NO_TIMES, status="checked", config={"block": 256}), *rows])
    assert line.endswith(f" M=512 bfloat16 fp8 and 1 more case: {begin} case one: y: 3 of 4 wrong")


@pytest.mark.parametrize(
    ("name", "options", "shown"),
    [
        ("odd,M=8192", {}, "odd,M=8192 N=4096 bfloat16 fp8"),
        ("odd,dtype=bfloat16,p=0.5", {"p": 0.5}, "odd,dtype=bfloat16,p=0.5 M=8192 N=4096 fp8"),
        ("odd,quant=fp8,N=8", {}, "odd,quant=fp8,N=8 M=8192 N=4096 bfloat16"),
        ("k-12345678", {"launch": "123456789abcdef0"}, "launch k-12345678 M=8192 N=4096"),
    ],
)
def test_failure_tells_each_value_of_a_derived_case_once(name: str, options: dict[str, Any], shown: str) -> None:
    failed = record(**NO_TIMES, case=name, options=options, status="failed", reason="y: 3 of 4 wrong", config=None)
    assert failure_lines([failed]) == [f"rmsnorm_fwd baseline: {shown}: y: 3 of 4 wrong"]


def test_failure_leaves_out_the_default_mode_and_policy() -> None:
    failed: dict[str, Any] = {**NO_TIMES, "status": "failed", "reason": "y: 3 of 4 wrong", "config": None}
    assert failure_lines([record(quant="none", **failed)])[0].startswith(
        "rmsnorm_fwd baseline: te-8192x4096 M=8192 N=4096 bfloat16: y"
    )
    assert " bfloat16 fp8 hot: y" in failure_lines([record(policy="hot", **failed)])[0]


@pytest.mark.usefixtures("engine")
def test_strict_check_fails_for_lines_that_no_text_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        Outcome("checked", "rmsnorm_fwd baseline: 12 configs on 1,024 cases, 48 of 60 pairs"),
        Outcome("noted", "rmsnorm_fwd: no check has two programs of k"),
        Outcome("noted", "rmsnorm_fwd optimized: equal rows"),
    ]
    checked = [record(**{**NO_TIMES, "status": "checked"})]
    monkeypatch.setattr("kerneltune.sweep_run.run_sweep", lambda *_: SweepResult(checked, [], lines))
    command = ["sweep", "rmsnorm", "--check-only", "--results", tmp_path]
    result = run(*command)
    assert (result.exit_code, result.stdout.splitlines()) == (
        0,
        [
            "device: NVIDIA H200",
            "",
            "op           variant   passed  failed  skipped  types  modes",
            "rmsnorm_fwd  baseline       1       0        0  bf16   fp8  2 lines to read",
            "",
            "rmsnorm_fwd baseline: 12 configs on 1,024 cases, 48 of 60 pairs",
            "to read: rmsnorm_fwd: no check has two programs of k",
            "to read: rmsnorm_fwd optimized: equal rows",
            "passed: 1 check, 2 lines to read (--strict fails)",
        ],
    )
    for accepted, left in (([], "2 lines"), (["two programs"], "1 line"), (["two programs", "no such"], "1 line")):
        result = run(*command, "--strict", *(word for text in accepted for word in ("--accept", text)))
        assert (result.exit_code, result.stdout.splitlines()[-1]) == (1, f"FAILED: {left} to read (--strict); 1 check passed")
        assert ("--accept 'no such': no line has this text" in result.stderr) is ("no such" in accepted)
        assert result.stdout.count("\naccepted: ") == 2 - int(left[0])
    result = run(*command, "--strict", "--accept", "rmsnorm")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "passed: 1 check")
    lines[:] = lines[:1]
    assert run(*command, "--strict").exit_code == 0


def test_sweep_that_skips_every_row_exits_with_2_and_a_reason(engine: dict[str, Any], tmp_path: Path) -> None:
    reasons = ["needs 9 bytes, 8 are free", "no fp8"]
    engine["answer"] = [record(variant=reason[:2], **{**NO_TIMES, "status": "skipped", "reason": reason}) for reason in reasons]
    result = run("sweep", "rmsnorm", "--results", tmp_path)
    assert "passed" not in result.stdout.splitlines()[-1]
    last = result.stderr.splitlines()[-1]
    assert last.endswith("sweeps/rmsnorm.yaml: nothing checked: 2 rows skipped: needs 9 bytes, 8 are free and 1 more")
    assert result.exit_code == 2


@pytest.mark.usefixtures("an_h200")
def test_sweep_on_a_gpu_that_times_no_row_shows_their_reasons_and_speaks_of_times(engine: dict[str, Any], tmp_path: Path) -> None:
    engine["answer"] = [record(**{**NO_TIMES, "status": "skipped", "reason": "needs 9 bytes"})]
    result = run("sweep", "rmsnorm", "--results", tmp_path)
    assert "skipped: needs 9 bytes" in result.stdout
    assert "On a GPU" not in result.stdout
    assert result.stderr.splitlines()[-1].endswith("nothing timed: 1 row skipped: needs 9 bytes")


def test_check_says_why_cases_are_skipped(engine: dict[str, Any], tmp_path: Path) -> None:
    reasons = ["N=33 is odd", "N=35 is odd", "N=35 is odd"]
    skipped = [record(**{**NO_TIMES, "status": "skipped", "reason": reason}) for reason in reasons]
    engine["answer"] = [record(**{**NO_TIMES, "status": "checked"}), *skipped]
    result = run("sweep", "rmsnorm", "--check-only", "--results", tmp_path)
    assert "rmsnorm_fwd baseline: skipped 3 cases: N=33 is odd, N=35 is odd\n" in result.stdout


def test_sweep_exits_with_1_if_an_own_variant_fails(engine: dict[str, Any], tmp_path: Path) -> None:
    failed: dict[str, Any] = {"status": "failed", "reason": "y: 3 of 4 wrong", **NO_TIMES}
    engine["answer"] = [record(), record(variant="optimized", **failed)]
    result = run("sweep", "rmsnorm", "--results", tmp_path)
    label = "te-8192x4096 M=8192 N=4096 bfloat16 fp8"
    assert result.stdout.splitlines()[-1] == f"failed: rmsnorm_fwd optimized: {label}: y: 3 of 4 wrong"
    assert result.exit_code == 1
    engine["answer"] = [record(), record(variant="eager", **failed)]
    assert run("sweep", "rmsnorm", "--results", tmp_path).exit_code == 0


def test_last_line_of_checks_says_whether_own_variants_passed(engine: dict[str, Any], tmp_path: Path) -> None:
    checked, failed = {**NO_TIMES, "status": "checked"}, {**NO_TIMES, "status": "failed", "reason": "y: 3 of 4 wrong"}
    for failing, last in (
        ("optimized", "FAILED: 1 of 2 checks"),
        ("eager", "passed: 1 check, 1 of other packages failed"),
    ):
        configs = [record(variant=failing, config={"block": block}, **failed) for block in (1, 2)]
        engine["answer"] = [record(**checked), record(variant=failing, **checked), *configs]
        result = run("sweep", "rmsnorm", "--check-only", "--results", tmp_path)
        assert (result.exit_code, result.stdout.splitlines()[-1]) == (int(failing == "optimized"), last)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("mine.py:3: reference: RuntimeError: no, for rmsnorm_fwd M=8192", 2),
        ("run 2: mine.py:3: reference: changes its input x", 2),
        ("reference: NoneType: expected a dict of output -> tensor", 2),
        ("my own.py:3: inputs: RuntimeError: no", 2),
        ("inputs: x was overwritten, and is no output", 1),
        ("mine.py:3: compare: None: expected a list of lines", 1),
        ("outputs: the reference gives z, the variant does not", 1),
    ],
)
def test_sweep_exits_with_2_if_inputs_or_reference_fail(reason: str, code: int, engine: dict[str, Any], tmp_path: Path) -> None:
    failed: dict[str, Any] = {"status": "failed", "reason": reason, **NO_TIMES}
    engine["answer"] = [record(**failed), record(variant="optimized", **failed | {"reason": "mine.py:9: y: 3 of 4 wrong"})]
    assert run("sweep", "rmsnorm", "--results", tmp_path).exit_code == code
