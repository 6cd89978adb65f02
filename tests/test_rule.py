"""Rules: evaluated as written, read back as they were, refused in one line where they are damaged."""

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asserting import every
from made_up import CASE, Small, nothing, op_of, small_space

from kerneltune import cache, device, rule_file
from kerneltune.device import Device
from kerneltune.rule import Facts, Form, Rule, Scaled, Split
from kerneltune.spec import Case, Variant

VARIANT = Variant("optimized", nothing, Small, small_space, default=lambda _case: Small(256, 4))
FORMS: tuple[Form, ...] = (
    {"block": 64, "warps": 2},
    {"block": Scaled("M", 0.5, 16, 1024), "warps": 4},
    {"block": Scaled("M", 65536.0, 8, 1024, inverse=True), "warps": 1},
)
OF_TYPE = Split(subject="dtype", equals="float32", then=(0,), otherwise=(1, 0))
TREE = Split(subject="M*bytes", at_most=4096.0, then=OF_TYPE, otherwise=(2,))
JUDGED = {"cases": 3, "judged": 3, "geomean": 0.99, "worst": 0.9, "worst_case": "M=8"}
RULE = Rule(variant="optimized", policy="cold", forms=FORMS, tree=TREE, judged=JUDGED)
GPU = "nvidia_h200"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    cache.clear()
    yield
    cache.clear()


def stored(root: Path, text: str | None = None, gpu: str = GPU, arch: str = "sm_90") -> Path:
    path = rule_file.path_of("fake", gpu, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text is not None else rule_file.dumps("fake", gpu, [RULE], {"arch": arch}))
    return path


def found(root: Path, size: int, dtype: str = "bfloat16", gpu: str = GPU) -> cache.Choice:
    return cache.Chooser.of(op_of(VARIANT), VARIANT, "cold", root).find(Case("", (("M", size),), dtype), gpu)


def test_numbers_of_a_case_are_products_of_sizes_and_bytes() -> None:
    facts = Facts({"M": 24, "N": 100}, {"dtype": "float16"})
    values = {"M": 24, "M*N": 2400, "M/N": 0.24, "M*bytes": 48}
    assert {expression: facts.number(expression) for expression in values} == pytest.approx(values)
    assert Facts({"M": 24, "N": 0}, {"dtype": "uint8"}).number("M*bytes/N") == 24
    for expression in ("M+N", "", "M*", "low(M)", "M N", "2*M"):
        with pytest.raises(ValueError, match="expected a product of sizes"):
            facts.number(expression)


def test_a_knob_that_follows_a_size_stays_within_its_bounds() -> None:
    grows, shrinks = Scaled("M", 0.5, 16, 1024), Scaled("M", 65536.0, 8, 1024, inverse=True)
    assert [grows.at({"M": size}) for size in (1, 100, 1 << 20)] == [16, 64, 1024]
    assert [shrinks.at({"M": size}) for size in (1, 1000, 1 << 20)] == [1024, 64, 8]


def test_a_rule_file_is_read_as_it_was_written() -> None:
    assert rule_file.loads(rule_file.dumps("fake", GPU, [RULE, RULE], {}), "fake", GPU) == (RULE, RULE)


def test_a_rule_file_has_a_form_a_line() -> None:
    many = tuple({"block": block, "warps": warps} for block in range(40) for warps in (1, 2))
    lines = rule_file.dumps("fake", GPU, [Rule(variant="optimized", policy="cold", forms=many, tree=TREE)], {}).splitlines()
    assert '        {"block": 39, "warps": 2}' in lines
    assert max(map(len, lines)) < 100


def test_a_look_up_takes_the_first_form_of_the_leaf_that_is_valid(tmp_path: Path) -> None:
    stored(tmp_path)
    assert found(tmp_path, 1024) == cache.Choice(Small(512, 4), "rule", 'the rule: {"block": 512, "warps": 4}')
    assert found(tmp_path, 1024, "float32").config == Small(64, 2)
    assert found(tmp_path, 4096) == cache.Choice(Small(16, 1), "rule", 'the rule: {"block": 16, "warps": 1}')
    assert found(tmp_path, 8192) == cache.Choice(Small(256, 4), "default", "the default")  # a block of 8 is none


def test_a_rule_says_nothing_of_sizes_below_half_of_those_it_was_fitted_to(tmp_path: Path) -> None:
    fenced = Rule(variant="optimized", policy="cold", forms=FORMS, tree=(0,), known={"bytes": [2]}, least={"M": 512})
    stored(tmp_path, rule_file.dumps("fake", GPU, [fenced], {}))
    assert [found(tmp_path, size).source for size in (255, 256, 1 << 30)] == ["default", "rule", "rule"]
    assert found(tmp_path, 512, "float32").source == "default"


def test_a_rule_of_another_gpu_serves_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: Device("NVIDIA H100 80GB HBM3", "sm_90", 132, 50 << 20, "580"))
    stored(tmp_path)
    stored(tmp_path, gpu="nvidia_b200", arch="sm_100")
    with pytest.warns(UserWarning, match="no rules for nvidia_h100_80gb_hbm3: those of nvidia_h200, the nearest known") as caught:
        told = {found(tmp_path, size, gpu="nvidia_h100_80gb_hbm3").told for size in (1024, 2048)}
    assert len(caught) == 1
    assert every("the rule of nvidia_h200" in text for text in told)


def test_the_interpreter_has_no_rule(tmp_path: Path) -> None:
    stored(tmp_path)
    assert found(tmp_path, 1024, gpu=device.INTERPRETER).source == "default"


