"""Each rule of the attempt, when it is changed, fails its state machine.

A mutation replaces a piece of `attempt.py` or `candidates.py` by another one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from services.gateway.request import attempt, candidates
from tests.property.test_attempt_machine import AttemptMachine

SOURCES = {module: Path(module.__file__ or "").read_text() for module in (candidates, attempt)}

CANCELS = (
    "        self._cancel_prefill(out)\n        self._cancel_decode(out)\n        self.state, self"
)
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
    "HELD, its worker is in the plan: it reserves again": (
        "kind = Kind.OFFER if is_reserved else",
        "kind = Kind.OFFER if False else",
    ),
    "HELD, its worker is not in the plan: it is kept": (
        "if self.state is State.HELD and self.holder not in",
        "if False and self.holder not in",
    ),
    "nobody left: no word of it": (
        "out.append(act.Exhausted() if question is None else self._ask(*question, now))",
        "if question is not None:\n            out.append(self._ask(*question, now))",
    ),
    "no time left: the next one is asked": (
        "        if now >= self.until:\n",
        "        if False:\n",
    ),
    "who refused for ever is asked again": (
        "if candidate.worker_id not in self._excluded:",
        "if True:",
    ),
    "RESERVING, reserved: the lease ends": (
        "out: list[Action] = [act.Hold(number, worker_id, lease_ms)]",
        "out: list[Action] = []",
    ),
    "RESERVING, reserved: nobody is offered it": (
        "        self.state = State.HELD\n        return self._ask_next(out, now)",
        "        self.state = State.HELD\n        return out",
    ),
    "STARTING, reserved only: another one is offered it": (
        "        if state is State.STARTING:\n",
        "        if False:\n",
    ),
    "STARTING, reserved only: it counts as two workers": (
        "is_one = decode.kind is Kind.START",
        "is_one = self._prefill is None",
    ),
    "reserved by another worker is taken": ("if worker_id != asked.worker_id:", "if False:"),
    "reserved twice": (
        "if state is not State.STARTING and (starts or state is not State.RESERVING):",
        "if False:",
    ),
    "a number is used twice": ("        self.num_asked += 1\n", "        self.num_asked = 1\n"),
    "RESERVING, refused: it is left open": (
        "if by is reservation or is_lost or reservation.kind is Kind.START:",
        "if offer is not None and (is_lost or reservation.kind is Kind.START):",
    ),
    "refused: nobody notes it": (
        "            out.append(act.Refuse(side, refusal, by.worker_id))\n",
        "            pass\n",
    ),
    "refused for ever is not remembered": (
        "if is_answer and refusal.reason in PERMANENT:",
        "if False:",
    ),
    "lost for ever: it counts as refused": (
        "if is_answer and refusal.reason in PERMANENT:",
        "if refusal.reason in PERMANENT:",
    ),
    "refused once is remembered": (
        "if is_answer and refusal.reason in PERMANENT:",
        "if is_answer:",
    ),
    "OFFERING, accepted: it is no offer": (
        "        self.num_offers += 1\n        self.state = State.PREFILL",
        "        self.state = State.PREFILL",
    ),
    "OFFERING, accepted of an older offer counts": (
        "if self.state is not State.OFFERING or self._last_asked.number != number:",
        "if self.state is not State.OFFERING:",
    ),
    "OFFERING, accepted late counts": (
        "if self.state is not State.OFFERING or self._last_asked.number != number:",
        "if (self._prefill or self._decode) is None or self._last_asked.number != number:",
    ),
    "OFFERING, refused: the offer is left open": (
        "side is Side.PREFILL\n        self._cancel_prefill(out)\n",
        "side is Side.PREFILL\n",
    ),
    "OFFERING, LOST: the blocks are shown to another one": (
        "if by is reservation or is_lost or reservation.kind is Kind.START:",
        "if by is reservation or reservation.kind is Kind.START:",
    ),
    "OFFERING, no answer when the search ends: the blocks stay": (
        "is_lost = refusal.reason in _UNANSWERED",
        "is_lost = refusal.reason is RefusalReason.LOST",
    ),
    "OFFERING, refused: the blocks are given up": (
        "if by is reservation or is_lost or reservation.kind is Kind.START:",
        "if True:",
    ),
    "OFFERING, blocks given up: those who refused them are not asked again": (
        "            if offer is not None:\n                self._candidates.restart_decode()\n",
        "",
    ),
    "RESERVING, refused: those who refused are asked again": (
        "            if offer is not None:\n                self._candidates.restart_decode()\n",
        "            self._candidates.restart_decode()\n",
    ),
    "OFFERING, chained and refused: blocks of one worker are shown to another": (
        "if by is reservation or is_lost or reservation.kind is Kind.START:",
        "if by is reservation or is_lost:",
    ),
    "OFFERING, failed by decode: the reservation stays": (
        "if by is reservation or is_lost or reservation.kind is Kind.START:",
        "if offer is None or is_lost or reservation.kind is Kind.START:",
    ),
    "OFFERING, failed by decode: the search ends": (
        "return self._ask_next(out, now) if was_asking else out",
        "return self._ask_next(out, now) if is_answer else out",
    ),
    "OFFERING, failed by decode: the prefill worker is blamed": (
        "is_answer = was_asking and by is self._last_asked",
        "is_answer = was_asking",
    ),
    "OFFERING, failed by decode: it was no offer": (
        "self.num_offers += offer is not None or side is Side.PREFILL",
        "self.num_offers += side is Side.PREFILL",
    ),
    "STARTING, refused by prefill: it was no offer": (
        "self.num_offers += offer is not None or side is Side.PREFILL",
        "self.num_offers += offer is not None",
    ),
    "HELD, failed by decode: it goes on asking": (
        "return self._ask_next(out, now) if was_asking else out",
        "return self._ask_next(out, now)",
    ),
    "HELD, failed by decode: nobody notes it": (
        "            out.append(act.Refuse(Side.DECODE, refusal, None))\n",
        "            pass\n",
    ),
    "no answer: it is waited for": (
        "if state in _ASKING:\n            return min",
        "if False:\n            return min",
    ),
    "no answer in time and no time: the worker's fault": (
        "if now >= self._candidates.until:  #",
        "if False:  #",
    ),
    # tokens
    "PREFILL, first token: it is not counted": ("        self.position += 1\n", ""),
    "PREFILL, first token twice": (
        "if self.state is not State.PREFILL or self._last_asked.number != number:",
        "if (self._prefill or self._decode) is None or self._last_asked.number != number:",
    ),
    "PREFILL, one worker: the handoff is waited for": (
        "        if self._prefill is None:\n            self._start_decoding(out)",
        "        if False:\n            self._start_decoding(out)",
    ),
    "PREFILL, two workers: no handoff is waited for": (
        "        if self._prefill is None:\n            self._start_decoding(out)",
        "        if True:\n            self._start_decoding(out)",
    ),
    "PREFILL, the only token: it goes on": (
        "        if event.finish_reason is not None:\n            self._forget_prefill(out)",
        "        if False:\n            self._forget_prefill(out)",
    ),
    "PREFILL, the only token: the reservation is left": (
        "            return self._end(out, Outcome.DONE)\n",
        "            self._decode = None\n            return self._end(out, Outcome.DONE)\n",
    ),
    "PREFILL, tokens before the first one: dropped": (
        "self._early.append((number, Tokens(first_position, token_ids, logprobs, finish, error)))",
        "",
    ),
    "PREFILL, tokens of blocks given up count": (
        "out += self.tokens(asked, now, *tokens)",
        "out += self.tokens(self._decode.number if self._decode else asked, now, *tokens)",
    ),
    "HANDOFF, handed off: prefill is cancelled later": (
        "        self._forget_prefill(out)\n        out.append(act.Decoding(",
        "        out.append(act.Decoding(",
    ),
    "HANDOFF, handed off: the lease is renewed for ever": (
        "        out.append(act.Decoding(self._decode.number, self._decode.worker_id))\n",
        "",
    ),
    "HANDOFF, tokens: the handoff is still waited for": (
        "        if state is State.HANDOFF:\n            self._start_decoding(out)",
        "        if False:\n            self._start_decoding(out)",
    ),
    "HANDOFF, handed off: its patience goes on": (
        "            self._progress_at = now\n            self._start_decoding(out)",
        "            self._start_decoding(out)",
    ),
    "DECODE, repeated tokens: delivered": ("        if num_known:\n", "        if False:\n"),
    "DECODE, repeated tokens: scores are not cut": (
        "token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]",
        "token_ids = token_ids[num_known:]",
    ),
    "DECODE, nothing new: delivered": (
        "        if token_ids or finish is not None:\n",
        "        if True:\n",
    ),
    "DECODE, nothing new: no progress": (
        "        self._progress_at = now\n        if state is",
        "        if state is",
    ),
    "DECODE, a gap: delivered": ("        if num_known < 0:\n", "        if False:\n"),
    "DECODE, a gap of one: delivered": (
        "        if num_known < 0:\n",
        "        if num_known < -1:\n",
    ),
    "DECODE, the next one: a gap": ("        if num_known < 0:\n", "        if num_known <= 0:\n"),
    "DECODE, the last tokens: it goes on": (
        "            self._end(out, Outcome.DONE)\n        return out",
        "        return out",
    ),
    "DECODE, the last tokens: the worker is told": (
        "out.append(act.Forget(Side.DECODE, number))\n            self._decode = None\n",
        "pass\n",
    ),
    "tokens of an older question count": (
        "asked.number != number:\n            return ()\n        if state is not State.DECODE",
        "False:\n            return ()\n        if state is not State.DECODE",
    ),
    "a token that cannot be: delivered": (
        "        if finish is FinishReason.ERROR:\n",
        "        if False:\n",
    ),
    "a first token that cannot be: delivered": (
        "        if event.finish_reason is FinishReason.ERROR:\n",
        "        if False:\n",
    ),
    # ends
    "PREFILL to DECODE, failed: nobody hears it": (
        "if self.state not in _GENERATING:\n            return self._refused(",
        "if True:\n            return self._refused(",
    ),
    "failed: the wrong side": (
        "side = Side.PREFILL if by_prefill else asked.side",
        "side = asked.side",
    ),
    "failed: the wrong worker": (
        'act.Move(asked.worker_id, f"{side.value}_failed"',
        'act.Move(self._decode.worker_id, f"{side.value}_failed"',
    ),
    "stalled: the wrong worker": (
        "slow = self._last_asked",
        "slow = self._decode",
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
        CANCELS,
        "        self._cancel_decode(out)\n        self.state, self",
    ),
    "cancel: the reservation is left": (
        CANCELS,
        "        self._cancel_prefill(out)\n        self.state, self",
    ),
    "cancel: twice": (
        "return () if self.outcome is not None else self._end",
        "return self._end",
    ),
    "lost: nobody is told": (
        "            out.append(word)\n",
        "            pass\n",
    ),
    "late: another outcome": ("Outcome.LATE", "Outcome.BROKEN"),
}


class _Found(Exception):
    """The machine noticed."""


def test_the_rules_as_they_are_pass() -> None:
    _run(SOURCES, 300)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_rule_is_noticed(name: str) -> None:
    old, new = MUTATIONS[name]
    changed = {module: source.replace(old, new, 1) for module, source in SOURCES.items()}
    assert changed != SOURCES, "the rule is not there any more"
    with pytest.raises(_Found):
        _run(changed, 3000)


def _run(sources: Mapping[ModuleType, str], examples: int) -> None:
    """Runs the machine over these rules.

    Raises:
        _Found: it failed.
    """
    made = [_module(module.__name__, source) for module, source in sources.items()]
    rules, attempts = made
    attempts.Candidates = rules.Candidates
    try:

        class Changed(AttemptMachine):
            make = attempts.Attempt

        run_state_machine_as_test(
            Changed,
            settings=settings(
                max_examples=examples,
                stateful_step_count=15,
                derandomize=True,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    except Exception as error:
        raise _Found(str(error)) from error
    finally:
        for module in made:
            del sys.modules[module.__name__]


def _module(name: str, source: str) -> Any:
    """A module of its own with this source; dataclasses look it up by its name."""
    module = sys.modules[f"{name}_changed"] = ModuleType(f"{name}_changed")
    exec(compile(source, module.__name__, "exec"), module.__dict__)
    return module
