"""What links are seen to carry."""

import pytest

from kvmesh.core.types import WorkerId
from kvmesh.policy.link import LinkView
from kvmesh.transfer import meters
from kvmesh.transfer.meters import LinkKey, LinkMeter, LinkMeters

KEY = LinkKey(WorkerId("d0"), "tcp", "sent")


def test_goodput_counts_busy_time_once() -> None:
    meter = LinkMeter()
    meter.begin(100, now=1.0)
    meter.begin(300, now=2.0)
    assert meter.view(KEY).queued_bytes == 400
    meter.end(100, now=3.0)
    meter.end(300, now=5.0)
    meter.bytes = 400
    meter.begin(1, now=100.0)
    meter.end(1, now=101.0)

    view = meter.view(KEY)

    assert meter.busy_s == pytest.approx(5.0)
    assert view.goodput_bytes_s == pytest.approx(80.0)
    assert (view.peer, view.channel, view.queued_bytes) == ("d0", "tcp", 0)


def test_an_estimate_waits_for_what_is_queued() -> None:
    view = LinkView(WorkerId("d0"), "tcp", goodput_bytes_s=100.0, rtt_s=0.5, queued_bytes=50)

    assert view.estimate_s(100) == pytest.approx(2.0)
    assert LinkView(WorkerId("d0"), "tcp").estimate_s(100) is None


def link(peer: str, channel: str = "tcp") -> LinkKey:
    return LinkKey(WorkerId(peer), channel, "sent")


def test_links_of_gone_peers_are_dropped_when_another_comes() -> None:
    here = {WorkerId("d0"), WorkerId("d1")}
    links = LinkMeters(lambda: here)
    for name in ("d0", "d1"):
        links.of(link(name)).bytes, links.of(link(name)).cut_off_bytes = 8, 2
    here.remove(WorkerId("d0"))
    assert set(links.links) == {link("d0"), link("d1")}, (
        "what was read last may not be exported yet"
    )

    here.add(WorkerId("d2"))
    links.of(link("d2")).bytes = 5

    assert set(links.links) == {link("d1"), link("d2")}
    assert links.of(link("d1")).bytes == 8
    assert links.bytes == 25, "a total does not fall"


def test_a_link_with_a_transfer_under_way_stays() -> None:
    links = LinkMeters(lambda: ())
    links.of(link("d0")).begin(1, now=0.0)
    links.of(link("d1"))
    assert set(links.links) == {link("d0"), link("d1")}
    links.of(link("d0")).end(1, now=1.0)
    links.of(link("d2"))
    assert set(links.links) == {link("d2")}


def test_where_nobody_knows_who_is_gone_the_last_used_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "MAX_LINKS", 2)
    links = LinkMeters()
    links.of(link("d0"))
    links.of(link("d1"))
    links.of(link("d0"))
    links.of(link("d2"))
    assert set(links.links) == {link("d0"), link("d2")}
