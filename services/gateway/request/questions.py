"""An attempt's open questions to workers, until they are forgotten or cancelled.

An attempt has at most two: one for blocks, and one to a prefill worker that may write into them.
A worker that does both gets one question for both.
Pure. Tests: tests/property/test_attempt_machine.py, tests/property/test_attempt_mutations.py.
"""

from __future__ import annotations

from kvmesh.core.types import Candidate
from services.gateway.request.actions import Actions, Ask, Cancel, Forget, Kind, Side


class Questions:
    """The open questions of one attempt.

    Args:
        num_asked: questions of earlier attempts of the request.

    Attributes:
        num_asked: number of the last question.
        blocks: the question for blocks; None if none are held or asked for.
        offer: the offer of a prompt; None if none is open.
    """

    def __init__(self, num_asked: int) -> None:
        self.num_asked = num_asked
        self.blocks: Ask | None = None
        self.offer: Ask | None = None

    @property
    def last(self) -> Ask:
        """The most recent open question; the caller knows that there is one."""
        asked = self.offer or self.blocks
        assert asked is not None, "a worker knows of it"
        return asked

    def of(self, number: int) -> Ask | None:
        """The open question with this number."""
        for asked in (self.offer, self.blocks):
            if asked is not None and asked.number == number:
                return asked
        return None

    def ask(self, kind: Kind, candidate: Candidate) -> Ask:
        """Opens a question."""
        self.num_asked += 1
        asked = Ask(kind, self.num_asked, candidate)
        if kind is Kind.OFFER:
            self.offer = asked
        else:
            self.blocks = asked
        return asked

    def forget_offer(self) -> Actions:
        """Closes the offer: the prefill worker has done its part."""
        asked, self.offer = self.offer, None
        return () if asked is None else (Forget(Side.PREFILL, asked.number),)

    def forget_blocks(self) -> Actions:
        """Closes the question for blocks: the decode worker has done its part."""
        asked, self.blocks = self.blocks, None
        return () if asked is None else (Forget(Side.DECODE, asked.number),)

    def cancel_offer(self) -> Actions:
        """Closes the offer and stops the prefill worker."""
        asked, self.offer = self.offer, None
        return () if asked is None else (Cancel(Side.PREFILL, asked.number),)

    def cancel(self) -> Actions:
        """Closes everything that is open: first the writer into the blocks, then the blocks."""
        offer = self.cancel_offer()
        asked, self.blocks = self.blocks, None
        return offer if asked is None else (*offer, Cancel(Side.DECODE, asked.number))
