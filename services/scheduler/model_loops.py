"""The fast and the slow loop for one model's workers: decide on changes from the workers' reports.

They decide and remember. `planner.py` measures time and carries the changes out.
Tests: tests/unit/scheduler/test_planner.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import mul

from kvmesh.core.details import ANSWER, COPY, GET, TCP, FleetWorker
from kvmesh.core.turns import Parts, at_once, is_turn_over
from kvmesh.core.types import Role, RouteQuery, WorkerId
from kvmesh.policy.allocation_loop import Allocation, AllocationLoop, AllocationQuestion
from kvmesh.policy.composition import Composition, Offload
from kvmesh.policy.congestion import CongestionMeter, LinkCounts, LinkName
from kvmesh.policy.group_loops import GroupLoops, GroupStep, RoleLoops, RoleWork, sole_giver
from kvmesh.policy.measurement import ServingMeter
from kvmesh.policy.offload import OffloadState, Threshold
from kvmesh.policy.path_meter import PathMeter
from kvmesh.policy.prefix_source import FetchPace
from kvmesh.policy.prfaas import Hardware, ServingProfile
from kvmesh.policy.profiled_ratio import MeanLengths
from kvmesh.policy.sending import Life, SendingMeter, SendingTotal
from kvmesh.policy.threshold_loop import ThresholdLoop, ThresholdReading
from kvmesh.policy.waiting import Demand, split_waiting
from services.scheduler.config import PlanningConfig

_USUAL_TOKENS = 512
"""Tokens of the typical prompt from which an expected prefill speed is computed."""


class ModelLoops:
    """The loops of one model.

    Args:
        expected: the model's costs until they are measured; None waits for measurements.
    """

    def __init__(
        self,
        policy: Composition,
        config: PlanningConfig,
        expected: ServingProfile | None = None,
    ) -> None:
        self._policy = policy
        self._remote = config.remote_cluster
        self._egress = config.egress_mb_s * 1e6
        self._offload = ThresholdLoop(_start(policy, config.threshold_tokens), self._egress)
        self._meter = ServingMeter(self._remote, expected)
        self._expected = expected
        self._allocation = AllocationLoop()
        self._roles = RoleLoops()
        self._sent: dict[Life, int] = {}
        self._sending = SendingMeter()
        self._signs = CongestionMeter()
        self._read: dict[tuple[WorkerId, int, WorkerId, str], int] = {}
        self._groups = GroupLoops()
        self._paths = PathMeter()
        self._pace = FetchPace()

    @property
    def threshold(self) -> Threshold:
        """The threshold for the choice of cluster."""
        return self._offload.threshold

    @property
    def offload(self) -> OffloadState:
        """The state that routes read."""
        return OffloadState(self._remote, self.threshold.tokens, self._offload.has_room)

    @property
    def pace(self) -> FetchPace:
        """Measured speeds of prefill and transfer, for decisions about fetches."""
        return self._pace

    @property
    def links(self) -> Mapping[tuple[WorkerId, WorkerId], float]:
        """Measured seconds to move a token's KV, by sender and receiver."""
        return self._paths.links

    def note_prompt(self, query: RouteQuery, uncached_tokens: int) -> None:
        """Adds a request that was routed for the first time to the distribution of lengths."""
        output = self._meter.answers.expected(query.max_new_tokens)
        lengths = MeanLengths(uncached_tokens, query.num_tokens, output)
        self._groups.note_new(query.scenario, lengths)
        self._allocation.note_prompt(uncached_tokens, output)
        is_far = bool(self._remote) and uncached_tokens > self.threshold.tokens
        self._meter.note_prompt(uncached_tokens, is_far=is_far)

    # --- every second ------------------------------------------------------------------------

    def observe(
        self,
        workers: Sequence[FleetWorker],
        home: Sequence[FleetWorker],
        demand: Demand,
        num_new: int,
        elapsed_s: float,
    ) -> Parts[None]:
        """Adds the loads of a cycle.

        Args:
            home: those of `workers` that `home` returns.
            num_new: requests routed for the first time since the last cycle.
            elapsed_s: seconds since the last cycle.
        """
        yield from self._meter.observe(workers, num_new, elapsed_s)
        yield from self._paths.observe(workers)
        pace = self._paths.pace(self._prompt_token_s())
        is_measured = self._meter.prompt_token_s is not None
        reach = self._meter.reach_tokens if is_measured else math.inf
        self._pace = dataclasses.replace(pace, reach_tokens=reach)
        yield
        loads = [each.load for each in home]
        self._allocation.observe(split_waiting(demand.reserved, demand.unreserved, loads))
        yield
        yield from self._groups.observe(home, demand, elapsed_s)

    def _prompt_token_s(self) -> float | None:
        measured, expected = self._meter.prompt_token_s, self._expected
        if measured is not None or expected is None:
            return measured
        return expected.local_prefill_s(_USUAL_TOKENS) / _USUAL_TOKENS

    def end_window(self, home: Sequence[FleetWorker]) -> list[GroupStep]:
        """The steps of P/D-Serve's monitor for each local group, once per `planning.monitor_s`."""
        token_s = self._prompt_token_s()
        prompt_s = None if token_s is None else partial(mul, token_s)
        return list(self._groups.end_window(home, prompt_s))

    def carried_out(self, step: GroupStep) -> None:
        """Notes that the monitor's step was ordered."""
        self._groups.carried_out(step.group)

    def adjust(
        self,
        workers: Sequence[FleetWorker],
        home: Sequence[FleetWorker],
        demand: Demand,
        elapsed_s: float,
    ) -> bool:
        """Moves the threshold (PrfaaS 3.4.3 point 2). Returns True if it changed."""
        if not self._remote:
            return False
        far = [each for each in workers if each.info.cluster == self._remote]
        near = [each for each in home if each.info.role is not Role.DECODE]
        read, reading = self._take_read(home, far)
        sent = read + self._take_sent(far)
        waiting = reading + sum(each.load.sending_bytes for each in far)
        sending = self._sending.observe(
            {
                _life(each): SendingTotal(each.reported_at, each.load.sending_s_total)
                for each in far
                if each.reported
            }
        )
        with_signs = self._signs.observe(self._leaving_links(home, far))
        if self._policy.offload is not Offload.ADAPTIVE or not far or not self._egress:
            return False
        measured = ThresholdReading(
            sent, waiting, demand.remote, demand.local, len(far), len(near), sending, with_signs
        )
        return self._offload.cycle(measured, elapsed_s)

    def _leaving_links(
        self, home: Sequence[FleetWorker], far: Sequence[FleetWorker]
    ) -> Iterator[tuple[LinkName, LinkCounts]]:
        """Yields what senders of the remote cluster tell of their TCP links to local workers."""
        names = {each.info.worker_id for each in home}
        for worker in far:
            for link in worker.detail.links:
                if link.channel == TCP and link.peer in names:
                    name = LinkName(worker.info.worker_id, worker.info.incarnation, link.peer)
                    yield name, LinkCounts(link.bytes_total, link.retransmits, link.rtt_s)

    def _take_sent(self, far: Sequence[FleetWorker]) -> int:
        before, sent = self._sent, 0
        # Workers that left are dropped; the counts of restarted workers begin anew.
        self._sent = {_life(each): each.load.sent_bytes_total for each in far if each.reported}
        for life, total in self._sent.items():
            sent += total - before.get(life, total)
        return sent

    def _take_read(
        self, home: Sequence[FleetWorker], far: Sequence[FleetWorker]
    ) -> tuple[int, int]:
        """Bytes that local workers read from the remote cluster in this cycle, and bytes queued.

        The readers count them. Fetched prefixes and answers to queries leave the cluster as a
        prompt's KV does.
        """
        holders = {each.info.worker_id for each in far}
        before, self._read = self._read, {}
        read = reading = 0
        for worker in home:
            for link in worker.detail.links:
                if link.channel in (GET, COPY, ANSWER) and link.peer in holders:
                    here = worker.info
                    name = (here.worker_id, here.incarnation, link.peer, link.channel)
                    self._read[name] = link.bytes_total
                    since = link.bytes_total - before.get(name, link.bytes_total)
                    read += max(since, 0)  # the worker dropped its counter and counts anew
                    reading += link.queued_bytes
        return read, reading

    def role_work(self, home: Sequence[FleetWorker], demand: Demand) -> Parts[list[RoleWork]]:
        """The work of FlowKV's cycle for every local group."""
        return self._roles.work(home, demand)

    def home(self, workers: Sequence[FleetWorker]) -> Parts[list[FleetWorker]]:
        """Returns the local workers that do not drain."""
        found: list[FleetWorker] = []
        for number, each in enumerate(workers):
            if is_turn_over(number):
                yield
            if each.info.cluster != self._remote and not each.load.draining:
                found.append(each)
        return found

    # --- every few minutes -------------------------------------------------------------------

    def question(self, workers: Sequence[FleetWorker]) -> AllocationQuestion | None:
        """The input of PrfaaS's slow loop; None if too little is known or a worker helps out."""
        home = at_once(self.home(workers))
        num_prefill = sum(each.info.role is Role.PREFILL for each in home)
        queues = self._allocation.take_queues(num_prefill, len(home) - num_prefill)
        serving = self._meter.serving or self._expected
        if serving is None or self._roles.is_helping or not self._allocation.has_lengths:
            return None
        num_far = sum(each.info.cluster == self._remote for each in workers)
        egress = self._offload.take_capacity()
        hardware = Hardware(num_far if self._egress else 0, len(home), egress)
        loads = [(each.info, each.load) for each in home]
        return self._allocation.question(serving, hardware, self.threshold, loads, queues)

    def giver(self, to_role: Role | None, workers: Sequence[FleetWorker]) -> WorkerId | None:
        """The least loaded worker of the side that gives one up; None if it can spare none.

        Lengths and queues are known only for all groups together, so they do not tell which group
        can spare a worker. With several local groups, no worker moves.
        """
        return sole_giver(to_role, at_once(self.home(workers)))

    def accept(self, found: Allocation, workers: Sequence[FleetWorker], *, moved: bool) -> None:
        """Takes over the threshold of an evaluation, for the split of roles from now on.

        Args:
            moved: whether the worker that was to move was ordered to.
        """
        has_far = any(each.info.cluster == self._remote for each in workers)
        if self._policy.offload is not Offload.ADAPTIVE or not has_far or not self._egress:
            return
        home = at_once(self.home(workers))
        num_prefill = sum(each.info.role is Role.PREFILL for each in home)
        if moved:
            num_prefill += 1 if found.move.to_role is Role.PREFILL else -1
        self._offload.threshold = found.threshold(self.threshold, num_prefill)


def _life(worker: FleetWorker) -> Life:
    return worker.info.worker_id, worker.info.incarnation


def _start(policy: Composition, configured: int) -> Threshold:
    """The first threshold.

    Without a configured one, nothing is offloaded until lengths and speeds are known.
    """
    if policy.offload is Offload.ALL:
        return Threshold(0.0, 0.0)
    if policy.offload is Offload.NONE or not configured:
        return Threshold(math.inf, math.inf)
    return Threshold(float(configured), float(configured))
