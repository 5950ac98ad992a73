"""A model of an attempt's workers, of their clients' tokens and of the clock.

Events of workers may be heard in any order, twice, or late; the model says what has to come of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvmesh.core.types import (
    Candidate,
    Endpoint,
    FinishReason,
    Placement,
    Refusal,
    RefusalReason,
    TokenLogprobs,
    WorkerId,
)
from services.gateway.request import actions as act
from services.gateway.request.actions import Actions, Kind, Limits, Outcome, Side
from services.gateway.request.attempt import Attempt
from services.gateway.wire.worker_events import FirstToken, Tokens

FIRST, END = 5, 11
"""Positions of the first token wanted and behind the last one."""
LIMITS = Limits(answer_s=2.0, prefill_s=10.0, stall_s=5.0)
DEADLINE_S = 40.0
WORKERS = [Candidate(WorkerId(name), 1, Endpoint("host", 1)) for name in "abcd"]
NEVER = (RefusalReason.TOO_LONG, RefusalReason.INVALID)
UNANSWERED = (RefusalReason.LOST, RefusalReason.DEADLINE)
REASONS = (RefusalReason.BUSY, RefusalReason.LOST, *NEVER)


def token_at(position: int) -> int:
    return position * 7 + 3


def scores(first: int, count: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(-float(first + i), (), ()) for i in range(count))


def sure(job: Job | None) -> Job:
    """A job that the rule's condition says there is."""
    assert job is not None
    return job


@dataclass(eq=False)
class Job:
    """What one worker knows of one question; an offer knows whose blocks it is for."""

    number: int
    kind: Kind
    candidate: Candidate
    blocks: Job | None = None
    is_open: bool = True
    is_renewed: bool = False
    was_shown: bool = False
    """To a prefill worker that may be writing there."""
    runs: bool = False
    next: int = 0

    @property
    def worker_id(self) -> WorkerId:
        return self.candidate.worker_id


@dataclass
class Round:
    """Who of a plan is still to be asked."""

    to_offer: list[Candidate] = field(default_factory=list)
    to_reserve: list[Candidate] = field(default_factory=list)
    holders: list[Candidate] = field(default_factory=list)
    until: float = math.inf


