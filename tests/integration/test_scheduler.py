from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.core.errors import ConfigError, LostError
from kvmesh.core.peers import PeerCheck, PeerReport
from kvmesh.core.types import (
    BlockHash,
    Placement,
    Refusal,
    RefusalReason,
    RequestId,
    Role,
    RouteCause,
    WorkerId,
    WorkerInfo,
)
from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.metadata.redis_fleet import RedisFleetStore
from kvmesh.rpc.channels import open_channel
from kvmesh.rpc.convert_worker import worker_info_to_proto
from kvmesh.rpc.fleet import FleetWatch, RouteClient
from kvmesh.rpc.registration import PeerHooks
from kvmesh.runtime.app import ServiceContext, serving
from kvmesh.v1 import kv_manager_service_pb2, kv_manager_service_pb2_grpc, types_pb2
from kvmesh.v1.scheduler_service_pb2 import RegisterWorkerRequest, RouteRequest, RouteResponse
from kvmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from services.scheduler.config import (
    FleetConfig,
    FleetStoreConfig,
    KvManagerTarget,
    RoutingConfig,
    SchedulerConfig,
)
from services.scheduler.fleet import Fleet
from services.scheduler.peers import Peers
from tests.integration.scheduler_mesh import (
    EXAMPLE,
    SOON_S,
    FakeWorker,
    address,
    first_names,
    in_background,
    mesh,
    scheduler,
)
from tests.redis_server import redis_url
from tests.unit.policy.fleet_examples import query, worker_info
from tests.waiting import until


