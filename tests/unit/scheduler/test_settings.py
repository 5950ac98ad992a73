from __future__ import annotations

import pytest

from kvmesh.core.errors import ConfigError
from services.scheduler.config import PlanningConfig, RoutingConfig, SchedulerConfig
from services.scheduler.role_orders import RoleChanges
from services.scheduler.settings import role_changes, router_settings


def policy_of(**changes: object) -> object:
    routing = RoutingConfig(**changes)  # type: ignore[arg-type]
    return router_settings(SchedulerConfig(routing=routing)).policy.route


def test_tokens_for_aggregation_are_the_config_s_where_the_policy_has_the_rule() -> None:
    assert policy_of(aggregate_tokens=99).aggregate_tokens == 99  # type: ignore[attr-defined]
    kept = policy_of(policy="cache_load", aggregate_tokens=99)
    assert kept.aggregate_tokens == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "routing",
    [
        RoutingConfig(policy="best"),
        RoutingConfig(placement="here"),
        RoutingConfig(joint_window_ms=1000.0),
    ],
)
def test_wrong_routing_is_named(routing: RoutingConfig) -> None:
    with pytest.raises(ConfigError, match=r"routing\."):
        router_settings(SchedulerConfig(routing=routing))


def test_role_changes() -> None:
    assert role_changes(PlanningConfig(roles="recommend")) is RoleChanges.RECOMMEND
    with pytest.raises(ConfigError, match=r"planning\."):
        role_changes(PlanningConfig(roles="maybe"))


def test_the_window_is_the_config_s() -> None:
    config = SchedulerConfig(routing=RoutingConfig(policy="joint", joint_window_ms=5.0))
    assert router_settings(config).policy.joint_window_s == pytest.approx(0.005)
