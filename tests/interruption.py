"""Interrupts what a test runs at each of its await points in turn.

Tasks that an event loop makes while `Interruptions` watches it are counted from suspension to
suspension. At the chosen one something happens: as soon as the task waits, or in the moment when
what it waits for has come and it is about to go on, which is where results get lost.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Collection, Coroutine, Generator
from types import TracebackType
from typing import Any, Self

Deed = Callable[[], None]


class Interruptions:
    """Counts suspensions of tasks by the names of their coroutines, and acts at one of them.

    Args:
        watched: qualified names of coroutine functions.
    """

    def __init__(self, watched: Collection[str]) -> None:
        self._watched = frozenset(watched)
        self._number = 0
        self._is_late = False
        self._deed: Deed | None = None
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.seen: list[str] = []
        """Which tasks were suspended since `arm`."""

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        make: Any = self._make  # its type has a parameter more in some Pythons than in others
        self._loop.set_task_factory(make)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.set_task_factory(None)

    def arm(self, number: int, deed: Deed, *, late: bool) -> None:
        """Lets `deed` happen at the `number`-th suspension from now on, counted from 1.

        Args:
            late: when what is waited for has come, just before the task goes on.
        """
        self._number, self._is_late, self._deed = number, late, deed
        self.seen.clear()

    def disarm(self) -> None:
        """What did not happen yet never will."""
        self._deed = None

    def tasks(self, *names: str) -> list[asyncio.Task[Any]]:
        """Watched tasks that have not ended."""
        return [task for task in self._tasks if task.get_name() in names and not task.done()]

    @property
    def was_reached(self) -> bool:
        """Whether there were so many suspensions."""
        return len(self.seen) >= self._number

    @property
    def has_struck(self) -> bool:
        """Whether it happened."""
        return self._deed is None

    def suspended(self, name: str, awaited: Any) -> None:
        """A task waits from now on."""
        self.seen.append(name)
        if len(self.seen) != self._number:
            return
        if self._is_late and awaited is not None:
            # Before the task adds its own: what it awaits tells in the order of asking.
            awaited.add_done_callback(functools.partial(self._strike, self._deed))
        else:
            self._loop.call_soon(self._strike, self._deed)

    def _strike(self, deed: Deed | None, _: object = None) -> None:
        if deed is not None and deed is self._deed:  # else it came too late
            self._deed = None
            deed()

    def _make(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        name = getattr(work, "__qualname__", "")
        if name not in self._watched:
            return asyncio.Task(work, loop=loop, **options)
        options["name"] = name
        task = asyncio.Task(_Watched(work, name, self), loop=loop, **options)
        self._tasks.add(task)
        return task


class _Watched(Coroutine[Any, Any, Any]):
    """A coroutine that tells where it waits."""

    def __init__(
        self, work: Coroutine[Any, Any, Any], name: str, interruptions: Interruptions
    ) -> None:
        self._work = work
        self._name = name
        self._interruptions = interruptions

    def send(self, value: Any, /) -> Any:
        return self._told(self._work.send(value))

    def throw(  # type: ignore[override]
        self,
        kind: Any,
        value: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> Any:
        return self._told(self._work.throw(kind if value is None else value))

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._work.__await__()

    def _told(self, awaited: Any) -> Any:
        self._interruptions.suspended(self._name, awaited)
        return awaited
