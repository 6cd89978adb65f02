"""`kerneltune adopt`: list the kernels of a capture, find suspicious kernels, and tune calls whose host depends on the config."""

import itertools
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kerneltune import device
from kerneltune.cli import loading
from kerneltune.cli import options as o
from kerneltune.cli.captures import show_capture, time_cells
from kerneltune.cli.cases import Ep, sizes_of
from kerneltune.cli.console import deliver, error_line, note, show, show_table, show_wrapped, unaccepted
from kerneltune.cli.progress import Reporter
from kerneltune.wording import assignments, counted
from kerneltune.yaml_fields import read_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kerneltune.adopt.expert_layer import Weights
    from kerneltune.adopt.getter import CallCase, GetterSpec
    from kerneltune.adopt.getter_tuning import TunedCall

app = typer.Typer(
    no_args_is_help=True,
    help="Show what a capture holds and what is suspicious about it; tune calls that ask a function for their config.",
)
_FEW_CALLS = 4
"""Calls of a whole table, the smallest first, that are checked in the interpreter: with 4096 tokens a call takes minutes."""
Folder = Annotated[Path, o.argument("DIR", "Folder of a capture.")]


@app.command("list")
def list_command(folder: Folder) -> None:
    """Show the kernels of a capture: launches, share of the GPU time, else of bytes, configs, keys, sizes that keys leave out."""
    from kerneltune.adopt.overview import read_capture

    show_capture(read_capture(folder))


@app.command("lint")
def lint_command(folder: Folder, accept: o.Accept = None) -> None:
    """Show suspicious kernels: keys that name no argument or omit sizes, configs that never win, results that vary.

    Exit code 1 if a line has no text of an --accept.
    """
    from kerneltune.adopt.overview import check_records, findings, read_capture

    texts = findings(read_capture(folder))
    left = unaccepted(texts, accept or ())
    for text in texts:
        show_wrapped(text if text in left else f"accepted: {text}")
    if left:
        raise typer.Exit(1)
    unchecked = "" if check_records(folder) else f"; no check yet: kerneltune sweep {folder} --check-only"
    show_wrapped(f"nothing {'else ' if texts else ''}to report{unchecked}")


@dataclass(frozen=True)
class Sizes:
    """Hold the options that give the sizes of calls."""

    model: Annotated[Path | None, o.option("--model", "FILE", "Sizes of the experts of a config.json.")] = None
    tp: Annotated[int, o.count("--tp", "GPUs that share each expert.")] = 1
    ep: Ep = 1
    tokens: Annotated[str, o.option("--tokens", "N1,N2", "Tokens to tune; by default the keys of a table.")] = ""
    size: Annotated[list[str] | None, o.option("--size", "NAME=N1,N2", "Another size; may be repeated.")] = None


@dataclass(frozen=True)
class EngineTable:
    """Hold the options of the table of an engine."""

    export: Annotated[str | None, o.pick("--export", ("vllm", "sglang"), "Write the table of an engine.")] = None
    named: Annotated[
        str, o.option("--named", "FIELDS", "Kind of weights, for the table's name: dtype=fp8_w8a8,block_shape=[128,128].")
    ] = ""

    def texts(self, calls: "Sequence[TunedCall]", weights: "Weights") -> dict[str, str]:
        """Return the tables of calls by path; none where no engine is named."""
        from kerneltune.adopt.getter_tuning import engine_tables

        return engine_tables(self.export, device.current().name, calls, weights) if self.export else {}


@app.command("getter")
@o.ungrouped()
def getter_command(
    getter: Annotated[str, o.argument("MODULE:FUNCTION", "What gives the config; also FILE.py:FUNCTION.")],
    call: Annotated[str, o.option("--call", "MODULE:FUNCTION", "An expert layer, or what makes a call of sizes.")],
    out: Annotated[Path, o.option("--out", "DIR", "Folder of trials, configs and tables.", parser=o.named_folder)],
    sizes: Sizes,
    table: EngineTable,
    dtype: Annotated[str, o.option("--dtype", "NAME", "Element type.", callback=o.full_name)] = "bfloat16",
    space: Annotated[Path | None, o.option("--space", "FILE", "YAML of values by knob.")] = None,
    budget: Annotated[float, o.seconds("Search time of all calls together.")] = 240.0,
    trials: o.Trials = None,
    policy: o.PolicyName = None,
    force: Annotated[bool, o.flag("--force", "Search again where a config is known.")] = False,
    workers: o.Workers = None,
) -> None:
    """Tune calls whose host depends on the config, such as a sort by BLOCK_SIZE_M, by overriding the function that gives it.

    A call is timed as a whole and checked against its results under the program's own config, which stays unless the paired
    interval says that another is faster. Without a GPU some overrides are checked, and nothing is timed. Exit code 1 where no
    call was tuned or, without a GPU, a check failed.
    """
    from kerneltune.adopt.expert_layer import named_weights
    from kerneltune.adopt.getter import GetterSpec, call_case, write_spec
    from kerneltune.adopt.getter_tuning import TunedCall, tune_getter

    weights = named_weights(table.named)
    loading.require_writable(out)
    device.select_backend()
    cases = _called_here(_call_cases(sizes, table), not sizes.tokens and bool(sizes.model or table.export))
    began = time.monotonic()
    values = {name: field.sizes(0) for name, field in read_yaml(space).fields().items()} if space else {}
    spec = _probed(GetterSpec(getter, call, str(Path.cwd()), dtype, cases, values, weights=weights), space)
    write_spec(out, spec)
    table.texts([TunedCall(case, case.own) for case in spec.cases], weights)  # raises early
    names = [call_case(spec, case).name for case in spec.cases]
    if not device.current().is_gpu:
        return _check_calls(out, names, spec.cases, table.export is not None)
    share = budget / sum(case.is_searched for case in spec.cases)
    options = loading.make_options(policy=policy, budget_s=share, trials=trials, retune="all" if force else None, workers=workers)
    with Reporter() as progress:
        calls = tune_getter(out, options, progress)
    _show_calls(names, calls, time.monotonic() - began)
    for path, text in table.texts(calls, weights).items():
        deliver(text, out / path)
    if not any(call.evidence for call in calls):
        raise typer.Exit(1)


