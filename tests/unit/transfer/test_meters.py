"""What links are seen to carry."""

import pytest

from kvmesh.core.types import WorkerId
from kvmesh.policy.link import LinkView
from kvmesh.transfer.meters import LinkKey, LinkMeter

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
