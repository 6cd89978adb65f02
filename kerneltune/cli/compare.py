"""`kerneltune compare`: show the A/B table of two variants, peers or record files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from kerneltune.cli import loading
from kerneltune.cli import options as o
from kerneltune.cli.console import STDOUT, deliver, note, width
from kerneltune.cli.files import SUFFIX, load_some, record_files, selected, tables_of_devices
from kerneltune.cli.progress import Reporter
from kerneltune.plan import Selection, load_plan
from kerneltune.records import Record, grouped, load
from kerneltune.reporting.naming import by_family
from kerneltune.reporting.pairing import BEST_PEER, Comparison, ab_rows, default_pair, side
from kerneltune.reporting.tables import ab_table
from kerneltune.sweep_file import family_name
from kerneltune.table import join_tables
from kerneltune.wording import counted

Sides = tuple[list[Record], list[Record]]


@o.ungrouped(without=("variant",))
def command(
    selection: Selection,
    a: Annotated[str | None, o.argument("[A]", "A variant, a peer, best-peer or a file of records; else best-peer.")] = None,
    b: Annotated[str | None, o.argument("[B]", "A variant, a peer or a file of records; optimized by default.")] = None,
    source: Annotated[list[Path] | None, o.option("--from", "FILE", "Take records from this file; may be repeated.")] = None,
    run: Annotated[bool, o.flag("--run", "Measure now, interleaved, instead of reading records.")] = False,
    family: Annotated[str | None, o.option("--family", "NAME", "Only records of this family; needed by --run.")] = None,
    policy: o.PolicyName = None,
    style: o.Style = "text",
    output: o.Output = None,
    results: o.Results = None,
) -> None:
    """Show how fast B is against A, case by case: µs, speed-up, `+` above 1.05x and `-` below 0.95x.

    Without names A is the fastest peer of every case and B is `optimized`; a workload that declares a table shows its table.
    The command reads the newest records of this GPU; on a machine without a GPU, the recorded results of any GPU.
    `compare X X --run` measures X twice: the difference is noise.
    """
    if a is not None and b is None:  # a single name is B, a single file has A and B
        source, b = ([*(source or []), Path(a)], None) if _is_file(a) else (source, a)
        a = None
    are_files = _is_file(a) and _is_file(b)
    if source and (run or are_files):
        raise ValueError(f"from: {str(source[0])!r}: expected only where A or B is a variant, and without --run")
    selection = replace(selection, family=family or "")
    if run:
        if a is None or b is None:
            raise ValueError("a: missing: expected A and B where --run is given")
        sides = _measured(a, b, selection, policy, results, output)
    elif a is not None and a == b:
        hint = "expected another variant or file, or --run to measure a variant twice"
        raise ValueError(f"b: {b!r}: the same records as A: {hint}")
    else:
        records = [] if are_files else _loaded(source or (), family, results)
        if a is None and b is None:
            own_tables = tables_of_devices(_of_policy(selected(records, selection), policy))
            if own_tables:
                deliver(join_tables(own_tables, style, width()), output)
                return
        if a is None or b is None:
            a, b = _default_names(b, selected(records, selection))
        sides = _recorded(a, b, records, selection, policy)
    tables = _tables(a, b, *sides)
    if not any(tables.values()):
        same = f"{'variant, ' if _is_file(a) or _is_file(b) else ''}case, device and policy"
        raise ValueError(f"nothing to compare: {a} and {b} have no record of the same {same}")
    deliver(_render((a, b), tables, style), output)
    _note_unpaired((a, b), sides, tables)


def _note_unpaired(names: tuple[str, str], sides: Sides, tables: dict[str, list[Comparison]]) -> None:
    """Print how many rows of two files the tables lack, as a slow case that a file leaves out looks like none."""
    shown = {id(record) for rows in tables.values() for row in rows for record in (row.a, row.b)}
    for name, records in zip(names, sides, strict=True) if all(map(_is_file, names)) else ():
        if unpaired := sum(id(record) not in shown for record in records):
            note(f"{counted(unpaired, 'row')} of {name} without a row of the other file")


def _default_names(b: str | None, records: Sequence[Record]) -> tuple[str, str]:
    """Return the names of A and B where A is not given, and perhaps B."""
    a, default_b = default_pair([record for record in records if record.role != "part"])
    if a == (b or default_b):
        raise ValueError(f"nothing to compare: A and B are both {a}: name another variant")
    return a, b or default_b


def _recorded(a: str, b: str, records: list[Record], selection: Selection, policy: str | None) -> Sides:
    """Return the records that A and B stand for, of a policy that both sides have."""
    a_records, b_records = _side(a, records, selection), _side(b, records, selection)
    b_policies = {record.policy for record in b_records}
    a_records = _of_policy([record for record in a_records if record.policy in b_policies], policy)
    a_policies = {record.policy for record in a_records}
    return a_records, [record for record in b_records if record.policy in a_policies]


def _of_policy(records: list[Record], policy: str | None) -> list[Record]:
    """Return the records of a policy; None stands for `cold`, or for the policy of the first record if none is of `cold`."""
    if policy is None:
        policies = [record.policy for record in records]
        policy = "cold" if "cold" in policies or not policies else policies[0]
    return [record for record in records if record.policy == policy]


def _is_file(name: str | None) -> bool:
    return name is not None and name.endswith(SUFFIX)


def _measured(a: str, b: str, selection: Selection, policy: str | None, results: Path | None, output: Path | None) -> Sides:
    """Measure A and B now, if the output can be written; return their records."""
    if output not in (None, STDOUT):
        loading.require_writable(output.parent)
    if not selection.family:
        raise ValueError("family: missing: expected --family where --run is given")
    options, ops = loading.make_options(selection.family, results, policy=policy), loading.load_ops()
    from kerneltune.sweep_run import measure_live

    selection.require_match("op", ops)
    for name in (a, b):  # a whole name: a pattern, as --variant takes it, could stand for several variants
        o.one_of("variant", name, dict.fromkeys(v.name for op in selection.ops or ops for v in ops[op].variants))
    selection = replace(selection, variants=tuple(dict.fromkeys((a, b))))
    with Reporter() as progress:
        measured = measure_live(load_plan(ops, selection, options), progress, "compare --run", repeat=1 + (a == b))
    if a == b:
        return measured[::2], measured[1::2]  # the two rows of a case follow each other
    return [record for record in measured if record.variant == a], [record for record in measured if record.variant == b]


def _loaded(files: Sequence[Path], family: str | None, results: Path | None = None) -> list[Record]:
    """Return the records of the named files, of a single family if a family is named; without files, see `record_files`."""
    if not files:
        return [record for path in record_files(results, family) for record in load(path)]
    records = [record for path in files for record in load_some(path)]
    families = by_family(records)
    return records if family is None else families[o.one_of("family", family_name(family), families)]


def _side(name: str, records: list[Record], selection: Selection) -> list[Record]:
    """Return the selected records that a name stands for, of all policies: of a file, of a variant, or of the best peers."""
    if _is_file(name):
        return selected(_loaded([Path(name)], selection.family or None), selection)
    chosen = selected(records, selection)
    if name != BEST_PEER:
        o.one_of("variant", name, [*dict.fromkeys(record.variant for record in chosen), BEST_PEER, f"a {SUFFIX} file"])
    return side(chosen, name)


def _tables(a: str, b: str, a_records: list[Record], b_records: list[Record]) -> dict[str, list[Comparison]]:
    """Return heading -> rows: a single table, a table per family, or a table per variant of a file.

    A variant of a file is compared with the fastest peers, else with the same variant. If each side has a single variant, the
    two variants are compared.
    """
    if not _is_file(a) and not _is_file(b):
        tables = _some_rows({family: ab_rows(members, b_records) for family, members in by_family(a_records).items()})
        return tables if len(tables) > 1 else {"": _joined(tables)}
    a_variants, b_variants = (grouped(side, lambda record: record.variant) for side in (a_records, b_records))
    if a == BEST_PEER:
        a_variants = dict.fromkeys(b_variants, a_records)
    elif b == BEST_PEER:
        b_variants = dict.fromkeys(a_variants, b_records)
    elif len(a_variants) == len(b_variants) == 1 and a_variants.keys() != b_variants.keys():
        return {"": ab_rows(a_records, b_records)}
    return _some_rows({name: ab_rows(a_variants[name], b_variants.get(name, ())) for name in a_variants})


def _some_rows(tables: dict[str, list[Comparison]]) -> dict[str, list[Comparison]]:
    return {heading: rows for heading, rows in tables.items() if rows}


def _joined(tables: dict[str, list[Comparison]]) -> list[Comparison]:
    return [row for rows in tables.values() for row in rows]


def _render(names: tuple[str, str], tables: dict[str, list[Comparison]], style: str) -> str:
    """Return the tables in a style; for CSV, as a single table."""
    if style == "csv":
        tables = {"": _joined(tables)}
    return join_tables([ab_table(rows, *names, title=title) for title, rows in tables.items()], style, width())