def _probed(asked: "GetterSpec", space: Path | None) -> "GetterSpec":
    """Call the program in a process of its own, and return the spec with the program's own configs; space: file of values."""
    from kerneltune.adopt.getter import probe
    from kerneltune.processes.start import in_fresh_processes

    try:
        return next(in_fresh_processes(1, probe, asked))
    except ValueError as error:  # a crash or a hang has no name
        text = f"call: {asked.call}: {error}" if str(error).startswith("process ") else str(error)
        raise ValueError(re.sub("^space: ", lambda _: f"{space}: ", text)) from error


def _call_cases(sizes: Sizes, table: EngineTable) -> "list[CallCase]":
    """Return a case for each combination of sizes. A table has cases of all its keys; only cases of `--tokens` are tuned."""
    from kerneltune.adopt.expert_layer import expert_sizes
    from kerneltune.adopt.getter import CallCase
    from kerneltune.adopt.getter_tuning import ENGINE_TOKENS
    from kerneltune.workloads.model_config import read

    values_of: dict[str, list[int]] = {}
    if sizes.tokens or sizes.model or table.export:
        values_of["tokens"] = sizes_of("tokens", sizes.tokens) if sizes.tokens else list(ENGINE_TOKENS)
    if sizes.model is not None:
        values_of |= {name: [value] for name, value in expert_sizes(read(sizes.model), sizes.tp, sizes.ep).items()}
    elif max(sizes.tp, sizes.ep) > 1:
        raise ValueError("tp, ep: expected with --model")
    for text in sizes.size or ():
        name, _, values = text.partition("=")
        if not name.isidentifier():
            raise ValueError(f"size: {text!r}: expected NAME=N1,N2")
        values_of[name] = sizes_of(f"size {name}", values)
    if not values_of:
        raise ValueError("size: missing: expected --model FILE, --tokens or --size NAME=VALUE")
    tuned = set(values_of.get("tokens", ()))
    if table.export:
        values_of["tokens"] = sorted({*ENGINE_TOKENS, *tuned})
    combined = (dict(zip(values_of, values, strict=True)) for values in itertools.product(*values_of.values()))
    return [CallCase(call, is_wanted=not table.export or call["tokens"] in tuned) for call in combined]


def _called_here(cases: "list[CallCase]", is_whole_table: bool) -> "list[CallCase]":
    """Return the cases that are called on this machine: without a GPU, which times nothing, cases to tune alone.

    is_whole_table: whether the user chose no tokens, so that without a GPU few of them will do.
    """
    if device.current().is_gpu:
        return cases
    tuned = [case for case in cases if case.is_wanted]
    called = tuned[:_FEW_CALLS] if is_whole_table else tuned
    if len(tuned) > _FEW_CALLS:
        count = f"{len(called)} of {len(tuned)} calls"
        note(f"no GPU: {count} in the interpreter, where thousands of tokens take minutes: --tokens chooses others")
    return called


def _check_calls(folder: Path, names: "Sequence[str]", cases: "Sequence[CallCase]", is_exported: bool) -> None:
    """Show the own configs of calls, and check some overrides in the interpreter; exit with 1 if a check fails."""
    from kerneltune.adopt.getter import given_knobs
    from kerneltune.adopt.getter_tuning import check_getter

    own = [assignments(case.own) if not case.problem else f"skipped: {case.problem}" for case in cases]
    show_table(("call", "own config"), list(zip(names, own, strict=True)))
    outcomes = check_getter(folder)
    for outcome in outcomes:
        if outcome.status == "failed" and outcome.case is not None:
            error_line(f"{outcome.case.name}: {assignments(given_knobs(outcome.config))}: {outcome.reason}")
        else:
            show_wrapped(outcome.reason)
    num_failed = sum(outcome.status == "failed" for outcome in outcomes)
    checked = f"{num_failed} failed" if num_failed else "all agree with the call's own config"
    show(f"{checked}; no GPU: nothing was timed{', and no table was written' * is_exported}")
    if num_failed:
        raise typer.Exit(1)


def _show_calls(names: "Sequence[str]", calls: "Sequence[TunedCall]", seconds: float) -> None:
    """Print the tuned calls, and a line for each call that was not tuned."""
    from kerneltune.adopt.configs import launch_defaults

    rows = []
    for name, call in zip(names, calls, strict=True):
        if call.evidence:
            own = launch_defaults() | call.case.own
            changed = {knob: value for knob, value in call.config.items() if own.get(knob) != value}
            rows.append((name, *time_cells(call.evidence), assignments(changed) if call.is_faster else "own config"))
        elif call.skipped:
            note(f"skipped: {name}: {call.skipped}")
    show_table(("call", "own µs", "ours µs", "speedup", "95 %", "changed"), rows)
    reasons = Counter(reason for call in calls for reason in call.failed)
    for reason, count in reasons.most_common(1):
        note(f"{reasons.total()} overrides failed; {count} of them: {reason}")
    gained = sum(call.is_faster for call in calls)
    show(f"{counted(len(rows), 'call')} tuned in {seconds:.0f} s, {gained} of them faster than with the own config")
