"""Host memory for the KV of preempted sequences, with the copies out and back.

Copies are long and run outside of the event loop and the steps. Until a copy ends it owns its
source blocks, its places and its target blocks.
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
from kvmesh.policy.preemption import choose_preemption, with_sample, without_copy
from kvmesh.policy.prompt_time import PromptTime


@dataclass(frozen=True, slots=True)
class SwapStatistics:
    """Counters since start, and the number of places in use."""

    blocks_kept: int = 0
    swapped_out_total: int = 0
    swapped_in_total: int = 0


@dataclass(slots=True)
class _Kept:
    """The KV of one sequence in host memory.

    Attributes:
        places: place of each block, by the block's spot in the sequence.
        num_computed, num_sealed: values of the sequence when it was preempted.
        is_copied: whether the copy is complete; until then the places must not be freed.
        is_forgotten: whether the sequence ended meanwhile.
    """

    places: dict[BlockSpot, int]
    num_computed: int
    num_sealed: int
    is_copied: bool = False
    is_forgotten: bool = False


class SwapSpace:
    """KV of preempted sequences in host memory.

    Args:
        prompt_time: to compute a sequence's KV again.
        clock: measures the copies, in the copying thread.
        copier: makes the copies.
    """

    def __init__(
        self,
        arena: HostArena,
        prompt_time: PromptTime,
        clock: Clock,
        copier: Copier | None = None,
    ) -> None:
        self._arena = arena
        self._prompt_time = prompt_time
        self._clock = clock
        self._copier = copier or InlineCopier()
        self._kept: dict[Sequence, _Kept] = {}
        self._forgotten = 0
        self._byte_s = 0.0
        self._out = self._in = 0

    def keep(
        self, sequence: Sequence, kv: SequenceBlocks, cache: GroupCache, left: Callable[[], None]
    ) -> bool:
        """Starts to copy a sequence's KV out, if that pays and there is room.

        Args:
            kv: the sequence's blocks, which must stay unchanged until `left`.
            left: called when they are copied.

        Returns:
            Whether the copy started; if not, `left` is not called.
        """
        spots = cache.contents(kv, sequence.num_computed)
        if not spots:
            return False
        num_bytes = len(spots) * self._arena.block_bytes
        compute_s = self._prompt_time.of(sequence.num_computed)
        decision = choose_preemption(compute_s, num_bytes, self._byte_s)
        if not decision.swap:
            self._byte_s = without_copy(self._byte_s)
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
        """Number of sequences with KV in host memory."""
        return len(self._kept)

    def has(self, sequence: Sequence) -> bool:
        """Returns whether a sequence has KV in host memory."""
        return sequence in self._kept

    def restore(
        self, sequence: Sequence, cache: GroupCache, arrived: Callable[[], None]
    ) -> tuple[SequenceBlocks, int]:
        """Starts to copy a sequence's KV back, with room for its tokens.

        Args:
            arrived: called when the copy is complete; the places are free then.

        Returns:
            Its blocks, and the number of positions that they will hold.

        Raises:
            OutOfBlocksError: nothing has changed, and `arrived` is not called.
        """
        kept = self._kept[sequence]
        assert kept.is_copied, "it is still on its way out"
        kv, missing = cache.rebuild(list(kept.places), kept.num_sealed, sequence.chain.hashes)
        try:
            cache.grow(kv, kept.num_computed, len(sequence.tokens), whole=True)
        except OutOfBlocksError:
            cache.release(kv)
            raise
        # The copy reads the places until its end, even if the sequence is forgotten meanwhile.
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
        """Drops a sequence's KV in host memory, if there is any."""
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
            self._byte_s = with_sample(self._byte_s, seconds / num_bytes)
            done()

        self._copier.start(timed, observed)

    def close(self) -> None:
        """Frees the staging memory of copies; no copy may be under way."""
        self._arena.close()

    def statistics(self) -> SwapStatistics:
        """Returns the current counts."""
        kept = self._arena.num_places - self._arena.num_free
        return SwapStatistics(kept, self._out, self._in)

    def check_integrity(self) -> None:
        """Raises AssertionError if places are lost or taken twice."""
        places = [place for kept in self._kept.values() for place in kept.places.values()]
        assert len(set(places)) == len(places), "a place is taken twice"
        taken = len(places) + self._forgotten
        assert self._arena.num_free + taken == self._arena.num_places, "a place is lost"
