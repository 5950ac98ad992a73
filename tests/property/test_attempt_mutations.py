"""Each rule of the attempt, when it is changed, fails its state machine.

A mutation replaces a piece of `attempt.py`, `candidates.py` or `questions.py` by another one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from services.gateway.request import attempt, candidates, questions
from tests.property.test_attempt_machine import STAGES, AttemptMachine

MODULES = (candidates, questions, attempt)
SOURCES = {module: Path(module.__file__ or "").read_text() for module in MODULES}

MUTATIONS = {
    # the search for workers
    "IDLE, two workers: the prompt is shown at once": (
        "Kind.RESERVE if self._decode else Kind.START",
        "Kind.START",
    ),
    "IDLE, one worker: blocks are asked for alone": (
        "Kind.RESERVE if self._decode else Kind.START",
        "Kind.RESERVE",
    ),
    "ask next, blocks are held: others are reserved": (
        "        if blocks is None:\n",
        "        if True:\n",
    ),
    "IDLE, the blocks' worker is in the plan: they are given up": (
        "return () if self.blocks is None or self.blocks.worker_id in names else self.cancel()",
        "return self.cancel()",
    ),
    "IDLE, the blocks' worker is not in the plan: they are kept": (
        "return () if self.blocks is None or self.blocks.worker_id in names else self.cancel()",
        "return ()",
    ),
    "nobody left: no word of it": (
        "return [*given_up, act.Refuse(side, refusal, by.worker_id), self._ask_next(now)]",
        (
            "asks = [self._ask_next(now)]\n"
            "        asks = asks if self.state is State.ASKING else []\n"
            "        return [*given_up, act.Refuse(side, refusal, by.worker_id), *asks]"
        ),
    ),
    "no time left: the next one is asked": (
        "        if now >= self.until:\n",
        "        if False:\n",
    ),
    "who refused for ever is asked again": (
        "if candidate.worker_id not in self._excluded:",
        "if True:",
    ),
    "reserved: the lease ends": (
        "return [hold, self._taken(now) if starts else self._ask_next(now)]",
        "return [self._taken(now) if starts else self._ask_next(now)]",
    ),
    "reserved: nobody is offered it": (
        "return [hold, self._taken(now) if starts else self._ask_next(now)]",
        "return [hold, *([self._taken(now)] * starts)]",
    ),
    "reserved, started: another one is asked": (
        "return [hold, self._taken(now) if starts else self._ask_next(now)]",
        "return [hold, self._ask_next(now)]",
    ),
    "asked to START, reserved only: another one is offered it": (
        "elif blocks.kind is Kind.START:",
        "elif False:",
    ),
    "asked to START, reserved only: it counts as two workers": (
        "is_one = decode.kind is Kind.START",
        "is_one = self._open.offer is None",
    ),
    "reserved twice": (
        "return self._open.last if is_it else None",
        "return self._open.of(number)",
    ),
    "an offer is said to be reserved": (
        "if asked is None or asked.kind is Kind.OFFER:",
        "if asked is None:",
    ),
    "a number is used twice": (
        "Ask(kind, next(self._numbers), candidate)",
        "Ask(kind, 1, candidate)",
    ),
    "blocks are refused: the question is left open": (
        "if by is blocks or reason in _UNANSWERED or blocks.kind is Kind.START:",
        "if by is not blocks and (reason in _UNANSWERED or blocks.kind is Kind.START):",
    ),
    "refused: nobody notes it": (
        "return [*given_up, act.Refuse(side, refusal, by.worker_id), self._ask_next(now)]",
        "return [*given_up, self._ask_next(now)]",
    ),
    "refused: the next one is not asked": (
        "return [*given_up, act.Refuse(side, refusal, by.worker_id), self._ask_next(now)]",
        "return [*given_up, act.Refuse(side, refusal, by.worker_id), act.Exhausted()]",
    ),
    "refused for ever is not remembered": (
        "if reason in PERMANENT:",
        "if False:",
    ),
    "refused once is remembered": (
        "if reason in PERMANENT:",
        "if True:",
    ),
    "an answer to an older question counts": (
        "is_it = self.state in states and self._open.last.number == number",
        "is_it = self.state in states",
    ),
    "a second answer to a question counts": (
        "is_it = self.state in states and self._open.last.number == number",
        "is_it = self._open.of(number) is not None and self._open.last.number == number",
    ),
    "asked for blocks, accepted": (
        "if asked is None or asked.kind is not Kind.OFFER:",
        "if asked is None:",
    ),
    "an offer is refused: it is left open": (
        "        return self._cancel_offer()\n",
        "        return ()\n",
    ),
    "an offer is LOST: the blocks are shown to another one": (
        "if by is blocks or reason in _UNANSWERED or blocks.kind is Kind.START:",
        "if by is blocks or blocks.kind is Kind.START:",
    ),
    "an offer, no answer when the search ends: the blocks stay": (
        "if by is blocks or reason in _UNANSWERED or blocks.kind is Kind.START:",
        "if by is blocks or reason is RefusalReason.LOST or blocks.kind is Kind.START:",
    ),
    "an offer is refused: the blocks are given up": (
        "if by is blocks or reason in _UNANSWERED or blocks.kind is Kind.START:",
        "if True:",
    ),
    "blocks are given up: those who had no room before are not asked again": (
        "            self._to_reserve = deque(self._decode)\n",
        "",
    ),
    "blocks are refused: those who had no room before are asked again": (
        "            kind = Kind.RESERVE if self._decode else Kind.START\n",
        (
            "            kind = Kind.RESERVE if self._decode else Kind.START\n"
            "            self._to_reserve = self._to_reserve and deque(self._decode)\n"
        ),
    ),
    "an offer, chained and refused: blocks of one worker are shown to another": (
        "if by is blocks or reason in _UNANSWERED or blocks.kind is Kind.START:",
        "if by is blocks or reason in _UNANSWERED:",
    ),
    "blocks are lost: the reservation stays": (
        "            return self.cancel()\n        return",
        "            return self._cancel_offer()\n        return",
    ),
    "blocks are lost: the prefill worker is blamed": (
        "return self._refused(asked, side, refusal, now)",
        "return self._refused(self._open.last, side, refusal, now)",
    ),
    "no answer: it is waited for": (
        "if state is State.ASKING:\n            return min",
        "if False:\n            return min",
    ),
    "no answer: the worker is not known as silent": (
        "return [silent, *self._refused(slow, slow.side, lost, now)]",
        "return self._refused(slow, slow.side, lost, now)",
    ),
    "no answer in time and no time: the worker's fault": (
        "if now >= self._candidates.until:  #",
        "if False:  #",
    ),
    # progress
    "PREFILL, progress: the wait goes on": (
        "            self._progress_at = now\n        return ()",
        "            pass\n        return ()",
    ),
    "HANDOFF, progress: the wait goes on": (
        "if self._last(number, State.PREFILL, State.HANDOFF) is not None:",
        "if self._last(number, State.PREFILL) is not None:",
    ),
    "DECODE, progress: another wait": (
        "if self._last(number, State.PREFILL, State.HANDOFF) is not None:",
        "if self._last(number, *_GENERATING) is not None:",
    ),
    "PREFILL, progress of another question: another wait": (
        "if self._last(number, State.PREFILL, State.HANDOFF) is not None:",
        "if self.state in (State.PREFILL, State.HANDOFF):",
    ),
    # tokens
    "tokens are not counted": ("        self.position += len(token_ids)\n", ""),
    "PREFILL, first token twice": (
        "if self._last(number, State.PREFILL) is None:",
        "if self._last(number, *_GENERATING) is None:",
    ),
    "PREFILL, one worker: the handoff is waited for": (
        "        if self._open.offer is None:\n            out += self._start",
        "        if False:\n            out += self._start",
    ),
    "PREFILL, two workers: no handoff is waited for": (
        "        if self._open.offer is None:\n            out += self._start",
        "        if True:\n            out += self._start",
    ),
    "the last tokens: it goes on": ("        if finish is None:\n", "        if True:\n"),
    "the last tokens: another outcome": ("self._end(Outcome.DONE)", "self._end(Outcome.MOVED)"),
    "PREFILL, the only token: the reservation is forgotten": (
        "done = self._open.forget_blocks() if first is None else self._open.forget_offer()",
        "done = [*self._open.forget_blocks(), *self._open.forget_offer()]",
    ),
    "PREFILL, the only token: the worker is told": (
        "done = self._open.forget_blocks() if first is None else self._open.forget_offer()",
        "done = self._open.forget_blocks() if first is None else ()",
    ),
    "DECODE, the last tokens: the worker is told": (
        "done = self._open.forget_blocks() if first is None else self._open.forget_offer()",
        "done = self._open.forget_offer()",
    ),
    "PREFILL, the only token: it goes on": (
        "        if self.outcome is not None:\n            return out\n",
        "",
    ),
    "before PREFILL's end, tokens: dropped": ("self._early.append((number, event))", ""),
    "PREFILL, tokens of blocks given up count": (
        "out += self.tokens(asked, tokens, now)",
        "out += self.tokens(getattr(self._open.blocks, 'number', asked), tokens, now)",
    ),
    "HANDOFF, handed off: prefill is cancelled later": (
        "return [*self._open.forget_offer(), act.Decoding(decode",
        "return [act.Decoding(decode",
    ),
    "HANDOFF, handed off: the lease is renewed for ever": (
        "return [*self._open.forget_offer(), act.Decoding(decode.number, decode.worker_id)]",
        "return self._open.forget_offer()",
    ),
    "HANDOFF, tokens: the handoff is still waited for": (
        "out = self._start_decoding(now) if state is State.HANDOFF else []",
        "out: list[Action] = []",
    ),
    "HANDOFF, handed off: its patience goes on": (
        "self.state, self._progress_at = State.DECODE, now",
        "self.state = State.DECODE",
    ),
    "DECODE, repeated tokens: delivered": ("        if num_known:\n", "        if False:\n"),
    "DECODE, repeated tokens: scores are not cut": (
        "event = event.without(num_known)",
        "event = event._replace(token_ids=event.token_ids[num_known:])",
    ),
    "DECODE, nothing new: delivered": (
        "        if event.token_ids or event.finish_reason is not None:\n",
        "        if True:\n",
    ),
    "DECODE, nothing new: no progress": (
        "        self._progress_at = now\n        if num_known",
        "        if num_known",
    ),
    "DECODE, a gap: delivered": ("        if num_known < 0:\n", "        if False:\n"),
    "DECODE, a gap of one: delivered": (
        "        if num_known < 0:\n",
        "        if num_known < -1:\n",
    ),
    "DECODE, the next one: a gap": ("        if num_known < 0:\n", "        if num_known <= 0:\n"),
    "tokens of an older question count": (
        "asked.number != number:\n            return ()\n        if state is not State.DECODE",
        "False:\n            return ()\n        if state is not State.DECODE",
    ),
    "a token that cannot be: delivered": (
        "        if finish is FinishReason.ERROR:\n",
        "        if False:\n",
    ),
    # ends
    "PREFILL to DECODE, failed: nobody hears it": (
        "if self.state in _GENERATING:\n            return self._moved(",
        "if False:\n            return self._moved(",
    ),
    "failed: the wrong side": ("{side.value}_failed", "{asked.side.value}_failed"),
    "refused: the wrong side": (
        "return self._refused(asked, side, refusal, now)",
        "return self._refused(asked, asked.side, refusal, now)",
    ),
    "failed: the wrong worker": (
        'self._moved(asked, f"{side.value}_failed"',
        'self._moved(self._open.blocks, f"{side.value}_failed"',
    ),
    "stalled: the wrong worker": (
        "slow = self._open.last",
        "slow = self._open.blocks",
    ),
    "stalled: another word": ('f"{self.state.name.lower()}_stalled"', '"stalled"'),
    "DECODE, stalled: as patient as before": (
        "limits.stall_s if state is State.DECODE else limits.prefill_s",
        "limits.prefill_s",
    ),
    "PREFILL, stalled: as impatient as later": (
        "limits.stall_s if state is State.DECODE else limits.prefill_s",
        "limits.stall_s",
    ),
    "a tick before it is due": ("        if now < self.due:\n            return ()\n", ""),
    "a tick just when it is due": ("if now < self.due:", "if now <= self.due:"),
    "the deadline: none": (
        "return min(self._progress_at + patience_s, self._deadline)",
        "return self._progress_at + patience_s",
    ),
    "the deadline: it moves": ("if now >= self._deadline:", "if False:"),
    "cancel: the offer is left": (
        "        offer = self._cancel_offer()\n",
        "        offer: Actions = ()\n",
    ),
    "cancel: the reservation is left": (
        "return offer if asked is None else (*offer, Cancel(Side.DECODE, asked.number))",
        "return offer",
    ),
    "the worker of an older question counts": (
        "if asked is not None and asked.number == number:",
        "if asked is not None:",
    ),
    "cancel: twice": (
        "return () if self.outcome is not None else self._end",
        "return self._end",
    ),
    "lost: nobody is told": (
        "return [*self._open.cancel(), *told]",
        "return self._open.cancel()",
    ),
    "late: another outcome": ("Outcome.LATE", "Outcome.BROKEN"),
}


ROUNDS = (8, 40, 200)
"""Examples for each stage and number of workers; more if fewer noticed nothing."""

pytestmark = pytest.mark.timeout(300)  # a search may be long where others compute as well


class _Found(Exception):
    """The machine noticed."""


def test_the_rules_as_they_are_pass() -> None:
    _run(SOURCES, ROUNDS[:1])


# All of them take two minutes of a processor, and tell something new only after the rules changed.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if number % 4 else [])
        for number, name in enumerate(MUTATIONS)
    ],
)
def test_a_changed_rule_is_noticed(name: str) -> None:
    old, new = MUTATIONS[name]
    changed = {module: source.replace(old, new, 1) for module, source in SOURCES.items()}
    assert changed != SOURCES, "the rule is not there any more"
    with pytest.raises(_Found):
        _run(changed, ROUNDS)


def _run(sources: Mapping[ModuleType, str], rounds: Sequence[int]) -> None:
    """Runs the machine over these rules, from each stage in turn.

    Raises:
        _Found: it failed.
    """
    made = [_module(module.__name__, source) for module, source in sources.items()]
    rules, asked, attempts = made
    attempts.Candidates, attempts.Questions = rules.Candidates, asked.Questions
    try:
        for examples, stage, is_one in product(rounds, STAGES, (False, True)):
            begin = {"make": attempts.Attempt, "stages": (stage,), "ones": (is_one,)}
            machine = type("Changed", (AttemptMachine,), begin)
            run_state_machine_as_test(machine, settings=_settings(examples))
    except Flaky:  # it failed once: the time limit of a test, and no rule
        raise
    except Exception as error:
        raise _Found(str(error)) from error
    finally:
        for module in made:
            del sys.modules[module.__name__]


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=15,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def _module(name: str, source: str) -> Any:
    """A module of its own with this source; dataclasses look it up by its name."""
    module = sys.modules[f"{name}_changed"] = ModuleType(f"{name}_changed")
    exec(compile(source, module.__name__, "exec"), module.__dict__)
    return module
