"""Routes that bring a prefix from where it is, so that load may go elsewhere."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from kvmesh.core.fetch_reason import FetchReason
from kvmesh.core.types import (
    Placement,
    Role,
    RouteCause,
    RoutePlan,
    RouteQuery,
    WorkerId,
)
from kvmesh.policy.composition import COMPOSITIONS, decide_route
from kvmesh.policy.explain import describe_decision
from kvmesh.policy.holders import HeldBlocks, Lower
from kvmesh.policy.offload import OffloadState
from kvmesh.policy.prefix_source import MIN_FETCH_TOKENS, FetchPace
from kvmesh.policy.ranking import CACHE_LOAD, KVMESH, RoutePolicy
from kvmesh.policy.routing import plan_route
from kvmesh.policy.seats import SILENT_AFTER_S
from kvmesh.policy.view import FleetView, WorkerView
from tests.unit.policy.fleet_examples import LAYOUT, NOW, fleet, query, worker

LONG = 3200
BLOCKS = LONG // LAYOUT.block_size
DECODE = worker("d", Role.DECODE, decode_running=7)
"""Too full to help."""


def pending(name: str, tokens: int, **changes: Any) -> WorkerView:
    return dataclasses.replace(worker(name, **changes), pending_tokens=tokens)


def plan(
    *workers: WorkerView,
    held: dict[str, int],
    asked: RouteQuery | None = None,
    policy: RoutePolicy = KVMESH,
    pace: FetchPace | None = None,
) -> RoutePlan:
    matches = {WorkerId(name): blocks for name, blocks in held.items()}
    view: FleetView = dataclasses.replace(fleet(*workers), pace=pace or FetchPace())
    made = plan_route(view, asked or query(LONG), matches, NOW, random.Random(0), policy)
    assert isinstance(made, RoutePlan), made
    return made


def test_load_spreads_away_from_the_holder() -> None:
    made = plan(pending("a", 1500), pending("b", 0), DECODE, held={"a": BLOCKS})
    first = made.prefill[0]
    assert first.worker_id == "b"
    assert first.source is not None
    assert (first.source.worker_id, first.source.num_blocks) == ("a", BLOCKS)
    assert first.fetch is FetchReason.FETCH
    assert made.cause is RouteCause.FETCH
    assert "fetches up to 3200 from a" in made.reason
    holder = next(each for each in made.prefill if each.worker_id == "a")
    assert (holder.source, holder.fetch) == (None, FetchReason.HELD)


ASKED = FetchPace(token_s=1e-3, inside_token_s=0.9e-3, ask_chunk_s=0.05, ask_pair_s=1e-9)
"""Moving KV takes nearly as long as computing it; asking does not."""


def test_a_prefix_that_a_decode_worker_holds_is_asked_for_where_that_is_quickest() -> None:
    near, new = worker("d", Role.DECODE, decode_running=5), 32
    workers, held = (pending("a", 0), near), {"d": (LONG - new) // LAYOUT.block_size}
    made = plan(*workers, held=held, pace=ASKED)
    first = made.prefill[0]
    assert (first.worker_id, first.fetch, first.source) == ("a", FetchReason.ASK, None)
    assert "which it asks the worker that decodes" in made.reason
    # Its KV would be here as soon: both are named, and the worker that computes decides.
    made = plan(*workers, held=held, pace=dataclasses.replace(ASKED, inside_token_s=1e-4))
    assert made.prefill[0].fetch is FetchReason.ASK
    assert made.prefill[0].source is not None
    for pace in (
        dataclasses.replace(ASKED, ask_chunk_s=0.0),  # nobody has asked yet
        dataclasses.replace(ASKED, ask_chunk_s=9.0),
        dataclasses.replace(ASKED, ask_pair_s=1e-3),
    ):
        assert plan(*workers, held=held, pace=pace).prefill[0].fetch is FetchReason.SLOW


def test_nobody_asks_where_the_prompt_is_not_decoded() -> None:
    """An idle worker decodes it; the price of a question that is not asked would be made up."""
    holder, idle = worker("d", Role.DECODE, decode_running=5), worker("e", Role.DECODE)
    held = {"d": BLOCKS - 2}
    made = plan(pending("a", 0), holder, idle, held=held, pace=ASKED)
    [first] = [each for each in made.prefill if each.worker_id != "d"]
    assert (first.fetch, first.saved_tokens) == (FetchReason.SLOW, 0.0)
    refused = dataclasses.replace(query(LONG), avoid=frozenset({WorkerId("d")}))
    other = worker("e", Role.DECODE, decode_running=6)
    made = plan(pending("a", 0), holder, other, held=held, asked=refused, pace=ASKED)
    assert made.decode[0].worker_id == "e"
    assert made.prefill[0].fetch is FetchReason.SLOW


def test_a_prefix_in_another_cluster_is_not_asked_for() -> None:
    far = worker("e", Role.DECODE, decode_running=5, cluster="west")
    made = plan(pending("a", 0), DECODE, far, held={"e": BLOCKS - 2}, pace=ASKED)
    assert made.prefill[0].fetch is not FetchReason.ASK


def test_a_prefix_that_a_prefill_worker_holds_is_not_asked_for() -> None:
    made = plan(pending("a", 5000), pending("b", 0), DECODE, held={"a": BLOCKS}, pace=ASKED)
    assert [each.fetch for each in made.prefill if each.worker_id == "b"] == [FetchReason.SLOW]


def test_who_decodes_what_it_computes_asks_nobody() -> None:
    held = {"b": BLOCKS - 2}
    hybrids = pending("a", 0, role=Role.HYBRID), pending("b", 90_000, role=Role.HYBRID)
    pair = pending("a", 0), worker("b", Role.DECODE, decode_running=5)
    together = dataclasses.replace(query(LONG), placement=Placement.AGGREGATED)
    for workers, asked in ((hybrids, query(LONG)), (pair, together)):
        made = plan(*workers, held=held, asked=asked, pace=ASKED)
        assert made.placement is Placement.AGGREGATED
        [found] = [each for each in made.prefill if each.worker_id == "a"]
        assert (found.fetch, found.saved_tokens) == (FetchReason.SLOW, 0.0)


def test_a_hybrid_helps_with_no_prefix_that_it_would_have_to_ask_for() -> None:
    late, hybrid = pending("a", 9000), pending("c", 0, role=Role.HYBRID, decode_running=4)
    holder = worker("b", Role.DECODE, decode_running=5)
    made = plan(late, holder, hybrid, held={"b": BLOCKS - 20}, pace=ASKED)
    assert (made.placement, made.prefill[0].worker_id) != (Placement.AGGREGATED, "c")


def test_an_idle_holder_computes_itself() -> None:
    made = plan(pending("a", 0), pending("b", 0), DECODE, held={"a": BLOCKS})
    assert made.prefill[0].worker_id == "a"
    assert made.cause is RouteCause.PREFIX
    # Who is asked when it refuses would fetch.
    assert made.prefill[1].source is not None


def test_decode_workers_are_read_from_and_fetch_where_they_prefill() -> None:
    made = plan(pending("a", 0), DECODE, held={"d": BLOCKS})
    assert made.prefill[0].source is not None
    assert made.prefill[0].source.worker_id == "d"
    assert [each.source for each in made.decode] == [None]
    hybrids = [pending("a", 9000, role=Role.HYBRID), pending("b", 0, role=Role.HYBRID)]
    alone = plan(*hybrids, held={"a": BLOCKS})
    assert alone.placement is Placement.AGGREGATED
    assert alone.prefill[0].source is not None


def test_the_rest_of_a_prefix_is_fetched_too() -> None:
    made = plan(pending("a", 9000), pending("b", 0), DECODE, held={"a": BLOCKS, "b": BLOCKS // 2})
    assert made.prefill[0].worker_id == "b"
    assert made.prefill[0].cached_tokens == LONG // 2
    assert made.prefill[0].source is not None


def test_reasons_not_to_fetch() -> None:
    busy = pending("a", 9000)
    short = plan(busy, pending("b", 0), DECODE, held={"a": 5})
    assert short.prefill[0].fetch is FetchReason.SHORT
    nobody = plan(busy, pending("b", 0), DECODE, held={})
    assert nobody.prefill[0].fetch is FetchReason.NOBODY
    slow_way = FetchPace(token_s=0.001, inside_token_s=0.002)
    slow = plan(busy, pending("b", 0), DECODE, held={"a": BLOCKS}, pace=slow_way)
    assert slow.prefill[0].fetch is FetchReason.SLOW
    queue = 100 * LAYOUT.block_bytes * BLOCKS
    full_line = pending("a", 9000, sending_bytes=queue)
    assert plan(full_line, pending("b", 0), DECODE, held={"a": BLOCKS}).prefill[0].source is None


def test_who_is_silent_or_of_another_layout_is_not_read_from() -> None:
    silent = pending("a", 0, reported_at=NOW - 2 * SILENT_AFTER_S)
    assert plan(silent, pending("b", 0), DECODE, held={"a": BLOCKS}).prefill[0].source is None
    other = dataclasses.replace(LAYOUT, dtype="bfloat16")
    strange = pending("a", 9000, layout=other)
    made = plan(strange, pending("b", 0), DECODE, held={"a": BLOCKS})
    assert made.prefill[0].worker_id == "b"
    assert made.prefill[0].source is None


def test_policies_of_other_systems_do_not_fetch() -> None:
    made = plan(pending("a", 9000), pending("b", 0), DECODE, held={"a": BLOCKS}, policy=CACHE_LOAD)
    assert {each.source for each in made.prefill} == {None}


def test_the_decision_shows_the_fetch() -> None:
    policy, offload = COMPOSITIONS["kvmesh"], OffloadState()
    view, asked = fleet(pending("a", 9000), pending("b", 0), DECODE), query(LONG)
    decision = decide_route(policy, view, asked, {WorkerId("a"): BLOCKS}, NOW, offload)
    facts = describe_decision(view, asked, decision, policy.route, offload)
    first = facts.prefill[0]
    assert facts.reason == "fetch"
    assert (first.worker_id, first.fetch, first.source) == ("b", "fetch", "a")
    # Of 3200 tokens, all but the last block and what the fetch costs are saved.
    assert first.score[0] == LONG - first.saved_tokens
    assert 0.9 * LONG < first.saved_tokens < LONG


def test_the_last_token_is_computed_and_what_is_just_too_short_is_not_fetched() -> None:
    """Of a prompt that a holder has to its last token, a worker with all but a block lacks none."""
    full, size = MIN_FETCH_TOKENS // LAYOUT.block_size, LAYOUT.block_size
    asked = query(size * (full + 1))
    busy, idle = pending("a", 90_000), pending("b", 0)
    for held, expected in ((full, FetchReason.HELD), (1, FetchReason.SHORT), (0, None)):
        made = plan(busy, idle, DECODE, held={"a": full + 1, "b": held}, asked=asked)
        first = made.prefill[0]
        assert first.worker_id == "b"
        assert first.fetch is expected or expected is None
        assert (first.source is not None) == (expected is None)


def tiered(name: str, **changes: Any) -> WorkerView:
    """A worker that has measured its tiers: a token is up in a fiftieth, or a fifth, of 1 ms."""
    view = pending(name, 0, **changes)
    return dataclasses.replace(
        view, load=dataclasses.replace(view.load, host_token_s=2e-5, disk_token_s=2e-4)
    )


def below(held: dict[str, tuple[int, int, int]]) -> HeldBlocks:
    """Of each worker: leading blocks, of these in host memory, and on disk."""
    matches = HeldBlocks()
    for name, (blocks, host, disk) in held.items():
        matches.take(WorkerId(name), blocks, Lower(host, disk))
    return matches


MEASURED = FetchPace(token_s=1e-3, inside_token_s=3e-5)


def plan_below(
    *workers: WorkerView, held: dict[str, tuple[int, int, int]], pace: FetchPace = MEASURED
) -> RoutePlan:
    view: FleetView = dataclasses.replace(fleet(*workers), pace=pace)
    made = plan_route(view, query(LONG), below(held), NOW, random.Random(0), KVMESH)
    assert isinstance(made, RoutePlan), made
    return made


def test_what_lies_on_disk_costs_what_bringing_it_up_costs() -> None:
    made = plan_below(
        tiered("a"), tiered("b"), DECODE, held={"a": (BLOCKS, 0, BLOCKS), "b": (BLOCKS, BLOCKS, 0)}
    )
    first = made.prefill[0]
    assert (first.worker_id, first.fetch, first.source) == ("b", FetchReason.LOAD, None)
    assert (first.cached_tokens, first.host_tokens, first.disk_tokens) == (LONG, LONG, 0)
    assert round(first.load_tokens) == LONG / 50
    assert f"brings up {LONG} of the cached ones" in made.reason


def test_a_peer_s_memory_is_read_where_one_s_own_disk_is_slower() -> None:
    workers = (tiered("a"), pending("b", 900), DECODE)
    held = {"a": (BLOCKS, 0, BLOCKS), "b": (BLOCKS, 0, 0)}
    first = plan_below(*workers, held=held).prefill[0]
    assert (first.worker_id, first.fetch) == ("a", FetchReason.FETCH)
    assert first.source is not None
    assert first.source.worker_id == "b"
    assert first.source.before_load
    # 5 ms for any fetch and 3e-5 s for each token, against 2e-4 s for each token from disk.
    assert round(first.load_tokens - first.saved_tokens) == round(5 + (LONG - 16) * 0.03 + 0.48)
    slow = dataclasses.replace(MEASURED, inside_token_s=1.8e-4)
    first = plan_below(*workers, held=held, pace=slow).prefill[0]
    assert (first.worker_id, first.fetch, first.source) == ("a", FetchReason.LOAD, None)


def test_whoever_has_it_in_memory_is_read_rather_than_who_has_to_bring_it_up() -> None:
    held = {"a": (BLOCKS, 0, BLOCKS), "b": (BLOCKS, 0, 0)}
    for seed in range(8):
        view: FleetView = dataclasses.replace(
            fleet(tiered("a", prefill_active=4), pending("b", 9000), pending("c", 0), DECODE),
            pace=MEASURED,
        )
        made = plan_route(view, query(LONG), below(held), NOW, random.Random(seed), KVMESH)
        assert isinstance(made, RoutePlan), made
        first = made.prefill[0]
        assert first.worker_id == "c"
        assert first.source is not None
        assert (first.source.worker_id, first.source.before_load) == ("b", False)


def test_a_tier_slower_than_computing_counts_as_computing() -> None:
    slow = dataclasses.replace(
        tiered("a"), load=dataclasses.replace(tiered("a").load, disk_token_s=1.0)
    )
    made = plan_below(slow, tiered("b"), DECODE, held={"a": (BLOCKS, 0, BLOCKS)})
    costs = {str(each.worker_id): each.load_tokens for each in made.prefill}
    assert costs["a"] == LONG


def test_the_debug_page_shows_what_has_to_come_up() -> None:
    view = dataclasses.replace(fleet(tiered("a"), DECODE), pace=MEASURED)
    held = below({"a": (BLOCKS, 100, 20)})
    decision = decide_route(COMPOSITIONS["kvmesh"], view, query(LONG), held, NOW, OffloadState())
    facts = describe_decision(view, query(LONG), decision, KVMESH, OffloadState())
    (shown,) = facts.prefill
    assert (shown.host_tokens, shown.disk_tokens) == (1600, 320)
    assert round(shown.load_tokens) == 1600 / 50 + 320 / 5
    assert shown.score[0] == 1 + shown.load_tokens
