"""Searches for workers until the deadline: asks for a plan, tries its candidates, pauses, repeats.

At the deadline the search ends with one refusal, the last one that it got. This is the only place
where a request waits for capacity.
Tests: tests/integration/test_gateway_refusals.py, tests/integration/test_gateway_asked.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from kvmesh.core.errors import InvalidRequestError
from kvmesh.core.types import (
    BlockHash,
    Candidate,
    Placement,
    Refusal,
    RefusalReason,
    RoutePlan,
    RouteQuery,
    SequenceSpec,
    WorkerId,
)
from kvmesh.kv.hashing import packed_hashes, packed_tokens, root_hash
from kvmesh.policy.connections import BY_CONNECTIONS
from kvmesh.policy.fair_share import Claim
from kvmesh.policy.forwarding import (
    REROUTE_AFTER_S,
    backoff_s,
    rounds_per_route,
)
from kvmesh.policy.groups import GroupKey
from kvmesh.policy.waiting import looking
from kvmesh.telemetry.tracing import start_span
from services.gateway.errors import Stage, StageRefusedError
from services.gateway.request.candidates import PERMANENT
from services.gateway.request.ledger import Ledger
from services.gateway.request.mesh import GenerationRequest, Mesh
from services.gateway.request.refusals import Refusals
from services.gateway.request.routing import Served
from services.gateway.request.turnstile import Turn

FIRST_RANK = -(2**31)
"""The lowest rank that a request can have: the first of its tenant."""


class Asker(Protocol):
    """Asks the workers of a plan; `Life` does."""

    @property
    def holds(self) -> bool:
        """Whether a worker holds blocks and waits for a prefill worker."""
        ...

    def ask(self, prefill: Sequence[Candidate], decode: Sequence[Candidate], until: float) -> None:
        """Asks the workers of a plan, one after the other, until the time `until`."""
        ...

    async def answer(self) -> bool:
        """Waits until a worker takes the request or all refuse; True if a worker took it."""
        ...

    def prefetch(self, candidate: Candidate, hashes: Sequence[BlockHash]) -> None:
        """Lets the worker that will probably get the offer load the prefix blocks that it holds."""
        ...


def as_ms(seconds: float) -> int:
    """Converts seconds to whole milliseconds for a message, at least one."""
    return max(1, round(seconds * 1000))


def claim_of(request: GenerationRequest, *, is_resumed: bool = False) -> Claim:
    """A request's claim in the fair queue."""
    tenant, limits = request.tenant, request.tenant.limits
    num_tokens = len(request.prompt_ids)
    rank = FIRST_RANK if is_resumed else request.rank
    return Claim(tenant.name, num_tokens, limits.weight, limits.priority, rank)


