"""Getters that give a table of configs or None, as the look-ups of the engines' linear layers do, and further calls."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_getter import PAIRWISE, facts_of, probed, program, spec_of

from kerneltune.adopt.expert_layer import named_weights
from kerneltune.adopt.getter import call_case, installed, make_call, operators, read_spec, write_spec
from kerneltune.adopt.getter_tuning import check_getter
from kerneltune.task import knobs_of

HOST = """
import triton
import triton.language as tl

@triton.jit
def double(x, y, rows, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < rows), mask=at < rows)

taken = []
def get_config(kind): return TABLE
def call(x):
    table = get_config("x")
    table = table[0] if isinstance(table, tuple) else table
    config = table[min(table, key=lambda known: abs(known - len(x)))] if table else {"BLOCK": 8, "num_warps": 2}
    taken.append(config["BLOCK"])
    y = torch.empty_like(x)
    double[(triton.cdiv(len(x), config["BLOCK"]),)](x, y, LAUNCHED)
    return y
def case(rows, device, seed): return functools.partial(call, torch.ones(rows, device=device))
"""


def host(folder: Path, table: str, launched: str = "len(x), **config") -> str:
    """Write a program whose getter gives a table, and whose launch gets a config."""
    return program(folder, f"TABLE = {table}" + HOST.replace("LAUNCHED", launched))


@pytest.mark.parametrize("launched", ["len(x), **config", "rows=len(x), **config"])
@pytest.mark.parametrize(
    ("table", "own"),
    [
        ("None", {"BLOCK": 8, "num_warps": 2}),
        ("{1: {'BLOCK': 16}, 5: {'BLOCK': 32}, 64: {'BLOCK': 64}}", {"BLOCK": 32}),
        ("({1: {'BLOCK': 16}}, 'more')", {"BLOCK": 16}),
    ],
)
def test_getter_of_a_table_is_overridden_in_every_row(tmp_path: Path, table: str, own: dict[str, int], launched: str) -> None:
    file = host(tmp_path, table, launched)
    if table == "None" and "rows=" in launched:  # whether a config has rows is not known
        with pytest.raises(ValueError, match=rf"^call: {file}:case: fails with its own config: .*'rows'$"):
            probed(file)
        return
    spec = probed(file)
    assert spec.cases[0].own == own
    assert spec.options == [name for name in ("num_warps", "num_stages") if name not in own]
    write_spec(tmp_path, spec)
    (outcome,) = check_getter(tmp_path)
    assert outcome.status == "checked"
    getter = installed(f"{file}:get_config", str(tmp_path))
    module: Any = sys.modules[Path(file).stem]
    getter.knobs = {"BLOCK": 4}
    assert module.case(6, "cpu", 0)().tolist() == [2.0] * 6
    assert module.taken[-1] == 4


def test_call_that_takes_any_size_is_given_each_size() -> None:
    def case(rows: int, **sizes: Any) -> Callable[[], Any]:
        return lambda: (rows, sizes["columns"], sizes["seed"])

    assert make_call(spec_of("float32"), case, {"rows": 4, "columns": 8}, "cpu", 3)() == (4, 8, 3)


def test_blocks_of_fp8_may_have_eight_rows_and_are_no_deeper_than_a_block_of_scales(tmp_path: Path) -> None:
    own = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "num_stages": 4}
    spec = facts_of((1,), dtype="bfloat16", weights=named_weights("dtype=fp8_w8a8,block_shape=[128,128]"))
    write_spec(tmp_path, msgspec.structs.replace(spec, cases=[msgspec.structs.replace(spec.cases[0], own=own)]))
    (op,) = operators(str(tmp_path))
    case = call_case(read_spec(tmp_path), read_spec(tmp_path).cases[0])
    configs = [knobs_of(config) for config in op.variants[0].configs(case)]
    assert {config["BLOCK_SIZE_M"] for config in configs} == {8, 16, 32, 64}
    assert {config["BLOCK_SIZE_K"] for config in configs} == {64, 128}
    assert max(config["num_stages"] for config in configs if config["BLOCK_SIZE_N"] * config["BLOCK_SIZE_K"] == 256 * 128) == 5


def test_getter_call_that_reads_values_compiles_nothing_ahead(tmp_path: Path) -> None:
    file = program(tmp_path, "PADS = True" + PAIRWISE.replace("block == 64", "float(x[0]) == 64"))
    write_spec(tmp_path, probed(file))
    (op,) = operators(str(tmp_path))
    case = next(iter(read_spec(tmp_path).cases))
    inputs = op.inputs(call_case(read_spec(tmp_path), case), device="meta")
    assert op.variants[0].run(inputs, op.variants[0].default_config(call_case(read_spec(tmp_path), case))) == {}