def _damaged(change: Any) -> str:
    data = json.loads(rule_file.dumps("fake", GPU, [RULE], {}))
    change(data)
    return json.dumps(data)


def _put(*path: Any, value: Any) -> Any:
    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = value

    return change


DAMAGES = {
    "": "JSON",
    "[]": "expected object",
    "{" * 5000: "JSON",
    _damaged(_put("op", value="other")): "op: 'other': expected 'fake'",
    _damaged(_put("schema", value=9)): "schema: 9",
    _damaged(_put("rules", value=3)): "rules: 3: expected array",
    _damaged(_put("rules", 0, "forms", value=[])): "rules[0].forms: []: expected",
    _damaged(_put("rules", 0, "forms", 0, "block", value=[1])): "rules[0].forms[0]",
    _damaged(_put("rules", 0, "forms", 0, "block", value=10**400)): "rules[0].forms[0]",
    _damaged(_put("rules", 0, "forms", 0, "block", value=float("nan"))): "JSON",
    _damaged(_put("rules", 0, "forms", 1, "block", value={"pow2": "M"})): "rules[0].forms[1]",
    _damaged(_put("rules", 0, "tree", value=[99])): "tree: 99: expected places in forms, below 3",
    _damaged(_put("rules", 0, "tree", value={"use": [0]})): "rules[0].tree.use: [0]: expected no field",
    _damaged(_put("rules", 0, "tree", "if", value="M+1")): "expected a product of sizes",
    _damaged(_put("rules", 0, "tree", "at_most", value="x")): "at_most: 'x'",
    _damaged(_put("rules", 0, "near", value=-1)): "near: -1",
    _damaged(_put("rules", 0, "speeds", value={"sms": 132})): "rules[0].speeds",
    '{"schema": ' + "9" * 5000 + "}": "schema: integer value out of range",
}


@pytest.mark.parametrize("text", DAMAGES)
def test_a_damaged_rule_is_one_warning_and_the_default(text: str, tmp_path: Path) -> None:
    path = stored(tmp_path, text)
    with pytest.warns(UserWarning) as caught:
        assert [found(tmp_path, size).config for size in (1024, 2048, 8)] == [Small(256, 4)] * 3
    assert len(caught) == 1
    said = str(caught[0].message)
    assert said.startswith(str(path))
    assert DAMAGES[text] in said
    assert said.endswith("; not used")
    assert "\n" not in said


IMPOSSIBLE: list[dict[str, Any]] = [
    {"block": 0, "warps": 4},
    {"block": -64, "warps": 4},
    {"block": 100, "warps": 4},
    {"block": 64, "warps": 64},
    {"block": 64},
    {"block": "64", "warps": 4},
    {"block": 1 << 60, "warps": 1},
]


@pytest.mark.parametrize("knobs", IMPOSSIBLE)
def test_a_rule_whose_knobs_no_kernel_takes_is_passed_over(knobs: dict[str, Any], tmp_path: Path) -> None:
    passed_over = Rule(variant="optimized", policy="cold", forms=(knobs, FORMS[0]), tree=(0, 1))
    stored(tmp_path, rule_file.dumps("fake", GPU, [passed_over], {}))
    assert found(tmp_path, 1024).config == Small(64, 2)


def test_a_rule_of_other_axes_is_passed_over(tmp_path: Path) -> None:
    foreign = Rule(
        variant="optimized", policy="cold", forms=FORMS, tree=Split(subject="Q*R", at_most=3.0, then=(0,), otherwise=(1,))
    )
    stored(tmp_path, rule_file.dumps("fake", GPU, [foreign], {}))
    assert found(tmp_path, 1024).source == "default"


@pytest.mark.parametrize("config", [{"block": float("nan"), "warps": 4}, {"block": 0, "warps": 4}, {"block": -16, "warps": 4},
                                    {"block": 64, "warps": -1}, {"block": 10**400, "warps": 4}, {"block": 48, "warps": 4},
                                    {"block": True, "warps": 4}, {"block": None, "warps": 4}])  # fmt: skip
def test_an_entry_that_no_kernel_takes_is_a_miss_with_one_warning_that_names_it(config: dict[str, Any], tmp_path: Path) -> None:
    good = {"variant": "optimized", "case": "good", "axes": {"M": 64}, "dtype": "bfloat16", "quant": "none", "options": {},
            "policy": "cold", "config": {"block": 128, "warps": 8}, "evidence": {}}  # fmt: skip
    bad = {**good, "case": "bad", "axes": dict(CASE.axes), "config": config}
    path = cache.path_of("fake", GPU, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"schema": 1, "op": "fake", "device": GPU, "entries": [bad, good]}))
    with pytest.warns(UserWarning) as caught:
        assert found(tmp_path, CASE["M"]).config == Small(256, 4)
        assert found(tmp_path, 64).config == Small(128, 8)  # one bad entry breaks no other look-up
    ours = [str(one.message) for one in caught if "not used" in str(one.message)]
    assert len(ours) == 1
    assert str(path) in ours[0]
    assert "\n" not in ours[0]
    assert "entries[0]" in ours[0] or "optimized bad" in ours[0]


def test_looking_up_imports_nothing_heavy() -> None:
    import subprocess

    code = (
        "import sys; from kerneltune import cache, rule_file; from kerneltune.spec import Case; "
        "rule_file.load(rule_file.path_of('rmsnorm_fwd', 'nvidia_h200', cache.roots())); "
        "assert not {'numpy', 'pandas', 'sklearn', 'optuna', 'torch', 'scipy'} & set(sys.modules), sorted(sys.modules)"
    )
    with warnings.catch_warnings():
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
