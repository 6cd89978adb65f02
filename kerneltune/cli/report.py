"""`kerneltune report`: HTML pages of records, searches and configs; pictures and Markdown for a pull request."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import deliver, note, write
from kerneltune.cli.files import record_files, selected

if TYPE_CHECKING:
    from kerneltune.cache import CacheEntry
    from kerneltune.records import Record
    from kerneltune.reporting.payload import Sources
    from kerneltune.run_options import Selection
    from kerneltune.search.task import Trial

_PAGE = Path("report.html")
_LARGE = 2_000_000


@o.selects("case", "variant")
def command(
    wanted: "Selection",
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Records; those of this GPU if none."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The page, or the index of several; report.html if not given."),
    ] = None,
    a: Annotated[str | None, typer.Option("--a", metavar="NAME", help="The variant or peer that is A at first.")] = None,
    b: Annotated[str | None, typer.Option("--b", metavar="NAME", help="The variant or peer that is B at first.")] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="DIR", help="Write the main charts as PNG instead.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="DIR", help="Write the main charts as SVG instead.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the A/B tables as Markdown instead; - prints them.")
    ] = None,
    configs: o.Configs = None,
    results: o.Results = None,
) -> None:
    """Write HTML pages that need no network: A against B, shares of the ceiling, peers, bandwidth, tuning.

    One family is one page; several are an index and a page each beside it. A is the fastest peer of every case unless it is
    named. Pages are written unless pictures or Markdown are asked for; with -o they are written as well.
    """
    paths = files or record_files(results)
    sources = _sources(paths, wanted, (a, b), configs, results)
    pictures: list[Path] = []
    for folder, suffix in ((png, "png"), (svg, "svg")):
        if folder is not None:
            from kerneltune.reporting.pictures import draw

            for name, content in draw(sources.records, sources.pair, suffix).items():
                write(folder / f"{name}.{suffix}", content)
                pictures.append(folder / f"{name}.{suffix}")
    if markdown is not None:
        is_printed = str(markdown) == "-"
        text = _markdown(sources, pictures, Path() if is_printed else markdown.parent)
        deliver(text, None if is_printed else markdown)
    if output is not None or not (png or svg or markdown):
        if sources.records and not sources.trials:
            note("no trial store beside these records: the page shows what the config cache says of the tuning")
        for path, text in _pages(sources, output or _PAGE).items():
            write(path, text)
            if len(text.encode()) > _LARGE:
                note(f"{path} has {len(text.encode()) / 1e6:.1f} MB; --op, --dtype and --quant make it smaller")


def _pages(sources: "Sources", path: Path) -> dict[Path, str]:
    """Return path -> page: one of a family, else an index and a page for each beside it."""
    from kerneltune.reporting.page import index_page, page
    from kerneltune.reporting.payload import apart, index, payload

    parts = apart(sources)
    if len(parts) <= 1:
        return {path: page(payload(sources))}
    names = {name: path.with_name(f"{path.stem}_{name}{path.suffix}") for name in parts}
    listed = index(sources, {name: (part, names[name].name) for name, part in parts.items()})
    return {path: index_page(listed), **{names[name]: page(payload(part), path.name) for name, part in parts.items()}}


def _sources(
    paths: Sequence[Path], wanted: "Selection", pair: tuple[str | None, str | None], configs: Path | None, results: Path | None
) -> "Sources":
    """Return the selected records, what trial stores and the config cache know about them."""
    from kerneltune.records import load
    from kerneltune.reporting.naming import by_family
    from kerneltune.reporting.payload import Sources, default_pair
    from kerneltune.workloads import own_tables

    everything = selected([record for path in paths for record in load(path)], wanted)
    if not everything:
        raise ValueError(f"no records to report in {', '.join(map(str, paths))}")
    own = {family: own_tables(members) for family, members in by_family(everything).items()}
    records = [record for record in everything if record.role != "part"]
    return Sources(
        records=records,
        trials=_trials(records, results),
        entries=_entries(records, configs),
        own=own,
        pair=default_pair(records, *pair),
        command=" ".join(["kerneltune", *sys.argv[1:]]),
        files=[_short(path) for path in paths],
    )


def _short(path: Path) -> str:
    """Return the path from here, where it lies below, else the file's name: pages say nothing of this machine."""
    whole = path.absolute()
    return str(whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else path.name)


def _trials(records: "Sequence[Record]", results: Path | None) -> "list[Trial]":
    """Return the stored trials of the records' operators and devices."""
    from kerneltune.device import slug
    from kerneltune.search.task import store_path

    root = o.results_root(results) / "runs" / "trials"
    wanted = dict.fromkeys(store_path(root / slug(record.device), record.op) for record in records)
    stores = [path for path in wanted if path.is_file()]
    if not stores:
        return []
    from kerneltune.search.trials import history  # imports Optuna

    return [trial for path in stores for trial in history(path)]


def _entries(records: "Sequence[Record]", configs: Path | None) -> "dict[str, list[CacheEntry]]":
    """Return the cached configs of the records' operators and devices."""
    from kerneltune import cache
    from kerneltune.device import slug

    found: dict[str, list[CacheEntry]] = {}
    for op, device in dict.fromkeys((record.op, slug(record.device)) for record in records):
        found.setdefault(op, []).extend(cache.load(op, device, configs))
    return found


def _markdown(sources: "Sources", pictures: Sequence[Path], folder: Path) -> str:
    """Return the A/B table of every family, the tables of workloads, and the pictures that lie beside it."""
    from kerneltune.reporting.naming import by_family
    from kerneltune.reporting.tables import ab_rows, ab_table, side

    a, b = sources.pair
    lines = []
    for family, members in by_family(sources.records).items():
        rows = ab_rows(side(members, a), side(members, b))
        if rows:
            lines += [f"### {family}: {a} (A) against {b} (B)", "", ab_table(rows, a, b).markdown()]
        for table in sources.own.get(family, ()):
            lines += [f"### {family}{': ' if table.title else ''}{table.title}", "", replace(table, title="").markdown()]
    for path in {path.stem: path for path in pictures}.values():
        beside = Path(os.path.relpath(str(path), str(folder))).as_posix()
        lines.append(f"![{path.stem.replace('_', ' ')}]({beside})")
    return "\n".join(lines).rstrip() + "\n"
