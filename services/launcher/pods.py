"""Pods of a Deployment, and the order in which Kubernetes ends them when it becomes smaller.

Source: `ActivePodsWithRanks` of Kubernetes' ReplicaSet controller, which compares node, phase and
readiness before it looks at `controller.kubernetes.io/pod-deletion-cost` (since 1.22).
Tests: tests/unit/launcher/test_pods.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GOES_FIRST = -(2**31)
"""Lowest deletion cost that Kubernetes accepts."""

_PHASES = {"Pending": 0, "Unknown": 1, "Running": 2}


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of one of the Deployments.

    Attributes:
        deployment: name of its Deployment.
        revision: hash of the pod template that it was made from.
        is_active: whether it counts as one of the replicas: it is not being deleted and has not
            ended.
        is_assigned: whether it has a node.
        deletion_cost: of two pods that are alike otherwise, the one with the lower cost ends first.
    """

    name: str
    deployment: str
    revision: str = ""
    is_active: bool = True
    is_assigned: bool = True
    phase: str = "Running"
    is_ready: bool = True
    deletion_cost: int = 0

    @property
    def standing(self) -> tuple[bool, int, bool]:
        """Kubernetes compares this before the deletion cost; the lower pod ends first."""
        return self.is_assigned, _PHASES.get(self.phase, 0), self.is_ready


def in_the_way(pod: Pod, active: Iterable[Pod], replicas: int) -> str:
    """Returns why another pod could end if the Deployment became smaller by one now; else empty.

    Args:
        pod: the pod that is to end. It will have the lowest deletion cost.
        active: the active pods of its Deployment.
        replicas: number of pods that the Deployment is to have.
    """
    active = list(active)
    if replicas != len(active):
        return f"{pod.deployment} has {len(active)} pods and is to have {replicas}"
    if len({each.revision for each in active}) > 1:
        return f"{pod.deployment} is being rolled out"
    before = [each.name for each in active if each.standing < pod.standing]
    return f"{', '.join(before)} would end first, not being ready" if before else ""
