"""The index of operators: current, sufficient for commands that only look, not needed. Contracts that contradict themselves."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kerneltune import listing, ops, records, workloads
from kerneltune.files import data_root
from kerneltune.listing import check_case, check_contract, summary_of
from kerneltune.measuring.compare import ceiling_task
from kerneltune.plan import Options, Selection, load_plan
from kerneltune.spec import Case, Op, Traffic, Variant, missing_packages
from kerneltune.wording import dtype_name, short_dtype


def test_kind_of_an_operator_follows_its_origin_then_its_module() -> None:
    shipped = ops.load()["rmsnorm_fwd"]
    mine = replace(shipped, module="kerneltune_kernels.norm")
    assert [op.kind for op in (shipped, mine, replace(shipped, origin=("folder",)))] == ["shipped", "foreign", "captured"]


def test_index_has_the_facts_of_every_operator(tmp_path: Path) -> None:
    facts = {name: ops.operators_in(name) for name in ops.modules()} | {
        name: workloads.operators_in(name) for name in workloads.MODULES
    }
    listing.write_index(facts, tmp_path / "index.json")
    assert listing.INDEX.read_text() == (tmp_path / "index.json").read_text(), "run `kerneltune ops --index`"
    assert ops.summaries() == {name: summary_of(op) for name, op in ops.load().items()}


@pytest.mark.parametrize("path", sorted((data_root("results") / "nvidia_h200").glob("*.jsonl")), ids=lambda path: path.stem)
def test_shipped_records_have_the_roles_that_their_operators_give(path: Path) -> None:
    """Variants that only call torch are peers; records of removed operators are of peers alone."""
    facts = ops.summaries() | workloads.summaries()
    roles = {(op.name, variant.name): variant.role for op in facts.values() for variant in op.variants}
    assert roles["fp8_grouped_gemm", "baseline"] == "peer"
    recorded = {(record.op, record.variant, record.role) for record in records.load(path)}
    assert {(op, name, role) for op, name, role in recorded if roles.get((op, name), "peer") != role} == set()


@pytest.mark.parametrize("command", [["ops"], ["compare", "baseline", "optimized", "--family", "rmsnorm"]], ids=lambda c: c[0])
def test_ops_and_compare_import_neither_torch_nor_triton(command: list[str]) -> None:
    code = "import sys; from kerneltune.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    before = os.times()
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # as on a machine without a GPU, whose driver would be asked
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True, env=environment)
    after = os.times()
    assert ("rmsnorm_fwd" if command == ["ops"] else "bfloat16") in done.stdout
    assert not {"torch", "triton", "optuna"} & set(done.stderr.split())
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert seconds < 4  # 0.5 and 0.8 on an idle machine; with torch 4.4


def test_facts_of_a_module_missing_from_the_index_are_read_by_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[None] = []
    monkeypatch.setattr(listing, "INDEX", tmp_path / "none.json")
    assert ops.summaries(lambda: prepared.append(None)).keys() == ops.load().keys()
    assert len(prepared) == len(ops.modules())


def test_facts_of_a_plug_in_are_those_of_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import dataclasses\nfrom kerneltune.ops.stream import OP\n"
    (tmp_path / "listed_plug_in.py").write_text(code + "OPS = (dataclasses.replace(OP, name='listed'),)\n")
    monkeypatch.setenv("KERNELTUNE_PLUGINS", str(tmp_path / "listed_plug_in.py"))
    assert ops.summaries()["listed"].axes == ("read", "write")


@dataclass(frozen=True)
class Knobs:
    rows: int
    warps: int


def op(**changes: Any) -> Op:
    """Return an operator without a mistake except the changes, which are fields of it or of its variant."""
    variant = Variant("optimized", dict, Knobs, lambda _case: {"rows": (1, 2), "warps": (4,)}, default=lambda _case: Knobs(1, 4))
    of_variant = {name: changes.pop(name) for name in ("config", "space", "invalid", "default", "unsupported") if name in changes}
    operator = Op(
        name="copy",
        axes=("M", "N"),
        dtypes=("bfloat16",),
        inputs=dict,
        reference=dict,
        compare=lambda *_: [],
        traffic=lambda _: Traffic(1, 1),
        variants=(replace(variant, **of_variant),),
        module=__name__,
        options={"layout": ("row", "col")},
        free_axes=("M",),
    )
    return replace(operator, **changes)


def refuse(_case: Case, _config: Knobs) -> str | None:
    return "too many warps"


def only_two_rows(_case: Case, config: Knobs) -> str | None:
    return None if config.rows == 2 else "two rows"


def small_only(case: Case, _config: Knobs) -> str | None:
    return "too large" if case["M"] > 16 else None


def misspelled(_case: Case, config: Any) -> str | None:
    return "no warps" if config.wraps else None


def no_config(_case: Case) -> None:
    return None


def no_such_sizes(_case: Case) -> Knobs:
    raise ValueError("N must be a multiple of 5")


@pytest.mark.parametrize("changes", [{}, {"invalid": small_only}, {"default": no_such_sizes}, {"unsupported": lambda _: "no"}])
def test_contract_without_a_mistake_passes(changes: dict[str, Any]) -> None:
    check_contract(op(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"name": name}, f"{name}: name: {name!r}: expected letters, digits, '_', '-' and '.'")
            for name in ("", "a/b", "../up", "..", "a b")
        ),
        ({"free_axes": ("K",)}, "copy: free_axes: 'K': expected one of axes: M, N"),
        ({"invalid": None}, "copy: variants: optimized: invalid: None: expected a function"),
        ({"inputs": "x"}, "copy: inputs: 'x': expected a function"),
        ({"free_options": ("pad",)}, "copy: free_options: 'pad': expected one of options: layout"),
        ({"unseen_options": ("layout",)}, "copy: unseen_options: 'layout': expected one of free_options: none"),
        ({"bands": {"N": (64,)}}, "copy: bands: 'N': expected one of free_axes: M"),
        ({"bands": {"M": (64, 16)}}, "copy: bands: M: (64, 16): expected rising sizes"),
        (
            {"variants": (Variant("a", make_dataclass("Run", [])()),)},
            "copy: variants: a: run: Run: expected a hash, which a frozen dataclass has",
        ),
        ({"variants": (Variant("a", dict),) * 2}, "copy: variants: 'a': expected each name once"),
        ({"options": {"M": (1, 2)}}, "copy: axes and options: 'M': expected each name once"),
        ({"options": {"dtype": ("a", "b")}}, "copy: axes and options: 'dtype': expected each name once"),
        ({"config": dict}, "copy optimized: config: <class 'dict'>: expected a dataclass"),
        (
            {"config": make_dataclass("Knobs", [("rows", int | None)])},
            "copy optimized: config: rows: int | None: expected bool, int, float or str",
        ),
        ({"config": make_dataclass("Empty", [])}, "copy optimized: config: Empty: no knobs: expected a field, or None"),
        ({"axes": "MN"}, "copy: axes: 'MN': expected a tuple of names"),
        ({"name": ["copy"]}, "['copy']: name: ['copy']: expected letters, digits, '_', '-' and '.'"),
        ({"quants": None}, "copy: quants: None: expected a tuple of names"),
        ({"free_axes": 1}, "copy: free_axes: 1: expected a tuple of names"),
        ({"unseen_options": 1}, "copy: unseen_options: 1: expected a tuple of names"),
        ({"variants": ("baseline",)}, "copy: variants: ('baseline',): expected a tuple of Variant"),
        (
            {"variants": (replace(Variant("a", dict), requires="torch"),)},
            "copy: variants: a: requires: 'torch': expected a tuple of names",
        ),
        ({"options": ["layout"]}, "copy: options: ['layout']: expected names with tuples of values"),
        ({"bands": {"M": 64}}, "copy: bands: {'M': 64}: expected names with tuples of values"),
        ({"bands": {"M": ("16", 64)}}, "copy: bands: M: ('16', 64): expected rising sizes"),
        ({"as_called": "M"}, "copy: as_called: 'M': expected a function"),
        ({"dtypes": ("float32", "bf16")}, "copy: dtypes: 'bf16': expected 'bfloat16'"),
        ({"options": {"scale": 1.0}}, "copy: options: {'scale': 1.0}: expected names with tuples of values"),
        ({"options": {"scale": ()}}, "copy: options: scale: (): expected a tuple of numbers or texts, the usual one first"),
        ({"options": {"k": (None, 1)}}, "copy: options: k: (None, 1): expected a tuple of numbers or texts, the usual one first"),
        ({"default": None}, "copy optimized: default: None: expected a function of the case, for Knobs"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.partition(": expected")[0],
)
def test_contract_with_a_mistake_raises_one_line_with_file_and_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        check_contract(op(**changes))
    place = "" if "name" in changes else r"test_listing\.py:\d+: "  # a name that no call gives has no line
    assert re.fullmatch(place + re.escape(message), str(error.value))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"space": lambda _case: {"rows": (1,), "wraps": (4,), "warps": (4,)}},
            "space: 'wraps': expected a knob of the config: rows, warps",
        ),
        ({"space": lambda _case: None}, "space: None: expected the values of each knob"),
        ({"space": lambda _case: {"rows": (1,), "warps": 4}}, "space: 'warps': 4: expected a tuple of values"),
        (
            {"space": lambda _case: {"rows": (1, True), "warps": (4,)}},
            "space: 'rows': True of type bool: expected int",
        ),
        (
            {"space": lambda _case: {"rows": tuple(np.array([1, 2])), "warps": (4,)}},
            f"space: 'rows': {np.array([1])[0]!r} of type int64: expected int",
        ),
        ({"space": lambda _case: {"rows": (1,)}}, "space: 'warps': expected values in the space"),
        ({"invalid": refuse}, "default: Knobs(rows=1, warps=4): not valid (too many warps)"),
        (
            {"invalid": only_two_rows, "default": lambda _: Knobs(2, 1), "space": lambda _: {"rows": (1,), "warps": (4,)}},
            "space: {'rows': (1,), 'warps': (4,)}: no valid config",
        ),
        ({"invalid": misspelled}, "invalid: AttributeError: 'Knobs' object has no attribute 'wraps'"),
        ({"default": no_config}, "default: None: expected a Knobs"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.partition(": expected")[0],
)
def test_knobs_with_a_mistake_raise_one_line_with_file_and_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        check_contract(op(**changes))
    case = "copy optimized M=4096 N=4096 bfloat16 none layout=row"
    assert re.fullmatch(rf"test_listing\.py:\d+: {re.escape(message)}, for {case}", str(error.value))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("OPS = (dataclasses.replace(OP, name='mistaken',\n module=__name__, free_axes=('rows',)),)", "mistaken_operator.py:4: "),
        ("OPS = (dataclasses.replace(OP, **{'name': 'mistaken', 'module': __name__, 'free_axes': ('rows',)}),)", ""),
    ],
)
def test_plug_in_with_a_mistake_raises_when_it_loads(
    given: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "mistaken_operator", raising=False)
    ops.load_with.cache_clear()
    mistake = f"import dataclasses\nfrom kerneltune.ops.stream import OP\n{given}\n"
    (tmp_path / "mistaken_operator.py").write_text(mistake)
    monkeypatch.setenv("KERNELTUNE_PLUGINS", str(tmp_path / "mistaken_operator.py"))
    load: Callable[[], object] = ops.load
    with pytest.raises(ValueError) as error:
        load()
    expected = f"plug-in {tmp_path}/mistaken_operator.py: {line}mistaken: free_axes: 'rows': expected one of axes: read, write"
    assert str(error.value) == expected


def seven_only(case: Case) -> dict[str, tuple[int, ...]]:
    return {"rows": (1, 2), "columns" if case["M"] == 7 else "warps": (4,)}


def no_traffic(case: Case) -> Traffic:
    return Traffic(case["gone"], 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"traffic": lambda _: 7}, "traffic: 7: expected a Traffic(read, write)"),
        ({"traffic": no_traffic}, "traffic: KeyError: 'gone'"),
        ({"as_called": lambda _: None}, "as_called: None: expected a Case"),
        ({"space": seven_only}, "space: 'columns': expected a knob of the config: rows, warps"),
        ({"invalid": lambda case, _: "odd" if case["M"] == 7 else None}, "default: Knobs(rows=1, warps=4): not valid (odd)"),
        ({"invalid": lambda case, _: 1 // (case["M"] - 7)}, "invalid: ZeroDivisionError: integer division or modulo by zero"),
        ({"unsupported": lambda case: case["K"]}, "unsupported: KeyError: 'K'"),
        ({"unsupported": lambda case: case["M"] != 7}, "unsupported: False: expected None, or a reason in words"),
        ({"unsupported": lambda _: "", "config": None}, "unsupported: '': expected None, or a reason in words"),
    ],
)
def test_operator_that_contradicts_itself_on_a_case_raises_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    check_case(op(), Case("a", (("M", 7), ("N", 8)), "bfloat16", options=(("layout", "row"),)))
    (tmp_path / "s.yaml").write_text("family: s\nops: [copy]\ncheck:\n  - {name: a, M: [7], N: 8}\n")
    with pytest.raises(ValueError) as caught:
        load_plan({"copy": op(**changes)}, Selection(str(tmp_path / "s.yaml")), Options())
    assert re.fullmatch(
        rf"test_listing\.py:\d+: {re.escape(message)}, for copy (optimized )?M=7 N=8 bfloat16 none layout=row", str(caught.value)
    )


@pytest.mark.parametrize(
    ("short", "whole"),
    [("bf16", "bfloat16"), ("bf16+fp32+e4m3", "bfloat16+float32+float8_e4m3fn"), ("fp16+int8", "float16+int8"), ("none", "none")],
)
def test_short_names_of_dtypes_apply_to_each_part_of_a_joined_name(short: str, whole: str) -> None:
    assert (short_dtype(whole), dtype_name(short)) == (short, whole)


def test_default_that_is_not_valid_for_the_case_of_the_look_up_raises_one_line() -> None:
    """A call looks up another case than the case of the sweep, which has a valid default."""
    refuses = replace(op().variants[0], invalid=lambda case, _config: "odd" if dict(case.axes)["M"] == 7 else None)
    wrong = op(variants=(refuses,), as_called=lambda case: replace(case, axes=(("M", 7), ("N", 8))))
    with pytest.raises(ValueError, match=r"^test_listing.py:\d+: default: .*: not valid \(odd\), for .* M=7 N=8 "):
        check_case(wrong, Case("a", (("M", 6), ("N", 8)), "bfloat16", options=(("layout", "row"),)))


def test_modules_of_packages_that_are_not_installed_are_missing() -> None:
    assert missing_packages(("no_such_package.sub", "json.decoder", "no_such_package")) == (
        "no_such_package.sub",
        "no_such_package",
    )


def test_ceiling_of_a_variant_that_writes_nothing_reads_as_much_and_writes_a_byte() -> None:
    reads = op(traffic=lambda _case: Traffic(1 << 20, 0))
    case = Case("a", (("M", 6), ("N", 8)), "bfloat16", options=(("layout", "row"),))
    task = ceiling_task(ops.load(), reads, case, "cold")
    assert task is not None
    assert (task.case["read"], task.case["write"]) == (1 << 20, 1)
    assert task.op.traffic(task.case).read >= 1 << 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops": lambda _case: 64.0}, "flops: 64.0: expected an integer of type int"),
        ({"traffic": lambda _case: Traffic(1.5, 2)}, "traffic: 1.5: expected an integer of type int"),  # type: ignore[arg-type]
    ],
)
def test_traffic_or_flops_of_another_type_raise_one_line_before_the_check(changes: dict[str, Any], message: str) -> None:
    """The journal of a check would hold them, and could not be read again."""
    with pytest.raises(ValueError, match=rf"^test_listing.py:\d+: {re.escape(message)}, for copy M=6 N=8 "):
        check_case(op(**changes), Case("a", (("M", 6), ("N", 8)), "bfloat16", options=(("layout", "row"),)))
