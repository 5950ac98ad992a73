"""RedisProcess: starts empty, ends, and tells why it cannot start."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvmesh.metadata import server_binary
from kvmesh.metadata.server_binary import (
    RedisProcess,
    RedisStartError,
    find_redis_binary,
    free_port,
)
from tests.redis_server import redis_process


def command(port: int, line: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(line + b"\r\n")
        return connection.recv(100)


def test_restart_on_the_same_port_is_empty() -> None:
    with redis_process() as process:
        assert command(process.port, b"SET a 1") == b"+OK\r\n"
        first = process.pid
        process.stop(kill=True)
        assert process.pid is None
        process.start()
        assert process.pid != first
        assert command(process.port, b"DBSIZE") == b":0\r\n"


def test_stop_ends_the_process_and_can_be_repeated(tmp_path: Path) -> None:
    with redis_process(tmp_path) as process:
        pid = process.pid
        assert pid is not None
        process.stop()
        process.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_taken_port_is_an_error_even_if_another_redis_answers_there() -> None:
    with redis_process() as first:
        binary = find_redis_binary()
        assert binary is not None
        second = RedisProcess(binary, first.port)
        with pytest.raises(RedisStartError, match=str(first.port)):
            second.start()
        assert second.pid is None
        assert command(first.port, b"PING") == b"+PONG\r\n"


def test_a_chosen_port_that_was_taken_meanwhile_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with redis_process() as first:
        choices = iter([first.port, first.port, free_port()])
        monkeypatch.setattr(server_binary, "free_port", lambda: next(choices))
        with redis_process() as second:
            assert second.port != first.port
            assert command(second.port, b"PING") == b"+PONG\r\n"
            port = second.port
            second.stop(kill=True)
            with socket.create_server(("127.0.0.1", port)), pytest.raises(RedisStartError):
                second.start()  # clients know its port by now
        assert command(first.port, b"PING") == b"+PONG\r\n"


def test_chosen_ports_are_none_that_connections_get() -> None:
    told = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not told.exists():
        pytest.skip("the kernel does not tell its range")
    first, last = map(int, told.read_text().split())
    assert not any(first <= free_port() <= last for _ in range(100))


def test_binary_on_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_binary() == binary
    monkeypatch.setenv("PATH", "")
    assert find_redis_binary() != binary
