"""Runs for test_compiler.py, of an operator that compilers import, and the script that compiles them outside pytest.

pytest's process has Triton's interpreter on and could not compile; `main` runs in a process of its own, without it.
"""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from kerneltune.measuring.assembly import TARGETS
from kerneltune.measuring.compiler import CompilePool, CompileResult
from kerneltune.spec import Case, Op, Traffic, Variant
from kerneltune.task import Run, Task

READING = ("item", "tolist", "numpy", "cpu", "nonzero")
"""Methods of a tensor that wait for its values."""


CASE = Case("any", (), "float32")


@dataclass(frozen=True)
class Argument:
    """Hold the second argument of a function as the knob of a config."""

    value: Any = None


def op_of(module: str, inputs: Callable[..., Any], *functions: Callable[..., Any]) -> Op:
    """Return an operator whose variants call functions of inputs and an argument; its module holds it as `OP`."""

    def variant(function: Callable[..., Any]) -> Variant:
        return Variant(function.__name__, lambda given, config: function(given, config.value), Argument)

    return Op(
        name="jobs", axes=(), dtypes=("float32",), inputs=lambda case, device: inputs(case, device=device),
        reference=dict, compare=lambda *_: [], traffic=lambda _case: Traffic(0, 0),
        variants=tuple(map(variant, functions)), module=module,
    )  # fmt: skip


def run_of(op: Op, function: Callable[..., Any], value: object = None, case: Case = CASE) -> Run:
    """Return the run that calls a function of `op_of` with an argument."""
    return Run(Task(op, case, op.variant(function.__name__)), Argument(value))


def no_inputs(_case: Case, *, device: str) -> Mapping[str, Any]:
    """Make inputs that must be made on the meta device."""
    assert device == "meta"
    return {"x": torch.empty(4, device=device)}


def fine(inputs: Mapping[str, Any], _config: object) -> None:
    """Launch nothing."""
    assert inputs["x"].is_meta


@triton.autotune(
    [triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128}, num_warps=4)],
    key=["N"],
    restore_value=["x_ptr"],
    cache_results=True,
)
@triton.jit
def _double(x_ptr, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, at < N, other=0.0), at < N)


LIMIT = 3.0


@triton.jit
def times_a_global(x):
    return x * LIMIT


@triton.jit
def _calls_a_function(x_ptr):
    tl.store(x_ptr, times_a_global(tl.load(x_ptr)))


def calling(inputs: Mapping[str, Any], _config: object) -> None:
    """Launch a kernel that calls a function which Triton refuses."""
    _calls_a_function[(1,)](inputs["x"])


def autotuned(inputs: Mapping[str, Any], _config: object) -> None:
    """Launch a kernel with an autotuner of its own."""
    _double[(1,)](inputs["x"], 4)


def waiting(inputs: Mapping[str, Any], method: str) -> None:
    """Read a value of a tensor."""
    getattr(inputs["x"][0], method)()


def boom(_inputs: Mapping[str, Any], config: str) -> None:
    """Fail as a compiler may."""
    raise RuntimeError(f"no such layout: {config}\nand a second line")


def hang(_inputs: Mapping[str, Any], seconds: float) -> None:
    """Return too late."""
    time.sleep(seconds)


def wait(_inputs: Mapping[str, Any], file: str) -> None:
    """Return when a file is there."""
    while not os.path.exists(file):
        time.sleep(0.01)


def assemble(_inputs: Mapping[str, Any], file: str) -> None:
    """Run a program that does not end, as ptxas may not."""
    with subprocess.Popen(["sleep", "3600"]) as program, open(file, "w") as pid:
        pid.write(str(program.pid))


def die(_inputs: Mapping[str, Any], code: int) -> None:
    """Take the worker with it."""
    os._exit(code)


def disk_is_full(_inputs: Mapping[str, Any], _config: object) -> None:
    """Fail as Triton's cache does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def killed_once(_inputs: Mapping[str, Any], marker: str) -> None:
    """Be killed the first time, as by the operating system where memory is short."""
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


def terminated(_inputs: Mapping[str, Any], _config: object) -> None:
    """Be sent SIGTERM, as all processes of a batch job are."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60.0)


