"""Control-plane state in this process's memory: for one replica without Redis, and for tests.

Nothing survives the process; workers rebuild it. Tests: tests/contract/test_metadata_store.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvmesh.core.block_names import TELLS_STATES, TELLS_TIERS, in_disk, in_host, saved_state
from kvmesh.core.clock import Clock
from kvmesh.core.slots import (
    SLOT_WIDTH,
    PrefixMatch,
    Publisher,
    Slot,
    SlotChange,
    SlotChanges,
    SlotState,
)
from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.kv.hashing import split_hashes
from kvmesh.metadata.store import ApplyResult, Registration, StoreStatistics

LOG_LENGTH = 1024
"""Number of changes kept for followers; a follower further behind takes a new snapshot."""


@dataclass(slots=True)
class _SlotRecord:
    publisher: Publisher
    lease_end: float
    live: bool
    sequence: int = 0
    held: set[BlockHash] = field(default_factory=set)
    told_end: bool = False


def _match_of(record: _SlotRecord, hashes: bytes, length: int) -> PrefixMatch:
    """Returns the match of one slot that holds `length` leading blocks: states, tiers counted."""
    held, publisher, found = record.held, record.publisher, split_hashes(hashes)[:length]
    if TELLS_STATES in held:
        saved = (end for end in range(length, 0, -1) if saved_state(found[end - 1]) in held)
        length = next(saved, 0)
    lower = [0, 0]
    if TELLS_TIERS in held:
        lower = [sum(name(each) in held for each in found[:length]) for name in (in_host, in_disk)]
    whose = publisher.worker_id, publisher.incarnation, publisher.cluster
    return PrefixMatch(*whose, length, *lower)


class MemoryMetadataStore:
    """A `MetadataStore` in memory.

    Args:
        lease_s: seconds that a slot lives after its last renewal.
    """

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._next_slot = 1
        self._slots: dict[Slot, _SlotRecord] = {}
        self._slot_of: dict[WorkerId, Slot] = {}
        self._index: dict[tuple[str, BlockHash], set[Slot]] = {}
        # The last changes. Positions carry the log's name: those of another store are not valid.
        self._log: deque[SlotChange] = deque(maxlen=LOG_LENGTH)
        self._log_name = uuid.uuid4().hex
        self._num_logged = 0
        self._logged = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether the store is empty."""
        return not (self._slots or self._slot_of or self._index)

    async def register(self, publisher: Publisher) -> Registration:
        """See `MetadataStore.register`."""
        slot = self._slot_of.get(publisher.worker_id)
        record = self._alive(slot) if slot is not None else None
        if slot is not None and record is not None and record.publisher == publisher:
            record.lease_end = self._lease_end()
            return Registration(slot, record.sequence)
        slot = self._open(publisher, live=True)
        self._promote(slot)
        return Registration(slot, 0)

    async def begin_snapshot(self, publisher: Publisher) -> Slot:
        """See `MetadataStore.begin_snapshot`."""
        return self._open(publisher, live=False)

    async def apply_snapshot_part(
        self, slot: Slot, sequence: int, held: bytes, *, last: bool
    ) -> ApplyResult:
        """See `MetadataStore.apply_snapshot_part`."""
        record = self._alive(slot)
        if record is None or record.live:
            return ApplyResult.UNKNOWN
        self._add(slot, record, held)
        self._note(SlotChange(slot, stored=held))
        record.lease_end = self._lease_end()
        if last:
            record.live = True
            record.sequence = sequence
            self._note(SlotChange(slot, state=SlotState.LIVE))
            self._promote(slot)
        return ApplyResult.APPLIED

    async def apply_events(
        self, slot: Slot, sequence: int, stored: bytes, removed: bytes
    ) -> ApplyResult:
        """See `MetadataStore.apply_events`."""
        record = self._alive(slot)
        if record is None or not record.live:
            return ApplyResult.UNKNOWN
        if sequence != record.sequence + 1:
            return ApplyResult.GAP
        self._add(slot, record, stored)
        for block_hash in split_hashes(removed):
            if block_hash in record.held:
                self._remove(slot, record, block_hash)
        self._note(SlotChange(slot, stored=stored, removed=removed))
        record.sequence = sequence
        record.lease_end = self._lease_end()
        return ApplyResult.APPLIED

    async def renew(self, known: Sequence[tuple[Slot, int]]) -> list[bool]:
        """See `MetadataStore.renew`."""
        return [self._renew(slot, sequence) for slot, sequence in known]

    def _renew(self, slot: Slot, sequence: int) -> bool:
        record = self._alive(slot)
        if record is None or not record.live or record.sequence != sequence:
            return False
        record.lease_end = self._lease_end()
        return True

    async def forget(self, slot: Slot) -> None:
        """See `MetadataStore.forget`."""
        self._end(slot)

    async def match(self, namespace: str, hashes: bytes) -> list[PrefixMatch]:
        """See `MetadataStore.match`."""
        lengths: dict[Slot, int] = {}
        active: set[Slot] | None = None
        for position, block_hash in enumerate(split_hashes(hashes)):
            holders = self._index.get((namespace, block_hash), set())
            active = holders.copy() if active is None else active & holders
            if not active:
                break
            lengths.update(dict.fromkeys(active, position + 1))
        matches = [
            match
            for slot, length in lengths.items()
            if (record := self._alive(slot)) is not None and record.live
            if (match := _match_of(record, hashes, length)).num_blocks
        ]
        return sorted(matches, key=lambda match: (-match.num_blocks, match.worker_id))

    async def holders(self, namespace: str, hashes: bytes) -> dict[WorkerId, set[BlockHash]]:
        """See `MetadataStore.holders`."""
        found: dict[WorkerId, set[BlockHash]] = {}
        for block_hash in split_hashes(hashes):
            for slot in self._index.get((namespace, block_hash), ()):
                record = self._alive(slot)
                if record is not None and record.live:
                    found.setdefault(record.publisher.worker_id, set()).add(block_hash)
        return found

    async def sweep(self, max_blocks: int) -> int:
        """See `MetadataStore.sweep`."""
        removed = 0
        for slot, record in list(self._slots.items()):
            if self._alive(slot) is not None:
                continue
            self._end(slot)
            while record.held and removed < max_blocks:
                self._remove(slot, record, next(iter(record.held)))
                removed += 1
            if record.held:
                break
            del self._slots[slot]
            if self._slot_of.get(record.publisher.worker_id) == slot:
                del self._slot_of[record.publisher.worker_id]
        return removed

    async def statistics(self) -> StoreStatistics:
        """See `MetadataStore.statistics`."""
        live = [
            record
            for slot, record in self._slots.items()
            if record.live and self._alive(slot) is not None
        ]
        return StoreStatistics(len(live), sum(len(record.held) for record in live))

    async def position(self) -> str:
        """See `MetadataStore.position`."""
        return f"{self._log_name}-{self._num_logged}"

    async def slots(self) -> list[SlotChange]:
        """See `MetadataStore.slots`."""
        return [
            SlotChange(slot, record.publisher, SlotState.LIVE if record.live else SlotState.LOADING)
            for slot, record in self._slots.items()
            if self._alive(slot) is not None
        ]

    async def held(self, slot: Slot, cursor: int) -> tuple[int, bytes]:
        """See `MetadataStore.held`."""
        record = self._slots.get(slot)
        return 0, b"" if record is None else b"".join(record.held)

    async def changes_after(self, position: str, wait_s: float) -> SlotChanges | None:
        """See `MetadataStore.changes_after`."""
        name, _, number = position.partition("-")
        if name != self._log_name:
            return None
        at = int(number)
        if at == self._num_logged:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._logged.wait()
        first = self._num_logged - len(self._log)
        if at < first:
            return None
        changes = tuple(islice(self._log, at - first, None))
        return SlotChanges(await self.position(), changes)

    async def probe(self) -> None:
        """See `MetadataStore.probe`."""

    async def close(self) -> None:
        """See `MetadataStore.close`."""

    def _note(self, change: SlotChange) -> None:
        self._log.append(change)
        self._num_logged += 1
        self._logged.set()
        self._logged = asyncio.Event()

    def _lease_end(self) -> float:
        return self._clock.now() + self._lease_s

    def _alive(self, slot: Slot) -> _SlotRecord | None:
        record = self._slots.get(slot)
        return record if record is not None and self._clock.now() < record.lease_end else None

    def _open(self, publisher: Publisher, *, live: bool) -> Slot:
        slot = Slot(f"{self._next_slot:0{SLOT_WIDTH}x}")
        self._next_slot += 1
        self._slots[slot] = _SlotRecord(publisher, self._lease_end(), live)
        state = SlotState.LIVE if live else SlotState.LOADING
        self._note(SlotChange(slot, publisher, state))
        return slot

    def _promote(self, slot: Slot) -> None:
        worker_id = self._slots[slot].publisher.worker_id
        before = self._slot_of.get(worker_id)
        if before is not None and before != slot:
            self._end(before)
        self._slot_of[worker_id] = slot

    def _end(self, slot: Slot) -> None:
        record = self._slots.get(slot)
        if record is None:
            return
        record.lease_end = float("-inf")
        if not record.told_end:
            record.told_end = True
            self._note(SlotChange(slot, state=SlotState.ENDED))

    def _add(self, slot: Slot, record: _SlotRecord, hashes: bytes) -> None:
        for block_hash in split_hashes(hashes):
            record.held.add(block_hash)
            self._index.setdefault((record.publisher.namespace, block_hash), set()).add(slot)

    def _remove(self, slot: Slot, record: _SlotRecord, block_hash: BlockHash) -> None:
        record.held.discard(block_hash)
        key = (record.publisher.namespace, block_hash)
        self._index[key].discard(slot)
        if not self._index[key]:
            del self._index[key]


