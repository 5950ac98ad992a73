"""Predicts the time from a prompt's acceptance to its first token, from earlier prompts.

A request that is accepted just before its deadline gets its first token too late, so the search for
a worker has to end earlier by the expected prefill time. Mean and deviation are smoothed as TCP
smooths round trips (RFC 6298). Tests: tests/unit/policy/test_prefill_times.py.
"""

from __future__ import annotations

from dataclasses import dataclass

_GAIN, _DEVIATION_GAIN = 1 / 8, 1 / 4
# TCP uses 4 deviations. A late first token is worse than a premature retransmission.
_DEVIATIONS = 6.0
WAY_SHARE = 0.01
"""Fraction of a request's TTFT limit reserved for the network to the client and back."""

MAX_SHARE = 0.5
"""Largest fraction of a request's TTFT limit reserved for how much prefill times vary."""

LEAST_SHARE = 0.05
"""Smallest fraction of the limit in which a request looks for a worker, although most prompts of
its length take longer than the limit: one that is free serves it late rather than not at all."""


@dataclass(slots=True)
class _Smoothed:
    mean_s: float
    deviation_s: float

    def add(self, seconds: float) -> None:
        error = seconds - self.mean_s
        self.mean_s += _GAIN * error
        self.deviation_s += _DEVIATION_GAIN * (abs(error) - self.deviation_s)


class PrefillTimes:
    """Prefill times by length; prompts between two powers of two share an estimate.

    Attributes:
        num_noted: number of times noted so far; estimates are the same while it is.
    """

    def __init__(self) -> None:
        self._by_length: dict[int, _Smoothed] = {}
        self.num_noted = 0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Adds the seconds from a prompt's acceptance to its first token."""
        self.num_noted += 1
        length = num_tokens.bit_length()
        known = self._by_length.get(length)
        if known is None:
            self._by_length[length] = _Smoothed(seconds, seconds / 2)
        else:
            known.add(seconds)

    def expected_s(self, num_tokens: int) -> float:
        """Returns the seconds that most prompts of this length stay under; 0 while not known."""
        times = self._times(num_tokens)
        return 0.0 if times is None else times.mean_s + _DEVIATIONS * times.deviation_s

    def patience_s(self, num_tokens: int, ttft_s: float) -> float:
        """Returns the seconds to look for a worker so that the first token comes in `ttft_s`.

        A prompt that begins later would miss its limit and delay other prompts.
        """
        times = self._times(num_tokens)
        mean_s = 0.0 if times is None else times.mean_s
        way_s = WAY_SHARE * ttft_s
        reserved_s = max(min(self.expected_s(num_tokens) + way_s, MAX_SHARE * ttft_s), mean_s)
        return max(ttft_s - reserved_s, LEAST_SHARE * ttft_s)

    def _times(self, num_tokens: int) -> _Smoothed | None:
        """Times of this length, or of the nearest one that is known."""
        length = num_tokens.bit_length()
        times = self._by_length.get(length)
        if times is None and self._by_length:
            # The estimate of the nearest length is better than none.
            nearest = min(self._by_length, key=lambda known: (abs(known - length), known))
            times = self._by_length[nearest]
        return times
