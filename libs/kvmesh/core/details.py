"""Details of models, workers and links for people, and workers with all that is known of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.core.health import Health
from kvmesh.core.types import WorkerId, WorkerInfo, WorkerLoad


@dataclass(frozen=True, slots=True)
class ModelDetail:
    """The state of the scheduler's planner for one model, for people.

    Attributes:
        remote_cluster: name of the cluster that long prompts are sent to; empty: none.
        threshold_tokens: prompts with more uncached tokens go there; None without a remote cluster.
    """

    model: str
    remote_cluster: str = ""
    threshold_tokens: float | None = None


TCP = "tcp"
"""Channel name of a link that is TCP connections: it alone has a budget and retransmits."""

GET = "get"
"""Channel name of a link's reads, whichever transport carried them."""

COPY = "copy"
"""Same as `GET`, for planned copies. They yield to other transfers, so their speed says nothing."""

ASK, ANSWER = "ask", "answer"
"""Same as `GET`, for remote queries sent to the other worker and for the answers to its queries."""

_INCOMING = (GET, COPY, ANSWER)


@dataclass(frozen=True, slots=True)
class LinkDetail:
    """A worker's link to another worker, for people.

    Attributes:
        channel: kind of channel for sent KV: local, ipc, shm, nixl or tcp. Else `get` for reads
            from the other worker, `copy` for planned copies from it, `ask` and `answer` for
            remote queries.
        bytes_total: KV bytes that arrived since start; for ask and answer, bytes of queries and
            attention.
        queued_bytes: bytes of requested transfers that have not ended.
        busy_s: seconds since start with a transfer in flight.
        budget_bytes_s: limit on the link's bandwidth; 0 is none.
        rtt_s: smoothed round-trip time in seconds; for answer, of a query in one layer. 0 is not
            known.
        pair_s: for answer, seconds of attention per pair of query token and prefix token in all
            layers.
        failed_total: number of transfers that were refused or lost.
    """

    peer: WorkerId
    channel: str
    bytes_total: int = 0
    queued_bytes: int = 0
    busy_s: float = 0.0
    budget_bytes_s: float = 0.0
    rtt_s: float = 0.0
    retransmits: int = 0
    failed_total: int = 0
    pair_s: float = 0.0

    @property
    def is_incoming(self) -> bool:
        """Whether the bytes come from the other worker; otherwise they go to it."""
        return self.channel in _INCOMING


@dataclass(frozen=True, slots=True)
class QueueLengths:
    """Numbers of sequences on one side of a worker's engine.

    Attributes:
        waiting: accepted, but not in the latest step.
        running: in the latest step.
        swapped: preempted; their KV is in host memory or is computed again.
        sending: computed, and their KV is not taken yet.
        receiving: waiting for KV from another worker, for a prompt or a part of it.
    """

    waiting: int = 0
    running: int = 0
    swapped: int = 0
    sending: int = 0
    receiving: int = 0


@dataclass(frozen=True, slots=True)
class WorkerDetail:
    """Details of a worker for people. Route decisions read only the links.

    Attributes:
        cordoned: whether an operator ordered that it gets no new work.
        blocks_cached: number of blocks that hold cached KV and are free to be reused.
        prompt_tokens_total: prompt tokens looked up in the prefix cache since start.
        cached_tokens_total: prompt tokens found there since start.
        prefill_queues, decode_queues: its sequences, by what they wait for.
    """

    cordoned: bool = False
    blocks_cached: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    links: tuple[LinkDetail, ...] = ()
    prefill_queues: QueueLengths = QueueLengths()
    decode_queues: QueueLengths = QueueLengths()


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """A worker with its load.

    Attributes:
        reported: False until its first report to this scheduler: until then its load is a guess and
            its totals are not known. After a scheduler's restart this holds for old workers too.
        reported_at: when its load arrived, in seconds of the scheduler's clock.
        health: level of its fault; a DEGRADED or DEAD worker is also shown as draining.
        fault: description of its fault, for people.
        connecting: whether it gets nothing new because peers of its group are not connected to it.
    """

    info: WorkerInfo
    load: WorkerLoad
    detail: WorkerDetail = WorkerDetail()
    reported: bool = field(default=True, compare=False)  # not sent to watchers
    reported_at: float = field(default=0.0, compare=False)  # not sent either
    health: Health = Health.OK
    fault: str = ""
    connecting: bool = False
