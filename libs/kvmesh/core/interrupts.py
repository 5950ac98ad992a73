"""Handles Ctrl-C and SIGTERM while a program still loads its modules.

An interrupted import ends with a useless traceback of up to forty lines. With these functions a
program that is interrupted before its work begins just ends, like a C program. A service that gets
SIGTERM before it serves anybody has nothing to drain, so it ends with 0. This includes the first
process of a container, which the kernel spares signals that it does not handle.
Tests: tests/integration/test_interrupts.py, tests/e2e/test_drained_starts.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator


def end_when_interrupted() -> None:
    """Lets Ctrl-C (130 to a shell) and SIGTERM (0) end the process silently until handled.

    For services, whose event loop handles both once it runs. If interrupts are ignored, as in
    background jobs of a shell, they stay ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # No exception, which an import might swallow; there is nothing to clean up yet.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def leave_when_terminated() -> None:
    """Lets SIGTERM end the process with 0, after its `finally` blocks, until it is handled."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


@contextlib.contextmanager
def ended_when_interrupted() -> Iterator[None]:
    """Lets Ctrl-C end the process silently inside the context; after it, `KeyboardInterrupt` again.

    Does nothing outside the main thread, because other threads cannot change signal handlers.
    """
    before = signal.getsignal(signal.SIGINT)
    if (
        before is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
