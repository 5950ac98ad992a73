"""Loads a service's modules without looking for garbage, and libraries without what they can do
without.

Most of a start is imports, and they make objects that stay; the collector walks all of them again
and again, which costs a tenth of the start. `run_service` turns it on when the service serves.
Tests: tests/integration/test_app.py, tests/unit/runtime/test_loading.py.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def load_without_collector() -> None:
    """Turns the cyclic garbage collector off until somebody calls `gc.enable`."""
    gc.disable()


@contextmanager
def without(*modules: str) -> Iterator[None]:
    """What is imported here does not find these modules, and has to do without them.

    Those that are loaded already stay.
    """
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: it is not there
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
