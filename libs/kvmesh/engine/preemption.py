"""Preempted sequences, which lost their blocks, and their return.

A preempted sequence's KV is either dropped, and then recomputed as far as the prefix cache lost it,
or copied to host memory and back. Its blocks return to the pool once they are copied out, and it
runs again once they are copied back. Tests: tests/unit/engine/test_preemption.py,
tests/property/test_engine_core.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from kvmesh.core.errors import OutOfBlocksError
from kvmesh.engine.sequence import Sequence, SequenceState
from kvmesh.engine.swap_space import SwapSpace
from kvmesh.kv.sequence_blocks import GroupCache, SequenceBlocks


@dataclass(slots=True)
class _Arrival:
    """A sequence's KV that is being brought back.

    Attributes:
        num_computed: number of positions that it will hold.
        is_here: whether the copy is complete.
        is_dropped: whether the sequence ended meanwhile.
    """

    kv: SequenceBlocks
    num_computed: int
    is_here: bool = False
    is_dropped: bool = False


class PreemptedSequences:
    """Sequences that wait for blocks, oldest first.

    Args:
        num_reusable: returns how many blocks of a sequence may come from the prefix cache.
        swap: None to recompute all preempted sequences.
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
        self._leaving: dict[Sequence, SequenceBlocks] = {}
        self._arriving: dict[Sequence, _Arrival] = {}
        self._starved: Sequence | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def makes_room_for(self, sequence: Sequence) -> bool:
        """Returns whether a victim's blocks are being copied out, so that the sequence should wait.

        If they turn out too few, the sequence asks again, and another victim follows.
        """
        if not self._leaving:
            return False
        self._starved = self._starved or sequence
        return True

    def served(self, sequence: Sequence) -> None:
        """Records that a running sequence has the blocks that it asked for."""
        if sequence is self._starved:
            self._starved = None

    def add(self, victim: Sequence) -> None:
        """Takes a sequence's blocks, at once or when they are copied; it must be in no step."""
        kv = victim.kv
        victim.kv = SequenceBlocks([[] for _ in kv.tables])
        self._leaving[victim] = kv
        left = partial(self._left, victim)
        if self._swap is None or not self._swap.keep(victim, kv, self._cache, left):
            left()
        victim.num_computed = 0
        victim.state = SequenceState.PREEMPTED
        # Sequences return in the order of their age, and ids grow with time.
        self._waiting.append(victim)
        self._waiting.sort(key=lambda s: s.sequence_id)

    def _left(self, victim: Sequence) -> None:
        self._cache.release(self._leaving.pop(victim), victim.chain.hashes)

    def discard(self, sequence: Sequence) -> None:
        """Forgets a sequence that ended while it waited."""
        self._waiting.remove(sequence)
        if self._swap is not None:
            self._swap.forget(sequence)
        arrival = self._arriving.get(sequence)
        if arrival is None:
            return
        arrival.is_dropped = True
        if arrival.is_here:
            self._give_back(sequence)

    def readmit(self) -> Sequence | None:
        """Returns the oldest sequence, running again; None while its blocks or KV are missing."""
        if not self._waiting or self._waiting[0] in self._leaving or self._is_starving():
            return None
        sequence = self._waiting[0]
        try:
            if sequence not in self._arriving:
                self._bring_back(sequence)
        except OutOfBlocksError:
            return None
        arrival = self._arriving[sequence]
        if not arrival.is_here:
            return None
        del self._arriving[sequence]
        self._waiting.pop(0)
        sequence.kv = arrival.kv
        sequence.num_computed = arrival.num_computed
        sequence.state = SequenceState.RUNNING
        return sequence

    def _is_starving(self) -> bool:
        """Whether a running sequence waits for blocks, which must not go back to the victim."""
        if self._starved is not None and self._starved.state is not SequenceState.RUNNING:
            self._starved = None
        return self._starved is not None

    def _bring_back(self, sequence: Sequence) -> None:
        here: list[Sequence] = []
        if self._swap is None or not self._swap.has(sequence):
            kv, num_computed = self._resume(sequence)
            here.append(sequence)
        else:

            def arrived() -> None:
                here.append(sequence)
                self._arrived(sequence)

            kv, num_computed = self._swap.restore(sequence, self._cache, arrived)
        self._arriving[sequence] = _Arrival(kv, num_computed, is_here=bool(here))

    def _arrived(self, sequence: Sequence) -> None:
        arrival = self._arriving.get(sequence)
        if arrival is None:  # the copy ended before the arrival was recorded
            return
        arrival.is_here = True
        if arrival.is_dropped:
            self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self._cache.release(self._arriving.pop(sequence).kv)

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
        """Raises AssertionError if a preempted sequence holds blocks or the swap space is wrong."""
        for sequence in self._waiting:
            assert sequence.kv.is_empty, "a preempted sequence holds blocks"
        if self._swap is not None:
            self._swap.check_integrity()
            kept = [s for s in self._waiting if self._swap.has(s)]
            assert len(kept) == self._swap.num_sequences, "what is kept belongs to nobody"
