"""The admin port: an HTTP server for operators, separate from everything that clients can reach.

It serves metrics, `/debug/*` and actions. Services add routes with `context.admin.route(...)`.
Every call needs the token (`Authorization: Bearer`, or Basic with any name, so that a browser asks
for it). Without a token, the port serves only this host and only reads. A Unix socket can replace
the port or exist beside it; a user who can open its file may do everything.
Tests: tests/integration/test_admin.py.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from kvmesh.core.errors import ConfigError, InvalidRequestError
from kvmesh.core.text_files import UNREADABLE, why_unreadable
from kvmesh.rpc.listening_port import ListeningPort
from kvmesh.rpc.tls import server_context
from kvmesh.runtime.admin_config import AdminConfig
from kvmesh.runtime.admin_guard import HEADER_TIMEOUT_S, IDLE_TIMEOUT_S, AdminGuard
from kvmesh.runtime.http_connection import HttpConnection
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MIN_TOKEN_CHARS = 16
MAX_BODY_BYTES = 1 << 20
CLOSE_S = 0.5
"""Seconds before connections are closed that are still open when the service ends."""

_THIS_HOST = frozenset({"127.0.0.1", "::1", "localhost"})
_READING = frozenset({"GET", "HEAD"})


class AdminPort:
    """The routes of the admin port and their server.

    Attributes:
        port: the bound port; -1 without one.
        guard: guards the port's connections.

    Raises:
        ConfigError: the token file cannot be read, the token is too short, or one is missing.
    """

    def __init__(self, config: AdminConfig) -> None:
        self._config = config
        self._digest = _token_digest(config)
        self._ssl = server_context(config.tls, "server.admin.tls", ca_signs=False)
        self._routes: list[web.RouteDef] = []
        self._open: set[tuple[str, str]] = set()
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | ListeningPort | None = None
        self._socket: asyncio.Server | None = None
        self.guard = AdminGuard()
        self.port = -1
        if config.port >= 0 and not self._digest and config.host not in _THIS_HOST:
            raise ConfigError(
                f"server.admin.host {config.host} can be reached from outside: set "
                "server.admin.token_file or KVMESH_SERVER__ADMIN__TOKEN"
            )

    def route(self, method: str, path: str, handler: Handler, *, needs_token: bool = True) -> None:
        """Adds a route; call it before the service starts to serve.

        Args:
            method: `GET` reads; every other method is an action and needs a configured token.
            path: in aiohttp's format, for example `/debug/requests/{id}`.
            needs_token: False for a page that contains no data itself.
        """
        assert self._runner is None, "routes are added before the port is opened"
        self._routes.append(web.route(method, path, handler))
        if not needs_token:
            self._open.add((method, path))

    async def start(self) -> None:
        """Opens the configured port and socket.

        Raises:
            ConfigError: the port is taken, or the socket cannot be made.
        """
        config = self._config
        if not self._config.is_wanted:
            return
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(self._routes)
        app.on_response_prepare.append(_name_server)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        assert self._runner.server is not None, "set up"
        loop = asyncio.get_running_loop()
        connection = partial(HttpConnection, self._runner.server, loop, IDLE_TIMEOUT_S, _refusal)
        if config.socket:
            await self._open_socket(connection)
        if config.port >= 0:
            await self._open_port(self.guard.wrap(connection))

    async def _open_socket(self, connection: Callable[[], asyncio.Protocol]) -> None:
        path = self._config.socket
        try:
            self._socket = await asyncio.get_running_loop().create_unix_server(connection, path)
            await asyncio.to_thread(os.chmod, path, 0o600)
        except OSError as error:
            # Python notices itself that a path is too long, so that has no `strerror`.
            reason = error.strerror or error
            raise ConfigError(f"server.admin.socket {path}: {reason}") from error

    async def _open_port(self, connections: Callable[[], asyncio.Protocol]) -> None:
        config = self._config
        try:
            self._server, self.port = await self._listen(connections)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port}: the port is taken or the address "
                f"is not this host's ({error.strerror}); choose another with --server.admin.port"
            ) from error
        log.info(
            "admin_serving",
            address=f"{config.host}:{self.port}",
            tls=self._ssl is not None,
            needs_token=bool(self._digest),
        )

    async def _listen(
        self, connections: Callable[[], asyncio.Protocol]
    ) -> tuple[asyncio.Server | ListeningPort, int]:
        host, port = self._config.host, self._config.port
        if self._ssl is not None:
            over_tls = ListeningPort(self._ssl, HEADER_TIMEOUT_S, lambda _: connections())
            return over_tls, await over_tls.start(host, port)
        server = await asyncio.get_running_loop().create_server(connections, host, port)
        return server, server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Closes the port. May be called again."""
        for server in (self._server, self._socket):
            if server is not None:
                server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if self._check(request):
                self.guard.let_in(request.transport)
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            headers = {}
            if error.status == 401:
                headers["WWW-Authenticate"] = 'Basic realm="kvmesh admin"'
            return _refusal(error.status, error.text or error.reason, headers)

    def _check(self, request: web.Request) -> bool:
        """Checks a request; raises the answer to a request that is not allowed.

        Returns:
            Whether the caller has proved that it may call. Routes that are open to all prove
                nothing.
        """
        if _came_by_socket(request):
            return True
        resource = request.match_info.route.resource
        if resource is not None and (request.method, resource.canonical) in self._open:
            return False
        if not self._digest:
            self._check_without_token(request)
        elif not hmac.compare_digest(
            _digest(sent_token(request.headers.get("Authorization", ""))), self._digest
        ):
            raise web.HTTPUnauthorized(text="the admin token is missing or wrong")
        if request.method not in _READING and not _is_same_origin(request):
            raise web.HTTPForbidden(text="an action must not come from another site's page")
        return True

    def _check_without_token(self, request: web.Request) -> None:
        # A web page can make a browser call this host under the page's own name (DNS rebinding).
        name = _host_in(f"//{request.host}")
        if name not in _THIS_HOST:
            raise web.HTTPForbidden(text=f"ask for 127.0.0.1 or localhost, not {name}")
        if request.method not in _READING:
            raise web.HTTPForbidden(text="actions need a token: set server.admin.token_file")


