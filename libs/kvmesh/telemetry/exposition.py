"""Metrics as text, also those of a service that runs as several processes.

These processes share a folder: each writes its values there, and any of them can compute the sums.
Tests: tests/integration/test_exposition.py.
"""

from __future__ import annotations

import contextlib
import operator
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvmesh.core.config import environment
from kvmesh.core.newcomers import Newcomers
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SHARED_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Name of the variable with the shared folder.

`prometheus_client` reads it at its import, so it must be set before a process starts.
"""


def shared_registry(folder: Path) -> CollectorRegistry:
    """The sums over all processes that write to `folder`, including ended ones."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return registry


CALL_S = 5.0
"""Seconds after which a scrape is cut."""

MAX_CALLS = 32
"""Maximum number of calls at once, each with a thread. If there are more, the oldest is cut."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 2 * MAX_CALLS

    def __init__(self, *args: Any) -> None:
        self._calls = Newcomers[Any](_cut, MAX_CALLS)
        self._began: dict[Any, float] = {}
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._began[request] = time.monotonic()
        self._calls.enter(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._calls.leave(request)
        self._began.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second: cuts calls of clients that are slow to send or to read."""
        due = time.monotonic() - CALL_S
        for request, began in tuple(self._began.items()):
            if began < due:
                _cut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs a caller that left, instead of a traceback on standard error."""
        log.debug("metrics_call_failed", error=repr(sys.exception()))


def _cut(request: socket.socket) -> None:
    """Cuts a call; its thread notices."""
    with contextlib.suppress(OSError):  # it has already ended
        request.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: scrapes are too frequent."""


def start_exposition_server(
    host: str, port: int, registry: CollectorRegistry
) -> tuple[WSGIServer, threading.Thread]:
    """Serves `/metrics` from a thread; the caller ends both.

    Always in the plain text format: in OpenMetrics, the library writes `vllm_` for `vllm:` to a
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


def exposition(without: str = "") -> bytes:
    """The metrics of this process, or of all processes that share its folder.

    Args:
        without: name of a label to leave out; series that differ only in it are summed.
    """
    folder = environment(SHARED_FOLDER_VARIABLE)
    registry = shared_registry(Path(folder)) if folder else prometheus_client.REGISTRY
    if not without:
        return prometheus_client.generate_latest(registry)
    told = CollectorRegistry(auto_describe=False)
    told.register(_Without(registry, without))
    return prometheus_client.generate_latest(told)


class _Without(Collector):
    """The metrics of a registry without one label."""

    def __init__(self, registry: CollectorRegistry, label: str) -> None:
        self._registry = registry
        self._label = label

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            if any(self._label in sample.labels for sample in metric.samples):
                metric = self._summed(metric)  # noqa: PLW2901
            yield metric

    def _summed(self, metric: Metric) -> Metric:
        sums: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
        for sample in metric.samples:
            labels = {name: each for name, each in sample.labels.items() if name != self._label}
            key = (sample.name, frozenset(labels.items()))
            value = sample.value
            if (before := sums.get(key)) is not None:
                # The sum began when the first of its series did.
                join = min if sample.name.endswith("_created") else operator.add
                value = join(before.value, value)
            sums[key] = Sample(sample.name, labels, value)
        summed = Metric(metric.name, metric.documentation, metric.type, metric.unit)
        summed.samples = list(sums.values())
        return summed
