"""The sequences that decode on one simulated worker, and at which step each is due.

Every one of them takes part in every step, so one count of steps stands for all: a sequence's own
numbers are brought up to it (`settle`) when it ends, needs a block or leaves. A join or an end thus
costs O(log n), not a walk over the batch. Tests: tests/unit/sim/test_worker.py.
"""

from __future__ import annotations

import heapq

from kvmesh.sim.requests import SimSequence
from kvmesh.sim.trace_request import TRACE_BLOCK


class DecodingSet:
    """A sequence is due at the step at which it ends or needs a block.

    Attributes:
        count: sequences that decode.
        steps: done since the start.
    """

    def __init__(self) -> None:
        self.count = 0
        self.steps = 0
        self._base_context = 0
        self._due: list[tuple[int, int, int, SimSequence]] = []
        self._num_due = 0

    @property
    def context(self) -> int:
        """Tokens of all of them."""
        return self._base_context + self.count * self.steps

    def start(self, sequence: SimSequence) -> None:
        """The sequence has one token without KV, in every step from now on."""
        sequence.settled_at = self.steps
        if sequence.decodes_from is None:
            sequence.decodes_from = self.steps
        self.count += 1
        self._base_context += sequence.num_tokens - self.steps
        self.await_due(sequence)

    def stop(self, sequence: SimSequence) -> None:
        """The sequence takes part no more; its numbers are up to date."""
        self.settle(sequence)
        self.count -= 1
        self._base_context -= sequence.num_tokens - self.steps
        sequence.settled_at = sequence.due_at = None

    def settle(self, sequence: SimSequence) -> None:
        """Brings a sequence's numbers up to the steps that are done."""
        assert sequence.settled_at is not None, "it does not decode"
        done = self.steps - sequence.settled_at
        sequence.settled_at = self.steps
        sequence.num_computed += done
        sequence.num_tokens += done
        sequence.left -= done

    def await_due(self, sequence: SimSequence) -> None:
        """Its blocks are known: it is due when they or its output are full."""
        room = len(sequence.blocks) * TRACE_BLOCK - sequence.num_computed
        self._put(sequence, self.steps + min(room, sequence.left))

    def put_due(self, sequence: SimSequence) -> None:
        """Lets `take_due` give it once more before the next step."""
        self._put(sequence, self.steps)

    def take_due(self) -> list[SimSequence]:
        """Sequences that end or need a block now, in order of step, then age."""
        found: list[SimSequence] = []
        while self._due and self._due[0][0] <= self.steps:
            due, _, _, sequence = heapq.heappop(self._due)
            # An entry of a sequence that has left, or is due at another step, counts no more.
            if sequence.due_at == due:
                sequence.due_at = None
                found.append(sequence)
        return found

    def steps_to_next(self) -> int:
        """Steps until some sequence is due; one decodes."""
        while self._due[0][3].due_at != self._due[0][0]:
            heapq.heappop(self._due)
        return self._due[0][0] - self.steps

    def clear(self) -> None:
        """Nothing is due any more."""
        self._due.clear()

    def _put(self, sequence: SimSequence, step: int) -> None:
        sequence.due_at = step
        self._num_due += 1
        heapq.heappush(self._due, (step, sequence.order, self._num_due, sequence))
