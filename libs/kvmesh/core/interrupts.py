"""Handles Ctrl-C while a program still loads its modules.

An interrupted import ends with a useless traceback of up to forty lines. With these functions a
program that is interrupted before its work begins just ends, like a C program.
Tests: tests/integration/test_interrupts.py.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


def end_when_interrupted() -> None:
    """Lets Ctrl-C end the process silently (130 to a shell) until a handler is installed.

    For programs whose event loop handles Ctrl-C once it runs. If interrupts are ignored, as in
    background jobs of a shell, they stay ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


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
