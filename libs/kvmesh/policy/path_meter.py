"""Measures how fast KV travels inside and between clusters, from the links that workers report.

Tests: tests/unit/policy/test_path_meter.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.details import ANSWER, ASK, COPY, GET, FleetWorker, LinkDetail
from kvmesh.core.turns import Parts, is_turn_over
from kvmesh.core.types import WorkerId
from kvmesh.policy.measurement import KEEP
from kvmesh.policy.prefix_source import FetchPace

MIN_BYTES = 1 << 20
"""Minimum number of bytes for a measurement: fewer reflect waiting more than the path."""

MIN_BUSY_S = 1.0
"""Seconds in flight after which fewer than `MIN_BYTES` are a measurement too: the path is slow."""

PAIR_KEEP = 0.8
"""Factor on the weight of a link's older samples for each second in which it carried anything."""


@dataclass(slots=True)
class _Carried:
    """Bytes and their time in flight, both with exponential forgetting."""

    bytes: float = 0.0
    busy_s: float = 0.0

    def token_s(self, token_bytes: float) -> float:
        """Returns the seconds that a token's KV travels; 0 while unknown."""
        if self.bytes < MIN_BYTES and self.busy_s < MIN_BUSY_S:
            return 0.0
        # A path that carried less in so long has no exact speed: it is at most this fast.
        return token_bytes * self.busy_s / max(self.bytes, MIN_BYTES)


_LinkName = tuple[WorkerId, int, WorkerId, str]


class PathMeter:
    """Measures the links of one model's workers; handoffs and fetches both count.

    Each direction between two clusters has a speed of its own: a link may be asymmetric, or
    congested in one direction only.

    Attributes:
        links: seconds that a token's KV travels, by sender and receiver, for links that carried
            enough to tell.
    """

    def __init__(self) -> None:
        self._seen: dict[_LinkName, tuple[int, float]] = {}
        self._inside = _Carried()
        self._between: dict[tuple[str, str], _Carried] = {}
        self._pairs: dict[tuple[WorkerId, WorkerId], _Carried] = {}
        self.links: dict[tuple[WorkerId, WorkerId], float] = {}
        self._token_bytes = 0.0
        self._asked = (0.0, 0.0)

    def observe(self, workers: Sequence[FleetWorker]) -> Parts[None]:
        """Adds the bytes that the links carried since the last call, and the speed of queries."""
        asked: list[tuple[float, float]] = []
        for carried in (self._inside, *self._between.values()):
            carried.bytes *= KEEP
            carried.busy_s *= KEEP
        clusters = {each.info.worker_id: each.info.cluster for each in workers}
        self._forget(clusters)
        before, self._seen = self._seen, {}
        for number, worker in enumerate(workers):
            if is_turn_over(number):
                yield
            info = worker.info
            self._token_bytes = info.layout.block_bytes / info.layout.block_size
            for link in worker.detail.links:
                cluster = clusters.get(link.peer)
                same = cluster == info.cluster
                # Routes price queries within a cluster only, so remote ones do not count.
                if link.channel == ANSWER and same and link.rtt_s:
                    asked.append((link.rtt_s * info.layout.num_layers, link.pair_s))
                name = (info.worker_id, info.incarnation, link.peer, link.channel)
                self._seen[name] = (link.bytes_total, link.busy_s)
                # Copies do not count: they yield to all other transfers, fetches are faster.
                if cluster is not None and link.channel not in (ASK, ANSWER, COPY):
                    ends = (cluster, info.cluster) if link.is_incoming else (info.cluster, cluster)
                    self._add(info.worker_id, self._path(*ends), link, before.get(name))
        # The median, because the holder that a route will find is not known here.
        self._asked = sorted(asked)[len(asked) // 2] if asked else (0.0, 0.0)

    def _path(self, source: str, target: str) -> _Carried:
        if source == target:
            return self._inside
        return self._between.setdefault((source, target), _Carried())

    def _add(
        self,
        sender: WorkerId,
        carried: _Carried,
        link: LinkDetail,
        before: tuple[int, float] | None,
    ) -> None:
        last_bytes, last_busy_s = before or (0, 0.0)
        num_bytes = max(link.bytes_total - last_bytes, 0)
        busy_s = max(link.busy_s - last_busy_s, 0.0)
        carried.bytes += num_bytes
        carried.busy_s += busy_s
        if not num_bytes or link.channel == GET:
            return
        # Only what was carried makes older samples count less: most links rest most of the time.
        pair = sender, link.peer
        own = self._pairs.setdefault(pair, _Carried())
        own.bytes = PAIR_KEEP * own.bytes + num_bytes
        own.busy_s = PAIR_KEEP * own.busy_s + busy_s
        if token_s := own.token_s(self._token_bytes):
            self.links[pair] = token_s

    def _forget(self, here: Mapping[WorkerId, str]) -> None:
        """Drops the links of workers that have left, and the paths of clusters without workers."""
        for pair in [each for each in self._pairs if not (each[0] in here and each[1] in here)]:
            del self._pairs[pair]
            self.links.pop(pair, None)
        left = set(here.values())
        for ends in [each for each in self._between if not left.issuperset(each)]:
            del self._between[ends]

    def pace(self, token_s: float | None) -> FetchPace:
        """Returns the measured times for routes.

        Args:
            token_s: seconds to compute a prompt token; None while unknown.
        """
        inside = self._inside.token_s(self._token_bytes)
        between = {
            ends: travel_s
            for ends, each in self._between.items()
            if (travel_s := each.token_s(self._token_bytes))
        }
        return FetchPace(token_s or 0.0, inside, between, *self._asked)
