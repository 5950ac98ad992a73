"""Running sequences: distributes tokens and blocks of the next step, and preempts if necessary.

Blocks go to the oldest sequence first; when there are none, the youngest is preempted. Preempted
sequences return when the running ones have enough blocks. Tests:
tests/unit/engine/test_running.py, tests/unit/engine/test_core.py,
tests/property/test_engine_core.py.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterator

from kvmesh.core.errors import OutOfBlocksError
from kvmesh.engine.preemption import PreemptedSequences
from kvmesh.engine.protocol import PartPace
from kvmesh.engine.remote import come_back
from kvmesh.engine.sequence import Sequence, SequenceState
from kvmesh.kv.sequence_blocks import GroupCache
from kvmesh.policy.batching import BatchLimits, plan_batch
from kvmesh.policy.step_rules import StepRules, StepTurns


def _is_part(sequence: Sequence) -> bool:
    return sequence.is_part and sequence.num_remaining > 1


def _is_prompt(sequence: Sequence) -> bool:
    """Whether more than a decode step is missing; a prompt's last token is no decode step."""
    return sequence.num_remaining > 1 or len(sequence.tokens) == len(sequence.spec.token_ids)


def _age(sequence: Sequence) -> int:
    return sequence.sequence_id  # ids grow with time


class RunningSequences:
    """Running sequences, oldest first, and preempted ones that wait for blocks.

    Attributes:
        preempted: sequences that lost their blocks.
        num_preemptions: number of preemptions since start.
        on_preempted: called with each preempted sequence.
        rules: division of steps between prompts and decoding sequences.
        latest: sequences of the latest step.
    """

    def __init__(
        self, cache: GroupCache, limits: BatchLimits, preempted: PreemptedSequences
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._members: list[Sequence] = []
        self._part_is_next = False
        self.preempted = preempted
        self.num_preemptions = 0
        self.rules = StepRules()
        self.latest: frozenset[Sequence] = frozenset()
        self._turns = StepTurns()
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
        self.latest = frozenset(sequence for sequence, _ in planned)
        return planned

    def pace_of(self, sequence: Sequence) -> PartPace | None:
        """The pace of a sequence's next chunk, if it is a part; else None."""
        if not _is_part(sequence):
            return None
        limits = self._limits
        decodes = any(each.num_remaining == 1 for each in self._members)
        beside = (
            (limits.max_tokens, limits.mixed_tokens, self.rules.beside_decode) if decodes else ()
        )
        fewest = min((each for each in beside if each is not None), default=limits.max_tokens)
        return PartPace(limits.max_tokens, fewest)

    def _grown(self) -> list[tuple[Sequence, int]]:
        runnable = [s for s in self._members if s.constraint is None or s.constraint.ready]
        others = [s for s in runnable if not _is_part(s)]
        part = next((s for s in runnable if _is_part(s) and not s.waits_for_layers), None)
        if part is not None:
            # Decoding sequences run between any two steps of a part; prompts wait for its end.
            decoding = [s for s in others if s.num_remaining == 1]
            self._part_is_next = not self._part_is_next or not decoding
            if not self._part_is_next:
                others = decoding
            elif self._grow(part, len(part.tokens), ()):
                return [(part, len(part.tokens))]
        prompts_first = self._turns.prompts_first(self.rules)
        grown = self._divided(others, prompts_first=prompts_first)
        if prompts_first and not grown:  # prompts may wait for blocks that the others free
            grown = self._divided(others, prompts_first=False)
        decoding = [s for s in others if not _is_prompt(s)]
        self._turns.note(left_out=bool(grown and decoding) and grown.keys().isdisjoint(decoding))
        return list(grown.items())

    def _divided(self, others: list[Sequence], *, prompts_first: bool) -> dict[Sequence, int]:
        """Divides a step between sequences; returns those with blocks, and the end of each."""
        remaining, beside = [s.num_remaining for s in others], self.rules.beside_decode
        first = {n for n, s in enumerate(others) if prompts_first and _is_prompt(s)}
        plans = plan_batch(remaining, self._limits, beside, first)
        grown: dict[Sequence, int] = {}
        for plan in plans:
            sequence = others[plan.index]
            end = sequence.num_computed + plan.num_tokens
            # An earlier sequence of the batch may have preempted this one.
            if sequence.state is SequenceState.RUNNING and self._grow(sequence, end, grown):
                grown[sequence] = end
        return grown

    def _grow(self, sequence: Sequence, end: int, protected: Collection[Sequence]) -> bool:
        """Takes blocks up to `end`, preempting younger sequences; False if it must wait."""
        while True:
            try:
                self._cache.grow(sequence.kv, sequence.start, end)
                self.preempted.served(sequence)
                return True
            except OutOfBlocksError:
                if self._drop_rolling():
                    continue
                if self.preempted.makes_room_for(sequence):
                    return False
                victim = self._youngest(protected)
                if victim is None:
                    return False
                self.preempt(victim)
                if victim is sequence:
                    return False

    def _drop_rolling(self) -> bool:
        """Turns a rolling state into an evictable cache entry; False if there is none."""
        return any(self._cache.drop_rolling(s.kv, s.chain.hashes) for s in self._members)

    def _youngest(self, protected: Collection[Sequence]) -> Sequence | None:
        # Another worker writes into the blocks of a sequence with an upstream part, and only the
        # runner has the progress of a part.
        return next(
            (
                each
                for each in reversed(self._members)
                if each not in protected and each.upstream is None and not each.num_begun
            ),
            None,
        )

    def _readmit(self) -> bool:
        """Readmits preempted sequences while there is room; False if none was readmitted."""
        num_before = len(self._members)
        while (sequence := self.preempted.readmit()) is not None:
            insort(self._members, sequence, key=_age)
        return len(self._members) > num_before
