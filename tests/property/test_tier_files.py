"""The tiers with their bytes, in any order of prompts, copies, loads, faults and crashes.

The pool, the copies in host memory and in a real file, and the index of the scheduler are those of
a worker; only time and threads are the test's. After every step each block that can be found has
its own KV, and after every publication the index finds what is here, in the tier where it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmesh.core.block_names import DISK, HOST, IN_TIER, TELLS_TIERS
from kvmesh.core.clock import ManualClock
from kvmesh.core.slots import Publisher, Slot, SlotChange, SlotState
from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.engine import disk_store
from kvmesh.engine.block_file import BlockFile
from kvmesh.engine.core import EngineCore
from kvmesh.engine.disk_store import NUM_PIECES, DiskStore
from kvmesh.engine.fake import FakeRunner
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.tier_stores import HostStore
from kvmesh.engine.tiered_cache import LoadResult, TieredCache
from kvmesh.kv.tiers import Copy, Tier
from kvmesh.policy.prompt_time import PromptTime
from kvmesh.policy.slot_index import SlotIndex
from tests.late_copier import LateCopier, LateTimers

NUM_BLOCKS, HOST_PLACES, DISK_PLACES, PIECE_BLOCKS = 7, 3, 6, 2
WORKER, SPACE = WorkerId("w"), "model"


def _key(*path: int) -> BlockHash:
    return BlockHash(bytes((*path, *range(100, 116 - len(path)))))


CHAINS = [[_key(1), *(_key(1, chain, depth) for depth in range(4))] for chain in range(4)]
"""Prompts with one first block in common."""

KEYS = list(dict.fromkeys(key for chain in CHAINS for key in chain))


class KilledError(Exception):
    """The process ends here."""


class FaultyFile(BlockFile):
    """A file whose writes may fail, or end with the process.

    Attributes:
        fails_at: which of the three calls of a write fails: records cleared, blocks, records.
        dies_at: the same, but the process dies in it.
        spoilt: places with another byte than was written.
        read_bad: places of which a read said so.
    """

    fails_at: int | None = None
    dies_at: int | None = None
    spoilt: set[int]
    read_bad: set[int]
    _call = 0

    def write(self, copies: Sequence[Copy], blocks: Sequence[memoryview]) -> list[bool]:
        self._call = 0
        good = super().write(copies, blocks)
        if all(good):
            self.spoilt.difference_update(copy.place for copy in copies)
            self.read_bad.difference_update(copy.place for copy in copies)
        return good

    def read(self, places: Sequence[int], blocks: Sequence[memoryview]) -> list[bool]:
        good = super().read(places, blocks)
        self.read_bad.update(
            place for place, is_good in zip(places, good, strict=True) if not is_good
        )
        return good

    def _write_records(self, places: Any, records: Any) -> None:
        if self.fails_at == self._call:
            self._records[places] = records
        self._may_fail()
        super()._write_records(places, records)

    def _write_blocks(self, places: Sequence[int], blocks: Sequence[memoryview]) -> None:
        if self._call in (self.fails_at, self.dies_at):
            half = bytes(blocks[0][: self._block_bytes // 2])
            os.pwrite(self._fd, half, self._first + places[0] * self._block_bytes)
        self._may_fail()
        super()._write_blocks(places, blocks)

    def _may_fail(self) -> None:
        if self.dies_at == self._call:
            raise KilledError
        if self.fails_at == self._call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._call += 1


class TierFileMachine(RuleBasedStateMachine):
    """One worker with host memory and a file, over several lives."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.timers = LateTimers()
        loop = SimpleNamespace(get_running_loop=lambda: self.timers)
        self.patches = patch.object(disk_store, "asyncio", loop)
        self.patches.start()
        self.index = SlotIndex()
        self.life = 0
        self.spoilt: set[int] = set()
        self.begin_life()

    def begin_life(self) -> None:
        """A process starts and tells the index what it found."""
        self.life += 1
        self.runner = FakeRunner(num_blocks=NUM_BLOCKS)
        self.core = EngineCore(self.runner.spec, NUM_BLOCKS, growth_tokens=0)
        self.pool = self.core.pool
        self.size = self.runner.spec.layout.block_bytes
        passage = range(HOST_PLACES, HOST_PLACES + NUM_PIECES * PIECE_BLOCKS)
        self.arena = HostArena(self.runner.kv, self.size, passage.stop)
        self.file = FaultyFile(self.folder / "w.kv", SPACE, self.size, DISK_PLACES)
        self.file.spoilt, self.file.read_bad = self.spoilt, set()
        self.copier, self.disk = LateCopier(), LateCopier()
        store = DiskStore(self.file, self.arena, passage, self.copier, self.disk)
        host, disk = Tier(HOST, HOST_PLACES), Tier(DISK, DISK_PLACES)
        disk.adopt(self.file.kept())
        self.tiers = TieredCache(
            *(self.pool, self.core.fills, [host, disk]),
            [HostStore(self.arena, self.copier), store],
            *(PromptTime(64), ManualClock(), store),
        )
        self.sequences: list[list[tuple[int, BlockHash]]] = []
        self.num_loading = 0
        self.slot = Slot(f"{self.life:014d}")
        self.index.note_life(WORKER, self.life)
        publisher = Publisher(WORKER, self.life, "east", SPACE)
        self.index.apply(SlotChange(self.slot, publisher, SlotState.LOADING))
        assert self.found(KEYS[:1]) == (0, 0, 0), "of the last life nothing is found"
        self.publish()
        self.index.apply(SlotChange(self.slot, state=SlotState.LIVE))
        self.index_is_true()

    # --- prompts -------------------------------------------------------------------------------

    @initialize()
    def fill(self) -> None:
        """Pool and tiers are full, so whatever comes evicts."""
        for chain in CHAINS:
            self.compute(chain, len(chain), ends=True)
            self.catch_up()

    @rule(chain=st.sampled_from(CHAINS), length=st.integers(1, 5), ends=st.booleans())
    def compute(self, chain: list[BlockHash], length: int, ends: bool) -> None:
        keys = chain[:length]
        cached = self.pool.match(keys)
        self.pool.acquire(cached)
        missing = len(keys) - len(cached)
        if missing > self.pool.num_free:
            self.pool.release(cached)
            return
        blocks = [*cached, *self.pool.allocate(missing)]
        for block, key in list(zip(blocks, keys, strict=True))[len(cached) :]:
            self.runner.kv.write_view(block, 1)[:] = self.content(key)
            self.pool.seal(block, key)
        if ends:
            self.pool.release(blocks)
        else:
            self.sequences.append(list(zip(blocks, keys, strict=True)))

    @rule(chains=st.lists(st.sampled_from(CHAINS), min_size=2, max_size=3))
    def compute_many(self, chains: list[list[BlockHash]]) -> None:
        """More than the pool holds, and nothing is copied meanwhile."""
        for chain in chains:
            self.compute(chain, len(chain), ends=True)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end_sequence(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self.pool.release([block for block, _ in self.sequences.pop(index)])

    @precondition(lambda self: len(self.tiers.below[1]) > 0)
    @rule(data=st.data(), spoils=st.booleans(), stalls=st.booleans())
    def load_from_disk(self, data: st.DataObject, spoils: bool, stalls: bool) -> None:
        """A prompt whose end lies on disk only, perhaps with another byte than was written."""
        key = data.draw(st.sampled_from(list(self.tiers.below[1])))
        self.pool.clear_cached()
        if spoils and not self.disk.jobs:
            self.spoil(self.place(key), 0, record=False)
        chain = next(each for each in CHAINS if key in each)
        self.load(chain, chain.index(key) + 1)
        self.disk.catch_up()
        if stalls and self.timers.waiting:
            self.stall()  # what was read is on its way into the pool

    @rule(chain=st.sampled_from(CHAINS), length=st.integers(1, 5))
    def load(self, chain: list[BlockHash], length: int) -> None:
        keys = chain[:length]
        fill = self.core.fills.begin(keys)
        before = fill.num_held
        self.num_loading += 1

        def done(result: LoadResult) -> None:
            self.num_loading -= 1
            assert before <= result.num_blocks <= length

        self.tiers.load(fill, done)

    @rule(num=st.integers(1, 4))
    def clear_cached(self, num: int) -> None:
        self.pool.clear_cached(num)

    @rule(chain=st.sampled_from(CHAINS))
    def hint(self, chain: list[BlockHash]) -> None:
        self.pool.evict_first(chain)
        self.tiers.below.evict_first(chain)

    # --- copies and the disk -------------------------------------------------------------------

    @precondition(lambda self: self.copier.jobs)
    @rule()
    def copy(self) -> None:
        self.copier.run_one()

    @precondition(lambda self: self.disk.jobs)
    @rule()
    def use_disk(self) -> None:
        self.disk.run_one()

    @rule()
    def catch_up(self) -> None:
        while self.copier.jobs or self.disk.jobs:
            self.copier.catch_up()
            self.disk.catch_up()

    @precondition(lambda self: self.timers.waiting)
    @rule()
    def stall(self) -> None:
        """A load had no progress for too long; the disk may answer later."""
        self.timers.go_off()

    @rule(call=st.none() | st.integers(0, 2))
    def fill_disk(self, call: int | None) -> None:
        """From now on this call of each write fails; None: the disk has room again."""
        self.file.fails_at = call

    @rule(place=st.integers(0, DISK_PLACES - 1), at=st.integers(0, 1 << 20), record=st.booleans())
    def spoil(self, place: int, at: int, record: bool) -> None:
        """A byte of a block, or of a record, turns into another one."""
        if record:
            at = 4096 + place * 64 + at % 64
        else:
            at = self.file._first + place * self.size + at % self.size
        (byte,) = os.pread(self.file._fd, 1, at)
        os.pwrite(self.file._fd, bytes([byte ^ 255]), at)
        self.spoilt.add(place)

    @rule(call=st.none() | st.integers(0, 3))
    def crash(self, call: int | None) -> None:
        """The process dies: between two writes, or in this call of one."""
        disk = self.tiers.below[1]
        if call is not None and self.disk.jobs:
            self.file.dies_at = call
            use_disk, _ = self.disk.jobs[0]
            with contextlib.suppress(KilledError):
                use_disk()
        whole = {key for key in disk if self.place(key) not in self.spoilt}
        self.file.close()
        self.timers.waiting.clear()
        self.begin_life()
        found = set(self.tiers.below[1])
        assert whole <= found, "a copy that was whole is not found"

    # --- what is true --------------------------------------------------------------------------

    @rule()
    def publish(self) -> None:
        events = self.pool.take_events()
        stored, removed = b"".join(events.stored), b"".join(events.removed)
        self.index.apply(SlotChange(self.slot, stored=stored, removed=removed))

    @rule()
    def publish_and_compare(self) -> None:
        self.publish()
        self.index_is_true()

    def index_is_true(self) -> None:
        """What the index tells of each block is where the block is."""
        names = {TELLS_TIERS}
        for key in KEYS:
            tier = None if self.pool.find(key) is not None else self.tier_with(key)
            is_here = tier is not None or self.pool.find(key) is not None
            assert self.found([key]) == (is_here, tier == HOST, tier == DISK)
            names |= ({key} if is_here else set()) | ({IN_TIER[tier](key)} if tier else set())
        assert self.index.held(SPACE, WORKER) == names

    def found(self, keys: Sequence[BlockHash]) -> tuple[int, int, int]:
        holders = self.index.match(SPACE, keys)
        lower = holders.lower([WORKER])
        host, disk = (0, 0) if lower is None else lower[0]
        return holders.get(WORKER, 0), host, disk

    def tier_with(self, key: BlockHash) -> str | None:
        """The fastest tier whose memory or file has this block, by its bytes."""
        for name, tier, read in ((HOST, 0, self.host_bytes), (DISK, 1, self.disk_bytes)):
            if key in self.tiers.below[tier]:
                if name == HOST or self.place(key) not in self.spoilt:
                    assert read(key) == self.content(key), f"{name} has another block"
                return name
        return None

    def place(self, key: BlockHash, level: int = 1) -> int:
        tier = self.tiers.below[level]
        copy = tier.begin_read(key)
        tier.end_read(copy, is_good=True)
        return copy.place

    def host_bytes(self, key: BlockHash) -> bytes:
        return bytes(self.arena.views([self.place(key, 0)])[0])

    def disk_bytes(self, key: BlockHash) -> bytes:
        return os.pread(self.file._fd, self.size, self.file._first + self.place(key) * self.size)

    def content(self, key: BlockHash) -> bytes:
        return (bytes(key) * self.size)[: self.size]

    @invariant()
    def records_and_bytes_agree(self) -> None:
        self.pool.check_integrity()
        self.tiers.check_integrity()
        for key in KEYS:
            self.tier_with(key)
            block = self.pool.find(key)
            if block is not None:
                assert bytes(self.runner.kv.read_view(block, 1)) == self.content(key)
        if not self.num_loading:
            kept = {self.place(key) for key in self.tiers.below[1]}
            assert not kept & self.file.read_bad, "a copy that is known to be bad is kept"
        owners = [0] * NUM_BLOCKS
        for sequence in self.sequences:
            for block, key in sequence:
                owners[block] += 1
                assert bytes(self.runner.kv.read_view(block, 1)) == self.content(key)
        for block, count in enumerate(owners):
            assert self.pool._references[block] >= count, "a block has another owner"
            if not self.num_loading:
                assert self.pool._references[block] == count, "a block without an owner is held"

    def teardown(self) -> None:
        try:
            for sequence in self.sequences:
                self.pool.release([block for block, _ in sequence])
            self.sequences.clear()
            self.catch_up()
            assert self.num_loading == 0
            assert self.tiers.is_idle
            assert self.pool.is_idle
            assert not self.timers.waiting
            self.records_and_bytes_agree()
            self.publish_and_compare()
        finally:
            self.tiers.close()
            self.patches.stop()
            shutil.rmtree(self.folder)


TestTierFiles = TierFileMachine.TestCase
TestTierFiles.settings = settings(max_examples=100, stateful_step_count=50)