def note_process(_inputs: Mapping[str, Any], file: str) -> None:
    """Write down who compiles."""
    with open(file, "a") as pids:
        pids.write(f"{os.getpid()}\n")


OP = op_of(
    __name__, no_inputs, fine, calling, autotuned, waiting, boom, hang, wait, assemble, die, disk_is_full, killed_once,
    terminated, note_process,
)  # fmt: skip


def killed(pool: CompilePool, folder: str) -> list[CompileResult]:
    """Return the results of jobs whose workers are killed: while they compile, always, and between two jobs."""
    results = list(pool.compile([job(killed_once, f"{folder}/once"), job(fine), job(die, 9), job(disk_is_full)]))
    results += list(pool.compile([job(note_process, f"{folder}/pids")]))
    with open(f"{folder}/pids") as pids:
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
            while os.path.exists(f"/proc/{pid}"):
                time.sleep(0.01)
    return results + list(pool.compile([job(fine)] * 3))


def job(function: Callable[..., Any], value: object = None) -> Run:
    """Return the run of a function of this module."""
    return run_of(OP, function, value)


def broken(pool: CompilePool, timeout_s: float) -> list[CompileResult]:
    """Run good jobs between bad jobs of every kind; as many hang as there are workers, so that later jobs need new workers."""
    hung = [job(hang, 3600.0)] * pool.workers
    unknown = Run(Task(replace(OP, name="unknown"), CASE, OP.variants[0]), Argument())
    bad = [job(fine), job(boom, "odd"), job(fine), *hung, job(fine), job(die, 3), job(fine), unknown, job(fine)]
    return list(pool.compile(bad, timeout_s))


def assembling(pool: CompilePool, folder: str) -> list[bool]:
    """Return whether the program of a job that hangs still runs after the job was given up."""
    pid, timeout_s = Path(folder, "pid"), 1.0
    while not (pid.exists() and pid.read_text()):  # given up before the program ran
        (compiled,) = pool.compile([job(assemble, str(pid))], timeout_s)
        assert compiled.crashed
        timeout_s *= 4
    with suppress(OSError):
        about = Path("/proc", pid.read_text(), "stat").read_text()
        return [about.rpartition(")")[2].split()[0] != "Z"]
    return [False]


def given_up(pool: CompilePool, file: str) -> list[CompileResult]:
    """Give up a compiling job, which its worker compiles to the end, and a waiting job, which is not begun."""
    running = [pool.submit(job(wait, file)) for _ in range(pool.workers)]
    waiting = pool.submit(job(boom, "never begun"))
    while not all(one.running() or one.done() for one in running):
        time.sleep(0.01)
    for one in (*running, waiting):
        one.cancel()
    assert waiting.cancelled()
    Path(file).touch()
    return [one.result() for one in running]


def real(pool: CompilePool) -> list[CompileResult]:
    """Compile a config of each operator's kernels, and among them a job that raises."""
    from kerneltune import ops
    from kerneltune.ops.rmsnorm import BwdConfig, FwdConfig
    from kerneltune.ops.stream import StreamConfig

    operators = ops.load()
    sizes = (("M", 512), ("N", 1024))
    stream = Case("s", (("read", 1 << 20), ("write", 1 << 20)), "int32")
    fwd = tuple((name, values[0]) for name, values in operators["rmsnorm_fwd"].options.items())
    plain = Case("p", sizes, "bfloat16", "none", fwd)
    transposed = Case("t", (("M", 512), ("N", 16384)), "bfloat16", "fp8_t", fwd)
    bwd = Case("b", sizes, "bfloat16", "none", (("zero_centered", False),))
    wanted = [
        ("rmsnorm_bwd", "optimized", bwd, BwdConfig(rows=1, cols=1024, split=False, warps=4, ctas=1, stages=2)),
        ("stream", "baseline", stream, StreamConfig(1024, 8, 0)),
        ("rmsnorm_fwd", "optimized", plain, FwdConfig(1, 1024, False, 4, 2, 3, False)),
        ("rmsnorm_fwd", "optimized", transposed, FwdConfig(1, 4096, True, 8, 1, 2, False)),
    ]
    jobs = [Run(Task(operators[op], case, operators[op].variant(name)), config) for op, name, case, config in wanted]
    for (op, name, case, config), _ in zip(wanted, jobs, strict=True):
        assert operators[op].variant(name).invalid(case, config) is None
    return list(pool.compile([*jobs, job(boom, "last")]))


