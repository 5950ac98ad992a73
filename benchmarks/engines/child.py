"""The side of a process that computes for `benchmarks.engine` when asked for."""

from __future__ import annotations

import abc
import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class SteppingEngine(Protocol):
    """An engine that is told every step."""

    def prefill(self, tokens: int) -> float:
        """Seconds from one prompt of so many tokens to its first token."""
        ...

    def decode(self, batch: int, tokens: int, steps: int) -> float:
        """Gives each of a batch so many positions of its own, for `steps` steps at most.

        Returns the seconds of the first of them.
        """
        ...

    def step(self) -> float:
        """Seconds in which each sequence gets one token."""
        ...

    def drain(self) -> float:
        """Ends what is still to be done; the seconds of it."""
        ...


class BatchingEngine(abc.ABC):
    """A `SteppingEngine` to which prompts are added, and which steps all of them."""

    @abc.abstractmethod
    def _add(self, tokens: int, new: int) -> None:
        """A prompt of so many positions of its own, and how many tokens it gets."""

    @abc.abstractmethod
    def _compute(self) -> None:
        """One step."""

    @abc.abstractmethod
    def _is_busy(self) -> bool:
        """Whether a prompt has not got all of its tokens."""

    def prefill(self, tokens: int) -> float:
        """See `SteppingEngine.prefill`."""
        self.drain()
        self._add(tokens, 1)
        return self.drain()

    def decode(self, batch: int, tokens: int, steps: int) -> float:
        """See `SteppingEngine.decode`."""
        self.drain()
        for _ in range(batch):
            self._add(tokens, 1 + steps)
        return self.step()

    def step(self) -> float:
        """See `SteppingEngine.step`."""
        started = time.perf_counter()
        self._compute()
        return time.perf_counter() - started

    def drain(self) -> float:
        """See `SteppingEngine.drain`."""
        seconds = 0.0
        while self._is_busy():
            seconds += self.step()
        return seconds


def serve(make: Callable[[Path, str, int], SteppingEngine], doc: str | None) -> None:
    """Says in how many seconds the engine was there, then answers each line of standard input with
    one: what to do, and the seconds that it took.

    `prefill N`, `decode B N S` and `step` are the methods of `SteppingEngine`.

    Args:
        make: given the checkpoint's folder, a dtype and a number of threads.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    # Engines print as well.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    begun = time.perf_counter()
    engine = make(options.folder, options.dtype, options.threads)
    answers.write(f"{time.perf_counter() - begun}\n")
    for line in sys.stdin:
        verb, *numbers = line.split()
        seconds = getattr(engine, verb)(*map(int, numbers))
        answers.write(f"{seconds}\n")
    engine.drain()
