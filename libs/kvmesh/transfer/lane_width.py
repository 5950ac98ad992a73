"""The number of connections of a transfer: chosen by cores, then adapted by measurement. Pure.

Connections cost threads at both ends. Where these share few cores, a second connection makes a
transfer slower. Over a long distance, or with many cores, one connection does not fill the link.
Tests: tests/unit/transfer/test_lane_width.py.
"""

from __future__ import annotations

MOST_LANES = 8
"""Maximum number of connections that are tried if the number is not configured."""
MEASURED_BYTES = 8 << 20
"""Minimum bytes of a measured transfer; a shorter one measures its start more than the link."""
_TRY_EVERY = 12
"""Number of measured transfers between two trials of another width."""
_GAIN = 1.1
"""Factor by which another width must be faster; rates at one width vary by as much."""
_WEIGHT = 0.3


def lanes_by_cores(cores: int) -> int:
    """Returns the initial number of connections: each keeps a thread busy at both ends."""
    return max(1, min(4, cores // 2))


class LaneWidth:
    """The width of one link, 1 to `most`.

    Every dozenth transfer tries one connection more or fewer, in turn. A width whose recent average
    is a tenth faster becomes the width in use.

    Attributes:
        most: maximum number of connections.
        now: number of connections in use.
    """

    def __init__(self, first: int, most: int) -> None:
        assert 1 <= first <= most, f"{first} of {most} connections"
        self.most = most
        self.now = first
        self._rates: dict[int, float] = {}
        self._until_try = _TRY_EVERY
        self._step = 1

    @classmethod
    def of(cls, lanes: int, cores: int) -> LaneWidth:
        """Returns a fixed width of `lanes`; with 0 an adaptive one that starts from the cores."""
        if lanes:
            width = cls(lanes, lanes)
            width._step = 0
            return width
        return cls(lanes_by_cores(cores), MOST_LANES)

    def next(self) -> int:
        """Returns the width of a starting transfer, alone and of `MEASURED_BYTES` or more."""
        if self._step == 0 or self._until_try > 0:
            return self.now
        other = self.now + self._step
        return other if 1 <= other <= self.most else self.now - self._step

    def saw(self, width: int, bytes_per_s: float) -> None:
        """Records the rate of a transfer of `next` that was alone until its end."""
        if self._step == 0:
            return
        before = self._rates.get(width, bytes_per_s)
        self._rates[width] = before + _WEIGHT * (bytes_per_s - before)
        if width == self.now:
            self._until_try -= 1
            return
        self._until_try = _TRY_EVERY
        self._step = -self._step if self.most > 2 else self._step
        if self._rates[width] > _GAIN * self._rates.get(self.now, 0.0):
            self.now = width
