"""Prefix fetches between simulated workers, as in `runtime/prefix_fetch.py`, in virtual time.
Tests: tests/unit/sim/test_fetch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvmesh.core.types import PrefixSource
from kvmesh.policy.prefix_source import FetchPace
from kvmesh.sim.events import EventQueue
from kvmesh.sim.fleet import SimFleet
from kvmesh.sim.profile import TYPICAL_TOKENS, Profile
from kvmesh.sim.requests import SimSequence
from kvmesh.sim.trace_request import TRACE_BLOCK
from kvmesh.sim.worker import SimWorker

_MESSAGES = 3
"""Number of messages of a fetch: the lease, its answer, and the request for the bytes."""


def fleet_pace(profile: Profile, fleet: SimFleet) -> FetchPace:
    """Returns the times that a scheduler would measure in a fleet with this profile now."""
    device, links = profile.devices[profile.plan.local], profile.links
    token_bytes = profile.token_bytes
    return FetchPace(
        device.prefill_s(TYPICAL_TOKENS) / TYPICAL_TOKENS,
        token_bytes / links.inside_bytes_per_s,
        fleet.between_token_s(),
    )


@dataclass(slots=True)
class _Fetch:
    """A fetch in progress.

    Attributes:
        most: leading blocks of the prompt that the holder has, by the route.
        have: leading blocks of the prompt that the reader has or that have arrived.
    """

    worker: SimWorker
    sequence: SimSequence
    holder: SimWorker
    most: int
    have: int


class Fetches:
    """All fetches of a run.

    Args:
        stretch: returns the random factor on the size of the next transfer.

    Attributes:
        tokens: number of tokens fetched from other workers.
    """

    def __init__(
        self,
        events: EventQueue,
        fleet: SimFleet,
        profile: Profile,
        stretch: Callable[[], float],
    ) -> None:
        self._events = events
        self._fleet = fleet
        self._profile = profile
        self._stretch = stretch
        self.tokens = 0

    def begin(self, worker: SimWorker, sequence: SimSequence, source: PrefixSource) -> None:
        """Fetches the prefix that the source holds; then the worker computes the rest."""
        holder = self._fleet.workers[source.worker_id]
        have = sequence.num_cached // TRACE_BLOCK
        self._next_piece(_Fetch(worker, sequence, holder, source.num_blocks, have))

    def _next_piece(self, fetch: _Fetch) -> None:
        """Requests the missing blocks; a holder lends as many as fit into its pool at a time."""
        holder, have = fetch.holder, fetch.have
        lent: list[int] = []
        load_s = 0.0
        if holder.alive and have < fetch.most:
            lent, load_s = holder.lend(fetch.sequence.request.reusable_hashes, have)
        if not lent:
            fetch.worker.go_on(fetch.sequence, have)
            return
        kv_bytes = self._profile.kv_bytes
        held = have + len(lent)
        before = kv_bytes(have * TRACE_BLOCK) if have else 0.0
        size = max(kv_bytes(held * TRACE_BLOCK) - before, 0.0) * self._stretch()
        arrived = partial(self._arrived, fetch, lent)
        latency = _MESSAGES * self._profile.links.latency_s + load_s

        def left() -> None:
            self._events.after(latency, arrived)

        self._fleet.link(holder, fetch.worker).send(size, left)

    def _arrived(self, fetch: _Fetch, lent: list[int]) -> None:
        fetch.holder.take_back(lent)
        if fetch.sequence.gone:
            return
        # Nothing of a piece counts if the holder died meanwhile: perhaps before the last byte.
        if fetch.holder.alive:
            fetch.have += len(lent)
            self.tokens += len(lent) * TRACE_BLOCK
        self._next_piece(fetch)
