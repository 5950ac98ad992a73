"""The life of groups on Kubernetes: scheduler, launcher and API server, workers that only register.

With KUBEBUILDER_ASSETS the API server is a real one, as in test_kubernetes.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvmesh.core.launch import Launcher
from kvmesh.core.types import Role, RoutePlan, WorkerId, WorkerLoad
from kvmesh.metadata.memory_store import MemoryFleetStore
from kvmesh.policy.group_life import GroupWish
from kvmesh.rpc.convert_group import state_word
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Membership
from services.scheduler.groups import Groups
from tests.kubernetes.api_server import ASSETS
from tests.kubernetes.stage import Object, Stage, cluster, launcher
from tests.unit.policy.fleet_examples import query, worker_info
from tests.unit.scheduler.parts import Parts
from tests.waiting import until

IDLE, BUSY = WorkerLoad(blocks_free=512), WorkerLoad(blocks_free=512, decode_running=1)


class Mesh(Parts):
    """A scheduler, at which every pod that is ready registers."""

    def __init__(self, stage: Stage, remote: Launcher) -> None:
        super().__init__()
        feed, store = FleetFeed(self.fleet), MemoryFleetStore(self.clock)
        parts = self.fleet, feed, remote, store, self.decisions, self.clock
        self.groups = Groups(*parts, owner="one")
        self.members: dict[str, Membership] = {}
        self._stage = stage

    async def look(self) -> None:
        """The scheduler looks at its groups, and pods come and go."""
        self.clock.advance(0.5)
        await self.groups.look()
        pods = {each["metadata"]["name"]: each for each in await self._stage.controllers.pods()}
        for name in self.members.keys() - pods.keys():
            self.fleet.leave(self.members.pop(name))
        for name, pod in pods.items():
            if name not in self.members and pod["status"].get("conditions"):
                self._register(name, pod)

    def _register(self, name: str, pod: Object) -> None:
        (container,) = pod["spec"]["containers"]
        variables = {each["name"]: each.get("value", "") for each in container["env"]}
        role, scenario = Role(container["name"]), variables["KVMESH_WORKER__SCENARIO"]
        member = self.fleet.register(worker_info(name, role, scenario=scenario), self.clock.now())
        assert isinstance(member, Membership)
        self.members[name] = member
        self.report(name, IDLE)

    def report(self, name: str, load: WorkerLoad) -> None:
        assert self.fleet.report(self.members[name], load, self.clock.now())

    async def ready(self, fact: Callable[[list[str]], bool], *, state: str = "ready") -> list[str]:
        """Looks until a fact about the general group's workers is true; returns their names."""
        found: list[str] = []

        async def is_so() -> bool:
            await self.look()
            (view,) = [each for each in await self.groups.views() if not each.wish.scenario]
            found[:] = sorted(each.worker_id for each in view.workers)
            return state_word(view.state) == state and fact(found)

        await until(is_so, f"the group is {state}")
        return found

    async def decoders(self) -> set[str]:
        plan = await self.router.route(query(2000), "")
        assert isinstance(plan, RoutePlan)
        return {each.worker_id for each in plan.decode}


@pytest.fixture(params=["twin", *(["real"] if ASSETS else [])])
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    async with cluster(request.param, tmp_path) as found:
        yield found


@asynccontextmanager
async def mesh_of(stage: Stage, folder: Path) -> AsyncIterator[Mesh]:
    async with launcher(stage, folder) as remote:
        yield Mesh(stage, remote)


def of(names: list[str], deployment: str) -> list[str]:
    return [name for name in names if name.startswith(f"kvmesh-{deployment}-5d9c-")]


async def test_a_group_grows_shrinks_by_the_worker_that_was_closed_and_is_upgraded(
    stage: Stage, tmp_path: Path
) -> None:
    async with mesh_of(stage, tmp_path) as mesh:
        await mesh.groups.apply(GroupWish("", prefill=1, decode=3))
        names = await mesh.ready(lambda names: len(names) == 4)
        assert (len(of(names, "prefill")), len(of(names, "decode"))) == (1, 3)
        for deployment in ("prefill-next", "decode-next"):
            assert of(names, deployment) == [], "nobody has asked for that checkpoint"

        for name in of(names, "decode"):
            mesh.report(name, BUSY)
        await mesh.groups.apply(GroupWish("", prefill=1, decode=2))
        await mesh.ready(lambda names: len(names) == 4, state="changing")
        (closed,) = mesh.fleet.closed
        mesh.report(closed, IDLE)
        stayed = await mesh.ready(lambda names: len(names) == 3)
        assert set(names) - set(stayed) == {closed}, "the others serve on, busy as they are"

        for name in of(stayed, "decode"):
            mesh.report(name, IDLE)
        await mesh.groups.apply(GroupWish("", "/models/three", prefill=1, decode=2))
        upgraded = await mesh.ready(lambda names: not set(names) & set(stayed))
        assert (len(of(upgraded, "prefill-next")), len(of(upgraded, "decode-next"))) == (1, 2)
        assert await mesh.decoders() <= set(of(upgraded, "decode-next"))
        for deployment in ("kvmesh-prefill", "kvmesh-decode"):
            assert await stage.controllers.names(deployment) == []


async def test_a_signal_gives_a_group_a_pod_more_and_one_less(stage: Stage, tmp_path: Path) -> None:
    async with mesh_of(stage, tmp_path) as mesh:
        await mesh.groups.apply(GroupWish("", prefill=1, decode=1))
        before = [WorkerId(name) for name in await mesh.ready(lambda names: len(names) == 2)]
        assert await mesh.groups.scale(before, Role.DECODE, 1, sizes=range(1, 3)) == ""
        after = await mesh.ready(lambda names: len(names) == 3)
        assert len(of(after, "decode")) == 2
        assert await stage.controllers.replicas("kvmesh-decode") == 2
        assert await mesh.groups.scale(before, Role.DECODE, -1, sizes=range(1, 3)) == ""
        assert len(of(await mesh.ready(lambda names: len(names) == 2), "decode")) == 1
        assert await stage.controllers.replicas("kvmesh-decode") == 1
