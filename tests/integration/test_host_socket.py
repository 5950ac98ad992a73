"""Unix sockets of workers that live, that were killed, and that start at the same time."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.core.own_folder import own_temporary_folder
from kvmesh.transfer.channel_pool import SendOptions
from kvmesh.transfer.host import host_id
from kvmesh.transfer.host_socket import listen_on_host
from tests.transfer_pair import running_pair, whole

_STARTS = """
import sys
from kvmesh.transfer.host import host_id
from kvmesh.transfer.host_socket import listen_on_host
listener, path = listen_on_host(host_id())
print(path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where they lie; pytest's own folders are too deep for a socket."""
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        monkeypatch.setenv("TMPDIR", place)
        yield own_temporary_folder()


def start() -> subprocess.Popen[str]:
    """A process that listens."""
    return subprocess.Popen(
        [sys.executable, "-c", _STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def path_of(process: subprocess.Popen[str]) -> Path:
    """Where it listens, once it does."""
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def is_heard(path: Path) -> bool:
    """Whether somebody listens."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_who_starts_removes_the_sockets_of_the_killed_and_no_others(folder: Path) -> None:
    killed, running = start(), start()
    left, kept = path_of(killed), path_of(running)
    killed.kill()
    killed.communicate()
    assert {*folder.iterdir()} == {left, kept}

    listener, own = listen_on_host(host_id())

    assert {*folder.iterdir()} == {kept, own}
    assert is_heard(kept)
    assert is_heard(own)
    listener.close()
    running.communicate("")
    assert running.returncode == 0


def test_a_worker_that_takes_nobody_in_for_long_keeps_its_socket(folder: Path) -> None:
    listener, path = listen_on_host(host_id())
    waiting = []
    while True:
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        waiting.append(client)
        if client.connect_ex(str(path)):
            break
    other, _ = listen_on_host(host_id())
    assert path.exists()
    for each in (*waiting, listener, other):
        each.close()


def test_sockets_of_other_hosts_stay(folder: Path) -> None:
    elsewhere, path = listen_on_host("another-boot")
    elsewhere.close()  # as its host sees it, somebody listens
    listener, own = listen_on_host(host_id())
    assert {*folder.iterdir()} == {path, own}
    listener.close()


def test_many_that_start_at_once_are_all_heard(folder: Path) -> None:
    started = [start() for _ in range(8)]
    paths = {path_of(process) for process in started}
    assert {*folder.iterdir()} == paths
    assert all(is_heard(path) for path in paths)
    for process in started:
        process.communicate("")


async def test_a_server_that_ends_leaves_nothing(folder: Path) -> None:
    async with running_pair(SendOptions(kinds=("shm",))) as pair:
        await pair.pool.put(pair.reservation, whole(1))
        assert len(os.listdir(folder)) == 1
        closing = asyncio.create_task(pair.server.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        assert not os.listdir(folder), "though cut off while it waits for connections"


async def test_a_folder_too_deep_for_a_socket_is_left_empty(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    deep = folder / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    async with running_pair(SendOptions(kinds=("shm", "tcp"))) as pair:
        assert pair.reservation.host_route is None
        await pair.pool.put(pair.reservation, whole(1))
    assert not any(own_temporary_folder().iterdir())
