"""NIXL's processes are killed under load: work goes on, nothing stays held."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvmesh.transfer.nixl_process import is_installed
from tests.chaos.load import under_load
from tests.e2e.api_client import ApiClient
from tests.mesh_child import Child
from tests.mesh_processes import Mesh, running_mesh
from tests.waiting import until

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs the extra nixl")


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    flags = {"engine.fake-step-s": 0.01, "worker.channels": "nixl,tcp"}
    async with running_mesh(tmp_path, 1, 1, flags={"prefill": flags, "decode": flags}) as mesh:
        yield mesh


def engines_of(child: Child) -> list[int]:
    """Processes of the engine that a worker runs."""
    assert child.process is not None
    pid = child.process.pid
    started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(other) for other in started]


async def carries_more(child: Child) -> None:
    """Waits until NIXL has carried KV to a worker once more."""
    name, link = "kvmesh_link_transfer_seconds_count", {"channel": "nixl", "direction": "received"}
    before = (await child.metrics()).value(name, **link)

    async def more() -> bool:
        return (await child.metrics()).value(name, **link) > before

    await until(more, "KV came by NIXL")


async def test_engines_that_are_killed_under_load_cost_retries_at_most(mesh: Mesh) -> None:
    prefill, decode = mesh["prefill-0"], mesh["decode-0"]
    async with ApiClient(mesh.url) as client, under_load(client, num_clients=3) as load:
        for victim in (decode, prefill):
            await carries_more(decode)
            (engine,) = engines_of(victim)
            os.kill(engine, signal.SIGKILL)
            await load.more(6)
            assert engine not in engines_of(victim)
        await carries_more(decode)
    load.check_all_ok()
    await mesh.idle()
    assert len(engines_of(prefill)) == len(engines_of(decode)) == 1
