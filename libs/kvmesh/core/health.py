"""Levels of faults. Who has which: `policy/health.py`."""

from __future__ import annotations

import enum


class Health(enum.IntEnum):
    """Level of a worker's fault."""

    OK = 0
    SUSPECT = 1
    """Tried last."""
    DEGRADED = 2
    """Takes nothing new; what runs there may end."""
    DEAD = 3
    """What runs there is lost, and goes on elsewhere at once."""
