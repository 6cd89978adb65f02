"""Calls whose host depends on the config: the override, the checks, tuning on a GPU that is none, and the engines' tables."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_gpu
import numpy as np
import pytest
import torch
from fake_gpu import Bench
from typer.testing import CliRunner
from warm_python import python

from kerneltune.adopt.expert_layer import named_weights
from kerneltune.adopt.getter import (
    CallCase,
    GetterSpec,
    installed,
    make_call,
    probe,
    read_spec,
    write_spec,
)
from kerneltune.adopt.getter_tuning import ENGINE_TOKENS, check_getter
from kerneltune.cli import app
from kerneltune.stats import Samples
from kerneltune.task import Evaluation, Outcome, Task

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "adopted_packages"
EXAMPLE = str(EXAMPLES / "fused_moe.py")
SIZES = {"experts": 4, "hidden": 64, "inner": 32, "top_k": 2}
ALL_SIZES = ["--tokens", "1", *(f"--size={name}={size}" for name, size in SIZES.items())]
SMALL = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
LARGE = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
_numbers = itertools.count()


@pytest.fixture
def fused_moe(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import the example anew, without an override."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "fused_moe", raising=False)
    installed.cache_clear()
    import fused_moe

    yield fused_moe
    installed.cache_clear()
    del sys.modules["fused_moe"]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command probe in this process, because a fresh process takes longer."""

    def work_here(_count: int, work: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
        yield work(*arguments)

    monkeypatch.setattr("kerneltune.processes.start.in_fresh_processes", work_here)


def spec_of(dtype: str, named: str = "") -> GetterSpec:
    return GetterSpec("", "", "", dtype, [], weights=named_weights(named))


def facts_of(tokens: Sequence[int], **fields: Any) -> GetterSpec:
    cases = [CallCase({"tokens": each, **SIZES}) for each in tokens]
    return GetterSpec(
        f"{EXAMPLE}:get_config", f"{EXAMPLE}:fused_experts", str(EXAMPLES), fields.pop("dtype", "float32"), cases, **fields
    )


def program(folder: Path, text: str) -> str:
    """Write a module of a name of its own; return the file."""
    path = folder / f"program_{next(_numbers)}.py"
    path.write_text("import functools\nimport torch\n" + text)
    return str(path)


def probed(file: str, **fields: Any) -> GetterSpec:
    """Probe the functions `get_config` and `case` of a file."""
    cases = [CallCase({"rows": 4})]
    return probe(GetterSpec(f"{file}:get_config", f"{file}:case", str(Path(file).parent), "float32", cases, **fields))


@pytest.mark.parametrize("config", [None, LARGE, {**SMALL, "BLOCK_SIZE_M": 32, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 4}])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 5, 2), (9, 5, 2), (40, 3, 3)])
def test_example_of_fused_experts_agrees_with_torch(
    fused_moe: Any, tokens: int, experts: int, top_k: int, config: dict[str, int] | None
) -> None:
    sizes = {"tokens": tokens, "experts": experts, "hidden": 64, "inner": 48, "top_k": top_k}
    call: Any = make_call(spec_of("float32"), fused_moe.fused_experts, sizes, "cpu", 0)
    getter = installed("fused_moe:get_config", str(EXAMPLES))
    getter.knobs = config
    expected = fused_moe.checked_by(*call.keywords.values())
    assert (call() - expected).norm() < 2e-3 * expected.norm()  # products of fp32 round to tf32


def test_probe_finds_the_own_config_of_each_call_and_the_options_that_reach_the_kernel(fused_moe: Any) -> None:
    probed_facts = probe(facts_of((1, 9)))
    assert [one.own for one in probed_facts.cases] == [SMALL, LARGE]
    assert probed_facts.options == ["num_warps", "num_stages"]
    assert probed_facts.cases[0].bytes == 4 * (64 + 4 * 3 * 32 * 64 + 2 + 2)  # activations, weights, and two pairs


OVERRIDDEN = """
class Choice:
    @staticmethod
    def of_class(rows): return {"BLOCK": 4, "name": "own"}
def get_config(rows): return {"BLOCK": 4}, "more"
"""


