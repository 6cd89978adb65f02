"""`kerneltune report`: one HTML page of records, searches, configs and curves; pictures and Markdown for a pull request."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import note, write
from kerneltune.cli.files import curve_files, record_files

if TYPE_CHECKING:
    from kerneltune.cache import Entry
    from kerneltune.records import Key, Record
    from kerneltune.reporting.payload import Sources

_PAGE = Path("report.html")
_LARGE = 2_000_000
_CURVES = ".csv"


def command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Records, or curves (.csv); those of this GPU if none."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page; report.html if not given.")
    ] = None,
    a: Annotated[str | None, typer.Option("--a", metavar="NAME", help="The variant or peer that is A at first.")] = None,
    b: Annotated[str | None, typer.Option("--b", metavar="NAME", help="The variant or peer that is B at first.")] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="DIR", help="Write the main charts as PNG instead.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="DIR", help="Write the main charts as SVG instead.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the A/B tables as Markdown instead.")
    ] = None,
    op: o.OpNames = None,
    dtype: o.Dtypes = None,
    quant: o.Quants = None,
    configs: o.Configs = None,
    results: o.Results = None,
) -> None:
    """Write one HTML page that needs no network: A against B, ceiling, peers, bandwidth, scaling, tuning, training curves.

    The page is written unless pictures or Markdown are asked for; with -o it is written as well.
    """
    paths = files or [*record_files(results), *([] if op or dtype or quant else curve_files(results))]
    sources = _sources(paths, op, dtype, quant, (a, b), configs, results)
    pictures: list[Path] = []
    for folder, suffix in ((png, "png"), (svg, "svg")):
        if folder is not None:
            for name, content in _pictures(sources, suffix).items():
                write(folder / f"{name}.{suffix}", content)
                pictures.append(folder / f"{name}.{suffix}")
    if markdown is not None:
        write(markdown, _markdown(sources, pictures, markdown.parent))
    if output is not None or not (png or svg or markdown):
        from kerneltune.reporting.page import page
        from kerneltune.reporting.payload import payload

        content = page(payload(sources)).encode()
        write(output or _PAGE, content)
        if len(content) > _LARGE:
            note(f"the page has {len(content) / 1e6:.1f} MB; --op, --dtype and --quant make it smaller")


def _pictures(sources: "Sources", suffix: str) -> dict[str, bytes]:
    """Name -> content.

    Raises:
        ValueError: nothing to draw, no matplotlib, or two pictures of one name.
    """
    from kerneltune.reporting.pictures import draw, draw_curves

    found = draw(sources.records, sources.pair, suffix) if sources.records else {}
    for file, curves in sources.curves.items():
        name = Path(file).stem
        if name in found:
            raise ValueError(f"{file}: {name!r}: expected a file name that no other picture has")
        found[name] = draw_curves(curves, suffix)
    return found


def _sources(
    paths: Sequence[Path],
    op: list[str] | None,
    dtype: list[str] | None,
    quant: list[str] | None,
    pair: tuple[str | None, str | None],
    configs: Path | None,
    results: Path | None,
) -> "Sources":
    """The selected records, what the operators, the trial stores and the config cache know about them, and the curves."""
    from kerneltune import curves
    from kerneltune.records import load
    from kerneltune.reporting.payload import Sources, default_pair
    from kerneltune.search.trials import history
    from kerneltune.spec import parts_of

    of_curves = {_short(path): curves.load(path) for path in paths if path.suffix == _CURVES}
    records = [record for path in paths if path.suffix != _CURVES for record in load(path)]
    for name, wanted in (("op", op), ("dtype", dtype), ("quant", quant)):
        taken = o.chosen(name, wanted, [getattr(record, name) for record in records])
        records = [record for record in records if getattr(record, name) in taken]
    if not records and len(of_curves) < len(paths):
        raise ValueError(f"no records to report in {', '.join(map(str, paths))}")
    known_ops = o.load_ops()
    present = [known_ops[name] for name in dict.fromkeys(record.op for record in records) if name in known_ops]
    peers = frozenset((op.name, variant.name) for op in present for variant in op.variants if variant.is_peer)
    parts = parts_of(present)
    records = [record for record in records if (record.op, record.variant) not in parts]
    stores = _stores(records, results)
    if records and not stores:
        note("no trial store beside these records: the page shows what the config cache says of the tuning")
    return Sources(
        records=records,
        trials=[row for path in stores for row in history(path)],
        entries=_entries(records, configs),
        peers=peers,
        flops=_flops(records),
        pair=default_pair(records, peers, *pair) if records else ("", ""),
        command=" ".join(["kerneltune", *sys.argv[1:]]),
        files=[_short(path) for path in paths],
        curves=of_curves,
    )


def _short(path: Path) -> str:
    """The path from here, where it lies below."""
    whole = path.absolute()
    return str(whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else path)


def _flops(records: "Sequence[Record]") -> "dict[Key, int]":
    """Floating-point operations of the records' keys, where the operator states them and the axes and options are its own."""
    from kerneltune.spec import Case

    known = o.load_ops()
    found: dict[Key, int] = {}
    strange: dict[str, None] = {}
    for r in records:
        op = known.get(r.op)
        if op is None or op.flops is None:
            continue
        if tuple(r.axes) != op.axes or r.options.keys() != op.options.keys():
            given, expected = (", ".join(names) for names in ([*r.axes, *r.options], [*op.axes, *op.options]))
            strange[f"{r.op} with {given}, not {expected}: of another version or operator; no roofline"] = None
            continue
        found[r.key] = op.flops(Case(r.case, tuple(r.axes.items()), r.dtype, r.quant, tuple(r.options.items())))
    for text in strange:
        note(text)
    return found


