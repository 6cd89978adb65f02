"""`kerneltune compare`: show the A/B table of two variants, peers or record files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from kerneltune.cli import options as o
from kerneltune.cli.console import STDOUT, deliver, width
from kerneltune.cli.files import SUFFIX, load_some, record_files, selected, tables_of_devices
from kerneltune.cli.progress import Reporter
from kerneltune.plan import Selection, load_plan
from kerneltune.records import Record, grouped, load
from kerneltune.reporting.naming import by_family
from kerneltune.reporting.tables import BEST_PEER, Comparison, ab_rows, ab_table, default_pair, side
from kerneltune.sweep_file import family_name
from kerneltune.table import join_tables

Sides = tuple[list[Record], list[Record]]


@o.selection(without=("variant",))
def command(
    wanted: Selection,
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

    Without names: the fastest peer of every case against `optimized`; a workload that declares a table of its own shows that.
    Reads the newest records of this GPU; on a machine without a GPU, the recorded results of any GPU. `compare X X --run`
    measures X twice: the difference is noise.
    """
    if a is not None and b is None:
        a, b, source = (None, None, [*(source or []), Path(a)]) if _is_file(a) else (None, a, source)
    if source and (run or (_is_file(a) and _is_file(b))):
        raise ValueError(f"from: {str(source[0])!r}: expected only where A or B is a variant, and without --run")
    if a is not None and a == b and not run:
        raise ValueError(
            f"b: {b!r}: the same records as A: expected another variant or file, or --run to measure a variant twice"
        )
    wanted = replace(wanted, family=family or "")
    if run:
        if a is None or b is None:
            raise ValueError("a: missing: expected A and B where --run is given")
        sides = _measured(a, b, wanted, policy, results, output)
    else:
        records = [] if _is_file(a) and _is_file(b) else _loaded(source or (), family, results)
        if a is None and b is None and (own := tables_of_devices(_of_policy(selected(records, wanted), policy))):
            deliver(join_tables(own, style, width()), output)
            return
        if a is None:
            first, second = default_pair([record for record in selected(records, wanted) if record.role != "part"])
            a, b = first, b or second
            if a == b:
                raise ValueError(f"nothing to compare: A and B are both {b}: name another variant")
        assert b is not None  # without A there is a default of B
        of_a, of_b = _side(a, records, wanted), _side(b, records, wanted)
        policies = {record.policy for record in of_b}
        of_a = _of_policy([record for record in of_a if record.policy in policies], policy)
        sides = of_a, [record for record in of_b if record.policy == of_a[0].policy] if of_a else []
    tables = _tables(a, b, *sides)
    if not any(tables.values()):
        same = f"{'variant, ' if _is_file(a) or _is_file(b) else ''}case, device and policy"
        raise ValueError(f"nothing to compare: {a} and {b} have no record of the same {same}")
    deliver(_render((a, b), tables, style), output)


def _of_policy(records: list[Record], policy: str | None) -> list[Record]:
    """Return the records of a policy; for None, of `cold`, or, as training steps have no `cold`, of the first record's policy."""
    policies = dict.fromkeys(record.policy for record in records)
    chosen = policy or ("cold" if "cold" in policies else next(iter(policies), ""))
    return [record for record in records if record.policy == chosen]


def _is_file(name: str | None) -> bool:
    return name is not None and name.endswith(SUFFIX)


def _measured(a: str, b: str, wanted: Selection, policy: str | None, results: Path | None, output: Path | None) -> Sides:
    """Measure A and B now, if the output can be written; return their records."""
    if output not in (None, STDOUT):
        o.require_writable(output.parent)
    if not wanted.family:
        raise ValueError("family: missing: expected --family where --run is given")
    options, ops = o.make_options(wanted.family, results, policy=policy), o.load_ops()
    from kerneltune.sweep_run import measure_live

    wanted.require_match("op", ops)
    for name in (a, b):  # a pattern may match several variants
        o.choice("variant", name, dict.fromkeys(v.name for op in wanted.ops or ops for v in ops[op].variants))
    selection = replace(wanted, variants=tuple(dict.fromkeys((a, b))))
    with Reporter() as progress:
        measured = measure_live(load_plan(ops, selection, options), progress, "compare --run", repeat=1 + (a == b))
    if a == b:
        return measured[::2], measured[1::2]
    return [record for record in measured if record.variant == a], [record for record in measured if record.variant == b]


def _loaded(files: Sequence[Path], family: str | None, results: Path | None = None) -> list[Record]:
    """Return the records of the named files, of a single family if a family is named; without files, see `record_files`."""
    if not files:
        return [record for path in record_files(results, family) for record in load(path)]
    records = [record for path in files for record in load_some(path)]
    families = by_family(records)
    return records if family is None else families[o.choice("family", family_name(family), families)]


def _side(name: str, records: list[Record], wanted: Selection) -> list[Record]:
    """Return the wanted records that a name stands for, of all policies: of a file, of a variant, or of the best peers."""
    chosen = selected(_loaded([Path(name)], wanted.family or None) if _is_file(name) else records, wanted)
    if _is_file(name):
        return chosen
    if name != BEST_PEER:
        o.choice("variant", name, [*dict.fromkeys(record.variant for record in chosen), BEST_PEER, f"a {SUFFIX} file"])
    return side(chosen, name)


def _tables(a: str, b: str, of_a: list[Record], of_b: list[Record]) -> dict[str, list[Comparison]]:
    """Return heading -> rows: a single table, a table per family, or a table per variant of a file.

    A variant of a file is compared with the fastest peers, else with the same variant. If each side has a single variant, the
    two variants are compared.
    """
    if not _is_file(a) and not _is_file(b):
        tables = {family: rows for family, members in by_family(of_a).items() if (rows := ab_rows(members, of_b))}
        return tables if len(tables) > 1 else {"": [row for rows in tables.values() for row in rows]}
    in_a, in_b = (grouped(side, lambda record: record.variant) for side in (of_a, of_b))
    if a == BEST_PEER:
        in_a = dict.fromkeys(in_b, of_a)
    elif b == BEST_PEER:
        in_b = dict.fromkeys(in_a, of_b)
    elif len(in_a) == len(in_b) == 1 and in_a.keys() != in_b.keys():
        return {"": ab_rows(of_a, of_b)}
    return {variant: rows for variant in in_a if (rows := ab_rows(in_a[variant], in_b.get(variant, ())))}


def _render(names: tuple[str, str], tables: dict[str, list[Comparison]], style: str) -> str:
    """Return the tables in a style; for CSV, as a single table."""
    if style == "csv":
        tables = {"": [row for rows in tables.values() for row in rows]}
    return join_tables([ab_table(rows, *names, title=title) for title, rows in tables.items()], style, width())
