"""Fetch or compute: by what travels and what is computed, in one unit."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from kvmesh.policy.prefix_source import (
    ASK_CHUNK_TOKENS,
    BETWEEN_SHARE,
    INSIDE_SHARE,
    OVERHEAD_TOKENS,
    WORTH,
    FetchPace,
    Way,
    cheapest_way,
    choose_holder,
    saved_tokens,
)

HOME, FAR = "home", "far"
PACE = FetchPace(
    token_s=0.001,
    inside_token_s=0.0001,
    between_token_s={(FAR, HOME): 0.0005, (HOME, FAR): 0.002},
)


def test_what_is_not_measured_has_a_default() -> None:
    unknown = FetchPace()
    assert unknown.share(HOME, HOME) == unknown.inside_share == INSIDE_SHARE
    assert unknown.share(FAR, HOME) == BETWEEN_SHARE
    assert unknown.overhead_tokens == OVERHEAD_TOKENS
    half = FetchPace(token_s=0.001, inside_token_s=0.0001)
    assert half.share(HOME, HOME) == half.share(FAR, FAR) == pytest.approx(0.1)
    assert half.share(FAR, HOME) == BETWEEN_SHARE


def test_each_direction_between_clusters_has_its_own_speed() -> None:
    assert PACE.share(FAR, HOME) == pytest.approx(0.5)
    assert PACE.share(HOME, FAR) == pytest.approx(2.0)
    assert PACE.share(HOME, "third") == BETWEEN_SHARE
    not_computed = dataclasses.replace(PACE, token_s=0.0)
    assert not_computed.share(HOME, FAR) == BETWEEN_SHARE


def saved(queued: float, *, inside: bool) -> float:
    """Of a thousand tokens that are missing."""
    share = PACE.share(HOME if inside else FAR, HOME)
    return saved_tokens(1000, queued, PACE.overhead_tokens, share)


def test_a_fetch_saves_what_it_does_not_cost() -> None:
    # Five milliseconds are five tokens, and each token that travels is a tenth of one.
    assert saved(0, inside=True) == pytest.approx(1000 - 5 - 100)
    assert saved(2000, inside=True) == pytest.approx(1000 - 5 - 300)


@pytest.mark.parametrize(
    ("queued", "inside", "pays"),
    [(0, True, True), (0, False, True), (7000, True, False), (1000, False, False)],
)
def test_a_slow_way_or_a_busy_holder_is_left_alone(queued: float, inside: bool, pays: bool) -> None:
    found = saved(queued, inside=inside)
    assert found >= 1000 * (1 - WORTH) if pays else found == 0


def test_of_two_holders_at_random_the_less_loaded_is_read() -> None:
    loads = {"a": 5.0, "b": 1.0}
    assert choose_holder(["a", "b"], lambda name: (loads[name],), random.Random(0)) == "b"
    many = {f"w{index}": float(index) for index in range(8)}
    rng = random.Random(0)
    taken = Counter(choose_holder(list(many), lambda name: (many[name],), rng) for _ in range(800))
    assert taken["w7"] == 0, "the most loaded one is never the better of two"
    assert taken["w0"] > taken["w6"] > 0


@pytest.mark.parametrize(
    ("fetch", "ask", "worth", "way", "cost"),
    [
        (None, None, 1.0, Way.COMPUTE, 100.0),
        (50.0, None, 1.0, Way.FETCH, 50.0),
        (50.0, 49.0, 1.0, Way.ASK, 49.0),
        (50.0, 50.0, 1.0, Way.FETCH, 50.0),
        (100.0, 100.0, 1.0, Way.COMPUTE, 100.0),
        (90.0, 85.0, 0.8, Way.COMPUTE, 100.0),
        (90.0, 80.0, 0.8, Way.ASK, 80.0),
    ],
)
def test_the_cheapest_way_troubles_another_worker_only_where_that_is_worth_it(
    fetch: float | None, ask: float | None, worth: float, way: Way, cost: float
) -> None:
    assert cheapest_way(100.0, fetch, ask, worth=worth) == (way, cost)


def test_asking_costs_a_round_of_questions_per_chunk_and_attention_per_pair() -> None:
    pace = FetchPace(token_s=0.01, ask_chunk_s=0.2, ask_pair_s=1e-5)
    assert pace.ask_tokens(100, 1000) == pytest.approx((0.2 + 1.0) / 0.01)
    assert pace.ask_tokens(ASK_CHUNK_TOKENS + 1, 0) == pytest.approx(2 * 0.2 / 0.01)
    assert FetchPace(token_s=0.01).ask_tokens(100, 1000) is None
    assert FetchPace(ask_chunk_s=0.2).ask_tokens(100, 1000) is None
