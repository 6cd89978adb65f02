"""Values of tensors in a capture: which are kept, how they share memory, and how a later capture mends them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adopted import captured, example, of_kernel
from asserting import every
from safetensors.torch import load_file

from kerneltune.adopt import startup
from kerneltune.adopt.arguments import describe
from kerneltune.adopt.folder import CLASSES, META, VALUES
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.replay import make_replay
from kerneltune.adopt.values import collect


def test_capture_keeps_index_values_and_a_sample_of_floats(tmp_path: Path) -> None:
    launch = of_kernel(captured(tmp_path), "scale_chosen")[0]
    kept = load_file(tmp_path / CLASSES / launch.digest / VALUES)
    assert [values.kept for values in launch.storages] == ["sample", "values"]
    assert kept["storage.1"].view(torch.int64).tolist() == [0, 2]
    floats = kept["storage.0"].view(torch.float32)
    assert torch.equal(floats, torch.arange(4 * 96, dtype=torch.float32) % 7)
    assert launch.storages[0].statistics.largest == 6.0


def test_capture_of_tensors_that_share_memory_has_one_storage(tmp_path: Path) -> None:
    module = example()
    startup.capture(tmp_path)
    whole = torch.ones(8, 64)
    module.row_sum[(4,)](whole[2:6], whole[0, :4], 4, 64)
    startup.uninstall()
    launch = read_capture(tmp_path).classes[0]
    x, y = (argument.tensor for argument in launch.arguments[:2])
    assert x is not None
    assert y is not None
    assert (x.storage, x.offset, y.storage, y.offset) == (0, 2 * 64 * 4, 0, 0)
    assert launch.argument_bytes == 4 * 64 * 4 + 4 * 4


def test_capture_of_small_views_of_a_large_buffer_keeps_only_the_views(tmp_path: Path) -> None:
    module = example()
    startup.capture(tmp_path)
    whole = torch.empty(3 << 28)  # 3 GiB, of which two pages are used
    x, y = whole[:100].view(1, 100), whole[-1:]
    x.fill_(2.0)
    module.row_sum[(1,)](x, y, 1, 100)
    startup.uninstall()
    (launch,) = read_capture(tmp_path).classes
    assert [values.bytes for values in launch.storages] == [400, 4]
    replay = make_replay(launch, tmp_path / CLASSES / launch.digest, "cpu", 0)
    assert sum(storage.numel() for storage in replay.storages) <= 2 * 404 + 2 * 256  # and what aligns them
    assert replay.named["x_ptr"].tolist() == x.tolist()


@pytest.mark.parametrize("gap", [0, 30, 100, 101, 5000])
def test_captured_views_share_a_storage_up_to_twice_their_bytes(tmp_path: Path, gap: int) -> None:
    whole = torch.zeros(6000)
    arguments, storages = describe(["x", "y"], [whole[:50], whole[50 + gap : 100 + gap]], {})
    numbers = [argument.tensor.storage for argument in arguments if argument.tensor is not None]
    assert numbers == ([0, 0] if gap <= 100 else [0, 1])
    assert len(storages) == numbers[-1] + 1


def test_capture_keeps_all_indices_beside_many_samples_of_floats(tmp_path: Path) -> None:
    module = example()
    startup.capture(tmp_path, max_bytes=2048)
    for columns in range(8, 80, 8):
        module.scale_chosen[(1, 1)](torch.ones(4, columns), torch.zeros(2, dtype=torch.int64), columns, 2.0)
    startup.uninstall()
    kept = [tuple(values.kept for values in launch.storages) for launch in read_capture(tmp_path).classes]
    assert len(kept) == 9
    assert every(indices == "values" for _, indices in kept), kept
    assert {floats for floats, _ in kept} == {"sample", "statistics"}


@pytest.mark.parametrize(
    ("tensor", "kept"),
    [
        (torch.zeros(3 << 20, dtype=torch.int8), "sample"),  # weights
        (torch.full((1 << 19,), 0x77777777, dtype=torch.int32), "sample"),  # packed weights
        (torch.arange(1 << 19, dtype=torch.int32), "values"),
        (torch.zeros(64, dtype=torch.int8), "values"),
        (torch.zeros(3 << 20), "sample"),
    ],
)
def test_capture_keeps_all_of_indices_and_a_sample_of_weights(tensor: torch.Tensor, kept: str) -> None:
    arguments, storages = describe(["x"], [tensor], {})
    values = collect(arguments, storages, 64 << 20, 64 << 20)
    assert values.kept[0].kept == kept
    assert values.bytes == (tensor.nbytes if kept == "values" else min(tensor.nbytes, 1 << 20))


def _routing_table(rows: int = 5000) -> torch.Tensor:
    """Return a table of 65 columns of which 5 are filled, as Transformer Engine's routing has, the rest random bits."""
    table = torch.randint(-(1 << 31), 1 << 31, (rows, 65), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    table[:, :4], table[:, 64] = torch.arange(rows, dtype=torch.int32)[:, None], 2
    return table


def test_capture_keeps_all_of_a_table_that_is_filled_in_part() -> None:
    arguments, storages = describe(["x"], [_routing_table()], {})
    values = collect(arguments, storages, 64 << 20, 64 << 20)
    assert values.kept[0].kept == "values"
    weights = torch.randint(-(1 << 31), 1 << 31, (5000, 65), dtype=torch.int32, generator=torch.Generator().manual_seed(4))
    both, live = describe(["table", "weights"], [_routing_table(), weights], {})
    kept = collect(both, live, 2 << 20, 2 << 20).kept
    assert [values.kept for values in kept] == ["values", "statistics"]
    assert [values.kept for values in collect(both, live, 1 << 20, 1 << 20).kept] == ["sample", "statistics"]


def test_sample_repeats_whole_rows(tmp_path: Path) -> None:
    """An index of a table's first rows stays in its column, so that no launch reads it from another."""
    module, table = example(), _routing_table(rows=10000)
    startup.capture(tmp_path, max_bytes=(1 << 21) + 64)
    module.scale_chosen[(1, 1)](torch.ones(4, 8), table, 8, 2.0)
    startup.uninstall()
    launch = read_capture(tmp_path).classes[0]
    assert launch.storages[1].kept == "sample"
    replayed = make_replay(launch, tmp_path / CLASSES / launch.digest, "cpu", 0)
    assert bool((replayed.named["rows_ptr"][:, 64] == 2).all())


def test_capture_over_max_bytes_names_values_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launch = of_kernel(captured(tmp_path, max_bytes=8), "scale_chosen")[0]
    assert [values.kept for values in launch.storages] == ["statistics", "missing"]
    assert "16 bytes of index values are over --max-bytes: not kept" in caplog.text
    assert not (tmp_path / CLASSES / launch.digest / VALUES).exists()


def _remove_values(class_folder: Path) -> None:
    (class_folder / VALUES).unlink()


def _damage_class(class_folder: Path) -> None:
    (class_folder / META).write_bytes((class_folder / META).read_bytes()[:200])


def _remove_class(class_folder: Path) -> None:
    (class_folder / META).unlink()


@pytest.mark.parametrize("damage", [_remove_values, _damage_class, _remove_class])
def test_capture_again_mends_a_class_that_is_damaged(damage: Callable[[Path], None], tmp_path: Path) -> None:
    launch = of_kernel(captured(tmp_path), "scale_chosen")[0]
    damage(tmp_path / CLASSES / launch.digest)
    assert read_capture(tmp_path).problems or any(one.problem for one in read_capture(tmp_path).classes)
    mended = captured(tmp_path)
    assert mended.problems == []
    assert [one.problem for one in of_kernel(mended, "scale_chosen")] == [""]
    assert len(mended.classes) == 2


@pytest.mark.parametrize(("first", "kept"), [(8, "missing"), (1 << 20, "values")])
def test_capture_again_with_another_max_bytes_keeps_the_values_of_either(first: int, kept: str, tmp_path: Path) -> None:
    assert of_kernel(captured(tmp_path, max_bytes=first), "scale_chosen")[0].storages[1].kept == kept
    again = captured(tmp_path, max_bytes=8 + (1 << 20) - first)
    assert of_kernel(again, "scale_chosen")[0].storages[1].kept == "values"
