"""One attempt to run a request on one or two workers, as a state table.

It begins with the search for workers. It ends with the last token, or when a worker loses the
request: the next attempt then continues behind the tokens that were delivered. Each question to a
worker has a new number, which the worker's answers carry. An answer is ignored if its question is
not open any more.

    state      event                                   next       actions
    ---------  --------------------------------------  ---------  ------------------------------
    IDLE       ask, the plan has decode workers        RESERVING  Ask RESERVE the first of them
    IDLE       ask, it has prefill workers only        STARTING   Ask START the first of them
    HELD       ask, the holder is in the plan          OFFERING   Ask OFFER its first prefill worker
    HELD       ask, the holder is not                  as IDLE    Cancel decode first
    RESERVING  reserved                                OFFERING   Hold, ask next
    STARTING   reserved, and it starts                 PREFILL    Hold, Taken
    STARTING   reserved only                           OFFERING   Hold, Ask OFFER the same worker
    RES., STA. reserved by another worker              as refused with LOST
    RES., STA. refused or failed                       IDLE       Cancel decode, Refuse, ask next
    OFFERING   accepted                                PREFILL    Taken
    OFFERING   refused or failed by prefill            HELD       Cancel prefill, Refuse, ask next
    OFFERING   the same, LOST, DEADLINE or chained     IDLE       Cancel both, Refuse, ask next
    OFFERING   failed by decode                        IDLE       Cancel both, Refuse, ask next
    HELD       failed by decode                        IDLE       Cancel decode, Refuse
    RES.-OFF.  no answer in `answer_s`                 as refused with LOST
    RES.-OFF.  the search's deadline                   as refused with DEADLINE
    PREFILL    first token, two workers                HANDOFF    Deliver it, then early tokens
    PREFILL    first token, one worker                 DECODE     Deliver it, Decoding, early tokens
    PREFILL    first token, it is the last             DONE       Deliver it, Cancel decode
    before     tokens                                  same       kept as early tokens
    HANDOFF    handed off                              DECODE     Forget prefill, Decoding
    HANDOFF    tokens                                  as handed off, then as in DECODE
    DECODE     tokens from the next position or before DECODE     Deliver those that are new
    DECODE     tokens behind the next position         MOVED      Cancel, Move: token_gap
    DECODE     the last tokens                         DONE       Deliver those that are new, Forget
    PRE.-DEC.  refused or failed                       MOVED      Cancel, Move: <side>_failed
    PRE., HAN. nothing for `prefill_s`                 MOVED      Cancel, Move: <state>_stalled
    DECODE     nothing for `stall_s`                   MOVED      Cancel, Move: decode_stalled
    PRE.-DEC.  a token that cannot be generated        BROKEN     Cancel, Break
    PRE.-DEC.  the request's deadline                  LATE       Cancel, Expire
    any        cancel                                  CANCELLED  Cancel
    any        anything else                           same

"Ask next" is an Ask of the plan's next candidate, or Exhausted if there is none or no time. The
rows from DONE to CANCELLED are outcomes; the state is OVER then. Four paths lead through the table:

- aggregated: ask, reserved and started, first token, tokens;
- disaggregated: ask, reserved, accepted, first token, handed off, tokens;
- chained: as disaggregated with one worker that is both, for a worker that cannot start by itself;
- pooled: any of these with a candidate that names a source of the prompt's prefix. The question
  carries the source; the attempt does not look at it.

A reservation is cancelled if a prefill worker was offered it and was lost, or had not answered when
the search ended: that worker may still be writing into its blocks.

No I/O and no clock: `now` is an argument, in seconds that never go back.
Why: docs/adr/0024-one-attempt.md. Tests: tests/property/test_attempt_machine.py,
tests/property/test_attempt_mutations.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvmesh.core.types import (
    Candidate,
    FinishReason,
    Placement,
    Refusal,
    RefusalReason,
    TokenLogprobs,
    WorkerId,
)
from services.gateway.request import actions as act
from services.gateway.request.actions import Action, Actions, Kind, Limits, Outcome, Side, State
from services.gateway.request.candidates import PERMANENT, Candidates
from services.gateway.request.questions import Questions
from services.gateway.wire.worker_events import FirstToken, Tokens

_ASKS = {Kind.RESERVE: State.RESERVING, Kind.OFFER: State.OFFERING, Kind.START: State.STARTING}
_ASKING = frozenset(_ASKS.values())
_UNANSWERED = frozenset({RefusalReason.LOST, RefusalReason.DEADLINE})
_GENERATING = frozenset({State.PREFILL, State.HANDOFF, State.DECODE})


class Attempt:
    """One attempt of one request.

    Args:
        position: of the first token to generate; all tokens before it are known.
        limits: how long it waits for workers.
        deadline: the request ends as late then.
        num_asked: questions of earlier attempts of this request.

    Attributes:
        state: see the table.
        outcome: None until the attempt is over.
        position: of the next token.
        answer_s: wait for the answer to a question; the owner may change it between questions.
    """

    def __init__(self, position: int, limits: Limits, deadline: float, num_asked: int = 0) -> None:
        self.state = State.IDLE
        self.outcome: Outcome | None = None
        self.position = position
        self.answer_s = limits.answer_s
        self._limits = limits
        self._deadline = deadline
        self._progress_at = 0.0
        self._candidates = Candidates()
        self._open = Questions(num_asked)
        self._early: list[tuple[int, Tokens]] = []

    @property
    def num_asked(self) -> int:
        """Number of the last question."""
        return self._open.num_asked

    @property
    def holder(self) -> WorkerId | None:
        """The decode worker whose reservation waits for a prefill worker."""
        return self._open.last.worker_id if self.state is State.HELD else None

    @property
    def asked_at(self) -> float | None:
        """When the question was asked that has no answer yet; None if there is none."""
        return self._progress_at if self.state in _ASKING else None

    @property
    def asked(self) -> Candidate:
        """The worker that was asked last."""
        return self._open.last.candidate

    @property
    def due(self) -> float:
        """When `tick` has to be called if nothing happens before; later events may change it."""
        state, limits = self.state, self._limits
        if state in _GENERATING:
            patience_s = limits.stall_s if state is State.DECODE else limits.prefill_s
            return min(self._progress_at + patience_s, self._deadline)
        if state in _ASKING:
            return min(self._progress_at + self.answer_s, self._candidates.until)
        return math.inf

    # -- Finding workers --------------------------------------------------------------------------

    def ask(
        self, prefill: Sequence[Candidate], decode: Sequence[Candidate], until: float, now: float
    ) -> Actions:
        """Asks the workers of a plan one after the other, until one takes it or none is left.

        Args:
            prefill: workers for the prompt, best first.
            decode: workers for the tokens, best first; empty if the prompt's worker makes them.
            until: the search's deadline.
        """
        assert self.state in (State.IDLE, State.HELD), f"asks when {self.state.value}"
        given_up: Actions = ()
        if self.state is State.HELD and self.holder not in {each.worker_id for each in decode}:
            given_up = self._open.cancel()
        self._candidates.replace(prefill, decode, until)
        return [*given_up, self._ask_next(now)]

    def reserved(
        self, number: int, worker_id: WorkerId, lease_ms: int, now: float, *, starts: bool = False
    ) -> Actions:
        """A worker holds blocks.

        Args:
            starts: it computes the prompt as well.
        """
        asked, state = self._open.blocks, self.state
        if asked is None or asked.number != number:
            return ()
        if state is not State.STARTING and (starts or state is not State.RESERVING):
            return ()
        if worker_id != asked.worker_id:
            # Another worker took over the address; the fleet view will catch up.
            text = f"{worker_id} answered for {asked.worker_id}"
            return self._refused(asked, Side.DECODE, Refusal(RefusalReason.LOST, text), now)
        hold = act.Hold(number, worker_id, lease_ms)
        if starts:
            return [hold, self._taken(now)]
        if state is State.STARTING:
            return [hold, self._ask(Kind.OFFER, asked.candidate, now)]
        return [hold, self._ask_next(now)]

    def accepted(self, number: int, now: float) -> Actions:
        """A prefill worker computes the prompt."""
        if self.state is not State.OFFERING or self._open.last.number != number:
            return ()
        return [self._taken(now)]

    def ended(
        self, number: int, refusal: Refusal, now: float, *, by_prefill: bool = False
    ) -> Actions:
        """A worker refused or failed, or its stream broke.

        Args:
            by_prefill: for a question to both sides of a worker (START): the side that ended it.
        """
        asked = self._open.of(number)
        if asked is None:
            return ()
        side = Side.PREFILL if by_prefill else asked.side
        if self.state in _GENERATING:
            return self._moved(asked, f"{side.value}_failed", refusal.message)
        if self.state in _ASKING and asked is self._open.last:
            return self._refused(asked, side, refusal, now)
        return self._lost_blocks(refusal, now)

    def _ask_next(self, now: float) -> Action:
        self.state = State.IDLE if self._open.blocks is None else State.HELD
        question = self._candidates.next(now, is_reserved=self.state is State.HELD)
        return act.Exhausted() if question is None else self._ask(*question, now)

    def _ask(self, kind: Kind, candidate: Candidate, now: float) -> act.Ask:
        self.state, self._progress_at = _ASKS[kind], now
        return self._open.ask(kind, candidate)

    def _refused(self, by: act.Ask, side: Side, refusal: Refusal, now: float) -> Actions:
        """The worker that was asked last did not take it."""
        blocks, reason = self._open.blocks, refusal.reason
        assert blocks is not None, "a question is open"
        if reason in PERMANENT:
            self._candidates.exclude(by.worker_id)
        # A silent prefill worker may be writing into the blocks; chained, both are one worker.
        if by is blocks or reason in _UNANSWERED or blocks.kind is Kind.START:
            given_up = self._give_up()
        else:
            given_up = self._open.cancel_offer()
        told = act.Refuse(side, refusal, by.worker_id)
        return [*given_up, told, self._ask_next(now)]

    def _lost_blocks(self, refusal: Refusal, now: float) -> Actions:
        """A decode worker lost its reservation."""
        was_offering = self.state is State.OFFERING
        lost = [*self._give_up(), act.Refuse(Side.DECODE, refusal, None)]
        if was_offering:
            return [*lost, self._ask_next(now)]
        self.state = State.IDLE
        return lost

    def _give_up(self) -> Actions:
        """Gives up the blocks; workers that had no room while they were offered may have some."""
        if self._open.offer is not None:
            self._candidates.restart_decode()
        return self._open.cancel()

    def _taken(self, now: float) -> act.Taken:
        prefill, decode = self._open.last, self._open.blocks
        assert decode is not None, "blocks are held"
        self.state, self._progress_at = State.PREFILL, now
        is_one = decode.kind is Kind.START
        placement = Placement.AGGREGATED if is_one else Placement.DISAGGREGATED
        return act.Taken(placement, prefill.worker_id, decode.worker_id)

    # -- Generating -------------------------------------------------------------------------------

    def first_token(self, number: int, event: FirstToken, now: float) -> Actions:
        """The prompt was computed."""
        if self.state is not State.PREFILL or self._open.last.number != number:
            return ()
        if event.finish_reason is FinishReason.ERROR:
            return self._end(Outcome.BROKEN, act.Break(event.error))
        self._progress_at = now
        self.position += 1
        logprobs = () if event.logprobs is None else (event.logprobs,)
        first = act.Deliver((event.token_id,), logprobs, event.finish_reason, event)
        if event.finish_reason is not None:
            return [first, *self._open.forget_offer(), *self._end(Outcome.DONE)]
        self.state = State.HANDOFF
        out: list[Action] = [first]
        if self._open.offer is None:
            out += self._start_decoding()
        early, self._early = self._early, []
        for asked, tokens in early:
            out += self.tokens(asked, now, *tokens)
        return out

    def handed_off(self, number: int, now: float) -> Actions:
        """The KV is complete at the decode worker."""
        if self.state is not State.HANDOFF or self._open.last.number != number:
            return ()
        self._progress_at = now
        return self._start_decoding()

    def tokens(
        self,
        number: int,
        now: float,
        first_position: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        finish: FinishReason | None = None,
        error: str = "",
    ) -> Actions:
        """A decode worker generated tokens; see `Tokens` for the arguments."""
        asked, state = self._open.blocks, self.state
        if asked is None or asked.number != number:
            return ()
        if state is not State.DECODE and state is not State.HANDOFF:
            # The first token comes over another connection, and may come later.
            self._early.append((number, Tokens(first_position, token_ids, logprobs, finish, error)))
            return ()
        num_known = self.position - first_position
        if num_known < 0:
            text = f"tokens at {first_position}, expected {self.position}"
            return self._moved(asked, "token_gap", text)
        self._progress_at = now
        out: list[Action] = []
        if state is State.HANDOFF:
            out += self._start_decoding()
        if finish is FinishReason.ERROR:
            return [*out, *self._end(Outcome.BROKEN, act.Break(error))]
        if num_known:
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        if token_ids or finish is not None:
            self.position += len(token_ids)
            out.append(act.Deliver(token_ids, logprobs, finish))
        if finish is not None:
            out += self._open.forget_blocks()
            out += self._end(Outcome.DONE)
        return out

    def _start_decoding(self) -> Actions:
        decode = self._open.blocks
        assert decode is not None, "blocks are held"
        self.state = State.DECODE
        return [*self._open.forget_offer(), act.Decoding(decode.number, decode.worker_id)]

    # -- Ends -------------------------------------------------------------------------------------

    def tick(self, now: float) -> Actions:
        """Time passed."""
        if now < self.due:
            return ()
        slow = self._open.last
        if self.state in _ASKING:
            reason, text = RefusalReason.LOST, "the worker did not answer in time"
            if now >= self._candidates.until:  # the request ran out of time, not the worker
                reason = RefusalReason.DEADLINE
                text = "the deadline passed before the worker answered"
            return self._refused(slow, slow.side, Refusal(reason, text), now)
        if now >= self._deadline:
            return self._end(Outcome.LATE, act.Expire())
        text = f"no progress at {slow.worker_id}"
        return self._moved(slow, f"{self.state.name.lower()}_stalled", text)

    def cancel(self) -> Actions:
        """Cancels the attempt: its answer is no longer needed. Repeatable."""
        return () if self.outcome is not None else self._end(Outcome.CANCELLED)

    def _moved(self, by: act.Ask, reason: str, text: str) -> Actions:
        return self._end(Outcome.MOVED, act.Move(by.worker_id, reason, text))

    def _end(self, outcome: Outcome, *told: Action) -> Actions:
        self.state, self.outcome = State.OVER, outcome
        return [*self._open.cancel(), *told]
