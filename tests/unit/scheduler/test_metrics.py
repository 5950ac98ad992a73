"""The scheduler's metrics."""

from __future__ import annotations

from prometheus_client import REGISTRY

from kvmesh.core.types import Role
from kvmesh.policy.groups import GroupKey
from services.scheduler.metrics import show_workers


def test_groups_with_the_same_labels_are_counted_together() -> None:
    """The label of a checkpoint is the beginning of its fingerprint."""
    one = GroupKey("counted", "12345678-one", "", "here")
    other = GroupKey("counted", "12345678-other", "", "here")
    show_workers({(one, Role.PREFILL): 2, (other, Role.PREFILL): 1, (other, Role.DECODE): 1})

    def shown(role: Role) -> float | None:
        labels = {
            "model": "counted",
            "checkpoint": "12345678",
            "scenario": "",
            "cluster": "here",
            "role": role.value,
        }
        return REGISTRY.get_sample_value("kvmesh_scheduler_workers", labels)

    assert shown(Role.PREFILL) == 3
    assert shown(Role.DECODE) == 1
    assert shown(Role.HYBRID) == 0
