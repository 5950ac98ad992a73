"""Each rule of the attempt, when it is changed, fails its state machine.

A mutation is a piece of `attempt.py` with another one in its place.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from services.gateway.request import attempt
from tests.property.test_attempt_machine import AttemptMachine

SOURCE = Path(attempt.__file__).read_text()

MUTATIONS = {
    # the search for workers
    "IDLE, two workers: the prompt is shown at once": (
        "Kind.RESERVE if self._holders else Kind.START",
        "Kind.START",
    ),
    "IDLE, one worker: blocks are asked for alone": (
        "Kind.RESERVE if self._holders else Kind.START",
        "Kind.RESERVE",
    ),
    "HELD, its worker is in the plan: it reserves again": (
        "kind = Kind.OFFER if is_held else",
        "kind = Kind.OFFER if False else",
    ),
    "HELD, its worker is not in the plan: it is kept": (
        "if self.state is State.HELD and self.holder not in",
        "if False and self.holder not in",
    ),
    "nobody left: no word of it": ("        out.append(act.Vain())\n", ""),
    "no time left: the next one is asked": ("if now < self._until:", "if True:"),
    "who refused for ever is asked again": (
        "if candidate.worker_id not in self._unfit:",
        "if True:",
    ),
    "RESERVING, reserved: the lease ends": (
        "out: list[Action] = [act.Hold(number, worker_id, lease_ms)]",
        "out: list[Action] = []",
    ),
    "RESERVING, reserved: nobody is offered it": (
        "        self.state = State.HELD\n        return self._next(out, now)",
        "        self.state = State.HELD\n        return out",
    ),
    "STARTING, reserved only: another one is offered it": (
        "        if state is State.STARTING:\n            self._is_chained = True",
        "        if False:\n            self._is_chained = True",
    ),
    "STARTING, reserved only: it counts as two workers": (
        "            self._is_chained = True\n",
        "",
    ),
    "reserved by another worker is taken": ("if worker_id != candidate.worker_id:", "if False:"),
    "reserved twice": (
        "if state is not State.STARTING and (starts or state is not State.RESERVING):",
        "if False:",
    ),
    "a number is used twice": ("        self.num_asked += 1\n", "        self.num_asked = 1\n"),
    "RESERVING, refused: it is left open": (
        "if not is_offer or self._is_chained or refusal.reason is RefusalReason.LOST:",
        "if is_offer and (self._is_chained or refusal.reason is RefusalReason.LOST):",
    ),
    "refused: nobody notes it": (
        "        out.append(act.Refuse(side, refusal, _worker(opened)))\n",
        "",
    ),
    "refused for ever is not remembered": ("if refusal.reason in NEVER:", "if False:"),
    "OFFERING, accepted: it is no offer": (
        "        self.num_offers += 1\n        self.state = State.PREFILL",
        "        self.state = State.PREFILL",
    ),
    "OFFERING, accepted of an older offer counts": (
        "or opened is None or opened.number != number:\n            return ()\n        chained",
        "or opened is None:\n            return ()\n        chained",
    ),
    "OFFERING, accepted late counts": (
        "if self.state is not State.OFFERING or opened is None",
        "if opened is None",
    ),
    "OFFERING, refused: the offer is left open": (
        "        if is_offer:\n            self._drop_prefill(out)",
        "        if False:\n            self._drop_prefill(out)",
    ),
    "OFFERING, LOST: the blocks are shown to another one": (
        "or self._is_chained or refusal.reason is RefusalReason.LOST:",
        "or self._is_chained:",
    ),
    "OFFERING, refused: the blocks are given up": (
        "if not is_offer or self._is_chained or refusal.reason is RefusalReason.LOST:",
        "if True:",
    ),
    "OFFERING, blocks given up: those who refused them are not asked again": (
        "            if is_offer:\n                self._to_reserve = deque(self._holders)\n",
        "",
    ),
    "OFFERING, chained and refused: blocks of one worker are shown to another": (
        "if not is_offer or self._is_chained or refusal",
        "if not is_offer or refusal",
    ),
    "OFFERING, failed by decode: the offer stays": (
        "_drop_prefill(out)\n        self._drop_decode(out)\n        out.append(act.Refuse(",
        "_drop_decode(out)\n        out.append(act.Refuse(",
    ),
    "OFFERING, failed by decode: the search ends": (
        "return self._next(out, now) if was_shown else out",
        "return out",
    ),
    "HELD, failed by decode: it goes on asking": (
        "return self._next(out, now) if was_shown else out",
        "return self._next(out, now)",
    ),
    "HELD, failed by decode: nobody notes it": (
        "        out.append(act.Refuse(Side.DECODE, refusal, None))\n",
        "",
    ),
    "no answer: it is waited for": (
        "if state in _WAITS:\n            return min",
        "if False:\n            return min",
    ),
    "no answer in time and no time: the worker's fault": (
        "if now >= self._until:  #",
        "if False:  #",
    ),
    # tokens
    "PREFILL, first token: it is not counted": ("        self.position += 1\n", ""),
    "PREFILL, first token twice": (
        "if self.state is not State.PREFILL or opened is None or opened.number != number:",
        "if opened is None or opened.number != number:",
    ),
    "PREFILL, one worker: the handoff is waited for": (
        "        if self._prefill is None:\n            self._is_handed_off(out)",
        "        if False:\n            self._is_handed_off(out)",
    ),
    "PREFILL, two workers: no handoff is waited for": (
        "        if self._prefill is None:\n            self._is_handed_off(out)",
        "        if True:\n            self._is_handed_off(out)",
    ),
    "PREFILL, the only token: it goes on": (
        "        if event.finish_reason is not None:\n            self._forget_prefill(out)",
        "        if False:\n            self._forget_prefill(out)",
    ),
    "PREFILL, the only token: the reservation is left": (
        "            return self._close(out, Outcome.DONE)\n",
        "            self._decode = None\n            return self._close(out, Outcome.DONE)\n",
    ),
    "PREFILL, tokens before the first one: dropped": (
        "            self._early.append((first_position, token_ids, logprobs, finish, error))\n",
        "",
    ),
    "PREFILL, tokens of blocks given up count": ("        self._early.clear()\n", ""),
    "HANDOFF, handed off: prefill is cancelled later": (
        "        self._forget_prefill(out)\n        out.append(act.Decoding(",
        "        out.append(act.Decoding(",
    ),
    "HANDOFF, handed off: the lease is renewed for ever": (
        "        out.append(act.Decoding(self._decode.number, self._decode.candidate.worker_id))\n",
        "",
    ),
    "HANDOFF, tokens: the handoff is still waited for": (
        "        if state is State.HANDOFF:\n            self._is_handed_off(out)",
        "        if False:\n            self._is_handed_off(out)",
    ),
    "HANDOFF, handed off: its patience goes on": (
        "            self._since = now\n            self._is_handed_off(out)",
        "            self._is_handed_off(out)",
    ),
    "DECODE, repeated tokens: delivered": ("        if repeated:\n", "        if False:\n"),
    "DECODE, repeated tokens: scores are not cut": (
        "token_ids, logprobs = token_ids[repeated:], logprobs[repeated:]",
        "token_ids = token_ids[repeated:]",
    ),
    "DECODE, nothing new: delivered": (
        "        if token_ids or finish is not None:\n",
        "        if True:\n",
    ),
    "DECODE, nothing new: no progress": (
        "self._since = now\n        out: list[Action] = []\n        if state is",
        "out: list[Action] = []\n        if state is",
    ),
    "DECODE, a gap: delivered": ("        if repeated < 0:\n", "        if False:\n"),
    "DECODE, a gap of one: delivered": (
        "        if repeated < 0:\n",
        "        if repeated < -1:\n",
    ),
    "DECODE, the next one: a gap": ("        if repeated < 0:\n", "        if repeated <= 0:\n"),
    "DECODE, the last tokens: it goes on": (
        "            self._close(out, Outcome.DONE)\n        return out",
        "        return out",
    ),
    "DECODE, the last tokens: the worker is told": (
        "out.append(act.Forget(Side.DECODE, number))\n            self._decode = None\n",
        "pass\n",
    ),
    "tokens of an older question count": (
        "opened.number != number:\n            return ()\n        if state is not State.DECODE",
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
        "if self.state in _RUNS:\n            opened",
        "if False:\n            opened",
    ),
    "failed: the wrong side": (
        "says = Side.PREFILL if by_prefill else side",
        "says = side",
    ),
    "failed: the wrong worker": (
        "opened = self._prefill if side is Side.PREFILL else self._decode",
        "opened = self._decode",
    ),
    "stalled: the wrong worker": (
        "slow = _worker(self._prefill or self._decode)",
        "slow = _worker(self._decode)",
    ),
    "PREFILL, stalled: another word": ('State.PREFILL: "prefill_stalled", ', ""),
    "HANDOFF, stalled: another word": (', State.HANDOFF: "handoff_stalled"', ""),
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
        "return min(self._since + patience_s, self._deadline)",
        "return self._since + patience_s",
    ),
    "the deadline: it moves": ("if now >= self._deadline:", "if False:"),
    "cancel: the offer is left": (
        "        self._drop_prefill(out)\n        self._drop_decode(out)\n        self.state, self",
        "        self._drop_decode(out)\n        self.state, self",
    ),
    "cancel: the reservation is left": (
        "        self._drop_prefill(out)\n        self._drop_decode(out)\n        self.state, self",
        "        self._drop_prefill(out)\n        self.state, self",
    ),
    "cancel: twice": (
        "return () if self.outcome is not None else self._close",
        "return self._close",
    ),
    "lost: nobody is told": (
        "        out.append(word)\n",
        "",
    ),
    "an outcome of another name": ("act.Expire: Outcome.LATE", "act.Expire: Outcome.BROKEN"),
}


class _Found(Exception):
    """The machine noticed."""


def test_the_rules_as_they_are_pass() -> None:
    _run(SOURCE, 300)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_rule_is_noticed(name: str) -> None:
    old, new = MUTATIONS[name]
    assert SOURCE.count(old) >= 1, "the rule is not there any more"
    with pytest.raises(_Found):
        _run(SOURCE.replace(old, new, 1), 3000)


def _run(source: str, examples: int) -> None:
    """Runs the machine over these rules.

    Raises:
        _Found: it failed.
    """
    module = ModuleType("services.gateway.request.changed_attempt")
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, module.__name__, "exec"), module.__dict__)

        class Changed(AttemptMachine):
            make = module.Attempt

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
        del sys.modules[module.__name__]
