"""Loads a service's modules without looking for garbage.

Most of a start is imports, and they make objects that stay; the collector walks all of them again
and again, which costs a tenth of the start. `run_service` turns it on when the service serves.
Tests: tests/integration/test_app.py.
"""

from __future__ import annotations

import gc


def load_without_collector() -> None:
    """Turns the cyclic garbage collector off until somebody calls `gc.enable`."""
    gc.disable()
