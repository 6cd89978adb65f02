"""The runner: a hang, a failure, Ctrl-C and a missing GPU."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from journey import HERE, ROOT, Journey
from proof_file import code_of, load_proof
from runner import gpus_of, parts
from subprocesses import wait_for

FAKES = str(HERE / "fakes.py")


def start(tmp_path: Path, *arguments: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"FAKE_PID": str(tmp_path / "pid"), "GPU_OUT": str(tmp_path / "out"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, FAKES, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def summary(tmp_path: Path) -> dict[str, dict[str, object]]:
    content = json.loads((tmp_path / "out" / "summary.json").read_text())
    return {one["name"]: one for one in content["journeys"]}


def pid_of_slow(tmp_path: Path) -> int:
    """Wait for the journey `slow`, and return its process."""
    file = tmp_path / "pid"
    wait_for(lambda: file.is_file() and bool(file.read_text()))
    return int(file.read_text())


def test_journeys_end_in_a_table_with_their_outputs_kept(tmp_path: Path) -> None:
    process = start(tmp_path, "--only", "fine,broken,hangs,unable,lacking")
    out, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (1, "")
    ended = summary(tmp_path)
    assert {name: one["passed"] for name, one in ended.items()} == {
        "fine": "yes", "broken": "no", "hangs": "no", "unable": "not run", "lacking": "not run",
    }  # fmt: skip
    assert ended["fine"]["reason"] == "on GPU 1"  # of two
    assert "kerneltune.stats" in ended["fine"]["modules"]
    assert ended["hangs"]["reason"] == "ended after 2 s"
    assert "before it hangs" in (tmp_path / "out" / "hangs.txt").read_text()
    assert (tmp_path / "out" / "broken.failed" / "place" / "left.txt").read_text() == "seen"
    assert "lacking  not run            0  no_such_package: not installed" in out
    assert out.splitlines()[-4:-1] == ["1 of 5 passed", "run alone: make gpu JOURNEY=broken", "run alone: make gpu JOURNEY=hangs"]
    kept = load_proof(tmp_path / "out" / "results" / "nvidia_fake" / "proof.json")
    assert {name: run.passed for name, run in kept.journeys.items()} == {"fine": True, "broken": False, "hangs": False}
    assert kept.journeys["fine"].commit == "4010a35"
    assert len(code_of(kept, "fine")["kerneltune.stats"]) == 8
    state = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"  # nobody may ask what became of it


def test_journeys_are_divided_among_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,5")
    assert gpus_of({"count": "2"}) == ["4", "7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpus_of({"count": "2"}) == ["0", "1"]
    assert gpus_of({}) == [""]
    journeys = [Journey(name, lambda _: None, limit_s, alone) for name, limit_s, alone in
                (("a", 400, False), ("b", 300, True), ("c", 200, False), ("d", 100, False))]  # fmt: skip
    names = {gpu: [one.name for one in part] for gpu, part in parts(journeys, ["0", "1"]).items()}
    assert names == {"0": ["a", "c", "d"], "1": ["b"]}


def test_runner_after_ctrl_c_keeps_results_of_ended_journeys(tmp_path: Path) -> None:
    process = start(tmp_path, "--only", "unable,slow")
    assert process.stdout
    while "unable: not run" not in process.stdout.readline():
        assert process.poll() is None
    pid_of_slow(tmp_path)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 130
    assert {name: one["passed"] for name, one in summary(tmp_path).items()} == {"unable": "not run", "slow": "interrupted"}
    assert "slow" in out


def test_runner_that_is_killed_keeps_the_proof_of_ended_journeys(tmp_path: Path) -> None:
    process = start(tmp_path, "--only", "fine,slow")
    assert process.stdout
    while "fine: yes" not in process.stdout.readline():
        assert process.poll() is None
    pid = pid_of_slow(tmp_path)
    process.kill()
    process.wait()
    os.kill(pid, signal.SIGKILL)
    kept = load_proof(tmp_path / "out" / "results" / "nvidia_fake" / "proof.json")
    assert {name: run.passed for name, run in kept.journeys.items()} == {"fine": True}


def test_runner_of_an_unknown_journey_fails_with_one_line(tmp_path: Path) -> None:
    process = start(tmp_path, "--only", "nosuch")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 2
    assert errors.startswith("error: JOURNEY: 'nosuch': expected one of fine, broken")
    assert errors.count("\n") == 1


def test_runner_without_a_gpu_fails_with_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"GPU_OUT": str(tmp_path), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(HERE)], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no NVIDIA GPU that torch can use: journeys run on one\n"


def test_registered_journeys_include_every_promised_one() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(HERE), "--only", "nosuch"], env=environment, capture_output=True, text=True, check=False
    )
    for name in ("sweep_quick", "gate_run", "adopt_script", "train_experts_compiled", "decode_int4", "gpu_tests"):
        assert name in done.stderr
