"""Slots: one per continuous life of a publisher of blocks in the store that all kvmanagers share,
the steps that such a life is told in, and what lookups find.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

from kvmesh.core.types import WorkerId

Slot = NewType("Slot", str)
"""Number of one publisher in the store, never used again: what a dead one left never matches."""

SLOT_WIDTH = 14
"""Characters of a slot, fixed, so that several slots can be joined."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """A worker that tells which blocks it holds.

    Attributes:
        incarnation: which life of the worker.
        namespace: blocks of different namespaces never match.
    """

    worker_id: WorkerId
    incarnation: int
    cluster: str
    namespace: str


class SlotState(enum.Enum):
    """What a slot's blocks count for."""

    LOADING = "loading"
    """Nothing yet: a snapshot is coming in."""
    LIVE = "live"
    """Lookups see them; an earlier slot of the same worker ends."""
    ENDED = "ended"
    """Nothing any more."""


@dataclass(frozen=True, slots=True)
class SlotChange:
    """A step in the life of a slot.

    Attributes:
        publisher: whose slot it is; with the first step.
        state: from now on; None: as before.
        stored, removed: joined hashes, 16 bytes each; `stored` comes first.
    """

    slot: Slot
    publisher: Publisher | None = None
    state: SlotState | None = None
    stored: bytes = b""
    removed: bytes = b""


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """Steps in the order in which the store took them.

    Attributes:
        position: in the store's log, after these.
    """

    position: str
    changes: tuple[SlotChange, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Leading blocks of a request that one worker can resume from.

    Attributes:
        host_blocks, disk_blocks: of these, blocks that are not in its pool, by the fastest tier.
    """

    worker_id: WorkerId
    incarnation: int
    cluster: str
    num_blocks: int
    host_blocks: int = 0
    disk_blocks: int = 0
