"""The tuning stage of a sweep: which cases lack a config or have a stale one, and the processes that find out.

Decides nothing about configs and prints nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from typing import Any

from kerneltune import cache, device, sweep
from kerneltune.measuring.compare import commit, memory_shortage, release_memory
from kerneltune.plan import Options, Progress, Selection, load_plan, results_root, wanted_variants
from kerneltune.search import spaces
from kerneltune.search.loop import Search, values
from kerneltune.search.trials import Trial
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.tuning.bench import ChildLostError
from kerneltune.tuning.knobs import widened
from kerneltune.tuning.machines import Clock, Machines
from kerneltune.tuning.tuner import NothingPassedError, Tuner, checked_space, measure_space, tune
from kerneltune.tuning.usage import Usage, keep
from kerneltune.tuning.verify import Verdict, verify

CEILING_OP = "stream"


def run_tune(ops: Mapping[str, Op], selection: Selection, options: Options, progress: Progress) -> list[cache.Entry]:
    """Search the selected bench cases, or measure their whole spaces; returns the entries that were stored.

    Raises:
        ValueError: no GPU, bad input, a space that makes no sense, or a folder that cannot be written.
    """
    plan = load_plan(ops, selection)
    entries = [entry for entry in plan.bench if selection.takes(entry)]
    if options.knobs:
        _check_knobs(ops, entries, selection, options)
    if not device.current().is_gpu:
        raise ValueError("tune needs a GPU: in the interpreter nothing can be timed")
    return tune_entries(ops, entries, selection, options, progress)


def tune_entries(
    ops: Mapping[str, Op], entries: Sequence[sweep.Entry], selection: Selection, options: Options, progress: Progress
) -> list[cache.Entry]:
    """Search what the cache lacks; the ceiling of every case as well.

    Raises:
        ValueError: a GPU that nothing can be compiled for ahead of time, or a space that makes no sense.
    """
    search = Search(options.budget_s, options.trials, options.sampler, until_gain=options.until_gain)
    wanted = list(_wanted(ops, entries, selection, options))
    if not wanted:
        return []
    for op, case, variant in wanted:  # before anything is measured or written
        checked_space(op, case, widened(variant, options.knobs))
    release_memory()  # the measuring process needs what this one no longer does
    stored = []
    progress.stage("measure spaces" if options.exhaustive else "tune", len(wanted))
    with Machines(options) as machines:
        clock, searches = Clock(machines), list[tuple[Mapping[str, Any], Usage]]()
        for (op, case, variant), following in zip_longest(wanted, wanted[1:]):
            label = f"{op.name} {variant.name} {case.name} {case.dtype} {case.quant}"
            shortage = memory_shortage(op, case)
            if shortage is not None:
                progress.note(f"not tuned: {op.name} {case.name}: {shortage}")
                progress.advance(label)
                continue
            tuner = machines.tuner(op, case, widened(variant, options.knobs))
            compiling = machines.compiling(tuner)
            mine = Clock(machines)
            try:
                if options.exhaustive:
                    progress.best(_export(tuner, measure_space(tuner, compiling), selection, options))
                else:
                    if following is not None:
                        later, later_case, later_variant = following
                        machines.compile_ahead(machines.tuner(later, later_case, widened(later_variant, options.knobs)), search)
                    entry = tune(tuner, search, compiling, options.configs)
                    stored.append(entry)
                    gain = entry.evidence.get("speedup")
                    progress.best(f"{entry.config}" + (f" {gain:.2f}x the incumbent" if gain else ""))
            except NothingPassedError as error:
                progress.note(str(error))
            except ChildLostError as error:
                progress.note(f"not tuned: {label}: {error}")
            searches.append((_identity(tuner), mine.usage(tuner)))
            whole = clock.usage(tuner)
            progress.advance(label)
        if sum(usage.evaluations for _, usage in searches):
            progress.note(whole.text)
            path = results_root(options) / "runs" / "searches" / f"{device.current().slug}.jsonl"
            keep(path, whole, searches, family=selection.family, commit=commit())
    cache.clear()
    return stored


def _identity(tuner: Tuner) -> dict[str, Any]:
    case = tuner.case
    names = {"op": tuner.op.name, "variant": tuner.variant.name, "case": case.name, "axes": dict(case.axes)}
    return {**names, "dtype": case.dtype, "quant": case.quant, "options": dict(case.options), "policy": tuner.policy}


def verify_cache(
    ops: Mapping[str, Op], entries: Sequence[tuple[str, str, cache.Entry]], options: Options, progress: Progress
) -> list[tuple[str, str, Verdict]]:
    """Judge cached entries, given as (device, operator, entry); those of this machine's GPU that are stale are timed again.

    Raises:
        ValueError: an operator that does not exist.
    """
    here = device.current()
    for _, name, _ in entries:
        if name not in ops:
            raise ValueError(f"unknown op {name!r}; there are {', '.join(ops)}")
    found = []
    progress.stage("verify", len(entries))
    with ExitStack() as stack:
        machines = stack.enter_context(Machines(options)) if any(slug == here.slug for slug, *_ in entries) else None
        for slug, name, entry in entries:
            duel = partial(_duel, machines, entry.policy) if machines is not None and slug == here.slug else None
            found.append((slug, name, verify(ops[name], entry, duel)))
            progress.advance(f"{name} {entry.variant} {entry.case} {entry.dtype} {entry.quant}")
    return found


def _duel(machines: Machines, policy: str, op: Op, case: Case, variant: Variant, configs: Sequence[Config]) -> int:
    """Which config wins, the first unless another is surely faster.

    Raises:
        ValueError: the first is wrong now, or cannot be timed.
    """
    bench = machines.bench
    try:
        bench.open(op, case, variant, policy)
        trials = [bench.trial(config, None) for config in configs]
        if trials[0].time_us is None:
            raise ValueError(f"{trials[0].status}: {trials[0].detail}")
        timed = [config for config, trial in zip(configs, trials, strict=True) if trial.time_us is not None]
        best, _ = machines.tuner(op, case, variant, policy).duel(timed)
        return configs.index(best)
    except ChildLostError as error:
        raise ValueError(f"lost: {error}") from error
    finally:
        bench.close()


def _check_knobs(ops: Mapping[str, Op], entries: Sequence[sweep.Entry], selection: Selection, options: Options) -> None:
    for name in dict.fromkeys(entry.op for entry in entries):
        for variant in wanted_variants(ops[name], selection, options):
            if variant.config is not None:
                widened(variant, options.knobs)


def _export(tuner: Tuner, trials: Mapping[Config, Trial], selection: Selection, options: Options) -> str:
    """Write the measured space of a case; says where.

    Raises:
        NothingPassedError: no config has a time.
    """
    if all(trial.time_us is None for trial in trials.values()):
        raise NothingPassedError(f"{tuner.op.name} {tuner.variant.name}: no config has a time for {tuner.case.label}")
    op, case, variant, here = tuner.op, tuner.case, tuner.variant, device.current()
    stored = tuner.store.of_case(op, case, variant, tuner.policy)
    newest = max(stored, key=lambda s: s.date)
    flags = [f"--knob {name}={','.join(texts)}" for name, texts in options.knobs]
    parts = ["kerneltune tune", selection.family, "--exhaustive --op", op.name, "--case", case.name, "--dtype", case.dtype]
    command = [*parts, "--quant", case.quant, "--variant", variant.name, *flags]
    space = spaces.MeasuredSpace(
        op=op.name, variant=variant.name, case=case.name, axes=case.axes, dtype=case.dtype, quant=case.quant,
        options=case.options, policy=tuner.policy, default=_knobs(variant.default_config(case)), device=here.name,
        driver=here.driver, source_hash=op.source_hash, commit=newest.commit, date=newest.date, command=" ".join(command),
        trials={_knobs(config): trials[config] for config in variant.configs(case) if config in trials}, **device.versions(),
    )  # fmt: skip
    path = spaces.write(results_root(options) / here.slug / "spaces", space)
    return f"{len(space.feasible)} of {len(space.trials)} configs have a time, best {min(space.feasible.values()):.2f} µs: {path}"


def _knobs(config: Config) -> spaces.Knobs:
    return tuple(values(config).items())


def _wanted(
    ops: Mapping[str, Op], entries: Sequence[sweep.Entry], selection: Selection, options: Options
) -> Iterator[tuple[Op, Case, Variant]]:
    """What the cache has no entry for: the ceiling of every case first, then the cases, bf16 before the other types.

    Every case, and no ceiling, where whole spaces are measured.
    """
    work: dict[tuple[str, str, Case], tuple[Op, Case, Variant]] = {}
    ceiling = ops.get(CEILING_OP)
    for entry in sorted(entries, key=lambda e: e.case.dtype != "bfloat16"):
        op, case = ops[entry.op], entry.case
        for variant in wanted_variants(op, selection, options):
            if variant.config is not None and variant.unsupported(case) is None:
                work[op.name, variant.name, case] = (op, case, variant)
        if ceiling is not None and not options.exhaustive:
            stream_case = ceiling_case(op, case)
            work[ceiling.name, ceiling.variants[0].name, stream_case] = (ceiling, stream_case, ceiling.variants[0])
    for op, case, variant in work.values():
        if options.force or options.exhaustive or not cached_config(op, case, variant, options, exact=True):
            yield op, case, variant


def cached_config(op: Op, case: Case, variant: Variant, options: Options, exact: bool) -> Config | None:
    """The cached config of a case: exactly its own, or the nearest that is valid."""
    hits = cache.candidates(
        op.name, variant.name, device.current().slug, case.axes, case.dtype, case.quant, case.options, options.policy,
        () if exact else op.free_axes, options.configs,
    )  # fmt: skip
    for hit in hits:
        if exact and not hit.exact:
            continue
        try:
            config = variant.config_from(hit.entry.config)
        except ValueError:
            continue
        if variant.valid(case, config) is None:
            return config
    return None


def ceiling_case(op: Op, case: Case) -> Case:
    """The case of the streaming operator that moves as many bytes."""
    traffic = op.traffic(case)
    return Case(f"{traffic.read}+{traffic.write}", (("read", traffic.read), ("write", traffic.write)), "int32")