class MemoryFleetStore:
    """A `FleetStore` in memory."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._workers: dict[WorkerId, tuple[bytes, float]] = {}
        self._groups: dict[str, bytes] = {}
        self._adapters = b""
        self._leases: dict[str, tuple[str, float]] = {}

    async def put_worker(self, worker_id: WorkerId, info: bytes, ttl_s: float) -> None:
        """See `FleetStore.put_worker`."""
        self._workers[worker_id] = (info, self._clock.now() + ttl_s)

    async def list_workers(self) -> dict[WorkerId, bytes]:
        """See `FleetStore.list_workers`."""
        now = self._clock.now()
        self._workers = {key: kept for key, kept in self._workers.items() if now < kept[1]}
        return {worker_id: info for worker_id, (info, _) in self._workers.items()}

    async def remove_worker(self, worker_id: WorkerId) -> None:
        """See `FleetStore.remove_worker`."""
        self._workers.pop(worker_id, None)

    async def put_group(self, scenario: str, wish: bytes) -> None:
        """See `FleetStore.put_group`."""
        self._groups[scenario] = wish

    async def list_groups(self) -> dict[str, bytes]:
        """See `FleetStore.list_groups`."""
        return dict(self._groups)

    async def remove_group(self, scenario: str) -> None:
        """See `FleetStore.remove_group`."""
        self._groups.pop(scenario, None)

    async def put_adapters(self, wishes: bytes) -> None:
        """See `FleetStore.put_adapters`."""
        self._adapters = wishes

    async def adapters(self) -> bytes:
        """See `FleetStore.adapters`."""
        return self._adapters

    async def acquire_lease(self, name: str, owner: str, ttl_s: float) -> bool:
        """See `FleetStore.acquire_lease`."""
        if self._holder(name) not in (None, owner):
            return False
        self._leases[name] = (owner, self._clock.now() + ttl_s)
        return True

    async def release_lease(self, name: str, owner: str) -> None:
        """See `FleetStore.release_lease`."""
        if self._holder(name) == owner:
            del self._leases[name]

    async def close(self) -> None:
        """See `FleetStore.close`."""

    def _holder(self, name: str) -> str | None:
        owner, end = self._leases.get(name, (None, float("-inf")))
        return owner if self._clock.now() < end else None
