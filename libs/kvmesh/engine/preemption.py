"""Sequences that lost their blocks, and what is kept of them in host memory.

A preempted sequence's KV is either dropped, and computed again as far as the prefix cache lost it
too, or copied to host memory and back. Copies are made between steps, on the event loop: blocks
may be given away, and written by others, as soon as they are released.
Tests: tests/unit/engine/test_preemption.py, tests/property/test_engine_core.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvmesh.core.clock import Clock
from kvmesh.core.errors import OutOfBlocksError
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.sequence import Sequence, SequenceState
from kvmesh.kv.sequence_blocks import BlockSpot, GroupCache, SequenceBlocks
from kvmesh.policy.preemption import Speeds, choose_preemption, with_sample


@dataclass(frozen=True, slots=True)
class SwapStatistics:
    """Counters since start, and places that are taken now."""

    blocks_kept: int = 0
    swapped_out_total: int = 0
    swapped_in_total: int = 0


@dataclass(frozen=True, slots=True)
class _Kept:
    """One sequence's KV in host memory.

    Attributes:
        places: by where the block was.
        num_computed, num_sealed: as they were.
    """

    places: dict[BlockSpot, int]
    num_computed: int
    num_sealed: int


class SwapSpace:
    """KV of preempted sequences in host memory.

    Args:
        clock: measures the copies.
    """

    def __init__(self, arena: HostArena, clock: Clock) -> None:
        self._arena = arena
        self._clock = clock
        self._kept: dict[Sequence, _Kept] = {}
        self._speeds = Speeds()
        self._out = self._in = 0

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Takes a step with prompts, for what computing again would cost."""
        token_s = with_sample(self._speeds.token_s, seconds / num_tokens)
        self._speeds = Speeds(token_s, self._speeds.byte_s)

    def keep(self, sequence: Sequence, cache: GroupCache) -> None:
        """Copies what a sequence goes on from, where that pays and there is room."""
        spots = cache.contents(sequence.kv, sequence.num_computed)
        num_bytes = len(spots) * self._arena.block_bytes
        decision = choose_preemption(sequence.num_computed, num_bytes, self._speeds)
        if not spots or len(spots) > self._arena.num_free or not decision.swap:
            return
        started = self._clock.now()
        places = self._arena.store(list(spots.values()))
        self._observe_copy(num_bytes, started)
        self._kept[sequence] = _Kept(
            dict(zip(spots, places, strict=True)), sequence.num_computed, sequence.kv.num_sealed
        )
        self._out += 1

    @property
    def num_sequences(self) -> int:
        """Sequences of which something is kept."""
        return len(self._kept)

    def has(self, sequence: Sequence) -> bool:
        """Whether something is kept of a sequence."""
        return sequence in self._kept

    def restore(self, sequence: Sequence, cache: GroupCache) -> tuple[SequenceBlocks, int]:
        """Puts a sequence's KV back, with room for its tokens; nothing of it is kept any more.

        Returns:
            Its blocks and how many positions they hold.

        Raises:
            OutOfBlocksError: all is as it was.
        """
        kept = self._kept[sequence]
        kv, missing = cache.rebuild(list(kept.places), kept.num_sealed, sequence.chain.hashes)
        try:
            cache.grow(kv, kept.num_computed, len(sequence.tokens), whole=True)
        except OutOfBlocksError:
            cache.release(kv)
            raise
        started = self._clock.now()
        self._arena.load([kept.places[spot] for spot in missing], list(missing.values()))
        self._observe_copy(len(missing) * self._arena.block_bytes, started)
        self.forget(sequence)
        self._in += 1
        return kv, kept.num_computed

    def forget(self, sequence: Sequence) -> None:
        """Gives up what is kept of a sequence, if anything is."""
        kept = self._kept.pop(sequence, None)
        if kept is not None:
            self._arena.free(list(kept.places.values()))

    def _observe_copy(self, num_bytes: int, started: float) -> None:
        if num_bytes:
            sample = (self._clock.now() - started) / num_bytes
            byte_s = with_sample(self._speeds.byte_s, sample)
            self._speeds = Speeds(self._speeds.token_s, byte_s)

    def statistics(self) -> SwapStatistics:
        """The counts of this moment."""
        kept = self._arena.num_places - self._arena.num_free
        return SwapStatistics(kept, self._out, self._in)

    def check_integrity(self) -> None:
        """Raises AssertionError when places were lost or are taken twice."""
        places = [place for kept in self._kept.values() for place in kept.places.values()]
        assert len(set(places)) == len(places), "a place is taken twice"
        assert self._arena.num_free + len(places) == self._arena.num_places, "a place is lost"


class PreemptedSequences:
    """Sequences that wait for blocks, oldest first.

    Args:
        num_reusable: of a sequence, blocks that may come from the prefix cache.
        swap: None to compute all of them again.
    """

    def __init__(
        self,
        cache: GroupCache,
        num_reusable: Callable[[Sequence], int],
        swap: SwapSpace | None,
    ) -> None:
        self._cache = cache
        self._num_reusable = num_reusable
        self._swap = swap
        self._waiting: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def add(self, victim: Sequence) -> None:
        """Takes a sequence's blocks; it is in no step."""
        if self._swap is not None:
            self._swap.keep(victim, self._cache)
        self._cache.release(victim.kv, victim.chain.hashes)
        victim.num_computed = 0
        victim.state = SequenceState.PREEMPTED
        # Back in order of age: ids grow with time.
        self._waiting.append(victim)
        self._waiting.sort(key=lambda s: s.sequence_id)

    def discard(self, sequence: Sequence) -> None:
        """Forgets a sequence that ended while it waited."""
        self._waiting.remove(sequence)
        if self._swap is not None:
            self._swap.forget(sequence)

    def readmit(self) -> Sequence | None:
        """The oldest one, running again; None while its blocks are not there."""
        if not self._waiting:
            return None
        sequence = self._waiting[0]
        try:
            if self._swap is not None and self._swap.has(sequence):
                kv, num_computed = self._swap.restore(sequence, self._cache)
            else:
                kv, num_computed = self._resume(sequence)
        except OutOfBlocksError:
            return None
        self._waiting.pop(0)
        sequence.kv = kv
        sequence.num_computed = num_computed
        sequence.state = SequenceState.RUNNING
        return sequence

    def _resume(self, sequence: Sequence) -> tuple[SequenceBlocks, int]:
        kv = self._cache.resume(sequence.chain.hashes[: self._num_reusable(sequence)])
        num_cached = kv.num_sealed * self._cache.block_size
        try:
            self._cache.grow(kv, num_cached, len(sequence.tokens), whole=True)
        except OutOfBlocksError:
            self._cache.release(kv)
            raise
        return kv, num_cached

    def check_integrity(self) -> None:
        """Raises AssertionError when one of them holds blocks."""
        for sequence in self._waiting:
            assert sequence.kv.is_empty, "a preempted sequence holds blocks"
        if self._swap is not None:
            self._swap.check_integrity()
            kept = [s for s in self._waiting if self._swap.has(s)]
            assert len(kept) == self._swap.num_sequences, "what is kept belongs to nobody"
