"""Times of loading a worker's model, and of its process before.

Tests: tests/unit/runtime/test_worker_loading.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

from kvmesh.core.empty_spare import Assignment, Origin


@dataclass(frozen=True, slots=True)
class Loading:
    """A model that is being loaded. Times are seconds since 1970.

    Attributes:
        began_at: when its loading began, with the engine's modules imported.
        empty_s: seconds from the start of the process until it waited as an empty spare.
        assignment: its assignment as an empty spare; None: the process started with the model.
    """

    began_at: float
    empty_s: float = 0.0
    assignment: Assignment | None = None

    def origin(self, checkpoint: str, now: float) -> Origin:
        """Returns the origin of the worker that has loaded the model now."""
        load_s = now - self.began_at
        before_s = process_s(self.began_at) if self.assignment is None else self.empty_s
        return Origin(checkpoint, before_s + load_s, load_s, self.assignment)


def process_s(now: float) -> float:
    """Returns the seconds from the start of this process until a time."""
    return now - psutil.Process().create_time()


def begin() -> Loading:
    """Returns the loading that begins now, in a process that was started for its model."""
    return Loading(time.time())
