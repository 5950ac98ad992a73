"""One attempt at workers as a state table: who is asked, which tokens count, when it is lost.

An attempt lasts from the search for workers to the last token, or until one of them loses it; then
the next attempt goes on behind the tokens that are there. What a worker says carries the number of
the question that it answers; numbers are never used twice, and what is said to an older one is not
heard.

    state      event                                   next       actions
    ---------  --------------------------------------  ---------  ------------------------------
    IDLE       ask, plan for two workers               RESERVING  Ask RESERVE the first one
    IDLE       ask, plan for one worker                STARTING   Ask START the first one
    HELD       ask, its worker is in the plan          OFFERING   Ask OFFER the first one
    HELD       ask, it is not                          as IDLE    Cancel decode first
    any above  ask, nobody to ask or no time left      same       Vain
    RESERVING  reserved                                OFFERING   Hold, Ask OFFER the next one
    STARTING   started                                 PREFILL    Hold, Taken
    STARTING   reserved: it only reserves              OFFERING   Hold, Ask OFFER the same worker
    RES., STA. reserved or started by another worker   as refused with LOST
    RES., STA. refused, failed, no answer in time      IDLE       Cancel decode, Refuse, next one
    OFFERING   accepted                                PREFILL    Taken
    OFFERING   refused, failed or late, by prefill     HELD       Cancel prefill, Refuse, next one
    OFFERING   the same with LOST, or decode is it too IDLE       Cancel both, Refuse, next one
    OFFERING   failed by decode                        IDLE       Cancel both, Refuse, next one
    HELD       failed by decode                        IDLE       Cancel decode, Refuse
    PREFILL    first token, two workers                HANDOFF    Deliver it, then what came early
    PREFILL    first token, one worker                 DECODE     Deliver it, Decoding, early ones
    PREFILL    first token is the last                 DONE       Deliver it, Cancel decode
    PREFILL    nothing for `prefill_s`                 MOVED      Cancel, Move: prefill_stalled
    HANDOFF    handed off                              DECODE     Forget prefill, Decoding
    HANDOFF    tokens                                  as handed off, then as DECODE
    HANDOFF    nothing for `prefill_s`                 MOVED      Cancel, Move: handoff_stalled
    DECODE     tokens, some of them the next ones      DECODE     Deliver those that are new
    DECODE     tokens, all of them known               DECODE
    DECODE     tokens behind the next one              MOVED      Cancel, Move: token_gap
    DECODE     tokens, the last ones                   DONE       Deliver those that are new, Forget
    DECODE     nothing for `stall_s`                   MOVED      Cancel, Move: decode_stalled
    before     tokens of decode                        same       kept until the first token is here
    PRE.-DEC.  refused or failed                       MOVED      Cancel, Move: <side>_failed
    PRE.-DEC.  a token that cannot be                  BROKEN     Cancel, Break
    PRE.-DEC.  the request's deadline                  LATE       Cancel, Expire
    any        cancel                                  CANCELLED  Cancel
    any        anything else                           same

Rows of ways: aggregated is START and started; disaggregated is RESERVE, reserved, OFFER, accepted,
first token, handed off; chained is START to a worker that only reserves, and OFFER to the same one;
pooled is any of these with a candidate that names who holds the prompt's prefix, which the question
carries along: to the attempt it is no other way. A reservation that was shown to a prefill worker
which did not answer is given up: that one may be writing there, and would beside the next one. Who
refused for ever is not asked again.

No I/O and no clock: `now` is an argument, in seconds that never go back.
Tests: tests/property/test_attempt_machine.py, tests/property/test_attempt_mutations.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

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
from services.gateway.wire.worker_events import FirstToken

NEVER = frozenset({RefusalReason.TOO_LONG, RefusalReason.INVALID})
"""Refusals that would be repeated for ever."""

_ASKS = {Kind.RESERVE: State.RESERVING, Kind.OFFER: State.OFFERING, Kind.START: State.STARTING}
_WAITS = frozenset(_ASKS.values())
_RUNS = frozenset({State.PREFILL, State.HANDOFF, State.DECODE})
_OUTCOMES = {act.Break: Outcome.BROKEN, act.Expire: Outcome.LATE, act.Move: Outcome.MOVED}
_STALLED = {State.PREFILL: "prefill_stalled", State.HANDOFF: "handoff_stalled"}


_Early = tuple[int, Sequence[int], Sequence[TokenLogprobs], FinishReason | None, str]


class _Open(NamedTuple):
    """What a worker knows of."""

    number: int
    candidate: Candidate


class Attempt:
    """One attempt of one request.

    Args:
        position: of the first token that is wanted; all before it are known.
        limits: how long it waits for what.
        deadline: then the request has run for too long.
        num_asked: questions of attempts before.

    Attributes:
        state: see the table.
        outcome: None before the end.
        position: of the next token.
        num_asked: questions so far; the number of the last one.
        num_offers: prompts shown that were taken, refused or lost.
    """

    def __init__(self, position: int, limits: Limits, deadline: float, num_asked: int = 0) -> None:
        self.state = State.IDLE
        self.outcome: Outcome | None = None
        self.position = position
        self.num_asked = num_asked
        self.num_offers = 0
        self._limits = limits
        self._deadline = deadline
        self._until = math.inf
        self._since = 0.0  # the last thing happened
        self._decode: _Open | None = None
        self._prefill: _Open | None = None
        self._holders: Sequence[Candidate] = ()
        self._to_reserve: deque[Candidate] = deque()
        self._to_offer: deque[Candidate] = deque()
        self._unfit: set[WorkerId] = set()
        self._early: list[_Early] = []
        self._is_chained = False

    @property
    def holder(self) -> WorkerId | None:
        """The worker whose blocks wait for a prefill worker."""
        return _worker(self._decode) if self.state is State.HELD else None

    @property
    def due(self) -> float:
        """When `tick` has something to do, if nothing happens before; it may come to be sooner."""
        state, limits = self.state, self._limits
        if state in _RUNS:
            patience_s = limits.stall_s if state is State.DECODE else limits.prefill_s
            return min(self._since + patience_s, self._deadline)
        if state in _WAITS:
            return min(self._since + limits.answer_s, self._until)
        return math.inf

    # -- The search for workers -------------------------------------------------------------------

    def ask(
        self, prefill: Sequence[Candidate], decode: Sequence[Candidate], until: float, now: float
    ) -> Actions:
        """Asks the workers of a plan, one after the other, until one takes it or none is left.

        Args:
            prefill: where the prompt may be computed, in this order.
            decode: where tokens may be made, in this order; empty: where the prompt is.
            until: then nobody is asked any more.
        """
        assert self.state in (State.IDLE, State.HELD), f"asks when {self.state.value}"
        self._until = until
        self._holders = decode
        self._to_reserve, self._to_offer = deque(decode), deque(prefill)
        out: list[Action] = []
        if self.state is State.HELD and self.holder not in {each.worker_id for each in decode}:
            self._drop_decode(out)
        return self._next(out, now)

    def reserved(self, number: int, worker_id: WorkerId, lease_ms: int, now: float) -> Actions:
        """A worker holds blocks."""
        return self._is_held(number, worker_id, lease_ms, now, starts=False)

    def started(self, number: int, worker_id: WorkerId, lease_ms: int, now: float) -> Actions:
        """A worker holds blocks and computes the prompt in them."""
        return self._is_held(number, worker_id, lease_ms, now, starts=True)

    def _is_held(
        self, number: int, worker_id: WorkerId, lease_ms: int, now: float, *, starts: bool
    ) -> Actions:
        opened, state = self._decode, self.state
        if opened is None or opened.number != number:
            return ()
        if state is not State.STARTING and (starts or state is not State.RESERVING):
            return ()
        candidate = opened.candidate
        if worker_id != candidate.worker_id:
            # Another worker took over the address; the fleet view will catch up.
            text = f"{worker_id} answered for {candidate.worker_id}"
            return self._refused(Side.DECODE, Refusal(RefusalReason.LOST, text), now)
        out: list[Action] = [act.Hold(number, worker_id, lease_ms)]
        if starts:
            return self._is_taken(out, Placement.AGGREGATED, worker_id, now)
        if state is State.STARTING:
            self._is_chained = True
            out.append(self._ask(Kind.OFFER, candidate, now))
            return out
        self.state = State.HELD
        return self._next(out, now)

    def accepted(self, number: int, now: float) -> Actions:
        """A prefill worker computes the prompt."""
        opened = self._prefill
        if self.state is not State.OFFERING or opened is None or opened.number != number:
            return ()
        chained = self._is_chained
        placement = Placement.AGGREGATED if chained else Placement.DISAGGREGATED
        return self._is_taken([], placement, opened.candidate.worker_id, now)

    def ended(
        self, number: int, refusal: Refusal, now: float, *, by_prefill: bool = False
    ) -> Actions:
        """A worker refused, or failed, or its stream broke.

        Args:
            by_prefill: where one question was for both sides, which of them says so.
        """
        side = self._side(number)
        if side is None:
            return ()
        says = Side.PREFILL if by_prefill else side
        if self.state in _RUNS:
            opened = self._prefill if side is Side.PREFILL else self._decode
            worker_id, reason = _worker(opened), f"{says.value}_failed"
            return self._end(act.Move(worker_id, reason, refusal.message))
        if side is Side.PREFILL or self.state in (State.RESERVING, State.STARTING):
            return self._refused(says, refusal, now)
        # The reservation is lost while it waits for a prefill worker.
        out: list[Action] = []
        was_shown = self._prefill is not None
        self.num_offers += was_shown
        self._drop_prefill(out)
        self._drop_decode(out)
        out.append(act.Refuse(Side.DECODE, refusal, None))
        self._to_reserve = deque(self._holders)
        return self._next(out, now) if was_shown else out

    def _next(self, out: list[Action], now: float) -> Actions:
        """Asks whoever is next."""
        if now < self._until:
            is_held = self.state is State.HELD
            kind = Kind.OFFER if is_held else Kind.RESERVE if self._holders else Kind.START
            line = self._to_reserve if kind is Kind.RESERVE else self._to_offer
            while line and self._to_offer:
                candidate = line.popleft()
                if candidate.worker_id not in self._unfit:
                    out.append(self._ask(kind, candidate, now))
                    return out
        out.append(act.Vain())
        return out

    def _ask(self, kind: Kind, candidate: Candidate, now: float) -> act.Ask:
        self.num_asked += 1
        opened = _Open(self.num_asked, candidate)
        if kind is Kind.OFFER:
            self._prefill = opened
        else:
            self._decode, self._is_chained = opened, False
        self.state = _ASKS[kind]
        self._since = now
        return act.Ask(kind, opened.number, candidate)

    def _refused(self, side: Side, refusal: Refusal, now: float) -> Actions:
        """The worker that was asked last did not take it."""
        out: list[Action] = []
        is_offer = self.state is State.OFFERING
        opened = self._prefill if is_offer else self._decode
        self.num_offers += side is Side.PREFILL
        if refusal.reason in NEVER:
            self._unfit.add(_worker(opened))
        if is_offer:
            self._drop_prefill(out)
        if not is_offer or self._is_chained or refusal.reason is RefusalReason.LOST:
            self._drop_decode(out)
            if is_offer:
                self._to_reserve = deque(self._holders)
        out.append(act.Refuse(side, refusal, _worker(opened)))
        return self._next(out, now)

    def _is_taken(
        self, out: list[Action], placement: Placement, worker_id: WorkerId, now: float
    ) -> Actions:
        self.num_offers += 1
        self.state = State.PREFILL
        self._since = now
        out.append(act.Taken(placement, worker_id, _worker(self._decode)))
        return out

    # -- Tokens -----------------------------------------------------------------------------------

    def first_token(self, number: int, event: FirstToken, now: float) -> Actions:
        """The prompt was computed; its token is at the end of the sequence that was sent."""
        opened = self._prefill or self._decode
        if self.state is not State.PREFILL or opened is None or opened.number != number:
            return ()
        if event.finish_reason is FinishReason.ERROR:
            return self._end(act.Break(event.error))
        self._since = now
        self.position += 1
        logprobs = () if event.logprobs is None else (event.logprobs,)
        out: list[Action] = [act.Deliver((event.token_id,), logprobs, event.finish_reason, event)]
        if event.finish_reason is not None:
            self._forget_prefill(out)
            return self._close(out, Outcome.DONE)
        self.state = State.HANDOFF
        if self._prefill is None:
            self._is_handed_off(out)
        early, self._early = self._early, []
        for first, token_ids, scores, finish, error in early:
            if self._decode is not None:
                number = self._decode.number
                out += self.tokens(number, first, token_ids, now, scores, finish, error)
        return out

    def handed_off(self, number: int, now: float) -> Actions:
        """The KV is complete at the decode worker."""
        out: list[Action] = []
        if self.state is State.HANDOFF and self._side(number) is Side.PREFILL:
            self._since = now
            self._is_handed_off(out)
        return out

    def tokens(
        self,
        number: int,
        first_position: int,
        token_ids: Sequence[int],
        now: float,
        logprobs: Sequence[TokenLogprobs] = (),
        finish: FinishReason | None = None,
        error: str = "",
    ) -> Actions:
        """A decode worker made tokens.

        Args:
            first_position: of the first one, from the start of the sequence.
            error: why a token cannot be, where `finish` says so.
        """
        opened, state = self._decode, self.state
        if opened is None or opened.number != number:
            return ()
        if state is not State.DECODE and state is not State.HANDOFF:
            # Decode may speak before the first token is here: they come over different connections.
            self._early.append((first_position, token_ids, logprobs, finish, error))
            return ()
        repeated = self.position - first_position
        if repeated < 0:
            text = f"tokens at {first_position}, expected {self.position}"
            return self._end(act.Move(opened.candidate.worker_id, "token_gap", text))
        self._since = now
        out: list[Action] = []
        if state is State.HANDOFF:
            self._is_handed_off(out)
        if finish is FinishReason.ERROR:
            return [*out, *self._end(act.Break(error))]
        if repeated:
            token_ids, logprobs = token_ids[repeated:], logprobs[repeated:]
        if token_ids or finish is not None:
            self.position += len(token_ids)
            out.append(act.Deliver(token_ids, logprobs, finish))
        if finish is not None:
            out.append(act.Forget(Side.DECODE, number))
            self._decode = None
            self._close(out, Outcome.DONE)
        return out

    def _is_handed_off(self, out: list[Action]) -> None:
        assert self._decode is not None, "blocks are held"
        self._forget_prefill(out)
        out.append(act.Decoding(self._decode.number, self._decode.candidate.worker_id))
        self.state = State.DECODE

    # -- Ends -------------------------------------------------------------------------------------

    def tick(self, now: float) -> Actions:
        """Time passed."""
        if now < self.due:
            return ()
        if self.state in _WAITS:
            side = Side.PREFILL if self.state is State.OFFERING else Side.DECODE
            if now >= self._until:  # the request ran out of time, not the worker
                text = "the deadline passed before the worker answered"
                return self._refused(side, Refusal(RefusalReason.DEADLINE, text), now)
            text = "the worker did not answer in time"
            return self._refused(side, Refusal(RefusalReason.LOST, text), now)
        if now >= self._deadline:
            return self._end(act.Expire())
        slow = _worker(self._prefill or self._decode)
        reason = _STALLED.get(self.state, "decode_stalled")
        return self._end(act.Move(slow, reason, f"no progress at {slow}"))

    def cancel(self) -> Actions:
        """Nobody wants it any more; may be called again."""
        return () if self.outcome is not None else self._close([], Outcome.CANCELLED)

    def _end(self, word: act.Move | act.Break | act.Expire) -> Actions:
        out = list(self._close([], _OUTCOMES[type(word)]))
        out.append(word)
        return out

    def _close(self, out: list[Action], outcome: Outcome) -> Actions:
        self._drop_prefill(out)
        self._drop_decode(out)
        self.state, self.outcome = State.OVER, outcome
        return out

    def _forget_prefill(self, out: list[Action]) -> None:
        if self._prefill is not None:
            out.append(act.Forget(Side.PREFILL, self._prefill.number))
            self._prefill = None

    def _drop_prefill(self, out: list[Action]) -> None:
        if self._prefill is not None:
            out.append(act.Cancel(Side.PREFILL, self._prefill.number))
            self._prefill = None
            self.state = State.HELD

    def _drop_decode(self, out: list[Action]) -> None:
        if self._decode is not None:
            out.append(act.Cancel(Side.DECODE, self._decode.number))
            self._decode = None
        self._early.clear()
        self.state = State.IDLE

    def _side(self, number: int) -> Side | None:
        """Of what is open; None if it is not open any more."""
        if self._prefill is not None and self._prefill.number == number:
            return Side.PREFILL
        if self._decode is not None and self._decode.number == number:
            return Side.DECODE
        return None


def _worker(opened: _Open | None) -> WorkerId:
    assert opened is not None, "a worker knows of it"
    return opened.candidate.worker_id
