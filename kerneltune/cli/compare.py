"""`kerneltune compare`: the A/B table of two variants, peers or record files."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import deliver, width
from kerneltune.cli.files import record_files
from kerneltune.cli.progress import reporter

if TYPE_CHECKING:
    from kerneltune.records import Record
    from kerneltune.reporting.tables import Row

_SUFFIX = ".jsonl"


def command(
    a: Annotated[str, typer.Argument(metavar="A", help="A variant, a peer, or a file of records.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same, to compare with A.")],
    op: o.OpNames = None,
    source: Annotated[
        list[Path] | None, typer.Option("--from", metavar="FILE", help="Take records from this file; may be repeated.")
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Measure now, interleaved, instead of reading records.")] = False,
    family: Annotated[
        str | None, typer.Option("--family", metavar="NAME", help="Only records of this family; needed by --run.")
    ] = None,
    policy: o.PolicyName = "cold",
    style: Annotated[str, typer.Option("--format", metavar="text|markdown|csv", help="Form of the table.")] = "text",
    output: o.Output = None,
    results: o.Results = None,
) -> None:
    """Show A against B, case by case, with `+` above 1.05x and `-` below 0.95x.

    Reads the newest records of this GPU; where there is no GPU, the recorded ones of any.
    """
    o.choice("format", style, ("text", "markdown", "csv"))
    o.choice("policy", policy, o.POLICIES)
    if run:
        records = _measure(a, b, op, family, policy, results)
    elif a.endswith(_SUFFIX) and b.endswith(_SUFFIX):
        records = []
    else:
        records = _recorded(source, family, results)
    sides = _side(a, records, op, policy), _side(b, records, op, policy)
    tables = _tables(a, b, *sides)
    if not any(tables.values()):
        raise ValueError(f"nothing to compare: no case, device and policy that both {a} and {b} have records of")
    deliver(_render(tables, style), output)


def _measure(a: str, b: str, op: list[str] | None, family: str | None, policy: str, results: Path | None) -> "list[Record]":
    """Records of A and B, measured now."""
    if family is None:
        raise ValueError("family: missing: expected --family where --run is given")
    from kerneltune import sweep

    sweep.find(family)
    known = o.load_ops()
    from kerneltune.campaign import compare_live

    selection = o.make_selection(known, family, op, variants=list(dict.fromkeys((a, b))))
    with reporter() as progress:
        return compare_live(known, selection, a, b, o.make_options(policy, results=results), progress)


def _recorded(source: list[Path] | None, family: str | None, results: Path | None) -> "list[Record]":
    """Records of the files given, else of this GPU, else of any GPU."""
    from kerneltune.records import load

    return [record for path in source or record_files(results, family) for record in load(path)]


def _side(name: str, records: "list[Record]", op: list[str] | None, policy: str) -> "list[Record]":
    """The records that a name stands for: of a file, or of a variant among `records`."""
    from kerneltune.records import load

    is_file = name.endswith(_SUFFIX)
    found = load(Path(name)) if is_file else records
    for wanted in op or ():
        o.choice("op", wanted, list(dict.fromkeys(record.op for record in found)))
    if not is_file:
        o.choice("variant", name, [*dict.fromkeys(record.variant for record in found), f"a {_SUFFIX} file"])
        found = [record for record in found if record.variant == name]
    return [record for record in found if (not op or record.op in op) and record.policy == policy]


def _tables(a: str, b: str, of_a: "list[Record]", of_b: "list[Record]") -> "dict[str, list[Row]]":
    """Heading -> rows: one table, or one per variant where a file holds several."""
    from kerneltune.reporting.tables import ab_rows

    if not a.endswith(_SUFFIX) and not b.endswith(_SUFFIX):
        return {"": ab_rows(of_a, of_b)}
    of_both = [v for v in dict.fromkeys(record.variant for record in of_a) if any(record.variant == v for record in of_b)]
    if not of_both:  # a file of one variant against another
        return {"": ab_rows(of_a, of_b)} if len({record.variant for record in of_a}) == 1 else {}
    rows = {v: ab_rows([r for r in of_a if r.variant == v], [r for r in of_b if r.variant == v]) for v in of_both}
    return {variant: found for variant, found in rows.items() if found}


def _render(tables: "dict[str, list[Row]]", style: str) -> str:
    from kerneltune.reporting.tables import ab_csv, ab_markdown, ab_text

    if style == "csv":
        return ab_csv([row for rows in tables.values() for row in rows])
    table: Callable[[list[Row]], str] = ab_markdown if style == "markdown" else lambda rows: ab_text(rows, width())
    mark = "### " if style == "markdown" else ""
    return "\n".join((f"{mark}{heading}\n\n" if heading else "") + table(rows) for heading, rows in tables.items())
