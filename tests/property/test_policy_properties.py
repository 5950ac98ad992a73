"""Decisions equal brute force on small cases and keep their bounds on all."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvmesh.core.types import BlockHash, RequestId, Role, WorkerId
from kvmesh.policy.curves import Quadratic
from kvmesh.policy.dispatch import BatchTraffic, dispatch, volume
from kvmesh.policy.elastic import Batch, ElasticReason, Prompt, plan_elastic
from kvmesh.policy.heavy_hitters import heavy_hitters
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.load_score import (
    Regime,
    RegimeLimits,
    Score,
    ScoredWorker,
    classify,
    fleet_score,
)
from kvmesh.policy.offload import (
    AdjustReason,
    LinkState,
    OffloadState,
    Threshold,
    adjust_threshold,
)
from kvmesh.policy.offload_route import plan_offload
from kvmesh.policy.pdserve import InstanceProfile, choose_ratio
from kvmesh.policy.pool_eviction import plan_eviction
from kvmesh.policy.prefix_source import FetchPace
from kvmesh.policy.prfaas import Hardware, ServingProfile, operating_point, optimum, search
from kvmesh.policy.ranking import KVMESH
from kvmesh.policy.replication import choose_copy, plan_copies
from kvmesh.policy.role_switch import SwitchLimits, plan_switches
from kvmesh.policy.segment_tree import Segment, SegmentTree
from tests.unit.policy.fleet_examples import NOW, fleet, query, worker

WORKERS = [WorkerId(f"w{i}") for i in range(4)]
positive = st.floats(0.01, 100.0)


@given(positive, positive, positive, positive, st.integers(4, 40))
def test_eq_1_equals_a_search_over_all_splits(
    b_p: float, t_p: float, b_d: float, t_d: float, num_instances: int
) -> None:
    profile = InstanceProfile(b_p, t_p, b_d, t_d)
    rates = [
        min(n * profile.prefill_rate, (num_instances - n) * profile.decode_rate)
        for n in range(2, num_instances - 1)
    ]
    assert choose_ratio(profile, num_instances).rate == pytest.approx(max(rates))


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(0, 2), st.floats(0, 2))
def test_regimes_are_algorithm_1(prefill: float, decode: float, low: float, gap: float) -> None:
    limits = RegimeLimits(low, low + gap, low, low + gap)
    worst = max(abs(prefill), abs(decode))
    expected = (
        Regime.NORMAL
        if worst <= low
        else Regime.IMBALANCED
        if worst <= low + gap
        else Regime.EXTREME
    )
    assert classify(Score(prefill, decode), limits) is expected


own_scores = st.lists(st.floats(0.0, 5.0), min_size=1, max_size=8)


@given(own_scores, own_scores)
def test_no_switch_takes_what_the_giving_side_needs(
    prefill: list[float], decode: list[float]
) -> None:
    """Spread over the workers that stay, the work of their side is within their capacity."""
    limits = SwitchLimits()
    workers = [
        *(ScoredWorker(WorkerId(f"p{n}"), True, Score(x, 0.0)) for n, x in enumerate(prefill)),
        *(ScoredWorker(WorkerId(f"d{n}"), False, Score(0.0, x)) for n, x in enumerate(decode)),
    ]
    fleet = fleet_score(workers)
    switches = plan_switches(workers, fleet, classify(fleet), {}, limits)
    if not switches:
        return
    (role,) = {each.role for each in switches}
    home, helped = (decode, prefill) if role is Role.PREFILL else (prefill, decode)
    stay = sum(home) / (len(home) - len(switches))
    assert stay <= limits.needy + 1e-9
    assert stay + limits.margin <= sum(helped) / (len(helped) + len(switches)) + 1e-9


# --- PrfaaS --------------------------------------------------------------------------------------

profiles = st.builds(
    ServingProfile,
    st.builds(Quadratic, st.floats(0.01, 1), st.floats(1e-5, 1e-3)),
    st.builds(Quadratic, st.floats(0.01, 1), st.floats(1e-5, 1e-3)),
    st.builds(Quadratic, st.floats(1e3, 1e8), st.floats(1e2, 1e5)),
    st.floats(1, 64),
    st.floats(0.005, 0.05),
    st.floats(10, 1000),
)
lengths_samples = st.lists(st.integers(1, 100_000), min_size=3, max_size=30).map(LengthDistribution)


@settings(max_examples=40)
@given(profiles, lengths_samples, st.integers(1, 6), st.integers(2, 8), st.data())
def test_less_bandwidth_never_lowers_the_threshold_or_raises_the_rate(
    profile: ServingProfile,
    lengths: LengthDistribution,
    num_remote: int,
    num_local: int,
    data: st.DataObject,
) -> None:
    num_prefill = data.draw(st.integers(1, num_local - 1))
    # With one split and times that are linear, the ceiling of eq. 6 is a crossing of two curves.
    points = []
    for egress in (1e11, 1e9, 1e8, 1e7, 1e6):
        grid = search(
            profile, lengths, Hardware(num_remote, num_local, egress), None, [num_prefill]
        )
        points.append(max(grid, key=lambda p: (p.prefill_ceiling, -p.threshold_tokens)))
    rates = [point.rate for point in points]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(rates))
    for before, after in pairwise(points):
        if after.prefill_ceiling < before.prefill_ceiling * (1 - 1e-9):
            assert after.threshold_tokens >= before.threshold_tokens


@settings(max_examples=40)
@given(profiles, lengths_samples, st.integers(0, 4), st.integers(2, 6), st.floats(1e5, 1e10))
def test_the_optimum_is_the_best_of_every_threshold_and_split(
    profile: ServingProfile,
    lengths: LengthDistribution,
    num_remote: int,
    num_local: int,
    egress: float,
) -> None:
    hardware = Hardware(num_remote, num_local, egress)
    best = optimum(search(profile, lengths, hardware))
    for threshold in (0.0, lengths.quantile(0.3), lengths.mean, lengths.quantile(1.0), 1e9):
        for num_prefill in range(num_local + 1):
            point = operating_point(profile, lengths, hardware, threshold, num_prefill)
            # A threshold between two lengths acts like the lower one, which is on the grid.
            assert point.rate <= best.rate * (1 + 1e-9)
    assert best.egress_bytes_per_s <= egress * (1 + 1e-9) or not num_remote


@given(
    st.floats(1, 1e5),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=60),
)
def test_the_threshold_stays_within_its_bounds(
    base: float, links: list[tuple[float, float, float]]
) -> None:
    threshold = Threshold(base, base)
    for link in links:
        before = threshold.tokens
        threshold = adjust_threshold(threshold, LinkState(*link))
        assert base / 8 <= threshold.tokens <= 8 * base
        if threshold.reason in {AdjustReason.LINK_FULL, AdjustReason.REMOTE_SURGE}:
            assert threshold.tokens >= before
        elif threshold.reason is AdjustReason.LOCAL_SURGE:
            assert threshold.tokens <= before
        else:
            assert abs(threshold.tokens - base) <= abs(before - base)


def _adjusted(start: float, *link: float) -> float:
    return adjust_threshold(Threshold(1000.0, start), LinkState(*link)).tokens


@given(
    st.floats(125, 8000),
    *(st.tuples(st.floats(0, top), st.floats(0, top)).map(sorted) for top in (1, 9, 9)),
)
def test_the_threshold_is_monotonic_in_all_that_it_reads(
    start: float, utilisation: list[float], remote: list[float], local: list[float]
) -> None:
    (low_use, high_use), (low_far, high_far), (low_near, high_near) = utilisation, remote, local
    before = _adjusted(start, low_use, low_far, high_near)
    assert before <= _adjusted(start, high_use, low_far, high_near)
    assert before <= _adjusted(start, low_use, high_far, high_near)
    assert before <= _adjusted(start, low_use, low_far, low_near)


@given(st.floats(0.1, 4.0), st.floats(0.0, 1.7), st.floats(125, 8000))
def test_a_threshold_does_not_flap_on_a_link_that_stays_as_it_is(
    load: float, steepness: float, start: float
) -> None:
    """What it leaves on the link falls as a power of it, as that of most lengths does."""
    threshold, seen = Threshold(1000.0, start), []
    for _ in range(60):
        use = min(load * (threshold.tokens / 1000.0) ** -steepness, 1.0)
        threshold = adjust_threshold(threshold, LinkState(use))
        seen.append(threshold.tokens)
    assert len(set(seen[40:])) == 1, "it came to rest"
    if load * 8.0**-steepness <= 0.9:
        assert load * (seen[-1] / 1000.0) ** -steepness <= 0.9, "and the link has room"


# --- TokenLake -----------------------------------------------------------------------------------

batches = st.lists(
    st.builds(
        BatchTraffic,
        st.frozensets(st.sampled_from(WORKERS)),
        st.dictionaries(st.sampled_from(WORKERS), st.integers(1, 50)),
    ),
    max_size=4,
)


@given(batches)
def test_dispatch_equals_the_best_of_all_assignments(traffic: list[BatchTraffic]) -> None:
    best = min(
        sum(volume(batch, worker, 8) for batch, worker in zip(traffic, chosen, strict=True))
        for chosen in itertools.permutations(WORKERS, len(traffic))
    )
    found = dispatch(traffic, WORKERS, 8)
    assert found.volume_bytes == best
    assert len(set(found.workers)) == len(traffic)
    travels = zip(traffic, found.workers, strict=True)
    assert sum(volume(batch, worker, 8) for batch, worker in travels) == best


def _latency(batch: Sequence[Prompt], num_workers: int) -> float:
    # Padding to the longest prompt, imperfect speed-up: no shape that the program could rely on.
    longest = max(each.context_tokens for each in batch)
    return len(batch) * longest / math.sqrt(num_workers) + 3 * num_workers


def _divisions(prompts: list[Prompt], num_workers: int) -> Iterator[list[Batch]]:
    if not prompts:
        yield []
        return
    for count in range(1, len(prompts) + 1):
        for workers in range(1, num_workers + 1):
            for rest in _divisions(prompts[count:], num_workers - workers):
                yield [Batch(tuple(prompts[:count]), workers), *rest]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(1, 120)), min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_the_elastic_program_equals_the_best_of_all_divisions(
    drawn: list[tuple[int, float]], num_workers: int
) -> None:
    prompts = sorted(
        (Prompt(RequestId(f"r{i}"), tokens, slo) for i, (tokens, slo) in enumerate(drawn)),
        key=lambda each: (each.context_tokens, each.request_id),
    )
    totals: dict[bool, list[float]] = {True: [], False: []}
    for division in _divisions(prompts, num_workers):
        costs = [_latency(batch.prompts, batch.num_workers) for batch in division]
        meets = all(
            cost <= min(each.slo_s for each in batch.prompts)
            for cost, batch in zip(costs, division, strict=True)
        )
        totals[meets].append(
            sum(len(b.prompts) * cost for b, cost in zip(division, costs, strict=True))
        )
    plan = plan_elastic(prompts, num_workers, _latency)
    assert plan.reason is (ElasticReason.WITHIN_SLO if totals[True] else ElasticReason.BEST_EFFORT)
    assert plan.total_latency_s == pytest.approx(min(totals[True] or totals[False]))
    assert sum(batch.num_workers for batch in plan.batches) <= num_workers
    assert [p for batch in plan.batches for p in batch.prompts] == prompts


@st.composite
def trees(draw: st.DrawFn) -> SegmentTree:
    tree = SegmentTree()
    nodes: list[Segment] = []
    for index in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from([None, *nodes]))
        reads = draw(st.integers(0, 20))
        segment: Segment | None = None
        for holder in draw(st.sets(st.sampled_from(WORKERS), min_size=1)):
            now = draw(st.floats(0, 100))
            segment = tree.add(BlockHash(bytes([index])), parent, holder, now)
        assert segment is not None
        nodes.append(segment)
        # Reads of a segment are reads of its prefix too.
        above: Segment | None = segment
        while above is not None:
            above.accesses += reads
            above = above.parent
    return tree


@given(trees(), st.integers(1, 20))
def test_heavy_hitters_are_the_most_read_of_all(tree: SegmentTree, count: int) -> None:
    found = [segment.accesses for segment in heavy_hitters(tree, count)]
    assert found == sorted((segment.accesses for segment in tree), reverse=True)[:count]


@given(trees(), st.sampled_from(WORKERS), st.integers(1, 20), st.data())
def test_eviction_never_leaves_an_orphan(
    tree: SegmentTree, holder: WorkerId, count: int, data: st.DataObject
) -> None:
    pinned = data.draw(st.sets(st.sampled_from([segment.name for segment in tree])))
    held = sum(holder in segment.copies for segment in tree)
    drops = plan_eviction(tree, holder, count, pinned)
    assert len(drops) == len(set(drops))
    assert not pinned & {drop.segment for drop in drops}
    for drop in drops:
        segment = tree.get(drop.segment)
        assert segment is not None
        tree.drop(segment, drop.holder)  # asserts that what nobody holds has no children
    if not pinned:
        after = sum(holder in segment.copies for segment in tree)
        assert held - after >= min(count, held)
    left = {segment.name for segment in tree}
    assert all(s.parent is None or s.parent.name in left for s in tree)


@given(trees(), st.sets(st.sampled_from(WORKERS)), st.data(), st.integers(0, 9))
def test_copies_are_planned_and_read_on_live_workers_only(
    tree: SegmentTree, live: set[WorkerId], data: st.DataObject, seed: int
) -> None:
    loads = {worker: data.draw(st.floats(0, 100)) for worker in sorted(live)}
    hitters = heavy_hitters(tree, 10)
    for copy in plan_copies(hitters, loads):
        segment = tree.get(copy.segment)
        assert segment is not None
        assert {copy.source, copy.target} <= live
        assert copy.source in segment.copies
        assert copy.target not in segment.copies
    assume(hitters)
    chosen = choose_copy(hitters[0], loads, random.Random(seed))
    readable = live & set(hitters[0].copies)
    assert chosen in readable if readable else chosen is None


travel = st.one_of(st.none(), st.floats(1e-6, 1e-2))


def moved_tokens(holder: str, num_blocks: int, out_s: float | None, back_s: float | None) -> int:
    """Tokens that cross the link between two clusters, of which one holds the prefix.

    Args:
        out_s, back_s: seconds for a token from home to the far cluster, and back; None: unknown.
    """
    known = {("east", "far"): out_s, ("far", "east"): back_s}
    pace = FetchPace(1e-3, 1e-5, {ends: each for ends, each in known.items() if each is not None})
    workers = worker("far", cluster="far"), worker("p"), worker("d", Role.DECODE)
    view = dataclasses.replace(fleet(*workers), pace=pace)
    # Home computes a short rest, the far cluster a long one: the side without the prefix.
    asked = query(16 * num_blocks + (36 if holder == "far" else 1400))
    offload = OffloadState("far", 400, link_has_room=True)
    held = {WorkerId(holder): num_blocks}
    plan = plan_offload(view, asked, held, NOW, random.Random(0), KVMESH, offload)
    assert plan.choice is not None
    return plan.choice.moved_tokens


@given(st.integers(26, 300), travel, travel)
def test_swapped_directions_of_a_link_swap_the_decision(
    num_blocks: int, out_s: float | None, back_s: float | None
) -> None:
    goes = moved_tokens("p", num_blocks, out_s, back_s)
    comes = moved_tokens("far", num_blocks, out_s, back_s)
    assert moved_tokens("far", num_blocks, back_s, out_s) == goes
    assert moved_tokens("p", num_blocks, back_s, out_s) == comes
    # What the other direction carries does not matter.
    assert moved_tokens("p", num_blocks, out_s, None) == goes
    assert moved_tokens("far", num_blocks, None, back_s) == comes
