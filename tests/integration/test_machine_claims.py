"""What docs/security.md says of other users of the machine, and of memory, and no other test shows:
of real sockets and processes.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.rpc.channels import MAX_MESSAGE_BYTES
from kvmesh.transfer.channel_pool import SendOptions
from tests.mesh_child import Child
from tests.transfer_pair import Pair, running_pair, whole

_NOBODY = 65534
_CONNECT = f"""
import os, socket, sys
os.setgroups([])
os.setgid({_NOBODY})
os.setuid({_NOBODY})
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except PermissionError:
    print("kept out")
else:
    print("let in")
"""


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """A receiver on this host, of a user who hides nothing."""
    before = os.umask(0)
    try:
        with tempfile.TemporaryDirectory() as place:
            os.chmod(place, 0o755)
            monkeypatch.setattr(tempfile, "tempdir", place)
            async with running_pair(SendOptions(kinds=("shm",))) as running:
                yield running
    finally:
        os.umask(before)


def socket_of(pair: Pair) -> Path:
    assert pair.reservation.host_route is not None
    return Path(pair.reservation.host_route.socket_path)


async def test_the_socket_of_shared_memory_lies_in_a_folder_of_its_users_own(pair: Pair) -> None:
    facts = socket_of(pair).parent.stat()
    assert stat.S_IMODE(facts.st_mode) == 0o700
    assert facts.st_uid == os.getuid()
    await pair.pool.put(pair.reservation, whole(1))


async def as_nobody(pair: Pair) -> str:
    """How another user fares who knows the path."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CONNECT, str(socket_of(pair)), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    return said.decode().strip()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
async def test_another_user_does_not_reach_the_socket(pair: Pair) -> None:
    assert await as_nobody(pair) == "kept out"
    socket_of(pair).parent.chmod(0o755)
    assert await as_nobody(pair) == "let in", "nothing but the folder keeps others out"


BOMB_BYTES = 8 * MAX_MESSAGE_BYTES


def peak_bytes(process: int) -> int:
    """Most memory that a process has had."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[Child]:
    child = Child("scheduler", "scheduler", {"telemetry.metrics-port": -1}, tmp_path)
    child.start()
    try:
        await child.ready()
        yield child
    finally:
        child.kill()


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("rpc", ["OrderWorker", "Route"])
async def test_a_message_that_unpacks_to_far_more_is_refused_before_it_does(
    scheduler: Child, rpc: str, compression: grpc.Compression
) -> None:
    assert scheduler.process is not None
    before = peak_bytes(scheduler.process.pid)
    unbounded = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(
        scheduler.address, unbounded, compression=compression
    ) as channel:
        raw: Any = channel
        path = f"/kvmesh.v1.SchedulerService/{rpc}"
        if rpc == "OrderWorker":
            call = raw.unary_unary(path)(bytes(BOMB_BYTES), timeout=30)
        else:
            call = raw.stream_stream(path)(iter([bytes(BOMB_BYTES)]), timeout=30)
        code = await call.code()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peak_bytes(scheduler.process.pid) - before < BOMB_BYTES // 4
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        raw = channel
        health = raw.unary_unary("/grpc.health.v1.Health/Check")
        assert await health(b"", timeout=10) == b"\x08\x01"  # it serves
