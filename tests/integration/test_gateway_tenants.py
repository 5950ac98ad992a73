"""Tenants at a real gateway: keys, quotas over several gateways, fair share, caches apart."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from kvmesh.client.messages import GenerateOptions, request_message
from kvmesh.kv.hashing import root_hash
from kvmesh.metadata.tenant_store import FileTenantStore
from kvmesh.metadata.tenants import Directory, KeyRecord, digest_of, directory_to_json
from kvmesh.policy.quota import TenantLimits
from kvmesh.rpc.channels import open_channel
from kvmesh.v1.inference_service_pb2 import GenerateRequest, ResumePoint
from kvmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from services.gateway.config import AccessConfig, HttpConfig, QuotaConfig, SharedRedisConfig
from tests.integration.gateway_fake_worker import LAYOUT, MODEL
from tests.integration.gateway_stack import Stack, gateway_stack
from tests.redis_server import redis_process, redis_url

Limits = dict[str, TenantLimits]


async def write_tenants(path: Path, limits: Limits) -> AccessConfig:
    """A directory in which the key of tenant `x` is `key-x`."""
    directory = Directory()
    for name, each in limits.items():
        directory = directory.with_tenant(name, each)
        directory = directory.with_key(KeyRecord(digest_of(f"key-{name}"), name))
    store = FileTenantStore(path)
    assert await store.replace(await store.read(), directory_to_json(directory))
    return AccessConfig(tenants_file=str(path), refresh_s=0.01)


async def ask(stack: Stack, tenant: str, **fields: Any) -> tuple[int, Any, dict[str, str]]:
    return await ask_with(stack, tenant, {}, **fields)


async def ask_with(
    stack: Stack, tenant: str, more: Mapping[str, str], **fields: Any
) -> tuple[int, Any, dict[str, str]]:
    body = {"model": MODEL, "prompt": "one two three", "max_tokens": 4, **fields}
    headers = {"Authorization": f"Bearer key-{tenant}", "x-request-id": tenant, **more}
    async with (
        aiohttp.ClientSession(stack.url) as session,
        session.post("/v1/completions", json=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json(), dict(answer.headers)


@contextlib.asynccontextmanager
async def tenants(folder: Path, allowed: Limits, /, **changes: Any) -> AsyncIterator[Stack]:
    access = await write_tenants(folder / "tenants.json", allowed)
    quota = changes.pop("quota", QuotaConfig())
    async with gateway_stack(folder, access=access, quota=quota, **changes) as stack:
        yield stack
        await stack.idle()


async def test_a_quota_that_is_used_up_is_named_and_says_when_to_come_back(tmp_path: Path) -> None:
    limits = {"a": TenantLimits(requests_per_min=6), "b": TenantLimits(tokens_per_min=6)}
    async with tenants(tmp_path, limits) as stack:
        assert (await ask(stack, "a"))[0] == 200
        status, body, headers = await ask(stack, "a")
        assert status == 429
        assert headers["x-kvmesh-quota"] == "requests_per_min"
        assert int(headers["Retry-After"]) in range(1, 11)
        assert body["error"]["code"] == "quota"
        assert "6 requests per minute" in body["error"]["message"]
        assert (await ask(stack, "b"))[0] == 200
        assert (await ask(stack, "b"))[2]["x-kvmesh-quota"] == "tokens_per_min"
        metrics = stack.gateway.metrics
        name = "kvmesh_gateway_over_quota_total"
        assert metrics.value(name, tenant="a", quota="requests_per_min") == 1
        assert metrics.value(name, tenant="b", quota="tokens_per_min") == 1
        used = "kvmesh_gateway_tenant_tokens_total"
        assert metrics.value(used, tenant="a") == metrics.value(used, tenant="b") > 4


@pytest.mark.parametrize("named", [False, True])
async def test_metrics_of_the_public_port_name_tenants_only_if_asked_to(
    tmp_path: Path, named: bool
) -> None:
    http = HttpConfig(port=0, tenant_metrics=named)
    async with tenants(tmp_path, {"a": TenantLimits(), "b": TenantLimits()}, http=http) as stack:
        for name in ("a", "b"):
            assert (await ask(stack, name))[0] == 200
        url = f"http://127.0.0.1:{stack.gateway.http_port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            text = await answer.text()
    used = [line for line in text.splitlines() if line.startswith("kvmesh_gateway_tenant_tokens_t")]
    assert ('tenant="a"' in text) is named
    assert ("tenant=" in text) is named
    assert len(used) == 2 if named else len(used) == 1
    assert float(used[0].split()[-1]) > 0


async def test_a_tenants_times_hold_where_its_requests_name_none(tmp_path: Path) -> None:
    limits = {"a": TenantLimits(ttft_ms=700, tpot_ms=50, itl_ms=90), "b": TenantLimits()}
    async with tenants(tmp_path, limits) as stack:
        for tenant, headers in (("a", {}), ("a", {"x-slo-tpot-ms": "20"}), ("b", {})):
            assert (await ask_with(stack, tenant, headers))[0] == 200
        told = [(query.tpot_s, query.ttft_budget_ms) for query in stack.mesh.queries]
        assert [tpot_s for tpot_s, _ in told] == [0.05, 0.02, math.inf]
        assert all(budget_ms <= 700 for _, budget_ms in told[:2])
        assert told[2][1] > 700


async def test_a_quota_over_grpc_is_named_in_the_trailing_metadata(tmp_path: Path) -> None:
    async with tenants(tmp_path, {"a": TenantLimits(requests_per_min=6)}) as stack:
        assert (await ask(stack, "a"))[0] == 200
        async with open_channel(f"127.0.0.1:{stack.context.port}") as channel:
            stub: Any = InferenceServiceStub(channel)
            metadata = (("authorization", "Bearer key-a"),)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(GenerateRequest(text="one"), metadata=metadata):
                    pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(caught.value.trailing_metadata())
        assert trailing["kvmesh-quota"] == "requests_per_min"
        assert 0 < int(trailing["retry-after-ms"]) <= 10_000


async def test_a_revoked_key_ends_and_a_new_one_begins_while_the_gateway_runs(
    tmp_path: Path,
) -> None:
    async with tenants(tmp_path, {"a": TenantLimits()}) as stack:
        assert (await ask(stack, "a"))[0] == 200
        assert (await ask(stack, "b"))[0] == 401
        await write_tenants(tmp_path / "tenants.json", {"b": TenantLimits()})
        while (await ask(stack, "a"))[0] != 401:
            await asyncio.sleep(0)
        assert (await ask(stack, "b"))[0] == 200


async def test_two_gateways_share_one_quota_and_go_on_alone_without_redis(tmp_path: Path) -> None:
    limits = {"a": TenantLimits(max_concurrent=1), "b": TenantLimits(requests_per_min=6)}
    for name in "xy":
        (tmp_path / name).mkdir()
    with redis_process(tmp_path) as redis:
        shared = SharedRedisConfig(redis.url, timeout_s=5.0)
        async with (
            tenants(tmp_path / "x", limits, redis=shared) as one,
            tenants(tmp_path / "y", limits, redis=shared) as two,
        ):
            assert (await ask(one, "b"))[0] == 200
            assert (await ask(two, "b"))[2]["x-kvmesh-quota"] == "requests_per_min"

            one.mesh.go.clear()  # its decode worker waits
            running = asyncio.create_task(ask(one, "a"))
            await one.mesh.until(lambda: one.gateway.admission.num_open == 1)
            while (await ask(two, "a"))[0] == 200:  # until one's claim is in Redis
                await asyncio.sleep(0)
            assert (await ask(two, "a"))[2]["x-kvmesh-quota"] == "max_concurrent"
            one.mesh.go.set()
            assert (await running)[0] == 200
            while (await ask(two, "a"))[0] != 200:  # until one has told that it is over
                await asyncio.sleep(0)

            redis.stop(kill=True)
            two.mesh.go.clear()
            running = asyncio.create_task(ask(two, "a"))
            await two.mesh.until(lambda: two.gateway.admission.num_open == 1)
            assert (await ask(two, "a"))[0] == 429  # its own limit goes on
            assert (await ask(one, "a"))[0] == 200
            two.mesh.go.set()
            assert (await running)[0] == 200


async def test_keys_of_redis_are_demanded_even_before_redis_is_there(tmp_path: Path) -> None:
    with redis_process(tmp_path) as redis:
        redis.stop(kill=True)
        access = AccessConfig(tenants_in_redis=True, refresh_s=0.01)
        shared = SharedRedisConfig(redis.url)
        async with gateway_stack(tmp_path, access=access, redis=shared) as stack:
            status, _, headers = await ask(stack, "a")
            assert (status, headers["x-kvmesh-refusal"]) == (503, "gateway-busy")


async def test_prefixes_of_tenants_have_different_hashes_and_salts_stay_within(
    tmp_path: Path,
) -> None:
    async with tenants(tmp_path, {"a": TenantLimits(), "b": TenantLimits()}) as stack:
        prompt = "one request, one handoff " * 20
        for tenant in "aab":
            assert (await ask(stack, tenant, prompt=prompt))[0] == 200
        assert (await ask(stack, "b", prompt=prompt, cache_salt="1:a:"))[0] == 200
        roots = [spec.root_hash for spec in stack.mesh.workers["p1"].specs]
        hashes = [query.block_hashes for query in stack.mesh.queries]
        assert hashes[0] == hashes[1]
        assert len({hashes[0], hashes[2], hashes[3]}) == 3
        assert not set(hashes[0]) & set(hashes[2])
        assert len(set(roots)) == 3
        assert root_hash(LAYOUT.model_fingerprint) not in roots


async def test_a_flood_of_one_tenant_does_not_starve_another(tmp_path: Path) -> None:
    """Prefill says no until 60 requests of one tenant and 3 of another wait."""
    limits = {"flood": TenantLimits(), "polite": TenantLimits()}
    async with tenants(tmp_path, limits, limits={"ttft_deadline_ms": 30_000}) as stack:
        worker = stack.mesh.workers["p1"]
        worker.does.reject_offers = -1
        flood = [asyncio.create_task(ask(stack, "flood")) for _ in range(60)]
        await stack.mesh.until(lambda: stack.gateway.lanes.num_queued == 60)
        polite = [asyncio.create_task(ask(stack, "polite")) for _ in range(3)]
        await stack.mesh.until(lambda: stack.gateway.lanes.num_queued == 63)
        del worker.offers[:]
        worker.does.reject_offers = 0
        answers = await asyncio.gather(*flood, *polite)
        assert {status for status, _, _ in answers} == {200}
        order = [request_id.partition("-")[0] for request_id, _ in worker.offers]
        assert order.count("flood") == 60
        # Not after the 60; a few are out of order, since heads race and their number grows.
        assert max(at for at, name in enumerate(order) if name == "polite") < 20
        assert stack.gateway.lanes.num_queued == 0


async def test_a_flood_of_resumed_streams_does_not_starve_another_tenant(tmp_path: Path) -> None:
    """A client can say that it has tokens, whether it has some or not."""
    limits = {"flood": TenantLimits(), "polite": TenantLimits()}
    async with tenants(tmp_path, limits, limits={"ttft_deadline_ms": 30_000}) as stack:
        worker = stack.mesh.workers["p1"]

        async def resumed(channel: grpc.aio.Channel, **point: Any) -> list[Any]:
            options: GenerateOptions = {"max_tokens": 4, "request_id": "flood"}
            request = request_message("one two three", options, MODEL)
            if point:
                request.resume.CopyFrom(ResumePoint(**point))
            metadata = (("authorization", "Bearer key-flood"),)
            call = InferenceServiceStub(channel).Generate(request, metadata=metadata)
            return [piece async for piece in call]

        async with open_channel(f"127.0.0.1:{stack.context.port}") as channel:
            first = (await resumed(channel))[0].resume
            point = {"seed": 5, "prompt_sum": first.prompt_sum, "token_ids": [7]}
            worker.does.reject_offers = -1
            flood = [asyncio.create_task(resumed(channel, **point)) for _ in range(60)]
            await stack.mesh.until(lambda: stack.gateway.lanes.num_queued == 60)
            polite = [asyncio.create_task(ask(stack, "polite")) for _ in range(3)]
            await stack.mesh.until(lambda: stack.gateway.lanes.num_queued == 63)
            del worker.offers[:]
            worker.does.reject_offers = 0
            await asyncio.gather(*flood)
            assert {(await each)[0] for each in polite} == {200}
        order = [request_id.partition("-")[0] for request_id, _ in worker.offers]
        assert order.count("flood") == 60
        assert max(at for at, name in enumerate(order) if name == "polite") < 20


async def test_tenants_of_the_configuration_are_held_to_the_defaults(tmp_path: Path) -> None:
    access = AccessConfig(api_keys="key-a,key-b")
    quota = QuotaConfig(requests_per_min_per_key=6)
    with redis_url(tmp_path) as url:
        redis = SharedRedisConfig(url, key_prefix=f"{tmp_path.name}:", timeout_s=5.0)
        async with gateway_stack(tmp_path, access=access, quota=quota, redis=redis) as stack:
            assert [(await ask(stack, "a"))[0] for _ in range(2)] == [200, 429]
            assert (await ask(stack, "b"))[0] == 200
