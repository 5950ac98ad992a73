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
    """

    reserved: int = 0
    unreserved: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests of one model that look for workers.

    Attributes:
        scenarios: by the scenario that they name.
        remote, local: number of requests that wait for prefill in that cluster. The scheduler
            estimates it from the requests that asked again: most waiting requests wait for their
            turn to ask.
    """

    scenarios: Mapping[str, Looking] = field(default_factory=dict)
    remote: float = 0.0
    local: float = 0.0

    @property
    def reserved(self) -> int:
        """Number of requests with a reservation."""
        return sum(each.reserved for each in self.scenarios.values())

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
