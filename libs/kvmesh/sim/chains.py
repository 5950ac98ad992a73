"""Prompts that several simulated workers compute together, as in `runtime/prompt_chain.py`, in
virtual time. Tests: tests/unit/sim/test_chains.py.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from kvmesh.core.types import PrefixSource
from kvmesh.policy.chain import part_ends, upstream_parts
from kvmesh.sim.events import EventQueue
from kvmesh.sim.fleet import SimFleet
from kvmesh.sim.profile import Profile
from kvmesh.sim.requests import SimSequence
from kvmesh.sim.trace_request import TRACE_BLOCK
from kvmesh.sim.worker import SimWorker

_MESSAGES = 2
"""Number of messages to ask a worker for a part: offer and answer."""


class Chains:
    """All chained prompts of a run.

    The blocks that a part leaves in its worker's prefix cache are not modelled.

    Attributes:
        tokens: number of tokens that workers computed for others.
    """

    def __init__(self, events: EventQueue, fleet: SimFleet, profile: Profile) -> None:
        self._events = events
        self._fleet = fleet
        self._profile = profile
        self.tokens = 0

    def begin(self, worker: SimWorker, sequence: SimSequence, source: PrefixSource) -> None:
        """Lets other workers compute the beginning of a prompt, if all of them are free."""
        parts = upstream_parts(source)
        helpers = [self._fleet.workers[each.worker_id] for each in parts]
        if not all(each.is_free for each in helpers):
            worker.go_on(sequence, 0)
            return
        first = sequence.num_cached
        cuts = [first, *(each.num_blocks * TRACE_BLOCK for each in parts), sequence.num_tokens]
        works = [self._work_s(worker, first, *span) for span in pairwise(cuts)]
        travels = [self._travel_s(first, end) for end in cuts[1:-1]]
        overhead_s = _MESSAGES * self._profile.links.latency_s
        num_layers = worker.info.layout.num_layers
        ends = part_ends(works, travels, overhead_s, num_layers)
        for helper, end_s, (begin, end) in zip(helpers, ends, pairwise(cuts), strict=False):
            helper.begin_part(end - begin)
            self._events.after(end_s, partial(self._ended, helper, end - begin))
        # The last worker first waits for its first layers, and for slower parts before it.
        wait_s = max(ends[-1] - works[-1], 0.0)
        self._events.after(wait_s, partial(self._came, worker, sequence, helpers, cuts[-2]))

    def _work_s(self, worker: SimWorker, first: int, begin: int, end: int) -> float:
        prefill_s = worker.device.prefill_s
        return prefill_s(end - first) - (prefill_s(begin - first) if begin > first else 0.0)

    def _travel_s(self, first: int, end: int) -> float:
        kv_bytes, links = self._profile.kv_bytes, self._profile.links
        return max(kv_bytes(end) - kv_bytes(first), 0.0) / links.inside_bytes_per_s

    def _ended(self, helper: SimWorker, num_tokens: int) -> None:
        if helper.alive:
            helper.end_part(num_tokens)
            self.tokens += num_tokens

    def _came(
        self, worker: SimWorker, sequence: SimSequence, helpers: list[SimWorker], end: int
    ) -> None:
        if sequence.gone:
            return
        if all(each.alive for each in helpers):
            worker.go_on_behind(sequence, end)
        else:
            worker.go_on(sequence, 0)
