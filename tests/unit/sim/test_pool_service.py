from __future__ import annotations

import random

import pytest

from kvmesh.sim.pool_service import ServiceSettings, goodput_rate, serve
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest

PROFILE = load_profile("tokenlake")
PREFILL_S = PROFILE.devices["a100"].prefill_s


def request(at: float, blocks: int, first_id: int) -> TraceRequest:
    return TraceRequest(at, blocks * TRACE_BLOCK, 1, tuple(range(first_id, first_id + blocks)))


def skewed(num: int, rate: float) -> list[TraceRequest]:
    """Two in three prompts begin with the same sixty blocks."""
    rng = random.Random(1)
    return [
        TraceRequest(
            index / rate,
            64 * TRACE_BLOCK,
            1,
            (*(range(60) if index % 3 else range(10**4 * index, 10**4 * index + 60)),
             *(rng.randrange(10**6, 10**9) for _ in range(4))),
        )
        for index in range(1, num + 1)
    ]  # fmt: skip


def test_a_long_prompt_alone_runs_on_several_workers() -> None:
    """TokenLake 6.2: idle workers raise the degree of parallelism."""
    alone = [request(0.0, 40, 1)]
    elastic = serve(alone, PROFILE, ServiceSettings(8, 110), seed=0)
    routed = serve(alone, PROFILE, ServiceSettings(8, 110, pooled=False), seed=0)
    assert routed.ttft_s(50) == pytest.approx(PREFILL_S(40 * TRACE_BLOCK))
    assert elastic.ttft_s(50) < routed.ttft_s(50) / 3
    assert sum(seconds > 0 for seconds in elastic.computed.values()) > 3


def test_every_prompt_gets_its_token_once() -> None:
    requests = skewed(60, rate=20.0)
    for pooled in (True, False):
        found = serve(requests, PROFILE, ServiceSettings(4, 110, pooled=pooled), seed=0)
        assert len(found.ttfts) == len(requests)
        assert min(found.ttfts) > 0
        assert 0 <= found.hits <= found.segments


def test_a_pool_evens_out_what_a_router_gives_to_one() -> None:
    requests = skewed(240, rate=12.0)
    elastic = serve(requests, PROFILE, ServiceSettings(8, 110), seed=0)
    routed = serve(requests, PROFILE, ServiceSettings(8, 110, pooled=False), seed=0)
    assert elastic.cv < 0.15
    assert elastic.cv < routed.cv
    assert elastic.in_time >= routed.in_time
    assert 0 < elastic.sent_share < 1, "the matching sends less than the worst choice"


def test_equal_seeds_are_equal() -> None:
    settings = ServiceSettings(4, 20)
    assert serve(skewed(40, 5.0), PROFILE, settings, 3) == serve(
        skewed(40, 5.0), PROFILE, settings, 3
    )


@pytest.mark.parametrize(
    ("points", "rate"),
    [
        ([(1.0, 0.99), (2.0, 0.95), (3.0, 0.5)], 2.0),
        ([(3.0, 0.95), (1.0, 0.99), (2.0, 0.5)], 1.0),
        ([(1.0, 0.5)], 0.0),
    ],
)
def test_goodput_is_the_highest_rate_up_to_the_first_miss(
    points: list[tuple[float, float]], rate: float
) -> None:
    assert goodput_rate(points) == rate
