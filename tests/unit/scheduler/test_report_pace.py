from __future__ import annotations

import pytest

from kvmesh.policy.seats import SILENT_AFTER_S
from services.scheduler.config import FleetConfig
from services.scheduler.report_pace import ALIVE_INTERVAL_S, WORKERS_AT_FULL_PACE, ReportPace


@pytest.mark.parametrize(
    ("num_workers", "factor"),
    [(0, 1), (1, 1), (WORKERS_AT_FULL_PACE, 1), (WORKERS_AT_FULL_PACE + 1, 2), (10_000, 5)],
)
def test_larger_fleets_report_less_often(num_workers: int, factor: int) -> None:
    config = FleetConfig()
    pace = ReportPace(config)
    assert pace.adapt(num_workers, 0.0) is (factor > 1)
    told = pace.accepted()
    assert told.report_interval_ms == factor * config.report_interval_s * 1000
    assert told.alive_interval_ms == factor * ALIVE_INTERVAL_S * 1000
    patience_s = pace.patience_s(0.0)
    assert told.alive_interval_ms / 1000 < SILENT_AFTER_S + patience_s, "it is silent before that"
    assert told.lease_ms / 1000 == config.lease_s + patience_s


def test_a_shrinking_fleet_is_trusted_until_all_know_the_shorter_interval() -> None:
    pace = ReportPace(FleetConfig())
    pace.adapt(10_000, 0.0)
    slow_s = pace.patience_s(0.0)
    assert not pace.adapt(8_000, 1.0), "a few workers less change nothing"
    assert pace.adapt(500, 1.0)
    assert pace.accepted().alive_interval_ms == ALIVE_INTERVAL_S * 1000
    assert pace.patience_s(1.0 + 5 * ALIVE_INTERVAL_S) == slow_s
    assert pace.patience_s(1.0 + 10 * ALIVE_INTERVAL_S) == 0.0


def test_a_fleet_that_grows_while_it_shrank_keeps_the_longer_patience() -> None:
    pace = ReportPace(FleetConfig())
    pace.adapt(10_000, 0.0)
    pace.adapt(500, 1.0)
    assert pace.adapt(4_000, 2.0)
    assert pace.patience_s(2.0) == 4 * ALIVE_INTERVAL_S
    assert pace.patience_s(20.0) == ALIVE_INTERVAL_S
