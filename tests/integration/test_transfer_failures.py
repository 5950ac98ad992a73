"""Links that cut, stall and slow down, and peers that die: nothing is torn or left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import sys

import pytest

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import Refusal, RefusalReason
from kvmesh.transfer import tcp_channel
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.data_server import ReceiveOptions
from kvmesh.transfer.frames import Checksum
from kvmesh.transfer.local_channel import LocalHub
from kvmesh.transfer.memory import create_shared
from kvmesh.transfer.stall import PaceWatch, Rest
from tests.faulty_link import Faults, faulty_link
from tests.transfer_pair import (
    BLOCK,
    DECODE,
    NUM_BLOCKS,
    PREFILL,
    SENDER,
    STALL_S,
    Pair,
    running_pair,
    until,
    whole,
)

TOTAL = NUM_BLOCKS * BLOCK
TCP = SendOptions(kinds=("tcp",), lanes=2, stall_timeout_s=2, checksum=Checksum.CRC32C)


async def put_through(pair: Pair, faults: Faults, runs: list[Run]) -> None:
    async with faulty_link(pair.reservation.data_endpoint, faults) as endpoint:
        pair.reservation = dataclasses.replace(pair.reservation, data_endpoint=endpoint)
        await pair.pool.put(pair.reservation, runs)
        await pair.pool.commit(pair.reservation, 7, 70)
        await pair.pool.close()


def assert_landed(pair: Pair) -> None:
    assert pair.target.content(0, NUM_BLOCKS) == pair.source.read_view(0, NUM_BLOCKS)
    assert len(pair.target.commits) == 1


@pytest.mark.parametrize("seed", range(6))
async def test_a_transfer_goes_on_after_cuts_at_any_byte(seed: int) -> None:
    """Cuts fall into the second lane's greeting, heads, payloads and trailers."""
    rng = random.Random(seed)
    early = rng.randrange(150, 600)
    faults = Faults(cut_at=sorted([early, *(rng.randrange(600, TOTAL) for _ in range(2))]))
    async with running_pair(TCP, ReceiveOptions(stall_timeout_s=2)) as pair:
        await put_through(pair, faults, whole(NUM_BLOCKS))
        assert_landed(pair)


async def test_a_first_greeting_that_is_cut_is_lost_and_nothing_was_written() -> None:
    async with running_pair(TCP) as pair:
        with pytest.raises(LostError):
            await put_through(pair, Faults(cut_at=[50]), whole(NUM_BLOCKS))
        assert pair.target.granted == []


@pytest.mark.parametrize("cut", [200, 1 << 20, 5 << 20, TOTAL - 100])
async def test_what_was_acknowledged_is_not_sent_again(cut: int) -> None:
    faults = Faults(cut_at=[cut])
    async with running_pair(TCP, ReceiveOptions(stall_timeout_s=2)) as pair:
        await put_through(pair, faults, whole(NUM_BLOCKS))
        assert_landed(pair)
        again = sum(grant.put.num_blocks for grant, ok in pair.target.ended if ok) - NUM_BLOCKS
        # At most the pieces that were on their way on the connection that was cut.
        assert again * BLOCK <= 4 * (8 << 20)
        assert faults.passed < TOTAL + 4 * (8 << 20)
        assert pair.sent.resumed >= 1


async def test_a_link_that_goes_silent_fails_in_the_stall_time() -> None:
    options = dataclasses.replace(TCP, stall_timeout_s=STALL_S)
    async with running_pair(options, ReceiveOptions(stall_timeout_s=STALL_S)) as pair:
        started = asyncio.get_running_loop().time()
        with pytest.raises(LostError, match=r"no progress|closed|HELLO"):
            await put_through(pair, Faults(stall_at=4 << 20), whole(NUM_BLOCKS))
        assert asyncio.get_running_loop().time() - started < 5 + 10 * STALL_S
        await until(lambda: not pair.target.open_grants)


async def test_a_link_that_starves_a_transfer_is_given_up() -> None:
    """It never stalls: each window brings some bytes, and all of them would take minutes."""
    options = dataclasses.replace(TCP, stall_timeout_s=0.6, patience_s=0.05)
    async with running_pair(options, ReceiveOptions(stall_timeout_s=2)) as pair:
        with pytest.raises(LostError, match="the link is too slow"):
            await put_through(pair, Faults(bytes_per_s=1e6), whole(NUM_BLOCKS))
        assert pair.sent.resumed == 0, "another connection would be no faster"
        assert pair.sent.queued_bytes == 0


