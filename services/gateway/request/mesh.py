"""Values of the request flow: what is asked, where it runs, and what all requests share."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmesh.console.request_log import RequestLog
from kvmesh.core.types import Placement, RequestId, RouteCause, SamplingParams, WorkerId
from kvmesh.core.values import quick
from kvmesh.policy.connections import Connections
from kvmesh.policy.quota import Tenant
from services.gateway.config import LimitsConfig
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.doorstep import Doorstep
from services.gateway.request.lanes import Lanes
from services.gateway.request.routing import Router
from services.gateway.wire.worker_sessions import WorkerSessions


@quick
@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation, as the mesh sees it.

    Attributes:
        request_id: unique among all requests in the mesh.
        arrived_at: when it came to this machine, in seconds on the loop's clock.
        ttft_s: longest wait until a worker takes it.
        tpot_s: longest mean time per token that its client accepts; infinite for none.
        checkpoint: fingerprint of the one that is to serve it, while there are workers of it; it
            alone may go on with tokens that it has generated.
        traceparent: parent of its spans.
        tenant: whose it is; it shares workers fairly with others.
        rank: among the tenant's requests that wait; lower goes first.
    """

    request_id: RequestId
    model: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrived_at: float
    ttft_s: float
    cache_salt: str = ""
    scenario: str = ""
    placement: Placement = Placement.AUTO
    traceparent: str = ""
    tenant: Tenant = Tenant()
    rank: int = 0
    checkpoint: str = ""
    tpot_s: float = math.inf


class Placed(NamedTuple):
    """Where a request runs.

    Attributes:
        cause: what decided that.
        checkpoint: fingerprint of what the workers hold.
    """

    placement: Placement
    prefill_worker: WorkerId
    decode_worker: WorkerId
    cause: RouteCause = RouteCause.LOAD
    checkpoint: str = ""

    @property
    def decision(self) -> str:
        """One line for the response's header."""
        return f"{self.cause.value}; prefill={self.prefill_worker}; decode={self.decode_worker}"


@dataclass(frozen=True, slots=True)
class Mesh:
    """What every request needs from the gateway."""

    router: Router
    sessions: WorkerSessions
    metrics: GatewayMetrics
    limits: LimitsConfig
    rng: random.Random
    lanes: Lanes = field(default_factory=Lanes)
    doorstep: Doorstep = field(default_factory=Doorstep)
    log: RequestLog = field(default_factory=RequestLog)
    connections: Connections = field(default_factory=Connections)
