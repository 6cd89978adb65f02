"""Nsight Compute's CSV pages, in the form that it documents and prints, and a stand-in for the program itself."""

import os
from pathlib import Path

import pytest

from kerneltune.inspection.ncu import ConflictLine, find_ncu, parse_raw, parse_source, profile, why_refused

RAW = """\
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"dram__throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum",\
"l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum","launch__occupancy_limit_blocks","launch__occupancy_limit_registers",\
"launch__occupancy_limit_shared_mem","launch__occupancy_limit_warps","launch__registers_per_thread",\
"lts__t_sector_hit_rate.pct","sm__maximum_warps_per_active_cycle_pct","sm__warps_active.avg.pct_of_peak_sustained_active",\
"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_long_scoreboard_not_issued_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio"
"","","","","","","","","","","","%","ns","","block","block","block","block","register/thread","%","%","%","inst","inst","inst","inst"
"0","71","python3.11","127.0.0.1","_rmsnorm_fwd_rows","1","7","(256, 1, 1)","(8192, 1, 1)","0","9.0","91.27","34,816",\
"1,048,576","32","6","15","8","40","33.41","75","61.9","3.5","17.25","16","1"
"1","71","python3.11","127.0.0.1","_rmsnorm_bwd_dgamma","1","7","(256, 1, 1)","(64, 1, 1)","0","9.0","4.1","2,048",\
"0","32","8","8","8","32","n/a","100","12","0.5","2","1","1"
"""

SOURCE = """\
"Kernel Name","_rmsnorm_fwd_transpose"
"File Path","/src/kerneltune/ops/rmsnorm/kernels.py"
"Line No","Source","Address","Source","Warp Stall Sampling (All Samples)","L1 Conflicts Shared N-Way",\
"L1 Wavefronts Shared Excessive"
"226","    x = tl.load(x_ptr + offsets)","-","-","120","0","0"
"","","0x7f00","LDG.E.128 R4, desc[UR8][R8.64]","120","0","0"
"241","    words = tl.trans(q)","-","-","40","4.5","12,288"
"","","0x7f10","STS.64 [R2], R4","40","4.5","12,288"
"242","    pass","-","-","0","0","0"
"Kernel Name","_bare"
"Address","Source","Warp Stall Sampling (All Cycles)","L1 Wavefronts Shared Excessive"
"0x7f20","      STS [R2], R4 ","3","7"
"""

INSTRUCTIONS = SOURCE[SOURCE.index('"Kernel Name","_bare"') :]


def test_parse_raw_gives_a_profile_per_launch() -> None:
    rows, dgamma = parse_raw("==PROF== Connected to process 71\n" + RAW)
    assert (rows.kernel, rows.time_us, rows.limiter) == ("_rmsnorm_fwd_rows", pytest.approx(34.816), "registers")
    assert rows.values == {
        "DRAM % of peak": 91.27,
        "L2 hit rate %": 33.41,
        "shared bank conflicts": 1048576,
        "registers": 40,
        "occupancy possible %": 75,
        "occupancy reached %": 61.9,
    }
    assert rows.stalls == (("long scoreboard", 17.25), ("barrier", 3.5))
    assert dgamma.limiter == "registers, shared mem, warps"
    assert "L2 hit rate %" not in dgamma.values  # n/a


def test_parse_raw_and_parse_source_of_no_kernels_are_empty() -> None:
    assert parse_raw("") == parse_raw("==WARNING== No kernels were profiled.\n") == parse_raw('"ID","Kernel Name"\n') == []
    assert parse_source("==ERROR== nothing\n") == []


def test_parse_source_adds_instructions_up_by_source_line() -> None:
    assert parse_source(SOURCE) == [
        ConflictLine("kernels.py:241", "words = tl.trans(q)", 12288),
    ]


def test_parse_source_without_lines_gives_instructions() -> None:
    assert parse_source(INSTRUCTIONS) == [ConflictLine("0x7f20", "STS [R2], R4", 7)]


def test_why_refused_names_the_missing_permission() -> None:
    output = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n"
    assert "CAP_SYS_ADMIN" in why_refused(output)
    assert "\n" not in why_refused(output)
    assert why_refused("==ERROR== Profiling is not supported on device 0.").startswith("ncu does not support this GPU")
    assert why_refused("==PROF== Disconnected") == ""


def stand_in(folder: Path, body: str) -> Path:
    """Write an executable called ncu."""
    path = folder / "ncu"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


PAGES = """
for word in "$@"; do
  [ "$word" = raw ] && exec cat "$PAGES/raw.csv"
  [ "$word" = source ] && exec cat "$PAGES/source.csv"
  [ "$last" = -o ] && : > "$word"
  last="$word"
done
echo "$@" > "$PAGES/arguments"
"""


def test_profile_runs_ncu_once_and_reads_two_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raw.csv").write_text(RAW)
    (tmp_path / "source.csv").write_text(SOURCE)
    monkeypatch.setenv("PAGES", str(tmp_path))
    profiles, lines = profile(stand_in(tmp_path, PAGES), ["python", "kernel.py"], tmp_path)
    assert [p.kernel for p in profiles] == ["_rmsnorm_fwd_rows", "_rmsnorm_bwd_dgamma"]
    assert [line.place for line in lines] == ["kernels.py:241"]
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("--clock-control none --profile-from-start off")
    assert arguments.endswith("python kernel.py\n")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM - no'; exit 1", "ncu was refused: this user may not read the GPU's counters"),
        ("echo '==ERROR== Unknown option'; echo bye; exit 1", "ncu made no report: ==ERROR== Unknown option"),
        ("exit 1", "ncu made no report: it said nothing"),
        ('while [ "$1" != -o ]; do [ $# = 0 ] && exit; shift; done; : > "$2"', "ncu saw no kernel: it said nothing"),
    ],
)
def test_profile_that_ncu_refuses_raises_one_line(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        profile(stand_in(tmp_path, body), ["true"], tmp_path)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_profile_with_ncu_that_cannot_be_run_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"cannot run {tmp_path}/ncu: No such file"):
        profile(tmp_path / "ncu", ["true"], tmp_path)


def test_find_ncu_returns_the_program_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{stand_in(tmp_path, 'true').parent}{os.pathsep}{os.environ['PATH']}")
    assert find_ncu() == tmp_path / "ncu"
