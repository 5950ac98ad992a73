"""P/D-Serve's on-demand forwarding: the order and the pace in which a gateway offers a request to
prefill workers, which have no queue. When it gives up is in `prefill_times`.

Source: P/D-Serve 3.5. The pace of the offers is ours. Tests: tests/unit/policy/test_forwarding.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.types import RouteCause, WorkerId

ROUNDS_PER_ROUTE = 8
REROUTE_AFTER_S = 0.25
"""A gateway asks for a new plan after `ROUNDS_PER_ROUTE` rounds over the candidates or after
`REROUTE_AFTER_S` seconds: the fleet has changed by then."""

MIN_BACKOFF_S = 0.002
MAX_BACKOFF_S = 0.025
BACKOFF_GROWTH = 1.5
FULL_PACE_WAITERS = 32
"""Number of waiting requests up to which none pauses longer than `MAX_BACKOFF_S` seconds."""


_ELSEWHERE = frozenset({RouteCause.SHORT_PROMPT, RouteCause.HELP})
"""Causes of plans that name only workers that are free now, although others could serve too."""


def rounds_per_route(cause: RouteCause) -> int:
    """Returns the number of rounds over a plan's candidates before the gateway asks for another."""
    return 1 if cause in _ELSEWHERE else ROUNDS_PER_ROUTE


def still_refusing(refused: Mapping[WorkerId, float], now: float) -> dict[WorkerId, float]:
    """Returns the workers whose recent refusals still count, with the times of these.

    A plan may name only one or two free workers. If only the refusals of the last plan counted, two
    such plans could send a request back and forth and never to a third worker.

    Args:
        refused: time of each worker's last refusal of the request, in seconds on any clock.
    """
    return {name: at for name, at in refused.items() if at > now - REROUTE_AFTER_S}


def backoff_s(num_rounds: int, num_waiting: int) -> float:
    """Returns the longest pause in seconds after a round in which every worker refused.

    With many waiting requests each asks less often, so that their total rate is bounded. Otherwise
    the offers alone would keep gateway and workers busy when they are full.

    Args:
        num_rounds: rounds that this request made before.
        num_waiting: requests of this gateway that look for workers now.
    """
    longest = MAX_BACKOFF_S * max(1.0, num_waiting / FULL_PACE_WAITERS)
    # The exponent is limited so that a long wait does not overflow.
    return min(MIN_BACKOFF_S * BACKOFF_GROWTH ** min(num_rounds, 32), longest)


@dataclass(frozen=True, slots=True)
class PrefillPeer:
    """A prefill worker as one gateway sees it.

    Attributes:
        connections: requests of this gateway that the worker computes.
        is_filling: whether it accepted the gateway's last request and has rejected none since.
    """

    worker_id: WorkerId
    connections: int
    is_filling: bool = False


def offer_order(peers: Sequence[PrefillPeer]) -> list[WorkerId]:
    """Returns the workers in the order of offers (P/D-Serve 3.5).

    First comes the worker whose batch is being filled, then those with the fewest connections.
    Offering to one worker until it is busy fills its batch; a rejection costs one message.
    """
    ordered = sorted(peers, key=lambda p: (not p.is_filling, p.connections, p.worker_id))
    return [peer.worker_id for peer in ordered]
