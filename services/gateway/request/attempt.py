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
rows from DONE to CANCELLED are outcomes; the state is OVER then. Four ways lead through the table:

- aggregated: ask, reserved and started, first token, tokens;
- disaggregated: ask, reserved, accepted, first token, handed off, tokens;
- chained: as disaggregated with one worker that is both, for a worker that cannot start by itself;
- pooled: any of these with a candidate that names a source of the prompt's prefix. The question
  carries the source; the attempt does not look at it.

A reservation is given up if a prefill worker was offered it and was lost, or had not answered when
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
        num_asked: number of the last question.
        num_offers: how often a prompt was offered to a worker that has answered or was lost.
    """

    def __init__(self, position: int, limits: Limits, deadline: float, num_asked: int = 0) -> None:
        self.state = State.IDLE
        self.outcome: Outcome | None = None
        self.position = position
        self.num_asked = num_asked
        self.num_offers = 0
        self._limits = limits
        self._deadline = deadline
        self._progress_at = 0.0
        self._candidates = Candidates()
        # What is open at workers, from the question until Forget or Cancel.
        self._decode: act.Ask | None = None
        self._prefill: act.Ask | None = None
        self._early: list[tuple[int, Tokens]] = []

    @property
    def holder(self) -> WorkerId | None:
        """The decode worker whose reservation waits for a prefill worker."""
        return self._last_asked.worker_id if self.state is State.HELD else None

    @property
    def due(self) -> float:
        """When `tick` has to be called if nothing happens before; later events may change it."""
        state, limits = self.state, self._limits
        if state in _GENERATING:
            patience_s = limits.stall_s if state is State.DECODE else limits.prefill_s
            return min(self._progress_at + patience_s, self._deadline)
        if state in _ASKING:
            return min(self._progress_at + limits.answer_s, self._candidates.until)
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
        out: list[Action] = []
        if self.state is State.HELD and self.holder not in {each.worker_id for each in decode}:
            self._cancel_decode(out)
        self._candidates.replace(prefill, decode, until)
        return self._ask_next(out, now)

    def reserved(
        self, number: int, worker_id: WorkerId, lease_ms: int, now: float, *, starts: bool = False
    ) -> Actions:
        """A worker holds blocks.

        Args:
            starts: it computes the prompt as well.
        """
        asked, state = self._decode, self.state
        if asked is None or asked.number != number:
            return ()
        if state is not State.STARTING and (starts or state is not State.RESERVING):
            return ()
        if worker_id != asked.worker_id:
            # Another worker took over the address; the fleet view will catch up.
            text = f"{worker_id} answered for {asked.worker_id}"
            return self._refused(asked, Side.DECODE, Refusal(RefusalReason.LOST, text), now)
        out: list[Action] = [act.Hold(number, worker_id, lease_ms)]
        if starts:
            return self._taken(out, now)
        if state is State.STARTING:
            out.append(self._ask(Kind.OFFER, asked.candidate, now))
            return out
        self.state = State.HELD
        return self._ask_next(out, now)

    def accepted(self, number: int, now: float) -> Actions:
        """A prefill worker computes the prompt."""
        if self.state is not State.OFFERING or self._last_asked.number != number:
            return ()
        return self._taken([], now)

    def ended(
        self, number: int, refusal: Refusal, now: float, *, by_prefill: bool = False
    ) -> Actions:
        """A worker refused or failed, or its stream broke.

        Args:
            by_prefill: for a question to both sides of a worker (START): the side that ended it.
        """
        both = (self._prefill, self._decode)
        asked = next((each for each in both if each is not None and each.number == number), None)
        if asked is None:
            return ()
        side = Side.PREFILL if by_prefill else asked.side
        if self.state not in _GENERATING:
            return self._refused(asked, side, refusal, now)
        move = act.Move(asked.worker_id, f"{side.value}_failed", refusal.message)
        return self._end([], Outcome.MOVED, move)

    def _ask_next(self, out: list[Action], now: float) -> Actions:
        question = self._candidates.next(now, is_reserved=self.state is State.HELD)
        out.append(act.Exhausted() if question is None else self._ask(*question, now))
        return out

    def _ask(self, kind: Kind, candidate: Candidate, now: float) -> act.Ask:
        self.num_asked += 1
        asked = act.Ask(kind, self.num_asked, candidate)
        if kind is Kind.OFFER:
            self._prefill = asked
        else:
            self._decode = asked
        self.state = _ASKS[kind]
        self._progress_at = now
        return asked

    def _refused(self, by: act.Ask, side: Side, refusal: Refusal, now: float) -> Actions:
        """The worker asked last did not take it, or a decode worker lost its reservation."""
        offer, reservation = self._prefill, self._decode
        assert reservation is not None, "a question is open"
        out: list[Action] = []
        was_asking = self.state in _ASKING
        is_answer = was_asking and by is self._last_asked
        if is_answer and refusal.reason in PERMANENT:
            self._candidates.exclude(by.worker_id)
        self.num_offers += offer is not None or side is Side.PREFILL
        self._cancel_prefill(out)
        # Who did not answer may be writing into the blocks; chained, both sides are one worker.
        is_lost = refusal.reason in _UNANSWERED
        if by is reservation or is_lost or reservation.kind is Kind.START:
            self._cancel_decode(out)
            if offer is not None:
                self._candidates.restart_decode()
        if is_answer:
            out.append(act.Refuse(side, refusal, by.worker_id))
        else:  # it may be asked again
            out.append(act.Refuse(Side.DECODE, refusal, None))
        return self._ask_next(out, now) if was_asking else out

    def _taken(self, out: list[Action], now: float) -> Actions:
        prefill, decode = self._last_asked, self._decode
        assert decode is not None, "blocks are held"
        self.num_offers += 1
        self.state = State.PREFILL
        self._progress_at = now
        is_one = decode.kind is Kind.START
        placement = Placement.AGGREGATED if is_one else Placement.DISAGGREGATED
        out.append(act.Taken(placement, prefill.worker_id, decode.worker_id))
        return out

    # -- Generating -------------------------------------------------------------------------------

    def first_token(self, number: int, event: FirstToken, now: float) -> Actions:
        """The prompt was computed."""
        if self.state is not State.PREFILL or self._last_asked.number != number:
            return ()
        if event.finish_reason is FinishReason.ERROR:
            return self._end([], Outcome.BROKEN, act.Break(event.error))
        self._progress_at = now
        self.position += 1
        logprobs = () if event.logprobs is None else (event.logprobs,)
        out: list[Action] = [act.Deliver((event.token_id,), logprobs, event.finish_reason, event)]
        if event.finish_reason is not None:
            self._forget_prefill(out)
            return self._end(out, Outcome.DONE)
        self.state = State.HANDOFF
        if self._prefill is None:
            self._start_decoding(out)
        early, self._early = self._early, []
        for asked, tokens in early:
            out += self.tokens(asked, now, *tokens)
        return out

    def handed_off(self, number: int, now: float) -> Actions:
        """The KV is complete at the decode worker."""
        out: list[Action] = []
        if self.state is State.HANDOFF and self._last_asked.number == number:
            self._progress_at = now
            self._start_decoding(out)
        return out

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
        asked, state = self._decode, self.state
        if asked is None or asked.number != number:
            return ()
        if state is not State.DECODE and state is not State.HANDOFF:
            # The first token comes over another connection, and may come later.
            self._early.append((number, Tokens(first_position, token_ids, logprobs, finish, error)))
            return ()
        out: list[Action] = []
        num_known = self.position - first_position
        if num_known < 0:
            text = f"tokens at {first_position}, expected {self.position}"
            return self._end(out, Outcome.MOVED, act.Move(asked.worker_id, "token_gap", text))
        self._progress_at = now
        if state is State.HANDOFF:
            self._start_decoding(out)
        if finish is FinishReason.ERROR:
            return self._end(out, Outcome.BROKEN, act.Break(error))
        if num_known:
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        if token_ids or finish is not None:
            self.position += len(token_ids)
            out.append(act.Deliver(token_ids, logprobs, finish))
        if finish is not None:
            out.append(act.Forget(Side.DECODE, number))
            self._decode = None
            self._end(out, Outcome.DONE)
        return out

    def _start_decoding(self, out: list[Action]) -> None:
        assert self._decode is not None, "blocks are held"
        self._forget_prefill(out)
        out.append(act.Decoding(self._decode.number, self._decode.worker_id))
        self.state = State.DECODE

    # -- Ends -------------------------------------------------------------------------------------

    def tick(self, now: float) -> Actions:
        """Time passed."""
        if now < self.due:
            return ()
        slow = self._last_asked
        if self.state in _ASKING:
            reason, text = RefusalReason.LOST, "the worker did not answer in time"
            if now >= self._candidates.until:  # the request ran out of time, not the worker
                reason = RefusalReason.DEADLINE
                text = "the deadline passed before the worker answered"
            return self._refused(slow, slow.side, Refusal(reason, text), now)
        if now >= self._deadline:
            return self._end([], Outcome.LATE, act.Expire())
        text = f"no progress at {slow.worker_id}"
        move = act.Move(slow.worker_id, f"{self.state.name.lower()}_stalled", text)
        return self._end([], Outcome.MOVED, move)

    def cancel(self) -> Actions:
        """Nobody wants it any more; may be called again."""
        return () if self.outcome is not None else self._end([], Outcome.CANCELLED)

    def _end(self, out: list[Action], outcome: Outcome, word: Action | None = None) -> Actions:
        self._cancel_prefill(out)
        self._cancel_decode(out)
        self.state, self.outcome = State.OVER, outcome
        if word is not None:
            out.append(word)
        return out

    # -- What is open at workers ------------------------------------------------------------------

    @property
    def _last_asked(self) -> act.Ask:
        asked = self._prefill or self._decode
        assert asked is not None, "a worker knows of it"
        return asked

    def _forget_prefill(self, out: list[Action]) -> None:
        if self._prefill is not None:
            out.append(act.Forget(Side.PREFILL, self._prefill.number))
            self._prefill = None

    def _cancel_prefill(self, out: list[Action]) -> None:
        if self._prefill is not None:
            out.append(act.Cancel(Side.PREFILL, self._prefill.number))
            self._prefill = None
            self.state = State.HELD

    def _cancel_decode(self, out: list[Action]) -> None:
        if self._decode is not None:
            out.append(act.Cancel(Side.DECODE, self._decode.number))
            self._decode = None
        self.state = State.IDLE
