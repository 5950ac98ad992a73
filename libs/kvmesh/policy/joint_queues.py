"""Divides prompts among workers and orders each worker's queue. Pure.

Tests: tests/unit/policy/test_joint_queues.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.types import Candidate, RequestId, WorkerId
from kvmesh.policy.elastic import Prompt, plan_elastic
from kvmesh.policy.matching import least_total
from kvmesh.policy.ranking import BUSY_TOKENS, SLACK_TOKENS
from kvmesh.policy.view import WorkerView


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
    """

    index: int
    num_tokens: int
    objective: float
    seats: Mapping[WorkerId, Seat]

    @property
    def own(self) -> WorkerId:
        """Worker to which the prompt goes if it is decided alone."""
        return next(iter(self.seats))


Queues = Mapping[WorkerId, Sequence[JointPrompt]]
"""Prompts by worker, in the order in which it computes them."""


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


def by_volume(prompts: Sequence[JointPrompt]) -> Queues:
    """Returns batches of least total latency, on the workers to which the fewest tokens move.

    One batch goes to each worker whose queue is about as short as the shortest; the degree of
    parallelism is 1. Source: TokenLake 6.2 (batches), 5 (workers).
    """
    if not prompts:
        return {}
    waits = {name: seat.wait for each in prompts for name, seat in each.seats.items()}
    latest = min(waits.values()) + SLACK_TOKENS
    workers = sorted(name for name, wait in waits.items() if wait <= latest)
    batches = _batches(prompts, min(len(workers), len(prompts)))
    longest = max(waits.values()) + 1.0
    costs = [
        # Ties in volume go to the shorter queue.
        [_brought(batch, name) + waits[name] / longest / 2 for name in workers]
        for batch in batches
    ]
    chosen = least_total(costs)
    if any(math.isinf(row[column]) for row, column in zip(costs, chosen, strict=True)):
        return in_order_of_asking(prompts)  # no worker may take the whole batch
    return {workers[column]: batch for batch, column in zip(batches, chosen, strict=True)}


def _batches(prompts: Sequence[JointPrompt], num_workers: int) -> list[list[JointPrompt]]:
    by_name = {RequestId(f"{number:03}"): each for number, each in enumerate(prompts)}
    works = {name: min(seat.work for seat in each.seats.values()) for name, each in by_name.items()}

    def latency(batch: Sequence[Prompt], _num_workers: int) -> float:
        return sum(works[prompt.request_id] for prompt in batch)

    listed = [Prompt(name, each.num_tokens, each.objective) for name, each in by_name.items()]
    plan = plan_elastic(listed, num_workers, latency)
    return [[by_name[prompt.request_id] for prompt in batch.prompts] for batch in plan.batches]


def _brought(batch: Sequence[JointPrompt], worker_id: WorkerId) -> float:
    seats = [each.seats.get(worker_id) for each in batch]
    return sum(math.inf if seat is None else seat.brought for seat in seats)
