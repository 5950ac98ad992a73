"""Probes of a port: whether its service is ready or alive, and whether the port is free.

Tests: tests/unit/cli/test_probes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import grpc

from kvmesh.cli.health import CHECK, SERVING, check_health
from kvmesh.core.types import Endpoint

_TIMEOUT_S = 1.0
_PORTS_TRIED = 100
_LAST_PORT = 65_535

# Local services are called directly, without the environment's proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Probe:
    """Kind of a probe: gRPC health, `GET /ready`, or Redis PING.

    Attributes:
        password: Redis password; empty if it has none.
    """

    kind: Literal["grpc", "http", "redis"]
    endpoint: Endpoint
    password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Readiness:
    """A service's answer to a probe, within a second.

    Attributes:
        ready: whether it is ready for work.
        reason: its reason for not being ready; empty if it gives none.
    """

    ready: bool
    reason: str = ""


async def readiness(probe: Probe) -> Readiness:
    """Probes whether a service is ready."""
    if probe.kind == "redis":
        return Readiness(await answers_ping(probe.endpoint, probe.password))
    # While a process starts, its port usually refuses connections; this check is cheap.
    if not await accepts(probe.endpoint):
        return Readiness(False)
    if probe.kind == "grpc":
        state = await asyncio.to_thread(check_health, str(probe.endpoint), _TIMEOUT_S)
        return Readiness(state == SERVING)
    status, body = await asyncio.to_thread(http_get, f"http://{probe.endpoint}/ready")
    return Readiness(status == 200, "" if status == 200 else _reason(status, body))


def _reason(status: int, body: str) -> str:
    try:
        said = json.loads(body)
    except ValueError:
        return body.strip() if status == 0 else f"HTTP status {status}"
    error = said.get("error") if isinstance(said, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else f"HTTP status {status}"


async def is_ready(probe: Probe) -> bool:
    """Whether a service answers and is ready for work."""
    return (await readiness(probe)).ready


class Pulse:
    """Repeatedly checks over one connection that a process is alive, until it ends.

    Args:
        probe: gRPC health or Redis PING.
    """

    def __init__(self, probe: Probe) -> None:
        assert probe.kind in ("grpc", "redis"), probe.kind
        self._probe = probe
        self._channel: grpc.aio.Channel | None = None

    async def beat(self) -> bool:
        """Waits, without limit, for an answer; False if the port is closed.

        Any answer counts: a draining service, or one without health checks, is alive too.
        """
        if self._probe.kind == "redis":
            return await _redis_answers(self._probe.endpoint)
        if self._channel is None:
            # Its own subchannel pool, so that a restarted process does not inherit the backoff.
            options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
            self._channel = grpc.aio.insecure_channel(str(self._probe.endpoint), options=options)
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(CHECK)
        try:
            await check(b"")
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
        return True

    async def close(self) -> None:
        """Closes the connection."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


async def _redis_answers(endpoint: Endpoint) -> bool:
    try:
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        try:
            writer.write(b"PING\r\n")
            return bool(await reader.readline())  # a refusal shows too that it is alive
        finally:
            await _close(writer)
    except OSError:
        return False


async def accepts(endpoint: Endpoint) -> bool:
    """Whether a program accepts connections at the endpoint."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    except OSError:  # a timeout is one too
        return False
    await _close(writer)
    return True


async def answers_ping(endpoint: Endpoint, password: str = "") -> bool:
    """Whether a Redis with this password, or without one, answers PING."""
    return (await _ping(endpoint, password)).startswith(b"+PONG")


async def speaks_redis(endpoint: Endpoint) -> bool:
    """Whether a Redis listens at the endpoint, with or without a password."""
    return (await _ping(endpoint, "")).startswith((b"+PONG", b"-NOAUTH"))


async def _ping(endpoint: Endpoint, password: str) -> bytes:
    """Returns the answer to PING, or the refusal of the password; empty without an answer."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            try:
                if password:
                    writer.write(f"AUTH {password}\r\n".encode())
                    if not (answer := await reader.readline()).startswith(b"+OK"):
                        return answer
                writer.write(b"PING\r\n")
                return await reader.readline()
            finally:
                await _close(writer)
    except OSError:
        return b""


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def http_get(
    url: str, timeout_s: float = _TIMEOUT_S, tls: ssl.SSLContext | None = None
) -> tuple[int, str]:
    """Returns status and body of a GET; status 0 and the reason if no server answers.

    Args:
        tls: trusted CAs for an https:// URL; None: those of this machine.
    """
    opener = _OPENER
    if tls is not None:
        handler = urllib.request.HTTPSHandler(context=tls)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), handler)
    try:
        with opener.open(url, timeout=timeout_s) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        return 0, str(getattr(error, "reason", error))


def is_free(endpoint: Endpoint) -> bool:
    """Whether a server could listen at the endpoint."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections just ended counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((endpoint.host, endpoint.port))
        except OSError:
            return False
        return True


def next_free_port(host: str, port: int, besides: Collection[int] = ()) -> int:
    """Returns the first free port from `port` on; 0 if there is none among a hundred.

    Args:
        besides: ports that are reserved otherwise.
    """
    for candidate in range(port, min(port + _PORTS_TRIED, _LAST_PORT + 1)):
        if candidate not in besides and is_free(Endpoint(host, candidate)):
            return candidate
    return 0


def free_ports(host: str, num_ports: int) -> list[int]:
    """Returns different free ports; another program may still take one before its use."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(num_ports):
            probe = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.bind((host, 0))
            ports.append(int(probe.getsockname()[1]))
        return ports
