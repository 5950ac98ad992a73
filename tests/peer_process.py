"""A worker in a process of its own, without a mesh: it holds prefixes, or computes parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvmesh.core.types import Endpoint, PrefixSource, WorkerId
from tests.mesh_child import Child
from tests.mesh_processes import MODEL, MODEL_FOLDER


@dataclass(frozen=True)
class Peer:
    """One worker, its engine a fake."""

    child: Child

    @classmethod
    def make(cls, name: str, folder: Path, **more: object) -> Peer:
        """It is not started.

        Args:
            more: flags of its engine.
        """
        flags: dict[str, object] = {
            "worker.id": name,
            "worker.channels": "tcp",
            "worker.scheduler-targets": "",
            "worker.kvmanager-target": "",
            "engine.kind": "fake",
            "engine.model": MODEL_FOLDER,
            "engine.model-name": MODEL,
        }
        flags |= {f"engine.{flag.replace('_', '-')}": value for flag, value in more.items()}
        return cls(Child(name, "prefill", flags, folder, is_forked=True))

    @property
    def worker_id(self) -> WorkerId:
        """Its name."""
        return WorkerId(self.child.name)

    def source(self, num_blocks: int, *, computes: bool = False) -> PrefixSource:
        """How others name it."""
        host, _, port = self.child.address.rpartition(":")
        ready = self.child.event("worker_ready")
        assert ready is not None
        control = Endpoint(host, int(port))
        return PrefixSource(
            self.worker_id, ready["incarnation"], control, num_blocks, computes=computes
        )
