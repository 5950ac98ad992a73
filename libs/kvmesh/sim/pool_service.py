"""Simulates prefill over one pool of segments (TokenLake), or over per-worker caches and a router.

With a pool, each free worker starts a plan of the most urgent waiting prompts. The dynamic program
forms batches and their degrees of parallelism, and a matching chooses the workers that send the
fewest bytes. Without a pool, a prompt goes to the worker with its longest prefix and waits there.
Decode is not modelled.
Source: TokenLake 5, 6. Tests: tests/unit/sim/test_pool_service.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.core.summary_statistics import coefficient_of_variation, percentile
from kvmesh.core.types import RequestId, WorkerId
from kvmesh.policy.cache_load import CachedRequest, PoolHardware, cache_load
from kvmesh.policy.dispatch import BatchTraffic, dispatch, volume
from kvmesh.policy.elastic import Batch, Prompt, plan_elastic
from kvmesh.policy.urgency import most_urgent, num_usable
from kvmesh.sim.events import EventQueue
from kvmesh.sim.pool import PoolSettings, Read, SegmentPool
from kvmesh.sim.profile import Profile
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest

SLO_FACTOR = 10.0
"""TTFT limit as a multiple of the TTFT on an idle device without a cache (TokenLake 7)."""

IN_TIME = 0.9
"""Fraction of the requests that must be in time for a rate to count as served."""

MAX_PLANNED = 6
"""Maximum number of prompts in one plan; the dynamic program's cost grows with its square."""

PARALLEL_LOSS = 0.05
"""Cost of each further worker of a batch, as a fraction of the batch's time."""

HIDDEN_SIZE = 4096
MEMORY_BYTES_PER_S = 2.0e12
FLOPS = 3.12e14
"""Values of Llama-2-7B on an A100, as in `profiles/tokenlake.json`."""


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Settings of one run.

    Attributes:
        capacity: number of segments that a worker can hold.
        blocks: number of blocks per segment.
        pooled: whether there is one pool with elastic plans; else each worker has its own cache
            and queue.
    """

    num_workers: int
    capacity: int
    blocks: int = 2
    pooled: bool = True


@dataclass(slots=True)
class ServiceResult:
    """Results of one run.

    Attributes:
        late: number of first tokens after their limit.
        sent, worst_sent: bytes per layer that were sent, and that the worst choice of workers would
            send.
    """

    ttfts: list[float] = field(default_factory=list)
    late: int = 0
    hits: int = 0
    segments: int = 0
    sent: float = 0.0
    worst_sent: float = 0.0
    computed: dict[WorkerId, float] = field(default_factory=dict)

    @property
    def in_time(self) -> float:
        """Fraction of the prompts that kept the TTFT limit."""
        return 1.0 - self.late / len(self.ttfts)

    @property
    def hit_rate(self) -> float:
        """Fraction of whole prompt segments that were cached."""
        return self.hits / self.segments if self.segments else 0.0

    @property
    def sent_share(self) -> float:
        """Bytes sent as a fraction of those of the worst choice of workers."""
        return self.sent / self.worst_sent if self.worst_sent else 0.0

    @property
    def cv(self) -> float:
        """Coefficient of variation of the seconds that the workers computed."""
        return coefficient_of_variation([*self.computed.values()])

    def ttft_s(self, percent: float) -> float:
        """Returns a percentile of the time to first token in seconds."""
        return percentile(self.ttfts, percent)


def serve(
    requests: Iterable[TraceRequest], profile: Profile, settings: ServiceSettings, seed: int
) -> ServiceResult:
    """Prefills all prompts of a trace on the profile's local device."""
    service = (_Elastic if settings.pooled else _Routed)(profile, settings, seed)
    for request in requests:
        service.expect(request)
    service.events.run(lambda: False)
    return service.result


def goodput_rate(points: Iterable[tuple[float, float]]) -> float:
    """Returns the highest rate up to which enough requests are in time; 0 if there is none.

    Args:
        points: pairs of a rate and the fraction of requests in time.
    """
    best = 0.0
    for rate, in_time in sorted(points):
        if in_time < IN_TIME:
            break
        best = rate
    return best


class _Service:
    """Base of both services: arrivals, the pool, the TTFT limit."""

    def __init__(self, profile: Profile, settings: ServiceSettings, seed: int) -> None:
        self.events = EventQueue()
        self.result = ServiceResult()
        self._settings = settings
        self._prefill_s = profile.devices[profile.plan.local].prefill_s
        self._pool = SegmentPool(
            PoolSettings(
                settings.num_workers,
                settings.capacity,
                settings.blocks,
                replicate=settings.pooled,
                pooled=settings.pooled,
            ),
            seed,
        )
        self._workers = self._pool.workers
        self.result.computed.update(dict.fromkeys(self._workers, 0.0))

    def expect(self, request: TraceRequest) -> None:
        """Schedules a request's arrival."""
        self.events.at(request.arrival_s, lambda: self.arrive(request))

    def arrive(self, request: TraceRequest) -> None:
        """Handles an arriving request; subclasses implement it."""
        raise AssertionError("a form of service says what happens then")

    def _left(self, request: TraceRequest, num_hits: int) -> int:
        cached = num_hits * self._settings.blocks * TRACE_BLOCK
        return max(request.input_tokens - cached, 1)

    def _first_token(self, request: TraceRequest) -> None:
        ttft = self.events.now() - request.arrival_s
        self.result.ttfts.append(ttft)
        self.result.late += ttft > SLO_FACTOR * self._prefill_s(request.input_tokens)

    def _count(self, num_hits: int, request: TraceRequest) -> None:
        self.result.hits += num_hits
        self.result.segments += len(request.full_ids) // self._settings.blocks


