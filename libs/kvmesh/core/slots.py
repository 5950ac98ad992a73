"""Slots: each is one uninterrupted registration, or one snapshot, of a publisher of blocks in the
store that all kvmanagers share. Also the changes of a slot, and the result of lookups.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

from kvmesh.core.types import WorkerId

Slot = NewType("Slot", str)
"""Number of a publisher in the store. It is never reused, so blocks left by a dead one never match.
"""

SLOT_WIDTH = 14
"""Number of characters of a slot; fixed, so that several slots can be joined."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """A worker that publishes the blocks that it holds.

    Attributes:
        incarnation: incarnation of the worker.
        namespace: namespace of its block hashes; blocks of different namespaces never match.
    """

    worker_id: WorkerId
    incarnation: int
    cluster: str
    namespace: str


class SlotState(enum.Enum):
    """State of a slot: whether lookups find its blocks."""

    LOADING = "loading"
    """Lookups do not find its blocks yet, because a snapshot is arriving."""
    LIVE = "live"
    """Lookups find its blocks; an earlier slot of the same worker ends."""
    ENDED = "ended"
    """Lookups no longer find its blocks."""


@dataclass(frozen=True, slots=True)
class SlotChange:
    """One change of a slot.

    Attributes:
        publisher: owner of the slot; given with the first change only.
        state: new state; None: unchanged.
        stored, removed: joined hashes, 16 bytes each; `stored` is applied first.
    """

    slot: Slot
    publisher: Publisher | None = None
    state: SlotState | None = None
    stored: bytes = b""
    removed: bytes = b""


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """Changes in the order of the store's log.

    Attributes:
        position: position in the log after these changes.
    """

    position: str
    changes: tuple[SlotChange, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Leading blocks of a request that one worker can resume from.

    Attributes:
        num_blocks: number of these blocks.
        host_blocks, disk_blocks: number of these blocks that are not in its pool, by fastest tier.
    """

    worker_id: WorkerId
    incarnation: int
    cluster: str
    num_blocks: int
    host_blocks: int = 0
    disk_blocks: int = 0
