"""`kerneltune report`: an HTML page of records and configs; a picture for a pull request."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from kerneltune import cache
from kerneltune.cli import options as o
from kerneltune.cli.console import deliver, note
from kerneltune.cli.files import record_files, selected, tables_of_devices
from kerneltune.device import slug
from kerneltune.plan import Selection
from kerneltune.records import load
from kerneltune.reporting.naming import by_family, source
from kerneltune.reporting.page import Sources, page
from kerneltune.reporting.pairing import default_pair, family_pairs, paired
from kerneltune.reporting.picture import speedups

_PAGE = Path("report.html")
_LARGE = 3_000_000


@o.ungrouped(without=("case", "variant"))
def command(
    selection: Selection,
    files: Annotated[list[Path] | None, o.argument("[FILE]...", "Records; the records of this GPU without a file.")] = None,
    output: Annotated[Path | None, o.option("--output -o", "FILE", "Write the page here; report.html if not given.")] = None,
    a: Annotated[str | None, o.option("--a", "NAME", "The variant or peer that is A at first.")] = None,
    b: Annotated[str | None, o.option("--b", "NAME", "The variant or peer that is B at first.")] = None,
    svg: Annotated[Path | None, o.option("--svg", "FILE", "Write a picture of all speed-ups instead; - prints it.")] = None,
    configs: o.Configs = None,
    results: o.Results = None,
) -> None:
    """Write an HTML page that needs no network: every family's speed-up, A against B by case, charts, and the gain of tuning.

    A is the fastest peer of every case unless it is named. With --svg the page is written only if -o is given.
    """
    o.read_configs(configs)
    sources = _sources(files or record_files(results), selection, (a, b))
    if svg is not None:
        deliver(_picture(sources), svg)
    if output is None and svg:
        return
    path, text = output or _PAGE, page(sources)
    deliver(text, path)
    if len(text.encode()) > _LARGE:
        note(f"{path} has {len(text.encode()) / 1e6:.1f} MB; --op, --dtype and --quant make it smaller")


def _picture(sources: Sources) -> str:
    """Return the picture of all families, each with its own A and B."""
    families = by_family(sources.records)
    pairs_of = family_pairs(families, sources.pair)
    rows_of = {family: paired(members, *pairs_of[family]) for family, members in families.items()}
    shown = [row.b for rows in rows_of.values() for row in rows]
    return speedups(rows_of, pairs_of, source(shown, ("device", "torch", "triton")) if shown else "")


def _sources(paths: Sequence[Path], selection: Selection, pair: tuple[str | None, str | None]) -> Sources:
    """Return the selected records and the cached configs of their operators."""
    everything = selected([record for path in paths for record in load(path)], selection)
    if not everything:
        raise ValueError(f"no records to report in {', '.join(map(str, paths))}")
    own = {family: tables_of_devices(members) for family, members in by_family(everything).items()}
    records = [record for record in everything if record.role != "part"]
    default_pair(records, *pair)  # an unknown variant is an error before anything is written
    folders = dict.fromkeys((record.op, slug(record.device)) for record in records)
    return Sources(
        records=records,
        pair=pair,
        entries=[entry for op, device in folders for entry in cache.load(op, device)],
        command=" ".join(["kerneltune", *sys.argv[1:]]),
        files=[_short(path) for path in paths],
        own=own,
    )


def _short(path: Path) -> str:
    """Return the path relative to the current folder, or the file's name alone: a page names no folder of this machine."""
    whole = path.absolute()
    return str(whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else path.name)
