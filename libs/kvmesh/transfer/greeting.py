"""The start of a connection: its destination, its options, and the greeting.

Tests: tests/integration/test_transfer.py, tests/contract/test_channels.py.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.core.errors import LostError, ProtocolError, RefusedError
from kvmesh.core.types import WorkerId
from kvmesh.transfer.channel import SHM
from kvmesh.transfer.codec import encode_frame
from kvmesh.transfer.decoder import PayloadStart
from kvmesh.transfer.frame_socket import FrameSocket
from kvmesh.transfer.frames import Checksum, LinkOffer
from kvmesh.transfer.meters import LinkMeter
from kvmesh.transfer.pacing import Pacer
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.sender_protocol import Ended, SenderMachine
from kvmesh.transfer.wire import Wire


class PeerKey(NamedTuple):
    """Destination of a channel: one incarnation of a worker."""

    worker_id: WorkerId
    incarnation: int


_LINK_ID_BITS = 64

DEFAULT_PATIENCE_S = 60.0
"""Seconds a sender waits for a handoff before it gives up."""


@dataclass(frozen=True, slots=True)
class Link:
    """State shared by the connections of a channel.

    Attributes:
        identity: this end.
        peer: the other end.
        link_id: tells its connections from those of another channel between the two.
        meter: counts the bytes that it moves.
        threads: threads for blocking calls.
    """

    identity: ChannelIdentity
    peer: PeerKey
    link_id: int
    meter: LinkMeter
    threads: Executor


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """Settings of lanes.

    Attributes:
        connect_timeout_s: seconds from the first packet to HELLO_OK.
        stall_timeout_s: seconds without progress after which a lane that owes some is cut.
        pacer: budget of the link; None for no limit.
        poll_s: see `SendOptions`.
        patience_s: seconds; a transfer is given up if the rest would take longer at its measured
            speed.
        is_staged: the payloads lie in staging memory, which is reused as soon as a transfer has
            continued on another lane.
    """

    connect_timeout_s: float
    stall_timeout_s: float
    pacer: Pacer | None = None
    poll_s: float = 0.0
    is_staged: bool = False
    patience_s: float = DEFAULT_PATIENCE_S


Connect = Callable[[], Awaitable[Wire]]


async def open_frames(
    connect: Connect,
    machine: SenderMachine,
    options: LaneOptions,
    threads: Executor,
    pool_fd: int | None = None,
) -> FrameSocket:
    """Opens a connection and waits until its peer has answered the HELLO.

    Raises:
        RefusedError, LostError: as `Lane.open`.
    """
    try:
        async with asyncio.timeout(options.connect_timeout_s):
            wire = await connect()
            frames = FrameSocket(
                wire,
                machine.block_bytes,
                options.stall_timeout_s,
                threads,
                poll_s=options.poll_s,
            )
            try:
                await frames.send(encode_frame(machine.hello()), pool_fd)
                await _greeted(frames, machine)
            except BaseException:
                frames.close()
                raise
    except TimeoutError as error:
        text = f"data channel: no HELLO in {options.connect_timeout_s:g} s"
        raise LostError(text) from error
    return frames


async def _greeted(frames: FrameSocket, machine: SenderMachine) -> None:
    try:
        event = await frames.receive()
        if event is None:
            raise LostError("data channel: closed before HELLO_OK")
        outcome = machine.receive(event.frame if isinstance(event, PayloadStart) else event)
    except ProtocolError as error:
        raise LostError(f"data channel: {error}") from error
    if isinstance(outcome, Ended):
        raise RefusedError(outcome.refusal)


def new_link_id() -> int:
    """Returns a random number that identifies a channel between two workers."""
    return secrets.randbits(_LINK_ID_BITS)


def asker_machine(
    identity: ChannelIdentity, peer: PeerKey, kind: str, lane: int, checksum: Checksum
) -> SenderMachine:
    """Creates the state of a connection for requests, which is a channel of its own.

    Args:
        checksum: checksum that this end asks for where bytes leave the machine.
    """
    # A Unix socket stays within the machine: a checksum would only cost time.
    wish = Checksum.NONE if kind == SHM else checksum
    return sender_machine(identity, peer, LinkOffer(new_link_id(), lane, wish))


def sender_machine(
    identity: ChannelIdentity, peer: PeerKey, offer: LinkOffer | None
) -> SenderMachine:
    """Creates the state of a new connection."""
    return SenderMachine(identity, peer.worker_id, peer.incarnation, offer)
