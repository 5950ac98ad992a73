"""Splits the requests that wait at gateways into those for prefill and those for decode.

Tests: tests/unit/policy/test_waiting.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.core.types import WorkerLoad


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
