from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.core.details import FleetWorker
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.turns import at_once
from kvmesh.core.types import Role, WorkerLoad
from kvmesh.policy.curves import Quadratic
from kvmesh.policy.measurement import REACH, MeanAnswer, ServingMeter
from kvmesh.policy.prfaas import ServingProfile
from tests.unit.policy.fleet_examples import LAYOUT, worker_info

FAR = "west"


def prefill(
    total: int, cluster: str = "east", incarnation: int = 1, compute_used: float = 0.5
) -> FleetWorker:
    load = WorkerLoad(prefill_tokens_total=total, compute_used=compute_used)
    info = worker_info(f"p-{cluster}", cluster=cluster, incarnation=incarnation)
    return FleetWorker(info, load)


def decode(total: int) -> FleetWorker:
    load = WorkerLoad(
        prefill_tokens_total=total,
        decode_tokens_total=total,
        decode_running=4,
        memory_bandwidth_used=0.8,
    )
    return FleetWorker(worker_info("d", Role.DECODE), load)


def measured(*, cycles: int, far_speed: int = 0) -> ServingMeter:
    """1,000 prompt tokens and 200 decoded ones a second, two requests a second."""
    meter = ServingMeter(FAR)
    for cycle in range(cycles + 1):
        far = [prefill(far_speed * cycle, FAR)] if far_speed else []
        at_once(meter.observe([prefill(1000 * cycle), decode(200 * cycle), *far], 2, 1.0))
    return meter


def test_nothing_is_known_at_first() -> None:
    assert measured(cycles=0).serving is None
    assert ServingMeter(FAR).answers.tokens is None


def test_answers_are_as_long_as_recent_ones() -> None:
    answers = MeanAnswer()
    assert answers.expected(70) == 70, "nothing is known"
    answers.observe(200, 10)
    assert answers.expected(70) == pytest.approx(20)
    assert answers.expected(5) == 5, "a request has a limit"
    for _ in range(400):
        answers.observe(300, 5)
    assert answers.expected(70) == pytest.approx(60, rel=0.01)


def test_speeds_from_totals_and_busy_time() -> None:
    serving = measured(cycles=20).serving
    assert serving is not None
    # Half of each second for a thousand tokens.
    assert serving.local_prefill_s(1000) == pytest.approx(0.5)
    # 0.8 s for 50 steps of four sequences.
    assert serving.decode_step_s == pytest.approx(0.016)
    assert serving.output_tokens == pytest.approx(100, rel=0.1)
    assert serving.decode_batch == 8
    assert serving.kv_bytes(16) == LAYOUT.block_bytes
    assert serving.remote_prefill_s(1000) == pytest.approx(0.5), "unknown: as at home"


def test_the_remote_cluster_has_its_own_speed() -> None:
    serving = measured(cycles=20, far_speed=4000).serving
    assert serving is not None
    assert serving.remote_prefill_s(1000) == pytest.approx(0.125)
    assert serving.local_prefill_s(1000) == pytest.approx(0.5)


def test_a_worker_that_restarted_counts_anew() -> None:
    meter = measured(cycles=20)
    before = meter.serving
    at_once(meter.observe([prefill(10, incarnation=2), decode(4200)], 2, 1.0))
    assert before is not None
    assert meter.serving is not None
    assert meter.serving.local_prefill_s(1000) == pytest.approx(before.local_prefill_s(1000))


def test_totals_from_before_the_first_report_are_of_no_cycle() -> None:
    meter = measured(cycles=20)
    before = meter.prompt_token_s
    guessed = FleetWorker(prefill(0, incarnation=2).info, WorkerLoad(), reported=False)
    at_once(meter.observe([guessed], 0, 1.0))
    at_once(meter.observe([prefill(9_000_000, incarnation=2)], 0, 1.0))
    assert meter.prompt_token_s == pytest.approx(before)


def test_cycles_may_be_of_any_length() -> None:
    meter = ServingMeter(FAR)
    for cycle in range(10):
        at_once(meter.observe([prefill(1000 * cycle), decode(200 * cycle)], 2, 0.5))
    assert meter.serving is not None
    # Half of each half second for a thousand tokens; 0.4 s for 50 steps.
    assert meter.serving.local_prefill_s(1000) == pytest.approx(0.25)
    assert meter.serving.decode_step_s == pytest.approx(0.008)


def test_less_than_a_second_of_work_says_nothing_of_speed() -> None:
    meter = ServingMeter(FAR)
    for cycle in range(2):
        at_once(meter.observe([prefill(1000 * cycle, compute_used=0.9)], 1, 1.0))
    assert meter.prompt_token_s is None
    at_once(meter.observe([prefill(2000, compute_used=0.9)], 1, 1.0))
    assert meter.prompt_token_s == pytest.approx(0.0009)


