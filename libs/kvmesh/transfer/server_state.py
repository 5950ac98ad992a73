"""State shared by the connections of one `DataServer`."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, field

from kvmesh.core.types import WorkerId
from kvmesh.transfer.frame_socket import FrameSocket
from kvmesh.transfer.memory import PoolMemory
from kvmesh.transfer.nixl_reader import NixlReaders
from kvmesh.transfer.staging import StagingRing


@dataclass(slots=True)
class ServerState:
    """State shared by the connections of one server.

    Attributes:
        lanes: the newest connection of each (peer, link id, lane).
        copy_threads: number of threads that share one large copy out of a peer's pool.
        readers: NIXL readers of peers' pools; None if NIXL is not offered.
        pool: this worker's pool for CUDA IPC, which contains all grants; None if IPC is not
            offered.
        staging: memory through which blocks of a device pool arrive; None for a pool in host
            memory.
        answering: thread that computes queries, one at a time; None if queries are not offered.
    """

    lanes: dict[tuple[WorkerId, int, int], FrameSocket] = field(default_factory=dict)
    copy_threads: int = 1
    readers: NixlReaders | None = None
    pool: PoolMemory | None = None
    staging: StagingRing | None = None
    answering: Executor | None = None
