"""Rates and their history, from totals that are read about once a second.

Pure: times and totals come from the caller. Tests: tests/unit/console/test_sampler.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.console.share import Share
from kvmesh.core.details import FleetWorker
from kvmesh.core.summary_statistics import percentile
from kvmesh.core.types import Role, WorkerId

HISTORY = 300
"""Maximum number of samples kept: five minutes at one per second."""


GONE_S = 300.0
"""Seconds that a worker that left is still shown."""
MAX_GONE = 50


class LinkName(NamedTuple):
    """The link from one worker to another."""

    sender: WorkerId
    peer: WorkerId
    channel: str


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """A worker's rates per second since the previous sample.

    Attributes:
        hit_share: fraction of prompt tokens found in the prefix cache, 0 to 1; None without a
            lookup.
    """

    prefill_tokens_s: float = 0.0
    decode_tokens_s: float = 0.0
    hit_share: float | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker that has left.

    Attributes:
        at_s: when it was first missing, in seconds since 1970.
    """

    worker: FleetWorker
    at_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The mesh at one time.

    Attributes:
        at_s: seconds since 1970.
        prefill_tokens_s, decode_tokens_s, transfer_bytes_s: None while no scheduler is connected.
        ttft_p50_s, ttft_p99_s: of requests that ended in the window; None without any.
        disaggregated_share: fraction of the requests placed in the window, 0 to 1.
        threshold_tokens: uncached tokens above which a prompt goes to another cluster; None if no
            policy has a threshold.
        prefill_workers, decode_workers: hybrids count on both sides.
    """

    at_s: float
    requests_s: float
    refusals_s: float
    prefill_tokens_s: float | None
    decode_tokens_s: float | None
    transfer_bytes_s: float | None
    num_open: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    disaggregated_share: float | None
    threshold_tokens: float | None
    prefill_workers: int
    decode_workers: int


class Sampler:
    """Turns totals into rates, and keeps their history."""

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._arrived = 0
        self._refusals = 0.0
        self._workers: dict[WorkerId, FleetWorker] = {}
        self._links: dict[LinkName, int] = {}
        self.samples: deque[Sample] = deque(maxlen=HISTORY)
        self.worker_rates: dict[WorkerId, WorkerRates] = {}
        self.link_rates: dict[LinkName, float] = {}
        self.gone: dict[WorkerId, Gone] = {}

    def take(
        self,
        workers: Sequence[FleetWorker],
        share: Share,
        unix_s: float,
        threshold_tokens: float | None = None,
        *,
        fresh: bool = True,
    ) -> Sample:
        """Adds a sample.

        Args:
            share: the gateway's requests now.
            unix_s: seconds since 1970; grows from call to call.
            fresh: False if the workers are only the last known ones.
        """
        elapsed_s = unix_s - self._at_s if self._at_s is not None else 0.0
        self._miss(workers, unix_s)
        self._rate_workers(workers, elapsed_s)
        refusals = sum(share.refusals.values())
        ttfts = share.ttfts_s
        rates = self.worker_rates.values()
        sample = Sample(
            at_s=unix_s,
            requests_s=per_second(share.arrived_total - self._arrived, elapsed_s),
            refusals_s=per_second(refusals - self._refusals, elapsed_s),
            prefill_tokens_s=sum(each.prefill_tokens_s for each in rates) if fresh else None,
            decode_tokens_s=sum(each.decode_tokens_s for each in rates) if fresh else None,
            transfer_bytes_s=sum(self.link_rates.values()) if fresh else None,
            num_open=share.num_open,
            ttft_p50_s=percentile(ttfts, 50) if ttfts else None,
            ttft_p99_s=percentile(ttfts, 99) if ttfts else None,
            disaggregated_share=share.disaggregated_share,
            threshold_tokens=threshold_tokens,
            prefill_workers=sum(each.info.role in (Role.PREFILL, Role.HYBRID) for each in workers),
            decode_workers=sum(each.info.role in (Role.DECODE, Role.HYBRID) for each in workers),
        )
        self._at_s, self._arrived, self._refusals = unix_s, share.arrived_total, refusals
        self.samples.append(sample)
        return sample

    def _miss(self, workers: Sequence[FleetWorker], unix_s: float) -> None:
        """Notes workers that left since the last sample.

        Forgets those that came back or left long ago.
        """
        here = {each.info.worker_id for each in workers}
        left = {name: Gone(each, unix_s) for name, each in self._workers.items()}
        kept = {
            name: gone
            for name, gone in {**left, **self.gone}.items()
            if name not in here and unix_s - gone.at_s < GONE_S
        }
        latest = sorted(kept, key=lambda name: -kept[name].at_s)[:MAX_GONE]
        self.gone = {name: kept[name] for name in latest}

    def _rate_workers(self, workers: Sequence[FleetWorker], elapsed_s: float) -> None:
        before, self._workers = self._workers, {each.info.worker_id: each for each in workers}
        links_before, self._links = self._links, links_of(workers)
        self.worker_rates = {
            name: _worker_rates(before[name], worker, elapsed_s)
            for name, worker in self._workers.items()
            if name in before and before[name].info.incarnation == worker.info.incarnation
        }
        self.link_rates = {
            name: per_second(total - links_before[name], elapsed_s)
            for name, total in self._links.items()
            if name in links_before
        }


def links_of(workers: Sequence[FleetWorker]) -> dict[LinkName, int]:
    """Total bytes that each link has carried."""
    return {
        LinkName(worker.info.worker_id, link.peer, link.channel): link.bytes_total
        for worker in workers
        for link in worker.detail.links
    }


def per_second(difference: float, elapsed_s: float) -> float:
    """The rate of a counter; 0 if no time has passed."""
    # A restarted process counts from zero again.
    return max(difference, 0.0) / elapsed_s if elapsed_s > 0 else 0.0


def _worker_rates(before: FleetWorker, now: FleetWorker, elapsed_s: float) -> WorkerRates:
    looked_up = now.detail.prompt_tokens_total - before.detail.prompt_tokens_total
    found = now.detail.cached_tokens_total - before.detail.cached_tokens_total
    computed = now.load.prefill_tokens_total - before.load.prefill_tokens_total
    generated = now.load.decode_tokens_total - before.load.decode_tokens_total
    return WorkerRates(
        # A decode step computes the token from which it continues.
        per_second(computed - generated, elapsed_s),
        per_second(generated, elapsed_s),
        found / looked_up if looked_up > 0 else None,
    )
