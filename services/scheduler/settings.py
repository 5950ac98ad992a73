"""Checks the configuration's choices. Tests: tests/unit/scheduler/test_settings.py."""

from __future__ import annotations

import dataclasses

from kvmesh.core.errors import ConfigError
from kvmesh.core.types import Placement
from kvmesh.policy.composition import COMPOSITIONS, Composition
from services.scheduler.config import PlanningConfig, RoutingConfig, SchedulerConfig
from services.scheduler.role_orders import RoleChanges
from services.scheduler.router import RouterSettings

MOST_WINDOW_MS = 200.0
"""Maximum window in milliseconds. Gateways wait half a second for a plan by default."""


def router_settings(config: SchedulerConfig) -> RouterSettings:
    """Makes the router's settings.

    Raises:
        ConfigError: a word or number makes no sense.
    """
    routing = config.routing
    placements = {placement.value: placement for placement in Placement}
    if routing.placement not in placements:
        raise ConfigError(
            f"routing.placement {routing.placement!r}: choose one of {', '.join(placements)}"
        )
    return RouterSettings(
        _policy(routing), placements[routing.placement], config.kvmanager.timeout_s
    )


def role_changes(planning: PlanningConfig) -> RoleChanges:
    """The handling of role changes.

    Raises:
        ConfigError: a word makes no sense.
    """
    return _changes("planning.roles", planning.roles)


def substitute_changes(planning: PlanningConfig) -> RoleChanges:
    """The handling of substitutions.

    Raises:
        ConfigError: a word makes no sense.
    """
    return _changes("planning.substitutes", planning.substitutes)


def _changes(option: str, word: str) -> RoleChanges:
    words = {change.value: change for change in RoleChanges}
    if word not in words:
        raise ConfigError(f"{option} {word!r}: choose one of {', '.join(words)}")
    return words[word]


def _policy(routing: RoutingConfig) -> Composition:
    if routing.policy not in COMPOSITIONS:
        known = ", ".join(COMPOSITIONS)
        raise ConfigError(f"routing.policy {routing.policy!r}: choose one of {known}")
    if routing.joint_window_ms > MOST_WINDOW_MS:
        raise ConfigError(f"routing.joint_window_ms is a time from 0 to {MOST_WINDOW_MS:.0f} ms")
    policy = dataclasses.replace(
        COMPOSITIONS[routing.policy], joint_window_s=routing.joint_window_ms / 1e3
    )
    if not policy.route.aggregate_tokens:
        return policy  # a baseline that sends no prompts to decode workers
    route = dataclasses.replace(policy.route, aggregate_tokens=routing.aggregate_tokens)
    return dataclasses.replace(policy, route=route)