def test_override_replaces_the_getter_in_every_module_and_only_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = Path(program(tmp_path, OVERRIDDEN))
    user: dict[str, Any] = {}
    importing = ModuleType(f"{file.stem}_user")
    exec(f"from {file.stem} import get_config", user)
    vars(importing).update(user)
    monkeypatch.setitem(sys.modules, importing.__name__, importing)
    getter = installed(f"{file}:get_config", str(tmp_path))
    getter.knobs = {"BLOCK": 8, "num_warps": 2}
    assert importing.get_config(3) == ({"BLOCK": 8, "num_warps": 2}, "more")
    of_class = installed(f"{file.stem}:Choice.of_class", str(tmp_path))
    of_class.knobs = {"BLOCK": 2}
    assert sys.modules[file.stem].Choice.of_class(3) == {"BLOCK": 2, "name": "own"}


NAMED = """
from typing import NamedTuple
class Chosen(NamedTuple):
    config: dict
    is_tuned: bool
def get_config(): return Chosen({"BLOCK": 4, "num_warps": 2}, False)
def call(rows):
    chosen = get_config()
    return torch.ones(rows) * chosen.config.pop("BLOCK") / chosen.config["num_warps"]
def case(rows): return functools.partial(call, rows)
"""


def test_getter_of_a_named_tuple_whose_dict_the_host_changes_is_probed_and_overridden(tmp_path: Path) -> None:
    file = program(tmp_path, NAMED)
    facts = probed(file)
    assert facts.cases[0].own == {"BLOCK": 4, "num_warps": 2}
    getter = installed(f"{file}:get_config", str(tmp_path))
    getter.knobs = {"BLOCK": 8}
    assert sys.modules[Path(file).stem].call(2).tolist() == [4.0, 4.0]


GOOD = "def get_config(): return {'BLOCK': 4}\n"
BAD = {
    "call: FILE: no launch behind the getter, which gave None or a table, has integers by name": "def get_config(): return None\n"
    "def case(rows): return lambda: torch.ones(int(get_config() is None))\n",
    "getter: FILE: returned tensor([[1., 1., 1., 1., 1., 1., 1., 1.], [1., 1., 1., 1., 1… (Tensor): expected a dict of": "def "
    "get_config(): return torch.ones(8, 8)\ndef case(rows): return get_config\n",
    "call: FILE: never asks the getter": GOOD + "def case(rows): return lambda: torch.ones(rows)\n",
    "call: FILE: asks the getter at its first call only: the answer is kept elsewhere": GOOD
    + "@functools.cache\ndef kept(): return get_config()\ndef case(rows): return lambda: torch.ones(kept()['BLOCK'])\n",
    "call: FILE: fails with its own config: FILE:LINE: ZeroDivisionError: ": GOOD + "def case(rows): return lambda: 1 // 0\n",
    "call: argument columns: missing: give --size columns=VALUE": GOOD + "def case(rows, columns): return None\n",
    "call: size rows: the function takes none: expected one of columns": GOOD + "def case(columns=1, dtype=0): return None\n",
    "call: size rows: the function takes none: expected one of tokens, experts, hidden, inner, top_k": GOOD
    + "def case(hidden_states, w1, w2, topk_weights, topk_ids, **more): return None\n",
    "call: returned int: expected a function without arguments, such as a partial": GOOD + "def case(rows): return 3\n",
    "getter: FILE: importing fails: FILE:LINE: NameError: name 'missing' is not defined": "missing\n",
    "call: 'FILE': FILE has no function case": GOOD,
}


