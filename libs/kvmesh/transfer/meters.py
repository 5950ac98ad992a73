"""What links carried: live totals by peer, channel kind and direction, and views of them.

Tests: tests/unit/transfer/test_meters.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from kvmesh.core.busy_time import BusyTime
from kvmesh.core.types import WorkerId
from kvmesh.policy.link import LinkView

Direction = Literal["sent", "received"]

MAX_LINKS = 1024
"""Links that are remembered where nobody knows which peers are gone: those used last."""


class LinkKey(NamedTuple):
    """One direction of one kind of channel to one peer."""

    peer: WorkerId
    channel: str
    direction: Direction


@dataclass(frozen=True, slots=True)
class TransferSample:
    """One transfer that ended well, for histograms.

    Attributes:
        calls: runs that were contiguous on both sides, as far as this side knows.
        seconds: from the call to the last answer (sender), or of the write (receiver).
    """

    link: LinkKey
    bytes: int
    calls: int
    seconds: float


TransferObserver = Callable[[TransferSample], None]
"""Told of every transfer that ended well; must not block."""


def unobserved(sample: TransferSample) -> None:
    """An observer that does nothing."""


@dataclass(slots=True)
class LinkMeter:
    """Totals of all channels of one kind with one peer in one direction, since start.

    Attributes:
        bytes: KV bytes that arrived in their blocks.
        calls: contiguous runs they were moved in.
        frames: PUT and PULL frames that were answered with yes.
        seconds: wall time of successful transfers; those of concurrent transfers add up.
        busy_s: wall time with at least one transfer under way.
        refused: transfers and commits that the receiver refused.
        lost: transfers and commits that ended with their channel.
        late: answers that came after the sender had given up.
        resumed: pieces that were sent again after their connection was cut.
        channels: connections that were opened.
        retransmits: TCP segments that were sent again, on the connections that are up.
        queued_bytes: asked for and not ended.
        arrived_bytes: of `queued_bytes`, those in their blocks already, as far as answers tell.
        cut_off_bytes: of transfers that failed, those that were in their blocks by then.
        rtt_s: smallest smoothed round trip of the connections that are up; of answers, that of a
            question, in one layer, without its attention.
        pair_s: of answers: attention for each query token and token of the prefix, in all layers.
        leaving: time with pieces given to a network; the links of one sender share it.
    """

    bytes: int = 0
    calls: int = 0
    frames: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0
    commits: int = 0
    refused: int = 0
    lost: int = 0
    late: int = 0
    resumed: int = 0
    channels: int = 0
    retransmits: int = 0
    queued_bytes: int = 0
    arrived_bytes: int = 0
    cut_off_bytes: int = 0
    rtt_s: float = 0.0
    pair_s: float = 0.0
    leaving: BusyTime = field(default_factory=BusyTime, repr=False)
    _under_way: int = field(default=0, repr=False)
    _busy_since: float = field(default=0.0, repr=False)

    def begin(self, num_bytes: int, now: float) -> None:
        """A transfer was asked for."""
        if self._under_way == 0:
            self._busy_since = now
        self._under_way += 1
        self.queued_bytes += num_bytes

    def end(self, num_bytes: int, now: float) -> None:
        """It ended, in whatever way."""
        self._under_way -= 1
        self.queued_bytes -= num_bytes
        if self._under_way == 0:
            self.busy_s += now - self._busy_since

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self._under_way == 0

    @property
    def goodput_bytes_s(self) -> float:
        """KV bytes per second while something was under way; 0 is not known yet."""
        return self.bytes / self.busy_s if self.busy_s > 0 else 0.0

    def view(self, key: LinkKey) -> LinkView:
        """The link as policies see it."""
        return LinkView(
            peer=key.peer,
            channel=key.channel,
            goodput_bytes_s=self.goodput_bytes_s,
            rtt_s=self.rtt_s,
            retransmits=self.retransmits,
            queued_bytes=self.queued_bytes,
            transferred_bytes=self.bytes,
        )


class LinkMeters:
    """Meters by link. A worker that restarts may have a new id, so links of gone ones are dropped.

    Attributes:
        links: the live meters; not to be written.
        leaving: time with pieces given to a network, over any link.
    """

    def __init__(self, peers: Callable[[], Collection[WorkerId]] | None = None) -> None:
        """Has no link yet.

        Args:
            peers: those that are still here; links of others are dropped when a new one comes.
                None: nobody knows.
        """
        self._peers = peers
        self._links: OrderedDict[LinkKey, LinkMeter] = OrderedDict()
        self._dropped_bytes = 0
        self.leaving = BusyTime()
        self.links: Mapping[LinkKey, LinkMeter] = MappingProxyType(self._links)

    def of(self, key: LinkKey) -> LinkMeter:
        """The meter of a link, a new one at zero if need be."""
        meter = self._links.get(key)
        if meter is None:
            self._drop_gone()
            meter = self._links[key] = LinkMeter(leaving=self.leaving)
        self._links.move_to_end(key)
        return meter

    @property
    def bytes(self) -> int:
        """KV bytes of all links since start, dropped ones included. Never falls: what has arrived
        of transfers that are under way counts, on a slow link one takes seconds, and goes on to
        when they fail.
        """
        return self._dropped_bytes + sum(
            _carried(meter) + meter.arrived_bytes for meter in self._links.values()
        )

    def _drop_gone(self) -> None:
        surplus = len(self._links) + 1 - MAX_LINKS
        here = None if self._peers is None else self._peers()
        for number, (key, meter) in enumerate(list(self._links.items())):
            is_gone = number < surplus if here is None else key.peer not in here
            if is_gone and meter.is_idle:
                self._dropped_bytes += _carried(meter)
                del self._links[key]


def _carried(meter: LinkMeter) -> int:
    return meter.bytes + meter.cut_off_bytes


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """State of one side of the data plane.

    Attributes:
        open_channels: connections that are up.
        links: totals; the live meters, not to be written.
    """

    open_channels: int
    links: Mapping[LinkKey, LinkMeter]

    def views(self) -> list[LinkView]:
        """All links as policies see them."""
        return [meter.view(key) for key, meter in self.links.items()]
