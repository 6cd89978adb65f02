"""The tuning stage of a sweep: which cases lack a config or have a stale one, and the processes that find out.

Decides nothing about configs and prints nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from typing import Any

from kerneltune import cache, device, sweep
from kerneltune.measuring.compare import commit, memory_shortage, release_memory
from kerneltune.measuring.compiler import TARGETS, CompilePool
from kerneltune.plan import Options, Progress, Selection, load_plan, results_root, wanted_variants
from kerneltune.search import spaces
from kerneltune.search.loop import Search, values
from kerneltune.search.trials import Trial, TrialStore
from kerneltune.spec import Case, Config, Op, Space, Variant
from kerneltune.tuning.bench import ChildLostError, IsolatedBench, split_cores
from kerneltune.tuning.tuner import NothingPassedError, Tuner, checked_space, compile_with, measure_space, tune
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
        for op, case, variant in wanted:
            label = f"{op.name} {variant.name} {case.name} {case.dtype} {case.quant}"
            shortage = memory_shortage(op, case)
            if shortage is not None:
                progress.note(f"not tuned: {op.name} {case.name}: {shortage}")
                progress.advance(label)
                continue
            variant = widened(variant, options.knobs)
            tuner = machines.tuner(op, case, variant)
            compiling = compile_with(machines.pool, op, case, variant)
            try:
                if options.exhaustive:
                    progress.best(_export(tuner, measure_space(tuner, compiling), selection, options))
                else:
                    entry = tune(tuner, search, compiling, options.configs)
                    stored.append(entry)
                    gain = entry.evidence.get("speedup")
                    progress.best(f"{entry.config}" + (f" {gain:.2f}x the incumbent" if gain else ""))
            except NothingPassedError as error:
                progress.note(str(error))
            except ChildLostError as error:
                progress.note(f"not tuned: {label}: {error}")
            progress.advance(label)
    cache.clear()
    return stored


class Machines:
    """The compile pool, the measuring child, and the trial stores, for as long as a stage lasts."""

    def __init__(self, options: Options) -> None:
        here = device.current()
        target = TARGETS.get(here.arch)
        if target is None:
            raise ValueError(f"cannot compile ahead of time for {here.arch}; known targets: {', '.join(TARGETS)}")
        measuring, compiling = split_cores()
        self.pool = CompilePool(target, options.workers, compiling)
        self.bench = IsolatedBench(cores=measuring)
        self._policy, self._folder = options.policy, results_root(options) / "runs" / "trials" / here.slug

    def tuner(self, op: Op, case: Case, variant: Variant, policy: str = "") -> Tuner:
        """A tuner that remembers what was tried before.

        Raises:
            ValueError: the store cannot be read.
        """
        prints = {"source_hash": op.source_hash, "driver": device.current().driver, **device.versions()}
        store = TrialStore(self._folder / f"{op.name}.jsonl", commit(), **prints)
        return Tuner(op, case, variant, policy or self._policy, store, self.bench)

    def __enter__(self) -> "Machines":
        self.pool.__enter__()
        self.bench.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bench.__exit__(*error)
        self.pool.__exit__(*error)


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


def _duel(machines: "Machines", policy: str, op: Op, case: Case, variant: Variant, configs: Sequence[Config]) -> int:
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


def widened(variant: Variant, knobs: Sequence[tuple[str, tuple[str, ...]]]) -> Variant:
    """The variant with further values to some knobs of its space, given as text; `valid` still has the last word.

    Raises:
        ValueError: a knob that the variant does not have, or a value of another type.
    """
    if not knobs:
        return variant
    types = {f.name: f.type for f in fields(variant.config)} if variant.config is not None else {}
    more: dict[str, tuple[Any, ...]] = {}
    for name, texts in knobs:
        if name not in types:
            raise ValueError(f"knob: {name!r}: {variant.name} has {', '.join(types) or 'none'}")
        more[name] = tuple(_typed(name, text, types[name]) for text in texts)

    def space(case: Case) -> Space:
        return {name: tuple(dict.fromkeys((*given, *more.get(name, ())))) for name, given in variant.space(case).items()}

    return replace(variant, space=space)


def _typed(name: str, text: str, kind: Any) -> Any:
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"knob: {name}: {text!r}: expected {getattr(kind, '__name__', kind)}") from None


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
