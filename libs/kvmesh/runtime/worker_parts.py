"""What both sides of a worker are made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.core.clock import Clock
from kvmesh.core.types import WorkerId
from kvmesh.engine.core import EngineCore
from kvmesh.engine.protocol import KvMemory
from kvmesh.rpc.direct import DirectListener
from kvmesh.runtime.worker_metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Which worker this is, and which life of it."""

    worker_id: WorkerId
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """Shared collaborators.

    Attributes:
        wake_engine: says that the engine has new work.
        on_change: says that the load changed.
        direct: where gateways' streams may go.
    """

    identity: WorkerIdentity
    core: EngineCore
    memory: KvMemory
    clock: Clock
    wake_engine: Callable[[], None]
    on_change: Callable[[], None]
    metrics: WorkerMetrics
    direct: DirectListener