class Search:
    """One search for workers.

    Args:
        asker: asks the workers of a plan.
        token_ids: the prompt, and the tokens generated so far.
        again_until: the deadline if the client is already reading; None for a first search.
        is_resumed: its client says that another gateway began the stream.
        avoid: workers that lost this request before.
        fingerprint: the checkpoint to use. If it has generated tokens, no other checkpoint may
            continue them; otherwise another one may replace it when it has no workers left.

    Attributes:
        plan: the plan whose workers are asked now.
        fingerprint: the checkpoint in use.
    """

    def __init__(
        self,
        mesh: Mesh,
        ledger: Ledger,
        asker: Asker,
        token_ids: tuple[int, ...],
        *,
        again_until: float | None = None,
        is_resumed: bool = False,
        avoid: frozenset[WorkerId] = frozenset(),
        fingerprint: str = "",
    ) -> None:
        self._mesh = mesh
        self._ledger = ledger
        self._asker = asker
        self._request: GenerationRequest = ledger.request
        self._token_ids = token_ids
        self._again_until = again_until
        self._is_resumed = is_resumed
        self._failed = avoid
        self._refusals = Refusals()
        self._num_rounds = 0
        self.fingerprint = fingerprint
        self._is_bound = len(token_ids) > len(self._request.prompt_ids)
        self._served: Served | None = None
        self._spec: SequenceSpec | None = None
        self._block_hashes: tuple[BlockHash, ...] | None = None
        self._now = asyncio.get_running_loop().time
        self._choose()
        # Clients choose the fingerprint of a resumed stream, so it does not become a key.
        group = GroupKey(self._request.model, "", "", "")
        ledger.searches(group if self._served is None else self._served.group)
        self._lane, self._waiting = ledger.lane, ledger.waiting
        self._deadline = self._deadline_now()
        self.plan: RoutePlan | None = None

    async def run(self) -> None:
        """Searches until workers take the request or the deadline passes.

        Raises:
            StageRefusedError: no worker took the request in time.
            InvalidRequestError: no worker can ever take it.
        """
        # A request whose client is already reading does not queue. If the client alone says so, it
        # queues as the first of its tenant: no more than it could ask for with a priority.
        claim = None
        if self._again_until is None or self._is_resumed:
            claim = claim_of(self._request, is_resumed=self._is_resumed)
        with self._lane.turns.enter(claim) as turn:
            await self._queue(turn)
            while True:
                plan = await self._route()
                if plan is None:
                    await self._pause(turn)
                elif await self._try_plan(plan, turn):
                    return

    def refused(self, stage: Stage, refusal: Refusal, worker_id: WorkerId | None) -> None:
        """Counts and traces a refusal. The client gets the last one."""
        now = self._now()
        self._refusals.note(stage, refusal, worker_id, now)
        self._ledger.refused(stage, refusal, worker_id, now)

    @property
    def sequence(self) -> SequenceSpec:
        """The sequence that the search sends to workers."""
        if self._spec is None:
            assert self._served is not None, "a plan comes before its sequence is sent"
            salt, adapter = self._request.cache_salt, self._request.adapter
            root = root_hash(self.fingerprint, cache_salt=salt, adapter=adapter)
            prompt, sampling = self._request.prompt_ids, self._request.sampling
            if len(self._token_ids) > len(prompt):  # the client already has the prompt's logprobs
                sampling = replace(sampling, num_prompt_logprobs=-1)
            self._spec = SequenceSpec(
                self._token_ids,
                len(prompt),
                sampling,
                root,
                self.fingerprint,
                adapter,
                self._request.embedding,
            )
        return self._spec

    @property
    def remaining_ms(self) -> int:
        """Milliseconds left for a worker to start."""
        return as_ms(self._deadline - self._now())

    def _choose(self) -> None:
        """Chooses a checkpoint, and keeps it while it can serve the request."""
        router, scenario = self._mesh.router, self._request.scenario
        found = router.served_as_before(scenario, self.fingerprint)
        is_free = not (self._is_bound and self.fingerprint)
        if is_free and (found is None or not found.num_awake):
            draw, request = self._mesh.rng.random(), self._request
            found = router.served(scenario, draw, request.adapter, embeds=request.embedding >= 0)
        if found is None or self._served is None or found.facts != self._served.facts:
            self._spec = self._block_hashes = None
        self._served = found
        if found is not None:
            self.fingerprint = found.group.fingerprint

    # --- asking the scheduler ---

    async def _route(self) -> RoutePlan | None:
        self._choose()
        if self._served is None:
            which = f" of checkpoint {self.fingerprint}" if self._is_bound else ""
            message = f"no worker{which} for {self._request.model} is known"
            self.refused(Stage.GATEWAY, Refusal(RefusalReason.NO_WORKERS, message), None)
            return None
        remaining_s = self._remaining_s()
        query = self._query(remaining_s, self._served.facts.block_size)
        with start_span("gateway.route", self._request.traceparent) as span:
            plan = await self._mesh.router.route(query, span.traceparent, remaining_s)
            if isinstance(plan, Refusal):
                span.event("refused", reason=plan.reason.value, message=plan.message)
            else:
                span.set(placement=plan.placement.value, reason=plan.reason, policy=plan.policy)
        self._refusals.fade(self._now())
        if isinstance(plan, RoutePlan):
            self._ledger.routed(plan, self._now())
            for first in plan.prefill[:1]:
                num_held = first.cached_tokens // self._served.facts.block_size
                self._asker.prefetch(first, query.block_hashes[:num_held])
            return plan
        self.refused(Stage.SCHEDULER, plan, None)
        if plan.reason in PERMANENT:
            raise InvalidRequestError(plan.message, code="context_length_exceeded")
        if plan.reason is RefusalReason.DEADLINE:  # waiting would only make it later
            raise StageRefusedError(plan, Stage.SCHEDULER)
        return None

    def _hashes(self, block_size: int) -> tuple[BlockHash, ...]:
        """Hashes of the sequence's full blocks; all queries of one search share them."""
        if self._block_hashes is None:
            packed, prompt = self._request.packed_prompt, self._request.prompt_ids
            if len(self._token_ids) > len(prompt):
                packed += packed_tokens(self._token_ids[len(prompt) :])
            self._block_hashes = tuple(packed_hashes(self.sequence.root_hash, packed, block_size))
        return self._block_hashes

    def _query(self, remaining_s: float, block_size: int) -> RouteQuery:
        """The query to the scheduler."""
        request, counts = self._request, self._waiting
        waits = self._num_rounds > 0  # no worker took the request in an earlier round
        held = counts.paused_reserved + (waits and self._asker.holds)
        has_plan, remote = counts.planned, counts.remote
        if waits and self.plan is not None:
            has_plan, remote = has_plan + 1, remote + self.plan.remote
        told = looking(counts.paused + waits, held, counts.queued, has_plan, remote)
        num_generated = len(self._token_ids) - len(request.prompt_ids)
        unanswered = self._mesh.sessions.unanswered()
        return RouteQuery(
            request_id=request.request_id,
            model=request.model,
            num_tokens=len(self._token_ids),
            max_new_tokens=request.sampling.max_tokens - num_generated,
            block_hashes=self._hashes(block_size),
            scenario=request.scenario,
            avoid=self._failed.union(self._refusals.workers, unanswered),
            ttft_budget_ms=self._budget_ms(remaining_s),
            placement=request.placement,
            waiting=told.reserved + told.unreserved,
            waiting_reserved=told.reserved,
            waiting_remote=told.remote,
            lost=self._failed,
            unanswered=unanswered,
            tpot_s=request.tpot_s,
            adapter=request.adapter,
            fingerprint=self.fingerprint,
        )

    # --- asking workers ---

    def _ask(self, plan: RoutePlan) -> None:
        self.plan = plan
        prefill: Sequence[Candidate] = plan.prefill
        if plan.policy in BY_CONNECTIONS:  # this gateway's connections decide the order
            named = {candidate.worker_id: candidate for candidate in plan.prefill}
            prefill = [named[name] for name in self._mesh.connections.order(list(named))]
        decode: Sequence[Candidate] = plan.decode
        if plan.placement is Placement.AGGREGATED:
            decode = ()
        late_last = self._mesh.sessions.late_last
        self._asker.ask(late_last(prefill), late_last(decode), self._deadline)

    async def _try_plan(self, plan: RoutePlan, turn: Turn) -> bool:
        """Asks the plan's candidates in rounds, until one takes the request or the plan is old."""
        old_at = self._now() + REROUTE_AFTER_S
        if not turn.waits_for(remote=plan.remote):
            await self._queue(turn)
            if self._now() >= old_at:
                return False
        for _ in range(rounds_per_route(plan.cause)):
            self._refusals.check(plan)
            self._remaining_s()
            self._ask(plan)
            if await self._asker.answer():
                return True
            await self._pause(turn)
            if self._now() >= old_at:
                break
        return False

    # --- time ---

    def _deadline_now(self) -> float:
        """The search's deadline, from the present estimates."""
        if self._again_until is not None:
            return self._again_until
        mesh, request = self._mesh, self._request
        times, lag = self._lane.prefill_times, mesh.lanes.lag
        patience_s = times.patience_s(len(request.prompt_ids), request.ttft_s)
        # This process may pass on the first token late, by its event-loop lag.
        late_s = min(lag.peak_s, patience_s / 2)
        longest_s = mesh.limits.request_timeout_s
        return request.arrived_at + min(longest_s, patience_s - late_s)

    def _budget_ms(self, remaining_s: float) -> int:
        """Milliseconds until the first token is late; 0 for a client that is already reading."""
        if self._again_until is not None:
            return 0
        request = self._request
        return as_ms(max(request.arrived_at + request.ttft_s - self._now(), remaining_s))

    def _remaining_s(self) -> float:
        """Seconds left, more than zero.

        Raises:
            StageRefusedError: no time is left.
        """
        left = self._deadline - self._now()
        if left > 0:
            return left
        raise self._refusals.after(self._request.ttft_s)

    async def _queue(self, turn: Turn) -> None:
        """Waits for the request's turn."""
        with self._counted(turn):
            await self._my_turn(turn)

    @contextmanager
    def _counted(self, turn: Turn) -> Iterator[None]:
        """Counts the request among those that wait, while this context is open."""
        waiting, was_asked, holds = self._waiting, self._num_rounds > 0, self._asker.holds
        has_plan, remote = turn.remote is not None, bool(turn.remote)
        waiting.queued += not was_asked
        waiting.paused += was_asked
        waiting.paused_reserved += holds
        waiting.planned += has_plan
        waiting.remote += remote
        try:
            yield
        finally:
            waiting.queued -= not was_asked
            waiting.paused -= was_asked
            waiting.paused_reserved -= holds
            waiting.planned -= has_plan
            waiting.remote -= remote

    async def _pause(self, turn: Turn) -> None:
        """Waits with jittered backoff after a full round, then for the request's turn."""
        turn.missed()
        lane = self._lane
        longest_s = backoff_s(self._num_rounds, lane.crowd.num_waiting) * lane.turns.pace(turn)
        self._num_rounds += 1
        wait_s = longest_s * self._mesh.rng.uniform(0.5, 1.0)
        with self._counted(turn):
            await asyncio.sleep(min(wait_s, self._remaining_s()))
            self._deadline = self._deadline_now()
            await self._my_turn(turn)

    async def _my_turn(self, turn: Turn) -> None:
        await turn.wait(self._remaining_s())
        self._remaining_s()
        # Others may have shown meanwhile that prompts take longer.
        self._deadline = self._deadline_now()
        self._remaining_s()
