"""Kernels that are given an object of a frozen dataclass, such as a layout of Gluon: captured and served by its fields."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from adopted import imported, kernel_of, write_table
from triton.experimental.gluon import language as gl

from kerneltune.adopt import startup
from kerneltune.adopt.arguments import NotRecordableError, decode_value, encode_value
from kerneltune.adopt.folder import CLASSES
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.replay import make_replay

SOURCE = """
from dataclasses import dataclass
import triton
import triton.language as tl
@dataclass(frozen=True)
class Affine:
    scale: float
    shifts: tuple[int, ...]
@triton.jit
def applied(x_ptr, y_ptr, N, MAP: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < N, other=0.0)
    tl.store(y_ptr + places, x * MAP.scale + MAP.shifts[0], mask=places < N)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a module with a kernel that is given an object."""
    yield from imported(tmp_path, monkeypatch, "of_objects", SOURCE)


def launch(module: Any, scale: float) -> list[float]:
    """Launch the kernel on 0 to 4; returns the result."""
    x, y = torch.arange(5.0), torch.empty(5)
    module.applied[(1,)](x, y, 5, module.Affine(scale, (1,)), BLOCK=32)
    return y.tolist()


@pytest.mark.parametrize(
    "layout",
    [
        gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]),
        gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])),
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
    ],
)
def test_layouts_of_gluon_keep_their_fields(layout: Any) -> None:
    stored = json.loads(json.dumps(encode_value(layout)))
    decoded = decode_value(stored)
    assert (decoded, hash(decoded), decoded.mangle()) == (layout, hash(layout), layout.mangle())


def test_objects_that_no_module_holds_or_that_change_are_refused() -> None:
    @dataclass(frozen=True)
    class Local:
        width: int

    @dataclass
    class Changing:
        width: int

    for value in (Local(1), Changing(1)):
        with pytest.raises(NotRecordableError, match=type(value).__name__):
            encode_value(value)


@pytest.mark.parametrize(
    ("stored", "wrong"),
    [
        (["collections", "OrderedDict", {}], "no frozen dataclass"),
        (["triton.experimental.gluon.language", "NoLayout", {}], "no frozen dataclass"),
        (["triton.experimental.gluon.language", "SliceLayout", {"axis": 1}], "axis"),
        (["triton.experimental.gluon.language", "SliceLayout", 3], "SliceLayout: .*: capture again"),
        ([3, "SliceLayout", {}], "expected a plain value"),
    ],
)
def test_damaged_objects_are_errors(stored: list[Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        decode_value({"object": stored})


def test_capture_has_a_class_for_each_object_and_serve_tells_them_apart(tmp_path: Path, module: Any) -> None:
    startup.capture(tmp_path, plain=True)
    for scale in (2.0, 3.0, 2.0):
        launch(module, scale)
    startup.recorder().flush()
    startup.uninstall()
    classes = sorted(read_capture(tmp_path).classes, key=lambda one: one.label)
    assert [one.label.split()[2:] for one in classes] == 2 * [["float32", "N=5", "MAP=Affine", "BLOCK=32"]]
    scales = [next(a.value["object"][2]["scale"] for a in one.arguments if a.name == "MAP") for one in classes]
    assert sorted(scales) == [2.0, 3.0]
    for one, scale in zip(classes, scales, strict=True):
        replay = make_replay(one, tmp_path / CLASSES / one.digest, "cpu", 0)
        replay.run(next(each.config for each in one.candidates if each.grid is not None))
        assert replay.named["y_ptr"].tolist() == [scale * number + 1 for number in range(5)]
    chosen = next(one.config for one in classes[1].candidates if one.config.num_warps == 8)
    write_table(tmp_path, kernel_of(classes[1:], [chosen], is_plain=True, shared=()))
    startup.install(tmp_path, misses=None)
    assert [launch(module, scale)[1] for scale in (*scales, scales[1])] == [scale + 1 for scale in (*scales, scales[1])]
    assert startup.server().counters.by_name() == {"served of_objects.applied": 2, "missed of_objects.applied": 1}
