"""The attempt over a model of its workers, under every order of what they say, and fail to say.

Events come in any order that two connections allow, some of them twice or never; streams break,
workers refuse, stall and lose what they had, clients leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvmesh.core.types import (
    Candidate,
    FinishReason,
    RefusalReason,
)
from services.gateway.request import actions as act
from services.gateway.request.actions import Kind, Outcome, Side, State
from services.gateway.wire.worker_events import FirstToken, Tokens
from tests.property.attempt_model import (
    DEADLINE_S,
    END,
    FIRST,
    REASONS,
    WORKERS,
    AttemptModel,
    Round,
    scores,
    sure,
    token_at,
)

RuleT = TypeVar("RuleT", bound=Callable[..., None])

STAGES = (
    "idle",
    "held",
    "asked",
    "late",
    "unfit",
    "chained",
    "taken",
    "early",
    "again",
    "first",
    "silent",
    "decode",
    "tokens",
    "lost",
)


def of_machine(values: Callable[[Any], Sequence[Any]]) -> st.SearchStrategy[Any]:
    """One of the values that the running machine allows."""
    return st.runner().flatmap(lambda machine: st.sampled_from(values(machine)))


A_STAGE = of_machine(lambda machine: machine.stages)
IS_ONE = of_machine(lambda machine: machine.ones)


def when(fact: Callable[[Any], Any]) -> Callable[[RuleT], RuleT]:
    """A rule for an attempt that is not over."""

    def rule_of(function: RuleT) -> RuleT:
        made: RuleT = precondition(lambda self: not self.is_over and bool(fact(self)))(function)
        return made

    return rule_of


class AttemptMachine(AttemptModel, RuleBasedStateMachine):
    """What can happen, at every point of an attempt's life.

    Attributes:
        stages: where attempts begin.
        ones: whether their plans are for one worker.
    """

    stages: ClassVar[Sequence[str]] = STAGES
    ones: ClassVar[Sequence[bool]] = (False, True)

    def __init__(self) -> None:
        RuleBasedStateMachine.__init__(self)
        AttemptModel.__init__(self)

    @initialize(
        stage=A_STAGE,
        is_one=IS_ONE,
        num_before=st.sampled_from([0, 0, 3, 5]),
        now=st.sampled_from([0.0, 0.0, DEADLINE_S - 3.0]),
    )
    def begin(self, stage: str, is_one: bool, num_before: int, now: float) -> None:
        """So that what comes late is as often looked at as what comes early."""
        self.now = now
        if num_before:
            self.delivered = [token_at(FIRST + i) for i in range(num_before)]
            self.start()
        self.lead_to(stage, is_one)

    def lead_to(self, stage: str, is_one: bool) -> None:
        if stage == "idle":
            return
        a, b, c, d = WORKERS
        self.ask([a, b], [] if is_one else [c, d], 1.0 if stage == "late" else 30.0)
        if not is_one:
            self.reserves()
        if stage == "again" and not is_one and self.sent < END - 2:
            # Tokens come of blocks that are given up then.
            self.hands_over()
            self.decodes(1, 0, "heard")
            self.refuses(RefusalReason.LOST, by_prefill=False)
            self.reserves()
        if stage == "held":
            self.refuses(RefusalReason.BUSY, by_prefill=True)
            self.refuses(RefusalReason.BUSY, by_prefill=True)
        while stage == "unfit" and self.asked is not None:
            self.refuses(RefusalReason.TOO_LONG, by_prefill=False)
        if stage in ("asked", "late", "held", "unfit"):
            return
        if stage == "chained" and is_one:
            self.reserves()
            return
        self.starts() if is_one else self.accepts()
        self.follow_to(stage, is_one)

    def follow_to(self, stage: str, is_one: bool) -> None:
        if stage in ("early", "silent", "decode", "tokens", "lost") and not is_one:
            self.hands_over()
        if stage == "early" and self.sent < END - 2:
            self.decodes(1, 0, "heard")
        if stage in ("taken", "early", "chained", "again"):
            return
        self.computes(is_error=False)
        if stage in ("decode", "tokens", "lost") and not (is_one or self.is_over):
            self.ticks(self.now + 0.5)
            self.says_that_it_handed_off()
        if stage == "tokens" and self.sent < END - 3:
            self.decodes(2, 0, "heard")
        if stage == "lost" and self.sent < END - 3:
            self.decodes(1, 0, "lost")

    # -- What happens -----------------------------------------------------------------------------

    @when(lambda self: not (self.asked or self.is_taken))
    @rule(
        prefill=st.lists(st.sampled_from(WORKERS), unique=True, max_size=3),
        decode=st.lists(st.sampled_from(WORKERS), unique=True, max_size=2),
        patience_s=st.sampled_from([0.0, 1.0, 3.0, 30.0, 30.0, 30.0]),
    )
    def ask(self, prefill: list[Candidate], decode: list[Candidate], patience_s: float) -> None:
        until = self.now + patience_s
        self.round = Round(list(prefill), list(decode), list(decode), until)
        held = self.held
        if held is not None and held.candidate not in decode:
            self.held = None
        expected = self.next_question()
        actions = self.attempt.ask(prefill, decode, until, self.now)
        self.do(actions)
        self.goes_on(actions, expected)
        assert held is None or held.is_open == (held.candidate in decode)

    @when(lambda self: self.held and not self.asked)
    @rule(is_planned=st.booleans())
    def asks_again(self, is_planned: bool) -> None:
        """While blocks are held, by a worker of the next plan or of none."""
        holder = sure(self.held).candidate
        others = [each for each in WORKERS if each is not holder]
        self.ask(others[:1], [others[1], holder] if is_planned else others[1:], 30.0)

    @when(lambda self: self.asked)
    @rule()
    def reserves(self) -> None:
        job = sure(self.asked)
        if job.kind is not Kind.OFFER:
            self.hear(self.hear_reserved, job)

    @when(lambda self: self.asked)
    @rule()
    def starts(self) -> None:
        job = sure(self.asked)
        if job.kind is Kind.START:
            job.runs = True
            self.hear(self.hear_started, job)

    @when(lambda self: self.asked and self.asked.kind is Kind.OFFER)
    @rule()
    def accepts(self) -> None:
        self.hear(self.hear_accepted, sure(self.asked))

    @when(lambda self: self.asked)
    @rule()
    def answers_what_was_not_asked(self) -> None:
        number = sure(self.asked).number
        if sure(self.asked).kind is Kind.OFFER:
            assert self.attempt.reserved(number, 9, self.now) == ()
            assert self.attempt.reserved(number, 9, self.now, starts=True) == ()
        else:
            assert self.attempt.accepted(number, self.now) == ()

    @when(lambda self: self.asked)
    @rule(reason=st.sampled_from(REASONS), by_prefill=st.booleans())
    def refuses(self, reason: RefusalReason, by_prefill: bool) -> None:
        job = sure(self.asked)
        if job.blocks is not None and job.blocks.runs:
            reason = RefusalReason.LOST  # who has handed over had taken it
        job.is_open = reason is RefusalReason.LOST  # who was lost may have it still
        by_prefill = by_prefill and job.kind is Kind.START
        self.hear(self.hear_end, job, reason, by_prefill)

    @when(lambda self: self.held or self.is_taken)
    @rule(
        side=st.sampled_from(Side),
        reason=st.sampled_from(REASONS),
        by_prefill=st.booleans(),
        chance=st.integers(0, 2),
    )
    def fails(self, side: Side, reason: RefusalReason, by_prefill: bool, chance: int) -> None:
        if chance and self.is_taken:
            return
        job = self.prefill if side is Side.PREFILL else self.decode or self.held
        if job is not None:
            by_prefill = by_prefill and job.kind is Kind.START and self.prefill is None
            self.hear(self.hear_end, job, reason, by_prefill)

    @when(lambda self: self.is_taken)
    @rule(side=st.sampled_from(Side))
    def makes_progress(self, side: Side) -> None:
        """With the prompt, or with sending its KV; it may be heard late.

        Who only decodes has nothing to say of it.
        """
        job = self.prefill if side is Side.PREFILL else self.decode
        self.hear(self.hear_progress, sure(job or self.decode))

    @when(lambda self: self.is_taken and not self.has_first)
    @rule(is_error=st.sampled_from([False, False, True]))
    def computes(self, is_error: bool) -> None:
        job = sure(self.prefill or self.decode)
        finish = FinishReason.LENGTH if self.sent == END - 1 else None
        if is_error:
            finish = FinishReason.ERROR
        if finish is not None and job is self.prefill:
            job.is_open = False
        (score,) = scores(self.sent, 1)
        event = FirstToken(token_at(self.sent), score, finish, 2, (), "no token")
        self.hear(self.hear_first, job, event)

    @when(lambda self: self.offer and not self.offer.blocks.runs)
    @rule()
    def hands_over(self) -> None:
        """The blocks are written; nobody has heard of it yet, perhaps not even that it began."""
        if self.sent < END - 1:
            offer = sure(self.offer)
            sure(offer.blocks).runs = True
            offer.is_open = False

    @when(lambda self: self.prefill and self.decode.runs and self.has_first)
    @rule()
    def says_that_it_handed_off(self) -> None:
        self.hear(self.hear_handed_off, self.prefill)

    @when(lambda self: self.maker and self.maker.runs and self.maker.is_open)
    @rule(
        count=st.integers(0, 3),
        repeated=st.integers(0, 2),
        way=st.sampled_from(["heard"] * 6 + ["lost", "error"]),
    )
    def decodes(self, count: int, repeated: int, way: str) -> None:
        job = sure(self.maker)
        first = max(job.next - repeated, self.sent + 1)
        job.next = end = min(job.next + count, END)
        if first > end:
            return
        finish = FinishReason.LENGTH if end == END else None
        if way == "error":
            finish = FinishReason.ERROR
        if finish is not None:
            job.is_open = False
        token_ids = tuple(token_at(position) for position in range(first, end))
        tokens = Tokens(first, token_ids, scores(first, end - first), finish, "no token")
        if way == "lost":
            job.is_open = True  # nobody knows that it is over
        else:
            self.hear(self.hear_tokens, job, tokens)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def says_it_again(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.said))()

    @precondition(lambda self: len(self.jobs) > 1)
    @rule(
        data=st.data(),
        what=st.sampled_from(["yes", "no", "works", "first", "tokens", "handed off"]),
    )
    def who_was_given_up_speaks(self, data: st.DataObject, what: str) -> None:
        """Its answer was late, or its connection slow."""
        known = (self.asked, self.held, self.prefill, self.decode)
        job = data.draw(st.sampled_from(list(self.jobs.values())))
        if job in known and not self.is_over:
            return
        position = FIRST + len(self.delivered)
        if what == "yes":
            self.hear_reserved(job)
            self.hear_started(job)
            self.hear_accepted(job)
        elif what == "no":
            self.hear_end(job, RefusalReason.BUSY, by_prefill=False)
        elif what == "works":
            self.hear_progress(job)
        elif what == "first":
            (score,) = scores(position, 1)
            self.hear_first(job, FirstToken(token_at(position), score, None, 2))
        elif what == "tokens":
            self.hear_tokens(
                job, Tokens(position, (token_at(position),), scores(position, 1), None)
            )
        else:
            self.hear_handed_off(job)

    @precondition(lambda self: not self.is_over)
    @rule(step_s=st.sampled_from([0.1, 1.0, 1.9, 4.9, 9.9]))
    def time_passes(self, step_s: float) -> None:
        self.ticks(self.now + step_s)

    @precondition(lambda self: self.due < math.inf)
    @rule()
    def patience_ends(self) -> None:
        assert self.attempt.tick(math.nextafter(self.due, 0.0)) == ()
        self.ticks(max(self.now, self.due))

    def ticks(self, now: float) -> None:
        is_due = now >= self.due
        self.now = now
        actions = self.attempt.tick(now)
        if not is_due:
            assert actions == ()
        elif self.asked is not None:
            job = sure(self.asked)
            late = now >= self.round.until
            reason = RefusalReason.DEADLINE if late else RefusalReason.LOST
            side = Side.PREFILL if job.kind is Kind.OFFER else Side.DECODE
            silent = [each for each in actions if isinstance(each, act.Unanswered)]
            assert silent == ([] if late else [act.Unanswered(job.candidate, self.since)])
            self.is_refused(job, side, reason, actions)
        elif now >= DEADLINE_S:
            self.do(actions)
            assert (self.outcome, self.last) == (Outcome.LATE, act.Expire())
        else:
            word = "decode" if self.is_handed else "handoff" if self.has_first else "prefill"
            job = sure(self.decode if self.is_handed else self.prefill or self.decode)
            text = f"no progress at {job.worker_id}"
            self.is_lost(actions, act.Move(job.worker_id, f"{word}_stalled", text))

    @precondition(lambda self: not self.is_over)
    @rule(chance=st.integers(0, 5))
    def client_leaves(self, chance: int) -> None:
        if not chance:
            self.do(self.attempt.cancel())
            assert self.outcome is Outcome.CANCELLED
            assert self.attempt.cancel() == ()

    @precondition(lambda self: self.is_over)
    @rule(stage=A_STAGE, is_one=IS_ONE)
    def another_attempt(self, stage: str, is_one: bool) -> None:
        """Of the same request, or of another one if that has ended."""
        if self.outcome is not Outcome.MOVED or self.now > DEADLINE_S / 2:
            self.delivered, self.finish, self.now = [], None, 0.0
        self.start()
        self.lead_to(stage, is_one)

    # -- Always -----------------------------------------------------------------------------------

    @invariant()
    def it_agrees(self) -> None:
        attempt = self.attempt
        assert attempt.outcome is self.outcome
        assert (attempt.state is State.OVER) == self.is_over
        assert attempt.due == self.due
        if not self.is_over or self.outcome is Outcome.DONE:
            assert attempt.position == FIRST + len(self.delivered)
        waits = self.held is not None and self.asked is None and not self.is_over
        assert attempt.holds == waits

    @invariant()
    def nothing_is_open_but_what_is_known(self) -> None:
        known = set() if self.is_over else {self.asked, self.held, self.prefill, self.decode}
        for job in self.jobs.values():
            assert not job.is_open or job in known, f"{job} is open and forgotten"
            assert not job.is_renewed or (job in known and not self.is_handed)

    def teardown(self) -> None:
        if not self.is_over:
            self.do(self.attempt.cancel())
        assert self.is_over
        assert not any(job.is_open or job.is_renewed for job in self.jobs.values())


TestAttemptMachine = pytest.mark.timeout(300)(AttemptMachine.TestCase)
TestAttemptMachine.settings = settings(
    max_examples=300, stateful_step_count=40, report_multiple_bugs=False
)
