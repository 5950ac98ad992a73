from __future__ import annotations

import pytest

from kvmesh.sim.cost_fit import DecodeSample, PrefillSample, fit_decode, fit_prefill, fit_terms


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
