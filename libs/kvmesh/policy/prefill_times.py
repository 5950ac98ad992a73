"""How long prompts take from their acceptance to their first token, learned from those before.

A request that is accepted at its very deadline gets its first token after it: the search for a
worker has to end earlier by the time that the prompt will take. Mean and deviation are smoothed as
TCP smooths round trips (RFC 6298). Tests: tests/unit/policy/test_prefill_times.py.
"""

from __future__ import annotations

from dataclasses import dataclass

_GAIN, _DEVIATION_GAIN = 1 / 8, 1 / 4
# TCP takes 4; a first token that comes too late is worse than a resend that comes too early.
_DEVIATIONS = 6.0
WAY_SHARE = 0.01
"""This share of a request's time is set aside for the way to the client and back."""

MAX_SHARE = 0.5
"""At most this share of a request's time is set aside for its prompt."""


@dataclass(slots=True)
class _Smoothed:
    mean_s: float
    deviation_s: float

    def add(self, seconds: float) -> None:
        error = seconds - self.mean_s
        self.mean_s += _GAIN * error
        self.deviation_s += _DEVIATION_GAIN * (abs(error) - self.deviation_s)


class PrefillTimes:
    """Times by length: prompts of up to twice the tokens of another count as alike."""

    def __init__(self) -> None:
        self._by_length: dict[int, _Smoothed] = {}

    def note(self, num_tokens: int, seconds: float) -> None:
        """A prompt had its first token so long after it was accepted."""
        length = num_tokens.bit_length()
        known = self._by_length.get(length)
        if known is None:
            self._by_length[length] = _Smoothed(seconds, seconds / 2)
        else:
            known.add(seconds)

    def expected_s(self, num_tokens: int) -> float:
        """A time that most prompts of this length stay under; 0 while nothing is known."""
        if not self._by_length:
            return 0.0
        length = num_tokens.bit_length()
        times = self._by_length.get(length)
        if times is None:
            # The nearest one is still better than nothing.
            nearest = min(self._by_length, key=lambda known: (abs(known - length), known))
            times = self._by_length[nearest]
        return times.mean_s + _DEVIATIONS * times.deviation_s

    def patience_s(self, num_tokens: int, ttft_s: float) -> float:
        """How long to look for a worker so that the first token still comes within `ttft_s`."""
        expected_s = self.expected_s(num_tokens) + WAY_SHARE * ttft_s
        return ttft_s - min(expected_s, MAX_SHARE * ttft_s)
