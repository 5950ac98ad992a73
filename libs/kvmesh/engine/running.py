"""Running sequences: distributes tokens and blocks of the next step, and preempts if necessary.

Blocks go to the oldest sequence first; when there are none, the youngest is preempted. Preempted
sequences return when the running ones have what they need. Tests:
tests/unit/engine/test_running.py, tests/unit/engine/test_core.py,
tests/property/test_engine_core.py.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterator

from kvmesh.core.errors import OutOfBlocksError
from kvmesh.engine.preemption import PreemptedSequences
from kvmesh.engine.remote import come_back
from kvmesh.engine.sequence import Sequence, SequenceState
from kvmesh.kv.sequence_blocks import GroupCache
from kvmesh.policy.batching import BatchLimits, plan_batch


def _age(sequence: Sequence) -> int:
    return sequence.sequence_id  # ids grow with time


class RunningSequences:
    """Running sequences, oldest first, and preempted ones that wait for blocks.

    Attributes:
        preempted: sequences that lost their blocks.
        num_preemptions: number of preemptions since start.
        on_preempted: called with each preempted sequence.
        beside_decode: most prompt tokens of a step in which some sequence decodes; None: as many
            as the step's budget leaves.
    """

    def __init__(
        self, cache: GroupCache, limits: BatchLimits, preempted: PreemptedSequences
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._members: list[Sequence] = []
        self.preempted = preempted
        self.num_preemptions = 0
        self.beside_decode: int | None = None
        self.on_preempted: Callable[[Sequence], None] = lambda _: None

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence that was held; it may be older than others that run."""
        sequence.state = SequenceState.RUNNING
        insort(self._members, sequence, key=_age)

    def discard(self, sequence: Sequence) -> None:
        """Removes a sequence that ended or is held from now on."""
        self._members.remove(sequence)

    def preempt(self, victim: Sequence) -> None:
        """Takes a sequence's blocks; it must be in no step."""
        self._members.remove(victim)
        if victim.remote is not None:
            come_back(victim, self._cache.block_size)
            victim.num_computed = 0  # with holes, no KV can be kept
        self.preempted.add(victim)
        self.num_preemptions += 1
        self.on_preempted(victim)

    def plan(self) -> list[tuple[Sequence, int]]:
        """Plans the next step: its sequences with their blocks, and the end position of each."""
        so_far = self.num_preemptions
        planned = self._grown()
        # A sequence readmitted after a preemption would take the blocks that the preemption freed.
        # If nothing else can compute, nobody else needs these blocks.
        if (self.num_preemptions == so_far or not planned) and self._readmit():
            planned = self._grown()
        return planned

    def _grown(self) -> list[tuple[Sequence, int]]:
        runnable = [s for s in self._members if s.constraint is None or s.constraint.ready]
        whole = next((s for s in runnable if s.in_one_step and s.num_remaining > 1), None)
        if whole is not None and self._grow(whole, len(whole.tokens), ()):
            return [(whole, len(whole.tokens))]
        remaining = [s.num_remaining for s in runnable]
        plans = plan_batch(remaining, self._limits, self.beside_decode)
        grown: dict[Sequence, int] = {}
        for plan in plans:
            sequence = runnable[plan.index]
            end = sequence.num_computed + plan.num_tokens
            # An earlier sequence of the batch may have preempted this one.
            if sequence.state is SequenceState.RUNNING and self._grow(sequence, end, grown):
                grown[sequence] = end
        return list(grown.items())

    def _grow(self, sequence: Sequence, end: int, protected: Collection[Sequence]) -> bool:
        """Takes blocks up to `end`, preempting younger sequences; False if it must wait."""
        while True:
            try:
                self._cache.grow(sequence.kv, sequence.num_computed, end)
                self.preempted.served(sequence)
                return True
            except OutOfBlocksError:
                if self._drop_rolling():
                    continue
                if self.preempted.makes_room_for(sequence):
                    return False
                victim = self._youngest(protected)
                self.preempt(victim)
                if victim is sequence:
                    return False

    def _drop_rolling(self) -> bool:
        """Turns a rolling state into an evictable cache entry; False if there is none."""
        return any(self._cache.drop_rolling(s.kv, s.chain.hashes) for s in self._members)

    def _youngest(self, protected: Collection[Sequence]) -> Sequence:
        # The asking sequence is not protected, so there always is a victim. A sequence with an
        # upstream part is no victim: another worker writes into its blocks, and it needs no more.
        return next(s for s in reversed(self._members) if s not in protected and s.upstream is None)

    def _readmit(self) -> bool:
        """Readmits preempted sequences while there is room; False if none was readmitted."""
        num_before = len(self._members)
        while (sequence := self.preempted.readmit()) is not None:
            insort(self._members, sequence, key=_age)
        return len(self._members) > num_before
