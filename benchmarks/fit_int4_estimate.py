"""Fit the times of `ops/int4_gemm/estimate.py`, by which untuned configs of products in e4m3 are chosen. Needs no GPU.

python benchmarks/fit_int4_estimate.py [--gpu nvidia_h100_80gb_hbm3] [--today]

Prints how near the chosen configs come to the fastest known config, and the fitted times: the least known time of a case over
the time of its config, geometric mean and worst. *out*: every size of w gets the config that a fit without this size chooses.
`int4_fp8_grouped_gemm` has no estimate. Cases count whose space is known, `WHOLE` times or more.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from kept_trials import path_of, read
from scipy.optimize import least_squares
from untuned_shapes import known

from kerneltune import ops
from kerneltune.ops.int4_gemm import fp8_gemm
from kerneltune.ops.int4_gemm.estimate import HELD, SMS, TIMES, StepTimes, product_us, warps_of
from kerneltune.ops.int4_gemm.fp8_gemm import Int4Fp8Config, sizes_of
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Config
from kerneltune.task import Knobs, knob_pairs

WHOLE = 18
"""Fewest known times of a case by which a choice is judged."""
LAUNCHES = (3.0, 0.03)
"""First guess of what all configs of a case have in common, in µs: both launches, and the cast of a block of k."""
Times = Mapping[Case, Mapping[Knobs, float]]


class Seen(NamedTuple):
    """Hold a known time.

    Attributes:
        case: the case.
        config: the config.
        time_us: the time.
        weight: its weight in the fit; cases weigh the same, times near the fastest weigh more.
    """

    case: Case
    config: Int4Fp8Config
    time_us: float
    weight: float


def known_times(op: str, gpu: str) -> dict[Case, dict[Knobs, float]]:
    """Return the known times of each case's configs."""
    found = known(ops.load()[op], ops.load()[op].variant("optimized"), gpu).times
    return {case: {knobs: us for knobs, us in times.items() if us} for case, times in found.items()}


def judged_of(times: Times) -> list[Case]:
    """Return the cases whose choice is judged."""
    return [case for case, of_case in times.items() if len(of_case) >= WHOLE]


def is_compared(case: Case, c: Int4Fp8Config) -> bool:
    """Return whether a config is fitted: `fp8_gemm.shortest` compares its shape, and it has three or four stages."""
    N, rows, _, _ = sizes_of(case)
    programs = cdiv(c.splits * cdiv(rows, c.blocks) * cdiv(N, c.tokens), SMS)
    fits = c.splits == 1 or programs <= HELD[c.tokens, c.blocks]
    return fits and c.warps == warps_of(c.tokens, c.blocks) and c.stages < 5 and c.early == fp8_gemm.is_early(N)


def estimate_us(case: Case, c: Int4Fp8Config, values: Sequence[float]) -> float:
    """Estimate the time of a call: the launches and the cast, then the product. values: `LAUNCHES`, then `StepTimes`."""
    sizes = sizes_of(case)
    cost, tiles, reads = fp8_gemm.costs(sizes, c.tokens, c.blocks, StepTimes(*values[2:]))
    programs, steps = cdiv(c.splits * tiles, SMS), cdiv(sizes[2], c.splits)
    return values[0] + values[1] * sizes[2] + product_us(cost, programs, steps, reads, c.splits)


def seen(times: Times) -> list[Seen]:
    """Return the times that are fitted."""
    found = []
    for case, of_case in times.items():
        configs = [(Int4Fp8Config(**dict(knobs)), us) for knobs, us in of_case.items()]
        best_us = min(of_case.values())
        fitted = [(c, us, float(np.clip(3.2 - 2 * us / best_us, 0.05, 1.2))) for c, us in configs if is_compared(case, c)]
        norm = sum(weight**2 for _, _, weight in fitted) ** 0.5
        found += [Seen(case, c, us, weight / norm) for c, us, weight in fitted]
    return found


def fit(rows: Sequence[Seen], start: Sequence[float]) -> list[float]:
    """Return the values with the least error of the logarithm of the time."""
    weights, logs = np.array([row.weight for row in rows]), np.log([row.time_us for row in rows])

    def errors(values: Any) -> Any:
        guess = [estimate_us(row.case, row.config, values) for row in rows]
        return weights * (np.log(guess) - logs)

    result = least_squares(errors, start, bounds=(1e-6, 10), loss="soft_l1", f_scale=0.1, x_scale=np.maximum(start, 1e-3))
    return [float(value) for value in result.x]


def shares(times: Times, cases: Iterable[Case], choose: Callable[[Case], Config | None]) -> dict[Case, float]:
    """Return by case the least known time over the time of the chosen config; cases whose config was not timed are left out."""
    chosen = {case: times[case].get(knob_pairs(choose(case))) for case in cases}
    return {case: min(times[case].values()) / time_us for case, time_us in chosen.items() if time_us is not None}


def choice_by(values: Sequence[float]) -> Callable[[Case], Config]:
    """Return the choice of `int4_fp8_gemm` by fitted values."""
    return lambda case: fp8_gemm.shortest(sizes_of(case), SMS, StepTimes(*values[2:]))


def show_today(op: str, times: Times, gpu: str) -> None:
    """Print how near today's default comes, by the round of `whole_spaces.py` that timed a case, and over all."""
    choose, judged = ops.load()[op].variant("optimized").default_config, judged_of(times)
    for block in read(path_of(op, gpu)):
        of_round = {case for case, _, _ in block.rows}
        if found := shares(times, [case for case in judged if case in of_round], choose):
            show(f"{op}, round of {block.date:.16}", found)
    if found := shares(times, judged, choose):
        show(f"{op}, today", found)


def show(name: str, found: Mapping[Case, float]) -> None:
    """Print the geometric mean and the worst case."""
    worst = min(found, key=found.__getitem__)
    mean = statistics.geometric_mean(found.values())
    print(f"{name}: {mean:.3f} over {len(found)} cases, worst {found[worst]:.3f}, {worst.label}")


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="nvidia_h100_80gb_hbm3", help="folder of a GPU")
    parser.add_argument("--today", action="store_true", help="fit nothing, which takes minutes")
    options = parser.parse_args()
    show_today("int4_fp8_grouped_gemm", known_times("int4_fp8_grouped_gemm", options.gpu), options.gpu)
    times = known_times("int4_fp8_gemm", options.gpu)
    show_today("int4_fp8_gemm", times, options.gpu)
    if found := shares(times, judged_of(times), choice_by((*LAUNCHES, *TIMES))):
        show("int4_fp8_gemm, without a rest", found)
    if options.today or not (judged := judged_of(times)):
        return
    rows = seen(times)
    fitted = fit(rows, (*LAUNCHES, *TIMES))
    print(f"{len(rows)} times fitted: {StepTimes(*(round(value, 5) for value in fitted[2:]))}")
    show("fitted", shares(times, judged, choice_by(fitted)))
    out: dict[Case, float] = {}
    for size in sorted({(case["M"], case["K"]) for case in judged}):
        left = fit([row for row in rows if (row.case["M"], row.case["K"]) != size], fitted)
        out |= shares(times, [case for case in judged if (case["M"], case["K"]) == size], choice_by(left))
    show("out", out)


if __name__ == "__main__":
    main()
