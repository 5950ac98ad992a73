"""Interface of a KV channel on the sending side, and the choice of channel for a peer.

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
from kvmesh.core.named_values import listed
from kvmesh.core.types import HostRoute, Reservation
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.device import Moment
from kvmesh.transfer.frames import BlockPart

LOCAL, IPC, SHM, NIXL, TCP = "local", "ipc", "shm", "nixl", "tcp"
KINDS = (LOCAL, IPC, SHM, NIXL, TCP)
DEFAULT_KINDS = (LOCAL, IPC, SHM, TCP)
"""Fastest first; only kinds without optional requirements."""

PieceT = TypeVar("PieceT")


class SendChannel(Protocol):
    """Writes blocks of this worker's pool into reservations of one incarnation of one peer."""

    @property
    def is_open(self) -> bool:
        """Whether the channel accepts new transfers."""
        ...

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        ...

    async def put(
        self,
        reservation: Reservation,
        runs: Sequence[Run],
        part: BlockPart | None = None,
        after: Moment = None,
    ) -> None:
        """Writes runs (`target_start` is an index of the reservation); returns when they are there.

        With `part` it sends only these bytes of each block. It reads a device's blocks after the
        moment `after`, or after the present one if None.

        Any number of calls may run at once. When this returns or raises, cancellation included,
        the peer no longer reads the blocks for this call, or its reads never count.

        Raises:
            RefusedError: the receiver refused, with its refusal.
            LostError: the channel died or stalled; the content of the blocks is undefined.
        """
        ...

    async def commit(self, reservation: Reservation, first_token_id: int, num_tokens: int) -> None:
        """Declares that all blocks are or will be written; may be repeated.

        Raises:
            RefusedError, LostError: as `put`.
        """
        ...

    async def close(self) -> None:
        """Ends the channel; transfers under way get LostError. May be called again."""
        ...


def parse_kinds(words: str) -> tuple[str, ...]:
    """Returns the kinds of a comma-separated list, in its order.

    Raises:
        ConfigError: an unknown kind, or none.
    """
    kinds = listed(words)
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
    """Returns the kinds to try, in the order of `allowed`.

    Args:
        same_process: the peer is served by this process.
        has_memfd: other processes can map this worker's pool.
        has_ipc: this worker's pool is on a device, and IPC has not failed with this peer.
        has_nixl: this worker's engine runs, and NIXL has not failed with this peer.
        here: identity of this host.
        there: the peer's route within its host; None if it is reachable by network only.
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
    """Variant of `usable_kinds` for a worker that reads from or queries a peer.

    Args:
        stand_ins: per kind that only writes, the kind to use in its place.
    """
    kinds = tuple(dict.fromkeys(stand_ins.get(kind, kind) for kind in allowed))
    return usable_kinds(kinds, same_process=False, has_memfd=True, here=here, there=there)


async def carry_all(
    pieces: Iterable[PieceT], carry: Callable[[PieceT], Awaitable[None]], width: int
) -> None:
    """Carries pieces, at most `width` at once, started in order.

    After a failure or a cancellation no further piece starts, and it waits for the pieces under
    way. A second cancellation cancels them. However many cancellations come, all pieces have ended
    when this returns: their memory belongs to others afterwards.
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
            # Twice: a piece that waits for its answer handles the first as this function does.
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
