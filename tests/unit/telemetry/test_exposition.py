"""Processes that share a folder: any of them tells the sums of all, also of those that ended."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from kvmesh.core.config import child_environment
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
