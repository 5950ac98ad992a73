"""Findings of `kvmesh doctor`, one line each. Tests: tests/unit/cli/test_doctor.py."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """Severity of a finding."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        remedy: the action to take; empty if none is needed.
    """

    level: Level
    subject: str
    detail: str
    remedy: str = ""

    @classmethod
    def ok(cls, subject: str, detail: str) -> Finding:
        """Returns a finding without a problem."""
        return cls(Level.OK, subject, detail)

    @classmethod
    def warn(cls, subject: str, detail: str, remedy: str) -> Finding:
        """Returns a finding that works, but worse than it could."""
        return cls(Level.WARN, subject, detail, remedy)

    @classmethod
    def fail(cls, subject: str, detail: str, remedy: str) -> Finding:
        """Returns a finding that does not work."""
        return cls(Level.FAIL, subject, detail, remedy)
