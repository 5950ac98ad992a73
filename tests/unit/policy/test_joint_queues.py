"""Prompts divided among workers: nothing is better than what `by_time` finds."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

from kvmesh.core.types import Candidate, Endpoint, WorkerId
from kvmesh.policy.elastic import ElasticReason
from kvmesh.policy.joint_queues import (
    JointPrompt,
    Queues,
    Seat,
    by_time,
    by_volume,
    first_token,
    in_order_of_asking,
    total_tokens,
)
from kvmesh.policy.ranking import BUSY_TOKENS
from tests.unit.policy.fleet_examples import worker

WORKERS = {name: worker(name) for name in "abc"}


def seat(
    name: str, work: float, *, wait: float = 0.0, free: int = 4, brought: int = 0
) -> tuple[WorkerId, Seat]:
    worker_id = WorkerId(name)
    candidate = Candidate(worker_id, 1, Endpoint("127.0.0.1", 5000))
    return worker_id, Seat(WORKERS[name], candidate, wait, work, free, brought)


def prompt(
    index: int,
    *seats: tuple[WorkerId, Seat],
    num_tokens: int = 100,
    objective: float = math.inf,
    times: Sequence[float] = (),
) -> JointPrompt:
    return JointPrompt(index, num_tokens, objective, dict(seats), times)


def indexes(queues: Queues) -> dict[str, list[int]]:
    return {str(name): [each.index for each in queue] for name, queue in queues.items()}


def every_division(prompts: list[JointPrompt]) -> list[Queues]:
    """All ways to give prompts to workers, in all orders."""
    found: list[Queues] = []
    for order in itertools.permutations(prompts):
        for names in itertools.product(*(each.seats for each in order)):
            queues: dict[WorkerId, list[JointPrompt]] = defaultdict(list)
            for each, name in zip(order, names, strict=True):
                queues[name].append(each)
            found.append(queues)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_by_time_is_the_best_of_all_divisions(seed: int) -> None:
    draw = random.Random(seed)
    waits = {name: float(draw.randrange(0, 3000, 500)) for name in "abc"}
    free = {name: draw.randrange(0, 3) for name in "abc"}
    prompts = [
        prompt(
            index,
            *(
                seat(name, float(draw.randrange(1, 3000)), wait=waits[name], free=free[name])
                for name in draw.sample("abc", draw.randrange(1, 4))
            ),
        )
        for index in range(draw.randrange(1, 5))
    ]
    best = min(map(total_tokens, every_division(prompts)))
    found = by_time(prompts)
    assert sorted(i for queue in indexes(found).values() for i in queue) == list(
        range(len(prompts))
    )
    assert total_tokens(found) == pytest.approx(best)


def test_who_has_a_choice_gives_way_to_who_has_none() -> None:
    """Both would go to `a` by themselves; the second one's prefix lies there alone."""
    prompts = [
        prompt(0, seat("a", 10), seat("b", 10)),
        prompt(1, seat("a", 10), seat("b", 1000)),
    ]
    assert indexes(in_order_of_asking(prompts)) == {"a": [0, 1]}
    assert indexes(by_time(prompts)) == {"b": [0], "a": [1]}


def test_of_one_worker_the_shortest_prompt_comes_first() -> None:
    prompts = [prompt(0, seat("a", 900)), prompt(1, seat("a", 10)), prompt(2, seat("a", 100))]
    assert indexes(by_time(prompts)) == {"a": [1, 2, 0]}


def test_a_full_worker_costs_what_a_refusal_costs() -> None:
    one_free = [prompt(n, seat("a", 10, free=1), seat("b", 500)) for n in range(2)]
    queues = by_time(one_free)
    assert {name: len(queue) for name, queue in queues.items()} == {"a": 1, "b": 1}
    together = in_order_of_asking(one_free)
    assert total_tokens(together) == 10 + 20 + BUSY_TOKENS


def test_what_is_computed_until_the_first_token() -> None:
    prompts = [
        prompt(0, seat("a", 30, free=1), seat("b", 5)),
        prompt(1, seat("a", 70, wait=8, free=1), seat("b", 5)),
    ]
    on_a, on_b = prompts[1].seats[WorkerId("a")], prompts[1].seats[WorkerId("b")]
    queues = {WorkerId("a"): prompts}
    assert first_token(queues, on_a, prompts[1]) == 8 + 30 + 70 + BUSY_TOKENS
    assert first_token(queues, on_b, prompts[1]) == 5
    elsewhere = {WorkerId("a"): prompts[:1]}
    assert first_token(elsewhere, on_a, prompts[1]) == 8 + 30 + 70 + BUSY_TOKENS
    assert first_token({}, on_a, prompts[1]) == 78


