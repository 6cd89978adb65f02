"""Run the gate on this GPU: measure the selected rows in fresh processes, judge them, and measure suspects again."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from kerneltune import device
from kerneltune.gating.rows import defaults_of
from kerneltune.gating.verdict import DEFAULT_MARGIN, UNUSABLE, Verdict, confirm, gate
from kerneltune.plan import Options, Plan, Selection, load_plan
from kerneltune.processes.start import in_fresh_processes
from kerneltune.progress import Progress
from kerneltune.records import Record
from kerneltune.spec import Op, TaskKey
from kerneltune.sweep_file import cases_by_op
from kerneltune.sweep_run import measure_live
from kerneltune.wording import counted

LoadOps = Callable[[], Mapping[str, Op]]
"""Function that returns the operators by name. Every process calls it, so it must be a module's function (not a closure)."""

_COMMAND = "gate --run"


def run_gate(
    load_ops: LoadOps, plan: Plan, baseline: Sequence[Record], processes: int, margin: float | None, progress: Progress
) -> tuple[Verdict, list[Record]]:
    """Return the verdict, and the new records, pooled over the processes and over the further measurements of suspects.

    A row of the baseline that the selection leaves out is not reported as missing. `margin` None takes the sweep file's margin.
    """
    kept = [record for record in baseline if _selected(record, plan)]
    gpu, devices = device.current().name, sorted({record.device for record in kept if record.status == "passed"})
    if not devices:
        return Verdict((), UNUSABLE, "nothing compared: no timed record of the baseline is among what --run selects"), []
    if gpu not in devices:
        return Verdict((), UNUSABLE, f"not comparable: baseline has device {', '.join(devices)}, this is {gpu}"), []
    tolerated = plan.sweep.gate.get("margin", DEFAULT_MARGIN) if margin is None else margin

    def remeasure(suspects: frozenset[TaskKey]) -> list[Record]:
        progress.note(f"measuring {counted(len(suspects), 'suspect row')} again")
        return run_processes(load_ops, plan, processes, progress, {key.of_case for key in suspects})

    measured = run_processes(load_ops, plan, processes, progress)
    judge = partial(gate, kept, margin=tolerated, peers=plan.options.peers, defaults=partial(defaults_of, plan.ops))
    return confirm(judge, measured, remeasure)


def run_processes(
    load_ops: LoadOps, plan: Plan, processes: int, progress: Progress, keys: Collection[TaskKey] | None = None
) -> list[Record]:
    """Return the selected rows of each fresh process; `keys`, if given, restricts them further.

    A suspect is measured beside the same variants as the first time, so the result has all rows of its case.
    """
    device.require_gpu(_COMMAND)
    progress.stage("measure", processes)
    rows: list[Record] = []
    for measured in in_fresh_processes(processes, _measure, load_ops, plan.selection, plan.options, keys):
        rows += measured
        progress.advance(f"{len(measured)} rows in a fresh process")
    return rows


def _measure(load_ops: LoadOps, selection: Selection, options: Options, keys: Collection[TaskKey] | None) -> list[Record]:
    """Measure the rows; runs in the subprocess."""
    return measure_live(load_plan(load_ops(), selection, options), Progress(), _COMMAND, keys)


def _selected(record: Record, plan: Plan) -> bool:
    """Return whether the run must have a row of the baseline: yes for a removed variant, no for a peer that is not selected."""
    is_in_family = record.family == plan.family or (not record.family and record.op in cases_by_op(plan.sweep.bench))
    op = plan.ops.get(record.op)
    policy = plan.options.policy or (op.policy if op else "cold")
    if not is_in_family or record.policy != policy or not plan.selection.matches_case(record.op, record.key.case):
        return False
    is_peer = any(variant.name == record.variant and variant.is_peer for variant in op.variants) if op else False
    return plan.selection.matches_variant(record.variant, plan.options.peers or not is_peer)
