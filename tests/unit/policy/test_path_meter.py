"""The speed of the ways between workers, from the totals that their links show."""

from __future__ import annotations

import dataclasses

import pytest

from kvmesh.core.details import ANSWER, ASK, COPY, GET, FleetWorker, LinkDetail, WorkerDetail
from kvmesh.core.turns import at_once
from kvmesh.core.types import WorkerId, WorkerLoad
from kvmesh.policy.path_meter import MIN_BYTES, PathMeter
from kvmesh.policy.prefix_source import FetchPace
from tests.unit.policy.fleet_examples import LAYOUT, worker_info

ASKS = (ASK, ANSWER, COPY)
TOKEN_BYTES = LAYOUT.block_bytes / LAYOUT.block_size


def seen(name: str, *links: tuple[str, int, float], cluster: str = "east") -> FleetWorker:
    details = [
        LinkDetail(WorkerId(peer), "tcp", bytes_total=total, busy_s=busy)
        for peer, total, busy in links
    ]
    info = dataclasses.replace(worker_info(name), cluster=cluster)
    return FleetWorker(info, WorkerLoad(), WorkerDetail(links=tuple(details)))


def test_ways_inside_and_between_are_apart() -> None:
    meter = PathMeter()
    far = seen("c", cluster="west")
    at_once(
        meter.observe(
            [seen("a", ("b", 10 * MIN_BYTES, 2.0), ("c", 2 * MIN_BYTES, 4.0)), seen("b"), far]
        )
    )
    pace = meter.pace(0.5)
    assert pace.token_s == 0.5
    assert pace.inside_token_s == pytest.approx(TOKEN_BYTES * 2.0 / (10 * MIN_BYTES))
    between_s = TOKEN_BYTES * 4.0 / (2 * MIN_BYTES)
    assert pace.between_token_s == pytest.approx({("east", "west"): between_s})


def got(name: str, cluster: str, peer: str, total: int, busy: float) -> FleetWorker:
    """A worker that read from another one."""
    link = LinkDetail(WorkerId(peer), GET, bytes_total=total, busy_s=busy)
    return dataclasses.replace(seen(name, cluster=cluster), detail=WorkerDetail(links=(link,)))


def test_a_link_between_clusters_is_measured_in_each_direction() -> None:
    """A read comes from its holder: the reader's report is about the direction to the reader."""
    meter = PathMeter()
    sends = seen("e", ("w", 4 * MIN_BYTES, 1.0))
    reads = got("e2", "east", "w", 2 * MIN_BYTES, 6.0)
    at_once(meter.observe([sends, reads, seen("w", cluster="west")]))
    second_s = TOKEN_BYTES / MIN_BYTES
    assert meter.pace(None).between_token_s == pytest.approx(
        {("east", "west"): second_s / 4, ("west", "east"): second_s * 3}
    )


def test_clusters_that_left_are_forgotten() -> None:
    meter = PathMeter()
    sends = seen("e", ("w", 4 * MIN_BYTES, 1.0))
    at_once(meter.observe([sends, seen("w", cluster="west")]))
    assert meter.pace(None).between_token_s
    at_once(meter.observe([sends]))
    at_once(meter.observe([sends, seen("w2", cluster="west")]))
    assert not meter.pace(None).between_token_s


def test_little_in_a_long_time_is_a_slow_way() -> None:
    """Otherwise a link too slow for the first slice of a fetch would be tried again and again."""
    meter = PathMeter()
    west = seen("w", cluster="west")
    at_once(meter.observe([got("e", "east", "w", 0, 0.9), west]))
    assert not meter.pace(None).between_token_s
    at_once(meter.observe([got("e", "east", "w", 0, 10.0), west]))
    found = meter.pace(None).between_token_s["west", "east"]
    assert found == pytest.approx(10.0 * TOKEN_BYTES / MIN_BYTES, rel=0.05)
    for _ in range(200):
        at_once(meter.observe([got("e", "east", "w", 0, 10.0), west]))
    assert not meter.pace(None).between_token_s, "after some minutes of rest it is tried again"


