from __future__ import annotations

import math
import random
import statistics

import pytest

from kvmesh.sim.cost_fit import (
    COVERAGE,
    DecodeSample,
    PrefillSample,
    fit_decode,
    fit_prefill,
    fit_terms,
)


def prefill_of(tokens: int, cached: int, noise: float = 0.0) -> PrefillSample:
    pairs = tokens * (2 * cached + tokens)
    return PrefillSample(tokens, cached, (0.01 + 2e-4 * tokens + 3e-9 * pairs) * (1 + noise))


def test_exact_costs_are_found_again() -> None:
    samples = [prefill_of(n, c) for n in (32, 128, 1024, 8192) for c in (0, 4096)]
    fit = fit_prefill(samples)
    assert fit.coefficients == pytest.approx((0.01, 2e-4, 3e-9))
    assert fit.relative_error < 1e-9
    steps = [DecodeSample(b, c, 0.02 + 1e-3 * b + 1e-7 * b * c) for b in (1, 8) for c in (64, 4096)]
    assert fit_decode(steps).coefficients == pytest.approx((0.02, 1e-3, 1e-7))


def test_errors_say_how_far_noise_moves_a_coefficient() -> None:
    noise = [0.05, -0.05, 0.05, -0.05, 0.05, -0.05]
    lengths = [32, 64, 512, 1024, 4096, 8192]
    fit = fit_prefill([prefill_of(n, 0, e) for n, e in zip(lengths, noise, strict=True)])
    assert 0.02 < fit.relative_error < 0.05
    for found, error, true in zip(fit.coefficients, fit.errors, (0.01, 2e-4, 3e-9), strict=True):
        assert abs(found - true) < 4 * error


def test_no_cost_is_negative() -> None:
    # Faster than linear: the constant would be below zero.
    fit = fit_terms([[1.0, n] for n in (10, 20, 40)], [1.0, 2.5, 6.0])
    assert fit.coefficients[0] == fit.errors[0] == 0
    assert fit.coefficients[1] > 0


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="2 samples cannot tell 3 terms apart"):
        fit_prefill([prefill_of(1, 0), prefill_of(2, 0)])


@pytest.mark.parametrize(("noise", "drift"), [(0.05, 0.0), (0.2, 0.1), (0.05, 0.3)])
def test_fresh_runs_are_within_the_prediction_error_as_often_as_is_said(
    noise: float, drift: float
) -> None:
    points = [(n, c) for n in (32, 128, 512, 2048) for c in (0, 512)]
    within, standard = [], []
    for seed in range(40):
        rng = random.Random(seed)

        def round_of_runs(rng: random.Random = rng) -> list[float]:
            # All that is measured in one round is slow together.
            speed = rng.gauss(0.0, drift)
            return [
                prefill_of(*each).seconds * math.exp(rng.gauss(speed, noise)) for each in points
            ]

        rounds = [round_of_runs() for _ in range(5)]
        samples = [
            PrefillSample(*point, statistics.median(runs), runs)
            for point, runs in zip(points, zip(*rounds, strict=True), strict=True)
        ]
        fit = fit_prefill(samples)
        assert fit.prediction_error is not None
        for (n, c), seconds in zip(points, round_of_runs(), strict=True):
            terms = (1.0, n, n * (2 * c + n))
            said = sum(a * b for a, b in zip(fit.coefficients, terms, strict=True))
            within.append(abs(seconds / said - 1) <= fit.prediction_error)
            standard.append(abs(seconds / said - 1) <= fit.relative_error)
    assert COVERAGE - 0.15 < statistics.mean(within) < 0.99
    assert statistics.mean(standard) < 0.75


def test_without_a_point_to_spare_no_prediction_error_is_said() -> None:
    points = [(32, 0), (128, 0), (1024, 0), (2048, 0)]
    samples = [PrefillSample(n, c, (s := prefill_of(n, c).seconds), (s, s)) for n, c in points]
    assert fit_prefill(samples[:3]).prediction_error is None
    assert fit_prefill(samples).prediction_error == pytest.approx(0.0, abs=1e-9)
    assert fit_prefill([prefill_of(n, c) for n, c in points]).prediction_error is None
