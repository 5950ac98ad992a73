"""The P/D group of a worker: the workers that it may share work with.

Source: P/D-Serve 3.2. Tests: tests/unit/policy/test_groups.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from kvmesh.core.types import WorkerInfo


@dataclass(frozen=True, order=True, slots=True)
class GroupKey:
    """What the workers of a group have in common.

    Attributes:
        fingerprint: of the checkpoint; KV is never exchanged between two.
        scenario: that the group serves; empty: any that has no group of its own.
        cluster: where it is; empty for what is kept of all groups of a scenario, between which
            every route chooses anew.
    """

    model: str
    fingerprint: str
    scenario: str
    cluster: str

    @classmethod
    def of(cls, info: WorkerInfo) -> GroupKey:
        """The group of a worker."""
        return cls(info.model, info.layout.model_fingerprint, info.scenario, info.cluster)

    @property
    def name(self) -> str:
        """For people; unique among the groups of one checkpoint."""
        return f"{self.scenario or 'any'}@{self.cluster}"


def serving_label(scenario: str, labels: Collection[str]) -> str:
    """Which groups serve a scenario: its own, else those of any scenario.

    Args:
        labels: scenarios of the groups that there are.

    Returns:
        A label; empty: groups without one, and where there are none any worker.
    """
    return scenario if scenario in labels else ""


def shares_of_groups(
    askers: Mapping[str, float], sizes: Mapping[GroupKey, int]
) -> dict[GroupKey, float]:
    """The share of some requests that each group serves.

    As routes do, this sends a scenario's requests to its own groups, else to groups of any
    scenario, else to all. Several groups of one scenario share by their sizes.

    Args:
        askers: requests by scenario; empty shares among all groups by size.
        sizes: workers of each group.

    Returns:
        A share for each group; they add up to 1 where there is a group.
    """
    shares = dict.fromkeys(sizes, 0.0)
    total = sum(askers.values())
    parts = {scenario: count / total for scenario, count in askers.items()} if total else {}
    for scenario, part in parts.items() or [("", 1.0)]:
        serving = _serving(scenario, sizes) if parts else list(sizes)
        size = sum(sizes[key] for key in serving)
        for key in serving:
            shares[key] += part * sizes[key] / size
    return shares


def _serving(scenario: str, groups: Iterable[GroupKey]) -> list[GroupKey]:
    groups = list(groups)
    label = serving_label(scenario, {key.scenario for key in groups})
    return [key for key in groups if key.scenario == label] or groups
