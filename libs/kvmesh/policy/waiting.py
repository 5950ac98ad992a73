"""What requests at the gateways wait for. Tests: tests/unit/policy/test_waiting.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.core.types import WorkerLoad


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests that look for a worker, by what they wait for."""

    prefill: float
    decode: float


def split_waiting(reserved: float, unreserved: float, loads: Iterable[WorkerLoad]) -> Waiting:
    """Tells what requests at the gateways wait for.

    One with a reservation waits for prefill. One without finds the decode slots taken, by sequences
    that run or by reservations of others; the latter wait for prefill, and so does whoever waits
    for them.

    Args:
        reserved, unreserved: requests that wait with a reservation and without one.
        loads: of all workers at home.
    """
    running = reservations = 0
    for load in loads:
        running += load.decode_running
        reservations += load.decode_reserved
    share = running / (running + reservations) if running + reservations else 1.0
    return Waiting(reserved + unreserved * (1.0 - share), unreserved * share)
