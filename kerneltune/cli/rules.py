"""Define `kerneltune cache observe`, `fit` and `explain`: rules for cases without a config of their own."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import show, show_wrapped, width
from kerneltune.cli.files import bench_cases
from kerneltune.cli.progress import reporter
from kerneltune.files import data_root
from kerneltune.spec import Case, Op, Variant
from kerneltune.table import Column, Row, Table, pairs

if TYPE_CHECKING:
    from kerneltune.cache import CacheEntry
    from kerneltune.rule import Rule


def observe(
    ops: o.OpsGiven = None,
    variant: o.Whose = "optimized",
    dtype: o.Dtypes = None,
    case: o.CaseNames = None,
    most: Annotated[int, typer.Option("--most", metavar="N", help="Configs per case.")] = 14,
    cases: Annotated[int | None, typer.Option("--cases", metavar="N", help="Cases per operator, the least known first.")] = None,
    budget: Annotated[float | None, o.seconds("Begin no case after that.")] = None,
    extra: Annotated[list[str] | None, typer.Option("--sweep", metavar="FILE", help="Further cases; may be repeated.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Time configs again that were timed with the present code.")] = False,
    configs: o.Configs = None,
    results: o.Results = None,
    workers: o.Workers = None,
) -> None:
    """Time configs that a rule may choose, on recorded cases and on cases of the sweeps, and keep the trials beside the records.

    A case is timed with the choices of rules, its own config, the default, and configs of other cases, whose knobs may follow a
    size.
    """
    from kerneltune import device
    from kerneltune.rules.known_times import targets, timed, timed_cases, to_observe
    from kerneltune.rules.transfer import donors_of
    from kerneltune.run_options import require_gpu
    from kerneltune.search.task import Task, knobs_of
    from kerneltune.tune.observe import observe as run

    known = o.load_ops()
    names = [o.choice("op", name, known) for name in ops or _with_variant(known, variant)]
    require_gpu("cache observe")
    folder = o.results_root(results)
    o.require_writable(folder)
    bench, slug = bench_cases(known, extra or []), device.current().slug
    asked = []
    for name in names:
        op, of = known[name], known[name].variant(variant)
        donors, known_times = donors_of(op, of, "cold", slug, configs), timed_cases(op, of, slug, configs, folder)
        done = set() if again else timed(op, of, slug, folder)
        wanted = [one for one in targets(op, of, donors, bench.get(name, [])) if _is_wanted(one, dtype, case)]
        for one, offered in islice(to_observe(op, of, known_times, donors, wanted, most), cases):
            if new := [config for config in offered if (one, tuple(knobs_of(config).items())) not in done]:
                asked.append((Task(op, one, of), new))
    with reporter() as progress:
        options = o.make_options("cold", budget_s=budget, configs=configs, results=folder, workers=workers)
        count = run(asked, options, progress)
    show(f"{count} of {len(asked)} cases timed: {folder / slug / 'trials'}")


def fit(
    ops: o.OpsGiven = None,
    gpu: o.Gpu = None,
    variant: o.Whose = "optimized",
    check: Annotated[bool, typer.Option("--check", help="Write nothing.")] = False,
    leave_out: Annotated[
        str | None,
        typer.Option(
            "--leave-out",
            metavar="WHAT",
            help="Judge rules that know nothing of a whole `band` (first size of the same power of two) or of the `rest` (same "
            "other sizes); write nothing.",
        ),
    ] = None,
    configs: o.Configs = None,
    results: o.Results = None,
) -> None:
    """Fit the rules of a GPU to the kept times, and write the rules beside the configs.

    The table shows a rule's speed on sizes that it was not fitted to, geometric mean and worst: tuned time over the rule's time
    on recorded cases; least known time over the rule's time on observed cases without a recorded config; unseen: both, with the
    kind of the tree chosen without the case's sizes, too. Needs no GPU.
    """
    from kerneltune.rules.costs import CostTable
    from kerneltune.rules.fit import fitted, left_out
    from kerneltune.rules.known_times import timed_cases

    if leave_out is not None:
        o.choice("leave-out", leave_out, ("band", "rest"))
    known = o.load_ops()
    slug = _gpu(gpu, configs)
    folder = _observed(results)
    if is_stored := not check and leave_out is None:
        o.require_writable(o.configs_root(configs))
    rows: list[Row] = []
    for name in [o.choice("op", name, known) for name in ops or _with_variant(known, variant)]:
        op, of = known[name], known[name].variant(variant)
        known_times = timed_cases(op, of, slug, configs, folder)
        if len({timed.case.axes for timed in known_times}) < 2:
            rows.append(Row((name, *[None] * len(_JUDGED)), "times of fewer than two sizes are known"))
            continue
        table = CostTable(op, of, known_times)
        if leave_out is not None:
            judged = left_out(table, leave_out).data
        else:
            made, _ = fitted(table)
            judged = made.judged
            if is_stored:
                _store(name, slug, made, len(known_times), configs)
        worst = f"worst: {judged['worst_case']}" if judged.get("worst_case") else ""
        rows.append(Row((name, *(judged.get(field) for field in _JUDGED)), worst))
    columns = (Column(name, digits=0 if field in _COUNTS else 3) for field, name in _JUDGED.items())
    show(Table((Column("op"), *columns), tuple(rows)).text(width()))


_JUDGED = {
    "cases": "cases", "judged": "judged", "geomean": "mean", "worst": "worst",
    "observed": "other", "observed_geomean": "mean", "observed_worst": "worst",
    "unseen": "unseen", "unseen_worst": "worst",
}  # fmt: skip
"""Field of `Rule.judged` -> heading."""
_COUNTS = ("cases", "judged", "observed")


def _store(op: str, slug: str, made: "Rule", cases: int, configs: Path | None) -> None:
    """Write a rule into the file of its operator, which keeps the rules of other variants."""
    from kerneltune import device, rule_file
    from kerneltune.cache import readable
    from kerneltune.files import replace_text

    before = readable(rule_file.path_of(op, slug, Path()), configs)
    others = [one for one in rule_file.load(before) if one.variant != made.variant] if before.exists() else []
    about = {"arch": device.arch_of(slug), "cases": cases, "command": f"kerneltune cache fit {op}"}
    replace_text(rule_file.path_of(op, slug, o.configs_root(configs)), rule_file.dumps(op, slug, [*others, made], about))


def _observed(results: Path | None) -> Path:
    """Return the folder of the kept trials: the folder of the results, or the packaged folder if that has no trials."""
    folder = o.results_root(results)
    return folder if results or any(folder.glob("*/trials/*")) else data_root("results")


def explain(
    op: o.OpName,
    case: Annotated[
        list[str], typer.Argument(metavar="CASE...", help="A bench case by name, or sizes and options such as M=8192 N=3584.")
    ],
    gpu: o.Gpu = None,
    variant: o.Whose = "optimized",
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", callback=o.whole_name, help="Element type, where CASE is sizes.")
    ] = None,
    quant: Annotated[str | None, typer.Option("--quant", metavar="NAME", help="Quantization mode.")] = None,
    configs: o.Configs = None,
) -> None:
    """Show the config of a case in a call without `config=`, its source, and the quality of the rule on unknown sizes."""
    from kerneltune import cache
    from kerneltune.rule import Facts
    from kerneltune.search.task import knobs_of

    known = o.load_ops()
    chosen = known[o.choice("op", op, known)]
    of = chosen.variant(variant)
    if of.config is None:
        raise ValueError(f"variant: {variant!r}: expected a variant with knobs")
    slug = _gpu(gpu, configs)
    asked = chosen.called(_case(known, chosen, ",".join(case), dtype, quant))
    if (reason := of.unsupported(asked)) is not None:
        raise ValueError(f"case: {asked.label}: unsupported: {reason}")
    chooser = cache.Chooser.of(chosen, of, "cold", configs)
    found = chooser.find(asked, slug)
    _explained("case", asked.label)
    _explained("config", pairs(knobs_of(found.config)))
    _explained("from", _SOURCES[found.source] + _staleness(of, asked, cache.load(op, slug, configs)))
    ruling = cache.ruling_of(chooser, slug)
    if ruling is None:
        _explained("rule", "none: `kerneltune cache fit` makes one where times of several sizes are known")
        return
    facts = Facts.of(asked)
    leaf, answers = ruling.rule.leaf(facts)
    path = " and ".join(answers) or f"{_for_any(ruling.rule, leaf)} for any case"
    unknown = "" if ruling.rule.knows(facts) else f"; it says nothing of this case: fitted to {_fitted_to(ruling.rule)}"
    _explained("rule", f"{ruling.told(slug)}: {path}{unknown}")
    for line in _left_out(ruling.rule.judged):
        _explained("left out", line)


def _for_any(made: "Rule", leaf: Sequence[int]) -> str:
    """Return the result of a rule's only leaf, in words."""
    return "one config" if any(made.forms[leaf[0]]) else "the default"


