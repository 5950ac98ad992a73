"""The log of a store: who follows it has in the end what the store has, whatever happened in
between. For both homes of `MetadataStore`.
"""

from __future__ import annotations

import random

import pytest

from kvmesh.core.slots import Publisher, Slot, SlotChange, SlotState
from kvmesh.metadata.store import MetadataStore
from kvmesh.policy.slot_index import SlotIndex
from tests.contract.metadata_homes import (
    EVERYTHING,
    NAMESPACE,
    Home,
    Redis,
    block,
    blocks,
    publisher,
)

WORKERS = ("a", "b", "c")
CHAIN = 12


class Follower:
    """An index that follows a store as schedulers do, a step at a time."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._position = ""
        self.index = SlotIndex()
        self.num_pictures = 0

    async def picture(self) -> None:
        """Begins anew, of a store that may change between the steps."""
        self.num_pictures += 1
        self.index = self.index.replacement()
        self._position = await self._store.position()
        for change in await self._store.slots():
            self.index.apply(change)
            cursor, is_first = 0, True
            while cursor or is_first:
                cursor, held = await self._store.held(change.slot, cursor)
                is_first = False
                self.index.apply(SlotChange(change.slot, stored=held))

    async def step(self) -> bool:
        """Takes some changes; False if there were none."""
        found = await self._store.changes_after(self._position, 0.001) if self._position else None
        if found is None:
            await self.picture()
            return True
        for change in found.changes:
            self.index.apply(change)
        self._position = found.position
        return bool(found.changes)

    async def catch_up(self) -> None:
        """Takes all."""
        while await self.step():
            pass


class Life:
    """One worker's publishing, with mistakes and restarts."""

    def __init__(self, home: Home, name: str, rng: random.Random) -> None:
        self.home, self.name, self.rng = home, name, rng
        self.incarnation, self.sequence = 1, 0
        self.slot: Slot | None = None
        self.loading: Slot | None = None
        self.length = 0

    @property
    def publisher(self) -> Publisher:
        return publisher(self.name, self.incarnation)

    async def act(self) -> None:
        """Does one of the things that happen to publishers; what is held is always a prefix."""
        store = self.home.store
        match self.rng.choice(["events"] * 6 + ["snapshot", "gap", "restart", "forget", "expire"]):
            case "events" if self.slot is not None:
                length = self.rng.randrange(CHAIN + 1)
                stored = blocks(*range(self.length, length))
                removed = blocks(*reversed(range(length, self.length)))
                self.sequence += 1
                await store.apply_events(self.slot, self.sequence, stored, removed)
                self.length = length
            case "gap" if self.slot is not None:
                await store.apply_events(self.slot, self.sequence + 5, blocks(*range(CHAIN)), b"")
            case "snapshot":
                loading = await store.begin_snapshot(self.publisher)
                self.length = self.rng.randrange(CHAIN + 1)
                cut = self.rng.randrange(self.length + 1)
                parts = blocks(*range(cut)), blocks(*range(cut, self.length))
                await store.apply_snapshot_part(loading, 40, parts[0], last=False)
                await store.apply_snapshot_part(loading, 40, parts[1], last=True)
                self.slot, self.sequence = loading, 40
            case "forget" if self.slot is not None:
                await store.forget(self.slot)
                await self._begin()
            case "expire" if self.slot is not None and isinstance(self.home, Redis):
                await self.home.expire(self.slot)
                await self._begin()
            case _:
                self.incarnation += 1
                await self._begin()

    async def _begin(self) -> None:
        registration = await self.home.store.register(self.publisher)
        self.slot, self.sequence, self.length = registration.slot, registration.sequence, 0


async def truth(store: MetadataStore) -> dict[str, dict[str, set[bytes]]]:
    """Of each live worker what it holds, by incarnation."""
    found: dict[str, dict[str, set[bytes]]] = {}
    for change in await store.slots():
        assert change.publisher is not None
        if change.state is SlotState.LIVE:
            _, held = await store.held(change.slot, 0)
            hashes = {held[at : at + 16] for at in range(0, len(held), 16)}
            found[change.publisher.worker_id] = {str(change.publisher.incarnation): hashes}
    return found


@pytest.mark.parametrize("seed", range(12))
async def test_a_follower_has_what_the_store_has(home: Home, seed: int) -> None:
    rng = random.Random(seed)
    store = home.store
    lives = [Life(home, name, rng) for name in WORKERS]
    follower = Follower(store)
    for _ in range(80):
        await rng.choice(lives).act()
        match rng.randrange(8):
            case 0:
                await follower.step()
            case 1:
                follower.index.sweep(rng.randrange(5))
            case 2:
                await store.sweep(3)
    await store.sweep(EVERYTHING)  # which ends slots whose lease is over
    await follower.catch_up()
    held = await truth(store)
    for life in lives:
        incarnation = next(iter(held.get(life.name, {"0": set()})))
        follower.index.note_life(life.publisher.worker_id, int(incarnation))
        known = follower.index.held(NAMESPACE, life.publisher.worker_id)
        assert known == held.get(life.name, {"0": set()})[incarnation]
    asked = [block(number) for number in range(CHAIN)]
    told = {
        each.worker_id: each.num_blocks for each in await store.match(NAMESPACE, b"".join(asked))
    }
    assert dict(follower.index.match(NAMESPACE, asked)) == told
    while follower.index.needs_sweep:
        follower.index.sweep(100)
    assert dict(follower.index.match(NAMESPACE, asked)) == told
    everything = set().union(*(hashes for each in held.values() for hashes in each.values()))
    loading = [each for each in await store.slots() if each.state is SlotState.LOADING]
    assert loading or follower.index.num_blocks == len(everything), "nothing is left of the dead"


async def test_a_picture_may_be_taken_while_the_store_changes(home: Home) -> None:
    store = home.store
    slot = (await store.register(publisher("a"))).slot
    await store.apply_events(slot, 1, blocks(*range(8)), b"")
    follower = Follower(store)
    # As if each of these came between two pages.
    position = await store.position()
    await store.apply_events(slot, 2, blocks(8), blocks(3))
    await follower.picture()
    follower._position = position
    await store.apply_events(slot, 3, blocks(3), blocks(0))
    await follower.catch_up()
    follower.index.note_life(publisher("a").worker_id, 1)
    assert follower.index.held(NAMESPACE, publisher("a").worker_id) == {
        block(number) for number in range(1, 9)
    }
    assert follower.num_pictures == 1


async def test_a_position_that_is_too_old_or_unknown_is_said(home: Home) -> None:
    store = home.store
    slot = (await store.register(publisher("a"))).slot
    position = await store.position()
    assert await store.changes_after("1-1", 0.001) is None
    for number in range(1, 9_000):
        await store.apply_events(slot, number, blocks(number % 7), b"")
    assert await store.changes_after(position, 0.001) is None
    found = await store.changes_after(await store.position(), 0.001)
    assert found is not None
    assert found.changes == ()
