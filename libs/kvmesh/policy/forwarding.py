"""P/D-Serve's on-demand forwarding: in which order a gateway offers a request to prefill workers
that have no queue, and when it gives up.

Source: P/D-Serve 3.5. Tests: tests/unit/policy/test_forwarding.py.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core.types import WorkerId


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
