"""How many connections a transfer is spread over: by cores, and then by what is measured. Pure.

Connections cost threads at both ends. Where those share few cores a second one is slower than the
first alone; over a long way, or beside many cores, one does not fill the link.
Tests: tests/unit/transfer/test_lane_width.py.
"""

from __future__ import annotations

MOST_LANES = 8
"""That are tried where nothing is set."""
MEASURED_BYTES = 8 << 20
"""Shorter transfers say more of their beginning than of the link."""
_TRY_EVERY = 12
"""Measured transfers between two tries of another width."""
_GAIN = 1.1
"""By which another width must be faster: rates of one width differ by as much."""
_WEIGHT = 0.3


def lanes_by_cores(cores: int) -> int:
    """Connections to begin with: each end of one has a thread that is busy."""
    return max(1, min(4, cores // 2))


class LaneWidth:
    """The width of one link, 1 to `most`.

    Every dozenth transfer takes one connection more or fewer, in turn. A width that is a tenth
    faster, by its average of late, is taken from then on.

    Attributes:
        most: connections.
        now: that transfers take.
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
        """As set, `lanes` and never another; or with 0 by cores and by measuring."""
        if lanes:
            width = cls(lanes, lanes)
            width._step = 0
            return width
        return cls(lanes_by_cores(cores), MOST_LANES)

    def next(self) -> int:
        """Of a transfer that begins, alone on its link and of `MEASURED_BYTES` or more."""
        if self._step == 0 or self._until_try > 0:
            return self.now
        other = self.now + self._step
        return other if 1 <= other <= self.most else self.now - self._step

    def saw(self, width: int, bytes_per_s: float) -> None:
        """Such a transfer has ended, and was alone all the time."""
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
