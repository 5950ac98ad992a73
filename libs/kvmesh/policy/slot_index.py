"""In-memory index of the workers that hold each block, built from a store's change log; lookups
take microseconds.

A set of workers is one integer; blocks that arrived together share it. A lookup bisects the chain
of hashes. A block's hash covers all blocks before it, so a holder of a block normally holds those
too, and blocks between two with the same holders need no lookup. A worker that dropped blocks from
the middle of a prefix may be listed for them; it notices at its own lookup. Likewise a prefix's
start is assumed in the pool and its end below, because pools and tiers evict ends first.

Besides hashes the index holds the names of `core/block_names.py`. They say which tier has a block,
and where a prefix of a model with linear layers can resume.
Tests: tests/unit/policy/test_slot_index.py, tests/contract/test_store_log.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvmesh.core.block_names import (
    TELLS_STATES,
    TELLS_TIERS,
    cut_names,
    in_disk,
    in_host,
    saved_state,
)
from kvmesh.core.slots import Publisher, Slot, SlotChange, SlotState
from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.policy.holders import Holders, Levels

_Space = dict[BlockHash, int]


@dataclass(slots=True)
class _Slot:
    publisher: Publisher
    place: int
    is_live: bool = False


class Lives:
    """Current incarnation of each worker; an index and its replacement share it."""

    def __init__(self) -> None:
        self.of: dict[WorkerId, int] = {}


class SlotIndex:
    """Holders by block hash. Lookups find only workers whose published incarnation is current.

    Args:
        lives: current incarnations; only `note_life` writes them.
    """

    def __init__(self, lives: Lives | None = None) -> None:
        self._lives = Lives() if lives is None else lives
        self._spaces: dict[str, _Space] = {}
        self._slots: dict[Slot, _Slot] = {}
        self._slot_of: dict[WorkerId, Slot] = {}
        # A slot's place is its bit in the sets. A place is reused when no set has its bit any more.
        self._names: list[WorkerId] = []
        self._places: dict[WorkerId, int] = {}
        self._free: list[int] = []
        self._live = 0
        self._ended = 0
        self._emptying: Iterator[None] | None = None

    @property
    def num_blocks(self) -> int:
        """Number of known hashes, including those of ended slots until they are swept."""
        return sum(map(len, self._spaces.values()))

    @property
    def needs_sweep(self) -> bool:
        """Whether bits of ended slots are left in the sets."""
        return bool(self._ended) or self._emptying is not None

    def replacement(self) -> SlotIndex:
        """Returns an empty index that shares the workers' incarnations."""
        return SlotIndex(self._lives)

    def note_life(self, worker_id: WorkerId, incarnation: int | None) -> None:
        """Sets a worker's current incarnation; None: the worker is gone."""
        if incarnation is None:
            self._lives.of.pop(worker_id, None)
        else:
            self._lives.of[worker_id] = incarnation
        self._place(worker_id)

    def apply(self, change: SlotChange) -> None:
        """Applies the next change; ignores one of an unknown slot that does not open it."""
        slot = self._slots.get(change.slot)
        if slot is None:
            if change.publisher is None:
                return
            slot = self._open(change.slot, change.publisher)
        if change.state is SlotState.ENDED:
            self._end(change.slot)
            return
        bit = 1 << slot.place
        space = self._spaces.setdefault(slot.publisher.namespace, {})
        _add(space, change.stored, bit)
        _remove(space, change.removed, bit)
        if change.state is not None:
            self._set_live(change.slot, slot, is_live=change.state is SlotState.LIVE)

    def match(self, namespace: str, hashes: Sequence[BlockHash]) -> Holders:
        """Returns the number of leading blocks that each worker can resume from, without zeros."""
        space = self._spaces.get(namespace)
        if not space or not hashes:
            return Holders(self._names, self._places, [])
        get, live = space.get, self._live
        levels = levels_of(lambda at: get(hashes[at], 0), len(hashes), live)
        tellers = get(TELLS_STATES, 0) & live
        if tellers:
            levels = _resumable(lambda at: get(saved_state(hashes[at]), 0), levels, tellers)
        tellers = get(TELLS_TIERS, 0) & live
        if not (tellers and levels):
            return Holders(self._names, self._places, levels)

        def in_memory(at: int) -> int:
            return get(hashes[at], 0) & ~get(in_disk(hashes[at]), 0)

        def in_pool(at: int) -> int:
            return in_memory(at) & ~get(in_host(hashes[at]), 0)

        most = levels[0][0]
        return Holders(
            self._names,
            self._places,
            levels,
            levels_of(in_pool, most, live),
            levels_of(in_memory, most, live),
        )

    def held(self, namespace: str, worker_id: WorkerId) -> set[BlockHash]:
        """Returns all blocks that a worker holds; scans every hash."""
        place = self._places.get(worker_id)
        if place is None:
            return set()
        space = self._spaces.get(namespace, {})
        return {each for each, holders in space.items() if holders >> place & 1}

    def sweep(self, count: int) -> None:
        """Clears the bits of ended slots from about `count` hashes."""
        if self._emptying is None:
            self._emptying = self._empty()
        for _ in range(count):
            if next(self._emptying, self) is self:
                self._emptying = None
                return

    def _open(self, name: Slot, publisher: Publisher) -> _Slot:
        place = self._free.pop() if self._free else len(self._names)
        if place == len(self._names):
            self._names.append(publisher.worker_id)
        else:
            self._names[place] = publisher.worker_id
        slot = self._slots[name] = _Slot(publisher, place)
        return slot

    def _set_live(self, name: Slot, slot: _Slot, *, is_live: bool) -> None:
        worker_id = slot.publisher.worker_id
        slot.is_live = is_live
        if is_live:
            before = self._slot_of.get(worker_id)
            self._slot_of[worker_id] = name
            if before is not None and before != name:
                self._end(before)
        self._place(worker_id)

    def _end(self, name: Slot) -> None:
        slot = self._slots.pop(name)
        worker_id = slot.publisher.worker_id
        self._live &= ~(1 << slot.place)
        self._ended |= 1 << slot.place
        if self._slot_of.get(worker_id) == name:
            del self._slot_of[worker_id]
        self._place(worker_id)

    def _place(self, worker_id: WorkerId) -> None:
        """Lets lookups find the worker's live slot if it is of the current incarnation."""
        before = self._places.pop(worker_id, None)
        if before is not None:
            self._live &= ~(1 << before)
        name = self._slot_of.get(worker_id)
        slot = None if name is None else self._slots[name]
        if slot is None or not slot.is_live:
            return
        if self._lives.of.get(worker_id) == slot.publisher.incarnation:
            self._places[worker_id] = slot.place
            self._live |= 1 << slot.place

    def _empty(self) -> Iterator[None]:
        """Clears the bits of ended slots, one hash per step, and then frees their places."""
        gone, self._ended = self._ended, 0
        for namespace, space in list(self._spaces.items()):
            for block_hash in list(space):
                yield
                _clear(space, block_hash, gone)
            if not space:
                del self._spaces[namespace]
        self._free += (place for place in range(gone.bit_length()) if gone >> place & 1)