def showing(answer: Callable[[Mapping[str, str]], Any]) -> Handler:
    """Makes a handler that answers with the result of `answer` for the query, as JSON."""

    async def show(request: web.Request) -> web.StreamResponse:
        try:
            return web.json_response(answer(request.query))
        except InvalidRequestError as error:
            raise web.HTTPBadRequest(text=str(error)) from error

    return show


def sent_token(authorization: str) -> str:
    """The token in an Authorization header (Bearer, or Basic's password); empty without one."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        pair = base64.b64decode(value.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return pair.partition(":")[2]


def _refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    body = {"error": {"message": message, "code": status}}
    return web.json_response(body, status=status, headers=headers)


async def _name_server(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "kvmesh"  # without the versions of the libraries in use


def _came_by_socket(request: web.Request) -> bool:
    """Whether the request came through the Unix socket, whose file permissions authorise it."""
    transport = request.transport
    # A Unix socket's name is a path, other names are tuples.
    return transport is not None and isinstance(transport.get_extra_info("sockname"), str)


def _is_same_origin(request: web.Request) -> bool:
    """Whether the page that sent an action is of this host. Only browsers send an origin."""
    origin = request.headers.get("Origin", "")
    return not origin or origin.partition("://")[2] == request.host


def _host_in(url: str) -> str | None:
    """The host's name; None if there is none, or the URL is invalid."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _token_digest(config: AdminConfig) -> bytes:
    """Digest of the configured token; empty without one."""
    token = config.token
    if config.token_file:
        try:
            token = Path(config.token_file).read_text(encoding="utf-8").strip()
        except UNREADABLE as error:
            raise ConfigError(
                f"server.admin.token_file {config.token_file}: {why_unreadable(error)}"
            ) from error
    elif not token:
        return b""
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(f"the admin token must have at least {MIN_TOKEN_CHARS} characters")
    return _digest(token)


async def json_body(request: web.Request) -> dict[str, object]:
    """Parses the JSON object in an action's body; empty without a body.

    Raises:
        web.HTTPBadRequest: the body is not a JSON object.
    """
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(text="the body cannot be read") from error
    try:
        content = json.loads(raw) if raw else {}
    except (ValueError, RecursionError) as error:
        raise web.HTTPBadRequest(text=f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise web.HTTPBadRequest(text="the body must be a JSON object")
    return content
