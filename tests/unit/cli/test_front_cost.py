from __future__ import annotations

from dataclasses import astuple

import pytest

from kvmesh.cli.front_cost import (
    FRONT,
    LEAST_CORES,
    LONG_LENGTH,
    SHORT_LENGTH,
    Span,
    cores_of,
    cpu_s,
    fit_front,
    fit_loop,
    offers_of,
)
from kvmesh.sim.profile import Front, Loop

IDLE_CORES = 0.05


def span(
    seconds: float, requests: int, tokens: int, refusals: int = 0, length: int = SHORT_LENGTH
) -> Span:
    """4 ms a request, 2 us a prompt token, 0.2 ms a token, 1 ms a refusal, and what is always."""
    cpu = IDLE_CORES * seconds + 0.004 * requests + 0.0002 * tokens + 0.001 * refusals
    return Span(seconds, cpu + 2e-6 * length * requests, requests, tokens, refusals)


def test_costs_are_found_again() -> None:
    lone, long = span(1, 20, 40), span(1, 20, 40, 0, LONG_LENGTH)
    crowd = span(5, 30, 60, 900, LONG_LENGTH)
    found = fit_front(span(2, 0, 0), lone, long, span(3, 4, 1024), crowd, 2.0)
    expected = Front(2.0, 0.004, 0.0002, 0.001, 2e-6, IDLE_CORES)
    assert astuple(found) == pytest.approx(astuple(expected))


def test_noise_makes_no_cost_negative() -> None:
    less = Span(1.0, 0.01, 5, 10)
    found = fit_front(span(2, 0, 0), less, less, less, less, 2.0)
    assert found == Front(2.0, 0.0, 0.0, 0.0, 0.0, IDLE_CORES)


def test_offers_are_read_from_the_metrics() -> None:
    text = (
        "# TYPE kvmesh_gateway_prefill_offers histogram\n"
        'kvmesh_gateway_prefill_offers_bucket{le="1.0"} 3.0\n'
        "kvmesh_gateway_prefill_offers_sum 41.0\n"
    )
    assert offers_of(text) == 41.0
    assert offers_of("") == 0.0


def test_time_of_this_process_counts() -> None:
    before = cpu_s()[FRONT]
    assert before > 0
    assert sum(range(300_000)) > 0
    assert cpu_s()[FRONT] >= before


def test_what_a_loop_does_for_steps_is_theirs() -> None:
    prefill, decode = Front(2.0, 0.003, 0.0, 0.0004, 2e-6), Front(2.0, 0.002, 0.0002, 0.0, 1e-6)
    streams = Span(2.0, 0.4, 4, 2048)
    assert fit_loop(prefill, decode, streams) == Loop(0.003, 0.002, 0.0004, 2e-6, 1e-6, 0.2)


@pytest.mark.parametrize(("cpu_s", "cores"), [(1.5, 0.75), (2.2, 1.0), (0.0, LEAST_CORES)])
def test_an_engine_uses_one_core_at_most(cpu_s: float, cores: float) -> None:
    assert cores_of(cpu_s, 2.0) == cores