def test_a_prompts_pace_is_that_at_home_before_that_far_away() -> None:
    meter = ServingMeter(FAR)
    for cycle in range(6):
        at_once(meter.observe([prefill(4000 * cycle, FAR)], 1, 1.0))
    assert meter.prompt_token_s == pytest.approx(0.000125)
    for cycle in range(6, 16):
        at_once(meter.observe([prefill(4000 * cycle, FAR), prefill(1000 * cycle)], 1, 1.0))
    assert meter.prompt_token_s == pytest.approx(0.0005)


def test_generated_tokens_are_no_prompts_of_a_hybrid() -> None:
    """Both count as computed; what was generated does not make its prompts look fast."""
    meter = ServingMeter(FAR)
    info = worker_info("h", Role.HYBRID)
    for cycle in range(11):
        load = WorkerLoad(
            prefill_tokens_total=1200 * cycle,
            decode_tokens_total=200 * cycle,
            decode_running=4,
            compute_used=0.5,
            memory_bandwidth_used=0.8,
        )
        at_once(meter.observe([FleetWorker(info, load)], 2, 1.0))
    assert meter.serving is not None
    assert meter.serving.local_prefill_s(1000) == pytest.approx(0.5)


def test_decode_that_is_not_seen_at_work_is_not_known() -> None:
    """A report may come between steps, when nothing runs, and says nothing of how long they are."""
    meter = ServingMeter(FAR)
    info = worker_info("d", Role.DECODE)
    for cycle in range(10):
        idle = FleetWorker(info, WorkerLoad(decode_tokens_total=200 * cycle, decode_running=4))
        at_once(meter.observe([prefill(1000 * cycle), idle], 2, 1.0))
    assert meter.prompt_token_s == pytest.approx(0.0005)
    assert meter.serving is None


PROFILE = ServingProfile(
    remote_prefill_s=Quadratic(0.0, 1e-4, 1e-8),
    local_prefill_s=Quadratic(0.05, 2e-4, 1e-7),
    kv_bytes=Quadratic(0.0, 1.0),
    decode_batch=8,
    decode_step_s=0.02,
    output_tokens=100,
)


def test_a_measured_speed_keeps_the_constant_and_the_curve_of_the_profile() -> None:
    """Half of each second for 1,000 tokens: for these lengths twice as slow as the profile."""
    meter = ServingMeter(FAR, PROFILE)
    lengths = (500, 1500)
    for cycle in range(21):
        for tokens in lengths:
            meter.note_prompt(tokens, is_far=False)
        meter.note_prompt(100_000, is_far=True)
        at_once(meter.observe([prefill(1000 * cycle), decode(200 * cycle)], 2, 1.0))
    serving = meter.serving
    assert serving is not None
    local = PROFILE.local_prefill_s
    factor = 0.0005 * sum(lengths) / sum(map(local, lengths))
    for tokens in (1, 1000, 50_000):
        assert serving.local_prefill_s(tokens) == pytest.approx(factor * local(tokens))
    assert sum(map(serving.local_prefill_s, lengths)) == pytest.approx(0.0005 * sum(lengths))
    assert serving.remote_prefill_s(1000) == PROFILE.remote_prefill_s(1000), "not measured yet"


def test_without_a_profile_the_workers_attention_gives_the_curve() -> None:
    meter = ServingMeter(FAR)
    for cycle in range(21):
        meter.note_prompt(1000, is_far=False)
        told = prefill(1000 * cycle)
        told = FleetWorker(replace(told.info, pair_share=1e-3), told.load)
        at_once(meter.observe([told, decode(200 * cycle)], 2, 1.0))
    serving = meter.serving
    assert serving is not None
    assert serving.local_prefill_s(1000) == pytest.approx(0.5)
    # 1000 tokens are 1000 + 500 of work, 4000 are 4000 + 8000.
    assert serving.local_prefill_s(4000) == pytest.approx(0.5 * 12 / 1.5)


def test_what_a_hybrid_hands_off_grows_by_its_full_group_alone() -> None:
    meter = ServingMeter(FAR)
    groups = KvGroups((0, 64), state_blocks=3)
    for cycle in range(21):
        told = decode(200 * cycle)
        told = FleetWorker(replace(told.info, groups=groups), told.load)
        at_once(meter.observe([prefill(1000 * cycle), told], 2, 1.0))
    serving = meter.serving
    assert serving is not None
    assert serving.kv_bytes(32) == LAYOUT.block_bytes * (2 + 2 + 3)
    assert serving.kv_bytes(6400) == LAYOUT.block_bytes * (400 + 4 + 3)


def test_a_speed_tells_of_prompts_that_are_not_much_longer_than_the_measured_ones() -> None:
    meter = ServingMeter(FAR)
    assert meter.reach_tokens == 0.0
    for num_tokens in (100, 300):
        meter.note_prompt(num_tokens, is_far=False)
    assert meter.reach_tokens == REACH * 200
