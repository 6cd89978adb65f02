"""The line of an error."""

import re
import runpy
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kerneltune.errors import first_line, line_of_inputs, meant, place_of, reads_values, statement_in, unknown, without_places


@triton.jit
def _asks_what_is_not_there(x_ptr, n):
    for i in range(n):
        tl.store(x_ptr + i, i.not_there)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("one"), "ValueError: one"),
        (RuntimeError("\n  first \nsecond"), "RuntimeError: first"),
        (
            RuntimeError("at 24:8:\n    while at < LANES:\n    ^\nname 'at' has two types"),
            "RuntimeError: at 24:8: name 'at' has two types",
        ),
        (
            type("PTXASError", (Exception,), {})(
                "PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\n"
                "ptxas info    : 12 bytes gmem\n"
                "ptxas /tmp/a.ptx, line 67; error   : Unknown modifier '.b'\nptxas fatal   : aborted"
            ),
            "PTXASError: Unknown modifier '.b'",
        ),
        (AssertionError(), "AssertionError"),
        (KeyboardInterrupt(" \n "), "KeyboardInterrupt"),
        (
            ImportError("cannot import name 'a' from 'b.c' (/v/lib/python3/site-packages/b/c.py)"),
            "ImportError: cannot import name 'a' from 'b.c'",
        ),
        (OSError("/usr/lib/python3/dist-packages/b/_c.so: undefined symbol: d"), "OSError: b/_c.so: undefined symbol: d"),
        (ImportError("cannot import name 'a' (/v/my files/site-packages/b/c.py)"), "ImportError: cannot import name 'a'"),
        (OSError("cannot read /home/me/mine.py"), "OSError: cannot read /home/me/mine.py"),
        (ValueError("a\ud800b"), "ValueError: a\\ud800b"),
        (ValueError("x" * 300), f"ValueError: {'x' * 200}"),
    ],
)
def test_first_line_skips_lines_without_content(error: BaseException, text: str) -> None:
    assert first_line(error) == text


@pytest.mark.parametrize("unit", ["/a", " (/a", "/site-packages/a", " (/a/site-packages/"])
def test_without_places_of_a_long_text_takes_less_than_half_a_second(unit: str) -> None:
    text = unit * (40_000 // len(unit))

    def seconds() -> float:
        began = time.process_time()
        assert len(without_places(text)) <= len(text)
        return time.process_time() - began

    assert min(seconds() for _ in range(3)) < 0.5
    assert without_places("/a" * 20_000) == "/a" * 20_000


def test_unknown_name_error_lists_known_names_and_the_nearest() -> None:
    assert str(unknown("op", "rmsnrom_fwd", ["rmsnorm_fwd", "stream"])) == (
        "op: 'rmsnrom_fwd': did you mean rmsnorm_fwd? expected one of rmsnorm_fwd, stream"
    )
    assert str(unknown("family", "x", [], ", or a .yaml file")) == "family: 'x': expected one of (none found), or a .yaml file"
    assert str(unknown("row_pad", 3, [0, 8])) == "row_pad: 3: expected one of 0, 8"
    many = [f"variant_{number}" for number in range(25)]
    near = r"variant: 'variant_x': did you mean variant_\d+\? expected one of 25 names, or a file"
    assert re.fullmatch(near, str(unknown("variant", "variant_x", many, ", or a file")))
    assert str(unknown("variant", "?", many)).endswith(many[-1])
    assert str(unknown("case", "?", [*many, "a", "b", "c"])).endswith(f"{many[-1]} and 3 more")
    assert meant(None, ["none"]) == meant("softmax", ["rmsnorm"]) == meant("rmsnorm", ["rmsnorm", "rmsnorm_2"]) == ""
    assert meant("rmsnorn", iter(["rmsnorm", "stream"])) == "; did you mean rmsnorm?"
    assert meant("bf61", ["float32", "bfloat16"]) == "; did you mean bf16?"


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the error is the compiler's")
def test_error_in_the_interpreter_names_the_line_of_the_kernel() -> None:
    tensor = torch.zeros(4)
    with pytest.raises(Exception) as caught:
        _asks_what_is_not_there[(1,)](tensor, 4)
    line = first_line(caught.value)
    assert re.fullmatch(r"Triton's interpreter: test_errors\.py:\d+: AttributeError: .*no attribute 'not_there'.*", line), line


def test_place_of_a_function_is_its_line_or_the_line_of_its_statement_that_raised() -> None:
    def fails(text: str) -> None:
        raise ValueError(text)

    first = fails.__code__.co_firstlineno
    assert place_of(partial(fails, "a")) == f"test_errors.py:{first}: "
    assert place_of(lru_cache(fails)) == f"test_errors.py:{first}: "
    with pytest.raises(ValueError, match="a") as caught:
        fails("a")
    assert place_of(fails, caught.value) == f"test_errors.py:{first + 1}: "
    assert place_of(len) == place_of(object()) == ""


def test_place_of_an_error_is_the_innermost_statement_of_no_package(tmp_path: Path) -> None:
    (tmp_path / "helpers_of_inputs.py").write_text("import torch\n\n\ndef make(size):\n    return torch.zeros(size, 1.5)\n")
    helpers = runpy.run_path(str(tmp_path / "helpers_of_inputs.py"))

    def inputs() -> None:
        helpers["make"](4)

    with pytest.raises(TypeError) as caught:
        inputs()
    assert place_of(inputs, caught.value) == statement_in("", caught.value) == "helpers_of_inputs.py:5: "


@pytest.mark.parametrize("make", [lambda: torch.Generator(device="meta"), lambda: torch.ones(1, device="meta").item()])
def test_line_of_inputs_without_a_branch_for_meta_says_what_they_must_do(make: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError) as caught:
        make()
    assert line_of_inputs(caught.value) == (
        "values are made for device meta, which holds none: expected a branch: "
        'return torch.empty(shape, dtype=dtype, device=device) for each tensor `if device == "meta"`'
    )
    assert line_of_inputs(RuntimeError("bad metadata")) == "RuntimeError: bad metadata"


def test_error_of_host_code_that_reads_a_value_is_one_of_a_tensor_without_memory() -> None:
    value = torch.ones(1, device="meta")
    for read in (value.item, value.numpy):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            read()
        assert reads_values(caught.value)
    assert not reads_values(RuntimeError("bad metadata"))
    assert not reads_values(ValueError("no meta tensor"))
