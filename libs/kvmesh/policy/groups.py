"""The P/D group of a worker: the workers that it may share requests with.

Source: P/D-Serve 3.2. Tests: tests/unit/policy/test_groups.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from kvmesh.core.types import WorkerInfo


@dataclass(frozen=True, order=True, slots=True)
class GroupKey:
    """Identity of a P/D group: the properties that its workers share.

    Attributes:
        fingerprint: its checkpoint; two checkpoints never exchange KV.
        scenario: the one that the group serves; empty: any scenario without a group of its own.
        cluster: its cluster. Empty in keys of data that covers all groups of a scenario, because
            every route chooses between these again.
    """

    model: str
    fingerprint: str
    scenario: str
    cluster: str

    @classmethod
    def of(cls, info: WorkerInfo) -> GroupKey:
        """Returns the key of a worker's group."""
        return cls(info.model, info.layout.model_fingerprint, info.scenario, info.cluster)

    @property
    def checkpoint(self) -> str:
        """Beginning of the fingerprint, for people."""
        return self.fingerprint[:8]

    @property
    def name(self) -> str:
        """Display name; unique among the groups of one checkpoint."""
        return f"{self.scenario or 'any'}@{self.cluster}"


def serving_label(scenario: str, labels: Collection[str]) -> str:
    """Returns the scenario label of the groups that serve a scenario: its own, else the general
    one.

    Args:
        labels: scenarios of the existing groups.

    Returns:
        The label. Empty for groups without a scenario; if there are none, any worker serves it.
    """
    return scenario if scenario in labels else ""


def shares_of_groups(
    askers: Mapping[str, float], sizes: Mapping[GroupKey, int]
) -> dict[GroupKey, float]:
    """Returns the fraction of the requests that each group serves.

    As in routing, a scenario's requests go to its own groups, else to general groups, else to all
    groups. Several groups of one scenario share by size.

    Args:
        askers: number of requests by scenario; if empty, all groups share by size.
        sizes: number of workers of each group.

    Returns:
        A fraction for each group; they sum to 1 unless there is no group.
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
