"""What `kvmesh doctor` found, one line each. Tests: tests/unit/cli/test_doctor.py."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """How bad it is."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked thing.

    Attributes:
        remedy: what to do; empty if nothing is to be done.
    """

    level: Level
    subject: str
    detail: str
    remedy: str = ""

    @classmethod
    def ok(cls, subject: str, detail: str) -> Finding:
        """As it should be."""
        return cls(Level.OK, subject, detail)

    @classmethod
    def warn(cls, subject: str, detail: str, remedy: str) -> Finding:
        """Works, but worse than it could."""
        return cls(Level.WARN, subject, detail, remedy)

    @classmethod
    def fail(cls, subject: str, detail: str, remedy: str) -> Finding:
        """Does not work."""
        return cls(Level.FAIL, subject, detail, remedy)
