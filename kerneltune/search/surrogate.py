"""Predict the times of untried configs of a finite space, and the gain that is left, by a Gaussian process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize
from scipy.spatial.distance import cdist
from scipy.special import ndtr
from threadpoolctl import ThreadpoolController

Array = NDArray[np.float64]
F = TypeVar("F", bound=Callable[..., Any])

NEAR, FAR = 0.3, 0.7
"""Distance above the best log time at which log times are cut, because very slow configs say little about fast configs.

FAR keeps more of the spread than NEAR, and so more uncertainty about the gain that is left. Twelve searches, of four measured
spaces with three seeds each, ended at a gain of 1 %: with FAR after 1476 trials in all, and 1 search missed the best time; with
NEAR after 716 trials in all, and 4 missed it.
"""
_UNLIKELY = 1e-6
"""Factor of the improvement of a config that probably gives no time."""
_JOINT = 256
_DRAWS = 128
_REFIT_EVERY = 4
_BLAS = ThreadpoolController()


def _on_one_core(function: F) -> F:
    """Limit BLAS to a single core, because two cores take six times as long for some hundred rows and disturb the compilers."""
    limited: F = _BLAS.wrap(limits=1, user_api="blas")(function)
    return limited


class Surrogate:
    """Hold the posterior of log time over a pool of configs, see `_coordinates`.

    The kernel is Matérn 5/2 with a length scale per coordinate. The scales are fitted to the known times, under a prior.
    """

    def __init__(self, pool: Sequence[Mapping[str, Any]], seed: int = 0, worst: float = NEAR) -> None:
        """Take the knob values of every config; worst: distance above the best log time at which log times are cut."""
        self._worst = worst
        self._points = _coordinates(pool)
        self._rng = np.random.default_rng(seed)
        self._theta = np.concatenate([np.full(self._points.shape[1], np.log(0.5)), [0.0, np.log(0.05)]])
        self._fitted = 0

    @_on_one_core
    def fit(self, seen: Sequence[int], times: Sequence[float | None]) -> None:
        """Learn from evaluated configs, given by their index in the pool, and their times; None for a config without a time."""
        timed = [(index, time) for index, time in zip(seen, times, strict=True) if time is not None]
        logs = np.log([time for _, time in timed])
        best = float(np.min(logs))
        logs = np.minimum(logs, best + self._worst)
        self._seen = np.array([index for index, _ in timed], dtype=int)
        self._mean, self._scale = float(np.mean(logs)), float(np.std(logs)) or 1.0
        self._values = (logs - self._mean) / self._scale
        self._best = (best - self._mean) / self._scale
        self._tried = np.asarray(seen, dtype=int)
        self._worked = np.array([time is not None for time in times], dtype=float)
        if not self._fitted or len(timed) >= max(self._fitted + _REFIT_EVERY, 1.2 * self._fitted):
            self._fit_scales()
            self._fitted = len(timed)

    @_on_one_core
    def improvement(self, untried: Sequence[int], pending: Sequence[int] = ()) -> Array:
        """Return the expected improvement (len(untried),) of the log time, times the probability that a config gives a time.

        A config that probably gives no time gets a tiny value and comes last: because no time around it becomes known, its
        improvement would look large for ever. Pending configs count with their predicted times.
        """
        seen, values = self._seen, self._values
        if len(pending):
            believed, _ = self._posterior(seen, values, np.asarray(pending, dtype=int))
            seen = np.concatenate([seen, np.asarray(pending, dtype=int)])
            values = np.concatenate([values, believed])
        mean, variance = self._posterior(seen, values, np.asarray(untried, dtype=int))
        deviation = np.sqrt(variance)
        z = (self._best - mean) / deviation
        improvement: Array = deviation * (z * ndtr(z) + np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)) * self._scale
        probability = self._success_probability(np.asarray(untried, dtype=int))
        return improvement * np.where(probability < 0.5, _UNLIKELY * probability, probability)

    def _success_probability(self, indices: NDArray[np.int_]) -> Array:
        """Return the probability that configs give a time, from the same process over successes and failures."""
        mean = np.mean(self._worked)
        factor = cho_factor(self._covariance(self._tried) + 0.1 * np.eye(len(self._tried)))
        probability = mean + self._kernel(self._tried, indices).T @ cho_solve(factor, self._worked - mean)
        bounded: Array = np.clip(probability, 0.02, 1.0)
        return bounded

    @_on_one_core
    def gain(self, untried: Sequence[int]) -> float:
        """Return the fraction of the best time that trying all untried configs is expected to save.

        A joint draw gives a time for each of the 256 untried configs with the largest expected improvement. The gain is the mean,
        over the draws, of the distance of the fastest drawn time below the best known time.
        """
        if not len(untried):
            return 0.0
        ranked = np.asarray(untried, dtype=int)[np.argsort(-self.improvement(untried))[:_JOINT]]
        factor = cho_factor(self._covariance(self._seen))
        cross = self._kernel(self._seen, ranked)
        mean = cross.T @ cho_solve(factor, self._values)
        joint = self._kernel(ranked, ranked) - cross.T @ cho_solve(factor, cross) + 1e-6 * np.eye(len(ranked))
        draws = mean + self._rng.standard_normal((_DRAWS, len(ranked))) @ cholesky(joint)
        saved = np.maximum(0.0, self._best - draws.min(axis=1)) * self._scale
        return float(np.mean(-np.expm1(-saved)))

    def _posterior(self, seen: NDArray[np.int_], values: Array, indices: NDArray[np.int_]) -> tuple[Array, Array]:
        factor = cholesky(self._covariance(seen), lower=True)
        cross = solve_triangular(factor, self._kernel(seen, indices), lower=True)
        mean = cross.T @ solve_triangular(factor, values, lower=True)
        variance = np.exp(self._theta[-2]) - np.sum(cross**2, axis=0)
        return mean, np.maximum(variance, 1e-9)

    def _kernel(self, a: NDArray[np.int_], b: NDArray[np.int_]) -> Array:
        scaled = self._points / np.exp(self._theta[:-2])
        return _matern(np.sqrt(5.0) * cdist(scaled[a], scaled[b]), self._theta)

    def _covariance(self, seen: NDArray[np.int_]) -> Array:
        return self._kernel(seen, seen) + _noise(self._theta) * np.eye(len(seen))

    def _fit_scales(self) -> None:
        """Fit the scales by maximum likelihood of the known times, under a prior."""
        points, knobs = self._points[self._seen], self._points.shape[1]
        bounds = [(np.log(0.05), np.log(20.0))] * knobs + [(np.log(0.05), np.log(20.0)), (np.log(1e-3), np.log(0.5))]
        middle = np.log([*[0.7] * knobs, 1.0, 0.03])
        squared_distances = np.square(points[:, None] - points).transpose(2, 0, 1)

        def cost(theta: Array) -> tuple[float, Array]:
            """Return the cost and its gradient with respect to theta."""
            shrink = np.exp(-2 * theta[:knobs])
            distance = np.sqrt(5.0 * np.tensordot(shrink, squared_distances, 1))
            kernel = _matern(distance, theta)
            factor = cholesky(kernel + _noise(theta) * np.eye(len(points)), lower=True)
            inverse = cho_solve((factor, True), np.eye(len(points)))
            weights, from_middle = inverse @ self._values, theta - middle
            slopes = (inverse - np.outer(weights, weights)) / 2
            nearer = slopes * np.exp(theta[-2] - distance) * (1.0 + distance) * 5.0 / 3.0
            of_noise = 2 * np.exp(2 * theta[-1]) * np.trace(slopes)
            slope = np.concatenate([shrink * np.tensordot(squared_distances, nearer, 2), [np.sum(slopes * kernel), of_noise]])
            loss = self._values @ weights / 2 + np.sum(np.log(np.diag(factor))) + from_middle @ from_middle / 2
            return float(loss), slope + from_middle

        fitted = minimize(cost, self._theta, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 25})
        self._theta = np.asarray(fitted.x)


def _matern(distance: Array, theta: Array) -> Array:
    """Return Matérn 5/2 of distances, which are in length scales times √5."""
    kernel: Array = np.exp(theta[-2] - distance) * (1.0 + distance + distance**2 / 3.0)
    return kernel


def _noise(theta: Array) -> float:
    return float(np.exp(2 * theta[-1])) + 1e-6


def _coordinates(pool: Sequence[Mapping[str, Any]]) -> Array:
    """Return (configs, coordinates) in [0, 1]: powers of two evenly spaced, on both sides of 0; a coordinate for each word."""
    columns = []
    for knob in pool[0]:
        values = [config[knob] for config in pool]
        distinct = sorted(set(values), key=repr)
        if all(isinstance(value, bool | int | float) for value in distinct):
            numbers = np.array(values, dtype=float)
            logs = np.sign(numbers) * np.log2(1.0 + 2.0 * np.abs(numbers))
            columns.append((logs - logs.min()) / (np.ptp(logs) or 1.0))
        else:
            columns += [np.array([value == word for value in values], dtype=float) for word in distinct]
    return np.column_stack(columns)
