"""The compile pool, on the CPU: facts of real kernels, and jobs that raise, hang or die.

Runs in one process of its own, without Triton's interpreter, which this process may have on.
"""

import json
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pool_jobs
import pytest
import triton
from asserting import every
from subprocesses import TESTS, environment, interrupted_stops

from kerneltune.measuring.assembly import TARGETS
from kerneltune.measuring.compiler import CompilePool, CompileResult, Kernel
from kerneltune.processes.start import WorkerStoppedError
from kerneltune.processes.worker import Worker

THREADS, REGISTER_FILE = 32, 65536


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what pool_jobs.main printed, and Triton's disk cache after it."""
    cache = str(tmp_path_factory.mktemp("triton"))
    env = environment(TRITON_CACHE_DIR=cache)
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", "import pool_jobs; pool_jobs.main()"]
    done = subprocess.run(command, cwd=TESTS, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout) | {"cache": cache}


def test_pool_compiles_kernels_for_sm_90_in_the_order_of_jobs(answers: dict[str, Any]) -> None:
    *compiled, raised = answers["real"]
    assert [c["error"] for c in compiled] == [""] * 4
    names = [[kernel["name"] for kernel in c["kernels"]] for c in compiled]
    # the slowest job comes first: an answer that arrives earlier still waits for its turn
    assert names == [
        ["_rmsnorm_bwd_main", "_rmsnorm_bwd_dgamma"],
        ["_stream"],
        ["_rmsnorm_fwd_loop"],
        ["_rmsnorm_fwd_loop", "transpose_bytes"],
    ]
    assert raised["kernels"] == []
    assert "RuntimeError" in raised["error"]


def test_pool_compiles_the_first_config_of_an_autotuner_and_keeps_no_times(answers: dict[str, Any]) -> None:
    autotuned = answers["autotuned"][0]
    assert [(kernel["name"], kernel["warps"]) for kernel in autotuned["kernels"]] == [("_double", 2)], autotuned["error"]
    assert not list(Path(answers["cache"]).glob("**/*autotune.json"))


def test_result_of_host_code_that_reads_values_is_unknown_and_names_what_compilations_lack(answers: dict[str, Any]) -> None:
    _autotuned, *reading, failing = answers["autotuned"]
    line = pool_jobs.waiting.__code__.co_firstlineno + 2
    assert len(reading) == len(pool_jobs.READING)
    for result in reading:
        assert result["unknown"]
        assert result["error"].startswith(f"pool_jobs.py:{line}: host code reads values, which a compilation lacks: "), result
    assert (failing["unknown"], failing["error"].partition(": ")[2]) == (False, "RuntimeError: no such layout: x")


def test_pool_tries_a_job_of_a_killed_worker_once_more_and_then_fails_it(answers: dict[str, Any]) -> None:
    errors = [one["error"] for one in answers["killed"]]
    disk = f"pool_jobs.py:{pool_jobs.disk_is_full.__code__.co_firstlineno + 2}: OSError: [Errno 28] No space left on device"
    assert errors == ["", "", "the compiler died: exit code 9, twice", disk, "", "", "", ""]
    assert [one["crashed"] for one in answers["killed"]] == [False, False, True, True, False, False, False, False]


def test_job_whose_compiler_is_sent_sigterm_is_stopped_and_has_no_result() -> None:
    with CompilePool(TARGETS["sm_90"], 1) as pool:
        with pytest.raises(WorkerStoppedError, match=r"^the compiler was ended from outside: exit code -15$"):
            list(pool.compile([pool_jobs.job(pool_jobs.terminated)]))
        (following,) = pool.compile([pool_jobs.job(pool_jobs.fine)])
        assert following.error == ""


def test_pool_ends_programs_of_a_cancelled_job(answers: dict[str, Any]) -> None:
    assert answers["programs"] == [False]


def test_pool_after_a_cancelled_job_compiles_on(answers: dict[str, Any]) -> None:
    assert [one["error"] for one in answers["given up"]] == ["", ""]


def test_pool_compiles_casts_for_gfx942_into_fnuz_types(answers: dict[str, Any]) -> None:
    assert {c["error"] for c in answers["fnuz"]} == {""}
    assert {kernel["name"] for c in answers["fnuz"] for kernel in c["kernels"]} >= {
        "_cast_rows", "cast_both_groups", "_cast_transpose_groups", "gate_early", "gate_again", "cast_early", "cast_again",
    }  # fmt: skip
    assert every(c["kernels"] for c in answers["fnuz"])


