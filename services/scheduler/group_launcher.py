"""The launcher of groups: it assigns an empty spare where there is one, else starts a process.

An assigned spare counts as started with what it was assigned. When its group gives it up, it leaves
the fleet and its process ends; its launcher starts it again, as an empty spare.
Tests: tests/unit/scheduler/test_group_launcher.py, tests/e2e/test_group_life.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kvmesh.core.empty_spare import Assignment
from kvmesh.core.launch import Launched, Launcher, LaunchSpec
from kvmesh.core.types import WorkerId, WorkerInfo
from services.scheduler.empty_spares import EmptySpares
from services.scheduler.fleet import Fleet

Drain = Callable[[WorkerId, str], bool]
"""Orders a worker to leave, with a reason. False if it is not connected."""


class GroupLauncher:
    """A `Launcher` that uses another one's empty spares first."""

    def __init__(
        self, launcher: Launcher, fleet: Fleet, empties: EmptySpares, drain: Drain
    ) -> None:
        self._launcher = launcher
        self._fleet = fleet
        self._empties = empties
        self._drain = drain

    async def start(self, spec: LaunchSpec) -> WorkerId:
        """See `Launcher.start`."""
        kept = await self.list()
        example = self._example(spec, kept)
        names = {each.worker_id for each in kept}
        for spare in self._empties.all():
            fits = example is not None and spare.can_be_like(example)
            if example is None or not fits or spare.worker_id not in names:
                continue
            assignment = dataclasses.replace(
                Assignment.like(example, "its group is to have one more worker"),
                role=spec.role,
                scenario=spec.scenario,
                group_checkpoint=spec.checkpoint,
            )
            if self._empties.assign(spare.worker_id, assignment):
                return spare.worker_id
        return await self._launcher.start(spec)

    async def stop(self, worker_id: WorkerId) -> None:
        """See `Launcher.stop`; the process of an assigned spare is kept, and empty again."""
        if worker_id in self._assigned():
            self._drain(worker_id, "its group gives it up")
        else:
            await self._launcher.stop(worker_id)

    async def restart(self, worker_id: WorkerId) -> WorkerId:
        """See `Launcher.restart`."""
        return await self._launcher.restart(worker_id)

    async def list(self) -> list[Launched]:
        """See `Launcher.list`."""
        assigned = self._assigned()
        return [
            dataclasses.replace(each, spec=assigned.get(each.worker_id, each.spec))
            for each in await self._launcher.list()
        ]

    def _assigned(self) -> dict[WorkerId, LaunchSpec]:
        """Assignments of groups to spares, which may still load the model or already serve."""
        told = {each.worker_id: each.assignment for each in self._empties.all()}
        told |= {info.worker_id: info.origin.assignment for info, _ in self._fleet.reports()}
        return {
            # Groups are of the launcher's first model.
            name: LaunchSpec(each.role, each.scenario, each.group_checkpoint)
            for name, each in told.items()
            if each is not None and each.group_checkpoint is not None
        }

    def _example(self, spec: LaunchSpec, kept: Sequence[Launched]) -> WorkerInfo | None:
        """A worker with the same model and checkpoint, whose layout the new one must have."""
        infos = {info.worker_id: info for info, _ in self._fleet.reports()}
        wanted = (spec.checkpoint, spec.model)
        return next(
            (
                infos[each.worker_id]
                for each in kept
                if each.worker_id in infos and (each.spec.checkpoint, each.spec.model) == wanted
            ),
            None,
        )
