"""A host whose workers share its cores: who computes beside others takes longer.

Tests: tests/unit/sim/test_host.py.
"""

from __future__ import annotations

from typing import Protocol

from kvmesh.sim.profile import Sharing


class Sharer(Protocol):
    """A step loop of a worker of the host."""

    def others_changed(self) -> None:
        """Another worker of the host began to compute, or stopped."""
        ...


class Host:
    """Who computes now, of the workers of one host."""

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing
        self._sharers: list[Sharer] = []
        self._busy: set[Sharer] = set()

    def add(self, sharer: Sharer) -> None:
        """A worker comes to the host."""
        self._sharers.append(sharer)

    def note(self, sharer: Sharer, *, is_busy: bool) -> None:
        """The worker computes from now on, or does not; may be repeated."""
        if is_busy == (sharer in self._busy):
            return
        (self._busy.add if is_busy else self._busy.remove)(sharer)
        for each in self._sharers:
            if each is not sharer:
                each.others_changed()

    def prefill_stretch(self, sharer: Sharer) -> float:
        """How many times as long a chunk of a prompt takes as on a host of its own."""
        return 1 + (self.sharing.prefill - 1) * self._num_others(sharer)

    def decode_stretch(self, sharer: Sharer) -> float:
        """As `prefill_stretch`, of a decode step."""
        return 1 + (self.sharing.decode - 1) * self._num_others(sharer)

    def _num_others(self, sharer: Sharer) -> int:
        return len(self._busy) - (sharer in self._busy)
