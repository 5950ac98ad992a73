"""Memory that a transfer has let go may be written, whatever is still on its way to the peer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket

from kvmesh.core.types import Endpoint
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.codec import encode_frame
from kvmesh.transfer.frames import Checksum, HelloOkFrame, LinkTerms
from tests.device_twin import TwinPool
from tests.native import needs_transfer_library
from tests.transfer_pair import (
    BLOCK,
    DECODE,
    LAYOUT,
    SENDER,
    reservation_behind,
    until,
    whole,
)

NUM_BLOCKS = 16
STAGING = 64 * BLOCK  # a piece is an eighth of it


@needs_transfer_library
async def test_staging_that_is_used_again_is_not_what_the_peer_reads() -> None:
    loop = asyncio.get_running_loop()
    content = random.Random(2).randbytes(NUM_BLOCKS * BLOCK)
    device = TwinPool(LAYOUT, NUM_BLOCKS, content)
    options = SendOptions(
        kinds=("tcp",), lanes=1, checksum=Checksum.NONE, staging_bytes=STAGING, stall_timeout_s=300
    )
    pool = ChannelPool(SENDER, device, options)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
        put = asyncio.create_task(pool.put(reservation_behind(endpoint), whole(8)))
        peer, _ = await loop.sock_accept(listener)
        with peer:
            await loop.sock_recv(peer, 4096)
            terms = LinkTerms(Checksum.NONE, 0)
            await loop.sock_sendall(peer, encode_frame(HelloOkFrame(DECODE, 7, terms)))
            await _wait_until_readable(peer, 1024)

            while not put.done():  # the peer reads nothing, so the second one cuts the connection
                put.cancel()
                await asyncio.sleep(0)
            staging = pool.staging
            assert staging is not None
            assert staging.num_free == staging.num_blocks
            staging._view[:] = bytes(staging.num_bytes)

            came = await _rest_of(peer)
    start = came.index(content[:16])
    assert len(came) > start
    assert content.startswith(came[start:])
    await until(lambda: pool.statistics().open_channels == 0)
    await pool.close()
    device.close()


async def _wait_until_readable(peer: socket.socket, num_bytes: int) -> None:
    while True:
        with contextlib.suppress(BlockingIOError):
            if len(peer.recv(num_bytes, socket.MSG_PEEK)) == num_bytes:
                return
        await asyncio.sleep(0)


async def _rest_of(peer: socket.socket) -> bytes:
    """What a connection still brings, until its end."""
    loop, came = asyncio.get_running_loop(), bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := await loop.sock_recv(peer, 1 << 20):
            came += piece
    return bytes(came)
