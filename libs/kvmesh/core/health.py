"""Levels of faults. `policy/health.py` decides which worker has which level."""

from __future__ import annotations

import enum


class Health(enum.IntEnum):
    """Level of a worker's fault."""

    OK = 0
    SUSPECT = 1
    """The worker is tried last."""
    DEGRADED = 2
    """The worker gets no new requests; running ones may finish there."""
    DEAD = 3
    """The worker's running requests are lost, and continue on other workers at once."""
