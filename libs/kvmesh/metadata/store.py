"""The contracts of durable control-plane state: where blocks are, and which workers there are.

`MetadataStore` belongs to the kvmanager, `FleetStore` to the scheduler. Both have a Redis home
(`redis_store.py`, `redis_fleet.py`) and an in-memory twin (`memory_store.py`).
Tests: tests/contract/test_metadata_store.py runs against all of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from kvmesh.core.errors import KvMeshError
from kvmesh.core.slots import PrefixMatch, Publisher, Slot, SlotChange, SlotChanges
from kvmesh.core.types import WorkerId


class StoreUnavailableError(KvMeshError):
    """The store did not answer in time or refused; the change may or may not have happened."""

    grpc_status = "UNAVAILABLE"
    retry_safe = True


class ApplyResult(enum.Enum):
    """What became of a batch of block events or a part of a snapshot."""

    APPLIED = "applied"
    GAP = "gap"
    """A batch before it is missing; nothing was changed."""
    UNKNOWN = "unknown"
    """The slot's lease is over or the store lost its memory; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A publisher's slot and the sequence number of the last batch applied to it."""

    slot: Slot
    sequence: int


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Live publishers, and the names that hold of their blocks; one of two publishers is two."""

    num_publishers: int
    num_blocks: int


class MetadataStore(Protocol):
    """Which worker holds which blocks.

    A slot is `live` (lookups see it, events change it) or `loading` (a snapshot is coming in). A
    slot whose lease ended is neither: lookups stop seeing it at once, `sweep` removes the rest.
    Hashes and the other names that hold of blocks (`core/block_names.py`) travel joined, 16 bytes
    each; the caller has checked the length. Only `match` looks at what a name means. Every method
    raises StoreUnavailableError.
    """

    async def register(self, publisher: Publisher) -> Registration:
        """Opens or reopens the live slot of a publisher.

        The same incarnation with a lease gets the slot it had. Otherwise the slot is new, empty
        and at sequence 0, and a slot of an earlier life ends.
        """
        ...

    async def begin_snapshot(self, publisher: Publisher) -> Slot:
        """Opens a loading slot beside the live one, which lookups go on using."""
        ...

    async def apply_snapshot_part(
        self, slot: Slot, sequence: int, held: bytes, *, last: bool
    ) -> ApplyResult:
        """Adds blocks to a loading slot and renews its lease.

        The last part makes it live at `sequence` and ends the worker's slot before it, in one
        step.
        """
        ...

    async def apply_events(
        self, slot: Slot, sequence: int, stored: bytes, removed: bytes
    ) -> ApplyResult:
        """Applies a batch, `stored` first, to a live slot and renews its lease.

        A GAP unless `sequence` is one more than that of the batch before.
        """
        ...

    async def renew(self, slot: Slot, sequence: int) -> bool:
        """Renews the lease of a live slot; False if it has none or is at another sequence."""
        ...

    async def forget(self, slot: Slot) -> None:
        """Ends a slot's lease now."""
        ...

    async def match(self, namespace: str, hashes: bytes) -> list[PrefixMatch]:
        """What live workers can resume from, at least one leading block; longest first.

        Of many workers a store may leave out those that seem to hold less than others.
        """
        ...

    async def sweep(self, max_blocks: int) -> int:
        """Removes at most about `max_blocks` entries of slots without a lease; how many it did.

        Slots that ended without a word are ended in the log, too.
        """
        ...

    # Who follows the store takes `position`, then a picture of it (`slots`, of each its `held`),
    # then `changes_after` that position. The picture may be of any moment since: the changes are
    # of sets, so whoever takes them in order has in the end what the store has.

    async def position(self) -> str:
        """Where the log ends now."""
        ...

    async def slots(self) -> list[SlotChange]:
        """All slots with a lease, without what they hold."""
        ...

    async def held(self, slot: Slot, cursor: int) -> tuple[int, bytes]:
        """A page of what a slot holds, joined, and the cursor of the next page; 0 begins and ends.

        A block may come twice.
        """
        ...

    async def changes_after(self, position: str, wait_s: float) -> SlotChanges | None:
        """What happened next, or nothing if that takes longer than about `wait_s`.

        None if the log does not know the position: it is too old, or of a store that has lost its
        memory.
        """
        ...

    async def statistics(self) -> StoreStatistics:
        """Counts, for metrics."""
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
        """Remembers a worker for `ttl_s` seconds; `info` is the caller's encoding."""
        ...

    async def list_workers(self) -> dict[WorkerId, bytes]:
        """All workers whose time is not over."""
        ...

    async def remove_worker(self, worker_id: WorkerId) -> None:
        """Forgets a worker; nothing happens if it is unknown."""
        ...

    async def put_group(self, scenario: str, wish: bytes) -> None:
        """Remembers what a group is to be; `wish` is the caller's encoding."""
        ...

    async def list_groups(self) -> dict[str, bytes]:
        """All groups that were wished for, by scenario."""
        ...

    async def remove_group(self, scenario: str) -> None:
        """Forgets a group; nothing happens if it is unknown."""
        ...

    async def acquire_lease(self, name: str, owner: str, ttl_s: float) -> bool:
        """Takes a lease that is free or already the owner's, for `ttl_s` seconds from now."""
        ...

    async def release_lease(self, name: str, owner: str) -> None:
        """Gives a lease back; nothing happens if the owner does not hold it."""
        ...

    async def close(self) -> None:
        """Closes connections. May be called again."""
        ...
