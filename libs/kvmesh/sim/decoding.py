"""The decoding sequences of one simulated worker, and the step at which each is due.

All of them take part in every step, so one step counter is enough. A sequence's own numbers are
updated from it (`settle`) when the sequence ends, needs a block or leaves. So a join or an end
costs O(log n) instead of a walk over the batch. Tests: tests/unit/sim/test_worker.py.
"""

from __future__ import annotations

import heapq

from kvmesh.sim.requests import SimSequence
from kvmesh.sim.trace_request import TRACE_BLOCK


class DecodingSet:
    """Decoding sequences; each is due at the step at which it ends or needs a block.

    Attributes:
        count: number of sequences that decode.
        steps: number of steps done since the start.
    """

    def __init__(self) -> None:
        self.count = 0
        self.steps = 0
        self._base_context = 0
        self._due: list[tuple[int, int, int, SimSequence]] = []
        self._num_due = 0

    @property
    def context(self) -> int:
        """Total tokens of all decoding sequences."""
        return self._base_context + self.count * self.steps

    def start(self, sequence: SimSequence) -> None:
        """Adds a sequence with one token without KV, which decodes in every step from now on."""
        sequence.settled_at = self.steps
        if sequence.decodes_from is None:
            sequence.decodes_from = self.steps
        self.count += 1
        self._base_context += sequence.num_tokens - self.steps
        self.await_due(sequence)

    def stop(self, sequence: SimSequence) -> None:
        """Removes a sequence and updates its numbers."""
        self.settle(sequence)
        self.count -= 1
        self._base_context -= sequence.num_tokens - self.steps
        sequence.settled_at = sequence.due_at = None

    def settle(self, sequence: SimSequence) -> None:
        """Updates a sequence's numbers to the steps done."""
        assert sequence.settled_at is not None, "it does not decode"
        done = self.steps - sequence.settled_at
        sequence.settled_at = self.steps
        sequence.num_computed += done
        sequence.num_tokens += done
        sequence.left -= done

    def await_due(self, sequence: SimSequence) -> None:
        """Schedules a sequence for the step at which its blocks are full or its output ends."""
        room = len(sequence.blocks) * TRACE_BLOCK - sequence.num_computed
        self._put(sequence, self.steps + min(room, sequence.left))

    def put_due(self, sequence: SimSequence) -> None:
        """Lets `take_due` return a sequence once more before the next step."""
        self._put(sequence, self.steps)

    def take_due(self) -> list[SimSequence]:
        """Returns the sequences that end or need a block now, by step, then age."""
        found: list[SimSequence] = []
        while self._due and self._due[0][0] <= self.steps:
            due, _, _, sequence = heapq.heappop(self._due)
            # Entries of sequences that left or are due at another step are stale.
            if sequence.due_at == due:
                sequence.due_at = None
                found.append(sequence)
        return found

    def steps_to_next(self) -> int:
        """Returns the steps until a sequence is due; at least one must decode."""
        while self._due[0][3].due_at != self._due[0][0]:
            heapq.heappop(self._due)
        return self._due[0][0] - self.steps

    def clear(self) -> None:
        """Drops all due entries."""
        self._due.clear()

    def _put(self, sequence: SimSequence, step: int) -> None:
        sequence.due_at = step
        self._num_due += 1
        heapq.heappush(self._due, (step, sequence.order, self._num_due, sequence))