def test_by_volume_the_fewest_tokens_move() -> None:
    """TokenLake 5: batches of one, each where it has least to bring."""
    prompts = [
        prompt(0, seat("a", 10, brought=0), seat("b", 60, brought=50)),
        prompt(1, seat("a", 60, brought=900), seat("b", 10, brought=0)),
    ]
    assert indexes(by_volume(prompts).queues) == {"a": [0], "b": [1]}


def test_by_volume_a_worker_that_is_much_later_takes_no_part() -> None:
    prompts = [prompt(0, seat("a", 10, wait=9000), seat("b", 60, brought=50))]
    assert indexes(by_volume(prompts).queues) == {"b": [0]}
    assert by_volume([]).queues == {}


def test_by_volume_more_prompts_than_workers_share_one() -> None:
    """The program of TokenLake 6.2 puts those of like length together."""
    prompts = [
        prompt(0, seat("a", 10), seat("b", 10), num_tokens=100),
        prompt(1, seat("a", 900), seat("b", 900), num_tokens=1000),
        prompt(2, seat("a", 10), seat("b", 10), num_tokens=101),
    ]
    batches = sorted(indexes(by_volume(prompts).queues).values())
    assert batches == [[0, 2], [1]]


def long(index: int, *names: str, wait: float = 0.0, objective: float = math.inf) -> JointPrompt:
    """A prompt that two workers compute in 0.6 of the time, and three in half of it."""
    seats = [seat(name, 8000, wait=wait) for name in names]
    times = (8000.0, 4800.0, 4000.0)
    return prompt(index, *seats, num_tokens=8000, objective=objective, times=times)


def test_by_volume_an_idle_fleet_computes_a_long_prompt_together() -> None:
    """TokenLake 6.2: the degree of parallelism comes out of the program."""
    found = by_volume([long(0, "a", "b", "c"), prompt(1, *(seat(name, 10) for name in "abc"))])
    assert sorted(indexes(found.queues).values()) == [[0], [1]]
    ((name, degree),) = found.degrees.items()
    assert indexes(found.queues)[name] == [0]
    assert degree == 2
    assert found.reason is ElasticReason.WITHIN_SLO
    assert found.saved == 8000 - 4800


def test_by_volume_as_many_prompts_as_workers_have_one_each() -> None:
    found = by_volume([long(index, "a", "b", "c") for index in range(3)])
    assert len(found.queues) == 3
    assert not found.degrees
    assert found.saved == 0


def test_by_volume_busy_workers_compute_nothing_together() -> None:
    found = by_volume([long(index, "a", "b", "c", wait=100.0) for index in range(2)])
    assert len(found.queues) == 2
    assert not found.degrees


@pytest.mark.parametrize("hurried", [0, 1])
def test_by_volume_who_would_be_late_alone_gets_two_workers(hurried: int) -> None:
    limits = [5000.0 if index == hurried else math.inf for index in range(2)]
    found = by_volume([long(i, "a", "b", "c", objective=limits[i]) for i in range(2)])
    assert found.reason is ElasticReason.WITHIN_SLO
    ((name, degree),) = found.degrees.items()
    assert (indexes(found.queues)[name], degree) == ([hurried], 2)


def test_by_volume_limits_that_no_plan_keeps_are_left_out() -> None:
    """The paper's fall-back."""
    found = by_volume([long(index, "a", "b", objective=100) for index in range(2)])
    assert found.reason is ElasticReason.BEST_EFFORT
    assert sorted(len(queue) for queue in found.queues.values()) == [1, 1]
    alone = by_volume([long(0, "a", "b", "c", objective=100)])
    assert alone.reason is ElasticReason.BEST_EFFORT
    assert list(alone.degrees.values()) == [3]


def test_by_volume_a_chain_begins_on_an_idle_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKERS, "a", worker("a", prefill_active=1))
    seats = (seat("a", 8000, wait=500.0), seat("b", 8000, brought=90), seat("c", 8000, brought=90))
    found = by_volume([prompt(0, *seats, num_tokens=8000, times=(8000.0, 4800.0))])
    assert set(found.queues) <= {"b", "c"}, "though nothing would move to `a`"
    assert list(found.degrees.values()) == [2]


def test_by_volume_prompts_of_two_clusters_stay_apart() -> None:
    prompts = [prompt(0, seat("a", 10)), prompt(1, seat("b", 10)), prompt(2, seat("b", 10))]
    assert indexes(by_volume(prompts).queues) == {"a": [0], "b": [1, 2]}
