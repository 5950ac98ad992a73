"""Runs a service: config, logs, gRPC server, health, admin port, signals, drain, exit code.

A service is `run_service(name, ConfigClass, build)`; `build(config, context)` is the only place
that constructs its objects. Life: start -> serve -> drain -> close. SIGTERM and SIGINT drain.
Tests: tests/integration/test_app.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc
import prometheus_client
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from kvmesh.core.config import load_config, option, secret
from kvmesh.core.errors import ConfigError, KvMeshError
from kvmesh.core.mesh_secret import THIS_HOST, load_secret
from kvmesh.core.named_values import listed
from kvmesh.core.open_files import raise_open_files
from kvmesh.core.process_end import end_process
from kvmesh.rpc.callers import RpcNames, RunningServer, check_callers
from kvmesh.rpc.channels import MeshAccess, PeerTls, bind_server, make_server
from kvmesh.rpc.direct import DirectListener
from kvmesh.rpc.reflection import SERVICE_NAME, ReflectionServicer
from kvmesh.runtime.admin_config import AdminConfig
from kvmesh.telemetry.config import TelemetryConfig
from kvmesh.telemetry.exposition import start_exposition_server
from kvmesh.telemetry.logs import configure_logging, event_logger, logs_for_people
from kvmesh.telemetry.tracing import Allowance, configure_tracing

if TYPE_CHECKING:
    from google.protobuf.descriptor import FileDescriptor

    from kvmesh.runtime.admin import AdminPort

log = event_logger(__name__)

FORCED_EXIT = 130
COLLECT_AFTER = 10_000

_LAST_TASKS_S = 0.5  # maximum seconds to wait for tasks that are about to end
_CANCEL_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The addresses and access rules of a service."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(0, "gRPC port; 0 picks a free one")
    direct_port: int = option(
        0, "port for direct streams between services; 0 picks a free one, -1 uses gRPC only"
    )
    share_port: bool = option(False, "let several processes of this service share the ports")
    advertise_host: str = option(
        "", "host name at which peers reach this service; empty: `server.host`"
    )
    drain_s: float = option(30.0, "maximum seconds that a drain waits for running requests")
    tls: PeerTls = option(PeerTls, "")
    callers: str = option(
        "",
        "certificate names that may call this service, as NAME or NAME:Rpc, "
        "comma-separated; empty: all callers",
    )
    secret: str = secret(
        "shared secret of the mesh: callers must prove that they hold it, and this service "
        "proves it to peers"
    )
    secret_file: str = option(
        "", "file with the shared secret of the mesh, the same for all services"
    )
    admin: AdminConfig = option(AdminConfig, "")


def mesh_access(config: ServerConfig) -> MeshAccess:
    """The credentials that a service shows to the other services of its mesh.

    Raises:
        ConfigError: the secret's file cannot be read, or the secret is too short.
    """
    return MeshAccess(config.tls, load_secret(config.secret_file, config.secret))


class ServiceConfig(Protocol):
    """The sections that every service's config has."""

    @property
    def server(self) -> ServerConfig:
        """The addresses of the service."""
        ...

    @property
    def telemetry(self) -> TelemetryConfig:
        """Logs, traces, metrics."""
        ...


ConfigT = TypeVar("ConfigT", bound=ServiceConfig)
ServicerT = TypeVar("ServicerT")

DrainHook = Callable[[], Awaitable[None]]


class StoppedError(Exception):
    """The service was told to stop before it served."""


