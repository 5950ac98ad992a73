"""Builds the gateway. Tests: tests/integration/test_gateway_http.py."""

from __future__ import annotations

import asyncio
import random
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import prometheus_client
from aiohttp import web

from kvmesh.console.page import LocalRequests, SharePage
from kvmesh.console.request_log import RequestLog
from kvmesh.core.details import FleetWorker
from kvmesh.core.errors import ConfigError
from kvmesh.core.health import Health
from kvmesh.core.named_values import listed
from kvmesh.engine.model_source import find_model
from kvmesh.policy.crowd import Lag
from kvmesh.rpc.fleet import FleetWatch, RouteClient
from kvmesh.rpc.listening_port import ListeningPort
from kvmesh.rpc.tls import server_context
from kvmesh.runtime.app import ServiceContext
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from services.gateway.config import GatewayConfig, ModelConfig
from services.gateway.console import ConsoleSources, add_console
from services.gateway.entrance import Entrance
from services.gateway.frontend import Frontend
from services.gateway.fronts.arrivals import Arrivals, DatedConnection
from services.gateway.fronts.grpc_front import InferenceServicer
from services.gateway.fronts.http import HttpFront, http_refusal
from services.gateway.fronts.http_adapters import AdapterRoutes
from services.gateway.fronts.http_direct import DirectHttp
from services.gateway.fronts.http_guard import ConnectionGuard, Factory
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.lanes import Lanes
from services.gateway.request.mesh import Mesh
from services.gateway.request.routing import Router, candidate_of
from services.gateway.request.scenarios import Scenarios
from services.gateway.shared_redis import open_journal, open_redis
from services.gateway.tenants.admission import Admission
from services.gateway.tenants.tenancy import open_tenancy
from services.gateway.text.tokenizer import TOKENIZER_FILE, TextTokenizer, load_tokenizer
from services.gateway.wire.worker_sessions import WorkerSessions

log = event_logger(__name__)

HTTP_BACKLOG = 1024
LAG_INTERVAL_S = 0.05

HTTP_CLOSE_S = 0.5
"""Seconds before connections are closed that are still open after the drain."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway.

    Attributes:
        http_port: the bound HTTP port.
    """

    http_port: int
    entrance: Entrance
    sessions: WorkerSessions
    admission: Admission
    metrics: GatewayMetrics
    lanes: Lanes


async def build(config: GatewayConfig, context: ServiceContext) -> None:
    """Builds the gateway into `context`."""
    await start_gateway(config, context)


async def start_gateway(config: GatewayConfig, context: ServiceContext) -> Gateway:
    """Builds the gateway and returns its parts.

    Raises:
        ConfigError: the HTTP port is taken, or models, keys or targets cannot be used.
        CheckpointError: a model folder has no tokenizer.
    """
    models = [await _Model.load(each) for each in config.model.every]
    names = [each.config.name for each in models]
    targets = _schedulers(config)
    access = context.access
    sessions = WorkerSessions(access)
    context.stack.push_async_callback(sessions.close)
    fleet = FleetWatch(targets, access)
    fleet.on_change(lambda workers: _connect(sessions, workers, names))
    routes = RouteClient(targets, access)
    context.spawn(fleet.run(), "fleet watch")
    context.spawn(routes.run(), "route streams")

    metrics = _add_metrics(context)
    timeout_s = config.scheduler.route_timeout_s
    routers = [Router(each, fleet, routes, sessions.in_flight, timeout_s) for each in names]
    shown = RequestLog(time.time() - asyncio.get_running_loop().time())
    of_first = metrics.of(names[0])
    mesh = Mesh(
        *(routers[0], sessions, metrics, of_first, config.limits, random.Random()),
        log=shown,
        scenarios=Scenarios.of(config.scenario),
    )
    frontends = [
        Frontend(
            replace(mesh, router=router, of_model=metrics.of(model.config.name)),
            model.tokenizer,
            model.config.names,
        )
        for model, router in zip(models, routers, strict=True)
    ]
    context.spawn(_watch_lag(mesh.lanes.lag), "lag watch")
    for model in models:
        context.spawn(_speed_up(model, metrics), f"tokenizer of {model.config.name}")
    requests = LocalRequests(shown, metrics.refusals, asyncio.get_running_loop().time)
    if config.server.admin.port >= 0:
        console = ConsoleSources(names, targets, access, requests)
        for name, work in add_console(context.admin, console).items():
            context.spawn(work, name)
    elif config.server.admin.is_wanted:  # one of several processes: the parent serves the console
        SharePage(requests).add_to(context.admin)
    redis = open_redis(config, context)
    keys, admission = await open_tenancy(config, context, redis)
    journal = open_journal(config, context, metrics)
    entrance = Entrance(mesh, frontends, keys, admission, journal)
    context.on_drain(admission.drain)
    servicer = InferenceServicer(entrance)
    context.add_servicer(add_InferenceServiceServicer_to_server, servicer, public=True)
    front = HttpFront(entrance, config.http, int(time.time()))
    front.more_routes = AdapterRoutes(entrance, fleet, targets, access, config.http).routes()
    http_port = await _serve_http(front, config, ConnectionGuard(config.http, metrics), context)
    log.info("http_serving", address=f"{config.http.host}:{http_port}", model=", ".join(names))
    return Gateway(http_port, entrance, sessions, admission, metrics, mesh.lanes)


