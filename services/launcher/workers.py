"""The launcher of Kubernetes: a worker is a pod, and one more or less is the size of a Deployment.

A Deployment, not a StatefulSet: the scheduler says which worker is to end, and of a StatefulSet
always the pod with the highest number ends. Tests: tests/integration/test_kubernetes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence, Set

from kvmesh.core.clock import Clock
from kvmesh.core.launch import Launched, LaunchError, LaunchSpec
from kvmesh.core.types import WorkerId
from kvmesh.telemetry.logs import event_logger
from services.launcher.cluster import Cluster, ConflictError, Scale
from services.launcher.deployments import deployment_of
from services.launcher.pods import GOES_FIRST, Pod, in_the_way

log = event_logger(__name__)

START_S = 4.0
"""Seconds until Kubernetes has made the pod of a new worker; callers wait five."""
MOVE_S = 25.0
"""Seconds to wait while another pod would end instead of the one that is to end."""
LEAVE_S = 10.0
"""Seconds until Kubernetes has begun to end a pod."""
GONE_S = 80.0
"""Seconds until a pod has ended; it drains first. Callers wait two minutes for all."""
KILL_GRACE_S = 1
"""The shortest time that the node still confirms the end; 0 would only forget the pod."""
POLL_S = 0.1


class KubernetesWorkers:
    """A `Launcher` whose workers are the pods of some Deployments.

    Sizes are changed one at a time, and only while a Deployment has the pods that it is to have:
    so it is known which pod is new, and which one ends.

    Args:
        deployments: what the workers of each Deployment are started as.
        model: name under which they serve their model.
    """

    def __init__(
        self, cluster: Cluster, deployments: Mapping[str, LaunchSpec], model: str, clock: Clock
    ) -> None:
        self._cluster = cluster
        self._deployments = deployments
        self._model = model
        self._clock = clock
        self._changing = asyncio.Lock()
        self._replacing = asyncio.Lock()

    async def start(self, spec: LaunchSpec) -> WorkerId:
        """See `Launcher.start`."""
        if spec.model not in ("", self._model):
            raise LaunchError(f"workers here serve {self._model!r}, not {spec.model!r}")
        wanted = LaunchSpec(spec.role, spec.scenario, spec.checkpoint)
        deployment = deployment_of(wanted, self._deployments)
        async with self._changing:
            until = self._clock.now() + START_S
            known = await self._grow(deployment, until)
            name = await self._new_pod(deployment, known, until)
            if not name:
                await self._shrink(deployment)
                raise LaunchError(_no_pod(deployment))
        log.info("worker_started", worker_id=name, deployment=deployment)
        return name

    async def stop(self, worker_id: WorkerId) -> None:
        """See `Launcher.stop`."""
        until = self._clock.now() + MOVE_S
        while reason := await self._take_away(worker_id):
            if self._clock.now() >= until:
                raise LaunchError(f"{worker_id} stays: {reason}; ask again when that is over")
            await asyncio.sleep(POLL_S)
        log.info("worker_stopped", worker_id=worker_id)
        until = self._clock.now() + GONE_S
        while any(each.name == worker_id for each in await self._cluster.pods()):
            if self._clock.now() >= until:
                raise LaunchError(f"{worker_id} has not ended within {GONE_S:g} s")
            await asyncio.sleep(POLL_S)

    async def restart(self, worker_id: WorkerId) -> WorkerId:
        """See `Launcher.restart`."""
        async with self._changing, self._replacing:
            pod = await self._find(worker_id)
            known = {each.name for each in await self._active(pod.deployment)}
            await self._cluster.delete_pod(worker_id, KILL_GRACE_S)
            name = await self._new_pod(pod.deployment, known, self._clock.now() + START_S)
        log.warning("worker_killed", worker_id=worker_id, next_life=name)
        if not name:
            raise LaunchError(f"{worker_id} was killed; {_no_pod(pod.deployment)}")
        return name

    async def list(self) -> list[Launched]:
        """See `Launcher.list`."""
        # While a pod is being replaced, the count would be one too low.
        async with self._replacing:
            pods = await self._cluster.pods()
        return [
            Launched(WorkerId(each.name), self._deployments[each.deployment])
            for each in pods
            if each.is_active and each.deployment in self._deployments
        ]

    # --- sizes ---------------------------------------------------------------------------------

    async def _grow(self, deployment: str, until: float) -> set[str]:
        """Makes a Deployment larger by one; returns the names of its pods before."""
        while True:
            scale = await self._cluster.scale(deployment)
            known = {each.name for each in await self._active(deployment)}
            if len(known) == scale.replicas:
                with contextlib.suppress(ConflictError):  # look again
                    await self._resize(deployment, scale, 1)
                    return known
            if self._clock.now() >= until:
                raise LaunchError(
                    f"{deployment} has {len(known)} pods and is to have {scale.replicas}:"
                    " `kubectl describe replicaset` says why"
                )
            await asyncio.sleep(POLL_S)

    async def _new_pod(self, deployment: str, known: Set[str], until: float) -> WorkerId:
        """Waits for a pod that was not known; returns an empty name if none comes."""
        while self._clock.now() < until:
            for each in await self._active(deployment):
                if each.name not in known:
                    return WorkerId(each.name)
            await asyncio.sleep(POLL_S)
        return WorkerId("")

    async def _shrink(self, deployment: str) -> None:
        """Takes a size back for which no pod came."""
        while True:
            with contextlib.suppress(ConflictError):
                await self._resize(deployment, await self._cluster.scale(deployment), -1)
                return

    async def _resize(self, deployment: str, scale: Scale, by: int) -> None:
        changed = Scale(max(scale.replicas + by, 0), scale.version)
        await self._cluster.set_scale(deployment, changed)

    async def _take_away(self, worker_id: WorkerId) -> str:
        """Makes a worker's Deployment smaller by it; returns why not, or nothing."""
        async with self._changing:
            pod = await self._find(worker_id)
            scale = await self._cluster.scale(pod.deployment)
            active = await self._active(pod.deployment)
            if reason := in_the_way(pod, active, scale.replicas):
                return reason
            for each in active:  # marks of attempts that failed
                if each.deletion_cost <= GOES_FIRST and each.name != pod.name:
                    await self._cluster.set_deletion_cost(each.name, None)
            await self._cluster.set_deletion_cost(worker_id, GOES_FIRST)
            try:
                await self._resize(pod.deployment, scale, -1)
            except LaunchError as error:
                await self._cluster.set_deletion_cost(worker_id, None)
                if isinstance(error, ConflictError):
                    return "its Deployment is being changed"
                raise
            await self._until_it_leaves(pod)
            return ""

    async def _until_it_leaves(self, pod: Pod) -> None:
        """Waits until Kubernetes ends the pod; nothing else changes sizes meanwhile."""
        until = self._clock.now() + LEAVE_S
        while any(each.name == pod.name for each in await self._active(pod.deployment)):
            if self._clock.now() >= until:
                raise LaunchError(
                    f"{pod.deployment} is one smaller, but Kubernetes has not ended {pod.name}"
                    f" within {LEAVE_S:g} s; is its controller manager there, and 1.22 or newer?"
                )
            await asyncio.sleep(POLL_S)

    async def _active(self, deployment: str) -> Sequence[Pod]:
        pods = await self._cluster.pods()
        return [each for each in pods if each.is_active and each.deployment == deployment]

    async def _find(self, worker_id: WorkerId) -> Pod:
        pods = [each for each in await self._cluster.pods() if each.is_active]
        for each in pods:
            if each.name == worker_id and each.deployment in self._deployments:
                return each
        known = [each.name for each in pods]
        raise LaunchError(f"{worker_id} is no worker of this cluster; these are: {known}")


def _no_pod(deployment: str) -> str:
    return f"{deployment} got no pod within {START_S:g} s; `kubectl describe replicaset` says why"
