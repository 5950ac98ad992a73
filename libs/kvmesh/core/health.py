"""Levels of faults. `policy/health.py` decides which worker has which level."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Health(enum.IntEnum):
    """Level of a worker's fault."""

    OK = 0
    SUSPECT = 1
    """The worker is tried last."""
    DEGRADED = 2
    """The worker gets no new requests; running ones may finish there."""
    DEAD = 3
    """The worker's running requests are lost, and continue on other workers at once."""


@dataclass(frozen=True, slots=True)
class DeviceErrors:
    """Errors that a worker's device reports of itself. The default is a device without errors.

    Attributes:
        errors_total: uncorrectable memory errors and critical XIDs since the worker's start.
        last_xid: the latest of these XIDs; 0: none.
        failing: the device has no row left to replace a faulty one, so further errors are expected.
        lost: the device does not answer, or must be reset.
    """

    errors_total: int = 0
    last_xid: int = 0
    failing: bool = False
    lost: bool = False


NO_DEVICE_ERRORS = DeviceErrors()
