"""Contracts that contradict themselves: one line when the operator loads."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kerneltune import ops
from kerneltune.contracts import check_contract
from kerneltune.spec import Case, Op, Traffic, Variant


@dataclass(frozen=True)
class Knobs:
    rows: int
    warps: int


def op(**changes: Any) -> Op:
    """Return an operator without a mistake, but for the changes, of its variant where they are fields of one."""
    variant = Variant("optimized", dict, Knobs, lambda _case: {"rows": (1, 2), "warps": (4,)}, default=lambda _case: Knobs(1, 4))
    of_variant = {name: changes.pop(name) for name in ("config", "space", "valid", "default", "unsupported") if name in changes}
    given = Op(
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
    return replace(given, **changes)


def refuse(_case: Case, _config: Knobs) -> str | None:
    return "too many warps"


def only_two_rows(_case: Case, config: Knobs) -> str | None:
    return None if config.rows == 2 else "two rows"


def small_only(case: Case, _config: Knobs) -> str | None:
    return "too large" if case["M"] > 16 else None


def misspelled(_case: Case, config: Any) -> str | None:
    return "no warps" if config.wraps else None


def no_such_sizes(_case: Case) -> Knobs:
    raise ValueError("N must be a multiple of 5")


@pytest.mark.parametrize("changes", [{}, {"valid": small_only}, {"default": no_such_sizes}, {"unsupported": lambda _case: "no"}])
def test_contract_without_a_mistake_passes(changes: dict[str, Any]) -> None:
    check_contract(op(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"free_axes": ("K",)}, "copy: free_axes: 'K': expected one of M, N"),
        ({"free_options": ("pad",)}, "copy: free_options: 'pad': expected one of layout"),
        ({"bands": {"N": (64,)}}, "copy: bands: 'N': expected one of M"),
        ({"bands": {"M": (64, 16)}}, "copy: bands: M: (64, 16): expected rising sizes"),
        ({"variants": (Variant("a", dict),) * 2}, "copy: variants: 'a': expected one variant of each name"),
        ({"config": dict}, "copy optimized: config: <class 'dict'>: expected a dataclass"),
        ({"default": None}, "copy optimized: default: None: expected a function of the case, for Knobs"),
        (
            {"space": lambda _case: {"rows": (1,), "wraps": (4,), "warps": (4,)}},
            "copy optimized: space: 'wraps': expected a knob of the config: rows, warps, for M=4096 N=4096 bfloat16 none",
        ),
        ({"space": lambda _case: {"rows": (1,)}}, "copy optimized: space: 'warps': expected values in the space, for M=4096"),
        ({"valid": refuse}, "copy optimized: default: Knobs(rows=1, warps=4): not valid (too many warps), for M=4096"),
        (
            {"valid": only_two_rows, "default": lambda _case: Knobs(2, 1), "space": lambda _case: {"rows": (1,), "warps": (4,)}},
            "copy optimized: space: {'rows': (1,), 'warps': (4,)}: no valid config, for M=4096",
        ),
        ({"valid": misspelled}, "copy optimized: AttributeError: 'Knobs' object has no attribute 'wraps', for M=4096"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.partition(": expected")[0],
)
def test_contract_with_a_mistake_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        check_contract(op(**changes))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_plug_in_with_a_mistake_is_refused_when_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = "import dataclasses\nfrom kerneltune.ops.stream import OP\n"
    mistake += "OPS = (dataclasses.replace(OP, name='mistaken', free_axes=('rows',)),)\n"
    (tmp_path / "mistaken_operator.py").write_text(mistake)
    monkeypatch.setenv("KERNELTUNE_PLUGINS", str(tmp_path / "mistaken_operator.py"))
    load: Callable[[], object] = ops.load
    with pytest.raises(ValueError) as error:
        load()
    expected = f"plug-in {tmp_path}/mistaken_operator.py: mistaken: free_axes: 'rows': expected one of read, write"
    assert str(error.value) == expected
