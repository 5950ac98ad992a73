"""What the connections of one `DataServer` share."""

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
    """What the connections of one server share.

    Attributes:
        lanes: the newest connection of each (peer, link id, lane).
        copy_threads: that share one large copy out of a peer's pool.
        readers: of peers' segments; None: no engine is to be used.
        pool: that grants lie in, for peers whose devices read each other's; None: for no peer.
        staging: what blocks of a device pool arrive through; None: the pool is in host memory.
        answering: where queries are computed, one at a time; None: none is.
    """

    lanes: dict[tuple[WorkerId, int, int], FrameSocket] = field(default_factory=dict)
    copy_threads: int = 1
    readers: NixlReaders | None = None
    pool: PoolMemory | None = None
    staging: StagingRing | None = None
    answering: Executor | None = None
