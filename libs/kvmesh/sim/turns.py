"""Decides in virtual time which waiting request may look for workers, as the gateway's
`services/gateway/request/turnstile.py` does.

While every search succeeds, all requests look at once. A request that finds no worker joins the
fair queue, and so do all later requests until the queue is empty again.
Tests: tests/unit/sim/test_turns.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvmesh.policy.fair_share import Claim, FairQueue
from kvmesh.policy.groups import serving_label
from kvmesh.sim.requests import SimRequest

Call = Callable[[], object]


class Lanes:
    """The turns of each group: `services/gateway/request/lanes.py`.

    Args:
        labels: scenarios that have workers of their own.
    """

    def __init__(self, labels: Collection[str] = ()) -> None:
        self._labels = frozenset(labels)
        self._turns: dict[str, Turns] = {}

    def of(self, request: SimRequest) -> Turns:
        """Returns the turns of the group that serves a request."""
        label = self.label(request)
        turns = self._turns.get(label)
        if turns is None:
            turns = self._turns[label] = Turns()
        return turns

    def label(self, request: SimRequest) -> str:
        """Returns the scenario of the group that serves a request; empty if it has none."""
        return serving_label(request.trace.scenario, self._labels)


class Turns:
    """The gateway's requests that wait for the workers of one group.

    Attributes:
        num_looking: number of requests that look for workers, in the queue or not.
    """

    def __init__(self) -> None:
        self.num_looking = 0
        self._queue = FairQueue()
        self._queued: set[SimRequest] = set()
        self._heads: list[SimRequest] = []
        # Requests that wait for their turn, with the callback for it.
        self._calls: dict[SimRequest, Call] = {}

    @property
    def share(self) -> float:
        """Fraction of the waiting requests that may look for workers now; above 0, up to 1."""
        return len(self._heads) / len(self._queue) if self._heads else 1.0

    def enter(self, request: SimRequest) -> None:
        """Adds a request that begins to look for workers."""
        self.num_looking += 1
        if self._queued:
            self._join(request)

    def wait(self, request: SimRequest, call: Call) -> bool:
        """Returns whether it is the request's turn; if not, `call` is called when it is.

        Until then `leave` may end the wait.
        """
        if request not in self._queued or request in self._heads:
            return True
        self._calls[request] = call
        return False

    def missed(self, request: SimRequest) -> None:
        """Records that a request found no workers."""
        if request in self._queued:
            self._queue.missed()
            self._refresh()
        else:
            self._join(request)

    def leave(self, request: SimRequest, *, placed: bool) -> None:
        """Removes a request that has its workers or was refused."""
        self.num_looking -= 1
        if request not in self._queued:
            return
        (self._queue.placed if placed else self._queue.left)(request)
        self._queued.remove(request)
        self._calls.pop(request, None)
        self._refresh()

    def _join(self, request: SimRequest) -> None:
        # A moved stream does not queue: its client is already reading.
        if not request.generated:
            self._queued.add(request)
            self._queue.add(request, Claim("", request.num_tokens))
            self._refresh()

    def _refresh(self) -> None:
        self._heads = [each for each in self._queue.heads() if isinstance(each, SimRequest)]
        for request in self._heads:
            call = self._calls.pop(request, None)
            if call is not None:
                call()
