"""Divides prompts among workers and orders each worker's queue. Pure.

Tests: tests/unit/policy/test_joint_queues.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.core.types import Candidate, RequestId, WorkerId
from kvmesh.policy.elastic import ElasticPlan, ElasticReason, Prompt, plan_elastic
from kvmesh.policy.matching import least_total
from kvmesh.policy.ranking import BUSY_TOKENS, SLACK_TOKENS
from kvmesh.policy.view import WorkerView

MAX_ELASTIC = 128
"""Maximum product of prompts and idle workers in the program of TokenLake 6.2, whose cost grows
with its square."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker with respect to one prompt.

    Attributes:
        wait: tokens that it computes before any of the divided prompts.
        work: computed tokens, or their equivalent in time, that this prompt takes.
        free: number of its free prefill slots.
        brought: tokens of the prompt that it fetches from another worker.
    """

    worker: WorkerView
    candidate: Candidate
    wait: float
    work: float
    free: int
    brought: int


@dataclass(frozen=True, slots=True)
class JointPrompt:
    """A prompt that several workers may compute.

    Attributes:
        index: index of its request.
        objective: TTFT limit in computed tokens.
        seats: the workers that may compute it, in the order of its own decision; it would go to
            the first by itself.
        times: computed tokens until its first one on 1, 2, ... idle workers at once; empty if one
            worker has to compute it.
    """

    index: int
    num_tokens: int
    objective: float
    seats: Mapping[WorkerId, Seat]
    times: Sequence[float] = ()

    @property
    def own(self) -> WorkerId:
        """Worker to which the prompt goes if it is decided alone."""
        return next(iter(self.seats))


Queues = Mapping[WorkerId, Sequence[JointPrompt]]
"""Prompts by worker, in the order in which it computes them."""


@dataclass(frozen=True, slots=True)
class Division:
    """Prompts divided into queues.

    Attributes:
        degrees: workers that compute a queue's only prompt together with this one, which is
            counted; those with one are left out.
        reason: result of TokenLake's program; None: another rule divided.
    """

    queues: Queues
    degrees: Mapping[WorkerId, int] = field(default_factory=dict)
    reason: ElasticReason | None = None

    @property
    def saved(self) -> float:
        """Computed tokens that several workers for a prompt save, over all prompts."""
        return sum(
            self.queues[name][0].times[0] - self.queues[name][0].times[degree - 1]
            for name, degree in self.degrees.items()
        )


def in_order_of_asking(prompts: Sequence[JointPrompt]) -> Queues:
    """Returns the queues with each prompt on its own first choice."""
    queues: dict[WorkerId, list[JointPrompt]] = defaultdict(list)
    for each in prompts:
        queues[each.own].append(each)
    return queues


def total_tokens(queues: Queues) -> float:
    """Returns the sum over all prompts of the tokens computed until their first one."""
    total = 0.0
    for worker_id, queue in queues.items():
        before = 0.0
        for turn, each in enumerate(queue):
            seat = each.seats[worker_id]
            before += seat.work
            total += seat.wait + before + BUSY_TOKENS * (turn >= seat.free)
    return total


def first_token(queues: Queues, seat: Seat, prompt: JointPrompt) -> float:
    """Returns the tokens that a worker computes until a prompt's first one.

    A prompt that is not in the worker's queue counts as its last.
    """
    worker_id = seat.worker.worker_id
    total, turn = seat.wait + seat.work, 0
    for other in queues.get(worker_id, ()):
        if other is prompt:
            break
        total += other.seats[worker_id].work
        turn += 1
    return total + BUSY_TOKENS * (turn >= seat.free)


def by_time(prompts: Sequence[JointPrompt]) -> Queues:
    """Returns the queues with the least `total_tokens`, exactly.

    The work of the k-th prompt from the end of a queue counts k times, so queue places are the
    columns of an assignment problem. The shortest prompt of a worker comes first. Source: Horn
    1973; Bruno, Coffman and Sethi 1974.
    """
    places = [
        (worker_id, from_end)
        for worker_id in _near(prompts)
        for from_end in range(1, len(prompts) + 1)
    ]
    costs = [
        [_cost(each.seats.get(worker_id), from_end) for worker_id, from_end in places]
        for each in prompts
    ]
    queues: dict[WorkerId, list[tuple[int, JointPrompt]]] = defaultdict(list)
    for each, column in zip(prompts, least_total(costs), strict=True):
        worker_id, from_end = places[column]
        queues[worker_id].append((-from_end, each))
    return {
        worker_id: [each for _, each in sorted(queue, key=lambda pair: pair[0])]
        for worker_id, queue in queues.items()
    }


def _cost(seat: Seat | None, from_end: int) -> float:
    """Returns a prompt's part of the sum: the prompt and those behind it wait for its work."""
    if seat is None:
        return math.inf
    return seat.wait + from_end * seat.work + BUSY_TOKENS * (from_end > seat.free)


