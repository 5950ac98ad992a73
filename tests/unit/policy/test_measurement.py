from __future__ import annotations

import pytest

from kvmesh.core.details import FleetWorker
from kvmesh.core.types import Role, WorkerLoad
from kvmesh.policy.measurement import ServingMeter
from tests.unit.policy.fleet_examples import LAYOUT, worker_info

FAR = "west"


def prefill(total: int, cluster: str = "east", incarnation: int = 1) -> FleetWorker:
    load = WorkerLoad(prefill_tokens_total=total, compute_used=0.5)
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
        meter.observe([prefill(1000 * cycle), decode(200 * cycle), *far], 2, 1.0)
    return meter


def test_nothing_is_known_at_first() -> None:
    assert measured(cycles=0).serving is None
    assert ServingMeter(FAR).output_tokens is None


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
    meter.observe([prefill(10, incarnation=2), decode(4200)], 2, 1.0)
    assert before is not None
    assert meter.serving is not None
    assert meter.serving.local_prefill_s(1000) == pytest.approx(before.local_prefill_s(1000))
