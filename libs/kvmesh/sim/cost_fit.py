"""Costs fitted to measured times: prefill over lengths, a decode step over batch and context.

Pure. Tests: tests/unit/sim/test_cost_fit.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

COVERAGE = 0.9
"""Fraction of new measurements within `Fit.prediction_error` of the prediction."""


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """Measured seconds of a prompt.

    Attributes:
        tokens: number of computed tokens.
        cached: number of cached positions before them.
        seconds: median of the runs.
        runs: seconds of each run, one per round; empty where only the median is known.
    """

    tokens: int
    cached: int
    seconds: float
    runs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """Measured seconds of one step of `batch` sequences with `context` positions each.

    Attributes:
        seconds, runs: see `PrefillSample`.
    """

    batch: int
    context: int
    seconds: float
    runs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted sum of terms.

    Attributes:
        coefficients: coefficients of the terms, none negative.
        errors: their standard errors; 0 for a term that was left out.
        relative_error: root mean square of prediction / measurement - 1 at the fitted samples; a
            new measurement deviates more.
        prediction_error: relative distance from the prediction within which a new run lies in
            `COVERAGE` of cases (see `prediction_error`); None with too few samples to hold one out.
    """

    coefficients: tuple[float, ...]
    errors: tuple[float, ...]
    relative_error: float
    prediction_error: float | None = None


def fit_prefill(samples: Sequence[PrefillSample]) -> Fit:
    """Fits `c0 + c1 * tokens + c2 * tokens * (2 * cached + tokens)`.

    The last term counts attended pairs twice, so that it is `tokens` squared without a cached
    prefix.

    Raises:
        ValueError: there are fewer samples than terms.
    """
    rows = [[1.0, each.tokens, each.tokens * (2 * each.cached + each.tokens)] for each in samples]
    return _fit_runs(rows, samples)


def fit_decode(samples: Sequence[DecodeSample]) -> Fit:
    """Fits `c0 + c1 * batch + c2 * batch * context`.

    Raises:
        ValueError: there are fewer samples than terms.
    """
    rows = [[1.0, each.batch, each.batch * each.context] for each in samples]
    return _fit_runs(rows, samples)


def prediction_error(
    rows: Sequence[Sequence[float]], rounds: Sequence[Sequence[float]]
) -> float | None:
    """Returns the relative error of a fit's predictions that holds in `COVERAGE` of cases.

    Each run is predicted by a fit to the medians of the other rounds at the other points. So the
    error includes the misfit of the terms, the noise of one run and the drift between rounds, but
    not drift that takes longer than all rounds.

    Args:
        rows: terms of each point.
        rounds: for each round, the seconds at every point.

    Returns:
        A quantile of the held-out errors, corrected upwards for their number; None if there are too
        few points to hold one out, or no runs.

    Source: cross-conformal prediction, arXiv 1208.0806.
    """
    if not rounds or len(rows) <= len(rows[0]):
        return None
    errors: list[float] = []
    for held, runs in enumerate(rounds):
        others = [each for index, each in enumerate(rounds) if index != held] or [runs]
        medians = [statistics.median(each) for each in zip(*others, strict=True)]
        for point, row in enumerate(rows):
            kept = [index for index in range(len(rows)) if index != point]
            fit = fit_terms([rows[index] for index in kept], [medians[index] for index in kept])
            predicted = sum(c * term for c, term in zip(fit.coefficients, row, strict=True))
            # A term that only this point has is missing in the fit, which then says nothing.
            errors.append(abs(runs[point] / predicted - 1.0) if predicted > 0 else math.inf)
    place = min(math.ceil((len(errors) + 1) * COVERAGE), len(errors)) - 1
    found = sorted(errors)[place]
    return found if math.isfinite(found) else None


def _fit_runs(
    rows: Sequence[Sequence[float]], samples: Sequence[PrefillSample] | Sequence[DecodeSample]
) -> Fit:
    fit = fit_terms(rows, [each.seconds for each in samples])
    rounds = list(zip(*(each.runs for each in samples), strict=True))
    return replace(fit, prediction_error=prediction_error(rows, rounds))


def fit_terms(rows: Sequence[Sequence[float]], values: Sequence[float]) -> Fit:
    """Fits terms by least squares of relative errors, leaving out negative coefficients.

    Relative errors give short and long samples equal weight.

    Raises:
        ValueError: there are fewer samples than terms.
    """
    terms = np.asarray(rows, dtype=np.float64) / np.asarray(values)[:, None]
    number = terms.shape[1]
    if len(values) < number:
        raise ValueError(f"{len(values)} samples cannot tell {number} terms apart")
    kept = list(range(number))
    while True:
        found = _solve(terms[:, kept])
        if found.min() >= 0 or len(kept) == 1:
            break
        kept.pop(int(found.argmin()))
    coefficients, errors = np.zeros(number), np.zeros(number)
    coefficients[kept] = found
    residuals = terms @ coefficients - 1.0
    freedom = max(len(values) - len(kept), 1)
    inverse = np.linalg.pinv(terms[:, kept].T @ terms[:, kept])
    spread = float(residuals @ residuals) / freedom
    errors[kept] = np.sqrt(np.clip(np.diag(inverse), 0.0, None) * spread)
    return Fit(
        tuple(coefficients.tolist()),
        tuple(errors.tolist()),
        float(np.sqrt(np.mean(residuals**2))),
    )


def _solve(terms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    # Columns are scaled; squares of lengths would dominate otherwise.
    scale = np.abs(terms).max(axis=0)
    found = np.linalg.lstsq(terms / scale, np.ones(len(terms)), rcond=None)[0]
    return np.asarray(found / scale)
