"""Compares the duration of the engine's steps with earlier steps of the same kind. Pure.

Steps are of one kind if their tokens, and the positions that these attend to, are equal up to a
factor of two. So neither a long prompt nor an engine that was always slow makes a worker count as
slow. Tests: tests/unit/engine/test_step_watch.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.engine.protocol import SequenceChunk

WINDOW_S = 1.5
"""Seconds before now whose steps measure how slow the engine is."""

MIN_KNOWN = 3
"""Minimum number of ended steps of a kind before its duration is known."""

_PROMPT_BITS = 8
_LEAST_EXPECTED_S = 6.0
"""Minimum estimate in seconds for a step larger than any before, which may compile kernels."""

_GAIN = 1 / 16
_SLOW_RATIO = 2.0
# A slowdown becomes the usual duration after minutes, not after seconds.
_SLOW_GAIN = 1 / 512


class _Kind(NamedTuple):
    """Size class of a step; both counts as powers of two."""

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
    """State of the steps at one moment, for reports.

    Attributes:
        age_s: seconds since the running step began; 0 if none runs.
        expected_s: usual seconds of its kind; 0 if not known.
        slowdown: duration of recent steps over the usual duration of their kinds; 0 if no kind
            is known.
    """

    age_s: float = 0.0
    expected_s: float = 0.0
    slowdown: float = 0.0


def _num_tokens(chunk: SequenceChunk) -> int:
    """Returns the tokens of a chunk that one step computes; a chain's part takes several steps."""
    count = chunk.end - chunk.start
    return count if chunk.pace is None else min(count, chunk.pace.step_tokens)


class StepWatch:
    """Measures steps. Every `now` is in seconds on one clock that never goes back."""

    def __init__(self) -> None:
        self._usual: dict[_Kind, _Usual] = {}
        self._ended: deque[_Ended] = deque()
        self._running: tuple[_Kind, float] | None = None
        self._starved: deque[tuple[float, float]] = deque([(-math.inf, 0.0)])

    def begin(self, chunks: Sequence[SequenceChunk], now: float) -> None:
        """Records the start of a step."""
        tokens = sum(_num_tokens(each) for each in chunks)
        attended = sum(_num_tokens(each) * each.end for each in chunks)
        self._running = _Kind(tokens.bit_length(), attended.bit_length()), now

    def end(self, now: float) -> None:
        """Records the end of the step."""
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

    def state(self, now: float, starved_s: float = 0.0) -> StepState:
        """Returns the state at this moment.

        Args:
            starved_s: total seconds that the process has waited for a core, which are subtracted.
        """
        self._forget(now)
        self._starved.append((now, starved_s))
        took_s = sum(each.took_s for each in self._ended)
        usual_s = sum(each.usual_s for each in self._ended)
        age_s = expected_s = 0.0
        if self._running is not None:
            kind, began_at = self._running
            age_s = max(now - began_at - self._starved_since(began_at), 0.0)
            usual = self._usual.get(kind)
            if usual is not None and usual.num_steps >= MIN_KNOWN:
                expected_s = usual.mean_s
                took_s += age_s
                usual_s += min(age_s, expected_s)
            else:
                expected_s = self._of_like_kinds(kind) or self._of_larger_ones(kind)
        if self._ended:
            took_s -= self._starved_since(self._ended[0].at - self._ended[0].took_s)
        took_s = max(took_s, usual_s)
        return StepState(age_s, expected_s, took_s / usual_s if usual_s > 0 else 0.0)

    def _of_like_kinds(self, kind: _Kind) -> float:
        """Estimates a kind that was never measured from kinds with the same token count.

        Their steps have compiled the kernels for that count. 0 if there are none.
        """
        like = [
            usual.mean_s * 2.0 ** max(kind.attended - other.attended, 0)
            for other, usual in self._usual.items()
            if other.tokens == kind.tokens and usual.num_steps >= MIN_KNOWN
        ]
        return max(like, default=0.0)

    def _of_larger_ones(self, kind: _Kind) -> float:
        """Estimates a step larger than every known prompt step, such as a part of a chain.

        0 if the step is not larger.
        """
        known = [
            each
            for each, usual in self._usual.items()
            if usual.num_steps >= MIN_KNOWN and each.tokens >= _PROMPT_BITS
        ]
        largest = max(known, default=kind)
        if largest >= kind:
            return 0.0
        more = max(kind.tokens - largest.tokens, kind.attended - largest.attended, 0)
        return max(self._usual[largest].mean_s * 2.0**more, _LEAST_EXPECTED_S)

    def _starved_since(self, moment: float) -> float:
        """Returns the seconds without a core since the last `state` before a moment."""
        return self._starved[-1][1] - next(
            total for at, total in reversed(self._starved) if at <= moment
        )

    def _forget(self, now: float) -> None:
        since = now - WINDOW_S if self._running is None else min(now - WINDOW_S, self._running[1])
        if self._ended:
            since = min(since, self._ended[0].at - self._ended[0].took_s)
        while len(self._starved) > 1 and self._starved[1][0] <= since:
            self._starved.popleft()
        while self._ended and self._ended[0].at <= now - WINDOW_S:
            self._ended.popleft()