@pytest.mark.parametrize("message", BAD)
def test_getter_command_with_a_bad_function_fails_with_one_line(message: str, tmp_path: Path, in_this_process: None) -> None:
    file = program(tmp_path, BAD[message])
    out = tmp_path / "out"
    options = ["--call", f"{file}:case", "--size", "rows=4", "--dtype", "float32", "--out", str(out)]
    result = CliRunner().invoke(app, ["adopt", "getter", f"{file}:get_config", *options])
    assert result.exit_code == 2
    names = {f"{file}:get_config": "FILE", f"{file}:case": "FILE", file: "FILE"}
    (line,) = result.stderr.splitlines()
    for name, short in names.items():
        line = line.replace(name, short)
    line = re.sub(rf"{Path(file).name}:\d+: ", "FILE:LINE: ", line)
    assert line.startswith(f"error: {message}")
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.py:get", "--tokens", "1"), "getter: nowhere.py: no such file"),
        (("get_config", "--tokens", "1"), "getter: 'get_config': expected MODULE:FUNCTION or FILE.py:FUNCTION"),
        (
            (f"{EXAMPLE}:get_confik", "--tokens", "1"),
            f"getter: '{EXAMPLE}:get_confik': {EXAMPLE} has no function get_confik; did",
        ),
        ((f"{EXAMPLE}:get_config",), "size: missing: expected --model FILE, --tokens or --size NAME=VALUE"),
        ((f"{EXAMPLE}:get_config", "--size", "4"), "size: '4': expected NAME=N1,N2"),
        ((f"{EXAMPLE}:get_config", "--tokens", "1", "--tp", "2"), "tp, ep: expected with --model"),
        ((f"{EXAMPLE}:get_config", "--tokens", "1"), "call: size experts: missing: give --model FILE or --size experts=VALUE"),
        (("get_config", "--tokens", "1", "--named", "fp8"), "named: 'fp8': expected dtype=NAME alone, with block_shape="),
        (
            (f"{EXAMPLE}:get_config", *ALL_SIZES, "--dtype", "bf17"),
            "dtype: 'bf17': expected the name of an element type of torch",
        ),
        (
            (f"{EXAMPLE}:get_config", *ALL_SIZES, "--named", "dtype=fp8_w8a8"),
            "named: dtype=fp8_w8a8: the call takes no use_fp8_w8a8",
        ),
    ],
)
def test_getter_command_with_bad_arguments_names_them(
    arguments: Sequence[str], message: str, tmp_path: Path, in_this_process: None, fused_moe: Any
) -> None:
    options = ["--call", f"{EXAMPLE}:fused_experts", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["adopt", "getter", *arguments, *options])
    assert (result.exit_code, result.stderr.startswith(f"error: {message}")) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("BLOCK: [a]", "1: BLOCK: 'a': expected an integer of 0 or more"),
        ("A: 1\nBLOCK: []", "2: BLOCK: []: expected at least one value"),
        ("BLOCK: [16]\nBLOCK: [32]", "2: BLOCK: a list: expected each field once"),
        ("BLOCK: 2026-13-45", "1: BLOCK: '2026-13-45': expected a plain value"),
        ("[", "1: YAML: "),
        ("7", "1: file: '7': expected fields with values"),
        ("", "1: file: empty: expected fields with values"),
    ],
)
def test_getter_command_with_a_damaged_space_file_names_it(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    options = ["--call", "b:c", "--tokens", "1", "--out", str(tmp_path), "--space", str(path)]
    result = CliRunner().invoke(app, ["adopt", "getter", "a:b", *options])
    assert (result.exit_code, result.stderr.startswith(f"error: {path}:{message}")) == (2, True), result.stderr


@pytest.mark.parametrize(("name", "other"), [("time", "<module 'time' (built-in)>"), ("yaml", "yaml/__init__.py")])
def test_probe_of_a_file_with_the_name_of_another_module_names_it(name: str, other: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text(GOOD)
    with pytest.raises(ValueError, match=rf"^getter: {file}: another module has its name: .*{re.escape(other)}$"):
        probed(str(file))


def test_getter_command_with_a_space_of_an_unknown_knob_names_its_file(
    tmp_path: Path, in_this_process: None, fused_moe: Any
) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("BLOCK: [16]")
    options = ["--call", f"{EXAMPLE}:fused_experts", *ALL_SIZES, "--out", str(tmp_path / "out"), "--space", str(path)]
    result = CliRunner().invoke(app, ["adopt", "getter", f"{EXAMPLE}:get_config", *options])
    expected = f"error: {path}: BLOCK: expected a knob of the own config: "
    assert (result.exit_code, result.stderr.startswith(expected)) == (2, True), result.stderr


def test_probe_with_a_space_of_an_unknown_knob_raises(fused_moe: Any) -> None:
    with pytest.raises(ValueError, match=r"^space: BLOCK: expected a knob of the own config: BLOCK_SIZE_K, BLOCK_SIZE_M"):
        probe(facts_of((1,), space={"BLOCK": [16]}))


def test_overrides_of_the_example_agree_with_the_own_config(fused_moe: Any, tmp_path: Path) -> None:
    write_spec(tmp_path, probe(facts_of((1, 9), dtype="bfloat16")))
    (outcome,) = check_getter(tmp_path)
    configs, cases, checked, possible = map(int, re.findall(r"\d+", outcome.reason.rpartition(": ")[2].replace(",", ""))[:4])
    assert (outcome.status, cases) == ("checked", 2)
    assert 2 < configs <= checked < possible


PAIRWISE = """
def get_config(): return {"BLOCK": 16}
def total(x, sort_by=None):
    block = get_config()["BLOCK"]
    padded = torch.empty(-(-len(x) // block) * block)
    padded[:len(x)] = x
    if PADS: padded[len(x):] = 0.0
    if block == 64: raise RuntimeError("blocks of 64 are too large")
    return padded.view(-1, block).sum(1).sum(0, keepdim=True)
def case(rows, device, seed):
    return functools.partial(total, torch.randn(rows, device=device, generator=torch.Generator(device).manual_seed(seed)))
"""


@pytest.mark.parametrize("pads", [True, False])
def test_check_finds_an_override_under_which_the_host_forgets_its_padding(tmp_path: Path, pads: bool) -> None:
    file = program(tmp_path, f"PADS = {pads}" + PAIRWISE)
    for block in (32, 64):
        facts = probed(file, space={"BLOCK": [block]})
        write_spec(tmp_path, msgspec_with(facts, cases=[CallCase({"rows": 48})]))
        write_spec(tmp_path, probe(read_spec(tmp_path)))
        *failed, coverage = check_getter(tmp_path)
        raised = rf"the launch failed: {Path(file).name}:\d+: RuntimeError: blocks of 64 are too large"
        reason = raised if block == 64 else "output 0: NaN"
        assert coverage.status == "checked"
        assert bool(failed) == (not pads or block == 64)
        assert all(re.match(reason, one.reason) and block == one.config.BLOCK for one in failed)


def test_check_of_a_call_that_changes_its_argument_fails(tmp_path: Path) -> None:
    """Pairs of a case whose reference fails do not run: without a check of the call itself nothing says why."""
    file = program(tmp_path, "PADS = True" + PAIRWISE.replace("return padded.view", "x.zero_(); return padded.view"))
    facts = probed(file, space={"BLOCK": [32]})
    write_spec(tmp_path, probe(msgspec_with(facts, cases=[CallCase({"rows": 48})])))
    (failed,) = check_getter(tmp_path)
    assert (failed.status, failed.config.BLOCK) == ("failed", 16)
    assert "reference: changes its input argument 0" in failed.reason


def msgspec_with(facts: GetterSpec, **fields: Any) -> GetterSpec:
    from msgspec.structs import replace

    return replace(facts, **fields)


class GetterBench(Bench):
    """Times blocks of 32 rows as fastest from 9 tokens on, and the own config as fastest below; blocks of 128 rows are wrong."""

    def time_us(self, task: Task, config: Any) -> float:
        right = 32 if task.case["tokens"] >= 9 else task.default.BLOCK_SIZE_M
        return 10.0 + abs(np.log2(config.BLOCK_SIZE_M / right)) + 0.1 * (config.num_warps != 4) + (config.GROUP_SIZE_M > 8)

    def measure(self, task: Task, config: Any, best_us: float | None) -> Evaluation:
        if config.BLOCK_SIZE_M == 128:
            return Evaluation("failed", reason="output 0: NaN in other places: 1 of 64 elements")
        return Evaluation("passed", self.time_us(task, config))

    def time_interleaved(self, task: Task, configs: Sequence[Any]) -> list[Samples]:
        return [np.full(15, self.time_us(task, config)) for config in configs]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, in_this_process: None) -> Iterator[None]:
    """Make a GPU whose times are a formula; the program runs in the interpreter."""
    monkeypatch.setattr("kerneltune.adopt.getter._torch_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    with fake_gpu.stands_in(monkeypatch):
        monkeypatch.setattr("kerneltune.tune.session.GpuWorker", GetterBench)
        monkeypatch.setattr("kerneltune.processes.start.start_server", lambda: None)
        yield


def vllm_entry(folder: Path, gpu: str, experts: int, inner: int, tokens: int) -> dict[str, int]:
    """Look a config up as vLLM does: one file for a layer and a GPU, in it the nearest key."""
    name = f"E={experts},N={inner},device_name={gpu.replace(' ', '_')}.json"
    rows = {int(key): row for key, row in json.loads((folder / name).read_text()).items()}
    nearest: dict[str, int] = min(rows.items(), key=lambda item: abs(item[0] - tokens))[1]
    return nearest


def test_getter_command_keeps_unbeaten_own_configs_and_writes_a_table_of_all_keys(
    tmp_path: Path, h200: None, fused_moe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("BLOCK_SIZE_M: [32, 128]\nBLOCK_SIZE_N: [32]\nBLOCK_SIZE_K: [32]\nGROUP_SIZE_M: [1]\nnum_stages: [3]\n")
    sizes = [f"--size={name}={value}" for name, value in SIZES.items()]
    options = ["--call", f"{EXAMPLE}:fused_experts", *sizes, "--tokens", "1,9,4000", "--space", str(space), "--policy", "hot"]
    monkeypatch.setattr("kerneltune.cli.console.console.width", 400)
    # few keys, because the interpreter takes seconds for thousands of tokens
    monkeypatch.setattr("kerneltune.adopt.getter_tuning.ENGINE_TOKENS", (1, 2, 16))
    options[options.index("1,9,4000")] = "1,9"
    result = CliRunner().invoke(
        app, ["adopt", "getter", f"{EXAMPLE}:get_config", *options, "--out", str(tmp_path / "moe"), "--export", "vllm"]
    )
    assert result.exit_code == 0, result.stderr
    first, second = (line.split() for line in result.stdout.splitlines()[1:3])
    assert first == ["tokens=1", "10.0", "10.0", "1.000x", "1.000-1.000", "own", "config"]
    assert second[:5] == ["tokens=9", "11.0", "10.0", "1.100x", "1.100-1.100"]
    assert "BLOCK_SIZE_M=32" in second
    assert "faster than with the own config" in result.stdout.splitlines()[-1]
    assert "overrides failed; " in result.stderr
    assert "of them: output 0: NaN in other places" in result.stderr
    table = json.loads((tmp_path / "moe" / "E=4,N=32,device_name=NVIDIA_H200.json").read_text())
    assert list(table) == ["1", "2", "9", "16"]
    launch = {"num_warps": 4, "num_stages": 3}
    assert table["1"] == table["2"] == {**SMALL, **launch}
    assert table["16"] == {**LARGE, **launch}  # not tuned: the default that the engine would have taken
    assert table["9"]["BLOCK_SIZE_M"] == 32
    # the example's own look-up, and ours of vLLM's, find the row
    monkeypatch.setenv("FUSED_MOE_CONFIGS", str(tmp_path / "moe"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    fused_moe.table.cache_clear()
    assert fused_moe.get_config(8, 4, 32) == vllm_entry(tmp_path / "moe", "NVIDIA H200", 4, 32, 8) == table["9"]
    fused_moe.table.cache_clear()


LAYER = """
def get_config(): return {"BLOCK_SIZE_M": 16}
def case(tokens, experts, inner): return lambda: torch.ones(1) * len(get_config())
"""


def test_getter_runs_of_other_weights_into_one_folder_have_their_own_configs(
    tmp_path: Path, h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    class BenchOfWeights(GetterBench):
        """Times blocks of 64 rows as fastest with weights of fp8, and of 32 rows otherwise."""

        def time_us(self, task: Task, config: Any) -> float:
            measured.append(task.op.name)
            return 10.0 + abs(float(np.log2(config.BLOCK_SIZE_M / (64 if "fp8" in task.op.name else 32))))

    monkeypatch.setattr("kerneltune.tune.session.GpuWorker", BenchOfWeights)
    monkeypatch.setattr("kerneltune.adopt.getter_tuning.ENGINE_TOKENS", (1, 2))
    file = program(tmp_path, LAYER)
    out = tmp_path / "out"
    options = ["--call", f"{file}:case", "--size=experts=4", "--size=inner=32", "--policy", "hot", "--out", str(out)]
    for named, rows in (("", 32), ("dtype=fp8_w8a8", 64), ("", 32), ("dtype=fp8_w8a8,block_shape=[64, 64]", 64)):
        measured.clear()
        words = [f"{file}:get_config", *options, "--named", named, "--export", "vllm"]
        result = CliRunner().invoke(app, ["adopt", "getter", *words])
        assert result.exit_code == 0, result.stderr
        fields = f",{named}" if named else ""
        table = json.loads((out / f"E=4,N=32,device_name=NVIDIA_H200{fields.replace(' ', '')}.json").read_text())
        assert [row["BLOCK_SIZE_M"] for row in table.values()] == [rows, rows]
    assert measured
    measured.clear()
    assert CliRunner().invoke(app, ["adopt", "getter", *words]).exit_code == 0
    assert measured == []  # the second run takes what is there


def test_getter_export_without_sizes_of_a_table_fails_before_it_checks(
    tmp_path: Path, in_this_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_root: Path) -> None:
        raise AssertionError("checked")

    monkeypatch.setattr("kerneltune.adopt.getter_tuning.check_getter", never)
    monkeypatch.setattr("kerneltune.adopt.getter_tuning.ENGINE_TOKENS", (1, 2))
    text = "def get_config(): return {'BLOCK': 4}\ndef case(tokens): return lambda: torch.ones(get_config()['BLOCK'])\n"
    file = program(tmp_path, text)
    options = ["--call", f"{file}:case", "--tokens", "1", "--out", str(tmp_path / "out"), "--export", "sglang"]
    result = CliRunner().invoke(app, ["adopt", "getter", f"{file}:get_config", *options])
    assert (result.exit_code, result.stderr) == (2, "error: export: sglang: size experts: missing\n")


def test_getter_command_without_a_gpu_checks_the_smallest_calls(
    tmp_path: Path, in_this_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[int]] = []

    def check(root: Path) -> list[Outcome]:
        called.append([one.sizes["tokens"] for one in read_spec(root).cases])
        return [Outcome("checked", "2 configs on 4 cases, all pairs")]

    monkeypatch.setattr("kerneltune.adopt.getter_tuning.check_getter", check)
    file = program(tmp_path, GOOD + "def case(tokens, experts, inner): return lambda: torch.ones(tokens) * len(get_config())\n")
    options = ["--call", f"{file}:case", "--size", "experts=8", "--size", "inner=16", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["adopt", "getter", f"{file}:get_config", *options, "--export", "vllm"])
    assert result.exit_code == 0, result.stderr
    assert called == [[1, 2, 4, 8]]
    assert "no GPU: 4 of 18 calls in the interpreter" in result.stderr
    assert [line.split() for line in result.stdout.splitlines()[1:3]] == [[f"tokens={n}", "BLOCK=4"] for n in (1, 2)]
    *_, pairs, last = result.stdout.splitlines()
    assert pairs.endswith("2 configs on 4 cases, all pairs")
    assert last == "all agree with the call's own config; no GPU: nothing was timed, and no table was written"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    words = [python(), "-m", "kerneltune", "adopt", "getter", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_getter_command_with_a_call_that_ends_its_process_names_it(tmp_path: Path) -> None:
    file = program(tmp_path, GOOD + "import os\ndef case(rows): os._exit(3)\n")
    options = ["--call", f"{file}:case", "--size", "rows=4", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["adopt", "getter", f"{file}:get_config", *options])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"error: call: {file}:case: process 1 of 1 crashed: exit code 3\n"


@pytest.mark.gpu
def test_getter_table_on_a_gpu_has_no_slower_row(tmp_path: Path) -> None:
    sizes = [f"--size={name}={value}" for name, value in {"experts": 16, "hidden": 2048, "inner": 768, "top_k": 4}.items()]
    options = ["--tokens", "16,1024", "--budget", "6", "--export", "vllm", "--out", str(tmp_path)]
    done = command(f"{EXAMPLE}:get_config", "--call", f"{EXAMPLE}:fused_experts", *sizes, *options)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("tokens=")]  # a cell may go on in further lines
    assert [row[0] for row in rows] == ["tokens=16", "tokens=1024"]
    assert all(float(row[3].removesuffix("x")) >= 1.0 for row in rows)
    (table,) = tmp_path.glob("E=16,N=768,device_name=*.json")
    assert list(map(int, json.loads(table.read_text()))) == list(ENGINE_TOKENS)