def test_questions_say_nothing_of_how_fast_kv_travels() -> None:
    meter = PathMeter()
    asked = [
        LinkDetail(WorkerId("b"), kind, bytes_total=9 * MIN_BYTES, busy_s=9.0) for kind in ASKS
    ]
    asker = dataclasses.replace(seen("a"), detail=WorkerDetail(links=tuple(asked)))
    at_once(meter.observe([asker, seen("b")]))
    assert meter.pace(0.5) == FetchPace(0.5)


def test_totals_count_once() -> None:
    meter = PathMeter()
    fleet = [seen("a", ("b", 8 * MIN_BYTES, 1.0)), seen("b")]
    at_once(meter.observe(fleet))
    first = meter.pace(None)
    for _ in range(3):
        at_once(meter.observe(fleet))
    assert meter.pace(None).inside_token_s == pytest.approx(first.inside_token_s)
    at_once(meter.observe([seen("a", ("b", 16 * MIN_BYTES, 9.0)), seen("b")]))
    assert meter.pace(None).inside_token_s > 3 * first.inside_token_s


def test_little_says_nothing() -> None:
    meter = PathMeter()
    at_once(
        meter.observe([seen("a", ("b", MIN_BYTES - 1, 0.9), ("gone", 1 << 40, 1.0)), seen("b")])
    )
    assert meter.pace(None) == FetchPace()


def test_questions_are_as_quick_as_the_middle_one_of_those_measured() -> None:
    meter = PathMeter()
    times = [0.001, 0.02, 0.003]
    links = [LinkDetail(WorkerId("b"), ANSWER, rtt_s=rtt_s, pair_s=2 * rtt_s) for rtt_s in times]
    askers = [
        dataclasses.replace(seen(name), detail=WorkerDetail(links=(link,)))
        for name, link in zip("acd", links, strict=True)
    ]
    at_once(meter.observe([*askers, seen("b")]))
    pace = meter.pace(0.5)
    assert pace.ask_chunk_s == pytest.approx(0.003 * LAYOUT.num_layers)
    assert pace.ask_pair_s == pytest.approx(0.006)
    at_once(meter.observe([seen("b")]))
    assert meter.pace(0.5).ask_chunk_s == 0.0


def test_far_questions_say_nothing_of_those_within_a_cluster() -> None:
    meter = PathMeter()
    links = (
        LinkDetail(WorkerId("b"), ANSWER, rtt_s=0.001, pair_s=0.002),
        LinkDetail(WorkerId("c"), ANSWER, rtt_s=0.5, pair_s=0.3),
    )
    asker = dataclasses.replace(seen("a"), detail=WorkerDetail(links=links))
    at_once(meter.observe([asker, seen("b"), seen("c", cluster="west")]))
    assert meter.pace(0.5).ask_chunk_s == pytest.approx(0.001 * LAYOUT.num_layers)


def test_each_link_has_its_own_speed_while_both_ends_are_there() -> None:
    meter = PathMeter()
    slow = ("b", 4 * MIN_BYTES, 4.0), ("c", 4 * MIN_BYTES, 0.5)
    at_once(meter.observe([seen("a", *slow), seen("b"), seen("c")]))
    second_s = TOKEN_BYTES / (4 * MIN_BYTES)
    assert meter.links == pytest.approx({("a", "b"): 4 * second_s, ("a", "c"): 0.5 * second_s})
    for _ in range(9):  # it rests, and is not forgotten
        at_once(meter.observe([seen("a", *slow), seen("b"), seen("c")]))
    assert meter.links[WorkerId("a"), WorkerId("b")] == pytest.approx(4 * second_s)
    at_once(meter.observe([seen("a", *slow), seen("c")]))
    assert list(meter.links) == [("a", "c")]


def test_reads_of_a_link_are_not_of_its_sender() -> None:
    meter = PathMeter()
    read = LinkDetail(WorkerId("b"), GET, bytes_total=9 * MIN_BYTES, busy_s=9.0)
    reader = dataclasses.replace(seen("a"), detail=WorkerDetail(links=(read,)))
    at_once(meter.observe([reader, seen("b")]))
    assert meter.links == {}
