"""Prompts that several simulated workers compute together, as in `runtime/prompt_chain.py`, in
virtual time. Tests: tests/unit/sim/test_chains.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

from kvmesh.core.types import PrefixSource
from kvmesh.policy.chain import part_ends, prefix_behind, travelling, upstream_parts
from kvmesh.sim.events import EventQueue
from kvmesh.sim.fleet import SimFleet
from kvmesh.sim.profile import Profile
from kvmesh.sim.requests import SimSequence
from kvmesh.sim.trace_request import TRACE_BLOCK
from kvmesh.sim.worker import SimWorker

_MESSAGES = 2
"""Number of messages to ask a worker for a part: offer and answer."""

_FETCH_MESSAGES = 3
"""Number of messages of a fetch, as in `sim/fetch.py`."""


class Chains:
    """All chained prompts of a run.

    The blocks that a part leaves in its worker's prefix cache are not modelled.

    Args:
        fetch: fetches a prefix for a prompt that its worker computes alone.

    Attributes:
        tokens: number of tokens that workers computed for others.
    """

    def __init__(
        self,
        events: EventQueue,
        fleet: SimFleet,
        profile: Profile,
        fetch: Callable[[SimWorker, SimSequence, PrefixSource], None],
    ) -> None:
        self._events = events
        self._fleet = fleet
        self._profile = profile
        self._fetch = fetch
        self.tokens = 0

    def begin(self, worker: SimWorker, sequence: SimSequence, source: PrefixSource) -> None:
        """Lets other workers compute the beginning of a prompt, if all of them are free."""
        parts = upstream_parts(source)
        helpers = [self._fleet.workers[each.worker_id] for each in parts]
        if not all(each.is_free for each in helpers):
            prefix = prefix_behind(source)
            if prefix is None or prefix.worker_id == worker.info.worker_id:
                worker.go_on(sequence, 0)
            else:
                self._fetch(worker, sequence, prefix)
            return
        held = sequence.num_cached
        ends_at = [*(each.num_blocks * TRACE_BLOCK for each in parts), sequence.num_tokens]
        first, begin_s = self._head(sequence, helpers[0], prefix_behind(source))
        first = min(first, ends_at[0])
        cuts = [first, *ends_at]
        works = [self._work_s(worker, first, *span) for span in pairwise(cuts)]
        inside = self._profile.links.inside_bytes_per_s
        travels = [self._kv_bytes(tokens) / inside for tokens in travelling(cuts, held)]
        overhead_s = _MESSAGES * self._profile.links.latency_s
        num_layers = worker.info.layout.num_layers
        ends = part_ends(works, travels, overhead_s, num_layers, begin_s)
        for helper, end_s, (begin, end) in zip(helpers, ends, pairwise(cuts), strict=False):
            helper.begin_part(end - begin)
            self._events.after(end_s, partial(self._ended, helper, end - begin))
        # The last worker first waits for its first layers, and for slower parts before it.
        wait_s = max(ends[-1] - works[-1], 0.0)
        self._events.after(wait_s, partial(self._came, worker, sequence, helpers, cuts[-2]))

    def _head(
        self, sequence: SimSequence, helper: SimWorker, prefix: PrefixSource | None
    ) -> tuple[int, float]:
        """Returns the first position that the first worker computes, and when it begins."""
        hashes = sequence.request.reusable_hashes
        held = len(helper.pool.match(hashes))
        holder = None if prefix is None else self._fleet.workers[prefix.worker_id]
        if prefix is None or holder is None or not holder.alive:
            return held * TRACE_BLOCK, 0.0
        lent, load_s = holder.lend(hashes[: prefix.num_blocks], held)
        holder.take_back(lent)
        num_tokens = len(lent) * TRACE_BLOCK
        links = self._profile.links
        is_near = holder.info.cluster == helper.info.cluster
        speed = links.inside_bytes_per_s if is_near else links.between_bytes_per_s
        fetch_s = self._kv_bytes(num_tokens) / speed
        begin_s = _FETCH_MESSAGES * links.latency_s + load_s + fetch_s
        return held * TRACE_BLOCK + num_tokens, begin_s

    def _work_s(self, worker: SimWorker, first: int, begin: int, end: int) -> float:
        return worker.device.chunk_s(begin, end, is_first=begin == first)

    def _kv_bytes(self, num_tokens: int) -> float:
        kv_bytes = self._profile.kv_bytes
        return max(kv_bytes(num_tokens) - kv_bytes(0), 0.0)

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
