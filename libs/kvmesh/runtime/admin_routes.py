"""The admin routes that every service has.

Tests: tests/integration/test_admin.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from kvmesh.core.config import format_config
from kvmesh.runtime.admin import AdminPort, json_body
from kvmesh.telemetry.exposition import CONTENT_TYPE, exposition
from kvmesh.telemetry.logs import event_logger, set_level

log = event_logger(__name__)


def add_common_routes(admin: AdminPort, name: str, config: Any, stop: Callable[[], None]) -> None:
    """Adds `/health`, `/metrics`, `/debug/config`, `/debug/tasks` and two actions.

    Args:
        name: name of the service.
        config: shown with its secrets masked.
        stop: starts the drain that ends the process.
    """
    add_service_routes(admin, name, config, stop)
    admin.route("GET", "/metrics", _metrics)
    admin.route("GET", "/debug/tasks", _tasks)
    admin.route("POST", "/admin/log-level", _set_log_level)


def add_service_routes(admin: AdminPort, name: str, config: Any, stop: Callable[[], None]) -> None:
    """Adds the common routes that do not depend on the process that answers."""

    async def health(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "service": name})

    async def show_config(_request: web.Request) -> web.StreamResponse:
        return web.Response(text=format_config(config))

    async def drain(_request: web.Request) -> web.StreamResponse:
        log.info("drain_asked")
        stop()
        return web.json_response({"status": "draining"}, status=202)

    admin.route("GET", "/health", health, needs_token=False)
    admin.route("GET", "/debug/config", show_config)
    admin.route("POST", "/admin/drain", drain)


async def _metrics(_request: web.Request) -> web.StreamResponse:
    return metrics_answer(exposition())


def metrics_answer(text: bytes) -> web.Response:
    """Makes an answer from an exposition."""
    return web.Response(
        body=text,
        headers={"Content-Type": CONTENT_TYPE},
    )


async def _tasks(_request: web.Request) -> web.StreamResponse:
    """All tasks of the event loop, and the line at which each waits."""
    return web.json_response([_described(task) for task in asyncio.all_tasks()])


def _described(task: asyncio.Task[Any]) -> dict[str, str]:
    frames = task.get_stack(limit=1)
    at = f"{frames[0].f_code.co_qualname}:{frames[0].f_lineno}" if frames else ""
    return {"name": task.get_name(), "at": at}


async def _set_log_level(request: web.Request) -> web.StreamResponse:
    return set_log_level(await json_body(request))


def set_log_level(body: dict[str, object]) -> web.Response:
    """Sets the log level that an action's body names, and answers.

    Raises:
        web.HTTPBadRequest: the body names no level.
    """
    level = str(body.get("level", ""))
    if not set_level(level):
        raise web.HTTPBadRequest(text="level: one of debug, info, warning, error")
    log.info("log_level_set", level=level)
    return web.json_response({"level": level})
