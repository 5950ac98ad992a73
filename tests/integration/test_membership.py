"""A service with a secret: who may call, and what the others are told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.cli.__main__ import main
from kvmesh.core.mesh_secret import MeshSecret, new_secret
from kvmesh.rpc.channels import MeshAccess, bind_server, open_channel
from kvmesh.rpc.direct import OFFER_KEY
from kvmesh.rpc.fleet import FleetWatch
from kvmesh.rpc.membership import MAX_AGE_S, PROOF_KEY, MemberChannel, MembersOnly, call_proof
from kvmesh.runtime.app import ServerConfig, serving
from kvmesh.v1.scheduler_service_pb2 import OrderWorkerRequest, WatchFleetRequest, WorkerDrain
from kvmesh.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceServicer,
    SchedulerServiceStub,
    add_SchedulerServiceServicer_to_server,
)
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import build as build_scheduler

SECRET = MeshSecret(new_secret())
NOW = 1_800_000_000.0
ORDER = "/kvmesh.v1.SchedulerService/OrderWorker"
WATCH = "/kvmesh.v1.SchedulerService/WatchFleet"


class _Scheduler(SchedulerServiceServicer):
    """Counts calls that reach it."""

    num_calls = 0

    async def OrderWorker(self, request: Any, context: Any) -> Any:
        self.num_calls += 1
        await context.abort(grpc.StatusCode.NOT_FOUND, "reached")


@asynccontextmanager
async def closed_server(now_s: float = NOW) -> AsyncIterator[tuple[str, _Scheduler]]:
    """A server with the secret whose clock stands still."""
    interceptor = MembersOnly(SECRET, clock=lambda: now_s)
    server = grpc.aio.server(interceptors=[interceptor])
    servicer = _Scheduler()  # type: ignore[abstract]
    add_SchedulerServiceServicer_to_server(servicer, server)
    port = bind_server(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        await server.stop(0)


async def order(channel: grpc.aio.Channel, metadata: Any = None) -> tuple[grpc.StatusCode, str]:
    stub: Any = SchedulerServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.OrderWorker(OrderWorkerRequest(), metadata=metadata, timeout=10)
    return caught.value.code(), caught.value.details() or ""


REFUSED = {
    "nothing": ((), "server.secret_file"),
    "another secret": (
        (call_proof(MeshSecret(new_secret()), ORDER, NOW),),
        "another secret than this mesh",
    ),
    "another method": ((call_proof(SECRET, WATCH, NOW),), "another secret than this mesh"),
    "an old proof": ((call_proof(SECRET, ORDER, NOW - MAX_AGE_S - 1),), "clock differs by 301 s"),
    "a proof of the future": ((call_proof(SECRET, ORDER, NOW + MAX_AGE_S + 1),), "clock differs"),
    "an old proof with a new time": (
        ((PROOF_KEY, f"{int(NOW)}.{call_proof(SECRET, ORDER, NOW - 9)[1].partition('.')[2]}"),),
        "another secret than this mesh",
    ),
    "no hex": (((PROOF_KEY, f"{int(NOW)}.xyz"),), "malformed"),
    "no time": (((PROOF_KEY, "soon.00"),), "malformed"),
    "no proof": (((PROOF_KEY, f"{int(NOW)}."),), "another secret than this mesh"),
    "empty": (((PROOF_KEY, ""),), "malformed"),
}


@pytest.mark.parametrize("shown", REFUSED)
async def test_a_caller_without_the_secret_is_refused_and_told_why(shown: str) -> None:
    metadata, text = REFUSED[shown]
    async with closed_server() as (address, servicer), open_channel(address) as channel:
        code, details = await order(channel, metadata)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert text in details
    assert servicer.num_calls == 0


@pytest.mark.parametrize("age_s", [0, MAX_AGE_S, -MAX_AGE_S])
async def test_a_member_is_served_though_clocks_differ_a_little(age_s: int) -> None:
    async with closed_server() as (address, servicer):
        inner = grpc.aio.insecure_channel(address)
        async with MemberChannel(inner, SECRET, lambda: NOW - age_s) as channel:
            code, details = await order(channel, (("x-other", "kept"),))
    assert (code, details) == (grpc.StatusCode.NOT_FOUND, "reached")
    assert servicer.num_calls == 1


@asynccontextmanager
async def scheduler() -> AsyncIterator[tuple[str, MeshAccess]]:
    text = new_secret()
    config = SchedulerConfig(server=ServerConfig(secret=text))
    async with serving("scheduler", config, build_scheduler) as context:
        assert context.access.secret is not None
        yield f"127.0.0.1:{context.port}", context.access


async def test_health_is_open_and_reflection_is_not() -> None:
    async with scheduler() as (address, _), open_channel(address) as channel:
        raw: Any = channel
        assert await raw.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10) == b"\x08\x01"
        asked = raw.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(
            iter([b"\x3a\x00"]), timeout=10
        )
        assert await asked.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_tool_calls_with_the_header_that_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, file = new_secret(), tmp_path / "secret"
    file.write_text(text)
    config = SchedulerConfig(server=ServerConfig(secret_file=str(file)))
    nowhere = ("--state-dir", str(tmp_path))
    assert main(["proof", ORDER, *nowhere]) == 1
    assert "--secret-file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["proof", "OrderWorker", *nowhere])
    capsys.readouterr()
    assert main(["proof", ORDER.strip("/"), *nowhere, "--secret-file", str(file)]) == 0
    name, _, value = capsys.readouterr().out.strip().partition(": ")
    assert text not in value
    async with (
        serving("scheduler", config, build_scheduler) as context,
        open_channel(f"127.0.0.1:{context.port}") as channel,
    ):
        code, _ = await order(channel, ((name, value),))
        assert code is grpc.StatusCode.INVALID_ARGUMENT  # an order that is none: it was let in
        assert (await order(channel))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_a_service_that_others_reach_says_that_it_is_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for server, is_said in (
        (ServerConfig(host="0.0.0.0"), True),
        (ServerConfig(host="0.0.0.0", secret=new_secret()), False),
        (ServerConfig(), False),
    ):
        caplog.clear()
        async with serving("scheduler", SchedulerConfig(server=server), build_scheduler):
            assert (
                any(each.getMessage() == "anybody_may_call" for each in caplog.records) is is_said
            )


async def test_only_members_are_offered_a_direct_socket() -> None:
    async with scheduler() as (address, member):
        for access, is_offered in ((MeshAccess(), False), (member, True)):
            async with open_channel(address, access) as channel:
                raw: Any = channel
                # It stays open: a stream that has ended may be answered with its end alone.
                call = raw.stream_stream("/kvmesh.v1.SchedulerService/Route")(timeout=10)
                metadata = dict(await call.initial_metadata())
                call.cancel()
                assert (OFFER_KEY in metadata) is is_offered


async def test_members_watch_and_order_and_a_watcher_knows_that_it_is_refused() -> None:
    async with scheduler() as (address, member):
        async with open_channel(address, member) as channel:
            stub: Any = SchedulerServiceStub(channel)
            async for view in stub.WatchFleet(WatchFleetRequest(watcher="test"), timeout=10):
                assert not view.workers
                break
            with pytest.raises(grpc.aio.AioRpcError, match="no worker 'w'"):
                await stub.OrderWorker(
                    OrderWorkerRequest(worker_id="w", drain=WorkerDrain()), timeout=10
                )
        stranger = FleetWatch([address])
        refused: list[str] = []

        def leave() -> None:
            refused.append(stranger.refusal)
            raise _LeftError

        stranger.on_refusal(leave)
        with pytest.raises(_LeftError):
            await stranger.run()
        assert "server.secret_file" in refused[0]


class _LeftError(Exception):
    pass
