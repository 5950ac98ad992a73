"""Speeds up a service's start: imports without the garbage collector, and libraries without their
optional dependencies.

Most of a start is imports. They create lasting objects that the collector scans again and again,
which costs a tenth of the start. `run_service` turns the collector on when the service serves.
Tests: tests/integration/test_app.py, tests/unit/runtime/test_loading.py.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def load_without_collector() -> None:
    """Turns the cyclic garbage collector off until `gc.enable` is called."""
    gc.disable()


@contextmanager
def without(*modules: str) -> Iterator[None]:
    """Hides modules from the imports inside the context, which then do without them.

    Modules that are loaded already stay visible.
    """
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: it is not there
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