def test_compile_result_has_registers_spills_and_shared_memory(answers: dict[str, Any]) -> None:
    bwd, stream, plain, transposed = (c["kernels"] for c in answers["real"][:4])
    for kernel in [*bwd, *stream, *plain, *transposed]:
        assert 16 <= kernel["registers"] <= 255, kernel
        assert kernel["registers"] * kernel["warps"] * THREADS <= REGISTER_FILE, kernel
        assert kernel["spill_bytes"] == 0, kernel
        assert 0 <= kernel["shared_bytes"] <= TARGETS["sm_90"].program_bytes, kernel
    assert [kernel["warps"] for kernel in (*bwd, *stream, *plain, *transposed)] == [4, 8, 8, 4, 8, 4]
    # only before the transpose are rows split over programs that wait for each other
    assert [kernel["cooperative"] for kernel in (*bwd, *stream, *plain, *transposed)] == [False] * 4 + [True, False]
    assert stream[0]["shared_bytes"] == 0  # nothing to reduce, nothing to pipeline
    row = 1024 * 2
    assert row * 2 <= plain[0]["shared_bytes"] <= row * 6  # the tiles that three stages keep in flight, and the reduction
    assert 64 * 128 <= transposed[1]["shared_bytes"] <= 65536  # a tile of bytes, to be turned


def test_compile_result_of_code_that_stores_undefined_registers_is_an_error(answers: dict[str, Any]) -> None:
    """Read code that ptxas 12.8 makes of a tile of fp8 stored twice (triton-lang/triton#11111)."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    version = subprocess.run([assembler, "--version"], capture_output=True, text=True, check=True).stdout
    if "release 12.8" not in version:
        pytest.skip(f"another ptxas may compile it right: {version.splitlines()[-1]}")
    (wrong,) = answers["wrong"]
    (kernel,) = wrong["kernels"]
    assert kernel["stray_stores"] > 0
    assert wrong["error"] == (
        f"_twice: wrong code: ptxas stores the stack pointer in {kernel['stray_stores']} places where numbers belong"
    )
    assert {kernel["stray_stores"] for c in answers["real"] + answers["fnuz"] for kernel in c["kernels"]} == {0}


def test_compile_result_has_resources_of_its_largest_kernel(answers: dict[str, Any]) -> None:
    bwd = answers["real"][0]
    assert bwd["program_registers"] == max(kernel["registers"] * kernel["warps"] for kernel in bwd["kernels"])
    two = CompileResult((Kernel("a", 8, 40, 0, 0), Kernel("b", 4, 64, 16, 0)))
    assert (two.program_registers, two.spill_bytes) == (320, 16)
    assert (CompileResult((), "x").program_registers, CompileResult((), "x").spill_bytes) == (0, 0)


def test_pool_interrupted_while_it_starts_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[BaseProcess | None] = []
    begin = Worker.begin

    def interrupted(worker: Worker) -> None:
        if begun:
            raise KeyboardInterrupt
        begin(worker)
        begun.append(worker.process)

    monkeypatch.setattr(Worker, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt), CompilePool(TARGETS["sm_90"], 2):
        raise AssertionError("the pool was entered")
    (process,) = begun
    assert process is not None
    assert not process.is_alive()


def test_pool_interrupted_twice_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = interrupted_stops(monkeypatch)
    with pytest.raises(KeyboardInterrupt), CompilePool(TARGETS["sm_90"], 2):
        pass
    assert len(stopped) == 2


def test_pool_fails_only_the_job_that_raises_hangs_or_dies(answers: dict[str, Any]) -> None:
    assert [c["error"] for c in answers["broken"]] == [
        "",
        f"pool_jobs.py:{pool_jobs.boom.__code__.co_firstlineno + 2}: RuntimeError: no such layout: odd",
        "",
        "compiling took longer than 1 s",
        "compiling took longer than 1 s",
        "",
        "the compiler died: exit code 3, twice",
        "",
        "ValueError: no operator unknown in OP or OPS of pool_jobs or of a package that holds it",
        "",
    ]
    assert every(c["kernels"] == [] for c in answers["broken"])


def test_pool_stops_compiling_a_kernel_that_cannot_be_launched(answers: dict[str, Any]) -> None:
    threads, memory = (c["error"] for c in answers["large"])
    assert "out of resource: threads, Required: 2048, Hardware limit: 1024" in threads
    assert "out of resource: shared memory" in memory
    assert "Hardware limit: 65536" in memory
    assert not list(Path(answers["cache"]).glob("*/_rmsnorm_fwd_once.ttir"))  # refused before its first stage
    assert list(Path(answers["cache"]).glob("*/_plain.ttgir"))
    amdgcn = [path.name for path in Path(answers["cache"]).glob("*/*.amdgcn")]
    assert amdgcn
    assert "_plain.amdgcn" not in amdgcn


def test_error_in_a_function_that_a_kernel_calls_names_its_line() -> None:
    with CompilePool(TARGETS["sm_90"], 1) as pool:
        (result,) = pool.compile([pool_jobs.job(pool_jobs.calling)])
    line = pool_jobs.times_a_global.fn.__code__.co_firstlineno + 2
    assert result.error.startswith(f"pool_jobs.py:{line}: CompilationError: "), result.error
    assert "Cannot access global variable LIMIT" in result.error
