"""Which members of the pool a plan weighs against each other.

Tests: tests/unit/kvmanager/test_pool_planner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import TypeVar

from kvmesh.core.pool import PoolMember

KeyT = TypeVar("KeyT", str, tuple[str, ...])


def namespace_of(member: PoolMember) -> str:
    """Workers of one namespace have the same blocks."""
    return member.namespace


def scenario_of(member: PoolMember) -> str:
    """No worker reads blocks of another scenario's workers."""
    return member.report.scenario


def work_of(member: PoolMember) -> tuple[str, ...]:
    """Cluster and role: copies on workers of different roles save different parts of a request."""
    return member.cluster, member.report.role.value


def alike(members: Iterable[PoolMember]) -> list[list[PoolMember]]:
    """Returns the members by work and scenario: a copy on one can replace a copy on another."""
    same = grouped(members, lambda member: (*work_of(member), scenario_of(member)))
    return [each for _, each in same]


def grouped(
    members: Iterable[PoolMember], key: Callable[[PoolMember], KeyT]
) -> list[tuple[KeyT, list[PoolMember]]]:
    """Returns the members of each key; keys in order, and members by name."""
    ordered = sorted(members, key=lambda member: (key(member), member.worker_id))
    return [(name, list(group)) for name, group in groupby(ordered, key)]
