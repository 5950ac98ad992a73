from __future__ import annotations

import statistics
from collections import Counter
from itertools import pairwise

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest
from kvmesh.sim.workload import Workload, closed_loop, make_requests, scale_rate, spread_ticks

LENGTHS = LengthDistribution([100, 1000, 5000])


def made(**changes: float) -> tuple[TraceRequest, ...]:
    settings = {"num_requests": 2000, "rate": 10.0, **changes}
    return make_requests(Workload(lengths=LENGTHS, **settings), seed=3)  # type: ignore[arg-type]


def dispersion(requests: tuple[TraceRequest, ...]) -> float:
    """Variance over mean of arrivals per second; 1 for Poisson."""
    counts = Counter(int(each.arrival_s) for each in requests)
    values = [counts[second] for second in range(int(requests[-1].arrival_s))]
    return statistics.variance(values) / statistics.mean(values)


def test_poisson_arrivals_at_the_rate() -> None:
    requests = made()
    assert len(requests) == 2000
    assert requests[-1].arrival_s == pytest.approx(200, rel=0.1)
    assert dispersion(requests) == pytest.approx(1.0, abs=0.3)


def test_bursts_keep_the_mean_rate_and_scatter_more() -> None:
    requests = made(num_requests=10_000, burst=8.0)
    assert requests[-1].arrival_s == pytest.approx(1000, rel=0.25)
    assert dispersion(requests) > 3


def test_lengths_and_ids_fit() -> None:
    for request in made(num_requests=300, turns=4, num_shared=3):
        assert len(request.hash_ids) == -(-request.input_tokens // TRACE_BLOCK)
        assert request.output_tokens >= 1


def test_outputs_have_their_mean() -> None:
    outputs = [each.output_tokens for each in made(output_tokens=100.0)]
    assert statistics.mean(outputs) == pytest.approx(100, rel=0.1)


def test_a_turn_begins_with_the_one_before() -> None:
    sessions: dict[str, list[TraceRequest]] = {}
    for request in made(num_requests=90, turns=3):
        sessions.setdefault(request.session, []).append(request)
    assert len(sessions) == 30
    for turns in sessions.values():
        assert [each.turn for each in turns] == [0, 1, 2]
        for before, after in pairwise(turns):
            assert after.input_tokens > before.input_tokens + before.output_tokens
            assert after.full_ids[: len(before.full_ids)] == before.full_ids
            assert after.arrival_s == pytest.approx(before.arrival_s + after.think_s)


def test_shared_prefixes_are_skewed() -> None:
    firsts = Counter(each.hash_ids[:4] for each in made(num_shared=4))
    assert len(firsts) == 4
    (_, most), *_, (_, least) = firsts.most_common()
    assert most > 2.5 * least


def test_without_sharing_nothing_is_shared() -> None:
    ids = [each for request in made(num_requests=200) for each in request.hash_ids]
    assert len(ids) == len(set(ids))


def test_equal_seeds_make_equal_requests() -> None:
    assert made(burst=3.0, turns=2, num_shared=2) == made(burst=3.0, turns=2, num_shared=2)


def test_ticks_are_spread_and_rates_scaled() -> None:
    ticks = tuple(TraceRequest(3.0 * (n // 5), 10, 1, (n,)) for n in range(50))
    spread = spread_ticks(ticks, seed=1)
    assert len({each.arrival_s for each in spread}) == 50
    assert all(0 <= each.arrival_s - 3.0 * (each.hash_ids[0] // 5) < 3 for each in spread)
    assert scale_rate(ticks, 2.0)[-1].arrival_s == ticks[-1].arrival_s / 2
    with pytest.raises(ConfigError, match="positive"):
        scale_rate(ticks, 0.0)


def test_users_of_a_closed_loop_ask_one_after_the_other() -> None:
    lengths = LengthDistribution([1000, 2000])
    made = closed_loop(Workload(12, 1.0, lengths, turns=3, think_s=0.5), seed=1)
    assert len(made) == 12
    by_user: dict[str, list[int]] = {}
    for each in made:
        by_user.setdefault(each.session, []).append(each.turn)
    assert list(by_user.values()) == [[0, 1, 2]] * 4
    assert len({id_ for each in made for id_ in each.hash_ids}) == sum(
        len(each.hash_ids) for each in made
    )
    assert all((each.think_s > 0) == (each.turn > 0) for each in made)
    assert made == closed_loop(Workload(12, 1.0, lengths, turns=3, think_s=0.5), seed=1)


def test_a_closed_loop_without_pauses_keeps_the_number_of_requests() -> None:
    made = closed_loop(Workload(12, 1.0, LENGTHS, turns=3, think_s=0.0), seed=1)
    assert {each.think_s for each in made} == {0.0}
    assert [each.turn for each in made].count(0) == 4
