"""Who starts and ends workers: `kvmesh up` on this machine, or an orchestrator.

The one way by which the mesh grows, shrinks and replaces what hangs. Tests:
tests/unit/cli/test_local_workers.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvmesh.core.errors import KvMeshError
from kvmesh.core.types import Role, WorkerId


class LaunchError(KvMeshError):
    """A worker could not be started or ended; the message says why."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What a worker is to be.

    Attributes:
        scenario: whose group it joins; empty: that of any scenario.
        checkpoint: folder or name of its model, as its machine sees it; empty: that of the others.
        model: name under which it is served; empty: the launcher's first.
    """

    role: Role
    scenario: str = ""
    checkpoint: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker that a launcher keeps."""

    worker_id: WorkerId
    spec: LaunchSpec


class Launcher(Protocol):
    """Starts and ends workers. What it started, it keeps alive until it is told to stop it."""

    async def start(self, spec: LaunchSpec) -> WorkerId:
        """Starts a worker and returns its name before it has loaded its model.

        Raises:
            LaunchError: it cannot.
        """
        ...

    async def stop(self, worker_id: WorkerId) -> None:
        """Lets a worker finish what runs, ends it, and keeps it no more.

        Raises:
            LaunchError: it keeps no such worker.
        """
        ...

    async def restart(self, worker_id: WorkerId) -> None:
        """Kills a worker at once: it hangs. Its next life begins as after any end.

        Raises:
            LaunchError: it keeps no such worker.
        """
        ...

    async def list(self) -> list[Launched]:
        """The workers that it keeps, whether they run now or are about to be started again.

        Raises:
            LaunchError: it does not answer.
        """
        ...