def _stores(records: "Sequence[Record]", results: Path | None) -> list[Path]:
    """Return the trial stores of the records' operators and devices that exist here."""
    from kerneltune.device import slug
    from kerneltune.search.trials import has_store, store_path

    root = o.results_root(results) / "runs" / "trials"
    wanted = dict.fromkeys(store_path(root / slug(record.device), record.op) for record in records)
    return [path for path in wanted if has_store(path)]


def _entries(records: "Sequence[Record]", configs: Path | None) -> "dict[str, list[Entry]]":
    """The cached configs of the records' operators and devices."""
    from kerneltune import cache
    from kerneltune.device import slug

    found: dict[str, list[Entry]] = {}
    for op, device in dict.fromkeys((record.op, slug(record.device)) for record in records):
        found.setdefault(op, []).extend(cache.load(op, device, o.configs_root(configs)))
    return found


def _markdown(sources: "Sources", pictures: Sequence[Path], folder: Path) -> str:
    """The A/B table of every family and where its numbers come from, the final losses, and the pictures that lie beside it."""
    from kerneltune.reporting.naming import by_family, source
    from kerneltune.reporting.tables import ab_rows, ab_table, curves_table

    a, b = sources.pair
    families = by_family(sources.records)
    tables = {f: ab_rows(*([r for r in members if r.variant == name] for name in (a, b))) for f, members in families.items()}
    if any(tables.values()):
        tables = {family: rows for family, rows in tables.items() if rows}
    lines = []
    for family, rows in tables.items():
        of = f"{family}: " if len(tables) > 1 else ""
        whence = source([side for row in rows for side in (row.a, row.b)] or families[family])
        lines += [f"### {of}{a} (A) against {b} (B)", "", f"{whence}. `{sources.command}`", "", ab_table(rows, a, b).markdown()]
    for file, curves in sources.curves.items():
        lines += [f"### {curves.title}", "", f"{curves.source}. Losses in `{file}`.", "", curves_table(curves).markdown()]
    for path in {path.stem: path for path in pictures}.values():
        beside = Path(os.path.relpath(str(path), str(folder))).as_posix()
        lines.append(f"![{path.stem.replace('_', ' ')}]({beside})")
    return "\n".join(lines).rstrip() + "\n"
