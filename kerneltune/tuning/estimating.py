"""The speeds by which defaults are estimated, fitted to measured times."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import least_squares

from kerneltune.estimate import Estimated, Speeds, Work, time_us, with_speeds
from kerneltune.spec import Case, Variant

Timed = tuple[Case, Mapping[tuple[tuple[str, Any], ...], float | None]]
"""A case, and knobs -> µs; None for a config that has no time."""

_LEAST = 40
"""Fewest times that speeds are fitted to."""
_DOUBTED = 0.05
"""Error in log time from which a time counts less than by its square."""
_FARTHEST = 3.0
"""Factor, as a logarithm, by which a speed may differ from that of the default."""


def fitted_to(variant: Variant, timed: Iterable[Timed]) -> Variant:
    """Return the variant with a default of the speeds that give the least squares of log time.

    Unchanged where its default is not estimated, or where few times are known.
    """
    default = variant.default
    if not isinstance(default, Estimated):
        return variant
    rows = [row for case, times in timed for row in _rows(variant, default, case, times)]
    if len(rows) < _LEAST:
        return variant
    work = Work(*np.array([work for work, _ in rows], dtype=float).T)
    return replace(variant, default=with_speeds(default, _fitted(default.speeds, work, np.log([us for _, us in rows]))))


def for_sms(variant: Variant, sms: int) -> Variant:
    """Return the variant with a default that is estimated for a GPU of so many SMs; unchanged where it is not estimated."""
    default = variant.default
    if not isinstance(default, Estimated):
        return variant
    return replace(variant, default=with_speeds(default, msgspec.structs.replace(default.speeds, sms=sms)))


def _rows(
    variant: Variant, default: Estimated, case: Case, times: Mapping[tuple[tuple[str, Any], ...], float | None]
) -> Iterable[tuple[Work, float]]:
    """Yield work and time of the configs that are estimated."""
    for knobs, us in times.items():
        config = variant.valid_config(case, dict(knobs)) if us else None
        work = None if config is None else default.work(case, config)
        if work is not None and us:
            yield work, us


def _fitted(start: Speeds, work: Work, log_us: Any) -> Speeds:
    """Return the speeds of the least squares, with four digits; SMs are not fitted."""
    names = [name for name in start.__struct_fields__ if name != "sms"]

    def speeds(values: Iterable[float]) -> Speeds:
        return msgspec.structs.replace(start, **dict(zip(names, values, strict=True)))

    begun = np.log([getattr(start, name) for name in names])
    found = least_squares(
        lambda logs: np.log(time_us(work, speeds(np.exp(logs)))) - log_us,
        begun, bounds=(begun - _FARTHEST, begun + _FARTHEST), loss="soft_l1", f_scale=_DOUBTED, max_nfev=100,
    )  # fmt: skip
    return speeds(float(f"{speed:.4g}") for speed in np.exp(found.x))
