"""Serves the console on an admin port: the page, one snapshot, a stream of them, one request.

The page is plain HTML, CSS and JavaScript modules from this package; it loads nothing from other
sites. In a gateway of several processes, each process serves its share to the parent, which has
the page. Tests: tests/integration/test_console.py, tests/e2e/test_console_page.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, Protocol

from aiohttp import web

from kvmesh.console.request_log import RequestLog
from kvmesh.console.rows import Json, timeline
from kvmesh.console.share import Share, share_of, share_to_json
from kvmesh.console.snapshot import ConsoleView, history, snapshot
from kvmesh.runtime.admin import AdminPort

INTERVAL_S = 1.0
"""Seconds between two snapshots of a stream."""

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


SHARE_PATH = "/console/share"
REQUEST_PATH = "/console/requests/"


class Requests(Protocol):
    """The console's source of a gateway's requests."""

    async def share(self, *, with_rows: bool) -> Share:
        """All requests now."""
        ...

    async def find(self, name: str) -> Json | None:
        """The timeline of one request, by its id or the client's; None if it is not remembered."""
        ...


class LocalRequests:
    """Requests of this process.

    Args:
        refusals: returns the refusals since start, by (stage, reason).
        now: the log's clock.
    """

    def __init__(
        self,
        log: RequestLog,
        refusals: Callable[[], Mapping[tuple[str, str], float]],
        now: Callable[[], float],
    ) -> None:
        self._log = log
        self._refusals = refusals
        self._now = now

    async def share(self, *, with_rows: bool) -> Share:
        """See `Requests.share`."""
        return share_of(self._log, self._refusals(), self._now(), with_rows=with_rows)

    async def find(self, name: str) -> Json | None:
        """See `Requests.find`."""
        trace = self._log.find(name)
        return None if trace is None else timeline(trace, self._log, self._now())


class SharePage:
    """Routes of a process whose share another process shows in its console."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def add_to(self, admin: AdminPort) -> None:
        """Adds the routes."""
        admin.route("GET", SHARE_PATH, self._share)
        admin.route("GET", REQUEST_PATH + "{request_id}", self._request)

    async def _share(self, request: web.Request) -> web.StreamResponse:
        share = await self._requests.share(with_rows="rows" in request.query)
        return _json(share_to_json(share))

    async def _request(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["request_id"]
        found = await self._requests.find(name)
        if found is None:
            raise web.HTTPNotFound(text=f"{name!r} is not among the requests that are remembered")
        return _json(found)


class ConsolePage(SharePage):
    """Routes of the console.

    Args:
        requests: requests of the whole gateway.
        view: makes the console's view around these requests.
    """

    def __init__(self, requests: Requests, view: Callable[[Share], ConsoleView]) -> None:
        super().__init__(requests)
        self._view = view
        static = files("kvmesh.console") / "static"
        self._files = {
            each.name: each.read_bytes() for each in static.iterdir() if _kind(each.name) in _TYPES
        }

    def add_to(self, admin: AdminPort) -> None:
        """Adds the routes."""
        super().add_to(admin)
        admin.route("GET", "/", self._to_console, needs_token=False)
        admin.route("GET", "/console", self._index)
        admin.route("GET", "/console/snapshot", self._snapshot)
        admin.route("GET", "/console/events", self._events)
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
        view = await self._now()
        return _json(snapshot(view) | {"history": history(view.sampler.samples)})

    async def _now(self) -> ConsoleView:
        return self._view(await self._requests.share(with_rows=True))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
        )
        await response.prepare(request)
        while True:
            text = _dumps(snapshot(await self._now()))
            await response.write(f"event: snapshot\ndata: {text}\n\n".encode())
            await asyncio.sleep(INTERVAL_S)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _dumps(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _json(content: Any) -> web.Response:
    return web.json_response(content, dumps=_dumps, headers={"Cache-Control": "no-store"})
