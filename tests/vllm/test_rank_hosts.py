"""Workers whose ranks are on several hosts: here, processes that share nothing but sockets."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from kvmesh.cli.probes import free_ports
from tests.e2e.api_client import ApiClient
from tests.mesh_child import Child
from tests.mesh_processes import MODEL_FOLDER, Flags, Mesh, running_mesh
from tests.vllm.oracle import some_prompts
from tests.vllm.streams import Load, undisturbed
from tests.vllm.test_ranks import ENDS_S, VLLM, pairs_of, ranks_of
from tests.waiting import until


async def add_spread(mesh: Mesh, name: str, more: Flags) -> tuple[Child, Child]:
    """Starts a worker with one rank here and one on another host; returns worker and other host."""
    (port,) = free_ports("127.0.0.1", 1)
    worker = mesh.add_worker(name, {**VLLM, "engine.hosts": 2, "engine.ranks-port": port, **more})
    other = mesh.add(
        f"{name}-host-1",
        "ranks",
        {"ranks.leader": f"127.0.0.1:{port}", "ranks.model": MODEL_FOLDER},
    )
    await asyncio.gather(worker.ready(), other.ready())
    return worker, other


async def test_workers_on_two_hosts_share_kv_and_outlive_a_lost_host(tmp_path: Path) -> None:
    """Each with each. The decode worker loses its other host, its rank there, then its leader."""
    prompts = some_prompts(16, 200, seed=5)
    flags = {"prefill-0": VLLM, "decode-0": VLLM}
    async with (
        running_mesh(tmp_path, 1, 1, engine="vllm", flags=flags) as mesh,
        ApiClient(mesh.url) as client,
    ):
        await add_spread(mesh, "prefill-1", {"engine.pipeline-parallel": 2})
        victim, host = await add_spread(mesh, "decode-1", {"engine.tensor-parallel": 2})
        await mesh.all_known()
        async with asyncio.TaskGroup() as clients:
            load = Load(client, prompts)
            for number in range(4):
                clients.create_task(load.run(number))
            await until(lambda: len(pairs_of(load)) == 4, "each with each", 240)
            host.kill()
            await until(lambda: not victim.running, "its worker ends", ENDS_S)
            forget(victim, "ranks_lost")
            await load.more(4)
            host.start()
            await mesh.restart("decode-1")
            await mesh.all_known()
            await load.more(8)
            (rank,) = ranks_of(host)
            os.kill(rank, signal.SIGKILL)
            await until(lambda: not victim.running, "its worker ends", ENDS_S)
            forget(victim, "ranks_lost")
            await until(lambda: host.event("rank_lost") is not None, "the host tells which")
            forget(host, "rank_lost")
            await mesh.restart("decode-1")  # the host waits for it
            await mesh.all_known()
            (rank,) = ranks_of(host)
            victim.kill()
            await until(lambda: not Path(f"/proc/{rank}").exists(), "its rank ends", ENDS_S)
            await load.more(4)
            load.stopping = True
        await mesh.restart("decode-1")
        await mesh.all_known()
        await mesh.idle()
    expected = undisturbed(prompts)
    for index, answer in load.answers:
        assert answer.ok, (answer.status, answer.error)
        assert answer.token_ids == expected[index], f"prompt {index}"


def forget(child: Child, event: str) -> None:
    """Checks that an error was told, and takes it for meant."""
    log = child.log_path.read_text()
    assert event in log
    child.log_path.write_text("")
