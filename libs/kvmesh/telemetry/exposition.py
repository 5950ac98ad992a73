"""Metrics as text, also those of a service that runs as several processes.

Such processes share a folder: each writes its values there, and any of them can tell the sums.
Tests: tests/unit/telemetry/test_exposition.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from kvmesh.core.config import environment

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SHARED_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Read by `prometheus_client` when it is imported: set it before a process starts."""


def shared_registry(folder: Path) -> CollectorRegistry:
    """The sums over all processes that write to `folder`, those that ended included."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return registry


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is not worth a line."""


def start_exposition_server(
    host: str, port: int, registry: CollectorRegistry
) -> tuple[WSGIServer, threading.Thread]:
    """Serves `/metrics` from a thread; the caller ends both.

    Always the plain text format: in OpenMetrics the library writes `vllm_` for `vllm:` to a
    Prometheus before 3.0, so that dashboards and alerts find nothing.

    Raises:
        OSError: the port is taken.
    """

    def answer(_environ: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", CONTENT_TYPE)])
        return [prometheus_client.generate_latest(registry)]

    server = make_server(host, port, answer, _Server, handler_class=_Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True, name="metrics")
    thread.start()
    return server, thread


def exposition() -> bytes:
    """The metrics of this process, or of all that it shares a folder with."""
    folder = environment(SHARED_FOLDER_VARIABLE)
    if not folder:
        return prometheus_client.generate_latest()
    return prometheus_client.generate_latest(shared_registry(Path(folder)))
