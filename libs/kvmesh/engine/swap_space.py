"""Host memory for the KV of preempted sequences: what is kept there, and the copies out and back.

Copies are long and run beside the event loop and the steps. Blocks that are copied out, places that
are copied from and blocks that are copied into belong to the copy until it is made.
Tests: tests/unit/engine/test_preemption.py, tests/property/test_engine_core.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvmesh.core.clock import Clock
from kvmesh.core.errors import OutOfBlocksError
from kvmesh.engine.copier import Copier, InlineCopier
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.sequence import Sequence
from kvmesh.kv.sequence_blocks import BlockSpot, GroupCache, SequenceBlocks
from kvmesh.policy.preemption import Speeds, choose_preemption, with_sample, without_copy


@dataclass(frozen=True, slots=True)
class SwapStatistics:
    """Counters since start, and places that are taken now."""

    blocks_kept: int = 0
    swapped_out_total: int = 0
    swapped_in_total: int = 0


@dataclass(slots=True)
class _Kept:
    """One sequence's KV in host memory.

    Attributes:
        places: by where the block was.
        num_computed, num_sealed: as they were.
        is_copied: whether all is there; until then the places cannot be given away.
        is_forgotten: nobody wants it any more.
    """

    places: dict[BlockSpot, int]
    num_computed: int
    num_sealed: int
    is_copied: bool = False
    is_forgotten: bool = False


class SwapSpace:
    """KV of preempted sequences in host memory.

    Args:
        clock: measures the copies, in the thread that makes them.
        copier: makes them.
    """

    def __init__(self, arena: HostArena, clock: Clock, copier: Copier | None = None) -> None:
        self._arena = arena
        self._clock = clock
        self._copier = copier or InlineCopier()
        self._kept: dict[Sequence, _Kept] = {}
        self._forgotten = 0
        self._speeds = Speeds()
        self._out = self._in = 0

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Takes a step with prompts, for what computing again would cost."""
        token_s = with_sample(self._speeds.token_s, seconds / num_tokens)
        self._speeds = Speeds(token_s, self._speeds.byte_s)

    def keep(
        self, sequence: Sequence, kv: SequenceBlocks, cache: GroupCache, left: Callable[[], None]
    ) -> bool:
        """Begins to copy what a sequence goes on from, where that pays and there is room.

        Args:
            kv: the sequence's blocks, which must stay as they are until `left`.
            left: called when they are copied.

        Returns:
            Whether it began; if not, `left` is not called.
        """
        spots = cache.contents(kv, sequence.num_computed)
        if not spots:
            return False
        num_bytes = len(spots) * self._arena.block_bytes
        decision = choose_preemption(sequence.num_computed, num_bytes, self._speeds)
        if not decision.swap:
            self._speeds = without_copy(self._speeds)
        if len(spots) > self._arena.num_free or not decision.swap:
            return False
        places = self._arena.take(len(spots))
        kept = _Kept(dict(zip(spots, places, strict=True)), sequence.num_computed, kv.num_sealed)
        self._kept[sequence] = kept
        self._out += 1

        def done() -> None:
            kept.is_copied = True
            if kept.is_forgotten:
                self._free(kept)
            left()

        blocks = list(spots.values())
        self._copy(partial(self._arena.store, blocks, places), num_bytes, done)
        return True

    @property
    def num_sequences(self) -> int:
        """Sequences of which something is kept."""
        return len(self._kept)

    def has(self, sequence: Sequence) -> bool:
        """Whether something is kept of a sequence."""
        return sequence in self._kept

    def restore(
        self, sequence: Sequence, cache: GroupCache, arrived: Callable[[], None]
    ) -> tuple[SequenceBlocks, int]:
        """Begins to put a sequence's KV back, with room for its tokens.

        Args:
            arrived: called when it is there; nothing of it is kept any more then.

        Returns:
            Its blocks and how many positions they will hold.

        Raises:
            OutOfBlocksError: all is as it was, and `arrived` is not called.
        """
        kept = self._kept[sequence]
        assert kept.is_copied, "it is still on its way out"
        kv, missing = cache.rebuild(list(kept.places), kept.num_sealed, sequence.chain.hashes)
        try:
            cache.grow(kv, kept.num_computed, len(sequence.tokens), whole=True)
        except OutOfBlocksError:
            cache.release(kv)
            raise
        # The places are read until the copy is made, whoever forgets the sequence meanwhile.
        del self._kept[sequence]
        self._forgotten += len(kept.places)
        places = [kept.places[spot] for spot in missing]

        def done() -> None:
            self._forgotten -= len(kept.places)
            self._arena.free(list(kept.places.values()))
            self._in += 1
            arrived()

        copy = partial(self._arena.load, places, list(missing.values()))
        self._copy(copy, len(missing) * self._arena.block_bytes, done)
        return kv, kept.num_computed

    def forget(self, sequence: Sequence) -> None:
        """Gives up what is kept of a sequence, if anything is."""
        kept = self._kept.pop(sequence, None)
        if kept is None:
            return
        self._forgotten += len(kept.places)
        if kept.is_copied:
            self._free(kept)
        else:
            kept.is_forgotten = True

    def _free(self, kept: _Kept) -> None:
        self._forgotten -= len(kept.places)
        self._arena.free(list(kept.places.values()))

    def _copy(self, copy: Callable[[], None], num_bytes: int, done: Callable[[], None]) -> None:
        if not num_bytes:
            done()
            return
        seconds = 0.0

        def timed() -> None:
            nonlocal seconds
            started = self._clock.now()
            copy()
            seconds = self._clock.now() - started

        def observed() -> None:
            byte_s = with_sample(self._speeds.byte_s, seconds / num_bytes)
            self._speeds = Speeds(self._speeds.token_s, byte_s)
            done()

        self._copier.start(timed, observed)

    def close(self) -> None:
        """Gives up the memory that copies pass through; none is being made."""
        self._arena.close()

    def statistics(self) -> SwapStatistics:
        """The counts of this moment."""
        kept = self._arena.num_places - self._arena.num_free
        return SwapStatistics(kept, self._out, self._in)

    def check_integrity(self) -> None:
        """Raises AssertionError when places were lost or are taken twice."""
        places = [place for kept in self._kept.values() for place in kept.places.values()]
        assert len(set(places)) == len(places), "a place is taken twice"
        taken = len(places) + self._forgotten
        assert self._arena.num_free + taken == self._arena.num_places, "a place is lost"