@dataclass(frozen=True, slots=True)
class _Model:
    """The text side of a model."""

    config: ModelConfig
    folder: Path
    tokenizer: TextTokenizer

    @classmethod
    async def load(cls, config: ModelConfig) -> _Model:
        folder = await asyncio.to_thread(find_model, config.path, has_weights=False)
        tokenizer = load_tokenizer(
            folder,
            use_generation_config=config.use_generation_config,
            tool_calls=config.tool_calls,
            reasoning_parser=config.reasoning_parser,
        )
        return cls(config, folder, tokenizer)


def _add_metrics(context: ServiceContext) -> GatewayMetrics:
    metrics = GatewayMetrics()
    prometheus_client.REGISTRY.register(metrics)
    context.stack.callback(prometheus_client.REGISTRY.unregister, metrics)
    return metrics


def _schedulers(config: GatewayConfig) -> tuple[str, ...]:
    targets = listed(config.scheduler.targets)
    if not targets:
        raise ConfigError("scheduler.targets is empty; give host:port of at least one scheduler")
    return targets


async def _watch_lag(lag: Lag) -> None:
    """Measures the event-loop lag, forever."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        lag.note(loop.time() - due)


async def _speed_up(model: _Model, metrics: GatewayMetrics) -> None:
    """Switches tokenising to the faster library if possible, and reports the library in use."""
    encoder = model.tokenizer.encoder
    await encoder.speed_up(model.folder / TOKENIZER_FILE)
    metrics.encodes_by(encoder.library)
    log.info("tokenizer", library=encoder.library, reason=encoder.reason)


def _connect(
    sessions: WorkerSessions, workers: tuple[FleetWorker, ...], names: Sequence[str]
) -> None:
    served = [each for each in workers if each.info.model in names]
    sessions.keep([candidate_of(each) for each in served if each.health is not Health.DEAD])
    # Requests on a dead worker move at once, not only when they have stalled for long enough.
    sessions.give_up({each.info.worker_id for each in served if each.health is Health.DEAD})


async def _serve_http(
    front: HttpFront, gateway: GatewayConfig, guard: ConnectionGuard, context: ServiceContext
) -> int:
    config, arrivals = gateway.http, Arrivals()
    tls = server_context(config.tls, "http.tls", ca_signs=False)
    # aiohttp cancels the handler of a client that leaves, and with it the work in the mesh.
    runner = web.AppRunner(front.app(), handler_cancellation=True, shutdown_timeout=HTTP_CLOSE_S)
    await runner.setup()
    context.stack.push_async_callback(runner.cleanup)
    assert runner.server is not None, "set up"
    direct = DirectHttp(front.calls, arrivals, config, front.is_draining)
    context.stack.push_async_callback(direct.close)
    loop = asyncio.get_running_loop()
    connection = partial(
        DatedConnection, arrivals, runner.server, loop, config.idle_timeout_s, http_refusal
    )
    try:
        port = await _listen(tls, guard, direct.wrap(connection), gateway, context)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; "
            "choose another with --http.port"
        ) from error
    return port


async def _listen(
    tls: ssl.SSLContext | None,
    guard: ConnectionGuard,
    factory: Factory,
    gateway: GatewayConfig,
    context: ServiceContext,
) -> int:
    # Only the guard limits the number of connections: it knows addresses.
    server = ListeningPort(
        tls,
        gateway.http.header_timeout_s,
        guard.wrap(factory),
        guard.turned_away,
        # Silent handshakes leave half of the port to other clients; the guard counts all others.
        limit=gateway.http.max_connections // 2 or sys.maxsize,
    )
    context.stack.callback(server.close)
    return await server.start(
        gateway.http.host,
        gateway.http.port,
        backlog=HTTP_BACKLOG,
        reuse_port=gateway.server.share_port,
    )
