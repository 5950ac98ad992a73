"""A second cluster in processes of its own, behind a link that the kernel holds to 200 Mbit/s where
it may: the length chooses the cluster, and whatever becomes of link and workers costs no token.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from benchmarks.live_link import FarLink, far_link, missing
from tests.e2e.api_client import Answer, ApiClient
from tests.mesh_child import Child
from tests.mesh_processes import VOCAB_SIZE, Flags, Mesh, fake_tokens, running_mesh
from tests.waiting import until

LINK_BYTES_S = 25e6
STARVED_BYTES_S = 50e3
THRESHOLD = 500
TOKEN_BYTES = 2048
LONG, SHORT = 1500, 200
FAR = "far-0"
NO_LINK = missing()

WORKER: Flags = {
    "engine.fake-token-bytes": TOKEN_BYTES,
    "engine.num-blocks": 256,
    "worker.stall-s": 1.0,
    # The gateway's patience ends first: a transfer is to be seen under way before it is given up.
    "worker.handoff-s": 3600.0,
}
FLAGS: dict[str, Flags] = {
    "scheduler": {
        # A machine that stands still for a while loses nobody.
        "fleet.lease-s": 6.0,
        "planning.remote-cluster": "west",
        "planning.egress-mb-s": LINK_BYTES_S / 1e6,
        "planning.threshold-tokens": THRESHOLD,
        "server.admin.port": 0,
    },
    "gateway": {"limits.prefill-timeout-s": 2.0, "limits.stall-s": 2.0},
    "prefill": WORKER,
    "decode": WORKER,
}


def own_prompt(length: int, seed: int) -> list[int]:
    """A prompt that shares no block with those of other seeds."""
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


@dataclass
class Clusters:
    """A mesh with a worker in a second cluster.

    Attributes:
        link: the only way to that worker; None where there can be no such link.
    """

    mesh: Mesh
    client: ApiClient
    link: FarLink | None

    @property
    def far(self) -> Child:
        """The worker of the second cluster."""
        return self.mesh[FAR]

    async def ask(self, length: int, seed: int) -> Answer:
        """Asks with a prompt of its own; the tokens are those of any cluster."""
        return await self.complete(own_prompt(length, seed))

    async def complete(self, prompt: list[int]) -> Answer:
        """Asks with this prompt."""
        answer = await self.client.complete(prompt, max_tokens=6)
        assert answer.token_ids == fake_tokens(prompt, 6)
        return answer

    async def newest_decision(self) -> dict[str, Any]:
        """What the scheduler tells of its last route."""
        url = f"http://{self.mesh['scheduler'].address_of('admin_serving')}/debug/decisions"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            decision: dict[str, Any] = (await response.json())["routes"][0]
            return decision

    async def in_transfer(self, seed: int) -> asyncio.Task[Answer]:
        """Asks with long prompts until one's KV is on its way home. Returns that request.

        On a slow machine a transfer may be over before it is seen.
        """
        seeds = itertools.count(100 * seed)
        asking = asyncio.create_task(self.ask(LONG, seed))

        async def leaves() -> bool:
            nonlocal asking
            if asking.done():
                asking.result()
                asking = asyncio.create_task(self.ask(LONG, next(seeds)))
            metrics = await self.far.metrics()
            return metrics.value("kvmesh_link_queued_bytes", direction="sent") > 0

        await until(leaves, "KV leaves the second cluster")
        return asking

    @asynccontextmanager
    async def caught_in_transfer(self, seed: int) -> AsyncIterator[FarLink]:
        """A long prompt's KV is on its way over a link that starves; whatever the body does to it,
        the request is served at home.
        """
        assert self.link is not None
        await self.goes_far_again()  # on a slow machine, what came before may have measured less
        with starved(self.link):
            asking = await self.in_transfer(seed)
            yield self.link
            assert (await asking).prefill_worker == "prefill-0"

    async def goes_far_again(self) -> None:
        """All of it is back, and used."""
        await self.mesh.all_known()
        await self.mesh.idle()
        seeds = iter(range(1000, 2000))

        async def far() -> bool:
            return (await self.ask(LONG, next(seeds))).prefill_worker == FAR

        await until(far, "long prompts go to the second cluster again")
        await self.mesh.idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clusters(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clusters]:
    with ExitStack() as stack:
        link = None if NO_LINK else stack.enter_context(far_link(LINK_BYTES_S))
        near = {"server.host": "127.0.0.1" if link is None else link.near}
        services = ("kvmanager", "scheduler", "gateway", "prefill", "decode")
        flags = {name: {**FLAGS.get(name, {}), **near} for name in services}
        flags[FAR] = {"server.host": "127.0.0.1" if link is None else link.far}
        folder = tmp_path_factory.mktemp("two_clusters")
        async with running_mesh(folder, 1, 1, flags=flags) as mesh, ApiClient(mesh.url) as client:
            home = mesh["prefill-0"].flags
            there = {**home, "worker.id": FAR, "worker.cluster": "west", "worker.channels": "tcp"}
            prefix = () if link is None else link.prefix
            await mesh.add(FAR, "prefill", there, prefix=prefix).ready()
            await mesh.all_known()
            yield Clusters(mesh, client, link)
            await mesh.idle()


@contextmanager
def starved(link: FarLink) -> Iterator[None]:
    """The link carries next to nothing inside; a test that fails leaves it whole to others."""
    link.set_rate(STARVED_BYTES_S)
    try:
        yield
    finally:
        link.set_up(True)
        link.set_rate(LINK_BYTES_S)


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
needs_link = pytest.mark.skipif(bool(NO_LINK), reason=f"a link of the kernel's: {NO_LINK}")


async def test_the_length_chooses_the_cluster(clusters: Clusters) -> None:
    long = await clusters.ask(LONG, 1)
    assert long.headers["x-kvmesh-decision"] == f"long_prompt; prefill={FAR}; decode=decode-0"
    decision = await clusters.newest_decision()
    assert (decision["reason"], decision["threshold_tokens"]) == ("long_prompt", THRESHOLD)
    assert decision["compared_tokens"] == LONG
    short = await clusters.ask(SHORT, 2)
    assert short.headers["x-kvmesh-decision"] == "load; prefill=prefill-0; decode=decode-0"
    assert (await clusters.newest_decision())["compared_tokens"] == SHORT

    async def sent() -> bool:
        metrics = await clusters.far.metrics()
        return metrics.value("kvmesh_link_bytes_total", direction="sent") >= LONG * TOKEN_BYTES

    await until(sent, "the prompt's KV came over the link")
    await clusters.mesh.idle()


async def test_the_next_turn_of_a_conversation_stays_at_home(clusters: Clusters) -> None:
    """Its KV came home with the first answer and lies on the decode worker."""
    prompt = own_prompt(LONG, 20)
    first = await clusters.complete(prompt)
    assert first.prefill_worker == FAR
    turn = [*prompt, *first.token_ids, *own_prompt(34, 21)]

    async def is_known() -> bool:
        answer = await clusters.complete(turn[:LONG])
        cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
        # The worker that computed it, far away, holds it as well.
        return answer.prefill_worker != FAR and bool(cached >= LONG - 2 * 16)

    await until(is_known, "the prefix is used at home")
    second = await clusters.complete(turn)
    assert FAR not in second.headers["x-kvmesh-decision"]
    decision = await clusters.newest_decision()
    assert decision["reason"] != "long_prompt"
    assert decision["compared_tokens"] <= len(turn) - LONG + 16
    await clusters.mesh.idle()


@needs_link
async def test_a_link_that_is_cut_in_a_transfer_costs_no_token(clusters: Clusters) -> None:
    async with clusters.caught_in_transfer(3) as link:
        link.set_up(False)
    await clusters.goes_far_again()


@needs_link
async def test_a_handoff_over_a_link_that_starves_is_given_up(clusters: Clusters) -> None:
    """Bytes go on to arrive, so nothing stalls; it would take a minute."""
    async with clusters.caught_in_transfer(4):
        pass
    await clusters.goes_far_again()


@needs_link
async def test_a_remote_worker_killed_in_a_transfer_costs_no_token(clusters: Clusters) -> None:
    async with clusters.caught_in_transfer(5):
        clusters.far.kill()
    assert (await clusters.ask(LONG, 6)).prefill_worker == "prefill-0", "its cluster is empty"
    await clusters.mesh.restart(FAR)
    await clusters.goes_far_again()
