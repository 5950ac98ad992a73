"""One attempt to run a request on one or two workers, as a state table.

It begins with the search for workers. It ends with the last token, or when a worker loses the
request: the next attempt then continues behind the tokens that were delivered. Each question to a
worker has a new number, which the worker's answers carry. An answer is ignored if its question is
not open any more.

    state      event                                   next       actions
    ---------  --------------------------------------  ---------  ------------------------------
    IDLE       ask, blocks are held outside the plan   ASKING     Cancel decode, ask next
    IDLE       ask                                     ASKING     ask next
    ASKING     reserved                                ASKING     Hold, ask next
    ASKING     started                                 PREFILL    Hold, Taken
    ASKING     accepted                                PREFILL    Taken
    ASKING     an offer is refused or failed           ASKING     Cancel prefill, Refuse, ask next
    ASKING     the same, LOST, DEADLINE or chained     ASKING     Cancel both, Refuse, ask next
    ID., ASK.  blocks are refused or lost              ASKING     Cancel both, Refuse, ask next
    ASKING     no answer in `answer_s`                 as refused with LOST, Unanswered before it
    ASKING     the search's deadline                   as refused with DEADLINE
    PREFILL    first token, two workers                HANDOFF    Deliver it, then early tokens
    PREFILL    first token, one worker                 DECODE     Deliver it, Decoding, early tokens
    PREFILL    first token, it is the last             DONE       Deliver it, Cancel decode
    to PREF.   tokens                                  same       kept as early tokens
    HANDOFF    handed off                              DECODE     Forget prefill, Decoding
    HANDOFF    tokens                                  as handed off, then as in DECODE
    DECODE     tokens from the next position or before DECODE     Deliver those that are new
    DECODE     tokens behind the next position         MOVED      Cancel, Move: token_gap
    DECODE     the last tokens                         DONE       Deliver those that are new, Forget
    PRE.-DEC.  refused or failed                       MOVED      Cancel, Move: <side>_failed
    PRE., HAN. progress                                same       wait for another `prefill_s`
    PRE., HAN. nothing for `prefill_s`                 MOVED      Cancel, Move: <state>_stalled
    DECODE     nothing for `stall_s`                   MOVED      Cancel, Move: decode_stalled
    PRE.-DEC.  a token that cannot be generated        BROKEN     Cancel, Break
    PRE.-DEC.  the request's deadline                  LATE       Cancel, Expire
    any        cancel                                  CANCELLED  Cancel
    any        anything else                           same

"Ask next" asks the plan's next worker: a decode worker to RESERVE blocks, or if the plan has none,
a prefill worker to START. Once blocks are held, it is an OFFER to the next prefill worker, or to
the same worker if that was asked to START. Without a worker or time: Exhausted, and the state is
IDLE. The rows from DONE to CANCELLED are outcomes; the state is OVER then. Four paths lead through
the table:

- aggregated: ask, started, first token, tokens;
- disaggregated: ask, reserved, accepted, first token, handed off, tokens;
- chained: as disaggregated with one worker that is both, because it cannot start by itself now;
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
from collections.abc import Iterator, Sequence

from kvmesh.core.types import Candidate, FinishReason, Placement, Refusal, RefusalReason
from services.gateway.request import actions as act
from services.gateway.request.actions import Action, Actions, Kind, Limits, Outcome, Side, State
from services.gateway.request.candidates import Candidates
from services.gateway.request.questions import Questions
from services.gateway.wire.worker_events import FirstToken, Tokens

_GENERATING = frozenset({State.PREFILL, State.HANDOFF, State.DECODE})


class Attempt:
    """One attempt of one request.

    Args:
        position: of the first token to generate; all tokens before it are known.
        limits: how long it waits for workers.
        deadline: the request ends as late then.
        numbers: of its questions; the request's attempts share them.

    Attributes:
        state: see the table.
        outcome: None until the attempt is over.
        position: of the next token.
        answer_s: wait for the answer to a question; the owner may change it between questions.
    """

    def __init__(
        self, position: int, limits: Limits, deadline: float, numbers: Iterator[int]
    ) -> None:
        self.state = State.IDLE
        self.outcome: Outcome | None = None
        self.position = position
        self.answer_s = limits.answer_s
        self._limits = limits
        self._deadline = deadline
        self._progress_at = 0.0
        self._candidates = Candidates()
        self._open = Questions(numbers)
        self._early: list[tuple[int, Tokens]] = []

    @property
    def holds(self) -> bool:
        """Whether a decode worker's reservation waits for a prefill worker."""
        return self.state is State.IDLE and self._open.blocks is not None

    @property
    def due(self) -> float:
        """When `tick` has to be called if nothing happens before; later events may change it."""
        state, limits = self.state, self._limits
        if state in _GENERATING:
            patience_s = limits.stall_s if state is State.DECODE else limits.prefill_s
            return min(self._progress_at + patience_s, self._deadline)
        if state is State.ASKING:
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
        assert self.state is State.IDLE, f"asks when {self.state.value}"
        self._candidates.replace(prefill, decode, until)
        return [*self._open.cancel_unplanned(decode), self._ask_next(now)]

    def reserved(self, number: int, lease_ms: int, now: float, *, starts: bool = False) -> Actions:
        """A worker holds blocks.

        Args:
            starts: it computes the prompt as well.
        """
        asked = self._last(number, State.ASKING)
        if asked is None or asked.kind is Kind.OFFER:
            return ()
        hold = act.Hold(number, asked.worker_id, lease_ms)
        return [hold, self._taken(now) if starts else self._ask_next(now)]

    def accepted(self, number: int, now: float) -> Actions:
        """A prefill worker computes the prompt."""
        asked = self._last(number, State.ASKING)
        if asked is None or asked.kind is not Kind.OFFER:
            return ()
        return [self._taken(now)]

    def ended(self, number: int, side: Side, refusal: Refusal, now: float) -> Actions:
        """A side of a worker refused or failed, or its stream broke."""
        asked = self._open.of(number)
        if asked is None:
            return ()
        if self.state in _GENERATING:
            return self._moved(asked, f"{side.value}_failed", refusal.message)
        return self._refused(asked, side, refusal, now)

    def _last(self, number: int, *states: State) -> act.Ask | None:
        """The latest question, if it has this number and the attempt is in one of these states."""
        is_it = self.state in states and self._open.last.number == number
        return self._open.last if is_it else None

    def _ask_next(self, now: float) -> Action:
        question = self._candidates.next(now, self._open.blocks)
        if question is None:
            self.state = State.IDLE
            return act.Exhausted()
        self.state, self._progress_at = State.ASKING, now
        return self._open.ask(*question)

    def _refused(self, by: act.Ask, side: Side, refusal: Refusal, now: float) -> Actions:
        """A worker did not take what it was asked, or lost the blocks that it held."""
        self._candidates.refused(by.worker_id, refusal.reason)
        given_up = self._open.refused(by, refusal.reason)
        return [*given_up, act.Refuse(side, refusal, by.worker_id), self._ask_next(now)]

    def _taken(self, now: float) -> act.Taken:
        prefill, decode = self._open.last, self._open.decoder
        self.state, self._progress_at = State.PREFILL, now
        is_one = decode.kind is Kind.START
        placement = Placement.AGGREGATED if is_one else Placement.DISAGGREGATED
        return act.Taken(placement, prefill.worker_id, decode.worker_id)

    # -- Generating -------------------------------------------------------------------------------

    def progress(self, number: int, now: float) -> Actions:
        """The prefill worker has computed or sent more."""
        if self._last(number, State.PREFILL, State.HANDOFF) is not None:
            self._progress_at = now
        return ()

    def first_token(self, number: int, event: FirstToken, now: float) -> Actions:
        """The prompt was computed."""
        if self._last(number, State.PREFILL) is None:
            return ()
        self.state, self._progress_at = State.HANDOFF, now
        out = self._deliver(event.at(self.position), event)
        if self.outcome is not None:
            return out
        if self._open.offer is None:
            out += self._start_decoding(now)
        early, self._early = self._early, []
        for asked, tokens in early:
            out += self.tokens(asked, tokens, now)
        return out

    def handed_off(self, number: int, now: float) -> Actions:
        """The KV is complete at the decode worker."""
        return () if self._last(number, State.HANDOFF) is None else self._start_decoding(now)

    def tokens(self, number: int, event: Tokens, now: float) -> Actions:
        """A decode worker generated tokens."""
        asked, state = self._open.blocks, self.state
        if asked is None or asked.number != number:
            return ()
        if state is not State.DECODE and state is not State.HANDOFF:
            # The first token comes over another connection, and may come later.
            self._early.append((number, event))
            return ()
        num_known = self.position - event.first_position
        if num_known < 0:
            text = f"tokens at {event.first_position}, expected {self.position}"
            return self._moved(asked, "token_gap", text)
        self._progress_at = now
        if num_known:
            event = event.without(num_known)
        out = self._start_decoding(now) if state is State.HANDOFF else []
        if event.token_ids or event.finish_reason is not None:
            out += self._deliver(event)
        return out

    def _deliver(self, event: Tokens, first: FirstToken | None = None) -> list[Action]:
        """Delivers the next tokens; the last ones end the attempt, and their worker's question."""
        _, token_ids, logprobs, finish, error = event
        if finish is FinishReason.ERROR:
            return self._end(Outcome.BROKEN, act.Break(error))
        self.position += len(token_ids)
        deliver = act.Deliver(token_ids, logprobs, finish, first)
        if finish is None:
            return [deliver]
        done = self._open.forget_blocks() if first is None else self._open.forget_offer()
        return [deliver, *done, *self._end(Outcome.DONE)]

    def _start_decoding(self, now: float) -> list[Action]:
        decode = self._open.decoder
        self.state, self._progress_at = State.DECODE, now
        return [*self._open.forget_offer(), act.Decoding(decode.number, decode.worker_id)]

    # -- Ends -------------------------------------------------------------------------------------

    def tick(self, now: float) -> Actions:
        """Time passed."""
        if now < self.due:
            return ()
        slow = self._open.last
        if self.state is State.ASKING:
            if now >= self._candidates.until:  # the request ran out of time, not the worker
                text = "the deadline passed before the worker answered"
                return self._refused(slow, slow.side, Refusal(RefusalReason.DEADLINE, text), now)
            silent = act.Unanswered(slow.candidate, self._progress_at)
            lost = Refusal(RefusalReason.LOST, "the worker did not answer in time")
            return [silent, *self._refused(slow, slow.side, lost, now)]
        if now >= self._deadline:
            return self._end(Outcome.LATE, act.Expire())
        text = f"no progress at {slow.worker_id}"
        return self._moved(slow, f"{self.state.name.lower()}_stalled", text)

    def cancel(self) -> Actions:
        """Cancels the attempt: its answer is no longer needed. Repeatable."""
        return () if self.outcome is not None else self._end(Outcome.CANCELLED)

    def _moved(self, by: act.Ask, reason: str, text: str) -> Actions:
        return self._end(Outcome.MOVED, act.Move(by.worker_id, reason, text))

    def _end(self, outcome: Outcome, *told: Action) -> list[Action]:
        self.state, self.outcome = State.OVER, outcome
        return [*self._open.cancel(), *told]
