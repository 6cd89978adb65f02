"""`kerneltune ops`: list the operators with their variants, or the knobs of an operator."""

import dataclasses
import inspect
import re
from typing import Annotated

import typer

from kerneltune.cli import loading
from kerneltune.cli import options as o
from kerneltune.cli.console import note, show, show_table, show_wrapped
from kerneltune.listing import OpSummary
from kerneltune.spec import Case, Op, Variant, missing_packages
from kerneltune.wording import short_dtype

_KNOB = re.compile(r"^    (\w+): (.*(?:\n     +.*)*)", re.M)
"""A knob and its meaning in the `Attributes` of a config's docstring."""


def command(
    name: Annotated[str | None, o.argument("[OP]", "Show this operator's variants and knobs.")] = None,
    sizes: Annotated[list[str] | None, o.argument("[AXIS=SIZE]...", "Knobs for these sizes, like M=8192 N=4096.")] = None,
    dtype: o.Dtype = None,
    quant: o.Quant = None,
    index: Annotated[bool, typer.Option("--index", hidden=True, help="Write the index of operators that is shipped.")] = False,
) -> None:
    """List the operators, or show an operator's variants and the values of their knobs."""
    if index:
        _write_index()
        return
    listed = loading.load_summaries()
    if name is None:
        o.refuse("expected only with OP", dtype=dtype, quant=quant)
        head = ("op", "axes", "types", "modes", "variants", "peers")
        show_table(head, [_row(op) for op in listed.values()])
        variants = [variant for op in listed.values() for variant in op.variants]
        missing = dict.fromkeys(package for variant in variants for package in missing_packages(variant.requires))
        if missing:
            show_wrapped(f"* not installed here: {', '.join(missing)}", "")
        return
    o.one_of("op", name, listed)  # before the operators' code is loaded, which takes seconds
    op = loading.load_ops()[name]
    case = loading.case_of_sizes(op, sizes or [], dtype, quant)
    described = [_described(op, variant, case) for variant in op.variants]
    show_wrapped(f"{op.name}: {case.label}")
    for option, values in op.options.items():
        show_wrapped(f"  option {option:<14} {', '.join(map(str, values))}", " " * 24)
    for lines in described:
        show("")
        for line, indent in lines:
            show_wrapped(line, " " * indent)


def _described(op: Op, variant: Variant, case: Case) -> list[tuple[str, int]]:
    try:
        return list(_details(variant, case))
    except (ValueError, LookupError, ArithmeticError, TypeError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"{op.name} {variant.name}: no knobs for {case.label}: {reason}") from error


def _write_index() -> None:
    """Write the summaries of all operators of this package, which `load_summaries` reads."""
    loading.load_ops()
    from kerneltune import listing, ops, workloads

    operators = {module: ops.operators_in(module) for module in ops.modules()}
    operators |= {module: workloads.operators_in(module) for module in workloads.MODULES}
    listing.write_index(operators)
    note(f"wrote {listing.INDEX}: {sum(map(len, operators.values()))} operators")


def _row(op: OpSummary) -> tuple[str, ...]:
    own = [variant.name for variant in op.variants if variant.role != "peer"]
    peers = [f"{v.name}{'*' if missing_packages(v.requires) else ''}" for v in op.variants if v.role == "peer"]
    lists = (op.axes, map(short_dtype, op.dtypes), op.quants, own, peers or "-")
    return op.name, *map(" ".join, lists)  # without commas the table fits 80 columns


def _details(variant: Variant, case: Case) -> list[tuple[str, int]]:
    """Return lines on a variant, its knobs with values, default and meaning, each with the indent of its continuation."""
    missing = variant.missing()
    lacking = f" (needs {', '.join(missing)})" if missing else ""
    lines = [(f"{variant.name}{' (peer)' if variant.is_peer else ''}{lacking}", 2)]
    unsupported = variant.unsupported(case)
    if unsupported:
        return [*lines, (f"  not for this case: {unsupported}", 2)]
    if variant.config is None:
        return [*lines, ("  no knobs", 2)]
    description, _, knobs = (inspect.getdoc(variant.config) or "").partition("\n\nAttributes:\n")
    lines += [(f"  {' '.join(part.split())}", 2) for part in description.split("\n\n")]
    meanings = dict(_KNOB.findall(knobs))
    default = variant.default_config(case)
    space = variant.space(case)
    for field in dataclasses.fields(variant.config):
        values = ", ".join(map(str, space.get(field.name, ())))
        knob = f"  {field.name:<12} default {getattr(default, field.name, '-')!s:<8} from "
        lines.append((knob + values, len(knob)))
        if field.name in meanings:
            lines.append((f"  {'':<12} {' '.join(meanings[field.name].split())}", 15))
    return [*lines, (f"  {sum(1 for _ in variant.configs(case))} valid configs", 2)]