class ServiceContext:
    """The argument of `build`: the server to add servicers to, and owners of what `build` makes.

    Attributes:
        server: serves the servicers that `add_servicer` adds.
        port: bound gRPC port.
        stack: enter every resource here; closed in reverse order.
        direct: for servicers with long-lived streams; `build` starts it.
        access: for calls to other services of the mesh.
        stop: when it is set, the service drains and ends.
    """

    def __init__(
        self, name: str, config: ServerConfig, stack: AsyncExitStack, stop: asyncio.Event
    ) -> None:
        self.name = name
        self.stack = stack
        self.stop = stop
        self._admin_config = config.admin
        if config.admin.is_wanted:
            _ = self.admin  # reports errors in its configuration now
        self.access = mesh_access(config)
        self._callers = _known_callers(config)
        self._is_open = _is_open(config, self.access)
        self._is_started = False
        self._rpcs = RpcNames()
        self._public = RpcNames()
        self.server: grpc.aio.Server = make_server(
            share_port=config.share_port,
            callers=self._callers,
            secret=self.access.secret,
            public=self._public.services,
        )
        self.port = bind_server(self.server, config.host, config.port, config.tls)
        self.host = config.advertise_host or config.host
        self.direct = DirectListener(
            config.host, config.direct_port, config.tls, config.advertise_host
        )
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._health = health.aio.HealthServicer()
        self._drain_hooks: list[DrainHook] = []
        self._close_hooks: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    @functools.cached_property
    def admin(self) -> AdminPort:
        """The admin port.

        Add routes before `build` returns; for routes that only show data use `show`.
        """
        # A service without an admin port does not load the HTTP server.
        from kvmesh.runtime.admin import AdminPort  # noqa: PLC0415

        return AdminPort(self._admin_config)

    def show(self, path: str, answer: Callable[[Mapping[str, str]], Any]) -> None:
        """Shows data as JSON on the admin port, if one is configured.

        Args:
            answer: makes the data from a query's fields; raises `InvalidRequestError` for bad
                fields.
        """
        if not self._admin_config.is_wanted:
            return
        from kvmesh.runtime.admin import showing  # noqa: PLC0415

        self.admin.route("GET", path, showing(answer))

    async def open_admin(self, config: ServiceConfig) -> None:
        """Opens the admin port, if one is configured.

        Args:
            config: the service's config, which the port shows.
        """
        if not self._admin_config.is_wanted:
            return
        from kvmesh.runtime.admin_routes import add_common_routes  # noqa: PLC0415

        add_common_routes(self.admin, self.name, config, self.stop.set)
        self.stack.push_async_callback(self.admin.close)
        await self.admin.start()

    def add_servicer(
        self, add: Callable[[ServicerT, Any], None], servicer: ServicerT, *, public: bool = False
    ) -> None:
        """Adds a servicer to the server; call it before `build` returns, or `announce` it there.

        Args:
            add: the function that gRPC generates, such as `add_SchedulerServiceServicer_to_server`.
            public: callers do not need the mesh's secret.
        """
        add(servicer, RunningServer(self.server) if self._is_started else self.server)
        if public:
            add(servicer, self._public)
        add(servicer, self._rpcs)

    def announce(self, *files: FileDescriptor) -> None:
        """Names the services of proto files that are added while the server runs."""
        for file in files:
            for service in file.services_by_name.values():
                self._rpcs.services.add(service.full_name)
                self._rpcs.names.update(service.methods_by_name)

    def complete_server(self) -> None:
        """Lets reflection list all servicers, and checks the callers' rules.

        Call it after adding them.

        Raises:
            ConfigError: a rule allows a call that no servicer has.
        """
        names = (*self._rpcs.services, health.SERVICE_NAME, SERVICE_NAME)
        reflection = ReflectionServicer(names)
        # Reflection is as open as the server: it needs the secret if no servicer is public.
        is_public = bool(self._public.services)
        self.add_servicer(add_ServerReflectionServicer_to_server, reflection, public=is_public)
        check_callers(self._callers, self._rpcs.names)
        if self._is_open and not is_public:
            log.warning(
                "anybody_may_call",
                hint="set server.secret_file, or mTLS with server.tls.*, for all services",
            )

    async def start(self) -> None:
        """Starts the server, and reports that the service serves."""
        self._is_started = True
        # gRPC cannot stop a server whose start was cancelled.
        starting = asyncio.ensure_future(self.server.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await starting
            raise
        await self.set_serving(True)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs a background task for the life of the service. Its crash ends the service."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def on_drain(self, hook: DrainHook) -> None:
        """Adds work for the drain. Hooks run in the order of adding and share its deadline."""
        self._drain_hooks.append(hook)

    def on_close(self, hook: Callable[[], None]) -> None:
        """Adds work for the moment before the streams are cut. A hook may be called again."""
        self._close_hooks.append(hook)

    async def set_serving(self, serving: bool) -> None:
        """Sets the gRPC health status that orchestrators ask for."""
        state = health_pb2.HealthCheckResponse
        await self._health.set("", state.SERVING if serving else state.NOT_SERVING)

    async def drain(self, deadline_s: float) -> None:
        """Ends readiness and lets running work finish."""
        await self.set_serving(False)
        try:
            async with asyncio.timeout(deadline_s):
                for hook in self._drain_hooks:
                    await hook()
        except TimeoutError:
            log.warning("drain_deadline_passed", deadline_s=deadline_s)

    async def close(self) -> None:
        """Ends background tasks and the server. May be called again."""
        for hook in self._close_hooks:
            hook()
        # Handlers of long-lived streams end only with the server.
        await self.server.stop(grace=0.2)
        await self.direct.close()
        # Repeatedly: `asyncio.wait_for` of Python 3.11, which redis-py uses, loses a cancel that
        # arrives together with its result.
        while self._tasks:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.wait(self._tasks, timeout=_CANCEL_AGAIN_S)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not self.failure.done():
            self.failure.set_result(error)


def _is_open(config: ServerConfig, access: MeshAccess) -> bool:
    """Whether callers on other hosts need no credentials."""
    tls = config.tls
    is_closed = access.secret is not None or bool(tls.cert and tls.ca and tls.verify_callers)
    return not is_closed and config.host not in THIS_HOST


def _known_callers(config: ServerConfig) -> frozenset[str]:
    names = frozenset(listed(config.callers))
    tls = config.tls
    if names and not (tls.cert and tls.ca and tls.verify_callers):
        raise ConfigError("server.callers needs mTLS: server.tls.cert, server.tls.ca")
    return names


Build = Callable[[ConfigT, ServiceContext], Awaitable[None]]


@asynccontextmanager
async def serving(
    name: str, config: ConfigT, build: Build[ConfigT], stop: asyncio.Event | None = None
) -> AsyncIterator[ServiceContext]:
    """Builds a service and serves it inside the current loop; in-process tests use it too.

    Raises:
        StoppedError: `stop` was set before the service served.
    """
    stop = stop or asyncio.Event()
    async with AsyncExitStack() as stack:
        async with _ended_by(stop):
            context = ServiceContext(name, config.server, stack, stop)
            stack.push_async_callback(context.close)  # for a failing build
            await context.set_serving(False)
            await build(config, context)
            context.complete_server()
            await context.open_admin(config)
            # Pushed again, so that streams and tasks end before the objects that they use are
            # closed.
            stack.push_async_callback(context.close)
            await context.start()
        log.info("serving", address=f"{config.server.host}:{context.port}")
        yield context


@asynccontextmanager
async def _ended_by(stop: asyncio.Event) -> AsyncIterator[None]:
    """Cancels the context's block when `stop` is set.

    Raises:
        StoppedError: the block was cancelled.
    """
    starting = asyncio.current_task()
    assert starting is not None, "a coroutine runs in a task"

    async def watch() -> None:
        await stop.wait()
        starting.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if stop.is_set() and not starting.uncancel():
            raise StoppedError from None
        raise
    finally:
        watching.cancel()


async def _main(name: str, config: ConfigT, build: Build[ConfigT], collect_after: int) -> int:
    stop = asyncio.Event()
    _install_signals(stop)
    try:
        code = await _serve(name, config, build, collect_after, stop)
    except StoppedError:
        code = 0
    await _let_tasks_end()
    if not code:
        log.info("stopped")
    return code


async def _serve(
    name: str, config: ConfigT, build: Build[ConfigT], collect_after: int, stop: asyncio.Event
) -> int:
    async with serving(name, config, build, stop) as context:
        gc.enable()  # see `kvmesh.core.loading`
        # All present objects stay: later collections need not walk them, which costs 30 ms each
        # time.
        gc.collect()
        gc.freeze()
        # Few objects of a request are in cycles. Rare collections cost 1 % instead of 4 %.
        gc.set_threshold(collect_after, 20, 20)
        stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        crashed: asyncio.Future[Any] = context.failure
        await asyncio.wait({stopping, crashed}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if context.failure.done():
            if isinstance(error := context.failure.result(), ConfigError):
                raise error  # reported like an error of the start
            log.failure("background_task_failed", context.failure.result())
            return 1
        log.info("draining")
        await context.drain(config.server.drain_s)
    return 0


async def _let_tasks_end() -> None:
    """Waits for tasks that are about to end.

    A call's own task inside gRPC ends a moment after `server.stop` returns. If the closing loop
    cancels it in that moment, gRPC prints a traceback although the stop succeeded.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=_LAST_TASKS_S)


def _install_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def ask() -> None:
        if stop.is_set():  # the second signal does not wait for running work
            raise SystemExit(FORCED_EXIT)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)


def run_service(
    name: str,
    config_class: type[ConfigT],
    build: Build[ConfigT],
    *,
    collect_after: int = COLLECT_AFTER,
) -> None:
    """Runs a service until a signal; exits the process with 0, 1 (crash) or 2 (config).

    Args:
        collect_after: number of new objects after which the garbage collector looks for cycles,
            while everything waits.
    """
    configure_logging(name)  # for errors before the config is known
    raise_open_files()
    try:
        config = load_config(config_class, sys.argv[1:], prog=f"python -m services.{name}")
        telemetry = config.telemetry
        configure_logging(name, telemetry.log.level, telemetry.log.format)
        trace = telemetry.trace
        with contextlib.ExitStack() as stack:
            allowance = Allowance(trace.ratio, trace.per_second)
            stack.enter_context(configure_tracing(name, trace.exporter, trace.target, allowance))
            if telemetry.metrics_port >= 0:
                stack.enter_context(metrics_server(config.server.host, telemetry.metrics_port))
            code = uvloop.run(_main(name, config, build, collect_after))
    except KvMeshError as error:
        cannot_start(name, error)
        code = 2
    end_process(code)


def cannot_start(name: str, error: KvMeshError) -> None:
    """Reports why a service does not start: a plain line for people, an event for a log."""
    if logs_for_people():
        sys.stderr.write(f"{name}: {error}\n")
    else:
        log.error("cannot_start", error=str(error))


@contextlib.contextmanager
def metrics_server(
    host: str, port: int, registry: prometheus_client.CollectorRegistry = prometheus_client.REGISTRY
) -> Iterator[None]:
    """Serves `/metrics` from a separate thread.

    Raises:
        ConfigError: the port is taken.
    """
    try:
        server, thread = start_exposition_server(host, port, registry)
    except OSError as error:
        raise ConfigError(
            f"metrics port {port} is taken; choose another with --telemetry.metrics-port"
        ) from error
    log.info("metrics_serving", address=f"{host}:{server.server_port}")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=2)