def _left_out(judged: Mapping[str, Any]) -> Iterator[str]:
    """Yield the quality of a rule on left-out shapes, first on recorded and then on other cases."""
    if judged.get("judged"):
        told = f"rules that do not know a case's sizes reach {judged['geomean']:.3f} of its tuned speed"
        where = f"geometric mean of {judged['judged']} of {judged['cases']} cases; worst {judged['worst']:.3f}"
        yield f"{told} ({where}: {judged['worst_case']})"
    if judged.get("observed"):
        where = f"geometric mean of {judged['observed']} other cases; worst {judged['observed_worst']:.3f}"
        yield f"{judged['observed_geomean']:.3f} of the fastest known ({where})"


def _staleness(variant: Variant, case: Case, entries: Sequence["CacheEntry"]) -> str:
    """Return the changes since the case's own entry was stored; empty without changes or without an entry."""
    from kerneltune.tune.candidates import changed

    own = next((one for one in entries if one.as_case == case and (one.variant, one.policy) == (variant.name, "cold")), None)
    reason = "" if own is None else changed(variant, own, here=False)
    return f"; stale: {reason}" if reason else ""


def _fitted_to(made: "Rule") -> str:
    """Return the words and the least sizes that a rule was fitted to."""
    words = [f"{name}={','.join(map(str, values))}" for name, values in made.known.items()]
    return " ".join([*words, *(f"{axis}>={-(-size // 2)}" for axis, size in made.least.items())])


