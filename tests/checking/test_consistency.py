"""Find outputs that a variant gives in another way than before."""

import pytest

from kerneltune.checking.consistency import FirstSeen
from kerneltune.spec import Case, Variant


@pytest.mark.parametrize(("other", "text"), [("odd", "in another run"), ("wide", "in case wide float32 none")])
def test_output_over_an_input_in_some_runs_names_both(other: str, text: str) -> None:
    seen, variant = FirstSeen(), Variant("optimized", lambda _inputs, _config: {})
    odd, second = (Case(name, (("M", 2),), "float32") for name in ("odd", other))
    assert seen.other_place(variant, odd, {"y": True}) == []
    (line,) = seen.other_place(variant, second, {"y": False})
    assert line == f"outputs: y is written over an input in case odd float32 none, and not {text}"
