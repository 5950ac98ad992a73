"""Block metadata in Redis: shared by all kvmanager replicas, rebuilt from the workers if lost.

It needs Redis or Valkey 6.2 or newer, a cluster too, with `maxmemory-policy noeviction`: a Redis
that evicts keys makes the index wrong unnoticed. Key layout: scripts.py.
Tests: tests/contract/test_metadata_store.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvmesh.core.slots import PrefixMatch, Publisher, Slot, SlotChange, SlotChanges, SlotState
from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash, WorkerId
from kvmesh.kv.hashing import split_hashes
from kvmesh.metadata import scripts
from kvmesh.metadata.redis_answers import strings_of, understanding
from kvmesh.metadata.redis_client import RedisClient, milliseconds
from kvmesh.metadata.store import ApplyResult, Registration, StoreStatistics

APPLY_SLICE_BLOCKS = 256
"""Maximum number of blocks changed by one script call, which blocks Redis for about 1 ms."""

RENEWED_AT_ONCE = 256
"""Maximum number of leases that one script call renews, for the same reason."""

HELD_PAGE_BLOCKS = 1024
"""Approximate number of blocks in a page of a slot's blocks."""

LOG_PAGE = 64
"""Maximum number of log entries read at once: at most 256 KiB."""


def _publisher(worker: bytes, incarnation: bytes, cluster: bytes, namespace: bytes) -> Publisher:
    return Publisher(
        WorkerId(worker.decode()), int(incarnation), cluster.decode(), namespace.decode()
    )


def _change(fields: list[bytes]) -> SlotChange:
    """Parses an entry of the log, which alternates names and values."""
    told = dict(zip(fields[::2], fields[1::2], strict=True))
    state = told.get(b"state")
    publisher = None
    if b"worker" in told:
        facts = (told[name] for name in (b"worker", b"incarnation", b"cluster", b"namespace"))
        publisher = _publisher(*facts)
    return SlotChange(
        Slot(told[b"slot"].decode()),
        publisher,
        None if state is None else SlotState(state.decode()),
        told.get(b"stored", b""),
        told.get(b"removed", b""),
    )


def apply_slices(stored: bytes, removed: bytes) -> Iterator[tuple[bytes, bytes, bool]]:
    """Yields a batch in slices (stored, removed, is the last); an empty batch is one slice."""
    step = APPLY_SLICE_BLOCKS * BLOCK_HASH_BYTES
    slices = [(stored[at : at + step], b"") for at in range(0, len(stored), step)]
    slices += [(b"", removed[at : at + step]) for at in range(0, len(removed), step)]
    slices = slices or [(b"", b"")]
    for number, (added, gone) in enumerate(slices, start=1):
        yield added, gone, number == len(slices)


