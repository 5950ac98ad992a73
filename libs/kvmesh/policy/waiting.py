"""Requests that wait at gateways: their numbers, and which side they wait for. The scheduler and
the simulator both use this.

Tests: tests/unit/policy/test_waiting.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.core.types import Role, WorkerLoad


@dataclass(frozen=True, slots=True)
class Looking:
    """Number of requests that look for workers.

    Attributes:
        reserved: those with a reservation; they wait for prefill.
        unreserved: those without a reservation.
        remote: those with a reservation that wait for the remote cluster's prefill workers.
    """

    reserved: int = 0
    unreserved: int = 0
    remote: int = 0

    def __add__(self, other: Looking) -> Looking:
        return Looking(
            self.reserved + other.reserved,
            self.unreserved + other.unreserved,
            self.remote + other.remote,
        )


def looking(asked: int, asked_reserved: int, queued: int, planned: int, remote: int) -> Looking:
    """Returns what a gateway's waiting requests wait for.

    A request that was offered to workers knows what it waits for: prefill, if it has a reservation.
    Queued requests are assumed to wait for prefill in the same proportion, and those for prefill
    for the two clusters in the proportion of all with a plan.

    Args:
        asked, asked_reserved: requests that all workers refused, and those with a reservation
            among them.
        queued: requests that were not offered to any worker yet.
        planned, remote: waiting requests that had a plan, and those that it sent to the remote
            cluster.
    """
    total = asked + queued
    reserved = round(asked_reserved * total / asked) if asked else 0
    return Looking(reserved, total - reserved, round(reserved * remote / planned) if planned else 0)


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests of one model that look for workers.

    Attributes:
        scenarios: by the scenario that they name.
    """

    scenarios: Mapping[str, Looking] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        """Number of requests with a reservation."""
        return sum(each.reserved for each in self.scenarios.values())

    @property
    def remote(self) -> int:
        """Number of those that wait for the remote cluster's prefill workers."""
        return sum(each.remote for each in self.scenarios.values())

    @property
    def local(self) -> int:
        """Number of those that wait for the home cluster's prefill workers."""
        return self.reserved - self.remote

    @property
    def unreserved(self) -> int:
        """Number of requests without a reservation."""
        return sum(each.unreserved for each in self.scenarios.values())


@dataclass(frozen=True, slots=True)
class Waiting:
    """Number of requests that wait for a prefill worker and for a decode worker."""

    prefill: float
    decode: float


def split_waiting(reserved: float, unreserved: float, loads: Iterable[WorkerLoad]) -> Waiting:
    """Returns how many of the requests at the gateways wait for prefill and for decode.

    A request with a reservation waits for prefill. A request without one finds the decode slots
    taken by running sequences or by other requests' reservations. Those reservations wait for
    prefill, so a request that waits for them waits for prefill too.

    Args:
        reserved, unreserved: requests that wait with a reservation and without one.
        loads: loads of all workers at home.
    """
    running = reservations = 0
    for load in loads:
        running += load.decode_running
        reservations += load.decode_reserved
    share = running / (running + reservations) if running + reservations else 1.0
    return Waiting(reserved + unreserved * (1.0 - share), unreserved * share)


def per_worker(waiting: Waiting, roles: Sequence[Role]) -> Waiting:
    """Returns the equal share of each worker of the side for which requests wait.

    Args:
        roles: of all workers for which they wait.
    """
    num_prefill = roles.count(Role.PREFILL)
    num_decode = len(roles) - num_prefill
    return Waiting(waiting.prefill / max(num_prefill, 1), waiting.decode / max(num_decode, 1))
