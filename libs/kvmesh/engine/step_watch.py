"""How long the engine's steps take beside what steps like them have taken before. Pure.

Steps are alike if their tokens, and the positions that these attend to, are the same up to a factor
of two. So a long prompt makes no worker slow, and neither does an engine that was always slow.
Tests: tests/unit/engine/test_step_watch.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.engine.protocol import SequenceChunk

WINDOW_S = 1.5
"""Steps of this time tell how slow the engine is now."""

MIN_KNOWN = 3
"""Steps of a kind that have to have ended before it is known how long they take."""

_GAIN = 1 / 16
_SLOW_RATIO = 2.0
# A slower engine is the usual one after minutes, not after seconds.
_SLOW_GAIN = 1 / 512


class _Kind(NamedTuple):
    """Powers of two."""

    tokens: int
    attended: int


@dataclass(slots=True)
class _Usual:
    mean_s: float
    num_steps: int = 1

    def add(self, seconds: float) -> None:
        self.num_steps += 1
        known = self.num_steps > MIN_KNOWN
        slow = known and seconds > _SLOW_RATIO * self.mean_s
        gain = _SLOW_GAIN if slow else max(_GAIN, 1 / self.num_steps)
        self.mean_s += gain * (seconds - self.mean_s)


class _Ended(NamedTuple):
    at: float
    took_s: float
    usual_s: float


@dataclass(frozen=True, slots=True)
class StepState:
    """What a report tells of the steps.

    Attributes:
        age_s: since the running step began; 0: none runs.
        expected_s: what steps like it have taken; 0: not known.
        slowdown: time of the steps of late, over what steps like them have taken before; 0: none
            of them is known.
    """

    age_s: float = 0.0
    expected_s: float = 0.0
    slowdown: float = 0.0


class StepWatch:
    """Every `now` is in seconds on one clock that never goes back."""

    def __init__(self) -> None:
        self._usual: dict[_Kind, _Usual] = {}
        self._ended: deque[_Ended] = deque()
        self._running: tuple[_Kind, float] | None = None

    def begin(self, chunks: Sequence[SequenceChunk], now: float) -> None:
        """A step begins."""
        tokens = sum(each.end - each.start for each in chunks)
        attended = sum((each.end - each.start) * each.end for each in chunks)
        self._running = _Kind(tokens.bit_length(), attended.bit_length()), now

    def end(self, now: float) -> None:
        """It has ended."""
        assert self._running is not None, "a step began"
        (kind, began_at), self._running = self._running, None
        took_s, usual = now - began_at, self._usual.get(kind)
        if usual is None:
            self._usual[kind] = _Usual(took_s)
        else:
            if usual.num_steps >= MIN_KNOWN:
                self._ended.append(_Ended(now, took_s, usual.mean_s))
            usual.add(took_s)
        self._forget(now)

    def state(self, now: float) -> StepState:
        """How it is now."""
        self._forget(now)
        took_s = sum(each.took_s for each in self._ended)
        usual_s = sum(each.usual_s for each in self._ended)
        age_s = expected_s = 0.0
        if self._running is not None:
            kind, began_at = self._running
            age_s, usual = now - began_at, self._usual.get(kind)
            if usual is not None and usual.num_steps >= MIN_KNOWN:
                expected_s = usual.mean_s
                took_s += age_s
                usual_s += min(age_s, expected_s)
        return StepState(age_s, expected_s, took_s / usual_s if usual_s > 0 else 0.0)

    def _forget(self, now: float) -> None:
        while self._ended and self._ended[0].at <= now - WINDOW_S:
            self._ended.popleft()
