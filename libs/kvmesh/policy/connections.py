"""A gateway's own count of its requests at each prefill worker, for policies that offer by it.

Source: P/D-Serve 3.5 (least SSE connections, one batch filled after the other). The order itself
is `forwarding.offer_order`. Tests: tests/unit/policy/test_connections.py,
tests/integration/test_equal_decisions.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvmesh.core.types import WorkerId
from kvmesh.policy.forwarding import PrefillPeer, offer_order

BY_CONNECTIONS = frozenset({"pdserve"})
"""Route policies whose plans name prefill workers that gateways order themselves."""


class Connections:
    """This gateway's requests at each prefill worker, and the worker whose batch is being
    filled.

    Args:
        fills: whether one worker's batch is filled before the next one's. Workers with queues never
            refuse, so there the fewest connections alone decide.
    """

    def __init__(self, *, fills: bool = True) -> None:
        self._fills = fills
        self._open: Counter[WorkerId] = Counter()
        self._filling: WorkerId | None = None

    def order(self, names: Sequence[WorkerId]) -> list[WorkerId]:
        """Returns the workers in the order of offers (P/D-Serve 3.5)."""
        return offer_order(
            [PrefillPeer(name, self._open[name], name == self._filling) for name in names]
        )

    def accepted(self, name: WorkerId) -> None:
        """Records that a worker accepted an offer; the connection lasts until the answer ends."""
        self._open[name] += 1
        if self._fills:
            self._filling = name

    def rejected(self, name: WorkerId) -> None:
        """Records that a worker refused an offer because it is busy."""
        if name == self._filling:
            self._filling = None

    def ended(self, name: WorkerId) -> None:
        """Records that a request of the worker ended."""
        assert self._open[name] > 0, f"nothing is open at {name}"
        self._open[name] -= 1
        if not self._open[name]:
            del self._open[name]

    @property
    def num_open(self) -> int:
        """Number of requests in flight."""
        return self._open.total()