def _near(prompts: Sequence[JointPrompt]) -> list[WorkerId]:
    """Returns the workers among which the best division lies.

    These are, for each prompt, as many of its soonest workers as there are prompts.
    """
    near: set[WorkerId] = set()
    for each in prompts:
        seats = each.seats
        soonest = sorted(seats, key=lambda name: _cost(seats[name], 1))
        near.update((each.own, *soonest[: len(prompts)]))
    return sorted(near)


def by_volume(prompts: Sequence[JointPrompt]) -> Division:
    """Returns batches of least total latency, on the workers to which the fewest tokens move.

    The program of TokenLake 6.2 forms the batches. It may give several idle workers to a long
    prompt, which they compute as a chain; a batch of several prompts is computed by one worker, one
    after the other. Each batch goes to one of the workers whose queue is about as short as the
    shortest, and further workers of a chain are chosen afterwards. Source: TokenLake 6.2 (batches
    and degrees), 5 (workers).
    """
    if not prompts:
        return Division({})
    seats = {name: seat for each in prompts for name, seat in each.seats.items()}
    waits = {name: seat.wait for name, seat in seats.items()}
    soonest = min(waits.values())
    workers = sorted(name for name, wait in waits.items() if wait <= soonest + SLACK_TOKENS)
    idle = frozenset(name for name in workers if not seats[name].wait and _is_idle(seats[name]))
    plan, by_name = _elastic(prompts, len(workers), len(idle), soonest)
    batches = [[by_name[prompt.request_id] for prompt in each.prompts] for each in plan.batches]
    degrees = [each.num_workers for each in plan.batches]
    longest = max(waits.values()) + 1.0
    costs = [
        [
            # A chain begins on an idle worker. Ties in volume go to the shorter queue.
            math.inf
            if degree > 1 and name not in idle
            else _brought(batch, name) + waits[name] / longest / 2
            for name in workers
        ]
        for batch, degree in zip(batches, degrees, strict=True)
    ]
    chosen = least_total(costs)
    if any(math.isinf(row[column]) for row, column in zip(costs, chosen, strict=True)):
        return Division(in_order_of_asking(prompts))  # no worker may take the whole batch
    names = [workers[column] for column in chosen]
    several = {name: degree for name, degree in zip(names, degrees, strict=True) if degree > 1}
    return Division(dict(zip(names, batches, strict=True)), several, plan.reason)


def _is_idle(seat: Seat) -> bool:
    return not (seat.worker.prefill_used or seat.worker.pending_tokens)


def _elastic(
    prompts: Sequence[JointPrompt], num_workers: int, num_idle: int, soonest: float
) -> tuple[ElasticPlan, Mapping[RequestId, JointPrompt]]:
    """Runs TokenLake's program, with latencies in computed tokens.

    Only idle workers compute a prompt together, so the program runs twice: among idle workers, and
    among all of them with one worker for each batch. The better plan is returned.

    Args:
        soonest: tokens that the first worker computes before any of the prompts.
    """
    by_name = {RequestId(f"{number:03}"): each for number, each in enumerate(prompts)}

    def latency(batch: Sequence[Prompt], degree: int) -> float:
        first, *more = (by_name[prompt.request_id] for prompt in batch)
        if more or degree == 1:
            return sum(map(_alone, (first, *more)))
        return first.times[min(degree, len(first.times)) - 1] if first.times else _alone(first)

    listed = [
        Prompt(name, each.num_tokens, each.objective - soonest) for name, each in by_name.items()
    ]
    most = min(num_workers, len(prompts))
    plans = [plan_elastic(listed, most, lambda batch, _: latency(batch, 1))]
    if num_idle > 1 and any(each.times for each in prompts):
        plans.append(plan_elastic(listed, min(num_idle, MAX_ELASTIC // len(prompts)), latency))
    best = min(
        plans, key=lambda each: (each.reason is ElasticReason.BEST_EFFORT, each.total_latency_s)
    )
    return best, by_name


def _alone(prompt: JointPrompt) -> float:
    """Returns the computed tokens of a prompt on one worker."""
    return prompt.times[0] if prompt.times else min(seat.work for seat in prompt.seats.values())


def _brought(batch: Sequence[JointPrompt], worker_id: WorkerId) -> float:
    seats = [each.seats.get(worker_id) for each in batch]
    return sum(math.inf if seat is None else seat.brought for seat in seats)