class RedisMetadataStore:
    """A `MetadataStore` in Redis.

    Args:
        client: closed with the store.
        lease_s: seconds that a slot lives after its last renewal.
    """

    def __init__(self, client: RedisClient, lease_s: float) -> None:
        self._client = client
        self._lease_ms = milliseconds(lease_s)

    async def register(self, publisher: Publisher) -> Registration:
        """See `MetadataStore.register`."""
        answer = await self._open(scripts.REGISTER, publisher)
        with understanding():
            slot, sequence = answer
            return Registration(Slot(slot.decode()), int(sequence))

    async def begin_snapshot(self, publisher: Publisher) -> Slot:
        """See `MetadataStore.begin_snapshot`."""
        answer = await self._open(scripts.BEGIN_SNAPSHOT, publisher)
        with understanding():
            return Slot(answer.decode())

    async def _open(self, script: str, publisher: Publisher) -> Any:
        return await self._client.run(
            script,
            publisher.worker_id,
            publisher.incarnation,
            publisher.cluster,
            publisher.namespace,
            self._lease_ms,
        )

    async def apply_snapshot_part(
        self, slot: Slot, sequence: int, held: bytes, *, last: bool
    ) -> ApplyResult:
        """See `MetadataStore.apply_snapshot_part`."""
        for stored, _, final in apply_slices(held, b""):
            result = await self._client.ask(
                scripts.APPLY,
                slot,
                self._lease_ms,
                "0",
                sequence,
                "1" if last and final else "0",
                stored,
                b"",
            )
            if result != b"applied":
                break
        with understanding():
            return ApplyResult(result.decode())

    async def apply_events(
        self, slot: Slot, sequence: int, stored: bytes, removed: bytes
    ) -> ApplyResult:
        """See `MetadataStore.apply_events`.

        A large batch takes several calls. If one fails, the sequence number stays unchanged, so
        that the next batch is a GAP and a snapshot makes the index exact again.
        """
        for added, gone, final in apply_slices(stored, removed):
            result = await self._client.ask(
                scripts.APPLY,
                slot,
                self._lease_ms,
                "1",
                sequence,
                "1" if final else "0",
                added,
                gone,
            )
            if result != b"applied":
                break
        with understanding():
            return ApplyResult(result.decode())

    async def renew(self, known: Sequence[tuple[Slot, int]]) -> list[bool]:
        """See `MetadataStore.renew`."""
        found: list[bool] = []
        for start in range(0, len(known), RENEWED_AT_ONCE):
            words = [word for each in known[start : start + RENEWED_AT_ONCE] for word in each]
            told = await self._client.ask(scripts.RENEW, self._lease_ms, *words)
            with understanding():
                found += [int(each) > 0 for each in told]
        return found

    async def forget(self, slot: Slot) -> None:
        """See `MetadataStore.forget`."""
        await self._client.run(scripts.FORGET, slot)

    async def match(self, namespace: str, hashes: bytes) -> list[PrefixMatch]:
        """See `MetadataStore.match`."""
        found = await self._client.ask(scripts.MATCH, namespace, hashes)
        with understanding():
            matches = [
                PrefixMatch(
                    WorkerId(worker.decode()), int(incarnation), cluster.decode(), *map(int, counts)
                )
                for worker, incarnation, cluster, *counts in found
            ]
        return sorted(matches, key=lambda match: (-match.num_blocks, match.worker_id))

    async def holders(self, namespace: str, hashes: bytes) -> dict[WorkerId, set[BlockHash]]:
        """See `MetadataStore.holders`."""
        found: dict[WorkerId, set[BlockHash]] = {}
        step = APPLY_SLICE_BLOCKS * BLOCK_HASH_BYTES
        for start in range(0, len(hashes), step):
            joined = hashes[start : start + step]
            answer = await self._client.ask(scripts.HOLDERS, namespace, joined)
            names = split_hashes(joined)
            with understanding():
                for worker, held in answer:
                    pairs = zip(names, held, strict=True)
                    mine = {name for name, is_in in pairs if is_in == ord("1")}
                    found.setdefault(WorkerId(worker.decode()), set()).update(mine)
        return found

    async def sweep(self, max_blocks: int) -> int:
        """See `MetadataStore.sweep`.

        Each answer must end a slot or remove a block, so that a faulty Redis cannot cause an
        endless loop.
        """
        removed = 0
        for slot in strings_of(await self._client.run(scripts.DEAD_SLOTS)):
            done = False
            while not done and removed < max_blocks:
                count = min(APPLY_SLICE_BLOCKS, max_blocks - removed)
                answer = await self._client.run(scripts.SWEEP, slot, count)
                with understanding():
                    num_blocks, finished = answer
                    done = bool(finished)
                    if not (0 if done else 1) <= num_blocks <= count:
                        raise ValueError(f"{num_blocks} of at most {count} blocks swept")
                    removed += num_blocks
        return removed

    async def statistics(self) -> StoreStatistics:
        """See `MetadataStore.statistics`."""
        answer = await self._client.run(scripts.STATISTICS)
        with understanding():
            num_publishers, num_blocks = answer
            return StoreStatistics(int(num_publishers), int(num_blocks))

    async def position(self) -> str:
        """See `MetadataStore.position`."""
        with understanding():
            return str((await self._client.run(scripts.LOG_END)).decode())

    async def slots(self) -> list[SlotChange]:
        """See `MetadataStore.slots`."""
        found = await self._client.run(scripts.SLOTS)
        with understanding():
            return [
                SlotChange(
                    Slot(slot.decode()),
                    _publisher(*facts),
                    SlotState.LIVE if live == b"1" else SlotState.LOADING,
                )
                for slot, *facts, live in found
                if None not in facts
            ]

    async def held(self, slot: Slot, cursor: int) -> tuple[int, bytes]:
        """See `MetadataStore.held`."""
        answer = await self._client.ask(scripts.HELD, slot, cursor, HELD_PAGE_BLOCKS)
        with understanding():
            following, hashes = answer
            if len(hashes) % BLOCK_HASH_BYTES:
                raise ValueError(f"{len(hashes)} bytes of hashes")
            return int(following), bytes(hashes)

    async def changes_after(self, position: str, wait_s: float) -> SlotChanges | None:
        """See `MetadataStore.changes_after`."""
        found = await self._changes(position)
        if found is None or found.changes:
            return found
        await self._client.wait_for_entry("log", position, wait_s)
        return await self._changes(position)

    async def _changes(self, position: str) -> SlotChanges | None:
        answer = await self._client.ask(scripts.LOG_AFTER, position, LOG_PAGE)
        if answer is None:
            return None
        with understanding():
            changes = tuple(_change(fields) for _, fields in answer)
            return SlotChanges(str(answer[-1][0].decode()) if answer else position, changes)

    async def probe(self) -> None:
        """See `MetadataStore.probe`."""
        await self._client.run(scripts.PROBE)

    async def close(self) -> None:
        """See `MetadataStore.close`."""
        await self._client.close()
