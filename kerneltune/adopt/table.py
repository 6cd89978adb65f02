"""Read and write the table that serving reads: for every kernel the configs of its captured launches, by author's key and size.

Tuning writes the table. A manifest beside the table holds its SHA-256, so that every rank serves the same table or none.
"""

import bisect
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kerneltune.adopt.configs import StoredConfig
from kerneltune.adopt.folder import FORMAT, NAMES_IN_FILES, KernelCode, builtin, read_json
from kerneltune.files import locked, read_bytes, replace_text
from kerneltune.nearness import log2_distance

MANIFEST = "manifest.json"
_MAX_BYTES = 256 << 20
_MISSING = 2.0**-16
"""Size in place of a size that is missing or below 1: it is far from every other size."""


@dataclass(frozen=True, slots=True)
class ServingRow:
    """Hold the configs of a class of launches, or of classes that share a config, with times and intervals as evidence.

    `sizes` has every size of the class by name; `configs` has as JSON the chosen config, then the configs to fall back to.
    """

    sizes: dict[str, int]
    configs: Annotated[tuple[StoredConfig, ...], msgspec.Meta(min_length=1)]
    evidence: dict[str, Any]


class Group(msgspec.Struct, frozen=True, dict=True, rename=NAMES_IN_FILES):
    """Hold the rows for a value of the author's key and a list of the tensors' element types.

    `split` has the names of the sizes that the author's key leaves out and that decide between the rows; empty for a single row.
    """

    key_values: list[Any]
    dtypes: list[str]
    split: tuple[str, ...]
    rows: Annotated[tuple[ServingRow, ...], msgspec.Meta(min_length=1)]

    def _deciding(self, sizes: Mapping[str, int | None]) -> list[float]:
        return [size if size and size > 0 else _MISSING for size in map(sizes.get, self.split)]

    @cached_property
    def _sorted(self) -> tuple[list[tuple[list[float], ServingRow]], list[float]]:
        """Return the rows with their deciding sizes, by the first of these sizes, and the first sizes alone."""
        rows = sorted([(self._deciding(row.sizes), row) for row in self.rows], key=lambda row: row[0][:1])
        return rows, [sizes[0] for sizes, _ in rows] if self.split else []

    def nearest(self, sizes: Mapping[str, int | None]) -> ServingRow:
        """Return the row whose deciding sizes are the nearest. A launch of a new size waits for it: microseconds."""
        deciding, (rows, first_sizes) = self._deciding(sizes), self._sorted
        if len(deciding) == 1:  # the usual case: only the neighbours of the size can be the nearest
            index = bisect.bisect_left(first_sizes, deciding[0])
            rows = rows[max(index - 1, 0) : index + 1]
        return min(rows, key=lambda row: log2_distance(row[0], deciding))[1]


class TableKernel(KernelCode, frozen=True, dict=True, rename=NAMES_IN_FILES | {"shared": "portfolio"}):
    """Hold the configs of a kernel in a table.

    Attributes:
        package: version of the package that holds the kernel; empty if unknown.
        shared: the config of all classes for torch.compile, which cannot tell launches apart; empty if no config is correct in
            all. Tables of earlier versions have several, the best first.
    """

    module: str
    name: str
    package: str
    groups: tuple[Group, ...]
    shared: tuple[StoredConfig, ...]

    def reads(self, values: Mapping[str, Any]) -> bool:
        """Return whether globals have the values that the kernel was tuned with; a missing global may have any value."""
        return all(values.get(name, tuned) == tuned for name, tuned in self.globals.items())

    @cached_property
    def _group_of(self) -> dict[str, Group]:
        return {repr((group.key_values, group.dtypes)): group for group in self.groups}

    def group(self, key_values: Sequence[Any], dtypes: Sequence[str]) -> Group | None:
        """Return the group of an author's key and element types; None where the table has none."""
        return self._group_of.get(repr((list(key_values), list(dtypes))))  # a text, because True == 1

    def nearest(self, sizes: Mapping[str, int], dtypes: Sequence[str]) -> ServingRow | None:
        """Return the row of the nearest captured launch, by log2 distance, with these element types; None if none has them."""
        rows = [row for group in self.groups if group.dtypes == list(dtypes) for row in group.rows]
        names = set(sizes).union(*(row.sizes for row in rows))
        return Group([], list(dtypes), tuple(sorted(names)), tuple(rows)).nearest(sizes) if rows else None


class _Manifest(msgspec.Struct):
    """Hold the SHA-256 of every table by name."""

    tables: dict[str, str]


@dataclass(frozen=True, slots=True)
class ServingTable:
    """Hold the kernels of one GPU model."""

    device: str
    versions: dict[str, str]
    kernels: tuple[TableKernel, ...]
    digest: str = ""


def table_path(root: Path, device: str) -> Path:
    """Return the file of a GPU model's table."""
    return root / "served" / f"{device}.json"


def write_table(root: Path, table: ServingTable) -> str:
    """Write the table of a GPU model as JSON, then the manifest that names it; returns its SHA-256.

    Equal tables have equal files.
    """
    path = table_path(root, table.device)
    stored = {"format": FORMAT, **msgspec.to_builtins(table, enc_hook=builtin), "digest": ""}
    text = json.dumps(stored, indent=1, sort_keys=True) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifest = path.parent / MANIFEST
    with locked(manifest):  # another host may write the table of its GPU
        try:
            tables = read_json(manifest, _Manifest).tables
        except ValueError:  # there is none, or it is damaged
            tables = {}
        replace_text(path, text)
        replace_text(manifest, json.dumps({"format": FORMAT, "tables": {**tables, path.name: digest}}, indent=1) + "\n")
    return digest


def check_manifest(root: Path, manifest: str) -> None:
    """Check that a table of a folder has a SHA-256 that begins as given."""
    digests = read_json(root / "served" / MANIFEST, _Manifest).tables.values()
    if not any(digest.startswith(manifest) for digest in digests):
        raise ValueError(f"manifest: {manifest}: {root} has tables of SHA-256 {', '.join(sorted(digests))}")


def read_table(root: Path, device: str) -> ServingTable | None:
    """Return the table of a GPU model; None if the folder has no table for it."""
    path = table_path(root, device)
    if not path.is_file():
        return None
    data = read_bytes(path, _MAX_BYTES)
    digest, tables = hashlib.sha256(data).hexdigest(), read_json(path.parent / MANIFEST, _Manifest).tables
    if tables.get(path.name) != digest:
        raise ValueError(f"{path}: SHA-256 {digest[:12]}…, {MANIFEST} beside it names {str(tables.get(path.name))[:12]}…")
    table = read_json(path, ServingTable, data=data, is_versioned=True)
    if table.device != device:
        raise ValueError(f"{path}: device: {table.device!r}: expected {device!r}, by the file's name")
    return replace(table, digest=digest)
