"""NIXL as a data channel: rights, fences and failures, between real processes of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import Refusal, RefusalReason
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.data_server import ReceiveOptions
from kvmesh.transfer.frames import SegmentOffer
from kvmesh.transfer.nixl_child import READ
from kvmesh.transfer.nixl_process import EngineError, NixlProcess, is_installed
from kvmesh.transfer.nixl_reader import NixlReaders, paired
from kvmesh.transfer.target import WriteGrant
from tests.transfer_pair import (
    BLOCK,
    DECODE,
    NUM_BLOCKS,
    PREFILL,
    SENDER,
    Pair,
    SourcePool,
    running_pair,
    until,
    whole,
)

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs the extra nixl")
PATIENT_S = 25
"""Two processes load the engine, on a busy machine."""
SEND = SendOptions(kinds=("nixl",), stall_timeout_s=PATIENT_S)
RECEIVE = ReceiveOptions(kinds=("nixl",), stall_timeout_s=PATIENT_S)


def engines(role: str) -> list[int]:
    """Processes of the engine that this one has started and not yet ended."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found = []
    for child in map(int, children):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if role.encode() in words:
                found.append(child)
    return found


def rights_on(pool: str, pid: int) -> list[str]:
    """How a process has mapped a pool."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split()[1] for line in maps if f"memfd:{pool}" in line]


@contextlib.asynccontextmanager
async def warm_pair(receive: ReceiveOptions = RECEIVE) -> AsyncIterator[Pair]:
    """Both ends, after their engines reached each other.

    Checks that a grant fails only when no process is left that could write its blocks, and that
    nothing is left afterwards.
    """
    left: list[int] = []
    async with running_pair(SEND, receive) as pair:
        end_write = pair.target.end_write

        def watched(grant: WriteGrant, ok: bool) -> None:
            left.extend([] if ok else engines("read"))
            end_write(grant, ok)

        pair.target.end_write = watched  # type: ignore[method-assign]
        await pair.pool.put(pair.reservation, whole(1))
        yield pair
        assert pair.target.open_grants == []
    assert left == []
    assert engines("own") == engines("read") == []


async def test_a_peer_without_the_engine_is_reached_by_the_next_kind() -> None:
    send = replace(SEND, kinds=("nixl", "tcp"))
    async with running_pair(send, ReceiveOptions(kinds=("tcp",))) as pair:
        await pair.pool.put(pair.reservation, whole(3))

        assert pair.target.content(0, 3) == pair.source.read_view(0, 3)
        assert pair.pool.statistics().links[DECODE, "tcp", "sent"].bytes == 3 * BLOCK  # type: ignore[index]
        assert engines("read") == []


async def test_without_the_engine_here_the_next_kind_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvmesh.transfer.channel_pool.is_installed", lambda: False)
    async with running_pair(replace(SEND, kinds=("nixl", "tcp"))) as pair:
        await pair.pool.put(pair.reservation, whole(1))

        assert set(pair.pool.statistics().links) == {(DECODE, "tcp", "sent")}


async def test_engines_that_do_not_reach_each_other_are_given_up_for_this_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nonsense(self: object) -> SegmentOffer:
        return SegmentOffer("nixl", 0x1000, b"nixlSerDes|no keys")

    monkeypatch.setattr("kvmesh.transfer.nixl_channel.NixlOwner.segment", nonsense)
    monkeypatch.setattr("kvmesh.transfer.nixl_channel.NixlOwner.offers", lambda *_: True)
    async with running_pair(replace(SEND, kinds=("nixl", "tcp")), RECEIVE) as pair:
        with pytest.raises(LostError, match="engine"):
            await pair.pool.put(pair.reservation, whole(1))
        assert pair.target.is_untouched

        await pair.pool.put(pair.reservation, whole(1))
        assert pair.target.content(0, 1) == pair.source.read_view(0, 1)
        assert pair.pool.statistics().links[DECODE, "tcp", "sent"].bytes == BLOCK  # type: ignore[index]


async def test_a_peer_that_is_refused_starts_nothing_and_its_keys_reach_no_engine() -> None:
    async with running_pair(SEND, RECEIVE) as pair:
        pair.target.refuse = Refusal(RefusalReason.STALE, "no")
        asked: list[int] = []
        ask = NixlProcess.ask

        async def watched(self: NixlProcess, kind: int, body: bytes) -> bytes:
            asked.append(kind)
            return await ask(self, kind, body)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NixlProcess, "ask", watched)
            with pytest.raises(RefusedError):
                await pair.pool.put(pair.reservation, whole(1))

        assert pair.sent.refused == 1
        assert asked == []
        assert engines("read") == []


async def test_the_sender_s_pool_cannot_be_written_with_the_keys_it_gave_away() -> None:
    """The engine has no keys for reading alone; the mapping that it registers has."""
    source = SourcePool()
    owner = await NixlProcess.start("own", source.fd, NUM_BLOCKS * BLOCK)
    try:
        await owner.answer()
        (pid,) = engines("own")
        rights = rights_on("test-pool", pid)
        assert rights
        assert not any("w" in right for right in rights)
    finally:
        await owner.killed()
        source.close()


@pytest.mark.parametrize("role", ["own", "read"])
async def test_a_killed_engine_loses_the_transfer_and_the_next_one_starts_anew(role: str) -> None:
    async with warm_pair() as pair:
        (pid,) = engines(role)
        pair.target.on_grant = lambda: os.kill(pid, signal.SIGKILL)

        with pytest.raises(LostError):
            await pair.pool.put(pair.reservation, whole(300))

        assert pair.target.open_grants == []
        assert not all(ok for _, ok in pair.target.ended)
        pair.target.on_grant = lambda: None
        await until(lambda: not Path(f"/proc/{pid}").exists())
        await pair.pool.put(pair.reservation, whole(300))
        assert pair.target.content(0, 300) == pair.source.read_view(0, 300)


async def test_a_connection_that_is_lost_when_it_is_made_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask, read_by = NixlProcess.ask, list[NixlProcess]()

    async def lost_at_first(self: NixlProcess, kind: int, body: bytes) -> bytes:
        if kind == READ and self not in read_by:
            read_by.append(self)
            if len(read_by) == 1:
                raise EngineError("NIXL: NIXL_ERR_REMOTE_DISCONNECT")
            assert len(engines("read")) == 1, "the first one can write no more"
        return await ask(self, kind, body)

    monkeypatch.setattr(NixlProcess, "ask", lost_at_first)
    async with running_pair(SEND, RECEIVE) as pair:
        await pair.pool.put(pair.reservation, whole(300))
        await pair.pool.put(pair.reservation, whole(2))

        assert pair.target.content(0, 300) == pair.source.read_view(0, 300)
        assert len(read_by) == 2
        assert (pair.sent.lost, pair.sent.channels) == (0, 1)


async def test_a_write_that_hangs_is_given_up_and_leaves_the_blocks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # where the sender's processor has to help
    async with warm_pair(replace(RECEIVE, stall_timeout_s=4)) as pair:
        (owner,) = engines("own")
        os.kill(owner, signal.SIGSTOP)

        with pytest.raises(LostError, match="no progress for 4 s"):
            await pair.pool.put(pair.reservation, whole(300))

        assert pair.target.open_grants == []
        before = pair.target.content(0, 300)
        os.kill(owner, signal.SIGCONT)  # what the read still asked for is answered now
        by_tcp = ChannelPool(SENDER, pair.source, replace(SEND, kinds=("tcp",)))
        await by_tcp.put(pair.reservation, whole(10, first=310))
        await by_tcp.close()
        assert pair.target.content(310, 10) == pair.source.read_view(310, 10)
        assert pair.target.content(0, 300) == before


async def test_a_connection_that_ends_while_it_is_read_is_noticed() -> None:
    async with warm_pair() as pair:
        (reader,) = engines("read")
        pair.target.on_grant = lambda: os.kill(reader, signal.SIGSTOP)
        putting = asyncio.create_task(pair.pool.put(pair.reservation, whole(300)))
        await until(lambda: bool(pair.target.open_grants))

        await pair.pool.close()

        with pytest.raises(LostError):
            await putting
        await until(lambda: pair.target.open_grants == [])
        await until(lambda: PREFILL in pair.target.lost)
        assert reader not in engines("read")


async def test_an_engine_that_stalls_ends_within_the_stall_time() -> None:
    async with warm_pair(replace(RECEIVE, stall_timeout_s=4)) as pair:
        (reader,) = engines("read")
        os.kill(reader, signal.SIGSTOP)

        with pytest.raises(LostError, match="no progress for 4 s"):
            await pair.pool.put(pair.reservation, whole(2))

        assert pair.target.open_grants == []
        assert pair.target.ended[-1][1] is False


async def test_a_receiver_has_no_more_readers_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.transfer.nixl_reader.MAX_READERS", 1)
    async with warm_pair() as pair:
        second = ChannelPool(
            replace(SENDER, incarnation=4), pair.source, replace(SEND, kinds=("nixl", "tcp"))
        )
        await second.put(pair.reservation, whole(2))

        assert second.statistics().links[DECODE, "tcp", "sent"].bytes == 2 * BLOCK  # type: ignore[index]
        await second.close()


def test_readers_without_a_pool_or_of_another_engine_are_refused() -> None:
    with pytest.raises(EngineError, match="not in host memory"):
        NixlReaders(None, 1).open(SegmentOffer("nixl", 0, b""))
    with pytest.raises(EngineError, match="no mooncake here"):
        NixlReaders(None, 1).open(SegmentOffer("mooncake", 0, b""))


@pytest.mark.parametrize(
    ("targets", "sources", "pairs"),
    [
        ([(0, 10)], [(100, 4), (200, 6)], [(0, 100, 4), (4, 200, 6)]),
        ([(50, 4), (0, 6)], [(100, 10)], [(50, 100, 4), (0, 104, 6)]),
        ([(0, 3), (9, 5)], [(20, 5), (40, 3)], [(0, 20, 3), (9, 23, 2), (11, 40, 3)]),
        ([(7, 2), (3, 2)], [(1, 2), (5, 2)], [(7, 1, 2), (3, 5, 2)]),
    ],
)
def test_ranges_are_cut_at_each_others_borders(
    targets: list[tuple[int, int]],
    sources: list[tuple[int, int]],
    pairs: list[tuple[int, int, int]],
) -> None:
    found = paired(np.array(targets), np.array(sources))

    assert [tuple(pair) for pair in found.tolist()] == pairs
