"""Workers of a group reach each other before requests come, and are not used if they cannot."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.scheduler_access import SchedulerAccess, live_fleet
from kvmesh.core.types import Role
from tests.e2e.api_client import ApiClient
from tests.e2e.local_stack import group, member, running_up
from tests.e2e.test_group_life import CHAT, ONE_OF_EACH, groups, is_new
from tests.mesh_processes import Mesh, running_mesh
from tests.moved_data_port import announced_by, move_data_port, repaired
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = list(range(3, 100))
OF_CHAT = {"x-kvmesh-scenario": "chat", "x-slo-ttft-ms": "500"}
APART = {"KVMESH_ROUTING__AGGREGATE_TOKENS": "0"}
"""Short prompts are handed over, too."""

NEW = "decode-1"
"""The decode worker of the group that is set up."""


async def chat_is(state: Path, wanted: str) -> dict[str, Any]:
    """The group when it is in a state; others come with it."""
    found: dict[str, Any] = {}

    async def is_there() -> bool:
        found.clear()
        found.update((await groups(state)).get("chat", {}))
        return found.get("state") == wanted

    await until(is_there, f"chat is {wanted}")
    return found


async def test_a_group_opens_when_its_data_ports_are_reached(tmp_path: Path) -> None:
    state, file = tmp_path / "state", tmp_path / "groups.toml"
    file.write_text(CHAT)
    move_data_port(tmp_path, NEW)
    async with (
        running_up(tmp_path, *ONE_OF_EACH, more=APART) as told,
        ApiClient(f"http://{told['http']}") as client,
    ):
        await group(state, "apply", str(file), "--no-wait")
        shown = await chat_is(state, "connecting")
        await until(lambda: _has_problem(state), "it says why")
        problem = (await groups(state))["chat"]["problem"]
        port = announced_by(tmp_path, NEW).read_text()
        assert f"{NEW}: prefill-1 cannot send KV to it: " in problem
        assert f"127.0.0.1:{port}: " in problem
        assert "worker.data_port" in problem, "and what to look at"
        assert {each["worker_id"]: each["connecting"] for each in shown["workers"]} == {
            "prefill-1": False,
            NEW: True,
        }
        answer = await client.streamed(PROMPT, headers=OF_CHAT, max_tokens=4)
        assert answer.ok
        assert (answer.prefill_worker, answer.decode_worker) == ("prefill-0", "decode-0")
        await group(state, "remove", "any")
        answer = await client.streamed(PROMPT, headers=OF_CHAT, max_tokens=4)
        assert answer.status == 503
        assert answer.headers["x-kvmesh-refusal"] == "scheduler-no_workers"
        # Another scheduler knows what is wished, and hears from the workers what is wrong.
        os.kill(member(told, "scheduler")["pid"], signal.SIGKILL)
        await until(lambda: is_new(state, told), "the scheduler is started again", 60)
        await chat_is(state, "connecting")
        answer = await client.streamed(PROMPT, headers=OF_CHAT, max_tokens=4)
        assert answer.status == 503, "still"
        async with repaired(tmp_path, NEW):
            shown = await chat_is(state, "ready")
            assert not shown["problem"]
            answer = await client.streamed(PROMPT, headers=OF_CHAT, max_tokens=4)
            assert answer.ok, answer.error
            assert (answer.prefill_worker, answer.decode_worker) == ("prefill-1", NEW)


async def _has_problem(state: Path) -> bool:
    return bool((await groups(state))["chat"]["problem"])


async def data_ports(mesh: Mesh) -> set[int]:
    """Where the decode workers receive KV."""
    access = SchedulerAccess((mesh["scheduler"].address,), mesh.access, 60.0)
    async with live_fleet(access, "a test") as view:
        infos = [each.info for each in view.workers]
    return {each.data_endpoint.port for each in infos if each.role is Role.DECODE}


def num_lanes(ports: set[int]) -> int:
    """How many TCP connections of this machine lead to these ports."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established = [row[2] for row in rows if row[3] == "01"]
    return sum(int(remote.partition(":")[2], 16) in ports for remote in established)


async def test_first_handoffs_find_open_lanes(tmp_path: Path) -> None:
    flags = {role: {"worker.channels": "tcp"} for role in ("prefill", "decode")}
    async with running_mesh(tmp_path, 2, 2, flags=flags) as mesh, ApiClient(mesh.url) as client:
        ports = await data_ports(mesh)
        assert num_lanes(ports) == 4, "each pair has one, before the first request"
        answers = await asyncio.gather(
            *(client.streamed([*PROMPT, number], max_tokens=4) for number in range(8))
        )
        assert all(each.ok for each in answers)
        assert {each.prefill_worker for each in answers} == {"prefill-0", "prefill-1"}
        assert num_lanes(ports) == 4
        await mesh.idle()
