"""The input of decisions: an immutable snapshot of the fleet.

It does no bookkeeping; the scheduler and the simulator build views. Tests: tests/unit/policy/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmesh.core.types import WorkerId, WorkerInfo, WorkerLoad
from kvmesh.core.values import quick
from kvmesh.policy.prefix_source import FetchPace


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as a decision sees it.

    Attributes:
        reported_at: when `load` was reported, in seconds on the decision's clock.
        prefill_in_flight: prompts sent to the worker that `load` does not show yet.
        decode_in_flight: sequences sent to the worker that `load` does not show yet.
        pending_tokens: prompt tokens that the worker accepted and has not computed.
    """

    info: WorkerInfo
    load: WorkerLoad
    reported_at: float
    prefill_in_flight: int = 0
    decode_in_flight: int = 0
    pending_tokens: int = 0

    @property
    def worker_id(self) -> WorkerId:
        """The worker's stable name."""
        return self.info.worker_id

    @property
    def prefill_used(self) -> int:
        """Prefill slots in use, including prompts in flight."""
        return self.load.prefill_active + self.prefill_in_flight

    @property
    def computes(self) -> bool:
        """Whether the worker computes prompts or tokens, or will when their KV has come."""
        return self.decode_used > 0 or self.prefill_used > 0

    @property
    def decode_used(self) -> int:
        """Decode slots in use: running, preempted, reserved and in flight."""
        load = self.load
        listed = load.decode_running + load.decode_reserved + load.decode_preempted
        return listed + self.decode_in_flight


@dataclass(frozen=True, slots=True)
class FleetView:
    """All live workers.

    Attributes:
        version: grows with every change of the fleet.
        num_routes: plans made before this one; the turn of a rotation.
        pace: measured times of computing and of moving KV.
        reads: tokens of cached prefixes read recently from each worker that holds a part of the
            prompt; 0 for all others.
        links: measured seconds to move a token's KV, by sender and receiver.
    """

    workers: tuple[WorkerView, ...]
    version: int = 0
    num_routes: int = 0
    pace: FetchPace = FetchPace()
    reads: Mapping[WorkerId, float] = field(default_factory=dict)
    links: Mapping[tuple[WorkerId, WorkerId], float] = field(default_factory=dict)


# For speed, as in `core/types.py`.
for _often_made in (FleetView, WorkerView):
    quick(_often_made)
