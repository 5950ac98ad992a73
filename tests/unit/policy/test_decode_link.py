from __future__ import annotations

import dataclasses
import random

import pytest

from kvmesh.core.types import Role, RoutePlan, WorkerId
from kvmesh.policy.routing import plan_route
from kvmesh.policy.view import FleetView, WorkerView
from tests.unit.policy.fleet_examples import NOW, POLICIES, fleet, query, worker

SLOW_S, FAST_S = 1e-4, 1e-6


def links(**token_s: float) -> dict[tuple[WorkerId, WorkerId], float]:
    return {(WorkerId("p"), WorkerId(name)): each for name, each in token_s.items()}


def decode_order(view: FleetView, policy: str = "kvmesh", seed: int = 0) -> list[str]:
    made = plan_route(view, query(), {}, NOW, random.Random(seed), POLICIES[policy])
    assert isinstance(made, RoutePlan)
    return [each.worker_id for each in made.decode]


def of(*workers: WorkerView, **token_s: float) -> FleetView:
    return dataclasses.replace(fleet(worker("p"), *workers), links=links(**token_s))


def decoders(**running: int) -> list[WorkerView]:
    return [worker(name, Role.DECODE, decode_running=each) for name, each in running.items()]


@pytest.mark.parametrize("policy", ["kvmesh", "cache_load"])
def test_of_equal_workers_the_nearest_decodes(policy: str) -> None:
    view = of(*decoders(a=0, b=0, c=0), a=SLOW_S, b=FAST_S, c=SLOW_S / 4)
    for seed in range(8):
        assert decode_order(view, policy, seed) == ["b", "c", "a"]


def test_the_reason_says_when_the_link_decided() -> None:
    view, told = of(*decoders(a=0, b=0), a=SLOW_S, b=FAST_S), set()
    for seed in range(8):
        made = plan_route(view, query(), {}, NOW, random.Random(seed), POLICIES["kvmesh"])
        assert isinstance(made, RoutePlan)
        told.add(made.reason.endswith(", over a faster link"))
    assert told == {False, True}  # chance had chosen it in the other cases


def test_baselines_do_not_weigh_links() -> None:
    view = of(*decoders(a=0, b=0), a=SLOW_S, b=FAST_S)
    orders = {tuple(decode_order(view, "least_loaded", seed)) for seed in range(8)}
    assert orders == {("a", "b"), ("b", "a")}


def test_load_comes_before_the_link() -> None:
    assert decode_order(of(*decoders(a=0, b=2), a=SLOW_S, b=FAST_S)) == ["a", "b"]
    full = of(*decoders(a=0, b=8), a=SLOW_S, b=FAST_S)
    assert decode_order(full) == ["a", "b"]


def test_small_differences_and_unknown_links_leave_the_order_to_chance() -> None:
    for view in (
        of(*decoders(a=0, b=0)),
        of(*decoders(a=0, b=0), a=SLOW_S, b=SLOW_S * 1.9),
        of(*decoders(a=0, b=0), a=FAST_S, b=FAST_S * 4),  # both take less than two milliseconds
        of(*decoders(a=0, b=0), a=SLOW_S),  # the other one is tried, so that it gets known
    ):
        assert {decode_order(view, seed=seed)[0] for seed in range(8)} == {"a", "b"}


def test_what_a_worker_holds_needs_no_link() -> None:
    view = of(*decoders(a=0, b=0), a=SLOW_S, b=FAST_S)
    held = {WorkerId("a"): 20, WorkerId("b"): 18}
    made = plan_route(view, query(), held, NOW, random.Random(0), POLICIES["cache_load"])
    assert isinstance(made, RoutePlan)
    assert made.decode[0].worker_id == "a"
