from __future__ import annotations

import pytest

from kvmesh.console.sampler import (
    GONE_S,
    HISTORY,
    MAX_GONE,
    LinkName,
    Sampler,
    WorkerRates,
)
from kvmesh.console.share import Share
from kvmesh.core.details import LinkDetail
from kvmesh.core.types import Role
from tests.unit.console.examples import D0, P0, fleet_worker, with_detail

NOTHING = Share()


def test_totals_become_rates() -> None:
    sampler = Sampler()
    link = LinkDetail(D0, "shm", bytes_total=100)
    before = fleet_worker("p0", prefill_tokens_total=50, decode_tokens_total=10)
    first = sampler.take([with_detail(before, link, prompt=10)], NOTHING, 5.0)
    assert (first.requests_s, first.prefill_tokens_s, first.at_s) == (0.0, 0.0, 5.0)

    after = fleet_worker("p0", prefill_tokens_total=250, decode_tokens_total=20)
    more = LinkDetail(D0, "shm", bytes_total=500)
    share = Share(1, 1, refusals={("prefill", "busy"): 6.0})
    sample = sampler.take([with_detail(after, more, prompt=110, cached=25)], share, 7.0, 300.0)
    assert sample.requests_s == 0.5
    assert sample.refusals_s == 3.0
    # 200 tokens were computed, ten of them in steps that generated one.
    assert sampler.worker_rates == {P0: WorkerRates(95.0, 5.0, hit_share=0.25)}
    assert sampler.link_rates == {LinkName(P0, D0, "shm"): 200.0}
    assert (sample.transfer_bytes_s, sample.threshold_tokens, sample.num_open) == (200.0, 300.0, 1)


def test_a_new_life_counts_from_zero() -> None:
    sampler = Sampler()
    sampler.take([fleet_worker("p0", decode_tokens_total=900)], NOTHING, 0.0)
    sampler.take([fleet_worker("p0", incarnation=2, decode_tokens_total=5)], NOTHING, 1.0)
    assert sampler.worker_rates == {}
    sampler.take([fleet_worker("p0", incarnation=2, decode_tokens_total=9)], NOTHING, 2.0)
    assert sampler.worker_rates[P0].decode_tokens_s == 4.0
    sampler.take([], NOTHING, 3.0)
    assert sampler.worker_rates == {}


def test_percentiles_and_shares_are_those_of_the_requests() -> None:
    share = Share(ttfts=(("a", 3.0), ("b", 1.0), ("a", 2.0)), num_aggregated=1, num_disaggregated=3)
    sample = Sampler().take([], share, 20.0)
    assert sample.ttft_p50_s == 2.0
    assert sample.ttft_p99_s == pytest.approx(2.98)
    assert sample.disaggregated_share == 0.75
    empty = Sampler().take([], NOTHING, 0.0)
    assert empty.ttft_p50_s is None
    assert empty.disaggregated_share is None


def test_hybrids_count_on_both_sides() -> None:
    fleet = [
        fleet_worker("p"),
        fleet_worker("d", Role.DECODE),
        fleet_worker("e", Role.DECODE),
        fleet_worker("h", Role.HYBRID),
    ]
    sample = Sampler().take(fleet, NOTHING, 0.0)
    assert (sample.prefill_workers, sample.decode_workers) == (2, 3)


def test_rates_of_a_fleet_that_nobody_tells_of_are_not_known() -> None:
    sampler = Sampler()
    sampler.take([fleet_worker("p0", decode_tokens_total=5)], NOTHING, 0.0)
    sample = sampler.take(
        [fleet_worker("p0", decode_tokens_total=5)], Share(2, 2), 1.0, fresh=False
    )
    told = (sample.prefill_tokens_s, sample.decode_tokens_s, sample.transfer_bytes_s)
    assert told == (None, None, None)
    assert (sample.requests_s, sample.prefill_workers) == (2.0, 1)


def test_who_left_is_told_until_it_is_back_or_forgotten() -> None:
    sampler = Sampler()
    both = [fleet_worker("p0"), fleet_worker("d0", Role.DECODE)]
    sampler.take(both, NOTHING, 0.0)
    assert sampler.gone == {}
    for second in (1.0, 2.0):
        sampler.take(both[1:], NOTHING, second)
        assert {name: gone.at_s for name, gone in sampler.gone.items()} == {P0: 1.0}
    sampler.take(both, NOTHING, 3.0)
    assert sampler.gone == {}
    sampler.take([], NOTHING, 4.0)
    assert set(sampler.gone) == {P0, D0}
    sampler.take([], NOTHING, 4.0 + GONE_S)
    assert sampler.gone == {}
    sampler.take([fleet_worker(f"w{n}") for n in range(MAX_GONE + 5)], NOTHING, 400.0)
    sampler.take([], NOTHING, 401.0)
    assert len(sampler.gone) == MAX_GONE


def test_history_is_bounded() -> None:
    sampler = Sampler()
    for second in range(HISTORY + 5):
        sampler.take([], NOTHING, float(second))
    assert len(sampler.samples) == HISTORY
    assert sampler.samples[-1].at_s == HISTORY + 4
