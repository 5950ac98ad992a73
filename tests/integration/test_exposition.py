"""Processes that share a folder: any of them tells the sums of all, also of those that ended."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from kvmesh.core.config import child_environment
from kvmesh.telemetry import exposition as module
from kvmesh.telemetry.exposition import (
    SHARED_FOLDER_VARIABLE,
    exposition,
    shared_registry,
    start_exposition_server,
)

COUNT = """
import sys
from prometheus_client import Counter
from kvmesh.telemetry.exposition import exposition
Counter("requests", "Requests.").inc(int(sys.argv[1]))
print(exposition().decode())
"""


def _process(folder: Path, count: int) -> str:
    return subprocess.run(
        [sys.executable, "-c", COUNT, str(count)],
        env=child_environment({SHARED_FOLDER_VARIABLE: str(folder)}),
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_counters_add_up_over_processes(tmp_path: Path) -> None:
    assert "requests_total 2.0" in _process(tmp_path, 2)
    assert "requests_total 5.0" in _process(tmp_path, 3)
    assert shared_registry(tmp_path).get_sample_value("requests_total") == 5.0


def test_alone_a_process_tells_its_own() -> None:
    assert b"python_info" in exposition()


SUM = """
import sys
from prometheus_client import Counter, Gauge
from kvmesh.telemetry.exposition import exposition
used = Counter("used", "Used.", ["tenant", "kind"])
for tenant, kind, count in (("acme", "a", 1), ("beta", "a", 2), ("", "a", 4), ("acme", "b", 8)):
    used.labels(tenant, kind).inc(count)
Counter("other", "Other.", ["kind"]).labels("a").inc(5)
print(exposition(without="tenant").decode())
"""


@pytest.mark.parametrize("shared", [False, True])
def test_a_label_is_left_out_and_its_series_are_added_up(tmp_path: Path, shared: bool) -> None:
    env = {SHARED_FOLDER_VARIABLE: str(tmp_path)} if shared else {}
    text = subprocess.run(
        [sys.executable, "-c", SUM],
        env=child_environment(env),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "acme" not in text
    assert "tenant" not in text
    lines = text.splitlines()
    assert lines.count("# TYPE used_total counter") == 1
    assert {'used_total{kind="a"} 7.0', 'used_total{kind="b"} 8.0'} <= set(lines)
    assert 'other_total{kind="a"} 5.0' in lines
    assert len([line for line in lines if line.startswith("used_total{")]) == 2


# What Prometheus asks for, before and since 3.0.
ACCEPT = (
    "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;q=0.2",
    "",
)


@pytest.mark.parametrize("accept", ACCEPT)
def test_names_have_their_colons_for_every_prometheus(accept: str) -> None:
    registry = CollectorRegistry()
    Counter("vllm:prompt_tokens", "Tokens.", registry=registry).inc(3)
    server, thread = start_exposition_server("127.0.0.1", 0, registry)
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        request = urllib.request.Request(url, headers={"Accept": accept})
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert b"\nvllm:prompt_tokens_total 3.0\n" in answer.read()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _call(port: int, data: bytes) -> socket.socket:
    caller = socket.create_connection(("127.0.0.1", port), timeout=30)
    caller.sendall(data)
    return caller


def _ended(caller: socket.socket) -> bool:
    """Waits until the other end has cut it."""
    with contextlib.suppress(ConnectionResetError):
        while caller.recv(65536):
            pass
    caller.close()
    return True


def test_callers_that_do_not_finish_are_cut(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "CALL_S", 0.1)
    server, thread = start_exposition_server("127.0.0.1", 0, CollectorRegistry())
    try:
        slow = [_call(server.server_port, b"GET /metrics HTTP/1.1\r\nX: ") for _ in range(4)]
        for caller in (_call(server.server_port, b"GET /metrics HTTP/1.1\r\n") for _ in range(4)):
            # Reset: what is sent to it fails.
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            caller.close()
        assert all(_ended(caller) for caller in slow)
        monkeypatch.setattr(module, "CALL_S", 60.0)  # who says all is not hurried
        with _call(server.server_port, b"GET /metrics HTTP/1.0\r\n\r\n") as good:
            assert good.recv(65536).startswith(b"HTTP/1.0 200")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert capfd.readouterr().err == ""


def test_more_callers_than_threads_cut_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_S", 60.0)
    monkeypatch.setattr(module, "MAX_CALLS", 3)
    server, thread = start_exposition_server("127.0.0.1", 0, CollectorRegistry())
    try:
        slow = [_call(server.server_port, b"GET /metrics HTTP/1.1\r\nX: ") for _ in range(6)]
        assert all(_ended(caller) for caller in slow[:3])
        for caller in slow[3:]:
            caller.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
