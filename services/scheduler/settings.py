"""Checks the configuration's choices. Tests: tests/unit/scheduler/test_settings.py."""

from __future__ import annotations

import dataclasses

from kvmesh.core.errors import ConfigError
from kvmesh.core.types import Placement
from kvmesh.policy.composition import COMPOSITIONS, Composition
from services.scheduler.config import PlanningConfig, RoutingConfig, SchedulerConfig
from services.scheduler.role_orders import RoleChanges
from services.scheduler.router import RouterSettings
from services.scheduler.scale_orders import SCALE_BY

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


def scale_changes(config: SchedulerConfig) -> RoleChanges:
    """The handling of scale signals.

    Raises:
        ConfigError: a word or number makes no sense, or nobody could carry the signals out.
    """
    planning = config.planning
    changes = _changes("planning.scale", planning.scale)
    if planning.scale_by not in SCALE_BY:
        choices = ", ".join(SCALE_BY)
        raise ConfigError(f"planning.scale_by {planning.scale_by!r}: choose one of {choices}")
    if planning.scale_min > planning.scale_max:
        raise ConfigError("planning.scale_min is above planning.scale_max")
    if changes is RoleChanges.APPLY and not config.launcher.target:
        text = "planning.scale=apply needs who starts workers: `kvmesh up` does, or launcher.target"
        raise ConfigError(text)
    if changes is RoleChanges.APPLY and role_changes(planning) is RoleChanges.OFF:
        raise ConfigError(
            "planning.scale=apply needs planning.roles=apply or recommend: both follow one load"
        )
    return changes


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
