"""What the simulation does when something happens at one of its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvmesh.sim.requests import SimSequence
    from kvmesh.sim.worker import SimWorker


class WorkerListener(Protocol):
    """Callbacks for the events of a worker."""

    def on_chunk(self, worker: SimWorker, sequence: SimSequence) -> None:
        """Called when more of a prompt is computed whose KV another worker waits for."""
        ...

    def on_first_token(self, worker: SimWorker, sequence: SimSequence) -> None:
        """Called at a prompt's first token."""
        ...

    def on_finished(self, worker: SimWorker, sequence: SimSequence) -> None:
        """Called after the last token, when the sequence is released."""
        ...

    def on_change(self, worker: SimWorker) -> None:
        """Called when the worker's load or cache changes."""
        ...

    def on_opening(self) -> None:
        """Called when a worker may accept requests that it refused before."""
        ...
