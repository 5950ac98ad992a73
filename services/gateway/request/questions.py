"""An attempt's open questions to workers, until they are forgotten or cancelled.

An attempt has at most two: one for blocks, and one to a prefill worker that may write into them.
A worker that does both gets one question for both.
Pure. Tests: tests/property/test_attempt_machine.py, tests/property/test_attempt_mutations.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvmesh.core.types import Candidate, RefusalReason
from services.gateway.request.actions import Actions, Ask, Cancel, Forget, Kind, Side

_UNANSWERED = frozenset({RefusalReason.LOST, RefusalReason.DEADLINE})


class Questions:
    """The open questions of one attempt.

    Args:
        numbers: of the questions.

    Attributes:
        blocks: the question for blocks; None if none are held or asked for.
        offer: the offer of a prompt; None if none is open.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self.blocks: Ask | None = None
        self.offer: Ask | None = None

    @property
    def last(self) -> Ask:
        """The most recent open question; the caller knows that there is one."""
        asked = self.offer or self.blocks
        assert asked is not None, "a worker knows of it"
        return asked

    @property
    def decoder(self) -> Ask:
        """The question for blocks; the caller knows that there is one."""
        assert self.blocks is not None, "blocks are held or asked for"
        return self.blocks

    def of(self, number: int) -> Ask | None:
        """The open question with this number."""
        for asked in (self.offer, self.blocks):
            if asked is not None and asked.number == number:
                return asked
        return None

    def ask(self, kind: Kind, candidate: Candidate) -> Ask:
        """Opens a question."""
        asked = Ask(kind, next(self._numbers), candidate)
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

    def cancel_unplanned(self, decode: Collection[Candidate]) -> Actions:
        """Gives up blocks of a worker that is not among these."""
        names = {each.worker_id for each in decode}
        return () if self.blocks is None or self.blocks.worker_id in names else self.cancel()

    def refused(self, by: Ask, reason: RefusalReason) -> Actions:
        """Closes what a refusal ends: the offer, or the question for blocks as well."""
        blocks = self.decoder
        # A silent prefill worker may be writing into the blocks; chained, both are one worker.
        if by is blocks or reason in _UNANSWERED or blocks.kind is Kind.START:
            return self.cancel()
        return self._cancel_offer()

    def _cancel_offer(self) -> Actions:
        asked, self.offer = self.offer, None
        return () if asked is None else (Cancel(Side.PREFILL, asked.number),)

    def cancel(self) -> Actions:
        """Closes everything that is open: first the writer into the blocks, then the blocks."""
        offer = self._cancel_offer()
        asked, self.blocks = self.blocks, None
        return offer if asked is None else (*offer, Cancel(Side.DECODE, asked.number))
