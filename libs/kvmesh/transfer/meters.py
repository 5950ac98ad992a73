"""Live totals of links by peer, channel kind and direction, and views of them for policies.

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
"""Maximum number of links kept, the most recently used, where departed peers are unknown."""


class LinkKey(NamedTuple):
    """One direction of one kind of channel to one peer."""

    peer: WorkerId
    channel: str
    direction: Direction


@dataclass(frozen=True, slots=True)
class TransferSample:
    """One transfer that ended well, for histograms.

    Attributes:
        calls: number of runs that were contiguous on both sides, as far as this side knows.
        seconds: sender: from the call to the last answer; receiver: duration of the write.
    """

    link: LinkKey
    bytes: int
    calls: int
    seconds: float


TransferObserver = Callable[[TransferSample], None]
"""Called with every transfer that ended well; must not block."""


def unobserved(sample: TransferSample) -> None:
    """An observer that does nothing."""


@dataclass(slots=True)
class LinkMeter:
    """Totals of all channels of one kind with one peer in one direction, since start.

    Attributes:
        bytes: KV bytes that arrived in their blocks.
        calls: contiguous runs in which they moved.
        frames: PUT and PULL frames that were accepted.
        seconds: wall time of successful transfers; those of concurrent transfers add up.
        busy_s: wall time with at least one transfer under way.
        refused: transfers and commits that the receiver refused.
        lost: transfers and commits that ended with their channel.
        late: answers that came after the sender had given up.
        resumed: pieces that were sent again after their connection was cut.
        channels: connections that were opened.
        retransmits: TCP segments that were sent again, on open connections.
        queued_bytes: bytes of transfers that were requested and have not ended.
        arrived_bytes: the part of `queued_bytes` that is in its blocks, according to answers.
        cut_off_bytes: bytes of failed transfers that were in their blocks by then.
        rtt_s: smallest smoothed round trip in seconds of open connections. For answers to queries:
            the round trip of a query in one layer, without its attention.
        pair_s: for answers to queries: seconds of attention per pair of a query token and a prefix
            token, in all layers.
        leaving: time with pieces handed to a network; the links of one sender share it.
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
        """Records that a transfer was requested."""
        if self._under_way == 0:
            self._busy_since = now
        self._under_way += 1
        self.queued_bytes += num_bytes

    def end(self, num_bytes: int, now: float) -> None:
        """Records that a transfer ended, with or without success."""
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
        """KV bytes per second while a transfer was under way; 0 if not known yet."""
        return self.bytes / self.busy_s if self.busy_s > 0 else 0.0

    def view(self, key: LinkKey) -> LinkView:
        """Returns the link as policies see it."""
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
    """Meters by link. Drops links of departed workers, since a restarted worker may have a new id.

    Attributes:
        links: the live meters; read only.
        leaving: time with pieces handed to a network, over any link.
    """

    def __init__(self, peers: Callable[[], Collection[WorkerId]] | None = None) -> None:
        """Starts without links.

        Args:
            peers: returns the workers that are present. Links of other workers are dropped when a
                new link is added. None: unknown; then the least recently used links are dropped.
        """
        self._peers = peers
        self._links: OrderedDict[LinkKey, LinkMeter] = OrderedDict()
        self._dropped_bytes = 0
        self.leaving = BusyTime()
        self.links: Mapping[LinkKey, LinkMeter] = MappingProxyType(self._links)

    def of(self, key: LinkKey) -> LinkMeter:
        """Returns the meter of a link; creates it at zero if there is none."""
        meter = self._links.get(key)
        if meter is None:
            self._drop_gone()
            meter = self._links[key] = LinkMeter(leaving=self.leaving)
        self._links.move_to_end(key)
        return meter

    @property
    def bytes(self) -> int:
        """KV bytes of all links since start, including dropped links. Never falls.

        Bytes that have arrived count while their transfer is under way, since a transfer on a
        slow link takes seconds. They still count when the transfer fails.
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
        open_channels: number of open connections.
        links: the live meters; read only.
    """

    open_channels: int
    links: Mapping[LinkKey, LinkMeter]

    def views(self) -> list[LinkView]:
        """Returns all links as policies see them."""
        return [meter.view(key) for key, meter in self.links.items()]