async def test_what_was_acknowledged_counts_no_longer_as_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = list[int]()

    class Noted(PaceWatch):
        def end(self, rest: Rest) -> None:
            left.append(rest.num_bytes)
            super().end(rest)

    monkeypatch.setattr(tcp_channel, "PaceWatch", Noted)
    async with running_pair(TCP) as pair:
        await put_through(pair, Faults(), whole(NUM_BLOCKS))
    assert left == [0]


@pytest.mark.parametrize("faults", [Faults(delay_s=0.003), Faults(bytes_per_s=60e6)])
async def test_a_slow_link_is_no_failure(faults: Faults) -> None:
    options = dataclasses.replace(TCP, stall_timeout_s=STALL_S)
    async with running_pair(options, ReceiveOptions(stall_timeout_s=STALL_S)) as pair:
        await put_through(pair, faults, whole(NUM_BLOCKS))
        assert_landed(pair)
        assert pair.sent.resumed == 0


async def test_a_busy_refusal_that_is_no_old_writer_is_passed_on() -> None:
    async with running_pair(TCP) as pair:
        pair.target.refuse = Refusal(RefusalReason.BUSY, "another writer")
        with pytest.raises(RefusedError):
            await pair.pool.put(pair.reservation, whole(1))


_SENDER = """
import asyncio, json, sys
from dataclasses import replace
from kvmesh.core.types import Endpoint, HostRoute
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.data_server import DataAddress
from tests.transfer_pair import NUM_BLOCKS, SENDER, SourcePool, reservation_at, whole

async def main():
    kind, host, port, host_id, path = sys.argv[1:]
    address = DataAddress(Endpoint(host, int(port)), HostRoute(host_id, path))
    pool = ChannelPool(SENDER, SourcePool(), SendOptions(kinds=(kind,)))
    while True:
        await pool.put(reservation_at(address), whole(NUM_BLOCKS))

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_sender_that_is_killed_leaves_no_writer_behind(kind: str) -> None:
    async with running_pair(TCP, ReceiveOptions(stall_timeout_s=5)) as pair:
        route, endpoint = pair.reservation.host_route, pair.reservation.data_endpoint
        assert route is not None
        where = [endpoint.host, str(endpoint.port), route.host_id, route.socket_path]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _SENDER,
            kind,
            *where,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        await until(lambda: len(pair.target.granted) > 3)

        process.kill()
        await process.wait()

        await until(lambda: PREFILL in pair.target.lost and not pair.target.open_grants)
        await until(lambda: pair.server.statistics().open_channels == 0)
        await pair.pool.put(pair.reservation, whole(NUM_BLOCKS))
        assert pair.target.content(0, NUM_BLOCKS) == pair.source.read_view(0, NUM_BLOCKS)


class _LyingPool:
    """Says that it has more blocks than its memfd."""

    def __init__(self) -> None:
        self.fd, self._map = create_shared("short", BLOCK)
        self.num_blocks = NUM_BLOCKS

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        return memoryview(self._map)


async def test_a_pool_that_is_smaller_than_it_says_is_not_mapped() -> None:
    async with running_pair() as pair:
        source = _LyingPool()
        pool = ChannelPool(SENDER, source, SendOptions(kinds=("shm",)), hub=LocalHub())

        with pytest.raises(RefusedError, match="mapping"):
            await pool.put(pair.reservation, whole(1))

        assert pair.target.granted == []
        await pool.close()
        os.close(source.fd)


async def test_blocks_outside_of_the_mapped_pool_are_refused() -> None:
    async with running_pair(SendOptions(kinds=("shm",))) as pair:
        with pytest.raises(RefusedError, match="outside of the sender's"):
            await pair.pool.put(pair.reservation, [Run(NUM_BLOCKS - 1, 0, 2)])
        assert pair.target.granted == []
        assert pair.pool.statistics().links[DECODE, "shm", "sent"].refused == 1  # type: ignore[index]