def levels_of(look: Callable[[int], int], count: int, live: int) -> Levels:
    """Returns, for each number of leading blocks up to `count`, the workers that hold as many.

    Args:
        look: returns the bit set of workers that hold the block at an index.
        live: bit set of the workers that count.
    """
    found: Levels = []
    last = count - 1
    low, left = 0, look(0) & live
    # Indexes further on that were looked up, with their holders; the nearest is last.
    ahead = [(last, look(last))]
    while left and low < last:
        high, holders = ahead[-1]
        stay = left & holders
        if stay == left:
            low = high
            ahead.pop()
        elif high == low + 1:
            found.append((high, left ^ stay))
            low, left = high, stay
            ahead.pop()
        else:
            middle = (low + high) // 2
            ahead.append((middle, look(middle)))
    if left:
        found.append((last + 1, left))
    found.reverse()
    return found


def _resumable(look: Callable[[int], int], levels: Levels, tellers: int) -> Levels:
    """Shortens the prefix of each worker in `tellers` to its last saved state.

    Scans every block: where a worker saved states depends on prompts that are not known here.

    Args:
        look: returns the bit set of workers with a saved state after the block at an index.
        tellers: bit set of the workers that publish saved states.
    """
    cut: Levels = []
    open_below, upcoming = 0, list(reversed(levels))
    at = levels[0][0] if levels else 0
    while at and (open_below or upcoming):
        if upcoming and upcoming[-1][0] == at:
            _, workers = upcoming.pop()
            others = workers & ~tellers
            if others:
                cut.append((at, others))
            open_below |= workers & tellers
        if open_below and (saved := open_below & look(at - 1)):
            cut.append((at, saved))
            open_below ^= saved
        at -= 1
    return cut


def _add(space: _Space, joined: bytes, bit: int) -> None:
    # Blocks that arrive together mostly have equal holders, so they share one integer again.
    before, after = 0, bit
    get = space.get
    for block_hash in cut_names(joined):
        holders = get(block_hash, 0)
        if holders is not before:
            before, after = holders, holders | bit
        space[block_hash] = after


def _remove(space: _Space, joined: bytes, bit: int) -> None:
    before, after = 0, 0
    for block_hash in cut_names(joined):
        holders = space.get(block_hash, 0)
        if holders is not before:
            before, after = holders, holders & ~bit
        if after:
            space[block_hash] = after
        else:
            space.pop(block_hash, None)


def _clear(space: _Space, block_hash: BlockHash, gone: int) -> None:
    holders = space.get(block_hash, 0)
    if holders & gone:
        left = holders & ~gone
        if left:
            space[block_hash] = left
        else:
            del space[block_hash]
