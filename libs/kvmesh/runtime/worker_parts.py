"""The parts that both sides of a worker share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.core.clock import Clock
from kvmesh.core.types import RequestId, WorkerId
from kvmesh.engine.core import EngineCore
from kvmesh.engine.protocol import KvMemory
from kvmesh.policy.prompt_time import PromptTime
from kvmesh.rpc.direct import DirectListener
from kvmesh.runtime.worker_metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The worker's id and incarnation."""

    worker_id: WorkerId
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts that both sides of a worker share.

    Attributes:
        wake_engine: tells the engine that it has new work.
        on_change: tells the registration that the load changed.
        on_prompt, on_reservation: the same, because this request was accepted.
        direct: listener for gateways' direct streams.
        prompt_time: measured by the engine's steps.
    """

    identity: WorkerIdentity
    core: EngineCore
    memory: KvMemory
    clock: Clock
    wake_engine: Callable[[], None]
    on_change: Callable[[], None]
    on_prompt: Callable[[RequestId], None]
    on_reservation: Callable[[RequestId], None]
    metrics: WorkerMetrics
    direct: DirectListener
    prompt_time: PromptTime
