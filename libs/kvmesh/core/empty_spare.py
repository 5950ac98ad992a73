"""Workers that start without a model, and the origin of a worker's model.

Tests: tests/unit/core/test_empty_spare.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvmesh.core.kv_formats import DTYPE_BYTES

if TYPE_CHECKING:
    from kvmesh.core.types import Role, WorkerId, WorkerInfo


@dataclass(frozen=True, slots=True)
class Assignment:
    """The group and model that an empty spare is assigned to.

    Attributes:
        scenario: scenario whose group it joins.
        model: name under which its model is served.
        checkpoint: folder or name of the model, as its machine sees it.
        dtype: data type of the model.
        block_size: token positions per KV block.
        max_model_len: longest sequence in tokens.
        group_checkpoint: the checkpoint as its group's wish names it, if the group grows; None: it
            replaces a lost worker.
        reason: for logs.
    """

    role: Role
    scenario: str
    model: str
    checkpoint: str
    dtype: str
    block_size: int
    max_model_len: int
    group_checkpoint: str | None = None
    reason: str = ""

    @classmethod
    def like(cls, info: WorkerInfo, reason: str) -> Assignment:
        """Returns the assignment that makes another worker like this one."""
        return cls(
            info.role,
            info.scenario,
            info.model,
            info.origin.checkpoint,
            info.layout.dtype,
            info.layout.block_size,
            info.max_model_len,
            reason=reason,
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a worker's model: the start of its process and of its loading.

    Attributes:
        checkpoint: folder or name of its model, as its machine sees it.
        start_s: seconds from the start of its process until it could serve, without the time that
            an empty spare waited; 0: not reported.
        load_s: seconds of `start_s` for which it loaded its model; 0: not reported.
        assignment: its assignment as an empty spare, which its next life is again. None: its
            process started with the model.
    """

    checkpoint: str = ""
    start_s: float = 0.0
    load_s: float = 0.0
    assignment: Assignment | None = None


@dataclass(frozen=True, slots=True)
class EmptySpare:
    """A worker without a model.

    Attributes:
        engine: kind of its engine.
        assignment: the assignment that it loads; None: it waits for one.
    """

    worker_id: WorkerId
    incarnation: int
    cluster: str
    engine: str
    assignment: Assignment | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it can be assigned."""
        return self.assignment is None

    def can_be_like(self, info: WorkerInfo) -> bool:
        """Whether it could load the model of this worker and join its group.

        An assignment names no adapters, and only a KV data type that a model can have. Only the
        fake engine needs no checkpoint.
        """
        layout = info.layout
        return (
            self.is_waiting
            and (self.cluster, self.engine) == (info.cluster, layout.engine)
            and layout.dtype in DTYPE_BYTES
            and not info.adapters
            and (bool(info.origin.checkpoint) or layout.engine == "fake")
        )
