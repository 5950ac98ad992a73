"""Costs fitted to measured times: prefill over lengths, a decode step over batch and context.

Pure. Tests: tests/unit/sim/test_cost_fit.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """Seconds of a prompt.

    Attributes:
        tokens: computed.
        cached: positions before them.
    """

    tokens: int
    cached: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """Seconds of one step of `batch` sequences with `context` positions each."""

    batch: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A sum of terms.

    Attributes:
        coefficients: of the terms, none negative.
        errors: standard errors of them; 0 for a term that was left out.
        relative_error: root mean square of prediction over measurement, less one.
    """

    coefficients: tuple[float, ...]
    errors: tuple[float, ...]
    relative_error: float


def fit_prefill(samples: Sequence[PrefillSample]) -> Fit:
    """`c0 + c1 * tokens + c2 * tokens * (2 * cached + tokens)`: the last counts attended pairs
    twice, so that without a cached prefix this is the quadratic of `tokens`.

    Raises:
        ValueError: fewer samples than terms.
    """
    rows = [[1.0, each.tokens, each.tokens * (2 * each.cached + each.tokens)] for each in samples]
    return fit_terms(rows, [each.seconds for each in samples])


def fit_decode(samples: Sequence[DecodeSample]) -> Fit:
    """`c0 + c1 * batch + c2 * batch * context`.

    Raises:
        ValueError: fewer samples than terms.
    """
    rows = [[1.0, each.batch, each.batch * each.context] for each in samples]
    return fit_terms(rows, [each.seconds for each in samples])


def fit_terms(rows: Sequence[Sequence[float]], values: Sequence[float]) -> Fit:
    """Least squares of relative errors; terms whose coefficient would be negative are left out.

    Relative, because the shortest and the longest sample matter alike.

    Raises:
        ValueError: fewer samples than terms.
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
    # Columns are scaled, or squares of lengths would drown the rest.
    scale = np.abs(terms).max(axis=0)
    found = np.linalg.lstsq(terms / scale, np.ones(len(terms)), rcond=None)[0]
    return np.asarray(found / scale)
