"""One suite for every kind of channel: what a sender may rely on, whatever carries the bytes."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import Refusal, RefusalReason
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.channel import KINDS
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.data_server import ReceiveOptions
from kvmesh.transfer.frames import BlockPart, Checksum
from kvmesh.transfer.local_channel import LocalHub
from kvmesh.transfer.nixl_process import is_installed
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.tls import DataTls
from tests.transfer_pair import (
    BLOCK,
    DECODE,
    LAYOUT,
    NUM_BLOCKS,
    PREFILL,
    STALL_S,
    Pair,
    SourcePool,
    running_pair,
    until,
    whole,
)

PLAIN = SendOptions(stall_timeout_s=5)
ENGINE_STALL_S = 25
"""Two processes that load an engine, on a busy machine."""
STAGING = 48 * BLOCK
"""Less than most transfers here, so that their pieces take turns in it."""
LONG = pytest.mark.long
CHANNELS = {
    "local": replace(PLAIN, kinds=("local",)),
    "shm": replace(PLAIN, kinds=("shm",)),
    "shm_polling": replace(PLAIN, kinds=("shm",), poll_s=1e-4),
    "nixl": replace(PLAIN, kinds=("nixl",), stall_timeout_s=ENGINE_STALL_S),
    "tcp": replace(PLAIN, kinds=("tcp",)),
    "tcp_one_lane_crc32": replace(PLAIN, kinds=("tcp",), lanes=1, checksum=Checksum.CRC32),
    "tcp_four_lanes_no_checksum": replace(PLAIN, kinds=("tcp",), lanes=4, checksum=Checksum.NONE),
    "tcp_with_budget": replace(PLAIN, kinds=("tcp",), budget_bytes_s=400e6),
    "tcp_tls": replace(PLAIN, kinds=("tcp",)),
    "local_device_to_device": replace(PLAIN, kinds=("local",), staging_bytes=STAGING),
    "ipc_device_to_device": replace(PLAIN, kinds=("ipc",)),
    "shm_device_to_device": replace(PLAIN, kinds=("shm",), staging_bytes=STAGING),
    "tcp_device_to_device": replace(PLAIN, kinds=("tcp",)),
}


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    names = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return cert, key


def options_of(name: str, request: pytest.FixtureRequest) -> tuple[SendOptions, ReceiveOptions]:
    send = CHANNELS[name]
    receive = ReceiveOptions(
        stall_timeout_s=5, poll_s=send.poll_s, staging_bytes=send.staging_bytes
    )
    if name == "nixl":
        if not is_installed():
            pytest.skip("needs the extra nixl")
        receive = replace(receive, kinds=KINDS, stall_timeout_s=ENGINE_STALL_S)
    if name != "tcp_tls":
        return send, receive
    cert, key = request.getfixturevalue("certificate")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    client = DataTls(ssl.create_default_context(cafile=cert), frozenset({"test"}))
    return replace(send, tls=client), replace(receive, tls=DataTls(server))


@pytest.fixture(params=CHANNELS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    send, receive = options_of(request.param, request)
    devices = (True, True) if "device" in request.param else (False, False)
    async with running_pair(send, receive, devices) as pair:
        yield pair


def expect(pair: Pair, *runs: Run) -> None:
    for run in runs:
        source = pair.source.read_view(run.source_start, run.count)
        assert pair.target.content(run.target_start, run.count) == source


async def put_lands(pair: Pair) -> None:
    runs = [Run(5, 2, 10), Run(0, 20, 1), Run(30, 21, 289)]

    await pair.pool.put(pair.reservation, runs)
    await pair.pool.commit(pair.reservation, 42, 4700)

    expect(pair, *runs)
    assert not any(pair.target.content(0, 2) + pair.target.content(12, 8))
    assert all(ok for _, ok in pair.target.ended)
    (commit,) = pair.target.commits
    assert (commit.first_token_id, commit.num_tokens) == (42, 4700)
    assert (commit.claim.reservation_id, commit.claim.generation) == (11, 1)
    pair.target.commits.clear()


async def test_runs_land_byte_for_byte_and_nothing_else_is_touched(pair: Pair) -> None:
    await put_lands(pair)

    assert (pair.sent.bytes, pair.sent.calls, pair.sent.commits) == (300 * BLOCK, 3, 1)
    assert pair.sent.seconds > 0
    assert pair.sent.queued_bytes == 0
    (sample,) = pair.samples
    assert (sample.bytes, sample.calls) == (300 * BLOCK, 3)
    assert sample.link == (DECODE, pair.kind, "sent")


@pytest.mark.parametrize("name", ["shm", "tcp", "local", "tcp_tls", "nixl"])
def test_the_same_under_uvloop(name: str, request: pytest.FixtureRequest) -> None:
    send, receive = options_of(name, request)

    async def scenario() -> None:
        async with running_pair(send, receive) as pair:
            await put_lands(pair)

    uvloop.run(scenario())


async def test_concurrent_transfers_land_apart(pair: Pair) -> None:
    runs = [Run((first * 7) % 300, first, 20) for first in range(0, NUM_BLOCKS, 20)]

    await asyncio.gather(*(pair.pool.put(pair.reservation, [run]) for run in runs))

    expect(pair, *runs)
    assert pair.sent.bytes == NUM_BLOCKS * BLOCK
    assert all(ok for _, ok in pair.target.ended)


@pytest.mark.parametrize("name", ["shm", "tcp", "tcp_one_lane_crc32"])
async def test_transfers_that_overtake_others_at_a_full_window_land_as_well(
    name: str, request: pytest.FixtureRequest
) -> None:
    send, receive = options_of(name, request)
    sizes = [20, 20, 1, 20, 2, 20, 1, 16]  # a small one fits where a large one waits
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    runs = [Run(start, start, size) for start, size in zip(starts, sizes, strict=True)]
    async with running_pair(send, replace(receive, window_bytes=24 * BLOCK)) as pair:
        for _ in range(10):
            await asyncio.gather(*(pair.pool.put(pair.reservation, [run]) for run in runs))

        expect(pair, *runs)
        assert all(ok for _, ok in pair.target.ended)


async def test_scattered_blocks_land_in_order(pair: Pair) -> None:
    runs = [Run(NUM_BLOCKS - 1 - index, index, 1) for index in range(NUM_BLOCKS)]

    await pair.pool.put(pair.reservation, runs)

    expect(pair, *runs)
    assert pair.sent.calls == NUM_BLOCKS


async def test_parts_of_blocks_land_one_after_the_other(pair: Pair) -> None:
    runs = [Run(5, 2, 40), Run(0, 60, 1)]
    third = BLOCK // 4

    await pair.pool.put(pair.reservation, runs, BlockPart(third, 2 * third))

    for run in runs:
        for index in range(run.count):
            here = pair.target.content(run.target_start + index, 1)
            there = pair.source.read_view(run.source_start + index, 1)
            assert here[third : 3 * third] == there[third : 3 * third]
            assert not any(here[:third] + here[3 * third :])
    assert (pair.sent.bytes, pair.sent.calls) == (41 * 2 * third, 41)

    for part in (BlockPart(0, third), BlockPart(3 * third, third)):
        await pair.pool.put(pair.reservation, runs, part)
    expect(pair, *runs)
    assert not any(pair.target.content(0, 2) + pair.target.content(42, 18))


async def test_a_refused_transfer_leaves_the_channel_usable(pair: Pair) -> None:
    refusal = Refusal(RefusalReason.DRAINING, "leaving", work_done=True, retry_after_ms=70)
    pair.target.refuse = refusal
    with pytest.raises(RefusedError) as caught:
        await pair.pool.put(pair.reservation, whole(300))
    assert caught.value.refusal == refusal
    with pytest.raises(RefusedError) as caught:
        await pair.pool.commit(pair.reservation, 42, 10)
    assert caught.value.refusal == refusal
    assert pair.target.is_untouched
    assert pair.sent.refused == 2
    connections = pair.sent.channels

    pair.target.refuse = None
    await put_lands(pair)
    assert pair.target.lost == []
    assert pair.sent.channels <= max(connections, 4)


@pytest.mark.parametrize(
    ("change", "run", "reason"),
    [
        ({"capability": b"guess"}, Run(0, 0, 1), RefusalReason.STALE),
        # The target's refusals have tests of their own; these are the limits of a frame's fields.
        pytest.param({"capability": b""}, Run(0, 0, 1), RefusalReason.STALE, marks=LONG),
        pytest.param({}, Run(0, NUM_BLOCKS - 1, 2), RefusalReason.INVALID, marks=LONG),
        ({}, Run(0, 2**32 - 1, 1), RefusalReason.INVALID),
    ],
)
async def test_writes_without_right_change_nothing(
    pair: Pair, change: dict[str, bytes], run: Run, reason: RefusalReason
) -> None:
    reservation = dataclasses.replace(pair.reservation, **change)  # type: ignore[arg-type]

    with pytest.raises(RefusedError) as caught:
        await pair.pool.put(reservation, [run])

    assert caught.value.refusal.reason is reason
    assert pair.target.is_untouched
    await put_lands(pair)


async def test_another_layout_is_refused(pair: Pair) -> None:
    layout = dataclasses.replace(LAYOUT, num_layers=2, block_size=32)
    pool = ChannelPool(
        ChannelIdentity(PREFILL, 3, layout), pair.source, pair.pool._options, hub=pair.pool._hub
    )

    with pytest.raises(RefusedError, match="num_layers 2") as caught:
        await pool.put(pair.reservation, whole(1))

    assert caught.value.refusal.reason is RefusalReason.INVALID
    assert pair.target.granted == []
    await pool.close()


async def test_another_life_of_the_receiver_is_not_written_to(pair: Pair) -> None:
    reservation = dataclasses.replace(pair.reservation, incarnation=6)

    with pytest.raises((RefusedError, LostError)):
        await pair.pool.put(reservation, whole(1))

    assert pair.target.granted == []
    assert pair.target.lost == []


async def test_after_a_cancelled_put_the_blocks_may_change_and_the_channel_lives(
    pair: Pair,
) -> None:
    putting = asyncio.create_task(pair.pool.put(pair.reservation, whole(300)))
    await until(lambda: bool(pair.target.granted))

    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    done = {run.first: run.count for grant, ok in pair.target.ended if ok for run in grant.put.runs}
    before = {first: pair.source.read_view(first, n).tobytes() for first, n in done.items()}
    pair.source.fill(0xEE)

    await pair.pool.commit(pair.reservation, 1, 1)
    for first, content in before.items():
        assert pair.target.content(first, len(content) // BLOCK) == content
    assert all(ok for _, ok in pair.target.ended)
    await pair.pool.put(pair.reservation, whole(2))
    expect(pair, Run(0, 0, 2))


async def test_a_receiver_that_closes_is_lost(pair: Pair) -> None:
    closing: list[asyncio.Task[None]] = []

    def close() -> None:
        if not closing:
            closing.append(asyncio.create_task(pair.server.close()))

    pair.target.on_grant = close

    async def put_twice() -> None:  # a copy within the process may finish before the close
        await pair.pool.put(pair.reservation, whole(300))
        await pair.pool.put(pair.reservation, whole(300))

    with pytest.raises(LostError):
        await put_twice()
    await closing[0]

    pair.target.check_grants_ended_once()


async def test_a_closed_pool_opens_nothing_and_tells_the_target(pair: Pair) -> None:
    await pair.pool.commit(pair.reservation, 1, 1)

    await pair.pool.close()
    await pair.pool.close()

    with pytest.raises(LostError, match="closed"):
        await pair.pool.put(pair.reservation, whole(1))
    await until(lambda: pair.target.lost == [PREFILL])
    assert pair.pool.statistics().open_channels == 0


@pytest.mark.parametrize("wanted", [("local", "shm", "tcp"), ("shm", "tcp"), ("tcp",)])
async def test_the_first_usable_kind_is_taken(wanted: tuple[str, ...]) -> None:
    async with running_pair(SendOptions(kinds=wanted, stall_timeout_s=STALL_S)) as pair:
        await put_lands(pair)
        assert set(pair.pool.statistics().links) == {(DECODE, wanted[0], "sent")}


async def test_what_is_not_there_is_passed_over() -> None:
    options = SendOptions(stall_timeout_s=STALL_S)
    async with running_pair(options, ReceiveOptions(kinds=("tcp",))) as pair:
        await put_lands(pair)
        assert set(pair.pool.statistics().links) == {(DECODE, "tcp", "sent")}


async def test_a_socket_path_that_is_not_visible_here_falls_back_to_the_network() -> None:
    async with running_pair(SendOptions(kinds=("shm", "tcp"), stall_timeout_s=STALL_S)) as pair:
        assert pair.reservation.host_route is not None
        route = replace(pair.reservation.host_route, socket_path="/nowhere/data")
        pair.reservation = replace(pair.reservation, host_route=route)
        await put_lands(pair)
        assert pair.pool.statistics().links[DECODE, "tcp", "sent"].bytes == 300 * BLOCK  # type: ignore[index]


async def test_with_no_way_at_all_the_transfer_is_lost() -> None:
    source = SourcePool()
    async with running_pair() as pair:
        pool = ChannelPool(
            pair.pool._identity, source, SendOptions(kinds=("local", "shm")), hub=LocalHub()
        )
        reservation = replace(pair.reservation, host_route=None)
        with pytest.raises(LostError, match="no channel of local, shm"):
            await pool.put(reservation, whole(1))
        await pool.close()
    source.close()
