"""What every kind of channel does for a sender, and how one is chosen.

Adding a kind: a file with a `SendChannel`, an entry in `channel_pool.py`, and its fixture in
tests/contract/test_channels.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from kvmesh.core.errors import ConfigError
from kvmesh.core.types import HostRoute, Reservation
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.device import Moment
from kvmesh.transfer.frames import BlockPart

LOCAL, IPC, SHM, NIXL, TCP = "local", "ipc", "shm", "nixl", "tcp"
KINDS = (LOCAL, IPC, SHM, NIXL, TCP)
DEFAULT_KINDS = (LOCAL, IPC, SHM, TCP)
"""Fastest first; those that need nothing that is not always there."""

PieceT = TypeVar("PieceT")


class SendChannel(Protocol):
    """Writes blocks of this worker's pool into reservations of one life of one peer."""

    @property
    def is_open(self) -> bool:
        """Whether new transfers can be given to it."""
        ...

    @property
    def num_connections(self) -> int:
        """Connections that are up."""
        ...

    async def put(
        self,
        reservation: Reservation,
        runs: Sequence[Run],
        part: BlockPart | None = None,
        after: Moment = None,
    ) -> None:
        """Writes runs (`target_start` is an index of the reservation); returns when they are there.

        With `part` only these bytes of each block; a device's blocks are read behind the moment
        `after`, without one behind now.

        Any number of calls may run at once. When this returns or raises, cancellation included,
        nobody reads the blocks for this call any more, or what is read never counts.

        Raises:
            RefusedError: the receiver said no; the refusal is its own.
            LostError: the channel died or stalled; the blocks hold anything.
        """
        ...

    async def commit(self, reservation: Reservation, first_token_id: int, num_tokens: int) -> None:
        """Says that all is written; may be repeated.

        Raises:
            RefusedError, LostError: as `put`.
        """
        ...

    async def close(self) -> None:
        """Ends it; what is under way gets LostError. May be called again."""
        ...


def parse_kinds(words: str) -> tuple[str, ...]:
    """The kinds of a comma-separated list, in its order.

    Raises:
        ConfigError: an unknown kind, or none.
    """
    kinds = tuple(word.strip() for word in words.split(",") if word.strip())
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        known = ", ".join(KINDS)
        raise ConfigError(f"channels must be some of {known}, got {words!r}")
    return kinds


def usable_kinds(
    allowed: Sequence[str],
    *,
    same_process: bool,
    has_memfd: bool,
    has_ipc: bool = False,
    has_nixl: bool = False,
    here: str,
    there: HostRoute | None,
) -> tuple[str, ...]:
    """The kinds to try, in the order of `allowed`.

    Args:
        same_process: the peer is served by this process.
        has_memfd: this worker's pool can be mapped by others.
        has_ipc: this worker's pool is on a device, and nothing speaks against that with this peer.
        has_nixl: this worker's engine is there, and nothing speaks against it with this peer.
        here: identity of this host.
        there: where the peer is reached on its host; None: by network only.
    """
    same_host = there is not None and there.host_id == here and here != ""
    usable = {
        LOCAL: same_process,
        IPC: same_host and has_ipc,
        SHM: same_host and has_memfd,
        NIXL: has_nixl and has_memfd,
        TCP: True,
    }
    return tuple(kind for kind in allowed if usable[kind])


def kinds_to_ask(
    allowed: Sequence[str], stand_ins: Mapping[str, str], here: str, there: HostRoute | None
) -> tuple[str, ...]:
    """As `usable_kinds`, for who asks a peer over a connection of its own.

    Args:
        stand_ins: kinds that take the place of those that only write.
    """
    kinds = tuple(dict.fromkeys(stand_ins.get(kind, kind) for kind in allowed))
    return usable_kinds(kinds, same_process=False, has_memfd=True, here=here, there=there)


async def carry_all(
    pieces: Iterable[PieceT], carry: Callable[[PieceT], Awaitable[None]], width: int
) -> None:
    """Carries pieces, at most `width` at once, in order of their beginning.

    After a failure or a cancellation no further piece begins, and those under way are waited for.
    A second cancellation cancels them. However many come, all pieces have ended when this does:
    they are in memory that is another's afterwards.
    """
    left = deque(pieces)

    async def work() -> None:
        while left:
            try:
                await carry(left.popleft())
            except BaseException:
                left.clear()
                raise

    workers = [asyncio.ensure_future(work()) for _ in range(min(width, len(left)))]
    try:
        await asyncio.wait(workers)
    except asyncio.CancelledError:
        left.clear()
        try:
            await asyncio.wait(workers)
        except asyncio.CancelledError:
            # Twice: one that waits for its answer takes the first as this function does.
            cuts = 2
            while not all(worker.done() for worker in workers):
                if cuts:
                    for worker in workers:
                        worker.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait(workers, timeout=0 if cuts else None)
                cuts = max(0, cuts - 1)
        raise
    finally:
        failures = [w.exception() for w in workers if w.done() and not w.cancelled()]
    for failure in failures:
        if failure is not None:
            raise failure
