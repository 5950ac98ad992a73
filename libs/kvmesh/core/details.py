"""What people want to see of models, workers and links; workers with all that is known of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.core.health import Health
from kvmesh.core.types import WorkerId, WorkerInfo, WorkerLoad


@dataclass(frozen=True, slots=True)
class ModelDetail:
    """What the scheduler's planner says about one model, for people.

    Attributes:
        remote_cluster: that long prompts are sent to; empty: none.
        threshold_tokens: longer uncached prompts go there; None without a remote cluster.
    """

    model: str
    remote_cluster: str = ""
    threshold_tokens: float | None = None


GET = "get"
"""The kind of channel under which links show what was read, whatever carried it."""

COPY = "copy"
"""As `GET`, for planned copies: they give way to others, so their pace tells nobody."""

ASK, ANSWER = "ask", "answer"
"""As `GET`, for questions to the other worker and for what it answered."""


@dataclass(frozen=True, slots=True)
class LinkDetail:
    """A worker's way to another worker, for people.

    Attributes:
        channel: kind of channel: local, ipc, shm, nixl or tcp; get for what is read from the other,
            copy for what is read of it as planned, ask and answer for queries.
        bytes_total: KV bytes that arrived since start; of ask and answer, of queries and attention.
        queued_bytes: asked for and not ended.
        busy_s: time with a transfer under way since start.
        budget_bytes_s: bound on the link; 0 is none.
        rtt_s: smoothed round trip; of answers, that of a question in one layer. 0 is not known.
        pair_s: of answers, attention for each query token and token of a prefix in all layers.
        failed_total: transfers that were refused or lost.
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


@dataclass(frozen=True, slots=True)
class WorkerDetail:
    """What people want to see of a worker. Decisions read of it the links alone.

    Attributes:
        cordoned: no new work is routed to it, by order of an operator.
        blocks_cached: hold cached KV and are free to be taken.
        prompt_tokens_total: looked up in the prefix cache since start.
        cached_tokens_total: found there since start.
    """

    cordoned: bool = False
    blocks_cached: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    links: tuple[LinkDetail, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """A worker with its load.

    Attributes:
        reported: False until it reports: its load is a guess, its totals are not known. A worker
            that serves for long is new to a scheduler that was restarted.
        reported_at: when its load came, by the scheduler's clock.
        health: a worker that is DEGRADED or DEAD is told to be draining, too.
        fault: what is wrong with it, for people.
    """

    info: WorkerInfo
    load: WorkerLoad
    detail: WorkerDetail = WorkerDetail()
    reported: bool = field(default=True, compare=False)  # not told to watchers
    reported_at: float = field(default=0.0, compare=False)  # neither
    health: Health = Health.OK
    fault: str = ""