class _Routed(_Service):
    """Service with a cache and a queue per worker, and a router that follows prefixes."""

    def __init__(self, profile: Profile, settings: ServiceSettings, seed: int) -> None:
        super().__init__(profile, settings, seed)
        self._free_at = dict.fromkeys(self._workers, 0.0)

    def arrive(self, request: TraceRequest) -> None:
        now = self.events.now()
        read = self._pool.read(request)
        worker = read.owner
        assert worker is not None, "a cache of its own has an owner"
        self._count(len(read.holders), request)
        duration = self._prefill_s(self._left(request, len(read.holders)))
        self.result.computed[worker] += duration
        self._free_at[worker] = max(self._free_at[worker], now) + duration
        self.events.at(self._free_at[worker], lambda: self._first_token(request))


class _Elastic(_Service):
    """Service with one pool: free workers take waiting prompts in batches of several workers."""

    def __init__(self, profile: Profile, settings: ServiceSettings, seed: int) -> None:
        super().__init__(profile, settings, seed)
        self._waiting: list[TraceRequest] = []
        self._free = set(self._workers)
        self._hardware = PoolHardware(settings.num_workers, MEMORY_BYTES_PER_S, FLOPS, HIDDEN_SIZE)

    def arrive(self, request: TraceRequest) -> None:
        self._waiting.append(request)
        self._plan()

    def _plan(self) -> None:
        if not self._waiting or not self._free:
            return
        urgent = most_urgent(self._waiting, self._slack, MAX_PLANNED)
        for request in urgent:
            self._waiting.remove(request)
        chosen = {RequestId(str(number)): request for number, request in enumerate(urgent)}
        reads = {name: self._pool.read(request) for name, request in chosen.items()}
        left = {name: self._left(chosen[name], len(reads[name].holders)) for name in chosen}
        for name, request in chosen.items():
            self._count(len(reads[name].holders), request)
        load = self._cache_load(chosen, left)

        def latency(prompts: Sequence[Prompt], num_workers: int) -> float:
            whole = sum(self._prefill_s(left[each.request_id]) for each in prompts)
            loss = 1.0 + PARALLEL_LOSS * (num_workers - 1)
            return whole * loss / num_workers / (1.0 - load)

        prompts = [
            Prompt(name, request.input_tokens, self._slo_left(request))
            for name, request in chosen.items()
        ]
        plan = plan_elastic(prompts, num_usable(len(self._free)), latency)
        traffic = [each for batch in plan.batches for each in self._traffic(batch, reads)]
        where = dispatch(traffic, sorted(self._free), HIDDEN_SIZE)
        self.result.sent += where.volume_bytes
        self.result.worst_sent += sum(
            max(volume(each, worker, HIDDEN_SIZE) for worker in self._workers) for each in traffic
        )
        at = 0
        for batch in plan.batches:
            group = where.workers[at : at + batch.num_workers]
            at += batch.num_workers
            duration = latency(batch.prompts, batch.num_workers)
            self._start(group, [chosen[each.request_id] for each in batch.prompts], duration)

    def _traffic(self, batch: Batch, reads: Mapping[RequestId, Read]) -> list[BatchTraffic]:
        """Returns the reads and writes of each worker of a batch (TokenLake 5)."""
        names = [each.request_id for each in batch.prompts]
        queried = frozenset(holder for name in names for holder in reads[name].holders)
        stored: Counter[WorkerId] = Counter()
        for name in names:
            stored.update(reads[name].stored)
        tokens = self._settings.blocks * TRACE_BLOCK
        puts = {holder: n * tokens // batch.num_workers for holder, n in stored.items()}
        return [BatchTraffic(queried, puts)] * batch.num_workers

    def _slack(self, request: TraceRequest) -> float:
        """Returns the seconds until it is too late to begin, even with all workers."""
        fastest = self._prefill_s(request.input_tokens) / self._settings.num_workers
        return self._slo_left(request) - fastest

    def _slo_left(self, request: TraceRequest) -> float:
        waited = self.events.now() - request.arrival_s
        return SLO_FACTOR * self._prefill_s(request.input_tokens) - waited

    def _cache_load(
        self, chosen: Mapping[RequestId, TraceRequest], left: Mapping[RequestId, int]
    ) -> float:
        parts = [
            CachedRequest(request.input_tokens - left[name], left[name])
            for name, request in chosen.items()
        ]
        compute_s = sum(self._prefill_s(tokens) for tokens in left.values())
        return cache_load(parts, compute_s / self._settings.num_workers, self._hardware)

    def _start(
        self, group: Sequence[WorkerId], requests: Sequence[TraceRequest], duration: float
    ) -> None:
        self._free.difference_update(group)
        for worker in group:
            self.result.computed[worker] += duration
        self.events.after(duration, lambda: self._end(group, requests))

    def _end(self, group: Sequence[WorkerId], requests: Sequence[TraceRequest]) -> None:
        for request in requests:
            self._first_token(request)
        self._free.update(group)
        self._plan()
