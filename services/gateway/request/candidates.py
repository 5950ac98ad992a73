"""Chooses the next worker of a route plan for an attempt, and the question for that worker.

Pure. Tests: tests/property/test_attempt_machine.py, tests/property/test_attempt_mutations.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from kvmesh.core.types import Candidate, RefusalReason, WorkerId
from services.gateway.request.actions import Ask, Kind

PERMANENT = frozenset({RefusalReason.TOO_LONG, RefusalReason.INVALID})
"""Refusals that a worker would repeat each time it is asked."""


class Candidates:
    """The workers of the current plan that have not been asked, best first.

    Attributes:
        until: time from which no worker is asked, in seconds on the attempt's clock.
    """

    def __init__(self) -> None:
        self.until = math.inf
        self._decode: Sequence[Candidate] = ()
        self._to_reserve: deque[Candidate] = deque()
        self._to_offer: deque[Candidate] = deque()
        self._excluded: set[WorkerId] = set()

    def replace(
        self, prefill: Sequence[Candidate], decode: Sequence[Candidate], until: float
    ) -> None:
        """Takes a new plan; excluded workers stay excluded.

        Args:
            decode: empty if the worker that computes the prompt also generates.
        """
        self.until = until
        self._decode = decode
        self._to_offer = deque(prefill)
        self._to_reserve = deque(decode)

    def refused(self, worker_id: WorkerId, reason: RefusalReason) -> None:
        """Excludes a worker from this plan and from later ones, if it would refuse again."""
        if reason in PERMANENT:
            self._excluded.add(worker_id)

    def next(self, now: float, blocks: Ask | None) -> tuple[Kind, Candidate] | None:
        """The next question and its worker; None if no worker or no time is left.

        Args:
            blocks: the question to the worker that holds blocks, so a prefill worker is next.
        """
        if now >= self.until:
            return None
        if blocks is None:
            kind = Kind.RESERVE if self._decode else Kind.START
        elif blocks.kind is Kind.START:
            return Kind.OFFER, blocks.candidate
        else:
            kind = Kind.OFFER
            # If these blocks are given up, decode workers that had no room may have some by then.
            self._to_reserve = deque(self._decode)
        line = self._to_reserve if kind is Kind.RESERVE else self._to_offer
        while line and self._to_offer:  # without a prefill worker, reserved blocks are of no use
            candidate = line.popleft()
            if candidate.worker_id not in self._excluded:
                return kind, candidate
        return None
