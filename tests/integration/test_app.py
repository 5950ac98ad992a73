"""The life of a service process: start, health, drain, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.core.config import option
from kvmesh.rpc.channels import open_channel
from kvmesh.runtime.app import ServerConfig, ServiceContext, StoppedError, serving
from kvmesh.telemetry.config import TelemetryConfig


@dataclass(frozen=True, slots=True)
class Config:
    """A service without work."""

    server: ServerConfig = field(default_factory=ServerConfig)
    telemetry: TelemetryConfig = option(TelemetryConfig, "")


async def _health(port: int) -> str:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def test_health_follows_the_life_of_the_service() -> None:
    order: list[str] = []

    async def build(config: Config, context: ServiceContext) -> None:
        async def hook() -> None:
            order.append(await _health(context.port))

        context.on_drain(hook)
        context.stack.callback(order.append, "closed")

    async with serving("test", Config(), build) as context:
        order.append(await _health(context.port))
        await context.drain(5)
    assert order == ["SERVING", "NOT_SERVING", "closed"]


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_stop_at_any_moment_of_the_start_is_clean(num_turns: int) -> None:
    stop = asyncio.Event()

    async def stop_soon() -> None:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        stop.set()

    async def build(config: Config, context: ServiceContext) -> None:
        if not num_turns:
            stop.set()
        context.stack.callback(asyncio.create_task(stop_soon()).cancel)

    with contextlib.suppress(StoppedError):
        async with serving("test", Config(), build, stop):
            await stop.wait()


async def test_health_can_be_watched() -> None:
    async def build(config: Config, context: ServiceContext) -> None:
        pass

    async with (
        serving("test", Config(), build) as context,
        open_channel(f"127.0.0.1:{context.port}") as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        seen = [(await watch.read()).status]
        await context.set_serving(False)
        seen.append((await watch.read()).status)
        watch.cancel()
    states = health_pb2.HealthCheckResponse
    assert seen == [states.SERVING, states.NOT_SERVING]


async def test_a_drain_that_takes_too_long_is_given_up() -> None:
    async def build(config: Config, context: ServiceContext) -> None:
        context.on_drain(asyncio.Event().wait)  # type: ignore[arg-type]

    async with serving("test", Config(), build) as context:
        async with asyncio.timeout(5):
            await context.drain(0.05)


async def test_a_crashed_background_task_is_noticed() -> None:
    async def crash() -> None:
        raise RuntimeError("lost the engine")

    async def build(config: Config, context: ServiceContext) -> None:
        context.spawn(crash(), "crash")

    async with serving("test", Config(), build) as context:
        error = await asyncio.wait_for(asyncio.shield(context.failure), 5)
        assert "lost the engine" in str(error)


@asynccontextmanager
async def scheduler_process(*flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.scheduler", *flags, stderr=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _line(process: Process, event: str) -> dict[str, str]:
    assert process.stderr is not None
    async with asyncio.timeout(30):
        async for raw in process.stderr:
            if not raw.startswith(b"{"):  # gRPC's own words on a taken port
                continue
            line: dict[str, str] = json.loads(raw)
            if line["event"] == event:
                return line
    raise AssertionError(f"the log ended without {event}")


async def python_process(code: str) -> Process:
    """Runs code in a process whose output can be read."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=PIPE, stderr=PIPE
    )


async def test_sigterm_drains_and_exits_with_zero() -> None:
    async with scheduler_process("--server.port", "0") as process:
        address = (await _line(process, "serving"))["address"]
        assert await _health(int(address.rpartition(":")[2])) == "SERVING"
        process.send_signal(signal.SIGTERM)
        await _line(process, "stopped")
        assert await asyncio.wait_for(process.wait(), 20) == 0


async def test_sigterm_in_a_start_that_waits_exits_with_zero() -> None:
    """And closes what the start has opened, in the task that opened it."""
    code = (
        "import asyncio\n"
        "from kvmesh.runtime.app import run_service\n"
        "from tests.integration.test_app import Config\n"
        "async def build(config, context):\n"
        "    await context.stack.enter_async_context(asyncio.timeout(60))\n"
        "    context.stack.callback(print, 'closed')\n"
        "    print('waits', flush=True)\n"
        "    await asyncio.Future()\n"
        "run_service('test', Config, build)\n"
    )
    process = await python_process(code)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"waits\n"
    process.send_signal(signal.SIGTERM)
    said, errors = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, said) == (0, b"closed\n")
    assert b'"stopped"' in errors
    assert b"Traceback" not in errors


async def test_a_service_ends_without_taking_its_modules_apart() -> None:
    """It still runs the functions registered with `atexit`."""
    code = (
        "import atexit\n"
        "from kvmesh.runtime.app import run_service\n"
        "from tests.integration.test_app import Config\n"
        "class Held:\n"
        "    def __del__(self):\n"
        "        print('taken apart')\n"
        "held = Held()\n"
        "atexit.register(print, 'registered')\n"
        "async def build(config, context):\n"
        "    context.stack.callback(print, 'closed')\n"
        "run_service('test', Config, build)\n"
    )
    process = await python_process(code)
    assert process.stderr is not None
    while b'"serving"' not in await process.stderr.readline():
        assert process.returncode is None
    process.send_signal(signal.SIGTERM)
    said, _ = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, said) == (0, b"closed\nregistered\n")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--server.port", "seven"], "server.port must be a whole number"),
        (["--config", "none.toml"], "none.toml: cannot be read"),
        (["--server.tls.cert", "no.pem"], "server.tls.cert: no.pem: cannot be read: No such file"),
    ],
)
async def test_a_config_error_says_what_is_wrong_and_exits_with_two(
    flags: list[str], text: str
) -> None:
    async with scheduler_process(*flags) as process:
        line = await _line(process, "cannot_start")
        assert text in line["error"]
        assert await asyncio.wait_for(process.wait(), 20) == 2


async def test_a_taken_port_says_which_flag_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with scheduler_process("--server.port", port) as process:
            assert "--server.port" in (await _line(process, "cannot_start"))["error"]


async def test_grpc_status_of_an_unknown_service_is_unimplemented() -> None:
    async def build(config: Config, context: ServiceContext) -> None:
        return

    async with (
        serving("test", Config(), build) as context,
        open_channel(f"127.0.0.1:{context.port}") as channel,
    ):
        call: Any = channel.unary_unary("/kvmesh.v1.Nothing/Do")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(b"")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(("port", "loaded"), [("-1", False), ("0", True)])
async def test_a_service_that_serves_collects_garbage_and_has_loaded_what_it_uses(
    port: str, loaded: bool
) -> None:
    code = (
        "import gc, sys\n"
        "from kvmesh.core.loading import load_without_collector\n"
        "load_without_collector()\n"
        "from kvmesh.runtime.app import run_service\n"
        "from tests.integration.test_app import Config\n"
        "async def build(config, context):\n"
        "    assert not gc.isenabled()\n"
        "    async def say():\n"
        "        print(gc.isenabled(), 'aiohttp' in sys.modules)\n"
        "    context.on_drain(say)\n"
        "run_service('test', Config, build)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, f"--server.admin.port={port}", stdout=PIPE, stderr=PIPE
    )
    assert process.stderr is not None
    while b'"serving"' not in await process.stderr.readline():
        assert process.returncode is None
    process.send_signal(signal.SIGTERM)
    said, _ = await process.communicate()
    assert said.split() == [b"True", str(loaded).encode()]
    assert process.returncode == 0
