from __future__ import annotations

import dataclasses
import random

import pytest

from kvmesh.core.types import Role, RoutePlan, WorkerId
from kvmesh.policy.routing import plan_route
from kvmesh.policy.view import WorkerView
from kvmesh.sim.systems import SYSTEMS
from tests.unit.policy.fleet_examples import NOW, fleet, query, worker

DECODE = worker("d", Role.DECODE)


def first(system: str, *workers: WorkerView, matches: dict[str, int] | None = None) -> str:
    held = {WorkerId(name): blocks for name, blocks in (matches or {}).items()}
    rank = SYSTEMS[system].route
    plan = plan_route(fleet(*workers, DECODE), query(), held, NOW, random.Random(0), rank)
    assert isinstance(plan, RoutePlan)
    return plan.prefill[0].worker_id


def pending(view: WorkerView, tokens: int) -> WorkerView:
    return dataclasses.replace(view, pending_tokens=tokens)


def test_names_are_their_keys() -> None:
    assert all(name == system.name for name, system in SYSTEMS.items())


def test_connections_only_count_prompts() -> None:
    busy, idle = worker("a", prefill_active=3), worker("b", prefill_active=1)
    assert first("local_queues", busy, idle, matches={"a": 20}) == "b"


def test_pending_tokens_ignore_the_cache() -> None:
    long, short = pending(worker("a"), 9000), pending(worker("b", prefill_active=3), 100)
    assert first("pending_tokens", long, short, matches={"a": 20}) == "b"


@pytest.mark.parametrize(
    ("blocks", "active", "others", "chosen"),
    [
        (7, 2, 0, "a"),  # 112 of 320 tokens
        (6, 2, 0, "b"),  # no more than 0.3 of them
        (7, 64, 0, "a"),
        (7, 65, 0, "b"),  # 64 requests more than another worker has
        (7, 165, 100, "b"),
        (7, 300, 230, "a"),  # not 1.5 times as many
    ],
)
def test_cache_aware_needs_a_part_of_the_prompt_and_balance(
    blocks: int, active: int, others: int, chosen: str
) -> None:
    holder, other = worker("a", prefill_active=active), worker("b", prefill_active=others)
    assert first("cache_aware", holder, other, matches={"a": blocks}) == chosen


@pytest.mark.parametrize(
    ("blocks", "tokens", "chosen"),
    [(7, 100, "a"), (7, 200, "b"), (10, 100, "b")],  # ten are enough to be fetched
)
def test_cache_centric_weighs_the_queue_against_the_prefix(
    blocks: int, tokens: int, chosen: str
) -> None:
    holder = pending(worker("a"), tokens)
    assert first("cache_centric", holder, worker("b"), matches={"a": blocks}) == chosen