def _explained(word: str, text: str) -> None:
    show_wrapped(f"{word:<10}{text}", " " * 10)


_SOURCES = {
    "own": "the cache's entry for exactly this case",
    "near": "the cache's entry for the nearest sizes, options or type",
    "rule": "the rule",
    "default": "the default: no entry is for this case or near it, and no rule has another config",
}


def _case(known: Mapping[str, Op], op: Op, text: str, dtype: str | None, quant: str | None) -> Case:
    """Return the bench case of a name, or the case of sizes and options."""
    if "=" in text:
        return o.case_of_sizes(op, text.split(","), dtype or op.dtypes[0], quant or op.quants[0], whole=True)
    cases = [case for case in bench_cases(known).get(op.name, []) if dtype in (None, case.dtype) and quant in (None, case.quant)]
    named = {case.name: case for case in reversed(cases)}
    return named[o.choice("case", text, named)]


def _gpu(gpu: str | None, configs: Path | None) -> str:
    """Return the folder of a GPU: the given GPU, this machine's, or the only folder."""
    from kerneltune import device

    here = device.current()
    known = sorted({path.parent.name for path in o.config_files(configs)})
    if gpu is not None:
        return o.choice("gpu", gpu, [*known, here.slug])
    if here.is_gpu:
        return here.slug
    if len(known) != 1:
        raise ValueError(f"gpu: not given: expected one of {', '.join(known) or '(none found)'}")
    return known[0]


def _with_variant(known: Mapping[str, Op], name: str) -> list[str]:
    """Return the operators whose variant of this name has knobs."""
    return [op.name for op in known.values() if any(of.name == name and of.config is not None for of in op.variants)]


def _is_wanted(case: Case, dtypes: list[str] | None, names: list[str] | None) -> bool:
    import fnmatch

    return (not dtypes or case.dtype in dtypes) and (not names or any(fnmatch.fnmatch(case.name, name) for name in names))