class TestReports:
    async def test_a_load_that_stays_is_confirmed_and_one_that_changes_is_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reports, confirmed = [], []
        report, confirm = Fleet.report, Fleet.confirm

        def note_report(*arguments: Any) -> bool:
            reports.append(arguments[2])
            return report(*arguments)

        def note_confirm(*arguments: Any) -> bool:
            confirmed.append(arguments[1])
            return confirm(*arguments)

        monkeypatch.setattr(Fleet, "report", note_report)
        monkeypatch.setattr(Fleet, "confirm", note_confirm)
        async with scheduler() as context, mesh(address(context)) as gateway:
            worker, _ = await gateway.join(worker_info("p"))
            # Longer than its lease of a second.
            await until(lambda: len(confirmed) > 5)
            await gateway.until_names("p")
            told = len(reports)
            assert told <= 4, "the first, and at most one at each of the first intervals"
            worker.load = dataclasses.replace(worker.load, blocks_free=3)
            await gateway.until(lambda seen: seen[0].load.blocks_free == 3)
            assert reports[-1].blocks_free == 3
            known = len(confirmed)
            await until(lambda: len(confirmed) > known)
            assert len(reports) == told + 1

    async def test_news_that_come_when_a_report_is_due_are_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A result of a connection to a peer changes no load, so no later report would carry it."""
        heard: list[PeerReport] = []
        confirmed, results = [], [PeerReport()]
        note, confirm = Peers.note, Fleet.confirm

        def note_peers(peers: Peers, info: WorkerInfo, report: PeerReport) -> None:
            heard.append(report)
            note(peers, info, report)

        def note_confirm(*arguments: Any) -> bool:
            confirmed.append(arguments[1])
            return confirm(*arguments)

        monkeypatch.setattr(Peers, "note", note_peers)
        monkeypatch.setattr(Fleet, "confirm", note_confirm)
        hooks = PeerHooks(lambda _scheduler, _peers: None, lambda: results[-1])
        async with scheduler() as context:
            worker = FakeWorker(worker_info("p"), address(context), peers=hooks)
            async with in_background(worker.registration.run()):
                await until(lambda: confirmed, "it has nothing to report")

                def come() -> None:
                    results.append(PeerReport(None, (PeerCheck(WorkerId("d"), 1),)))
                    worker.registration.notify()

                def stand_still() -> None:
                    time.sleep(2 * EXAMPLE.fleet.report_interval_s)
                    asyncio.get_running_loop().call_soon(come)

                stand_still()  # so the news and the timer of the next report meet
                await until(lambda: heard[-1].checks, "it is reported", SOON_S)


class TestRoutes:
    async def test_plan_follows_registration_load_and_avoid(self) -> None:
        async with scheduler() as context, mesh(address(context)) as gateway:
            await gateway.join(worker_info("d", Role.DECODE))
            busy, _ = await gateway.join(worker_info("p1"))
            await gateway.join(worker_info("p2"))
            busy.report(prefill_active=4)
            await gateway.until(lambda seen: any(each.load.prefill_active for each in seen))
            plan = await gateway.plan()
            assert plan.placement is Placement.DISAGGREGATED
            assert first_names(plan) == ["p2", "d"]
            assert plan.policy == "kvmesh"
            assert "p2" in plan.reason
            avoiding = await gateway.plan(query(avoid={"p2"}))
            assert (first_names(avoiding), avoiding.cause) == (["d"], RouteCause.HELP)
            aggregated = await gateway.plan(query(placement=Placement.AGGREGATED))
            assert aggregated.decode == ()

    async def test_a_prompt_that_its_worker_took_and_ended_counts_no_more(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("SETTLE_S", "IN_FLIGHT_S"):  # no plan is forgotten for its age
            monkeypatch.setattr(f"services.scheduler.fleet.{name}", 1000.0)
        async with scheduler() as context, mesh(address(context)) as gateway:
            await gateway.join(worker_info("d", Role.DECODE))
            workers = {name: (await gateway.join(worker_info(name)))[0] for name in ("p1", "p2")}
            first, second = [
                first_names(await gateway.plan(query(request_id=RequestId(each))))[0]
                for each in ("one", "two")
            ]
            assert {first, second} == {"p1", "p2"}
            workers[first].registration.took_prompt(RequestId("one"))
            workers[first].report(blocks_free=7)
            await gateway.until(lambda seen: any(each.load.blocks_free == 7 for each in seen))
            assert first_names(await gateway.plan(query()))[0] == first

    async def test_routes_go_on_without_a_kvmanager(self) -> None:
        hashes = (BlockHash(bytes(16)),)
        config = dataclasses.replace(EXAMPLE, kvmanager=KvManagerTarget("127.0.0.1:1"))
        async with scheduler(config) as context, mesh(address(context)) as gateway:
            await gateway.join(worker_info("h", Role.HYBRID))
            assert not (await gateway.plan(query(block_hashes=hashes))).cache_known
            assert (await gateway.plan(query())).cache_known, "nothing to know"
            watch = FleetWatch([address(context)], with_detail=True)
            told: asyncio.Queue[bool | None] = asyncio.Queue()
            watch.on_change(lambda _: told.put_nowait(watch.kvmanager_connected))
            async with in_background(watch.run()), asyncio.timeout(SOON_S):
                assert await told.get() is False
            assert gateway.watch.kvmanager_connected is None, "for those who ask for details"

    async def test_prefix_matches_count_for_the_life_that_holds_them(self) -> None:
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(kvmanager({"p1": (1, 18), "p2": (9, 18)}))
            config = dataclasses.replace(EXAMPLE, kvmanager=KvManagerTarget(store, SOON_S))
            context = await stack.enter_async_context(scheduler(config))
            gateway = await stack.enter_async_context(mesh(address(context)))
            for name in ("p1", "p2"):
                await gateway.join(worker_info(name))
            await gateway.join(worker_info("d", Role.DECODE))
            asked = query(block_hashes=tuple(BlockHash(bytes([i]) * 16) for i in range(20)))
            # The stream to the kvmanager may come up after the first question.
            async with asyncio.timeout(SOON_S):
                while not (plan := await gateway.plan(asked)).cache_known:
                    await asyncio.sleep(0)
            cached = {each.worker_id: each.cached_tokens for each in plan.prefill}
            assert cached == {"p1": 18 * 16, "p2": 0}
            assert first_names(plan) == ["p1", "d"]

    async def test_refusals_come_back_as_values(self) -> None:
        async with scheduler() as context, mesh(address(context)) as gateway:
            outcome = await gateway.routes.route(query())
            assert isinstance(outcome, Refusal)
            assert outcome.reason is RefusalReason.NO_WORKERS

    async def test_bad_question_does_not_end_the_stream(self) -> None:
        async with scheduler() as context, open_channel(address(context)) as channel:
            call = SchedulerServiceStub(channel).Route()
            await call.write(RouteRequest(correlation_id=1, model="m", block_hashes=b"short"))
            bad = await call.read()
            await call.write(RouteRequest(correlation_id=2, model="m", num_tokens=1))
            good = await call.read()
            assert isinstance(bad, RouteResponse)
            assert isinstance(good, RouteResponse)
            assert (bad.correlation_id, good.correlation_id) == (1, 2)
            assert "multiple of 16" in bad.refusal.message
            call.cancel()

    async def test_config_chooses_policy_and_placement(self) -> None:
        config = dataclasses.replace(EXAMPLE, routing=RoutingConfig("round_robin", "aggregated"))
        async with scheduler(config) as context, mesh(address(context)) as gateway:
            await gateway.join(worker_info("p"))
            await gateway.join(worker_info("d", Role.DECODE))
            plans = [await gateway.plan() for _ in range(4)]
            assert [first_names(each) for each in plans] == [["d"], ["p"], ["d"], ["p"]]
            assert {each.policy for each in plans} == {"round_robin"}

    @pytest.mark.parametrize("routing", [RoutingConfig("best"), RoutingConfig(placement="apart")])
    async def test_unknown_names_in_the_config_stop_the_start(self, routing: RoutingConfig) -> None:
        with pytest.raises(ConfigError, match="choose one of"):
            async with scheduler(dataclasses.replace(EXAMPLE, routing=routing)):
                pass

    async def test_next_scheduler_answers_when_the_first_is_gone(self) -> None:
        async with scheduler() as second:
            async with scheduler() as first:
                targets = (address(first), address(second))
                stack = AsyncExitStack()
                gateway = await stack.enter_async_context(mesh(*targets))
                await gateway.join(worker_info("h", Role.HYBRID))
                await gateway.until_names("h")
            async with stack:
                async with asyncio.timeout(SOON_S):
                    while True:
                        try:
                            plan = await gateway.plan()
                            break
                        except LostError:
                            await asyncio.sleep(0)
                assert first_names(plan) == ["h"]

    async def test_no_scheduler_is_lost_at_once(self) -> None:
        client = RouteClient(["127.0.0.1:1"])
        async with in_background(client.run()):
            with pytest.raises(LostError, match="no scheduler"):
                await client.route(query(), timeout_s=SOON_S)


class TestMembership:
    async def test_broken_connection_removes_the_worker_at_once(self) -> None:
        config = dataclasses.replace(EXAMPLE, fleet=FleetConfig(lease_s=600.0, warmup_s=0.0))
        async with scheduler(config) as context, mesh(address(context)) as gateway:
            _, running = await gateway.join(worker_info("p"))
            await gateway.until_names("p")
            assert context.direct.num_open == 2, "routes and reports travel beside gRPC"
            running.cancel()
            async with asyncio.timeout(SOON_S):
                await gateway.until_names()

    async def test_goodbye_is_over_when_the_worker_is_out(self) -> None:
        async with scheduler() as context, mesh(address(context)) as gateway:
            worker, running = await gateway.join(worker_info("p"))
            await worker.registration.goodbye("test")
            outcome = await gateway.routes.route(query())
            assert isinstance(outcome, Refusal)
            assert outcome.reason is RefusalReason.NO_WORKERS
            async with asyncio.timeout(SOON_S):
                await running  # ends by itself and does not register again

    async def test_silent_worker_is_removed_when_its_lease_ends(self) -> None:
        config = dataclasses.replace(EXAMPLE, fleet=FleetConfig(lease_s=1.0, warmup_s=0.0))
        async with (
            scheduler(config) as context,
            mesh(address(context)) as gateway,
            open_channel(address(context)) as channel,
        ):
            call = SchedulerServiceStub(channel).RegisterWorker()
            info = worker_info_to_proto(worker_info("p"))
            await call.write(RegisterWorkerRequest(info=info))
            await gateway.until_names("p")
            await gateway.until_names()
            call.cancel()

    async def test_newer_life_takes_over_and_the_older_is_told_to_drain(self) -> None:
        async with scheduler() as context, mesh(address(context)) as gateway:
            older, _ = await gateway.join(worker_info("p"))
            await gateway.join(worker_info("p", incarnation=2))
            await gateway.until(lambda seen: [each.info.incarnation for each in seen] == [2])
            async with asyncio.timeout(SOON_S):
                while not older.drains:
                    await asyncio.sleep(0)
            assert older.drains == ["replaced by incarnation 2"]

    async def test_older_life_is_refused(self) -> None:
        async with (
            scheduler() as context,
            mesh(address(context)) as gateway,
            open_channel(address(context)) as channel,
        ):
            await gateway.join(worker_info("p", incarnation=2))
            call = SchedulerServiceStub(channel).RegisterWorker()
            await call.write(RegisterWorkerRequest(info=worker_info_to_proto(worker_info("p"))))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "incarnation 2" in (caught.value.details() or "")

    async def test_load_before_info_is_refused(self) -> None:
        async with scheduler() as context, open_channel(address(context)) as channel:
            call = SchedulerServiceStub(channel).RegisterWorker()
            await call.write(RegisterWorkerRequest(load=types_pb2.WorkerLoad()))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def test_watch_sees_who_comes_and_leaves(self) -> None:
        async with scheduler() as context, mesh(address(context)) as gateway:
            worker, _ = await gateway.join(worker_info("p"))
            async with asyncio.timeout(SOON_S):
                await gateway.until_names("p")
            assert gateway.watch.fresh
            worker.report(draining=True)
            async with asyncio.timeout(SOON_S):
                await gateway.until(lambda seen: seen[0].load.draining)
            await worker.registration.goodbye("test")
            async with asyncio.timeout(SOON_S):
                await gateway.until_names()


class TestRestart:
    async def test_workers_and_gateways_come_back(self) -> None:
        async with AsyncExitStack() as stack:
            async with scheduler() as context:
                port = context.port
                gateway = await stack.enter_async_context(mesh(address(context)))
                await gateway.join(worker_info("p"))
                await gateway.join(worker_info("d", Role.DECODE))
                await gateway.until_names("p", "d")
            async with asyncio.timeout(SOON_S):
                while gateway.watch.fresh:
                    await asyncio.sleep(0)
            seen = {each.info.worker_id for each in gateway.watch.workers}
            assert seen == {"p", "d"}, "the last view stays"
            with pytest.raises(LostError):
                await gateway.routes.route(query())
            async with scheduler(port=port):
                assert await gateway.routes.wait_connected(SOON_S)
                await until(lambda: gateway.watch.fresh)
                await gateway.until_names("p", "d")
                assert first_names(await gateway.plan()) == ["p", "d"]

    async def test_redis_remembers_the_fleet_until_the_lease_ends(self, tmp_path: Path) -> None:
        async with AsyncExitStack() as stack:
            url = stack.enter_context(redis_url(tmp_path))
            remembered = FleetStoreConfig(url, key_prefix=f"test:{tmp_path.name}:{os.getpid()}:")
            config = dataclasses.replace(EXAMPLE, redis=remembered)
            client = RedisClient(RedisConfig(url, key_prefix=remembered.key_prefix))
            stack.push_async_callback(client.close)
            async with scheduler(config) as context:
                gateway = await stack.enter_async_context(mesh(address(context)))
                await gateway.join(worker_info("h", Role.HYBRID))
                await until(RedisFleetStore(client).list_workers)
            # Nobody registers with the next one: what it knows it has from Redis.
            async with scheduler(config) as context, mesh(address(context)) as other:
                assert first_names(await other.plan()) == ["h"]
                await other.until_names("h")
                await other.until_names()

    async def test_redis_that_is_not_there_changes_nothing(self) -> None:
        config = dataclasses.replace(EXAMPLE, redis=FleetStoreConfig("redis://127.0.0.1:1/0"))
        async with scheduler(config) as context, mesh(address(context)) as gateway:
            await gateway.join(worker_info("h", Role.HYBRID))
            assert first_names(await gateway.plan()) == ["h"]


class FixedMatches(kv_manager_service_pb2_grpc.KvManagerServiceServicer):
    """A kvmanager that always gives the same matches: incarnation and blocks by worker."""

    def __init__(self, matches: dict[str, tuple[int, int]]) -> None:
        self._matches = [
            kv_manager_service_pb2.PrefixMatch(
                worker_id=name, cluster="east", incarnation=incarnation, num_blocks=blocks
            )
            for name, (incarnation, blocks) in matches.items()
        ]

    async def WatchPrefixes(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[kv_manager_service_pb2.WatchPrefixesResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "of an older release")
        yield kv_manager_service_pb2.WatchPrefixesResponse()

    async def MatchPrefix(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[kv_manager_service_pb2.MatchPrefixResponse]:
        await context.send_initial_metadata(())
        async for request in request_iterator:
            yield kv_manager_service_pb2.MatchPrefixResponse(
                correlation_id=request.correlation_id, matches=self._matches
            )

    async def Publish(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[kv_manager_service_pb2.PublishResponse]:
        async for _ in request_iterator:
            yield kv_manager_service_pb2.PublishResponse()


@asynccontextmanager
async def kvmanager(matches: dict[str, tuple[int, int]]) -> AsyncIterator[str]:
    async def build_it(config: SchedulerConfig, context: ServiceContext) -> None:
        kv_manager_service_pb2_grpc.add_KvManagerServiceServicer_to_server(
            FixedMatches(matches), context.server
        )

    async with serving("kvmanager", SchedulerConfig(), build_it) as context:
        yield address(context)
