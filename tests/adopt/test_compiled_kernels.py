"""Compiled kernels beside a table: copied whole, with their new paths."""

import json
from pathlib import Path

import pytest

from kerneltune.adopt.ahead import FOLDER, copy_entries, entry_name


def entry(cache: Path, name: str) -> Path:
    """Write an entry as Triton's disk cache has them."""
    folder = cache / name
    folder.mkdir(parents=True)
    (folder / "k.cubin").write_bytes(b"\x7fELF")
    (folder / "lock").write_text("")
    (folder / "__grp__k.json").write_text(json.dumps({"child_paths": {"k.cubin": str(folder / "k.cubin")}}))
    return folder


def test_copy_entries_into_an_empty_cache_writes_new_paths(tmp_path: Path) -> None:
    entry(tmp_path / "old", "ABC")
    assert copy_entries(tmp_path / "old", tmp_path / "tuned" / FOLDER, ["ABC", "GONE"]) == 1
    (tmp_path / "tuned" / FOLDER / "launchers.json").write_text("{}")  # no kernel
    assert copy_entries(tmp_path / "tuned" / FOLDER, tmp_path / "new") == 1
    copied = tmp_path / "new" / "ABC"
    assert json.loads((copied / "__grp__k.json").read_text()) == {"child_paths": {"k.cubin": str(copied / "k.cubin")}}
    assert sorted(file.name for file in copied.iterdir()) == ["__grp__k.json", "k.cubin"]
    assert (copied / "k.cubin").read_bytes() == b"\x7fELF"


def test_copy_entries_skips_libraries_and_paths_outside(tmp_path: Path) -> None:
    hostile = entry(tmp_path / "tuned" / FOLDER, "ABC")
    (hostile / "cuda_utils.so").write_bytes(b"\x7fELF")
    (hostile / "__grp__k.json").write_text(json.dumps({"child_paths": {"../../x.so": "/x.so", "k.cubin": "/k"}}))
    copy_entries(tmp_path / "tuned" / FOLDER, tmp_path / "new")
    copied = tmp_path / "new" / "ABC"
    assert sorted(file.name for file in copied.iterdir()) == ["__grp__k.json", "k.cubin"]
    assert json.loads((copied / "__grp__k.json").read_text()) == {"child_paths": {"k.cubin": str(copied / "k.cubin")}}


def test_copy_entries_keeps_entries_that_the_cache_has(tmp_path: Path) -> None:
    entry(tmp_path / "old", "ABC")
    copy_entries(tmp_path / "old", tmp_path / "tuned" / FOLDER, ["ABC"])
    there = entry(tmp_path / "new", "ABC")
    (there / "k.cubin").write_bytes(b"another")
    assert copy_entries(tmp_path / "tuned" / FOLDER, tmp_path / "new") == 0
    assert (there / "k.cubin").read_bytes() == b"another"


@pytest.mark.parametrize("damage", ["no file", "no list", "no JSON", "no names"])
def test_copy_entries_without_a_file_copies_none_and_names_the_folder_once(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, whole = tmp_path / FOLDER, entry(tmp_path / FOLDER, "XYZ")
    for name in ("ABC", "DEF"):
        group = entry(source, name) / "__grp__k.json"
        if damage == "no file":
            (source / name / "k.cubin").unlink()
        elif damage == "no list":
            group.unlink()
        else:
            group.write_text({"no JSON": "{", "no names": "[]"}[damage])
    assert copy_entries(source, tmp_path / "new") == 1
    assert [copied.name for copied in (tmp_path / "new").iterdir()] == [whole.name]
    text = "kerneltune: {}: 2 compiled kernels without all files, such as .cubin: Triton compiles anew"
    assert [record.getMessage() for record in caplog.records] == [text.format(source)]


def test_copy_entries_mends_an_entry_that_lacks_its_file(tmp_path: Path) -> None:
    entry(tmp_path / "tuned", "ABC")
    damaged = entry(tmp_path / "new", "ABC") / "k.cubin"
    damaged.unlink()
    assert copy_entries(tmp_path / "tuned", tmp_path / "new") == 1
    assert damaged.read_bytes() == b"\x7fELF"


def test_copy_entries_of_a_missing_folder_copies_none(tmp_path: Path) -> None:
    assert copy_entries(tmp_path / FOLDER, tmp_path / "new") == 0
    assert not (tmp_path / FOLDER).exists()


def test_entry_name_equals_that_of_tritons_disk_cache() -> None:
    from triton.runtime.cache import get_cache_manager

    digest = "453fad3a6d" * 6 + "4531"
    with_folder = get_cache_manager(digest)
    assert Path(with_folder.cache_dir).name == entry_name(digest)
    assert entry_name("") == ""