def fnuz(pool: CompilePool) -> list[CompileResult]:
    """Compile the kernels of every cast into a fp8 type of AMD's CDNA 3, the two types in turns, under default configs.

    Of casts with the same kernels the first is compiled, because the compiler takes up to 20 s for each.
    """
    from kerneltune import ops

    casts = {}
    for op in ops.load().values():
        if op.module.startswith("kerneltune.ops.fp8.") and "bfloat16" in op.dtypes:
            modules = {str(getattr(value, "__module__", "")) for value in vars(sys.modules[op.module]).values()}
            casts.setdefault(frozenset(name for name in modules if ".kernels." in name), op)
    jobs = []
    sizes = {"M": 256, "N": 512, "N1": 512, "N2": 128, "K": 256, "E": 2, "G": 2}
    for op, fp8_format in zip(casts.values(), itertools.cycle(("e4m3fnuz", "e5m2fnuz"))):
        options = {name: values[0] for name, values in op.options.items()} | {"fp8_format": fp8_format}
        case = Case("fnuz", tuple((axis, sizes[axis]) for axis in op.axes), "bfloat16", "fp8", tuple(options.items()))
        variant = op.variant("optimized")
        jobs.append(Run(Task(op, case, variant), variant.default_config(case)))
    return list(pool.compile(jobs))


def too_large(pool: CompilePool) -> list[CompileResult]:
    """Compile a program of more threads than a program may have, and one of more shared memory, on gfx942."""
    from kerneltune import ops
    from kerneltune.ops.int4_gemm.baselines.plain import PlainConfig
    from kerneltune.ops.rmsnorm import FwdConfig

    norm, gemm = ops.load()["rmsnorm_fwd"], ops.load()["int4_gemm"]
    rows = Case("rows", (("M", 512), ("N", 8192)), "bfloat16", "none", tuple((name, v[0]) for name, v in norm.options.items()))
    product = Case(
        "product", tuple((axis, 512) for axis in gemm.axes), "bfloat16", "int4", tuple((n, v[0]) for n, v in gemm.options.items())
    )
    jobs = [
        Run(Task(norm, rows, norm.variant("optimized")), FwdConfig(1, 8192, False, 32, 0, 1, False)),
        Run(Task(gemm, product, gemm.variant("baseline")), PlainConfig(64, 64, 128, 4, 6)),
    ]
    return list(pool.compile(jobs))


def wrong_code(pool: CompilePool) -> list[CompileResult]:
    """Compile a kernel that ptxas 12.8 compiles into wrong code."""
    import stray_stores

    return list(pool.compile([run_of(stray_stores.OP, stray_stores.run)]))


def main() -> None:
    """Print the answers of the pool as JSON."""
    with CompilePool(TARGETS["sm_90"], workers=2) as pool, tempfile.TemporaryDirectory() as folder:
        wrong = wrong_code(pool)
        compiled = real(pool)
        kept = given_up(pool, f"{folder}/go_on")
        mixed = broken(pool, timeout_s=1.0)
    with CompilePool(TARGETS["gfx942"], workers=2) as pool:
        answers = {"real": compiled, "given up": kept, "broken": mixed, "fnuz": fnuz(pool), "large": too_large(pool)}
    with CompilePool(TARGETS["sm_90"], workers=1) as pool, tempfile.TemporaryDirectory() as folder:
        answers["killed"] = killed(pool, folder)
        programs = assembling(pool, folder)
        answers["autotuned"] = list(pool.compile([job(autotuned), *(job(waiting, name) for name in READING), job(boom, "x")]))
    answers["wrong"] = wrong
    answer_rows = {
        name: [asdict(c) | {"program_registers": c.program_registers} for c in results] for name, results in answers.items()
    }
    json.dump(answer_rows | {"programs": programs}, sys.stdout)
