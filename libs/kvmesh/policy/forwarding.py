"""P/D-Serve's on-demand forwarding: in which order a gateway offers a request to prefill workers
that have no queue, and when it gives up.

Source: P/D-Serve 3.5. The pace of asking is ours. Tests: tests/unit/policy/test_forwarding.py.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.types import RouteCause, WorkerId

ROUNDS_PER_ROUTE = 8
REROUTE_AFTER_S = 0.25
"""A plan is asked for again after this many rounds or this long: the fleet has changed."""

MIN_BACKOFF_S = 0.002
MAX_BACKOFF_S = 0.025
BACKOFF_GROWTH = 1.5
FULL_PACE_WAITERS = 32
"""Up to this many waiting requests pause no longer than MAX_BACKOFF_S."""


_ELSEWHERE = frozenset({RouteCause.SHORT_PROMPT, RouteCause.HELP})
"""Plans that name only who is free just now, though others serve as well."""


def rounds_per_route(cause: RouteCause) -> int:
    """Rounds over a plan's candidates before another plan is asked for."""
    return 1 if cause in _ELSEWHERE else ROUNDS_PER_ROUTE


def still_refusing(refused: Mapping[WorkerId, float], now: float) -> dict[WorkerId, float]:
    """Who is to be avoided in the plan after the next as well, since it refused just now.

    A plan may name one or two workers that are free. If only the refusals of the last plan counted,
    two such plans would send a request to and fro, and never on to a third worker.

    Args:
        refused: when each worker last refused the request, seconds on any clock.
    """
    return {name: at for name, at in refused.items() if at > now - REROUTE_AFTER_S}


def backoff_s(num_rounds: int, num_waiting: int) -> float:
    """Longest pause after a full round that found nobody.

    With many requests waiting each asks less often, so that all together ask at a bounded rate:
    else the asking itself would keep the gateway and the workers busy when they are full.

    Args:
        num_rounds: rounds of this request before.
        num_waiting: requests of this gateway that look for workers now.
    """
    longest = MAX_BACKOFF_S * max(1.0, num_waiting / FULL_PACE_WAITERS)
    # The exponent is limited so that a long wait does not overflow.
    return min(MIN_BACKOFF_S * BACKOFF_GROWTH ** min(num_rounds, 32), longest)


def waiting_told(asked: int, asked_reserved: int, queued: int) -> tuple[int, int]:
    """How many requests of a gateway wait, and how many of them for prefill.

    A request that has asked knows what it waits for: prefill, if it has a reservation. Requests
    that are still queued are assumed to need the same in the same proportion.

    Args:
        asked, asked_reserved: requests that no worker took; of these, those with a reservation.
        queued: requests whose turn to ask has not come.
    """
    if not asked:
        return queued, 0
    total = asked + queued
    return total, round(asked_reserved * total / asked)


class ForwardReason(enum.Enum):
    """What to do with a request that no prefill worker has accepted yet."""

    OFFER = "there is time to ask"
    TIMED_OUT = "it has waited longer than its length allows"


@dataclass(frozen=True, slots=True)
class PrefillPeer:
    """A prefill worker as one gateway sees it.

    Attributes:
        connections: requests of this gateway that it works on.
        is_filling: it accepted the gateway's last request and has rejected none since.
    """

    worker_id: WorkerId
    connections: int
    is_filling: bool = False


def offer_order(peers: Sequence[PrefillPeer]) -> list[WorkerId]:
    """The worker whose batch is being filled, then those with the fewest connections.

    Sending to one worker until it is busy fills its batch; a rejection costs one message.
    """
    ordered = sorted(peers, key=lambda p: (not p.is_filling, p.connections, p.worker_id))
    return [peer.worker_id for peer in ordered]


def intervene(waited_s: float, limit_s: float) -> ForwardReason:
    """Early intervention: a request that cannot make its first token in time is ended now.

    Args:
        limit_s: from `pdserve.timeout_s`.
    """
    return ForwardReason.TIMED_OUT if waited_s >= limit_s else ForwardReason.OFFER