class AttemptModel:
    """What is open where, who is to be asked, which tokens count, and when patience ends.

    What it hears of workers goes to an attempt, and what that wants done is looked at.
    """

    make: ClassVar[type[Attempt]] = Attempt

    def __init__(self) -> None:
        self.now = 0.0
        self.jobs: dict[int, Job] = {}
        self.numbers = itertools.count(1)
        self.said: list[Callable[[], None]] = []
        self.delivered: list[int] = []
        self.finish: FinishReason | None = None
        self.start()

    def start(self) -> None:
        position = FIRST + len(self.delivered)
        self.attempt = self.make(position, LIMITS, DEADLINE_S, self.numbers)
        self.round = Round()
        self.unfit: set[WorkerId] = set()
        self.asked: Job | None = None
        self.held: Job | None = None
        self.prefill: Job | None = None
        self.decode: Job | None = None
        self.is_taken = self.has_first = self.is_handed = False
        self.sent = position
        self.early: list[tuple[Job, Tokens]] = []
        self.since = 0.0
        self.outcome: Outcome | None = None
        self.last: act.Move | act.Break | act.Expire | None = None

    # -- What the model knows -------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self.outcome is not None

    @property
    def offer(self) -> Job | None:
        """A prefill worker that has the prompt, or may have it."""
        if self.asked is not None and self.asked.kind is Kind.OFFER:
            return self.asked
        return self.prefill

    @property
    def maker(self) -> Job | None:
        """Who makes tokens, as soon as there are blocks for them."""
        return self.decode or (self.offer.blocks if self.offer is not None else None)

    @property
    def due(self) -> float:
        if self.is_over:
            return math.inf
        if self.asked is not None:
            return min(self.since + LIMITS.answer_s, self.round.until)
        if not self.is_taken:
            return math.inf
        patience_s = LIMITS.stall_s if self.is_handed else LIMITS.prefill_s
        return min(self.since + patience_s, DEADLINE_S)

    def next_question(self) -> tuple[Kind, Candidate] | None:
        """Whom to ask now."""
        plan = self.round
        if self.held is not None and self.held.kind is Kind.START and self.now < plan.until:
            return Kind.OFFER, self.held.candidate
        fit = [each for each in plan.to_offer if each.worker_id not in self.unfit]
        if self.now >= plan.until or not plan.to_offer:
            return None
        if self.held is not None:
            return (Kind.OFFER, fit[0]) if fit else None
        if not plan.holders:
            return (Kind.START, fit[0]) if fit else None
        left = [each for each in plan.to_reserve if each.worker_id not in self.unfit]
        return (Kind.RESERVE, left[0]) if left else None

    def goes_on(self, actions: Actions, expected: tuple[Kind, Candidate] | None) -> None:
        """The search asked whom it should, or nobody is left."""
        questions = [each for each in actions if isinstance(each, act.Ask | act.Exhausted)]
        if expected is None:
            assert questions == [act.Exhausted()]
            assert self.asked is None
        else:
            assert questions == [actions[-1]]
            assert isinstance(actions[-1], act.Ask)
            assert (actions[-1].kind, actions[-1].candidate) == expected

    # -- What the attempt wants done ------------------------------------------------------------

    def do(self, actions: Actions) -> None:
        for action in actions:
            assert not self.is_over, f"{action} after the end"
            match action:
                case act.Ask():
                    self.ask_worker(action)
                case act.Hold():
                    job = self.jobs[action.number]
                    assert (job.is_open, action.worker_id) == (True, job.worker_id)
                    job.is_renewed = True
                case act.Taken():
                    self.is_taken = True
                    self.since = self.now
                case act.Deliver():
                    self.deliver(action)
                case act.Decoding():
                    job = self.jobs[action.number]
                    assert (job, action.worker_id) == (self.decode, job.worker_id)
                    job.is_renewed = False
                case act.Forget():
                    job = self.open_job(action)
                    assert not job.is_open, f"{job} was left open"
                    job.is_renewed = False
                case act.Cancel():
                    job = self.open_job(action)
                    job.is_open = job.is_renewed = False
                case act.Move() | act.Break() | act.Expire():
                    self.last = action
                case _:
                    assert isinstance(action, act.Unanswered | act.Refuse | act.Exhausted)
        self.outcome = self.attempt.outcome

    def open_job(self, action: act.Forget | act.Cancel) -> Job:
        job = self.jobs[action.number]
        assert (action.side is Side.PREFILL) == (job.kind is Kind.OFFER)
        return job

    def ask_worker(self, ask: act.Ask) -> None:
        assert ask.number > max(self.jobs, default=0), "a number was used before"
        job = Job(ask.number, ask.kind, ask.candidate, next=self.sent + 1)
        if ask.kind is Kind.OFFER:
            assert self.held is not None, "a prompt is shown for blocks that are held"
            assert not self.held.was_shown, "somebody may be writing there"
            job.blocks = self.held
            self.held.was_shown = True
        line = self.round.to_reserve if ask.kind is Kind.RESERVE else self.round.to_offer
        if ask.candidate in line:  # who reserved only is offered the prompt as well
            del line[: line.index(ask.candidate) + 1]
        self.jobs[ask.number] = self.asked = job
        self.since = self.now

    def deliver(self, deliver: act.Deliver) -> None:
        first = FIRST + len(self.delivered)
        count = len(deliver.token_ids)
        expected = [token_at(first + i) for i in range(count)]
        assert list(deliver.token_ids) == expected, "a token was lost or repeated"
        assert tuple(deliver.logprobs) == scores(first, count)
        assert self.finish is None, "tokens after the last one"
        assert count or deliver.finish_reason is not None
        self.delivered += deliver.token_ids
        self.finish = deliver.finish_reason
        assert (self.finish is not None) == (first + count == END)

    # -- What is heard of workers; each may be heard again --------------------------------------

    def hear(self, what: Callable[..., None], *arguments: Any) -> None:
        self.said.append(lambda: what(*arguments))
        what(*arguments)

    def is_asked(self, job: Job, *kinds: Kind) -> bool:
        return not self.is_over and job is self.asked and job.kind in kinds

    def hear_reserved(self, job: Job) -> None:
        known = self.is_asked(job, Kind.RESERVE, Kind.START)
        actions = self.attempt.reserved(job.number, 9, self.now)
        if not known:
            assert actions == ()
        else:
            self.asked, self.held = None, job
            expected = self.next_question()
            self.do(actions)
            assert actions[0] == act.Hold(job.number, job.worker_id, 9)
            self.goes_on(actions, expected)

    def hear_started(self, job: Job) -> None:
        known = self.is_asked(job, Kind.START)
        actions = self.attempt.reserved(job.number, 9, self.now, starts=True)
        if not known:
            assert actions == ()
        else:
            self.asked, self.decode = None, job
            self.do(actions)
            where = act.Taken(Placement.AGGREGATED, job.worker_id, job.worker_id)
            assert actions == [act.Hold(job.number, job.worker_id, 9), where]

    def hear_accepted(self, job: Job) -> None:
        known = self.is_asked(job, Kind.OFFER)
        actions = self.attempt.accepted(job.number, self.now)
        if not known:
            assert actions == ()
            return
        blocks = job.blocks
        assert blocks is not None
        self.asked, self.held, self.prefill, self.decode = None, None, job, blocks
        self.do(actions)
        one = blocks.kind is Kind.START
        placement = Placement.AGGREGATED if one else Placement.DISAGGREGATED
        assert actions == [act.Taken(placement, job.worker_id, blocks.worker_id)]

    def hear_end(self, job: Job, reason: RefusalReason, by_prefill: bool) -> None:
        refusal = Refusal(reason, "an end")
        runs = self.is_taken and not self.is_over and job in (self.prefill, self.decode)
        runs = runs and not (job is self.prefill and self.is_handed)
        asked = job is self.asked and not self.is_over
        held = job is self.held and not self.is_over
        side = Side.PREFILL if by_prefill or job.kind is Kind.OFFER else Side.DECODE
        actions = self.attempt.ended(job.number, side, refusal, self.now)
        if runs:
            self.is_lost(actions, act.Move(job.worker_id, f"{side.value}_failed", "an end"))
        elif asked:
            self.is_refused(job, side, reason, actions)
        elif held:
            offer, self.asked, self.held = self.asked, None, None
            if reason in NEVER:
                self.unfit.add(job.worker_id)
            self.round.to_reserve = list(self.round.holders)
            # Without an offer, no prefill worker of the plan was left.
            expected = None if offer is None else self.next_question()
            self.do(actions)
            assert act.Refuse(side, refusal, job.worker_id) in actions
            self.goes_on(actions, expected)
            assert offer is None or not offer.is_open
            assert not job.is_open
        else:
            assert actions == ()

    def is_refused(self, job: Job, side: Side, reason: RefusalReason, actions: Actions) -> None:
        """The worker that was asked last did not take it."""
        self.asked = None
        if reason in NEVER:
            self.unfit.add(job.worker_id)
        if job.blocks is not None:
            gives_up = reason in UNANSWERED or job.blocks.kind is Kind.START
            if gives_up:
                self.held = None
                self.round.to_reserve = list(self.round.holders)
            else:
                job.blocks.was_shown = False
        expected = self.next_question()
        self.do(actions)
        assert not job.is_open
        assert job.blocks is None or job.blocks.is_open == (self.held is not None)
        refused = [each for each in actions if isinstance(each, act.Refuse)]
        assert [(e.side, e.refusal.reason, e.worker_id) for e in refused] == [
            (side, reason, job.worker_id)
        ]
        self.goes_on(actions, expected)

    def is_lost(self, actions: Actions, move: act.Move | None) -> None:
        self.do(actions)
        assert self.outcome is Outcome.MOVED
        assert move is None or self.last == move

    def hear_first(self, job: Job, event: FirstToken) -> None:
        known = self.is_taken and not self.has_first and not self.is_over
        known = known and job is (self.prefill or self.decode)
        prefill = self.prefill
        actions = self.attempt.first_token(job.number, event, self.now)
        if not known:
            assert actions == ()
            return
        if event.finish_reason is FinishReason.ERROR:
            self.do(actions)
            assert (self.outcome, self.last) == (Outcome.BROKEN, act.Break("no token"))
            return
        self.has_first, self.since = True, self.now
        self.is_handed = self.prefill is None
        end: str | None = None
        expected: list[tuple[int, FinishReason | None]] = [(self.sent, event.finish_reason)]
        position = self.sent + 1
        for maker, tokens in self.early:
            if event.finish_reason is not None or maker is not self.decode:
                continue  # nothing that was said before counts behind the last token
            position, end = self.expect(tokens, position, expected)
            if end is not None:
                break
        self.do(actions)
        self.delivered_as(actions, expected)
        first = actions[0]
        assert isinstance(first, act.Deliver)
        assert first.first == event
        if event.finish_reason is not None and job is prefill:
            assert actions[1] == act.Forget(Side.PREFILL, job.number)
        self.ended_as(end, event.finish_reason)

    def hear_progress(self, job: Job) -> None:
        waits = self.is_taken and not self.is_handed and not self.is_over
        if waits and job is (self.prefill or self.decode):
            self.since = self.now
        assert self.attempt.progress(job.number, self.now) == ()

    def hear_handed_off(self, job: Job) -> None:
        known = self.has_first and not self.is_handed and not self.is_over and job is self.prefill
        actions = self.attempt.handed_off(job.number, self.now)
        if known:
            self.is_handed, self.since = True, self.now
            assert self.decode is not None
            where = act.Decoding(self.decode.number, self.decode.worker_id)
            assert actions == [act.Forget(Side.PREFILL, job.number), where]
        else:
            assert not actions
        self.do(actions)

    def hear_tokens(self, job: Job, tokens: Tokens) -> None:
        known = job in (self.asked, self.held, self.decode) and not self.is_over
        position = FIRST + len(self.delivered)
        actions = self.attempt.tokens(job.number, tokens, self.now)
        if not known or not self.has_first:
            assert actions == ()
            if known:
                self.early.append((job, tokens))
            return
        expected: list[tuple[int, FinishReason | None]] = []
        _, end = self.expect(tokens, position, expected)
        if end == "done":
            assert actions[-1] == act.Forget(Side.DECODE, job.number)
        self.do(actions)
        self.delivered_as(actions, expected)
        self.ended_as(end, tokens.finish_reason)

    def expect(
        self, tokens: Tokens, position: int, expected: list[tuple[int, FinishReason | None]]
    ) -> tuple[int, str | None]:
        """Adds what is new in a message; the next position, and what ends the attempt."""
        if tokens.first_position > position:
            return position, "token_gap"
        self.is_handed, self.since = True, self.now
        if tokens.finish_reason is FinishReason.ERROR:
            return position, "no token"
        end = tokens.first_position + len(tokens.token_ids)
        for each in range(position, end):
            is_last = each == end - 1
            expected.append((each, tokens.finish_reason if is_last else None))
        return max(position, end), "done" if tokens.finish_reason is not None else None

    def delivered_as(
        self, actions: Actions, expected: Sequence[tuple[int, FinishReason | None]]
    ) -> None:
        told = [each for each in actions if isinstance(each, act.Deliver)]
        got = [token_id for each in told for token_id in each.token_ids]
        assert got == [token_at(position) for position, _ in expected]
        ends = [each.finish_reason for each in told if each.finish_reason is not None]
        assert ends == [finish for _, finish in expected if finish is not None]

    def ended_as(self, end: str | None, finish: FinishReason | None) -> None:
        if end == "token_gap":
            assert isinstance(self.last, act.Move)
            assert self.decode is not None
            assert (self.last.reason, self.last.worker_id) == (end, self.decode.worker_id)
            assert self.outcome is Outcome.MOVED
        elif end == "no token":
            assert (self.outcome, self.last) == (Outcome.BROKEN, act.Break("no token"))
        elif end == "done" or finish is not None:
            assert self.outcome is Outcome.DONE
        else:
            assert self.outcome is None
