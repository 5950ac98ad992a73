"""SIGTERM under load: a worker leaves in good order and no request fails."""

from __future__ import annotations

import signal

import pytest

from tests.chaos.load import under_load
from tests.e2e.api_client import ApiClient
from tests.mesh_processes import Mesh, fake_tokens
from tests.waiting import until


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_worker_drains_under_load(mesh: Mesh, client: ApiClient, name: str) -> None:
    async with under_load(client) as load:
        mesh[name].signal(signal.SIGTERM)
        assert await mesh[name].exit_code() == 0
        await load.more(12)
        await mesh.restart(name)
        await mesh.all_known()
        await load.more(12)
    load.check_all_ok()
    await mesh.idle()
    left = [line["reason"] for line in mesh["scheduler"].events() if line["event"] == "worker_left"]
    assert left == ["drained"], "it said goodbye"
    assert mesh["scheduler"].event("worker_lost") is None


async def test_a_long_stream_on_a_draining_worker_is_finished_there(pair: Mesh) -> None:
    async with ApiClient(pair.url) as client:
        prompt = list(range(10, 60))
        async with client.stream(prompt, max_tokens=150) as stream:
            await stream.read(5)
            worker = pair[stream.answer.decode_worker]
            worker.signal(signal.SIGTERM)
            answer = await stream.finish()
        assert answer.token_ids == fake_tokens(prompt, 150)
        assert await worker.exit_code() == 0
        assert pair["gateway"].event("request_lost_by_worker") is None


async def test_a_gateway_finishes_its_streams_and_starts_again(pair: Mesh) -> None:
    async with ApiClient(pair.url) as client:
        prompt = list(range(10, 60))
        async with client.stream(prompt, max_tokens=100) as stream:
            await stream.read(5)
            pair["gateway"].signal(signal.SIGTERM)
            await until(lambda: pair["gateway"].event("draining"), "it drains")
            assert not await pair.is_ready()
            late = await client.complete(prompt, max_tokens=10)
            assert late.status == 503
            assert late.headers["x-kvmesh-refusal"] == "gateway-draining"
            assert int(late.headers["Retry-After"]) >= 1
            answer = await stream.finish()
        assert answer.token_ids == fake_tokens(prompt, 100)
        assert await pair["gateway"].exit_code() == 0
        await pair.restart("gateway")
        await pair.all_known()
        again = await client.complete(prompt, max_tokens=10)
        assert again.token_ids == fake_tokens(prompt, 10)
        await pair.idle()


async def test_a_killed_gateway_leaves_nothing_behind_at_the_workers(pair: Mesh) -> None:
    async with ApiClient(pair.url) as client:
        prompt = list(range(10, 60))
        async with client.stream(prompt, max_tokens=4000) as stream:
            await stream.read(5)
            pair["gateway"].kill()
        await pair.restart("gateway")
        await pair.all_known()
        await pair.idle()
        again = await client.complete(prompt, max_tokens=10)
        assert again.token_ids == fake_tokens(prompt, 10)
