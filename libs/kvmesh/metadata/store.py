"""Interfaces of the control plane's durable state: the blocks of each worker, and the fleet.

The kvmanager owns `MetadataStore`, the scheduler `FleetStore`. Both have a Redis implementation
(`redis_store.py`, `redis_fleet.py`) and one in memory (`memory_store.py`).
Tests: tests/contract/test_metadata_store.py runs against all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.core.errors import KvMeshError
from kvmesh.core.slots import PrefixMatch, Publisher, Slot, SlotChange, SlotChanges
from kvmesh.core.types import BlockHash, WorkerId


class StoreUnavailableError(KvMeshError):
    """The store did not answer in time or refused; the change may or may not have happened."""

    grpc_status = "UNAVAILABLE"
    retry_safe = True


class ApplyResult(enum.Enum):
    """Result of applying a batch of block events or a part of a snapshot."""

    APPLIED = "applied"
    GAP = "gap"
    """An earlier batch is missing; nothing was changed."""
    UNKNOWN = "unknown"
    """The slot's lease has ended or the store lost its data; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A publisher's slot and the sequence number of the last batch applied to it."""

    slot: Slot
    sequence: int


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Number of live publishers, and of the names that they hold, counted per publisher."""

    num_publishers: int
    num_blocks: int


class MetadataStore(Protocol):
    """The blocks that each worker holds.

    A slot is `live` (lookups read it, events change it) or `loading` (a snapshot is arriving). A
    slot whose lease ended is neither: lookups skip it at once, and `sweep` removes its blocks.
    Hashes and the other names of blocks (`core/block_names.py`) are passed joined, 16 bytes each;
    the caller has checked the length. Only `match` reads the meaning of a name. Every method raises
    StoreUnavailableError.
    """

    async def register(self, publisher: Publisher) -> Registration:
        """Opens or reopens the live slot of a publisher.

        The same incarnation with a lease keeps its slot. Otherwise the slot is new, empty and at
        sequence 0, and the slot of an earlier incarnation ends.
        """
        ...

    async def begin_snapshot(self, publisher: Publisher) -> Slot:
        """Opens a loading slot beside the live one, which lookups still use."""
        ...

    async def apply_snapshot_part(
        self, slot: Slot, sequence: int, held: bytes, *, last: bool
    ) -> ApplyResult:
        """Adds blocks to a loading slot and renews its lease.

        The last part makes it live at `sequence` and ends the worker's previous slot, atomically.
        """
        ...

    async def apply_events(
        self, slot: Slot, sequence: int, stored: bytes, removed: bytes
    ) -> ApplyResult:
        """Applies a batch, `stored` first, to a live slot and renews its lease.

        Returns GAP unless `sequence` is one more than that of the previous batch.
        """
        ...

    async def renew(self, known: Sequence[tuple[Slot, int]]) -> list[bool]:
        """Renews the leases of live slots.

        Args:
            known: slots, each with the sequence that its worker is at.

        Returns:
            For each, whether it is renewed: it has a lease, and is at that sequence.
        """
        ...

    async def forget(self, slot: Slot) -> None:
        """Ends a slot's lease now."""
        ...

    async def match(self, namespace: str, hashes: bytes) -> list[PrefixMatch]:
        """Returns the live workers that hold at least one leading block, longest match first.

        If many workers match, a store may leave out those that seem to hold less.
        """
        ...

    async def holders(self, namespace: str, hashes: bytes) -> dict[WorkerId, set[BlockHash]]:
        """Returns which of these blocks each worker with a live slot holds, in any tier."""
        ...

    async def sweep(self, max_blocks: int) -> int:
        """Removes about `max_blocks` entries at most of slots without a lease; returns how many.

        It also logs the end of slots whose lease expired.
        """
        ...

    # A follower reads `position`, then a snapshot of the store (`slots`, and `held` of each slot),
    # then `changes_after` that position. The snapshot may be of any moment since: changes are set
    # operations, so a follower that applies them in order ends with the store's content.

    async def position(self) -> str:
        """Returns the position of the log's end."""
        ...

    async def slots(self) -> list[SlotChange]:
        """Returns all slots with a lease, without their blocks."""
        ...

    async def held(self, slot: Slot, cursor: int) -> tuple[int, bytes]:
        """Returns the cursor of the next page, and a page of a slot's blocks, joined.

        Cursor 0 begins and ends. A block may occur twice.
        """
        ...

    async def changes_after(self, position: str, wait_s: float) -> SlotChanges | None:
        """Returns the next changes; none of them if none happens within about `wait_s` seconds.

        None if the log does not know the position, because it is too old or the store lost its
        data.
        """
        ...

    async def statistics(self) -> StoreStatistics:
        """Returns counts for metrics."""
        ...

    async def probe(self) -> None:
        """Returns when the store can be read and written."""
        ...

    async def close(self) -> None:
        """Closes connections. May be called again."""
        ...


class FleetStore(Protocol):
    """Workers, groups and leases of the scheduler. Every method raises StoreUnavailableError."""

    async def put_worker(self, worker_id: WorkerId, info: bytes, ttl_s: float) -> None:
        """Stores a worker for `ttl_s` seconds; `info` is the caller's encoding."""
        ...

    async def list_workers(self) -> dict[WorkerId, bytes]:
        """Returns all workers that have not expired."""
        ...

    async def remove_worker(self, worker_id: WorkerId) -> None:
        """Removes a worker, if it is stored."""
        ...

    async def put_group(self, scenario: str, wish: bytes) -> None:
        """Stores the wanted state of a group; `wish` is the caller's encoding."""
        ...

    async def list_groups(self) -> dict[str, bytes]:
        """Returns the wanted states of all groups, by scenario."""
        ...

    async def remove_group(self, scenario: str) -> None:
        """Removes a group, if it is stored."""
        ...

    async def put_adapters(self, wishes: bytes) -> None:
        """Stores the wishes for LoRA adapters of all models; the caller's encoding."""
        ...

    async def adapters(self) -> bytes:
        """Returns the stored wishes for adapters; empty if there are none."""
        ...

    async def acquire_lease(self, name: str, owner: str, ttl_s: float) -> bool:
        """Takes a lease that is free or already the owner's, for `ttl_s` seconds from now."""
        ...

    async def release_lease(self, name: str, owner: str) -> None:
        """Releases a lease, if the owner holds it."""
        ...

    async def close(self) -> None:
        """Closes connections. May be called again."""
        ...
