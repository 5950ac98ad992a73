"""Ctrl-C while a program still loads its modules.

An import that is interrupted ends with a traceback of up to forty lines that tells nobody anything.
Until it has begun its work a program that is interrupted just ends, as one in C would.
Tests: tests/integration/test_interrupts.py.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


def end_when_interrupted() -> None:
    """Ctrl-C ends the process without a word (130 to a shell) until somebody handles it.

    For programs whose event loop handles it once it runs. Where interrupts are ignored, as in what
    a shell started in the background, they stay ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def ended_when_interrupted() -> Iterator[None]:
    """The same while modules load; afterwards Ctrl-C is `KeyboardInterrupt` again.

    Does nothing in other threads than the main one, which cannot change it.
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
