"""Interface of a launcher, which starts and ends workers: `kvmesh up` or an orchestrator.

The mesh grows, shrinks and replaces hanging workers only through it. Tests:
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
    """Specification of a worker to start.

    Attributes:
        scenario: scenario of the group that it joins; empty: the general group.
        checkpoint: folder or name of its model, as its machine sees it; empty: the launcher's
            default.
        model: name under which it is served; empty: the launcher's first model.
    """

    role: Role
    scenario: str = ""
    checkpoint: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker that a launcher keeps running."""

    worker_id: WorkerId
    spec: LaunchSpec


class Launcher(Protocol):
    """Starts and ends workers. It restarts a worker that ends until it is told to stop it."""

    async def start(self, spec: LaunchSpec) -> WorkerId:
        """Starts a worker and returns its name, before the worker has loaded its model.

        Raises:
            LaunchError: the launcher cannot start it.
        """
        ...

    async def stop(self, worker_id: WorkerId) -> None:
        """Lets a worker finish its requests, ends it, and does not restart it.

        Raises:
            LaunchError: the launcher keeps no such worker.
        """
        ...

    async def restart(self, worker_id: WorkerId) -> WorkerId:
        """Kills a hanging worker at once; it is started again as after any end.

        Returns the name of its next life, which is another one where names are not used again.

        Raises:
            LaunchError: the launcher keeps no such worker.
        """
        ...

    async def list(self) -> list[Launched]:
        """Returns the workers that it keeps, both running ones and those about to restart.

        Raises:
            LaunchError: the launcher does not answer.
        """
        ...
