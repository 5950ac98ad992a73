"""Prefixes that move between two clusters in processes, at the link's measured speed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.live_link import far_link, missing
from tests.e2e.api_client import ApiClient
from tests.e2e.test_two_clusters import FAR, TOKEN_BYTES, Clusters, own_prompt
from tests.mesh_processes import Flags, running_mesh
from tests.waiting import until

NO_LINK = missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(NO_LINK), reason=f"a link of the kernel's: {NO_LINK}"),
]

THRESHOLD = 500
PREFIX = 960
LONG = 1700
STEP_TOKENS = 64
STEP_S = 0.02
TOKEN_S = STEP_S / STEP_TOKENS
WIDE_BYTES_S = 10 * TOKEN_BYTES / TOKEN_S
"""A token's KV travels in a tenth of the time in which it is computed."""

NARROW_BYTES_S = 0.4 * TOKEN_BYTES / TOKEN_S
"""It travels for more than twice as long as it is computed, also on a busy machine."""

WORKER: Flags = {
    "engine.fake-token-bytes": TOKEN_BYTES,
    "engine.fake-step-s": STEP_S,
    "engine.max-batch-tokens": STEP_TOKENS,
    "engine.num-blocks": 512,
}
FLAGS: dict[str, Flags] = {
    "scheduler": {
        "fleet.lease-s": 6.0,
        "planning.remote-cluster": "west",
        "planning.threshold-tokens": THRESHOLD,
        "server.admin.port": 0,
    },
    "prefill": WORKER,
    "decode": WORKER,
}


@asynccontextmanager
async def clusters_behind(
    folder: Path, bytes_s: float, bytes_s_there: float
) -> AsyncIterator[Clusters]:
    """Two clusters with a link over which the KV of some prompts came home.

    Args:
        bytes_s, bytes_s_there: speeds of the link out of the far cluster, and into it.
    """
    with ExitStack() as stack:
        link = stack.enter_context(far_link(bytes_s))
        link.set_rate_there(bytes_s_there)
        near: Flags = {"server.host": link.near}
        services = ("kvmanager", "scheduler", "gateway", "prefill", "decode")
        flags = {name: {**FLAGS.get(name, {}), **near} for name in services}
        flags["scheduler"] = {**flags["scheduler"], "planning.egress-mb-s": bytes_s / 1e6}
        flags[FAR] = {"server.host": link.far}
        async with running_mesh(folder, 1, 1, flags=flags) as mesh, ApiClient(mesh.url) as client:
            home = mesh["prefill-0"].flags
            there = {**home, "worker.id": FAR, "worker.cluster": "west", "worker.channels": "tcp"}
            await mesh.add(FAR, "prefill", there, prefix=link.prefix).ready()
            await mesh.all_known()
            clusters = Clusters(mesh, client, link)
            for seed in range(3):
                await clusters.ask(LONG, seed)
            yield clusters
            await mesh.idle()


async def moved(clusters: Clusters, seed: int) -> bool:
    """Whether a long prompt, of which home has a prefix, was computed far behind that prefix."""
    prompt = own_prompt(LONG, seed)
    for length in (PREFIX // 2, PREFIX):
        answer = await clusters.complete(prompt[:length])
        assert answer.prefill_worker == "prefill-0", "a short rest stays at home"
    answer = await clusters.complete(prompt)
    return answer.prefill_worker == FAR and answer.cached_tokens == PREFIX


async def test_a_prefix_of_home_moves_to_the_far_cluster_over_a_wide_link(tmp_path: Path) -> None:
    async with clusters_behind(tmp_path, WIDE_BYTES_S, WIDE_BYTES_S) as clusters:
        seeds = iter(range(100, 200))
        await until(lambda: moved(clusters, next(seeds)), "the prefix moves")
        decision = await clusters.newest_decision()
        assert decision["reason"] == "long_prompt"
        assert decision["compared_tokens"] == LONG - PREFIX


# Of a link that is narrow both ways, either speed gives the right answer.
@pytest.mark.parametrize(
    "home",
    [
        pytest.param(WIDE_BYTES_S, id="wide"),
        pytest.param(NARROW_BYTES_S, id="narrow", marks=pytest.mark.long),
    ],
)
async def test_over_a_link_that_is_narrow_that_way_no_prefix_moves(
    tmp_path: Path, home: float
) -> None:
    """However fast the KV of prompts comes home."""
    async with clusters_behind(tmp_path, home, NARROW_BYTES_S) as clusters:
        seeds = iter(range(200, 300))

        async def is_measured() -> bool:
            return not await moved(clusters, next(seeds))

        # A link that was not measured yet is assumed to be worth a try.
        await until(is_measured, "the prefix stays")
        for _ in range(6):  # what comes home says nothing of the way there
            await clusters.ask(LONG, next(seeds))
        for _ in range(3):
            assert not await moved(clusters, next(seeds))
