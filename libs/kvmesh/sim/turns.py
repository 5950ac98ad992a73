"""Decides in virtual time which waiting request may look for workers, as the gateway's
`services/gateway/request/turnstile.py` does.

While every search succeeds, all requests look at once. A request that finds no worker joins the
fair queue, and so do all later requests until the queue is empty again. Requests for the two
clusters do not wait for each other.
Tests: tests/unit/sim/test_turns.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

from kvmesh.policy.crowd import Crowd
from kvmesh.policy.fair_share import Claim, FairQueue
from kvmesh.policy.groups import serving_label
from kvmesh.policy.prefill_times import PrefillTimes
from kvmesh.sim.requests import SimRequest

Call = Callable[[], object]

_TENANT = ""  # traces name no tenants


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
        crowd: requests that look for workers, in the queue or not, and how fast they get them.
        prefill_times: times of this group's earlier prompts.
    """

    def __init__(self) -> None:
        self.crowd = Crowd()
        self.prefill_times = PrefillTimes()
        self._queue = FairQueue()
        self._queued: set[SimRequest] = set()
        self._heads: Sequence[Hashable] = ()
        # Requests that wait for their turn, with the callback for it.
        self._calls: dict[Hashable, Call] = {}

    def pace(self, request: SimRequest) -> float:
        """Returns the factor on the pause of a request between two rounds."""
        return self._queue.pace(request) if request in self._queued else 1.0

    def is_hopeless(self, request: SimRequest) -> bool:
        """Whether a new request would only wait for its refusal, as a gateway judges it."""
        return self.crowd.is_hopeless(_TENANT, request.deadline_s - request.arrival_s)

    @property
    def retry_after_s(self) -> float:
        """Seconds that a gateway tells a client to wait if it refuses a new request."""
        return self.crowd.wait_s(_TENANT)

    def enter(self, request: SimRequest) -> None:
        """Adds a request that begins to look for workers."""
        self.crowd.enter(_TENANT)
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

    def waits_for(self, request: SimRequest, *, remote: bool) -> bool:
        """Records whose prefill workers a request waits for; returns whether it may still ask."""
        if remote:
            self._queue.split()
        if request not in self._queued or not self._queue.waits_for(request, remote=remote):
            return True
        self._refresh()
        return request in self._heads

    def missed(self, request: SimRequest, *, remote: bool | None) -> None:
        """Records that a request found no workers.

        Args:
            remote: whether it asked those of the remote cluster; None: it had no plan.
        """
        if request in self._queued:
            self._queue.missed(request)
            self._refresh()
        else:
            self._join(request)
            if remote is not None:
                self.waits_for(request, remote=remote)

    def leave(self, request: SimRequest, now: float, *, placed: bool) -> None:
        """Removes a request that has its workers or was refused."""
        self.crowd.leave(_TENANT, now, placed=placed)
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
            self._queue.add(request, Claim(_TENANT, request.num_tokens))
            self._refresh()

    def _refresh(self) -> None:
        heads = self._queue.heads()
        if heads is self._heads:
            return
        self._heads = heads
        for request in heads:
            call = self._calls.pop(request, None)
            if call is not None:
                call()
