"""Serves the console on an admin port: the page, one snapshot, a stream of them, one request.

The page is plain HTML, CSS and JavaScript modules from this package; nothing is loaded from
elsewhere. Tests: tests/integration/test_console.py, tests/e2e/test_console_page.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from aiohttp import web

from kvmesh.console.snapshot import ConsoleView, history, snapshot, timeline
from kvmesh.runtime.admin import AdminPort

INTERVAL_S = 1.0
"""Time between two snapshots of a stream."""

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ConsolePage:
    """Routes of the console.

    Args:
        view: reads the mesh now.
        now: the request log's clock.
    """

    def __init__(self, view: Callable[[], ConsoleView], now: Callable[[], float]) -> None:
        self._view = view
        self._now = now
        static = files("kvmesh.console") / "static"
        self._files = {
            each.name: each.read_bytes() for each in static.iterdir() if _kind(each.name) in _TYPES
        }

    def add_to(self, admin: AdminPort) -> None:
        """Adds the routes."""
        admin.route("GET", "/", self._to_console, needs_token=False)
        admin.route("GET", "/console", self._index)
        admin.route("GET", "/console/snapshot", self._snapshot)
        admin.route("GET", "/console/events", self._events)
        admin.route("GET", "/console/requests/{request_id}", self._request)
        admin.route("GET", "/console/{name}", self._file)

    async def _to_console(self, _request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("/console")

    async def _index(self, _request: web.Request) -> web.StreamResponse:
        return self._answer("index.html")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound(text=f"no file {name!r} in the console")
        return self._answer(name)

    def _answer(self, name: str) -> web.Response:
        kind = _TYPES[_kind(name)]
        body = self._files[name]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)

    async def _snapshot(self, _request: web.Request) -> web.StreamResponse:
        view = self._view()
        content = snapshot(view, self._now()) | {"history": history(view.sampler.samples)}
        return _json(content)

    async def _request(self, request: web.Request) -> web.StreamResponse:
        view, name = self._view(), request.match_info["request_id"]
        trace = view.log.find(name)
        if trace is None:
            raise web.HTTPNotFound(text=f"{name!r} is not among the requests that are remembered")
        return _json(timeline(trace, view.log, self._now()))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
        )
        await response.prepare(request)
        while True:
            text = _dumps(snapshot(self._view(), self._now()))
            await response.write(f"event: snapshot\ndata: {text}\n\n".encode())
            await asyncio.sleep(INTERVAL_S)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _dumps(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _json(content: Any) -> web.Response:
    return web.json_response(content, dumps=_dumps, headers={"Cache-Control": "no-store"})
